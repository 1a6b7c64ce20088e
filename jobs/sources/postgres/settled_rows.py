"""Finds settled rows: those before which no open transaction, for which a plan waits, can still add a row.

A row that is written but not committed is invisible, and may have a lower key than rows that are visible already. If a batch
read rows beyond its key, the row would never be read. Two arguments rule that out; each needs its steps in this order.

*A key drawn from a sequence, inside the INSERT* (`serial`, `IDENTITY`, `DEFAULT nextval`):

1. Read the highest visible key H.
2. Look in pg_locks for transactions that hold RowExclusiveLock, or a stronger lock of writers, on a table that the query reads.
3. Wait until exactly these have ended. Then all rows up to H are visible, or will never be.

Proof: a key below H was drawn before H, thus before (1). An INSERT locks its table before it draws, and keeps the lock
until its transaction has ended; and Postgres releases locks only after it has made the rows visible. So a transaction that
drew a key below H has ended, visibly, before (2), or is found in (2) and waited for. A transaction that begins later draws
above H: constant writing delays nothing. An INSERT through a partitioned table locks its partition only after drawing, but
the parent before: the parents of the tables that are read belong to the tables of (2). A transaction that its session prepares
meanwhile (two-phase commit) keeps its locks and its name.

*A time that is set from the start of the writing transaction* (`DEFAULT now()`, a trigger that sets updated_at):

1. Read the clock.
2. Read in pg_stat_activity when the oldest open transaction of this database began.
3. Look in pg_locks for prepared transactions that have written to a table that the query reads; wait for exactly these.

All rows with a time strictly below both (1) and (2), less a margin, are visible then, or will never be. Proof: a transaction
that writes such a time began before (1). If it was open at (2), the bound is not above its start, less the margin. If it was
prepared by (2), it is found in (3), or had ended by then. Else it had ended by (2). The margin covers the moment in which a
server process has taken its transaction's time and not published it yet, a clock that is set back by less than that, and a time
that is rounded to a step of the margin, which lies before the transaction's start. What the column's type rounds to is known.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from psycopg2 import sql

from tidegate.jobs.sources.postgres.source_connection import transaction
from tidegate.jobs.sources.postgres.table_query import Position, TableQuery
from tidegate.state_store.base.errors import AccessRefused, SourceChanged, SourceUnreadable

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
# Every INSERT, UPDATE, DELETE and COPY takes the first lock; writers that choose keys themselves LOCK TABLE with the others.
# ShareUpdateExclusiveLock and ShareLock are VACUUM's and CREATE INDEX's: they write no rows.
_WRITERS_LOCKS = ["RowExclusiveLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"]
_WRITERS = """
    SELECT DISTINCT virtualtransaction, pid
    FROM pg_locks
    WHERE locktype = 'relation' AND granted AND mode = ANY(%s) AND relation = ANY(%s)
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND pid IS DISTINCT FROM pg_backend_pid()
"""
_OLDEST_START = """
    SELECT (least(min(xact_start), %s::timestamptz) - %s * interval '1 second')::text,
        count(*) FILTER (WHERE state = 'disabled')
    FROM pg_stat_activity
    WHERE datid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid <> pg_backend_pid()
        AND backend_type NOT IN ('autovacuum worker', 'walsender')
"""
_DESCRIPTIONS = """
    SELECT format('session %%s of %%s (%%s), in a transaction since %%s', pid, usename, application_name, xact_start)
    FROM pg_stat_activity WHERE pid = ANY(%s)
    UNION ALL
    SELECT format('transaction %%L of %%s, prepared at %%s', gid, owner, prepared)
    FROM pg_prepared_xacts JOIN pg_locks ON transactionid = transaction
    WHERE locktype = 'transactionid' AND pid IS NULL AND virtualtransaction = ANY(%s)
"""
_LONG_OPEN = """
    SELECT pid FROM pg_stat_activity
    WHERE datid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid <> pg_backend_pid()
        AND backend_type NOT IN ('autovacuum worker', 'walsender')
        AND CASE WHEN pid = ANY(%(writers)s) THEN coalesce(xact_start, '-infinity') WHEN %(all)s THEN xact_start END
            < clock_timestamp() - %(seconds)s * interval '1 second'
"""
# A transaction's name in pg_locks, and the process of its session; a prepared one has none.
Writers = dict[str, int | None]


def settled_by_sequence(
    connection: Any, query: TableQuery, tables: list[int], highest: Position | None, wait_seconds: float
) -> sql.Composable | None:
    """Return the condition of settled rows; None if there are none, or transactions that write are still open.

    `highest` is the highest key that was visible before the call.
    """
    if highest is None or not _writers_end(connection, query, tables, wait_seconds):
        return None
    return query.up_to(highest)


def settled_by_clock(
    connection: Any,
    query: TableQuery,
    tables: list[int],
    after: Position | None,
    wait_seconds: float,
    margin_seconds: float,
) -> sql.Composable | None:
    """Return the condition of settled rows; None if a prepared transaction is still open.

    Raises: AccessRefused if open transactions are hidden from this role; SourceUnreadable, SourceChanged.
    """
    with transaction(connection) as cursor:
        _check_sees_all(cursor, query)
        cursor.execute("SELECT clock_timestamp()::text, clock_timestamp() < %s::timestamptz", [after[0] if after else None])
        clock, is_back = cursor.fetchone()
        if is_back:
            raise SourceChanged(
                f"{query.name}: the server's clock says {clock}, but rows up to {after and after[0]} are planned already. Rows "
                "written now would never be read: set the clock right, and give rows of meanwhile a new time."
            )
        cursor.execute(_OLDEST_START, [clock, margin_seconds])
        bound, hidden = cursor.fetchone()
        if hidden:
            raise SourceUnreadable(
                f"{query.name}: {hidden} session(s) run with track_activities = off and hide since when they write. Set it "
                "on for all roles that use this database."
            )
        prepared = {name: pid for name, pid in _writers(cursor, tables).items() if pid is None}
    if not _writers_end(connection, query, tables, wait_seconds, prepared):
        return None
    return sql.SQL("{} < {}").format(sql.Identifier(query.key[0]), sql.Literal(bound))


def long_open(cursor: Any, tables: list[int], *, seconds: float, is_by_clock: bool) -> list[str]:
    """Return descriptions of the transactions that have been open for longer than `seconds` and keep rows from being settled.

    Transactions that write to the tables do so; if rows are ordered by the clock, all transactions of the database do. One
    whose start this role may not see is taken for long open.
    """
    writers = _writers(cursor, tables)
    pids = [pid for pid in writers.values() if pid]
    cursor.execute(_LONG_OPEN, {"writers": pids, "all": is_by_clock, "seconds": seconds})
    pids = [pid for (pid,) in cursor.fetchall()]
    cursor.execute(_DESCRIPTIONS, [pids, [name for name, pid in writers.items() if pid is None]])
    return [row[0] for row in cursor.fetchall() if row[0]]


def highest_key(cursor: Any, query: TableQuery, after: Position | None) -> Position | None:
    """Return the highest visible key after a position."""
    # A subquery, because ORDER BY would take the position's text, which has the column's name, for the column.
    highest = sql.SQL("SELECT {keys} FROM {relation} WHERE {beyond} ORDER BY {keys} DESC LIMIT 1").format(
        keys=query.keys, relation=query.relation, beyond=query.beyond(after)
    )
    cursor.execute(sql.SQL("SELECT {} FROM ({}) AS highest").format(query.position, highest))
    row = cursor.fetchone()
    return list(row) if row else None


def _check_sees_all(cursor: Any, query: TableQuery) -> None:
    cursor.execute("SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), quote_ident(current_user)")
    sees, role = cursor.fetchone()
    if not sees:
        raise AccessRefused(
            f"{query.name}: role {role} cannot see since when other transactions are open, so rows could be skipped. "
            f"Run: GRANT pg_read_all_stats TO {role}"
        )


def _writers(cursor: Any, tables: list[int]) -> Writers:
    cursor.execute(_WRITERS, [_WRITERS_LOCKS, tables])
    return dict(cursor.fetchall())


def _writers_end(
    connection: Any, query: TableQuery, tables: list[int], wait_seconds: float, waiting: Mapping[str, int | None] | None = None
) -> bool:
    """Wait for exactly the transactions that write to these tables now; return whether they have ended.

    Each look at pg_locks is a transaction of its own: the wait holds no lock that would block an ALTER TABLE.
    """
    deadline = time.monotonic() + wait_seconds
    if waiting is None:
        with transaction(connection) as cursor:
            waiting = _writers(cursor, tables)
    while waiting:
        if time.monotonic() >= deadline:
            with transaction(connection) as cursor:
                cursor.execute(_DESCRIPTIONS, [[pid for pid in waiting.values() if pid], list(waiting)])
                writers = "; ".join(row[0] for row in cursor.fetchall() if row[0])
            logger.warning("%s: nothing new is planned now, lower keys may still come. Waiting for %s", query.name, writers)
            return False
        time.sleep(POLL_SECONDS)
        with transaction(connection) as cursor:
            still_open = _writers(cursor, tables)
        waiting = {name: pid for name, pid in still_open.items() if name in waiting}
    return True
