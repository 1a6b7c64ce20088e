"""PostgresTable refuses tables whose rows it could miss; each case here once lost rows silently."""

from dataclasses import replace
from typing import Any

import pytest

from tests.sources.shop import CREATE, DATED, DRAWN, ORDERS, Shop, refused
from tests.store import Attempt, encode_metadata
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.postgres import plan as planning
from tidegate.state_store.base.errors import AccessRefused, MalformedRecord, SourceChanged, SourceUnreadable

TEXTS = PostgresTable(table="orders", key="code", schema={"code": "string", "amount": "int"}, wait_seconds=0)


# ------------------------------------------------------------------------------------------------- the key's sequence


def test_a_sequence_that_cannot_be_seen_is_refused_with_the_grant_to_type(shop: Shop) -> None:
    """With SELECT on the table alone, keys chosen by hand would go unnoticed; the message can be pasted."""
    shop.sell(5)
    shop.execute("REVOKE ALL ON SEQUENCE orders_id_seq FROM tidegate_stager")
    message = refused(shop, ORDERS, AccessRefused)
    grant = "GRANT SELECT ON SEQUENCE orders_id_seq TO tidegate_stager"
    assert grant in message
    shop.execute(grant)
    assert shop.ids(shop.planned(ORDERS)) == [1, 2, 3, 4, 5]


def test_a_key_above_its_sequence_is_refused_though_the_sequence_was_never_used(shop: Shop) -> None:
    """Rows were loaded with their keys, as from a dump: the sequence has to be advanced."""
    shop.execute("INSERT INTO orders (id) VALUES (1000)")
    assert "SELECT setval('orders_id_seq', 1000)" in refused(shop, ORDERS, SourceChanged)
    shop.execute("SELECT setval('orders_id_seq', 1000)")
    assert shop.planned(ORDERS)["to"] == ["1000"]


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["ALTER TABLE orders ALTER id DROP IDENTITY"], "is not filled by a sequence"),
        (
            ["ALTER TABLE orders ALTER id DROP IDENTITY", "CREATE SEQUENCE orders_id_seq OWNED BY orders.id"],
            "is not filled by a sequence",
        ),
        (
            [
                "ALTER TABLE orders ALTER id DROP IDENTITY",
                "CREATE SEQUENCE mine",
                "ALTER TABLE orders ALTER id SET DEFAULT -nextval('mine')",
            ],
            "computes it",
        ),
    ],
)
def test_a_key_that_no_sequence_fills_is_refused_unless_the_author_promises(
    shop: Shop, statements: list[str], message: str
) -> None:
    """Rows with lower keys may come at any time. A trigger that draws the key is invisible, so its author declares it."""
    for statement in statements:
        shop.execute(statement)
    shop.execute("INSERT INTO orders (id) VALUES (10), (20)")
    refusal = refused(shop, ORDERS, SourceUnreadable)
    assert message in refusal
    assert "key_is_drawn=True" in refusal
    if "computes" not in message:
        assert shop.planned(DRAWN)["rows"] == 2


@pytest.mark.parametrize(
    "create",
    [
        "CREATE TABLE orders (code text PRIMARY KEY DEFAULT 'A' || nextval('codes'), amount int)",
        "CREATE TABLE orders (code uuid PRIMARY KEY DEFAULT gen_random_uuid(), amount int)",
    ],
)
def test_texts_and_uuids_are_not_keys_in_the_order_of_writing(shop: Shop, create: str) -> None:
    """'A10' sorts below 'A9', and a uuid anywhere: only an author's promise allows them."""
    shop.execute("DROP TABLE orders")
    shop.execute("CREATE SEQUENCE codes")
    shop.execute(create)
    shop.execute("INSERT INTO orders (amount) VALUES (1)")
    refusal = refused(shop, TEXTS, SourceUnreadable)
    assert "key_is_drawn=True" in refusal
    assert '("updated_at", "code")' in refusal


def test_two_sequences_do_not_make_one_order(shop: Shop) -> None:
    """A UNION of two tables, and a child with a sequence of its own: rows of the slower sequence would be missed."""
    shop.execute("CREATE TABLE returns (LIKE orders INCLUDING DEFAULTS)")
    shop.execute("CREATE SEQUENCE returned; ALTER TABLE returns ALTER id SET DEFAULT nextval('returned')")
    shop.sell(3)
    both = replace(ORDERS, table=None, query="SELECT * FROM orders UNION ALL SELECT * FROM returns")
    assert "returned" in refused(shop, both, SourceUnreadable)
    shop.execute("CREATE VIEW joined AS SELECT o.id, o.name, r.amount FROM orders o LEFT JOIN returns r ON r.name = o.name")
    assert shop.planned(replace(ORDERS, table="joined"))["rows"] == 3
    shop.execute("ALTER TABLE returns INHERIT orders")
    assert "returned" in refused(shop, ORDERS, SourceUnreadable)


def test_keys_between_the_steps_of_a_sequence_are_refused(shop: Shop) -> None:
    """An object mapper that draws one number for fifty keys hands out low ones later."""
    shop.execute("ALTER SEQUENCE orders_id_seq INCREMENT 50")
    assert shop.sold(2)["rows"] == 2
    shop.execute("INSERT INTO orders (id) VALUES (7)")
    assert "INCREMENT 50" in refused(shop, ORDERS, SourceChanged)


def test_a_numeric_key_with_digits_after_the_point_is_drawn_in_whole_numbers(shop: Shop) -> None:
    """Postgres prints 1.00 for the first number of its sequence; what lies between two of them was chosen by hand."""
    shop.execute("CREATE TABLE odd (id numeric(12,2) DEFAULT nextval('orders_id_seq') PRIMARY KEY, name text)")
    source = PostgresTable(table="odd", key="id", schema={"id": "decimal(12,2)", "name": "string"}, wait_seconds=0)
    shop.execute("INSERT INTO odd (name) VALUES ('a'), ('b')")
    first = shop.planned(source)
    assert (first["to"], first["rows"]) == (["2.00"], 2)
    assert shop.plan(source, first) is None
    shop.execute("INSERT INTO odd (name) VALUES ('c')")
    assert [row[1] for row in shop.rows(source, shop.planned(source, first))] == ["c"]

    shop.execute("INSERT INTO odd VALUES (2.50, 'by hand')")
    assert "has key 2.50, which sequence orders_id_seq (at 3, INCREMENT 1) does not hand out" in refused(
        shop, source, SourceChanged, first
    )
    shop.execute("UPDATE odd SET id = 3.50 WHERE id = 2.50")
    assert "SELECT setval('orders_id_seq', 4)" in refused(shop, source, SourceChanged, first)
    shop.execute("DELETE FROM odd WHERE id > 2")
    shop.execute("SELECT setval('orders_id_seq', 1)")
    assert "is at 1, but rows up to 2 were read" in refused(shop, source, SourceChanged, first)


@pytest.mark.parametrize("value", ["'NaN'", "'Infinity'"])
def test_a_key_after_which_no_key_can_come_is_refused(shop: Shop, value: str) -> None:
    """NaN is the highest number: every later row would be missed."""
    shop.execute("CREATE TABLE odd (id numeric NOT NULL)")
    shop.execute(f"INSERT INTO odd VALUES (1), ({value})")
    source = PostgresTable(table="odd", key="id", schema={"id": "decimal(10,0)"}, key_is_drawn=True)
    assert "1 row(s) in which id is" in refused(shop, source, MalformedRecord)


# --------------------------------------------------------------------------------------------------------- hidden rows


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_row_level_security_is_an_error_and_not_a_filter(shop: Shop, source: PostgresTable) -> None:
    """Both the plan and an executor refuse to read only the rows that a policy shows."""
    shop.sell(5)
    metadata = shop.planned(source)
    shop.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
    shop.execute("CREATE POLICY few ON orders USING (amount < 3)")
    message = refused(shop, source, AccessRefused)
    assert "row-level security" in message
    assert "BYPASSRLS" in message
    with pytest.raises(AccessRefused, match="row-level security"):
        shop.rows(source, metadata)


FUNCTION = "CREATE FUNCTION {} RETURNS SETOF orders LANGUAGE {} AS $$ {} $$"
PLPGSQL = FUNCTION.format("recent()", "plpgsql STABLE", "BEGIN RETURN QUERY SELECT * FROM orders; END")


@pytest.mark.parametrize(
    ("create", "query", "message"),
    [
        (PLPGSQL, "SELECT * FROM recent()", "reads no table"),
        (PLPGSQL, "SELECT (recent()).*", "reads no table"),
        (PLPGSQL, "SELECT id, 'n' AS name, 1 AS amount FROM generate_series(1, 9) AS id", "reads no table"),
        (PLPGSQL, "SELECT r.* FROM recent() AS r JOIN titles USING (name)", "calls recent()"),
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
        (FUNCTION.format("recent()", "sql VOLATILE", "SELECT * FROM orders"), "SELECT * FROM goods", "calls recent()"),
        (
            FUNCTION.format('"Late"."Re(c)"(n int)', "sql STABLE SECURITY DEFINER", "SELECT * FROM orders"),
            """SELECT r.* FROM "Late"."Re(c)"(length('it''s (')) AS r JOIN titles USING (name)""",
            'calls "Late"."Re(c)"(integer)',
        ),
    ],
)
def test_tables_within_a_function_are_refused(shop: Shop, create: str, query: str, message: str) -> None:
    """Their open writers are not seen, so rows of these would be passed by."""
    shop.execute('CREATE SCHEMA "Late"')
    shop.execute("CREATE TABLE titles AS SELECT 'n1' AS name")
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
        "SELECT * FROM recent()",
        "SELECT o.* FROM orders AS o, generate_series(1, 1), unnest(ARRAY[1], ARRAY['rows()']) AS u (a, b)",
        "SELECT id, unnest(ARRAY[name]) AS name, amount FROM orders WHERE amount IN (SELECT * FROM generate_series(1, 9))",
        "SELECT id, name, amount FROM orders, jsonb_to_recordset('[{\"a\": 1}]') AS j (a int)",
        "SELECT o.* FROM orders AS o, twice(amount) AS t WHERE scalar() > 0",
    ],
)
def test_functions_whose_tables_are_seen_or_that_read_none_may_be_called(shop: Shop, query: str) -> None:
    """Postgres writes the query of a simple SQL function into that of the caller; others read none."""
    shop.execute(FUNCTION.format("recent()", "sql STABLE", "SELECT * FROM orders"))
    shop.execute("CREATE FUNCTION scalar() RETURNS int LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN 1; END $$")
    shop.execute(
        "CREATE FUNCTION twice(n int) RETURNS SETOF int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN NEXT n * 2; END $$"
    )
    shop.sell(2)
    source = replace(DRAWN, table=None, query=query)
    assert shop.planned(source)["rows"] == 2
    writer = shop.session()
    writer.execute("BEGIN; INSERT INTO orders (name) VALUES ('early')")
    assert shop.plan(source) is None


# ------------------------------------------------------------------------------------------- a table that was replaced


def test_a_truncated_table_whose_sequence_goes_on_is_read_on(shop: Shop) -> None:
    """Its keys are higher than all before, even after VACUUM FULL and after its sequence was altered."""
    first = shop.sold(20)
    shop.execute("VACUUM FULL orders")
    shop.execute("ALTER SEQUENCE orders_id_seq CACHE 1")
    shop.sell(3)
    second = shop.planned(ORDERS, first)
    assert shop.ids(second) == [21, 22, 23]
    shop.execute("TRUNCATE orders")
    shop.sell(2)
    assert shop.ids(shop.planned(ORDERS, second)) == [24, 25]


@pytest.mark.parametrize("source", [ORDERS, DATED])
def test_a_table_that_was_created_again_is_never_taken_for_the_old_one(shop: Shop, source: PostgresTable) -> None:
    """Its rows are others, even with the same keys: the next plan and the read of a planned batch refuse it."""
    shop.sell(20)
    first = shop.planned(source)
    shop.execute("DROP TABLE orders")
    shop.execute(CREATE)
    shop.sell(27)

    assert "table orders was dropped" in refused(shop, source, SourceChanged, first)
    with pytest.raises(SourceChanged, match="dropped"):
        source.emitter(None, shop.settings).emit_batch(Attempt("orders", 1, 1, first), first)  # before Spark reads


@pytest.mark.parametrize("keeps_position", [False, True])
def test_the_next_generation_of_a_table_goes_on(shop: Shop, keeps_position: bool) -> None:
    """It is read from its beginning, or from its last position if its rows were put back."""
    first = shop.sold(20)
    shop.execute("CREATE TABLE copy (LIKE orders INCLUDING ALL)")
    shop.execute("INSERT INTO copy SELECT * FROM orders")
    shop.execute("DROP TABLE orders")
    shop.execute(CREATE)
    if keeps_position:
        shop.execute("INSERT INTO orders SELECT * FROM copy")
        shop.execute("SELECT setval('orders_id_seq', 20)")
    shop.sell(7)

    assert "generation=2" in refused(shop, ORDERS, SourceChanged, first)
    source = replace(ORDERS, generation=2, keeps_position=keeps_position)
    second = shop.planned(source, first)
    assert [row[0] for row in shop.rows(source, second)] == list(range(21, 28) if keeps_position else range(1, 8))
    shop.sell(3)
    assert shop.planned(source, second)["rows"] == 3


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


def test_a_row_that_takes_the_place_of_a_deleted_one_is_noticed(shop: Shop) -> None:
    """The range has the same number of rows as when it was planned, but other rows."""
    shop.execute("SELECT nextval('orders_id_seq')")
    first = shop.sold(5)
    shop.execute("DELETE FROM orders WHERE id = 4")
    shop.execute("INSERT INTO orders (id) VALUES (1)")
    assert "key 1" in refused(shop, ORDERS, SourceChanged, first)


@pytest.mark.parametrize("late", [-7, 2, 7])
def test_a_row_that_fills_an_old_gap_is_noticed(shop: Shop, late: int) -> None:
    """It is noticed many batches later, and after deletions."""
    source = replace(ORDERS, max_rows=2)
    for skipped in (2, 0, 1, 0, 0, 0):
        for _ in range(skipped):
            shop.execute("SELECT nextval('orders_id_seq')")
        shop.sell(2)
    batches = [shop.planned(source)]
    while following := shop.plan(source, batches[-1]):
        batches.append(following)
    assert [batch["rows"] for batch in batches] == [2] * 6
    shop.execute("DELETE FROM orders WHERE id % 2 = 0")
    assert shop.plan(source, batches[-1]) is None
    shop.execute("INSERT INTO orders (id) VALUES (%s)", [late])
    refusal = refused(shop, source, SourceChanged, batches[-1])
    assert f"key {late}" in refusal


def test_rows_may_be_deleted_or_changed_after_they_have_counted(shop: Shop) -> None:
    """Examples are retention, and a flag that marks a row as exported."""
    first = shop.sold(50)
    shop.execute("DELETE FROM orders WHERE id < 40")
    shop.execute("UPDATE orders SET name = 'exported'")
    shop.sell(2)
    assert shop.ids(shop.planned(ORDERS, first)) == [51, 52]


def test_gaps_are_remembered_up_to_a_limit(shop: Shop) -> None:
    """A filtered query has a gap for each row: the newest are watched, and metadata stays small."""
    shop.sell(3000)
    source = replace(ORDERS, table=None, query="SELECT * FROM orders WHERE id % 3 = 0")
    first = shop.planned(source)
    assert len(encode_metadata(first)) < 10_000
    shop.sell(3)
    second = shop.planned(source, first)
    assert len(encode_metadata(second)) < 10_000


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
    shop.execute(write)
    message = refused(shop, DATED, SourceChanged, first)
    assert "1 row(s)" in message
    shop.execute("UPDATE orders SET written = now() WHERE id IN (2, 100)")
    assert shop.planned(DATED, first)["rows"] >= 1


@pytest.mark.parametrize(
    "statements",
    [
        ["UPDATE orders SET amount = 99 WHERE id = 2"],
        ["SAVEPOINT s", "UPDATE orders SET amount = 99 WHERE id = 2"],
        ["SAVEPOINT s", "CREATE TABLE made ()", "RELEASE s", "SAVEPOINT t", "UPDATE orders SET amount = 99 WHERE id = 2"],
        ["SAVEPOINT s", "UPDATE orders SET amount = 99 WHERE id = 2", "RELEASE s"],
    ],
)
def test_a_write_without_its_time_that_is_open_during_a_plan_is_noticed(shop: Shop, statements: list[str]) -> None:
    """A savepoint writes by a subtransaction, which a snapshot of Postgres does not list as open."""
    shop.sell()
    shop.sell()
    first = shop.planned(DATED)
    shop.sell()
    writer = shop.session()
    for statement in ("BEGIN", *statements):
        writer.execute(statement)
    shop.execute("CREATE TABLE later ()")
    second = shop.planned(DATED, first)
    assert shop.ids(second, "written, id") == [3]
    assert shop.plan(DATED, second) is None
    writer.execute("COMMIT")
    assert "1 row(s)" in refused(shop, DATED, SourceChanged, second)


def test_a_write_without_its_time_while_a_plan_works_is_noticed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the snapshot shows is refused at once; the next plan would take it for read."""
    shop.sell()
    first = shop.planned(DATED)
    shop.sell()
    wait = planning.settled_by_clock

    def meanwhile(*arguments: Any) -> Any:
        shop.execute("UPDATE orders SET amount = 99 WHERE id = 1")
        return wait(*arguments)

    monkeypatch.setattr(planning, "settled_by_clock", meanwhile)
    assert "1 row(s)" in refused(shop, DATED, SourceChanged, first)


def test_rows_of_savepoints_beside_an_open_transaction_are_not_late(shop: Shop) -> None:
    """A transaction that is open holds back the snapshot's oldest number; rows that were read have higher ones."""
    writer, other = shop.session(), shop.session()
    writer.execute("BEGIN; SELECT now()")
    other.execute("BEGIN; SELECT pg_current_xact_id()")
    for n in range(5):
        writer.execute("SAVEPOINT s")
        writer.execute("INSERT INTO orders (name, amount) VALUES ('n', %s)", [n])
        writer.execute("ROLLBACK TO s" if n == 2 else "RELEASE s")
    writer.execute("COMMIT")
    first = shop.planned(DATED)
    assert first["rows"] == 4
    assert shop.plan(DATED, first) is None
    other.execute("SAVEPOINT s; SELECT pg_current_xact_id(); CREATE TABLE made ()")
    assert shop.plan(DATED, first) is None
    other.execute("COMMIT")
    shop.sell()
    assert shop.planned(DATED, first)["rows"] == 1


def test_a_table_that_was_rewritten_has_no_late_rows(shop: Shop) -> None:
    """ALTER TABLE and VACUUM FULL write every row again but change none."""
    shop.sell(5)
    first = shop.planned(DATED)
    shop.execute("ALTER TABLE orders ALTER amount TYPE integer USING amount + 0")
    shop.execute("ALTER TABLE orders ADD stamp uuid DEFAULT gen_random_uuid()")
    assert shop.plan(DATED, first) is None
    shop.sell(1)
    assert shop.planned(DATED, first)["rows"] == 1


def test_a_key_whose_type_changed_is_refused(shop: Shop) -> None:
    """'10' is below '9' as text: the position would mean other rows."""
    shop.execute("CREATE TABLE odd (id bigint)")
    shop.execute("INSERT INTO odd SELECT generate_series(1, 9)")
    source = PostgresTable(table="odd", key="id", schema={"id": "string"}, key_is_drawn=True, wait_seconds=0)
    first = shop.planned(source)
    shop.execute("ALTER TABLE odd ALTER id TYPE text")
    assert "id was bigint" in refused(shop, source, SourceChanged, first)
    with pytest.raises(ValueError, match="key_is_drawn"):
        replace(DATED, key_is_drawn=True)


def test_a_server_that_was_put_back_in_time_is_refused(shop: Shop) -> None:
    """After a restore from a backup, its transaction numbers are below those of the plan."""
    shop.sell(3)
    first: dict[str, Any] = shop.planned(ORDERS)
    first["snapshot"] = "99999999999:99999999999:"
    assert "backup" in refused(shop, ORDERS, SourceChanged, first)
