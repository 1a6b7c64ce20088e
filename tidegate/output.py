"""What people and programs see: tables on a terminal, JSON on request; data on stdout, talk on stderr."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# What a table may take when it goes into a file or a pipe, where nobody's window is the limit.
PIPED_WIDTH = 200


def out() -> "Console":
    """Return the console for data."""
    from rich.console import Console  # noqa: PLC0415 - JSON and point lookups do without

    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def talk() -> "Console":
    """Return the console for everything that is not data."""
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPED_WIDTH, highlight=False)


def say(message: str) -> None:
    """Tell the person something, on stderr."""
    talk().print(message, markup=False, soft_wrap=True)


def print_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as a table; numbers to the right, times in UTC to the second, NULL as an empty cell."""
    from rich.table import Table  # noqa: PLC0415

    rows = [list(row) for row in rows]
    table = Table(header_style="bold", box=None, pad_edge=False)
    for position, name in enumerate(columns):
        numeric = all(isinstance(row[position], int | Decimal | None) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console = out()
    with console.capture() as rendered:
        if title and rows:
            console.print(title, markup=False, style="bold", soft_wrap=True)  # a table would fold it to its own width
        console.print(table if rows else f"{title or 'Result'}: nothing yet.", markup=False)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in rendered.get().splitlines()))
    sys.stdout.flush()  # keeps the order with what is said on stderr


def print_json(value: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(value, default=plain, ensure_ascii=False, indent=2) + "\n")


def print_json_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a JSON array, one row a line, without holding the rows."""
    separator = "[\n"
    for row in rows:
        sys.stdout.write(separator + json.dumps(dict(row), default=plain, ensure_ascii=False))
        separator = ",\n"
    sys.stdout.write("[]\n" if separator == "[\n" else "\n]\n")


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: times in ISO 8601, decimals as text so that no digit is lost."""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return str(value)
