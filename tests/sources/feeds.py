"""Feeds put rows into sources, for the conformance suite and the engine's tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.batches import Stream
from tests.conftest import register_pipelines
from tests.integration.conftest import Tally
from tests.sources.in_process import SCHEMA, overwrite
from tests.sources.lake_tables import DeltaLakeTable, IcebergTable
from tests.statements import execute
from tidegate.jobs import Changes, Files, FixedBatches, Inputs, Pipeline, PostgresTable, Rows
from tidegate.jobs.testing import NotPossible
from tidegate.state_store import Settings, StateStore


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


class Disk:
    """A place of files, which can do what a bucket can."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, folder.name
        folder.mkdir(parents=True)

    def put(self, key: str, content: bytes | str) -> None:
        """Write a file; one that is there keeps its times, so that only its content differs."""
        path = self.folder / key
        (overwrite if path.exists() else Path.write_bytes)(path, content.encode() if isinstance(content, str) else content)

    def get(self, key: str) -> bytes:
        return (self.folder / key).read_bytes()

    def delete(self, key: str) -> None:
        (self.folder / key).unlink()


class FilesFeed(Feed):
    """CSV files of two rows on a disk or in a bucket, two files a batch."""

    def __init__(self, place: Any, prefix: str = "", *, first_row: int = 0, **source: Any) -> None:
        self.place, self._prefix = place, prefix
        self.source = Files(f"{place.url}/{prefix}".rstrip("/"), format="csv", schema=SCHEMA, max_files=2, **source)
        self._rows, self._files, self._manifests = first_row, 0, source.get("manifests")

    def _key(self, name: Any) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    def add(self, rows: list[tuple]) -> list[tuple]:
        self._files += 1
        content = "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)
        self.place.put(self._key(f"{self._files:03d}.csv"), content)
        if self._manifests:
            self.place.put(self._key(f"{self._manifests}/{self._files:03d}"), f"{self._files:03d}.csv\n")
        return rows

    def change(self) -> None:
        """Change a value, so that size and number of rows stay the same."""
        key = self._key("001.csv")
        self.place.put(key, self.place.get(key).replace(b"row 0,0", b"row 0,9"))

    @contextmanager
    def hide(self) -> Iterator[None]:
        key = self._key("002.csv")
        content = self.place.get(key)
        self.place.delete(key)
        yield
        self.place.put(key, content)


class InputsFeed(FilesFeed):
    """Two folders of CSV files; the second gets half as many rows, so that it has none for some batches."""

    def __init__(self, settings: Settings, name: str, **source: Any) -> None:
        super().__init__(Disk(settings.home / f"{name}_first"), **source)
        self._second = FilesFeed(Disk(settings.home / f"{name}_second"), first_row=1000)
        self.source = Inputs({"first": self.source, "second": self._second.source})

    def put(self, count: int) -> list[tuple]:
        return [*super().put(count), *self._second.put(count // 2)]


class LakeFeed(Feed):
    """A table of data files, two rows a version, two data files a batch."""

    def __init__(self, table: DeltaLakeTable | IcebergTable) -> None:
        self._table = table
        self.source = table.follow(max_files=2).source

    def add(self, rows: list[tuple]) -> list[tuple]:
        self._table.append(*rows)
        return rows

    def change(self) -> None:
        """Change a byte of each data file, but restore sizes and times."""
        for path in self._table.folder.rglob("*.parquet"):
            overwrite(path, path.read_bytes().replace(b"row 0", b"row 9"))


class FixedFeed(Feed):
    def __init__(self) -> None:
        self._batches: list[list[tuple]] = []
        self.source = FixedBatches(self._batches, SCHEMA)

    def add(self, rows: list[tuple]) -> list[tuple]:
        self._batches.append(rows)
        return rows

    def change(self) -> None:
        self._batches[0][0] = ("row 0", 9)


class TableFeed(Feed):
    def __init__(self, settings: Settings, *, by_time: bool) -> None:
        self._owner = settings.conninfo(user="tidegate_owner")
        # Each promise has a feed of its own, so it gets a table of its own.
        self.table = self._run("SELECT 'feed_' || count(*) FROM pg_tables WHERE tablename LIKE 'feed\\_%'")[0][0]
        when = "updated_at timestamptz DEFAULT clock_timestamp() NOT NULL, " if by_time else ""
        self._run(f"CREATE TABLE {self.table} ({when}id bigserial PRIMARY KEY, name text, amount int)")
        self._run(f"GRANT SELECT ON {self.table}, {self.table}_id_seq TO tidegate_stager")
        source = PostgresTable(table=self.table, key="id", schema={"id": "bigint", **SCHEMA}, max_rows=2, partitions=2)
        timed = {"key": ("updated_at", "id"), "schema": {"updated_at": "timestamp", **source.schema}, "margin_seconds": 0}
        self.source = replace(source, kind="opaque", **timed) if by_time else source

    def add(self, rows: list[tuple]) -> list[tuple]:
        insert = f"INSERT INTO {self.table} (name, amount) VALUES (%s, %s) RETURNING {', '.join(self.source.schema)}"
        return [tuple(_as_spark_shows(value) for value in self._run(insert, row)[0]) for row in rows]

    def change(self) -> None:
        """Update a row in place, which an append-only table must not do."""
        self._run(f"UPDATE {self.table} SET amount = 9 WHERE name = 'row 0'")

    @contextmanager
    def hide(self) -> Iterator[None]:
        if self.source.is_by_clock:  # it is read whole or fails: none of its rows can be left to a later batch
            raise NotPossible
        self._run(f"REVOKE SELECT ON {self.table} FROM tidegate_stager")
        yield
        self._run(f"GRANT SELECT ON {self.table} TO tidegate_stager")

    def _run(self, statement: str, values: tuple = ()) -> list[tuple]:
        return execute(self._owner, statement, values or None)


def _as_spark_shows(value: Any) -> Any:
    """Return a time as Spark's client shows it: local, without its zone."""
    return value.astimezone().replace(tzinfo=None) if isinstance(value, datetime) else value


class ChangesFeed(Feed):
    """The appended rows of another pipeline, two rows a txid, a txid a batch."""

    def __init__(self, settings: Settings, number: int) -> None:
        self._settings = settings
        name = f"feed_{number}"
        pipeline = Pipeline(name, Stream("transactional"), {f"{name}_rows": Rows({"name": "text", "amount": "integer"})})
        register_pipelines(settings, pipeline)
        self._spec = pipeline.spec
        self.source = Changes(f"{name}.{name}_rows", max_txids=1, partitions=2)

    def add(self, rows: list[tuple]) -> list[tuple]:
        placed = [(place, *row) for place, row in enumerate(rows)]
        with StateStore.connect(self._settings) as store:
            flow = Tally(store, self._spec)
            (txid,) = flow.plan(run_id=rows[0][0])
            flow.process(txid, **{self._spec.states[0].name: placed})
            flow.commit(txid)
        return [(txid, *row) for row in placed]

    def change(self) -> None:
        """Delete a row, which no role but the owner may do."""
        as_writer = f"SELECT set_config('tidegate.writer', '{self._spec.name}', true)"
        delete = f"DELETE FROM state.{self._spec.states[0].name} WHERE name = 'row 0'"
        execute(self._settings.conninfo(user="tidegate_owner"), f"{as_writer}; {delete}")


def _files(**source: Any) -> Callable[[Settings, int], FilesFeed]:
    return lambda settings, number: FilesFeed(Disk(settings.home / f"inbox_{number}"), **source)


FEEDS: dict[str, Callable[[Settings, int], Any]] = {
    "Files": _files(),
    "Files with a done folder": _files(done_folder="done"),
    "opaque Files": _files(kind="opaque"),
    "opaque Files with a done folder": _files(kind="opaque", done_folder="done"),
    "Inputs": lambda settings, number: InputsFeed(settings, f"inbox_{number}"),
    "opaque Inputs": lambda settings, number: InputsFeed(settings, f"inbox_{number}", kind="opaque"),
    "Delta": lambda settings, number: LakeFeed(DeltaLakeTable(settings, f"table_{number}")),
    "Iceberg": lambda settings, _number: LakeFeed(IcebergTable(settings)),
    "FixedBatches": lambda _settings, _number: FixedFeed(),
    "Changes": ChangesFeed,
    "PostgresTable by key": lambda settings, _number: TableFeed(settings, by_time=False),
    "PostgresTable by time": lambda settings, _number: TableFeed(settings, by_time=True),
}
