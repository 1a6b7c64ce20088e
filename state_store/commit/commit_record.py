"""The record of commits: what each has written, and the cursor, which advances with it in one statement.

Numbers such as I8 are rules of docs/protocol.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.base.errors import GuardMismatch, HoleDetected
from tidegate.state_store.commit import quarantined_records
from tidegate.state_store.commit.commit_facts import BatchFacts
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.ledger import counted_files, tables
from tidegate.state_store.ledger.batches import QUARANTINED


@dataclass(frozen=True)
class Commit:
    """A committed txid: its attempt, the number of state rows written, whether it had committed before the call.

    A batch that was given up is skipped: its commit has no rows, but a reason.
    """

    pipeline: str
    txid: int
    attempt: int
    key_count: int
    committed_at: datetime
    skipped_reason: str | None
    already_committed: bool

    def __str__(self) -> str:
        outcome = "committed" if self.skipped_reason is None else "skipped"
        outcome = f"already {outcome}" if self.already_committed else outcome
        return f"{self.pipeline} {self.txid}:{self.attempt} {outcome}, {self.key_count} key{'' if self.key_count == 1 else 's'}"


_COMMITS: sa.Select[Any] = sa.select(*(tables.commit.c[each.name] for each in fields(Commit)[:-1]), sa.true())


def find(connection: Connection, pipeline: str, txid: int) -> Commit | None:
    """Return the commit of a txid, if it has committed."""
    c = tables.commit.c
    row = connection.execute(_COMMITS.where(c.pipeline == pipeline, c.txid == txid)).one_or_none()
    return Commit(*row) if row else None


def awaiting_acks(connection: Connection, pipeline: str, limit: int) -> list[Commit]:
    """Return the commits of which the source has yet to learn, in order, at most `limit`."""
    b, c = tables.batch.c, tables.cursor.c
    of_batches = _COMMITS.join(tables.batch, tables.same_batch(tables.commit, tables.batch))
    due = of_batches.join(tables.cursor, c.pipeline == b.pipeline).where(b.pipeline == pipeline, b.txid <= c.txid, b.awaits_ack)
    return [Commit(*row) for row in connection.execute(due.order_by(b.txid).limit(limit))]


def already_committed(connection: Connection, pipeline: str, txid: int, cursor_txid: int) -> Commit:
    """Return the commit of a txid that the cursor has passed.

    Raises: HoleDetected if there is none.
    """
    done = find(connection, pipeline, txid)
    if done is None:
        raise HoleDetected(
            f"{pipeline}: the cursor is at txid {cursor_txid}, but txid {txid} has no commit record. Restore tidegate.commit."
        )
    return done


def skipped(pipeline: str) -> sa.Select[int, str, str]:
    """Return the query for the skipped batches of a pipeline: the txid, who has skipped it, and why."""
    k = tables.commit.c
    return sa.select(k.txid, k.owner, k.skipped_reason).where(k.pipeline == pipeline, k.skipped_reason.is_not(None))


def skip(connection: Connection, spec: PipelineSpec, batch: BatchFacts, owner: str, reason: str) -> Commit:
    """Commit the next batch without rows, as it was given up."""
    counted_files.write(connection, spec, [batch.input], are_skipped=True)
    if QUARANTINED in batch.input.metadata:
        quarantined_records.put_back(connection, spec.name, batch.locked.txid)
    return write(connection, [(batch, (0, 0))], owner, skipped_reason=reason)[0]


def write(
    connection: Connection,
    committed: Sequence[tuple[BatchFacts, tuple[int, int]]],
    owner: str,
    *,
    skipped_reason: str | None = None,
) -> list[Commit]:
    """Record the commits of consecutive batches, each with its numbers of state rows and of bad records; advance the cursor.

    Raises: GuardMismatch if the cursor is not at the txid before.
    """
    first, last = committed[0][0].locked, committed[-1][0]
    rows = [
        {
            "pipeline": batch.locked.pipeline,
            "txid": batch.locked.txid,
            "attempt": batch.locked.attempt,
            "source_digest": batch.input.digest,
            "owner": owner,
            "key_count": keys,
            "quarantined_rows": quarantined_rows,
            "skipped_reason": skipped_reason,
        }
        for batch, (keys, quarantined_rows) in committed
    ]
    c = tables.cursor.c
    recorded = insert(tables.commit).values(rows).returning(tables.commit.c.committed_at).cte("recorded")
    position = {"txid": last.locked.txid, "attempt": last.locked.attempt, "source_digest": last.input.digest}
    is_there = c.pipeline == first.pipeline, c.txid == first.txid - 1
    advanced = sa.update(tables.cursor).where(*is_there).values(position).returning(c.txid).cte("advanced")
    both = sa.outerjoin(recorded, advanced, sa.true())
    # One time for all: that at which the transaction began.
    committed_at, moved = connection.execute(sa.select(recorded.c.committed_at, advanced.c.txid).select_from(both)).all()[0]
    if moved is None:
        raise GuardMismatch(f"{first.pipeline}: the cursor left txid {first.txid - 1} while it was locked.")
    return [
        Commit(
            first.pipeline, batch.locked.txid, batch.locked.attempt, keys, committed_at, skipped_reason, already_committed=False
        )
        for batch, (keys, _) in committed
    ]
