"""Connections of a process, and databases, servers and settings of roles that are refused at once, or named."""

import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.integration.conftest import Tally
from tests.postgres_versions import AnyPostgres, running
from tests.servers import Server
from tests.store import errors, role_settings, schema_revision, set_limits
from tidegate import migrations
from tidegate.jobs.sources.postgres.source_connection import connected, transaction
from tidegate.jobs.sources.postgres.table_query import TableQuery
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings, StateStore


@pytest.mark.promise("performance:one-engine-per-process-and-settings-connections")
def test_the_last_store_closes_all_connections(server: Server, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_connected() -> bool:
        found = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"
        return bool(server.execute(found, [settings.pg_database]))

    first, second = StateStore.connect(settings), StateStore.connect(settings)
    assert first.engine is second.engine
    gc.disable()
    try:
        with first.engine.begin():
            second.close()
        assert is_connected()
        first.close()
        assert wait_until(lambda: not is_connected(), 10)
    finally:
        gc.enable()
    with monkeypatch.context() as patched:
        patched.setattr("tidegate.state_store.ledger.schema_revision.DIGEST", "0123456789ab")
        with pytest.raises(errors.SchemaOutOfDate):
            StateStore.connect(settings)
    StateStore.connect(settings).close()
    assert wait_until(lambda: not is_connected(), 10)


def session_of(settings: Settings) -> str:
    with StateStore.connect(settings) as store, store.engine.connect() as connection:
        return str(connection.scalar(sa.text("SELECT pg_backend_pid() || '/' || current_setting('application_name')")))


def test_a_forked_process_opens_its_own_connections(settings: Settings) -> None:
    """Two processes on one connection would read each other's answers. A session is named after its process."""
    with StateStore.connect(settings):
        parent = session_of(settings)
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            child = pool.submit(session_of, settings).result(60)
        assert not set(child.split("/")) & set(parent.split("/"))
        assert session_of(settings) == parent


@pytest.mark.promise("I9")
def test_a_commit_waits_for_the_disk_and_never_for_less_than_the_server_requires(settings: Settings) -> None:
    """Whatever the session's setting; a server whose standbys must apply a commit keeps that setting."""
    with StateStore.connect(settings) as store, store.engine.connect() as connection:
        for found in ("off", "local", "remote_write", "on", "remote_apply"):
            connection.execute(sa.select(sa.func.set_config("synchronous_commit", found, True)))
            set_limits(connection, settings)
            setting = connection.scalar(sa.select(sa.func.current_setting("synchronous_commit")))
            assert setting == ("remote_apply" if found == "remote_apply" else "on")


@pytest.mark.promise("error:SCHEMA_OUT_OF_DATE", "error:ACCESS_REFUSED")
def test_a_database_that_cannot_be_used_says_why(tally: Tally, settings: Settings, server: Server) -> None:

    def refuses(error: type[Exception], says: str, **changes: object) -> None:
        with pytest.raises(error, match=says):
            StateStore.connect(replace(settings, **changes))

    with server.database() as name:
        refuses(errors.SchemaOutOfDate, rf"Database {name} has no Tidegate tables\. Run: tidegate migrate", pg_database=name)
    tally.sql("UPDATE tidegate.alembic_version SET version_num = '0123456789ab'")
    says = rf"\(schema.sql 0123456789ab\) than .* with \({schema_revision.DIGEST}\)"
    refuses(errors.SchemaOutOfDate, says)
    with pytest.raises(errors.SchemaOutOfDate, match=says):
        migrations.upgrade(settings, [])
    refuses(errors.StoreUnavailable, r"Start it \(tidegate up\) or check PGHOST and PGPORT", pg_port=1)
    refuses(errors.AccessRefused, 'database "gone" does not exist', pg_database="gone")
    refuses(errors.AccessRefused, "unknown_user", pg_user="unknown_user")
    refuses(errors.AccessRefused, "password", pg_passfile=Path("/nonexistent"))

    # A file's name or a reason with a character that the database lacks would halt a pipeline, later.
    how, says = "template0 ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C'", r"keeps texts in LATIN1.*ENCODING 'UTF8'"
    with server.database(how) as name, pytest.raises(errors.PermanentError, match=says):
        migrations.upgrade(replace(settings, pg_database=name), [])


SETTINGS = {
    "ROLE tidegate_stager IN DATABASE {} SET statement_timeout = '5s'": "tidegate_stager: statement_timeout = 5s",
    "DATABASE {} SET idle_in_transaction_session_timeout = '2min'": "tidegate_reader: idle_in_transaction",
    "ROLE tidegate IN DATABASE {} SET idle_session_timeout = 5000": "tidegate: idle_session_timeout = 5000",
    "ROLE tidegate_owner IN DATABASE {} SET session_replication_role = replica": "tidegate_owner: session_rep",
    "ROLE tidegate_owner IN DATABASE {} SET tidegate.writer = 'tally'": "tidegate_owner: tidegate.writer = tally",
    "ROLE postgres IN DATABASE {} SET tidegate.writer = 'tally'": "postgres: tidegate.writer = tally",
    # the last, as it would refuse the others
    "DATABASE {} SET default_transaction_read_only = on": "tidegate: default_transaction_read_only = on",
}


def test_a_setting_under_which_steps_never_end_is_named_with_its_role(
    tally: Tally, settings: Settings, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PGOPTIONS comes before the settings of roles, so that none is advised then."""

    def alter(setting: str) -> None:
        tally.sql(f"ALTER {setting.format(settings.pg_database)}", role="postgres")

    alter("DATABASE {} SET idle_in_transaction_session_timeout = '24h'")
    assert tally.store.harmful_settings() == [], "a long one is no obstacle"
    alter("ROLE tidegate IN DATABASE {} SET statement_timeout = 0")
    monkeypatch.setenv("PGOPTIONS", "-c statement_timeout=5s -c default_transaction_read_only=on")
    with StateStore.connect(replace(settings, lock_timeout_seconds=9)) as store:  # with connections of its own
        (found,) = store.harmful_settings()
    says = "default_transaction_read_only = on and statement_timeout = 5000ms.*Take it out of .* PGOPTIONS"
    with pytest.raises(errors.SettingsInvalid, match=says) as refused:
        migrations.upgrade(settings, [tally.spec])
    assert str(refused.value) == found
    monkeypatch.delenv("PGOPTIONS")

    for setting in SETTINGS:
        alter(setting)
    found = tally.store.harmful_settings()
    for named in SETTINGS.values():
        assert [sentence for sentence in found if sentence.startswith(f"Role {named}")], named
    with pytest.raises(errors.AccessRefused, match="As an administrator, run: ALTER ROLE postgres") as refused:
        migrations.upgrade(settings, [tally.spec])
    for remedy in str(refused.value).partition("run: ")[2].split("; "):
        server.execute(remedy)
    assert tally.store.harmful_settings() == []
    migrations.upgrade(settings, [tally.spec])


def test_a_setting_of_the_servers_configuration_is_named(tmp_path: Path, free_port: Callable[[], int]) -> None:
    with running(AnyPostgres(tmp_path, free_port(), idle_session_timeout="50min")) as postgres:
        engine = sa.create_engine("postgresql+psycopg2://", connect_args=postgres.settings.conninfo(user="postgres"))
        with engine.connect() as connection:
            found = role_settings.harmful(connection, ["postgres"]).remedies
            assert list(found) == ["postgres: idle_session_timeout = 3000000ms in the configuration of the server"]
            for remedy in found.values():
                connection.exec_driver_sql(remedy)
            assert role_settings.harmful(connection, ["postgres"]).remedies == {}
        engine.dispose()


def test_a_source_is_read_without_the_limits_of_its_server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c statement_timeout=1h -c idle_in_transaction_session_timeout=1h")
    names = ["statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout"]
    query = TableQuery("t", ("public", "t"), "", ("id",), {})
    with connected(settings.conninfo(), query) as connection, transaction(connection) as cursor:
        cursor.execute("SELECT current_setting(name, true) FROM unnest(%s) AS name", [names])
        assert {value for (value,) in cursor} <= {"0", None}
