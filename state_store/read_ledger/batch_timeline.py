"""A range of batches with the times of their attempts and commits, for a picture of processing and committing."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.ledger import tables

MOST_BATCHES = 500
ATTEMPTS_SHOWN = 20  # the newest ones of a batch


@dataclass(frozen=True)
class Timeline:
    """The last committed txid, and batches in txid order, each with its newest attempts and its commit as columns by name."""

    cursor: int
    batches: Sequence[dict[str, Any]]


def timeline(connection: Connection, pipeline: str, first: int | None, last: int) -> Timeline:
    """Return the batches from `first` to `first + last - 1`, or the newest `last`; at most MOST_BATCHES.

    Each batch has txid, phase and opened_at; attempts with attempt, started_at, staged_at, sealed_at, failed_at, seen_at, error
    and owner; and commit, None if there is none, with attempt, committed_at, merged_at and skipped.
    """
    b, v, c = tables.batch.c, tables.batches_view.c, tables.cursor.c
    count = min(last, MOST_BATCHES)
    if first is None:
        newest = connection.scalar(sa.select(sa.func.max(b.txid)).where(b.pipeline == pipeline)) or 0
        first = max(newest - count + 1, 1)
    here = first, first + count - 1
    shown = sa.select(v.txid, v.phase, v.opened_at).where(v.pipeline == pipeline, v.txid.between(*here)).order_by(v.txid)
    attempts = _attempts(connection, pipeline, here)
    commits = _commits(connection, pipeline, here)
    batches = [
        {**row, "attempts": attempts.get(row["txid"], []), "commit": commits.get(row["txid"])}
        for row in connection.execute(shown).mappings()
    ]
    return Timeline(connection.scalar(sa.select(c.txid).where(c.pipeline == pipeline)) or 0, batches)


def _attempts(connection: Connection, pipeline: str, here: tuple[int, int]) -> dict[int, list[dict[str, Any]]]:
    a, b = tables.attempt.c, tables.batch.c
    statement = (
        sa.select(a.txid, a.attempt, a.started_at, a.staged_at, a.sealed_at, a.failed_at, a.seen_at)
        .add_columns(error_code(a.error).label("error"), a.owner)
        .join(tables.batch, tables.same_batch(tables.batch, tables.attempt))
        .where(a.pipeline == pipeline, a.txid.between(*here), a.attempt > b.attempt - ATTEMPTS_SHOWN)
        .order_by(a.txid, a.attempt)
    )
    by_txid: dict[int, list[dict[str, Any]]] = {}
    for row in connection.execute(statement).mappings():
        values = dict(row)
        by_txid.setdefault(values.pop("txid"), []).append(values)
    return by_txid


def _commits(connection: Connection, pipeline: str, here: tuple[int, int]) -> dict[int, dict[str, datetime | int | bool]]:
    k = tables.commit.c
    skipped = k.skipped_reason.is_not(None).label("skipped")
    statement = sa.select(k.txid, k.attempt, k.committed_at, k.merged_at, skipped)
    rows = connection.execute(statement.where(k.pipeline == pipeline, k.txid.between(*here))).mappings()
    return {row["txid"]: {name: value for name, value in row.items() if name != "txid"} for row in rows}


def error_code(error: sa.ColumnElement[str | None]) -> sa.ColumnElement[str | None]:
    """Return the code at the beginning of a recorded error, such as SOURCE_CHANGED; NULL without an error."""
    return sa.func.nullif(sa.func.left(sa.func.split_part(error, ":", 1), 100), "")
