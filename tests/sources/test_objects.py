"""`Files` over a real S3 server: the same promises as on a disk, by ETags, and no more of a listing than is needed."""

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.utils.config import Config
from pyspark.sql import SparkSession

from tests import steps
from tests.acceptance.test_every_source import die_in_turn, pipeline_over
from tests.conftest import Server
from tests.sources.beside_store import check_delta, check_markers, server, spark, template
from tests.sources.feeds import SCHEMA
from tests.sources.iceberg_catalog import load_catalog
from tests.sources.s3 import PAGE, SECRET, Bucket, S3Server, many_objects, pages_asked_for, plan_many, stack_beside_s3
from tidegate.jobs import Count, Files, FixedBatches, Iceberg, Inputs, Pipeline, Reference, Rows, State, Sum
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.jobs.sources.files.stores import buckets, object_places
from tidegate.jobs.testing import PROMISES, Bench
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import RowsLost, SourceChanged, SourceUnavailable, SourceUnreadable
from tidegate.state_store.seal.attempts import Attempt

__all__ = ["server", "spark", "template"]  # fixtures

_numbers = count(1)
ODD = ("with space.parquet", "50%25 off%.parquet", "grüße 😀.parquet", "a=b.parquet", "[x]{y}.parquet", "plus+&'!.parquet")
STATE = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})


@pytest.fixture(scope="module")
def beside_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, S3Server]]:
    """An S3 server, and a stack whose Spark reads from it."""
    with stack_beside_s3(tmp_path_factory.mktemp("s3_stack")) as both:
        yield both


@pytest.fixture(scope="module")
def s3(beside_store: tuple[Settings, S3Server]) -> S3Server:
    """The S3 server."""
    return beside_store[1]


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    """A bucket of the test's own."""
    return s3.make_bucket(f"bucket-{next(_numbers)}")


class ObjectsFeed:
    """Objects of two rows of CSV below a prefix, two objects a batch."""

    def __init__(self, bucket: Bucket, **source: Any) -> None:
        self.bucket = bucket
        self.source = Files(f"{bucket.url}/in/box", format="csv", schema=SCHEMA, max_files=2, **source)
        self._rows = self._objects = 0

    def put(self, count: int) -> list[tuple]:
        """Write rows into new objects."""
        rows = [(f"row {self._rows + number}", self._rows + number) for number in range(count)]
        self._rows += count
        before = self._objects
        for start in range(0, count, 2):
            self._objects += 1
            lines = "".join(f"{name},{amount}\n" for name, amount in rows[start : start + 2])
            self.bucket.put(f"in/box/{self._objects:03d}.csv", "name,amount\n" + lines)
        if self.source.manifests:
            names = (f"{number:03d}.csv\n" for number in range(before + 1, self._objects + 1))
            self.bucket.put(f"in/box/{self.source.manifests}/{before:03d}", "".join(names))
        return rows

    def change(self) -> None:
        """Change a value, so that size and number of rows stay the same."""
        self.bucket.put("in/box/001.csv", self.bucket.get("in/box/001.csv").replace(b"row 0,0", b"row 0,9"))

    @contextmanager
    def hide(self) -> Iterator[None]:
        """Take an object away for a while."""
        content = self.bucket.get("in/box/002.csv")
        self.bucket.delete("in/box/002.csv")
        yield
        self.bucket.put("in/box/002.csv", content)


def parquet(names: list[str], amounts: list[int], kind: pa.DataType | None = None) -> bytes:
    """Return a Parquet file; by default Spark's own reader takes it."""
    content = io.BytesIO()
    pq.write_table(pa.table({"name": names, "amount": pa.array(amounts, kind or pa.int32())}), content)
    return content.getvalue()


def stored(settings: Settings, pipeline: Pipeline) -> list[tuple]:
    """Return the state's rows."""
    with StateStore.connect(settings) as store:
        spec = pipeline.spec.states[0]
        return sorted(tuple(row[column.name] for column in spec.columns) for row in store.state_rows(spec))


VARIANTS = {"": {}, "opaque": {"kind": "opaque"}, "names grow": {"names_grow": True}, "manifests": {"manifests": "_lists"}}
CASES = [
    (name, promise) for name in VARIANTS for promise in PROMISES["opaque" if name == "opaque" else "transactional"].items()
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("variant", "promise"), CASES, ids=[f"{name}-{promise[0]}" for name, promise in CASES])
def test_objects_keep_the_promises_of_files(
    settings: Settings, spark: SparkSession, bucket: Bucket, variant: str, promise: tuple
) -> None:
    """Each promise of each kind; none is impossible for objects."""
    promise[1](Bench(ObjectsFeed(bucket, **VARIANTS[variant]), spark, settings))


def test_a_crash_anywhere_leaves_the_state_of_a_clean_run(
    settings: Settings, register: Callable[..., None], bucket: Bucket
) -> None:
    """Processes die around each COMMIT of plan, process and commit, in turn; the next run goes on."""
    feed = ObjectsFeed(bucket)
    pipeline = pipeline_over(feed)
    register(pipeline)
    die_in_turn(settings, pipeline, feed)


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint16()], ids=["Spark's reader", "own tasks"])
def test_the_state_is_what_duckdb_makes_of_the_same_objects(
    settings: Settings, register: Callable[..., None], bucket: Bucket, kind: pa.DataType
) -> None:
    """Partition folders, nested prefixes, and names that paths and URLs would have to quote."""
    for number, name in enumerate((*ODD, "plain.parquet")):
        for day in ("2026-01-01", "2026-01-02"):
            content = parquet([f"n{n % 3}" for n in range(number, number + 5)], list(range(number, number + 5)), kind)
            bucket.put(f"lake/deep er/dt={day}/{name}", content)
    bucket.put("lake/deep er/dt=2026-01-01/_SUCCESS", b"")
    bucket.put("lake/deeper/dt=2026-01-01/other.parquet", parquet(["beside"], [1], kind))
    source = Files(f"{bucket.url}/lake/deep er", "**/*.parquet", schema=SCHEMA, partitions={"dt": "date"}, max_files=4)
    state = State(key={"dt": "date", "name": "text"}, aggregates=STATE.aggregates)
    pipeline = Pipeline("lake", source, {"per_day": state})
    register(pipeline)
    assert len(run_pipeline(settings, pipeline, run_id="run").commits) == 4  # 14 objects
    assert run_pipeline(settings, pipeline, run_id="again").commits == []

    query = f"""
        SELECT dt, name, count(*), sum(amount)::bigint
        FROM read_parquet('{bucket.folder}/lake/deep er/*/*.parquet', hive_partitioning = true) GROUP BY ALL ORDER BY ALL
    """
    assert stored(settings, pipeline) == duckdb.execute(query).fetchall()
    left = source.left_alone(settings)
    assert (left.read, left.count) == (14, 1)


@pytest.mark.promise("decision:0034")
@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_an_object_that_is_not_as_planned_is_never_read(
    settings: Settings, spark: SparkSession, register: Callable[..., None], bucket: Bucket, format: str
) -> None:
    """Overwritten or deleted between plan and read, and while it is read."""

    def put(amount: int) -> None:
        bucket.put(f"one.{format}", parquet(["a"], [amount]) if format == "parquet" else f"name,amount\na,{amount}\n")

    put(1)
    pipeline = Pipeline("inbox", Files(bucket.url, format=format, schema=SCHEMA), {"per_name": STATE}, retry_delay_seconds=0)
    register(pipeline)
    assert steps.plan(settings, pipeline, run_id="run") == [1]
    for spoil, message in ((lambda: put(2), "was overwritten"), (lambda: bucket.delete(f"one.{format}"), "is gone")):
        spoil()
        with pytest.raises(SourceChanged, match=rf"s3a://{bucket.name}/one.{format} {message} since its batch was planned"):
            steps.process(settings, pipeline, 1, owner="test")
    put(1)
    # The server's times have whole seconds.
    os.utime(bucket.folder / f"one.{format}", (1_700_000_000, 1_700_000_000))
    with StateStore.connect(settings) as store:
        metadata = store.source_metadata("inbox", 1)
    attempt = Attempt("inbox", 1, 1, metadata)
    emitter = pipeline.source.emitter(spark, settings)
    rows = emitter.emit_batch(attempt, metadata)
    assert rows.collect() == [("a", 1)]
    put(2)
    with pytest.raises(SourceChanged, match="was overwritten"):
        emitter.verify_batch(attempt, metadata)
    put(1)  # what Spark read may have been the other content
    with pytest.raises(RowsLost, match="was touched, or replaced and put back"):
        emitter.verify_batch(attempt, metadata)
    put(3)  # a task opens what was planned, or nothing
    if format == "csv":
        with pytest.raises(SourceChanged, match="was overwritten"):
            (object_places.pinned(object_places.place_of(Path(), bucket.url) / "one.csv", metadata["files"][0])).open()
    put(1)
    run_pipeline(settings, pipeline, run_id="run")
    assert stored(settings, pipeline) == [("a", 1, 1)]
    put(4)
    with pytest.raises(SourceChanged, match="was overwritten since it counted in txid 1"):
        steps.plan(settings, pipeline, run_id="later")


@pytest.mark.promise("decision:0034")
def test_without_an_etag_the_content_identifies_an_object(
    settings: Settings, register: Callable[..., None], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is taken by reading it, as on a disk; an object put back is the same object."""
    described = buckets._info_of
    monkeypatch.setattr(buckets, "_info_of", lambda meta: replace(described(meta), etag=None))  # each S3 server has them
    bucket.put("one.csv", "name,amount\na,1\n")
    pipeline = Pipeline("inbox", Files(bucket.url, format="csv", schema=SCHEMA), {"per_name": STATE}, retry_delay_seconds=0)
    register(pipeline)
    assert steps.plan(settings, pipeline, run_id="run") == [1]
    bucket.put("one.csv", "name,amount\na,2\n")
    with pytest.raises(SourceChanged, match="was overwritten since its batch was planned"):
        steps.process(settings, pipeline, 1, owner="test")
    bucket.put("one.csv", "name,amount\na,1\n")
    steps.process(settings, pipeline, 1, owner="test")
    steps.commit(settings, pipeline, 1, owner="test")
    os.utime(bucket.folder / "one.csv", (1_700_000_000, 1_700_000_000))
    assert steps.plan(settings, pipeline, run_id="later") == []
    assert stored(settings, pipeline) == [("a", 1, 1)]


def test_names_that_grow_are_listed_from_the_last_one_on(
    settings: Settings, register: Callable[..., None], bucket: Bucket
) -> None:
    """Also as one of several inputs, which may have nothing new for some batches."""
    growing = Files(f"{bucket.url}/grows", format="csv", schema=SCHEMA, names_grow=True, max_files=2)
    other = Files(f"{bucket.url}/other", format="csv", schema=SCHEMA)
    pipeline = Pipeline("inbox", Inputs({"grows": growing, "other": other}), {"per_name": STATE})
    register(pipeline)
    for number in range(3):
        bucket.put(f"grows/{number}.csv", f"name,amount\na,{number}\n")
    run_pipeline(settings, pipeline, run_id="one")
    bucket.put("other/1.csv", "name,amount\nb,7\n")
    run_pipeline(settings, pipeline, run_id="two")
    bucket.put("grows/00.csv", "name,amount\na,100\n")  # declared never to come
    bucket.put("grows/3.csv", "name,amount\na,3\n")
    run_pipeline(settings, pipeline, run_id="three")
    assert stored(settings, pipeline) == [("a", 4, 6), ("b", 1, 7)]


REFERENCES = {"csv": ("csv", None), "parquet": ("parquet", None), "own tasks": ("parquet", pa.uint16())}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("format", "kind"), REFERENCES.values(), ids=REFERENCES)
def test_a_batch_is_joined_with_the_objects_that_were_there_when_it_was_planned(
    settings: Settings, register: Callable[..., None], bucket: Bucket, format: str, kind: pa.DataType | None
) -> None:
    """With other ones it is refused, or planned again if it is opaque; a plan is refused without any."""
    check_reference(settings, register, bucket, format, kind)


def check_reference(
    settings: Settings, register: Callable[..., None], folder: Any, format: str, kind: pa.DataType | None = None
) -> None:
    """Check that a batch is joined with the version of a reference that was there, in a store; `folder` puts and deletes."""

    def put(factor: int) -> None:
        content = parquet(["a"], [factor], kind) if format == "parquet" else f"name,amount\na,{factor}\n"
        folder.put(f"factors/{factor // 10}.{format}", content)

    factors = Reference(Files(f"{folder.url}/factors", f"*.{format}", format, {"name": "string", "amount": "int"}))
    pipeline = joined_with(factors, Files(f"{folder.url}/in", "*.csv", "csv", SCHEMA))
    register(pipeline)
    folder.put("in/1.csv", "name,amount\na,1\n")
    folder.put("factors/README", "Factors, by name.")
    with pytest.raises(SourceUnreadable, match=r"The reference has no files: nothing in .*/factors matches"):
        steps.plan(settings, pipeline, run_id="early")
    put(5)
    assert steps.plan(settings, pipeline, run_id="run") == [1]
    put(7)
    with pytest.raises(SourceChanged, match="It is a reference of this batch: put back what was planned"):
        steps.process(settings, pipeline, 1, owner="test")
    put(5)
    run_pipeline(settings, pipeline, run_id="run")
    assert stored(settings, pipeline) == [("a", 1, 5)]

    put(7)
    put(17)
    folder.put("in/2.csv", "name,amount\na,1\n")
    run_pipeline(settings, pipeline, run_id="next")
    assert stored(settings, pipeline) == [("a", 3, 29)], "both objects of the new version"

    opaque = joined_with(factors, Files(f"{folder.url}/in", "*.csv", "csv", SCHEMA), kind="opaque")
    register(opaque)
    assert steps.plan(settings, opaque, run_id="run") == [1, 2]
    put(9)
    folder.delete(f"factors/1.{format}")
    run_pipeline(settings, opaque, run_id="run")
    assert stored(settings, opaque) == [("a", 2, 18)]


def joined_with(factors: Reference, rows: Files, kind: Any = "transactional") -> Pipeline:
    """Return a pipeline that multiplies rows by factors."""
    return Pipeline(
        f"joined_{kind}",
        Inputs({"rows": rows, "factors": factors}, kind=kind),
        {f"per_{kind}_name": replace(STATE, kind=kind)},
        transform=lambda inputs: (
            inputs["rows"]
            .join(inputs["factors"].withColumnRenamed("amount", "factor"), "name")
            .selectExpr("name", "amount * factor AS amount")
        ),
        retry_delay_seconds=0,
    )


def test_an_object_that_is_gone_for_a_moment_holds_up_later_names_that_grow(settings: Settings, bucket: Bucket) -> None:
    """A program replaces it by deleting and writing: a plan that took the next one would never read it."""
    for number in range(1, 4):
        bucket.put(f"in/{number}.csv", f"name,amount\na,{number}\n")
    source = Files(f"{bucket.url}/in", "*.csv", "csv", SCHEMA, names_grow=True, max_files=9, marker="done")
    bucket.put("in/done", "")
    describe, gone = buckets.Bucket.describe, ["in/2.csv"]

    def replaced(store: buckets.Bucket, key: str, version: str | None = None) -> Any:
        if key in gone:
            gone.remove(key)
            raise FileNotFoundError(key)
        return describe(store, key, version)

    with patch.object(buckets.Bucket, "describe", replaced):
        first = source.coordinator(settings).initialize_transaction(1, None, None)
        second = source.coordinator(settings).initialize_transaction(2, first, None)
    assert [[file["name"] for file in found["files"]] for found in (first, second)] == [["1.csv"], ["2.csv", "3.csv"]]

    elsewhere = replace(source, folder=f"{bucket.url}/moved")
    bucket.put("moved/0.csv", "name,amount\na,0\n")
    bucket.put("moved/done", "")
    third = elsewhere.coordinator(settings).initialize_transaction(3, second, None)
    assert [file["name"] for file in third["files"]] == ["0.csv"], "the last name of another place was no name of this one"


def planned(source: Files, settings: Settings, previous: Any = None, txid: int = 1) -> list[list[str]]:
    """Return the names of the objects of each batch that plans would give after a batch, one coordinator each."""
    batches = []
    while found := source.coordinator(settings).initialize_transaction(txid, previous, None):
        batches.append([file["name"] for file in found["files"]])
        previous, txid = found, txid + 1
    return batches


def test_objects_are_read_as_manifests_name_them(settings: Settings, register: Callable[..., None], bucket: Bucket) -> None:
    """In their order, over plans that each read some, once each, and without a listing of the objects."""
    source = Files(f"{bucket.url}/in", "*", "csv", SCHEMA, manifests=f"{bucket.url}/lists/in", max_files=2)
    for name in ("a/1.csv", "b 2.csv", "3.csv", "4.csv", "unnamed.csv"):
        bucket.put(f"in/{name}", f"name,amount\n{name},1\n")
    url = bucket.url.replace("s3a://", "s3://")
    bucket.put("lists/in/day=1/1", f"3.csv\r\n\n  b 2.csv\n3.csv\n{url}/in/a/1.csv\n")
    entries = [{"url": f"{bucket.url}/in/4.csv", "mandatory": True}, {"url": "3.csv"}]
    bucket.put("lists/in/day=1/2.manifest", json.dumps({"entries": entries}))
    bucket.put("lists/in/day=1/3", "")
    pages: list[str] = []
    listing = buckets.Bucket.pages

    def seen(store: buckets.Bucket, folder: str, *arguments: Any) -> Any:
        pages.append(folder)
        return listing(store, folder, *arguments)

    pipeline = Pipeline("inbox", source, {"per_name": STATE})
    register(pipeline)
    with patch.object(buckets.Bucket, "pages", seen):
        for number in range(4):
            for txid in steps.plan(settings, pipeline, run_id=f"run {number}", max_batches=1):
                steps.process(settings, pipeline, txid, owner="test")
                steps.commit(settings, pipeline, txid, owner="test")
        assert set(pages) == {"lists/in"}
    with StateStore.connect(settings) as store:
        batches = [[f["name"] for f in store.source_metadata("inbox", txid)["files"]] for txid in (1, 2)]
        assert store.committed("inbox") == 2
    assert batches == [["3.csv", "b 2.csv"], ["a/1.csv", "4.csv"]]
    assert stored(settings, pipeline) == [(name, 1, 1) for name in ("3.csv", "4.csv", "a/1.csv", "b 2.csv")]

    bucket.put("lists/in/day=2/1", "unnamed.csv\n")
    assert len(steps.plan(settings, pipeline, run_id="later")) == 1
    bucket.put("in/3.csv", "name,amount\nother content,1\n")
    bucket.put("lists/in/day=2/2", "3.csv\n")
    with pytest.raises(SourceChanged, match=r"3\.csv was overwritten since it counted in txid 1"):
        steps.plan(settings, pipeline, run_id="last")


def test_a_manifest_that_cannot_be_followed_stops_planning(settings: Settings, bucket: Bucket) -> None:
    """Whatever it names is read some day: nothing is passed. One that is written again is read again."""
    source = Files(f"{bucket.url}/in", "*", "csv", SCHEMA, manifests="_lists", min_age_seconds=0)
    for name in ("1", "2", "3"):
        bucket.put(f"in/{name}", "name,amount\na,1\n")

    def refuses(content: str, error: type[Exception], message: str) -> None:
        bucket.put("in/_lists/1", content)
        with pytest.raises(error, match=message):
            planned(source, settings)

    refuses("2\nmissing\n", SourceUnavailable, r"Manifest .*/_lists/1 names missing, and there is no .*/in/missing\. ")
    for name in ("../1", "/1", "a//1", "s3a://other/in/1", f"{bucket.url}/inn/1", "hdfs://x/in/1"):
        refuses(f"1\n{name}\n", SourceUnreadable, r"/_lists/1, entry 2: .* is no name of an object below")
    for name in ("\ud800", "a\x00b", "a\nb", "a\tb", "a" * 100_000):
        refuses(json.dumps({"entries": [{"url": name}]}), SourceUnreadable, r"/_lists/1.* is no name of an object below")
    deep = '{"a":' * 100_000
    for content in (
        '{"entries": [{"uri": "1"}]}',
        '{"entries": 1}',
        "{",
        '{"files": []}',
        '{"entries": [{"url": null}]}',
        deep,
    ):
        refuses(content, SourceUnreadable, "/_lists/1 is no manifest: ")
    bucket.put("in/_lists/1", "1\n2\n")
    first = source.coordinator(settings).initialize_transaction(1, None, None)
    assert planned(source, settings, first, 2) == [["2"]]
    assert planned(replace(source, min_age_seconds=3600), settings) == []
    bucket.delete("in/_lists/1")
    with pytest.raises(SourceChanged, match=r"_lists/1 is gone, of which not all names have been read\. Put it back"):
        planned(source, settings, first, 2)


@pytest.mark.parametrize("max_files", [1, 2, 10])
def test_an_object_that_several_manifests_name_is_read_once(
    settings: Settings, register: Callable[..., None], bucket: Bucket, max_files: int
) -> None:
    """Also if one plan reads all of them, before anything has counted."""
    source = Files(f"{bucket.url}/in", "*", "csv", SCHEMA, manifests="_lists/", max_files=max_files)
    pipeline = Pipeline("inbox", source, {"per_name": STATE})
    register(pipeline)
    for name in ("1", "2", "3"):
        bucket.put(f"in/{name}", f"name,amount\n{name},1\n")
    for number, names in enumerate(("1\n2\n", "2\n3\n1\n", "1\n2\n3\n")):
        bucket.put(f"in/_lists/{number}", names)
    run_pipeline(settings, pipeline, run_id="run")
    assert stored(settings, pipeline) == [("1", 1, 1), ("2", 1, 1), ("3", 1, 1)]


def test_a_manifest_that_is_written_again_while_it_is_read_is_not_read_in_part(settings: Settings, bucket: Bucket) -> None:
    """Its first bytes may be those of the one before: what was added to it would be passed."""
    source = Files(f"{bucket.url}/in", "*", "csv", SCHEMA, manifests="_lists")
    bucket.put("in/1", "name,amount\na,1\n")
    bucket.put("in/2", "name,amount\na,1\n")
    bucket.put("in/_lists/1", "1\n")
    read = buckets.Bucket.read

    def overwritten(*arguments: Any) -> Any:
        bucket.put("in/_lists/1", "1\n2\n")
        return read(*arguments)

    with patch.object(buckets.Bucket, "read", overwritten), pytest.raises(SourceChanged, match="_lists/1"):
        source.coordinator(settings).initialize_transaction(1, None, None)
    assert planned(source, settings) == [["1"], ["2"]]


@pytest.mark.parametrize("manifests", ["", ".", "./lists", "../lists", "lists//", "lists/../lists", "/lists"])
def test_a_place_of_manifests_is_a_folder_below_the_source_or_a_url(manifests: str) -> None:
    """No other can be listed."""
    with pytest.raises(ValueError, match="manifests"):
        Files("s3a://lake/in", "*", "csv", SCHEMA, manifests=manifests)


def test_a_manifest_that_is_written_again_is_read_from_its_beginning(
    settings: Settings, register: Callable[..., None], bucket: Bucket
) -> None:
    """What has counted does not count again; what was put before it is not passed."""
    source = Files(f"{bucket.url}/in", "*", "csv", SCHEMA, manifests="_lists")
    pipeline = Pipeline("inbox", source, {"per_name": STATE})
    register(pipeline)
    for name in ("1", "2", "3"):
        bucket.put(f"in/{name}", f"name,amount\n{name},1\n")
    bucket.put("in/_lists/1", "1\n2\n")
    (txid,) = steps.plan(settings, pipeline, run_id="first", max_batches=1)
    steps.process(settings, pipeline, txid, owner="test")
    steps.commit(settings, pipeline, txid, owner="test")
    bucket.put("in/_lists/1", "3\n1\n2\n")
    assert run_pipeline(settings, pipeline, run_id="second").txids == [2, 3]
    with StateStore.connect(settings) as store:
        assert [store.source_metadata("inbox", txid)["files"][0]["name"] for txid in (1, 2, 3)] == ["1", "3", "2"]
    assert stored(settings, pipeline) == [("1", 1, 1), ("2", 1, 1), ("3", 1, 1)]


def test_the_last_name_of_an_idle_input_is_one_of_its_place(settings: Settings, bucket: Bucket) -> None:
    """Names that grow begin again where the input was moved to, also if the last batches had no rows of it."""
    bucket.put("in/5.csv", "name,amount\na,5\n")
    grows = Files(f"{bucket.url}/in", "*.csv", "csv", SCHEMA, names_grow=True)
    others = FixedBatches([[("b", 1)], [("b", 2)]], SCHEMA)
    coordinator = Inputs({"grows": grows, "others": others}).coordinator(settings)
    first = coordinator.initialize_transaction(1, None, None)
    second = coordinator.initialize_transaction(2, first, None)
    assert (set(first["inputs"]), set(second["inputs"])) == ({"grows", "others"}, {"others"})

    bucket.put("in/4.csv", "name,amount\na,4\n")  # comes too late
    bucket.put("moved/0.csv", "name,amount\na,0\n")
    assert Inputs({"grows": grows, "others": others}).coordinator(settings).initialize_transaction(3, second, None) is None
    moved = Inputs({"grows": replace(grows, folder=f"{bucket.url}/moved"), "others": others})
    third = moved.coordinator(settings).initialize_transaction(3, second, None)
    assert [file["name"] for file in third["inputs"]["grows"]["files"]] == ["0.csv"]


def test_planned_objects_are_read_whatever_the_declaration_becomes(
    settings: Settings, register: Callable[..., None], bucket: Bucket
) -> None:
    """Also if the glob does not take them any more; in another place, they are missed by name."""
    for name in "ab":
        bucket.put(f"in/{name}.csv", f"name,amount\n{name},1\n")
    bucket.put("in/c.CSV", "name,amount\nc,1\n")
    before = Files(f"{bucket.url}/in", "*.csv", "csv", SCHEMA, kind="opaque", max_files=9)
    state = {"per_name": replace(STATE, kind="opaque")}
    pipeline = Pipeline("inbox", before, state)
    register(pipeline)
    assert steps.plan(settings, pipeline, run_id="one") == [1]
    with StateStore.connect(settings) as store:
        attempt = store.start_attempt(pipeline.spec, 1, "test")
        assert isinstance(attempt, Attempt)
        store.fail_attempt(attempt, "test")
    away = Pipeline("inbox", replace(before, folder=f"{bucket.url}/out"), state)
    register(away)
    with pytest.raises(SourceChanged, match=r"There is no .*/out/a\.csv: the batch was planned with this file of .*/in,"):
        steps.process(settings, away, 1, owner="test")
    changed = Pipeline("inbox", replace(before, glob="*.CSV"), state)
    register(changed)
    run_pipeline(settings, changed, run_id="two")
    assert stored(settings, changed) == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)]


def test_an_empty_object_that_stands_for_a_folder_is_no_disorder(settings: Settings, bucket: Bucket) -> None:
    """It sorts as `out/`, after `out.csv`, and is listed as `out`."""
    bucket.put("in/out.csv", "name,amount\na,1\n")
    bucket.put("in/out/b.csv", "name,amount\na,2\n")
    stored = [meta for page in obstore.list(bucket.store, "in", chunk_size=10) for meta in page]
    placeholder = {**stored[0], "path": "in/out", "size": 0}
    with patch.object(obstore, "list", lambda *_arguments, **_options: [[stored[0], placeholder, stored[1]]]):
        found = (
            Files(f"{bucket.url}/in", "**/*.csv", "csv", SCHEMA, max_files=9)
            .coordinator(settings)
            .initialize_transaction(1, None, None)
        )
    assert [file["name"] for file in found["files"]] == ["out.csv", "out/b.csv"]


def test_a_delta_table_is_followed(settings: Settings, register: Callable[..., None], bucket: Bucket) -> None:
    """Its log and its data files are reached as all files are."""
    check_delta(settings, register, bucket)


def test_an_iceberg_table_is_followed(
    settings: Settings, register: Callable[..., None], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata is read by PyIceberg, which has the server's address from its own settings, and its files as all are."""
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__S3__ENDPOINT", bucket.server.endpoint)
    for name in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"):
        monkeypatch.setenv(name, "WHEN_REQUIRED")  # S3Proxy knows no others
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # as of its import
    lake = load_catalog("lake")
    lake.create_namespace_if_not_exists("stored")
    place = f"{bucket.url.replace('s3a:', 's3:')}/lake/odd"
    table = lake.create_table("stored.rows", pa.schema([("name", pa.string()), ("day", pa.string())]), location=place)
    with table.update_spec() as spec:
        spec.add_identity("day")
    source = Iceberg("lake.stored.rows", schema={"name": "string", "day": "string"}, max_files=2)
    pipeline = Pipeline("iced", source, {"iced_rows": Rows({"name": "text", "day": "text"})}, retry_delay_seconds=0)
    register(pipeline)
    for number, names in enumerate((["a", "b", "c"], ["d"])):
        table.append(pa.table({"name": names, "day": [f"50% {name} =/ü" for name in names]}))
        run_pipeline(settings, pipeline, run_id=f"run {number}")
    with StateStore.connect(settings) as store:
        found = sorted((row["name"], row["day"]) for row in store.state_rows(pipeline.spec.states[0]))
    assert found == sorted(tuple(row.values()) for row in table.scan().to_arrow().to_pylist())
    assert len(found) == 4

    table.append(pa.table({"name": ["e"], "day": ["x"]}))
    steps.plan(settings, pipeline, run_id="planned")
    (file,) = [task.file.file_path for task in table.scan(row_filter="day = 'x'").plan_files()]
    bucket.put(file.partition(f"{bucket.name}/")[2], b"other content")
    with pytest.raises(SourceChanged, match="was overwritten since its batch was planned"):
        run_pipeline(settings, pipeline, run_id="planned")


def test_folders_are_read_once_they_are_marked(settings: Settings, register: Callable[..., None], bucket: Bucket) -> None:
    """As the objects are then, also if they were listed before."""
    check_markers(settings, register, bucket)


def test_who_may_not_read_is_told_what_to_do(
    settings: Settings, s3: S3Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that does not exist, a key that is refused, a server that is away; no secret is in a message."""
    source = Files(bucket.url, format="csv", schema=SCHEMA)
    bucket.put("one.csv", "name,amount\na,1\n")

    def plan(of: Files) -> Any:
        object_places._store.cache_clear()
        return of.coordinator(settings).initialize_transaction(1, None, None)

    assert plan(source) is not None
    with pytest.raises(SourceUnreadable, match=r"s3a://absent does not exist for the store that was asked \(http://127"):
        plan(replace(source, folder="s3a://absent/prefix"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-0123")
    with pytest.raises(SourceUnreadable, match=r"the store .* refuses the credentials of this process") as refused:
        plan(source)
    assert "wrong-secret-0123" not in str(refused.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(SourceUnavailable, match=r"the store \(http://127.0.0.1:9\) does not answer"):
        plan(source)
    monkeypatch.undo()
    object_places._store.cache_clear()


def test_the_key_is_nowhere_but_in_the_environment(
    settings: Settings, register: Callable[..., None], bucket: Bucket, server: Server
) -> None:
    """Not in the ledger, in logs, or in Spark's plan."""
    bucket.put("one.parquet", parquet(["a"], [1]))
    pipeline = Pipeline("inbox", Files(bucket.url, schema=SCHEMA), {"per_name": STATE})
    register(pipeline)
    run_pipeline(settings, pipeline, run_id="run")
    found = server.settings.home
    texts = [path.read_text(errors="replace") for path in found.rglob("*.log")]
    assert texts
    with StateStore.connect(settings) as store:
        texts += [str(store.batch_history("inbox", 1)), str(store.source_metadata("inbox", 1)), pipeline.source.identity]
    assert [text for text in texts if SECRET in text] == []
    assert "'etag': " in texts[-2]


@pytest.mark.promise("decision:0034")
def test_a_plan_lists_no_further_than_it_needs(tmp_path: Path) -> None:
    """Pages are counted by the server; what a plan holds does not grow with the bucket."""
    with many_objects(50_000) as endpoint:
        first = plan_many(folder="s3a://many/in", batches=3)
        assert (first["objects"], pages_asked_for(endpoint)) == (300, 1)
        last = plan_many(folder="s3a://many/in", batches=3, names_grow=True, after="000049899.parquet")
        assert (last["objects"], pages_asked_for(endpoint)) == (100, 1)
        whole = plan_many(folder="s3a://many/in", batches=1000)
        assert (whole["objects"], pages_asked_for(endpoint)) == (50_000, 50)
        assert whole["grown_mb"] < first["grown_mb"] + 20


def test_the_example_of_the_page_does_what_it_says(settings: Settings, register: Callable[..., None], s3: S3Server) -> None:
    """docs/storage.md, as it stands."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    lake = s3.make_bucket("lake")
    for day in (1, 2):
        table = pa.table({"shop": ["x", "y", "x"], "cents": pa.array([day, 10, 100], pa.int64())})
        content = io.BytesIO()
        pq.write_table(table, content)
        lake.put(f"sales/dt=2026-11-0{day}/part-0.parquet", content.getvalue())
    pipeline: Pipeline = names["PIPELINE"]
    register(pipeline)
    run_pipeline(settings, pipeline, run_id="run")
    query = f"""
        SELECT dt, shop, count(*), sum(cents)::bigint
        FROM read_parquet('{lake.folder}/sales/*/*.parquet', hive_partitioning = true) GROUP BY ALL ORDER BY ALL
    """
    assert stored(settings, pipeline) == duckdb.execute(query).fetchall()
