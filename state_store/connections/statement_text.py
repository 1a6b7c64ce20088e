"""Statements that SQLAlchemy has no words for: their text with quoted names, executed as it is."""

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql

from tidegate.state_store.connections.table_locks import STATE

DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]
quoted = DIALECT.identifier_preparer.quote


def in_state(name: str) -> str:
    """Return the name of a table in schema state, as statements need it."""
    return f"{STATE}.{quoted(name)}"


def with_values(statement: Any) -> str:
    """Return the text of a statement or expression, with its values in it."""
    return str(statement.compile(dialect=DIALECT, compile_kwargs={"literal_binds": True}))


def ddl(connection: Connection, statement: str) -> None:
    """Execute a statement as it is: a percent sign in it is no placeholder."""
    connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
