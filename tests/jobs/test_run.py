"""Runs without Airflow: commits in order, batches in parallel, bad batches, and runs that cannot begin."""

import threading
from dataclasses import replace

import pytest

from tests.acceptance.conftest import clean_state, stored_state, write_sales
from tests.jobs.test_worker import SALES, sales
from tests.sources.in_process import counted_here
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import MalformedRecord, RangeRefused, SparkUnavailable

__all__ = ["counted_here", "sales"]  # fixtures


def test_a_run_commits_everything_in_order(settings: Settings) -> None:
    """Batches are planned first, processed in parallel, committed in order, each however long the next one takes.

    A second run does nothing: no txid, no commit.
    """
    write_sales(settings.home, "05")
    events: list[tuple[int, str]] = []
    first_has_committed, waited = threading.Event(), []

    def progress(txid: int, event: str) -> None:
        events.append((txid, event))
        if (txid, event) == (1, "committed"):
            first_has_committed.set()
        if (txid, event) == (2, "processed"):
            waited.append(first_has_committed.wait(timeout=60))

    result = run_pipeline(settings, SALES, run_id="run", progress=progress)

    assert waited == [True]
    assert result.txids == [commit.txid for commit in result.commits] == [1, 2, 3]
    assert [txid for txid, event in events if event == "committed"] == [1, 2, 3]
    assert [event for _, event in events[:3]] == ["planned"] * 3
    assert all(events.index((txid, "processed")) < events.index((txid, "committed")) for txid in result.txids)
    assert stored_state(settings, SALES) == clean_state(settings.home)
    again = run_pipeline(settings, SALES, run_id="second")
    assert (again.txids, again.commits) == ([], [])


@pytest.mark.soak
@pytest.mark.usefixtures("counted_here")
def test_a_run_ends_at_its_first_bad_batch_and_keeps_the_rest(settings: Settings) -> None:
    write_sales(settings.home, "05", "06", "07")
    (settings.home / "sales" / "03.csv").write_text("shop,cents\nnorth,one\n")
    with pytest.raises(MalformedRecord, match=r"03\.csv, line 2"):
        run_pipeline(settings, replace(SALES, window=1), run_id="run")
    with StateStore.connect(settings) as store:
        assert [status.phase for status in store.batch_statuses("inbox")] == ["committed", "halted", "planned", "planned"]
    with pytest.raises(MalformedRecord, match=r"03\.csv, line 2"):
        run_pipeline(settings, replace(SALES, concurrency=1), run_id="wider")
    with StateStore.connect(settings) as store:
        assert store.committed("inbox") == 1
        assert store.batch_statuses("inbox")[1].phase == "halted"


@pytest.mark.soak
@pytest.mark.promise("I3", "decision:0025")
@pytest.mark.usefixtures("counted_here")
def test_batches_outside_the_window_wait_unstaged(settings: Settings) -> None:
    write_sales(settings.home, "05", "06", "07", "08")
    pipeline, second_is_done, seen = replace(SALES, concurrency=3, window=2), threading.Event(), []

    def progress(txid: int, event: str) -> None:
        if (txid, event) == (2, "processed"):
            second_is_done.set()
        if (txid, event) == (1, "processed"):  # it does not commit before this returns
            assert second_is_done.wait(60)
            with StateStore.connect(settings) as store:
                wait_until(lambda: store.batch_statuses("inbox")[2].phase != "planned", 1)
                seen.extend((status.phase, status.waits_for) for status in store.batch_statuses("inbox"))

    result = run_pipeline(settings, pipeline, run_id="run", progress=progress)

    full = ("planned", "txid 1 to commit: the window is full")
    assert seen == [("processed", "its commit"), ("processed", "txid 1 to commit"), full, full]
    assert [commit.txid for commit in result.commits] == [1, 2, 3, 4]
    assert stored_state(settings, SALES) == clean_state(settings.home)


def test_a_run_that_cannot_begin_ends_at_once(settings: Settings) -> None:
    with pytest.raises(RangeRefused, match="txid 1 would be left out"):
        run_pipeline(settings, SALES, run_id="run", from_txid=2)
    with pytest.raises(SparkUnavailable, match="Start it: tidegate up"):
        run_pipeline(replace(settings, spark_remote="sc://127.0.0.1:9"), SALES, run_id="run")
