"""Waiting in Airflow's triggerer to process, to begin or to commit a batch, without a worker and with one query for all waits.

    TurnTrigger  one per waiting task; Airflow starts, moves, repeats and drops it as it likes
    TurnPoller   one per triggerer process, shared by all its triggers, alive while a batch waits

Nothing here decides anything. If a turn opens too early, the commit meets the cursor's lock and is retried; a turn that is
never reported ends by the task's timeout, and the next run starts with the txids that were left over. So a trigger that is
lost, doubled or late costs time and nothing else.

A wait ends in one of three ways:

- The turn opens: to process, when the task gets a worker or another task has processed the batch (`tidegate.dags.dispatch`); to
  begin, when the pipeline's window has room for the batch; to commit, when every earlier txid has committed.
  If another task has committed the batch itself by then, the task is over, otherwise a worker goes on with it.
- It is halted because the ledger says that an earlier batch waits for a person; not while a process task before it is on
  its way, as it is after failed tasks were cleared: its attempt lifts the halt.
- It is halted because the run tries this batch or an earlier one no more, without a word to the ledger: a task that is killed
  in its last try, or marked by hand as failed or as done, runs no code of ours. The ledger shows no attempt at work then. A
  batch that was given up halts no other, though its task may have failed, as long as a commit before it is still to come: that
  commit skips it.

The turn of a batch that no task processes any more, because its own was marked as done, would never come. After a while
its commit task gets a worker all the same, and processes it.
"""

import asyncio
import contextvars
import logging
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping
from typing import Any

from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

from tidegate.dags.dispatch import SECONDS_BETWEEN_LOOKS, Dispatcher, ProcessTasks
from tidegate.dags.waiting_tasks import Answer, Awaited, Place
from tidegate.jobs.engine.log_fields import about
from tidegate.jobs.engine.spans import Spans
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import TidegateError
from tidegate.state_store.ledger.batches import MAX_TXID
from tidegate.state_store.read_ledger.trace_times import AttemptTimes
from tidegate.state_store.turns.batch_turns import UNREGISTERED, Turn

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # Airflow itself looks at a trigger once a second
LONGEST_PAUSE_SECONDS = 4.0  # while Postgres is away
# A task that ends in the triggerer makes the Dag processor parse its file; several that end together, only once.
# While it waits for the others, it holds no worker and no slot of its Dag.
SECONDS_BETWEEN_ENDS = 10.0
FAILED_TASKS_EVERY_SECONDS = 15.0
# A batch whose turn it is, and whose process task is over, is processed by its commit task if no other has for this long.
SECONDS_UNTIL_ABANDONED = 60.0
OVER = ("success", "failed", "skipped", "upstream_failed", "removed")  # Airflow does not go on with a task in these states
# The group of tasks, once per txid, and its tasks, each of which may wait.
BATCH, PROCESS, COMMIT = "batch", "batch.process", "batch.commit"

UNKNOWN = Answer(0, Turn(opens=False, halted="the ledger knows no such batch of this run"), waits_for=MAX_TXID)


class TurnPoller:
    """Asks the ledger which turns are open, once for all waits in this process.

    If Postgres is away, it says so in the triggerer's log and asks again, less and less often.
    """

    def __init__(
        self, connect: Callable[[], StateStore], failed_tasks: Callable[[str, str], Iterable[int]], process_tasks: ProcessTasks
    ) -> None:
        self._connect = connect
        self._failed_tasks = failed_tasks
        self._process_tasks = process_tasks
        self._dispatcher = Dispatcher(process_tasks)
        self._next_look_at_tasks = 0.0
        self._waiting: dict[Place, set[asyncio.Future[Answer]]] = {}
        self._seen_failed: set[tuple[str, str, int]] = set()
        self._idle_since: dict[Place, float] = {}
        # The txids of each run with waiting batches: they never change, unless another database takes the ledger's place.
        self._txids_of: dict[tuple[str, str], list[int]] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait(self, place: Place) -> Answer:
        """Return the place's txid and turn, once that has opened or is halted."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place, set()).add(answer)
        if self._task is None:
            # A context of its own: the poller's log lines do not belong to the task that happened to start it.
            self._task = asyncio.create_task(self._poll(), name="turn poller", context=contextvars.Context())
            self._task.add_done_callback(self._pass_on_failure)
        try:
            return await answer
        finally:
            self._waiting[place].discard(answer)
            if not self._waiting[place]:
                del self._waiting[place]

    async def _poll(self) -> None:
        store: StateStore | None = None
        pause, look_at_tasks_in, ends_in = POLL_SECONDS, FAILED_TASKS_EVERY_SECONDS, SECONDS_BETWEEN_ENDS
        try:
            while self._waiting:
                look_at_tasks = look_at_tasks_in <= 0
                try:
                    if store is None:
                        store = await asyncio.to_thread(self._connect)
                    answers = await asyncio.to_thread(self._answers, store, list(self._waiting), look_at_tasks, ends_in <= 0)
                    pause = POLL_SECONDS
                except (TidegateError, AirflowRuntimeError) as error:
                    answers = {}
                    pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                    logger.warning("The turns cannot be read; asking again in %.0f s: %s", pause, error)
                for place, answer in answers.items():
                    for future in self._waiting.get(place, ()):
                        if not future.done():
                            future.set_result(answer)
                ends_in = SECONDS_BETWEEN_ENDS if ends_in <= 0 else ends_in - pause
                look_at_tasks_in = FAILED_TASKS_EVERY_SECONDS if look_at_tasks else look_at_tasks_in - pause
                await asyncio.sleep(pause)
        finally:
            self._task = None  # before any await: a wait that begins from here on starts the next poller
            if store:
                await asyncio.to_thread(store.close)

    def _answers(self, store: StateStore, places: list[Place], look_at_tasks: bool, look_at_ends: bool) -> dict[Place, Answer]:
        """Return the places whose wait is over. Runs in a thread.

        Batches that have committed are left for later, unless `look_at_ends`, or their whole run is over.
        """
        runs = {(place.pipeline, place.run_id) for place in places}
        known = {} if look_at_tasks else self._txids_of
        self._txids_of = txids_of = {run: known.get(run) or store.run_txids(*run) for run in runs}
        if not (self._dispatcher.is_due() or look_at_tasks or look_at_ends):
            places = [place for place in places if place.awaited != "process"]
        waiting = {
            place: txids[place.map_index]
            for place in places
            if place.map_index < len(txids := txids_of[place.pipeline, place.run_id])
        }
        over = {place: UNKNOWN for place in places if place not in waiting}
        last_of = {(pipeline, run_id): (pipeline, txids[-1]) for (pipeline, run_id), txids in txids_of.items() if txids}
        requested = {(place.pipeline, txid) for place, txid in waiting.items()} | set(last_of.values())
        turns = store.turns(sorted(requested))
        to_process = {place: txid for place, txid in waiting.items() if place.awaited == "process"}
        if to_process:
            over |= self._dispatcher.answers(store, to_process, turns, look_at_ends=look_at_ends)
        ended = {run for run, last in last_of.items() if look_at_ends or turns.get(last, UNREGISTERED).done}
        opened = _opened({place: txid for place, txid in waiting.items() if place not in to_process}, turns, ended)
        over |= self._without_tried_again(opened)
        if look_at_tasks:
            still = {place: txid for place, txid in waiting.items() if place not in over}
            over |= self._abandoned(store, still, turns) | self._after_failed_tasks(store, still, txids_of, turns)
        return over | _with_attempts(store, over)

    def _without_tried_again(self, opened: dict[Place, Answer]) -> dict[Place, Answer]:
        """Leave out commits that the run's process tasks may still decide.

        That is so for an open turn while the batch's own process task goes on, which mostly commits the batch by itself; and
        for a halt while a process task of the batch, or of one before it, goes on.
        """
        undecided = [place for place, answer in opened.items() if place.awaited == "commit" and not answer.turn.done]
        if not undecided:
            return opened
        is_due = (now := time.monotonic()) >= self._next_look_at_tasks
        at_work: dict[tuple[str, str], set[int]] = {}
        if is_due:
            self._next_look_at_tasks = now + SECONDS_BETWEEN_LOOKS
            for run in {(place.pipeline, place.run_id) for place in undecided}:
                at_work[run] = {index for index, state in self._process_tasks(*run).items() if state not in OVER}
        left_out = set()
        for place in undecided:
            indexes = at_work.get((place.pipeline, place.run_id), set())
            is_halted = bool(opened[place].turn.halted)
            goes_on = min(indexes, default=sys.maxsize) <= place.map_index if is_halted else place.map_index in indexes
            if goes_on or not is_due:
                left_out.add(place)
        return {place: answer for place, answer in opened.items() if place not in left_out}

    def _after_failed_tasks(
        self,
        store: StateStore,
        waiting: Mapping[Place, int],
        txids_of: Mapping[tuple[str, str], list[int]],
        turns: Mapping[tuple[str, int], Turn],
    ) -> dict[Place, Answer]:
        """Return the places from a batch on that their run tries no more.

        A task counts from the second look: one that has just failed may be reporting to the ledger at this moment.
        """
        first_failed: dict[tuple[str, str], int] = {}
        for pipeline, run_id, txid in sorted(self._failed_twice(store, txids_of)):
            first_failed.setdefault((pipeline, run_id), txid)
        over: dict[Place, Answer] = {}
        for place, txid in waiting.items():
            first = first_failed.get((place.pipeline, place.run_id))
            # A batch is processed although an earlier one has failed, as far as the window goes.
            may_begin = place.awaited == "process" and turns.get((place.pipeline, txid), UNREGISTERED).begins
            if first is not None and txid >= first and not may_begin:
                halted = f"no task of this run tries txid {first} any more"
                over[place] = Answer(txid, Turn(opens=False, halted=halted), waits_for=first)
        return over

    def _failed_twice(self, store: StateStore, txids_of: Mapping[tuple[str, str], list[int]]) -> set[tuple[str, str, int]]:
        """Return the batches that their run has tried no more at this look and at the last one, with their runs.

        The ledger has the last word: a batch that has committed or has an attempt at work is not among them. One that is sealed
        or was given up is among them only in its turn: before that, the commit of an earlier batch takes it along.
        """
        tried_no_more = {
            (*run, txids[i]) for run, txids in txids_of.items() for i in self._failed_tasks(*run) if i < len(txids)
        }
        known = store.processing(sorted({(pipeline, txid) for pipeline, _, txid in tried_no_more})) if tried_no_more else {}
        seen = set()
        for pipeline, run_id, txid in tried_no_more:
            batch = known.get((pipeline, txid))
            if batch and not batch.is_in_work and (batch.is_next or not batch.is_over):
                seen.add((pipeline, run_id, txid))
        failed, self._seen_failed = seen & self._seen_failed, seen
        return failed

    def _abandoned(
        self, store: StateStore, waiting: Mapping[Place, int], turns: Mapping[tuple[str, int], Turn]
    ) -> dict[Place, Answer]:
        """Return the places of batches that would be next to commit, and that no task has processed for a while.

        Their process tasks are over, says Airflow. A worker goes on: a commit processes what is not.
        """
        now = time.monotonic()
        committing = {p: txid for p, txid in waiting.items() if p.awaited == "commit" and (p.pipeline, txid) in turns}
        committed = {pipeline: store.committed(pipeline) for pipeline in {place.pipeline for place in committing}}
        following = {place: txid for place, txid in committing.items() if txid == committed[place.pipeline] + 1}
        known = store.processing([(place.pipeline, txid) for place, txid in following.items()]) if following else {}
        batches = {place: known.get((place.pipeline, txid)) for place, txid in following.items()}
        idle = {place for place, batch in batches.items() if batch and not (batch.is_over or batch.is_in_work)}
        self._idle_since = {place: self._idle_since.get(place, now) for place in idle}
        for_long = [
            place
            for place, since in self._idle_since.items()
            if now - since >= SECONDS_UNTIL_ABANDONED
            and self._process_tasks(place.pipeline, place.run_id).get(place.map_index) in OVER
        ]
        return {place: Answer(following[place], Turn(opens=True)) for place in for_long}

    def _pass_on_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            for futures in self._waiting.values():
                for future in futures:
                    if not future.done():
                        future.set_exception(error)


def _opened(
    waiting: Mapping[Place, int], turns: Mapping[tuple[str, int], Turn], ended: Container[tuple[str, str]]
) -> dict[Place, Answer]:
    """Return the places whose turn has come or is halted; what has committed, only in these runs."""
    over: dict[Place, Answer] = {}
    for place, txid in waiting.items():
        turn = turns.get((place.pipeline, txid), UNREGISTERED)
        if turn.done and (place.pipeline, place.run_id) not in ended:
            continue
        if turn.opens or turn.halted or (place.awaited == "begin" and turn.begins):
            over[place] = Answer(txid, turn)
    return over


def _with_attempts(store: StateStore, over: Mapping[Place, Answer]) -> dict[Place, Answer]:
    """Return the answers about batches that have committed and are traced, with what to record, by one query per pipeline."""
    traced = {place: answer for place, answer in over.items() if place.is_traced and answer.turn.done}
    attempts: dict[tuple[str, int], list[AttemptTimes]] = defaultdict(list)
    for pipeline in {place.pipeline for place in traced}:
        txids = [answer.txid for place, answer in traced.items() if place.pipeline == pipeline]
        for times in store.attempt_times(pipeline, txids):
            attempts[pipeline, times.txid].append(times)
    return {place: answer._replace(attempts=tuple(attempts[place.pipeline, answer.txid])) for place, answer in traced.items()}


def failed_tasks(pipeline: str, run_id: str) -> list[int]:
    """Return the map indexes of a run's batches that it tries no more, according to Airflow; most of them have committed.

    Their process task has failed permanently, or both of their tasks are over: a person may have marked them as done.
    """
    committing = dict(_states(pipeline, run_id, COMMIT))
    return [
        map_index
        for map_index, state in _states(pipeline, run_id, PROCESS)
        if state == "failed" or (state in OVER and committing.get(map_index) in OVER)
    ]


def process_tasks(pipeline: str, run_id: str) -> dict[int, str]:
    """Return the states of a run's process tasks, by the map indexes of their batches, according to Airflow."""
    return dict(_states(pipeline, run_id, PROCESS))


def _states(pipeline: str, run_id: str, *tasks: str) -> list[tuple[int, str]]:
    """Return the state of each instance of these tasks in a run, with its map index; those that have none yet are left out."""
    states = RuntimeTaskInstance.get_task_states(dag_id=pipeline, task_ids=list(tasks), run_ids=[run_id])
    return [(int(name.rpartition("_")[2]), state) for name, state in states.get(run_id, {}).items() if name not in tasks]


_poller = TurnPoller(lambda: StateStore.connect(Settings.load()), failed_tasks, process_tasks)


class TurnTrigger(BaseTrigger):  # type: ignore[misc]
    """Ends its task if another one has done its work; else sends it to a worker, to do it or to fail.

    Which batch that is follows from its task instance, because Airflow starts the triggers of both tasks by itself.
    """

    def __init__(self, pipeline_name: str, awaited: Awaited, concurrency: int = 1) -> None:
        super().__init__()
        self.pipeline_name = pipeline_name
        self.awaited = awaited
        self.concurrency = concurrency

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class and arguments with which another triggerer continues the wait."""
        arguments = {"pipeline_name": self.pipeline_name, "awaited": self.awaited, "concurrency": self.concurrency}
        return "tidegate.dags.batch_trigger.TurnTrigger", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, then end the task here if nothing is left to do; else a worker goes on, or fails with the reason of the halt.

        A failure here would be retried, and wait for the same thing. A process task that is tried again, or was cleared, goes
        to a worker at once: it may have to process its batch although that is sealed.
        """
        ti, pipeline = self.task_instance, self.pipeline_name
        if self.awaited == "process" and ti.try_number > 1:
            yield TriggerEvent(None)
            return
        spans = Spans.here() if self.awaited == "commit" else None
        place = Place(pipeline, ti.run_id, ti.map_index, self.awaited, self.concurrency, is_traced=spans is not None)
        txid, turn, attempts, waits_for = await _poller.wait(place)
        if turn.halted:
            reason = (
                f"{pipeline} {txid} will not commit in this run: {turn.halted.rstrip('.')}. "
                "Fix that and trigger the Dag again: it starts with what is left over. "
                f"More: tidegate why {pipeline} {txid}"
            )
            yield TriggerEvent({"reason": reason, "waits_for": waits_for})
        elif turn.done:
            done = "was processed by another task" if self.awaited == "process" else "has committed"
            with about(pipeline, txid):
                self.log.info("%s %d %s; to find its task: tidegate inspect %s --txid %d", pipeline, txid, done, pipeline, txid)
            if spans:
                spans.record_commits(attempts)
            yield TaskSuccessEvent()
        else:
            with about(pipeline, txid):
                self.log.info("%s %d: its turn to %s has come, a worker goes on with it now", pipeline, txid, self.awaited)
            yield TriggerEvent(None)
