"""Warm-up: a small batch of each file format, so that Java loads the classes before real batches need them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.spark.spark_errors import meaning_of
from tidegate.state_store.base.settings import Settings

SCHEMA = "key string, value bigint"


def warm_up(settings: Settings, folder: Path) -> None:
    """Read, hash, observe and aggregate rows, and pass them through Python; the files are written into this folder.

    Raises: SparkUnavailable, SparkFailed; errors of `spark_session`.
    """
    try:
        with spark_session(settings, "warm-up") as session:
            for number, rows in enumerate(_files(session, folder)):
                observed = rows.withColumn("hash", F.xxhash64("key", "value"))
                observed = observed.observe(Observation(f"format {number}"), F.bit_xor("hash"))
                by_key = observed.groupBy("key").agg(F.sum("value").alias("total"), F.bit_xor("hash").alias("hash"))
                by_key.mapInArrow(_unchanged, "key string, total bigint, hash bigint").collect()
    except (PySparkException, grpc.RpcError) as error:
        raise meaning_of(error) from error


def _files(session: SparkSession, folder: Path) -> Iterator[DataFrame]:
    (folder / "rows.csv").write_text("key,value\na,1\n")
    (folder / "rows.json").write_text('{"key": "a", "value": 1}\n')
    here = f"file:{folder}"  # whatever Hadoop's settings say of paths without a scheme
    yield session.read.schema(SCHEMA).option("header", True).csv(f"{here}/rows.csv")
    records = session.read.text(f"{here}/rows.json").select(F.from_json("value", SCHEMA).alias("record"))
    yield records.select("record.*")
    records.select("record.*").write.parquet(f"{here}/rows.parquet")
    yield session.read.schema(SCHEMA).parquet(f"{here}/rows.parquet")


def _unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches
