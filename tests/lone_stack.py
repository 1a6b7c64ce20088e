"""Fixtures for modules whose tests kill, stop or change servers that other processes must not lose: import them by name."""

from collections.abc import Iterator

import pytest

from tests.servers import Server, migrated_database, running_stack
from tidegate.state_store import Settings

__all__ = ["server", "stack", "template"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    with running_stack(tmp_path_factory.mktemp("stack")) as settings:
        yield settings


@pytest.fixture(scope="module")
def server(stack: Settings) -> Server:
    return Server(stack)


@pytest.fixture(scope="module")
def template(server: Server) -> Iterator[str]:
    with migrated_database(server) as name:
        yield name
