"""A run goes on after processes have died: every batch counts once, without an operator. All that kills servers is here."""

# ruff: noqa: F811
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.connect.client.core import RpcDeadlines

from tests import steps
from tests.integration.conftest import until
from tests.jobs.test_failures import skipping
from tests.lone_stack import server, stack, template  # noqa: F401 - fixtures: its tests kill servers
from tests.sources.conftest import Inbox
from tidegate.jobs import Count, FixedBatches, Pipeline, State
from tidegate.jobs.compute.batch_attempt import _Computation
from tidegate.jobs.compute.sessions import interruption, session
from tidegate.jobs.engine import retries
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SparkUnavailable, StoreUnavailable

BATCHES = 3


@pytest.fixture
def inbox(settings: Settings, register: Callable[..., None]) -> Inbox:
    inbox = Inbox(settings, register)
    for number in range(1, BATCHES + 1):
        inbox.write(f"{number}.csv", f"name,amount\na,{number}\n")
    return inbox


class Held:
    """A transform whose workers say that they hold rows, and wait until they may go on."""

    def __init__(self, folder: Path) -> None:
        self._holds, self._go_on = folder / "holds", folder / "go_on"

    def transform(self, rows: DataFrame) -> DataFrame:
        holds, go_on = self._holds, self._go_on
        if go_on.exists():
            return rows

        def hold(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                holds.touch()
                while not go_on.exists():
                    time.sleep(0.05)
                yield batch

        return rows.mapInArrow(hold, rows.schema)

    @contextmanager
    def when_a_worker_holds_rows(self, act: Callable[[], None]) -> Iterator[None]:
        """Act, in another thread, as soon as a worker holds rows; then let all workers go on."""

        def watch() -> None:
            try:
                until(self._holds.exists)
                act()
            finally:
                self._go_on.touch()

        with ThreadPoolExecutor(1) as thread:
            watching = thread.submit(watch)
            yield
            watching.result()


def server_process(stack: Settings, component: str) -> int:
    status = stack.stack_folder / "run" / "stack.status"
    return until(lambda: json.loads(status.read_text())["components"][component]["pid"])


@pytest.mark.promise("fault:spark-server-dies-or-hangs:processing", "limit:LONGEST_SERVER_SILENCE_SECONDS")
@pytest.mark.promise("limit:HEARTBEAT_SECONDS")
def test_a_spark_server_that_stands_still_is_given_up(inbox: Inbox, stack: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "LONGEST_SERVER_SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(interruption, "HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr(session, "DEADLINES", RpcDeadlines(config=2, interrupt=2, get_status=2, release_session=2))
    spark = server_process(stack, "spark")

    def seen() -> Any:
        return steps.history(inbox.settings, 1).attempts[0]["seen_at"]

    def stop() -> None:
        first = seen()
        until(lambda: seen() > first)
        os.kill(spark, signal.SIGSTOP)

    held = Held(inbox.settings.home)
    pipeline = skipping(inbox, held.transform)
    inbox.plan(pipeline, "run")
    refused = pytest.raises(SparkUnavailable, match="has not answered for 3 s, though it is there")
    try:
        with held.when_a_worker_holds_rows(stop), refused:
            steps.process(inbox.settings, pipeline, 1, owner="test")
    finally:
        os.kill(spark, signal.SIGCONT)
    history = steps.history(inbox.settings, 1)
    assert (history.status.phase, [attempt["is_poison"] for attempt in history.attempts]) == ("failed", [False])


@pytest.mark.promise("fault:spark-server-dies-or-hangs:processing", "fault:one-postgres-backend-or-server-dies:processing")
@pytest.mark.promise("fault:one-postgres-backend-or-server-dies:commit")
@pytest.mark.promise("fault:connection-breaks-before-commit-arrives:processing")
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
    for step in ("commit_batch", "commit_ready"):
        first_kill(StateStore, step, lambda *_: True)
    with held.when_a_worker_holds_rows(lambda: os.kill(server_process(stack, "spark"), signal.SIGKILL)):
        result = run_pipeline(inbox.settings, pipeline, run_id="run")
    assert set(killed) >= {"_stage", "seal", "note_spark", "commit_ready"}
    assert result.txids == [commit.txid for commit in result.commits] == [1, 2, 3]
    assert [commit.skipped_reason for commit in result.commits] == [None] * BATCHES
    assert inbox.counts(pipeline) == {"a": (BATCHES, 6)}
    histories = [steps.history(inbox.settings, txid) for txid in result.txids]
    assert {attempt["is_poison"] for history in histories for attempt in history.attempts} <= {False, None}


@pytest.mark.promise("limit:SERVER_PATIENCE_SECONDS")
def test_a_server_that_only_refuses_is_given_up_after_a_while(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "SERVER_PATIENCE_SECONDS", 1.0)
    tries: list[float] = []

    def step() -> None:
        tries.append(time.monotonic())
        raise StoreUnavailable("it is full")

    pipeline = Pipeline("any", FixedBatches([], {"n": "int"}), {"n": State(aggregates={"n": Count()})})
    with pytest.raises(StoreUnavailable, match="it is full"):
        retries.with_retries(settings, pipeline, step)
    assert tries[-1] - tries[0] >= 1.0
