"""Spark reads objects of a real S3 server, with Hadoop's client: at full size only, as this needs a stack of its own."""

import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import steps
from tests.acceptance.test_every_source import die_everywhere, pipeline_over
from tests.jars import fetch_or_skip
from tests.servers import Server, migrated_database, running_stack
from tests.sources.conftest import PER_NAME
from tests.sources.feeds import SCHEMA, ObjectsFeed
from tests.sources.s3 import PAGE, SECRET, Bucket, S3Server, spark_packages
from tests.sources.test_objects import bucket, fill_lake, lake_of, parquet, s3
from tidegate.jobs import Files, Inputs, Pipeline, Reference, State
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable

__all__ = ["bucket", "s3"]  # fixtures

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def server(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The Postgres of a stack whose Spark has the libraries that docs/storage.md names."""
    fetch_or_skip(*spark_packages().split(","))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIDEGATE_SPARK_PACKAGES", spark_packages())
        with running_stack(tmp_path_factory.mktemp("s3_stack")) as settings:
            yield Server(settings)


@pytest.fixture(scope="module")
def template(server: Server) -> Iterator[str]:
    with migrated_database(server) as name:
        yield name


def stored(settings: Settings, pipeline: Pipeline) -> list[tuple]:
    with StateStore.connect(settings) as store:
        spec = pipeline.spec.states[0]
        return sorted(tuple(row[column.name] for column in spec.columns) for row in store.state_rows(spec))


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
    state = State(key={"dt": "date", "name": "text"}, aggregates=PER_NAME.aggregates)
    pipeline = Pipeline("lake", source, {"per_day": state})
    register(pipeline)
    assert len(run_pipeline(settings, pipeline, run_id="run").commits) == 4  # 14 objects
    assert run_pipeline(settings, pipeline, run_id="again").commits == []
    query = f"SELECT dt, name, count(*), sum(amount)::bigint FROM {lake_of(bucket)} GROUP BY ALL ORDER BY ALL"
    assert stored(settings, pipeline) == duckdb.execute(query).fetchall()


def test_a_batch_is_joined_with_the_objects_that_were_there_when_it_was_planned(
    settings: Settings, register: Callable[..., None], bucket: Bucket
) -> None:
    def put(factor: int) -> None:
        bucket.put(f"factors/{factor // 10}.parquet", parquet(["a"], [factor]))

    rows = Files(f"{bucket.url}/in", "*.csv", "csv", SCHEMA)
    source = Inputs({"rows": rows, "factors": Reference(Files(f"{bucket.url}/factors", "*.parquet", schema=SCHEMA))})
    pipeline = Pipeline(
        "inbox",
        source,
        {"per_name": PER_NAME},
        lambda inputs: inputs["rows"].select("name").join(inputs["factors"], "name"),
        retry_delay_seconds=0,
    )
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


def test_the_example_of_the_page_does_what_it_says_and_keeps_the_key_in_the_environment(
    settings: Settings, register: Callable[..., None], s3: S3Server, server: Server
) -> None:
    """docs/storage.md, as it stands."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    lake = s3.make_bucket("lake")
    for day in (1, 2):
        table = pa.table({"shop": ["x", "y", "x"], "cents": pa.array([day, 10, 100], pa.int64())})
        pq.write_table(table, content := io.BytesIO())
        lake.put(f"sales/dt=2026-11-0{day}/part-0.parquet", content.getvalue())
    pipeline: Pipeline = names["PIPELINE"]
    register(pipeline)
    run_pipeline(settings, pipeline, run_id="run")
    query = f"""
        SELECT dt, shop, count(*), sum(cents)::bigint
        FROM read_parquet('{lake.folder}/sales/*/*.parquet', hive_partitioning = true) GROUP BY ALL ORDER BY ALL
    """
    assert stored(settings, pipeline) == duckdb.execute(query).fetchall()

    texts = [path.read_text(errors="replace") for path in server.settings.home.rglob("*.log")]
    assert texts
    with StateStore.connect(settings) as store:
        metadata = str(store.source_metadata(pipeline.name, 1))
        texts += [str(store.batch_history(pipeline.name, 1)), metadata, pipeline.source.identity]
    assert [text for text in texts if SECRET in text] == []
    assert "'etag': " in metadata
