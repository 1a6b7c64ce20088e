"""Which rows nobody can still slip in front of: the end of what may be planned.

A row that is written but not committed is invisible, and may have a lower key than rows that are visible already. If a
batch passed by, the row would never be read. Two arguments say when that cannot happen; each needs its looks in this order.

*A key drawn from a sequence, inside the INSERT* (`serial`, `IDENTITY`, `DEFAULT nextval`):

1. Read the highest visible key H.
2. Look in pg_locks for transactions that hold RowExclusiveLock, or a stronger lock that writers take, on a table we read.
3. Wait until exactly these have ended. Then all rows up to H are visible, or will never be.

Because: a key below H was drawn before H was, thus before (1). An INSERT locks its table before it draws, and keeps the
lock until its transaction has ended; and Postgres lets go of locks only after it has made the rows visible. So whoever drew
a key below H has ended, visibly, before (2), or is found in (2) and waited for. Who begins later draws above H: constant
writing holds up nothing. An INSERT through a partitioned table locks its partition only after drawing, but the parent
before: the parents of what we read belong to the tables of (2). A transaction that its session prepares meanwhile
(two-phase commit) keeps locks and name.

*A time that is set from the start of the writing transaction* (`DEFAULT now()`, a trigger that sets updated_at):

1. Read the clock.
2. Read in pg_stat_activity when the oldest open transaction of this database began.
3. Look in pg_locks for prepared transactions that have written to a table we read; wait for exactly these.

All rows with a time strictly below (1), less a margin, and strictly below (2), are visible then, or will never be. Because:
a transaction that writes such a time began before (1). If it was open at (2), the bound is not above its start. If it was
prepared by (2), it is found in (3), or had ended by then. Else it had ended by (2). The margin covers the moment in which a
server process has taken its transaction's time and not shown it yet, and a clock that is put back by less than that.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from psycopg2 import sql

from jobs.sources.postgres_query import Position, Query, check_primary, transaction
from state_store.errors import AccessRefused, MalformedRecord, SourceChanged, SourceUnreadable

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
# Every INSERT, UPDATE, DELETE and COPY takes the first. The others are what people LOCK TABLE with who choose keys
# themselves. ShareUpdateExclusiveLock and ShareLock are VACUUM's and CREATE INDEX's: they write no rows.
_WRITERS_LOCKS = ["RowExclusiveLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"]
# What our transaction has locked is what the query reads: tables behind views, partitions, both sides of a join.
_TABLES_READ = """
    SELECT c.oid, c.relkind, c.oid::regclass::text, EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid = c.oid)
    FROM pg_class AS c
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relnamespace <> 'pg_catalog'::regnamespace AND c.oid IN (
        SELECT ancestor.oid
        FROM pg_locks AS own, LATERAL (
            SELECT own.relation UNION SELECT relid FROM pg_partition_ancestors(own.relation)
        ) AS ancestor (oid)
        WHERE own.pid = pg_backend_pid() AND own.locktype = 'relation')
"""
_WRITERS = """
    SELECT DISTINCT virtualtransaction, pid
    FROM pg_locks
    WHERE locktype = 'relation' AND granted AND mode = ANY(%s) AND relation = ANY(%s)
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND pid IS DISTINCT FROM pg_backend_pid()
"""
# Sequences that fill a column: of serial and IDENTITY (they belong to it), or named in its DEFAULT.
_SEQUENCES = """
    SELECT s.seqrelid::regclass::text, s.seqcache, s.seqincrement, s.seqcycle,
        CASE WHEN has_sequence_privilege(s.seqrelid, 'USAGE, SELECT') THEN pg_sequence_last_value(s.seqrelid) END
    FROM pg_sequence AS s
    WHERE s.seqrelid IN (
        SELECT objid FROM pg_depend
        WHERE classid = 'pg_class'::regclass AND refclassid = 'pg_class'::regclass AND deptype IN ('a', 'i')
            AND refobjid = ANY(%(tables)s) AND (refobjsubid = %(column)s OR %(column)s = 0)
        UNION
        SELECT d.refobjid FROM pg_attrdef AS a
        JOIN pg_depend AS d ON d.classid = 'pg_attrdef'::regclass AND d.objid = a.oid AND d.refclassid = 'pg_class'::regclass
        WHERE a.adrelid = ANY(%(tables)s) AND (a.adnum = %(column)s OR %(column)s = 0))
"""
_OLDEST_START = """
    SELECT least(min(xact_start), %s::timestamptz)::text, count(*) FILTER (WHERE state = 'disabled')
    FROM pg_stat_activity
    WHERE datid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid <> pg_backend_pid()
        AND backend_type NOT IN ('autovacuum worker', 'walsender')
"""
_WHO = """
    SELECT format('session %%s of %%s (%%s), in a transaction since %%s', pid, usename, application_name, xact_start)
    FROM pg_stat_activity WHERE pid = ANY(%s)
    UNION ALL
    SELECT format('transaction %%L of %%s, prepared at %%s', gid, owner, prepared)
    FROM pg_prepared_xacts JOIN pg_locks ON transactionid = transaction
    WHERE locktype = 'transactionid' AND pid IS NULL AND virtualtransaction = ANY(%s)
"""
# A transaction's name in pg_locks, and the process of its session; a prepared one has none.
Writers = dict[str, int | None]


def settled_by_sequence(connection: Any, query: Query, after: Position | None, wait_seconds: float) -> sql.Composable | None:
    """Return the condition of rows that are settled, None if there are none behind `after` or writers hold them up.

    Raises: SourceUnreadable, SourceChanged, MalformedRecord for a table that cannot be read without skipping rows.
    """
    with transaction(connection) as cursor:
        check_primary(cursor, query)
        origins = query.check_columns(cursor)
        highest = _highest(cursor, query, after)
        tables = _tables_read(cursor, query)
        _check_sequences(cursor, query, tables, origins[query.key[0]], highest)
        _check_keys(cursor, query)
    if highest is None or not _writers_end(connection, query, tables, wait_seconds):
        return None
    return query.up_to(highest)


def settled_by_clock(
    connection: Any, query: Query, after: Position | None, wait_seconds: float, margin_seconds: float
) -> sql.Composable | None:
    """Return the condition of rows that are settled, None if a prepared transaction holds them up.

    Raises: AccessRefused if open transactions are hidden from this role; SourceUnreadable, SourceChanged, MalformedRecord.
    """
    with transaction(connection) as cursor:
        check_primary(cursor, query)
        query.check_columns(cursor)
        _check_sees_all(cursor, query)
        cursor.execute("SELECT clock_timestamp()::text, clock_timestamp() < %s::timestamptz", [after[0] if after else None])
        clock, is_back = cursor.fetchone()
        if is_back:
            raise SourceChanged(
                f"{query.name}: the server's clock says {clock}, but rows up to {after and after[0]} are planned already. Rows "
                "written now would never be read: set the clock right, and give rows of meanwhile a new time."
            )
        cursor.execute("SELECT (%s::timestamptz - %s * interval '1 second')::text", [clock, margin_seconds])
        cursor.execute(_OLDEST_START, cursor.fetchone())
        bound, hidden = cursor.fetchone()
        if hidden:
            raise SourceUnreadable(
                f"{query.name}: {hidden} session(s) run with track_activities = off and hide since when they write. Set it "
                "on for all roles that use this database."
            )
        tables = _tables_read(cursor, query)
        prepared = {name: pid for name, pid in _writers(cursor, tables).items() if pid is None}
        _check_keys(cursor, query)
    if not _writers_end(connection, query, tables, wait_seconds, prepared):
        return None
    return sql.SQL("{} < {}").format(sql.Identifier(query.key[0]), sql.Literal(bound))


def _highest(cursor: Any, query: Query, after: Position | None) -> Position | None:
    # Apart, because ORDER BY would take the position's text, which has the column's name, for the column.
    highest = sql.SQL("SELECT {keys} FROM {relation} WHERE {behind} ORDER BY {keys} DESC LIMIT 1").format(
        keys=query.keys, relation=query.relation, behind=query.behind(after)
    )
    cursor.execute(sql.SQL("SELECT {} FROM ({}) AS highest").format(query.position, highest))
    found = cursor.fetchone()
    return list(found) if found else None


def _tables_read(cursor: Any, query: Query) -> list[int]:
    """Return the tables that this transaction has read, and the parents through which rows get into them."""
    cursor.execute(_TABLES_READ)
    tables = cursor.fetchall()
    for _, relkind, name, is_subscribed in tables:
        if relkind == "f":
            raise SourceUnreadable(
                f"{query.name} reads foreign table {name}, whose open transactions are elsewhere. Read it there."
            )
        if relkind == "m":
            raise SourceUnreadable(
                f"{query.name} reads materialized view {name}, whose refreshes bring rows in any order. Read the tables it is "
                "made of."
            )
        if is_subscribed:
            raise SourceUnreadable(
                f"{query.name} reads {name}, which a subscription fills in the order of its publisher's commits. Read it there."
            )
    return [table for table, *_ in tables]


def _check_sequences(cursor: Any, query: Query, tables: list[int], origin: tuple[int, int], highest: Position | None) -> None:
    """Refuse sequences that do not hand out keys in order."""
    table, column = origin
    cursor.execute("SELECT relkind IN ('r', 'p') FROM pg_class WHERE oid = %s", [table])
    found = cursor.fetchone()
    # Behind a view or an expression, it could be any column of the tables that are read.
    place = {"tables": [table], "column": column} if found and found[0] else {"tables": tables, "column": 0}
    cursor.execute(_SEQUENCES, place)
    for sequence, cache, increment, cycles, last in cursor.fetchall():
        if cache > 1:
            raise SourceUnreadable(
                f"{query.name}: sequence {sequence} has CACHE {cache}, so sessions keep low keys for later, and rows would be "
                f"skipped. Run ALTER SEQUENCE {sequence} CACHE 1, then reconnect everybody who writes."
            )
        if increment < 0 or cycles:
            raise SourceUnreadable(
                f"{query.name}: sequence {sequence} counts down or starts over, so its keys do not increase."
            )
        if place["column"] and last is not None and highest and highest[0].isdigit() and int(highest[0]) > last:
            raise SourceChanged(
                f"{query.name} has key {highest[0]}, but sequence {sequence} is at {last}: somebody chose keys by hand, and "
                f"rows with the next ones would never be read. Run SELECT setval('{sequence}', {highest[0]})."
            )


def _check_keys(cursor: Any, query: Query) -> None:
    """Refuse rows that no range would ever contain."""
    conditions = [(f"{name} IS NULL", sql.SQL("{} IS NULL").format(sql.Identifier(name))) for name in query.key]
    if query.columns[query.key[0]].name == "timestamp":
        endless = sql.SQL("{} IN ('infinity', '-infinity')").format(sql.Identifier(query.key[0]))
        conditions.append((f"{query.key[0]} is infinite", endless))
    for said, condition in conditions:
        cursor.execute(sql.SQL("SELECT EXISTS (SELECT FROM {} WHERE {})").format(query.relation, condition))
        if cursor.fetchone()[0]:
            cursor.execute(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(query.relation, condition))
            raise MalformedRecord(
                f"{query.name} has {cursor.fetchone()[0]} row(s) in which {said}; they would never be read. Give them a key, "
                "and declare the column NOT NULL."
            )


def _check_sees_all(cursor: Any, query: Query) -> None:
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
    connection: Any, query: Query, tables: list[int], wait_seconds: float, waiting: Mapping[str, int | None] | None = None
) -> bool:
    """Wait until exactly the transactions that write to these tables now have ended; tell whether they have.

    Every look is a transaction of its own: waiting holds no lock that an ALTER TABLE would have to wait for.
    """
    deadline = time.monotonic() + wait_seconds
    if waiting is None:
        with transaction(connection) as cursor:
            waiting = _writers(cursor, tables)
    while waiting:
        if time.monotonic() >= deadline:
            with transaction(connection) as cursor:
                cursor.execute(_WHO, [[pid for pid in waiting.values() if pid], list(waiting)])
                who = "; ".join(row[0] for row in cursor.fetchall() if row[0])
            logger.warning("%s: nothing new is planned now, lower keys may still come. Waiting for %s", query.name, who)
            return False
        time.sleep(POLL_SECONDS)
        with transaction(connection) as cursor:
            found = _writers(cursor, tables)
        waiting = {name: pid for name, pid in found.items() if name in waiting}
    return True
