"""Turns: which batches may begin or commit, wait to be merged together, or have another process at work.

Everything here is a hint, read without a lock, that saves work or waiting. What decides is checked under locks: only the newest
attempt at a batch commits (it fences the older ones), in the order of the txids, the batches' numbers.

    turn     a batch may begin if it is one of the next `window` txids after the cursor, unless its pipeline is paused, and
             commit after every earlier txid
    waiting  a sealed batch waits a little for others that are being processed: merged together, they take less time
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql

from tidegate.state_store.ledger import tables
from tidegate.state_store.ledger.batches import in_window, is_held, with_current_attempt
from tidegate.state_store.seal import attempts

# A ready batch waits for this multiple of the last merge's duration: a long time after a large merge, hardly any after a small
# one. It never waits longer than the limit, even if the machine's clock was changed since the last merge or the seal.
MERGE_PATIENCE_FACTOR, LONGEST_MERGE_WAIT_SECONDS = 3, 180


@dataclass(frozen=True)
class Turn:
    """Whether a txid may commit now (`opens`), and be processed (`begins`): it is in the window, and no pause holds it.

    `halted` is why it will not commit in this run. A batch that was given up only waits to be skipped. It is `done` once it has
    committed, and the source has learned of that if it has to.
    """

    opens: bool
    halted: str | None = None
    given_up: bool = False
    done: bool = False
    begins: bool = True


@dataclass(frozen=True)
class Processing:
    """Whether processing `is_over` (sealed, given up or committed), and whether an attempt is at it."""

    is_over: bool
    is_in_work: bool


def has_room(txid: int, committed: int, window: int) -> bool:
    """Return whether a txid is in the pipeline's window, the most batches that may be begun and not committed."""
    return txid - committed <= window


RETIRED = "the pipeline was retired"
UNREGISTERED = Turn(opens=False, halted="the pipeline is not registered")


def turns(connection: Connection, waiting: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Turn]:
    """Return the turn of each (pipeline, txid), by a single statement.

    It opens when every earlier txid has committed, and the batch's processing has ended or it was given up; a little later if
    others that are being processed could be merged with it. It is halted while this batch or an earlier one waits for a person,
    or once the pipeline is retired.
    """
    if not waiting:
        return {}
    pipelines, txids = zip(*waiting, strict=True)
    rows = connection.execute(_TURNS, {"pipelines": list(pipelines), "txids": list(txids)})
    return {(row[0], row[1]): Turn(*row[2:]) for row in rows}


def _turns() -> sa.Select[Any]:
    """Return the statement, whose parameters are an array of pipelines and one of txids."""
    b, c, a, p = tables.batch.c, tables.cursor.c, tables.attempt.c, tables.pipeline.c
    requested = (
        sa.func.unnest(
            sa.bindparam("pipelines", type_=postgresql.ARRAY(sa.Text)),
            sa.bindparam("txids", type_=postgresql.ARRAY(sa.BigInteger)),
        )
        .table_valued(sa.column("pipeline", sa.Text), sa.column("txid", sa.BigInteger))
        .render_derived(name="requested")
    )
    halted = (
        sa.select(sa.func.concat("txid ", b.txid, " is halted: ", b.halted_reason))
        .where(b.pipeline == requested.c.pipeline, b.txid > c.txid, b.txid <= requested.c.txid, b.halted_at.is_not(None))
        .order_by(b.txid)
        .limit(1)
        .scalar_subquery()
    )
    of_batch = tables.same_batch(tables.batch, requested)
    given_up = sa.exists().where(of_batch, b.skip_reason.is_not(None))
    ended = (
        sa.exists()
        .where(of_batch, tables.same_attempt(tables.attempt, tables.batch))
        .where(sa.or_(a.failed_at.is_not(None), sa.and_(a.sealed_at.is_not(None), ~_waits_to_merge_together())))
        .correlate(requested, tables.cursor)
    )
    opens = sa.or_(c.txid >= requested.c.txid, sa.and_(c.txid == requested.c.txid - 1, sa.or_(ended, given_up)))
    done = sa.and_(c.txid >= requested.c.txid, ~sa.exists().where(of_batch, b.awaits_ack))
    begins = sa.and_(in_window(requested.c.txid), ~is_held(requested.c.txid, requested.c.pipeline))
    is_retired = sa.and_(p.retired_at.is_not(None), c.txid < requested.c.txid)
    stopped = sa.case((is_retired, sa.literal_column(f"'{RETIRED}'")), else_=halted)
    answer = sa.select(requested.c.pipeline, requested.c.txid, opens, stopped, given_up, done, begins)
    of_pipeline = sa.and_(c.pipeline == requested.c.pipeline, p.pipeline == c.pipeline)
    return answer.join(sa.join(tables.cursor, tables.pipeline, p.pipeline == c.pipeline), of_pipeline)


def _waits_to_merge_together() -> sa.ColumnElement[bool]:
    """Return whether the sealed batch after the cursor should wait for others to be merged with it."""
    c, a, k, p = tables.cursor.c, tables.attempt.c, tables.commit.c, tables.pipeline.c
    later = tables.batch.alias("later")
    others_are_coming = (
        sa.exists()
        .where(later.c.pipeline == c.pipeline, later.c.txid > c.txid, in_window(later.c.txid))
        .where(~attempts.newest_has_ended(later))
        .where(later.c.halted_at.is_(None), later.c.skip_reason.is_(None))
        .correlate(tables.cursor)
    )
    last_merge = (
        sa.select(sa.extract("epoch", k.merged_at - k.committed_at))
        .where(tables.same_batch(tables.commit, tables.cursor))
        .correlate(tables.cursor)
        .scalar_subquery()
    )
    merges_together = sa.exists().where(p.pipeline == c.pipeline, ~p.commits_alone).correlate(tables.cursor)
    waited = sa.extract("epoch", sa.func.clock_timestamp() - a.sealed_at)
    patience = sa.func.least(MERGE_PATIENCE_FACTOR * sa.func.coalesce(last_merge, 0), LONGEST_MERGE_WAIT_SECONDS)
    # A negative time means that the clock was set back: the time waited is unknown, so the batch waits no longer.
    return sa.and_(waited >= 0, waited < patience, merges_together, others_are_coming)


# Executed several times by each Airflow task: built once, in the process from which the tasks are forked.
_TURNS = _turns()


def processing(connection: Connection, waiting: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Processing]:
    """Return for each (pipeline, txid) whether it is still to be processed, by a single statement.

    That is so for a sealed batch, too, if its declaration is not the registered one, or it continues other metadata than the
    previous batch has now.
    """
    b, p, c, a = tables.batch.c, tables.pipeline.c, tables.cursor.c, tables.attempt.c
    continues = sa.case((a.attempt.is_(None), b.previous_digest), else_=a.previous_digest)
    is_sealed = sa.and_(a.sealed_at.is_not(None), a.fingerprint == p.fingerprint)
    is_decided = sa.and_(sa.or_(is_sealed, b.skip_reason.is_not(None)), continues.is_not_distinct_from(_previous_input()))
    is_over = sa.or_(c.txid >= b.txid, sa.func.coalesce(is_decided, sa.false()))
    statement = (
        sa.select(b.pipeline, b.txid, is_over, attempts.newest_is_alive(tables.batch))
        .select_from(tables.batch)
        .join(tables.pipeline, p.pipeline == b.pipeline)
        .join(tables.cursor, c.pipeline == b.pipeline)
        .outerjoin(tables.attempt, tables.same_attempt(tables.attempt, tables.batch))
        .where(sa.tuple_(b.pipeline, b.txid).in_(list(waiting)))
    )
    return {(row[0], row[1]): Processing(row[2], row[3]) for row in connection.execute(statement)}


def _previous_input() -> sa.ScalarSelect[bytes]:
    """Return the digest of the metadata that the previous batch has now; NULL if there is none."""
    before, done, tried = tables.batch.alias("before"), tables.commit.alias("done"), tables.attempt.alias("tried")
    return (
        sa.select(sa.func.coalesce(tried.c.source_digest, before.c.source_digest))
        .select_from(with_current_attempt(before, done, tried))
        .where(before.c.pipeline == tables.batch.c.pipeline, before.c.txid == tables.batch.c.txid - 1)
        .correlate(tables.batch)
        .scalar_subquery()
    )


def next_unbegun(connection: Connection, pipeline: str, run_id: str, after: int) -> int | None:
    """Return a run's next txid after this one that may begin and has not, if any."""
    batch, run_batch = tables.batch.c, tables.run_batch.c
    may_begin = in_window(run_batch.txid), ~is_held(run_batch.txid, run_batch.pipeline)
    return connection.scalar(
        sa.select(run_batch.txid)
        .join_from(tables.run_batch, tables.batch, tables.same_batch(tables.run_batch, tables.batch))
        .join(tables.cursor, tables.cursor.c.pipeline == run_batch.pipeline)
        .where(run_batch.pipeline == pipeline, run_batch.run_id == run_id, run_batch.txid > after)
        .where(batch.attempt == 0, batch.skip_reason.is_(None), *may_begin)
        .order_by(run_batch.txid)
        .limit(1)
    )


def is_in_work(connection: Connection, pipeline: str, txid: int) -> bool:
    """Return whether another process is at work on the batch, as far as its newest attempt shows."""
    b = tables.batch.c
    by_another = attempts.newest_is_alive(tables.batch), attempts.is_of_another_process(tables.batch)
    return bool(connection.scalar(sa.select(sa.exists().where(b.pipeline == pipeline, b.txid == txid, *by_another))))
