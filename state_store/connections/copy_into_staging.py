"""Copy partials into staging. Runs on executors too, so it imports nothing but psycopg2."""

from collections.abc import Iterable
from contextlib import closing
from typing import Any, Protocol

from psycopg2 import sql

from tidegate.state_store.connections.executor_connections import connect
from tidegate.state_store.connections.table_locks import STAGING

COPY_BLOCK_BYTES = 1 << 20


class CsvReader(Protocol):
    """A file of CSV bytes for COPY; an empty unquoted field is NULL."""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes; empty at the end."""


def copy_partition(
    conninfo: dict[str, Any], table: str, columns: Iterable[str], reader: CsvReader, task_attempt: int, digest: str
) -> tuple[int, int]:
    """Copy one Spark task's rows into a staging table, in one transaction; return their number and digest.

    If the process dies, or the answer is lost after the commit, the rows are never merged: no seal names their task attempt.
    `conninfo` has no password: libpq finds it in a file on the executor.
    """
    with closing(connect(conninfo)) as connection, connection, connection.cursor() as cursor:
        return copy_rows(cursor, table, columns, reader, task_attempt, digest)


def copy_rows(
    cursor: Any, table: str, columns: Iterable[str], reader: CsvReader, task_attempt: int, digest: str
) -> tuple[int, int]:
    """Copy rows into a staging table; return the task attempt's number of rows and digest, by the statement `digest`."""
    target = sql.Identifier(STAGING, table)
    copy = sql.SQL("COPY {} ({}) FROM STDIN WITH (FORMAT csv)").format(
        target, sql.SQL(", ").join(sql.Identifier(name) for name in columns)
    )
    cursor.copy_expert(copy, reader, COPY_BLOCK_BYTES)
    cursor.execute(digest, {"task_attempt": task_attempt})
    rows, checksum = cursor.fetchone()
    return rows, checksum
