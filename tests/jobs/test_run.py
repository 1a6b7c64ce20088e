"""Runs without Airflow: commits in order, batches in parallel, and two runs at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.acceptance.conftest import SALES, clean_state, sales, stored_state, write_sales
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import MalformedRecord, RangeRefused

__all__ = ["sales"]  # a fixture


def test_a_run_commits_everything_in_order(settings: Settings, sales: Pipeline) -> None:
    """All batches are planned first, processed in parallel, and committed in the order of their txids."""
    write_sales(settings.home, "05", "06", "07")
    events: list[tuple[int, str]] = []
    result = run_pipeline(settings, SALES, run_id="run", progress=lambda txid, event: events.append((txid, event)))

    assert result.txids == [commit.txid for commit in result.commits] == [1, 2, 3, 4]
    assert [txid for txid, event in events if event == "committed"] == [1, 2, 3, 4]
    assert [event for _, event in events[:4]] == ["planned"] * 4
    assert all(events.index((txid, "processed")) < events.index((txid, "committed")) for txid in result.txids)
    assert stored_state(settings) == clean_state(settings.home)


def test_a_commit_does_not_wait_for_the_next_batch(settings: Settings, sales: Pipeline) -> None:
    """However long the next batch takes to process."""
    first_has_committed, waited = threading.Event(), []

    def progress(txid: int, event: str) -> None:
        if (txid, event) == (1, "committed"):
            first_has_committed.set()
        if (txid, event) == (2, "processed"):
            waited.append(first_has_committed.wait(timeout=60))

    run_pipeline(settings, SALES, run_id="run", progress=progress)

    assert waited == [True]


def test_a_second_run_does_nothing(settings: Settings, sales: Pipeline) -> None:
    """Nothing new: no txid, no commit, the same state."""
    run_pipeline(settings, SALES, run_id="first")
    state = stored_state(settings)

    result = run_pipeline(settings, SALES, run_id="second")
    assert (result.txids, result.commits) == ([], [])
    with StateStore.connect(settings) as store:
        assert store.last_opened("sales").txid == 2
    assert stored_state(settings) == state


def test_a_run_ends_at_its_first_bad_batch_and_keeps_the_rest(settings: Settings, sales: Pipeline) -> None:
    """Earlier batches have committed, only the bad one is halted, and processed later ones keep their work."""
    write_sales(settings.home, "05", "06")
    bad = settings.home / "sales" / "03.csv"
    bad.write_text("shop,cents\nnorth,one\n")
    with pytest.raises(MalformedRecord, match=r"03\.csv, line 2"):
        run_pipeline(settings, replace(SALES, concurrency=1), run_id="run")
    with StateStore.connect(settings) as store:
        phases = [status.phase for status in store.batch_statuses("sales")]
        assert store.committed("sales") == 1
    assert phases[:2] == ["committed", "halted"]
    assert phases[2] in ("planned", "processed")


def test_a_range_with_a_gap_is_refused(settings: Settings, sales: Pipeline) -> None:
    """The gap is named, and nothing is planned."""
    with pytest.raises(RangeRefused, match="txid 1 would be left out"):
        run_pipeline(settings, SALES, run_id="run", from_txid=2)


@pytest.mark.promise("I3", "decision:0025")
def test_batches_outside_the_window_wait_unstaged(settings: Settings, sales: Pipeline) -> None:
    """The window bounds the batches in flight, even if threads are idle; then all commit, one window at a time."""
    write_sales(settings.home, "05", "06", "07", "08", "09", "10")
    pipeline, second_is_done, seen = replace(SALES, concurrency=3, window=2), threading.Event(), []

    def progress(txid: int, event: str) -> None:
        if (txid, event) == (2, "processed"):
            second_is_done.set()
        if (txid, event) == (1, "processed"):  # it does not commit before this returns
            assert second_is_done.wait(60)
            with StateStore.connect(settings) as store:
                wait_until(lambda: store.batch_statuses("sales")[2].phase != "planned", 2)
                seen.extend((status.phase, status.waits_for) for status in store.batch_statuses("sales"))

    result = run_pipeline(settings, pipeline, run_id="run", progress=progress)

    full = ("planned", "txid 1 to commit: the window is full")
    assert seen == [("processed", "its commit"), ("processed", "txid 1 to commit"), full, full, full]
    assert [commit.txid for commit in result.commits] == [1, 2, 3, 4, 5]
    assert stored_state(settings) == clean_state(settings.home)


def test_a_run_that_fails_ends_the_waits_for_the_window(settings: Settings, sales: Pipeline) -> None:
    """The batch that blocks the window will not commit in this run."""
    (settings.home / "sales" / "01.csv").write_text("shop,cents\nnorth,one\n")
    write_sales(settings.home, "05", "06", "07")

    with pytest.raises(MalformedRecord, match=r"01\.csv, line 2"):
        run_pipeline(settings, replace(SALES, window=1), run_id="run")

    with StateStore.connect(settings) as store:
        assert [status.phase for status in store.batch_statuses("sales")] == ["halted", *["planned"] * 3]


@pytest.mark.parametrize("window", [1, 4])
def test_two_runs_at_once_end_with_the_clean_state(settings: Settings, sales: Pipeline, window: int) -> None:
    """Started at the same moment over the same source, both end without an error; each batch counts once."""
    write_sales(settings.home, "05", "06", "07", "08")
    start = threading.Barrier(2)

    def run(run_id: str) -> list[int]:
        start.wait(timeout=60)
        return run_pipeline(settings, replace(SALES, window=window), run_id=run_id).txids

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, run_id) for run_id in ("left", "right")]
    txids = sorted({txid for done in runs for txid in done.result()})

    assert txids == [1, 2, 3, 4]
    with StateStore.connect(settings) as store:
        assert store.committed("sales") == store.last_opened("sales").txid == 4
    assert stored_state(settings) == clean_state(settings.home)
