"""PostgresTable notices alterations between two plans: it refuses those that could lose rows, and reads on after others."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg2
import pytest
from psycopg2 import sql

from tests.sources.shop import CREATE, DATED, DRAWN, ORDERS, Shop, all_batches, refused
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.postgres import plan as planning
from tidegate.jobs.sources.postgres.seen_by_plans import visible
from tidegate.state_store.base.errors import AccessRefused, SourceChanged, SourceUnreadable, TidegateError

PARTITIONED = (
    "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, name text, amount integer,"
    " written timestamptz NOT NULL DEFAULT now(), year integer NOT NULL DEFAULT 2025) PARTITION BY LIST (year)"
)


@pytest.fixture
def parted(shop: Shop) -> Shop:
    """A shop whose orders are partitioned by year, 20 of them sold."""
    shop.execute("DROP TABLE orders")
    shop.execute(PARTITIONED)
    shop.execute("CREATE TABLE orders_2025 PARTITION OF orders FOR VALUES IN (2025)")
    shop.sell(20)
    return shop


def run(shop: Shop, statements: list[str]) -> None:
    """Run statements, each a transaction of its own."""
    for statement in statements:
        shop.execute(statement)


# ------------------------------------------------------------------------------------------------------- partitions


@pytest.mark.sampled(2)
@pytest.mark.parametrize("source", [ORDERS, DATED])
@pytest.mark.parametrize("own_grant", [True, False])
def test_rows_of_a_partition_that_was_attached_are_not_passed_by(parted: Shop, source: PostgresTable, own_grant: bool) -> None:
    """They have keys of rows that were read, from a sequence of their own: neither gaps nor the newest range show them."""
    source = replace(source, max_rows=15)
    first, second = all_batches(parted, source)
    parted.execute("CREATE TABLE orders_2024 (LIKE orders)")
    parted.execute(
        "INSERT INTO orders_2024 SELECT n, 'old', n, '2024-05-01'::timestamptz + n * interval '1 s', 2024"
        " FROM generate_series(1, 5) AS n"
    )
    if not own_grant:
        parted.execute("REVOKE SELECT ON orders_2024 FROM tidegate_stager")
    parted.execute("ALTER TABLE orders ATTACH PARTITION orders_2024 FOR VALUES IN (2024)")
    assert first["rows"] + second["rows"] == 20
    message = refused(parted, source, SourceChanged, second)
    assert "partition orders_2024 was attached" in message
    assert "5 row(s)" in message
    assert "keeps_position=True" in message


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_a_new_partition_is_read_on(parted: Shop, source: PostgresTable) -> None:
    """Each month or year has a partition: created empty, or attached with new rows only; sub-partitions too."""
    first = parted.planned(source)
    run(
        parted,
        [
            "CREATE TABLE orders_2026 PARTITION OF orders FOR VALUES IN (2026) PARTITION BY RANGE (id)",
            "CREATE TABLE orders_2026_1 PARTITION OF orders_2026 FOR VALUES FROM (0) TO (1000)",
            "INSERT INTO orders (name, amount, year) VALUES ('new', 1, 2026), ('new', 2, 2025)",
        ],
    )
    second = parted.planned(source, first)
    assert parted.ids(second, "written, id" if source is DATED else "id") == [21, 22]
    run(parted, ["ALTER TABLE orders DETACH PARTITION orders_2025"])  # archived
    assert parted.plan(source, second) is None


def test_a_partition_with_a_sequence_of_its_own_is_refused(parted: Shop) -> None:
    """Rows that are inserted into it directly have other numbers."""
    run(parted, ["CREATE SEQUENCE mine", "CREATE TABLE orders_2024 (LIKE orders)"])
    run(parted, ["ALTER TABLE orders_2024 ALTER id SET DEFAULT nextval('mine')"])
    run(parted, ["ALTER TABLE orders ATTACH PARTITION orders_2024 FOR VALUES IN (2024)"])
    assert "mine" in refused(parted, ORDERS, SourceUnreadable)


def load(shop: Shop, ids: str = "generate_series(1, 5)") -> None:
    """Make a table of old orders with these ids, which could be attached as a partition."""
    shop.execute("CREATE TABLE orders_2024 (LIKE orders)")
    shop.execute(
        "INSERT INTO orders_2024 SELECT n, 'old', n, '2024-05-01'::timestamptz + n * interval '1 s', 2024"
        f" FROM (SELECT {ids} AS n) AS ids"
    )


ATTACH = "ALTER TABLE orders ATTACH PARTITION orders_2024 FOR VALUES IN (2024)"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", [ORDERS, DATED])
@pytest.mark.parametrize("savepoint", ["SELECT 1", "SAVEPOINT s", "SAVEPOINT s; CREATE TABLE o (); RELEASE s; SAVEPOINT t"])
def test_a_partition_whose_attachment_is_open_during_a_plan_is_not_passed_by(
    parted: Shop, source: PostgresTable, savepoint: str
) -> None:
    """In a savepoint it is attached by a subtransaction, which a snapshot of Postgres does not list as open."""
    first = parted.planned(source)
    load(parted)
    parted.sell(3)
    session = parted.session()
    session.execute(f"BEGIN; {savepoint}; {ATTACH}")
    parted.execute("CREATE TABLE later ()")
    second = parted.plan(source, first)
    session.execute("COMMIT")
    parted.sell(1)
    assert "5 row(s)" in refused(parted, source, SourceChanged, second or first)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", [ORDERS, DATED])
@pytest.mark.parametrize("step", ["check_keys", "snapshot_of", "partitions_of"])
def test_a_partition_that_is_attached_while_a_plan_works_is_not_passed_by(
    parted: Shop, source: PostgresTable, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes between the plan's statements, this plan refuses it, or the next one does."""
    load(parted)
    first = parted.planned(source)
    parted.sell(3)
    before = getattr(planning, step)
    statements = [ATTACH]

    def meanwhile(*arguments: Any) -> Any:
        found = before(*arguments)
        run(parted, [statements.pop()] if statements else [])
        return found

    monkeypatch.setattr(planning, step, meanwhile)
    assert "5 row(s)" in refused(parted, source, SourceChanged, first)


def test_a_partition_that_is_attached_while_a_plan_waits_is_not_passed_by(parted: Shop) -> None:
    """A plan by a drawn key waits for writers between its checks and its snapshot."""
    first = parted.planned(ORDERS)
    load(parted)
    writer = parted.session()
    writer.execute("BEGIN; INSERT INTO orders (name, amount) VALUES ('early', 1)")
    parted.sell(3)
    with ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(refused, parted, replace(ORDERS, wait_seconds=60), SourceChanged, first)
        parted.wait_until_polling()
        parted.execute(ATTACH)
        writer.execute("COMMIT")
        assert "5 row(s)" in refusal.result()


def test_a_partition_with_new_rows_may_be_attached_while_a_plan_works(parted: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are in the range that is cut just then, so they were not passed by; and the next plan knows this."""
    first = parted.planned(ORDERS)
    load(parted, "nextval('orders_id_seq')")
    load_more = "INSERT INTO orders (name, amount) VALUES ('new', 1)"
    run(parted, [load_more])
    before, statements = planning.partitions_of, [ATTACH]

    def meanwhile(*arguments: Any) -> Any:
        found = before(*arguments)
        run(parted, [statements.pop()] if statements else [])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(planning, "partitions_of", meanwhile)
        second = parted.planned(ORDERS, first)
    assert parted.ids(second) == [21, 22]
    assert second["rows"] == 2
    assert parted.plan(ORDERS, second) is None
    run(parted, [load_more])
    assert parted.ids(parted.planned(ORDERS, second)) == [23]


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_a_long_transaction_makes_no_partition_look_new(parted: Shop, source: PostgresTable) -> None:
    """All that was written since it began may still be open for its snapshot; but what was read with the range is known."""
    load(parted)
    if source is ORDERS:  # for a time, all transactions of the database are waited for
        parted.execute("CREATE TABLE other (n integer)")
        parted.session().execute("BEGIN; INSERT INTO other VALUES (1)")
    session = parted.session()
    session.execute("BEGIN; SELECT pg_current_xact_id()")
    run(parted, [ATTACH, "CREATE TABLE orders_2023 PARTITION OF orders FOR VALUES IN (2023)"])
    if source is DATED:
        session.execute("COMMIT")
    first = parted.planned(source)
    assert first["rows"] == 25
    assert parted.plan(source, first) is None
    assert len(first["attached"]) == (2 if source is ORDERS else 0)
    parted.execute("ALTER TABLE orders DETACH PARTITION orders_2024")
    assert parted.plan(source, first) is None
    parted.execute("INSERT INTO orders_2024 SELECT 6, 'late', 6, '2024-05-02', 2024")
    parted.execute(ATTACH)
    assert "orders_2024 was attached" in refused(parted, source, SourceChanged, first)


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_a_table_that_becomes_a_child_of_another_is_read_on(shop: Shop, source: PostgresTable) -> None:
    """Its own rows are the same; those of the other table are not read."""
    shop.sell(5)
    first = shop.planned(source)
    shop.execute("CREATE TABLE everything (LIKE orders)")
    shop.execute("ALTER TABLE orders INHERIT everything")
    assert shop.plan(source, first) is None
    shop.sell(1)
    assert shop.planned(source, first)["rows"] == 1


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_rows_of_a_family_that_became_a_child_are_not_passed_by(shop: Shop, source: PostgresTable) -> None:
    """By inheritance a table brings its own children along, which have been such for long."""
    shop.execute("CREATE TABLE old (LIKE orders)")
    shop.execute("CREATE TABLE older () INHERITS (old)")
    shop.execute("INSERT INTO older (id, written) VALUES (-1, now())")
    shop.sell(5)
    first = shop.planned(source)
    shop.execute("ALTER TABLE old INHERIT orders")
    message = refused(shop, source, SourceChanged, first)
    assert "partition older was attached" in message


# ------------------------------------------------------------------------------------------------------- sequences


SELL = "INSERT INTO orders (name, amount) SELECT 'new', n FROM generate_series(1, {}) AS n"
OTHER_SEQUENCE = [
    "CREATE SEQUENCE other START 15",
    "ALTER TABLE orders ALTER id DROP IDENTITY, ALTER id SET DEFAULT nextval('other')",
]
OTHER_COLUMN = ["ALTER TABLE orders RENAME id TO old", "ALTER TABLE orders ADD id bigserial"]
VIEW = ["ALTER TABLE orders RENAME TO sold", "CREATE VIEW orders AS SELECT id - 5 AS id, name, amount FROM sold"]
OTHER_SCHEMA = [
    "CREATE SCHEMA tidegate_stager",
    "CREATE TABLE tidegate_stager.orders (LIKE public.orders INCLUDING ALL)",
    "GRANT USAGE ON SCHEMA tidegate_stager TO tidegate_stager; GRANT SELECT ON tidegate_stager.orders TO tidegate_stager",
]
SECURED = [
    "ALTER TABLE orders ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
    "CREATE POLICY few ON orders USING (amount < 3)",
]
CHANGED: dict[str, tuple[list[str], type[TidegateError], str]] = {
    "counts down": (["ALTER SEQUENCE orders_id_seq INCREMENT -1 MINVALUE -100"], SourceUnreadable, "counts down"),
    "starts over": (["ALTER SEQUENCE orders_id_seq MAXVALUE 30 CYCLE"], SourceUnreadable, "starts over"),
    "unlogged": (["ALTER TABLE orders SET UNLOGGED"], SourceUnreadable, "orders_id_seq is unlogged"),
    "set back": (["SELECT setval('orders_id_seq', 10)"], SourceChanged, "is at 10, but rows up to 20 were read"),
    "begins again": (["TRUNCATE orders RESTART IDENTITY", SELL.format(7)], SourceChanged, "generation"),
    "has caught up": (["TRUNCATE orders RESTART IDENTITY", SELL.format(27)], SourceChanged, "orders_id_seq"),
    "by hand": (["INSERT INTO orders (id) VALUES (500)"], SourceChanged, "key 500, but sequence orders_id_seq is at 20"),
    "changed": (["UPDATE orders SET id = 900 WHERE id = 20"], SourceChanged, "key 900, but sequence"),
    "another sequence": (OTHER_SEQUENCE, SourceChanged, "sequence other is at 14"),
    "another column": (OTHER_COLUMN, SourceChanged, "what is called id is not the column"),
    "renamed": (["ALTER TABLE orders RENAME id TO number"], SourceUnreadable, 'column "id" does not exist'),
    "a view": (VIEW, SourceChanged, "a view has taken the table's place"),
    "another schema": (OTHER_SCHEMA, SourceChanged, "another one has taken its place"),
    "a policy": (SECURED, AccessRefused, "row-level security"),
    "dropped": (["DROP TABLE orders", CREATE, SELL.format(27)], SourceChanged, "table orders was dropped"),
}


@pytest.mark.parametrize("how", CHANGED)
def test_what_could_hide_rows_is_refused(shop: Shop, how: str) -> None:
    """Of the key's sequence, its column, or what has the table's name: the next plan refuses it, before a row is lost."""
    first = shop.sold(20)
    statements, error, message = CHANGED[how]
    run(shop, statements)
    assert message in refused(shop, ORDERS, error, first)


@pytest.mark.parametrize(
    "statements",
    [
        ["ALTER SEQUENCE orders_id_seq RESTART 1000"],
        ["ALTER SEQUENCE orders_id_seq MAXVALUE 100000 CACHE 1"],
        ["ALTER TABLE orders ALTER id SET GENERATED ALWAYS"],
        ["ALTER SEQUENCE orders_id_seq RENAME TO drawn"],
        ["TRUNCATE orders", "ALTER SEQUENCE orders_id_seq CACHE 1"],
        ["DELETE FROM orders WHERE id < 15", "ALTER SEQUENCE orders_id_seq RESTART 50"],
    ],
)
def test_a_sequence_that_was_altered_and_draws_higher_keys_is_read_on(shop: Shop, statements: list[str]) -> None:
    """The rows that were read are unchanged, so no key was drawn twice."""
    first = shop.sold(20)
    run(shop, statements)
    assert shop.plan(ORDERS, first) is None
    shop.sell(3)
    assert len(shop.ids(shop.planned(ORDERS, first))) == 3


def test_keys_that_were_drawn_twice_beside_an_old_row_are_noticed(shop: Shop) -> None:
    """The number of rows and their keys are the same, and one row is even the old one: only their writers differ."""
    first = shop.sold(20)
    run(shop, ["DELETE FROM orders WHERE id < 20", "ALTER SEQUENCE orders_id_seq RESTART 1"])
    shop.sell(19)
    run(shop, ["SELECT nextval('orders_id_seq')"])  # the key of an INSERT that fails at the old row
    shop.sell(1)
    message = refused(shop, ORDERS, SourceChanged, first)
    assert "19 row(s) with such keys were written since, such as 1" in message


def test_keys_that_are_drawn_twice_while_a_plan_waits_are_noticed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence was altered after the plan's first look at it, but its rows are in the plan's snapshot."""
    first = shop.sold(20)
    shop.sell(1)
    wait = planning.settled_by_sequence

    def meanwhile(*arguments: Any) -> Any:
        run(shop, ["DELETE FROM orders WHERE id < 20", "ALTER SEQUENCE orders_id_seq RESTART 1"])
        shop.sell(19)
        run(shop, ["SELECT nextval('orders_id_seq') FROM generate_series(20, 21)"])
        return wait(*arguments)

    monkeypatch.setattr(planning, "settled_by_sequence", meanwhile)
    assert "19 row(s) with such keys were written since, such as 1" in refused(shop, ORDERS, SourceChanged, first)


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["INSERT INTO words VALUES ('b')"], "has 4 row(s) up to e, but 3 when this was planned"),
        (["DELETE FROM words WHERE code = 'c'", "INSERT INTO words VALUES ('b')"], "3, but with other keys"),
    ],
)
def test_a_late_row_is_noticed_where_keys_have_no_gaps(shop: Shop, statements: list[str], message: str) -> None:
    """For texts that the author promised to draw, only the newest range's rows and their number can be compared."""
    run(shop, ["CREATE TABLE words (code text PRIMARY KEY)", "INSERT INTO words VALUES ('a'), ('c'), ('e')"])
    source = PostgresTable(table="words", key="code", schema={"code": "string"}, key_is_drawn=True, wait_seconds=0)
    first = shop.planned(source)
    assert shop.plan(source, first) is None
    run(shop, statements)
    assert message in refused(shop, source, SourceChanged, first)


# ------------------------------------------------------------------------------------- columns, views and other tables


def test_a_key_that_became_wider_is_read_on(shop: Shop) -> None:
    """Int to bigint, before the numbers run out: the order is the same."""
    run(shop, ["DROP TABLE orders", "CREATE TABLE orders (id serial PRIMARY KEY, name text, amount integer)"])
    shop.sell(20)
    first = shop.planned(ORDERS)
    run(shop, ["ALTER TABLE orders ALTER id TYPE bigint"])
    assert len(shop.rows(ORDERS, first)) == 20
    shop.sell(5)
    assert shop.ids(shop.planned(ORDERS, first)) == [21, 22, 23, 24, 25]


def test_a_view_that_shows_more_rows_than_before_is_noticed(shop: Shop) -> None:
    """The additional rows have keys that were missing."""
    shop.execute("CREATE VIEW goods AS SELECT id, name, amount FROM orders WHERE amount % 2 = 0")
    shop.sell(20)
    goods = replace(ORDERS, table="goods")
    first = shop.planned(goods)
    shop.execute("CREATE OR REPLACE VIEW goods AS SELECT id, name, amount FROM orders")
    assert "10 row(s) with keys that were missing" in refused(shop, goods, SourceChanged, first)


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_columns_that_are_not_declared_need_no_grant(shop: Shop, source: PostgresTable) -> None:
    """Grants per column are enough; a missing grant is named."""
    shop.sell(5)
    columns = ", ".join(source.schema)
    run(shop, ["REVOKE SELECT ON orders FROM tidegate_stager", "ALTER TABLE orders ADD secret text DEFAULT 'x'"])
    run(shop, [f"GRANT SELECT ({columns}) ON orders TO tidegate_stager"])
    first = shop.planned(source)
    assert len(shop.rows(source, first)) == 5
    shop.sell(1)
    if source is DATED:
        assert "GRANT SELECT (xmin)" in refused(shop, source, AccessRefused, first)
        run(shop, ["GRANT SELECT (xmin) ON orders TO tidegate_stager"])
    assert len(shop.rows(source, shop.planned(source, first))) == 1


def test_tables_whose_rows_come_in_another_order_are_refused(shop: Shop) -> None:
    """A subscription applies its publisher's commits in their order, and a foreign table's writers cannot be seen."""
    first = shop.sold(20)
    with closing(psycopg2.connect(**shop.settings.conninfo(user="postgres"))) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute("CREATE SUBSCRIPTION copies CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false)")
        cursor.execute(
            "INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate)"
            " SELECT oid, 'orders'::regclass, 'r' FROM pg_subscription WHERE subname = 'copies'"
        )
        try:
            assert "which a subscription fills" in refused(shop, ORDERS, SourceUnreadable, first)
            assert "which a subscription fills" in refused(shop, DRAWN, SourceUnreadable, first)
        finally:
            cursor.execute("DELETE FROM pg_subscription_rel")
            cursor.execute("ALTER SUBSCRIPTION copies DISABLE")
            cursor.execute("ALTER SUBSCRIPTION copies SET (slot_name = NONE)")
            cursor.execute("DROP SUBSCRIPTION copies")
        cursor.execute("CREATE FOREIGN DATA WRAPPER elsewhere")
        cursor.execute("CREATE SERVER elsewhere FOREIGN DATA WRAPPER elsewhere")
        cursor.execute("ALTER TABLE orders RENAME TO sold")
        cursor.execute("CREATE FOREIGN TABLE orders (id bigint, name text, amount integer) SERVER elsewhere")
        cursor.execute("GRANT SELECT ON orders TO tidegate_stager")
    assert "foreign" in refused(shop, ORDERS, SourceUnreadable, first)


@pytest.mark.parametrize(
    ("writer", "newest", "is_old"),
    [
        (2, 2**32 + 100, True),
        (3, 2**32 + 100, True),
        (49, 2**32 + 100, True),
        (50, 2**32 + 100, False),
        (99, 2**32 + 100, False),
        (101, 2**32 + 100, True),
        (2**32 - 1, 2**32 + 100, True),
        (2**32 - 1, 2**33 + 10, False),
    ],
)
def test_transaction_numbers_are_compared_across_their_wraparound(shop: Shop, writer: int, newest: int, is_old: bool) -> None:
    """A row has 32 bits of its number; they mean the last number with these bits that is not above the server's."""
    statement = sql.SQL("SELECT {} FROM (VALUES (%s::bigint, %s::bigint)) AS r (x, newest)")
    condition = visible(f"{2**32 + 50}:{2**32 + 50}:")
    assert shop.execute(statement.format(condition), [writer, newest]) == [(is_old,)]
