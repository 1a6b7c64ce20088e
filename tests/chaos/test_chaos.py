"""The states come out equal after a minute of kills, stops and cuts."""

from pathlib import Path

import pytest

from tests.chaos.run import run
from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS


@pytest.mark.promise("I1", "I20")
@SEES_CONNECTIONS_OF_TASKS
@pytest.mark.soak
def test_a_minute_of_chaos_leaves_the_states_of_a_clean_run(tmp_path: Path) -> None:
    """`make chaos` does the same for longer; its seed is the one of the day that it was written on."""
    report = run(tmp_path, minutes=1, seed=20261128)

    assert not report.violations, str(report)
    assert report.tally.cells, str(report)
    assert sum(report.cursors.values()) > 0, str(report)
