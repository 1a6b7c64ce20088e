"""The alternative to Tidegate: Structured Streaming, one file per trigger, foreachBatch into Postgres.

It is well written: availableNow, the batch aggregated by Spark, passed on as Arrow, copied, and upserted in key order, all in
one transaction. It promises less: a batch that is repeated after a crash counts twice.

`Peer` starts it in a process of its own, with a JVM of its own, and sends it requests; only the queries are timed.
"""

import json
import subprocess
import sys
import time
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import psycopg2
import pyarrow as pa
from psycopg2 import sql
from pyarrow import csv
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from state_store import Settings
from tidegate.stack.spark import MAX_DRIVER_MEMORY

SCHEMA = "user_id bigint, page string, amount bigint"


class Peer:
    """A Structured Streaming process, warm and waiting."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        conninfo = {key: str(value) for key, value in settings.conninfo(user="postgres").items()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peer", json.dumps(conninfo), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "peer.log").open("w"),
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)

    def run(self, source: Path, key: str, target: str, *, files_per_trigger: int = 1) -> float:
        """Count the events of new files into a table; return the seconds of the query."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([str(source), key, target, files_per_trigger]), file=self._process.stdin, flush=True)
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"The peer ended; see {self._folder / 'peer.log'}")
        return float(answer)


def create_target(connection: psycopg2.extensions.connection, target: str, key: str, key_type: str) -> None:
    """Create the peer's table: the state's columns and storage."""
    statement = (
        "CREATE TABLE {} ({} {} PRIMARY KEY, events bigint NOT NULL, amount bigint NOT NULL) "
        "WITH (fillfactor = 75, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_limit = 2000)"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql.SQL(statement).format(sql.Identifier(target), sql.Identifier(key), sql.SQL(key_type)))


def as_csv(rows: pa.Table) -> bytes:
    """Return rows as COPY reads them."""
    content = BytesIO()
    csv.write_csv(rows, content, csv.WriteOptions(include_header=False))
    return content.getvalue()


def copy_and_upsert(conninfo: dict[str, Any], target: str, key: str, content: bytes) -> None:
    """Copy rows into a temporary table and upsert them in key order, in one unguarded transaction."""
    stage = sql.SQL("CREATE TEMP TABLE stage (LIKE {}) ON COMMIT DROP").format(sql.Identifier(target))
    merge = sql.SQL(
        "INSERT INTO {target} AS kept SELECT * FROM stage ORDER BY {key} ON CONFLICT ({key}) DO UPDATE "
        "SET events = kept.events + excluded.events, amount = kept.amount + excluded.amount"
    ).format(target=sql.Identifier(target), key=sql.Identifier(key))
    with closing(psycopg2.connect(**conninfo)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(stage.as_string(cursor))
        cursor.copy_expert("COPY stage FROM STDIN WITH (FORMAT csv)", BytesIO(content))
        cursor.execute(merge.as_string(cursor))


def _serve(conninfo: dict[str, str], folder: Path) -> None:
    builder = SparkSession.builder.master("local[*]").appName("peer")
    for name, value in {
        "spark.driver.memory": str(MAX_DRIVER_MEMORY // 1024**2) + "m",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "8",
        "spark.sql.session.timeZone": "UTC",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    for line in sys.stdin:
        source, key, target, files_per_trigger = json.loads(line)
        start = time.perf_counter()
        rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files_per_trigger).parquet(source)
        query = (
            rows.writeStream.trigger(availableNow=True)
            .option("checkpointLocation", str(folder / "checkpoints" / target))
            .foreachBatch(_upsert(conninfo, key, target))
            .start()
        )
        query.awaitTermination()
        sys.stdout.write(f"{time.perf_counter() - start}\n")
        sys.stdout.flush()
    spark.stop()


def _upsert(conninfo: dict[str, str], key: str, target: str) -> Any:
    """Return the function that Structured Streaming calls for each batch."""

    def upsert(rows: Any, _batch_id: int) -> None:
        table = rows.groupBy(key).agg(F.count("*").alias("events"), F.sum("amount").alias("amount")).toArrow()
        copy_and_upsert(conninfo, target, key, as_csv(table))

    return upsert


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), Path(sys.argv[2]))
