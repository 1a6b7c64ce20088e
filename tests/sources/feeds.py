"""Feeds put rows into sources, for the conformance suite and the engine's tests."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg2
import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import write_deltalake

from tests.conformance.conftest import Flow, Stream
from tests.conftest import register_pipelines
from tests.sources.iceberg_catalog import catalog
from tests.sources.s3 import Bucket
from tidegate.jobs import Changes, Delta, Files, FixedBatches, Iceberg, Inputs, Kafka, Pipeline, PostgresTable, Rows
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.jobs.testing import NotPossible
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings

SCHEMA = {"name": "string", "amount": "int"}
SECONDS = 60


class Feed:
    """Rows by their numbers, which a source gets two at a time."""

    _rows = 0

    def add(self, rows: list[tuple]) -> list[tuple]:
        """Add one or two rows; return them as the source has them."""
        raise NotImplementedError

    def put(self, count: int) -> list[tuple]:
        rows = [(f"row {number}", number) for number in range(self._rows, self._rows + count)]
        self._rows += count
        return [row for start in range(0, count, 2) for row in self.add(rows[start : start + 2])]

    def change(self) -> None:
        raise NotPossible

    def hide(self) -> Any:
        raise NotPossible


def csv_of(rows: list[tuple]) -> str:
    return "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)


class FilesFeed(Feed):
    """A folder of CSV files of two rows, two files a batch."""

    def __init__(self, settings: Settings, *, name: str, first_row: int = 0, **source: Any) -> None:
        self.folder = settings.home / name
        self.folder.mkdir()
        done = {"done_folder": f"{name}_done"} if source.pop("done", False) else {}
        self.source = Files(name, format="csv", schema=SCHEMA, max_files=2, **done, **source)
        self._rows, self._files = first_row, 0

    def add(self, rows: list[tuple]) -> list[tuple]:
        self._files += 1
        (self.folder / f"{self._files:03d}.csv").write_text(csv_of(rows))
        return rows

    def change(self) -> None:
        """Change a value but restore size and times, so that only the content differs."""
        path = self.folder / "001.csv"
        before = path.stat()
        path.write_text(path.read_text().replace("row 0,0", "row 0,9"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    @contextmanager
    def hide(self) -> Iterator[None]:
        path = self.folder / "002.csv"
        aside = path.with_suffix(".aside.tmp")
        path.rename(aside)
        yield
        aside.rename(path)


class InputsFeed:
    """Two folders of CSV files; the second gets half as many rows, so that it has none for some batches."""

    def __init__(self, settings: Settings, *, name: str, **source: Any) -> None:
        self._first = FilesFeed(settings, name=f"{name}_first", **source)
        self._second = FilesFeed(settings, name=f"{name}_second", first_row=1000)
        self.source = Inputs({"first": self._first.source, "second": self._second.source})

    def put(self, count: int) -> list[tuple]:
        return [*self._first.put(count), *self._second.put(count // 2)]

    def change(self) -> None:
        self._first.change()

    def hide(self) -> AbstractContextManager[None]:
        return self._first.hide()


class DataFilesFeed(Feed):
    """A table of data files, two rows a version, two data files a batch; base class of the formats."""

    def __init__(self, source: Any, folder: Path) -> None:
        self.source = source
        self._folder = folder

    def append(self, rows: pa.Table) -> None:
        raise NotImplementedError

    def add(self, rows: list[tuple]) -> list[tuple]:
        names, amounts = zip(*rows, strict=True)
        self.append(pa.table({"name": names, "amount": pa.array(amounts, pa.int32())}))
        return rows

    def change(self) -> None:
        """Change a byte of each data file, but restore sizes and times."""
        for path in self._folder.rglob("*.parquet"):
            before, content = path.stat(), path.read_bytes()
            path.write_bytes(content.replace(b"row 0", b"row 9"))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class DeltaFeed(DataFilesFeed):
    def __init__(self, settings: Settings, number: int) -> None:
        name = f"table_{number}"
        super().__init__(Delta(name, schema=SCHEMA, max_files=2), settings.home / name)

    def append(self, rows: pa.Table) -> None:
        write_deltalake(str(self._folder), rows, mode="append")


class IcebergFeed(DataFilesFeed):
    def __init__(self, _settings: Settings, number: int) -> None:
        name = f"feeds.rows_{number}_{uuid.uuid4().hex}"
        catalog().create_namespace_if_not_exists("feeds")
        self._table = catalog().create_table(name, pa.schema([("name", pa.string()), ("amount", pa.int32())]))
        folder = Path(urlsplit(self._table.location()).path)
        super().__init__(Iceberg(f"lake.{name}", schema=SCHEMA, max_files=2), folder)

    def append(self, rows: pa.Table) -> None:
        self._table.append(rows)


class FixedFeed(Feed):
    def __init__(self) -> None:
        self._batches: list[list[tuple]] = []

    @property
    def source(self) -> FixedBatches:
        return FixedBatches(self._batches, SCHEMA)

    def add(self, rows: list[tuple]) -> list[tuple]:
        self._batches.append(rows)
        return rows

    def change(self) -> None:
        self._batches[0][0] = ("row 0", 9)


class TableFeed(Feed):
    def __init__(self, settings: Settings, *, by_time: bool) -> None:
        self._settings = settings
        # Each promise has a feed of its own, so it gets a table of its own.
        self.table = self._run("SELECT 'feed_' || count(*) FROM pg_tables WHERE tablename LIKE 'feed\\_%'")[0][0]
        when = "updated_at timestamptz DEFAULT clock_timestamp() NOT NULL, " if by_time else ""
        self._run(f"CREATE TABLE {self.table} ({when}id bigserial PRIMARY KEY, name text, amount int)")
        self._run(f"GRANT SELECT ON {self.table}, {self.table}_id_seq TO tidegate_stager")
        schema = {"id": "bigint", **SCHEMA}
        self.source = PostgresTable(
            table=self.table,
            key=("updated_at", "id") if by_time else "id",
            schema={"updated_at": "timestamp", **schema} if by_time else schema,
            max_rows=2,
            partitions=2,
            margin_seconds=0,
        )

    def add(self, rows: list[tuple]) -> list[tuple]:
        insert = f"INSERT INTO {self.table} (name, amount) VALUES (%s, %s) RETURNING {', '.join(self.source.schema)}"
        return [tuple(_as_spark_shows(value) for value in self._run(insert, row)[0]) for row in rows]

    def change(self) -> None:
        """Update a row in place, which an append-only table must not do."""
        self._run(f"UPDATE {self.table} SET amount = 9 WHERE name = 'row 0'")

    @contextmanager
    def hide(self) -> Iterator[None]:
        self._run(f"REVOKE SELECT ON {self.table} FROM tidegate_stager")
        yield
        self._run(f"GRANT SELECT ON {self.table} TO tidegate_stager")

    def _run(self, statement: str, values: tuple = ()) -> list[tuple]:
        with psycopg2.connect(**self._settings.conninfo(user="tidegate_owner")) as connection, connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []


class Unhidable(TableFeed):
    """A table that is read whole or fails: none of its rows can be left to a later batch."""

    def hide(self) -> Any:
        raise NotPossible


class ChangesFeed(Feed):
    """The appended rows of another pipeline, two rows a txid, a txid a batch."""

    def __init__(self, settings: Settings, number: int) -> None:
        self._settings = settings
        name = f"feed_{number}"
        states = {f"{name}_rows": Rows({"name": "text", "amount": "integer"})}
        pipeline = Pipeline(name, Stream("transactional"), states)
        register_pipelines(settings, pipeline)
        self._spec = pipeline.spec
        self.source = Changes(f"{name}.{name}_rows", max_txids=1, partitions=2)

    def add(self, rows: list[tuple]) -> list[tuple]:
        flow, placed = Flow(self._settings, self._spec), [(place, *row) for place, row in enumerate(rows)]
        (txid,) = flow.plan(len(rows), run_id=rows[0][0]) or []
        attempt = flow.start(txid)
        flow.seal(attempt, flow.stage(attempt, self._spec.states[0], placed))
        flow.commit(txid)
        flow.close()
        return [(txid, *row) for row in placed]

    def change(self) -> None:
        """Delete a row, which no role but the owner may do."""
        with psycopg2.connect(**self._settings.conninfo(user="tidegate_owner")) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT set_config('tidegate.writer', %s, true)", [self._spec.name])
            cursor.execute(f"DELETE FROM state.{self._spec.states[0].name} WHERE name = 'row 0'")


class ObjectsFeed(Feed):
    """Objects of two rows of CSV below a prefix, two objects a batch."""

    def __init__(self, bucket: Bucket, prefix: str = "in/box", **source: Any) -> None:
        self.bucket = bucket
        self._prefix = prefix
        self.source = Files(f"{bucket.url}/{prefix}", format="csv", schema=SCHEMA, max_files=2, **source)
        self._objects = 0

    def add(self, rows: list[tuple]) -> list[tuple]:
        self._objects += 1
        self.bucket.put(f"{self._prefix}/{self._objects:03d}.csv", csv_of(rows))
        return rows

    def put(self, count: int) -> list[tuple]:
        before, rows = self._objects, super().put(count)
        if self.source.manifests:
            names = (f"{number:03d}.csv\n" for number in range(before + 1, self._objects + 1))
            self.bucket.put(f"{self._prefix}/{self.source.manifests}/{before:03d}", "".join(names))
        return rows

    def change(self) -> None:
        """Change a value, so that size and number of rows stay the same."""
        self.bucket.put(f"{self._prefix}/001.csv", self.bucket.get(f"{self._prefix}/001.csv").replace(b"row 0,0", b"row 0,9"))

    @contextmanager
    def hide(self) -> Iterator[None]:
        content = self.bucket.get(f"{self._prefix}/002.csv")
        self.bucket.delete(f"{self._prefix}/002.csv")
        yield
        self.bucket.put(f"{self._prefix}/002.csv", content)


class KafkaFeed(Feed):
    """A topic of two partitions, two records a batch.

    A record cannot be changed, and partitions without a leader need a second broker: both have tests of their own.
    """

    def __init__(self, settings: Settings, kind: Any) -> None:
        self._settings = settings
        self._admin = AdminClient({**kafka_client(settings), "log_level": 0})
        self._producer = Producer({**kafka_client(settings), "log_level": 0})
        self.topic = f"feed.{uuid.uuid4().hex[:12]}"
        self._admin.create_topics([NewTopic(self.topic, 2, 1)])[self.topic].result(SECONDS)
        assert wait_until(lambda: self.topic in self._admin.list_topics(timeout=SECONDS).topics, SECONDS)
        self.source = Kafka(self.topic, kind=kind, max_records=2)

    def add(self, rows: list[tuple]) -> list[tuple]:
        put: list[tuple] = []

        def confirmed(error: Any, message: Any) -> None:
            assert error is None, error
            when = datetime.fromtimestamp(message.timestamp()[1] / 1000)
            place = (message.topic(), message.partition(), message.offset())
            put.append((bytes(message.key()), bytes(message.value()), *place, when))

        for name, number in rows:
            self._producer.produce(self.topic, key=name, value=str(number), partition=number % 2, on_delivery=confirmed)
        assert self._producer.flush(SECONDS) == 0
        return put


def _as_spark_shows(value: Any) -> Any:
    """Return a time as Spark's client shows it: local, without its zone."""
    return value.astimezone().replace(tzinfo=None) if isinstance(value, datetime) else value


def _files(**source: Any) -> Callable[[Settings, int], FilesFeed]:
    return lambda settings, number: FilesFeed(settings, name=f"inbox_{number}", **source)


FEEDS: dict[str, Callable[[Settings, int], Any]] = {
    "Files": _files(),
    "Files with a done folder": _files(done=True),
    "opaque Files": _files(kind="opaque"),
    "opaque Files with a done folder": _files(kind="opaque", done=True),
    "Inputs": lambda settings, number: InputsFeed(settings, name=f"inbox_{number}"),
    "opaque Inputs": lambda settings, number: InputsFeed(settings, name=f"inbox_{number}", kind="opaque"),
    "Delta": DeltaFeed,
    "Iceberg": IcebergFeed,
    "FixedBatches": lambda _settings, _number: FixedFeed(),
    "Changes": ChangesFeed,
    "PostgresTable by key": lambda settings, _number: TableFeed(settings, by_time=False),
    "PostgresTable by time": lambda settings, _number: Unhidable(settings, by_time=True),
}
