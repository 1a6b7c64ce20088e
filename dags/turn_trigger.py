"""Waiting for a batch's turn to commit, in Airflow's triggerer: no worker, and one query for everybody who waits.

    TurnTrigger  one per waiting txid; Airflow starts, moves, repeats and drops it as it likes
    TurnPoller   one per triggerer process, shared by all of them, alive while somebody waits

Nothing here decides anything. A turn that opens too early meets the cursor's lock in the commit, and is retried; a turn
that is never reported ends by the task's timeout, and the next run starts with the txids that were left over. So a
trigger that is lost, doubled or late costs time and nothing else.

A wait ends in one of three ways. The turn opens when every earlier txid has committed; if the batch itself has too, which
process tasks see to, the task is over, otherwise a worker goes on with it and commits. It is halted when the ledger says
that an earlier batch waits for a person. And it is halted when an earlier task of the same run has failed for good without
anybody telling the ledger: a task that is killed in its last try, or marked as failed by hand, runs no code of ours. A
batch that was given up halts nobody, though its process task may have failed: the commit before it, or its own, skips it.
"""

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple

from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

from state_store import Settings, StateStore
from state_store.errors import TidegateError
from state_store.queries import UNREGISTERED, Turn

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # Airflow itself looks at a trigger once a second
LONGEST_PAUSE_SECONDS = 30.0  # while Postgres is away
# A task that ends in the triggerer makes the Dag processor parse its file, 0.12 core seconds; several that end together once.
SECONDS_BETWEEN_ENDS = 3.0
FAILED_TASKS_EVERY_SECONDS = 15.0
PROCESS, COMMIT = "batch.process", "batch.commit"  # batch_dag's


class Place(NamedTuple):
    """Where a batch stands in a run: Airflow knows run and map index, the ledger knows which txid that is."""

    pipeline: str
    run_id: str
    map_index: int


class TurnPoller:
    """Asks the ledger whose turn it is, once for everybody who waits in this process.

    If Postgres is away, it says so in the triggerer's log and asks again, less and less often.
    """

    def __init__(
        self, connect: Callable[[], StateStore], failed_tasks: Callable[[str, str], Iterable[tuple[str, int]]]
    ) -> None:
        self._connect = connect
        self._failed_tasks = failed_tasks
        self._waiting: dict[Place, set[asyncio.Future[tuple[int, Turn]]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait(self, place: Place) -> tuple[int, Turn]:
        """Return the place's txid and its turn, once that has opened or is halted."""
        answer: asyncio.Future[tuple[int, Turn]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place, set()).add(answer)
        if self._task is None:
            # A context of its own: what the poller logs is not the story of the one task that happened to start it.
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
                    turns = await asyncio.to_thread(self._turns, store, list(self._waiting), look_at_tasks, ends_in <= 0)
                    pause = POLL_SECONDS
                except (TidegateError, AirflowRuntimeError) as error:
                    turns = {}
                    pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                    logger.warning("Whose turn it is cannot be read; asking again in %.0f s: %s", pause, error)
                for place, answer in turns.items():
                    for future in self._waiting.get(place, ()):
                        if not future.done():
                            future.set_result(answer)
                ends_in = SECONDS_BETWEEN_ENDS if ends_in <= 0 else ends_in - pause
                look_at_tasks_in = FAILED_TASKS_EVERY_SECONDS if look_at_tasks else look_at_tasks_in - pause
                await asyncio.sleep(pause)
        finally:
            self._task = None  # before any await: whoever comes from here on starts the next poller
            if store:
                await asyncio.to_thread(store.close)

    def _turns(
        self, store: StateStore, places: list[Place], look_at_tasks: bool, look_at_ends: bool
    ) -> dict[Place, tuple[int, Turn]]:
        """Return the places whose waiting is over, with txid and turn. Runs in a thread.

        Those that have nothing to do any more are left for later, unless `look_at_ends`, or their whole run is over.
        """
        runs = {(place.pipeline, place.run_id) for place in places}
        txids_of = {run: store.run_txids(*run) for run in runs}
        over: dict[Place, tuple[int, Turn]] = {}
        txid_of: dict[Place, int] = {}
        for place in places:
            txids = txids_of[place.pipeline, place.run_id]
            if place.map_index < len(txids):
                txid_of[place] = txids[place.map_index]
            else:
                over[place] = 0, Turn(opens=False, halted="the ledger knows no such batch of this run")
        asked = {(place.pipeline, txid) for place, txid in txid_of.items()}
        turns = store.turns(sorted(asked | {(run[0], txids[-1]) for run, txids in txids_of.items() if txids}))
        for place, txid in txid_of.items():
            turn = turns.get((place.pipeline, txid), UNREGISTERED)
            if turn.done and not look_at_ends and not turns[place.pipeline, txids_of[place.pipeline, place.run_id][-1]].done:
                continue
            if turn.opens or turn.halted:
                over[place] = txid, turn
        if look_at_tasks:
            for run in runs:
                over |= self._behind_failed_tasks(store, run, txids_of[run], txid_of.keys() - over.keys(), txid_of)
        return over

    def _behind_failed_tasks(
        self, store: StateStore, run: tuple[str, str], txids: list[int], waiting: Iterable[Place], txid_of: dict[Place, int]
    ) -> dict[Place, tuple[int, Turn]]:
        """Return the places of one run behind a task that failed for good and whose batch has not committed since."""
        tasks = [(task, txids[index]) for task, index in self._failed_tasks(*run) if index < len(txids)]
        turns = store.turns(sorted({(run[0], txid) for _, txid in tasks}))
        committed = store.committed(run[0])
        failed = [txid for task, txid in tasks if txid > committed and not (task == PROCESS and turns[run[0], txid].given_up)]
        if not failed:
            return {}
        turn = Turn(opens=False, halted=f"a task of txid {min(failed)} has failed for good in this run")
        return {p: (txid_of[p], turn) for p in waiting if (p.pipeline, p.run_id) == run and txid_of[p] > min(failed)}

    def _pass_on_failure(self, task: asyncio.Task[None]) -> None:
        """Let everybody who waits see an error that the poller did not expect."""
        if not task.cancelled() and (error := task.exception()):
            for futures in self._waiting.values():
                for future in futures:
                    if not future.done():
                        future.set_exception(error)


def failed_tasks(pipeline: str, run_id: str) -> list[tuple[str, int]]:
    """Return which process and commit tasks have failed for good, with their map indexes, asking Airflow."""
    states = RuntimeTaskInstance.get_task_states(dag_id=pipeline, task_ids=[PROCESS, COMMIT], run_ids=[run_id])
    failed = [name.rpartition("_") for name, state in states.get(run_id, {}).items() if state == "failed"]
    return [(task, int(index)) for task, _, index in failed]


_poller = TurnPoller(lambda: StateStore.connect(Settings.load()), failed_tasks)


class TurnTrigger(BaseTrigger):  # type: ignore[misc]
    """Ends the commit task when the batch has committed or never will in this run; sends it to a worker if it has to commit.

    Airflow renders `run_id` and `map_index` in the triggerer, so both arrive as text.
    """

    def __init__(self, pipeline_name: str, run_id: str, map_index: int | str) -> None:
        super().__init__()
        self.pipeline_name = pipeline_name
        self.run_id = run_id
        self.map_index = map_index

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what another triggerer needs to go on waiting."""
        return (
            "dags.turn_trigger.TurnTrigger",
            {"pipeline_name": self.pipeline_name, "run_id": self.run_id, "map_index": self.map_index},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, then end the task here if nothing is left to be done; a worker commits, or fails with what is halted.

        To fail here would be to be tried again, and to wait for the same thing.
        """
        txid, turn = await _poller.wait(Place(self.pipeline_name, self.run_id, int(self.map_index)))
        if turn.halted:
            yield TriggerEvent(
                f"{self.pipeline_name} {txid} will not commit in this run: {turn.halted.rstrip('.')}. "
                "Mend that and trigger the Dag again: it starts with what is left over."
            )
        elif turn.done:
            self.log.info("%s %d has committed", self.pipeline_name, txid)
            yield TaskSuccessEvent()
        else:
            self.log.info("%s %d: its turn has come, a worker commits it now", self.pipeline_name, txid)
            yield TriggerEvent(None)
