"""Start, seal and fail attempts. The newest attempt owns the batch; older ones are fenced (CONTRACT I4, I5).

The fence is ``batch.attempt``, raised by compare-and-set under the batch's row lock in the database that holds the
cursor. Airflow's try number, clocks and process ids play no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateTable, DropTable

from state_store import tables
from state_store.batches import decode_metadata
from state_store.declaration import PipelineSpec, SourceMetadata
from state_store.errors import AttemptFenced, UnknownBatch

LOCK_NOT_AVAILABLE = "55P03"


@dataclass(frozen=True)
class Attempt:
    """One try at a batch: its fence and what it has to read."""

    pipeline: str
    txid: int
    number: int
    source_metadata: SourceMetadata

    def __str__(self) -> str:
        return f"{self.pipeline} {self.txid}:{self.number}"


@dataclass(frozen=True)
class StagedPartition:
    """What one Spark task staged for one state: the rows that count for this partition, their number and digest."""

    state: str
    partition: int
    task_attempt: int
    rows: int
    digest: int


def lock_batch(connection: Connection, pipeline: str, txid: int) -> sa.Row:  # type: ignore[type-arg]
    """Lock the batch's row and return it: taking a fence, sealing and committing exclude each other.

    Raises: UnknownBatch.
    """
    b = tables.batch.c
    row = connection.execute(
        sa.select(tables.batch).where(b.pipeline == pipeline, b.txid == txid).with_for_update(key_share=True)
    ).one_or_none()
    if row is None:
        raise UnknownBatch(f"{pipeline} has no txid {txid}. See: tidegate inspect {pipeline}", pipeline=pipeline, txid=txid)
    return row


def newest(connection: Connection, pipeline: str, txid: int, number: int) -> sa.Row | None:  # type: ignore[type-arg]
    """Return the attempt's row with `overdue_seconds`, its age by the database's clock; None if there is none yet."""
    a = tables.attempt.c
    age = sa.func.extract("epoch", sa.func.now() - a.started_at).label("age_seconds")
    return connection.execute(
        sa.select(tables.attempt, age).where(a.pipeline == pipeline, a.txid == txid, a.attempt == number)
    ).one_or_none()


def take_fence(connection: Connection, spec: PipelineSpec, batch: sa.Row, owner: str) -> Attempt:  # type: ignore[type-arg]
    """Start the next attempt at a locked, uncommitted batch: raise the fence, create its staging tables, lift a halt."""
    number = batch.attempt + 1
    metadata = decode_metadata(spec.name, batch.txid, batch.source_metadata, batch.source_digest)
    b = tables.batch.c
    connection.execute(
        sa.update(tables.batch)
        .where(b.pipeline == spec.name, b.txid == batch.txid)
        .values(attempt=number, halted_at=None, halted_reason=None)
    )
    connection.execute(
        insert(tables.attempt).values(
            pipeline=spec.name, txid=batch.txid, attempt=number, owner=owner, fingerprint=spec.fingerprint
        )
    )
    for state in spec.states:
        connection.execute(CreateTable(tables.staging_table_of(state, batch.txid, number)))
    return Attempt(spec.name, batch.txid, number, metadata)


def check_fence(batch: sa.Row, attempt: Attempt) -> None:  # type: ignore[type-arg]
    """Refuse to go on if a newer attempt owns the locked batch.

    Raises: AttemptFenced.
    """
    if batch.attempt != attempt.number:
        raise AttemptFenced(
            f"{attempt} is fenced: attempt {batch.attempt} owns the batch now. Nothing of this attempt counts.",
            pipeline=attempt.pipeline,
            txid=attempt.txid,
            attempt=attempt.number,
        )


def write_seal(connection: Connection, attempt: Attempt, partitions: Sequence[StagedPartition], source_rows: int) -> None:
    """Write down what counts as this attempt's staging, and that it is complete."""
    rows = [
        {
            "pipeline": attempt.pipeline,
            "txid": attempt.txid,
            "attempt": attempt.number,
            "state": p.state,
            "partition": p.partition,
            "task_attempt": p.task_attempt,
            "rows": p.rows,
            "digest": p.digest,
        }
        for p in partitions
        if p.rows
    ]
    if rows:
        connection.execute(insert(tables.seal).values(rows))
    connection.execute(
        sa.update(tables.attempt).where(*_is(attempt)).values(sealed_at=sa.func.clock_timestamp(), source_rows=source_rows)
    )


def write_failure(connection: Connection, attempt: Attempt, error: str) -> None:
    """Write down why the attempt gave up, unless it had already ended."""
    a = tables.attempt.c
    connection.execute(
        sa.update(tables.attempt)
        .where(*_is(attempt), a.sealed_at.is_(None), a.failed_at.is_(None))
        .values(failed_at=sa.func.clock_timestamp(), error=error)
    )


def drop_old_staging(connection: Connection, spec: PipelineSpec, retention_hours: int, limit: int) -> int:
    """Drop the staging of attempts whose batch committed longer ago than the retention (CONTRACT I18); return how many.

    At most `limit` attempts, skipping those that somebody holds, so that it can ride along with every plan.
    """
    a, c = tables.attempt.c, tables.commit.c
    old = connection.execute(
        sa.select(a.txid, a.attempt)
        .join(tables.commit, sa.and_(a.pipeline == c.pipeline, a.txid == c.txid))
        .where(
            a.pipeline == spec.name,
            a.dropped_at.is_(None),
            c.committed_at < sa.func.now() - sa.func.make_interval(0, 0, 0, 0, retention_hours),
        )
        .order_by(a.txid, a.attempt)
        .limit(limit)
        .with_for_update(of=tables.attempt, skip_locked=True)
    ).all()
    dropped = 0
    for txid, number in old:
        try:
            with connection.begin_nested():
                for state in spec.states:
                    connection.execute(DropTable(tables.staging_table_of(state, txid, number), if_exists=True))
                connection.execute(
                    sa.update(tables.attempt)
                    .where(a.pipeline == spec.name, a.txid == txid, a.attempt == number)
                    .values(dropped_at=sa.func.now())
                )
        except OperationalError as held:
            if getattr(held.orig, "pgcode", None) != LOCK_NOT_AVAILABLE:
                raise
            continue  # a late reader or writer of this attempt: the next plan tries again
        dropped += 1
    return dropped


def _is(attempt: Attempt) -> tuple[sa.ColumnElement[bool], ...]:
    a = tables.attempt.c
    return a.pipeline == attempt.pipeline, a.txid == attempt.txid, a.attempt == attempt.number
