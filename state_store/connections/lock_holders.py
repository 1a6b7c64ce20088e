"""Names the sessions, or prepared transactions, that hold a lock for which a statement has waited in vain.

Postgres says who holds a lock only while somebody waits for it, so this looks afterwards. A lock of a row is told by the
transaction that the row names, any other by the tables of the statement; who has let it go meanwhile is not named. A role sees
the state and the transaction's start of its own sessions only, unless it may read all statistics. No statement's text is shown:
it may hold data. Runs on executors too, so it imports nothing but psycopg2.
"""

import re
from typing import Any

import psycopg2
from psycopg2 import sql

LOCK_NOT_AVAILABLE = "55P03"
_OF_TIMEOUTS = "ProcessInterrupts"  # the function of Postgres' code that ends a wait; NOWAIT does not wait
_LONGEST_TEXT = 10_000  # of a statement; its tables are named early
_ROW = re.compile(r"\((\d+,\d+)\).*?(\w+)\W*$")  # such as: while locking tuple (0,1) in relation "cursor"
_STRONG = re.compile(r"\s*(DROP|ALTER|TRUNCATE)\b|.*\bEXCLUSIVE MODE", re.IGNORECASE | re.DOTALL)
_END = "SELECT pg_terminate_backend({0}); a process that is stopped does not end before it goes on: kill -CONT {0}"
_STRONG_MODES = ["ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"]
_ROW_MODES = ["RowShareLock", "RowExclusiveLock", *_STRONG_MODES]
_ALL_MODES = ["AccessShareLock", "ShareUpdateExclusiveLock", *_ROW_MODES]
_TABLES_OF_ROW = """
SELECT DISTINCT n.nspname, c.relname
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = %s AND c.relkind IN ('r', 'p')
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
"""
_WRITER_OF_ROW = """
SELECT l.pid, l.virtualtransaction FROM {} r JOIN pg_locks l ON l.transactionid = r.xmax AND l.granted WHERE r.ctid = %s::tid
"""
# Of partitions, the statement names the table that they belong to.
_OF_TABLES = """
SELECT DISTINCT l.pid, l.virtualtransaction FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
WHERE l.pid IS DISTINCT FROM pg_backend_pid() AND l.mode = ANY(%s) AND c.relnamespace <> 'pg_catalog'::regnamespace
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND strpos(%s, split_part(c.relname, '$', 1)) > 0
"""
# Who waits in front of others is named with those whom it waits for.
_SESSIONS = """
SELECT a.pid, a.usename, a.application_name, a.state, to_char(a.xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')
FROM pg_stat_activity a
WHERE a.pid = ANY(%(pids)s::int[]) OR a.pid IN (SELECT unnest(pg_blocking_pids(p)) FROM unnest(%(pids)s::int[]) p)
ORDER BY a.xact_start NULLS FIRST, a.pid LIMIT 3
"""
# The locks of a transaction that PREPARE TRANSACTION has left belong to no process. Sessions that wait for it may be in front.
_PREPARED = """
SELECT quote_literal(x.gid), x.owner, x.database, to_char(x.prepared AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')
FROM pg_prepared_xacts x JOIN pg_locks own ON own.transactionid = x.transaction AND own.pid IS NULL
WHERE own.virtualtransaction = ANY(%(transactions)s::text[]) OR EXISTS (
  SELECT FROM pg_locks waiting JOIN pg_locks held ON held.pid IS NULL
    AND (held.transactionid = waiting.transactionid OR (held.database, held.relation) = (waiting.database, waiting.relation))
  WHERE waiting.pid = ANY(%(pids)s::int[]) AND NOT waiting.granted AND held.virtualtransaction = own.virtualtransaction)
ORDER BY x.prepared LIMIT 3
"""


def is_lock_timeout(error: BaseException | None) -> bool:
    """Return whether a driver's error ends a wait for a lock, or refuses to wait."""
    return getattr(error, "pgcode", None) == LOCK_NOT_AVAILABLE


def waited(error: BaseException | None) -> bool:
    """Return whether a driver's error ends a wait for a lock: only then is it worth looking who holds it."""
    return is_lock_timeout(error) and error.diag.source_function == _OF_TIMEOUTS  # type: ignore[union-attr]


def of(error: Any, connection: Any) -> str:
    """Return a sentence about who holds the lock that a driver's error is about, and what to do; "" if nobody has waited.

    The connection is psycopg2's, to the same database, with no failed transaction: the failed one has to be rolled back first.
    If it cannot be asked either, that is what the sentence says.
    """
    if not waited(error):
        return ""
    statement = bytes(getattr(error.cursor, "query", None) or b"").decode(errors="replace")[:_LONGEST_TEXT]
    try:
        with connection.cursor() as cursor:
            found, prepared = _holders(cursor, statement, error.diag.context or "")
    except psycopg2.Error as failed:
        return unknown(failed)
    if prepared:
        return " ".join(map(_described_prepared, prepared))
    if not found:
        return "Whoever held the lock has let it go, or is not seen here: look at pg_locks."
    each = "; ".join(map(_described, found))
    if len(found) == 1:
        return f"The lock is held by {each}. Wait until that ends, or end it: {_END.format(found[0][0])}"
    return f"The lock is held by one of: {each}. Wait until that ends, or end it: {_END.format('PID')}"


def unknown(failed: BaseException) -> str:
    """Return the sentence for a lock whose holder could not be asked for."""
    return f"Who holds the lock could not be read ({str(failed).strip()}): look at pg_locks."


def _holders(cursor: Any, statement: str, context: str) -> tuple[list[Any], list[Any]]:
    locks = _of_row(cursor, row) if (row := _ROW.search(context.partition("\n")[0])) else []
    if not locks:
        modes = _ROW_MODES if row else _ALL_MODES if _STRONG.match(statement) else _STRONG_MODES
        cursor.execute(_OF_TABLES, [modes, row[2] if row else statement])
        locks = cursor.fetchall()
    pids = [pid for pid, _ in locks if pid is not None]
    cursor.execute(_SESSIONS, {"pids": pids})
    sessions = cursor.fetchall()
    cursor.execute(_PREPARED, {"pids": pids, "transactions": [transaction for pid, transaction in locks if pid is None]})
    return sessions, cursor.fetchall()


def _of_row(cursor: Any, row: re.Match[str]) -> list[Any]:
    """Return the locks of the transaction that a row names as the last that has changed or locked it, if that is still open."""
    cursor.execute(_TABLES_OF_ROW, [row[2]])
    locks: list[Any] = []
    for table in cursor.fetchall():
        cursor.execute(sql.SQL(_WRITER_OF_ROW).format(sql.Identifier(*table)), [f"({row[1]})"])
        locks += cursor.fetchall()
    return locks


def _described_prepared(transaction: Any) -> str:
    gid, owner, database, since = transaction
    return (
        f"The lock is held by prepared transaction {gid} (owner {owner}, since {since} UTC), which no session has and "
        f"which never ends by itself. Decide how, in database {database}: COMMIT PREPARED {gid} or ROLLBACK PREPARED {gid}"
    )


def _described(session: Any) -> str:
    pid, user, application, state, since = session
    known = [f"user {user}", f"application {application or 'without a name'}", state, since and f"since {since} UTC"]
    return f"session {pid} ({', '.join(filter(None, known))})"
