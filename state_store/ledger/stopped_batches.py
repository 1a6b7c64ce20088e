"""Failed batches that stop: halted, to wait for a person, or given up, and skipped by a commit without rows; or reopened."""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.ledger import batches, tables


def stopped(connection: Connection, pipeline: str, limit: int) -> list[int]:
    """Return the uncommitted txids that are halted or were given up, in order, at most `limit`."""
    return list(connection.scalars(batches.open_txids(pipeline).where(_is_stopped()).limit(limit)))


def give_up(connection: Connection, pipeline: str, txid: int, owner: str, reason: str) -> bool:
    """Give up a batch that the caller has locked; return False if it has committed or is given up already."""
    b = tables.batch.c
    given_up = (
        sa.update(tables.batch)
        .where(b.pipeline == pipeline, b.txid == txid, b.txid > batches.cursor_txid(pipeline), b.skip_reason.is_(None))
        .values(skip_owner=owner, skip_reason=reason, halted_at=None, halted_reason=None)
    )
    return bool(connection.execute(given_up).rowcount)


def reopen(connection: Connection, pipeline: str, txid: int | None, without: Sequence[int] = ()) -> list[int]:
    """Lift halts, decisions to skip, and counts of failures, so that batches are tried again; return the txids.

    Without a txid, these are all halted or given-up batches; a given one need be neither. Committed ones are left out, and
    those `without`; one that is being committed or skipped is waited for.
    """
    b = tables.batch.c
    requested = sa.and_(_is_stopped() if txid is None else b.txid == txid, b.txid.not_in(without))
    locked = batches.lock_open(connection, pipeline, requested)
    values = {"skip_owner": None, "skip_reason": None, "halted_at": None, "halted_reason": None, "tries_after": b.attempt}
    return sorted(
        connection.scalars(
            sa.update(tables.batch)
            .where(b.pipeline == pipeline, b.txid.in_(locked), b.txid > batches.cursor_txid(pipeline), requested)
            .values(values)
            .returning(b.txid)
        )
    )


def halt(connection: Connection, pipeline: str, txid: int, reason: str) -> None:
    """Halt a batch: nothing retries it by itself, and later batches of the run end instead of waiting for it.

    Nothing changes if it has committed or was given up meanwhile, or if its pipeline was retired: after it is reinstated, its
    batches are as they were.
    """
    b, p = tables.batch.c, tables.pipeline.c
    batches.lock_open(connection, pipeline, b.txid == txid)
    is_retired = sa.exists().where(p.pipeline == pipeline, ~tables.IN_SERVICE)
    connection.execute(
        sa.update(tables.batch)
        .where(
            b.pipeline == pipeline, b.txid == txid, b.txid > batches.cursor_txid(pipeline), b.skip_reason.is_(None), ~is_retired
        )
        .values(halted_at=sa.func.now(), halted_reason=reason)
    )


def _is_stopped() -> sa.ColumnElement[bool]:
    return sa.or_(tables.batch.c.halted_at.is_not(None), tables.batch.c.skip_reason.is_not(None))
