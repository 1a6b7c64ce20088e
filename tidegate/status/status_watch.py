"""Watching the status: on a terminal a picture that is drawn again, elsewhere a line per change."""

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tidegate import output
from tidegate.status import status_report
from tidegate.status.status_report import Background, Look

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SLOW_SECONDS = 5  # until an answer is said to take long
NARROW_COLUMNS = 80  # below this a table would be one letter wide
# They change by themselves.
MOVING = ("lag_seconds", "rows_per_second")


def watch(look: Callable[[], Look], interval: float, *, as_json: bool) -> None:
    """Look again and again, until the process is interrupted; a server that is away is reported, and looked for again."""
    console = output.out()
    if as_json:
        _print_changed_facts(look, interval)
    elif console.is_terminal and not console.is_dumb_terminal:
        _draw(console, look, interval)
    else:
        _print_changed_lines(look, interval)


def _looks(look: Callable[[], Look], interval: float) -> Iterator[Look | str]:
    """Yield what is found at every interval; a sentence if an answer takes long, so that nobody takes old facts for new."""
    while True:
        started = time.monotonic()
        request = Background(look)  # so that an interrupt does not wait for a server
        while not request.is_done(0.1):
            waited = time.monotonic() - started
            if waited >= SLOW_SECONDS:
                yield f"No answer for {status_report.duration(waited)}; what was seen last may be out of date."
                request.is_done(1)
        yield request.result()
        time.sleep(interval)


def _draw(console: "Console", look: Callable[[], Look], interval: float) -> None:
    """Draw the picture on the terminal's alternate screen; when interrupted, leave the last one behind."""
    from rich.console import Group  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    last: RenderableType = Text("")
    with Live(last, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as screen:
        try:
            for found in _looks(look, interval):
                if isinstance(found, str):
                    screen.update(Group(Text(found, style="bold"), last), refresh=True)
                else:
                    last = picture(found, console.width)
                    screen.update(last, refresh=True)
        finally:
            screen.stop()
            console.print(last)


def picture(found: Look, width: int) -> "RenderableType":
    """Return what a terminal of this width shows of a look."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    parts: list[RenderableType] = [Text(f"Tidegate, {now}. End: Ctrl-C", style="dim")]
    if width < NARROW_COLUMNS:
        return Group(*parts, *(Text(output.visible(line)) for line in found.lines().values()))
    if found.trouble:
        parts.append(Text(output.visible(str(found.trouble)), style="bold"))
    for title, columns, rows in (
        status_report.pipelines_table(found.lags, found.losses),
        status_report.components_table(found.components),
    ):
        if rows:
            parts += [Text(""), Text(title, style="bold"), output.table(columns, rows)]
    parts += [
        Text(output.visible(line)) for line in (found.advice, found.page and f"The operator's page: {found.page}") if line
    ]
    return Group(*parts)


def _print_changed_lines(look: Callable[[], Look], interval: float) -> None:
    shown: dict[str, str] = {}
    for found in _looks(look, interval):
        lines = {"answer": found} if isinstance(found, str) else found.lines()
        if "answer" in lines and "answer" in shown:
            continue
        for name, line in lines.items():
            if shown.get(name) != line:
                _print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {output.visible(line)}")
        if "trouble" in shown and "trouble" not in lines and "answer" not in lines:
            _print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} The ledger answers again.")
        # While the ledger is away, what was seen of it last stays known: only what has changed is told afterwards.
        kept = shown if {"trouble", "answer"} & lines.keys() else {}
        shown = {**{name: line for name, line in kept.items() if name != "trouble"}, **lines}
        if "answer" not in lines:
            shown.pop("answer", None)


def _print_changed_facts(look: Callable[[], Look], interval: float) -> None:
    """Print a JSON document in one line whenever it tells something new."""
    shown = None
    for found in _looks(look, interval):
        if isinstance(found, str):
            continue
        facts = {**found.facts(), "trouble": None if found.trouble is None else str(found.trouble)}
        lasting = [{name: lag[name] for name in lag if name not in MOVING} for lag in facts["pipelines"]]
        if (told := {**facts, "pipelines": lasting}) != shown:
            shown = told
            _print(output.json_text(facts))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
