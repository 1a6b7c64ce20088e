"""A run goes on after servers and other runs have died: every batch counts once, without an operator."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tests import steps
from tests.jobs.test_failures import Held, counted, server_process, skipping
from tests.lone_stack import server, stack, template  # noqa: F401 - fixtures: its tests kill servers
from tests.sources.conftest import Inbox
from tidegate.jobs.compute.batch_attempt import _Computation
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SparkUnavailable
from tidegate.state_store.ledger import tables
from tidegate.state_store.seal.attempts import LONGEST_SILENCE_SECONDS

BATCHES = 4


@pytest.fixture
def inbox(settings: Settings, register: Callable[..., None]) -> Inbox:
    """A folder with one file for each batch."""
    inbox = Inbox(settings, register)
    for number in range(1, BATCHES + 1):
        inbox.write(f"{number}.csv", f"name,amount\na,{number}\n")
    return inbox


def attempts_of(inbox: Inbox, txid: int) -> list[dict[str, Any]]:
    """Return the ledger's attempts at a batch."""
    with StateStore.connect(inbox.settings) as store:
        return list(store.batch_history("inbox", txid).attempts)


@pytest.mark.promise("fault:spark-server-dies-or-hangs:processing")
def test_a_run_goes_on_when_spark_has_been_killed(inbox: Inbox, stack: Settings) -> None:
    """In mid-batch, under the policy that skips at once: no row is left out, and none counts twice."""
    held = Held(inbox.settings.home)
    pipeline = skipping(inbox, held.transform)

    def kill(_worker: int) -> None:
        os.kill(server_process(stack, "spark"), signal.SIGKILL)

    with held.when_a_worker_holds_rows(kill):
        result = run_pipeline(inbox.settings, pipeline, run_id="run")

    assert result.txids == [commit.txid for commit in result.commits] == [1, 2, 3, 4]
    assert counted(inbox, pipeline) == {"a": 10}
    assert {attempt["is_poison"] for txid in result.txids for attempt in attempts_of(inbox, txid)} <= {False, None}


@pytest.mark.promise(
    "fault:one-postgres-backend-or-server-dies:processing",
    "fault:one-postgres-backend-or-server-dies:commit",
    "fault:connection-breaks-before-commit-arrives:processing",
)
def test_a_run_goes_on_when_postgres_has_been_killed(inbox: Inbox, stack: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a different step of each batch: before it is staged, before its seal, before its query, at its merge."""
    pipeline = skipping(inbox, window=1)
    killed: list[str] = []

    def first_kill(place: object, name: str, is_here: Callable[..., bool]) -> None:
        original = getattr(place, name)

        def kill(*arguments: Any, **more: Any) -> Any:
            if name not in killed and is_here(*arguments):
                killed.append(name)
                os.kill(server_process(stack, "postgres"), signal.SIGKILL)
            return original(*arguments, **more)

        monkeypatch.setattr(place, name, kill)

    first_kill(_Computation, "_stage", lambda computation, *_: computation._attempt.txid == 1)
    first_kill(StateStore, "seal", lambda _store, attempt, *_: attempt.txid == 2)
    first_kill(StateStore, "note_spark", lambda _store, attempt, *_: attempt.txid == 3)
    first_kill(StateStore, "commit_batch", lambda _store, _spec, _txid, *_: True)
    first_kill(StateStore, "commit_ready", lambda *_: True)

    result = run_pipeline(inbox.settings, pipeline, run_id="run")

    assert set(killed) >= {"_stage", "seal", "note_spark", "commit_ready"}
    assert [commit.skipped_reason for commit in result.commits] == [None] * BATCHES
    assert counted(inbox, pipeline) == {"a": 10}


@pytest.mark.promise("fault:one-postgres-backend-or-server-dies:commit")
def test_a_run_goes_on_when_its_commit_is_not_answered(inbox: Inbox, stack: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres dies with the COMMIT: the run checks whether it took effect, and never guesses."""
    pipeline = skipping(inbox, window=1)
    kills = iter([True])

    def lose(_connection: Any) -> None:
        if next(kills, None):
            os.kill(server_process(stack, "postgres"), signal.SIGKILL)

    original = StateStore.commit_ready

    def with_a_kill(store: StateStore, *arguments: Any, **more: Any) -> Any:
        sa.event.listen(store.engine, "commit", lose)
        try:
            return original(store, *arguments, **more)
        finally:
            sa.event.remove(store.engine, "commit", lose)

    monkeypatch.setattr(StateStore, "commit_ready", with_a_kill)
    run_pipeline(inbox.settings, pipeline, run_id="run")
    assert next(kills, None) is None
    assert counted(inbox, pipeline) == {"a": 10}


def test_a_run_ends_at_once_when_spark_is_not_there_at_all(inbox: Inbox) -> None:
    """A run waits only for a server that has answered before; if it was never started, the message says so."""
    pipeline = skipping(inbox)
    with pytest.raises(SparkUnavailable, match="Start it: tidegate up"):
        run_pipeline(replace(inbox.settings, spark_remote="sc://127.0.0.1:9"), pipeline, run_id="run")
    run_pipeline(inbox.settings, pipeline, run_id="run")
    assert counted(inbox, pipeline) == {"a": 10}


def silence(as_owner: Callable, seconds: int) -> None:
    """Let the running attempts have reported last that long ago."""
    a = tables.attempt.c
    ago = sa.func.now() - sa.func.make_interval(0, 0, 0, 0, 0, 0, seconds)
    as_owner(sa.update(tables.attempt).where(a.sealed_at.is_(None), a.failed_at.is_(None)).values(seen_at=ago))


@pytest.mark.promise("limit:LONGEST_SILENCE_SECONDS")
def test_a_run_takes_over_from_a_silent_one(inbox: Inbox, as_owner: Callable) -> None:
    """A process that was killed or stopped holds up others briefly, not until its attempt is overdue."""
    pipeline = skipping(inbox)
    inbox.plan(pipeline, "dead")
    with StateStore.connect(inbox.settings) as store:
        for txid in range(1, BATCHES + 1):
            store.start_attempt(pipeline.spec, txid, "a dead run")
    silence(as_owner, LONGEST_SILENCE_SECONDS)

    for txid in range(1, BATCHES + 1):
        assert steps.commit(inbox.settings, pipeline, txid, owner="test").attempt == 2
    assert counted(inbox, pipeline) == {"a": 10}
