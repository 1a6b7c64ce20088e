"""Read-only queries for people and reports: the ledger by txid, a batch as `inspect --json` shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger import tables
from tidegate.state_store.ledger.batches import existing_input

# Columns of an attempt that the history of its batch shows elsewhere, in another form, or not at all.
NOT_SHOWN = ("pipeline", "txid", "source_metadata", "source_digest", "previous_digest")
ACTIONS_SHOWN = 100


@dataclass(frozen=True)
class BatchStatus:
    """A batch in the ledger, by its txid; `phase` is planned, processing, failed, halted, processed, committed or skipped.

    `error` is why the newest attempt failed or the batch is halted: a code such as SOURCE_CHANGED, or the name of an exception.
    """

    pipeline: str
    txid: int
    phase: str
    attempt: int
    source_rows: int | None
    key_count: int | None
    opened_at: datetime
    started_at: datetime | None
    sealed_at: datetime | None
    committed_at: datetime | None
    owner: str | None
    waits_for: str | None
    error: str | None


@dataclass(frozen=True)
class BatchHistory:
    """All of one batch: metadata, attempts, seals, the commit, checks, and operators' actions on it or its pipeline."""

    status: BatchStatus
    source_metadata: SourceMetadata
    source_digest: str
    attempts: Sequence[dict[str, Any]]
    seals: Sequence[dict[str, Any]]
    commit: dict[str, Any] | None
    actions: Sequence[dict[str, Any]]
    checks: Sequence[dict[str, Any]]


def batch_statuses(
    connection: Connection, pipeline: str, txids: Sequence[int] | None = None, limit: int = 100
) -> list[BatchStatus]:
    """Return ledger rows in txid order: the given txids, or the newest `limit`."""
    statement = statuses(pipeline)
    if txids is not None:
        statement = statement.where(tables.batches_view.c.txid.in_(list(txids)))
    rows = connection.execute(statement.order_by(tables.batches_view.c.txid.desc()).limit(limit)).all()
    return [BatchStatus(*row) for row in reversed(rows)]


def statuses(pipeline: str) -> sa.Select[Any]:
    """Return a query whose rows are the arguments of `BatchStatus`, in no order."""
    v = tables.batches_view.c
    return (
        sa.select(*v, batch_error().label("error"))
        .select_from(tables.batches_view)
        .join(tables.batch, tables.same_batch(tables.batch, tables.batches_view))
        .outerjoin(tables.attempt, tables.same_attempt(tables.attempt, tables.batches_view))
        .where(v.pipeline == pipeline)
    )


def batch_error() -> sa.ColumnElement[str | None]:
    """Return the error's code or exception name of a batch, within `statuses`; a committed batch has none."""
    halted = sa.case((tables.batches_view.c.phase == "halted", tables.batch.c.halted_reason))
    return sa.func.split_part(sa.func.coalesce(halted, tables.attempt.c.error), ":", 1)


def batch_history(connection: Connection, pipeline: str, txid: int) -> BatchHistory:
    """Return everything that the ledger knows of one batch.

    Raises: UnknownBatch, MetadataCorrupt.
    """
    batch_input = existing_input(connection, pipeline, txid)
    (status,) = batch_statuses(connection, pipeline, [txid], 1)
    a, s, c, r = (table.c for table in (tables.attempt, tables.seal, tables.commit, tables.check_result))

    def rows(columns: Sequence[Any], *order: Any) -> list[dict[str, Any]]:
        of = columns[0].table.c
        statement = sa.select(*columns).where(of.pipeline == pipeline, of.txid == txid).order_by(*order)
        return [dict(row) for row in connection.execute(statement).mappings()]

    digest = sa.func.encode(a.source_digest, "hex").label("source_digest")
    commit = [c.attempt, c.owner, c.committed_at, c.merged_at, c.key_count, c.quarantined_rows, c.skipped_reason]
    return BatchHistory(
        status,
        batch_input.metadata,
        batch_input.digest.hex(),
        rows([*(column for column in a if column.name not in NOT_SHOWN), digest], a.attempt),
        rows([s.attempt, s.state, s.partition, s.task_attempt, s.rows, s.digest], s.attempt, s.state, s.partition),
        next(iter(rows(commit)), None),
        newest_actions(connection, pipeline, txid)[::-1],
        rows([r.name, r.found], r.name),
    )


def newest_actions(connection: Connection, pipeline: str, txid: int | None = None) -> list[dict[str, Any]]:
    """Return the last operator actions, newest first: on a pipeline and all its batches; with a txid, not on other batches."""
    o = tables.operator_action.c
    concerned = [] if txid is None else [sa.or_(o.txid == txid, o.txid.is_(None))]
    statement = (
        sa.select(o.acted_at, o.action, o.txid, o.owner, o.reason)
        .where(o.pipeline == pipeline, *concerned)
        .order_by(o.number.desc())
        .limit(ACTIONS_SHOWN)
    )
    return [dict(row) for row in connection.execute(statement).mappings()]
