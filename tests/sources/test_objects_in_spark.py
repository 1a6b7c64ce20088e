"""Spark reads objects of a real S3 server, with Hadoop's client, from a stack of the module's own."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from tests.checkout import REPOSITORY
from tests.jars import fetch_or_skip
from tests.servers import Server, migrated_database, running_stack
from tests.sources.lake_tables import parquet_of
from tests.sources.test_objects import SECRET, S3Server, s3
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore

__all__ = ["s3"]  # a fixture

pytestmark = pytest.mark.soak

PAGE = REPOSITORY / "docs" / "storage.md"
ODD = ("with space.parquet", "50%25 off%.parquet", "grüße 😀.parquet", "a=b.parquet", "[x]{y}.parquet", "plus+&'!.parquet")


@pytest.fixture(scope="module")
def server(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The Postgres of a stack whose Spark has the libraries that docs/storage.md names."""
    (packages,) = re.findall(r'^spark_packages = "(.*)"$', PAGE.read_text(), re.MULTILINE)
    fetch_or_skip(*packages.split(","))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIDEGATE_SPARK_PACKAGES", packages)
        with running_stack(tmp_path_factory.mktemp("s3_stack")) as settings:
            yield Server(settings)


@pytest.fixture(scope="module")
def template(server: Server) -> Iterator[str]:
    with migrated_database(server) as name:
        yield name


@pytest.mark.promise("decision:0034")
def test_the_example_of_the_page_reads_objects_of_any_name_and_keeps_the_key_in_the_environment(
    settings: Settings, store: StateStore, register: Callable[..., None], s3: S3Server, server: Server
) -> None:
    """docs/storage.md, as it stands; the state is what DuckDB makes of the same objects."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    lake = s3.make_bucket("lake")
    for number, name in enumerate(ODD):
        table = pa.table({"shop": ["x", "y", "x"], "cents": pa.array([number, 10, 100], pa.int64())})
        for day in (1, 2):
            lake.put(f"sales/dt=2026-11-0{day}/{name}", parquet_of(table))
    pipeline: Pipeline = names["PIPELINE"]
    register(pipeline)
    run_pipeline(settings, pipeline, run_id="run")
    objects = f"read_parquet('{lake.folder}/sales/*/*.parquet', hive_partitioning = true)"
    query = f"SELECT dt, shop, count(*), sum(cents)::bigint FROM {objects} GROUP BY ALL ORDER BY ALL"
    spec = pipeline.spec.states[0]
    stored = sorted(tuple(row[column.name] for column in spec.columns) for row in store.state_rows(spec))
    metadata = str(store.source_metadata(pipeline.name, 1))
    texts = [str(store.batch_history(pipeline.name, 1)), metadata, pipeline.source.identity]
    assert stored == duckdb.execute(query).fetchall()
    assert (logs := [path.read_text(errors="replace") for path in server.settings.home.rglob("*.log")])
    assert [text for text in (*logs, *texts) if SECRET in text] == []
    assert "'etag': " in metadata
