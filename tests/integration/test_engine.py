"""Stores of one process share an Engine and its connections, and leave none behind."""

import gc
from contextlib import ExitStack

import pytest
import sqlalchemy as sa
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


def test_connections_are_kept_and_the_one_given_back_last_is_used_first(settings: Settings) -> None:
    """What was open at once is used again, by whichever store, instead of being made anew."""

    def sessions_of_three_at_once(store: StateStore) -> list[int]:
        with ExitStack() as at_once:  # the first to be opened is the last to be given back
            connections = [at_once.enter_context(store.engine.connect()) for _ in range(3)]
            return [connection.scalar(sa.select(sa.func.pg_backend_pid())) for connection in connections]

    with StateStore.connect(settings) as held:
        first = sessions_of_three_at_once(held)
        with StateStore.connect(settings) as another:
            assert sessions_of_three_at_once(another) == first
    assert len(set(first)) == 3


def test_a_store_that_cannot_connect_holds_nothing(server: Server, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What opened a connection and was refused does not keep it, nor those of later stores."""
    with monkeypatch.context() as patched:
        patched.setattr("state_store.schema.head_revision", lambda: "9999")
        with pytest.raises(SchemaOutOfDate):
            StateStore.connect(settings)
    StateStore.connect(settings).close()

    assert wait_until(lambda: not has_connections(server, settings), SECONDS)
