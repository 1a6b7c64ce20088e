"""The fixture for modules whose pipelines read the run's broker: import it by name."""

import pytest

from tests.servers import Server
from tidegate.state_store import Settings

__all__ = ["server"]


@pytest.fixture(scope="session")
def server(kafka_stack: Settings) -> Server:
    """The Postgres server of the run, with settings that lead to its broker."""
    return Server(kafka_stack)
