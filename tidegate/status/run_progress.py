"""Progress of a run: a bar per phase with the time that is left on a terminal, elsewhere a line per change."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tidegate import output
from tidegate.status.status_report import duration

if TYPE_CHECKING:
    from rich.progress import Task

BASIS = 3  # batches that have to end in this run before an estimate is made
STALLED = 3  # times the longest pause so far: then nobody knows when it goes on
# Below these, there is no room for notes, for bars.
NOTE_COLUMNS, BAR_COLUMNS = 115, 70
SHOWN_CHARACTERS = 24
clock = time.monotonic
SHOWN_PHASES = ("committed", "skipped", "processed", "processing", "failed", "planned", "halted")


class Run(Protocol):
    """A run whose progress is shown: its txids, and the phase of each as far as it is known."""

    pipeline: str
    state: str
    txids: list[int]
    phases: dict[int, str]


@dataclass
class Estimate:
    """The time until all batches have ended a phase, from the rate at which they have ended it in this run.

    There is none before BASIS batches have ended after the first one, and none while no batch ends for much longer than ever
    before in this run.
    """

    moments: list[tuple[float, int]] = field(default_factory=list)

    def note(self, done: int, now: float) -> None:
        """Take note of how many have ended at a moment in seconds; those that had ended at first are not counted."""
        if not self.moments or done > self.moments[-1][1]:
            self.moments.append((now, done))

    def seconds_left(self, total: int, now: float) -> float | None:
        """Return the seconds until `total` have ended; None if there is no basis for an estimate."""
        seen = self.moments[1:]  # the first moment is that of the first look
        if not seen or seen[-1][1] - seen[0][1] < BASIS:
            return None
        (first, few), (last, many) = seen[0], seen[-1]
        longest = max(later - earlier for (earlier, _), (later, _) in itertools.pairwise(seen))
        waited = now - last
        if waited > STALLED * longest:
            return None
        return max((total - many) * (last - first) / (many - few) - waited, 0.0)


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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    console = output.talk()
    estimates = {phase: Estimate() for phase in ("processed", "committed")}

    class Left(ProgressColumn):
        """The time that is left at the moment when it is drawn, so that no old number stands there while nothing happens."""

        def render(self, task: "Task") -> str:
            """Return it as text; nothing without an estimate."""
            left = None if is_stuck(run) or task.finished else estimates[task.description].seconds_left(len(run.txids), clock())
            return "" if left is None else f"about {duration(left)} left"

    columns: list[ProgressColumn] = [TextColumn("{task.description}"), MofNCompleteColumn()]
    if console.width >= BAR_COLUMNS:
        columns.insert(1, BarColumn(20))
    if console.width >= NOTE_COLUMNS:
        columns += [TimeElapsedColumn(), TextColumn("{task.fields[note]}")]
    with Progress(*columns, Left(), console=console) as progress:
        tasks = {phase: progress.add_task(phase, total=None, note="") for phase in estimates}

        def redraw() -> None:
            for phase, (done, note) in counts(run).items():
                estimates[phase].note(done, clock())
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


def is_stuck(run: Run) -> bool:
    """Return whether a batch waits for a person, so that nobody knows when the others commit."""
    return any(run.phases.get(txid) == "halted" for txid in run.txids)


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
