"""Read only: state by key, the ledger by txid, and whose turn it is."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql

from state_store import attempts, tables
from state_store.batches import existing_cut
from state_store.declaration import SNAPSHOT, SourceMetadata, StateSpec

_batches = sa.table(
    "batches",
    *(sa.column(name) for name in ("pipeline", "txid", "phase", "attempt", "source_rows", "key_count", "opened_at")),
    *(sa.column(name) for name in ("started_at", "sealed_at", "committed_at", "owner", "waits_for")),
    schema=tables.LEDGER,
)
_lag = sa.table(
    "lag",
    *(sa.column(name) for name in ("pipeline", "committed", "opened", "pending", "committed_at", "waits_for")),
    schema=tables.LEDGER,
)

# Columns of an attempt that its batch's history shows otherwise.
NOT_SHOWN = ("pipeline", "txid", "source_metadata", "source_digest", "previous_digest")
ACTIONS_SHOWN = 100
# Batches that share keys merge faster together than one by one. So while more are being processed, a batch that is ready waits
# to be merged with them, this many times as long as the last merge took: seconds after a large one, nothing after a small one.
PATIENCE = 3
# But never longer than this, whatever the clock of the machine has done since the last merge or the seal.
LONGEST_PATIENCE_SECONDS = 180


@dataclass(frozen=True)
class BatchStatus:
    """One txid in the ledger; `phase` is derived: planned, processing, failed, halted, processed, committed or skipped."""

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


@dataclass(frozen=True)
class Lag:
    """How far a pipeline is: last committed and last opened txid, what it waits for, and what waits for people."""

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


@dataclass(frozen=True)
class Turn:
    """Whether a txid may commit now; `halted` tells why it will not in this run; given up, it only waits to be skipped.

    Done, it has committed, and its source knows or need not. `begins` tells whether it may be processed: it is in the window.
    """

    opens: bool
    halted: str | None = None
    given_up: bool = False
    done: bool = False
    begins: bool = True


UNREGISTERED = Turn(opens=False, halted="the pipeline is not registered")


@dataclass(frozen=True)
class BatchHistory:
    """All of one batch: frozen metadata, attempts, what they sealed, the commit, what people did to it or its pipeline."""

    status: BatchStatus
    source_metadata: SourceMetadata
    source_digest: str
    attempts: Sequence[dict[str, Any]]
    seals: Sequence[dict[str, Any]]
    commit: dict[str, Any] | None
    actions: Sequence[dict[str, Any]]


def lag(connection: Connection, pipelines: Iterable[str] | None = None) -> list[Lag]:
    """Return how far each pipeline is, in the order of their names."""
    p, q = tables.pipeline.c, tables.quarantine.c
    waiting = sa.select(sa.func.count()).where(q.pipeline == _lag.c.pipeline, q.replayed_txid.is_(None)).scalar_subquery()
    statement: sa.Select[Any] = (
        sa.select(*_lag.c, waiting, p.paused_at, p.paused_by, p.paused_reason)
        .select_from(_lag)
        .join(tables.pipeline, p.pipeline == _lag.c.pipeline)
        .order_by(_lag.c.pipeline)
    )
    if pipelines is not None:
        statement = statement.where(_lag.c.pipeline.in_(list(pipelines)))
    return [Lag(*row) for row in connection.execute(statement)]


def batch_statuses(connection: Connection, pipeline: str, txids: Sequence[int] | None, limit: int) -> list[BatchStatus]:
    """Return ledger rows in txid order: the given txids, or the newest `limit`."""
    statement = sa.select(*_batches.c).where(_batches.c.pipeline == pipeline)
    if txids is not None:
        statement = statement.where(_batches.c.txid.in_(list(txids)))
    rows = connection.execute(statement.order_by(_batches.c.txid.desc()).limit(limit)).all()
    return [BatchStatus(*row) for row in reversed(rows)]


def batch_history(connection: Connection, pipeline: str, txid: int) -> BatchHistory:
    """Return everything the ledger knows of one batch.

    Raises: UnknownBatch, MetadataCorrupt.
    """
    cut = existing_cut(connection, pipeline, txid)
    (status,) = batch_statuses(connection, pipeline, [txid], 1)
    a, s, c = tables.attempt.c, tables.seal.c, tables.commit.c
    attempts = (
        sa.select(
            *(column for column in a if column.name not in NOT_SHOWN),
            sa.func.encode(a.source_digest, "hex").label("source_digest"),
        )
        .where(a.pipeline == pipeline, a.txid == txid)
        .order_by(a.attempt)
    )
    seals = (
        sa.select(s.attempt, s.state, s.partition, s.task_attempt, s.rows, s.digest)
        .where(s.pipeline == pipeline, s.txid == txid)
        .order_by(s.attempt, s.state, s.partition)
    )
    commit = sa.select(
        c.attempt, c.owner, c.committed_at, c.merged_at, c.key_count, c.quarantined_rows, c.skipped_reason
    ).where(c.pipeline == pipeline, c.txid == txid)
    return BatchHistory(
        status,
        cut.metadata,
        cut.digest.hex(),
        list(_dicts(connection.execute(attempts))),
        list(_dicts(connection.execute(seals))),
        next(_dicts(connection.execute(commit)), None),
        actions(connection, pipeline, txid),
    )


def actions(connection: Connection, pipeline: str, txid: int) -> list[dict[str, Any]]:
    """Return the newest of what people did by hand to a batch or to its whole pipeline, in the order in which they did it."""
    o = tables.operator_action.c
    statement = (
        sa.select(o.acted_at, o.action, o.txid, o.owner, o.reason)
        .where(o.pipeline == pipeline, sa.or_(o.txid == txid, o.txid.is_(None)))
        .order_by(o.number.desc())
        .limit(ACTIONS_SHOWN)
    )
    return list(reversed(list(_dicts(connection.execute(statement)))))


def turns(connection: Connection, waiting: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Turn]:
    """Tell for each (pipeline, txid) whether it may commit now; one statement for all of them.

    A turn opens when every earlier txid has committed, and this one's processing has ended somehow or it was given up; a
    little later if more batches are on their way that could be merged with it (`PATIENCE`). It is halted when the batch
    itself, or an earlier one, waits for a person; one that was given up does not, it is skipped in its turn. A hint for
    schedulers: the commit checks again under the lock.
    """
    if not waiting:
        return {}
    pipelines, txids = zip(*waiting, strict=True)
    found = connection.execute(_TURNS, {"pipelines": list(pipelines), "txids": list(txids)})
    return {(row[0], row[1]): Turn(*row[2:]) for row in found}


def awaiting_acks(connection: Connection, pipeline: str, limit: int) -> list[int]:
    """Return committed or skipped txids of which the source was not told yet, in order, at most `limit`."""
    b, c = tables.batch.c, tables.cursor.c
    behind_cursor = (c.pipeline == b.pipeline, b.pipeline == pipeline, b.txid <= c.txid)
    return list(connection.scalars(sa.select(b.txid).where(*behind_cursor, b.awaits_ack).order_by(b.txid).limit(limit)))


def _turns() -> sa.Select[Any]:
    """Return the statement for any number of (pipeline, txid), given as two arrays."""
    b, c, a = tables.batch.c, tables.cursor.c, tables.attempt.c
    asked = (
        sa.func.unnest(
            sa.bindparam("pipelines", type_=postgresql.ARRAY(sa.Text)),
            sa.bindparam("txids", type_=postgresql.ARRAY(sa.BigInteger)),
        )
        .table_valued(sa.column("pipeline", sa.Text), sa.column("txid", sa.BigInteger))
        .render_derived(name="asked")
    )
    halted = (
        sa.select(sa.func.concat("txid ", b.txid, " is halted: ", b.halted_reason))
        .where(b.pipeline == asked.c.pipeline, b.txid > c.txid, b.txid <= asked.c.txid, b.halted_at.is_not(None))
        .order_by(b.txid)
        .limit(1)
        .scalar_subquery()
    )
    of_batch = sa.and_(b.pipeline == asked.c.pipeline, b.txid == asked.c.txid)
    given_up = sa.exists().where(of_batch, b.skip_reason.is_not(None))
    ended = (
        sa.exists()
        .where(of_batch, a.pipeline == b.pipeline, a.txid == b.txid, a.attempt == b.attempt)
        .where(sa.or_(a.failed_at.is_not(None), sa.and_(a.sealed_at.is_not(None), ~_waits_for_company())))
        .correlate(asked, tables.cursor)
    )
    opens = sa.or_(c.txid >= asked.c.txid, sa.and_(c.txid == asked.c.txid - 1, sa.or_(ended, given_up)))
    done = sa.and_(c.txid >= asked.c.txid, ~sa.exists().where(of_batch, b.awaits_ack))
    begins = asked.c.txid - c.txid <= _in_flight()
    answer = sa.select(asked.c.pipeline, asked.c.txid, opens, halted, given_up, done, begins)
    return answer.join(tables.cursor, c.pipeline == asked.c.pipeline)


def _in_flight() -> sa.ScalarSelect[int]:
    """Return how many batches behind the cursor at hand may have begun."""
    p, c = tables.pipeline.c, tables.cursor.c
    return sa.select(p.in_flight).where(p.pipeline == c.pipeline).correlate(tables.cursor).scalar_subquery()


def _waits_for_company() -> sa.ColumnElement[bool]:
    """Tell of the sealed attempt at hand, the next behind the cursor at hand, whether it should wait for others to merge with.

    Opaque states are merged one by one: there, to wait wins nothing.
    """
    c, a, k, p = tables.cursor.c, tables.attempt.c, tables.commit.c, tables.pipeline.c
    later = tables.batch.alias("later")
    is_company_coming = (
        sa.exists()
        .where(later.c.pipeline == c.pipeline, later.c.txid > c.txid, later.c.txid - c.txid <= _in_flight())
        .where(~attempts.newest_has_ended(later))
        .where(later.c.halted_at.is_(None), later.c.skip_reason.is_(None))
        .correlate(tables.cursor)
    )
    last_merge = (
        sa.select(sa.extract("epoch", k.merged_at - k.committed_at))
        .where(k.pipeline == c.pipeline, k.txid == c.txid)
        .correlate(tables.cursor)
        .scalar_subquery()
    )
    merges_together = ~(
        sa.exists()
        .where(p.pipeline == c.pipeline, p.declaration.contains({"states": [{"kind": "opaque"}]}))
        .correlate(tables.cursor)
    )
    waited = sa.extract("epoch", sa.func.clock_timestamp() - a.sealed_at)
    patience = sa.func.least(PATIENCE * sa.func.coalesce(last_merge, 0), LONGEST_PATIENCE_SECONDS)
    # Less than nothing is a clock that was put back: nobody knows how long it has waited, so it waits no longer.
    return sa.and_(waited >= 0, waited < patience, merges_together, is_company_coming)


# Asked several times by each task of Airflow: built once, in the process that they are forked from.
_TURNS = _turns()


def only_commits_before(connection: Connection, pipeline: str, txid: int) -> bool:
    """Tell whether this batch and all before it that have not committed are sealed or given up, and none waits for a person."""
    b, c = tables.batch.c, tables.cursor.c
    is_ready = sa.and_(b.halted_at.is_(None), sa.or_(b.skip_reason.is_not(None), attempts.newest_is_sealed(tables.batch)))
    behind_cursor = (c.pipeline == b.pipeline, b.pipeline == pipeline, b.txid > c.txid, b.txid <= txid)
    return not connection.scalar(sa.select(sa.exists().where(*behind_cursor, ~is_ready)))


def quarantined(connection: Connection, pipeline: str, txid: int | None, limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield the records that wait in quarantine, in the order of their batches, without holding them all."""
    q = tables.quarantine.c
    of_batch = [] if txid is None else [q.txid == txid]
    statement = (
        sa.select(q.txid, q.number, q.reason, q.origin, q.payload, q.is_raw, q.quarantined_at)
        .where(q.pipeline == pipeline, q.replayed_txid.is_(None), *of_batch)
        .order_by(q.txid, q.number)
        .limit(limit)
    )
    yield from _dicts(connection.execution_options(yield_per=10_000).execute(statement))


def quarantine_counts(connection: Connection, pipeline: str, txid: int | None) -> dict[int, int]:
    """Return how many records of each txid wait in quarantine; only of this one, if it is given."""
    q = tables.quarantine.c
    of_batch = [] if txid is None else [q.txid == txid]
    statement = (
        sa.select(q.txid, sa.func.count())
        .where(q.pipeline == pipeline, q.replayed_txid.is_(None), *of_batch)
        .group_by(q.txid)
        .order_by(q.txid)
    )
    return {row[0]: row[1] for row in connection.execute(statement)}


def state_rows(connection: Connection, state: StateSpec, limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield a state's rows in key order, keys and values and txid, without holding them all."""
    table = tables.state_table_of(state)
    columns = [column for column in table.c if column.name != SNAPSHOT]
    statement = sa.select(*columns).order_by(*(table.c[key.name] for key in state.keys)).limit(limit)
    yield from _dicts(connection.execution_options(yield_per=10_000).execute(statement))


def _dicts(rows: sa.Result[Any]) -> Iterator[dict[str, Any]]:
    return (dict(row) for row in rows.mappings())
