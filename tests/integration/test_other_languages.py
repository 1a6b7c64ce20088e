"""A server that has its messages in another language, as one that was set up in Germany usually has."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg2
import pytest
import sqlalchemy as sa

from tests.postgres_versions import AnyPostgres, running
from tests.store import role_settings, translate
from tidegate.stack.components.server_process import reserve_port
from tidegate.state_store.base.errors import AccessRefused, SchemaOutOfDate, StoreUnavailable, TidegateError, Unprocessed

GERMAN = Path("/usr/share/locale/de/LC_MESSAGES/postgres-15.mo")  # of Debian's package; the wheels have English alone


@pytest.fixture(scope="module")
def german(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyPostgres]:
    if not (GERMAN.exists() and Path("/usr/lib/postgresql/15/bin/postgres").exists()):
        pytest.skip("Debian's PostgreSQL 15 with its translations is not installed")
    home = tmp_path_factory.mktemp("german")
    (home / ".tidegate").mkdir(mode=0o711)
    with ExitStack() as held, pytest.MonkeyPatch.context() as environment:
        environment.setenv("LANGUAGE", "de")
        with running(
            AnyPostgres(home, reserve_port(None, held), version=15, lc_messages="C.UTF-8", idle_session_timeout="50min")
        ) as postgres:
            yield postgres


def meaning(error: psycopg2.Error) -> TidegateError:
    """Return what an error means, after checking that it is in German."""
    words = ("existiert nicht", "fehlgeschlagen", "keine Partition", "kein pg_hba.conf", "Wiederherstellung")
    assert any(word in str(error) for word in words)
    return translate(error, "trying")


def test_errors_of_statements_mean_what_they_mean_in_english(german: AnyPostgres) -> None:
    """Staging that is gone is processed again, which a missing table of a state is not; a partition may be detached."""
    german.execute("CREATE TABLE counts (n int) PARTITION BY HASH (n)")
    german.execute("CREATE TABLE checked (n int CHECK (n > 0))")
    for statement, kind in {
        "SELECT FROM staging.per_shop_1_1": Unprocessed,
        "SELECT FROM state.per_shop": SchemaOutOfDate,
        "INSERT INTO counts VALUES (1)": SchemaOutOfDate,
    }.items():
        with pytest.raises(psycopg2.Error) as raised:
            german.execute(statement)
        assert type(meaning(raised.value)) is kind, statement
    with pytest.raises(psycopg2.Error) as raised:
        german.execute("INSERT INTO checked VALUES (0)")
    assert not isinstance(translate(raised.value, "trying"), SchemaOutOfDate)


def test_a_refused_connection_is_not_called_a_server_that_does_not_answer(german: AnyPostgres) -> None:
    for wrong in ({"password": "wrong"}, {"dbname": "nothing"}):
        with pytest.raises(psycopg2.OperationalError) as raised:
            psycopg2.connect(**{**german.settings.conninfo(), **wrong})
        refusal = meaning(raised.value)
        assert type(refusal) is StoreUnavailable
        assert str(refusal).startswith("Postgres refused the connection while trying: ")
        assert "Start it" not in str(refusal)
    hba = german.data / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text("local all all trust\nhost all postgres all scram-sha-256\n")
    german.execute("SELECT pg_reload_conf()")
    try:
        with pytest.raises(psycopg2.OperationalError) as raised, closing(psycopg2.connect(**german.settings.conninfo())):
            pass
        assert type(meaning(raised.value)) is AccessRefused
    finally:
        hba.write_text(before)


def test_a_setting_of_the_servers_configuration_is_named(german: AnyPostgres) -> None:
    """It is what a session has unless a role or database sets another value, here on a server of the test's own."""
    engine = sa.create_engine(
        "postgresql+psycopg2://", creator=lambda: psycopg2.connect(**german.settings.conninfo(user="postgres"))
    )
    with engine.connect() as connection:
        found = role_settings.harmful(connection, ["postgres"]).remedies
        assert list(found) == ["postgres: idle_session_timeout = 3000000ms in the configuration of the server"]
        for remedy in found.values():
            connection.exec_driver_sql(remedy)
        assert role_settings.harmful(connection, ["postgres"]).remedies == {}
    engine.dispose()


def test_a_standby_is_waited_for_until_it_is_the_primary(german: AnyPostgres) -> None:
    german.stop()
    (german.data / "standby.signal").touch()
    german.start()
    try:
        with pytest.raises(psycopg2.Error) as raised:
            german.execute("SELECT pg_current_wal_insert_lsn()")
        refusal = meaning(raised.value)
        assert type(refusal) is StoreUnavailable
        assert str(refusal).startswith("Postgres is a standby, or only reads, while trying: ")
    finally:
        german.stop()
        (german.data / "standby.signal").unlink()
        german.start()
