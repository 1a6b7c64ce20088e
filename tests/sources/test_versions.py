"""Objects of a bucket that keeps versions: a batch reads what it was planned with, whatever has become of it since."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests import steps
from tests.sources.beside_store import bucket, s3, server, spark, template
from tests.sources.feeds import SCHEMA, ObjectsFeed
from tests.sources.s3 import Bucket, VersioningServer, stack_beside_s3
from tests.sources.test_objects import STATE, parquet, stored
from tests.sources.test_objects_in_spark import joined_with
from tests.store import Attempt
from tidegate.jobs import Files, Pipeline, Reference
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.files.formats import parquet as parquet_format
from tidegate.jobs.testing import PROMISES, Bench
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import RowsLost, SourceChanged, SourceUnavailable, SourceUnreadable

__all__ = ["bucket", "s3", "server", "spark", "template"]  # fixtures

pytestmark = pytest.mark.soak

_numbers = count(1)
# What these promise to notice is read as it was.
OTHERWISE = ("a_changed_row_is_noticed", "what_is_hidden_stops_the_replay")


@pytest.fixture(scope="module")
def beside_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, Any]]:
    """An S3 server that keeps versions, and a stack whose Spark reads from it."""
    with stack_beside_s3(tmp_path_factory.mktemp("versions_stack"), VersioningServer) as both:
        yield both


def content(format: str, amount: int, kind: pa.DataType | None = None) -> bytes:
    return parquet(["a"], [amount], kind) if format == "parquet" else f"name,amount\na,{amount}\n".encode()


def inbox(bucket: Bucket, format: str, **source: Any) -> Pipeline:
    files = Files(bucket.url, format=format, schema=SCHEMA, versions=True, **source)
    return Pipeline("inbox", files, {"per_name": STATE}, retry_delay_seconds=0)


@pytest.mark.parametrize("promise", [name for name in PROMISES["transactional"] if name not in OTHERWISE])
def test_objects_with_versions_keep_the_promises_of_files(
    settings: Settings, spark: SparkSession, bucket: Bucket, promise: str
) -> None:
    PROMISES["transactional"][promise](Bench(ObjectsFeed(bucket, versions=True), spark, settings))


@pytest.mark.promise("decision:0040")
@pytest.mark.parametrize("spoil", ["overwritten", "deleted"])
@pytest.mark.parametrize("format", ["csv", "parquet", "own tasks"])
def test_a_batch_reads_the_versions_that_it_was_planned_with(
    settings: Settings, register: Callable[..., None], s3: VersioningServer, bucket: Bucket, format: str, spoil: str
) -> None:
    kind, format = (pa.uint16(), "parquet") if format == "own tasks" else (None, format)
    for number in (1, 2):
        bucket.put(f"{number}.{format}", content(format, number, kind))
    pipeline = inbox(bucket, format, max_files=2)
    register(pipeline)
    assert steps.plan(settings, pipeline, run_id="run") == [1]
    if spoil == "overwritten":
        bucket.put(f"1.{format}", content(format, 1000, kind))
    else:
        s3.delete(bucket.name, f"1.{format}")
    run_pipeline(settings, pipeline, run_id="run")
    assert stored(settings, pipeline) == [("a", 2, 3)]
    if spoil == "overwritten":
        with pytest.raises(SourceChanged, match="has changed since it counted in txid 1"):
            steps.plan(settings, pipeline, run_id="later")


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_batch_is_joined_with_the_versions_of_a_reference(
    settings: Settings, register: Callable[..., None], s3: VersioningServer, bucket: Bucket, format: str
) -> None:
    """Although it was overwritten, and one of its objects deleted, before the batch was read; also if the batch is opaque."""
    factors = Reference(Files(f"{bucket.url}/factors", "*", format, SCHEMA, versions=True))
    bucket.put("in/1.csv", "name,amount\na,1\n")
    for kind in ("transactional", "opaque"):
        for number in (1, 2):
            bucket.put(f"factors/{number}.{format}", content(format, number))
        pipeline = joined_with(factors, Files(f"{bucket.url}/in", "*.csv", "csv", SCHEMA), kind)
        register(pipeline)
        assert steps.plan(settings, pipeline, run_id="run") == [1]
        bucket.put(f"factors/1.{format}", content(format, 1000))
        s3.delete(bucket.name, f"factors/2.{format}")
        steps.complete(settings, pipeline, 1)
        assert stored(settings, pipeline) == [("a", 2, 3)]


@pytest.mark.promise("decision:0040")
@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_an_object_that_is_overwritten_while_it_is_read_is_read_again(
    settings: Settings, spark: SparkSession, register: Callable[..., None], bucket: Bucket, format: str
) -> None:
    bucket.put(f"1.{format}", content(format, 1))
    pipeline = inbox(bucket, format)
    register(pipeline)
    assert steps.plan(settings, pipeline, run_id="run") == [1]
    metadata = steps.metadata(settings, 1)
    attempt, emitter = Attempt("inbox", 1, 1, metadata), emitter_of(pipeline.source, spark, settings)
    assert emitter.emit_batch(attempt, metadata).collect() == [("a", 1)]
    bucket.put(f"1.{format}", content(format, 1000))
    with pytest.raises(RowsLost, match=r"was overwritten while it was read\. The batch is read again, by the version"):
        emitter.verify_batch(attempt, metadata)
    assert emitter.emit_batch(attempt, metadata).collect() == [("a", 1)]
    emitter.verify_batch(attempt, metadata)
    bucket.put(f"1.{format}", content(format, 1))  # another version of the same content
    assert emitter.emit_batch(attempt, metadata).collect() == [("a", 1)]
    emitter.verify_batch(attempt, metadata)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"versions": True}, (RowsLost, "The batch is read again, by the version that was planned")),
        ({"kind": "opaque"}, (SourceUnavailable, "The batch is planned again")),
        ({}, (SourceChanged, "was overwritten since its batch was planned")),
    ],
)
def test_an_object_that_changes_between_its_check_and_its_opening_is_no_other_case(
    settings: Settings, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, source: dict[str, Any], expected: tuple
) -> None:
    bucket.put("1.parquet", content("parquet", 1))
    files = Files(bucket.url, schema=SCHEMA, **source)
    metadata = coordinator_of(files, settings).initialize_transaction(1, None, None)
    assert metadata is not None

    def count_rows(path: Any) -> int:
        bucket.put("1.parquet", content("parquet", 1000))
        return counted(path)

    counted = parquet_format.count_rows
    monkeypatch.setattr(parquet_format, "count_rows", count_rows)
    emitter = emitter_of(files, None, settings)  # type: ignore[arg-type] - rows are counted without Spark
    error, message = expected
    with pytest.raises(error, match=message):
        emitter.facts(Attempt("inbox", 1, 1, metadata), metadata)


def test_the_last_batch_is_redone_from_the_versions_that_it_counted(
    settings: Settings, register: Callable[..., None], s3: VersioningServer, bucket: Bucket
) -> None:
    bucket.put("1.csv", content("csv", 1))
    pipeline = replace(inbox(bucket, "csv"), states={"per_name": replace(STATE, kind="opaque")})
    register(pipeline)
    run_pipeline(settings, pipeline, run_id="run")
    s3.delete(bucket.name, "1.csv")
    steps.redo(settings, pipeline, 1, owner="test", reason="a test")
    assert stored(settings, pipeline) == [("a", 1, 1)]


def test_a_version_that_is_lost_is_named(settings: Settings, register: Callable[..., None], bucket: Bucket) -> None:
    bucket.put("1.csv", content("csv", 1))
    pipeline = inbox(bucket, "csv")
    register(pipeline)
    assert steps.plan(settings, pipeline, run_id="run") == [1]
    metadata = steps.metadata(settings, 1)
    metadata["files"][0]["version"] = "lost"
    bucket.put("1.csv", content("csv", 1000))
    emitter = emitter_of(pipeline.source, None, settings)  # type: ignore[arg-type] - it fails before it needs Spark
    with pytest.raises(SourceChanged, match=r"1.csv is gone since its batch was planned and does not have the version"):
        emitter.emit_batch(Attempt("inbox", 1, 1, metadata), metadata)


def test_a_bucket_without_versions_is_refused_when_it_is_planned(settings: Settings, s3: VersioningServer) -> None:
    bucket = s3.make_bucket("forgets", keeps_versions=False)
    bucket.put("1.csv", content("csv", 1))
    with pytest.raises(SourceUnreadable, match=r"has no version: the bucket does not keep them\. Let its administrator turn"):
        coordinator_of(inbox(bucket, "csv").source, settings).initialize_transaction(1, None, None)


@pytest.mark.parametrize(("key", "shown"), [("in//x", "in//x"), ("in/../x", "in/../x"), ("in/x%0Ay", "in/x y")])
def test_an_object_whose_name_cannot_be_listed_is_named(settings: Settings, s3: VersioningServer, key: str, shown: str) -> None:
    """It is no failure of the store, which would be tried again, although the glob does not even take it."""
    bucket = s3.make_bucket(f"strange-{next(_numbers)}")
    bucket.put("in/1.csv", content("csv", 1))
    s3._put(f"/{bucket.name}/{key}", "x")
    source = Files(f"{bucket.url}/in", "*.csv", "csv", SCHEMA)
    with pytest.raises(SourceUnreadable) as refusal:
        coordinator_of(source, settings).initialize_transaction(1, None, None)
    assert f'"{shown}"' in str(refusal.value)
    assert str(refusal.value).endswith("Rename or delete it.")
