"""Runs without Airflow: commits in order, batches in parallel, bad batches, and runs that cannot begin."""

import threading
from dataclasses import replace

import pytest

from tests.acceptance.conftest import clean_state, stored_state, write_sales
from tests.jobs.test_worker import SALES, sales
from tests.sources.in_process import counted_here
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import RangeRefused, SparkUnavailable

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


def test_a_run_that_cannot_begin_ends_at_once(settings: Settings) -> None:
    with pytest.raises(RangeRefused, match="txid 1 would be left out"):
        run_pipeline(settings, SALES, run_id="run", from_txid=2)
    with pytest.raises(SparkUnavailable, match="Start it: tidegate up"):
        run_pipeline(replace(settings, spark_remote="sc://127.0.0.1:9"), SALES, run_id="run")
