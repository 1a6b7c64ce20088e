"""PostgresTable reads every row exactly once despite open writers, and refuses unsafe tables."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from tests.sources.shop import DATED, DEADLINE_SECONDS, ORDERS, SCHEMA, Shop, all_batches, refused
from tests.store import encode_metadata
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.jobs.sources.postgres.read import BLOCK_BYTES, parts_of
from tidegate.state_store.base.errors import MalformedRecord, SourceUnreadable

# ------------------------------------------------------------------------------------------------------- end to end


def test_an_opaque_batch_reads_what_is_still_there(shop: Shop) -> None:
    shop.sell(3)
    first = shop.planned(DATED)
    plan = coordinator_of(DATED, shop.settings).initialize_transaction
    # Planned again after its predecessor's new end it is never None, because the position would be lost.
    again = plan(2, first, {**first, "after": ["2020-01-01 00:00:00+00", "1"]})
    assert again == {**first, "after": first["to"], "splits": [], "rows": 0}
    assert shop.rows(DATED, again) == []
    shop.run("UPDATE orders SET amount = 99, written = now() WHERE id = 2")

    assert [row[1] for row in shop.rows(DATED, first)] == [1, 3]
    assert coordinator_of(DATED, shop.settings).initialize_transaction(1, None, first) == first
    assert [row[1:] for row in shop.rows(DATED, shop.planned(DATED, first))] == [(2, "n2", 99)]


# ------------------------------------------------------------------------------------------------------- in flight


@pytest.mark.promise("decision:0015", "limit:PostgresTable.wait_seconds")
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_lower_key_in_flight_holds_back_higher_ones(shop: Shop, end: str, caplog: pytest.LogCaptureFixture) -> None:
    writer = shop.session()
    writer.execute("BEGIN")
    writer.execute("INSERT INTO orders (name) VALUES ('early') RETURNING id")
    shop.sell()

    assert shop.plan(ORDERS) is None
    named = f"session {writer.connection.get_backend_pid()} of tidegate_owner (shop)"
    assert named in caplog.text
    assert named in (ORDERS.held_back(shop.settings) or "")
    writer.execute(end)
    assert ORDERS.held_back(shop.settings) is None
    assert shop.ids(shop.planned(ORDERS)) == ([1, 2] if end == "COMMIT" else [2])


@pytest.mark.promise("limit:PostgresTable.wait_seconds")
def test_a_plan_waits_only_for_the_writers_it_found(shop: Shop) -> None:
    found, later = shop.session(), shop.session()
    found.execute("BEGIN; INSERT INTO orders (name) VALUES ('early')")
    shop.sell()
    with ThreadPoolExecutor(1) as thread:
        plan = thread.submit(shop.planned, replace(ORDERS, wait_seconds=DEADLINE_SECONDS))
        shop.wait_until_polling()
        later.execute("BEGIN; INSERT INTO orders (name) VALUES ('late')")
        assert not plan.done()
        found.execute("COMMIT")
        metadata = plan.result(DEADLINE_SECONDS)
    later.execute("COMMIT")

    assert shop.ids(metadata) == [1, 2]
    assert shop.ids(shop.planned(ORDERS, metadata)) == [3]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM goods",
        "SELECT o.id, t.name, o.amount FROM orders o JOIN titles t ON t.code = o.name -- with a comment at its end",
        "WITH all_orders AS (SELECT * FROM orders) SELECT id, name, amount FROM all_orders;",
        "SELECT id, unnest(ARRAY[name]) AS name, amount FROM orders WHERE amount IN (SELECT * FROM generate_series(1, 9))",
        "SELECT DISTINCT id, (SELECT n.name FROM orders AS n WHERE n.id >= o.id ORDER BY n.id LIMIT 1) AS name, amount"
        " FROM orders AS o",
    ],
)
def test_writers_of_tables_in_a_query_are_waited_for(shop: Shop, query: str) -> None:
    shop.execute("CREATE VIEW goods AS SELECT id, name, amount FROM orders WHERE amount > 0")
    shop.execute("CREATE TABLE titles (code text, name text)")
    shop.execute("INSERT INTO titles VALUES ('n1', 'Paper'), ('n2', 'Ink')")
    shop.sell(2)
    source = replace(ORDERS, table=None, query=query)
    rows = shop.rows(source, shop.planned(source))
    assert rows == [(n, ("Paper" if n == 1 else "Ink") if "titles" in query else f"n{n}", n) for n in (1, 2)]
    for table in ("orders", "titles") if "titles" in query else ("orders",):
        writer = shop.session()
        writer.execute(f"BEGIN; INSERT INTO {table} (name) VALUES ('early')")
        assert shop.plan(source) is None
        writer.execute("ROLLBACK")
    assert shop.ids(shop.planned(source)) == [1, 2]


def test_a_partition_is_held_back_by_writers_through_its_parent(shop: Shop) -> None:
    shop.execute("CREATE TABLE parent (LIKE orders INCLUDING ALL) PARTITION BY RANGE (id)")
    shop.execute("CREATE TABLE child PARTITION OF parent DEFAULT")
    shop.execute("INSERT INTO parent (name) VALUES ('early')")
    through_parent = shop.session()
    through_parent.execute("BEGIN; LOCK TABLE ONLY parent IN ROW EXCLUSIVE MODE")

    assert shop.plan(replace(ORDERS, table="child")) is None
    through_parent.execute("COMMIT")
    assert shop.planned(replace(ORDERS, table="child"))["to"] == ["1"]
    assert shop.planned(replace(ORDERS, table="parent"))["to"] == ["1"]


@pytest.mark.promise("decision:0015")
def test_a_transaction_that_began_before_the_look_holds_back_its_time(shop: Shop) -> None:
    shop.sell()
    early = shop.session()
    early.execute("BEGIN; SELECT 1")
    shop.sell()

    first = shop.planned(DATED)
    assert shop.ids(first, "written, id") == [1]
    assert shop.plan(DATED, first) is None
    early.execute("INSERT INTO orders (name) VALUES ('early')")
    assert shop.plan(DATED, first) is None
    early.execute("COMMIT")
    assert shop.ids(shop.planned(DATED, first), "written, id") == [3, 2]


def test_rows_stay_behind_the_clock_by_the_margin(shop: Shop) -> None:
    shop.sell()
    shop.execute("INSERT INTO orders (written) VALUES (now() - interval '2 hours'), (now() + interval '2 hours')")
    first = shop.planned(replace(DATED, margin_seconds=3600))

    assert shop.ids(first, "written, id") == [2]
    assert shop.ids(shop.planned(DATED, first), "written, id") == [1]


# ------------------------------------------------------------------------------------------------------- cutting


def test_batches_and_their_parts_are_disjoint_and_complete(shop: Shop) -> None:
    shop.sell(997)
    shop.execute("DELETE FROM orders WHERE id % 10 < 4")
    source = replace(ORDERS, max_rows=100, partitions=3)
    batches = all_batches(shop, source)

    assert [len(shop.rows(source, batch)) for batch in batches] == [batch["rows"] for batch in batches]
    assert [batch["rows"] for batch in batches] == [*[100] * 5, 98]
    assert {len(parts_of(batch)) for batch in batches} == {3}
    assert [row[0] for batch in batches for row in shop.rows(source, batch)] == [
        row for (row,) in shop.execute("SELECT id FROM orders ORDER BY id")
    ]
    assert all(encode_metadata(batch) for batch in batches)


def test_rows_that_share_a_key_stay_together(shop: Shop) -> None:
    """A boundary between them would lose some: the batch grows instead."""
    source = replace(DATED, key="written", max_rows=2, partitions=2)
    assert shop.plan(source) is None  # no txid is spent on an empty table
    for rows in (1, 4, 1):
        shop.sell(rows)
    batches = all_batches(shop, source)

    assert [batch["rows"] for batch in batches] == [5, 1]
    assert [row[1] for batch in batches for row in shop.rows(source, batch)] == [1, 2, 3, 4, 5, 6]


def test_names_are_those_of_sql(shop: Shop) -> None:
    shop.run(
        'CREATE SCHEMA "My Shop"; CREATE TABLE "My Shop"."Order ""Lines"" %" ("Line No" serial, "select" text, "Größe;--" int)'
    )
    shop.run("""INSERT INTO "My Shop"."Order ""Lines"" %" ("select", "Größe;--") VALUES ('it''s', 3)""")
    schema = {"Line No": "int", "select": "string", "Größe;--": "int"}
    source = replace(ORDERS, table='"My Shop"."Order ""Lines"" %"', key="Line No", schema=schema)
    assert shop.rows(source, shop.planned(source)) == [(1, "it's", 3)]
    shop.sell()
    for table in ("public.Orders", ' "public".orders '):
        assert shop.planned(replace(ORDERS, table=table))["rows"] == 1


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
    source = PostgresTable(table="keyed", key="k", schema={"k": types[1]}, max_rows=1, wait_seconds=0)
    source = source if source.is_by_clock else replace(source, key_is_drawn=True)

    assert [shop.rows(source, batch) for batch in all_batches(shop, source)] == [[(key,)] for key in KEYS[types]]


# ------------------------------------------------------------------------------------------------------- values


# Type in Postgres, declared type, and values at the bounds of the former.
WIDER: list[tuple[str, str, list[Any]]] = [
    *(("smallint", kind, [-(2**15), 2**15 - 1]) for kind in ("int", "bigint", "float", "double", "decimal(5,0)")),
    *(("integer", kind, [-(2**31), 2**31 - 1, 2**24 + 1]) for kind in ("bigint", "double", "decimal(10,0)", "decimal(38,28)")),
    ("bigint", "decimal(19,0)", [-(2**63), 2**63 - 1]),
    ("real", "double", [float32 := 13421773 * 2.0**-27, -(2.0**-149), (2 - 2.0**-23) * 2.0**127, float("-inf")]),
    ("real", "float", [float32, 2.0**-149]),
    ("double precision", "double", [5e-324, 1.7976931348623157e308, 2.0**53 + 2]),
]


def test_a_wider_type_has_each_value(shop: Shop) -> None:
    """Up to the bounds; a type that would round one is refused."""
    for postgres_type, declared, values in WIDER:
        shop.run(f"DROP TABLE IF EXISTS wide; CREATE TABLE wide (id serial, v {postgres_type})")
        for value in values:
            shop.execute(
                f"INSERT INTO wide (v) VALUES (%s::float8::{postgres_type})"
                if isinstance(value, float)
                else "INSERT INTO wide (v) VALUES (%s)",
                [value],
            )
        source = PostgresTable(table="wide", key="id", schema={"id": "int", "v": declared}, wait_seconds=0)
        assert [value for _, value in shop.rows(source, shop.planned(source))] == values, (postgres_type, declared)
    for postgres_type, declared in (
        ("bigint", "double"),
        ("integer", "float"),
        ("numeric(9,0)", "double"),
        ("double precision", "float"),
    ):
        shop.run(f"DROP TABLE wide; CREATE TABLE wide (id serial, v {postgres_type}); INSERT INTO wide (v) VALUES (1)")
        source = PostgresTable(table="wide", key="id", schema={"id": "int", "v": declared}, wait_seconds=0)
        refused(shop, source, SourceUnreadable, message=f"which cannot be read as {declared}")


@pytest.mark.parametrize(
    ("postgres_type", "value", "spark_type", "shown"),
    [
        ("bigint", "2147483648", "int", "'2147483648'"),
        ("numeric", "1.005", "decimal(10,2)", "'1.005'"),
        ("numeric", "1000", "decimal(5,2)", "'1000'"),
        ("timestamptz", "'infinity'", "timestamp", "'infinity'"),
        ("date", "'0044-03-15 BC'", "date", "'0044-03-15 BC'"),
    ],
)
def test_a_value_that_does_not_fit_fails_with_column_and_key(
    shop: Shop, postgres_type: str, value: str, spark_type: str, shown: str
) -> None:
    shop.run(f"CREATE TABLE odd (id serial, v {postgres_type}); INSERT INTO odd (v) SELECT NULL FROM generate_series(1, 100)")
    shop.run(f"INSERT INTO odd (v) VALUES ({value}), (NULL)")
    source = PostgresTable(table="odd", key="id", schema={"id": "int", "v": spark_type}, wait_seconds=0)
    with pytest.raises(MalformedRecord, match=r"^Table odd, row id=101: v=") as refusal:
        shop.rows(source, shop.planned(source))
    assert f"{shown} does not fit {spark_type}" in str(refusal.value)
    assert "CASE WHEN ... THEN v END" in str(refusal.value)


def test_long_texts_and_many_rows_pass_through_blocks(shop: Shop) -> None:
    shop.execute("INSERT INTO orders (name) SELECT repeat(E'x\"\\n', 50000) FROM generate_series(1, 40)")
    shop.execute("INSERT INTO orders (name) VALUES (repeat('long ', %s))", [BLOCK_BYTES])
    shop.sell(5000)
    rows = shop.rows(ORDERS, shop.planned(replace(ORDERS, partitions=1)))
    assert rows == shop.execute("SELECT id, name, amount FROM orders ORDER BY id")


def test_the_kind_is_what_the_key_can_promise() -> None:
    assert (ORDERS.kind, DATED.kind, replace(DATED, kind="transactional").kind) == ("transactional", "opaque", "transactional")
    assert PostgresTable(table="t", key="at", schema={"at": "timestamp"}).kind == "opaque"


def test_the_identity_says_which_rows_and_where() -> None:
    connection = {"host": "a", "dbname": "b", "user": "c", "passfile": "/secret/place"}
    there = replace(ORDERS, connection=connection)
    assert '"host": "a"' in there.identity
    assert "/secret/place" not in there.identity
    assert ORDERS.identity == replace(ORDERS, max_rows=5, partitions=9, wait_seconds=3).identity
    others = [there, replace(ORDERS, table="others"), replace(ORDERS, schema={**SCHEMA, "amount": "bigint"}), DATED]
    others += [replace(ORDERS, table=None, query="orders"), replace(there, connection={**connection, "dbname": "d"})]
    assert len({ORDERS.identity, *(other.identity for other in others)}) == len(others) + 1
