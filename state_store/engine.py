"""Settings to Engine."""

import sqlalchemy as sa

from state_store.settings import Settings


def create_engine(settings: Settings, *, user: str | None = None) -> sa.Engine:
    """Return an Engine on the primary that holds ledger and state. Nothing is connected yet.

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
