"""The report of a run of chaos: what was done in which cell of the fault table, and whether the states came out equal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.faults import CELLS, Tally
from tests.chaos.wire import PHASES

MINUTES_FOR_ALL_CELLS = 60.0  # in less time, chance may leave a cell out


@dataclass(frozen=True)
class Report:
    """The outcome of a run: what was done, what was committed, and everything that is wrong."""

    minutes: float
    seed: int
    tally: Tally
    batches: Mapping[str, int]
    violations: Sequence[str]  # of invariants, while faults happened
    differences: Mapping[str, str]  # by state, from what plain Python computes

    @property
    def equal(self) -> bool:
        """Return whether the states equal those of a clean run, and no invariant was violated on the way."""
        return not self.differences and not self.violations

    @property
    def exit_code(self) -> int:
        """Return 1 if something is wrong, or a cell was not reached in the time that is enough for all."""
        return int(not self.equal or (self.minutes >= MINUTES_FOR_ALL_CELLS and bool(self.tally.missing)))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        tally = self.tally
        yield f"Faults by cell, each with the time at which it was first reached (seed {self.seed})"
        yield _row("", *PHASES)
        for row, phases in CELLS.items():
            yield _row(row, *(self._cell(row, phase) if phase in phases else "" for phase in PHASES))
        yield f"Not reached: {', '.join(f'{row} in {phase}' for row, phase in tally.missing) or 'none'}"
        yield f"Batches committed in {self.minutes:.1f} minutes of faults: {dict(self.batches)}"
        yield from (f"violated: {violation}" for violation in self.violations)
        yield from (f"differs: {state}: {how}" for state, how in self.differences.items())
        yield f"states equal: {'yes' if self.equal else 'no'}"

    def _cell(self, row: str, phase: str) -> str:
        count = self.tally.cells[row, phase]
        return f"{count} ({self.tally.reached[row, phase] / 60:.1f} min)" if count else "0"


def _row(name: str, *cells: str) -> str:
    return f"{name:48}" + "".join(f"{cell:>16}" for cell in cells)
