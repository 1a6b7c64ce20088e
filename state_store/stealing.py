"""Work stealing: a task that is through with its own batch goes on with one of its run that nobody has begun.

Who steals says so in the name of a connection of its own, which ends with it. To the batch's own task this tells one thing,
that somebody alive is at it: the task then waits instead of taking the batch over. It decides nothing. If the name is lost,
two may process the batch, and the fence tells which of them counts (I4). An advisory lock would tell the same; but a
connection pooler would keep it for whoever comes next.
"""

import sqlalchemy as sa
from sqlalchemy import Connection

from state_store import attempts, tables

NAME_BYTES = 63  # Postgres cuts off the rest; two batches of one name would only wait for each other's thief
_SESSIONS = sa.table("pg_stat_activity", sa.column("datname"), sa.column("application_name"))


def next_unbegun(connection: Connection, pipeline: str, run_id: str, behind: int) -> int | None:
    """Return the first txid of a run behind this one that has no attempt, no thief and room in the window, if any."""
    b, r, c, p = tables.batch.c, tables.run_batch.c, tables.cursor.c, tables.pipeline.c
    return connection.scalar(
        sa.select(b.txid)
        .select_from(sa.join(tables.run_batch, tables.batch, sa.and_(r.pipeline == b.pipeline, r.txid == b.txid)))
        .join(tables.cursor, c.pipeline == r.pipeline)
        .join(tables.pipeline, p.pipeline == r.pipeline)
        .where(r.txid - c.txid <= p.in_flight)
        .where(r.pipeline == pipeline, r.run_id == run_id, r.txid > behind, b.attempt == 0, b.skip_reason.is_(None))
        .where(~_has_thief(b.pipeline, b.txid))
        .order_by(r.txid)
        .limit(1)
    )


def say_stolen(connection: Connection, pipeline: str, txid: int) -> None:
    """Let the connection's name tell that its owner is at this batch."""
    connection.execute(sa.select(sa.func.set_config("application_name", _name(pipeline, txid), False)))


def is_stolen(connection: Connection, pipeline: str, txid: int, *, only_begun: bool) -> bool:
    """Tell whether somebody who stole the batch lives, and the batch's newest attempt has neither ended nor fallen silent.

    With `only_begun`, not if there is no attempt yet.
    """
    b = tables.batch.c
    is_open = sa.and_(~attempts.newest_has_ended(tables.batch), ~attempts.newest_is_silent(tables.batch))
    at_work = sa.exists().where(
        b.pipeline == pipeline, b.txid == txid, _has_thief(b.pipeline, b.txid), is_open, b.attempt >= int(only_begun)
    )
    return bool(connection.scalar(sa.select(at_work)))


def _has_thief(pipeline: sa.ColumnElement[str], txid: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    s = _SESSIONS.c
    return sa.exists().where(s.datname == sa.func.current_database(), s.application_name == _name(pipeline, txid))


def _name(pipeline: str | sa.ColumnElement[str], txid: int | sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    return sa.func.left(sa.func.concat("tidegate steals ", sa.cast(txid, sa.Text), " of ", pipeline), NAME_BYTES)
