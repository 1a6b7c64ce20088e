"""PostgresTable on a server of its own: prepared transactions, and a log-in by a password file."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
from psycopg2.errors import LockNotAvailable

from tests.integration.conftest import until
from tests.postgres_versions import AnyPostgres, running
from tests.sources.conftest import Inbox
from tests.sources.shop import CREATE, DATED, DEADLINE_SECONDS, ORDERS, Shop, expected
from tests.store import STACK_FOLDER, lock_holders
from tidegate.jobs import PostgresTable
from tidegate.stack.components.server_process import reserve_port


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyPostgres]:
    """A server with two-phase commit."""
    home = tmp_path_factory.mktemp("other")
    (home / STACK_FOLDER).mkdir(mode=0o711)
    with ExitStack() as ports, running(AnyPostgres(home, reserve_port(None, ports), max_prepared_transactions=5)) as server:
        server.execute("GRANT CONNECT ON DATABASE postgres TO tidegate_owner, tidegate_stager")
        server.execute("GRANT CREATE ON SCHEMA public TO tidegate_owner")
        server.execute("GRANT CREATE ON DATABASE postgres TO tidegate_owner")
        server.execute("GRANT pg_read_all_stats TO tidegate_stager, tidegate_owner")
        yield server


@pytest.fixture
def prepared_shop(postgres: AnyPostgres) -> Iterator[Shop]:
    """The shop of this server, with an empty table of orders."""
    with ExitStack() as sessions:
        shop = Shop(replace(postgres.settings, pg_database="postgres"), sessions)
        for (left,) in shop.execute("SELECT gid FROM pg_prepared_xacts"):
            shop.execute("ROLLBACK PREPARED %s", [left])
        shop.execute("DROP TABLE IF EXISTS orders")
        shop.execute(CREATE)
        yield shop


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_a_prepared_transaction_is_waited_for(
    prepared_shop: Shop, source: PostgresTable, caplog: pytest.LogCaptureFixture
) -> None:
    """After PREPARE TRANSACTION its session is gone, but its rows are not visible yet."""
    shop, key = prepared_shop, ", ".join(source.selection.key)
    writer = shop.session()
    writer.execute("BEGIN; INSERT INTO orders (name) VALUES ('early')")
    writer.execute("PREPARE TRANSACTION 'late'")
    shop.sell()

    assert shop.plan(source) is None
    assert "transaction 'late' of tidegate_owner" in caplog.text
    shop.execute("COMMIT PREPARED 'late'")
    assert shop.ids(shop.planned(source), key) == [1, 2]


@pytest.mark.promise("error:LOCK_HELD")
@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ("LOCK TABLE orders", "SELECT FROM orders"),
        ("UPDATE orders SET name = 'x'", "SELECT FROM orders FOR UPDATE"),
        ("UPDATE orders SET name = 'x'", "ALTER TABLE orders ADD more integer"),
    ],
)
def test_a_forgotten_prepared_transaction_that_holds_a_lock_is_named(prepared_shop: Shop, held: str, wanted: str) -> None:
    """No session has it: so it is named itself, with what ends it; also if a session waits for it in front of others."""
    shop, writer, waiting = prepared_shop, prepared_shop.session(), prepared_shop.session()
    shop.sell()
    writer.execute(f"BEGIN; {held}")
    writer.execute("PREPARE TRANSACTION 'it''s late'")

    def refused(statement: str) -> str:
        waiting.execute("BEGIN; SET LOCAL lock_timeout = '100ms'")
        with pytest.raises(LockNotAvailable) as error:
            waiting.execute(statement)
        waiting.connection.cursor().execute("ROLLBACK")
        return lock_holders.of(error.value, waiting.connection)

    said = refused(wanted)
    assert re.search(r"prepared transaction 'it''s late' \(owner tidegate_owner, since .* UTC\)", said)
    assert "in database postgres: COMMIT PREPARED 'it''s late' or ROLLBACK PREPARED 'it''s late'" in said
    migration = shop.session()
    with ThreadPoolExecutor(1) as thread:
        migrating = thread.submit(migration.execute, "BEGIN; LOCK TABLE orders; COMMIT")
        until(lambda: shop.execute("SELECT count(*) FROM pg_locks WHERE NOT granted") == [(1,)])
        assert "prepared transaction" in refused("SELECT FROM orders")
        shop.execute("ROLLBACK PREPARED 'it''s late'")
        migrating.result(DEADLINE_SECONDS)


def test_another_server_is_read_by_a_password_file(postgres: AnyPostgres, prepared_shop: Shop, inbox: Inbox) -> None:
    """Planner and executors find the password in the file that `connection` names; it is stored nowhere else."""
    prepared_shop.sell(20)
    connection = f"host=127.0.0.1 port={postgres.port} dbname=postgres user=tidegate_stager passfile={postgres.passfile}"
    pipeline = inbox.declare(replace(ORDERS, connection=connection))
    assert inbox.run(pipeline) == [1]
    assert inbox.rows(pipeline) == expected(prepared_shop)
    password = postgres.stager_passfile.read_text().strip().split(":")[-1]
    assert password not in pipeline.source.identity + repr(pipeline.source)
