"""Engines: one per settings, shared by the stores of a process."""

import os
import threading
from collections import Counter
from functools import lru_cache

import sqlalchemy as sa

from state_store.session_times import prepare_times
from state_store.settings import Settings

_lock = threading.Lock()
_users: Counter[sa.Engine] = Counter()


MOST_CONNECTIONS, CONNECTION_PATIENCE_SECONDS = 32, 30


def take_engine(
    settings: Settings,
    *,
    user: str | None = None,
    most_connections: int = MOST_CONNECTIONS,
    patience_seconds: int = CONNECTION_PATIENCE_SECONDS,
) -> sa.Engine:
    """Return the Engine of these settings; the caller gives it back (`give_back`).

    It opens at most `most_connections`; a thread waits `patience_seconds` for one, and then gets SQLAlchemy's TimeoutError.
    """
    engine = _engine_for(settings, user, most_connections, patience_seconds)
    with _lock:
        _users[engine] += 1
    return engine


def give_back(engine: sa.Engine) -> None:
    """Close all connections if the Engine has no other user: with others, it would lose track of those in use."""
    with _lock:
        _users[engine] -= 1
        if _users[engine] <= 0:
            del _users[engine]
            engine.dispose()


@lru_cache(maxsize=8)
def _engine_for(settings: Settings, user: str | None, most_connections: int, patience_seconds: int) -> sa.Engine:
    """Return the Engine on the primary that holds ledger and state. Nothing is connected yet.

    The same settings give the same Engine, as it caches compiled statements. After it is disposed of, it may be used again.

    The pool grows to the most connections ever used at once: one for a task or a command, a few for `tidegate run`. The
    connection that was returned last is used first: its session knows the tables.
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
        connect_args={**settings.conninfo(user=user), "application_name": "tidegate"},
    )
    sa.event.listen(engine, "connect", lambda connection, _record: prepare_times(connection))
    return engine


def _forget_connections() -> None:
    """Make a forked process open its own connections: processes that share one read each other's answers.

    The parent's connections are left open, because it still uses them.
    """
    global _lock  # noqa: PLW0603 - a thread of the parent may have held it
    _lock = threading.Lock()
    for engine in _users:
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_forget_connections)
