"""Holds tables of states for a transaction before it takes its snapshot, so that it finds their rows.

A migration that replaces a table by one with other range partitions waits for its readers, and they wait for it. A
reader that takes its snapshot first, and then waits, reads the new table, whose rows are all newer than the snapshot: it finds
none. LOCK TABLE takes no snapshot, so one that is taken after it shows the table that is there until the transaction ends. The
right to SELECT is enough. Runs on executors too, so it imports nothing but psycopg2.
"""

from collections.abc import Sequence
from typing import Any

from psycopg2 import errors as driver
from psycopg2 import sql

STATE, STAGING = "state", "staging"  # the schemas of states, and of what attempts have staged


def lock_of(table: str) -> sql.Composable:
    """Return the statement that holds a table, or a view and what it reads; it must be the first of its transaction."""
    # A migration locks the table before its partitions, so these need no lock of their own.
    return sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(sql.Identifier(STATE, table))


def hold(connection: Any, tables: Sequence[str], *, lock_timeout_seconds: int | None = None) -> None:
    """Hold these tables, before the transaction takes its snapshot, as even set_config does. The connection is psycopg2's.

    If one is missing or may not be read, none is held: the statement that reads it raises a better error.

    Raises: the driver's errors, such as LockNotAvailable after the timeout.
    """
    if not tables:
        return
    bounded = [] if lock_timeout_seconds is None else [sql.SQL(f"SET LOCAL lock_timeout = '{lock_timeout_seconds}s'")]
    with connection.cursor() as cursor:
        try:
            cursor.execute(sql.SQL("; ").join([*bounded, *map(lock_of, tables)]))
        except (driver.UndefinedTable, driver.InvalidSchemaName, driver.InsufficientPrivilege):
            connection.rollback()
