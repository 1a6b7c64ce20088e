"""PostgresTable: a table or query, read by an increasing key, in ranges that the ledger freezes.

    metadata = {"after": position or null, "to": position, "splits": [position, ...], "rows": how many when planned}

A batch is the rows behind `after` and up to `to`; `splits` cut it into the parts that Spark reads at the same time. Ranges
are half open and compared by the key's values alone, so that they are disjoint, and rows that share a key stay together.
Rows that open transactions may still bring are waited for, never passed by: see `postgres_in_flight`.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from psycopg2 import sql

from jobs.sources import Coordinator, Source
from jobs.sources.postgres_in_flight import settled_by_clock, settled_by_sequence
from jobs.sources.postgres_query import (
    Position,
    Query,
    SparkType,
    connected,
    conninfo_of,
    count_rows,
    said_range,
    shown,
    table_of,
    transaction,
)
from state_store.declaration import SourceKind, SourceMetadata
from state_store.errors import SourceChanged
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jobs.sources.postgres_reader import PostgresReader

_DRAWN = ("tinyint", "smallint", "int", "bigint", "decimal", "string")
_ORDERED = (*_DRAWN, "date", "timestamp", "timestamp_ntz")


@dataclass(frozen=True, kw_only=True)
class PostgresTable(Source):
    """A table or a query of Postgres, each row read exactly once, in the order of its key.

    `table` is written as in SQL: ``orders``, ``shop.orders``, ``"Shop"."Orders"``. `query` is one SELECT without LIMIT.
    `schema` maps columns, by their exact names, to Spark types; a value that does not fit fails the batch with its column and
    key. The key's columns belong to it and should have an index.

    `key` is one of:

    - ``"id"``: a number or text drawn from a sequence inside the INSERT (``serial``, ``IDENTITY``, ``DEFAULT nextval(...)``).
      Rows are only ever appended: the source is transactional. Not for keys that the application draws first and inserts
      later, as many object mappers do; use the next form for these.
    - ``("updated_at", "id")``: a ``timestamptz`` that the database sets to its now() whenever it writes the row, and what tells
      apart rows of one time. A row that is updated comes again, and versions that nobody has read yet are passed over: the
      source is opaque. For a time that never changes, such as created_at, say ``kind="transactional"``. The role that reads
      needs ``GRANT pg_read_all_stats``. Any open transaction in the database holds back what began after it.

    A batch has `max_rows` rows, and those that share the last one's key; it is read over at most `partitions` connections.
    A plan waits up to `wait_seconds` for transactions that may hold lower keys; when they take longer, a later plan has these
    rows. `margin_seconds` is how far behind the clock rows with a time are read; the clock may not be put back by more.

    `connection` holds libpq parameters without a password: ``{"host": ..., "dbname": ..., "user": ..., "passfile": ...}``, a
    connection string, or ``service=...``. Planner and executors find the password by themselves, so passfile and service file
    are paths that both can read. Without it, Tidegate's own database is read, as the role that executors stage with
    (``GRANT SELECT ON orders TO tidegate_stager``), on both sides.
    """

    table: str | None = None
    query: str | None = None
    key: str | tuple[str, str]
    schema: Mapping[str, str]
    kind: SourceKind = None  # type: ignore[assignment] # decided by the key unless it is given
    max_rows: int = 100_000
    partitions: int = 4
    connection: str | Mapping[str, Any] | None = None
    wait_seconds: float = 5
    margin_seconds: float = 1

    def __post_init__(self) -> None:
        """Check what can be checked without the database.

        Raises: ValueError.
        """
        if (self.table is None) == (self.query is None):
            raise ValueError("PostgresTable needs either table or query.")
        try:
            self._check_key(self.selection)
            if self.connection is not None:
                conninfo_of(self.connection)
        except ValueError as error:
            raise ValueError(f"PostgresTable({self.table or self.query!r}): {error}") from None
        for name in ("max_rows", "partitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"PostgresTable({self.table or self.query!r}): {name} must be at least 1.")
        for name in ("wait_seconds", "margin_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"PostgresTable({self.table or self.query!r}): {name} must not be negative.")
        if self.kind is None:
            object.__setattr__(self, "kind", "opaque" if self.is_by_clock else "transactional")
        if self.kind not in ("transactional", "opaque"):
            raise ValueError(f"PostgresTable({self.table or self.query!r}) is transactional or opaque, not {self.kind!r}.")

    @property
    def selection(self) -> Query:
        """What is read, as SQL."""
        return Query(
            shown(self.table, self.query),
            table_of(self.table) if self.table is not None else (),
            (self.query or "").strip().rstrip(";"),
            (self.key,) if isinstance(self.key, str) else tuple(self.key),
            {name: SparkType.parse(kind) for name, kind in self.schema.items()},
        )

    @property
    def is_by_clock(self) -> bool:
        """Whether the key is a time, not drawn from a sequence."""
        selection = self.selection
        return selection.columns[selection.key[0]].name == "timestamp"

    @property
    def identity(self) -> str:
        """Return what decides which rows are read: server, table or query, key and columns."""
        place = conninfo_of(self.connection) if self.connection is not None else {}
        server = {name: place[name] for name in ("service", "host", "hostaddr", "port", "dbname") if name in place}
        read = self.table if self.table is not None else self.query
        parts = [server, read, list(self.selection.key), list(self.schema.items())]
        return f"postgres {'table' if self.table is not None else 'query'} {json.dumps(parts, sort_keys=True)}"

    def coordinator(self, settings: Settings) -> "PostgresCoordinator":
        """Return what cuts ranges; it connects when it is asked."""
        return PostgresCoordinator(self, self._conninfo(settings, "plan"))

    def emitter(self, spark: "SparkSession", settings: Settings) -> "PostgresReader":
        """Return what reads the range that the metadata names."""
        from jobs.sources.postgres_reader import PostgresReader  # noqa: PLC0415 - declaring a pipeline must not load pyarrow
        from jobs.spark import LOCAL  # noqa: PLC0415

        conninfo = self._conninfo(settings, "read")
        executors_conninfo = dict(conninfo)
        if self.connection is None and not LOCAL.fullmatch(settings.spark_remote):
            executors_conninfo.pop("passfile", None)  # theirs is where their own PGPASSFILE says
        return PostgresReader(spark, self.selection, self.kind, conninfo=conninfo, executors_conninfo=executors_conninfo)

    def _conninfo(self, settings: Settings, doing: str) -> dict[str, Any]:
        own = self.connection is None
        parameters = settings.conninfo(user=settings.pg_stager) if own else conninfo_of(self.connection or "")
        return {"application_name": f"tidegate {doing}", **parameters}

    @staticmethod
    def _check_key(selection: Query) -> None:
        if not selection.columns:
            raise ValueError("it needs a schema, such as {'id': 'bigint', 'amount': 'decimal(12,2)'}.")
        if not 1 <= len(selection.key) <= 2 or len(set(selection.key)) != len(selection.key):
            raise ValueError("the key is one column, or a time and a column that tells apart rows of one time.")
        if absent := [name for name in selection.key if name not in selection.columns]:
            raise ValueError(f"key column {absent[0]} is not in the schema, which has {', '.join(selection.columns)}.")
        kinds = [selection.columns[name].name for name in selection.key]
        if kinds[0] in ("date", "timestamp_ntz"):
            raise ValueError(
                f"key column {selection.key[0]} is {kinds[0]}: what that means depends on the writer's time zone. Use a "
                "timestamptz, declared timestamp."
            )
        if kinds[0] not in (*_DRAWN, "timestamp"):
            raise ValueError(f"key column {selection.key[0]} is {kinds[0]}, which puts nothing in order. Use one of {_DRAWN}.")
        if len(kinds) > 1 and (kinds[0] != "timestamp" or kinds[1] not in _ORDERED):
            raise ValueError("a key of two columns is a timestamp, then a number, text or time.")


class PostgresCoordinator(Coordinator):
    """Cuts ranges; all ranges of one plan end where rows were settled when the plan first asked."""

    def __init__(self, source: PostgresTable, conninfo: dict[str, Any]) -> None:
        self._source = source
        self._query = source.selection
        self._conninfo = conninfo
        self._looked = False
        self._settled: sql.Composable | None = None

    def initialize_transaction(
        self,
        txid: int,  # noqa: ARG002 - ranges follow each other by the key alone
        previous_metadata: SourceMetadata | None,
        current_metadata: SourceMetadata | None,
    ) -> SourceMetadata | None:
        """Return the next range of settled rows, None if there are none.

        A range that was saved stays, unless the one before it now ends elsewhere.

        Raises: SourceUnavailable, SourceUnreadable, SourceChanged, AccessRefused, MalformedRecord for rows without a key.
        """
        after: Position | None = previous_metadata["to"] if previous_metadata else None
        if current_metadata is not None and (self._source.kind == "transactional" or current_metadata["after"] == after):
            return current_metadata
        with self._connected() as connection:
            if not self._looked:
                self._refuse_late_rows(connection, previous_metadata)
                self._settled = self._settle(connection, after)
                self._looked = True
            following = self._cut(connection, after, self._settled) if self._settled else None
        if following is None and current_metadata is not None:
            return {"after": after, "to": after, "splits": [], "rows": 0}
        return following

    def _connected(self) -> AbstractContextManager[Any]:
        return connected(self._conninfo, self._query)

    def _settle(self, connection: Any, after: Position | None) -> sql.Composable | None:
        source = self._source
        if source.is_by_clock:
            return settled_by_clock(connection, self._query, after, source.wait_seconds, source.margin_seconds)
        return settled_by_sequence(connection, self._query, after, source.wait_seconds)

    def _cut(self, connection: Any, after: Position | None, settled: sql.Composable) -> SourceMetadata | None:
        """Return the range of the next rows, looked at through the key's index, at most `max_rows` of it and ties."""
        source, query = self._source, self._query
        statement = sql.SQL(
            "SELECT n, {position} FROM ("
            " SELECT {keys}, row_number() OVER (ORDER BY {keys}) AS n, count(*) OVER () AS total FROM ("
            "  SELECT {keys} FROM {relation} WHERE {behind} AND {settled} ORDER BY {keys} FETCH FIRST {rows} ROWS WITH TIES"
            " ) AS batch"
            ") AS numbered WHERE n % {step} = 0 OR n = total ORDER BY n"
        ).format(
            position=query.position,
            keys=query.keys,
            relation=query.relation,
            behind=query.behind(after),
            settled=settled,
            rows=sql.Literal(source.max_rows),
            step=sql.Literal(ceil(source.max_rows / source.partitions)),
        )
        with transaction(connection) as cursor:
            cursor.execute(statement)
            ends = cursor.fetchall()
        if not ends:
            return None
        rows, *to = ends[-1]
        splits: list[Position] = []
        for _, *split in ends[:-1]:
            if split != to and split not in splits[-1:]:  # rows that share a key stay in one part
                splits.append(split)
        return {"after": after, "to": to, "splits": splits, "rows": rows}

    def _refuse_late_rows(self, connection: Any, previous: SourceMetadata | None) -> None:
        """Refuse to go on when rows have come into the range before: an alarm for keys that were not drawn by the INSERT."""
        if previous is None or self._source.kind != "transactional":
            return
        with transaction(connection) as cursor:
            found = count_rows(cursor, self._query, previous)
        if found > previous["rows"]:
            raise SourceChanged(
                f"{self._query.name} has {found} row(s) {said_range(previous)}, but {previous['rows']} when this was planned: "
                "rows with lower keys came later, and would never be read. Give them new keys, and let the INSERT draw them."
            )
