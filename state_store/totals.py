"""Sums over everything that a pipeline has committed, kept up to date by reading only what is new.

Reading all batches for each request would take longer the longer a pipeline has run. Batches before the last committed one are
settled: they never change again, so a process adds them up once and remembers the sum (`Settled`). Each request then reads the
batches committed since, the last one, which a redo may replace by a new attempt, and those that have not committed. A txid is a
batch's number.

The sums follow from the ledger alone, in whole numbers, so that all processes that read the same ledger return the same. They
never fall, as counters must not: also after a redo, the sums are those of the attempt that was committed first. Two events do
lower them: the redo of a skipped batch, and a ledger that was put back to an older state, whose sums start from zero.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql

from tidegate.state_store.ledger import tables

# A batch's way into the states: read, computed and staged; sealed; waiting to commit; merged. `latency` is from seal to merge.
PHASES = ("process", "seal", "wait", "commit", "latency")
BOUNDS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
MICROSECONDS = 1_000_000
# The first request in a process may find any number of batches. It reads some, and the next request goes on from there.
TXIDS_AT_ONCE, SETTLING_SECONDS = 20_000, 2.0
OPEN, SEALED = "open", "sealed"
LAST_TXID = 2**63 - 1


@dataclass
class Histogram:
    """How many batches took how long: one number per bound of BOUNDS_SECONDS and one above, and the sum in microseconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_SECONDS) + 1))
    microseconds: int = 0

    def add(self, other: "Histogram") -> None:
        """Add another histogram's batches."""
        self.counts = [one + another for one, another in zip(self.counts, other.counts, strict=True)]
        self.microseconds += other.microseconds


@dataclass
class Totals:
    """A pipeline's sums: rows, partials set aside, skipped batches, attempts by outcome, phases by duration.

    An attempt's outcome is `sealed`, or the first word of its error: a code of Tidegate, or the name of another exception.
    """

    source_rows: int = 0
    quarantined_rows: int = 0
    set_aside: int = 0
    skipped: int = 0
    attempts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, Histogram] = field(default_factory=lambda: {phase: Histogram() for phase in PHASES})

    def add(self, other: "Totals") -> None:
        """Add the sums over other batches of the same pipeline."""
        self.source_rows += other.source_rows
        self.quarantined_rows += other.quarantined_rows
        self.set_aside += other.set_aside
        self.skipped += other.skipped
        self.attempts += other.attempts
        for phase, histogram in self.seconds.items():
            histogram.add(other.seconds[phase])


class Position(NamedTuple):
    """A pipeline's last committed txid, and its history of commits; a new one begins when lost commits are accepted."""

    pipeline: str
    history: UUID
    txid: int


class _Range(NamedTuple):
    """The txids of a pipeline after one, up to another and including it."""

    pipeline: str
    after: int
    upto: int


@dataclass
class _Sum:
    """What is settled of one pipeline: all txids up to `through`, which committed at `committed_at` in this history."""

    history: UUID
    through: int = 0
    committed_at: datetime | None = None
    totals: Totals = field(default_factory=Totals)
    # Attempts at settled batches that have not ended: a killed one whose batch was skipped, or that of an abandoned redo.
    open_attempts: list[tuple[str, int, int]] = field(default_factory=list)


class Settled:
    """The sums that a process remembers; for one thread at a time."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}

    def read(self, connection: Connection, positions: Sequence[Position]) -> dict[str, Totals]:
        """Return the sums of each pipeline at these positions, which are those of the connection's snapshot.

        A pipeline is left out until this process has read all of its batches, which may take it several requests.
        """
        self._forget_others(connection, positions)
        for position in positions:
            self._sums.setdefault(position.pipeline, _Sum(position.history))
        ends_at = time.monotonic() + SETTLING_SECONDS
        while (ranges := self._unsettled(positions)) and time.monotonic() < ends_at:
            self._settle(connection, ranges)
        unread = {pipeline for pipeline, _, _ in ranges}
        known = {p.pipeline: self._sums[p.pipeline] for p in positions if p.pipeline not in unread}
        sums = _totals(connection, [_Range(pipeline, settled.through, LAST_TXID) for pipeline, settled in known.items()])
        for pipeline, outcomes in _outcomes_of(connection, [key for s in known.values() for key in s.open_attempts]).items():
            sums[pipeline].attempts += outcomes
        for pipeline, settled in known.items():
            sums[pipeline].add(settled.totals)
        return sums

    def _forget_others(self, connection: Connection, positions: Sequence[Position]) -> None:
        """Forget the sums of pipelines that are gone, have begun another history, or whose ledger is older than before."""
        c = tables.commit.c
        known = [_Range(name, s.through - 1, s.through) for name, s in self._sums.items() if s.through]
        moments = {row[0]: row[1] for row in connection.execute(_of(known, c.pipeline, c.txid, c.pipeline, c.committed_at))}
        now = {position.pipeline: position for position in positions}

        def is_the_same(name: str, settled: _Sum) -> bool:
            position = now.get(name)
            return (
                position is not None
                and position.history == settled.history
                and position.txid > settled.through
                and moments.get(name) == settled.committed_at
            )

        self._sums = {name: settled for name, settled in self._sums.items() if settled.through and is_the_same(name, settled)}

    def _unsettled(self, positions: Iterable[Position]) -> list[_Range]:
        """Return which txids are to be settled next; the last committed one is not, because a redo may change it."""
        ranges = []
        for pipeline, _, txid in positions:
            through = self._sums[pipeline].through
            if through < txid - 1:
                ranges.append(_Range(pipeline, through, min(txid - 1, through + TXIDS_AT_ONCE)))
        return ranges

    def _settle(self, connection: Connection, ranges: Sequence[_Range]) -> None:
        taken: list[_Range] = []
        for each in ranges:  # only some, so that many pipelines together do not make one statement too large
            taken.append(each)
            if sum(r.upto - r.after for r in taken) >= TXIDS_AT_ONCE:
                break
        c = tables.commit.c
        ends = [_Range(r.pipeline, r.upto - 1, r.upto) for r in taken]
        moments = {row[0]: row[1] for row in connection.execute(_of(ends, c.pipeline, c.txid, c.pipeline, c.committed_at))}
        unended = _open_attempts(connection, taken)
        for pipeline, totals in _totals(connection, taken).items():
            settled = self._sums[pipeline]
            settled.totals.add(totals)
            settled.open_attempts += unended.get(pipeline, [])
        for pipeline, _, upto in taken:
            self._sums[pipeline].through, self._sums[pipeline].committed_at = upto, moments.get(pipeline)


def _totals(connection: Connection, ranges: Sequence[_Range]) -> dict[str, Totals]:
    """Return the sums over these ranges, for each of their pipelines."""
    by_pipeline = {pipeline: Totals() for pipeline, _, _ in ranges}
    a = tables.attempt.c
    outcome = _outcome()
    attempts = _of(ranges, a.pipeline, a.txid, a.pipeline, outcome, sa.func.count()).where(outcome != OPEN)
    for pipeline, name, count in connection.execute(attempts.group_by(a.pipeline, outcome)):
        by_pipeline[pipeline].attempts[name] += count
    q = tables.quarantine.c
    aside = _of(ranges, q.pipeline, q.txid, q.pipeline, sa.func.count()).where(q.state.is_not(None))
    for pipeline, count in connection.execute(aside.group_by(q.pipeline)):
        by_pipeline[pipeline].set_aside = count
    committed = _committed(ranges)
    sums = sa.select(
        committed.c.pipeline,
        sa.func.coalesce(sa.func.sum(committed.c.source_rows), 0),
        sa.func.coalesce(sa.func.sum(committed.c.quarantined_rows), 0),
        sa.func.count(committed.c.skipped_reason),
    ).group_by(committed.c.pipeline)
    for pipeline, source_rows, quarantined_rows, skipped in connection.execute(sums):
        totals = by_pipeline[pipeline]
        totals.source_rows, totals.quarantined_rows, totals.skipped = int(source_rows), int(quarantined_rows), skipped
    for pipeline, phase, bucket, count, microseconds in connection.execute(_durations(committed)):
        histogram = by_pipeline[pipeline].seconds[phase]
        histogram.counts[bucket] += count
        histogram.microseconds += int(microseconds)
    return by_pipeline


def _committed(ranges: Sequence[_Range]) -> sa.CTE:
    """Return the commits of these ranges, each with the attempt committed first: the newest one sealed before the merge."""
    a, c = tables.attempt.c, tables.commit.c
    first = (
        sa.select(a.started_at, a.staged_at, a.sealed_at, a.source_rows, a.quarantined_rows)
        .where(tables.same_batch(tables.attempt, tables.commit), a.sealed_at <= c.merged_at, c.skipped_reason.is_(None))
        .order_by(a.attempt.desc())
        .limit(1)
        .lateral("first")
    )
    statement = _of(ranges, c.pipeline, c.txid, c.pipeline, c.skipped_reason, c.committed_at, c.merged_at, *first.c)
    return statement.outerjoin(first, sa.true()).cte("committed")


def _durations(committed: sa.CTE) -> sa.Select[Any]:
    """Return for each pipeline, phase and bucket the number of batches and their microseconds."""
    c = committed.c
    spans = {
        "process": c.staged_at - c.started_at,
        "seal": c.sealed_at - c.staged_at,
        "wait": c.committed_at - c.sealed_at,
        "commit": c.merged_at - c.committed_at,
        "latency": c.merged_at - c.sealed_at,
    }
    each = [
        sa.select(
            c.pipeline, sa.literal(phase).label("phase"), sa.cast(sa.extract("epoch", span) * MICROSECONDS, sa.BigInteger)
        )
        for phase, span in spans.items()
    ]
    rows = sa.union_all(*(statement.where(c.sealed_at.is_not(None)) for statement in each)).subquery()
    pipeline, phase, span = rows.c
    # A span is negative if two machines' clocks differ, or if the merge had begun before the seal.
    microseconds = sa.func.greatest(span, 0)
    bounds = [round(bound * MICROSECONDS) for bound in BOUNDS_SECONDS]
    # Prometheus' buckets include their upper bound, width_bucket's do not.
    bucket = sa.func.width_bucket(microseconds - 1, sa.cast(bounds, postgresql.ARRAY(sa.BigInteger)))
    counted = sa.select(pipeline, phase, bucket.label("bucket"), sa.func.count(), sa.func.sum(microseconds))
    return counted.where(span.is_not(None)).group_by(pipeline, phase, sa.literal_column("bucket"))


def _outcome() -> sa.ColumnElement[str]:
    a = tables.attempt.c
    return sa.case(
        (a.sealed_at.is_not(None), sa.literal_column(f"'{SEALED}'")),
        (a.failed_at.is_(None), sa.literal_column(f"'{OPEN}'")),
        else_=sa.func.split_part(a.error, sa.literal_column("':'"), sa.literal_column("1")),
    )


def _open_attempts(connection: Connection, ranges: Sequence[_Range]) -> dict[str, list[tuple[str, int, int]]]:
    a = tables.attempt.c
    by_pipeline: dict[str, list[tuple[str, int, int]]] = {}
    unended = _of(ranges, a.pipeline, a.txid, a.pipeline, a.txid, a.attempt)
    for key in connection.execute(unended.where(a.sealed_at.is_(None), a.failed_at.is_(None))):
        by_pipeline.setdefault(key[0], []).append((key[0], key[1], key[2]))
    return by_pipeline


def _outcomes_of(connection: Connection, attempts: Sequence[tuple[str, int, int]]) -> Mapping[str, Counter[str]]:
    """Return the outcomes of those attempts that have ended."""
    if not attempts:
        return {}
    a = tables.attempt.c
    by_pipeline: dict[str, Counter[str]] = {}
    ended = sa.select(a.pipeline, _outcome()).where(sa.tuple_(a.pipeline, a.txid, a.attempt).in_(list(attempts)))
    for pipeline, outcome in connection.execute(ended.where(sa.or_(a.sealed_at.is_not(None), a.failed_at.is_not(None)))):
        by_pipeline.setdefault(pipeline, Counter())[outcome] += 1
    return by_pipeline


def _of(ranges: Sequence[_Range], pipeline: sa.Column[Any], txid: sa.Column[Any], *columns: Any) -> sa.Select[Any]:
    """Return a query of a table's columns for all ranges at once, by its columns of pipeline and txid."""
    names, afters, uptos = zip(*ranges, strict=True) if ranges else ((), (), ())
    requested = (
        sa.func.unnest(
            sa.literal(list(names), postgresql.ARRAY(sa.Text)),
            sa.literal(list(afters), postgresql.ARRAY(sa.BigInteger)),
            sa.literal(list(uptos), postgresql.ARRAY(sa.BigInteger)),
        )
        .table_valued(sa.column("pipeline", sa.Text), sa.column("after", sa.BigInteger), sa.column("upto", sa.BigInteger))
        .render_derived(name="requested")
    )
    within = sa.and_(pipeline == requested.c.pipeline, txid > requested.c.after, txid <= requested.c.upto)
    return sa.select(*columns).select_from(requested).join(pipeline.table, within)
