"""PostgresTable reads every row exactly once despite open writers, prepared transactions and odd names, keys and values."""

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from psycopg2.errors import LockNotAvailable

from tests.postgres_versions import AnyPostgres, running
from tests.sources.conftest import Inbox
from tests.sources.in_process import batches
from tests.sources.shop import CREATE, DATED, ORDERS, SECONDS, Shop, by_query, refused
from tests.store import STACK_FOLDER, lock_holders
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.postgres.read import BLOCK_BYTES
from tidegate.stack.components.server_process import reserve_port
from tidegate.state_store.base.errors import MalformedRecord, SourceUnreadable


def test_an_opaque_batch_reads_what_is_still_there(shop: Shop) -> None:
    shop.sell(3)
    first = shop.plan(DATED)
    # Planned again after its predecessor's new end it is never None, because the position would be lost.
    again = shop.plan(DATED, first, {**first, "after": ["2020-01-01 00:00:00+00", "1"]})
    assert again == {**first, "after": first["to"], "splits": [], "rows": 0}
    assert shop.rows(DATED, again) == []
    shop.run("UPDATE orders SET amount = 99, written = now() WHERE id = 2")
    assert shop.ids(DATED, first) == [1, 3]
    assert shop.plan(DATED, None, first) == first
    assert [row[1:] for row in shop.rows(DATED, shop.plan(DATED, first))] == [(2, "n2", 99)]


@pytest.mark.promise("decision:0015", "limit:PostgresTable.wait_seconds")
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_lower_key_in_flight_holds_back_higher_ones(shop: Shop, end: str, caplog: pytest.LogCaptureFixture) -> None:
    writer = shop.session("INSERT INTO orders (name) VALUES ('early')")
    shop.sell()
    assert shop.plan(ORDERS) is None
    named = f"session {writer.connection.get_backend_pid()} of tidegate_owner (shop)"
    assert named in caplog.text
    assert named in (ORDERS.held_back(shop.settings) or "")
    writer.execute(end)
    assert ORDERS.held_back(shop.settings) is None
    assert shop.ids(ORDERS, shop.plan(ORDERS)) == ([1, 2] if end == "COMMIT" else [2])


@pytest.mark.promise("limit:PostgresTable.wait_seconds")
def test_a_plan_waits_only_for_the_writers_it_found(shop: Shop) -> None:
    found, later = shop.session("INSERT INTO orders (name) VALUES ('early')"), shop.session()
    shop.sell()
    with ThreadPoolExecutor(1) as thread:
        plan = thread.submit(shop.plan, replace(ORDERS, wait_seconds=SECONDS))
        shop.wait_until_polling()
        later.execute("BEGIN; INSERT INTO orders (name) VALUES ('late')")
        assert not plan.done()
        found.execute("COMMIT")
        metadata = plan.result(SECONDS)
    later.execute("COMMIT")
    assert shop.ids(ORDERS, metadata) == [1, 2]
    assert shop.ids(ORDERS, shop.plan(ORDERS, metadata)) == [3]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM goods",
        "SELECT o.id, t.name, o.amount FROM orders o JOIN titles t ON t.code = o.name -- with a comment at its end",
        "WITH all_orders AS (SELECT * FROM orders) SELECT id, name, amount FROM all_orders;",
        "SELECT id, unnest(ARRAY[name]) AS name, amount FROM orders WHERE amount IN (SELECT * FROM generate_series(1, 9))",
        "SELECT DISTINCT id, (SELECT name FROM orders n WHERE n.id >= o.id ORDER BY id LIMIT 1) AS name, amount FROM orders o",
    ],
)
def test_writers_of_tables_in_a_query_are_waited_for(shop: Shop, query: str) -> None:
    shop.run("CREATE TABLE titles (code text, name text); INSERT INTO titles VALUES ('n1', 'Paper'), ('n2', 'Ink')")
    shop.execute("CREATE VIEW goods AS SELECT id, name, amount FROM orders WHERE amount > 0")
    shop.sell(2)
    source, is_joined = by_query(ORDERS, query), "titles" in query
    read = shop.read(source, shop.plan(source))
    assert read == ([(1, "Paper", 1), (2, "Ink", 2)] if is_joined else [(1, "n1", 1), (2, "n2", 2)])
    for table in ("orders", "titles") if is_joined else ("orders",):
        writer = shop.session(f"INSERT INTO {table} (name) VALUES ('early')")
        assert shop.plan(source) is None
        writer.execute("ROLLBACK")
    assert shop.ids(source, shop.plan(source)) == [1, 2]


def test_a_partition_is_held_back_by_writers_through_its_parent(shop: Shop) -> None:
    shop.run("CREATE TABLE parent (LIKE orders INCLUDING ALL) PARTITION BY RANGE (id)")
    shop.run("CREATE TABLE child PARTITION OF parent DEFAULT; INSERT INTO parent (name) VALUES ('early')")
    through_parent = shop.session("LOCK TABLE ONLY parent IN ROW EXCLUSIVE MODE")
    assert shop.plan(replace(ORDERS, table="child")) is None
    through_parent.execute("COMMIT")
    assert [shop.plan(replace(ORDERS, table=table))["to"] for table in ("child", "parent")] == [["1"], ["1"]]


def test_rows_stay_behind_the_clock_by_the_margin(shop: Shop) -> None:
    shop.sell()
    shop.execute("INSERT INTO orders (written) VALUES (now() - interval '2 hours'), (now() + interval '2 hours')")
    first = shop.plan(replace(DATED, margin_seconds=3600))
    assert shop.ids(DATED, first) == [2]
    assert shop.ids(DATED, shop.plan(DATED, first)) == [1]


TRIGGER = """CREATE FUNCTION rounded() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN NEW.written := date_trunc('second', now()); RETURN NEW; END $$;
    CREATE TRIGGER rounded BEFORE INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION rounded()"""
THROUGH_A_VARIABLE = TRIGGER.replace("BEGIN", "DECLARE t timestamptz(0) := now(); day date; BEGIN day := now()::date;").replace(
    "date_trunc('second', now())", "t"
)
INTO = "CREATE TABLE audit (id bigint, at timestamptz, day date);" + TRIGGER.replace(
    "NEW.written := date_trunc('second', now())",
    "SELECT date_trunc('second', now()) INTO STRICT NEW.written; INSERT INTO audit SELECT NEW.id, NEW.written, current_date",
)
FUNCTION = """CREATE FUNCTION seconds() RETURNS timestamptz LANGUAGE sql RETURN date_trunc('second', now());
    CREATE FUNCTION moment() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RETURN seconds(); END $$;
    ALTER TABLE orders ALTER written SET DEFAULT moment()"""
OF_DOMAIN = """CREATE DOMAIN moment AS timestamptz DEFAULT date_trunc('second', now());
    ALTER TABLE orders ALTER written DROP DEFAULT, ALTER written TYPE moment"""
DOMAIN = "CREATE DOMAIN seconds AS timestamptz(0); CREATE DOMAIN whole AS seconds; ALTER TABLE orders ALTER written TYPE whole"
VIEW = "CREATE VIEW rounded AS SELECT id, name, amount, date_trunc('second', written) AS written FROM orders"
# What rounds a time to seconds, each in a schema of its own: statements, and the query that reads the table.
ROUNDED: dict[str, tuple[str, str]] = {
    "type": ("ALTER TABLE orders ALTER written TYPE timestamptz(0)", ""),
    "domain": (DOMAIN, ""),
    "view": (VIEW, "SELECT * FROM {}.rounded"),
    "query": ("", "SELECT id, name, amount, written::timestamptz(0) AS written FROM {}.orders"),
    "trigger": (TRIGGER, ""),
    "trigger_through_a_variable": (THROUGH_A_VARIABLE, ""),
    "trigger_by_into": (INTO, ""),
    "functions_of_the_default": (FUNCTION, ""),
    "default_of_a_domain": (OF_DOMAIN, ""),
    "default_itself": ("ALTER TABLE orders ALTER written SET DEFAULT date_trunc('seconds', now())", ""),
    "bin": ("", "SELECT id, name, amount, date_bin('1 second', written, '2000-01-01') AS written FROM {}.orders"),
}


@pytest.mark.promise("I12")
def test_a_rounded_time_before_its_transactions_start_is_read(shop: Shop) -> None:
    """A writer is open, and its rows have a time before its own start; others of the same second are read only after it."""
    sources: dict[str, PostgresTable] = {}
    for name, (statements, query) in ROUNDED.items():
        shop.execute(f"CREATE SCHEMA {name}; SET search_path = {name}; {CREATE}; {statements}")
        source = by_query(DATED, query.format(name)) if query else replace(DATED, table=f"{name}.orders")
        sources[name] = replace(source, max_rows=5)
    shop.execute("SELECT pg_sleep(1.3 - extract(second FROM now()) % 1)")  # a time that is rounded down
    writer = shop.session("SELECT now()")
    for name in ROUNDED:
        writer.execute(f"SET search_path = {name}; INSERT INTO orders (name) VALUES ('open')")
        shop.execute(f"SET search_path = {name}")
        shop.sell(20)
    read: dict[str, list[int]] = {name: [] for name in ROUNDED}
    previous: dict[str, Any] = dict.fromkeys(ROUNDED)
    for _ in range(2):
        shop.execute("SELECT pg_sleep(1.1)")
        for name, source in sources.items():
            while metadata := shop.plan(source, previous[name]):
                read[name] += shop.ids(source, metadata)
                previous[name] = metadata
        writer.execute("COMMIT")
    assert {name: sorted(ids) for name, ids in read.items()} == {name: [*range(1, 22)] for name in ROUNDED}


def test_rows_that_share_a_key_stay_together(shop: Shop) -> None:
    """A boundary between them would lose some: the batch grows instead."""
    source = replace(DATED, key="written", max_rows=2, partitions=2)
    assert shop.plan(source) is None  # no txid is spent on an empty table
    for rows in (1, 4, 1):
        shop.sell(rows)
    planned = batches(shop.settings, source)
    assert [(batch["rows"], shop.ids(source, batch)) for batch in planned] == [(5, [1, 2, 3, 4, 5]), (1, [6])]


def test_names_are_those_of_sql(shop: Shop) -> None:
    table = '"My Shop"."Order ""Lines"" %"'
    shop.run(f'CREATE SCHEMA "My Shop"; CREATE TABLE {table} ("Line No" serial, "select" text, "Größe;--" int)')
    shop.run(f"""INSERT INTO {table} ("select", "Größe;--") VALUES ('it''s', 3)""")
    source = replace(ORDERS, table=table, key="Line No", schema={"Line No": "int", "select": "string", "Größe;--": "int"})
    assert shop.rows(source, shop.plan(source)) == [(1, "it's", 3)]
    shop.sell()
    for name in ("public.Orders", ' "public".orders '):
        assert shop.plan(replace(ORDERS, table=name))["rows"] == 1


KEYS: dict[tuple[str, str], list[Any]] = {
    ("smallint", "smallint"): [-32768, -1, 0, 32767],
    ("bigint", "bigint"): [-(2**63), 0, 2**63 - 1],
    ("numeric", "decimal(38,10)"): [Decimal("-1.5"), Decimal("1.0000000001"), Decimal("1.1"), Decimal(10) ** 27],
    ("text", "string"): ["", "A'b\\", "a", 'ä\n\t"', "\U0001f30a"],
    ("uuid", "string"): ["00000000-0000-0000-0000-000000000001", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
    ("timestamptz", "timestamp"): [datetime(1, 1, 1, tzinfo=UTC), datetime(2024, 2, 29, 1, 2, 3, 456789, UTC)],
}


@pytest.mark.parametrize("types", KEYS, ids=" ".join)
def test_keys_of_all_types_cut_ranges(shop: Shop, types: tuple[str, str]) -> None:
    shop.run(f"CREATE TABLE keyed (k {types[0]} NOT NULL); SET timezone = 'Asia/Kathmandu'")
    for key in random.Random(1).sample(KEYS[types], len(KEYS[types])):
        shop.execute("INSERT INTO keyed VALUES (%s)", [key])
    is_drawn = types[1] != "timestamp"
    source = PostgresTable(table="keyed", key="k", schema={"k": types[1]}, max_rows=1, wait_seconds=0, key_is_drawn=is_drawn)
    assert [shop.rows(source, batch) for batch in batches(shop.settings, source)] == [[(key,)] for key in KEYS[types]]


def table_of(shop: Shop, postgres_type: str, declared: str, *values: Any) -> PostgresTable:
    shop.run(f"DROP TABLE IF EXISTS odd; CREATE TABLE odd (id serial, v {postgres_type})")
    for value in values:
        shop.execute(f"INSERT INTO odd (v) VALUES ((%s){'::float8' * isinstance(value, float)}::{postgres_type})", [value])
    return PostgresTable(table="odd", key="id", schema={"id": "int", "v": declared}, wait_seconds=0)


# Type in Postgres, declared type, and values at the bounds of the former.
WIDER: list[tuple[str, str, list[Any]]] = [
    *(("smallint", kind, [-(2**15), 2**15 - 1]) for kind in ("int", "bigint", "float", "double", "decimal(5,0)")),
    *(("integer", kind, [-(2**31), 2**31 - 1, 2**24 + 1]) for kind in ("bigint", "double", "decimal(10,0)", "decimal(38,28)")),
    ("bigint", "decimal(19,0)", [-(2**63), 2**63 - 1]),
    ("real", "double", [float32 := 13421773 * 2.0**-27, -(2.0**-149), (2 - 2.0**-23) * 2.0**127, float("-inf")]),
    ("real", "float", [float32, 2.0**-149]),
    ("double precision", "double", [5e-324, 1.7976931348623157e308, 2.0**53 + 2]),
]
ROUNDING = {"bigint": "double", "integer": "float", "numeric(9,0)": "double", "double precision": "float"}


def test_a_wider_type_has_each_value(shop: Shop) -> None:
    for postgres_type, declared, values in WIDER:
        source = table_of(shop, postgres_type, declared, *values)
        assert [value for _, value in shop.rows(source, shop.plan(source))] == values, (postgres_type, declared)
    for postgres_type, declared in ROUNDING.items():
        source = table_of(shop, postgres_type, declared, 1)
        refused(shop, source, SourceUnreadable, message=f"which cannot be read as {declared}")


MISFITS = [("bigint", "2147483648", "int"), ("numeric", "1.005", "decimal(10,2)"), ("numeric", "1000", "decimal(5,2)")]
MISFITS += [("timestamptz", "infinity", "timestamp"), ("date", "0044-03-15 BC", "date")]


def test_a_value_that_does_not_fit_fails_with_column_and_key(shop: Shop) -> None:
    for postgres_type, value, spark_type in MISFITS:
        source = table_of(shop, postgres_type, spark_type, *[None] * 100, value, None)
        misfit = re.escape(f"row id=101: v='{value}' does not fit {spark_type}")
        with pytest.raises(MalformedRecord, match=rf"^Table odd, {misfit}.*CASE WHEN \.\.\. THEN v END"):
            shop.rows(source, shop.plan(source))


def test_long_texts_and_many_rows_pass_through_blocks(shop: Shop) -> None:
    shop.execute("INSERT INTO orders (name) SELECT repeat(E'x\"\\n', 50000) FROM generate_series(1, 40)")
    shop.execute("INSERT INTO orders (name) VALUES (repeat('long ', %s))", [BLOCK_BYTES])
    shop.sell(5000)
    rows = shop.rows(ORDERS, shop.plan(replace(ORDERS, partitions=1)))
    assert rows == shop.execute("SELECT id, name, amount FROM orders ORDER BY id")


def test_the_identity_says_which_rows_and_where() -> None:
    connection = {"host": "a", "dbname": "b", "user": "c", "passfile": "/secret/place"}
    there = replace(ORDERS, connection=connection)
    assert '"host": "a"' in there.identity
    assert "/secret/place" not in there.identity
    assert ORDERS.identity == replace(ORDERS, max_rows=5, partitions=9, wait_seconds=3).identity
    others = [there, replace(ORDERS, table="others"), replace(ORDERS, schema={**ORDERS.schema, "amount": "bigint"}), DATED]
    others += [by_query(ORDERS, "orders"), replace(there, connection={**connection, "dbname": "d"})]
    assert len({ORDERS.identity, *(other.identity for other in others)}) == len(others) + 1


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyPostgres]:
    home = tmp_path_factory.mktemp("other")
    (home / STACK_FOLDER).mkdir(mode=0o711)
    with ExitStack() as ports, running(AnyPostgres(home, reserve_port(None, ports), max_prepared_transactions=5)) as server:
        for granted in ("CONNECT, CREATE ON DATABASE postgres", "CREATE ON SCHEMA public", "pg_read_all_stats"):
            server.execute(f"GRANT {granted} TO tidegate_owner, tidegate_stager")
        yield server


@pytest.fixture
def prepared(postgres: AnyPostgres) -> Iterator[Shop]:
    with ExitStack() as sessions:
        shop = Shop(replace(postgres.settings, pg_database="postgres"), sessions)
        for (left,) in shop.execute("SELECT gid FROM pg_prepared_xacts"):
            shop.execute("ROLLBACK PREPARED %s", [left])
        shop.run(f"DROP TABLE IF EXISTS orders; {CREATE}")
        yield shop


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_a_prepared_transaction_is_waited_for(prepared: Shop, source: PostgresTable, caplog: pytest.LogCaptureFixture) -> None:
    """After PREPARE TRANSACTION its session is gone, but its rows are not visible yet."""
    prepared.session("INSERT INTO orders (name) VALUES ('early')").execute("PREPARE TRANSACTION 'late'")
    prepared.sell()
    assert prepared.plan(source) is None
    assert "transaction 'late' of tidegate_owner" in caplog.text
    prepared.execute("COMMIT PREPARED 'late'")
    assert prepared.ids(source, prepared.plan(source)) == [1, 2]


@pytest.mark.promise("error:LOCK_HELD")
@pytest.mark.parametrize("wanted", ["SELECT FROM orders FOR UPDATE", "ALTER TABLE orders ADD more integer"])
def test_a_forgotten_prepared_transaction_that_holds_a_lock_is_named(prepared: Shop, wanted: str) -> None:
    prepared.sell()
    prepared.session("UPDATE orders SET name = 'x'").execute("PREPARE TRANSACTION 'it''s late'")
    waiting = prepared.session("SET LOCAL lock_timeout = '100ms'")
    with pytest.raises(LockNotAvailable) as error:
        waiting.execute(wanted)
    waiting.connection.cursor().execute("ROLLBACK")
    said = lock_holders.of(error.value, waiting.connection)
    assert re.search(r"prepared transaction 'it''s late' \(owner tidegate_owner, since .* UTC\)", said)
    assert "in database postgres: COMMIT PREPARED 'it''s late' or ROLLBACK PREPARED 'it''s late'" in said


def test_another_server_is_read_by_a_password_file(postgres: AnyPostgres, prepared: Shop, inbox: Inbox) -> None:
    prepared.sell(20)
    connection = f"host=127.0.0.1 port={postgres.port} dbname=postgres user=tidegate_stager passfile={postgres.passfile}"
    pipeline = inbox.declare(replace(ORDERS, connection=connection))
    assert inbox.run(pipeline) == [1]
    sums = prepared.execute("SELECT name, count(*), sum(amount) FROM orders GROUP BY name")
    assert inbox.counts(pipeline) == {name: (lines, amount) for name, lines, amount in sums}
    password = postgres.stager_passfile.read_text().strip().split(":")[-1]
    assert password not in pipeline.source.identity + repr(pipeline.source)
