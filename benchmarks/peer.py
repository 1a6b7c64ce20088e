"""The alternative to Tidegate: Structured Streaming, some files per trigger, foreachBatch into Postgres.

It is well written: availableNow, the batch computed by Spark, passed on as Arrow, copied, and merged in key order, all in one
transaction; a batch that goes into two tables is kept by Spark, not read twice. It promises less: a batch of counts that is
repeated after a crash counts twice.

`Peer` starts it in a process of its own, with a JVM of its own, and sends it requests; only the queries are timed.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Self

import psycopg2
import pyarrow as pa
from psycopg2 import sql
from pyarrow import csv
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks.pipelines import VERSION, ordinary, words
from tidegate.stack.components.spark import MAX_DRIVER_MEMORY
from tidegate.state_store import Settings

VERSIONS = ", ".join(f"{name} {kind}" for name, kind in VERSION.items())
SCHEMA = "user_id bigint, page string, amount bigint"
ADD_UP = "events = kept.events + excluded.events, amount = kept.amount + excluded.amount"


class Merge(NamedTuple):
    """How rows get into a table: the columns of its key, and what becomes of a row that is there; None leaves it alone."""

    target: str
    key: Sequence[str]
    update: str | None = ADD_UP


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

    def run(self, source: Path, key: str, target: str, *, job: str = "count", files_per_trigger: int = 1) -> float:
        """Bring new files into tables named after `target`; return the seconds of the query."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([job, str(source), key, target, files_per_trigger]), file=self._process.stdin, flush=True)
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
    copy_and_merge(conninfo, {Merge(target, (key,)): content})


def copy_and_merge(conninfo: dict[str, Any], contents: Mapping[Merge, bytes]) -> None:
    """Copy rows into temporary tables and merge them in key order, in one unguarded transaction."""
    with closing(psycopg2.connect(**conninfo)) as connection, connection, connection.cursor() as cursor:
        for merge, content in contents.items():
            names = {"stage": sql.Identifier(f"stage_{merge.target}"), "target": sql.Identifier(merge.target)}
            stage = sql.SQL("CREATE TEMP TABLE {stage} (LIKE {target}) ON COMMIT DROP").format(**names)
            action = f"UPDATE SET {merge.update}" if merge.update else "NOTHING"
            upsert = sql.SQL(
                "INSERT INTO {target} AS kept SELECT * FROM {stage} ORDER BY {key} ON CONFLICT ({key}) DO {action}"
            ).format(**names, key=sql.SQL(", ").join(map(sql.Identifier, merge.key)), action=sql.SQL(action))
            cursor.execute(stage.as_string(cursor))
            cursor.copy_expert(sql.SQL("COPY {stage} FROM STDIN WITH (FORMAT csv)").format(**names), BytesIO(content))
            cursor.execute(upsert.as_string(cursor))


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
        job, source, key, target, files_per_trigger = json.loads(line)
        start = time.perf_counter()
        stream = spark.readStream.option("maxFilesPerTrigger", files_per_trigger)
        rows = stream.text(source) if job == "words" else stream.schema(VERSIONS if job == "newest" else SCHEMA).parquet(source)
        query = (
            rows.writeStream.trigger(availableNow=True)
            .option("checkpointLocation", str(folder / "checkpoints" / target))
            .foreachBatch(partial(JOBS[job], conninfo, key, target))
            .start()
        )
        query.awaitTermination()
        sys.stdout.write(f"{time.perf_counter() - start}\n")
        sys.stdout.flush()
    spark.stop()


def _count(conninfo: dict[str, str], key: str, target: str, rows: Any, _batch_id: int) -> None:
    copy_and_upsert(conninfo, target, key, as_csv(_counted(rows, key)))


def _counted(rows: Any, key: str) -> pa.Table:
    table: pa.Table = rows.groupBy(key).agg(F.count("*").alias("events"), F.sum("amount").alias("amount")).toArrow()
    return table


def _append(conninfo: dict[str, str], _key: str, target: str, rows: Any, batch_id: int) -> None:
    """Append each row with its batch and a position in it, so that a repeated batch appends nothing twice."""
    numbered = rows.select(F.lit(batch_id).alias("batch"), F.monotonically_increasing_id().alias("position"), "*")
    copy_and_merge(conninfo, {Merge(target, ("batch", "position"), None): as_csv(numbered.toArrow())})


def _newest(conninfo: dict[str, str], key: str, target: str, rows: Any, _batch_id: int) -> None:
    newest = rows.groupBy(key).agg(F.max(F.struct("at", "page", "amount")).alias("row")).select(key, "row.*")
    update = "at = excluded.at, page = excluded.page, amount = excluded.amount WHERE excluded.at > kept.at"
    copy_and_merge(conninfo, {Merge(target, (key,), update): as_csv(newest.toArrow())})


def _two_states(conninfo: dict[str, str], _key: str, target: str, rows: Any, _batch_id: int) -> None:
    kept = ordinary(rows).persist()
    contents = {Merge(f"{target}_by_{key}", (key,)): as_csv(_counted(kept, key)) for key in ("page", "bucket")}
    kept.unpersist()
    copy_and_merge(conninfo, contents)


def _words(conninfo: dict[str, str], key: str, target: str, rows: Any, _batch_id: int) -> None:
    counts = words(rows).groupBy(key).agg(F.count("*").alias("events")).toArrow()
    copy_and_merge(conninfo, {Merge(target, (key,), "events = kept.events + excluded.events"): as_csv(counts)})


JOBS = {"count": _count, "append": _append, "newest": _newest, "two_states": _two_states, "words": _words}


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), Path(sys.argv[2]))
