"""Process tasks wait in the triggerer for a worker, and end there if another task has processed their batch."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from airflow.triggers.base import TaskSuccessEvent, TriggerEvent

from tests.batches import Batches
from tests.dags.conftest import CLICKS, in_a_loop
from tests.store import WINDOW
from tidegate.dags import batch_trigger, dispatch
from tidegate.dags.batch_trigger import PROCESS, TurnPoller, TurnTrigger
from tidegate.dags.waiting_tasks import Answer, Place
from tidegate.state_store import Settings, StateStore

CONCURRENCY = 2


class Airflow:
    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.failed: list[int] = []


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch) -> Airflow:
    monkeypatch.setattr(dispatch, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(batch_trigger, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(batch_trigger, "FAILED_TASKS_EVERY_SECONDS", 0.2)
    return Airflow()


@pytest.fixture
def poller(settings: Settings, airflow: Airflow) -> TurnPoller:
    return TurnPoller(lambda: StateStore.connect(settings), lambda *_: airflow.failed, lambda *_: airflow.states)


class Waits:
    def __init__(self, poller: TurnPoller, count: int) -> None:
        places = [Place(CLICKS.name, "run", index, "process", CONCURRENCY) for index in range(count)]
        self.tasks = [asyncio.create_task(poller.wait(place)) for place in places]

    async def over(self, *txids: int) -> list[str]:
        return [_outcome(await self.tasks[txid - 1]) for txid in txids]

    async def none_but(self, *txids: int) -> None:
        """Check that only the waits of these txids are over, also a while later."""
        await asyncio.sleep(8 * batch_trigger.POLL_SECONDS)
        assert [txid for txid, task in enumerate(self.tasks, start=1) if task.done()] == sorted(txids)


def _outcome(answer: Answer) -> str:
    return answer.turn.halted or ("no worker" if answer.turn.done else "worker")


@pytest.mark.promise("performance:so-do-process-tasks-except-first-ones", "decision:0027")
@in_a_loop
async def test_as_many_tasks_get_workers_as_the_run_may_have_and_the_others_end_without(
    batches: Batches, poller: TurnPoller, airflow: Airflow
) -> None:
    batches.plan("run", 5)
    waits = Waits(poller, 5)
    assert await waits.over(1, 2) == ["worker", "worker"]
    airflow.states |= {0: "running", 1: "queued", 2: "deferred", 3: "deferred", 4: "deferred"}
    await waits.none_but(1, 2)
    for txid in (1, 2, 3, 4):
        await asyncio.to_thread(batches.seal, txid)
    await waits.none_but(1, 2)
    await asyncio.to_thread(batches.seal, 5)
    assert await waits.over(3, 4, 5) == ["no worker"] * 3


@in_a_loop
async def test_a_task_whose_worker_is_gone_is_replaced_by_the_first_that_waits(
    batches: Batches, poller: TurnPoller, airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "SECONDS_ON_THE_WAY", 0.0)
    batches.plan("run", 3)
    airflow.states |= {0: "running", 1: "running"}
    waits = Waits(poller, 3)
    await asyncio.to_thread(batches.begin, 1)
    await waits.none_but()
    airflow.states[1] = "failed"
    assert await waits.over(2) == ["worker"]


@in_a_loop
async def test_a_task_on_its_way_to_a_worker_counts_before_airflow_shows_it(
    batches: Batches, poller: TurnPoller, airflow: Airflow
) -> None:
    """Between the end of a wait and the scheduler's next look, Airflow calls the task deferred."""
    batches.plan("run", 4)
    airflow.states |= dict.fromkeys(range(4), "deferred")
    waits = Waits(poller, 4)
    assert await waits.over(1, 2) == ["worker", "worker"]
    await waits.none_but(1, 2)


@in_a_loop
async def test_batches_need_no_worker_once_they_are_over_unless_sealed_under_another_declaration(
    batches: Batches, poller: TurnPoller, register: Callable[..., None]
) -> None:
    batches.plan("run", 3)
    batches.seal(1)
    batches.commit(1)
    batches.give_up(2)
    batches.seal(3)
    register(replace(CLICKS, version=2))
    assert await Waits(poller, 3).over(1, 2, 3) == ["no worker", "no worker", "worker"]


@in_a_loop
async def test_a_batch_beyond_the_window_waits_until_there_is_room_or_a_halt(
    batches: Batches, poller: TurnPoller, airflow: Airflow
) -> None:
    batches.plan("run", WINDOW + 2)
    waits = Waits(poller, WINDOW + 2)
    assert await waits.over(1, 2) == ["worker", "worker"]
    for txid in range(1, WINDOW + 1):
        await asyncio.to_thread(batches.seal, txid)
    await waits.none_but(1, 2)
    await asyncio.to_thread(batches.commit, 1)
    assert await waits.over(WINDOW + 1) == ["worker"]
    await asyncio.to_thread(batches.store.halt_batch, CLICKS.name, 2, "a person has to look")
    assert await waits.over(WINDOW + 2) == ["txid 2 is halted: a person has to look"]


@in_a_loop
async def test_a_process_task_that_was_cleared_goes_to_a_worker_at_once(
    batches: Batches, poller: TurnPoller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have to process its batch again although that is sealed."""
    monkeypatch.setattr(batch_trigger, "_poller", poller)
    batches.plan("run", 1)
    batches.seal(1)
    trigger = TurnTrigger(CLICKS.name, "process", CONCURRENCY)
    for try_number, event in ((1, TaskSuccessEvent()), (2, TriggerEvent(None))):
        trigger.task_instance = SimpleNamespace(task_id=PROCESS, run_id="run", map_index=0, try_number=try_number)
        assert [found async for found in trigger.run()] == [event]
