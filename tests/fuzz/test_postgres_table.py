"""Random tables, writers and mishaps: each committed row is read exactly once, or a plan refuses and says why.

The oracle is the writers' knowledge: a row counts if its transaction was committed. ``SOAK`` runs many more rounds, and
``FUZZ_SEED`` one of them.
"""

import json
import os
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg2
import pytest

from tests.sources.shop import Shop, shop, shops
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.state_store.base.errors import AccessRefused, MalformedRecord, SourceChanged, SourceUnreadable, TidegateError

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
LAYOUTS = ["plain", "plain", "partitioned", "inherited", "view", "query"]


@dataclass
class Written:
    """The ids of committed rows, in the order in which their writers learnt of the commit."""

    ids: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, ids: list[int]) -> None:
        with self.lock:
            self.ids += ids


class Round:
    def __init__(self, shop: Shop, seed: int) -> None:
        self.draw = random.Random(seed)
        self.shop = shop
        self.written = Written()
        self.layout = self.draw.choice(LAYOUTS)
        self.by_time = self.draw.random() < 0.3
        types = [self.draw.choice(list(VALUES)) for _ in range(self.draw.randint(1, 4))]
        self.columns = {f"c{number}": kind for number, kind in enumerate(types)}
        self._create()
        self.source = self._source()

    def _create(self) -> None:
        kinds = ["bigserial", "serial"] if self.layout == "inherited" else ["bigserial", "bigint GENERATED ALWAYS AS IDENTITY"]
        key = self.draw.choice(kinds)  # a child inherits a default, but no identity
        key = key if self.by_time or self.draw.random() < 0.9 else "numeric DEFAULT nextval('numbers')"
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        self.shop.execute("DROP TABLE orders")
        self.shop.execute("CREATE SEQUENCE numbers")
        partitioned = " PARTITION BY LIST (part)" if self.layout == "partitioned" else ""
        self.shop.execute(
            f"CREATE TABLE orders (id {key} NOT NULL, at timestamptz NOT NULL DEFAULT now(),"
            f" mark uuid NOT NULL DEFAULT gen_random_uuid(), part int NOT NULL DEFAULT 0, {columns}){partitioned}"
        )
        if partitioned:
            self.shop.execute("CREATE TABLE orders_0 PARTITION OF orders FOR VALUES IN (0)")
            self.shop.execute("CREATE TABLE orders_1 PARTITION OF orders FOR VALUES IN (1)")
        else:
            self.shop.execute("CREATE INDEX ON orders (id)")
        if self.layout == "inherited":
            self.shop.execute("CREATE TABLE more () INHERITS (orders)")
        if self.layout == "view":
            self.shop.execute("CREATE VIEW shown AS SELECT * FROM orders")

    def _source(self) -> PostgresTable:
        place = {"query": "SELECT * FROM orders -- all"} if self.layout == "query" else {"table": "orders"}
        place = {"table": "shown"} if self.layout == "view" else place
        schema = {"at": "timestamp", "id": "decimal(38,0)", "mark": "string"} | {
            name: VALUES[kind][0] for name, kind in self.columns.items()
        }
        return PostgresTable(
            **place,
            key=("at", "id") if self.by_time else "id",
            schema=schema,
            max_rows=self.draw.choice([1, 3, 10, 50, 1000]),
            partitions=self.draw.choice([1, 2, 5]),
            wait_seconds=self.draw.choice([0, 0.05, 1]),
            margin_seconds=0,
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
        draw = random.Random(seed)
        with ExitStack() as stack:
            connection = psycopg2.connect(**self.shop.settings.conninfo(user=self.shop.settings.pg_owner))
            stack.callback(connection.close)
            for _ in range(transactions):
                ids: list[int] = []
                with connection.cursor() as cursor:
                    for _ in range(draw.choice([1, 1, 2, 4])):
                        cursor.execute("SAVEPOINT one")
                        cursor.execute(self.insert(draw, draw.choice([1, 1, 3, 20])))
                        added = [int(row[0]) for row in cursor.fetchall()]
                        if draw.random() < 0.2:
                            cursor.execute("ROLLBACK TO one")
                            added = []
                        ids += added
                        time.sleep(draw.choice([0, 0, 0.002, 0.02]))
                if draw.random() < 0.25:
                    connection.rollback()
                else:
                    connection.commit()
                    self.written.add(ids)

    def read(self, metadata: dict[str, Any]) -> list[tuple]:
        """Return the rows of a batch, after the same checks as at an attempt."""
        return self.shop.rows(self.source, metadata)


def planned(current: Round, previous: dict | None) -> list[dict]:
    coordinator, batches = coordinator_of(current.source, current.shop.settings), []
    while metadata := coordinator.initialize_transaction(1, previous, None):
        previous = dict(json.loads(json.dumps(metadata)))
        batches.append(previous)
    return batches


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
    writers = [
        threading.Thread(target=current.write, args=(seed * 10 + number, current.draw.choice([3, 8, 15])))
        for number in range(current.draw.randint(1, 4))
    ]
    for writer in writers:
        writer.start()
    read: dict[int, tuple] = {}
    previous: dict | None = None
    is_last = False
    deadline = time.monotonic() + 60
    while True:
        is_last = not any(writer.is_alive() for writer in writers)
        batches = planned(current, previous)
        for previous in batches:
            rows = current.read(previous)
            assert rows == current.read(previous), f"seed {seed}: a replay differs"
            position = list(current.source.schema).index("id")
            for row in rows:
                assert int(row[position]) not in read, f"seed {seed}: row {row} came twice"
                read[int(row[position])] = row
        if is_last and not batches and len(read) >= len(current.written.ids):
            break
        assert time.monotonic() < deadline, f"seed {seed}: {len(read)} of {len(current.written.ids)} rows were read"
        if current.draw.random() < 0.3:
            statement = current.draw.choice(HARMLESS)
            if "DELETE" not in statement or current.layout in ("plain", "partitioned"):
                shop.execute(statement, {"read": list(read)})
    assert sorted(read) == sorted(current.written.ids), f"seed {seed}"
    names = list(current.source.schema)
    kinds = {"at": "timestamptz", "id": "numeric", "mark": "uuid"} | current.columns
    casts = [f"{name}::text" if current.source.schema[name] == "string" else name for name in names]
    # numbers as decimals: by their texts, for a double has more digits than a cast keeps
    casts = [f"{name}::text::numeric" if kinds[name].startswith("double") and "::" not in cast else cast
             for name, cast in zip(names, casts, strict=True)]  # fmt: skip
    shop.execute("SET timezone = 'UTC'")
    for row in shop.execute(f"SELECT {', '.join(casts)} FROM orders"):
        expected = tuple(bytes(value) if isinstance(value, memoryview) else value for value in row)
        assert read[int(expected[names.index("id")])] == expected, f"seed {seed}"


# Statements that should never be run on such a table; SEQUENCE is the sequence that draws the key.
MISHAPS: dict[str, list[str]] = {
    "set back": ["SELECT setval('SEQUENCE', 1, false)"],
    "restarted": ["ALTER SEQUENCE SEQUENCE RESTART"],
    "truncated and restarted": ["TRUNCATE orders", "ALTER SEQUENCE SEQUENCE RESTART"],
    "emptied and restarted": ["DELETE FROM orders WHERE id > 3", "ALTER SEQUENCE SEQUENCE RESTART"],
    "counting down": ["ALTER SEQUENCE SEQUENCE INCREMENT -1 MINVALUE -99"],
    "in steps": ["ALTER SEQUENCE SEQUENCE INCREMENT 7"],
    "cached": ["ALTER SEQUENCE SEQUENCE CACHE 10"],
    "a key by hand, far above": ["INSERT INTO orders (id) OVERRIDING SYSTEM VALUE VALUES (100000)"],
    "a key by hand, below": ["INSERT INTO orders (id) OVERRIDING SYSTEM VALUE VALUES (-5)"],
    "a key twice": ["INSERT INTO orders (id) OVERRIDING SYSTEM VALUE SELECT max(id) FROM orders HAVING max(id) IS NOT NULL"],
    "hidden": [
        "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY odd ON orders USING (id % 2 = 1)",
        "ALTER TABLE orders FORCE ROW LEVEL SECURITY",
    ],
    "a partition with old rows": [
        "CREATE TABLE orders_2 (LIKE orders)",
        "INSERT INTO orders_2 (id, part, at, mark) SELECT id, 2, at, gen_random_uuid() FROM orders ORDER BY id LIMIT 2",
        "ALTER TABLE orders ATTACH PARTITION orders_2 FOR VALUES IN (2)",
    ],
    "renamed": [
        "ALTER TABLE orders ADD other bigserial",
        "ALTER TABLE orders RENAME id TO gone",
        "ALTER TABLE orders RENAME other TO id",
    ],
    "unlogged": ["ALTER TABLE orders SET UNLOGGED"],
}


@pytest.mark.promise("I12")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", ONE or range(50 * len(MISHAPS) if IS_LONG else len(MISHAPS)))
def test_a_mishap_is_refused_or_costs_nothing(shop: Shop, seed: int) -> None:
    current = Round(shop, seed)
    current.by_time = False
    current.source = replace(current._source(), key="id", wait_seconds=0, kind=None)
    names = list(MISHAPS)
    name = names[seed % len(names)]
    for _ in range(current.draw.randint(1, 3)):
        current.write(current.draw.randrange(10**9), 3)
    read: Counter[str] = Counter()

    def count(rows: list[tuple]) -> None:
        position = list(current.source.schema).index("mark")
        read.update(row[position] for row in rows)

    batches = planned(current, None)
    for batch in batches:
        count(current.read(batch))
    try:
        [(sequence,)] = shop.execute("SELECT coalesce(pg_get_serial_sequence('orders', 'id'), 'numbers')")
        for statement in MISHAPS[name]:
            shop.execute(statement.replace("SEQUENCE SEQUENCE", f"SEQUENCE {sequence}").replace("'SEQUENCE'", f"'{sequence}'"))
        for _ in range(current.draw.randint(1, 12)):
            shop.execute(current.insert(current.draw, 1))
        if current.draw.random() < 0.5:
            shop.execute("DELETE FROM orders WHERE id = (SELECT min(id) FROM orders)")
    except psycopg2.Error as error:  # Postgres itself refuses it
        assert error.pgcode, name
        return
    last = batches[-1] if batches else None
    try:
        for batch in planned(current, last):
            count(current.read(batch))
    except TidegateError as refusal:
        assert isinstance(refusal, REFUSALS), f"seed {seed}, {name}"
        assert "\n" not in str(refusal)
        return
    missing = {row[0] for row in shop.execute("SELECT mark::text FROM orders")} - set(read)
    assert not missing, f"seed {seed}, {name}, {current.layout}: {len(missing)} rows are passed by"
    assert max(read.values(), default=1) == 1, f"seed {seed}, {name}: rows came twice"
