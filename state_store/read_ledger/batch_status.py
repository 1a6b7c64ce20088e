"""Read-only queries for people and reports: lag, the ledger by txid, a batch as `inspect --json` shows it, states by key."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.commit import quarantined_records
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger import tables, undeclared_columns
from tidegate.state_store.ledger.batches import existing_input

batches_view = sa.table(
    "batches",
    *(sa.column(name) for name in ("pipeline", "txid", "phase", "attempt", "source_rows", "key_count", "opened_at")),
    *(sa.column(name) for name in ("started_at", "sealed_at", "committed_at", "owner", "waits_for")),
    schema=tables.LEDGER,
)
lag_view = sa.table(
    "lag",
    *(sa.column(name) for name in ("pipeline", "committed", "opened", "pending", "committed_at", "waits_for")),
    schema=tables.LEDGER,
)

# Columns of an attempt that the history of its batch shows elsewhere, in another form, or not at all.
NOT_SHOWN = ("pipeline", "txid", "source_metadata", "source_digest", "previous_digest")
ACTIONS_SHOWN = 100
# A pipeline's speed is that of its newest commits: at most MOST_COMMITS, all within SPEED_HOURS before the last one.
MOST_COMMITS, SPEED_HOURS = 50, 1


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
class Lag:
    """A pipeline's progress: last committed and opened txid, what it waits for, what a person may have to see to.

    `lag_seconds` is the age of its oldest opened batch that has not committed, None if there is none. `rows_per_second` are the
    source rows of its newest commits, divided by the time that these took together; None before the first commit.
    `failed_plans` have failed since one succeeded, the newest with `plan_error`. `new_columns` of the source came after the
    first batch, and nobody declares them.
    """

    pipeline: str
    committed: int
    opened: int
    pending: int
    committed_at: datetime | None
    waits_for: str | None
    quarantined: int
    paused_at: datetime | None
    paused_by: str | None
    paused_reason: str | None
    lag_seconds: float | None
    rows_per_second: float | None
    failed_plans: int
    plans_failing_since: datetime | None
    plan_error: str | None
    new_columns: Sequence[Mapping[str, Any]]


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


def lag(connection: Connection, pipelines: Iterable[str] | None = None) -> list[Lag]:
    """Return how far each pipeline is, in the order of their names."""
    statement = lags()
    if pipelines is not None:
        statement = statement.where(lag_view.c.pipeline.in_(list(pipelines)))
    return [Lag(**row) for row in connection.execute(statement).mappings()]


def lags() -> sa.Select[Any]:
    """Return a query whose columns are the fields of `Lag`, in the order of the pipelines' names."""
    p, q, plan = tables.pipeline.c, tables.quarantine.c, tables.plan.c
    waiting = sa.select(sa.func.count()).where(q.pipeline == lag_view.c.pipeline, quarantined_records.waits()).scalar_subquery()
    return (
        sa.select(*lag_view.c, waiting.label("quarantined"), p.paused_at, p.paused_by, p.paused_reason)
        .add_columns(_age_of_oldest().label("lag_seconds"), _speed().label("rows_per_second"))
        .add_columns(sa.func.coalesce(plan.failed, 0).label("failed_plans"))
        .add_columns(plan.failing_since.label("plans_failing_since"), plan.error.label("plan_error"))
        .add_columns(undeclared_columns.new_columns(p.pipeline).label("new_columns"))
        .select_from(lag_view)
        .join(tables.pipeline, p.pipeline == lag_view.c.pipeline)
        .outerjoin(tables.plan, plan.pipeline == p.pipeline)
        .order_by(lag_view.c.pipeline)
    )


def _age_of_oldest() -> sa.ScalarSelect[Any]:
    """Return the age in seconds of the oldest opened batch that has not committed."""
    b = tables.batch.c
    age = sa.cast(sa.extract("epoch", sa.func.now() - b.opened_at), sa.Double)
    oldest = sa.select(sa.func.greatest(age, 0)).where(b.pipeline == lag_view.c.pipeline, b.txid == lag_view.c.committed + 1)
    return oldest.correlate(lag_view).scalar_subquery()


def _speed() -> sa.ScalarSelect[Any]:
    """Return source rows per second of a pipeline's newest commits.

    Skipped batches have no rows, but take time.
    """
    k, a = tables.commit.c, tables.attempt.c
    newest = (
        sa.select(k.pipeline, k.txid, k.attempt, k.committed_at, k.merged_at)
        .where(k.pipeline == tables.pipeline.c.pipeline, k.txid <= lag_view.c.committed)
        .order_by(k.txid.desc())
        .limit(MOST_COMMITS)
        .correlate(tables.pipeline, lag_view)
        .subquery("newest")
    )
    n = newest.c
    seconds = sa.extract("epoch", sa.func.max(n.merged_at) - sa.func.min(sa.func.least(a.started_at, n.committed_at)))
    rate = sa.cast(sa.func.coalesce(sa.func.sum(a.source_rows), 0), sa.Double) / sa.func.nullif(seconds, 0)
    since = lag_view.c.committed_at - timedelta(hours=SPEED_HOURS)
    return (
        sa.select(sa.cast(rate, sa.Double))
        .select_from(sa.join(newest, tables.attempt, tables.same_attempt(tables.attempt, newest)))
        .where(n.committed_at > since)
        .correlate(tables.pipeline, lag_view)
        .scalar_subquery()
    )


def batch_statuses(
    connection: Connection, pipeline: str, txids: Sequence[int] | None = None, limit: int = 100
) -> list[BatchStatus]:
    """Return ledger rows in txid order: the given txids, or the newest `limit`."""
    statement = statuses(pipeline)
    if txids is not None:
        statement = statement.where(batches_view.c.txid.in_(list(txids)))
    rows = connection.execute(statement.order_by(batches_view.c.txid.desc()).limit(limit)).all()
    return [BatchStatus(*row) for row in reversed(rows)]


def statuses(pipeline: str) -> sa.Select[Any]:
    """Return a query whose rows are the arguments of `BatchStatus`, in no order."""
    v = batches_view.c
    return (
        sa.select(*v, batch_error().label("error"))
        .select_from(batches_view)
        .join(tables.batch, tables.same_batch(tables.batch, batches_view))
        .outerjoin(tables.attempt, tables.same_attempt(tables.attempt, batches_view))
        .where(v.pipeline == pipeline)
    )


def batch_error() -> sa.ColumnElement[str | None]:
    """Return the error's code or exception name of a batch, within `statuses`; a committed batch has none."""
    halted = sa.case((batches_view.c.phase == "halted", tables.batch.c.halted_reason))
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
