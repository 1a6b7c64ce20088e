"""A database in which texts cannot be kept, and settings of roles under which steps never end: refused at once."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg2
import pytest
import sqlalchemy as sa
from psycopg2 import sql

from tests.integration.conftest import Execute, Tally
from tests.postgres_versions import AnyPostgres, running
from tests.servers import Server
from tests.store import role_settings
from tidegate import migrations
from tidegate.jobs.sources.postgres.source_connection import connected, transaction
from tidegate.jobs.sources.postgres.table_query import TableQuery
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import AccessRefused, PermanentError, SettingsInvalid

SETTINGS = {
    "ALTER ROLE tidegate_stager IN DATABASE {} SET statement_timeout = '5s'": "tidegate_stager: statement_timeout = 5s",
    "ALTER DATABASE {} SET idle_in_transaction_session_timeout = '2min'": "tidegate_reader: idle_in_transaction",
    "ALTER ROLE tidegate IN DATABASE {} SET idle_session_timeout = 5000": "tidegate: idle_session_timeout = 5000",
    "ALTER ROLE tidegate_owner IN DATABASE {} SET session_replication_role = replica": "tidegate_owner: session_rep",
    "ALTER ROLE tidegate_owner IN DATABASE {} SET tidegate.writer = 'tally'": "tidegate_owner: tidegate.writer = tally",
    "ALTER ROLE postgres IN DATABASE {} SET tidegate.writer = 'tally'": "postgres: tidegate.writer = tally",
    # the last, as it would refuse the others
    "ALTER DATABASE {} SET default_transaction_read_only = on": "tidegate: default_transaction_read_only = on",
}


@pytest.fixture
def latin(server: Server) -> Iterator[Settings]:
    with closing(psycopg2.connect(**server.settings.conninfo(user="postgres"))) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(
            "CREATE DATABASE in_latin1 OWNER tidegate_owner ENCODING 'LATIN1' LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C'"
            " TEMPLATE template0"
        )
        yield replace(server.settings, pg_database="in_latin1")
        server.drop_database("in_latin1")


def test_a_database_that_cannot_keep_every_text_is_refused(latin: Settings, tally: Tally) -> None:
    """A file's name or a reason with a character that it lacks would halt a pipeline, later."""
    with pytest.raises(PermanentError, match=r"keeps texts in LATIN1.*ENCODING 'UTF8'"):
        migrations.upgrade(latin, [tally.spec])


def test_a_setting_under_which_steps_never_end_is_named_with_its_role(tally: Tally, server: Server, as_role: Execute) -> None:
    settings = tally.store.settings
    for statement in SETTINGS:
        as_role("postgres", statement.format(settings.pg_database))

    found = tally.store.harmful_settings()
    for named in SETTINGS.values():
        assert [sentence for sentence in found if sentence.startswith(f"Role {named}")], named
    with pytest.raises(AccessRefused, match="As an administrator, run: ALTER ROLE postgres") as refused:
        migrations.upgrade(settings, [tally.spec])
    for remedy in str(refused.value).partition("run: ")[2].split("; "):
        server.execute(sql.SQL(remedy))
    assert tally.store.harmful_settings() == []
    migrations.upgrade(settings, [tally.spec])


def test_a_setting_of_the_processs_own_connections_is_named_and_a_long_one_is_no_obstacle(
    tally: Tally, as_role: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PGOPTIONS comes before the settings of roles, so that none is advised; a role's own is named besides."""
    settings = tally.store.settings
    as_role("postgres", f"ALTER DATABASE {settings.pg_database} SET idle_in_transaction_session_timeout = '24h'")
    assert tally.store.harmful_settings() == []
    as_role("postgres", f"ALTER ROLE tidegate IN DATABASE {settings.pg_database} SET statement_timeout = 0")
    monkeypatch.setenv("PGOPTIONS", "-c statement_timeout=5s -c default_transaction_read_only=on")
    with StateStore.connect(replace(settings, lock_timeout_seconds=9)) as store:  # with connections of its own
        (found,) = store.harmful_settings()
    with pytest.raises(SettingsInvalid, match="default_transaction_read_only = on and statement_timeout = 5000ms") as refused:
        migrations.upgrade(settings, [tally.spec])
    assert str(refused.value) == found
    assert "Take it out of the environment variable PGOPTIONS" in found
    monkeypatch.delenv("PGOPTIONS")
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
