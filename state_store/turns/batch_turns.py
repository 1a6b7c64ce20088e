"""Turns: which batches may begin or commit, wait to be merged together, or have another process at work.

One statement reads the facts without a lock, pure functions decide. Everything here is a hint that saves work or waiting; what
counts is checked under locks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql

from tidegate.state_store.attempt import attempts
from tidegate.state_store.attempt.attempts import AttemptRow
from tidegate.state_store.ledger import tables
from tidegate.state_store.ledger.batches import with_current_attempt
from tidegate.state_store.turns.wait_to_merge import has_waited_enough


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


class TurnFacts(NamedTuple):
    """What the ledger has of a txid, of its pipeline, and of the newest attempt at its batch.

    An unknown batch has no `attempt`. `halted_txid` is the first uncommitted one that is halted, `unended_txid` the first after
    the next to commit whose newest attempt has not ended, and that is neither halted nor given up; `unended_attempt` is the
    number of that attempt. `continues` is the digest of the input that the newest attempt, or else the plan, continues;
    `previous_digest` that of what the batch before has now.
    """

    pipeline: str
    txid: int
    committed: int
    window: int
    paused_at: datetime | None
    retired_at: datetime | None
    commits_alone: bool
    fingerprint: str
    last_merge_seconds: float | None
    halted_txid: int | None
    halted_reason: str | None
    unended_txid: int | None
    unended_attempt: int | None
    attempt: int | None
    skip_reason: str | None
    awaits_ack: bool | None
    newest: AttemptRow | None
    continues: bytes | None = None
    previous_digest: bytes | None = None

    @property
    def continues_previous(self) -> bool:
        """Whether the batch continues what the batch before has now; the first continues nothing (I12)."""
        return self.continues == self.previous_digest

    @property
    def is_committed(self) -> bool:
        """Whether the cursor has passed the txid."""
        return self.txid <= self.committed

    @property
    def is_next(self) -> bool:
        """Whether the txid is the next to commit."""
        return self.txid == self.committed + 1

    @property
    def is_over(self) -> bool:
        """Whether the batch need not be processed: it has committed, or is sealed or given up as it is planned now.

        A seal by another declaration than the registered one, or after other metadata than the previous batch has, is void.
        """
        is_sealed = self.newest is not None and self.newest.is_sealed_by(self.fingerprint)
        return self.is_committed or ((is_sealed or self.skip_reason is not None) and self.continues_previous)

    @property
    def is_in_work(self) -> bool:
        """Whether a process is at work on the batch."""
        return self.newest is not None and self.newest.is_at_work


UNREGISTERED = Turn(opens=False, halted="the pipeline is not registered")


def has_room(txid: int, committed: int, window: int) -> bool:
    """Return whether a txid is in the pipeline's window, the most batches that may be begun and not committed."""
    return txid - committed <= window


def is_held(attempts_begun: int | None, paused_at: datetime | None) -> bool:
    """Return whether a batch may not begin because its pipeline is paused: what has begun goes on."""
    return attempts_begun == 0 and paused_at is not None


def turn(facts: TurnFacts) -> Turn:
    """Return the turn of a txid.

    It opens when every earlier txid has committed, and the batch's processing has ended or it was given up; a little later if
    others that are being processed could be merged with it. It is halted while this batch or an earlier one waits for a person,
    or once the pipeline is retired.
    """
    given_up = facts.skip_reason is not None
    halted = None
    if facts.retired_at is not None and not facts.is_committed:
        halted = "the pipeline was retired"
    elif facts.halted_txid is not None and facts.halted_txid <= facts.txid:
        halted = f"txid {facts.halted_txid} is halted: {facts.halted_reason}"
    return Turn(
        opens=facts.is_committed or (facts.is_next and (given_up or _may_commit(facts))),
        halted=halted,
        given_up=given_up,
        done=facts.is_committed and not facts.awaits_ack,
        begins=has_room(facts.txid, facts.committed, facts.window) and not is_held(facts.attempt, facts.paused_at),
    )


def _may_commit(facts: TurnFacts) -> bool:
    """Return whether the newest attempt at the next batch has failed, or is sealed and need not wait for others."""
    if facts.newest is None:
        return False
    if facts.newest.sealed_seconds is None:
        return facts.newest.failed_at is not None
    unended = facts.unended_txid
    is_coming = unended is not None and has_room(unended, facts.committed, facts.window)
    others_are_coming = is_coming and not is_held(facts.unended_attempt, facts.paused_at)
    has_waited = has_waited_enough(facts.newest.sealed_seconds, facts.last_merge_seconds or 0)
    return facts.commits_alone or not others_are_coming or has_waited


def _read(connection: Connection, statement: sa.Select[Any], waiting: Sequence[tuple[str, int]]) -> Iterator[TurnFacts]:
    if not waiting:
        return
    pipelines, txids = zip(*waiting, strict=True)
    for row in connection.execute(statement, {"pipelines": list(pipelines), "txids": list(txids)}):
        newest = AttemptRow(*row[_OWN:_END]) if row[_OWN] is not None else None
        yield TurnFacts(*(*row[:_OWN], newest, *row[_END:]))


def turns(connection: Connection, waiting: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Turn]:
    """Return whether each (pipeline, txid) of a registered pipeline may commit now. A hint: the commit checks that."""
    return {facts[:2]: turn(facts) for facts in _read(connection, _TURNS, waiting)}


def processing(connection: Connection, waiting: Sequence[tuple[str, int]]) -> dict[tuple[str, int], TurnFacts]:
    """Return for each batch whether its processing `is_over`, or it `is_in_work`. A hint: `start_attempt` decides."""
    return {facts[:2]: facts for facts in _read(connection, _PROCESSING, waiting) if facts.attempt is not None}


def next_unbegun(connection: Connection, pipeline: str, run_id: str, after: int = 0) -> int | None:
    """Return a run's next txid after this one that may begin and has not, if any; begin it in mode "first"."""
    b, r = tables.batch.c, tables.run_batch.c
    begun = sa.select(b.attempt).where(tables.same_batch(tables.batch, tables.run_batch), b.skip_reason.is_(None))
    of_run = (r.pipeline == pipeline, r.run_id == run_id, r.txid > after, begun.scalar_subquery() == 0)
    txid = connection.scalar(sa.select(sa.func.min(r.txid)).where(*of_run))
    return txid if txid is not None and turns(connection, [(pipeline, txid)])[pipeline, txid].begins else None


def is_in_work(connection: Connection, pipeline: str, txid: int) -> bool:
    """Return whether another process is at work on the batch, as far as its newest attempt shows."""
    facts = processing(connection, [(pipeline, txid)]).get((pipeline, txid))
    return facts is not None and facts.newest is not None and facts.newest.is_at_work_elsewhere


def _facts() -> sa.Select[Any]:
    """Return the statement of facts, but for the last; its parameters are an array of pipelines and one of txids."""
    b = tables.batch.c
    arrays = (
        sa.bindparam("pipelines", type_=postgresql.ARRAY(sa.Text)),
        sa.bindparam("txids", type_=postgresql.ARRAY(sa.BigInteger)),
    )
    each = sa.func.unnest(*arrays).table_valued(sa.column("pipeline", sa.Text), sa.column("txid", sa.BigInteger))
    requested = sa.select(each.render_derived()).cte("requested")
    of_pipeline = _of_pipeline(requested).cte("of_pipeline").prefix_with("MATERIALIZED")
    return (
        sa.select(requested.c.pipeline, requested.c.txid, *list(of_pipeline.c)[1:])
        .add_columns(b.attempt, b.skip_reason, b.awaits_ack, *attempts.attempt_columns())
        .select_from(requested)
        .join(of_pipeline, of_pipeline.c.pipeline == requested.c.pipeline)
        .outerjoin(tables.batch, tables.same_batch(tables.batch, requested))
        .outerjoin(tables.attempt, tables.same_attempt(tables.attempt, tables.batch))
    )


def _of_pipeline(requested: sa.FromClause) -> sa.Select[Any]:
    c, k, p, later = tables.cursor.c, tables.commit.c, tables.pipeline.c, tables.batch.alias("later")
    last = sa.select(requested.c.pipeline, sa.func.max(requested.c.txid).label("txid")).group_by(requested.c.pipeline)
    last_requested = last.subquery("last_requested")
    after_cursor = sa.select(later.c.txid, later.c.halted_reason).where(later.c.pipeline == c.pipeline, later.c.txid > c.txid)
    in_order = after_cursor.order_by(later.c.txid).limit(1).correlate(tables.cursor, last_requested)
    halted = in_order.where(later.c.txid <= last_requested.c.txid, later.c.halted_at.is_not(None)).lateral("halted")
    is_free = later.c.halted_at.is_(None), later.c.skip_reason.is_(None), attempts.newest_ended_at(later).is_(None)
    of_unended = in_order.with_only_columns(later.c.txid, later.c.attempt)
    unended = of_unended.where(later.c.txid > c.txid + 1, *is_free).lateral("unended")
    return (
        sa.select(c.pipeline, c.txid, p.in_flight, p.paused_at, p.retired_at, p.commits_alone, p.fingerprint)
        .add_columns(sa.cast(sa.extract("epoch", k.merged_at - k.committed_at), sa.Float), *halted.c, *unended.c)
        .select_from(last_requested)
        .join(tables.cursor, c.pipeline == last_requested.c.pipeline)
        .join(tables.pipeline, p.pipeline == c.pipeline)
        .outerjoin(tables.commit, tables.same_batch(tables.commit, tables.cursor))
        .outerjoin(halted, sa.true())
        .outerjoin(unended, sa.true())
    )


def _digests() -> list[sa.ColumnElement[Any]]:
    """Return the digest of the input that a batch continues, and that of the input which the batch before has now."""
    a, before = tables.attempt.c, tables.batch.alias("before")
    done, tried = tables.commit.alias("done"), tables.attempt.alias("tried")
    previous = (
        sa.select(sa.func.coalesce(tried.c.source_digest, before.c.source_digest))
        .select_from(with_current_attempt(before, done, tried))
        .where(before.c.pipeline == tables.batch.c.pipeline, before.c.txid == tables.batch.c.txid - 1)
        .correlate(tables.batch)
    )
    return [sa.case((a.attempt.is_(None), tables.batch.c.previous_digest), else_=a.previous_digest), previous.scalar_subquery()]


# Executed several times by each Airflow task: built once, in the process from which the tasks are forked.
_TURNS = _facts()
_PROCESSING = _TURNS.add_columns(*attempts.session_columns(), *_digests())
_OWN = len(TurnFacts._fields) - 3  # the columns of the newest attempt begin here
_END = _OWN + len(AttemptRow._fields)  # in `_PROCESSING`, two are left
