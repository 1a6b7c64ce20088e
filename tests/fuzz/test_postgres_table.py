"""Random tables, writers and mishaps: a row that its writer committed is read once, or a plan refuses. FUZZ_SEED is a round."""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg2
import pytest

from tests.sources.shop import Shop, shop, shops
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.state_store.base.errors import AccessRefused, MalformedRecord, SourceChanged, SourceUnreadable

__all__ = ["shop", "shops"]  # fixtures

IS_LONG = bool(os.environ.get("SOAK"))
ONE = [int(seed)] if (seed := os.environ.get("FUZZ_SEED")) else None
REFUSALS = (SourceChanged, SourceUnreadable, AccessRefused, MalformedRecord)
# The expression that fills each type; the expected values are read back from Postgres.
VALUES: dict[str, tuple[str, list[str]]] = {
    "text": ("string", ["''", "' '", "E'\\n\"'", "'\\.'", "'\\N'", "'a,b'", "U&'\\+01F30A'", "repeat('x', 5000)", "'\ufeff'"]),
    "numeric": ("decimal(38,10)", ["0", "-1.10", "1e-10", "9999999999999999999999999999.9999999999", "1.000"]),
    "double precision": ("decimal(38,17)", ["0.1", "-0.0", "1e15", "123456.789", "1e-17"]),
    "double precision[]": ("string", ["'{}'", "'{NaN,NULL}'"]),
    "uuid": ("string", ["gen_random_uuid()", "'00000000-0000-0000-0000-000000000000'"]),
    "timestamp": ("timestamp_ntz", ["'0001-01-01'", "'9999-12-31 23:59:59.999999'", "'2026-03-29 02:30'", "now()::timestamp"]),
    "timestamptz": ("timestamp", ["'0001-01-02 UTC'", "'9999-12-30 23:59:59.999999 UTC'", "clock_timestamp()"]),
    "bytea": ("binary", ["''", "'\\x00ff'", "'\\x5c4e'", "decode(repeat('00ff', 3000), 'hex')"]),
    "jsonb": ("string", ["'null'", '\'{"a": [1, "\\u00e9"]}\'', "'1e400'", "'\"\"'"]),
    "boolean": ("boolean", ["true", "false"]),
    "date": ("date", ["'0001-01-01'", "'9999-12-31'", "'2024-02-29'"]),
    "bigint": ("bigint", ["-9223372036854775808", "9223372036854775807", "0"]),
    "interval": ("string", ["'1 month -3 days'", "'00:00:00.000001'"]),
}
OF_ALL = {"at": "timestamp", "id": "decimal(38,0)", "mark": "string"}
LAYOUTS = ["plain", "plain", "partitioned", "inherited", "view", "query"]
OF_LAYOUT = {
    "partitioned": "CREATE TABLE orders_0 PARTITION OF orders FOR VALUES IN (0);"
    " CREATE TABLE orders_1 PARTITION OF orders FOR VALUES IN (1)",
    "inherited": "CREATE INDEX ON orders (id); CREATE TABLE more () INHERITS (orders)",
    "view": "CREATE INDEX ON orders (id); CREATE VIEW shown AS SELECT * FROM orders",
}


class Round:
    """A drawn table, a source that reads it, and the ids of the rows that its writers have committed."""

    def __init__(self, shop: Shop, seed: int, **source: Any) -> None:
        self.draw, self.shop, self.written = random.Random(seed), shop, list[int]()
        self.layout = self.draw.choice(LAYOUTS)
        by_time = "key" not in source and self.draw.random() < 0.3
        kinds = self.draw.choices(list(VALUES), k=self.draw.randint(1, 4))
        self.columns = {f"c{number}": kind for number, kind in enumerate(kinds)}
        self._create(has_serial=by_time or self.draw.random() < 0.9)
        places = {"query": {"query": "SELECT * FROM orders -- all"}, "view": {"table": "shown"}}
        usual = {
            "key": ("at", "id") if by_time else "id",
            "schema": OF_ALL | {name: VALUES[kind][0] for name, kind in self.columns.items()},
            "max_rows": self.draw.choice([1, 3, 10, 50, 1000]),
            "partitions": self.draw.choice([1, 2, 5]),
            "wait_seconds": self.draw.choice([0, 0.05, 1]),
        }
        self.source = PostgresTable(**places.get(self.layout, {"table": "orders"}), margin_seconds=0, **{**usual, **source})
        self.names = list(self.source.schema)

    def _create(self, *, has_serial: bool) -> None:
        kinds = ["bigserial", "serial"] if self.layout == "inherited" else ["bigserial", "bigint GENERATED ALWAYS AS IDENTITY"]
        key = self.draw.choice(kinds) if has_serial else "numeric DEFAULT nextval('numbers')"  # a child inherits no identity
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        partitioned = " PARTITION BY LIST (part)" if self.layout == "partitioned" else ""
        self.shop.run(
            f"DROP TABLE orders; CREATE SEQUENCE numbers; CREATE TABLE orders (id {key} NOT NULL, {columns},"
            " at timestamptz NOT NULL DEFAULT now(), mark uuid NOT NULL DEFAULT gen_random_uuid(), part int NOT NULL DEFAULT 0)"
            f"{partitioned}; "
            f"{OF_LAYOUT.get(self.layout, 'CREATE INDEX ON orders (id)')}"
        )

    def insert(self, draw: random.Random, rows: int) -> str:
        values = []
        for _ in range(rows):
            odd = ["NULL" if draw.random() < 0.15 else draw.choice(VALUES[kind][1]) for kind in self.columns.values()]
            values.append(f"({', '.join([str(draw.randint(0, 1)), *odd])})")
        table = draw.choice(["orders", "more"]) if self.layout == "inherited" else "orders"
        return f"INSERT INTO {table} (part, {', '.join(self.columns)}) VALUES {', '.join(values)} RETURNING id"

    def write(self, seed: int, transactions: int) -> None:
        """Run one writer: transactions of some statements, committed or not, partly rolled back, with pauses."""
        draw, settings = random.Random(seed), self.shop.settings
        with closing(psycopg2.connect(**settings.conninfo(user=settings.pg_owner))) as connection:
            for _ in range(transactions):
                ids: list[int] = []
                with connection.cursor() as cursor:
                    for _ in range(draw.choice([1, 1, 2, 4])):
                        cursor.execute("SAVEPOINT one")
                        cursor.execute(self.insert(draw, draw.choice([1, 1, 3, 20])))
                        added = [int(row[0]) for row in cursor.fetchall()]
                        if draw.random() < 0.2:
                            cursor.execute("ROLLBACK TO one")
                        else:
                            ids += added
                        time.sleep(draw.choice([0, 0, 0.002, 0.02]))
                if draw.random() < 0.25:
                    connection.rollback()
                else:
                    connection.commit()
                    self.written.extend(ids)

    def batches(self, previous: Any = None) -> Iterator[dict[str, Any]]:
        coordinator = coordinator_of(self.source, self.shop.settings)
        while metadata := coordinator.initialize_transaction(1, previous, None):
            previous = json.loads(json.dumps(metadata))
            yield previous

    def stored(self) -> Iterator[list[Any]]:
        """Yield the rows that there are, with numbers as decimals: by their texts, as a double has more digits than a cast."""
        doubles = {name: "::text::numeric" for name, kind in self.columns.items() if kind == "double precision"}
        casts = {name: "::text" for name, kind in self.source.schema.items() if kind == "string"} | doubles
        columns = [f"{name}{casts.get(name, '')}" for name in self.names]
        self.shop.execute("SET timezone = 'UTC'")
        for row in self.shop.execute(f"SELECT {', '.join(columns)} FROM orders"):
            yield [bytes(value) if isinstance(value, memoryview) else value for value in row]

    def read(self, metadata: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of a batch, after the same checks as at an attempt."""
        return [dict(zip(self.names, row, strict=True)) for row in self.shop.rows(self.source, metadata)]


HARMLESS = [
    "DELETE FROM orders WHERE id < (SELECT max(id) FROM orders) / 3 AND id = ANY(%(read)s::bigint[])",
    "VACUUM FULL orders",
    "ALTER TABLE orders ADD IF NOT EXISTS later uuid DEFAULT gen_random_uuid()",
    "ANALYZE orders",
    "CREATE INDEX ON orders (at)",
]


@pytest.mark.promise("I12", "decision:0015")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", ONE or range(400 if IS_LONG else 6))
def test_each_committed_row_is_read_once_despite_concurrent_writers(shop: Shop, seed: int) -> None:
    current = Round(shop, seed)
    with ThreadPoolExecutor(4) as pool:
        seeds = range(seed * 10, seed * 10 + current.draw.randint(1, 4))
        writers = [pool.submit(current.write, each, current.draw.choice([3, 8, 15])) for each in seeds]
        read: dict[int, dict[str, Any]] = {}
        previous, is_last, found, deadline = None, False, 0, time.monotonic() + 300
        while not is_last or found or len(read) < len(current.written):
            assert time.monotonic() < deadline, f"{len(read)} of {len(current.written)} rows were read"
            is_last, found = all(writer.done() for writer in writers), 0
            for batch in current.batches(previous):
                rows, previous, found = current.read(batch), batch, found + 1
                assert rows == current.read(batch), "a replay differs"
                for row in rows:
                    assert read.setdefault(int(row["id"]), row) is row, "a row came twice"
            if current.draw.random() < 0.3:
                statement = current.draw.choice(HARMLESS)
                if "DELETE" not in statement or current.layout in ("plain", "partitioned"):
                    shop.execute(statement, {"read": list(read)})
    assert [writer.result() for writer in writers] == [None] * len(writers)
    assert sorted(read) == sorted(current.written)
    for there in current.stored():
        assert [*read[int(there[current.names.index("id")])].values()] == there


# What should never be run on such a table.
MISHAPS = [
    "SELECT setval('{sequence}', 1, false)",
    "ALTER SEQUENCE {sequence} RESTART",
    "TRUNCATE orders; ALTER SEQUENCE {sequence} RESTART",
    "DELETE FROM orders WHERE id > 3; ALTER SEQUENCE {sequence} RESTART",
    "ALTER SEQUENCE {sequence} INCREMENT -1 MINVALUE -99",
    "ALTER SEQUENCE {sequence} INCREMENT 7",
    "ALTER SEQUENCE {sequence} CACHE 10",
    "INSERT INTO orders (id) OVERRIDING SYSTEM VALUE VALUES (100000)",
    "INSERT INTO orders (id) OVERRIDING SYSTEM VALUE VALUES (-5)",
    "INSERT INTO orders (id) OVERRIDING SYSTEM VALUE SELECT max(id) FROM orders HAVING max(id) IS NOT NULL",
    "ALTER TABLE orders ENABLE ROW LEVEL SECURITY; CREATE POLICY odd ON orders USING (id % 2 = 1);"
    " ALTER TABLE orders FORCE ROW LEVEL SECURITY",
    "CREATE TABLE orders_2 (LIKE orders);"
    " INSERT INTO orders_2 (id, part, at, mark) SELECT id, 2, at, gen_random_uuid() FROM orders ORDER BY id LIMIT 2;"
    " ALTER TABLE orders ATTACH PARTITION orders_2 FOR VALUES IN (2)",
    "ALTER TABLE orders ADD other bigserial; ALTER TABLE orders RENAME id TO gone; ALTER TABLE orders RENAME other TO id",
    "ALTER TABLE orders SET UNLOGGED",
]


@pytest.mark.promise("I12")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", ONE or range(50 * len(MISHAPS) if IS_LONG else len(MISHAPS)))
def test_a_mishap_is_refused_or_costs_nothing(shop: Shop, seed: int) -> None:
    current = Round(shop, seed, key="id", wait_seconds=0)
    for _ in range(current.draw.randint(1, 3)):
        current.write(current.draw.randrange(10**9), 3)
    batches = list(current.batches())
    read = Counter(row["mark"] for batch in batches for row in current.read(batch))
    try:
        [(sequence,)] = shop.execute("SELECT coalesce(pg_get_serial_sequence('orders', 'id'), 'numbers')")
        shop.run(MISHAPS[seed % len(MISHAPS)].format(sequence=sequence))
        for _ in range(current.draw.randint(1, 12)):
            shop.execute(current.insert(current.draw, 1))
        if current.draw.random() < 0.5:
            shop.execute("DELETE FROM orders WHERE id = (SELECT min(id) FROM orders)")
    except psycopg2.Error as error:  # Postgres itself refuses it
        assert error.pgcode
        return
    try:
        for batch in current.batches(batches[-1] if batches else None):
            read.update(row["mark"] for row in current.read(batch))
    except REFUSALS as refusal:
        assert "\n" not in str(refusal)
        return
    missing = {row[0] for row in shop.execute("SELECT mark::text FROM orders")} - set(read)
    assert not missing, "rows are passed by"
    assert max(read.values(), default=1) == 1, "rows came twice"
