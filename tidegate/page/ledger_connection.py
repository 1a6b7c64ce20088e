"""The page's reader, one for each process of the api-server. An action connects for itself, as `pg_user`.

Settings are read, and Postgres is connected to, when a request first needs it: the api-server starts without either.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from sqlalchemy import Connection

from tidegate.state_store import Settings
from tidegate.state_store.read_ledger import registered_pipelines
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


@contextmanager
def snapshot_of(pipeline: str, doing: str) -> Iterator[Connection]:
    """Yield a snapshot for reading what belongs to a pipeline.

    Raises: the errors of `LedgerReader.snapshot`; UnknownPipeline if it is not registered.
    """
    with reader().snapshot(doing) as connection:
        registered_pipelines.check_registered(connection, pipeline)
        yield connection
