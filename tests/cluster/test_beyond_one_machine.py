"""The README's settings for several machines: files in an object store, Spark on a cluster, and an executor that dies."""

import os
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from tests.cluster.spark_cluster import REPOSITORY, SparkCluster, standalone_cluster
from tests.cluster.test_spark_cluster import DAILY, ROUTES, Author, Run, author, database, days, rows_of
from tests.conftest import register_pipelines
from tests.jars import fetch_or_skip
from tests.sources.s3 import Bucket, S3Server, running_server, spark_packages
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.jobs.pipelines import flights
from tidegate.stack.components import java_libraries
from tidegate.state_store import Settings

__all__ = ["author", "database", "days"]  # fixtures

pytestmark = pytest.mark.skipif("CLUSTER" not in os.environ, reason="takes minutes: make cluster-test")
DAYS, FILES_PER_BATCH = 24, 4
BUCKET = "lake"
PLACE = f"s3a://{BUCKET}/flights"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(stack: Settings, s3: S3Server, free_port: Callable[[], int]) -> Iterator[SparkCluster]:
    """Two workers and a Connect server that know the store's address and key, and the libraries that docs/storage.md names."""
    packages = spark_packages().split(",")
    fetch_or_skip(*packages)
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    jars = java_libraries.spark_jars(packages)
    with standalone_cluster(stack, free_port, properties={}, second_worker={}, environment=environment, jars=jars) as started:
        yield started


@pytest.fixture(scope="module")
def bucket(s3: S3Server, days: Path) -> Bucket:
    """A bucket with days of flights as Parquet, in a folder per day."""
    made = s3.make_bucket(BUCKET)
    with duckdb.connect() as connection:
        for file in sorted(days.glob("*.csv"))[:DAYS]:
            target = days / "flights.parquet"
            rows = "SELECT * REPLACE (year::INT AS year, month::INT AS month, day::INT AS day, dep_time::INT AS dep_time,"
            rows += " dep_delay::INT AS dep_delay, flight::INT AS flight, distance::INT AS distance)"
            connection.execute(f"COPY ({rows} FROM read_csv('{file}', nullstr = '')) TO '{target}' (FORMAT parquet)")
            made.put(f"flights/dt={file.stem}/part-0.parquet", target.read_bytes())
    return made


@pytest.fixture
def settings(cluster: SparkCluster, database: str, tmp_path: Path) -> Settings:
    """Settings with which the README's block replaces those of one machine, each with the value that it has here."""
    (block,) = re.findall(r"^```toml\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    here = cluster.settings
    (tmp_path / "tidegate.toml").write_text("".join(f'{name} = "{getattr(here, name)}"\n' for name in tomllib.loads(block)))
    environ = {
        "TIDEGATE_HOME": str(tmp_path),
        "PGPORT": str(here.pg_port),
        "PGDATABASE": database,
        "PGPASSFILE": str(here.pg_passfile),
        "TIDEGATE_TRUSTED_USERS": here.trusted_users,  # of a Connect server on this machine
        "TIDEGATE_STAGING_CONNECTIONS": str(here.staging_connections),
    }
    return Settings.load(environ)


def over_objects(pipeline: Pipeline) -> Pipeline:
    assert isinstance(pipeline.source, Files)
    schema = pipeline.source.schema
    return replace(pipeline, source=Files(PLACE, glob="*/*.parquet", schema=schema, max_files=FILES_PER_BATCH))


def test_flights_and_an_authors_code_run_far_away(
    settings: Settings, cluster: SparkCluster, bucket: Bucket, author: Callable[..., Author], days: Path
) -> None:
    shipped, own = over_objects(flights.PIPELINE), over_objects(author(pause=0.1).module().PIPELINE)
    register_pipelines(settings, shipped, own)
    assert len(run_pipeline(settings, shipped, run_id="run").commits) == DAYS / FILES_PER_BATCH
    with Run(settings, own) as run:
        run.await_staging()
        for executor in cluster.workers[0].executors():
            executor.kill()
    assert len(run.result.commits) == DAYS / FILES_PER_BATCH

    raw = sorted(map(str, days.glob("*.csv")))[:DAYS]
    assert rows_of(settings, shipped) == duckdb.sql(DAILY.replace("'{files}'", str(raw))).fetchall()
    expected = ROUTES.replace("'{files}'", str(raw)).format(arrow="'-'")
    assert rows_of(settings, own) == duckdb.sql(expected).fetchall()
