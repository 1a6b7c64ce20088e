"""When attempts at batches ran, waited and committed, for traces."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.ledger import tables


class AttemptTimes(NamedTuple):
    """One attempt at a batch, and its commit if it has committed; times by the database's clock, but for `staged_at`.

    Spark's client notes `staged_at` by its own clock. The last six are None unless this attempt was committed.
    """

    pipeline: str
    txid: int
    attempt: int
    owner: str
    source_rows: int | None
    started_at: datetime
    staged_at: datetime | None
    sealed_at: datetime | None
    failed_at: datetime | None
    error: str | None
    committed_by: str | None
    committed_at: datetime | None
    merged_at: datetime | None
    key_count: int | None
    quarantined_rows: int | None
    skipped_reason: str | None

    @property
    def ended_at(self) -> datetime | None:
        """When it sealed or failed, None while it works; not before its start, even if the clock was set back."""
        end = self.sealed_at or self.failed_at
        return max(self.started_at, end) if end else None


def attempt_times(connection: Connection, pipeline: str, txids: Sequence[int]) -> list[AttemptTimes]:
    """Return all attempts at some batches, in the order of txid and attempt."""
    a, c = tables.attempt.c, tables.commit.c
    of_attempt = [a[name] for name in AttemptTimes._fields[:10]]
    of_commit = [c.owner, c.committed_at, c.merged_at, c.key_count, c.quarantined_rows, c.skipped_reason]
    statement = (
        sa.select(*of_attempt, *of_commit)
        .select_from(sa.outerjoin(tables.attempt, tables.commit, tables.same_attempt(tables.commit, tables.attempt)))
        .where(a.pipeline == pipeline, a.txid.in_(list(txids)))
        .order_by(a.txid, a.attempt)
    )
    return [AttemptTimes(*row) for row in connection.execute(statement)]
