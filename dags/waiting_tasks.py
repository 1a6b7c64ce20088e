"""What waits in the triggerer, for what, and the answer that ends the wait, also after a killed task."""

from typing import Literal, NamedTuple, TypedDict

from tidegate.state_store.read_ledger.trace_times import AttemptTimes
from tidegate.state_store.turns.batch_turns import Turn

# process: a worker, or the end of the processing by another task. begin: room in the window. commit: the turn to commit.
Awaited = Literal["process", "begin", "commit"]


class Place(NamedTuple):
    """A waiting task: its pipeline, its run, the index of its batch in the run, what it awaits, and whether it is traced.

    `concurrency` is how many batches of the run may be processed at once, for waits for a worker.
    """

    pipeline: str
    run_id: str
    map_index: int
    awaited: Awaited = "commit"
    concurrency: int = 1
    is_traced: bool = False


class Answer(NamedTuple):
    """The end of a wait: the batch's txid (0 if the ledger knows none), its turn, and what to record if it is traced.

    `waits_for` is the txid whose commit would end the halt, if the ledger does not say why the turn is halted.
    """

    txid: int
    turn: Turn
    attempts: tuple[AttemptTimes, ...] = ()
    waits_for: int | None = None


class Halt(TypedDict):
    """Why a wait has ended without its turn, for people, and `Answer.waits_for`: what the trigger passes on to the task."""

    reason: str
    waits_for: int | None
