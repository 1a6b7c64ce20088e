"""The states come out equal after a minute of kills, stops and cuts, and the report tells what is wrong if they do not."""

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.faults import CELLS, Tally
from tests.chaos.report import Report
from tests.chaos.run import run
from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS

ALL_CELLS = {(row, phase): 1 for row, phases in CELLS.items() for phase in phases}


@pytest.mark.promise("I1", "I20")
@SEES_CONNECTIONS_OF_TASKS
@pytest.mark.soak
def test_a_minute_of_chaos_leaves_the_states_of_a_clean_run(tmp_path: Path) -> None:
    """`make chaos` does the same for longer; its seed is the one of the day that it was written on."""
    report = run(tmp_path, minutes=1, seed=20261128)

    assert report.equal, str(report)
    assert report.tally.by_victim, str(report)
    assert sum(report.batches.values()) > 0, str(report)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("minutes", "left_out", "violations", "differences", "exit_code"),
    [
        (60, 0, [], {}, 0),
        (60, 1, [], {}, 1),
        (59, 1, [], {}, 0),
        (1, 0, ["the cursor of many went back from 2 to 1"], {}, 1),
        (1, 0, [], {"many_sums": "1 rows too many"}, 1),
    ],
)
def test_a_run_fails_by_what_is_wrong_or_after_an_hour_by_a_cell_that_was_not_reached(
    minutes: float, left_out: int, violations: list[str], differences: dict[str, str], exit_code: int
) -> None:
    """The report says so too."""
    cells = dict(list(ALL_CELLS.items())[left_out:])
    tally = Tally(cells=Counter(cells), reached=dict.fromkeys(cells, 0.0))

    report = Report(minutes, 1, tally, {"many": 2}, violations, differences)

    assert report.exit_code == exit_code
    assert ("state equal                 yes" in str(report)) == (not violations and not differences)
    assert ("Not reached: none" in str(report)) == (left_out == 0)
