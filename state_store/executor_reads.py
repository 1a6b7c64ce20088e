"""Reads rows of a state by key in Spark's tasks, for state queries. Runs on executors, so it imports nothing but psycopg2."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg2
from psycopg2 import errors as driver
from psycopg2 import sql

from state_store.driver_errors import translate
from state_store.errors import GuardMismatch, StoreUnavailable
from state_store.executor_connections import connect
from state_store.held_tables import STATE, lock_of

ALIAS = "s"
KEYS_PER_STATEMENT = 5000
# Set, as texts of arrays depend on them, and so that a policy that would hide rows is an error. LOCAL, so that a pooler's
# session is unchanged for its other users.
_PINNED = (
    "SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO, YMD'; SET LOCAL bytea_output = 'hex'; "
    "SET LOCAL row_security = off; SET LOCAL lock_timeout = '10s'"
)


@dataclass(frozen=True)
class Reading:
    """How a state is read.

    `key` has the key's columns, each with the Postgres type in which its values are sent. `selected` and `condition` are SQL
    over the state's row, which is called ALIAS. No row may have a txid (the number of the batch that wrote it) above
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
        """Yield the rows of keys that exist, each with the key's position among those given.

        NULL in a key finds the row with NULL there. The keys must be different, with values that the columns can hold.

        Raises: GuardMismatch if a row is newer than it may be; StoreUnavailable, AccessRefused, SchemaOutOfDate.
        """
        alike: dict[tuple[bool, ...], list[int]] = {}
        for position, key in enumerate(keys):
            alike.setdefault(tuple(value is None for value in key), []).append(position)
        for nulls, positions in alike.items():
            for start in range(0, len(positions), KEYS_PER_STATEMENT):
                chunk = positions[start : start + KEYS_PER_STATEMENT]
                columns = [[keys[position][place] for position in chunk] for place, is_null in enumerate(nulls) if not is_null]
                for number, txid, *row in self._fetch(connection, self._statement(nulls), [*columns, list(range(len(chunk)))]):
                    self._check(txid)
                    yield chunk[number], tuple(row)

    def _fetch(self, connection: Any, statement: sql.Composable, arrays: list[list[Any]]) -> list[tuple[Any, ...]]:
        """Return the rows of a statement, in a transaction of its own, because a task may take long to use them.

        The table is held before a snapshot is taken, or imported: while the transaction that exported it lasts, that holds the
        table, too.
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

    def _statement(self, nulls: tuple[bool, ...]) -> sql.Composable:
        """Return the statement for keys with NULL in these columns: IS NULL uses an index, IS NOT DISTINCT FROM does not."""
        own = [sql.Identifier(ALIAS, name) for name, _ in self.key]
        sent = [(place, kind) for place, ((_, kind), is_null) in enumerate(zip(self.key, nulls, strict=True)) if not is_null]
        same = [
            sql.SQL("{} IS NULL").format(column)
            if is_null
            else sql.SQL("{} = {}").format(column, sql.Identifier("requested", f"key_{place}"))
            for place, (column, is_null) in enumerate(zip(own, nulls, strict=True))
        ]
        # The types' names come from the closed list in columns.ColumnType.
        arrays = [sql.SQL("%s::{}[]").format(sql.SQL(kind)) for _, kind in sent]
        names = [sql.Identifier(f"key_{place}") for place, _ in sent]
        return sql.SQL(
            "SELECT requested.number, {txid}, {selected} FROM unnest({arrays}) AS requested ({names}) "
            "JOIN {table} AS {alias} ON {same} WHERE {condition}"
        ).format(
            txid=sql.SQL("NULL") if self.newest_txid is None else sql.Identifier(ALIAS, "txid"),
            selected=sql.SQL(", ").join(map(sql.SQL, self.selected)),
            arrays=sql.SQL(", ").join([*arrays, sql.SQL("%s::integer[]")]),
            names=sql.SQL(", ").join([*names, sql.Identifier("number")]),
            table=sql.Identifier(STATE, self.table),
            alias=sql.Identifier(ALIAS),
            same=sql.SQL(" AND ").join(same) if same else sql.SQL("true"),
            condition=sql.SQL(self.condition),
        )

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
        raise translate(error, f"reading {of}") from error
    finally:
        if connection is not None:
            connection.close()
