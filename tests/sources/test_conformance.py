"""Every source keeps the promises of its kind, and the suite of `tidegate.jobs.testing` notices broken ones."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.sources.feeds import FEEDS, SCHEMA, FixedFeed
from tests.sources.in_process import ThisProcess
from tidegate.jobs import Count, FixedBatches, Pipeline, State, Sum
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.fixed_batches import FixedCoordinator, FixedEmitter
from tidegate.jobs.testing import PROMISES, Bench, BrokenPromise, NotPossible, check_source, partials
from tidegate.state_store import Settings


@pytest.fixture
def spark(settings: Settings) -> Iterator[SparkSession]:
    with spark_session(settings, "conformance") as session:
        yield session


# Tables have their own tests, on every version of Postgres; all promises of lists are checked below.
IN_SPARK = [
    name for name in FEEDS if "Postgres" not in name and name != "FixedBatches" and ("Files" not in name or name == "Files")
]
IN_PROCESS = [name for name in FEEDS if "Files" in name]
ALWAYS = ("each_row_is_in_exactly_one_batch", "records_are_the_rows")


def _promises(name: str) -> dict[str, Any]:
    return dict(PROMISES["opaque" if "opaque" in name else "transactional"])


def _cases() -> Iterator[Any]:
    """Yield each source with each promise: with rows and records in any run, and with the others in turn."""
    for place, name in enumerate(IN_SPARK):
        for number, promise in enumerate(_promises(name)):
            is_usual = promise in (ALWAYS[1:] if name == "Files" else ALWAYS) or (name != "Files" and (place + number) % 5 == 0)
            yield pytest.param(name, promise, id=f"{name}-{promise}", marks=() if is_usual else pytest.mark.soak)


@pytest.mark.promise("I11", "I12", "testing:records_are_the_rows")
@pytest.mark.parametrize(("feed", "promise"), list(_cases()))
def test_a_source_keeps_its_promises(settings: Settings, spark: SparkSession, feed: str, promise: str) -> None:
    try:
        _promises(feed)[promise](Bench(FEEDS[feed](settings, 0), spark, settings))
    except NotPossible:
        assert promise in ("what_is_hidden_stops_the_replay", "what_is_hidden_comes_in_a_later_batch")


@pytest.mark.promise(
    "I11",
    "I12",
    "testing:Feed",
    "testing:Bench",
    "testing:nothing_new_is_no_batch",
    "testing:a_batch_that_is_planned_again_leaves_no_gap",
    "testing:a_changed_row_is_noticed",
    "testing:what_is_hidden_stops_the_replay",
    "testing:what_is_hidden_comes_in_a_later_batch",
    "testing:callbacks_may_come_again",
)
@pytest.mark.parametrize("feed", IN_PROCESS)
def test_files_keep_their_promises_in_this_process(tmp_path: Path, feed: str) -> None:
    for name, holds in _promises(feed).items():
        home = tmp_path / name
        home.mkdir()
        settings = Settings(home=home, min_file_age_seconds=0)
        if name != "records_are_the_rows":  # of two frames of Spark
            holds(Bench(FEEDS[feed](settings, 0), ThisProcess(), settings))  # type: ignore[arg-type]


# Broken sources, to show that the suite can fail.


@dataclass(frozen=True)
class Broken(FixedBatches):
    fault: str = ""
    calls: list[int] = field(default_factory=list, compare=False)

    def coordinator(self, settings: Settings) -> FixedCoordinator:
        if self.fault == "restarts":
            return Restarting(self)
        return Endless(self) if self.fault == "endless" else super().coordinator(settings)

    def emitter(self, spark: SparkSession, settings: Settings) -> FixedEmitter:
        del settings
        return Faulty(self, spark)


class Restarting(FixedCoordinator):
    def initialize_transaction(self, txid: int, previous: Any, current: Any) -> Any:
        return super().initialize_transaction(txid, previous if txid > 1 and previous["position"] == 0 else None, current)


class Endless(FixedCoordinator):
    def initialize_transaction(self, txid: int, previous: Any, current: Any) -> Any:
        return super().initialize_transaction(txid, previous, current) or {"position": 10**6, "rows": 0, "sha256": ""}


class Faulty(FixedEmitter):
    """Loses or repeats rows, or depends on more than metadata."""

    def emit_batch(self, attempt: Any, metadata: Any) -> Any:
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
    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    @property
    def source(self) -> Broken:
        return Broken(self._batches, SCHEMA, fault=self._fault)


@pytest.mark.promise(
    "testing:each_row_is_in_exactly_one_batch", "testing:a_replay_has_the_identical_rows", "testing:check_source"
)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("loses a row", r"each row is in exactly one batch: 1 rows are missing, such as \('row 1', 1\)"),
        ("repeats a row", r"each row is in exactly one batch: 1 rows are too many, such as \('row 1', 1\)"),
        ("restarts", "there is an end|rows are too many"),
        ("endless", "there is an end"),
        ("depends on the attempt", "a replay of batch 1 has the identical rows"),
    ],
)
def test_a_broken_promise_is_named(settings: Settings, spark: SparkSession, fault: str, message: str) -> None:
    with pytest.raises(BrokenPromise, match=message):
        list(check_source(lambda: BrokenFeed(fault), spark, settings))


@pytest.mark.promise("testing:NotPossible", "testing:check_source")
def test_a_sound_source_is_reported_with_the_promises_checked(settings: Settings, spark: SparkSession) -> None:
    """All promises, except the one that the feed cannot test."""
    kept = set(check_source(FixedFeed, spark, settings))
    assert kept == set(PROMISES["transactional"]) - {"what_is_hidden_stops_the_replay"}


@pytest.mark.promise("testing:partials")
def test_an_authors_pipeline_is_tried_without_postgres(settings: Settings, spark: SparkSession) -> None:
    """Rows go in, and the partials that their batch would stage come out."""
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
