"""Stores of one process share an Engine and its connections, and close them all in the end."""

import gc
import os

import pytest
import sqlalchemy as sa
from psycopg2 import sql

from tests.servers import Server
from tests.store import set_limits
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SchemaOutOfDate

SECONDS = 10


def has_connections(server: Server, settings: Settings) -> bool:
    statement = sql.SQL("SELECT pid FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'")
    return bool(server.execute(statement, [settings.pg_database]))


@pytest.mark.promise("performance:one-engine-per-process-and-settings-connections")
def test_the_last_store_closes_all_connections(server: Server, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with monkeypatch.context() as patched:
        patched.setattr("tidegate.state_store.ledger.schema_revision.DIGEST", "0123456789ab")
        with pytest.raises(SchemaOutOfDate):
            StateStore.connect(settings)
    StateStore.connect(settings).close()

    assert wait_until(lambda: not has_connections(server, settings), SECONDS)


def test_a_forked_process_opens_its_own_connections(settings: Settings) -> None:
    """Two processes on one connection would read each other's answers; the parent keeps its connections."""
    with StateStore.connect(settings) as store:
        backend = sa.select(sa.func.concat_ws("/", sa.func.pg_backend_pid(), sa.func.current_setting("application_name")))
        with store.engine.connect() as connection:
            parent_backend = connection.scalar(backend)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                with StateStore.connect(settings) as again, again.engine.connect() as connection:
                    os.write(writing, str(connection.scalar(backend)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answers:
            child_backend = answers.read()
        os.waitpid(child, 0)
        assert child_backend
        # A session is named after its process: attempts of the parent live no longer than the parent's sessions.
        assert all(one != other for one, other in zip(child_backend.split("/"), parent_backend.split("/"), strict=True))
        with store.engine.connect() as connection:
            assert connection.scalar(backend) == parent_backend


@pytest.mark.promise("I9")
def test_a_commit_waits_for_the_disk_and_never_for_less_than_the_server_requires(settings: Settings) -> None:
    """Whatever the session's setting; a server whose standbys must apply a commit keeps that setting."""
    with StateStore.connect(settings) as store, store.engine.connect() as connection:
        pairs = {"off": "on", "local": "on", "remote_write": "on", "on": "on", "remote_apply": "remote_apply"}
        for found, expected in pairs.items():
            connection.execute(sa.select(sa.func.set_config("synchronous_commit", found, True)))
            set_limits(connection, settings)
            assert connection.scalar(sa.select(sa.func.current_setting("synchronous_commit"))) == expected
