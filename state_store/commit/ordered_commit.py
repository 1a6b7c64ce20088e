"""The ordered commit in one transaction: lock the cursor, check, merge, advance.

A txid is a batch's number; the cursor is a pipeline's row with its last committed txid. An attempt is a try at a batch, sealed
once its staged rows are complete. Numbers such as I3 are rules of docs/protocol.md.

No function here opens or ends a transaction: their callers in `StateStore` do. If the process dies at any statement, Postgres
rolls all of them back; if it dies after COMMIT was sent, the cursor's row shows the outcome (I10).
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.base.errors import (
    AttemptNotSealed,
    CommitOutOfOrder,
    DeclarationChanged,
    GuardMismatch,
    HoleDetected,
    MetadataCorrupt,
    StagingLost,
)
from tidegate.state_store.commit import merge_into_states, quarantined_records
from tidegate.state_store.commit.merge_into_states import NOTHING, Merged
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.ledger import counted_files, tables
from tidegate.state_store.ledger.batches import QUARANTINED, BatchInput, existing_input
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.ledger.cursors import Cursor, check_in_service, lock_cursor
from tidegate.state_store.seal import attempts
from tidegate.state_store.seal.attempts import LockedBatch
from tidegate.state_store.states import table_identity

# The most batches that one transaction merges: enough for most of the gain in speed, few enough to repeat if it fails.
MAX_BATCHES_TOGETHER = 100
MAX_ROWS_TOGETHER = 10_000_000  # staged rows of several batches in one transaction; a batch alone may have more


@dataclass(frozen=True)
class Commit:
    """A committed txid: its attempt, the number of state rows written, whether it had committed before the call.

    A batch that was given up is skipped: its commit has no rows, but a reason.
    """

    pipeline: str
    txid: int
    attempt: int
    key_count: int
    committed_at: datetime
    skipped_reason: str | None
    already_committed: bool

    def __str__(self) -> str:
        outcome = "committed" if self.skipped_reason is None else "skipped"
        outcome = f"already {outcome}" if self.already_committed else outcome
        return f"{self.pipeline} {self.txid}:{self.attempt} {outcome}, {self.key_count} key{'' if self.key_count == 1 else 's'}"


def find(connection: Connection, pipeline: str, txid: int) -> Commit | None:
    """Return the commit of a txid, if it has committed."""
    c = tables.commit.c
    row = connection.execute(
        sa.select(c.pipeline, c.txid, c.attempt, c.key_count, c.committed_at, c.skipped_reason).where(
            c.pipeline == pipeline, c.txid == txid
        )
    ).one_or_none()
    return Commit(*row, already_committed=True) if row else None


def commit_batch(
    connection: Connection, spec: PipelineSpec, txid: int, owner: str, attempt_timeout_seconds: int, witness: Witness
) -> Commit:
    """Commit a batch under the cursor's lock, or skip it if it was given up. A batch commits once: then its commit is returned.

    Runs in the caller's transaction, which must roll back after any error: then nothing of the batch is visible. The numbers
    are those of the rules in docs/protocol.md.

    Raises: CommitOutOfOrder before its turn; AttemptNotSealed, StagingLost if it must be processed first, or again;
    SourceChanged, MetadataCorrupt, UnknownBatch by its metadata; DeclarationChanged, DeclarationInvalid by its code;
    CheckFailed by an author's check; GuardMismatch if a row was not merged; what `lock_cursor` raises; the driver's errors.
    """
    cursor = lock_cursor(connection, spec.name, witness, may_be_retired=True)  # of this database, not an older copy (I9)
    if txid <= cursor.txid:
        return already_committed(connection, spec.name, txid, cursor.txid)  # I8
    check_in_service(connection, spec.name)
    check_no_hole(connection, spec.name, cursor.txid)
    if txid != cursor.txid + 1:  # I3
        raise CommitOutOfOrder(
            f"{spec.name} cannot commit txid {txid}: {cursor.txid} is the last committed. "
            f"It is retried until {txid - 1} commits; see: tidegate inspect {spec.name}",
            pipeline=spec.name,
            txid=txid,
        )
    batch = attempts.lock_batch(connection, spec.name, txid)
    if batch.skip_reason is not None:
        assert batch.skip_owner is not None, "the table holds both or none"
        return commit_skip(connection, spec, cursor, batch, batch.skip_owner, batch.skip_reason)
    batch_input = existing_input(connection, spec.name, txid)  # as it was frozen (I6)
    check_sealed(connection, spec, batch, attempt_timeout_seconds)  # the newest attempt (I4)
    check_continues(spec, batch_input, cursor)  # after its predecessor's input (I12)
    check_declaration(connection, spec)  # I16
    counted_files.write(connection, spec, [batch_input])  # refuses a file that has counted
    # All rows that were sealed (I7), and each of them (I14).
    (merged,) = merge_into_states.merge_all(connection, spec, [batch])
    return record(connection, batch, batch_input, owner, merged=merged)


def commit_skip(
    connection: Connection, spec: PipelineSpec, cursor: Cursor, batch: LockedBatch, owner: str, reason: str
) -> Commit:
    """Commit the next batch without rows, as it was given up.

    Raises: as `check_continues`: a skip consumes rows too, so it must leave no gap before them.
    """
    batch_input = existing_input(connection, spec.name, batch.txid)
    check_continues(spec, batch_input, cursor)
    counted_files.write(connection, spec, [batch_input])
    return record(connection, batch, batch_input, owner, skipped_reason=reason)


def commit_ready(
    connection: Connection, spec: PipelineSpec, owner: str, witness: Witness, *, max_batches: int, wait: bool
) -> list[Commit]:
    """Commit the ready batches that directly follow the cursor, in order, as if each were committed alone.

    A sealed batch is ready if it passes the checks of `commit_batch` and is neither halted nor given up; the first that is not
    ends the sequence. A batch of more than MAX_ROWS_TOGETHER rows, or of a pipeline that `commits_alone`, is merged by itself.

    Raises: as `commit_batch`; committing one by one then shows which batch is at fault.
    """
    cursor = lock_cursor(connection, spec.name, witness, wait=wait)
    check_no_hole(connection, spec.name, cursor.txid)
    check_declaration(connection, spec)
    if spec.commits_alone:
        max_batches = 1
    ready = _ready(connection, spec, cursor, max_batches)
    if not ready:
        return []
    counted_files.write(connection, spec, [batch_input for _, batch_input in ready])
    merged = merge_into_states.merge_all(connection, spec, [batch for batch, _ in ready])
    return [
        record(connection, batch, batch_input, owner, merged=of_batch)
        for (batch, batch_input), of_batch in zip(ready, merged, strict=True)
    ]


def _ready(
    connection: Connection, spec: PipelineSpec, cursor: Cursor, max_batches: int
) -> list[tuple[LockedBatch, BatchInput]]:
    """Lock and return the ready batches that may commit together, each with its current metadata."""
    ready: list[tuple[LockedBatch, BatchInput]] = []
    continued = None if cursor.source_digest is None else bytes(cursor.source_digest)
    rows = 0
    while len(ready) < max_batches:
        batch = attempts.lock_sealed(connection, spec.name, cursor.txid + len(ready) + 1)
        if batch is None:
            return ready
        try:
            batch_input = existing_input(connection, spec.name, batch.txid)
            check_sealed(connection, spec, batch, attempt_timeout_seconds=0)
        except StagingLost:
            return ready
        rows += attempts.sealed_rows(connection, spec.name, batch.txid, batch.attempt)
        if (
            batch.skip_reason is not None
            or batch.halted_at is not None
            or batch_input.continues != continued
            or (ready and rows > MAX_ROWS_TOGETHER)
        ):
            return ready
        ready.append((batch, batch_input))
        continued = batch_input.digest
    return ready


def record(
    connection: Connection,
    batch: LockedBatch,
    batch_input: BatchInput,
    owner: str,
    *,
    merged: Merged = NOTHING,
    skipped_reason: str | None = None,
) -> Commit:
    """Record the commit and advance the locked cursor.

    Raises: GuardMismatch if the cursor is not at the txid before.
    """
    pipeline, txid = batch.pipeline, batch.txid
    if skipped_reason is not None and QUARANTINED in batch_input.metadata:
        quarantined_records.put_back(connection, pipeline, txid)
    committed_at = connection.scalar(
        insert(tables.commit)
        .values(
            pipeline=pipeline,
            txid=txid,
            attempt=batch.attempt,
            source_digest=batch_input.digest,
            owner=owner,
            key_count=merged.keys,
            quarantined_rows=merged.quarantined_rows,
            skipped_reason=skipped_reason,
        )
        .returning(tables.commit.c.committed_at)
    )
    c = tables.cursor.c
    advanced = connection.execute(
        sa.update(tables.cursor)
        .where(c.pipeline == pipeline, c.txid == txid - 1)
        .values(txid=txid, attempt=batch.attempt, source_digest=batch_input.digest)
    )
    if advanced.rowcount != 1:
        raise GuardMismatch(f"{pipeline}: the cursor left txid {txid - 1} while it was locked.", pipeline=pipeline, txid=txid)
    assert committed_at is not None
    return Commit(pipeline, txid, batch.attempt, merged.keys, committed_at, skipped_reason, already_committed=False)


def already_committed(connection: Connection, pipeline: str, txid: int, cursor_txid: int) -> Commit:
    """Return the commit of a txid that the cursor has passed.

    Raises: HoleDetected if there is none.
    """
    done = find(connection, pipeline, txid)
    if done is None:
        raise HoleDetected(
            f"{pipeline}: the cursor is at txid {cursor_txid}, but txid {txid} has no commit record. Restore tidegate.commit.",
            pipeline=pipeline,
            txid=txid,
        )
    return done


def check_no_hole(connection: Connection, pipeline: str, cursor_txid: int) -> None:
    """Refuse a cursor that is not at the last txid in the table of commits.

    Raises: HoleDetected.
    """
    c = tables.commit.c
    last = connection.scalar(sa.select(sa.func.coalesce(sa.func.max(c.txid), 0)).where(c.pipeline == pipeline))
    if last != cursor_txid:
        raise HoleDetected(
            f"{pipeline}: the cursor is at txid {cursor_txid}, but the ledger committed {last}. Nothing is skipped or repeated "
            "until a person has restored one of the two.",
            pipeline=pipeline,
            txid=cursor_txid,
        )


def check_sealed(connection: Connection, spec: PipelineSpec, batch: LockedBatch, attempt_timeout_seconds: int) -> None:
    """Refuse a locked batch whose newest attempt is not sealed by this declaration of the pipeline.

    Raises: AttemptNotSealed while it is processed; StagingLost if it has to be processed again.
    """
    attempt = attempts.newest(connection, batch)
    name = str(batch)
    identity: dict[str, Any] = {"pipeline": spec.name, "txid": batch.txid, "attempt": batch.attempt}
    if attempt is None:
        raise StagingLost(f"{spec.name} {batch.txid} has not been processed yet. It is processed now.", **identity)
    if attempt.failed_at is not None:
        raise StagingLost(f"{name} failed: {attempt.error} It is processed again.", **identity)
    if attempt.sealed_at is None:
        if (silence := attempt.silent_seconds) >= attempts.LONGEST_SILENCE_SECONDS:
            raise StagingLost(
                f"{name} has not been heard of for {silence:.0f} s: its process ({attempt.owner}) died or is suspended. It is "
                "processed again.",
                **identity,
            )
        if attempt.age_seconds >= attempt_timeout_seconds:
            raise StagingLost(f"{name} has not ended within {attempt_timeout_seconds} s. It is processed again.", **identity)
        raise AttemptNotSealed(
            f"{name} is still processing ({attempt.owner}, for {attempt.age_seconds:.0f} s). The commit is retried.", **identity
        )
    if attempt.fingerprint != spec.fingerprint:
        raise StagingLost(f"{name} was computed by another declaration of the pipeline. It is processed again.", **identity)
    if attempt.quarantined_rows and not spec.quarantines:
        raise StagingLost(f"{name} set bad records aside; the pipeline no longer does so. It is processed again.", **identity)


def check_declaration(connection: Connection, spec: PipelineSpec) -> None:
    """Refuse a declaration that is not the registered one (I16), other tables than the pipeline owns, or others of their names.

    Raises: DeclarationChanged; HoleDetected, GuardMismatch as `table_identity.check`.
    """
    p, s = tables.pipeline.c, tables.state_table.c
    registered = connection.scalar(sa.select(p.fingerprint).where(p.pipeline == spec.name))
    if registered != spec.fingerprint:
        raise DeclarationChanged(
            f"{spec.name}: this code's declaration is not the registered one. Run: tidegate migrate", pipeline=spec.name
        )
    owned = set(connection.scalars(sa.select(s.state).where(s.pipeline == spec.name)))
    if owned != set(spec.tables):
        raise DeclarationChanged(f"{spec.name} does not own the states it declares. Run: tidegate migrate", pipeline=spec.name)
    table_identity.check(connection, spec.name)


def check_continues(spec: PipelineSpec, batch_input: BatchInput, cursor: Cursor) -> None:
    """Refuse a batch whose metadata does not continue the last commit's: rows would be lost or repeated (I12).

    Raises: StagingLost if the source can plan it again, else MetadataCorrupt.
    """
    if batch_input.continues == (None if cursor.source_digest is None else bytes(cursor.source_digest)):
        return
    where = f"{spec.name} {batch_input.txid} continues another batch than the one that committed as {cursor.txid}."
    if spec.source_kind == "transactional":
        raise MetadataCorrupt(f"{where} Restore tidegate.batch from a backup.", pipeline=spec.name, txid=batch_input.txid)
    raise StagingLost(f"{where} It is planned and processed again.", pipeline=spec.name, txid=batch_input.txid)
