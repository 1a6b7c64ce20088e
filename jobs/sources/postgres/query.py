"""Describes a Postgres table or query in SQL, connects to it, and translates its errors.

The planner of ranges, and Spark's executors, which read them, both use this. A position is the key's values as
text, in a form that loses nothing (numbers with all digits, times in UTC with microseconds); Postgres reads it back as the
column's own type.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg2
from psycopg2 import extensions, sql

from jobs.sources.column_types import SparkType, columns_of, parse_type
from state_store import driver_errors
from state_store.declaration import SourceMetadata
from state_store.errors import (
    AccessRefused,
    SchemaOutOfDate,
    SourceUnavailable,
    SourceUnreadable,
    StoreUnavailable,
    TidegateError,
)
from state_store.executor_connections import connect
from state_store.settings import CONNECT_TIMEOUT_SECONDS

Position = list[str]

_INTEGERS = ("smallint", "integer", "bigint")
# Postgres types, by name, that Spark's families of types, and its two floats, take without loss. A text takes any type, as
# Postgres prints it.
_ACCEPTED: dict[str, tuple[str, ...]] = {
    "integer": _INTEGERS,
    "decimal": (*_INTEGERS, "numeric", "real", "double precision"),  # the latter by the digits that Postgres prints
    "float": ("real",),
    "double": ("double precision",),
    "boolean": ("boolean",),
    "date": ("date",),
    "timestamp": ("timestamp with time zone",),
    "timestamp_ntz": ("timestamp without time zone",),
    "binary": ("bytea",),
}
_READABLE = "tinyint, smallint, int, bigint, decimal, float, double, boolean, date, timestamp, timestamp_ntz, binary, string"
# Settings are pinned, so that texts do not depend on them; policies that would hide rows become errors. LOCAL leaves a pooler's
# session unchanged for its other users.
_PINNED = sql.SQL(
    "SET LOCAL row_security = off; "
    "SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO, YMD'; SET LOCAL intervalstyle = 'postgres'; "
    "SET LOCAL extra_float_digits = 1; SET LOCAL bytea_output = 'hex'; SET LOCAL lock_timeout = '10s'"
)
_SECRETS = ("password", "sslpassword", "oauth_client_secret")
_QUOTED, _PLAIN = r'"(?:[^"]|"")+"', r'[^\s".]+'
_TABLE = re.compile(rf"({_QUOTED}|{_PLAIN})(?:\.({_QUOTED}|{_PLAIN}))?")
_SHOWN_QUERY_CHARACTERS = 60


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


def takes(declared: SparkType, postgres_type: str) -> bool:
    """Return whether every value of a Postgres type that fits a declared type arrives unchanged."""
    name = declared.alias if declared.family == "float" else declared.family
    return name == "text" or postgres_type in _ACCEPTED[name]


@dataclass(frozen=True)
class ResultColumn:
    """A result column as Postgres describes it: its type, and its table and column number, 0 if it has none."""

    type: str
    table: int
    number: int


@dataclass(frozen=True)
class Query:
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
            if not takes(kind, names[column.type_code]):
                raise complaint(
                    f"{self.name}: column {name} is {names[column.type_code]}, which cannot be read as {kind.name}. "
                    "Correct the schema and raise the pipeline's version, or cast the column in a query."
                )
        return {
            name: ResultColumn(names[c.type_code], c.table_oid or 0, c.table_column or 0)
            for c, name in zip(description, self.columns, strict=True)
        }

    def _compared(self, operator: str, position: Position) -> sql.Composable:
        # Untyped literals take the type of the column that they are compared with.
        values = sql.SQL(", ").join(map(sql.Literal, position))
        return sql.SQL("({}) {} ({})").format(self.keys, sql.SQL(operator), values)


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


def conninfo_of(connection: str | Mapping[str, Any]) -> dict[str, str]:
    """Return libpq parameters that name the same server on every machine, regardless of its PG variables.

    Raises: ValueError for parameters that are no connection, hold a secret, or do not say where to connect to.
    """
    try:
        text = connection if isinstance(connection, str) else extensions.make_dsn(**connection)
        parameters: dict[str, str] = extensions.parse_dsn(text)
    except (psycopg2.Error, TypeError):  # without the text: it may hold a password
        raise ValueError("connection is neither a libpq connection string nor a mapping of libpq parameters.") from None
    if secrets := [name for name in _SECRETS if name in parameters]:
        raise ValueError(
            f"connection holds a {secrets[0]}, which would end up in code and logs. Leave it out and name a passfile, which "
            "the planner and Spark's executors can both read, or a service."
        )
    missing = [name for name in ("host", "dbname", "user") if name not in parameters]
    if missing and "service" not in parameters:
        raise ValueError(f"connection does not name its {' and '.join(missing)}; it must, unless it names a service.")
    # Otherwise PGPORT, which names Tidegate's own server, would count on the planner and not on executors.
    return parameters if "service" in parameters else {"port": "5432", **parameters}


@contextmanager
def connected(conninfo: Mapping[str, Any], query: Query, missing: type[TidegateError] = SourceUnreadable) -> Iterator[Any]:
    """Connect for reading, and translate the driver's errors to ours.

    Raises: SourceUnavailable, AccessRefused, SourceUnreadable, and `missing` for a table or column that does not exist.
    """
    defaults: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_SECONDS, "keepalives_idle": 30, "keepalives_interval": 10}
    defaults |= {"require_auth": "!password"}  # a connection has to override this to send its password in clear text
    try:
        with closing(connect({**defaults, **conninfo, "client_encoding": "UTF8"})) as connection:
            # Each statement must see all earlier commits: planning looks at rows, then at locks, and relies on this order.
            connection.set_session(isolation_level="READ COMMITTED", readonly=True)
            yield connection
    except psycopg2.Error as error:
        raise _meaning(error, query, missing) from error


@contextmanager
def transaction(connection: Any) -> Iterator[Any]:
    """Yield a cursor in a transaction whose texts do not depend on settings of server or role."""
    with connection, connection.cursor() as cursor:
        cursor.execute(_PINNED)
        yield cursor


def check_primary(cursor: Any, query: Query) -> None:
    """Refuse a standby: it receives rows late, and does not show open writers.

    Raises: SourceUnreadable.
    """
    cursor.execute("SELECT pg_is_in_recovery()")
    if cursor.fetchone()[0]:
        raise SourceUnreadable(
            f"{query.name} is on a standby, which cannot tell which transactions are still open on its primary. Connect to "
            "the primary (target_session_attrs=read-write)."
        )


def count_rows(cursor: Any, query: Query, metadata: SourceMetadata) -> tuple[int, str]:
    """Count the rows that a batch's range has now; return the count and the digest of their keys."""
    if metadata["to"] is None:
        return 0, "0"
    statement = sql.SQL("SELECT count(*), {} FROM {} WHERE {}")
    cursor.execute(statement.format(query.digest, query.relation, query.between(metadata["after"], metadata["to"])))
    rows, digest = cursor.fetchone()
    return int(rows), digest


def range_in_words(metadata: SourceMetadata) -> str:
    """Return a range in words."""
    to = ", ".join(metadata["to"])
    return f"after {', '.join(metadata['after'])} and up to {to}" if metadata["after"] else f"up to {to}"


def _printed(name: str, kind: SparkType) -> sql.Composable:
    column = sql.Identifier(name)
    if kind.family == "decimal":  # as text: a cast of a double keeps 15 digits; trimmed: trailing zeros would count
        return sql.SQL("trim_scale({}::text::numeric)").format(column)
    return sql.SQL("encode({}, 'hex')").format(column) if kind.family == "binary" else column


def _meaning(error: psycopg2.Error, query: Query, missing: type[TidegateError]) -> TidegateError:
    """Return our error for a driver error, by its SQLSTATE."""
    family = driver_errors.translate(error, "reading")
    message = driver_errors.message_of(error)
    # A source's transaction is read-only on any server, so a refused write is the query's, not that of a failover.
    if isinstance(family, StoreUnavailable) and not isinstance(error, psycopg2.errors.ReadOnlySqlTransaction):
        return SourceUnavailable(f"{query.name} cannot be read now: {message}.")
    if isinstance(family, AccessRefused) and error.diag.source_function == "check_enable_rls":
        return AccessRefused(
            f"{query.name} has row-level security, which hides rows from this role: {message}. Let the role that reads it "
            "see all of them (ALTER ROLE ... BYPASSRLS), or GRANT SELECT on a view of the table's owner, and read that."
        )
    if isinstance(family, AccessRefused):
        return AccessRefused(
            f"{query.name} may not be read: {message}. GRANT SELECT to the role that reads it, and check the source's "
            "connection and its password file, on the planner and on Spark's executors."
        )
    if isinstance(family, SchemaOutOfDate):
        return missing(f"{query.name} is not as declared: {message}. Put it back, or correct the pipeline's PostgresTable.")
    return SourceUnreadable(f"{query.name} cannot be read: {message} (SQLSTATE {error.pgcode}).")
