"""Every source keeps the promises of its kind, as `jobs.testing` tells them; and the suite notices when one does not."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from jobs import Count, Files, FixedBatches, Pipeline, PostgresTable, State, Sum
from jobs.run import run_pipeline
from jobs.sources.fixed_batches import FixedCoordinator, FixedEmitter
from jobs.spark import spark_session
from jobs.testing import PROMISES, Bench, BrokenPromise, NotPossible, check_source, partials
from state_store import Settings, StateStore

SCHEMA = {"name": "string", "amount": "int"}


@pytest.fixture
def spark(settings: Settings) -> Iterator[SparkSession]:
    """The session that all tests of this folder share."""
    with spark_session(settings, "conformance") as session:
        yield session


class FilesFeed:
    """A folder of CSV files of two rows, two files a batch."""

    def __init__(self, settings: Settings, *, name: str, **source: Any) -> None:
        self.folder = settings.home / name
        self.folder.mkdir()
        done = {"done_folder": f"{name}_done"} if source.pop("done", False) else {}
        self.source = Files(name, format="csv", schema=SCHEMA, max_files=2, **done, **source)
        self._rows = self._files = 0

    def put(self, count: int) -> list[tuple]:
        """Write rows into new files."""
        rows = [(f"row {self._rows + number}", self._rows + number) for number in range(count)]
        self._rows += count
        for start in range(0, count, 2):
            self._files += 1
            lines = "".join(f"{name},{amount}\n" for name, amount in rows[start : start + 2])
            (self.folder / f"{self._files:03d}.csv").write_text("name,amount\n" + lines)
        return rows

    def change(self) -> None:
        """Change a value, and put back size and times, so that only the content tells."""
        path = self.folder / "001.csv"
        before = path.stat()
        path.write_text(path.read_text().replace("row 0,0", "row 0,9"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    @contextmanager
    def hide(self) -> Iterator[None]:
        """Take a file away for a while."""
        path = self.folder / "002.csv"
        aside = path.with_suffix(".aside.tmp")
        path.rename(aside)
        yield
        aside.rename(path)


class FixedFeed:
    """Lists of two rows."""

    def __init__(self) -> None:
        self._batches: list[list[tuple]] = []
        self._rows = 0

    @property
    def source(self) -> FixedBatches:
        """The source over the lists as they are now."""
        return FixedBatches(self._batches, SCHEMA)

    def put(self, count: int) -> list[tuple]:
        """Append lists."""
        rows = [(f"row {self._rows + number}", self._rows + number) for number in range(count)]
        self._rows += count
        self._batches += [rows[start : start + 2] for start in range(0, count, 2)]
        return rows

    def change(self) -> None:
        """Change a value."""
        self._batches[0][0] = ("row 0", 9)

    def hide(self) -> Any:
        """Refuse: lists in memory are always there."""
        raise NotPossible


class TableFeed:
    """A table, two rows a batch."""

    def __init__(self, settings: Settings, *, by_time: bool) -> None:
        self._settings = settings
        self._by_time = by_time
        self._rows = 0
        # Each promise has a feed of its own, so it gets a table of its own.
        self.table = self._run("SELECT 'feed_' || count(*) FROM pg_tables WHERE tablename LIKE 'feed\\_%'")[0][0]
        when = "updated_at timestamptz DEFAULT clock_timestamp() NOT NULL, " if by_time else ""
        self._run(f"CREATE TABLE {self.table} ({when}id bigserial PRIMARY KEY, name text, amount int)")
        self._run(f"GRANT SELECT ON {self.table} TO tidegate_stager")
        schema = {"id": "bigint", **SCHEMA}
        self.source = PostgresTable(
            table=self.table,
            key=("updated_at", "id") if by_time else "id",
            schema={"updated_at": "timestamp", **schema} if by_time else schema,
            max_rows=2,
            partitions=2,
            margin_seconds=0,
        )

    def put(self, count: int) -> list[tuple]:
        """Insert rows."""
        rows = [(f"row {self._rows + number}", self._rows + number) for number in range(count)]
        self._rows += count
        insert = f"INSERT INTO {self.table} (name, amount) VALUES (%s, %s) RETURNING {', '.join(self.source.schema)}"
        return [tuple(_as_spark_shows(value) for value in self._run(insert, row)[0]) for row in rows]

    def change(self) -> None:
        """Update a row in its place, which an append-only table must not."""
        self._run(f"UPDATE {self.table} SET amount = 9 WHERE name = 'row 0'")

    @contextmanager
    def hide(self) -> Iterator[None]:
        """Take the right to read away for a while."""
        self._run(f"REVOKE SELECT ON {self.table} FROM tidegate_stager")
        yield
        self._run(f"GRANT SELECT ON {self.table} TO tidegate_stager")

    def _run(self, statement: str, values: tuple = ()) -> list[tuple]:
        with psycopg2.connect(**self._settings.conninfo(user="tidegate_owner")) as connection, connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []


class Unhidable(TableFeed):
    """A table whose rows are there or fail as a whole: nothing of it can be left to a later batch."""

    def hide(self) -> Any:
        """Refuse."""
        raise NotPossible


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
    "FixedBatches": lambda _settings, _number: FixedFeed(),
    "PostgresTable by key": lambda settings, _number: TableFeed(settings, by_time=False),
    "PostgresTable by time": lambda settings, _number: Unhidable(settings, by_time=True),
}
CASES = [
    (name, promise)
    for name in FEEDS
    for promise in PROMISES["opaque" if "opaque" in name or "time" in name else "transactional"].items()
]


@pytest.fixture
def readable_statistics(server: Any) -> None:
    """Who reads by time has to see when open transactions began."""
    server.execute("GRANT pg_read_all_stats TO tidegate_stager")


@pytest.mark.parametrize(("feed", "promise"), CASES, ids=[f"{name}-{promise[0]}" for name, promise in CASES])
@pytest.mark.usefixtures("readable_statistics")
def test_a_source_keeps_its_promises(settings: Settings, spark: SparkSession, feed: str, promise: tuple) -> None:
    """Each source, each promise of its kind."""
    name, holds = promise
    try:
        holds(Bench(FEEDS[feed](settings, 0), spark, settings))
    except NotPossible:
        assert name in ("what_is_hidden_stops_the_replay", "what_is_hidden_comes_in_a_later_batch")


@pytest.mark.parametrize("tracking", ["full", "off"])
def test_rows_can_be_counted_without_any_of_their_values(settings: Settings, register: Any, tracking: str) -> None:
    """A global count needs no column, and still no bad record is read as a good one."""
    feed = FilesFeed(settings, name="inbox")
    feed.put(5)
    counted = Pipeline(
        name="conformance", source=feed.source, states={"total": State(aggregates={"rows": Count()})}, tracking=tracking
    )
    register(counted)
    run_pipeline(settings, counted, run_id="run")
    with StateStore.connect(settings) as store:
        assert [row["rows"] for row in store.state_rows(counted.spec.states[0])] == [5]


# the suite itself can fail


@dataclass(frozen=True)
class Broken(FixedBatches):
    """A source that breaks one promise."""

    fault: str = ""
    calls: list[int] = field(default_factory=list, compare=False)

    def coordinator(self, settings: Settings) -> FixedCoordinator:
        """Return a coordinator with the fault."""
        if self.fault == "restarts":
            return Restarting(self)
        return Endless(self) if self.fault == "endless" else super().coordinator(settings)

    def emitter(self, spark: SparkSession, settings: Settings) -> FixedEmitter:
        """Return an emitter with the fault."""
        del settings
        return Faulty(self, spark)


class Restarting(FixedCoordinator):
    """Forgets where it was."""

    def initialize_transaction(self, txid: int, previous: Any, current: Any) -> Any:
        """Start over with every plan."""
        return super().initialize_transaction(txid, previous if txid > 1 and previous["position"] == 0 else None, current)


class Endless(FixedCoordinator):
    """Always has one more."""

    def initialize_transaction(self, txid: int, previous: Any, current: Any) -> Any:
        """Return an empty batch for ever."""
        return super().initialize_transaction(txid, previous, current) or {"position": 10**6, "rows": 0, "sha256": ""}


class Faulty(FixedEmitter):
    """Loses or repeats rows, or depends on more than metadata."""

    def emit_batch(self, attempt: Any, metadata: Any) -> Any:
        """Return the rows with the fault."""
        rows = super().emit_batch(replace(attempt), metadata)
        fault = self._source.fault
        if fault == "loses a row":
            return rows.where(F.col("name") != "row 1")
        if fault == "repeats a row":
            return rows.union(rows.where(F.col("name") == "row 1"))
        if fault == "depends on the attempt":
            return rows.withColumn("amount", F.col("amount") + attempt.number - 1)
        return rows


class BrokenFeed(FixedFeed):
    """A feed of a broken source."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    @property
    def source(self) -> Broken:
        """The broken source."""
        return Broken(self._batches, SCHEMA, fault=self._fault)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("loses a row", r"each row is in exactly one batch: 1 rows are missing, such as \('row 1', 1\)"),
        ("repeats a row", r"each row is in exactly one batch: 1 rows are too many, such as \('row 1', 1\)"),
        ("restarts", "there is an end|rows are too many"),
        ("endless", "there is an end"),
        ("depends on the attempt", "a replay of batch 1 has the identical rows"),
    ],
)
def test_a_broken_promise_is_named(settings: Settings, spark: SparkSession, fault: str, told: str) -> None:
    """The author learns which promise it is, and sees a row."""
    with pytest.raises(BrokenPromise, match=told):
        list(check_source(lambda: BrokenFeed(fault), spark, settings))


def test_a_sound_source_is_told_what_was_tried(settings: Settings, spark: SparkSession) -> None:
    """All promises but the one that the feed cannot put to the test."""
    kept = set(check_source(FixedFeed, spark, settings))
    assert kept == set(PROMISES["transactional"]) - {"what_is_hidden_stops_the_replay"}


def test_an_authors_pipeline_is_tried_without_postgres(settings: Settings, spark: SparkSession) -> None:
    """Rows in, partials out: what a batch of these rows would stage."""
    pipeline = Pipeline(
        name="words",
        source=FixedBatches([], SCHEMA),
        transform=lambda rows: rows.where("amount > 0"),
        states={
            "per_name": State(key={"name": "text"}, aggregates={"rows": Count(), "amount": Sum("amount")}),
            "total": State(aggregates={"rows": Count()}),
        },
    )
    rows = spark.createDataFrame([("a", 1), ("b", 0), ("a", 2)], "name string, amount int")

    assert partials(pipeline, rows) == {"per_name": [{"name": "a", "rows": 2, "amount": 3}], "total": [{"rows": 2}]}


def test_fixed_batches_may_start_over(settings: Settings) -> None:
    """With cycle, the first list follows the last one."""
    source = FixedBatches([[("a", 1)], [("b", 2)]], SCHEMA, cycle=True)
    coordinator, previous, places = source.coordinator(settings), None, []
    for txid in range(1, 6):
        previous = coordinator.initialize_transaction(txid, previous, None)
        places.append(previous["sha256"])
    assert places[0] == places[2] == places[4] != places[1] == places[3]


def test_a_fixed_batch_that_does_not_fit_is_refused_where_it_is_declared() -> None:
    """The row and its batch are named."""
    with pytest.raises(ValueError, match=r"row \('b',\) of batch 2 does not have 2 values"):
        FixedBatches([[("a", 1)], [("b",)]], SCHEMA)
    with pytest.raises(ValueError, match="needs a schema"):
        FixedBatches([], {})


def test_a_done_folder_cannot_lie_where_files_are_read(tmp_path: Path) -> None:
    """Its files would be read again."""
    with pytest.raises(ValueError, match="inside it: they would be read again"):
        Files("inbox", format="text", done_folder="inbox/done")
