"""Connections to a Postgres source: parameters, settings of its transactions, and the meaning of its errors."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import psycopg2
from psycopg2 import extensions, sql

from tidegate.jobs.sources.postgres.table_query import TableQuery
from tidegate.state_store.base.errors import (
    AccessRefused,
    LockHeld,
    SchemaOutOfDate,
    SourceUnavailable,
    SourceUnreadable,
    StoreUnavailable,
    TidegateError,
)
from tidegate.state_store.base.settings import CONNECT_TIMEOUT_SECONDS
from tidegate.state_store.connections import lock_holders, postgres_errors
from tidegate.state_store.connections.answer_deadlines import LONGEST_SOURCE_ANSWER_SECONDS
from tidegate.state_store.connections.executor_connections import connect

# Settings are pinned, so that texts do not depend on them; policies that would hide rows become errors. LOCAL leaves a pooler's
# session unchanged for its other users.
_PINNED = sql.SQL(
    "SET LOCAL row_security = off; "
    "SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO, YMD'; SET LOCAL intervalstyle = 'postgres'; "
    "SET LOCAL extra_float_digits = 1; SET LOCAL bytea_output = 'hex'; "
    "SET LOCAL lock_timeout = '10s'; "
    "SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN "  # of which older servers do not know all
    "('statement_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout')"
)
_SECRETS = ("password", "sslpassword", "oauth_client_secret")


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
def connected(conninfo: Mapping[str, Any], query: TableQuery, missing: type[TidegateError] = SourceUnreadable) -> Iterator[Any]:
    """Connect for reading, and translate the driver's errors to ours.

    Raises: SourceUnavailable, AccessRefused, SourceUnreadable, and `missing` for a table or column that does not exist.
    """
    defaults: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_SECONDS, "keepalives_idle": 30, "keepalives_interval": 10}
    defaults |= {"require_auth": "!password"}  # a connection has to override this to send its password in clear text
    try:
        with closing(connect({**defaults, **conninfo, "client_encoding": "UTF8"})) as connection:
            connection.answer_seconds = LONGEST_SOURCE_ANSWER_SECONDS
            # Each statement must see all earlier commits: planning looks at rows, then at locks, and relies on this order.
            connection.set_session(isolation_level="READ COMMITTED", readonly=True)
            try:
                yield connection
            except psycopg2.Error as error:
                raise _meaning(error, query, missing, lock_holders.of(error, connection)) from error
    except psycopg2.Error as error:
        raise _meaning(error, query, missing) from error


@contextmanager
def transaction(connection: Any) -> Iterator[Any]:
    """Yield a cursor in a transaction whose texts do not depend on settings of server or role."""
    with connection, connection.cursor() as cursor:
        cursor.execute(_PINNED)
        yield cursor


def check_primary(cursor: Any, query: TableQuery) -> None:
    """Refuse a standby: it receives rows late, and does not show open writers.

    Raises: SourceUnreadable.
    """
    cursor.execute("SELECT pg_is_in_recovery()")
    if cursor.fetchone()[0]:
        raise SourceUnreadable(
            f"{query.name} is on a standby, which cannot tell which transactions are still open on its primary. Connect to "
            "the primary (target_session_attrs=read-write)."
        )


def _meaning(error: psycopg2.Error, query: TableQuery, missing: type[TidegateError], holder: str = "") -> TidegateError:
    """Return our error for a driver error, by its SQLSTATE; `holder` is what `lock_holders.of` says of it."""
    family = postgres_errors.translate(error, f"reading {query.name}", holder)
    if isinstance(family, LockHeld):
        return family
    message = postgres_errors.message_of(error)
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
