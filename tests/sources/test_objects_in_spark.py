"""Spark reads objects of a real S3 server, with Hadoop's client: at full size only, as this needs a stack of its own."""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import steps
from tests.acceptance.test_every_source import die_everywhere, pipeline_over
from tests.servers import Server
from tests.sources.beside_store import bucket, s3, server, spark, template
from tests.sources.feeds import SCHEMA, ObjectsFeed
from tests.sources.s3 import PAGE, SECRET, Bucket, S3Server, stack_beside_s3
from tests.sources.test_objects import STATE, fill_lake, lake_of, parquet, stored
from tidegate.jobs import Files, Inputs, Pipeline, Reference, State
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable

__all__ = ["bucket", "s3", "server", "spark", "template"]  # fixtures

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def beside_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, S3Server]]:
    with stack_beside_s3(tmp_path_factory.mktemp("s3_stack")) as both:
        yield both


def test_a_crash_anywhere_leaves_the_state_of_a_clean_run(
    settings: Settings, server: Server, register: Callable[..., None], bucket: Bucket
) -> None:
    feed = ObjectsFeed(bucket)
    pipeline = pipeline_over(feed)
    register(pipeline)
    die_everywhere(settings, server, pipeline, feed, stride=7)


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint16()], ids=["Spark's reader", "own tasks"])
def test_the_state_is_what_duckdb_makes_of_the_same_objects(
    settings: Settings, register: Callable[..., None], bucket: Bucket, kind: pa.DataType
) -> None:
    """Partition folders, nested prefixes, and names that paths and URLs would have to quote."""
    fill_lake(bucket, kind)
    source = Files(f"{bucket.url}/lake/deep er", "**/*.parquet", schema=SCHEMA, partitions={"dt": "date"}, max_files=4)
    state = State(key={"dt": "date", "name": "text"}, aggregates=STATE.aggregates)
    pipeline = Pipeline("lake", source, {"per_day": state})
    register(pipeline)
    assert len(run_pipeline(settings, pipeline, run_id="run").commits) == 4  # 14 objects
    assert run_pipeline(settings, pipeline, run_id="again").commits == []
    query = f"SELECT dt, name, count(*), sum(amount)::bigint FROM {lake_of(bucket)} GROUP BY ALL ORDER BY ALL"
    assert stored(settings, pipeline) == duckdb.execute(query).fetchall()


REFERENCES = {"csv": ("csv", None), "parquet": ("parquet", None), "own tasks": ("parquet", pa.uint16())}


@pytest.mark.parametrize(("format", "kind"), REFERENCES.values(), ids=REFERENCES)
def test_a_batch_is_joined_with_the_objects_that_were_there_when_it_was_planned(
    settings: Settings, register: Callable[..., None], bucket: Bucket, format: str, kind: pa.DataType | None
) -> None:
    def put(factor: int) -> None:
        content = parquet(["a"], [factor], kind) if format == "parquet" else f"name,amount\na,{factor}\n"
        bucket.put(f"factors/{factor // 10}.{format}", content)

    factors = Reference(Files(f"{bucket.url}/factors", f"*.{format}", format, {"name": "string", "amount": "int"}))
    pipeline = joined_with(factors, Files(f"{bucket.url}/in", "*.csv", "csv", SCHEMA))
    register(pipeline)
    bucket.put("in/1.csv", "name,amount\na,1\n")
    bucket.put("factors/README", "Factors, by name.")
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
    bucket.put("in/2.csv", "name,amount\na,1\n")
    run_pipeline(settings, pipeline, run_id="next")
    assert stored(settings, pipeline) == [("a", 3, 29)], "both objects of the new version"

    opaque = joined_with(factors, Files(f"{bucket.url}/in", "*.csv", "csv", SCHEMA), kind="opaque")
    register(opaque)
    assert steps.plan(settings, opaque, run_id="run") == [1, 2]
    put(9)
    bucket.delete(f"factors/1.{format}")
    run_pipeline(settings, opaque, run_id="run")
    assert stored(settings, opaque) == [("a", 2, 18)]


def joined_with(factors: Reference, rows: Files, kind: Any = "transactional") -> Pipeline:
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


def test_the_key_is_nowhere_but_in_the_environment(
    settings: Settings, register: Callable[..., None], bucket: Bucket, server: Server
) -> None:
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
