"""A Postgres table or query in SQL: the relation, its columns and their types, conditions and positions of ranges of its key.

The planner of ranges, and Spark's executors, which read them, both use this. A position is the key's values as
text, in a form that loses nothing (numbers with all digits, times in UTC with microseconds); Postgres reads it back as the
column's own type.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psycopg2 import sql

from tidegate.jobs.sources.column_types import SparkType, columns_of, parse_type
from tidegate.state_store.base.errors import SourceUnreadable, TidegateError
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

Position = list[str]

_QUOTED, _PLAIN = r'"(?:[^"]|"")+"', r'[^\s".]+'
_TABLE = re.compile(rf"({_QUOTED}|{_PLAIN})(?:\.({_QUOTED}|{_PLAIN}))?")
_SHOWN_QUERY_CHARACTERS = 60
_INTEGERS = ("smallint", "integer", "bigint")
# Postgres types, by name, that Spark's families of types, and its two floats, take without loss. A text takes any type, as
# Postgres prints it.
_ACCEPTED: dict[str, tuple[str, ...]] = {
    "integer": _INTEGERS,
    "decimal": (*_INTEGERS, "numeric", "real", "double precision"),  # the latter by the digits that Postgres prints
    "float": ("smallint", "real"),  # 24 bits hold each smallint
    "double": ("smallint", "integer", "real", "double precision"),  # 53 bits hold each integer, and not each bigint
    "boolean": ("boolean",),
    "date": ("date",),
    "timestamp": ("timestamp with time zone",),
    "timestamp_ntz": ("timestamp without time zone",),
    "binary": ("bytea",),
}
_READABLE = "tinyint, smallint, int, bigint, decimal, float, double, boolean, date, timestamp, timestamp_ntz, binary, string"


@dataclass(frozen=True)
class ResultColumn:
    """A result column as Postgres describes it: its type, and its table and column number, 0 if it has none."""

    type: str
    table: int
    number: int


@dataclass(frozen=True)
class TableQuery:
    """A table or a SELECT, with the requested columns and the key that orders its rows."""

    name: str
    table: tuple[str, ...]
    select: str
    key: tuple[str, ...]
    columns: dict[str, SparkType]

    @property
    def relation(self) -> sql.Composable:
        """The relation after FROM."""
        if self.table:
            return sql.Identifier(*self.table)
        return sql.SQL("({}\n) AS tidegate_source").format(sql.SQL(self.select))  # a comment may end the author's text

    @property
    def row_schema(self) -> str:
        """The requested columns as Spark writes them."""
        return columns_of({name: kind.name for name, kind in self.columns.items()})

    @property
    def keys(self) -> sql.Composable:
        """The key's columns, for SELECT and ORDER BY."""
        return sql.SQL(", ").join(map(sql.Identifier, self.key))

    @property
    def position(self) -> sql.Composable:
        """The key's values as a position."""
        return sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in self.key)

    def beyond(self, position: Position | None) -> sql.Composable:
        """Return the condition of rows after a position; of all rows with a key for None."""
        if position is None:
            return sql.SQL(" AND ").join(sql.SQL("{} IS NOT NULL").format(sql.Identifier(name)) for name in self.key)
        return self._compared(">", position)

    def up_to(self, position: Position) -> sql.Composable:
        """Return the condition of rows up to and including a position."""
        return self._compared("<=", position)

    def between(self, after: Position | None, to: Position) -> sql.Composable:
        """Return the condition of a range: after `after`, up to `to`."""
        return sql.SQL("{} AND {}").format(self.beyond(after), self.up_to(to))

    @property
    def digest(self) -> sql.Composable:
        """A digest of some rows' keys, whatever their order, as text. It uses MD5, which is the same in all versions."""
        texts = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in self.key)
        hashed = sql.SQL("('x' || left(md5(concat_ws(E'\\x1f', {})), 16))::bit(64)::bigint").format(texts)
        return sql.SQL("coalesce(sum({}), 0)::text").format(hashed)

    @property
    def values(self) -> sql.Composable:
        """The requested columns, in the form that COPY prints."""
        return sql.SQL(", ").join(_printed(name, kind) for name, kind in self.columns.items())

    def check_columns(self, cursor: Any, complaint: type[TidegateError] = SourceUnreadable) -> dict[str, ResultColumn]:
        """Check that the requested columns exist with types that fit, and return their descriptions.

        Raises: `complaint`, naming the column.
        """
        requested = sql.SQL(", ").join(map(sql.Identifier, self.columns))
        cursor.execute(sql.SQL("SELECT {} FROM {} LIMIT 0").format(requested, self.relation))
        description = cursor.description
        cursor.execute(
            "SELECT oid, format_type(oid, NULL) FROM pg_type WHERE oid = ANY(%s)", [[c.type_code for c in description]]
        )
        names = dict(cursor.fetchall())
        for column, (name, kind) in zip(description, self.columns.items(), strict=True):
            family = kind.alias if kind.family == "float" else kind.family
            if family != "text" and names[column.type_code] not in _ACCEPTED[family]:
                raise complaint(
                    f"{self.name}: column {name} is {names[column.type_code]}, which cannot be read as {kind.name}. "
                    "Correct the schema and raise the pipeline's version, or cast the column in a query."
                )
        return {
            name: ResultColumn(names[c.type_code], c.table_oid or 0, c.table_column or 0)
            for c, name in zip(description, self.columns, strict=True)
        }

    def plan_nodes(self, cursor: Any, columns: Iterable[str]) -> list[dict[str, Any]]:
        """Return the nodes of Postgres' plan for reading these columns, with their expressions."""
        requested = sql.SQL(", ").join(map(sql.Identifier, columns))
        cursor.execute(sql.SQL("EXPLAIN (VERBOSE, FORMAT JSON) SELECT {} FROM {}").format(requested, self.relation))
        nodes = [plan["Plan"] for plan in cursor.fetchone()[0]]
        for node in nodes:  # grows meanwhile
            nodes += node.get("Plans", [])
        return nodes

    def _compared(self, operator: str, position: Position) -> sql.Composable:
        # Untyped literals take the type of the column that they are compared with.
        values = sql.SQL(", ").join(map(sql.Literal, position))
        return sql.SQL("({}) {} ({})").format(self.keys, sql.SQL(operator), values)


def readable_type(text: str) -> SparkType:
    """Return the Spark type of this name, which a column of Postgres is read as.

    Raises: ValueError if no column can become it without loss.
    """
    advice = (
        f"Use one of {_READABLE}; declare anything else string, which is how Postgres prints it, and parse it in the transform."
    )
    try:
        declared = parse_type(text)
    except ValueError as error:
        raise ValueError(f"{error}. {advice}") from None
    if declared.parts:
        raise ValueError(f"{text!r} is not read from Postgres. {advice}")
    return declared


def table_of(text: str) -> tuple[str, ...]:
    """Return the parts of a table's name as SQL reads it: folded to lower case unless in quotes.

    Raises: ValueError if it is no name.
    """
    parts = _TABLE.fullmatch(text.strip())
    if parts is None:
        raise ValueError(f'{text!r} is no name of a table; write it as in SQL: orders, shop.orders or "Shop"."Orders".')
    return tuple(part[1:-1].replace('""', '"') if part[0] == '"' else part.lower() for part in parts.groups() if part)


def shown(table: str | None, query: str | None) -> str:
    """Return the source's name in messages."""
    if table is not None:
        return f"Table {table.strip()}"
    text = " ".join((query or "").split())
    return f"Query {text if len(text) <= _SHOWN_QUERY_CHARACTERS else text[:_SHOWN_QUERY_CHARACTERS] + '...'}"


def rows_now(cursor: Any, query: TableQuery, metadata: SourceMetadata, *, may_shrink: bool = False) -> str | None:
    """Return in words which rows a batch's range has now, beside those that were planned; None if they are the same."""
    if metadata["to"] is None:
        return None
    statement = sql.SQL("SELECT count(*), {} FROM {} WHERE {}")
    cursor.execute(statement.format(query.digest, query.relation, query.between(metadata["after"], metadata["to"])))
    rows, digest = cursor.fetchone()
    after = f"after {', '.join(metadata['after'])} and " if metadata["after"] else ""
    there = f"{rows} row(s) {after}up to {', '.join(metadata['to'])}"
    if rows > metadata["rows"] or (rows < metadata["rows"] and not may_shrink):
        return f"{there}, but {metadata['rows']} when this was planned"
    if rows == metadata["rows"] and metadata.get("keys", digest) != digest:
        return f"{there}, as when this was planned, but with other keys"
    return None


def _printed(name: str, kind: SparkType) -> sql.Composable:
    column = sql.Identifier(name)
    if kind.family == "decimal":  # as text: a cast of a double keeps 15 digits; trimmed: trailing zeros would count
        return sql.SQL("trim_scale({}::text::numeric)").format(column)
    if kind.alias == "double":  # a real is printed with fewer digits than it has as a double
        return sql.SQL("{}::double precision").format(column)
    return sql.SQL("encode({}, 'hex')").format(column) if kind.family == "binary" else column
