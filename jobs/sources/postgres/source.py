"""A source that reads a Postgres table or query by an increasing key, in frozen ranges.

    metadata = {"after": position or null, "to": position, "splits": [position, ...], "rows": how many when planned,
                "keys": digest of their keys, "gaps": ..., "snapshot": ..., "attached": ..., "origin": ..., "generation": 1}

A batch is the rows after `after` and up to `to`; `splits` divide it into the parts that Spark reads in parallel. Ranges are
half open and compared by the key's values alone, so that they are disjoint, and rows that share a key stay together. A row is
settled once no open transaction can add a row with a lower key (`tidegate.jobs.sources.postgres.settled_rows`); a range has
only settled rows. From the last six entries the next plan finds late rows, with keys in ranges that were planned before them
(`tidegate.jobs.sources.postgres.late_rows`, `tidegate.jobs.sources.postgres.seen_by_plans`), and whether it is the same table
(`tidegate.jobs.sources.postgres.table_origin`). A first range that was planned again and has no rows lacks these entries.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tidegate.jobs.sources import OF_ANOTHER_SOURCE, Dataset, Source
from tidegate.jobs.sources.column_types import check_names
from tidegate.jobs.sources.postgres.settled_rows import long_open
from tidegate.jobs.sources.postgres.source_connection import check_primary, connected, conninfo_of, transaction
from tidegate.jobs.sources.postgres.table_origin import read_origin
from tidegate.jobs.sources.postgres.table_query import TableQuery, readable_type, shown, table_of
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceKind, SourceMetadata

# Families of types that a sequence or a trigger may draw, and those that put rows of one time in order.
_DRAWN = ("integer", "decimal", "text")
_ORDERED = (*_DRAWN, "date", "timestamp", "timestamp_ntz")


@dataclass(frozen=True, kw_only=True)
class PostgresTable(Source):
    """A table or a query of Postgres, each row read exactly once, in the order of its key.

    `table` is written as in SQL: ``orders``, ``shop.orders``, ``"Shop"."Orders"``. `query` is one SELECT without LIMIT,
    TABLESAMPLE, or functions of Postgres itself for chance and the clock. Its conditions, and those of a view, have to be on
    columns that never change, and not on the clock, a setting, or rows of another table that come later: a row that they admit
    later would come after its range was read. Nor may the key itself be changed, or be drawn again by setval after its rows
    were deleted. A query names its tables itself: those that a function reads are not seen, and functions that return rows are
    refused.

    `schema` maps columns, by their exact names, to Spark types; a double may be a decimal. A value that does not fit fails
    the batch with its column and key. The key's columns must be in the schema and should have an index.

    `key` is one of:

    - ``"id"``: a number drawn from a sequence inside the INSERT (``serial``, ``IDENTITY``, ``DEFAULT nextval(...)``).
      Rows are only ever appended: the source is transactional. It is not for keys that the application draws first and
      inserts later, like many object mappers; use the next form for these. The reading role needs
      ``GRANT SELECT ON SEQUENCE`` too, because keys that the sequence has not drawn would hide later rows. `key_is_drawn` is
      the author's promise, where no such sequence can be found (a trigger draws the key, or a view hides its origin), that
      each INSERT itself draws a higher key than all before. Only with this promise may the key be a text or a uuid.
    - ``("updated_at", "id")``: a ``timestamptz`` that the database sets to its now() whenever it writes the row, and a column
      that distinguishes rows of one time. An updated row is read again, and versions that were not read before the next
      update are skipped: the source is opaque. For a time that never changes, such as created_at, use
      ``kind="transactional"``. The reading role needs ``GRANT pg_read_all_stats``. Any open transaction in the database
      delays rows of transactions that began after it.

    A batch has `max_rows` rows, plus those that share the last row's key; it is read over at most `partitions` connections.
    A plan waits up to `wait_seconds` for transactions that may hold lower keys; if they take longer, a later plan has these
    rows. Rows with a time are read once they are `margin_seconds` older than the clock, which may not be set back by more, and
    than the start of the oldest open transaction; the margin grows to the step to which a time is seen to be rounded, by its
    type, a default, a query or PL/pgSQL. More than a day is refused. Elsewhere it must not be rounded by more than the margin.

    `connection` holds libpq parameters without a password: ``{"host": ..., "dbname": ..., "user": ..., "passfile": ...}``, a
    connection string, or ``service=...``. Planner and executors find the password by themselves, so passfile and service file
    are paths that both can read. Without it, Tidegate's own database is read, by planner and executors as the staging role:
    ``GRANT SELECT ON orders TO tidegate_stager; GRANT SELECT ON SEQUENCE orders_id_seq TO tidegate_stager``.

    Late rows, with keys up to the position that was read, are refused at the next plan. So is a table that is not the same any
    more (dropped and created again, its sequence set back, its server restored). When a table has to begin again, raise
    `generation`, and the pipeline's version: it is then read from its beginning or, with `keeps_position`, from its last
    position, for rows that were put back under their keys, as from a dump. The states stay as they are.

    A promoted standby is refused too, as it may have lost rows that were read, whose keys others get. Where only synchronous
    standbys are promoted, which have all rows, `failover` may be ``"go-on"``; for Tidegate's own database, so may the setting
    `pg_failover`.
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
    key_is_drawn: bool = False
    generation: int = 1
    keeps_position: bool = False
    failover: Literal["halt", "go-on"] = "halt"

    def __post_init__(self) -> None:
        """Check what can be checked without the database.

        Raises: ValueError.
        """
        if (self.table is None) == (self.query is None):
            raise ValueError("PostgresTable needs either table or query.")
        try:
            self._check()
        except ValueError as error:
            raise ValueError(f"PostgresTable({self.table or self.query!r}): {error}") from None
        if self.kind is None:
            object.__setattr__(self, "kind", "opaque" if self.is_by_clock else "transactional")
        if self.kind not in ("transactional", "opaque"):
            raise ValueError(f"PostgresTable({self.table or self.query!r}) is transactional or opaque, not {self.kind!r}.")

    def _check(self) -> None:
        self._check_key(self.selection)
        check_names(self.schema)
        if self.connection is not None:
            conninfo_of(self.connection)
        for name in ("max_rows", "partitions", "generation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        for name in ("wait_seconds", "margin_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative.")
        if self.failover not in ("halt", "go-on"):
            raise ValueError(f'failover is "halt" or "go-on", not {self.failover!r}.')
        if self.key_is_drawn and self.is_by_clock:
            raise ValueError("key_is_drawn is not for a key that begins with a time.")

    @property
    def selection(self) -> TableQuery:
        """The table or query, as SQL."""
        return TableQuery(
            shown(self.table, self.query),
            table_of(self.table) if self.table is not None else (),
            (self.query or "").strip().rstrip(";"),
            (self.key,) if isinstance(self.key, str) else tuple(self.key),
            {name: readable_type(kind) for name, kind in self.schema.items()},
        )

    @property
    def is_by_clock(self) -> bool:
        """Whether the key is a time, not drawn from a sequence."""
        selection = self.selection
        return selection.columns[selection.key[0]].family == "timestamp"

    @property
    def identity(self) -> str:
        """Return what identifies the rows: server, table or query, key and columns."""
        place = conninfo_of(self.connection) if self.connection is not None else {}
        server = {name: place[name] for name in ("service", "host", "hostaddr", "port", "dbname") if name in place}
        selected = self.table if self.table is not None else self.query
        parts: list[Any] = [server, selected, list(self.selection.key), list(self.schema.items())]
        if self.generation > 1:
            parts.append({"generation": self.generation})
        return f"postgres {'table' if self.table is not None else 'query'} {json.dumps(parts, sort_keys=True)}"

    def held_back(self, settings: Settings) -> str | None:
        """Return the transactions that have been open for longer than a plan waits, and may still add rows."""
        query = self.selection
        with connected(self.conninfo(settings, "look"), query) as connection, transaction(connection) as cursor:
            check_primary(cursor, query)
            tables = read_origin(cursor, query, SourceUnreadable).read
            seconds = self.margin_seconds if self.is_by_clock else self.wait_seconds
            transactions = long_open(cursor, tables, seconds=seconds, is_by_clock=self.is_by_clock)
        if not transactions:
            return None
        return f"{query.name}: later rows wait for transactions that are still open: {'; '.join(transactions)}."

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> list[Dataset]:
        """Return the table; nothing for a query, which may read several tables, or if only a service file names the server."""
        del metadata
        place = self.conninfo(settings, "read")
        if self.table is None or "host" not in place or "dbname" not in place:
            return []
        table = self.selection.table if len(self.selection.table) > 1 else ("public", *self.selection.table)
        return [Dataset(f"postgres://{place['host']}:{place.get('port', 5432)}", ".".join([place["dbname"], *table]))]

    def conninfo(self, settings: Settings, doing: str) -> dict[str, Any]:
        """Return the parameters of a connection to the table's server, with what it is for as its name."""
        own = self.connection is None
        parameters = settings.conninfo(user=settings.pg_stager) if own else conninfo_of(self.connection or "")
        return {"application_name": f"tidegate {doing}", **parameters}

    @staticmethod
    def _check_key(selection: TableQuery) -> None:
        if not selection.columns:
            raise ValueError("it needs a schema, such as {'id': 'bigint', 'amount': 'decimal(12,2)'}.")
        if not 1 <= len(selection.key) <= 2 or len(set(selection.key)) != len(selection.key):
            raise ValueError("the key is one column, or a time and a column that tells apart rows of one time.")
        if absent := [name for name in selection.key if name not in selection.columns]:
            raise ValueError(f"key column {absent[0]} is not in the schema, which has {', '.join(selection.columns)}.")
        first, kinds = selection.columns[selection.key[0]].name, [selection.columns[name].family for name in selection.key]
        if kinds[0] in ("date", "timestamp_ntz"):
            raise ValueError(
                f"key column {selection.key[0]} is {first}: what that means depends on the writer's time zone. Use a "
                "timestamptz, declared timestamp."
            )
        if kinds[0] not in (*_DRAWN, "timestamp"):
            raise ValueError(
                f"key column {selection.key[0]} is {first}, which puts nothing in order. Use a whole number, a decimal, a "
                "string or a timestamp."
            )
        if len(kinds) > 1 and (kinds[0] != "timestamp" or kinds[1] not in _ORDERED):
            raise ValueError("a key of two columns is a timestamp, then a number, text or time.")


def is_range(metadata: SourceMetadata) -> bool:
    """Return whether metadata are those of a PostgresTable: `Changes` have ranges, too, and no generation."""
    return {"to", "generation"} <= metadata.keys()


def check_range(planned: SourceMetadata | None) -> None:
    """Refuse a batch that another kind of source has planned.

    Raises: SourceChanged.
    """
    if planned is not None and not is_range(planned):
        raise SourceChanged(OF_ANOTHER_SOURCE)
