"""A run goes on after servers have died: every batch counts once, without an operator. All that kills servers is here."""

# ruff: noqa: F811
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.connect.client.core import RpcDeadlines

from tests.jobs.test_failures import Held, attempts_of, counted, failed_while_held, skipping, wait_for
from tests.lone_stack import server, stack, template  # noqa: F401 - fixtures: its tests kill servers
from tests.sources.conftest import Inbox
from tidegate.jobs import Count, FixedBatches, Pipeline, State
from tidegate.jobs.compute.batch_attempt import _Computation
from tidegate.jobs.compute.sessions import session as spark_module
from tidegate.jobs.engine import retries
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SparkUnavailable, StoreUnavailable

BATCHES = 4


@pytest.fixture
def inbox(settings: Settings, register: Callable[..., None]) -> Inbox:
    inbox = Inbox(settings, register)
    for number in range(1, BATCHES + 1):
        inbox.write(f"{number}.csv", f"name,amount\na,{number}\n")
    return inbox


def server_process(stack: Settings, component: str) -> int:
    found: list[int] = []

    def is_noted() -> bool:
        status = json.loads((stack.stack_folder / "run" / "stack.status").read_text())
        found.extend(filter(None, [status["components"][component]["pid"]]))
        return bool(found)

    wait_for(is_noted, f"a process of {component}")
    return found[0]


@pytest.mark.promise(
    "fault:spark-server-dies-or-hangs:processing", "limit:LONGEST_SERVER_SILENCE_SECONDS", "limit:HEARTBEAT_SECONDS"
)
def test_a_spark_server_that_stands_still_is_given_up(inbox: Inbox, stack: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_module, "LONGEST_SERVER_SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(spark_module, "HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr(spark_module, "DEADLINES", RpcDeadlines(config=2, interrupt=2, get_status=2, release_session=2))
    spark = server_process(stack, "spark")

    def seen() -> Any:
        return attempts_of(inbox, 1)[0]["seen_at"]

    def stop(_worker: int) -> None:
        first = seen()
        wait_for(lambda: seen() > first, "the attempt's next sign of life")
        os.kill(spark, signal.SIGSTOP)

    try:
        error = failed_while_held(inbox, stop)
    finally:
        os.kill(spark, signal.SIGCONT)
    assert isinstance(error, SparkUnavailable)
    assert "has not answered for 3 s, though it is there" in str(error)


@pytest.mark.promise(
    "fault:spark-server-dies-or-hangs:processing",
    "fault:one-postgres-backend-or-server-dies:processing",
    "fault:one-postgres-backend-or-server-dies:commit",
    "fault:connection-breaks-before-commit-arrives:processing",
)
def test_a_run_goes_on_when_servers_have_been_killed(inbox: Inbox, stack: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark in mid-batch, under the policy that skips at once; Postgres at a different step of each batch."""
    held = Held(inbox.settings.home)
    pipeline = skipping(inbox, held.transform, window=1)
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

    with held.when_a_worker_holds_rows(lambda _worker: os.kill(server_process(stack, "spark"), signal.SIGKILL)):
        result = run_pipeline(inbox.settings, pipeline, run_id="run")

    assert set(killed) >= {"_stage", "seal", "note_spark", "commit_ready"}
    assert result.txids == [commit.txid for commit in result.commits] == [1, 2, 3, 4]
    assert [commit.skipped_reason for commit in result.commits] == [None] * BATCHES
    assert counted(inbox, pipeline) == {"a": 10}
    assert {attempt["is_poison"] for txid in result.txids for attempt in attempts_of(inbox, txid)} <= {False, None}


@pytest.mark.promise("limit:SERVER_PATIENCE_SECONDS")
def test_a_server_that_answers_and_refuses_is_given_up_after_a_while(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "SERVER_PATIENCE_SECONDS", 1.0)
    tries: list[float] = []

    def step() -> None:
        tries.append(time.monotonic())
        raise StoreUnavailable("it is full")

    pipeline = Pipeline("any", FixedBatches([], {"n": "int"}), {"n": State(aggregates={"n": Count()})})
    with pytest.raises(StoreUnavailable, match="it is full"):
        retries.with_retries(settings, pipeline, step)
    assert len(tries) > 1
    assert tries[-1] - tries[0] >= 1.0
