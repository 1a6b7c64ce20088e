"""Begin an attempt at a batch: decide whether it is needed, choose its input, and fence older ones (I4 in docs/protocol.md).

An attempt begins unless the batch has committed, its newest attempt is sealed, it was given up, it has not begun while its
pipeline is paused, or the pipeline's window is full: too many batches are in flight. The input is the metadata of what to
read. A transactional source keeps the planned input. Any other source plans the batch again for every attempt but the first,
and whenever the previous batch has another input than the one that this batch continues. A txid is a batch's number.
"""

import hashlib
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.attempt import turns
from tidegate.state_store.commit import commit_facts, ordered_commit, verdicts
from tidegate.state_store.commit.ordered_commit import Commit
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, SourceMetadata
from tidegate.state_store.ledger import batches, cursors, tables
from tidegate.state_store.ledger.batches import BatchInput, decode_metadata, encode_metadata
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.operate.redo_refusals import check_not_read, check_redoable
from tidegate.state_store.seal import attempts, staging_tables
from tidegate.state_store.seal.attempts import FENCED, AirflowTry, Attempt, AttemptRow, LockedBatch

BATCHES_LOOKED_BACK = 10
# resume: unless the newest attempt is sealed; take over: so, too, though another process is at work; first: only if there is no
# attempt yet; restage: also if the newest attempt is sealed, because its staging is lost; redo: the last committed batch again.
Mode = Literal["resume", "take over", "first", "restage", "redo"]


@dataclass(frozen=True)
class NewInput:
    """The input of a batch that was planned again: its metadata, and the digest of the input that it continues."""

    metadata: bytes
    continues: bytes | None


@dataclass(frozen=True)
class ReplanNeeded:
    """What a source needs to plan a batch again: the metadata of the batch before, its own, and the digest to continue."""

    previous: SourceMetadata | None
    current: SourceMetadata
    continues: bytes | None


class NotStarted(Enum):
    """Why an uncommitted batch gets no attempt."""

    SEALED = "processed already"
    BEGUN = "begun by another task"
    GIVEN_UP = "given up: it is skipped in its turn"
    IN_WORK = "in work by another process"
    AHEAD = "not begun: the window is full until earlier txids commit"
    PAUSED = "not begun: the pipeline is paused"


@dataclass(frozen=True)
class Request:
    """A request for an attempt: of which batch, by whom, on which condition, and with which input."""

    txid: int
    owner: str
    mode: Mode
    airflow: AirflowTry | None
    new_input: NewInput | None


@dataclass(frozen=True)
class _Facts:
    """What the ledger says of a batch, whose row is locked, and the input of the batch before it."""

    spec: PipelineSpec
    batch: LockedBatch
    previous: BatchInput | None
    planned: BatchInput
    newest: AttemptRow | None

    @property
    def previous_digest(self) -> bytes | None:
        """The digest of the input that this batch has to continue."""
        return self.previous.digest if self.previous else None

    @property
    def keeps_input(self) -> bool:
        """Whether the planned input is still the one to read."""
        return self.spec.source_kind == "transactional" or self.planned.continues == self.previous_digest

    @property
    def is_sealed(self) -> bool:
        """Whether the newest attempt is sealed by this declaration and continues the previous batch."""
        if self.newest is None or self.newest.sealed_at is None:
            return False
        return self.newest.fingerprint == self.spec.fingerprint and self.planned.continues == self.previous_digest


def start_attempt(
    connection: Connection, spec: PipelineSpec, request: Request, witness: Witness
) -> Attempt | Commit | ReplanNeeded | NotStarted:
    """Begin an attempt, or return why not: the batch's commit, what its source needs to plan it again, or a reason.

    Raises: UnknownBatch, MetadataCorrupt, HoleDetected, SchemaOutOfDate, DeclarationChanged; RangeRefused in mode "redo".
    """
    txid = request.txid
    batch = attempts.lock_batch(connection, spec.name, txid)
    if request.mode == "redo":
        check_redoable(spec, txid, cursors.committed(connection, spec.name))
        check_not_read(connection, spec, txid)
    elif done := ordered_commit.find(connection, spec.name, txid):
        return done
    cursors.check_history(connection, spec.name, witness)
    verdicts.check_declaration(spec, commit_facts.read_registered(connection, spec.name))
    previous = batches.input_of(connection, spec.name, txid - 1)
    planned = batches.existing_input(connection, spec.name, txid)
    facts = _Facts(spec, batch, previous, planned, attempts.newest(connection, batch))
    if request.mode != "redo" and (reason := _reason_against(connection, facts, request.mode)):
        return reason
    if _must_replan(facts, request.new_input):
        return ReplanNeeded(previous.metadata if previous else None, planned.metadata, facts.previous_digest)
    if spec.awaits_previous and previous is not None:
        attempts.lock_batch(connection, spec.name, previous.txid)  # waits for a redo of it, and lets no other begin
    attempt = _take_fence(connection, facts, request)
    staging_tables.create(connection, spec, txid, attempt.number)
    return attempt


def _reason_against(connection: Connection, facts: _Facts, mode: Mode) -> NotStarted | None:
    # A decision to give up concerns the batch with this input: with another input, it is tried again.
    if facts.batch.skip_reason is not None and facts.keeps_input:
        return NotStarted.GIVEN_UP
    if mode != "restage" and facts.is_sealed:
        return NotStarted.SEALED
    if mode == "first" and facts.newest is not None:
        return NotStarted.BEGUN
    if facts.newest is not None and mode != "take over" and turns.is_in_work(connection, facts.spec.name, facts.batch.txid):
        return NotStarted.IN_WORK
    if facts.newest is None and _is_held(connection, facts.batch):
        return NotStarted.PAUSED
    return None if batches.has_room(connection, facts.spec, facts.batch.txid) else NotStarted.AHEAD


def _is_held(connection: Connection, batch: LockedBatch) -> bool:
    txid, pipeline = sa.literal(batch.txid, sa.BigInteger), sa.literal(batch.pipeline, sa.Text)
    return bool(connection.scalar(sa.select(batches.is_held(txid, pipeline))))


def _must_replan(facts: _Facts, new_input: NewInput | None) -> bool:
    if new_input is not None:
        return new_input.continues != facts.previous_digest  # the previous batch has got a new input since
    # A rebuild has the batches that have committed, and never plans others.
    is_planned_again = facts.spec.source_kind != "transactional" and facts.spec.rebuilds is None
    return not facts.keeps_input or (is_planned_again and facts.newest is not None)


def _take_fence(connection: Connection, facts: _Facts, request: Request) -> Attempt:
    """Record a new attempt at a locked batch as its newest; lift a halt, or a decision to skip.

    Older attempts that have not ended are recorded as failed, and returned as `fenced`.
    """
    spec, batch, airflow = facts.spec, facts.batch, request.airflow
    number = batch.attempt + 1
    chosen = facts.planned if request.new_input is None else _planned_again(spec.name, facts.planned, request.new_input)
    a, b = tables.attempt.c, tables.batch.c
    fenced = connection.scalars(
        sa.update(tables.attempt)
        .where(a.pipeline == spec.name, a.txid == batch.txid, a.sealed_at.is_(None), a.failed_at.is_(None))
        .values(failed_at=sa.func.now(), error=f"{FENCED}: attempt {number} took over.", is_poison=False)
        .returning(a.attempt)
    ).all()
    connection.execute(
        sa.update(tables.batch)
        .where(b.pipeline == spec.name, b.txid == batch.txid)
        .values(attempt=number, halted_at=None, halted_reason=None, skip_owner=None, skip_reason=None)
    )
    # The attempt keeps its own copy only if it differs from the planned metadata, which may be large.
    is_first_plan = chosen.digest == bytes(batch.source_digest)
    connection.execute(
        insert(tables.attempt).values(
            pipeline=spec.name,
            txid=batch.txid,
            attempt=number,
            owner=request.owner,
            seen_at=sa.func.now(),
            session=attempts.OWN_SESSION,
            airflow_run_id=airflow and airflow.run_id,
            airflow_task_id=airflow and airflow.task_id,
            airflow_try=airflow and airflow.number,
            fingerprint=spec.fingerprint,
            source_metadata=None if is_first_plan else encode_metadata(chosen.metadata),
            source_digest=chosen.digest,
            previous_digest=chosen.continues,
        )
    )
    rows_before = _rows_before(connection, spec.name, batch.txid)
    return Attempt(spec.name, batch.txid, number, chosen.metadata, tuple(fenced), rows_before, batch.history)


def _planned_again(pipeline: str, planned: BatchInput, new: NewInput) -> BatchInput:
    digest = hashlib.sha256(new.metadata).digest()
    metadata = decode_metadata(pipeline, planned.txid, new.metadata, digest)
    return replace(planned, metadata=metadata, digest=digest, continues=new.continues)


def _rows_before(connection: Connection, pipeline: str, txid: int) -> dict[str, int]:
    """Return for each state the most rows that one attempt at this batch, or at a few before it, has sealed."""
    s = tables.seal.c
    rows = sa.func.sum(s.rows).label("rows")
    recent = (s.pipeline == pipeline, s.txid.between(txid - BATCHES_LOOKED_BACK, txid))
    each = sa.select(s.state, rows).where(*recent).group_by(s.state, s.txid, s.attempt).subquery()
    most = sa.select(each.c.state, sa.func.max(each.c.rows)).group_by(each.c.state)
    return {state: int(most_rows) for state, most_rows in connection.execute(most)}
