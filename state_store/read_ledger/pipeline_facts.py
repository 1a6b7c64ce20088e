"""The facts of each pipeline, one row per pipeline: what status, page, metrics and why show of it.

Each fact has one definition here. A reader names those that it shows, so that no other is computed. They are
looked up by keys: the cursor, the newest batch and the next one; counts and what belongs to the newest commits stop at a limit.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import JSONB

from tidegate.state_store.attempt import attempts, heartbeats
from tidegate.state_store.commit import quarantined_records
from tidegate.state_store.ledger import cursors, tables, undeclared_columns
from tidegate.state_store.read_ledger.batch_phases import UNCOMMITTED, Phase

# Counts stop at these: beyond them, the exact number does not matter.
MOST_RECORDS, MOST_ACKS, MOST_STAGED, MOST_SILENCES = 1_000_000, 10_000, 20_000, 1000
# A pipeline's speed is that of its newest commits: at most MOST_COMMITS, all within SPEED_HOURS before the last one.
MOST_COMMITS, SPEED_HOURS = 50, 1
RECENT = 200  # commits of a pipeline: more than there are between two scrapes
ERROR_CHARACTERS = 2000
REQUESTED = sa.bindparam("pipelines", type_=sa.ARRAY(sa.Text))


def facts(names: Iterable[str]) -> sa.Select[Any]:
    """Return a query of these facts, with a row per pipeline in service or retired, in the order of the pipelines' names."""
    p, c, plan = tables.pipeline.c, tables.cursor.c, tables.plan.c
    own = sa.join(tables.pipeline, tables.cursor, c.pipeline == p.pipeline).outerjoin(tables.plan, plan.pipeline == p.pipeline)
    with_commit = own.outerjoin(tables.commit, tables.same_batch(tables.commit, tables.cursor))
    known = _facts()
    return sa.select(*(known[name].label(name) for name in names)).select_from(with_commit).order_by(p.pipeline)


def of(names: Iterable[str]) -> sa.Select[Any]:
    """Return `facts` of the pipelines in the parameter `pipelines`."""
    return facts(names).where(tables.pipeline.c.pipeline == sa.any_(REQUESTED))


def _facts() -> Mapping[str, sa.ColumnElement[Any]]:
    p, c, b, plan = tables.pipeline.c, tables.cursor.c, tables.batch.c, tables.plan.c
    q, k = tables.quarantine.c, tables.commit.alias("any_commit").c
    of_batch = sa.select(sa.func.max(b.txid)).where(b.pipeline == c.pipeline)
    of_commit = sa.select(sa.func.max(k.txid)).where(k.pipeline == c.pipeline)
    opened = sa.func.coalesce(of_batch.scalar_subquery(), 0)
    waiting = sa.select(q.txid).where(q.pipeline == c.pipeline, quarantined_records.waits())
    acks = sa.select(b.txid).where(b.pipeline == c.pipeline, b.txid <= c.txid, b.awaits_ack)
    new_columns = undeclared_columns.new_columns(p.pipeline)
    return {
        **{column.name: column for column in p},
        "window": p.in_flight,
        "queries": p.declaration["queries"],
        "has_dropped": tables.HAS_DROPPED,
        "committed": c.txid,
        "opened": opened,
        "pending": opened - c.txid,
        "last_commit": sa.func.coalesce(of_commit.scalar_subquery(), 0),
        "committed_at": tables.commit.c.committed_at,
        "waits_for": _waits_for(),
        "quarantined": _count(waiting, MOST_RECORDS),
        "acks_due": _count(acks, MOST_ACKS),
        "lag_seconds": _age_of_oldest(),
        "rows_per_second": _speed(),
        "silences": _silences(),
        "planned_at": plan.succeeded_at,
        "failed_plans": sa.func.coalesce(plan.failed, 0),
        "plans_failing_since": plan.failing_since,
        "failed_run": plan.failed_run,
        "plan_error": plan.error,
        "short_plan_error": sa.func.left(plan.error, ERROR_CHARACTERS),
        "new_columns": new_columns,
        "staged": _staged(),
        "skipped_at": _newest_commit(_RECENT_COMMIT.skipped_reason.is_not(None)),
        "set_aside_at": _newest_commit(_sets_partials_aside()),
        **{f"cursor_{column.name}": column for column in cursors.CURSOR},
    }


def _count(rows: sa.Select[Any], most: int) -> sa.ScalarSelect[int]:
    limited = rows.limit(most).correlate(tables.cursor).subquery()
    return sa.select(sa.func.count()).select_from(limited).scalar_subquery()


def _waits_for() -> sa.ScalarSelect[Any]:
    c, v = tables.cursor.c, tables.batches_view.c
    text = "txid " + sa.cast(v.txid, sa.Text) + ": " + v.waits_for
    return sa.select(text).where(v.pipeline == c.pipeline, v.txid == c.txid + 1).scalar_subquery()


def _age_of_oldest() -> sa.ScalarSelect[Any]:
    b, c = tables.batch.c, tables.cursor.c
    age = sa.cast(sa.extract("epoch", sa.func.now() - b.opened_at), sa.Double)
    oldest = sa.select(sa.func.greatest(age, 0)).where(b.pipeline == c.pipeline, b.txid == c.txid + 1)
    return oldest.correlate(tables.cursor).scalar_subquery()


def _speed() -> sa.ScalarSelect[Any]:
    """Return source rows per second of a pipeline's newest commits.

    Skipped batches have no rows, but take time.
    """
    k, a, c = tables.commit.alias("some").c, tables.attempt.c, tables.cursor.c
    newest = (
        sa.select(k.pipeline, k.txid, k.attempt, k.committed_at, k.merged_at)
        .where(k.pipeline == c.pipeline, k.txid <= c.txid)
        .order_by(k.txid.desc())
        .limit(MOST_COMMITS)
        .correlate(tables.cursor)
        .subquery("newest")
    )
    n = newest.c
    seconds = sa.extract("epoch", sa.func.max(n.merged_at) - sa.func.min(sa.func.least(a.started_at, n.committed_at)))
    rate = sa.cast(sa.func.coalesce(sa.func.sum(a.source_rows), 0), sa.Double) / sa.func.nullif(seconds, 0)
    since = tables.commit.c.committed_at - timedelta(hours=SPEED_HOURS)
    return (
        sa.select(sa.cast(rate, sa.Double))
        .select_from(sa.join(newest, tables.attempt, tables.same_attempt(tables.attempt, newest)))
        .where(n.committed_at > since)
        .correlate(tables.cursor, tables.commit)
        .scalar_subquery()
    )


def _silences() -> sa.ScalarSelect[Any]:
    """Return the seconds since the last heartbeat of the open attempts at uncommitted txids, by txid."""
    a, c = tables.attempt.c, tables.cursor.c
    after_cursor = sa.select(a.txid, a.seen_at, a.sealed_at, a.failed_at).where(a.pipeline == c.pipeline, a.txid > c.txid)
    later = after_cursor.order_by(a.txid).limit(MOST_SILENCES).correlate(tables.cursor).subquery()
    by_txid = sa.func.jsonb_object_agg(later.c.txid, heartbeats.seconds_since(later.c.seen_at), type_=JSONB)
    return sa.select(by_txid).where(attempts.is_open(later)).scalar_subquery()


def _staged() -> sa.ScalarSelect[Any]:
    """Return how many attempts have kept staging, and how many bytes of it."""
    a, c = tables.attempt.c, tables.cursor.c
    kept = (
        sa.select(a.staged_bytes)
        .where(a.pipeline == c.pipeline, a.dropped_at.is_(None))
        .order_by(a.txid.desc(), a.attempt.desc())
        .limit(MOST_STAGED)
        .correlate(tables.cursor)
        .subquery()
    )
    both = sa.func.jsonb_build_array(sa.func.count(), sa.func.coalesce(sa.func.sum(kept.c.staged_bytes), 0))
    return sa.select(both).select_from(kept).scalar_subquery()


_RECENT_COMMIT = tables.commit.alias("late").c


def _newest_commit(condition: sa.ColumnElement[bool]) -> sa.ScalarSelect[Any]:
    """Return when the newest of a pipeline's last commits was made for which a condition on `_RECENT_COMMIT` holds."""
    c, k = tables.cursor.c, _RECENT_COMMIT
    newest = sa.select(sa.func.max(k.committed_at)).where(k.pipeline == c.pipeline, k.txid > c.txid - RECENT, condition)
    return newest.correlate(tables.cursor).scalar_subquery()


def _sets_partials_aside() -> sa.ScalarSelect[bool]:
    """Return whether the last record of a recent commit is a partial: these have the last numbers in their batch."""
    k, q = _RECENT_COMMIT, tables.quarantine.c
    last = sa.select(q.state.is_not(None)).where(q.pipeline == k.pipeline, q.txid == k.txid)
    return last.order_by(q.number.desc()).limit(1).scalar_subquery()


# How many batches after the last committed one have their phase looked up; all in the window (the most that may have begun), if
# that is larger, up to the second number.
MOST_PHASES, MOST_LOOKED_AT = 200, 1000
_WITH_ERROR = ("failed", "halted")


@dataclass
class OpenBatches:
    """A pipeline's batches that are opened and not committed, as far as their phase is looked up.

    `phases` counts them by phase, `errors` those that failed or are halted by phase and the first word of the error, mostly its
    code; `tries` is how many attempts that one has had which has had most.
    """

    phases: Counter[Phase] = field(default_factory=Counter)
    errors: dict[tuple[Phase, str], int] = field(default_factory=dict)
    tries: int = 0

    def all_phases(self, pending: int) -> dict[Phase, int]:
        """Return how many of so many batches are in each phase; those that are not looked up are counted as planned."""
        uncounted = max(pending - self.phases.total(), 0)
        return {phase: self.phases[phase] + uncounted * (phase == "planned") for phase in UNCOMMITTED}


def open_batches(connection: Connection, requested: sa.ColumnElement[bool]) -> defaultdict[str, OpenBatches]:
    """Count the uncommitted batches of each of the requested pipelines."""
    c, p, v = tables.cursor.c, tables.pipeline.c, tables.batches_view.c
    # By the order and the limit, Postgres uses the index, however large it estimates the range.
    near = (
        sa.select(v.phase, v.waits_for, v.attempt)
        .where(v.pipeline == p.pipeline, v.txid > c.txid, v.txid <= c.txid + sa.func.greatest(p.in_flight, MOST_PHASES))
        .order_by(v.txid)
        .limit(MOST_LOOKED_AT)
        .correlate(tables.pipeline, tables.cursor)
        .lateral("near")
    )
    error = sa.case((near.c.phase.in_(_WITH_ERROR), sa.func.split_part(near.c.waits_for, ":", 1)), else_="").label("error")
    statement = (
        sa.select(p.pipeline, near.c.phase, error, sa.func.count(), sa.func.max(near.c.attempt))
        .select_from(tables.pipeline)
        .join(tables.cursor, c.pipeline == p.pipeline)
        .join(near, sa.true())
        .where(requested)
        .group_by(p.pipeline, near.c.phase, sa.literal_column("error"))
    )
    by_pipeline: defaultdict[str, OpenBatches] = defaultdict(OpenBatches)
    for pipeline, phase, code, count, tries in connection.execute(statement):
        found = by_pipeline[pipeline]
        found.phases[phase] += count
        found.tries = max(found.tries, tries)
        if code:
            found.errors[phase, code] = count
    return by_pipeline
