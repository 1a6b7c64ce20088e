"""What operators do to batches and pipelines, and the words for it: one place for the command line and the page.

Each action is one method of the store, which records it with operator and reason. What is asked before it, whether it may be
done and what it will do, is a hint: the store decides under its locks.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tidegate.output import counted
from tidegate.state_store.base.errors import RangeRefused, UsageError
from tidegate.state_store.read_ledger.batch_phases import ENDED
from tidegate.status.run_progress import ranges

if TYPE_CHECKING:
    from tidegate.state_store import StateStore
    from tidegate.state_store.commit.commit_record import Commit
    from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, SourceMetadata
    from tidegate.state_store.read_ledger.batch_status import BatchStatus
    from tidegate.state_store.read_ledger.registered_pipelines import Lag

Verb = Literal["retry", "skip", "pause", "resume", "replay"]
MAY_STILL_COMMIT = ("planned", "processing", "processed")
MOST_LEFT_OVER = 1000  # txids that a message names
_BLANKS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and a symbol that show nothing: fillers of Hangul, and of Braille


@dataclass(frozen=True)
class Done:
    """What an action has done: a message, the txids that it concerns, and whether a run is needed to go on."""

    message: str
    txids: Sequence[int] = ()
    run_needed: bool = False


def require_reason(reason: str, example: str = "the server is back") -> str:
    """Return the reason without surrounding spaces.

    Raises: UsageError with the example if it has no visible character.
    """
    if all(unicodedata.category(character)[0] in "CMZ" or character in _BLANKS for character in reason):
        raise UsageError(f"Give a reason: --reason '{example}'")
    return reason.strip()


def retry(store: "StateStore", pipeline: str, txid: int | None, owner: str, reason: str) -> Done:
    """Let halted or given-up batches, or this one, be tried again. If none is, the txids are those that wait for a run.

    Raises: PipelinePaused, HoleDetected, UnknownBatch.
    """
    store.check_not_paused(pipeline)
    store.check_history(pipeline)
    if txid is not None and (status := status_of(store, pipeline, txid)).phase in ENDED:
        return Done(f"{pipeline} {txid} has {ended(status)}: nothing to retry.")
    if lifted := store.retry(pipeline, txid, owner, reason):
        return Done(f"{pipeline}: {ranges(lifted)} may be tried again.", lifted, run_needed=True)
    left_over = store.uncommitted(pipeline, limit=MOST_LEFT_OVER)
    message = f"Nothing to retry: no batch of {pipeline} is halted or was given up."
    if left_over:
        message += f" {ranges(left_over).capitalize()} {'waits' if len(left_over) == 1 else 'wait'} for a run."
    return Done(message, run_needed=bool(left_over))


def skip(store: "StateStore", spec: "PipelineSpec", txid: int, owner: str, reason: str) -> tuple[Done, "Commit | None"]:
    """Give up a failed batch; return also its commit, None if it is skipped when its turn comes.

    Raises: RangeRefused if the batch has not failed, and what `StateStore.skip_batch` raises.
    """
    done = store.skip_batch(spec, txid, owner, reason)
    if done is None:
        message = f"{spec.name} {txid} is given up: it is skipped as soon as the txids before it have committed"
    else:
        message = str(done)
    is_new = done is None or not done.already_committed
    return Done(f"{message}.", [txid] if is_new else [], run_needed=is_new), done


def pause(store: "StateStore", pipeline: str, owner: str, reason: str) -> tuple[Done, bool, "Lag"]:
    """Let no run and no batch begin; return also whether that is new, and the pipeline's state.

    Raises: SchemaOutOfDate if it is not registered.
    """
    changed = store.pause(pipeline, owner, reason)
    (now,) = store.lag([pipeline])
    if changed:
        return Done(f"{pipeline} is paused: no new run starts. {what_a_pause_holds(*store.in_flight(pipeline))}"), True, now
    if now.paused_at is None:  # by now, as another operator has resumed it
        return pause(store, pipeline, owner, reason)
    since = f"on {now.paused_at:%Y-%m-%d %H:%M} UTC by {now.paused_by}: {now.paused_reason}"
    return Done(f"{pipeline} was paused already, {since}"), False, now


def what_a_pause_holds(begun: int, not_begun: int) -> str:
    """Return what happens to the batches that were planned: so many have begun, so many have not."""
    ends = f"{counted(begun, 'batch in flight goes', 'batches in flight go')} on to the commit"
    waits = f"{counted(not_begun, 'planned batch waits', 'planned batches wait')} until it is resumed"
    told = [*([ends] if begun else []), *([waits] if not_begun else [])]
    return f"{'; '.join(told) or 'No batch is in flight'}."


def resume(store: "StateStore", pipeline: str, owner: str, reason: str) -> tuple[Done, bool]:
    """Let runs start again; return also whether that is new."""
    changed = store.resume(pipeline, owner, reason)
    return Done(f"{pipeline} goes on." if changed else f"{pipeline} was not paused.", run_needed=changed), changed


def replay(
    store: "StateStore", spec: "PipelineSpec", txid: int | None, owner: str, reason: str, beside: "SourceMetadata | None" = None
) -> tuple[Done, tuple[int, int] | None]:
    """Take up quarantined records, of one txid or all, as a batch; return also its txid and their number.

    `beside` has the versions of references, if the records are joined with such (`binding.replayed_with`).

    Raises: PipelinePaused, UnknownBatch; RangeRefused without the version of a reference.
    """
    store.check_not_paused(spec.name)
    if txid is not None:
        store.source_metadata(spec.name, txid)
    opened = store.replay_quarantined(spec, owner, reason, txid=txid, beside=beside)
    if opened is None:
        return Done(f"No record of {named(spec.name, txid)} waits in quarantine."), None
    new_txid, records = opened
    message = f"{spec.name}: {counted(records, 'record', 'records')} left quarantine, for txid {new_txid}."
    return Done(message, [new_txid], run_needed=True), opened


def what_skipping_does(status: "BatchStatus") -> str:
    """Return what happens to a failed batch that is skipped."""
    why_not = (status.waits_for or "").rstrip(".")
    return (
        f"{status.pipeline} {status.txid} is {status.phase} ({why_not}). Skipping it leaves all its rows out of the "
        "states, permanently."
    )


def what_redoing_does(status: "BatchStatus", states: Iterable[str], origin: str = "") -> str:
    """Return what happens to a committed batch that is redone; `origin` says from where."""
    return (
        f"{status.pipeline} {status.txid} has {ended(status)}, with {counted(status.key_count or 0, 'key', 'keys')}. Redoing "
        f"it takes back what it did to {', '.join(states)}, and processes it again{origin}."
    )


def check_failed(status: "BatchStatus", *, is_given_up: bool) -> None:
    """Refuse to skip a batch that may still commit, as the store does.

    Raises: RangeRefused.
    """
    if status.phase in MAY_STILL_COMMIT and not is_given_up:
        raise RangeRefused(
            f"{status.pipeline} {status.txid} has not failed, it is {status.phase}: only failed batches are skipped."
        )


def status_of(store: "StateStore", pipeline: str, txid: int) -> "BatchStatus":
    """Return a batch's status.

    Raises: UnknownBatch.
    """
    return store.batch_history(pipeline, txid).status


def ended(status: "BatchStatus") -> str:
    """Return how a batch has ended, after "has"."""
    return "been skipped" if status.phase == "skipped" else f"committed on {status.committed_at:%Y-%m-%d %H:%M} UTC"


def named(pipeline: str, txid: int | None) -> str:
    """Return the name of a pipeline, or of one of its batches."""
    return pipeline if txid is None else f"{pipeline} {txid}"
