"""The ordered commit in one transaction: lock the cursor, check, merge, advance.

A txid is a batch's number; the cursor is a pipeline's row with its last committed txid; the witness is a file outside Postgres
that marks each pipeline's last commit. An attempt is a try at a batch, sealed once its staged rows are complete. Numbers such
as I3 are rules of docs/protocol.md.

No function here opens or ends a transaction: their callers in `StateStore` do. If the process dies at any statement, Postgres
rolls all of them back; if it dies after COMMIT was sent, the cursor's row shows the outcome (I10).
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from state_store import attempts, merges, source_files, tables
from state_store.attempts import LockedBatch
from state_store.batches import QUARANTINED, BatchInput, existing_input
from state_store.declaration import PipelineSpec
from state_store.errors import (
    AttemptNotSealed,
    CommitOutOfOrder,
    DeclarationChanged,
    GuardMismatch,
    HoleDetected,
    MetadataCorrupt,
    SchemaOutOfDate,
    StagingLost,
    StoreUnavailable,
)
from state_store.merges import NOTHING, Merged
from state_store.witness import Mark, Witness

# How often the server checks that a silent client is still connected: a killed committer frees the lock this soon.
CONNECTION_CHECK_INTERVAL = "500ms"
# The most batches that one transaction merges: enough for most of the gain in speed, few enough to merge again if it fails.
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
        return f"{self.pipeline} {self.txid}:{self.attempt} {outcome}, {self.key_count} keys"


class Cursor(NamedTuple):
    """A pipeline's row in ``cursor``: its last commit, and the database's incarnation (`epoch`) that it was made in.

    A new `history` begins when an operator accepts that commits are lost.
    """

    pipeline: str
    txid: int
    attempt: int | None
    source_digest: bytes | None
    epoch: str
    history: UUID


_ledger = getattr(sa.func, tables.LEDGER)
CURSOR = [tables.cursor.c[name] for name in Cursor._fields]


class RegisteredPipeline(NamedTuple):
    """A pipeline's row in ``pipeline``: whether it is paused, by whom and why."""

    pipeline: str
    paused_at: datetime | None
    paused_by: str | None
    paused_reason: str | None


def set_limits(
    connection: Connection, lock_timeout_seconds: int, statement_timeout_seconds: int, idle_timeout_seconds: int
) -> None:
    """Bound every wait of this transaction, and make its COMMIT durable.

    The settings are local to the transaction, so that they work through a connection pooler. A statement may take long, but the
    pause between two statements is long only if the process is suspended (I20).
    """
    limits = {
        "lock_timeout": f"{lock_timeout_seconds}s",
        "statement_timeout": f"{statement_timeout_seconds}s",
        "idle_in_transaction_session_timeout": f"{idle_timeout_seconds}s",
        "client_connection_check_interval": CONNECTION_CHECK_INTERVAL,
        "synchronous_commit": _durable(),
    }
    connection.execute(sa.select(*(sa.func.set_config(name, value, True) for name, value in limits.items())))


def _durable() -> sa.ColumnElement[str]:
    """Return the setting by which a COMMIT waits for the disk, here and on standbys; a stricter one is kept."""
    found = sa.func.current_setting("synchronous_commit")
    return sa.case((found == "remote_apply", found), else_="on")


def lock_cursor(connection: Connection, pipeline: str, witness: Witness, *, wait: bool = True) -> Cursor:
    """Lock and return the pipeline's cursor, on the primary of the database in which the cursor was made.

    Without `wait`, a cursor that another transaction has locked is an error at once.

    Raises: SchemaOutOfDate if the pipeline was never registered (a missing row would lock nothing), StoreUnavailable on
    a standby, HoleDetected in a restored, promoted or copied database, or in one that is older than its witness.
    """
    c = tables.cursor.c
    row = connection.execute(sa.select(*CURSOR).where(c.pipeline == pipeline).with_for_update(nowait=not wait)).one_or_none()
    if row is None:
        raise _unregistered(pipeline)
    cursor = Cursor(*row)
    if connection.scalar(sa.select(sa.func.pg_is_in_recovery())):
        raise StoreUnavailable(f"{pipeline}: PGHOST is a standby. Commits need the primary.", pipeline=pipeline)
    _check_history(connection, cursor, witness)
    return cursor


def check_history(connection: Connection, pipeline: str, witness: Witness) -> None:
    """Refuse to plan or process in a database where no commit would be accepted.

    Raises: HoleDetected as `lock_cursor`, SchemaOutOfDate if the pipeline is not registered.
    """
    row = connection.execute(sa.select(*CURSOR).where(tables.cursor.c.pipeline == pipeline)).one_or_none()
    if row is None:
        raise _unregistered(pipeline)
    _check_history(connection, Cursor(*row), witness)


def _check_history(connection: Connection, cursor: Cursor, witness: Witness) -> None:
    identity: dict[str, Any] = {"pipeline": cursor.pipeline, "txid": cursor.txid}
    if lost := what_is_lost(connection, cursor, witness):
        raise HoleDetected(
            f"{cursor.pipeline}: this database is older than it was, or has gone on elsewhere from an older copy: {lost}. Put "
            "back a newer backup. Or give that up: put back what its source has moved away since, such as the files in a done "
            "folder, then run: tidegate migrate --accept-epoch",
            **identity,
        )
    if not is_same(cursor, epoch := current_epoch(connection), witness):
        raise HoleDetected(
            f"{cursor.pipeline}: this database was restored, promoted or copied (epoch {epoch}, the cursor was made in "
            f"{cursor.epoch}): commits after txid {cursor.txid} may be lost. Check what depends on them, then run: "
            "tidegate migrate --accept-epoch",
            **identity,
        )


def what_is_lost(connection: Connection, cursor: Cursor, witness: Witness) -> str | None:
    """Return as text which commits the witness knows and this database lacks, if any."""
    mark = witness.mark_of(cursor.pipeline, str(cursor.history))
    if mark is None:
        return None
    c = tables.commit.c
    found = connection.execute(
        sa.select(c.attempt, c.committed_at).where(c.pipeline == cursor.pipeline, c.txid == mark.txid)
    ).one_or_none()
    return lost_since(cursor, mark, MarkedCommit(*found) if found else None, witness)


class MarkedCommit(NamedTuple):
    """What the table ``commit`` has of the commit that a mark names."""

    attempt: int
    committed_at: datetime


def lost_since(cursor: Cursor, mark: Mark, found: MarkedCommit | None, witness: Witness) -> str | None:
    """Return as text which commits a mark shows to be lost, if any; `found` is the ledger's commit of the mark's txid."""
    file = witness.file_of(mark.pipeline, mark.history)
    if found is None and cursor.txid >= mark.txid:
        return None  # the ledger's cursor and commits contradict each other: `check_no_hole` reports that
    if found is None:
        return (
            f"it stands at txid {cursor.txid}, but {file} says that txid {mark.txid} committed at {mark.committed_at}, so "
            f"{_span(cursor.txid + 1, mark.txid)} lost"
        )
    if (committed_at := _as_text(found.committed_at)) != mark.committed_at:
        return (
            f"its txid {mark.txid} committed at {committed_at}, but {file} says that txid {mark.txid} "
            f"committed at {mark.committed_at}, so that commit, and those after it, are lost"
        )
    if found.attempt < mark.attempt:
        return (
            f"its txid {mark.txid} is that of attempt {found.attempt}, but {file} says that a redo has put attempt "
            f"{mark.attempt} in its place, so the redo is lost"
        )
    return None


def _span(first: int, last: int) -> str:
    return f"txid {first} is" if first == last else f"txids {first} to {last} are"


def _as_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat()


def mark(connection: Connection, pipeline: str) -> Mark | None:
    """Return the mark for the witness of a pipeline's last commit, also of this transaction; None without one."""
    c, k = tables.cursor.c, tables.commit.c
    row = connection.execute(
        sa.select(c.history, c.epoch, c.txid, c.attempt, k.committed_at)
        .join(tables.commit, sa.and_(k.pipeline == c.pipeline, k.txid == c.txid))
        .where(c.pipeline == pipeline)
    ).one_or_none()
    return Mark(pipeline, str(row.history), row.epoch, row.txid, row.attempt, _as_text(row.committed_at)) if row else None


class Epoch(NamedTuple):
    """Which incarnation of the database answers: the server, its timeline, and the number of the database in it.

    A restore or a promotion changes the system identifier or the timeline; a copy within its server changes the number.
    """

    server: str
    timeline: str
    number: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def of(cls, text: str) -> "Epoch":
        """Return the epoch that a cursor keeps as text; from any other text, one that equals no real epoch."""
        parts = text.split("/")
        return cls(*parts) if len(parts) == len(cls._fields) else cls(text, "", "")

    def was_promoted_from(self, before: "Epoch") -> bool:
        """Return whether this epoch differs by a later timeline alone, as after the promotion of a standby."""
        return self._replace(timeline="") == before._replace(timeline="") and self.timeline > before.timeline


def current_epoch(connection: Connection) -> Epoch:
    """Return which incarnation of the database answers."""
    return Epoch.of(connection.execute(sa.select(_ledger.epoch())).scalar_one())


def is_same(cursor: Cursor, epoch: Epoch, witness: Witness) -> bool:
    """Return whether the database is the one in which the cursor was made, so that no commit can be missing.

    A promoted standby is accepted too if the setting `pg_failover` says that it has all commits.
    """
    before = Epoch.of(cursor.epoch)
    return epoch == before or (witness.trusts_promotions and epoch.was_promoted_from(before))


def find(connection: Connection, pipeline: str, txid: int) -> Commit | None:
    """Return the commit of a txid, or None if it has not committed."""
    c = tables.commit.c
    row = connection.execute(
        sa.select(c.pipeline, c.txid, c.attempt, c.key_count, c.committed_at, c.skipped_reason).where(
            c.pipeline == pipeline, c.txid == txid
        )
    ).one_or_none()
    return Commit(*row, already_committed=True) if row else None


def merge_and_advance(
    connection: Connection, spec: PipelineSpec, txid: int, owner: str, attempt_timeout_seconds: int, witness: Witness
) -> Commit:
    """Commit a batch under the cursor's lock, or skip it if it was given up; an existing commit is returned (I8).

    Checks the database (I9), the order (I3), the metadata and what it continues (I6, I12), the newest attempt's seal (I4), the
    declaration (I16), that no file commits twice, the sealed rows (I7), and that each is merged (I14).

    Raises: CommitOutOfOrder, AttemptNotSealed, StagingLost (process it again), SourceChanged, DeclarationChanged,
    DeclarationInvalid, CheckFailed, GuardMismatch, MetadataCorrupt, UnknownBatch; what `lock_cursor` raises; the driver's
    errors. After any error, nothing of the batch is visible.
    """
    cursor = lock_cursor(connection, spec.name, witness)
    if txid <= cursor.txid:
        return already_committed(connection, spec.name, txid, cursor.txid)
    check_no_hole(connection, spec.name, cursor.txid)
    if txid != cursor.txid + 1:
        raise CommitOutOfOrder(
            f"{spec.name} cannot commit txid {txid}: {cursor.txid} is the last committed. "
            f"It is retried until {txid - 1} commits; see: tidegate inspect {spec.name}",
            pipeline=spec.name,
            txid=txid,
        )
    batch = attempts.lock_batch(connection, spec.name, txid)
    batch_input = existing_input(connection, spec.name, txid)
    if batch.skip_reason is not None:
        assert batch.skip_owner is not None, "the table holds both or none"
        check_continues(spec, batch_input, cursor)  # a skip consumes rows too, so it must not leave a gap before them
        source_files.write(connection, spec, [batch_input])
        return record(connection, batch, batch_input, batch.skip_owner, skipped_reason=batch.skip_reason)
    check_sealed(connection, spec, batch, attempt_timeout_seconds)
    check_continues(spec, batch_input, cursor)
    check_declaration(connection, spec)
    source_files.write(connection, spec, [batch_input])
    (merged,) = merges.merge_all(connection, spec, [(txid, batch.attempt)])
    return record(connection, batch, batch_input, owner, merged=merged)


def commit_ready(
    connection: Connection, spec: PipelineSpec, owner: str, witness: Witness, *, max_batches: int, wait: bool
) -> list[Commit]:
    """Commit all batches that directly follow the cursor and are ready, in order, as if each were committed alone.

    Ready is a sealed batch that passes the checks of `merge_and_advance` and is neither halted nor given up; the first that is
    not ends the sequence. A batch commits alone if it has more than MAX_ROWS_TOGETHER rows, if the pipeline has updates or
    checks, or if a state keeps previous values or has an author's combiner, sessions, or windows that become final. Returns an
    empty list, having changed nothing, if none is ready.

    Raises: what `merge_and_advance` raises; committing one by one then shows which batch is at fault.
    """
    cursor = lock_cursor(connection, spec.name, witness, wait=wait)
    check_no_hole(connection, spec.name, cursor.txid)
    check_declaration(connection, spec)
    if spec.commits_alone:
        max_batches = 1
    ready = _ready(connection, spec, cursor, max_batches)
    if not ready:
        return []
    source_files.write(connection, spec, [batch_input for _, batch_input in ready])
    merged = merges.merge_all(connection, spec, [(batch.txid, batch.attempt) for batch, _ in ready])
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

    Raises: GuardMismatch if that is not at the txid before.
    """
    pipeline, txid = batch.pipeline, batch.txid
    if skipped_reason is not None and QUARANTINED in batch_input.metadata:
        q = tables.quarantine.c  # records that this batch took up wait in quarantine again
        returned = sa.update(tables.quarantine).where(q.pipeline == pipeline, q.replayed_txid == txid)
        connection.execute(returned.values(replayed_txid=None))
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


def committed(connection: Connection, pipeline: str) -> int:
    """Return the last committed txid, read without a lock: it may grow meanwhile, but never shrinks.

    Raises: SchemaOutOfDate if the pipeline is not registered.
    """
    txid: int | None = connection.scalar(sa.select(tables.cursor.c.txid).where(tables.cursor.c.pipeline == pipeline))
    if txid is None:
        raise _unregistered(pipeline)
    return txid


def registered(connection: Connection, pipeline: str) -> RegisteredPipeline:
    """Return the pipeline's row.

    Raises: SchemaOutOfDate if it is not registered.
    """
    p = tables.pipeline.c
    row = connection.execute(
        sa.select(p.pipeline, p.paused_at, p.paused_by, p.paused_reason).where(p.pipeline == pipeline)
    ).one_or_none()
    if row is None:
        raise _unregistered(pipeline)
    return RegisteredPipeline(*row)


def _unregistered(pipeline: str) -> SchemaOutOfDate:
    return SchemaOutOfDate(f"Pipeline {pipeline} is not registered in this database. Run: tidegate migrate", pipeline=pipeline)


def already_committed(connection: Connection, pipeline: str, txid: int, cursor_txid: int) -> Commit:
    """Return the commit of a txid that the cursor has passed.

    Raises: HoleDetected if the ledger has none.
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
    """Refuse to go on if the cursor and the table of commits disagree about the last commit.

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
    attempt = attempts.newest(connection, spec.name, batch.txid, batch.attempt)
    name = f"{spec.name} {batch.txid}:{batch.attempt}"
    identity: dict[str, Any] = {"pipeline": spec.name, "txid": batch.txid, "attempt": batch.attempt}
    if attempt is None:
        raise StagingLost(f"{spec.name} {batch.txid} has not been processed yet. It is processed now.", **identity)
    if attempt.failed_at is not None:
        raise StagingLost(f"{name} failed: {attempt.error} It is processed again.", **identity)
    if attempt.sealed_at is None:
        if (silence := attempt.silent_seconds or 0) >= attempts.LONGEST_SILENCE_SECONDS:
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
    """Refuse a declaration other than the registered one (I16), or with other tables than the pipeline owns.

    Raises: DeclarationChanged.
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


def check_continues(spec: PipelineSpec, batch_input: BatchInput, cursor: Cursor) -> None:
    """Refuse a batch whose metadata does not continue that of the last commit: rows would be lost or repeated (I12).

    Raises: StagingLost if the source can plan it again, MetadataCorrupt if it never does.
    """
    if batch_input.continues == (None if cursor.source_digest is None else bytes(cursor.source_digest)):
        return
    where = f"{spec.name} {batch_input.txid} continues another batch than the one that committed as {cursor.txid}."
    if spec.source_kind == "transactional":
        raise MetadataCorrupt(f"{where} Restore tidegate.batch from a backup.", pipeline=spec.name, txid=batch_input.txid)
    raise StagingLost(f"{where} It is planned and processed again.", pipeline=spec.name, txid=batch_input.txid)
