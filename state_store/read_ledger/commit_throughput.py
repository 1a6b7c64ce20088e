"""Throughput and latency of a pipeline's commits, by buckets of time.

Commits have no index by time; but txids (numbers of batches) commit in order, so a binary search finds the first one of a
period. Only the last bucket still changes: for a caller that keeps the result, the others are computed only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.ledger import tables

MOST_COMMITS = 50_000  # only the newest of the period: as many as a statement can add up while a person waits
MOST_BUCKETS = 200
_BUCKETS = (60, 300, 900, 3600, 3 * 3600, 6 * 3600, 86400, 7 * 86400)
_ORIGIN = datetime(2001, 1, 1, tzinfo=UTC)  # a Monday


@dataclass(frozen=True)
class Bucket:
    """The commits of one bucket of time, which begins at `at`.

    Durations are medians and 95th percentiles in seconds: of processing up to the seal, and from there to the end of the merge.
    Skipped batches are in `skipped` alone.
    """

    at: datetime
    batches: int
    rows: int
    skipped: int
    quarantined: int
    processing_p50: float | None
    processing_p95: float | None
    commit_latency_p50: float | None
    commit_latency_p95: float | None


def bucket_seconds(days: int) -> int:
    """Return the shortest round length that divides these days into at most MOST_BUCKETS."""
    return next((length for length in _BUCKETS if days * 86400 / length <= MOST_BUCKETS), _BUCKETS[-1])


@dataclass(frozen=True)
class Throughput:
    """Buckets in order, up to the txid `committed`; `last_first` is the first txid of the last bucket.

    They are of one `history`: the pipeline begins another one after commits were lost.
    """

    history: UUID | None
    committed: int
    buckets: Sequence[Bucket]
    last_first: int


def throughput(connection: Connection, pipeline: str, days: int, known: Throughput | None = None) -> Throughput:
    """Return the buckets of the last days, without empty ones, for at most the newest MOST_COMMITS.

    With `known`, an earlier result for the same days, only commits from its last bucket on are read.
    """
    c = tables.cursor.c
    cursor = connection.execute(sa.select(c.txid, c.history).where(c.pipeline == pipeline)).one_or_none()
    committed, history = (cursor.txid, cursor.history) if cursor else (0, None)
    if known is not None and known.buckets and known.history == history and known.committed <= committed:
        part = _read(connection, pipeline, days, known.last_first, committed)
        # If the clock was set back, new commits are in earlier buckets: then all are read again.
        if part.buckets and part.buckets[0].at >= known.buckets[-1].at:
            begins = connection.execute(sa.select(sa.func.now())).scalar_one() - timedelta(days=days)
            settled = [bucket for bucket in known.buckets[:-1] if bucket.at >= begins]
            return Throughput(history, committed, [*settled, *part.buckets], part.last_first)
    first = max(_first_since(connection, pipeline, committed, timedelta(days=days)), committed - MOST_COMMITS + 1)
    part = _read(connection, pipeline, days, first, committed)
    return Throughput(history, committed, part.buckets, part.last_first)


@dataclass(frozen=True)
class _Part:
    buckets: Sequence[Bucket]
    last_first: int


def _read(connection: Connection, pipeline: str, days: int, first: int, committed: int) -> _Part:
    """Add up the commits of a range of txids by bucket."""
    k, a = tables.commit.c, tables.attempt.c
    at = sa.func.date_bin(timedelta(seconds=bucket_seconds(days)), k.committed_at, _ORIGIN).label("at")
    counts = k.skipped_reason.is_(None)
    processing = sa.extract("epoch", a.sealed_at - a.started_at)
    latency = sa.extract("epoch", k.merged_at - a.sealed_at)

    def percentile(share: float, seconds: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        value = sa.func.percentile_cont(share).within_group(sa.cast(seconds, sa.Double))
        return sa.func.round(sa.cast(value.filter(counts), sa.Numeric), 3)

    statement = (
        sa.select(
            sa.func.min(k.txid),
            at,
            sa.func.count().filter(counts),
            sa.cast(sa.func.coalesce(sa.func.sum(a.source_rows).filter(counts), 0), sa.BigInteger),
            sa.func.count().filter(~counts),
            sa.cast(sa.func.sum(k.quarantined_rows), sa.BigInteger),
            *(percentile(share, seconds) for seconds in (processing, latency) for share in (0.5, 0.95)),
        )
        .join(tables.attempt, tables.same_attempt(tables.attempt, tables.commit))
        .where(
            k.pipeline == pipeline, k.txid.between(first, committed), a.pipeline == pipeline, a.txid.between(first, committed)
        )
        .group_by(at)
        .order_by(at)
    )
    rows = connection.execute(statement).all()
    buckets = [Bucket(*row[1:6], *(None if value is None else float(value) for value in row[6:])) for row in rows]
    return _Part(buckets, rows[-1][0] if rows else first)


def _first_since(connection: Connection, pipeline: str, committed: int, period: timedelta) -> int:
    """Return the first txid that committed within the period; the one after the last if none did."""
    k = tables.commit.c
    low, high = 1, committed + 1
    while low < high:
        middle = (low + high) // 2
        is_within = k.committed_at >= sa.func.now() - period
        if connection.scalar(sa.select(is_within).where(k.pipeline == pipeline, k.txid == middle)) is False:
            low = middle + 1
        else:
            high = middle
    return low
