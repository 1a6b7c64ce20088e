"""After a crash at any statement of plan, process and commit, the state equals a clean run's."""

import pytest

from tests.acceptance.conftest import SALES, clean_state, run_once, stored_state, write_sales
from tests.conftest import Server, copied
from tests.crashes import Crash, EachPoint
from tidegate.state_store import Settings, StateStore


@pytest.mark.promise(
    "I1",
    "fault:process-dies-at-any-statement:processing",
    "fault:process-dies-at-any-statement:commit",
    "fault:process-dies-at-any-statement:after",
)
def test_a_crash_at_every_statement_leaves_the_state_of_a_clean_run(
    settings: Settings, server: Server, register: object
) -> None:
    """Each run dies at another statement, or around a COMMIT, of a batch's life; the next run repairs it."""
    register(SALES)
    write_sales(settings.home, "01", "02")
    assert run_once(settings, "first") == [1]
    write_sales(settings.home, "03", "04")
    expected = clean_state(settings.home)

    deaths = EachPoint()
    while True:
        with copied(server, settings) as copy:
            try:
                with deaths.armed():
                    run_once(copy, "crashing")
            except Crash as crash:
                run_once(copy, "crashing")  # Airflow tries the same run again ...
                assert run_once(copy, "another") in ([], [2])  # ... or a new run picks up the left-over batches
                with StateStore.connect(copy) as store:
                    assert store.committed("sales") == 2
                assert stored_state(copy) == expected, f"crashed at point {len(deaths.points)}: {crash}"
            else:
                assert stored_state(copy) == expected
                break

    assert {"before COMMIT", "after COMMIT"} < set(deaths.points)
    for step in (
        "INSERT INTO tidegate.batch",
        "INSERT INTO tidegate.seal",
        "INSERT INTO state.per_shop",
        "UPDATE tidegate.cursor",
    ):
        assert any(step in point for point in deaths.points), f"no crash was injected at {step}"
