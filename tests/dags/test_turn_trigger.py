"""Waiting triggers learn of their turns, or of a worker, from a real ledger, by one poller, under all kinds of failures."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.triggers.base import TaskSuccessEvent, TriggerEvent
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.batches import Batches
from tests.dags.conftest import CLICKS, in_a_loop
from tests.statements import execute
from tests.store import WINDOW, Turn
from tidegate.dags import batch_trigger, dispatch
from tidegate.dags.batch_trigger import COMMIT, PROCESS, TurnPoller, TurnTrigger
from tidegate.dags.waiting_tasks import Awaited, Place
from tidegate.state_store import Settings, StateStore

CONCURRENCY = 2
SILENCE = "UPDATE tidegate.attempt SET seen_at = now() - interval '61 s'"


class Poller(TurnPoller):
    looks = 0

    def _answers(self, *arguments: Any) -> Any:
        self.looks += 1  # at its beginning: all looks before have been answered
        return super()._answers(*arguments)


class Run:
    """A run whose tasks wait in the triggerer, and what Airflow says of them: the states of process tasks, and who failed."""

    def __init__(self, batches: Batches, settings: Settings) -> None:
        self.batches, self._settings = batches, settings
        self.states: dict[int, Any] = {}
        self.failed: list[int] = []
        self.looks_at_failed = 0
        self.poller = Poller(lambda: StateStore.connect(settings), self._failed_tasks, lambda *_: self.states)
        self._waits: dict[int, asyncio.Task[Any]] = {}

    def _failed_tasks(self, _pipeline: str, _run_id: str) -> list[int]:
        self.looks_at_failed += 1
        return list(self.failed)

    def wait(self, *txids: int, awaited: Awaited = "commit") -> None:
        for txid in txids:
            place = Place(CLICKS.name, "run", txid - 1, awaited, CONCURRENCY)
            self._waits[txid] = asyncio.create_task(self.poller.wait(place))

    async def turn(self, txid: int) -> Turn:
        answer = await self._waits[txid]
        assert answer.txid in (txid, 0)
        return answer.turn

    async def sent(self, *txids: int) -> list[str]:
        """Return what becomes of tasks that wait to process."""
        return ["no worker" if turn.done else "worker" for turn in [await self.turn(txid) for txid in txids]]

    def check(self, *over: int) -> None:
        assert [txid for txid, wait in self._waits.items() if wait.done()] == list(over)

    async def none_but(self, *over: int, looks: int = 8) -> None:
        """Only the waits of these txids are over, also some looks later."""
        until = self.poller.looks + looks
        while self.poller.looks < until:
            await asyncio.sleep(0.01)
        self.check(*over)

    async def looks_for_failed(self, count: int) -> None:
        """Wait until so many more looks at failed tasks have been made, or the wait of txid 3 is over."""
        until = self.looks_at_failed + count
        while self.looks_at_failed < until and not self._waits[3].done():
            await asyncio.sleep(0.01)

    def halt(self, txid: int) -> None:
        self.batches.store.halt_batch(CLICKS.name, txid, "SOURCE_CHANGED: a.csv")

    def as_owner(self, statement: str) -> None:
        execute(self._settings.conninfo(user="tidegate_owner"), statement)


@pytest.fixture
def run(batches: Batches, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose poller looks often."""
    for name, seconds in (("POLL_SECONDS", 0.05), ("SECONDS_BETWEEN_LOOKS", 0.05), ("FAILED_TASKS_EVERY_SECONDS", 0.1)):
        monkeypatch.setattr(batch_trigger, name, seconds)
    monkeypatch.setattr(dispatch, "SECONDS_BETWEEN_LOOKS", 0.0)
    return Run(batches, settings)


@pytest.mark.parametrize("awaited", ["begin", "process"])
@in_a_loop
async def test_a_wait_for_the_window_ends_when_there_is_room_or_a_halt(run: Run, awaited: Awaited) -> None:
    run.batches.plan("run", WINDOW + 2)
    run.batches.seal(*range(1, WINDOW + 1))
    run.wait(WINDOW + 1, WINDOW + 2, awaited=awaited)
    await run.none_but()
    run.batches.commit(1)
    assert (await run.turn(WINDOW + 1)).opens == (awaited == "process")
    run.check(WINDOW + 1)
    run.halt(2)
    assert (await run.turn(WINDOW + 2)).halted == "txid 2 is halted: SOURCE_CHANGED: a.csv"


@in_a_loop
async def test_a_halted_batch_ends_all_later_waits_with_its_reason(run: Run) -> None:
    run.batches.plan("run", 3)
    run.batches.seal(1)
    run.halt(2)
    run.wait(1, 3)
    first, third = await run.turn(1), await run.turn(3)
    assert (first.opens, first.halted) == (True, None)
    assert third.halted == "txid 2 is halted: SOURCE_CHANGED: a.csv"


@in_a_loop
async def test_a_commit_waits_while_its_process_task_goes_on_or_was_cleared(run: Run) -> None:
    """With a task that was cleared, commit tasks after it were, and start before its attempt lifts the halt."""
    run.batches.plan("run", 2)
    run.halt(1)
    run.batches.seal(2)
    run.states |= {0: None, 1: "success"}
    run.wait(1, 2)
    await run.none_but()
    run.states[0] = "running"
    run.batches.seal(1)
    await run.none_but()
    run.states[0] = "success"
    assert (await run.turn(1)).opens
    run.batches.commit(1)
    assert (await run.turn(2)).opens


@in_a_loop
async def test_waits_outlive_an_unreachable_postgres(run: Run, settings: Settings) -> None:
    run.batches.plan("run", 1)
    run.batches.seal(1)
    tried = iter([replace(settings, pg_port=1), settings])
    run.poller._connect = lambda: StateStore.connect(next(tried))
    run.wait(1)
    assert (await run.turn(1)).opens


@pytest.mark.parametrize("situation", ["an attempt at work", "sealed ahead of its turn"])
@in_a_loop
async def test_a_task_that_was_marked_by_hand_ends_no_wait_while_its_batch_may_still_commit(run: Run, situation: str) -> None:
    run.batches.plan("run", 3)
    (run.batches.begin if situation == "an attempt at work" else run.batches.seal)(2)
    run.failed = [1]
    run.wait(1, 3)
    await run.looks_for_failed(4)
    run.check()
    # Nothing is at work any more: the attempt falls silent, or nothing commits the sealed batch in its turn.
    if situation == "an attempt at work":
        run.as_owner(SILENCE)
    else:
        run.batches.seal(1)
        run.batches.commit(1)
    assert (await run.turn(3)).halted == "no task of this run tries txid 2 any more"


@in_a_loop
async def test_a_run_that_another_database_does_not_know_ends_its_waits(run: Run) -> None:
    """After `tidegate restore` no batch of the run is left; without an answer, its waits would keep the next run waiting."""
    run.batches.plan("run", 1)
    run.wait(1)
    await run.none_but()
    run.as_owner("TRUNCATE tidegate.batch CASCADE")
    assert (await run.turn(1)).halted == "the ledger knows no such batch of this run"


@pytest.mark.promise("limit:SECONDS_UNTIL_ABANDONED")
@pytest.mark.parametrize("has_begun", [False, True])
@in_a_loop
async def test_a_batch_that_nobody_processes_any_more_gets_a_worker_by_its_commit_task(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, has_begun: bool
) -> None:
    """Its process task was marked as done by hand, before it began or in its work: no task would ever seal it."""
    monkeypatch.setattr(batch_trigger, "SECONDS_UNTIL_ABANDONED", 0.3)
    run.states[0] = "up_for_retry"
    run.batches.plan("run", 2)
    if has_begun:
        run.batches.begin(1)
    run.wait(1, 2)
    await run.none_but(looks=20)  # which takes a second: its own task will try it again
    run.states[0] = "success"
    if has_begun:
        await run.none_but(looks=20)  # a task is at work
        run.as_owner(SILENCE)
    assert (await run.turn(1)).opens
    run.check(1)


def test_a_batch_whose_tasks_were_marked_by_hand_ends_the_later_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    of_process, of_commit = ("success", "failed", "running", "success"), ("success", "deferred", "success", "deferred")
    states: dict[str, Any] = {f"batch.process_{n}": state for n, state in enumerate(of_process)}
    states |= {f"batch.commit_{n}": state for n, state in enumerate(of_commit)} | {"batch.commit": None}

    def get_task_states(*, dag_id: str, task_ids: list[str], run_ids: list[str]) -> dict[str, Any]:
        assert dag_id == CLICKS.name
        chosen = {name: state for name, state in states.items() if name.rpartition("_")[0] in task_ids or name in task_ids}
        return {run_ids[0]: chosen}

    monkeypatch.setattr(batch_trigger.RuntimeTaskInstance, "get_task_states", get_task_states)
    assert set(batch_trigger.failed_tasks(CLICKS.name, "run")) == {0, 1}
    assert batch_trigger.process_tasks(CLICKS.name, "run") == dict(enumerate(of_process))


@in_a_loop
async def test_a_task_that_has_just_failed_may_still_report_to_the_ledger(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.batches.plan("run", 3)

    def failed_tasks(_pipeline: str, _run_id: str) -> list[int]:
        run.looks_at_failed += 1
        if run.looks_at_failed == 2:
            run.batches.give_up(2)
        return [1]

    monkeypatch.setattr(run.poller, "_failed_tasks", failed_tasks)
    run.wait(3)
    await run.looks_for_failed(4)
    run.check()


@pytest.mark.promise("performance:so-do-process-tasks-except-first-ones", "decision:0027")
@in_a_loop
async def test_as_many_tasks_get_workers_as_the_run_may_have_and_the_others_end_without(run: Run) -> None:
    """Between the end of a wait and the scheduler's next look, Airflow calls the task deferred; it counts all the same."""
    run.batches.plan("run", 5)
    run.states |= dict.fromkeys(range(5), "deferred")
    run.wait(1, 2, 3, 4, 5, awaited="process")
    assert await run.sent(1, 2) == ["worker", "worker"]
    await run.none_but(1, 2)
    run.states |= {0: "running", 1: "queued"}
    run.batches.seal(1, 2, 3, 4)
    await run.none_but(1, 2)
    run.batches.seal(5)
    assert await run.sent(3, 4, 5) == ["no worker"] * 3


@in_a_loop
async def test_a_task_whose_worker_is_gone_is_replaced_by_the_first_that_waits(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "SECONDS_ON_THE_WAY", 0.0)
    run.batches.plan("run", 3)
    run.states |= {0: "running", 1: "running"}
    run.wait(1, 2, 3, awaited="process")
    run.batches.begin(1)
    await run.none_but()
    run.states[1] = "failed"
    assert await run.sent(2) == ["worker"]


@in_a_loop
async def test_a_process_task_that_was_cleared_goes_to_a_worker_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have to process its batch again although that is sealed."""
    monkeypatch.setattr(batch_trigger, "_poller", run.poller)
    run.batches.plan("run", 1)
    run.batches.seal(1)
    trigger = TurnTrigger(CLICKS.name, "process", CONCURRENCY)
    for try_number, event in ((1, TaskSuccessEvent()), (2, TriggerEvent(None))):
        trigger.task_instance = SimpleNamespace(task_id=PROCESS, run_id="run", map_index=0, try_number=try_number)
        assert [found async for found in trigger.run()] == [event]


@pytest.mark.promise("performance:tasks-that-end-in-triggerer-end-together")
@in_a_loop
async def test_triggers_record_the_waits_and_commits_of_many_batches(
    run: Run, settings: Settings, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2 * WINDOW + 1
    run.batches.plan("run", count)
    for first in range(1, count + 1, WINDOW):
        run.batches.seal(*range(first, min(first + WINDOW, count + 1)))
        run.batches.store.commit_ready(CLICKS.spec, "test", wait=True)
    monkeypatch.setattr(Settings, "load", lambda: settings)
    monkeypatch.setattr(batch_trigger, "_poller", run.poller)

    async def wait(map_index: int) -> None:
        trigger = TurnTrigger(CLICKS.name, "commit")
        trigger.task_instance = SimpleNamespace(task_id=COMMIT, run_id="run", map_index=map_index)
        with trace.get_tracer("test").start_as_current_span(f"trigger_{map_index}"):
            assert [type(event) async for event in trigger.run()] == [TaskSuccessEvent]

    await asyncio.gather(*(wait(map_index) for map_index in range(count)))
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    recorded = {(s.name, s.attributes["tidegate.txid"], names[s.parent.span_id]) for s in spans if s.name in ("wait", "commit")}
    assert recorded == {(name, txid, f"trigger_{txid - 1}") for name in ("wait", "commit") for txid in range(1, count + 1)}
    assert len(spans) == 3 * count
