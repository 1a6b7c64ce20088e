"""Progress of a run: a line that changes on a terminal, elsewhere a line per change."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tidegate import output

SHOWN_PHASES = ("committed", "skipped", "processed", "processing", "failed", "planned", "halted")


class Run(Protocol):
    """A run whose progress is shown: its txids, and the phase of each as far as it is known."""

    pipeline: str
    state: str
    txids: list[int]
    phases: dict[int, str]


@contextlib.contextmanager
def shown(run: Run, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show the progress of a run; yield the function that shows it anew."""
    console = output.talk()
    if quiet:
        yield lambda: None
    elif console.is_terminal and not console.is_dumb_terminal:
        with console.status(summary(run)) as line:
            yield lambda: line.update(summary(run))
    else:
        last = ""

        def print_change() -> None:
            nonlocal last
            if (line := summary(run)) != last:
                output.say(line)
                last = line

        yield print_change


def summary(run: Run) -> str:
    """Return a run's progress in one line."""
    if not run.txids:
        return f"{run.pipeline}: {run.state}"
    called = {"failed": "to be tried again"}
    parts = []
    for phase in SHOWN_PHASES:
        if txids := [txid for txid in run.txids if run.phases.get(txid, "planned") == phase]:
            parts.append(f"{ranges(txids)} {called.get(phase, phase)}")
    return f"{run.pipeline}: {'; '.join(parts)}"


def ranges(txids: Sequence[int]) -> str:
    """Return txids in short notation: txids 1-3, 7."""
    parts: list[list[int]] = []
    for txid in txids:
        if parts and txid == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], txid]
        else:
            parts.append([txid])
    written = ", ".join("-".join(map(str, part)) for part in parts)
    return f"txid{'s' if len(txids) > 1 else ''} {written}" if txids else "none"
