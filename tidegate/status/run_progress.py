"""Progress of a run: a bar per phase with the time that is left on a terminal, elsewhere a line per change."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tidegate import output

# Below these, there is no room for notes, for bars.
NOTE_COLUMNS, BAR_COLUMNS = 115, 70
SHOWN_CHARACTERS = 24
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
        with bars(run) as redraw:
            yield redraw
    else:
        last = ""

        def print_change() -> None:
            nonlocal last
            if (line := summary(run)) != last:
                output.say(line)
                last = line

        yield print_change


@contextlib.contextmanager
def bars(run: Run) -> Iterator[Callable[[], None]]:
    """Show a bar for each phase on the terminal; yield the function that redraws them."""
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = output.talk()
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), MofNCompleteColumn()]
    if console.width >= BAR_COLUMNS:
        columns.insert(1, BarColumn(20))
    if console.width >= NOTE_COLUMNS:
        columns += [TimeElapsedColumn(), TextColumn("{task.fields[note]}")]
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(compact=True), console=console) as progress:
        tasks = {phase: progress.add_task(phase, total=None, note="") for phase in ("processed", "committed")}

        def redraw() -> None:
            for phase, (done, note) in counts(run).items():
                progress.update(tasks[phase], completed=done, total=len(run.txids) or None, note=note)

        yield redraw


def counts(run: Run) -> dict[str, tuple[int, str]]:
    """Return for each of the two phases how many batches have ended it, and a note."""
    by_phase = {phase: [t for t in run.txids if run.phases.get(t, "planned") == phase] for phase in SHOWN_PHASES}
    done = sorted([*by_phase["committed"], *by_phase["skipped"]])
    busy, halted = by_phase["processing"], by_phase["halted"]
    notes = [f"{len(busy)} processing: {short(ranges(busy))}"] if busy else []
    notes += [f"{short(ranges(halted))} halted"] if halted else []
    return {
        "processed": (len(done) + len(by_phase["processed"]), "; ".join(notes)),
        "committed": (len(done), f"last txid {done[-1]}" if done else ""),
    }


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


def short(text: str) -> str:
    """Return the text, cut to what a note has room for."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
