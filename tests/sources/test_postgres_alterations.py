"""PostgresTable notices alterations between two plans: it refuses those that could lose rows, and reads on after others."""

from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest
from psycopg2 import sql

from tests.sources.shop import DATED, DRAWN, ORDERS, Shop, meanwhile, refused
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.postgres import seen_by_plans
from tidegate.state_store.base.errors import AccessRefused, SourceChanged, SourceUnreadable, TidegateError

GOODS = replace(ORDERS, table="goods")
WORDS = PostgresTable(table="words", key="code", schema={"code": "string"}, key_is_drawn=True, wait_seconds=0)

# Partitioned by year; and old orders that could be attached, with keys that were read: no gap and no newest range shows them.
PARTED = (
    "DROP TABLE orders; CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, name text, amount integer,"
    " written timestamptz NOT NULL DEFAULT now(), year integer NOT NULL DEFAULT 2025) PARTITION BY LIST (year); "
    "CREATE TABLE orders_2025 PARTITION OF orders FOR VALUES IN (2025)"
)
LOAD = (
    "CREATE TABLE orders_2024 (LIKE orders); INSERT INTO orders_2024"
    " SELECT n, 'old', n, '2024-05-01'::timestamptz + n * interval '1 s', 2024 FROM (SELECT {} AS n) AS ids"
)
LOADED = LOAD.format("generate_series(1, 5)")
ATTACH = "ALTER TABLE orders ATTACH PARTITION orders_2024 FOR VALUES IN (2024)"
HIDDEN = f"{LOADED}; REVOKE SELECT ON orders_2024 FROM tidegate_stager; {ATTACH}"
ATTACHED = r"partition orders_2024 was attached .* 5 row\(s\) .*keeps_position=True"
OWN_SEQUENCE = "CREATE SEQUENCE mine; CREATE TABLE orders_2024 (LIKE orders); ALTER TABLE orders_2024 ALTER id SET DEFAULT"

SELL = "INSERT INTO orders (name, amount) SELECT 'new', n FROM generate_series(1, {}) AS n"
AGAIN = "DELETE FROM orders WHERE id < 20; ALTER SEQUENCE orders_id_seq RESTART 1; " + SELL.format(19)
FAMILY = (
    "CREATE TABLE old (LIKE orders); CREATE TABLE older () INHERITS (old); INSERT INTO older (id, written) VALUES (-1, now())"
)
OTHER_SEQUENCE = (
    "CREATE SEQUENCE other START 15; ALTER TABLE orders ALTER id DROP IDENTITY, ALTER id SET DEFAULT nextval('other')"
)
OTHER_SCHEMA = (
    "CREATE SCHEMA tidegate_stager; CREATE TABLE tidegate_stager.orders (LIKE public.orders INCLUDING ALL); "
    "GRANT USAGE ON SCHEMA tidegate_stager TO tidegate_stager; GRANT SELECT ON tidegate_stager.orders TO tidegate_stager"
)
POLICY = (
    "ALTER TABLE orders ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; CREATE POLICY few ON orders USING (amount < 3)"
)
VIEW = "CREATE VIEW goods AS SELECT id, name, amount FROM orders WHERE amount % 2 = 0"
ALL_IN_VIEW = "CREATE OR REPLACE VIEW goods AS SELECT id, name, amount FROM orders"
IN_PLACE = "ALTER TABLE orders RENAME TO sold; CREATE VIEW orders AS SELECT id - 5 AS id, name, amount FROM sold"
CREATE_WORDS = "CREATE TABLE words (code text PRIMARY KEY); INSERT INTO words VALUES ('a'), ('c'), ('e')"
LATE_WORD = "INSERT INTO words VALUES ('b')"

# What could hide rows: the source, statements before its first plan and after it, and how the next plan refuses.
REFUSED: dict[str, tuple[PostgresTable, str, str, type[TidegateError], str]] = {
    "attached": (ORDERS, PARTED, f"{LOADED}; {ATTACH}", SourceChanged, ATTACHED),
    "attached, by time": (DATED, PARTED, f"{LOADED}; {ATTACH}", SourceChanged, ATTACHED),
    "attached, readable through its parent": (ORDERS, PARTED, HIDDEN, SourceChanged, ATTACHED),
    "a partition's own sequence": (ORDERS, PARTED, f"{OWN_SEQUENCE} nextval('mine'); {ATTACH}", SourceUnreadable, "mine"),
    "a family that became a child": (ORDERS, FAMILY, "ALTER TABLE old INHERIT orders", SourceChanged, "older was attached"),
    "a family, by time": (DATED, FAMILY, "ALTER TABLE old INHERIT orders", SourceChanged, "older was attached"),
    "drawn twice": (
        *(ORDERS, "", f"{AGAIN}; SELECT nextval('orders_id_seq'); {SELL.format(1)}", SourceChanged),
        r"19 row\(s\) with such keys were written since, such as 1",  # of equal number; only their writers differ
    ),
    "a view shows more": (GOODS, VIEW, ALL_IN_VIEW, SourceChanged, r"view public\.goods was another one"),
    "a late word": (WORDS, CREATE_WORDS, LATE_WORD, SourceChanged, r"has 4 row\(s\) up to e, but 3 when this was planned"),
    "another word": (WORDS, CREATE_WORDS, f"DELETE FROM words WHERE code = 'c'; {LATE_WORD}", SourceChanged, "with other keys"),
    **{
        name: (ORDERS, "", statements, error, message)
        for name, statements, error, message in [
            ("counts down", "ALTER SEQUENCE orders_id_seq INCREMENT -1 MINVALUE -100", SourceUnreadable, "counts down"),
            ("starts over", "ALTER SEQUENCE orders_id_seq MAXVALUE 30 CYCLE", SourceUnreadable, "starts over"),
            ("unlogged", "ALTER TABLE orders SET UNLOGGED", SourceUnreadable, "orders_id_seq is unlogged"),
            ("set back", "SELECT setval('orders_id_seq', 10)", SourceChanged, "is at 10, but rows up to 20 were read"),
            ("begins again", f"TRUNCATE orders RESTART IDENTITY; {SELL.format(7)}", SourceChanged, "generation"),
            ("has caught up", f"TRUNCATE orders RESTART IDENTITY; {SELL.format(27)}", SourceChanged, "orders_id_seq"),
            ("by hand", "INSERT INTO orders (id) VALUES (500)", SourceChanged, "key 500, but sequence orders_id_seq is at 20"),
            ("changed", "UPDATE orders SET id = 900 WHERE id = 20", SourceChanged, "key 900, but sequence"),
            ("another sequence", OTHER_SEQUENCE, SourceChanged, "sequence other is at 14"),
            (
                *("another column", "ALTER TABLE orders RENAME id TO old; ALTER TABLE orders ADD id bigserial"),
                *(SourceChanged, "what is called id is not the column"),
            ),
            ("renamed", "ALTER TABLE orders RENAME id TO number", SourceUnreadable, 'column "id" does not exist'),
            ("a view in its place", IN_PLACE, SourceChanged, "a view has taken the table's place"),
            ("another schema", OTHER_SCHEMA, SourceChanged, "another one has taken its place"),
            ("a policy", POLICY, AccessRefused, "row-level security"),
        ]
    },
}
NEW_YEAR = (
    "CREATE TABLE orders_2026 PARTITION OF orders FOR VALUES IN (2026) PARTITION BY RANGE (id); "
    "CREATE TABLE orders_2026_1 PARTITION OF orders_2026 FOR VALUES FROM (0) TO (1000); "
    "ALTER TABLE orders DETACH PARTITION orders_2025; ALTER TABLE orders ALTER year SET DEFAULT 2026"
)
CHILD = "CREATE TABLE all_of_it (LIKE orders); ALTER TABLE orders INHERIT all_of_it"
SERIAL = "DROP TABLE orders; CREATE TABLE orders (id serial PRIMARY KEY, name text, amount integer)"
REWRITTEN = (
    "ALTER TABLE orders ALTER amount TYPE integer USING amount + 0; ALTER TABLE orders ADD u uuid DEFAULT gen_random_uuid()"
)
# What hides no row: the source, and statements before and after its first plan.
READ_ON: dict[str, tuple[PostgresTable, str, str]] = {
    "a new partition": (ORDERS, PARTED, NEW_YEAR),
    "a new partition, by time": (DATED, PARTED, NEW_YEAR),
    "a child of another": (ORDERS, "", CHILD),
    "a child of another, by time": (DATED, "", CHILD),
    "a wider key": (ORDERS, SERIAL, "ALTER TABLE orders ALTER id TYPE bigint"),
    "written again, by time": (DATED, "", REWRITTEN),
    **{
        statements: (ORDERS, "", statements)
        for statements in [
            "DELETE FROM orders WHERE id < 15; UPDATE orders SET name = 'exported'",
            "ALTER SEQUENCE orders_id_seq RESTART 1000",
            "ALTER SEQUENCE orders_id_seq MAXVALUE 100000 CACHE 1",
            "ALTER TABLE orders ALTER id SET GENERATED ALWAYS",
            "ALTER SEQUENCE orders_id_seq RENAME TO drawn",
            "VACUUM FULL orders; ALTER SEQUENCE orders_id_seq CACHE 1",
            "TRUNCATE orders; ALTER SEQUENCE orders_id_seq CACHE 1",
            "DELETE FROM orders WHERE id < 15; ALTER SEQUENCE orders_id_seq RESTART 50",
        ]
    },
}


def first_of(shop: Shop, source: PostgresTable, before: str) -> dict:
    """Make the tables, sell 20 orders, and return the first batch's metadata."""
    shop.run(before or "SELECT 1")
    shop.sell(20)
    return shop.planned(source)


@pytest.mark.parametrize("how", REFUSED)
def test_what_could_hide_rows_is_refused(shop: Shop, how: str) -> None:
    """Of the key's sequence, its column, partitions, or what has the table's name: before a row is lost."""
    source, before, after, error, message = REFUSED[how]
    first = first_of(shop, source, before)
    assert source is not WORDS or shop.plan(source, first) is None
    shop.run(after)
    refused(shop, source, error, first, message)


@pytest.mark.parametrize("how", READ_ON)
def test_what_hides_no_row_is_read_on(shop: Shop, how: str) -> None:
    """The next batch has exactly the rows that are sold then; those that were read may have gone."""
    source, before, after = READ_ON[how]
    first = first_of(shop, source, before)
    shop.run(after)
    assert shop.plan(source, first) is None
    shop.sell(3)
    sold = sorted(row for (row,) in shop.execute("SELECT id FROM orders ORDER BY id DESC LIMIT 3"))
    second = shop.planned(source, first)
    assert shop.ids(second, ", ".join(source.selection.key)) == sold
    assert min(sold) > 20
    assert second["rows"] == 3


LATE = (DATED, "", "UPDATE orders SET amount = 99 WHERE id = 1", r" 1 row\(s\)")
TWICE = (ORDERS, "", f"{AGAIN}; SELECT nextval('orders_id_seq') FROM generate_series(20, 21)", r"19 row\(s\) .* such as 1")
BY_ID, BY_TIME = (ORDERS, f"{PARTED}; {LOADED}", ATTACH, ATTACHED), (DATED, f"{PARTED}; {LOADED}", ATTACH, ATTACHED)


@pytest.mark.parametrize(
    ("step", "case"),
    [
        *((step, BY_ID) for step in ("settled_by_sequence", "snapshot_of", "gaps_of")),
        *((step, BY_TIME) for step in ("settled_by_clock", "snapshot_of", "attached")),
        ("settled_by_sequence", TWICE),
        ("settled_by_clock", LATE),
    ],
)
def test_what_could_hide_rows_while_a_plan_works_is_refused(
    shop: Shop, step: str, case: tuple[PostgresTable, str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes between the plan's statements; the next plan would take it for read."""
    source, before, statements, message = case
    first = first_of(shop, source, before)
    shop.sell(1)
    meanwhile(monkeypatch, step, lambda: shop.run(statements))
    refused(shop, source, SourceChanged, first, message)


@pytest.mark.parametrize("savepoint", ["SELECT 1", "SAVEPOINT s", "SAVEPOINT s; CREATE TABLE o (); RELEASE s; SAVEPOINT t"])
@pytest.mark.parametrize("case", [BY_ID, BY_TIME, LATE], ids=["attached", "attached, by time", "written without its time"])
def test_what_is_open_during_a_plan_is_not_passed_by(
    shop: Shop, savepoint: str, case: tuple[PostgresTable, str, str, str]
) -> None:
    """A savepoint writes by a subtransaction, which a snapshot of Postgres does not list as open."""
    source, before, statement, message = case
    first = first_of(shop, source, before)
    shop.sell(3)
    session = shop.session()
    session.execute(f"BEGIN; {savepoint}; {statement}")
    shop.execute("CREATE TABLE later ()")
    second = shop.plan(source, first)
    assert second is None or shop.plan(source, second) is None
    assert source is ORDERS or second
    session.execute("COMMIT")
    shop.sell(1)
    refused(shop, source, SourceChanged, second or first, message)


def test_a_transaction_that_metadata_cannot_list_counts_as_open(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had begun before the plan draws from a sequence that is restarted after it."""
    monkeypatch.setattr(seen_by_plans, "OPEN", 0)
    first = first_of(shop, ORDERS, "")
    session = shop.session()
    session.execute("BEGIN; CREATE TABLE o ()")
    shop.sell(3)
    second = shop.planned(ORDERS, first)
    shop.run("DELETE FROM orders WHERE id < 20; ALTER SEQUENCE orders_id_seq RESTART 1")
    session.execute(f"{SELL.format(19)}; COMMIT; SELECT nextval('orders_id_seq') FROM generate_series(20, 24)")
    refused(shop, ORDERS, SourceChanged, second, "such as 1:")


@pytest.mark.promise("I12", "limit:OPEN")
def test_rows_are_planned_by_time_once_all_open_transactions_can_be_listed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another database have no part in the time up to which rows are settled."""
    first = first_of(shop, DATED, "")
    with closing(psycopg2.connect(**shop.settings.conninfo(user="postgres") | {"dbname": "postgres"})) as elsewhere:
        elsewhere.cursor().execute("SELECT pg_current_xact_id()")
        shop.sell(3)
        with monkeypatch.context() as patch:
            patch.setattr(seen_by_plans, "OPEN", 0)
            assert shop.plan(DATED, first) is None
        second = shop.planned(DATED, first)
        assert (second["rows"], shop.plan(DATED, second)) == (3, None)


def test_a_partition_with_new_rows_may_be_attached_while_a_plan_works(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are in the range that is cut just then, so they were not passed by; and the next plan knows this."""
    first = first_of(shop, ORDERS, PARTED)
    shop.run(LOAD.format("nextval('orders_id_seq')"))
    shop.sell()
    with monkeypatch.context() as patch:
        meanwhile(patch, "gaps_of", lambda: shop.run(ATTACH))
        second = shop.planned(ORDERS, first)
    assert (shop.ids(second), second["rows"]) == ([21, 22], 2)
    assert shop.plan(ORDERS, second) is None
    shop.sell()
    assert shop.ids(shop.planned(ORDERS, second)) == [23]


def test_tables_whose_rows_come_in_another_order_are_refused(shop: Shop) -> None:
    """A subscription applies its publisher's commits in their order, and a foreign table's writers cannot be seen."""
    first = shop.sold(20)
    with closing(psycopg2.connect(**shop.settings.conninfo(user="postgres"))) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute("CREATE SUBSCRIPTION s CONNECTION 'dbname=x' PUBLICATION p WITH (connect = false, slot_name = NONE)")
        cursor.execute("INSERT INTO pg_subscription_rel SELECT oid, 'orders'::regclass, 'r' FROM pg_subscription")
        try:
            for source in (ORDERS, DRAWN):
                refused(shop, source, SourceUnreadable, first, "which a subscription fills")
        finally:
            cursor.execute("DELETE FROM pg_subscription_rel; DROP SUBSCRIPTION s")
        cursor.execute("CREATE FOREIGN DATA WRAPPER elsewhere; CREATE SERVER elsewhere FOREIGN DATA WRAPPER elsewhere")
        cursor.execute("ALTER TABLE orders RENAME TO sold")
        cursor.execute("CREATE FOREIGN TABLE orders (id bigint, name text, amount integer) SERVER elsewhere")
        cursor.execute("GRANT SELECT ON orders TO tidegate_stager")
    refused(shop, ORDERS, SourceUnreadable, first, "foreign")


def test_transaction_numbers_are_compared_across_their_wraparound(shop: Shop) -> None:
    """A row has 32 bits of its number; they mean the last number with these bits that is not above the server's."""
    statement = sql.SQL("SELECT {} FROM (VALUES (%s::bigint, %s::bigint)) AS r (x, newest)")
    condition = seen_by_plans.visible(f"{2**32 + 50}:{2**32 + 50}:")
    newest = 2**32 + 100
    old = [(2, newest), (3, newest), (49, newest), (101, newest), (2**32 - 1, newest)]
    for case in [*old, (50, newest), (99, newest), (2**32 - 1, 2**33 + 10)]:
        assert shop.execute(statement.format(condition), case) == [(case in old,)], case
