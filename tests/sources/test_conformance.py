"""Every source keeps the promises of its kind, and the suite of `tidegate.jobs.testing` notices broken ones."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import SparkSession

from tests.crashes import IN_FULL
from tests.sources.conftest import PER_NAME
from tests.sources.feeds import FEEDS, FixedFeed
from tests.sources.in_process import SCHEMA, ThisProcess, for_this_process, plan, raises
from tests.store import Attempt
from tidegate.jobs import Count, FixedBatches, Pipeline, State
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.fixed_batches import FixedCoordinator, FixedEmitter
from tidegate.jobs.testing import PROMISES, Bench, BrokenPromise, NotPossible, check_source, partials
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SourceChanged

ALWAYS = ("each_row_is_in_exactly_one_batch", "records_are_the_rows")


@pytest.fixture
def spark(settings: Settings) -> Iterator[SparkSession]:
    with spark_session(settings, "conformance") as session:
        yield session


@pytest.mark.promise("I11", "I12", "testing:records_are_the_rows")
@pytest.mark.parametrize("feed", ["Files", "Inputs", "opaque Inputs", "Delta", "Iceberg", "Changes"])
def test_a_source_keeps_its_promises(settings: Settings, spark: SparkSession, feed: str) -> None:
    """All of them at full size; tables of Postgres have a test of their own, on each version."""
    for number, (name, holds) in enumerate(PROMISES["opaque" if "opaque" in feed else "transactional"].items()):
        if IN_FULL or name in ALWAYS:
            is_here = not IN_FULL and name == ALWAYS[0] and feed in ("Files", "Changes")  # as their rows need no Spark
            means: Any = (ThisProcess(), for_this_process(settings)) if is_here else (spark, settings)
            with suppress(NotPossible) if name.startswith("what_is_hidden") else nullcontext():
                holds(Bench(FEEDS[feed](settings, number), *means))


@pytest.mark.promise("testing:a_batch_that_is_planned_again_leaves_no_gap", "testing:what_is_hidden_comes_in_a_later_batch")
@pytest.mark.promise("testing:what_is_hidden_stops_the_replay", "testing:a_changed_row_is_noticed", "testing:Bench", "I11")
@pytest.mark.promise("testing:callbacks_may_come_again", "testing:nothing_new_is_no_batch", "testing:Feed", "I12")
@pytest.mark.parametrize("feed", [name for name in FEEDS if "Files" in name])
def test_files_keep_their_promises_in_this_process(tmp_path: Path, feed: str) -> None:
    for name, holds in PROMISES["opaque" if "opaque" in feed else "transactional"].items():
        settings = Settings(home=tmp_path / name, min_file_age_seconds=0)
        if name != "records_are_the_rows":  # of two frames of Spark
            holds(Bench(FEEDS[feed](settings, 0), ThisProcess(), settings))  # type: ignore[arg-type]


@pytest.mark.promise("I11")
def test_what_another_kind_of_source_has_planned_is_neither_read_nor_gone_on_from(settings: Settings) -> None:
    """Ranges of txids and of keys look the same, and so do the files of a folder and of a table."""
    feeds = {name: FEEDS[name](settings, 0) for name in ("Files", "Delta", "Changes", "PostgresTable by key")}
    for feed in feeds.values():
        feed.put(8)
    first = {name: {**plan(settings, feed.source), "behind": None} for name, feed in feeds.items()}
    for (name, feed), (other, metadata) in product(feeds.items(), first.items()):
        emitter, attempt = emitter_of(feed.source, ThisProcess(), settings), Attempt("other", 1, 1, metadata)  # type: ignore[arg-type]
        if name != other:
            raises(SourceChanged, partial(emitter.emit_batch, attempt, metadata), "of another|from another")
            with suppress(SourceChanged):
                assert {**plan(settings, feed.source, metadata), "behind": None} == first[name], "it begins with its first rows"


# What a broken source makes of what a method returns, from the method's arguments; and how the suite says so.
EMIT, PLAN = (FixedEmitter, "emit_batch"), (FixedCoordinator, "initialize_transaction")
BROKEN: list[tuple[Any, str, Callable[..., Any], str]] = [
    (*EMIT, lambda rows, *_: rows.where("name <> 'row 1'"), r"in exactly one batch: 1 rows are missing, such as \('row 1'"),
    (*EMIT, lambda rows, *_: rows.union(rows.where("name = 'row 1'")), r"exactly one batch: 1 rows are too many"),
    (*EMIT, lambda rows, attempt, _: rows.replace(0, attempt.number - 1), "a replay of batch 1 has the identical rows"),
    (*PLAN, lambda found, *_: found or {"position": 10**6, "rows": 0, "sha256": ""}, "there is an end"),
]


@pytest.mark.promise("testing:each_row_is_in_exactly_one_batch", "testing:a_replay_has_the_identical_rows")
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken[-1])
def test_a_broken_promise_is_named(settings: Settings, spark: SparkSession, broken: Any) -> None:
    kind, method, spoilt, message = broken
    real = getattr(kind, method)
    breaking = patch.object(kind, method, lambda self, *arguments: spoilt(real(self, *arguments), *arguments))
    with breaking, pytest.raises(BrokenPromise, match=message):
        list(check_source(FixedFeed, spark, settings))


@pytest.mark.promise("testing:NotPossible", "testing:check_source")
def test_a_sound_source_is_reported_with_the_promises_checked(settings: Settings, spark: SparkSession) -> None:
    assert set(check_source(FixedFeed, spark, settings)) == set(PROMISES["transactional"]) - {"what_is_hidden_stops_the_replay"}


@pytest.mark.promise("testing:partials")
def test_an_authors_pipeline_is_tried_without_postgres(settings: Settings, spark: SparkSession) -> None:
    states = {"per_name": PER_NAME, "total": State(aggregates={"lines": Count()})}
    pipeline = Pipeline("words", FixedBatches([], SCHEMA), states, lambda rows: rows.where("amount > 0"))
    rows = spark.createDataFrame([("a", 1), ("b", 0), ("a", 2)], "name string, amount int")
    assert partials(pipeline, rows) == {"per_name": [{"name": "a", "lines": 2, "amount": 3}], "total": [{"lines": 2}]}
