"""Fixtures for modules whose databases are on the server beside the broker: import them by name."""

from collections.abc import Iterator

import pytest

from tests.conftest import Server, migrated_database
from tidegate.state_store import Settings

__all__ = ["server", "template"]


@pytest.fixture(scope="module")
def server(kafka_stack: Settings) -> Server:
    """The Postgres server beside the broker."""
    return Server(kafka_stack)


@pytest.fixture(scope="module")
def template(server: Server) -> Iterator[str]:
    """A migrated database on that server."""
    with migrated_database(server) as name:
        yield name
