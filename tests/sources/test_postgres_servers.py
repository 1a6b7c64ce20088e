"""PostgresTable on a server of its own: prepared transactions, standbys and their promotion, a log-in by a password file."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg2
import pytest
from psycopg2.errors import LockNotAvailable

from tests.integration.conftest import until
from tests.postgres_versions import AnyPostgres, running
from tests.sources.conftest import Inbox
from tests.sources.shop import CREATE, DATED, DEADLINE_SECONDS, ORDERS, Shop, expected, refused
from tests.store import STACK_FOLDER, lock_holders
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.jobs.sources.postgres import seen_by_plans
from tidegate.jobs.sources.postgres.read import read_part
from tidegate.jobs.sources.postgres.seen_by_plans import snapshot_of
from tidegate.stack.components.server_process import reserve_port
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable


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


@contextmanager
def shop_at(postgres: AnyPostgres, *, is_new: bool = True) -> Iterator[Shop]:
    """Open the shop of a server, which begins with an empty table of orders."""
    with ExitStack() as sessions:
        shop = Shop(settings_of(postgres), sessions)
        if is_new:
            for (left,) in shop.execute("SELECT gid FROM pg_prepared_xacts"):
                shop.execute("ROLLBACK PREPARED %s", [left])
            shop.execute("DROP TABLE IF EXISTS orders")
            shop.execute(CREATE)
        yield shop


def settings_of(postgres: AnyPostgres) -> Settings:
    return replace(postgres.settings, pg_database="postgres")


@pytest.fixture
def prepared_shop(postgres: AnyPostgres) -> Iterator[Shop]:
    with shop_at(postgres) as shop:
        yield shop


@contextmanager
def as_standby(postgres: AnyPostgres) -> Iterator[Path]:
    """Let a server be a standby; yield the file that makes it one, which it removes when it is promoted."""
    signal = postgres.data / "standby.signal"
    postgres.stop()
    signal.touch()
    os.chown(signal, postgres.data.stat().st_uid, -1)
    postgres.start()
    try:
        yield signal
    finally:
        postgres.stop()
        signal.unlink(missing_ok=True)
        postgres.start()


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


@pytest.mark.soak
def test_a_writer_that_prepares_meanwhile_is_still_waited_for(prepared_shop: Shop) -> None:
    """Its session has detached from it and does other work; transactions prepared later are not waited for."""
    shop = prepared_shop
    writer, other = shop.session(), shop.session()
    writer.execute("BEGIN; INSERT INTO orders (name) VALUES ('early')")
    shop.sell()
    with ThreadPoolExecutor(1) as thread:
        plan = thread.submit(shop.planned, replace(ORDERS, wait_seconds=DEADLINE_SECONDS))
        shop.wait_until_polling()
        writer.execute("PREPARE TRANSACTION 'late'")
        shop.wait_until_polling(3)
        other.execute("BEGIN; INSERT INTO orders (name) VALUES ('other'); PREPARE TRANSACTION 'other'")
        shop.wait_until_polling(3)
        assert not plan.done()
        shop.execute("COMMIT PREPARED 'late'")
        metadata = plan.result(DEADLINE_SECONDS)
    shop.execute("COMMIT PREPARED 'other'")

    assert shop.ids(metadata) == [1, 2]


def test_a_snapshot_lists_so_many_open_transactions_and_no_more(prepared_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """If more are open, the snapshot ends before the first that it does not list, so that none is taken for ended."""
    shop = prepared_shop  # whose server has no other transactions
    writer = shop.session()
    writer.execute("BEGIN; CREATE TABLE made ()")
    for n in range(3):
        writer.execute(f"SAVEPOINT s; CREATE TABLE made_{n} ()")
    shop.sell()
    [(xmin,)] = shop.execute("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
    with closing(psycopg2.connect(**shop.settings.conninfo(user=shop.settings.pg_stager))) as connection:
        cursor = connection.cursor()
        assert snapshot_of(cursor) == f"{xmin}:{xmin + 5}:{xmin},{xmin + 1},{xmin + 2},{xmin + 3}"
        monkeypatch.setattr(seen_by_plans, "OPEN", 2)
        assert snapshot_of(cursor) == f"{xmin}:{xmin + 2}:{xmin},{xmin + 1}"


@pytest.mark.soak
def test_a_standby_is_refused(postgres: AnyPostgres) -> None:
    """Its primary's locks cannot be seen there."""
    with shop_at(postgres):
        pass
    settings = settings_of(postgres)
    with as_standby(postgres):
        for source in (ORDERS, DATED):
            with pytest.raises(SourceUnreadable, match="standby"):
                coordinator_of(source, settings).initialize_transaction(1, None, None)
        with pytest.raises(SourceUnreadable, match="standby"):
            list(read_part(settings.conninfo(user="tidegate_stager"), ORDERS.selection, (None, ["1"])))


@pytest.mark.soak
@pytest.mark.parametrize("source", [ORDERS, DATED], ids=["by id", "by time"])
def test_a_promoted_standby_is_refused_unless_it_has_all_rows(postgres: AnyPostgres, source: PostgresTable) -> None:
    """Its writers have passed both the position and the transactions of before, so that nothing else shows what it lost."""
    with shop_at(postgres) as shop:
        shop.sell(3)
        before = shop.planned(source)
    with as_standby(postgres) as signal:
        postgres.execute("SELECT pg_promote()")
        with shop_at(postgres, is_new=False) as shop:
            shop.sell(3)
            assert not signal.exists()
            refused(shop, source, SourceChanged, before, r"a standby was promoted .* \(timeline \w+, now \w+\).*generation=2")
            for goes_on in (replace(source, failover="go-on"), replace(source, generation=2, keeps_position=True)):
                assert shop.planned(goes_on, before)["rows"] == 3
            trusting = replace(shop.settings, pg_failover="go-on")
            assert coordinator_of(source, trusting).initialize_transaction(2, before, None)["rows"] == 3


def test_another_server_is_read_by_a_password_file(postgres: AnyPostgres, inbox: Inbox) -> None:
    """Planner and executors find the password in the file that `connection` names; it is stored nowhere else."""
    with shop_at(postgres) as shop:
        shop.sell(20)
        connection = f"host=127.0.0.1 port={postgres.port} dbname=postgres user=tidegate_stager passfile={postgres.passfile}"
        pipeline = inbox.declare(replace(ORDERS, connection=connection))
        assert inbox.run(pipeline) == [1]
        assert inbox.rows(pipeline) == expected(shop)
        password = postgres.stager_passfile.read_text().strip().split(":")[-1]
        assert password not in pipeline.source.identity + repr(pipeline.source)
