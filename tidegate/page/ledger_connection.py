"""The page's reader, one for each process of the api-server. An action connects for itself, as `pg_user`.

Settings are read, and Postgres is connected to, when a request first needs it: the api-server starts without either.
"""

from functools import cache

from tidegate.state_store import Settings
from tidegate.state_store.read_ledger.ledger_reader import LedgerReader


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
