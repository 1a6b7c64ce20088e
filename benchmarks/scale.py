"""What a batch costs each part of the stack: core seconds, bytes of WAL and of the ledger.

`benchmarks.scale_model` adds them up. The pipelines differ in one thing each: small batches cost what a txid costs, large ones
of few keys what rows cost, large ones of many keys what keys cost. Core seconds are those of all processes of a component.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from psycopg2 import sql

from benchmarks.events import offer, write_events
from benchmarks.growth import Place
from benchmarks.harness import Bench, Figure, timed
from benchmarks.orchestration import write_small
from benchmarks.pipelines import ORDINARY, PAGES, SMALL, USERS
from benchmarks.project import Project, stack_without_airflow
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline

NAME = "scale"
BYTES_OF_LEDGER = "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class WHERE relnamespace = 'tidegate'::regnamespace"


@dataclass
class Spent:
    """What a run of batches has cost."""

    seconds: float
    postgres: float  # core seconds
    spark: float  # core seconds
    wal: int  # bytes


def run(bench: Bench) -> Iterator[Figure]:
    """Run small batches, then large ones of few keys, of many keys and through a transform; then weigh a long ledger."""
    txids, files, rows = bench.choose(100, 5), bench.choose(4, 4), bench.choose(2_000_000, 50_000)
    write_events(bench.folder / "events", files, rows)
    raw = sorted((bench.folder / "events").iterdir())
    with stack_without_airflow(bench.folder / "project") as made:
        made.register(SMALL, PAGES, USERS, ORDINARY)
        for first in (0, txids):  # the first time compiles
            write_small(made.home / "data" / SMALL.name, first, first + txids)
            small = _spent(made, SMALL)
        bench.tell(f"{txids} small batches: {small}")
        yield _figure("a txid of 100 rows, core seconds of Postgres", small.postgres / txids, "s")
        yield _figure("a txid of 100 rows, core seconds of Spark", small.spark / txids, "s")
        yield _figure("a txid of 100 rows, WAL", small.wal / txids, "bytes")
        for pipeline, what in ((PAGES, "a row"), (ORDINARY, "a row with a transform and two states")):
            large = _large(bench, made, pipeline, raw)
            yield _figure(f"{what}, core microseconds of Spark", large.spark / (files * rows) * 1e6, "µs")
        many = _large(bench, made, USERS, raw)
        keys = _keys_of_last(made, USERS, files)
        yield _figure("a key of a batch, core microseconds of Postgres", many.postgres / keys * 1e6, "µs")
        yield _figure("a key of a batch, WAL", many.wal / keys, "bytes")
        yield _figure("a committed txid in the ledger", _bytes_of_ledger(bench, made), "bytes")


def _figure(what: str, value: float, unit: str) -> Figure:
    return Figure(NAME, what, value, unit, value)


def _large(bench: Bench, made: Project, pipeline: Pipeline, raw: list[Path]) -> Spent:
    """Run the files twice, of which the first time compiles and fills the state, and return the second time's costs."""
    for turn in ("first", "second"):
        offer(raw, made.home / "data" / pipeline.name, turn)
        made.settle()
        spent = _spent(made, pipeline)
        bench.tell(f"{pipeline.name}, {turn} time: {spent}")
    return spent


def _spent(made: Project, pipeline: Pipeline) -> Spent:
    """Run the batches that are there and return what they cost."""
    log, cores = made.log_position(), made.core_seconds()
    seconds = timed(lambda: run_pipeline(made.settings, pipeline, run_id=f"scale after {log}"))
    used = {name: spent - cores[name] for name, spent in made.core_seconds().items()}
    return Spent(seconds, used["postgres"], used["spark"], made.log_position() - log)


def _keys_of_last(made: Project, pipeline: Pipeline, txids: int) -> int:
    """Return the number of keys of the last txids, each batch's counted by itself."""
    statement = sql.SQL(
        "WITH last AS (SELECT key_count FROM tidegate.commit WHERE pipeline = {} ORDER BY txid DESC LIMIT {}) "
        "SELECT sum(key_count)::bigint FROM last"
    ).format(sql.Literal(pipeline.name), sql.Literal(txids))
    with contextlib.closing(made.administrator()) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        ((keys,),) = cursor.fetchall()
    return int(keys)


def _bytes_of_ledger(bench: Bench, made: Project) -> float:
    """Return the bytes per txid of a ledger of many committed txids, with its indexes."""
    txids = bench.choose(100_000, 1_000)
    place = Place.create(made, txids)
    with contextlib.closing(place.administrator()) as connection, connection.cursor() as cursor:
        cursor.execute(BYTES_OF_LEDGER)
        ((before,),) = cursor.fetchall()
        place.fill_ledger(txids)
        cursor.execute(BYTES_OF_LEDGER)
        ((after,),) = cursor.fetchall()
    return float(after - before) / txids
