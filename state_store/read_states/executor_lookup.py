"""Reads rows of a state by key in Spark's tasks, for state queries. Runs on executors, so it imports nothing but psycopg2."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg2
from psycopg2 import errors as driver
from psycopg2 import sql

from tidegate.state_store.base.errors import GuardMismatch, StoreUnavailable
from tidegate.state_store.connections import lock_holders
from tidegate.state_store.connections.executor_connections import connect
from tidegate.state_store.connections.postgres_errors import translate
from tidegate.state_store.connections.table_locks import lock_of
from tidegate.state_store.states.key_lookup import ROW, chunks, statement

# The text of arrays depends on these settings, and a policy that would hide rows has to be an error. LOCAL, so that a pooler's
# session is unchanged for its other users.
_PINNED = (
    "SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO, YMD'; SET LOCAL bytea_output = 'hex'; "
    "SET LOCAL row_security = off; SET LOCAL lock_timeout = '10s'"
)


@dataclass(frozen=True)
class Reading:
    """How a state is read.

    `key` has the key's columns, each with the Postgres type in which its values are sent. `selected` and `condition` are SQL
    over the state's row, which is called ROW. No row may have a txid above
    `newest_txid`, if that is given. `snapshot` is the one to read from; None reads what has committed.
    """

    of: str
    table: str
    key: tuple[tuple[str, str], ...]
    selected: tuple[str, ...]
    condition: str
    newest_txid: int | None
    snapshot: str | None

    def rows(self, connection: Any, keys: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield each existing row, with its key's position among those given.

        None in a key means NULL. The keys must be different, with values that the columns can hold.

        Raises: GuardMismatch if a row is newer than it may be; StoreUnavailable, AccessRefused, SchemaOutOfDate.
        """
        txid = sql.SQL("NULL") if self.newest_txid is None else sql.Identifier(ROW, "txid")
        selected = [txid, *map(sql.SQL, self.selected)]
        for chunk in chunks(keys):
            requested = statement(self.table, self.key, chunk.nulls, selected, sql.SQL(self.condition))
            for number, newest, *row in self._fetch(connection, requested, chunk.arrays):
                self._check(newest)
                yield chunk.positions[number], tuple(row)

    def _fetch(self, connection: Any, statement: sql.Composable, arrays: list[list[Any]]) -> list[tuple[Any, ...]]:
        """Return a statement's rows, in a transaction of their own, because a task may take long to use them.

        It locks the table before it takes or imports a snapshot. The transaction that exported one locks the table, too.
        """
        imported = [] if self.snapshot is None else [sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self.snapshot))]
        begin = [sql.SQL(_PINNED), lock_of(self.table), *imported, sql.SQL("SELECT pg_is_in_recovery()")]
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute(sql.SQL("; ").join(begin))
                if cursor.fetchone()[0]:
                    raise StoreUnavailable(
                        f"{self.of} was read from a standby, which lags its primary. Connect to the primary."
                    )
                cursor.execute(statement, arrays)
                rows: list[tuple[Any, ...]] = cursor.fetchall()
                return rows
        except (driver.InvalidParameterValue, driver.UndefinedObject) as error:
            raise StoreUnavailable(
                f"The snapshot from which {self.of} is read is gone: the process of the attempt has lost its connection. "
                "Try the batch again."
            ) from error

    def _check(self, txid: int | None) -> None:
        if txid is not None and self.newest_txid is not None and txid > self.newest_txid:
            raise GuardMismatch(
                f"A row of state.{self.table} has txid {txid}, and the batch that reads it may see none after "
                f"{self.newest_txid}: a newer attempt at the batch has committed, or another writer changed the row. "
                "Nothing of this attempt counts; unless a newer one has, restore the table, or find its other writer."
            )


@contextmanager
def connected(conninfo: dict[str, Any], of: str) -> Iterator[Any]:
    """Connect for reading a state, and translate the driver's errors into Tidegate's."""
    connection = None
    try:
        connection = connect(conninfo)
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        yield connection
    except psycopg2.Error as error:
        holder = "" if connection is None else lock_holders.of(error, connection)
        raise translate(error, f"reading {of}", holder) from error
    finally:
        if connection is not None:
            connection.close()
