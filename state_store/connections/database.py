"""Connections to the database of ledger and states, and transactions on them. A process has one pool per role and settings."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Self
from uuid import uuid4

import psycopg2
import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from tidegate.state_store.base.errors import LockHeld, StoreUnavailable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.connections import lock_holders
from tidegate.state_store.connections.answer_deadlines import MARGIN_SECONDS, open_connection
from tidegate.state_store.connections.local_settings import local, set_local, without_time_limit
from tidegate.state_store.connections.postgres_errors import translate
from tidegate.state_store.connections.table_locks import hold
from tidegate.state_store.connections.utc_times import prepare_times

logger = logging.getLogger(__name__)

MOST_CONNECTIONS, CONNECTION_PATIENCE_SECONDS = 32, 30
# How often the server checks that a silent client is still connected: it releases the locks of a killed process this soon.
CONNECTION_CHECK_INTERVAL = "500ms"
# How long a transaction that changes tables of states waits for their readers. Meanwhile, later readers and commits wait, too.
DDL_LOCK_TIMEOUT_SECONDS = 5
# How long what can be done later waits for a lock.
PATIENCE_OF_WHAT_CAN_WAIT_SECONDS = 1
_lock = threading.Lock()
_users: Counter[sa.Engine] = Counter()


class Database:
    """The connections of one role. Nothing is connected yet, so Postgres may be away.

    At most `most_connections` are open; a thread waits `patience_seconds` for one, and then gets StoreUnavailable.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        user: str | None = None,
        most_connections: int = MOST_CONNECTIONS,
        patience_seconds: int = CONNECTION_PATIENCE_SECONDS,
    ) -> None:
        self.settings = settings
        self._pool_limits = f"{most_connections} connections were in use for {patience_seconds} s"
        self.engine = _engine_for(settings, user, most_connections, patience_seconds)
        with _lock:
            _users[self.engine] += 1

    def close(self) -> None:
        """Close the pool's connections, unless another Database of this process still uses it."""
        with _lock:
            _users[self.engine] -= 1
            if _users[self.engine] <= 0:
                del _users[self.engine]
                self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def translated_errors(self, doing: str) -> Iterator[None]:
        """Translate the errors of driver and pool into Tidegate's."""
        try:
            yield
        except PoolTimeout as error:
            raise StoreUnavailable(f"All {self._pool_limits} while {doing}. Try again later.") from error
        except (DBAPIError, psycopg2.Error) as error:
            driver_error = error.orig if isinstance(error, DBAPIError) else error
            raise translate(driver_error, doing, self._holder(driver_error)) from error

    def _holder(self, error: BaseException | None) -> str:
        """Return who holds the lock that an error is about, asked on another connection; "" for any other error."""
        if not lock_holders.waited(error):
            return ""
        try:
            with self.engine.connect() as connection:
                return lock_holders.of(error, connection.connection.driver_connection)
        except (PoolTimeout, DBAPIError) as failed:
            return lock_holders.unknown(failed)

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[Connection]:
        with self.translated_errors(doing), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def _write_transaction(
        self, doing: str, *, lock_timeout_seconds: int | None = None, writer: str | None = None
    ) -> Iterator[Connection]:
        """Run a transaction whose waits are bounded, and whose COMMIT is durable.

        A `writer` is the pipeline whose states it may write: triggers of the tables refuse all others.
        """
        with self._transaction(doing) as connection:
            set_limits(connection, self.settings, lock_timeout_seconds=lock_timeout_seconds, writer=writer)
            yield connection

    @contextmanager
    def _transaction_for_later(self, doing: str) -> Iterator[Connection]:
        """Run a transaction for what can be done later; if a lock is not to be had soon, log what is left and who holds it."""
        try:
            with self._write_transaction(doing, lock_timeout_seconds=PATIENCE_OF_WHAT_CAN_WAIT_SECONDS) as connection:
                yield connection
        except LockHeld as held:
            logger.warning("Left for later: %s. %s", doing, held)

    @contextmanager
    def _snapshot(
        self, doing: str, *, states: Sequence[str] = (), lock_timeout_seconds: int | None = None
    ) -> Iterator[Connection]:
        """Run a read-only transaction whose statements all see one snapshot.

        The caller names the `states` that it will read, so that no migration replaces their tables meanwhile.
        """
        with self.translated_errors(doing), self.engine.connect() as unprepared:
            connection = unprepared.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            hold(connection.connection.driver_connection, states, lock_timeout_seconds=lock_timeout_seconds)
            yield connection


def set_limits(
    connection: Connection, settings: Settings, *, lock_timeout_seconds: int | None = None, writer: str | None = None
) -> None:
    """Bound every wait of this transaction, make its COMMIT durable, and name the pipeline whose states it may write.

    A statement may take long, but the pause between two statements is long only if the process is suspended (I20 in
    docs/protocol.md).
    """
    lock_seconds = lock_timeout_seconds or settings.lock_timeout_seconds
    connection.execute(_limits(lock_seconds, settings.commit_timeout_seconds, settings.idle_timeout_seconds, writer))


@lru_cache  # each transaction begins with it, and most of its cost was to build it
def _limits(lock_seconds: int, statement_seconds: int, idle_seconds: int, writer: str | None) -> sa.Executable:
    current = sa.func.current_setting("synchronous_commit")
    limits = {
        "lock_timeout": f"{lock_seconds}s",
        "statement_timeout": f"{statement_seconds}s",
        "idle_in_transaction_session_timeout": f"{idle_seconds}s",
        "client_connection_check_interval": CONNECTION_CHECK_INTERVAL,
        "synchronous_commit": sa.case((current == "remote_apply", current), else_="on"),  # a stricter setting is kept
        **({"tidegate.writer": writer} if writer is not None else {}),
    }
    return sa.select(*local(limits), without_time_limit())


@contextmanager
def left_for_later(connection: Connection, doing: str) -> Iterator[None]:
    """Do what can be done later, in a savepoint; if a lock is not to be had soon, log what is left and who holds it.

    The block is then taken back, and the transaction goes on after it.

    Raises: the block's other errors.
    """
    patience = sa.func.current_setting("lock_timeout"), *local({"lock_timeout": f"{PATIENCE_OF_WHAT_CAN_WAIT_SECONDS}s"})
    try:
        with connection.begin_nested():
            usual, _ = connection.execute(sa.select(*patience)).one()
            yield
            set_local(connection, {"lock_timeout": usual})
    except OperationalError as error:
        if not lock_holders.is_lock_timeout(error.orig):
            raise
        logger.warning("Left for later: %s. %s", doing, lock_holders.of(error.orig, connection.connection.driver_connection))


def _name_session(_dialect: object, _record: object, _arguments: object, parameters: dict[str, Any]) -> None:
    """Name a new session after this process: attempts note the name, and live no longer than the sessions that have it."""
    parameters["application_name"] = f"tidegate {_id_of_process(os.getpid())}"


@lru_cache(maxsize=1)
def _id_of_process(_pid: int) -> str:
    """Return an id that no other process has; the number of this one only shows whether it has been forked since."""
    return uuid4().hex


@lru_cache(maxsize=8)
def _engine_for(settings: Settings, user: str | None, most_connections: int, patience_seconds: int) -> sa.Engine:
    """Return the Engine for these settings: always the same, as it caches compiled statements, also after it is disposed of.

    Its pool grows to the most connections used at once, and gives out the one that was returned last: its session has cached
    what it knows of the tables.
    """
    engine = sa.create_engine(
        "postgresql+psycopg2://",
        isolation_level="READ COMMITTED",  # a statement after the lock must see what the lock waited for
        pool_size=most_connections,
        max_overflow=0,
        pool_timeout=patience_seconds,
        pool_use_lifo=True,
        pool_pre_ping=True,
        use_native_hstore=False,  # saves a query per connection: no column is an hstore
        connect_args={**settings.conninfo(user=user), "connection_factory": open_connection},
    )
    sa.event.listen(engine, "do_connect", _name_session)
    sa.event.listen(engine, "connect", lambda connection, _record: prepare_times(connection))
    longest = settings.commit_timeout_seconds + MARGIN_SECONDS
    sa.event.listen(engine, "checkout", lambda connection, *_: _bound(connection, longest, settings.lock_timeout_seconds))
    sa.event.listen(engine, "checkin", _await_ping)
    return engine


def _bound(connection: Any, answer_seconds: float, lock_seconds: int) -> None:
    """Bound a session's waits for answers and for locks: reads say nothing else."""
    connection.answer_seconds, connection.lock_seconds = answer_seconds, lock_seconds


def _await_ping(connection: Any, _record: object) -> None:
    """Bound the wait of a session that is given back: the next question is whether it is alive, which it answers at once."""
    if connection is not None:  # else it is lost
        connection.answer_seconds = MARGIN_SECONDS


def _forget_connections() -> None:
    """Make a forked process open its own connections: processes that share one read each other's answers."""
    global _lock  # noqa: PLW0603 - a thread of the parent may have held it
    _lock = threading.Lock()
    for engine in _users:
        engine.dispose(close=False)  # the parent still uses the connections


os.register_at_fork(after_in_child=_forget_connections)
