"""Batches that nobody has begun are there for whoever has time; that they live is told, and decides nothing."""

import time
from contextlib import closing
from dataclasses import replace

import pytest

from jobs.engine import worker
from state_store import Settings
from state_store.beginning import NotStarted
from state_store.errors import StoreUnavailable
from tests import steps
from tests.integration.conftest import TALLY, Execute, Tally, until

THIEVES = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'tidegate claims %'"


def test_what_nobody_has_begun_is_found_in_order(tally: Tally) -> None:
    """Not what has an attempt, in whichever state, what was given up, and what another run covers."""
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


def test_no_batch_is_found_by_two_at_once(tally: Tally) -> None:
    """Each is one's until that one asks for the next, and so its own task knows that somebody is at it."""
    tally.plan(4)
    with closing(tally.store.claims("tally", "run")) as one, closing(tally.store.claims("tally", "run")) as other:
        assert [next(one), next(other)] == [1, 2]
        assert [tally.store.is_claimed("tally", txid) for txid in (1, 2, 3)] == [True, True, False]
        assert [tally.store.is_claimed("another", txid) for txid in (1, 2)] == [False, False]
        tally.start(1)
        assert tally.store.is_claimed("tally", 1)
        assert next(one) == 3
        assert [tally.store.is_claimed("tally", txid) for txid in (1, 2, 3)] == [False, True, True]


def test_what_the_window_has_no_room_for_is_left(tally: Tally) -> None:
    """However much time there is: what is staged behind the cursor has a bound. What was begun before keeps its work."""
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


def test_what_has_ended_is_nobodys(tally: Tally) -> None:
    """Its own task commits what is sealed, and tries again what has failed, whatever the thief does next."""
    tally.plan(2)
    with closing(tally.store.claims("tally", "run")) as claims:
        tally.process(next(claims))
        assert not tally.store.is_claimed("tally", 1)
        failed = tally.start(next(claims))
        assert tally.store.is_claimed("tally", 2)
        tally.store.fail_attempt(failed, "SPARK_FAILED: gone")
        assert not tally.store.is_claimed("tally", 2)


def test_a_thief_that_stands_still_has_nothing(tally: Tally, as_role: Execute) -> None:
    """Its connection lives on, in a process that was stopped or on a machine that is away."""
    tally.plan(1)
    with closing(tally.store.claims("tally", "run")) as claims:
        tally.start(next(claims))
        assert tally.store.is_claimed("tally", 1)
        as_role("tidegate_owner", "UPDATE tidegate.attempt SET seen_at = now() - interval '61 s'")
        assert not tally.store.is_claimed("tally", 1)


def test_a_name_that_a_pooler_keeps_is_not_believed_for_long(
    tally: Tally, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner died before it began: the batch's own task goes on after seconds, not after an hour."""
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


def test_who_stops_looking_or_dies_has_nothing(tally: Tally, as_role: Execute) -> None:
    """However it ends, its connection ends."""
    tally.plan(2)
    with closing(tally.store.claims("tally", "run")) as stops:
        assert next(stops) == 1
    until(lambda: not tally.store.is_claimed("tally", 1))

    with closing(tally.store.claims("tally", "run")) as dies:
        assert next(dies) == 1
        as_role("postgres", f"SELECT pg_terminate_backend(pid) FROM ({THIEVES}) AS thief")
        until(lambda: not tally.store.is_claimed("tally", 1))
        with pytest.raises(StoreUnavailable):
            next(dies)
    assert as_role("postgres", THIEVES) == []


def test_what_was_begun_meanwhile_is_left(tally: Tally) -> None:
    """Whoever finds a batch and is slow to begin must not fence who was faster."""
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
