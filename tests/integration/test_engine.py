"""Stores of one process share an Engine, and leave no connection behind."""

import gc

import pytest
from psycopg2 import sql

from state_store import Settings, StateStore
from state_store.errors import SchemaOutOfDate
from tests.conftest import Server
from tidegate.stack.component import wait_until

SECONDS = 10


def has_connections(server: Server, settings: Settings) -> bool:
    """Tell whether anybody is connected to the test's database."""
    statement = sql.SQL("SELECT pid FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'")
    return bool(server.execute(statement, [settings.pg_database]))


def test_the_last_store_closes_all_connections(server: Server, settings: Settings) -> None:
    """One that closes while another is at work leaves its connection alone, and the other closes it in the end."""
    first, second = StateStore.connect(settings), StateStore.connect(settings)
    assert first.engine is second.engine
    gc.disable()
    try:
        with first.engine.begin():
            second.close()
        assert has_connections(server, settings)
        first.close()
        assert wait_until(lambda: not has_connections(server, settings), SECONDS)
    finally:
        gc.enable()


def test_a_store_that_cannot_connect_holds_nothing(server: Server, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What opened a connection and was refused does not keep it, nor those of later stores."""
    with monkeypatch.context() as patched:
        patched.setattr("state_store.schema.head_revision", lambda: "9999")
        with pytest.raises(SchemaOutOfDate):
            StateStore.connect(settings)
    StateStore.connect(settings).close()

    assert wait_until(lambda: not has_connections(server, settings), SECONDS)
