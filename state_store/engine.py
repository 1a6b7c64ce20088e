"""Settings to Engine."""

from functools import lru_cache

import sqlalchemy as sa

from state_store.settings import Settings


@lru_cache(maxsize=8)
def engine_for(settings: Settings, *, user: str | None = None) -> sa.Engine:
    """Return the Engine on the primary that holds ledger and state. Nothing is connected yet.

    It is the same one for the same settings, because an Engine remembers the SQL that it has made of its statements: of those
    that a batch needs, some 40 at 1 ms each. Disposed of, it may be used again.

    A pool of one warm connection and room for more: a task or a command runs its statements one after another, and only
    `tidegate run` processes several batches in one process.
    """
    return sa.create_engine(
        "postgresql+psycopg2://",
        isolation_level="READ COMMITTED",  # a statement after the lock must see what the lock waited for
        pool_size=1,
        max_overflow=31,
        pool_pre_ping=True,
        connect_args={**settings.conninfo(user=user), "application_name": "tidegate"},
    )
