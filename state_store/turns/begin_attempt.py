"""Begin an attempt at a batch: decide whether it is needed, choose its input, and fence older ones (I4 in docs/protocol.md).

The input is the metadata of what to read. A transactional source keeps the planned input. Any other source plans the batch
again for every attempt but the first, and whenever the previous batch has another input than the one that this continues.
"""

import hashlib
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.attempt import attempts, staging_tables
from tidegate.state_store.attempt.attempts import FENCED, AirflowTry, Attempt, LockedBatch
from tidegate.state_store.commit import commit_facts, commit_record, verdicts
from tidegate.state_store.commit.commit_facts import BatchFacts, CommitFacts
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, SourceMetadata
from tidegate.state_store.ledger import tables
from tidegate.state_store.ledger.batches import BatchInput, decode_metadata, encode_metadata
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.ledger.cursors import check_not_retired
from tidegate.state_store.operate.redo_refusals import check_has_records, check_not_read, check_redoable
from tidegate.state_store.turns import batch_turns

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


def start_attempt(
    connection: Connection, spec: PipelineSpec, request: Request, witness: Witness
) -> Attempt | Commit | ReplanNeeded | NotStarted:
    """Begin an attempt, or return why not: the batch's commit, what its source needs to plan it again, or a reason.

    Raises: UnknownBatch, MetadataCorrupt, HoleDetected, SchemaOutOfDate, DeclarationChanged; RangeRefused in mode "redo".
    """
    txid = request.txid
    if spec.awaits_previous:  # waits for a redo of it, and lets no other begin; first, as all lock batches in their order
        attempts.lock_known(connection, spec.name, txid - 1)
    batch = attempts.lock_batch(connection, spec.name, txid)
    facts = commit_facts.read(connection, spec.name, batch.history, witness, [txid - 1, txid])
    if request.mode == "redo":
        check_redoable(spec, txid, facts.cursor.txid)
        check_not_read(connection, spec, txid)
        check_has_records(connection, spec.name, facts.batches[txid].input)
    elif facts.batches[txid].is_committed:
        return commit_record.already_committed(connection, spec.name, txid, facts.cursor.txid)
    chosen = decide(spec, request, facts)
    if not isinstance(chosen, BatchInput):
        return chosen
    attempt = _take_fence(connection, spec, batch, request, chosen)
    staging_tables.create(connection, spec, txid, attempt.number)
    return attempt


def decide(spec: PipelineSpec, request: Request, facts: CommitFacts) -> BatchInput | ReplanNeeded | NotStarted:
    """Return the input that an attempt at a batch reads, or why it does not start.

    Raises: PipelineRetired, DeclarationChanged, HoleDetected, GuardMismatch, MetadataCorrupt.
    """
    check_not_retired(spec.name, facts.retired)
    verdicts.check_declaration(spec, facts.registered)
    batch, before = facts.batches[request.txid], facts.batches.get(request.txid - 1)
    previous, planned = before.input if before else None, batch.input  # both have to fit their digests
    if request.mode != "redo" and (reason := _reason_against(spec, request.mode, facts, batch, previous)):
        return reason
    if _must_replan(spec, request.new_input, batch, previous):
        return ReplanNeeded(previous.metadata if previous else None, planned.metadata, previous.digest if previous else None)
    return planned if request.new_input is None else _planned_again(spec.name, planned, request.new_input)


def _reason_against(
    spec: PipelineSpec, mode: Mode, facts: CommitFacts, batch: BatchFacts, previous: BatchInput | None
) -> NotStarted | None:
    # A decision to give up concerns the batch with this input: with another input, it is tried again.
    if batch.locked.skip_reason is not None and _keeps_input(spec, batch, previous):
        return NotStarted.GIVEN_UP
    if (newest := batch.newest) is not None:
        if mode != "restage" and newest.is_sealed_by(spec.fingerprint) and batch.continues(previous):
            return NotStarted.SEALED
        if mode == "first":
            return NotStarted.BEGUN
        if mode != "take over" and newest.is_at_work_elsewhere:
            return NotStarted.IN_WORK
    if batch_turns.is_held(batch.locked.attempt, facts.registered.paused_at):
        return NotStarted.PAUSED
    return None if _has_room(spec, facts, batch.locked.txid) else NotStarted.AHEAD


def _has_room(spec: PipelineSpec, facts: CommitFacts, txid: int) -> bool:
    """Return whether the window has room; a batch that reads states as of the previous txid follows its commit (I21)."""
    return batch_turns.has_room(txid, facts.cursor.txid, 1 if spec.awaits_previous else facts.registered.window)


def _keeps_input(spec: PipelineSpec, batch: BatchFacts, previous: BatchInput | None) -> bool:
    return spec.source_kind == "transactional" or batch.continues(previous)


def _must_replan(spec: PipelineSpec, new: NewInput | None, batch: BatchFacts, previous: BatchInput | None) -> bool:
    if new is not None:
        return new.continues != (previous.digest if previous else None)  # the previous batch has got a new input since
    # A rebuild has the batches that have committed, and never plans others.
    is_planned_again = spec.source_kind != "transactional" and spec.rebuilds is None
    return not _keeps_input(spec, batch, previous) or (is_planned_again and batch.newest is not None)


def _take_fence(
    connection: Connection, spec: PipelineSpec, batch: LockedBatch, request: Request, chosen: BatchInput
) -> Attempt:
    """Record a new attempt at a locked batch as its newest; lift a halt, or a decision to skip.

    Older attempts that have not ended are recorded as failed, and returned as `fenced`.
    """
    airflow, number = request.airflow, batch.attempt + 1
    a, b = tables.attempt.c, tables.batch.c
    fenced = connection.scalars(
        sa.update(tables.attempt)
        .where(a.pipeline == spec.name, a.txid == batch.txid, attempts.is_open(tables.attempt))
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
