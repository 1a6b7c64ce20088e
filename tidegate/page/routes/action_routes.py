"""Routes for actions: what one would do, and doing it. The words and the checks are those of the command line."""

import shlex
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from tidegate import operator_actions
from tidegate.jobs.registry import find_pipeline
from tidegate.operator_actions import Verb
from tidegate.page import access, ledger_connection
from tidegate.page.http_answers import Refusal, body_of
from tidegate.page.shared_models import LARGEST, REASON_CHARACTERS, Txid
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import DeclarationChanged, RangeRefused, UnknownBatch, UnknownPipeline, class_and_text
from tidegate.state_store.commit import quarantined_records
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, references_of
from tidegate.state_store.ledger import batches, stopped_batches
from tidegate.state_store.operate.redo_refusals import check_redoable
from tidegate.state_store.read_ledger import batch_status, registered_pipelines
from tidegate.state_store.read_ledger.batch_phases import ENDED
from tidegate.state_store.read_ledger.batch_status import BatchStatus
from tidegate.state_store.read_ledger.registered_pipelines import Progress
from tidegate.status.run_progress import ranges

router = APIRouter(prefix="/api/pipelines/{pipeline}")

NO_REFERENCES = "The page cannot do it: references have to be read for it. Type the command."
NO_REDO = "The page cannot do it: a redo needs Spark, and the role that owns the tables. Type the command."
MOST_NAMED = 1000
RUN_FOLLOWS = "A run of the Dag is started for it."


class Prospect(BaseModel):
    """What an action would do, whether it may be done now, and the same by hand."""

    will: str
    allowed: bool
    refusal: str | None
    command: str


class Wanted(BaseModel):
    """An action: on which txid, if it concerns one, and why."""

    model_config = ConfigDict(extra="forbid")

    txid: int | None = Field(None, ge=1, le=LARGEST)
    reason: str = Field(max_length=REASON_CHARACTERS)


class Outcome(BaseModel):
    """What an action has done, and whether it needs a run of the Dag to go on."""

    message: str
    txids: list[int]
    run_needed: bool


@router.get("/actions/{verb}")
def prospect(pipeline: access.Readable, verb: Verb | Literal["redo"], user: access.User, txid: Txid = None) -> Prospect:
    """Return what an action would do."""
    with ledger_connection.reader().snapshot(f"looking what {verb} of {pipeline} would do") as connection:
        found = registered_pipelines.progress_of(connection, pipeline)
        will, refusal = _Prospects(connection, found, txid).of(verb)
    if not access.is_allowed(user, access.ACT, pipeline):
        refusal = access.may_not_change(pipeline)
    return Prospect(will=will, allowed=refusal is None, refusal=refusal, command=_command(verb, pipeline, txid))


@router.post("/actions/{verb}")
def act(pipeline: access.Changeable, verb: Verb, wanted: Annotated[Wanted, body_of(Wanted)], user: access.User) -> Outcome:
    """Act, as the user, and record it with the reason."""
    owner, reason, txid = access.owner(user, verb), operator_actions.require_reason(wanted.reason), wanted.txid
    with StateStore.connect(ledger_connection.settings()) as store:
        if verb == "retry":
            done = operator_actions.retry(store, pipeline, txid, owner, reason)
        elif verb == "skip":
            if txid is None:
                raise Refusal(422, "MALFORMED_REQUEST", "Say which txid is to be skipped.")
            done, _ = operator_actions.skip(store, _registered_spec(pipeline), txid, owner, reason)
        elif verb == "pause":
            done, _, _ = operator_actions.pause(store, pipeline, owner, reason)
        elif verb == "resume":
            done, _ = operator_actions.resume(store, pipeline, owner, reason)
        else:
            done, _ = operator_actions.replay(store, _registered_spec(pipeline), txid, owner, reason)
    return Outcome(message=done.message, txids=list(done.txids), run_needed=done.run_needed)


class _Prospects:
    """What each action would do to a pipeline, or to one of its batches, and why it may not be done."""

    def __init__(self, connection: Connection, found: Progress, txid: int | None) -> None:
        self._connection = connection
        self._found = found
        self._name = found.pipeline
        self._txid = txid

    def of(self, verb: str) -> tuple[str, str | None]:
        """Return what the action does, and why it is refused, if it is."""
        try:
            return {
                "retry": self._retry,
                "skip": self._skip,
                "pause": self._pause,
                "resume": self._resume,
                "replay": self._replay,
                "redo": self._redo,
            }[verb]()
        except RangeRefused as refused:
            return "Nothing.", str(refused)

    def _retry(self) -> tuple[str, str | None]:
        if self._txid is None:
            stopped = stopped_batches.stopped(self._connection, self._name, MOST_NAMED)
            will = f"{ranges(stopped).capitalize()} of {self._name}, halted or given up, may be tried again."
            if not stopped:
                return "Nothing.", self._paused() or f"No batch of {self._name} is halted or was given up."
            return f"{will} {RUN_FOLLOWS}", self._paused()
        status = self._status()
        if status.phase in ENDED:
            return "Nothing.", f"{self._name} {status.txid} has {operator_actions.ended(status)}: nothing to retry."
        will = f"{self._name} {status.txid} may be tried again, from its saved metadata, as often as its policy says."
        return f"{will} {RUN_FOLLOWS}", self._paused()

    def _skip(self) -> tuple[str, str | None]:
        status = self._status()
        if status.phase in ENDED:
            return "Nothing.", f"{self._name} {status.txid} has {operator_actions.ended(status)}."
        operator_actions.check_failed(
            status, is_given_up=status.txid in stopped_batches.stopped(self._connection, self._name, MOST_NAMED)
        )
        is_next = status.txid == self._found.committed + 1
        when = "That happens now" if is_next else f"That happens as soon as txid {status.txid - 1} has committed"
        return f"{operator_actions.what_skipping_does(status)} {when}; then later batches go on. {RUN_FOLLOWS}", None

    def _pause(self) -> tuple[str, str | None]:
        held = operator_actions.what_a_pause_holds(*batches.in_flight(self._connection, self._name))
        story = f"no new run starts, wherever it would be started, until it is resumed. {held}"
        return f"{self._name} will be paused: {story}", self._paused()

    def _resume(self) -> tuple[str, str | None]:
        will = f"Runs of {self._name} may start again. {RUN_FOLLOWS}"
        return will, None if self._found.paused_at else f"{self._name} is not paused."

    def _replay(self) -> tuple[str, str | None]:
        records = quarantined_records.totals(self._connection, self._name, self._txid).waiting
        if not records:
            return "Nothing.", f"No record of {operator_actions.named(self._name, self._txid)} waits in quarantine."
        leave, their = ("1 record leaves", "its") if records == 1 else (f"{records} records leave", "their")
        will = (
            f"{leave} the quarantine of {operator_actions.named(self._name, self._txid)}, as a batch of {their} own after txid "
            f"{self._found.opened}. Mended records are read as mended. What is still bad goes back. {RUN_FOLLOWS}"
        )
        return will, self._paused() or (NO_REFERENCES if references_of(self._found.spec.source_identity) else None)

    def _redo(self) -> tuple[str, str | None]:
        status = self._status()
        check_redoable(self._found.spec, status.txid, self._found.committed)
        return operator_actions.what_redoing_does(status, (state.name for state in self._found.spec.states)), NO_REDO

    def _paused(self) -> str | None:
        found = self._found
        if found.paused_at is None:
            return None
        since = f"{found.paused_at:%Y-%m-%d %H:%M} UTC"
        return f"{found.pipeline} is paused since {since}, by {found.paused_by}: {found.paused_reason}"

    def _status(self) -> BatchStatus:
        if self._txid is None:
            raise Refusal(422, "MALFORMED_REQUEST", "Say which txid is meant.")
        if not (found := batch_status.batch_statuses(self._connection, self._name, [self._txid], 1)):
            raise UnknownBatch(f"{self._name} has no txid {self._txid}.")
        return found[0]


def _registered_spec(pipeline: str) -> PipelineSpec:
    """Return the pipeline's declaration in the code.

    Raises: Refusal (409) if it cannot be imported; DeclarationChanged if it is not the registered one: this process may have
    imported it before it was edited.
    """
    try:
        spec = find_pipeline(pipeline).spec
    except UnknownPipeline as error:  # whose message names all pipelines, also those that the user may not see
        raise Refusal(409, "NOT_LOADED", f"No code here declares {pipeline}. Bring its file back, then try again.") from error
    except Exception as error:
        message = f"The code of {pipeline} cannot be imported: {class_and_text(error)}"
        raise Refusal(409, "NOT_LOADED", f"{message}. Correct it, then try again.") from error
    with ledger_connection.reader().snapshot(f"reading the declaration of {pipeline}") as connection:
        if registered_pipelines.fingerprint_of(connection, pipeline) != spec.fingerprint:
            raise DeclarationChanged(
                f"The declaration of {pipeline} that the api-server has imported is not the registered one. If the code is "
                "newer than the api-server, restart that; otherwise run: tidegate migrate"
            )
    return spec


def _command(verb: str, pipeline: str, txid: int | None) -> str:
    words = ["tidegate", *(("quarantine", "replay") if verb == "replay" else (verb,)), shlex.quote(pipeline)]
    if txid is not None and verb in ("retry", "skip", "redo"):
        words.append(str(txid))
    elif txid is not None and verb == "replay":
        words += ["--txid", str(txid)]
    words += ["--reason", "..."]
    return " ".join([*words, "--yes"] if verb in ("skip", "redo") else words)
