"""The page's connections: one reader and one store for each process of the api-server.

Settings are read, and Postgres is connected to, when a request first needs it: the api-server starts without either.
"""

from functools import cache

from state_store import Settings, StateStore
from state_store.engine import take_engine
from state_store.reader import LedgerReader


@cache
def settings() -> Settings:
    """Return the settings, read once.

    Raises: SettingsInvalid.
    """
    return Settings.load()


@cache
def reader() -> LedgerReader:
    """Return the reader, which logs in as `pg_reader`."""
    return LedgerReader(settings())


@cache
def store() -> StateStore:
    """Return the store that acts, as `pg_user`."""
    return StateStore(take_engine(settings()), settings())
