"""Which process tasks get a worker: as many of a run as it has concurrency, while batches are left that no task has begun.

The first tasks of a run get theirs from the scheduler (`tidegate.airflow_policy`), the others start in the triggerer. A task in
a worker goes on with further batches of its run, so most of the others find their batch sealed, and end without the start of a
process. A task gets a worker if its batch has not begun, or if its attempt failed or fell silent, and fewer tasks of the run
have workers than the run may have.

Nothing here decides anything: with too many workers, tasks wait or find their work done; with too few, for a moment, the run
takes longer.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from tidegate.dags.waiting_tasks import Answer, Place
from tidegate.state_store import StateStore
from tidegate.state_store.turns.batch_turns import UNREGISTERED, Turn

SECONDS_BETWEEN_LOOKS = 2.0
# Airflow takes this long, at most, to show that a task which was sent to a worker is on its way.
SECONDS_ON_THE_WAY = 10.0
WITH_WORKER = ("scheduled", "queued", "running", "restarting")
PROCESSED = Turn(opens=False, done=True)

# The states of a run's process tasks, by the index of their batch in the run.
ProcessTasks = Callable[[str, str], Mapping[int, str]]


class Dispatcher:
    """Ends the waits of process tasks: with a worker for the batch, or without one if the batch needs no processing."""

    def __init__(self, process_tasks: ProcessTasks) -> None:
        self._process_tasks = process_tasks
        self._next_look = 0.0
        self._sent: dict[tuple[str, str], dict[int, float]] = {}

    def is_due(self) -> bool:
        """Return whether it is time to look again, and note that."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + SECONDS_BETWEEN_LOOKS
        return True

    def answers(
        self, store: StateStore, waiting: Mapping[Place, int], turns: Mapping[tuple[str, int], Turn], *, look_at_ends: bool
    ) -> dict[Place, Answer]:
        """Return the waits for processing that are over. Each place is given with its txid, each txid has its turn.

        Batches that another task has processed are left for later, unless `look_at_ends`, or the run has no others left.
        """
        over: dict[Place, Answer] = {}
        runs: dict[tuple[str, str], list[Place]] = {}
        for place in waiting:
            runs.setdefault((place.pipeline, place.run_id), []).append(place)
        self._sent = {run: sent for run, sent in self._sent.items() if run in runs}
        known = store.processing([(place.pipeline, txid) for place, txid in waiting.items()])
        for run, places in runs.items():
            left: list[Place] = []
            ended: dict[Place, Answer] = {}
            for place in sorted(places, key=lambda each: each.map_index):
                txid = waiting[place]
                batch, turn = known.get((place.pipeline, txid)), turns.get((place.pipeline, txid), UNREGISTERED)
                if batch is None or (turn.halted and not turn.begins):
                    over[place] = Answer(txid, turn)
                elif batch.is_over:
                    ended[place] = Answer(txid, PROCESSED)
                elif turn.begins and not batch.is_in_work:
                    left.append(place)
            if look_at_ends or len(ended) == len(places):
                over |= ended
            over |= {place: Answer(waiting[place], Turn(opens=True)) for place in self._sent_to_workers(run, left)}
        return over

    def _sent_to_workers(self, run: tuple[str, str], left: Sequence[Place]) -> Sequence[Place]:
        """Return the first of these places, as many as the run may still have workers for."""
        if not left:
            return []
        now = time.monotonic()
        sent = {index: at for index, at in self._sent.get(run, {}).items() if at > now - SECONDS_ON_THE_WAY}
        busy = {index for index, state in self._process_tasks(*run).items() if state in WITH_WORKER} | sent.keys()
        chosen = left[: max(left[0].concurrency - len(busy), 0)]
        self._sent[run] = sent | dict.fromkeys((place.map_index for place in chosen), now)
        return chosen
