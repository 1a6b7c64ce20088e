"""Idle tasks go on with batches that no task has begun; whoever finds another process at work on a batch waits for it."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest
import sqlalchemy as sa

from tests.integration.conftest import TALLY, Tally, until
from tests.store import Attempt, Mode, NotStarted, Tracked, tables
from tidegate.jobs.engine import worker
from tidegate.jobs.engine.processing import Done, Processed
from tidegate.state_store import Settings

AsOwner = Callable[[sa.Executable], sa.CursorResult]
OTHER = "tidegate another"


class OtherProcess:
    """Another process, as the server sees it: a session of another name, and attempts that note it."""

    def __init__(self, tally: Tally, settings: Settings, as_owner: AsOwner) -> None:
        self._tally = tally
        self._as_owner = as_owner
        self.session = psycopg2.connect(**settings.conninfo(), application_name=OTHER)

    def start(self, txid: int) -> Attempt:
        attempt = self._tally.start(txid)
        of_batch = tables.attempt.c.txid == txid
        self._as_owner(sa.update(tables.attempt).where(of_batch).values(session=OTHER))
        return attempt

    def die(self) -> None:
        """End as a killed process does: the kernel closes its connection."""
        self.session.close()


@pytest.fixture
def other(tally: Tally, settings: Settings, as_owner: AsOwner) -> Iterator[OtherProcess]:
    process = OtherProcess(tally, settings, as_owner)
    with closing(process.session):
        yield process


def unbegun(tally: Tally, run_id: str = "run") -> list[int]:
    """Return the batches that a task of this run would go on with."""
    found = [0]
    while (txid := tally.store.next_unbegun("tally", run_id, after=found[-1])) is not None:
        found.append(txid)
    return found[1:]


@pytest.mark.promise("performance:task-that-is-finished-goes-on-with")
def test_an_idle_task_finds_the_batches_that_no_task_has_begun_in_order(tally: Tally) -> None:
    """Not those that have an attempt, in whichever state, those given up, and those of another run."""
    tally.plan(6)
    tally.plan(1, run_id="another")
    tally.process(1)
    tally.commit(1)
    tally.start(3)
    tally.store.fail_attempt(tally.start(5), "MALFORMED_RECORD: a.csv, line 3.", is_poison=True)
    assert tally.store.give_up("tally", 5, "the pipeline's policy", "its file is bad")

    assert [unbegun(tally, run_id) for run_id in ("run", "another", "no such run")] == [[2, 4, 6], [7], []]

    tally.process(2)
    begun = [tally.store.start_attempt(tally.spec, txid, "slow", mode="first") for txid in (3, 5, 2)]
    assert begun == [NotStarted.BEGUN, NotStarted.GIVEN_UP, NotStarted.SEALED]
    tally.store.fail_attempt(tally.start(6), "STORE_UNAVAILABLE: gone")
    assert tally.store.start_attempt(tally.spec, 6, "slow", mode="first") is NotStarted.BEGUN
    assert len(tally.store.batch_history("tally", 3).attempts) == 1


def test_batches_outside_the_window_are_not_begun(tally: Tally) -> None:
    tally.plan(6)
    tally.process(5)
    tally.spec = replace(tally.spec, window=2)
    tally.plan(1, run_id="another")
    assert [tally.store.turn("tally", txid).begins for txid in (1, 2, 3, 4)] == [True, True, False, False]
    assert unbegun(tally) == [1, 2]
    assert tally.store.start_attempt(tally.spec, 3, "too early") is NotStarted.AHEAD
    assert tally.store.start_attempt(tally.spec, 5, "again") is NotStarted.SEALED

    tally.process(1)
    tally.commit(1)

    assert unbegun(tally) == [2, 3]
    tally.start(3)


@pytest.mark.parametrize("end", ["killed", "suspended"])
def test_a_process_that_is_gone_holds_nobody_up(tally: Tally, other: OtherProcess, as_owner: AsOwner, end: str) -> None:
    tally.plan(1)
    other.start(1)
    assert tally.store.is_in_work("tally", 1)
    last_heartbeat = {"killed": sa.text("interval '1 hour'"), "suspended": sa.text("- interval '61 s'")}[end]
    as_owner(sa.update(tables.attempt).values(seen_at=sa.func.now() + last_heartbeat))
    if end == "killed":
        other.die()
    until(lambda: not tally.store.is_in_work("tally", 1))
    assert not tally.store.processing([("tally", 1)])["tally", 1].is_in_work


@pytest.mark.promise("limit:POLL_SECONDS")
def test_whoever_would_process_a_batch_waits_for_the_process_at_work(
    tally: Tally, settings: Settings, other: OtherProcess
) -> None:
    """Until that has ended, or has taken longer than an attempt may, or the wait is stopped; decided under the batch's lock."""
    tally.plan(3)

    def process(txid: int, *, seconds: int = 60, stopped: bool = False) -> tuple[float, list[str]]:
        """Return how long it took, and what each call got."""
        got: list[str] = []

        def step(mode: Mode) -> Processed:
            begun = tally.store.start_attempt(tally.spec, txid, "test", mode=mode)
            got.append(begun.name if isinstance(begun, NotStarted) else "attempt")
            return Processed("tally", txid, None, begun if isinstance(begun, NotStarted) else Done.SEALED)

        event = threading.Event()
        if stopped:
            event.set()
        began_at = time.monotonic()
        impatient = worker.Worker(tally.store, replace(TALLY, message_timeout_seconds=seconds), "test")
        impatient.after_others(txid, step, stopped=event)
        return time.monotonic() - began_at, got

    attempt = other.start(1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(process, 1)
        with pytest.raises(TimeoutError):
            waits.result(3 * worker.POLL_SECONDS)
        tally.store.seal(attempt, [], Tracked(0))
        assert waits.result(30)[1] == ["IN_WORK", "SEALED"]
    other.start(2)
    assert process(2, stopped=True)[1] == ["IN_WORK"]
    took, got = process(2, seconds=1)
    assert 1 <= took < 30
    assert got == ["IN_WORK", "attempt"]


def test_a_task_that_has_helped_for_long_gives_its_place_back(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run of many batches would keep its places from other pipelines until its end; the batches are not lost."""
    tally.plan(3)
    monkeypatch.setattr(worker, "LONGEST_HELP_SECONDS", 0.0)

    worker.Worker(tally.store, TALLY, "helper").help_run("run")

    assert unbegun(tally) == [1, 2, 3]
