"""The ordered commit: lock the cursor, check, merge, advance; one transaction, steps of CONTRACT section 3.5.

Nothing here opens or ends a transaction; `StateStore.commit_batch` does. If the process dies at any statement, Postgres
rolls all of them back; if it dies after COMMIT was sent, the cursor's row tells which (CONTRACT I10).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from state_store import attempts, staging, tables
from state_store.attempts import StagedPartition
from state_store.batches import decode_metadata
from state_store.declaration import PipelineSpec, StateSpec
from state_store.errors import (
    AttemptNotSealed,
    CommitOutOfOrder,
    DeclarationChanged,
    GuardMismatch,
    HoleDetected,
    RangeRefused,
    SchemaOutOfDate,
    StagingLost,
    StoreUnavailable,
)

# How often the server looks whether a silent client is still there: a killed committer frees the lock this soon.
CONNECTION_CHECK_INTERVAL = "500ms"


@dataclass(frozen=True)
class Commit:
    """A committed txid: which attempt counted, how many state rows it wrote, and whether it had counted before.

    A skipped txid has a commit too, without rows and with the reason.
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


def set_limits(connection: Connection, lock_timeout_seconds: int, statement_timeout_seconds: int) -> None:
    """Bound every wait of this transaction and make its COMMIT durable; local, so that it works behind a pooler."""
    limits = {
        "lock_timeout": f"{lock_timeout_seconds}s",
        "statement_timeout": f"{statement_timeout_seconds}s",
        "idle_in_transaction_session_timeout": f"{statement_timeout_seconds}s",
        "client_connection_check_interval": CONNECTION_CHECK_INTERVAL,
        "synchronous_commit": "on",
    }
    connection.execute(sa.select(*(sa.func.set_config(name, value, True) for name, value in limits.items())))


def lock_cursor(connection: Connection, pipeline: str) -> sa.Row:  # type: ignore[type-arg]
    """Lock and return the pipeline's cursor, on the primary and in the incarnation of the database it was made for.

    Raises: SchemaOutOfDate if the pipeline was never registered (a missing row would lock nothing), StoreUnavailable on
    a standby, HoleDetected in a restored, promoted or copied database.
    """
    c = tables.cursor.c
    cursor = connection.execute(sa.select(tables.cursor).where(c.pipeline == pipeline).with_for_update()).one_or_none()
    if cursor is None:
        raise _unregistered(pipeline)
    if connection.scalar(sa.select(sa.func.pg_is_in_recovery())):
        raise StoreUnavailable(f"{pipeline}: PGHOST is a standby. Commits need the primary.", pipeline=pipeline)
    _check_epoch(connection, cursor)
    return cursor


def check_epoch(connection: Connection, pipeline: str) -> None:
    """Refuse to plan or process where the commit would be refused: in a restored, promoted or copied database.

    Raises: HoleDetected, SchemaOutOfDate if the pipeline is not registered.
    """
    cursor = connection.execute(sa.select(tables.cursor).where(tables.cursor.c.pipeline == pipeline)).one_or_none()
    if cursor is None:
        raise _unregistered(pipeline)
    _check_epoch(connection, cursor)


def _check_epoch(connection: Connection, cursor: sa.Row) -> None:  # type: ignore[type-arg]
    if cursor.epoch != (epoch := current_epoch(connection)):
        raise HoleDetected(
            f"{cursor.pipeline}: this database was restored, promoted or copied (epoch {epoch}, the cursor was made in "
            f"{cursor.epoch}): commits after txid {cursor.txid} may be lost. Check what depends on them, then run: "
            "tidegate migrate --accept-epoch",
            pipeline=cursor.pipeline,
            txid=cursor.txid,
        )


def current_epoch(connection: Connection) -> str:
    """Return which incarnation of the database answers: system identifier and timeline change by restore and promotion."""
    system: sa.Select[tuple[int]] = sa.select(sa.column("system_identifier")).select_from(
        sa.func.pg_control_system().table_valued("system_identifier")
    )
    timeline = sa.func.left(sa.func.pg_walfile_name(sa.func.pg_current_wal_insert_lsn()), 8)
    return "{}/{}".format(*connection.execute(sa.select(system.scalar_subquery(), timeline)).one())


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
    connection: Connection, spec: PipelineSpec, txid: int, owner: str, attempt_timeout_seconds: int
) -> Commit:
    """Make the batch count: I3 order, I4 fence, I7 seal, I14 guard and I16 declaration are checked under the cursor's lock.

    Raises: CommitOutOfOrder, AttemptNotSealed, StagingLost (process it again), DeclarationChanged, GuardMismatch,
    HoleDetected, MetadataCorrupt, UnknownBatch. Whatever is raised, nothing of the batch is visible.
    """
    cursor = lock_cursor(connection, spec.name)
    if txid <= cursor.txid:
        return _already(connection, spec.name, txid, cursor.txid)
    _check_no_hole(connection, spec.name, cursor.txid)
    if txid != cursor.txid + 1:
        raise CommitOutOfOrder(
            f"{spec.name} cannot commit txid {txid}: {cursor.txid} is the last committed. "
            f"It is retried until {txid - 1} commits; see: tidegate inspect {spec.name}",
            pipeline=spec.name,
            txid=txid,
        )
    batch = attempts.lock_batch(connection, spec.name, txid)
    decode_metadata(spec.name, txid, batch.source_metadata, batch.source_digest)
    _check_sealed(connection, spec, batch, attempt_timeout_seconds)
    check_declaration(connection, spec)

    connection.execute(sa.select(sa.func.set_config("tidegate.writer", spec.name, True)))  # opens the tables to this pipeline
    keys = 0
    for state in spec.states:
        sealed = staging.recount(connection, state, txid, batch.attempt)
        keys += _merge(connection, spec, state, txid, batch.attempt, sealed)

    return _record(connection, spec, batch, owner, keys=keys)


def skip(connection: Connection, spec: PipelineSpec, txid: int, owner: str, reason: str) -> Commit:
    """Commit a batch that cannot be processed without its rows, so that order goes on; the reason stays in the ledger.

    Raises: RangeRefused if the pipeline waits for another txid, or if this one has not failed; HoleDetected, UnknownBatch.
    """
    cursor = lock_cursor(connection, spec.name)
    if txid <= cursor.txid:
        return _already(connection, spec.name, txid, cursor.txid)
    _check_no_hole(connection, spec.name, cursor.txid)
    batch = attempts.lock_batch(connection, spec.name, txid)
    if txid != cursor.txid + 1:
        raise RangeRefused(
            f"{spec.name} waits for txid {cursor.txid + 1}: only that one can be skipped, because commits go in order.",
            pipeline=spec.name,
            txid=txid,
        )
    attempt = attempts.newest(connection, spec.name, txid, batch.attempt)
    if attempt is None or (attempt.failed_at is None and batch.halted_at is None):
        raise RangeRefused(
            f"{spec.name} {txid} has not failed, so it is not skipped. See: tidegate inspect {spec.name} --txid {txid}",
            pipeline=spec.name,
            txid=txid,
        )
    return _record(connection, spec, batch, owner, keys=0, skipped_reason=reason)


def _record(
    connection: Connection,
    spec: PipelineSpec,
    batch: sa.Row,  # type: ignore[type-arg]
    owner: str,
    *,
    keys: int,
    skipped_reason: str | None = None,
) -> Commit:
    """Write the commit and advance the cursor, which is locked."""
    txid = batch.txid
    committed_at = connection.scalar(
        insert(tables.commit)
        .values(
            pipeline=spec.name,
            txid=txid,
            attempt=batch.attempt,
            source_digest=batch.source_digest,
            owner=owner,
            key_count=keys,
            skipped_reason=skipped_reason,
        )
        .returning(tables.commit.c.committed_at)
    )
    c = tables.cursor.c
    advanced = connection.execute(
        sa.update(tables.cursor)
        .where(c.pipeline == spec.name, c.txid == txid - 1)
        .values(txid=txid, attempt=batch.attempt, source_digest=batch.source_digest)
    )
    if advanced.rowcount != 1:
        raise GuardMismatch(f"{spec.name}: the cursor left txid {txid - 1} while it was locked.", pipeline=spec.name, txid=txid)
    assert committed_at is not None
    return Commit(spec.name, txid, batch.attempt, keys, committed_at, skipped_reason, already_committed=False)


def committed(connection: Connection, pipeline: str) -> int:
    """Return the last committed txid without locking anything: it may be more by now, never less.

    Raises: SchemaOutOfDate if the pipeline is not registered.
    """
    txid: int | None = connection.scalar(sa.select(tables.cursor.c.txid).where(tables.cursor.c.pipeline == pipeline))
    if txid is None:
        raise _unregistered(pipeline)
    return txid


def _unregistered(pipeline: str) -> SchemaOutOfDate:
    return SchemaOutOfDate(f"Pipeline {pipeline} is not registered in this database. Run: tidegate migrate", pipeline=pipeline)


def _already(connection: Connection, pipeline: str, txid: int, cursor_txid: int) -> Commit:
    done = find(connection, pipeline, txid)
    if done is None:
        raise HoleDetected(
            f"{pipeline}: the cursor is at txid {cursor_txid}, but txid {txid} has no commit record. Restore tidegate.commit.",
            pipeline=pipeline,
            txid=txid,
        )
    return done


def _check_no_hole(connection: Connection, pipeline: str, cursor_txid: int) -> None:
    c = tables.commit.c
    last = connection.scalar(sa.select(sa.func.coalesce(sa.func.max(c.txid), 0)).where(c.pipeline == pipeline))
    if last != cursor_txid:
        raise HoleDetected(
            f"{pipeline}: the cursor is at txid {cursor_txid}, but the ledger committed {last}. Nothing is skipped or repeated "
            "until a person has restored one of the two.",
            pipeline=pipeline,
            txid=cursor_txid,
        )


def _check_sealed(connection: Connection, spec: PipelineSpec, batch: sa.Row, attempt_timeout_seconds: int) -> None:  # type: ignore[type-arg]
    attempt = attempts.newest(connection, spec.name, batch.txid, batch.attempt)
    name = f"{spec.name} {batch.txid}:{batch.attempt}"
    identity = {"pipeline": spec.name, "txid": batch.txid, "attempt": batch.attempt}
    if attempt is None:
        raise StagingLost(f"{spec.name} {batch.txid} has not been processed yet. It is processed now.", **identity)
    if attempt.failed_at is not None:
        raise StagingLost(f"{name} failed: {attempt.error} It is processed again.", **identity)
    if attempt.sealed_at is None and attempt.age_seconds < attempt_timeout_seconds:
        raise AttemptNotSealed(
            f"{name} is still processing ({attempt.owner}, for {attempt.age_seconds:.0f} s). The commit is retried.",
            **identity,
        )
    if attempt.sealed_at is None:
        raise StagingLost(f"{name} has not ended within {attempt_timeout_seconds} s. It is processed again.", **identity)
    if attempt.fingerprint != spec.fingerprint:
        raise StagingLost(f"{name} was computed by another declaration of the pipeline. It is processed again.", **identity)


def check_declaration(connection: Connection, spec: PipelineSpec) -> None:
    """Refuse a declaration other than the registered one (CONTRACT I16).

    Raises: DeclarationChanged.
    """
    p, s = tables.pipeline.c, tables.state_table.c
    registered = connection.scalar(sa.select(p.fingerprint).where(p.pipeline == spec.name))
    if registered != spec.fingerprint:
        raise DeclarationChanged(
            f"{spec.name}: this code's declaration is not the registered one. Run: tidegate migrate", pipeline=spec.name
        )
    owned = set(connection.scalars(sa.select(s.state).where(s.pipeline == spec.name)))
    if owned != {state.name for state in spec.states}:
        raise DeclarationChanged(f"{spec.name} does not own the states it declares. Run: tidegate migrate", pipeline=spec.name)


def _merge(
    connection: Connection,
    spec: PipelineSpec,
    state: StateSpec,
    txid: int,
    attempt: int,
    sealed: Sequence[StagedPartition],
) -> int:
    """Upsert the sealed rows in key order; every one of them must land (CONTRACT I14).

    The txid guard is an alarm, not a filter: the cursor says that txid is new, so a row that the guard rejects was
    written by somebody else, and dropping it silently would lose an update.
    """
    expected = sum(p.rows for p in sealed)
    if not expected:
        return 0
    target, stage = tables.state_table_of(state), tables.staging_table_of(state, txid, attempt)
    names = [column.name for column in state.columns]
    keys = [key.name for key in state.keys]
    rows = (
        sa.select(*(stage.c[name] for name in names), sa.literal(txid, sa.BigInteger))
        .where(stage.c.task_attempt.in_([p.task_attempt for p in sealed]))
        .order_by(*(stage.c[key] for key in keys))  # index locality, and one lock order for everybody
    )
    upsert = insert(target).from_select([*names, "txid"], rows)
    new = upsert.excluded
    merged: dict[str, Callable[[str], sa.ColumnElement[Any]]] = {
        "sum": lambda name: target.c[name] + new[name],
        "min": lambda name: sa.func.least(target.c[name], new[name]),
        "max": lambda name: sa.func.greatest(target.c[name], new[name]),
    }
    upsert = upsert.on_conflict_do_update(
        index_elements=keys,
        set_={**{v.name: merged[v.merge](v.name) for v in state.values}, "txid": new.txid},
        where=target.c.txid < new.txid,
    )
    written = connection.execute(upsert).rowcount
    if written != expected:
        raise GuardMismatch(
            f"{spec.name} {txid}:{attempt}: {expected - written} of {expected} rows of state.{state.name} carry a txid of at "
            f"least {txid} already: somebody else wrote them. Nothing was committed; "
            "restore the table, or find its other writer.",
            pipeline=spec.name,
            txid=txid,
            attempt=attempt,
        )
    return expected
