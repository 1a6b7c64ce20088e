"""PostgresTable refuses tables whose rows it could miss; each case here once lost rows silently."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from pyspark.errors import PySparkException

from tests.sources.conftest import Inbox
from tests.sources.shop import CREATE, DATED, DRAWN, ORDERS, Shop, all_batches, refused
from tests.store import Attempt, encode_metadata
from tidegate.jobs import PostgresTable
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.postgres.read import PostgresReader
from tidegate.jobs.spark.task_errors import reported_in
from tidegate.state_store.base.errors import (
    AccessRefused,
    LockHeld,
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


def test_what_is_refused_goes_on_with_what_the_message_says(shop: Shop) -> None:
    """A grant of the sequence, without which keys chosen by hand would go unnoticed; a sequence behind rows of a dump."""
    shop.sell(5)
    shop.run("REVOKE ALL ON SEQUENCE orders_id_seq FROM tidegate_stager")
    grant = "GRANT SELECT ON SEQUENCE orders_id_seq TO tidegate_stager"
    refused(shop, ORDERS, AccessRefused, message=grant)
    shop.run(f"{grant}; INSERT INTO orders (id) VALUES (1000)")
    refused(shop, ORDERS, SourceChanged, message=r"SELECT setval\('orders_id_seq', 1000\)")
    shop.run("SELECT setval('orders_id_seq', 1000)")
    assert shop.ids(shop.planned(ORDERS)) == [1, 2, 3, 4, 5, 1000]


def test_the_sequences_under_a_view_are_found(shop: Shop) -> None:
    """A view's column does not name its origin, so all sequences of its tables must be in order."""
    shop.sell(2)
    shop.run(RETURNS)
    shop.run("CREATE VIEW goods AS SELECT o.id + 0 AS id, o.name, o.amount FROM orders o")
    assert shop.planned(GOODS)["to"] == ["2"]
    shop.run("CREATE VIEW joined AS SELECT o.id, o.name, r.amount FROM orders o LEFT JOIN returns r ON r.name = o.name")
    assert shop.planned(replace(ORDERS, table="joined"))["rows"] == 2


def test_keys_between_the_steps_of_a_sequence_are_refused(shop: Shop) -> None:
    """An object mapper that draws one number for fifty keys hands out low ones later."""
    shop.run("ALTER SEQUENCE orders_id_seq INCREMENT 50")
    assert shop.sold(2)["rows"] == 2
    shop.run("INSERT INTO orders (id) VALUES (7)")
    refused(shop, ORDERS, SourceChanged, message="INCREMENT 50")


def test_a_numeric_key_with_digits_after_the_point_is_drawn_in_whole_numbers(shop: Shop) -> None:
    """Postgres prints 1.00 for the first number of its sequence; what lies between two of them was chosen by hand."""
    shop.run("CREATE TABLE odd (id numeric(12,2) DEFAULT nextval('orders_id_seq') PRIMARY KEY, name text)")
    source = PostgresTable(table="odd", key="id", schema={"id": "decimal(12,2)", "name": "string"}, wait_seconds=0)
    shop.run("INSERT INTO odd (name) VALUES ('a'), ('b')")
    first = shop.planned(source)
    assert (first["to"], first["rows"], shop.plan(source, first)) == (["2.00"], 2, None)
    shop.run("INSERT INTO odd (name) VALUES ('c')")
    assert [row[1] for row in shop.rows(source, shop.planned(source, first))] == ["c"]
    for statements, message in [
        ("INSERT INTO odd VALUES (2.50, 'by hand')", r"has key 2.50, which .* orders_id_seq \(at 3, .* 1\) does not hand out"),
        ("UPDATE odd SET id = 3.50 WHERE id = 2.50", r"SELECT setval\('orders_id_seq', 4\)"),
        ("DELETE FROM odd WHERE id > 2; SELECT setval('orders_id_seq', 1)", "is at 1, but rows up to 2 were read"),
    ]:
        shop.run(statements)
        refused(shop, source, SourceChanged, first, message)


# --------------------------------------------------------------------------------------------------------- hidden rows


def test_hidden_transactions_are_refused(shop: Shop, tmp_path: Path) -> None:
    """Without pg_read_all_stats, or with track_activities = off, open transactions are invisible."""
    role = f"{shop.settings.pg_database}_blind"
    with closing(psycopg2.connect(**shop.settings.conninfo(user="postgres"))) as administrator:
        administrator.autocommit = True
        cursor = administrator.cursor()
        cursor.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'blind'; GRANT SELECT ON orders, orders_id_seq TO {role}")
        try:
            passfile = tmp_path / "pgpass"
            passfile.write_text("*:*:*:*:blind\n")
            passfile.chmod(0o600)
            place = {name: shop.settings.conninfo()[name] for name in ("host", "port", "dbname")}
            connection = {**place, "user": role, "passfile": str(passfile)}
            refused(shop, replace(DATED, connection=connection), AccessRefused, message=f"GRANT pg_read_all_stats TO {role}")
            assert shop.plan(replace(ORDERS, connection=connection)) is None
        finally:
            cursor.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    shop.sell()
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
        (PLPGSQL, "SELECT (recent()).*", "reads no table"),
        (PLPGSQL, "SELECT id, 'n' AS name, 1 AS amount FROM generate_series(1, 9) AS id", "reads no table"),
        (
            PLPGSQL,
            "SELECT * FROM titles, ROWS FROM (generate_series(1, 2), recent()) AS r (n, id, x, amount)",
            "calls recent()",
        ),
        (PLPGSQL, "SELECT (recent()).id, name, 1 AS amount FROM titles", "calls recent()"),
        (PLPGSQL, "SELECT * FROM orders WHERE id IN (SELECT id FROM recent())", "calls recent()"),
        (
            PLPGSQL,
            "WITH r AS MATERIALIZED (SELECT * FROM recent()) SELECT r.* FROM r JOIN titles USING (name)",
            "calls recent()",
        ),
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


def test_functions_whose_tables_are_seen_or_that_read_none_may_be_called(shop: Shop) -> None:
    """Postgres writes the query of a simple SQL function into that of the caller; others read none."""
    shop.execute(FUNCTION.format("recent()", "sql STABLE", "SELECT * FROM orders"))
    shop.execute("CREATE FUNCTION scalar() RETURNS int LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN 1; END $$")
    shop.execute(
        "CREATE FUNCTION twice(n int) RETURNS SETOF int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN NEXT n * 2; END $$"
    )
    shop.sell(2)
    sources = [
        replace(DRAWN, table=None, query=query)
        for query in [
            "SELECT * FROM recent()",
            "SELECT o.* FROM orders AS o, generate_series(1, 1), unnest(ARRAY[1], ARRAY['rows()']) AS u (a, b)",
            "SELECT id, unnest(ARRAY[name]) AS name, amount FROM orders WHERE amount IN (SELECT * FROM generate_series(1, 9))",
            "SELECT id, name, amount FROM orders, jsonb_to_recordset('[{\"a\": 1}]') AS j (a int)",
            "SELECT o.* FROM orders AS o, twice(amount) AS t WHERE scalar() > 0",
        ]
    ]
    assert [shop.planned(source)["rows"] for source in sources] == [2] * len(sources)
    shop.session().execute("BEGIN; INSERT INTO orders (name) VALUES ('early')")
    assert [shop.plan(source) for source in sources] == [None] * len(sources)


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


def test_a_query_that_looks_up_one_row_for_each_is_read(shop: Shop) -> None:
    shop.sell(5)
    one = "SELECT n.name FROM orders AS n WHERE n.id >= o.id ORDER BY n.id LIMIT 1"
    query = f"SELECT DISTINCT id, ({one}) AS name, amount FROM orders AS o CROSS JOIN LATERAL ({one}) AS looked_up"
    assert shop.planned(replace(DRAWN, table=None, query=query))["rows"] == 5


def test_a_query_that_writes_is_refused(shop: Shop) -> None:
    """By its own transaction, which only reads."""
    shop.sell()
    shop.run("GRANT USAGE ON SEQUENCE orders_id_seq TO tidegate_stager")
    source = replace(ORDERS, table=None, query="SELECT nextval('orders_id_seq') AS id, name, amount FROM orders")
    refused(shop, source, SourceUnreadable, message="read-only transaction")


# ------------------------------------------------------------------------- what became of a batch between plan and read


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_a_table_that_was_created_again_is_never_taken_for_the_old_one(shop: Shop, source: PostgresTable) -> None:
    """Its rows are others, even with the same keys; nor does an executor read only the rows that a policy shows."""
    shop.sell(20)
    first = shop.planned(source)
    shop.run(POLICY)
    with pytest.raises(AccessRefused, match="row-level security"):
        shop.rows(source, first)
    shop.run(f"DROP TABLE orders; {CREATE}")
    shop.sell(27)

    refused(shop, source, SourceChanged, first, "table orders was dropped")
    with pytest.raises(SourceChanged, match="dropped"):
        emitter_of(source, None, shop.settings).emit_batch(Attempt("orders", 1, 1, first), first)  # before Spark reads


@pytest.mark.parametrize("keeps_position", [False, True])
def test_the_next_generation_of_a_table_goes_on(shop: Shop, keeps_position: bool) -> None:
    """It is read from its beginning, or from its last position if its rows were put back."""
    first = shop.sold(20)
    shop.run("CREATE TABLE copy (LIKE orders INCLUDING ALL); INSERT INTO copy SELECT * FROM orders")
    shop.run(f"DROP TABLE orders; {CREATE}")
    if keeps_position:
        shop.run("INSERT INTO orders SELECT * FROM copy; SELECT setval('orders_id_seq', 20)")
    shop.sell(7)

    refused(shop, ORDERS, SourceChanged, first, "generation=2")
    source = replace(ORDERS, generation=2, keeps_position=keeps_position)
    second = shop.planned(source, first)
    assert [row[0] for row in shop.rows(source, second)] == list(range(21, 28) if keeps_position else range(1, 8))
    shop.sell(3)
    assert shop.planned(source, second)["rows"] == 3


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


def test_a_server_that_is_away_is_tried_again(shop: Shop, inbox: Inbox, free_port: Callable[[], int]) -> None:
    """Both the plan and an executor raise an error that is retried."""
    shop.sell()
    metadata = shop.planned(ORDERS)
    nowhere = {**shop.settings.conninfo(), "port": free_port()}
    refused(shop, replace(ORDERS, connection=nowhere), SourceUnavailable, message="Table orders cannot be read now")
    with spark_session(inbox.settings, "inbox") as spark:
        emitter = PostgresReader(ORDERS, spark, inbox.settings)
        emitter._executors_conninfo = nowhere
        with pytest.raises(PySparkException) as failure:
            emitter.emit_batch(Attempt("inbox", 1, 1, metadata), metadata).collect()
    explained = reported_in(failure.value)
    assert isinstance(explained, SourceUnavailable)
    assert "Table orders cannot be read now" in str(explained)
    assert reported_in(ValueError("something else")) is None


@pytest.mark.soak
def test_a_lock_on_the_table_is_named_with_its_session(shop: Shop) -> None:
    """The server answers, so the advice is not to bring it back; the plan is tried again."""
    shop.sell()
    with closing(psycopg2.connect(**shop.settings.conninfo(user="postgres"), application_name="psql")) as holder:
        holder.cursor().execute("LOCK TABLE orders")
        named = rf"held by session {holder.info.backend_pid} \(user postgres, application psql"
        refused(shop, ORDERS, LockHeld, message=named)
    assert shop.planned(ORDERS)


def test_batches_that_an_older_version_planned_are_read_and_followed(shop: Shop) -> None:
    """Their metadata has four entries; the first batch after them has all."""
    shop.sell(20)
    for source in (replace(ORDERS, max_rows=15), replace(DATED, max_rows=15)):
        first = {name: value for name, value in shop.planned(source).items() if name in ("after", "to", "splits", "rows")}
        assert len(shop.rows(source, first)) == 15
        second = shop.planned(source, first)
        assert len(shop.rows(source, second)) == 5
        assert shop.plan(source, second) is None


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
    refused(shop, ORDERS, SourceChanged, first, "the same number of rows .* but with other keys")


@pytest.mark.parametrize(
    "write",
    [
        "UPDATE orders SET amount = 99 WHERE id = 2",
        "INSERT INTO orders (id, written) SELECT 100, min(written) + interval '1 microsecond' FROM orders",
    ],
)
def test_a_row_that_is_written_without_its_time_is_noticed(shop: Shop, write: str) -> None:
    """Examples are an UPDATE that leaves updated_at alone, a clock set back for a while, and rows loaded with old times."""
    for _ in range(3):
        shop.sell()
    first = shop.planned(DATED)
    assert shop.plan(DATED, first) is None
    shop.run(write)
    refused(shop, DATED, SourceChanged, first, r"1 row\(s\)")
    shop.run("UPDATE orders SET written = now() WHERE id IN (2, 100)")
    assert shop.planned(DATED, first)["rows"] >= 1


def test_rows_of_savepoints_beside_an_open_transaction_are_not_late(shop: Shop) -> None:
    """A transaction that is open holds back the snapshot's oldest number; rows that were read have higher ones."""
    writer, other = shop.session(), shop.session()
    writer.execute("BEGIN; SELECT now()")
    other.execute("BEGIN; SELECT pg_current_xact_id()")
    for n in range(5):
        writer.execute("SAVEPOINT s; INSERT INTO orders (name, amount) VALUES ('n', %s)", [n])
        writer.execute("ROLLBACK TO s" if n == 2 else "RELEASE s")
    writer.execute("COMMIT")
    first = shop.planned(DATED)
    assert (first["rows"], shop.plan(DATED, first)) == (4, None)
    other.execute("SAVEPOINT s; SELECT pg_current_xact_id(); CREATE TABLE made ()")
    assert shop.plan(DATED, first) is None
    other.execute("COMMIT")
    shop.sell()
    assert shop.planned(DATED, first)["rows"] == 1


def test_a_key_or_a_server_of_another_order_is_refused(shop: Shop) -> None:
    """'10' is below '9' as text; after a restore from a backup, or with a clock put back, new rows come below old positions."""
    shop.run("CREATE TABLE odd (id bigint); INSERT INTO odd SELECT generate_series(1, 9)")
    source = replace(ODD, schema={"id": "string"}, wait_seconds=0)
    first = shop.planned(source)
    shop.run("ALTER TABLE odd ALTER id TYPE text")
    refused(shop, source, SourceChanged, first, "id was bigint")
    with pytest.raises(ValueError, match="key_is_drawn"):
        replace(DATED, key_is_drawn=True)
    ahead: dict[str, Any] = {**shop.sold(3), "snapshot": "99999999999:99999999999:"}
    refused(shop, ORDERS, SourceChanged, ahead, "backup")
    ahead = {"after": None, "to": ["2999-01-01 00:00:00+00", "1"], "splits": [], "rows": 1}
    refused(shop, DATED, SourceChanged, ahead, "clock says")
