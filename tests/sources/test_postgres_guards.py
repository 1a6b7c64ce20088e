"""PostgresTable refuses tables whose rows it could miss, at first and when they are altered; each case once lost rows."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import psycopg2
import pytest
from psycopg2 import sql

from tests.sources.in_process import batches, meanwhile, raises
from tests.sources.shop import CREATE, DATED, DRAWN, ORDERS, Shop, by_query, refused
from tests.statements import execute
from tests.store import encode_metadata
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.postgres import plan as planning
from tidegate.jobs.sources.postgres import seen_by_plans
from tidegate.jobs.sources.postgres.read import read_part
from tidegate.state_store.base.errors import AccessRefused, MalformedRecord, SourceChanged, SourceUnavailable, SourceUnreadable

TEXTS = PostgresTable(table="orders", key="code", schema={"code": "string", "amount": "int"}, wait_seconds=0)
ODD = PostgresTable(table="odd", key="id", schema={"id": "decimal(10,0)"}, key_is_drawn=True)
WORDS = PostgresTable(table="words", key="code", schema={"code": "string"}, key_is_drawn=True, wait_seconds=0)
GOODS = replace(ORDERS, table="goods")
BOTH = by_query(ORDERS, "SELECT * FROM orders UNION ALL SELECT * FROM returns")


NOT_DRAWN = "ALTER TABLE orders ALTER id DROP IDENTITY"
UNDECLARED = "is not filled by a sequence.*key_is_drawn=True"
NO_KEY = "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ALTER id DROP IDENTITY, ALTER id DROP NOT NULL"
RETURNS = """CREATE TABLE returns (LIKE orders INCLUDING DEFAULTS); CREATE SEQUENCE returned;
    ALTER TABLE returns ALTER id SET DEFAULT nextval('returned')"""
TEXT_KEY = """DROP TABLE orders; CREATE SEQUENCE codes;
    CREATE TABLE orders (code {}, amount int); INSERT INTO orders DEFAULT VALUES"""
NO_ORDER = r'\("updated_at", "code"\).*key_is_drawn=True'
CACHED_BELOW = "CREATE VIEW goods AS SELECT id + 0 AS id, name, amount FROM orders; ALTER SEQUENCE orders_id_seq CACHE 2"
STORED = "ALTER TABLE orders RENAME TO sold; CREATE MATERIALIZED VIEW orders AS SELECT * FROM sold"
NUMERIC = (
    "ALTER TABLE orders ALTER id DROP IDENTITY; CREATE SEQUENCE orders_id_seq;"
    " ALTER TABLE orders ALTER id TYPE numeric, ALTER id SET DEFAULT nextval('orders_id_seq')"
)
NO_NUMBER = "CREATE TABLE odd (id numeric NOT NULL); INSERT INTO odd VALUES (1), ('NaN')"
MANY_FOR_ONE = "ALTER SEQUENCE orders_id_seq INCREMENT 50; SELECT nextval('orders_id_seq'); INSERT INTO orders (id) VALUES (7)"
BETWEEN = "CREATE TABLE odd (id numeric(12,2) DEFAULT nextval('orders_id_seq')); INSERT INTO odd VALUES (0.50)"
NO_TIME = "ALTER TABLE orders ALTER written DROP NOT NULL; INSERT INTO orders (written) VALUES ({})"
POLICY = "ALTER TABLE orders ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON orders USING (amount < 3)"
# Open writers of tables within a function are not seen.
FUNCTION = """CREATE TABLE titles AS SELECT 'n1' AS name; CREATE SCHEMA "Late";
    CREATE FUNCTION {} RETURNS SETOF orders LANGUAGE """
PLPGSQL = FUNCTION.format("recent()") + "plpgsql STABLE AS $$ BEGIN RETURN QUERY SELECT * FROM orders;END $$"
VOLATILE = FUNCTION.format("recent()") + "sql VOLATILE AS $$ SELECT * FROM orders $$"
QUOTED = FUNCTION.format('"Late"."Re(c)"(n int)') + "sql STABLE SECURITY DEFINER AS $$ SELECT * FROM orders $$"
OVER_FUNCTION = "CREATE VIEW goods AS SELECT r.* FROM recent() AS r JOIN titles USING (name)"
CALLED = """SELECT r.* FROM "Late"."Re(c)"(length('it''s (')) AS r JOIN titles USING (name)"""
HOURLY = """CREATE FUNCTION hourly(timestamptz) RETURNS timestamptz LANGUAGE plpgsql AS
    $$ BEGIN RETURN date_trunc('hour', $1);END $$"""
# Queries whose rows depend on others: what comes later would change what was read, or would never be read.
ACROSS_ROWS = (
    "SELECT * FROM orders LIMIT 3",
    "SELECT * FROM (SELECT DISTINCT id, name, amount FROM orders OFFSET 1) AS few WHERE id > 0",
    "SELECT id / 10 AS id, 'ten' AS name, count(*)::int AS amount FROM orders GROUP BY 1",
    "SELECT row_number() OVER (ORDER BY id) AS id, name, amount FROM orders",
)
# What gives other rows, or values, each time.
VARYING = {
    "SELECT * FROM orders TABLESAMPLE BERNOULLI (50)": "a TABLESAMPLE",
    "SELECT * FROM orders WHERE random() < 0.5": r"random\(\)",
    "SELECT * FROM orders WHERE id < extract(epoch FROM now())": r"now\(\)",
    "SELECT id, name || CURRENT_DATE AS name, amount FROM orders": "CURRENT_DATE",
    "SELECT id, name, amount FROM orders, (SELECT clock_timestamp() AS at OFFSET 0) AS c WHERE written < at": "clock",
    "SELECT * FROM orders WHERE written <= 'now'": "'now' as a time",
    "SELECT * FROM orders WHERE '[2020-01-01,today]'::tstzrange @> written": r"'\[2020-01-01,today\]' as a time",
    """SELECT * FROM orders WHERE "name" <> 'it''s now' /* ' */ AND written < cast($t$ ToMorrow$t$ AS date)""": r"\$t\$ ToM",
    "SELECT id, ('yesterday'::text)::timestamptz::text AS name, amount FROM orders": "'yesterday' as a time",
}
# Times that are rounded to more than a day, shifted, or rounded in a way that cannot be known.
TOO_FAR = (
    *("date_trunc('week', written)", "date_trunc('Year', written, 'UTC')", "date_trunc(name, written)", "hourly(written)"),
    *("date_bin('2 days', written, '2000-01-01')", "written - interval '1 hour'", "written::timestamp::timestamptz"),
    "to_char(written, 'YYYY-MM-DD HH24:00')::timestamptz",
)
DATED_BY = "SELECT id, name, amount, {} AS written FROM orders"

# After a row was sold: the source, statements, the error, and what its line matches.
UNSAFE: list[tuple[PostgresTable, str, type[Exception], str]] = [
    (ORDERS, "INSERT INTO orders (id) VALUES (9)", SourceChanged, r"key 9, but .* is at 1.*setval\('orders_id_seq', 9\)"),
    (ORDERS, MANY_FOR_ONE, SourceChanged, "key 7, .* INCREMENT 50"),  # as object mappers draw
    (ODD, BETWEEN, SourceChanged, r"key 0\.50, which .* does not hand out"),
    (ORDERS, f"{NO_KEY}; INSERT INTO orders DEFAULT VALUES", MalformedRecord, r"1 row\(s\) in which id IS NULL"),
    (ODD, NO_NUMBER, MalformedRecord, r"1 row\(s\) in which id is"),  # later rows would be below it
    (DATED, NO_TIME.format("NULL"), MalformedRecord, r"1 row\(s\) in which written IS NULL"),
    (DATED, NO_TIME.format("'infinity'"), MalformedRecord, r"1 row\(s\) in which written is infinite"),
    (ORDERS, "REVOKE SELECT ON orders FROM tidegate_stager", AccessRefused, "GRANT SELECT"),
    (ORDERS, "REVOKE ALL ON SEQUENCE orders_id_seq FROM tidegate_stager", AccessRefused, "GRANT SELECT ON SEQUENCE orders_id"),
    *((source, POLICY, AccessRefused, "row-level security.*BYPASSRLS") for source in (ORDERS, DATED)),
    (ORDERS, "ALTER SEQUENCE orders_id_seq CACHE 20", SourceUnreadable, "orders_id_seq has CACHE 20.*CACHE 1, then reconnect"),
    (ORDERS, f"CREATE SEQUENCE mine CACHE 5; {NOT_DRAWN}, ALTER id SET DEFAULT nextval('mine')", SourceUnreadable, "CACHE 5"),
    (GOODS, CACHED_BELOW, SourceUnreadable, "CACHE 2"),
    (ORDERS, NOT_DRAWN, SourceUnreadable, UNDECLARED),
    (ORDERS, f"{NOT_DRAWN}; CREATE SEQUENCE orders_id_seq OWNED BY orders.id", SourceUnreadable, UNDECLARED),
    (ORDERS, f"CREATE SEQUENCE mine; {NOT_DRAWN}, ALTER id SET DEFAULT -nextval('mine')", SourceUnreadable, "computes it"),
    (TEXTS, TEXT_KEY.format("text PRIMARY KEY DEFAULT 'A' || nextval('codes')"), SourceUnreadable, NO_ORDER),  # A10 < A9
    (TEXTS, TEXT_KEY.format("uuid PRIMARY KEY DEFAULT gen_random_uuid()"), SourceUnreadable, NO_ORDER),
    (BOTH, RETURNS, SourceUnreadable, "returned"),
    (ORDERS, f"{RETURNS}; ALTER TABLE returns INHERIT orders", SourceUnreadable, "returned"),
    (ORDERS, STORED, SourceUnreadable, "materialized"),
    (ORDERS, "ALTER TABLE orders RENAME TO sold", SourceUnreadable, "Table orders is not as declared"),
    (ORDERS, "ALTER TABLE orders DROP amount", SourceUnreadable, 'column "amount" does not exist'),
    (ORDERS, "ALTER TABLE orders ALTER amount TYPE numeric", SourceUnreadable, "numeric, which cannot be read as int"),
    (by_query(DRAWN, "SELECT * FROM recent()"), PLPGSQL, SourceUnreadable, "reads no table.*Write the function's query into"),
    (by_query(DRAWN, "SELECT (recent()).id, name, 1 AS amount FROM titles"), PLPGSQL, SourceUnreadable, r"calls recent\(\)"),
    (replace(DRAWN, table="goods"), f"{VOLATILE}; {OVER_FUNCTION}", SourceUnreadable, r"calls recent\(\)"),
    (by_query(DRAWN, CALLED), QUOTED, SourceUnreadable, r'calls "Late"\."Re\(c\)"\(integer\)'),
    *((by_query(DRAWN, query), "", SourceUnreadable, "changes as rows come, and is not read again") for query in ACROSS_ROWS),
    *((by_query(DRAWN, query), "", SourceUnreadable, f"has {why}.* it gives other") for query, why in VARYING.items()),
    *((by_query(DATED, DATED_BY.format(time)), HOURLY, SourceUnreadable, "time written is computed") for time in TOO_FAR),
    (DATED, "ALTER TABLE orders ALTER written SET DEFAULT date_trunc('month', now())", SourceUnreadable, r"by date_trunc\('m"),
]


@pytest.mark.promise("I12")
@pytest.mark.parametrize("case", UNSAFE, ids=lambda case: f"{case[0].table or case[0].query}: {case[1][:60]}")
def test_tables_that_would_lose_rows_are_refused(shop: Shop, case: tuple[PostgresTable, str, type[Exception], str]) -> None:
    source, statements, error, message = case
    shop.sell()
    shop.run(statements)
    refused(shop, source, error, message=message)
    if message == UNDECLARED:  # a trigger that draws the key is invisible, so its author declares it
        assert shop.plan(DRAWN)["rows"] == 1


def test_hidden_transactions_are_refused(shop: Shop) -> None:
    """Without pg_read_all_stats, or with track_activities = off, open transactions are invisible."""
    shop.sell()
    shop.run("GRANT SELECT ON orders TO tidegate_reader")
    reader = shop.settings.conninfo(user="tidegate_reader")
    refused(shop, replace(DATED, connection=reader), AccessRefused, message="GRANT pg_read_all_stats TO tidegate_reader")
    hidden = psycopg2.connect(**{**shop.settings.conninfo(user="postgres"), "options": "-c track_activities=off"})
    with closing(hidden):
        hidden.cursor().execute("SELECT 1")
        refused(shop, DATED, SourceUnreadable, message="track_activities")


# Partitioned by year; and old orders that could be attached, with keys that were read: no gap and no newest range shows them.
PARTED = """DROP TABLE orders; CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, name text, amount integer,
    written timestamptz NOT NULL DEFAULT now(), year integer NOT NULL DEFAULT 2025) PARTITION BY LIST (year);
    CREATE TABLE orders_2025 PARTITION OF orders FOR VALUES IN (2025)"""
LOAD = """CREATE TABLE orders_2024 (LIKE orders); INSERT INTO orders_2024
    SELECT n, 'old', n, '2024-05-01'::timestamptz + n * interval '1 s', 2024 FROM (SELECT {} AS n) AS ids"""
LOADED = LOAD.format("generate_series(1, 5)")
ATTACH = "ALTER TABLE orders ATTACH PARTITION orders_2024 FOR VALUES IN (2024)"
HIDDEN = f"{LOADED}; REVOKE SELECT ON orders_2024 FROM tidegate_stager; {ATTACH}"
ATTACHED = r"partition orders_2024 was attached .* 5 row\(s\) .*keeps_position=True"
OWN_SEQUENCE = "CREATE SEQUENCE mine; CREATE TABLE orders_2024 (LIKE orders); ALTER TABLE orders_2024 ALTER id SET DEFAULT"
SELL = "INSERT INTO orders (name, amount) SELECT 'new', n FROM generate_series(1, {}) AS n"
AGAIN = "DELETE FROM orders WHERE id < 20; ALTER SEQUENCE orders_id_seq RESTART 1; " + SELL.format(19)
FAMILY = """CREATE TABLE old (LIKE orders); CREATE TABLE older () INHERITS (old);
    INSERT INTO older (id, written) VALUES (-1, now())"""
OTHER_SEQUENCE = f"CREATE SEQUENCE other START 15; {NOT_DRAWN}, ALTER id SET DEFAULT nextval('other')"
OTHER_SCHEMA = """CREATE SCHEMA tidegate_stager; CREATE TABLE tidegate_stager.orders (LIKE public.orders INCLUDING ALL);
    GRANT USAGE ON SCHEMA tidegate_stager TO tidegate_stager; GRANT SELECT ON tidegate_stager.orders TO tidegate_stager"""
VIEW = "CREATE VIEW goods AS SELECT id, name, amount FROM orders WHERE amount % 2 = 0"
ALL_IN_VIEW = "CREATE OR REPLACE VIEW goods AS SELECT id, name, amount FROM orders"
IN_PLACE = "ALTER TABLE orders RENAME TO sold; CREATE VIEW orders AS SELECT id - 5 AS id, name, amount FROM sold"
OTHER_COLUMN = "ALTER TABLE orders RENAME id TO old; ALTER TABLE orders ADD id bigserial"
CREATE_WORDS = "CREATE TABLE words (code text{} PRIMARY KEY); INSERT INTO words VALUES ('a'), ('c'), ('e')"
LATE_WORD = "INSERT INTO words VALUES ('b')"
IN_POSIX, OTHER_ORDER = CREATE_WORDS.format(' COLLATE "POSIX"'), 'ALTER TABLE words ALTER code TYPE text COLLATE "C"'
REORDERED = r'key column code had collation "POSIX".* now it has "C"'
COLLATION = "CREATE COLLATION ours (provider = libc, locale = '{}')"
IN_OURS = f"{COLLATION.format('C')}; {CREATE_WORDS.format(' COLLATE ours')}"
OTHER_OURS = f"""ALTER COLLATION ours RENAME TO older; {COLLATION.format("POSIX")};
    ALTER TABLE words ALTER code TYPE text COLLATE ours"""

# What could hide rows: the source, statements before its first plan and after it, and how the next plan refuses.
ALTERED: list[tuple[PostgresTable, str, str, type[Exception], str]] = [
    (ORDERS, PARTED, f"{OWN_SEQUENCE} nextval('mine'); {ATTACH}", SourceUnreadable, "mine"),
    (ORDERS, "", "ALTER SEQUENCE orders_id_seq INCREMENT -1 MINVALUE -100", SourceUnreadable, "counts down"),
    (ORDERS, "", "ALTER SEQUENCE orders_id_seq MAXVALUE 30 CYCLE", SourceUnreadable, "starts over"),
    (ORDERS, "", "ALTER TABLE orders SET UNLOGGED", SourceUnreadable, "orders_id_seq is unlogged"),
    *((source, PARTED, f"{LOADED}; {ATTACH}", SourceChanged, ATTACHED) for source in (ORDERS, DATED)),
    (ORDERS, PARTED, HIDDEN, SourceChanged, ATTACHED),  # readable through its parent
    *((source, FAMILY, "ALTER TABLE old INHERIT orders", SourceChanged, "older was attached") for source in (ORDERS, DATED)),
    # Of equal number; only their writers differ.
    (ORDERS, "", f"{AGAIN}; SELECT nextval('orders_id_seq'); {SELL.format(1)}", SourceChanged, r"19 row\(s\) .* such as 1"),
    (GOODS, VIEW, ALL_IN_VIEW, SourceChanged, r"view public\.goods was another one when rows were read.*generation=2"),
    (WORDS, CREATE_WORDS.format(""), LATE_WORD, SourceChanged, r"has 4 row\(s\) up to e, but 3 when this was planned"),
    (WORDS, CREATE_WORDS.format(""), f"DELETE FROM words WHERE code = 'c'; {LATE_WORD}", SourceChanged, "with other keys"),
    (WORDS, IN_POSIX, OTHER_ORDER, SourceChanged, REORDERED),
    (by_query(WORDS, "SELECT lower(code) AS code FROM words"), IN_POSIX, OTHER_ORDER, SourceChanged, REORDERED),
    (WORDS, IN_OURS, OTHER_OURS, SourceChanged, "key column code had collation ours"),  # of the same name and version
    (ORDERS, "", "SELECT setval('orders_id_seq', 10)", SourceChanged, "is at 10, but rows up to 20 were read"),
    (ORDERS, "", f"TRUNCATE orders RESTART IDENTITY; {SELL.format(7)}", SourceChanged, "generation"),
    (ORDERS, "", f"TRUNCATE orders RESTART IDENTITY; {SELL.format(27)}", SourceChanged, "orders_id_seq"),
    (ORDERS, "", "UPDATE orders SET id = 900 WHERE id = 20", SourceChanged, "key 900, but sequence"),
    (ORDERS, "", OTHER_SEQUENCE, SourceChanged, "sequence other is at 14"),
    (ORDERS, "", OTHER_COLUMN, SourceChanged, "what is called id is not the column"),
    (ORDERS, "", IN_PLACE, SourceChanged, "a view has taken the table's place"),
    (ORDERS, "", OTHER_SCHEMA, SourceChanged, "another one has taken its place"),
    (ORDERS, "", f"DROP TABLE orders; {CREATE}; {SELL.format(27)}", SourceChanged, "table orders was dropped"),
]
NEW_YEAR = """CREATE TABLE orders_2026 PARTITION OF orders FOR VALUES IN (2026) PARTITION BY RANGE (id);
    CREATE TABLE orders_2026_1 PARTITION OF orders_2026 FOR VALUES FROM (0) TO (1000);
    ALTER TABLE orders DETACH PARTITION orders_2025; ALTER TABLE orders ALTER year SET DEFAULT 2026"""
REWRITTEN = """ALTER TABLE orders ALTER amount TYPE integer USING amount + 0;
    ALTER TABLE orders ADD u uuid DEFAULT gen_random_uuid()"""
SERIAL = "DROP TABLE orders; CREATE TABLE orders (id serial PRIMARY KEY, name text, amount integer)"
NO_CLOCK = """name NOT IN ('now', $$today$$) AND written > 'epoch' -- not 'now'
    AND 'late'::day <> 'today' AND '{"at": "now"}'::jsonb <> '"now"'"""
# What hides no row: the source, and statements before and after its first plan.
READ_ON: list[tuple[PostgresTable, str, str]] = [
    *((source, PARTED, NEW_YEAR) for source in (ORDERS, DATED)),
    (ORDERS, SERIAL, "ALTER TABLE orders ALTER id TYPE bigint"),
    (DATED, "", REWRITTEN),
    (by_query(DRAWN, "SELECT id, name, amount FROM orders WHERE name <> 'now()' AND lower(name) <> 'CURRENT_DATE'"), "", ""),
    (by_query(DRAWN, f"SELECT id, name, amount FROM orders WHERE {NO_CLOCK}"), "CREATE TYPE day AS ENUM ('today', 'late')", ""),
    (GOODS, ALL_IN_VIEW, f"DROP VIEW goods; {ALL_IN_VIEW.replace('FROM', ' FROM ')}"),
    (ORDERS, "", "CREATE TABLE all_of_it (LIKE orders); ALTER TABLE orders INHERIT all_of_it"),
    (ORDERS, "", "DELETE FROM orders WHERE id < 15; UPDATE orders SET name = 'exported'"),
    (ORDERS, "", "DELETE FROM orders WHERE id < 15; ALTER SEQUENCE orders_id_seq RESTART 50"),
    (ORDERS, "", "ALTER TABLE orders ALTER id SET GENERATED ALWAYS"),
    (ORDERS, "", "ALTER SEQUENCE orders_id_seq RENAME TO drawn"),
    (ORDERS, "", "VACUUM FULL orders; ALTER SEQUENCE orders_id_seq CACHE 1"),
    (ORDERS, "", "TRUNCATE orders; ALTER SEQUENCE orders_id_seq CACHE 1"),
]


def first_of(shop: Shop, source: PostgresTable, before: str) -> Any:
    shop.run(before)
    shop.sell(20)
    return shop.plan(source)


@pytest.mark.promise("I11")
@pytest.mark.parametrize("case", ALTERED, ids=lambda case: f"{case[0].table or case[0].query}: {case[2][:60]}")
def test_what_could_hide_rows_is_refused(shop: Shop, case: tuple[PostgresTable, str, str, type[Exception], str]) -> None:
    """Of the key's sequence, its column and its order, partitions, or what has the table's name: before a row is lost."""
    source, before, after, error, message = case
    first = first_of(shop, source, before)
    assert "words" not in before or shop.plan(source, first) is None
    shop.run(after)
    refused(shop, source, error, first, message)


@pytest.mark.parametrize(("source", "before", "after"), READ_ON)
def test_what_hides_no_row_is_read_on(shop: Shop, source: PostgresTable, before: str, after: str) -> None:
    first = first_of(shop, source, before)
    shop.run(after)
    assert shop.plan(source, first) is None
    shop.sell(3)
    sold = sorted(row for (row,) in shop.execute("SELECT id FROM orders ORDER BY id DESC LIMIT 3"))
    assert shop.ids(source, shop.plan(source, first)) == sold
    assert min(sold) > 20


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
def test_what_could_hide_rows_while_a_plan_works_is_refused(shop: Shop, step: str, case: tuple) -> None:
    """Wherever it comes between the plan's statements; the next plan would take it for read."""
    source, before, statements, message = case
    first = first_of(shop, source, before)
    shop.sell(1)
    with meanwhile(planning, step, lambda: shop.run(statements)):
        refused(shop, source, SourceChanged, first, message)


@pytest.mark.parametrize("savepoint", ["SELECT 1", "SAVEPOINT s", "SAVEPOINT s; CREATE TABLE o (); RELEASE s; SAVEPOINT t"])
@pytest.mark.parametrize("case", [BY_ID, BY_TIME, LATE], ids=["attached", "attached, by time", "written without its time"])
def test_what_is_open_during_a_plan_is_not_passed_by(shop: Shop, savepoint: str, case: tuple) -> None:
    """A savepoint writes by a subtransaction, which a snapshot of Postgres does not list as open."""
    source, before, statement, message = case
    first = first_of(shop, source, before)
    shop.sell(3)
    session = shop.session(f"{savepoint}; {statement}")
    shop.execute("CREATE TABLE later ()")
    second = shop.plan(source, first)
    assert second is None or shop.plan(source, second) is None
    assert source is ORDERS or second
    session.execute("COMMIT")
    shop.sell(1)
    refused(shop, source, SourceChanged, second or first, message)


@patch.object(seen_by_plans, "OPEN", 0)
def test_a_transaction_that_metadata_cannot_list_counts_as_open(shop: Shop) -> None:
    """One that had begun before the plan draws from a sequence that is restarted after it."""
    first = first_of(shop, ORDERS, "")
    session = shop.session("CREATE TABLE o ()")
    shop.sell(3)
    second = shop.plan(ORDERS, first)
    shop.run("DELETE FROM orders WHERE id < 20; ALTER SEQUENCE orders_id_seq RESTART 1")
    session.execute(f"{SELL.format(19)}; COMMIT; SELECT nextval('orders_id_seq') FROM generate_series(20, 24)")
    refused(shop, ORDERS, SourceChanged, second, "such as 1:")


@pytest.mark.promise("I12", "limit:OPEN")
def test_rows_are_planned_by_time_once_all_open_transactions_can_be_listed(shop: Shop) -> None:
    """Those of another database have no part in the time up to which rows are settled."""
    first = first_of(shop, DATED, "")
    with closing(psycopg2.connect(**shop.settings.conninfo(user="postgres") | {"dbname": "postgres"})) as elsewhere:
        elsewhere.cursor().execute("SELECT pg_current_xact_id()")
        shop.sell(3)
        with patch.object(seen_by_plans, "OPEN", 0):
            assert shop.plan(DATED, first) is None
        second = shop.plan(DATED, first)
        assert (second["rows"], shop.plan(DATED, second)) == (3, None)


def test_a_partition_with_new_rows_may_be_attached_while_a_plan_works(shop: Shop) -> None:
    """Its rows are in the range that is cut just then, so they were not passed by; and the next plan knows this."""
    first = first_of(shop, ORDERS, PARTED)
    shop.run(LOAD.format("nextval('orders_id_seq')"))
    shop.sell()
    with meanwhile(planning, "gaps_of", lambda: shop.run(ATTACH)):
        second = shop.plan(ORDERS, first)
    assert shop.ids(ORDERS, second) == [21, 22]
    assert shop.plan(ORDERS, second) is None
    shop.sell()
    assert shop.ids(ORDERS, shop.plan(ORDERS, second)) == [23]


FOREIGN = """CREATE FOREIGN DATA WRAPPER elsewhere; CREATE SERVER elsewhere FOREIGN DATA WRAPPER elsewhere;
    ALTER TABLE orders RENAME TO sold; CREATE FOREIGN TABLE orders (id bigint, name text, amount integer) SERVER elsewhere;
    GRANT SELECT ON orders TO tidegate_stager"""


def test_tables_whose_rows_come_in_another_order_are_refused(shop: Shop) -> None:
    """A subscription applies its publisher's commits in their order, and a foreign table's writers cannot be seen."""
    first, administrator = shop.sold(20), shop.settings.conninfo(user="postgres")
    publication = "CONNECTION 'dbname=x' PUBLICATION p WITH (connect = false, slot_name = NONE)"
    execute(administrator, f"CREATE SUBSCRIPTION s {publication}")
    execute(administrator, "INSERT INTO pg_subscription_rel SELECT oid, 'orders'::regclass, 'r' FROM pg_subscription")
    try:
        for source in (ORDERS, DRAWN):
            refused(shop, source, SourceUnreadable, first, "which a subscription fills")
    finally:
        execute(administrator, "DELETE FROM pg_subscription_rel; DROP SUBSCRIPTION s")
    execute(administrator, FOREIGN)
    refused(shop, ORDERS, SourceUnreadable, first, "foreign")


def test_transaction_numbers_are_compared_across_their_wraparound(shop: Shop) -> None:
    """A row has 32 bits of its number; they mean the last number with these bits that is not above the server's."""
    statement = sql.SQL("SELECT {} FROM (VALUES (%s::bigint, %s::bigint)) AS r (x, newest)")
    condition = seen_by_plans.visible(f"{2**32 + 50}:{2**32 + 50}:")
    newest = 2**32 + 100
    old = [(2, newest), (3, newest), (49, newest), (101, newest), (2**32 - 1, newest)]
    for case in [*old, (50, newest), (99, newest), (2**32 - 1, 2**33 + 10)]:
        assert shop.execute(statement.format(condition), case) == [(case in old,)], case


@pytest.mark.promise("I11")
@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ("DELETE FROM orders WHERE id = 3", r"9 row\(s\) up to 10, but 10"),
        ("ALTER TABLE orders DROP amount", 'column "amount" does not exist'),
        ("ALTER TABLE orders ALTER amount TYPE text", "column amount is text"),
        ("DROP TABLE orders", 'relation "orders" does not exist'),
        (f"DROP TABLE orders; {CREATE}; {SELL.format(10)}", "table orders was dropped"),
        (POLICY, "row-level security"),
    ],
)
def test_a_batch_that_cannot_be_replayed_is_refused(shop: Shop, statements: str, message: str) -> None:
    """Planned rows are gone, or are others, even with the same keys; or only some of them are shown."""
    first = shop.sold(10)
    shop.run(statements)
    with pytest.raises((SourceChanged, AccessRefused), match=f"(?i:^table orders.*){message}"):
        shop.read(ORDERS, first)


def test_a_server_that_is_away_is_tried_again(shop: Shop, free_port: Callable[[], int]) -> None:
    first, nowhere = shop.sold(1), {**shop.settings.conninfo(), "port": free_port()}
    refused(shop, replace(ORDERS, connection=nowhere), SourceUnavailable, message="Table orders cannot be read now")
    raises(SourceUnavailable, lambda: list(read_part(nowhere, ORDERS.selection, (None, first["to"]))))


@pytest.mark.parametrize(("late", "change"), [(-7, "SELECT"), (2, "SELECT"), (7, "SELECT"), (-7, NUMERIC), (2, NUMERIC)])
def test_a_row_that_fills_an_old_gap_is_noticed(shop: Shop, late: int, change: str) -> None:
    shop.run(change)
    source = replace(ORDERS, max_rows=2, schema={"id": "decimal(38,0)"})
    for skipped in (2, 0, 1, 0, 0, 0):
        shop.execute("SELECT nextval('orders_id_seq') FROM generate_series(1, %s)", [skipped])
        shop.sell(2)
    planned = batches(shop.settings, source)
    assert [batch["rows"] for batch in planned] == [2] * 6
    shop.run("DELETE FROM orders WHERE id % 2 = 0")
    assert shop.plan(source, planned[-1]) is None
    shop.execute("INSERT INTO orders (id) VALUES (%s)", [late])
    refused(shop, source, SourceChanged, planned[-1], f"key {late}")


def test_gaps_are_remembered_up_to_a_limit(shop: Shop) -> None:
    """The newest are watched; a row in the place of a deleted one in an older gap is noticed by the keys of its range."""
    shop.sell(3000)
    source = by_query(ORDERS, "SELECT * FROM orders WHERE id % 3 = 0")
    first = shop.plan(source)
    shop.sell(3)
    assert [len(encode_metadata(batch)) < 10_000 for batch in (first, shop.plan(source, first))] == [True, True]
    shop.run("DELETE FROM orders WHERE id % 3 > 0")
    first = shop.plan(ORDERS)
    shop.run("DELETE FROM orders WHERE id = 3; INSERT INTO orders (id) VALUES (1)")
    refused(shop, ORDERS, SourceChanged, first, "as when this was planned, but with other keys")


def test_a_key_or_a_server_of_another_order_is_refused(shop: Shop) -> None:
    """'10' is below '9' as text; after a restore, a failover, or with a clock put back, new rows come below old positions."""
    shop.run("CREATE TABLE odd (id bigint); INSERT INTO odd SELECT generate_series(1, 9)")
    source = replace(ODD, schema={"id": "string"}, wait_seconds=0)
    first = shop.plan(source)
    shop.run("ALTER TABLE odd ALTER id TYPE text")
    refused(shop, source, SourceChanged, first, "id was bigint")
    sold = shop.sold(3)
    refused(shop, ORDERS, SourceChanged, {**sold, "snapshot": "99999999999:99999999999:"}, "backup")
    promoted = {**sold, "origin": {**sold["origin"], "timeline": "00000009"}}
    refused(shop, ORDERS, SourceChanged, promoted, r"a standby was promoted .* \(timeline 00000009, now \w+\).*generation=2")
    for goes_on in (replace(ORDERS, failover="go-on"), replace(ORDERS, generation=2, keeps_position=True)):
        assert shop.plan(goes_on, promoted) is None
    assert shop.plan(replace(ORDERS, generation=2), promoted)["rows"] == 3
    ahead = {"after": None, "to": ["2999-01-01 00:00:00+00", "1"], "splits": [], "rows": 1, "generation": 1}
    refused(shop, DATED, SourceChanged, ahead, "clock says")
    refused(shop, replace(ORDERS, keeps_position=True, generation=2), SourceChanged, {"files": []}, "kind of source.* without")
    assert shop.plan(replace(ORDERS, generation=2), {"files": []})["rows"] == 3
