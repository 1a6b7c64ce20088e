"""Waiting triggers learn of their turns from a real ledger, through one poller, under all kinds of failures."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest
from airflow.triggers.base import TaskSuccessEvent
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.batches import Batches
from tests.dags.conftest import CLICKS, PATIENCE_SECONDS, in_a_loop
from tests.store import WINDOW, Turn
from tidegate.dags import batch_trigger
from tidegate.dags.batch_trigger import COMMIT, Place, TurnPoller, TurnTrigger
from tidegate.state_store import Settings, StateStore

Polls = Callable[[int], Awaitable[None]]


@pytest.fixture(autouse=True)
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    """A function that waits until pollers, which look often here, have looked that many more times."""
    for name, seconds in (("POLL_SECONDS", 0.05), ("SECONDS_BETWEEN_LOOKS", 0.05), ("FAILED_TASKS_EVERY_SECONDS", 0.1)):
        monkeypatch.setattr(batch_trigger, name, seconds)
    answers, seen = TurnPoller._answers, 0

    def counted(poller: TurnPoller, *arguments: Any) -> Any:
        nonlocal seen
        seen += 1  # at its beginning: all looks before have been answered
        return answers(poller, *arguments)

    async def more(count: int) -> None:
        until = seen + 1 + count
        while seen < until:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(TurnPoller, "_answers", counted)
    return more


def _poller(
    settings: Settings,
    failed: Callable[[str, str], Iterable[int]] = lambda _pipeline, _run_id: [],
    process_tasks: Callable[[str, str], dict[int, str]] = lambda _pipeline, _run_id: {},
) -> TurnPoller:
    return TurnPoller(lambda: StateStore.connect(settings), failed, process_tasks)


@pytest.fixture
def poller(settings: Settings) -> TurnPoller:
    return _poller(settings)


def _places(txids: Iterable[int]) -> list[Place]:
    return [Place(CLICKS.name, "run", txid - 1) for txid in txids]


async def _turn(poller: TurnPoller, place: Place) -> Turn:
    answer = await poller.wait(place)
    assert answer.txid in (place.map_index + 1, 0)
    return answer.turn


@in_a_loop
async def test_turns_open_in_txid_order(batches: Batches, polls: Polls, poller: TurnPoller) -> None:
    batches.plan("run", 3)
    waits = [asyncio.create_task(_turn(poller, place)) for place in _places([1, 2, 3])]
    await asyncio.to_thread(batches.seal, 2)
    await asyncio.to_thread(batches.seal, 3)
    await polls(3)
    assert not any(wait.done() for wait in waits)

    for txid, wait in enumerate(waits, start=1):
        if txid == 1:
            await asyncio.to_thread(batches.seal, 1)
        assert (await wait).opens
        assert not any(later.done() for later in waits[txid:])
        await asyncio.to_thread(batches.commit, txid)


@in_a_loop
async def test_a_wait_for_the_window_ends_when_there_is_room(batches: Batches, polls: Polls, poller: TurnPoller) -> None:
    batches.plan("run", WINDOW + 2)
    last, later = (
        asyncio.create_task(_turn(poller, Place(CLICKS.name, "run", txid - 1, "begin"))) for txid in (WINDOW + 1, WINDOW + 2)
    )
    await polls(3)
    assert not last.done()

    await asyncio.to_thread(batches.seal, 1)
    await asyncio.to_thread(batches.commit, 1)
    assert not (await last).opens
    assert not later.done()
    await asyncio.to_thread(batches.store.halt_batch, CLICKS.name, 2, "a person has to look")
    assert (await later).halted == "txid 2 is halted: a person has to look"


@in_a_loop
async def test_a_halted_batch_ends_all_later_waits_with_its_reason(batches: Batches, poller: TurnPoller) -> None:
    batches.plan("run", 3)
    batches.seal(1)
    batches.store.halt_batch(CLICKS.name, 2, "SOURCE_CHANGED: a.csv")
    first, third = await asyncio.gather(*(_turn(poller, place) for place in _places([1, 3])))
    assert (first.opens, first.halted) == (True, None)
    assert third.halted == "txid 2 is halted: SOURCE_CHANGED: a.csv"


@in_a_loop
async def test_a_commit_waits_while_its_process_task_goes_on_or_was_cleared(
    batches: Batches, polls: Polls, settings: Settings
) -> None:
    """With a task that was cleared, commit tasks after it were, and start before its attempt lifts the halt."""
    batches.plan("run", 2)
    batches.store.halt_batch(CLICKS.name, 1, "SOURCE_CHANGED: a.csv")
    batches.seal(2)
    states: dict[int, Any] = {0: None, 1: "success"}
    poller = _poller(settings, process_tasks=lambda _pipeline, _run_id: states)
    waits = [asyncio.create_task(_turn(poller, place)) for place in _places([1, 2])]
    await polls(6)
    assert not any(wait.done() for wait in waits)
    states[0] = "running"
    await asyncio.to_thread(batches.seal, 1)
    await polls(6)
    assert not any(wait.done() for wait in waits)
    states[0] = "success"
    assert (await waits[0]).opens
    await asyncio.to_thread(batches.commit, 1)
    assert (await waits[1]).opens


@in_a_loop
async def test_waits_outlive_an_unreachable_postgres(batches: Batches, settings: Settings) -> None:
    batches.plan("run", 1)
    batches.seal(1)
    tried = iter([replace(settings, pg_port=1), settings])
    poller = TurnPoller(lambda: StateStore.connect(next(tried)), lambda *_: [], lambda *_: {})
    assert (await _turn(poller, *_places([1]))).opens


@pytest.mark.parametrize("situation", ["an attempt at work", "sealed ahead of its turn"])
@in_a_loop
async def test_a_task_that_was_marked_by_hand_ends_no_wait_while_its_batch_may_still_commit(
    batches: Batches, settings: Settings, situation: str
) -> None:
    batches.plan("run", 3)
    (batches.begin if situation == "an attempt at work" else batches.seal)(2)
    looks: list[str] = []
    poller = _poller(settings, lambda _pipeline, run_id: looks.append(run_id) or [1])
    before, wait = (asyncio.create_task(_turn(poller, place)) for place in _places([1, 3]))
    while len(looks) < 4:
        await asyncio.sleep(0.01)
    assert not wait.done()
    # Nothing is at work any more: the attempt falls silent, or nothing commits the sealed batch in its turn.
    if situation == "an attempt at work":
        await asyncio.to_thread(_as_owner, settings, SILENCE)
        assert not before.done()
    else:
        await asyncio.to_thread(batches.seal, 1)
        await asyncio.to_thread(batches.commit, 1)
    assert (await wait).halted == "no task of this run tries txid 2 any more"
    before.cancel()


@in_a_loop
async def test_a_run_that_another_database_does_not_know_ends_its_waits(
    batches: Batches, polls: Polls, poller: TurnPoller, settings: Settings
) -> None:
    """After `tidegate restore` no batch of the run is left; without an answer, its waits would keep the next run waiting."""
    batches.plan("run", 1)
    wait = asyncio.create_task(_turn(poller, *_places([1])))
    await polls(3)
    assert not wait.done()
    await asyncio.to_thread(_as_owner, settings, "TRUNCATE tidegate.batch CASCADE")
    assert (await wait).halted == "the ledger knows no such batch of this run"


SILENCE = "UPDATE tidegate.attempt SET seen_at = now() - interval '61 s'"


def _as_owner(settings: Settings, statement: str) -> None:
    with closing(psycopg2.connect(**settings.conninfo(user="tidegate_owner"))) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        connection.commit()


@pytest.mark.promise("limit:SECONDS_UNTIL_ABANDONED")
@pytest.mark.parametrize("has_begun", [False, True])
@in_a_loop
async def test_a_batch_that_nobody_processes_any_more_gets_a_worker_by_its_commit_task(
    batches: Batches, polls: Polls, settings: Settings, monkeypatch: pytest.MonkeyPatch, *, has_begun: bool
) -> None:
    """Its process task was marked as done by hand, before it began or in its work: no task would ever seal it."""
    monkeypatch.setattr(batch_trigger, "SECONDS_UNTIL_ABANDONED", 0.3)
    states = {0: "up_for_retry"}
    poller = _poller(settings, process_tasks=lambda _pipeline, _run_id: states)
    batches.plan("run", 2)
    if has_begun:
        batches.begin(1)
    first, second = (asyncio.create_task(_turn(poller, place)) for place in _places([1, 2]))
    await polls(20)  # which takes a second
    assert not first.done()  # its own task will try it again
    states[0] = "success"
    if has_begun:
        await polls(20)  # which takes a second
        assert not first.done()  # a task is at work
        await asyncio.to_thread(_as_owner, settings, SILENCE)
    assert (await first).opens
    assert not second.done()
    second.cancel()


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


@pytest.mark.parametrize("is_next", [False, True])
@in_a_loop
async def test_a_failed_task_of_a_batch_that_was_given_up_ends_no_wait(
    batches: Batches, settings: Settings, *, is_next: bool
) -> None:
    batches.plan("run", 3)
    batches.give_up(2)
    if is_next:
        batches.seal(1)
        batches.commit(1)
    looks: list[str] = []
    failed = [1]
    poller = _poller(settings, lambda _pipeline, run_id: looks.append(run_id) or list(failed))
    wait = asyncio.create_task(_turn(poller, *_places([3])))
    while len(looks) < 4 and not wait.done():
        await asyncio.sleep(0.01)
    if not is_next:
        assert not wait.done()
        # Between both commits, a look would find that nothing before txid 2 is still to come.
        failed.clear()
        last = len(looks)
        while len(looks) < last + 2:
            await asyncio.sleep(0.01)
        for txid in (1, 3):
            await asyncio.to_thread(batches.seal, txid)
        for txid in (1, 2):
            await asyncio.to_thread(batches.commit, txid)
        failed.append(1)
    turn = await wait
    assert (turn.opens, turn.halted) == ((False, "no task of this run tries txid 2 any more") if is_next else (True, None))


@in_a_loop
async def test_a_task_that_has_just_failed_may_still_report_to_the_ledger(batches: Batches, settings: Settings) -> None:
    batches.plan("run", 3)
    looks = 0

    def failed_tasks(_pipeline: str, _run_id: str) -> list[int]:
        nonlocal looks
        looks += 1
        if looks == 2:
            batches.give_up(2)
        return [1]

    poller = _poller(settings, failed_tasks)
    wait = asyncio.create_task(_turn(poller, *_places([3])))
    while looks < 4 and not wait.done():
        await asyncio.sleep(0.01)
    assert not wait.done()
    wait.cancel()


@pytest.mark.promise("performance:tasks-that-end-in-triggerer-end-together")
def test_triggers_record_the_waits_and_commits_of_many_batches(
    batches: Batches, settings: Settings, poller: TurnPoller, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2 * WINDOW + 1
    batches.plan("run", count)
    for txid in range(1, count + 1):
        batches.seal(txid)
        if txid % WINDOW == 0 or txid == count:
            batches.store.commit_ready(CLICKS.spec, "test", wait=True)
    monkeypatch.setattr(Settings, "load", lambda: settings)
    monkeypatch.setattr(batch_trigger, "_poller", poller)

    async def wait(map_index: int) -> None:
        trigger = TurnTrigger(CLICKS.name, "commit")
        trigger.task_instance = SimpleNamespace(task_id=COMMIT, run_id="run", map_index=map_index)
        with trace.get_tracer("test").start_as_current_span(f"trigger_{map_index}"):
            assert [type(event) async for event in trigger.run()] == [TaskSuccessEvent]

    async def body() -> None:
        await asyncio.gather(*(wait(map_index) for map_index in range(count)))

    asyncio.run(asyncio.wait_for(body(), 10 * PATIENCE_SECONDS))

    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    recorded = {(s.name, s.attributes["tidegate.txid"], names[s.parent.span_id]) for s in spans if s.name in ("wait", "commit")}
    assert recorded == {(name, txid, f"trigger_{txid - 1}") for name in ("wait", "commit") for txid in range(1, count + 1)}
    assert len(spans) == 3 * count
