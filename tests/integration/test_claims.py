"""Idle tasks claim batches that no task has begun; a claim is visible to other tasks, and only a hint."""

import time
from contextlib import closing
from dataclasses import replace

import pytest

from tests import steps
from tests.integration.conftest import TALLY, Execute, Tally, until
from tests.store import NotStarted
from tidegate.jobs.engine import worker
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import StoreUnavailable

CLAIMANTS = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'tidegate claims %'"


@pytest.mark.promise("performance:task-that-is-finished-claims-other-batches")
def test_batches_that_no_task_has_begun_are_claimed_in_order(tally: Tally) -> None:
    """Not those that have an attempt, in whichever state, those given up, and those of another run."""
    tally.plan(6)
    tally.plan(1, run_id="another")
    tally.process(1)
    tally.commit(1)
    tally.start(3)
    tally.store.fail_attempt(tally.start(5), "MALFORMED_RECORD: a.csv, line 3.", is_poison=True)
    assert tally.store.give_up("tally", 5, "the pipeline's policy", "its file is bad")

    assert list(tally.store.claims("tally", "run")) == [2, 4, 6]
    assert list(tally.store.claims("tally", "another")) == [7]
    assert list(tally.store.claims("tally", "no such run")) == []


@pytest.mark.promise("performance:task-that-is-finished-claims-other-batches")
def test_no_batch_is_claimed_by_two_tasks_at_once(tally: Tally) -> None:
    """A claim lasts until its task requests the next; meanwhile the batch's own task sees it."""
    tally.plan(4)
    with closing(tally.store.claims("tally", "run")) as one, closing(tally.store.claims("tally", "run")) as other:
        assert [next(one), next(other)] == [1, 2]
        assert [tally.store.is_claimed("tally", txid) for txid in (1, 2, 3)] == [True, True, False]
        assert [tally.store.is_claimed("another", txid) for txid in (1, 2)] == [False, False]
        tally.start(1)
        assert tally.store.is_claimed("tally", 1)
        assert next(one) == 3
        assert [tally.store.is_claimed("tally", txid) for txid in (1, 2, 3)] == [False, True, True]


def test_batches_outside_the_window_are_not_claimed(tally: Tally) -> None:
    """Even for idle tasks, the staging after the cursor is bounded. A batch that was begun before keeps its work."""
    tally.plan(6)
    tally.process(5)
    tally.spec = replace(tally.spec, window=2)
    tally.plan(1, run_id="another")
    assert [tally.store.turn("tally", txid).begins for txid in (1, 2, 3, 4)] == [True, True, False, False]
    assert list(tally.store.claims("tally", "run")) == [1, 2]
    assert tally.store.start_attempt(tally.spec, 3, "too early") is NotStarted.AHEAD
    assert tally.store.start_attempt(tally.spec, 5, "again") is NotStarted.SEALED

    tally.process(1)
    tally.commit(1)

    assert list(tally.store.claims("tally", "run")) == [2, 3]
    tally.start(3)


def test_a_claim_ends_with_the_attempt(tally: Tally) -> None:
    """The batch's own task commits a sealed batch, and retries a failed one, whatever the claimant does next."""
    tally.plan(2)
    with closing(tally.store.claims("tally", "run")) as claims:
        tally.process(next(claims))
        assert not tally.store.is_claimed("tally", 1)
        failed = tally.start(next(claims))
        assert tally.store.is_claimed("tally", 2)
        tally.store.fail_attempt(failed, "SPARK_FAILED: gone")
        assert not tally.store.is_claimed("tally", 2)


def test_a_suspended_claimant_loses_its_claim(tally: Tally, as_role: Execute) -> None:
    """Its connection stays open, in a process that was stopped or on a machine that is unreachable."""
    tally.plan(1)
    with closing(tally.store.claims("tally", "run")) as claims:
        tally.start(next(claims))
        assert tally.store.is_claimed("tally", 1)
        as_role("tidegate_owner", "UPDATE tidegate.attempt SET seen_at = now() - interval '61 s'")
        assert not tally.store.is_claimed("tally", 1)


def test_a_claim_that_a_pooler_keeps_open_is_soon_ignored(
    tally: Tally, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task died before it began the batch: the batch's own task does not wait for the attempt timeout."""
    tally.plan(1)
    monkeypatch.setattr(worker, "LONGEST_WAIT_FOR_CLAIMANT_SECONDS", 0.5)
    with closing(tally.store.claims("tally", "run")) as claims:
        assert next(claims) == 1
        assert tally.store.is_claimed("tally", 1)
        assert not tally.store.is_claimed("tally", 1, only_begun=True)
        began_at = time.monotonic()
        steps.await_claimant(settings, TALLY, 1)
        assert 0.5 <= time.monotonic() - began_at < 30
        tally.start(1)
        assert tally.store.is_claimed("tally", 1, only_begun=True)


def test_a_claimant_that_stops_or_dies_loses_its_claim(tally: Tally, as_role: Execute) -> None:
    """However it ends, its connection closes."""
    tally.plan(2)
    with closing(tally.store.claims("tally", "run")) as stops:
        assert next(stops) == 1
    until(lambda: not tally.store.is_claimed("tally", 1))

    with closing(tally.store.claims("tally", "run")) as dies:
        assert next(dies) == 1
        as_role("postgres", f"SELECT pg_terminate_backend(pid) FROM ({CLAIMANTS}) AS claimant")
        until(lambda: not tally.store.is_claimed("tally", 1))
        with pytest.raises(StoreUnavailable):
            next(dies)
    assert as_role("postgres", CLAIMANTS) == []


def test_a_batch_that_was_begun_meanwhile_is_left(tally: Tally) -> None:
    """A task that claims a batch and is slow to begin must not fence a faster task."""
    tally.plan(3)
    with closing(tally.store.claims("tally", "run")) as claims:
        assert next(claims) == 1
        tally.start(1)
        assert tally.store.start_attempt(tally.spec, 1, "slow", mode="first") is NotStarted.BEGUN
    tally.store.fail_attempt(tally.start(2), "STORE_UNAVAILABLE: gone")
    tally.process(3)

    begun = [tally.store.start_attempt(tally.spec, txid, "slow", mode="first") for txid in (1, 2, 3)]
    assert begun == [NotStarted.BEGUN, NotStarted.BEGUN, NotStarted.SEALED]
    assert len(tally.store.batch_history("tally", 1).attempts) == 1


def test_a_task_that_has_helped_for_long_gives_its_place_back(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run of many batches would keep its places from other pipelines until its end; the batches are not lost."""
    tally.plan(3)
    monkeypatch.setattr(worker, "LONGEST_HELP_SECONDS", 0.0)
    helper = worker.Worker(tally.store, TALLY, "helper")

    helper.process_claimed("run")

    assert list(tally.store.claims("tally", "run")) == [1, 2, 3]
    assert not any(tally.store.is_claimed("tally", txid) for txid in (1, 2, 3))
