"""Work stealing: a task that is through with its own batch goes on with one of its run that nobody has begun.

Who steals holds an advisory lock of the batch, on a connection of its own, while it processes. The lock says one thing, that
somebody alive is at it, to the batch's own task: which then waits instead of taking the batch over. It decides nothing. If it
is lost, with its connection or in a connection pooler, two may process the batch, and the fence tells which of them counts
(CONTRACT I4).
"""

import sqlalchemy as sa
from sqlalchemy import Connection

from state_store import tables

LOOK_AHEAD = 16


def unbegun(connection: Connection, pipeline: str, run_id: str, behind: int = 0) -> list[int]:
    """Return the first txids of a run behind this one that have no attempt yet, in order; what was given up needs none."""
    b, r = tables.batch.c, tables.run_batch.c
    statement = (
        sa.select(b.txid)
        .select_from(sa.join(tables.run_batch, tables.batch, sa.and_(r.pipeline == b.pipeline, r.txid == b.txid)))
        .where(r.pipeline == pipeline, r.run_id == run_id, r.txid > behind, b.attempt == 0, b.skip_reason.is_(None))
        .order_by(r.txid)
        .limit(LOOK_AHEAD)
    )
    return list(connection.scalars(statement))


def steal(connection: Connection, pipeline: str, txid: int) -> bool:
    """Take the batch's lock until `give_back`, or until the connection ends; False if somebody has it."""
    return bool(connection.scalar(sa.select(sa.func.pg_try_advisory_lock(_lock(pipeline, txid)))))


def give_back(connection: Connection, pipeline: str, txid: int) -> None:
    """Release the batch's lock."""
    connection.execute(sa.select(sa.func.pg_advisory_unlock(_lock(pipeline, txid))))


def is_stolen(connection: Connection, pipeline: str, txid: int) -> bool:
    """Tell whether somebody holds the batch's lock at this moment."""
    return not connection.scalar(sa.select(sa.func.pg_try_advisory_xact_lock_shared(_lock(pipeline, txid))))


def _lock(pipeline: str, txid: int) -> sa.ColumnElement[int]:
    return sa.func.hashtextextended(f"tidegate {pipeline}", sa.cast(txid, sa.BigInteger))
