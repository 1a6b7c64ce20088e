"""What metrics show of every pipeline, at one moment, by a few statements whose work is bounded.

No statement takes longer as more batches commit: they read the rows of uncommitted batches, of kept staging and of the
quarantine, up to a limit, and of the past the last commits only. What tasks have done is counted by what they send
themselves (`tidegate.dags.task_metrics`).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import HoleDetected
from tidegate.state_store.commit import quarantined_records
from tidegate.state_store.connections.local_settings import set_local
from tidegate.state_store.connections.table_locks import STAGING
from tidegate.state_store.ledger import cursors, tables, undeclared_columns
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.ledger.cursors import CURSOR, Cursor
from tidegate.state_store.read_ledger.batch_search import UNCOMMITTED
from tidegate.state_store.read_ledger.batch_status import batches_view

WITH_ERROR = ("failed", "halted")
# The statements read few rows of large tables by their keys. If Postgres expected many, it would read whole tables.
BY_KEYS = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off", "enable_material": "off"}
# Counts stop at these: beyond them, the exact number does not matter.
MOST_BATCHES, MOST_STAGED, MOST_RECORDS, MOST_ACKS = 10_000, 20_000, 1_000_000, 10_000
RECENT = 200  # commits of a pipeline: more than there are between two scrapes


@dataclass(frozen=True)
class PipelineMeasures:
    """One pipeline: positions as txids (numbers of batches), times as moments by the database's clock or in seconds.

    `phases` counts the batches that are opened and not committed, up to MOST_BATCHES; the rest are counted as planned.
    `errors` counts those of them that failed or are halted, by phase and the first word of the error, mostly its code; `tries`
    is how many attempts that one has had which has had most.
    `staged_*` are of attempts whose staging is kept. `acks_due` are committed batches of which the source has yet to learn.
    `failed_plans` counts plans that failed since one succeeded at `planned_at`; `plan_error` is the newest error's first word.
    `skipped_at` and `set_aside_at` are of the newest commit that skipped its batch, or set partials aside, of the RECENT ones.
    `is_whole` is whether the database contains all known commits.
    """

    pipeline: str
    committed: int
    opened: int
    committed_at: datetime | None
    lag_seconds: float
    paused_at: datetime | None
    quarantined: int
    staged_attempts: int
    staged_bytes: int
    acks_due: int
    planned_at: datetime | None
    failed_plans: int
    plan_error: str
    skipped_at: datetime | None
    set_aside_at: datetime | None
    is_whole: bool
    new_columns: int = 0
    tries: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Measures:
    """All pipelines in service in the order of their names, and the number of tables in staging."""

    pipelines: list[PipelineMeasures]
    staging_tables: int


def measures(connection: Connection, witness: Witness) -> Measures:
    """Return the measures in the connection's snapshot, and change its settings."""
    set_local(connection, BY_KEYS)
    c = tables.cursor.c
    in_service = sa.select(*CURSOR).join(tables.pipeline, _in_service(c.pipeline)).order_by(c.pipeline)
    all_cursors = [Cursor(*row) for row in connection.execute(in_service)]
    present = {row.pipeline: row for row in connection.execute(_present())}
    open_batches = _uncommitted(connection)
    epoch = cursors.current_epoch(connection)
    pipelines = []
    for cursor in all_cursors:
        name, row = cursor.pipeline, present[cursor.pipeline]
        found = open_batches.get(name, _OpenBatches())
        uncounted = max(row.opened - cursor.txid - found.phases.total(), 0)
        pipelines.append(
            PipelineMeasures(
                pipeline=name,
                committed=cursor.txid,
                opened=row.opened,
                committed_at=row.committed_at,
                lag_seconds=max(float(row.lag_seconds or 0), 0.0),
                paused_at=row.paused_at,
                quarantined=row.quarantined,
                staged_attempts=row.staged_attempts,
                staged_bytes=int(row.staged_bytes or 0),
                acks_due=row.acks_due,
                planned_at=row.planned_at,
                failed_plans=row.failed_plans,
                plan_error=row.plan_error,
                skipped_at=row.skipped_at,
                set_aside_at=row.set_aside_at,
                is_whole=row.last_commit == cursor.txid
                and cursors.is_same_database(cursor, epoch, witness)
                and _has_all(connection, cursor, witness),
                new_columns=row.new_columns,
                tries=found.tries,
                phases={phase: found.phases[phase] + uncounted * (phase == "planned") for phase in UNCOMMITTED},
                errors=found.errors,
            )
        )
    return Measures(pipelines, connection.scalar(_staging_tables()) or 0)


def _in_service(pipeline: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Return the condition that joins a pipeline in service, which is one not retired."""
    p = tables.pipeline.c
    return sa.and_(p.pipeline == pipeline, tables.IN_SERVICE)


def _has_all(connection: Connection, cursor: Cursor, witness: Witness) -> bool:
    """Return whether the database has the last commit that the witness marked outside it; False if the mark is damaged."""
    try:
        return cursors.describe_loss(connection, cursor, witness) is None
    except HoleDetected:
        return False


def _present() -> sa.Select[Any]:
    """Return a query with one row per pipeline in service."""
    p, k, b, c, a, q = (
        table.c for table in (tables.pipeline, tables.cursor, tables.batch, tables.commit, tables.attempt, tables.quarantine)
    )
    plan = tables.plan.c
    newest = sa.select(b.txid).where(b.pipeline == k.pipeline).order_by(b.txid.desc()).limit(1)
    last = sa.select(c.txid).where(c.pipeline == k.pipeline).order_by(c.txid.desc()).limit(1)
    committed_at = sa.select(c.committed_at).where(c.pipeline == k.pipeline, c.txid == k.txid)
    oldest = sa.select(sa.extract("epoch", sa.func.now() - b.opened_at)).where(b.pipeline == k.pipeline, b.txid == k.txid + 1)
    records = sa.select(q.txid).where(q.pipeline == k.pipeline, quarantined_records.waits()).limit(MOST_RECORDS)
    acks = sa.select(b.txid).where(b.pipeline == k.pipeline, b.txid <= k.txid, b.awaits_ack).order_by(b.txid).limit(MOST_ACKS)
    staged = (
        sa.select(a.staged_bytes)
        .where(a.pipeline == k.pipeline, a.dropped_at.is_(None))
        .order_by(a.txid.desc(), a.attempt.desc())
        .limit(MOST_STAGED)
        .correlate(tables.cursor)
        .subquery()
    )
    kept = sa.select(sa.func.count().label("attempts"), sa.func.sum(staged.c.staged_bytes).label("bytes")).select_from(staged)
    of_staging = kept.lateral("kept")
    recent = _recent().lateral("recent")
    return (
        sa.select(
            k.pipeline,
            p.paused_at,
            sa.func.coalesce(newest.scalar_subquery(), 0).label("opened"),
            sa.func.coalesce(last.scalar_subquery(), 0).label("last_commit"),
            committed_at.scalar_subquery().label("committed_at"),
            oldest.scalar_subquery().label("lag_seconds"),
            _count(records).label("quarantined"),
            _count(acks).label("acks_due"),
            plan.succeeded_at.label("planned_at"),
            sa.func.coalesce(plan.failed, 0).label("failed_plans"),
            sa.func.split_part(sa.func.coalesce(plan.error, ""), ":", 1).label("plan_error"),
            sa.func.jsonb_array_length(undeclared_columns.new_columns(k.pipeline)).label("new_columns"),
            of_staging.c.attempts.label("staged_attempts"),
            of_staging.c.bytes.label("staged_bytes"),
            *recent.c,
        )
        .select_from(tables.cursor)
        .join(tables.pipeline, _in_service(k.pipeline))
        .outerjoin(tables.plan, plan.pipeline == k.pipeline)
        .join(of_staging, sa.true())
        .join(recent, sa.true())
    )


def _recent() -> sa.Select[Any]:
    """Return a query for when one of a pipeline's last commits skipped its batch, and when one set partials aside."""
    k, c, q = tables.cursor.c, tables.commit.c, tables.quarantine.c
    last = (  # partials have the last numbers in their batch
        sa.select(q.state.is_not(None))
        .where(tables.same_batch(tables.quarantine, tables.commit))
        .order_by(q.number.desc())
        .limit(1)
        .correlate(tables.commit)
    )
    commits = (
        sa.select(c.committed_at, c.skipped_reason, last.scalar_subquery().label("sets_aside"))
        .where(c.pipeline == k.pipeline, c.txid > k.txid - RECENT)
        .correlate(tables.cursor)
        .subquery("commits")
    )
    newest = sa.func.max(commits.c.committed_at)
    return sa.select(
        newest.filter(commits.c.skipped_reason.is_not(None)).label("skipped_at"),
        newest.filter(commits.c.sets_aside).label("set_aside_at"),
    )


def _count(rows: sa.Select[Any]) -> sa.ScalarSelect[int]:
    """Return how many rows a pipeline's limited query has."""
    limited = rows.correlate(tables.cursor).subquery()
    return sa.select(sa.func.count()).select_from(limited).scalar_subquery()


@dataclass
class _OpenBatches:
    """A pipeline's uncommitted batches: how many by phase, and by phase and code; the attempts at the most tried one."""

    phases: Counter[str] = field(default_factory=Counter)
    errors: dict[tuple[str, str], int] = field(default_factory=dict)
    tries: int = 0


def _uncommitted(connection: Connection) -> dict[str, _OpenBatches]:
    """Count each pipeline's uncommitted batches."""
    k, b = tables.cursor.c, batches_view.c
    open_batches = (
        sa.select(b.phase, b.waits_for, b.attempt)
        .where(b.pipeline == k.pipeline, b.txid > k.txid)
        .order_by(b.txid)
        .limit(MOST_BATCHES)
        .lateral("open_batches")
    )
    error = sa.case(
        (open_batches.c.phase.in_(WITH_ERROR), sa.func.split_part(open_batches.c.waits_for, ":", 1)), else_=""
    ).label("error")
    statement = (
        sa.select(k.pipeline, open_batches.c.phase, error, sa.func.count(), sa.func.max(open_batches.c.attempt))
        .select_from(tables.cursor)
        .join(tables.pipeline, _in_service(k.pipeline))
        .join(open_batches, sa.true())
        .group_by(k.pipeline, open_batches.c.phase, sa.literal_column("error"))
    )
    by_pipeline: dict[str, _OpenBatches] = defaultdict(_OpenBatches)
    for pipeline, phase, code, count, tries in connection.execute(statement):
        found = by_pipeline[pipeline]
        found.phases[phase] += count
        found.tries = max(found.tries, tries)
        if phase in WITH_ERROR:
            found.errors[phase, code] = count
    return by_pipeline


def _staging_tables() -> sa.Select[Any]:
    """Return a query for the number of tables in schema staging."""
    c = sa.table("pg_class", sa.column("relkind"), sa.column("relnamespace"), schema="pg_catalog").c
    n = sa.table("pg_namespace", sa.column("oid"), sa.column("nspname"), schema="pg_catalog").c
    staging = sa.select(n.oid).where(n.nspname == STAGING).scalar_subquery()
    return sa.select(sa.func.count()).where(c.relkind == "r", c.relnamespace == staging)
