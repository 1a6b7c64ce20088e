"""Output for people and programs: tables or JSON on stdout, messages on stderr."""

import json
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from traceback import StackSummary

    from rich.console import Console

CODE = Path(__file__).parent  # as it stands in tracebacks: a link in a checkout is not followed
# The width of a table in a file or a pipe, where no window limits it.
PIPED_WIDTH = 200
# Characters that a terminal obeys or hides: control characters, marks that change the direction of text, characters without
# width (except the joiners, which some scripts need), tags, and surrogates, which no encoding has.
UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_kept: TextIO | None = None


def visible(text: str, keep: str = "") -> str:
    """Return the text with every character visible: those in UNSEEN, except `keep`, are escaped as in Python."""

    def escaped(found: re.Match[str]) -> str:
        character, code = found[0], ord(found[0])
        if character in keep:
            return character
        if character in SHORT:
            return SHORT[character]
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return UNSEEN.sub(escaped, text)


def to_paste(path: Path) -> str:
    """Return a path as one word of a command line, which no program takes for an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def show_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected exception as Python does, with every character visible: it may quote data.

    If a pipeline's module raises it when it is loaded, only the module's calls are shown: the rest says nothing to its author.
    """
    import traceback  # noqa: PLC0415 - rarely needed

    report = traceback.TracebackException(kind, error, trace)
    _keep_authors_calls(report.stack)
    sys.stderr.write(visible("".join(report.format()), keep="\n"))


def _keep_authors_calls(calls: "StackSummary") -> None:
    """Leave out the calls before a pipeline's module, and those of Tidegate after it."""
    pipelines = sys.modules.get("tidegate.jobs.pipelines")
    if pipelines is None:
        return
    folder = pipelines.__path__[-1]
    of_author = [number for number, call in enumerate(calls) if Path(call.filename).is_relative_to(folder)]
    if not of_author or calls[of_author[0]].name != "<module>":
        return
    first, last = of_author[0], of_author[-1]
    only_ours = all(_is_ours(call.filename) for call in calls[last + 1 :])
    calls[:] = calls[first : last + 1] if only_ours else calls[first:]


def _is_ours(file: str) -> bool:
    """Return whether code is Tidegate's; that of its dataclasses has no file."""
    return file == "<string>" or Path(file).is_relative_to(CODE)


def keep_standard_output() -> None:
    """Keep standard output for data: all else that this process and its children print, until they end, is for people.

    Modules of authors print, also in threads and when the process ends. Nor do they close these streams for others.
    """
    global _kept  # noqa: PLW0603 - one per process
    usual, for_people = sys.__stdout__, sys.__stderr__
    if usual is None:  # a shell's `>&-`
        _kept = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    elif for_people is not None and usual is sys.stdout:
        usual.flush()
        # A terminal may have fewer characters than the data has.
        _kept = os.fdopen(os.dup(1), "w", encoding=usual.encoding, errors="backslashreplace")
        os.dup2(2, 1)
        for stream in (usual, for_people):
            stream.close = stream.flush  # type: ignore[method-assign]


def data() -> TextIO:
    """Return the stream for data: standard output."""
    return _kept or sys.stdout


def out() -> "Console":
    """Return the console for data."""
    return _console(data())


def talk() -> "Console":
    """Return the console for messages."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> "Console":
    from rich.console import Console  # noqa: PLC0415 - JSON and point lookups do without

    return Console(file=stream, width=None if stream.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False)


class VisibleFormatter(logging.Formatter):
    """Writes log messages with every character visible: they quote data."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of the base class
        """Return the message, in one line."""
        return visible(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, and the traceback if there is one."""
        return visible(super().format(record), keep="\n")


class JsonFormatter(logging.Formatter):
    """Writes each log message as a line of JSON, with the engine's fields (`tidegate.jobs.engine.log_fields`)."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: timestamp, level, event and logger, as in Airflow's logs of tasks; then pipeline, txid, attempt."""
        from structlog.contextvars import get_contextvars  # noqa: PLC0415 - verbs without such a log start faster

        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
            **get_contextvars(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_text(line)


def show_log(level: int, *, as_json: bool = False) -> None:
    """Show log messages from this level upwards on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else VisibleFormatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def say(message: str) -> None:
    """Print a message for people, on stderr."""
    talk().print(visible(message, keep="\n"), soft_wrap=True)


def counted(number: int, one: str, many: str) -> str:
    """Return how many there are, in words."""
    return f"{number} {one if number == 1 else many}"


def report(message: str, facts: Any, as_json: bool) -> None:
    """Print what a verb has done: facts for programs, or a message for people."""
    print_json(facts) if as_json else say(message)


def write(*lines: str) -> None:
    """Write lines for people on stdout, unwrapped, so that what is in them can be copied."""
    data().write("".join(visible(line, keep="\n") + "\n" for line in lines))
    data().flush()


def print_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as a table: numbers right-aligned, times in UTC to the second, NULL as an empty cell, a list as its lines."""
    from rich.table import Table  # noqa: PLC0415

    rows = [list(row) for row in rows]
    table = Table(header_style="bold", box=None, pad_edge=False)
    for position, name in enumerate(columns):
        numeric = all(isinstance(row[position], int | Decimal | None) for row in rows)
        table.add_column(visible(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console = out()
    with console.capture() as rendered:
        if title and rows:
            console.print(visible(title), style="bold", soft_wrap=True)  # a table would fold it to its own width
        console.print(table if rows else f"{visible(title or 'Result')}: nothing yet.")
    data().write("".join(f"{line.rstrip()}\n" for line in rendered.get().splitlines()))
    data().flush()  # keeps the order with messages on stderr


def print_json(value: Any) -> None:
    """Print one JSON document."""
    data().write(json_text(value, indent=2) + "\n")


def print_json_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a JSON array, one row a line, without holding the rows."""
    separator = "[\n"
    for row in rows:
        data().write(separator + json_text(dict(row)))
        separator = ",\n"
    data().write("[]\n" if separator == "[\n" else "\n]\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """Return JSON whose characters a terminal only shows, and can show; to a program it means the same."""

    def escaped(found: re.Match[str]) -> str:
        return found[0] if found[0] == "\n" else json.dumps(found[0])[1:-1]  # line ends are between values, never in them

    has_all_characters = (getattr(data(), "encoding", None) or "utf-8").lower().startswith("utf")
    dumps = partial(json.dumps, default=plain, ensure_ascii=not has_all_characters, indent=indent, allow_nan=False)
    try:
        return UNSEEN.sub(escaped, dumps(value))
    except ValueError:  # JSON has no such numbers
        return UNSEEN.sub(escaped, dumps(_finite(value)))


def _finite(value: Any) -> Any:
    """Return a value for JSON in which the numbers NaN and infinity are texts, as on the page."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value if value is None or isinstance(value, str | int) else _finite(plain(value))


def plain(value: Any) -> Any:
    """Return a value for JSON: times in ISO 8601 and UTC, decimals as text so that no digit is lost."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).isoformat()
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes | memoryview):
        return f"\\x{bytes(value).hex()}"  # as Postgres writes and reads them
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
    if isinstance(value, list):
        return "\n".join(map(visible, value))
    if isinstance(value, bytes | memoryview):
        return str(plain(value))
    return visible(str(value))
