"""PostgresTable refuses tables whose rows it could miss; each case here once lost rows silently."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest

from tests.sources.conftest import Inbox
from tests.sources.shop import CREATE, DATED, DRAWN, ORDERS, Shop, all_batches, refused
from tests.store import Attempt, encode_metadata
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.postgres.read import read_part
from tidegate.state_store.base.errors import (
    AccessRefused,
    MalformedRecord,
    SourceChanged,
    SourceUnavailable,
    SourceUnreadable,
    TidegateError,
)

TEXTS = PostgresTable(table="orders", key="code", schema={"code": "string", "amount": "int"}, wait_seconds=0)
ODD = PostgresTable(table="odd", key="id", schema={"id": "decimal(10,0)"}, key_is_drawn=True)
GOODS = replace(ORDERS, table="goods")
BOTH = replace(ORDERS, table=None, query="SELECT * FROM orders UNION ALL SELECT * FROM returns")

NOT_DRAWN = "ALTER TABLE orders ALTER id DROP IDENTITY"
UNDECLARED = "is not filled by a sequence.*key_is_drawn=True"
NO_KEY = "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ALTER id DROP IDENTITY, ALTER id DROP NOT NULL"
RETURNS = (
    "CREATE TABLE returns (LIKE orders INCLUDING DEFAULTS); CREATE SEQUENCE returned; "
    "ALTER TABLE returns ALTER id SET DEFAULT nextval('returned')"
)
TEXT_KEY = (
    "DROP TABLE orders; CREATE SEQUENCE codes; CREATE TABLE orders (code {}, amount int); INSERT INTO orders DEFAULT VALUES"
)
NO_ORDER = r'\("updated_at", "code"\).*key_is_drawn=True'
CACHED_BELOW = "CREATE VIEW goods AS SELECT id + 0 AS id, name, amount FROM orders; ALTER SEQUENCE orders_id_seq CACHE 2"
STORED = "ALTER TABLE orders RENAME TO sold; CREATE MATERIALIZED VIEW orders AS SELECT * FROM sold"
INFINITE = "CREATE TABLE odd (id numeric NOT NULL); INSERT INTO odd VALUES (1), ('{}')"
MANY_FOR_ONE = "ALTER SEQUENCE orders_id_seq INCREMENT 50; SELECT nextval('orders_id_seq'); INSERT INTO orders (id) VALUES (7)"
BETWEEN = "CREATE TABLE odd (id numeric(12,2) DEFAULT nextval('orders_id_seq')); INSERT INTO odd VALUES (0.50)"
NO_TIME = "ALTER TABLE orders ALTER written DROP NOT NULL; INSERT INTO orders (written) VALUES ({})"
POLICY = "ALTER TABLE orders ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON orders USING (amount < 3)"

# What a plan refuses, after a row was sold: the source, statements, the error, and what its line matches.
UNSAFE: list[tuple[PostgresTable, str, type[TidegateError], str]] = [
    (ORDERS, "ALTER SEQUENCE orders_id_seq CACHE 20", SourceUnreadable, "orders_id_seq has CACHE 20.*CACHE 1, then reconnect"),
    (ORDERS, f"CREATE SEQUENCE mine CACHE 5; {NOT_DRAWN}, ALTER id SET DEFAULT nextval('mine')", SourceUnreadable, "CACHE 5"),
    (GOODS, CACHED_BELOW, SourceUnreadable, "CACHE 2"),
    (
        ORDERS,
        "INSERT INTO orders (id) VALUES (9)",
        SourceChanged,
        r"key 9, but sequence .* is at 1.*setval\('orders_id_seq', 9\)",
    ),
    (ORDERS, NOT_DRAWN, SourceUnreadable, UNDECLARED),
    (ORDERS, f"{NOT_DRAWN}; CREATE SEQUENCE orders_id_seq OWNED BY orders.id", SourceUnreadable, UNDECLARED),
    (ORDERS, f"CREATE SEQUENCE mine; {NOT_DRAWN}, ALTER id SET DEFAULT -nextval('mine')", SourceUnreadable, "computes it"),
    (TEXTS, TEXT_KEY.format("text PRIMARY KEY DEFAULT 'A' || nextval('codes')"), SourceUnreadable, NO_ORDER),  # A10 < A9
    (TEXTS, TEXT_KEY.format("uuid PRIMARY KEY DEFAULT gen_random_uuid()"), SourceUnreadable, NO_ORDER),
    (BOTH, RETURNS, SourceUnreadable, "returned"),
    (ORDERS, f"{RETURNS}; ALTER TABLE returns INHERIT orders", SourceUnreadable, "returned"),
    (ORDERS, f"{NO_KEY}; INSERT INTO orders DEFAULT VALUES", MalformedRecord, r"1 row\(s\) in which id IS NULL"),
    (ODD, INFINITE.format("NaN"), MalformedRecord, r"1 row\(s\) in which id is"),  # later rows would be below it
    (ODD, INFINITE.format("Infinity"), MalformedRecord, r"1 row\(s\) in which id is"),
    (DATED, NO_TIME.format("NULL"), MalformedRecord, r"1 row\(s\) in which written IS NULL"),
    (DATED, NO_TIME.format("'infinity'"), MalformedRecord, r"1 row\(s\) in which written is infinite"),
    (ORDERS, STORED, SourceUnreadable, "materialized"),
    (ORDERS, "ALTER TABLE orders RENAME TO sold", SourceUnreadable, "Table orders is not as declared"),
    (ORDERS, "ALTER TABLE orders DROP amount", SourceUnreadable, 'column "amount" does not exist'),
    (
        ORDERS,
        "ALTER TABLE orders ALTER amount TYPE numeric",
        SourceUnreadable,
        "amount is numeric, which cannot be read as int",
    ),
    (ORDERS, "REVOKE SELECT ON orders FROM tidegate_stager", AccessRefused, "GRANT SELECT"),
    (
        ORDERS,
        "REVOKE ALL ON SEQUENCE orders_id_seq FROM tidegate_stager",
        AccessRefused,
        "GRANT SELECT ON SEQUENCE orders_id_seq",
    ),
    (ORDERS, MANY_FOR_ONE, SourceChanged, "key 7, .* INCREMENT 50"),  # as object mappers draw
    (ODD, BETWEEN, SourceChanged, r"key 0\.50, which .* does not hand out"),
    (ORDERS, POLICY, AccessRefused, "row-level security.*BYPASSRLS"),
    (DATED, POLICY, AccessRefused, "row-level security"),
]


@pytest.mark.parametrize("case", UNSAFE, ids=lambda case: f"{case[0].table}: {case[1][:60]}")
def test_tables_that_would_lose_rows_are_refused(shop: Shop, case: tuple[PostgresTable, str, type[TidegateError], str]) -> None:
    """Every plan checks each condition of the promise that can be checked."""
    source, statements, error, message = case
    shop.sell()
    shop.run(statements)
    refused(shop, source, error, message=message)
    if message == UNDECLARED:  # a trigger that draws the key is invisible, so its author declares it
        assert shop.planned(DRAWN)["rows"] == 1


# --------------------------------------------------------------------------------------------------------- hidden rows


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


FUNCTION = "CREATE FUNCTION {} RETURNS SETOF orders LANGUAGE {} AS $$ {} $$"
PLPGSQL = FUNCTION.format("recent()", "plpgsql STABLE", "BEGIN RETURN QUERY SELECT * FROM orders; END")
VOLATILE = FUNCTION.format("recent()", "sql VOLATILE", "SELECT * FROM orders")
QUOTED = FUNCTION.format('"Late"."Re(c)"(n int)', "sql STABLE SECURITY DEFINER", "SELECT * FROM orders")


@pytest.mark.parametrize(
    ("create", "query", "message"),
    [
        (PLPGSQL, "SELECT * FROM recent()", "reads no table"),
        (
            PLPGSQL,
            "SELECT * FROM titles, ROWS FROM (generate_series(1, 2), recent()) AS r (n, id, x, amount)",
            "calls recent()",
        ),
        (PLPGSQL, "SELECT (recent()).id, name, 1 AS amount FROM titles", "calls recent()"),
        (VOLATILE, "SELECT * FROM goods", "calls recent()"),
        (
            *(QUOTED, """SELECT r.* FROM "Late"."Re(c)"(length('it''s (')) AS r JOIN titles USING (name)"""),
            'calls "Late"."Re(c)"(integer)',
        ),
    ],
)
def test_tables_within_a_function_are_refused(shop: Shop, create: str, query: str, message: str) -> None:
    """Their open writers are not seen, so rows of these would be passed by."""
    shop.run("CREATE SCHEMA \"Late\"; CREATE TABLE titles AS SELECT 'n1' AS name")
    shop.execute(create)
    if "goods" in query:
        shop.execute("CREATE VIEW goods AS SELECT r.* FROM recent() AS r JOIN titles USING (name)")
        assert message in refused(shop, replace(DRAWN, table="goods"), SourceUnreadable)
    shop.sell(2)
    refusal = refused(shop, replace(DRAWN, table=None, query=query), SourceUnreadable)
    assert message in refusal
    assert "Write the function's query into that of the PostgresTable" in refusal


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM orders LIMIT 3",
        "SELECT * FROM (SELECT DISTINCT id, name, amount FROM orders OFFSET 1) AS few WHERE id > 0",
        "WITH r AS MATERIALIZED (SELECT * FROM orders FETCH FIRST 3 ROWS ONLY) SELECT * FROM r UNION ALL SELECT * FROM r",
        "SELECT id / 10 AS id, 'ten' AS name, count(*)::int AS amount FROM orders GROUP BY 1",
        "SELECT max(id) AS id, name, 1 AS amount FROM orders GROUP BY name",
        "SELECT row_number() OVER (ORDER BY id) AS id, name, amount FROM orders",
    ],
)
def test_a_query_whose_rows_depend_on_others_is_refused(shop: Shop, query: str) -> None:
    """What comes later would change what was read, or would never be read."""
    shop.sell(5)
    refused(
        shop, replace(DRAWN, table=None, query=query), SourceUnreadable, message="changes as rows come, and is not read again"
    )


# ------------------------------------------------------------------------- what became of a batch between plan and read


@pytest.mark.promise("I11")
def test_a_table_that_was_created_again_is_never_taken_for_the_old_one(shop: Shop) -> None:
    """Its rows are others, even with the same keys; nor does an executor read only the rows that a policy shows."""
    first = shop.sold(20)
    shop.run(POLICY)
    with pytest.raises(AccessRefused, match="row-level security"):
        shop.rows(ORDERS, first)
    shop.run(f"DROP TABLE orders; {CREATE}")
    shop.sell(27)
    refused(shop, ORDERS, SourceChanged, first, "table orders was dropped")
    with pytest.raises(SourceChanged, match="dropped"):
        emitter_of(ORDERS, None, shop.settings).emit_batch(Attempt("orders", 1, 1, first), first)  # before Spark reads


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM orders WHERE id = 3", "9 row(s) up to 10, but 10"),
        ("ALTER TABLE orders DROP amount", 'column "amount" does not exist'),
        ("ALTER TABLE orders ALTER amount TYPE text", "column amount is text"),
        ("DROP TABLE orders", 'relation "orders" does not exist'),
    ],
)
def test_a_batch_that_cannot_be_replayed_halts(shop: Shop, inbox: Inbox, statement: str, message: str) -> None:
    """Planned rows are gone: the error names the table."""
    shop.sell(10)
    pipeline = inbox.declare(ORDERS)
    inbox.plan(pipeline, "run")
    shop.run(statement)
    refusal = inbox.refused(pipeline, SourceChanged)
    assert refusal.startswith("Table orders")
    assert message in refusal


def test_a_server_that_is_away_is_tried_again(shop: Shop, free_port: Callable[[], int]) -> None:
    """Both the plan and an executor raise an error that is retried."""
    first, nowhere = shop.sold(1), {**shop.settings.conninfo(), "port": free_port()}
    refused(shop, replace(ORDERS, connection=nowhere), SourceUnavailable, message="Table orders cannot be read now")
    with pytest.raises(SourceUnavailable):
        list(read_part(nowhere, ORDERS.selection, (None, first["to"])))


# ----------------------------------------------------------------------------------------------------------- late rows


@pytest.mark.parametrize("late", [-7, 2, 7])
def test_a_row_that_fills_an_old_gap_is_noticed(shop: Shop, late: int) -> None:
    """It is noticed many batches later, and after deletions."""
    source = replace(ORDERS, max_rows=2)
    for skipped in (2, 0, 1, 0, 0, 0):
        shop.execute("SELECT nextval('orders_id_seq') FROM generate_series(1, %s)", [skipped])
        shop.sell(2)
    batches = all_batches(shop, source)
    assert [batch["rows"] for batch in batches] == [2] * 6
    shop.run("DELETE FROM orders WHERE id % 2 = 0")
    assert shop.plan(source, batches[-1]) is None
    shop.execute("INSERT INTO orders (id) VALUES (%s)", [late])
    refused(shop, source, SourceChanged, batches[-1], f"key {late}")


def test_gaps_are_remembered_up_to_a_limit(shop: Shop) -> None:
    """A filtered query has a gap for each row: the newest are watched, and metadata stays small.

    A row that takes the place of a deleted one in an older gap is noticed by the keys of its range.
    """
    shop.sell(3000)
    source = replace(ORDERS, table=None, query="SELECT * FROM orders WHERE id % 3 = 0")
    first = shop.planned(source)
    shop.sell(3)
    assert [len(encode_metadata(batch)) < 10_000 for batch in (first, shop.planned(source, first))] == [True, True]
    shop.run("DELETE FROM orders WHERE id % 3 > 0")
    first = shop.planned(ORDERS)
    shop.run("DELETE FROM orders WHERE id = 3; INSERT INTO orders (id) VALUES (1)")
    refused(shop, ORDERS, SourceChanged, first, "as when this was planned, but with other keys")


def test_a_key_or_a_server_of_another_order_is_refused(shop: Shop) -> None:
    """'10' is below '9' as text; after a restore, a failover, or with a clock put back, new rows come below old positions."""
    shop.run("CREATE TABLE odd (id bigint); INSERT INTO odd SELECT generate_series(1, 9)")
    source = replace(ODD, schema={"id": "string"}, wait_seconds=0)
    first = shop.planned(source)
    shop.run("ALTER TABLE odd ALTER id TYPE text")
    refused(shop, source, SourceChanged, first, "id was bigint")
    sold = shop.sold(3)
    refused(shop, ORDERS, SourceChanged, {**sold, "snapshot": "99999999999:99999999999:"}, "backup")
    promoted = {**sold, "origin": {**sold["origin"], "timeline": "00000009"}}
    refused(shop, ORDERS, SourceChanged, promoted, r"a standby was promoted .* \(timeline 00000009, now \w+\).*generation=2")
    for goes_on in (replace(ORDERS, failover="go-on"), replace(ORDERS, generation=2, keeps_position=True)):
        assert shop.plan(goes_on, promoted) is None
    assert shop.planned(replace(ORDERS, generation=2), promoted)["rows"] == 3
    ahead = {"after": None, "to": ["2999-01-01 00:00:00+00", "1"], "splits": [], "rows": 1}
    refused(shop, DATED, SourceChanged, ahead, "clock says")
