"""Search for batches by phase, time and error: the newest first; each statement reads a bounded number of them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.ledger import tables
from tidegate.state_store.ledger.batches import MAX_TXID
from tidegate.state_store.read_ledger.batch_phases import ENDED
from tidegate.state_store.read_ledger.batch_status import BatchStatus, batch_error, statuses

LOOKED_AT = 10_000  # the most batches that one statement reads


@dataclass(frozen=True)
class BatchFilter:
    """Conditions that a batch has to meet; None stands for no condition.

    `since` and `until` limit the time of a batch's last event: opened, begun, sealed, failed, halted or committed. `error` is a
    code, such as SOURCE_CHANGED, or the name of an exception, in capitals or not. The txids are inclusive.
    """

    phase: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    from_txid: int | None = None
    to_txid: int | None = None


@dataclass(frozen=True)
class SearchResult:
    """Some matching batches, newest first. The search continues below the txid `before`; if that is None, it has ended."""

    batches: list[BatchStatus]
    before: int | None


def search(
    connection: Connection, pipeline: str, wanted: BatchFilter, before: int | None = None, limit: int = 100
) -> SearchResult:
    """Search the LOOKED_AT newest txids, below `before` if it is given, for at most `limit` matching batches.

    A call may find none although older batches match. All its statements should see one snapshot.
    """
    b, v, k = tables.batch.c, tables.batches_view.c, tables.cursor.c
    cursor = connection.scalar(sa.select(k.txid).where(k.pipeline == pipeline)) or 0
    first, last = wanted.from_txid or 1, wanted.to_txid or MAX_TXID
    if wanted.phase in ENDED:
        last = min(last, cursor)
    elif wanted.phase is not None:
        first = max(first, cursor + 1)
    if before is not None:
        last = min(last, before - 1)
    looked_at = sa.select(b.txid).where(b.pipeline == pipeline, b.txid.between(first, last)).order_by(b.txid.desc())
    counted = looked_at.limit(LOOKED_AT).subquery().c.txid
    lowest, highest, count = connection.execute(sa.select(sa.func.min(counted), sa.func.max(counted), sa.func.count())).one()
    if not count:
        return SearchResult([], None)
    here = statuses(pipeline).where(v.txid.between(lowest, highest))
    matching = here.where(*_conditions(wanted)).order_by(v.txid.desc()).limit(limit)
    rows = [BatchStatus(*row) for row in connection.execute(matching)]
    if len(rows) == limit:
        return SearchResult(rows, rows[-1].txid)
    is_last = count < LOOKED_AT
    if not is_last and wanted.since is not None and highest <= cursor:
        is_last = not _have_event_since(connection, here, wanted.since)
    return SearchResult(rows, None if is_last else lowest)


def _have_event_since(connection: Connection, batches: sa.Select[Any], since: datetime) -> bool:
    """Return whether one of these batches has had an event since; if not, no earlier committed batch has."""
    return connection.execute(batches.where(_last_event() >= since).limit(1)).first() is not None


def _conditions(wanted: BatchFilter) -> list[sa.ColumnElement[bool]]:
    conditions: list[sa.ColumnElement[bool]] = []
    if wanted.phase is not None:
        conditions.append(tables.batches_view.c.phase == wanted.phase)
    if wanted.error is not None:
        conditions.append(sa.func.lower(batch_error()) == wanted.error.lower())
    if wanted.since is not None:
        conditions.append(_last_event() >= wanted.since)
    if wanted.until is not None:
        conditions.append(_last_event() <= wanted.until)
    return conditions


def _last_event() -> sa.ColumnElement[datetime]:
    v, a, b = tables.batches_view.c, tables.attempt.c, tables.batch.c
    return sa.func.greatest(v.opened_at, v.started_at, v.sealed_at, v.committed_at, a.failed_at, b.halted_at)
