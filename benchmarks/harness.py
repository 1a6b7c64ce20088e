"""Figures: their table, the file of the latest ones, and plots."""

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
LATEST = RESULTS / "latest.json"
mpl.use("agg")


@dataclass(frozen=True)
class Bar:
    """The bounds that a ratio has to keep."""

    at_least: float | None = None
    at_most: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether a value is within the bar."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        return " ".join(
            [
                *([f"≥ {self.at_least:g}"] if self.at_least is not None else []),
                *([f"≤ {self.at_most:g}"] if self.at_most is not None else []),
            ]
        )


@dataclass(frozen=True)
class Figure:
    """One result: the measurement, its alternative, and the value that the bar bounds.

    `ours` and `theirs` are medians in `unit`; `value` is most often their ratio.
    """

    benchmark: str
    what: str
    ours: float
    unit: str
    value: float
    beside: str = ""
    theirs: float | None = None
    bar: Bar | None = None
    runs: Sequence[float] = ()
    their_runs: Sequence[float] = ()

    @property
    def verdict(self) -> str:
        """Return whether the bar holds; empty without one."""
        return "" if self.bar is None else "holds" if self.bar.holds(self.value) else "falls short"


def compared(
    benchmark: str,
    what: str,
    ours: Sequence[float],
    beside: str,
    theirs: Sequence[float],
    *,
    bar: Bar | None = None,
    unit: str = "s",
    is_speed: bool = True,
) -> Figure:
    """Return the figure of two things timed in turn: how many times as fast we are, or, `is_speed=False`, what we cost."""
    our, their = statistics.median(ours), statistics.median(theirs)
    value = their / our if is_speed else our / their
    return Figure(benchmark, what, our, unit, value, beside, their, bar, tuple(ours), tuple(theirs))


@dataclass
class Bench:
    """The means that every benchmark gets: its size, a folder, and messages about progress."""

    is_smoke: bool
    folder: Path
    console: Console = field(default_factory=Console)
    most_passes: int = 3

    def choose(self, full: int, smoke: int) -> int:
        """Return the full number, or that of a smoke run."""
        return smoke if self.is_smoke else full

    @property
    def passes(self) -> int:
        """The number of times to time each way."""
        return self.choose(self.most_passes, 1)

    def tell(self, text: str) -> None:
        """Print a message about progress."""
        self.console.print(f"[dim]{datetime.now(UTC):%H:%M:%S}[/dim] {text}", highlight=False)

    @contextmanager
    def timed(self, what: str, into: list[float]) -> Iterator[None]:
        """Time a block."""
        start = time.perf_counter()
        yield
        into.append(time.perf_counter() - start)
        self.tell(f"{what}: {into[-1]:.2f} s")

    @contextmanager
    def plot(self, name: str, title: str) -> Iterator[Axes]:
        """Draw one plot; a smoke run draws it into another folder than the real ones."""
        drawing = Drawing(figsize=(9, 4.5), layout="constrained")
        axes = drawing.add_subplot()
        axes.set_title(title)
        yield axes
        folder = self.folder if self.is_smoke else RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        drawing.savefig(folder / f"{name}.png", dpi=100)
        self.tell(f"drew {folder / name}.png")


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


Benchmark = Callable[[Bench], Iterator[Figure]]


def print_figures(console: Console, figures: Sequence[Figure]) -> None:
    """Print the figures as a table."""
    table = Table(title="Benchmarks", title_justify="left")
    for name in ("benchmark", "what", "ours", "beside", "theirs", "value", "bar", ""):
        table.add_column(name, justify="right" if name in ("ours", "theirs", "value", "bar") else "left")
    for f in figures:
        colour = {"holds": "green", "falls short": "red"}.get(f.verdict, "default")
        table.add_row(
            f.benchmark,
            f.what,
            _shown(f.ours, f.unit),
            f.beside,
            "" if f.theirs is None else _shown(f.theirs, f.unit),
            f"{f.value:.3g}",
            "" if f.bar is None else str(f.bar),
            f"[{colour}]{f.verdict}[/{colour}]",
        )
    console.print(table)


def write_latest(figures: Sequence[Figure], file: Path) -> None:
    """Replace the figures of the same names in the file; one line each, with time and commit."""
    known = json.loads(file.read_text()) if file.exists() else []
    latest = {(row["benchmark"], row["what"]): row for row in known}
    run = {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "commit": _commit()}
    for f in figures:
        measured = {name: round(value, 4) for name, value in (("ours", f.ours), ("value", f.value))}
        theirs = None if f.theirs is None else round(f.theirs, 4)
        bar = None if f.bar is None else str(f.bar)
        named = {"benchmark": f.benchmark, "what": f.what, "unit": f.unit, "beside": f.beside, "bar": bar, "verdict": f.verdict}
        latest[f.benchmark, f.what] = {**named, **measured, "theirs": theirs, **run}
    rows = sorted(latest.values(), key=lambda row: str(row["benchmark"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def _shown(value: float, unit: str) -> str:
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    )
    return asked.stdout.strip() or "unknown"
