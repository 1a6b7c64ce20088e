"""Connections that give up waiting for an answer: a server process that is stopped applies no timeout of its own.

Its kernel confirms what it is sent, so keepalives do not notice. A thread of the process looks at all waits, and shuts the
socket down of one that lasts too long. Runs on executors too, so it imports nothing but psycopg2.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg2
from psycopg2 import extensions, sql

# How much longer than the server the client waits, so that the server's own timeouts come first.
MARGIN_SECONDS = 30
# The longest wait for an answer to a statement whose connection says nothing else, and the longest statement of a source.
LONGEST_ANSWER_SECONDS = 600 + MARGIN_SECONDS
LONGEST_SOURCE_ANSWER_SECONDS = 3600
SECONDS_BETWEEN_LOOKS = 0.5
_waits: set["_Wait"] = set()


class NoAnswer(psycopg2.OperationalError):
    """A server process has not answered in time; what it was asked to do may be done yet, or still happen."""


class DeadlineConnection(extensions.connection):
    """A connection that is lost, with NoAnswer, once a statement has waited `answer_seconds` for the server.

    A COPY into the server waits for each block of its own; the time in which its content is made does not count.
    """

    answer_seconds: float = LONGEST_ANSWER_SECONDS
    # How long each statement of a transaction waits for a lock, unless the transaction says otherwise; None: for ever.
    lock_seconds: int | None = None

    server_session: str

    def commit(self) -> None:
        """Commit; after NoAnswer the outcome is unknown."""
        _Wait(self).for_answer(super().commit)

    def rollback(self) -> None:
        """Roll back."""
        _Wait(self).for_answer(super().rollback)


def open_connection(*args: Any, **kwargs: Any) -> DeadlineConnection:
    """Open a DeadlineConnection: the `connection_factory` of psycopg2.

    The class has no constructor: a refused connection would stay open for as long as the error that shows it.
    """
    connection = DeadlineConnection(*args, **kwargs)
    connection.cursor_factory = DeadlineCursor
    info = connection.info  # a lost connection does not tell any more
    connection.server_session = f"session {info.backend_pid} of the server at {info.host}:{info.port} (user {info.user})"
    _watch()
    return connection


class DeadlineCursor(extensions.cursor):
    """A cursor of a DeadlineConnection."""

    def execute(self, statement: Any, *args: Any) -> None:
        """Execute a statement; the first one of a transaction bounds the waits for locks, without a round trip of its own."""
        connection: Any = self.connection
        is_first = connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE and not connection.autocommit
        if is_first and connection.lock_seconds is not None and self.name is None:
            bound = f"SET LOCAL lock_timeout = '{connection.lock_seconds}s'; "
            statement = sql.SQL(bound) + statement if isinstance(statement, sql.Composable) else bound + statement
        _Wait(connection).for_answer(super().execute, statement, *args)

    def fetchmany(self, *args: Any) -> list[tuple[Any, ...]]:
        """Fetch rows, which a named cursor asks the server for."""
        rows: list[tuple[Any, ...]] = _Wait(self.connection).for_answer(super().fetchmany, *args)
        return rows

    def __iter__(self) -> Iterator[tuple[Any, ...]]:  # type: ignore[override]
        """Yield rows, `itersize` of which a named cursor asks for at a time."""
        while rows := self.fetchmany(self.itersize):
            yield from rows

    def close(self) -> None:
        """Close the cursor, which a named one asks the server to."""
        _Wait(self.connection).for_answer(super().close)

    def copy_expert(self, statement: Any, file: Any, *args: Any) -> None:
        """Copy a file into the server, or from it."""
        wait = _Wait(self.connection)
        wait.for_answer(super().copy_expert, statement, _Content(file, wait) if hasattr(file, "read") else file, *args)


class _Wait:
    """A wait of one thread for the server's answer on one connection."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.given_up = False
        self.ended = threading.Lock()  # taken once there is an answer: then the socket may be another connection's
        self.begin()

    def begin(self) -> None:
        self.deadline = time.monotonic() + self.connection.answer_seconds

    def for_answer(self, ask: Callable[..., Any], *args: Any) -> Any:
        _waits.add(self)
        try:
            return ask(*args)
        except psycopg2.Error as error:
            if not self.given_up:
                raise
            story = f"has not answered for {self.connection.answer_seconds:g} s: its process may be stopped"
            raise NoAnswer(f"{self.connection.server_session} {story}") from error
        finally:
            self.ended.acquire()
            _waits.discard(self)

    def give_up(self) -> None:
        """Shut the connection's socket down, unless the answer has come."""
        if self.ended.acquire(blocking=False):
            with suppress(psycopg2.Error, OSError):  # it is closed, or broken, already
                other = socket.socket(fileno=os.dup(self.connection.fileno()))
                with other:
                    self.given_up = True
                    other.shutdown(socket.SHUT_RDWR)
            self.ended.release()


class _Content:
    """The file of a COPY into the server, whose reading is no wait for the server."""

    def __init__(self, file: Any, wait: _Wait) -> None:
        self._file, self._wait = file, wait

    def read(self, size: int = -1) -> Any:
        self._wait.deadline = float("inf")
        try:
            return self._file.read(size)
        finally:
            self._wait.begin()


def _watch() -> None:
    global _watcher  # noqa: PLW0603 - one per process
    if not _watcher.is_alive():
        _watcher = threading.Thread(target=_look, name="tidegate answer deadlines", daemon=True)
        _watcher.start()


def _look() -> None:
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        now = time.monotonic()
        for wait in list(_waits):
            if wait.deadline < now:
                wait.give_up()


_watcher = threading.Thread(target=_look)
os.register_at_fork(after_in_child=_waits.clear)  # the parent's threads wait for these
