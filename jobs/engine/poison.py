"""Outcomes of a failed batch (retry, block, quarantine, skip), by the fault of its error and the pipeline's `on_poison`.

The code follows the table OUTCOMES; ``docs/poison.md`` shows it to people, and a test compares the two. Only content can be
bad: for no other fault are rows ever left out. A permanent error of unknown fault waits for a person.
"""

from enum import Enum

from tidegate.jobs.pipeline import Pipeline, PoisonPolicy
from tidegate.state_store.base.errors import BatchRetried, Fault, PermanentError, TidegateError


class Outcome(Enum):
    """What becomes of a batch after a failure. Other batches are processed all the same, and the ledger keeps their work."""

    SKIP = "is tried again; after `tries` failures of this kind, a commit without its rows takes its place"
    HALT = "waits for a person, at once"
    RETRY = "is tried again, `tries` times in one run; then it waits for a person, or for the next run"
    AWAIT = "waits until the server answers, for some minutes; then as after the last try"
    GO_ON = "goes on, without any decision"


_HALT_ALWAYS: dict[PoisonPolicy, Outcome] = {"block": Outcome.HALT, "quarantine": Outcome.HALT, "skip": Outcome.HALT}
OUTCOMES: dict[Fault, dict[PoisonPolicy, Outcome]] = {
    # Under "quarantine", records that a source or a check refuses raise no error: they are set aside.
    Fault.CONTENT: {"block": Outcome.HALT, "quarantine": Outcome.HALT, "skip": Outcome.SKIP},
    Fault.PIPELINE: _HALT_ALWAYS,
    Fault.SOURCE: _HALT_ALWAYS,
    Fault.LEDGER: _HALT_ALWAYS,
    Fault.SERVER: dict.fromkeys(_HALT_ALWAYS, Outcome.AWAIT),
    Fault.COMPUTATION: dict.fromkeys(_HALT_ALWAYS, Outcome.RETRY),
    Fault.ORDER: dict.fromkeys(_HALT_ALWAYS, Outcome.GO_ON),
    Fault.UNKNOWN: dict.fromkeys(_HALT_ALWAYS, Outcome.RETRY),
}


def fault_of(error: BaseException) -> Fault:
    """Return the fault of an error; UNKNOWN if it is not one of ours."""
    return error.fault if isinstance(error, TidegateError) else Fault.UNKNOWN


def outcome_of(error: BaseException, pipeline: Pipeline) -> Outcome:
    """Return what becomes of a batch of the pipeline that failed with this error."""
    fault = fault_of(error)
    if fault is Fault.UNKNOWN and isinstance(error, PermanentError):
        return Outcome.HALT
    return OUTCOMES[fault][pipeline.on_poison]


def pause_after(error: BaseException, pipeline: Pipeline, failures: int) -> int | None:
    """Return the seconds until a step that has failed so often in a run is tried again; None if it is not.

    BatchRetried is always tried again: the ledger counts these tries, and after the last one the batch is given up instead.
    """
    if isinstance(error, PermanentError):
        return None
    return pipeline.retry.pause_after(min(failures, pipeline.tries - 1) if isinstance(error, BatchRetried) else failures)
