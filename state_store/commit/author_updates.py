"""An author's own update: statements that run in the commit of a batch, under the cursor's lock, over the batch's rows.

They take effect with the batch, once, in txid order. So an update must neither end the transaction nor change anything outside
of it, which a crash would not take back. Both are prevented:

- Postgres refuses a COMMIT in the middle: the table ``open_commit`` has a row until the end, and a deferred trigger refuses a
  transaction that leaves it there.
- Statements that end, begin or divide transactions are refused before they are sent, as is more than one in a text.
- After each statement, the transaction has to be the same.
- While an update runs, its thread can open no connection: not by psycopg2, and not by a socket of Python.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psycopg2
import sqlalchemy as sa
from psycopg2.extensions import TRANSACTION_STATUS_INTRANS
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from tidegate.state_store.base.errors import DeclarationInvalid, TidegateError
from tidegate.state_store.connections import lock_holders
from tidegate.state_store.connections.postgres_errors import translate
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.ledger import tables

# Statements that begin, end or divide a transaction, and those that change its role, its settings or its session.
_FORBIDDEN = {
    *("ABORT", "BEGIN", "COMMIT", "END", "PREPARE", "RELEASE", "ROLLBACK", "SAVEPOINT", "START"),
    *("DISCARD", "LISTEN", "LOAD", "RESET", "SET"),
}  # fmt: skip
_running: ContextVar[str | None] = ContextVar("running update", default=None)


@dataclass(frozen=True)
class UpdateBatch:
    """What an update gets: its batch, and the way to Postgres.

    `rows` are the batch's rows as a table: the declared columns, and `position`, which is different for each row.
    """

    pipeline: str
    txid: int
    rows: sa.FromClause
    _connection: Connection = field(repr=False)
    _name: str = field(repr=False)

    def execute(self, statement: sa.Executable, parameters: Any = None) -> sa.CursorResult[Any]:
        """Execute a statement of SQLAlchemy in the batch's transaction, as the role that commits (setting `pg_user`).

        Raises: DeclarationInvalid for a forbidden statement, or if the transaction has ended; the errors of SQLAlchemy.
        """
        result: Any = self._connection.execute(statement, parameters)
        driver: Any = self._connection.connection.driver_connection
        if driver.info.transaction_status != TRANSACTION_STATUS_INTRANS:
            raise DeclarationInvalid(f"{self._name} has ended the transaction of its batch. It may only read and write.")
        return result  # type: ignore[no-any-return]


def run(connection: Connection, pipeline: str, state: StateSpec, txid: int, rows: sa.Select[Any], *, before: bool) -> None:
    """Run a state's update for a batch, or its code for `before` the other states are merged.

    Raises: DeclarationInvalid if the update fails by itself, or does what it must not do; the driver's errors, translated.
    """
    name = f"The update {state.name} of pipeline {pipeline}"
    code = state.before if before else state.update
    if code is None:
        raise DeclarationInvalid(f"{name} is code, and this process does not have it: commit where the pipeline is declared.")
    batch = UpdateBatch(pipeline, txid, rows.subquery("batch"), connection, name)
    try:
        with _confined(connection, name):
            code(batch)
    except (TidegateError, MemoryError):
        raise
    except (DBAPIError, psycopg2.Error) as error:
        driver_error = error.orig if isinstance(error, DBAPIError) else error
        if lock_holders.waited(driver_error):
            raise  # who holds the lock is asked on another connection, as this transaction has failed
        cause = translate(driver_error, f"running the update {state.name}")
        raise type(cause)(str(cause), pipeline=pipeline, txid=txid) from error
    except (Exception, SystemExit) as error:
        raise DeclarationInvalid(f"{name} failed: {type(error).__name__}: {error}", pipeline=pipeline, txid=txid) from error


def begin(connection: Connection, pipeline: str) -> None:
    """Make Postgres refuse the transaction's COMMIT until `end`."""
    connection.execute(sa.insert(tables.open_commit).values(pipeline=pipeline))


def end(connection: Connection, pipeline: str) -> None:
    """Allow the COMMIT again.

    Raises: DeclarationInvalid if the row of `begin` is gone, because an update has ended the transaction.
    """
    deleted = connection.execute(sa.delete(tables.open_commit).where(tables.open_commit.c.pipeline == pipeline)).rowcount
    if deleted != 1:
        raise DeclarationInvalid(f"An update of pipeline {pipeline} has ended the transaction of its batch.", pipeline=pipeline)


@contextmanager
def _confined(connection: Connection, name: str) -> Iterator[None]:
    """Check each statement before it is sent, and refuse connections that this thread tries to open."""

    def check(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        _check_single(name, statement)

    _guard_connections()
    token = _running.set(name)
    sa.event.listen(connection, "before_cursor_execute", check)
    try:
        yield
    finally:
        sa.event.remove(connection, "before_cursor_execute", check)
        _running.reset(token)


def _check_single(name: str, statement: str) -> None:
    import sqlparse  # noqa: PLC0415 - only updates need it

    parts = sqlparse.parse(statement) if ";" in statement or "/*" in statement or "--" in statement else [None]
    firsts: list[Any] = [part.token_first(skip_cm=True) if part else statement for part in parts]  # type: ignore[no-untyped-call]
    words = [str(first).split()[0].upper() for first in firsts if first and str(first).strip(" ;\n")]
    if len(words) > 1:
        raise DeclarationInvalid(f"{name} executes {len(words)} statements as one text. Execute them one by one.")
    if words and words[0] in _FORBIDDEN:
        raise DeclarationInvalid(f"{name} executes {words[0]}: the transaction belongs to the commit of the batch.")


@cache
def _guard_connections() -> None:
    """Install the hooks that refuse connections while an update runs; they cannot be removed, and cost next to nothing."""
    connect = psycopg2.connect

    def checked(*arguments: Any, **named: Any) -> Any:
        if name := _running.get():
            raise _refusal(name)
        return connect(*arguments, **named)

    psycopg2.connect = checked
    sys.addaudithook(_refuse_sockets)


def _refuse_sockets(event: str, _arguments: Any) -> None:
    if event == "socket.connect" and (name := _running.get()):
        raise _refusal(name)


def _refusal(name: str) -> DeclarationInvalid:
    return DeclarationInvalid(
        f"{name} opens a connection. What it does there would not be part of the commit, and would be repeated after a crash. "
        "Use what it is given, or follow the state in another pipeline."
    )
