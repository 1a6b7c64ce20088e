"""A store of a million objects, by `make cluster-test`."""

import os

import psycopg2
import pytest

from tests.conftest import register_pipelines
from tests.servers import Server
from tests.sources.beside_store import server, template
from tests.sources.s3 import many_objects, pages_asked_for, plan_many, set_count
from tests.sources.test_objects_in_spark import beside_store, s3
from tidegate.jobs import Count, Files, Pipeline, State
from tidegate.state_store import Settings

__all__ = ["beside_store", "s3", "server", "template"]  # fixtures

pytestmark = pytest.mark.skipif(not os.environ.get("CLUSTER"), reason="make cluster-test")

MANY, NEW = 1_000_000, 10_000


@pytest.mark.timeout(3600)
def test_a_million_objects_are_listed_and_planned_with_memory_flat(settings: Settings, server: Server) -> None:
    """All have counted but the last ones; a plan that begins after the last name asks for these alone.

    The listing is made up by a server of the test's, because S3Proxy reads its whole folder for each page.
    """
    pipeline = Pipeline("many", Files("s3a://many/in", schema={"name": "string"}), {"all": State(aggregates={"n": Count()})})
    register_pipelines(settings, pipeline)
    database = {"database": settings.pg_database}
    with many_objects(NEW) as endpoint:
        small = plan_many(server.settings, folder="s3a://many/in", batches=100, **database)
        set_count(endpoint, MANY + NEW)
        record_as_counted(server, settings.pg_database, MANY)
        pages_asked_for(endpoint)
        whole = plan_many(server.settings, folder="s3a://many/in", batches=100, **database)
        assert pages_asked_for(endpoint) == (MANY + NEW) // 1000
        last = f"{MANY - 1:09d}.parquet"
        grown = plan_many(server.settings, folder="s3a://many/in", batches=100, names_grow=True, after=last, **database)
        assert pages_asked_for(endpoint) == NEW // 1000
    print({"of 10,000": small, "of 1,010,000": whole, "of 1,010,000, names grow": grown})  # noqa: T201 - what is measured
    assert small["objects"] == whole["objects"] == grown["objects"] == NEW
    assert whole["grown_mb"] < small["grown_mb"] + 30


def record_as_counted(server: Server, database: str, count: int) -> None:
    """Write the ledger's rows of a first batch that had this many objects."""
    statements = (
        "INSERT INTO tidegate.batch (pipeline, txid, source_metadata, source_digest, opened_by) "
        "VALUES ('many', 1, '\\x7b7d', sha256('\\x7b7d'), 'test')",
        "UPDATE tidegate.cursor SET txid = 1 WHERE pipeline = 'many'",
        "INSERT INTO tidegate.source_file (pipeline, name, sha256, size, mtime_ns, txid) "
        "SELECT 'many', lpad(n::text, 9, '0') || '.parquet', sha256(convert_to('etag ' || lpad(to_hex(n), 32, '0'), 'UTF8')), "
        f"1000, 0, 1 FROM generate_series(0, {count:d} - 1) n",
        "ANALYZE tidegate.source_file",
    )
    connection = psycopg2.connect(**{**server.settings.conninfo(user="postgres"), "dbname": database})
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
    finally:
        connection.close()
