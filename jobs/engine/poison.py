"""What becomes of a batch that fails: the fault of its error, times the pipeline's policy.

This table is what the code goes by; ``docs/poison.md`` shows it to people, and a test holds the two together. Only content can
be bad: nothing else ever decides that rows are left out, and whatever is not known to be content waits for a person.
"""

from enum import Enum

from jobs.pipeline import Pipeline, PoisonPolicy
from state_store.errors import Fault, PermanentError, TidegateError


class Outcome(Enum):
    """What follows from a failure. The ledger keeps the work of all other batches, and all of them are processed."""

    SKIP = "is tried again; after `tries` failures of this kind, a commit without its rows takes its place"
    HALT = "waits for a person, at once"
    RETRY = "is tried again, `tries` times in one run; then it waits for a person, or for the next run"
    AWAIT = "waits until the server answers, for some minutes; then as after the last try"
    GO_ON = "goes on, without any decision"


_HALT_ALWAYS: dict[PoisonPolicy, Outcome] = {"block": Outcome.HALT, "quarantine": Outcome.HALT, "skip": Outcome.HALT}
OUTCOMES: dict[Fault, dict[PoisonPolicy, Outcome]] = {
    # The records that a source or a check refuses raise nothing under "quarantine": they are set aside before.
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
    """Return where the reason of a failure lies; of an error that is not ours nothing is known."""
    return error.fault if isinstance(error, TidegateError) else Fault.UNKNOWN


def outcome_of(error: BaseException, pipeline: Pipeline) -> Outcome:
    """Return what becomes of a batch of the pipeline that failed with this error."""
    fault = fault_of(error)
    if fault is Fault.UNKNOWN and isinstance(error, PermanentError):
        return Outcome.HALT
    return OUTCOMES[fault][pipeline.on_poison]
