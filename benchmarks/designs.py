"""The three designs of the thesis: one record per transaction, batches, pipelined batches.

The first two run one phase at a time: process, commit, process, commit. The third is `run_pipeline`.

Commits are sequential, so if both phases take equally long, pipelining can hide at most one of them: it is 2 n / (n + 1) times
as fast for n batches, 1.92 times for 24. The work of a batch outside its two phases reduces that, and so does competition of
the phases for the same machine. Therefore there are two figures. Processing that waits for a slow source leaves the cores to
the commit. Processing that computes takes one core, and the commit another; on two cores, nothing is left for Spark's driver
and compilers, for the second half of a COPY, and for Postgres' own writers.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from matplotlib.axes import Axes
from psycopg2 import sql
from pyspark.sql import DataFrame, SparkSession

from benchmarks import events
from benchmarks.harness import Bar, Bench, Figure, compared
from benchmarks.project import Project, stack_without_airflow
from tests import steps
from tests.servers import Server
from tidegate.jobs import Count, Files, FixedBatches, Pipeline, State, Sum
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.jobs.sources import Emitter
from tidegate.jobs.sources.binding import emitter_of
from tidegate.stack.components.server_process import log_file
from tidegate.state_store import Settings, StateStore

RECORDS_PER_BATCH = 100
CONCURRENCY = 2
BALANCED = Bar(at_least=0.85, at_most=1.15)
OWN_SHARE = 0.7  # of the commit's time: the rest of processing is work that is added
MOST_CALIBRATIONS, CALIBRATION_BATCHES = 5, 3
UNPIPELINED = "process and commit in turn"
Slowed = Callable[[Pipeline, float], Pipeline]
Way = Callable[[Settings, Pipeline, str], list[int]]
Span = tuple[float, float]


def run(bench: Bench) -> Iterator[Figure]:
    """Count the database's work per record, alone and in a batch; time batches in turn and pipelined; plot all three."""
    with stack_without_airflow(bench.folder / "stack") as made:
        single = _Counting(bench, made, "single", 1)
        batched = _Counting(bench, made, "batched", RECORDS_PER_BATCH)
        yield from _operations(single, batched)
        for kind, plot, slowed in (("waits", "designs", _waiting), ("computes", "designs_computing", _computing)):
            trial = _Balanced(bench, made, kind, slowed)
            trial.calibrate()
            in_turn, pipelined = trial.passes(bench.passes)
            what = f"{trial.batches} batches of {trial.keys:,} keys, processing {kind} {trial.added_seconds:.2f} s"
            balance = trial.balance
            yield Figure("designs", f"{what}: processing / commit", balance, "", balance, bar=BALANCED)
            yield compared("designs", f"{what}: pipelined", pipelined, UNPIPELINED, in_turn, bar=Bar(at_least=1.7))
            with bench.plot(plot, f"Busy and idle, by design: processing {kind}") as axes:
                _draw(axes, single.ledger, trial.in_turn[-1], trial.pipelined[-1])


@dataclass(frozen=True)
class _Batch:
    """The start and end of a batch's two phases in seconds, from the ledger."""

    txid: int
    process: Span
    commit: Span


@dataclass(frozen=True)
class _Operations:
    """Counters of a server's work for one database."""

    statements: int
    transactions: int
    rows: int

    def since(self, before: "_Operations") -> "_Operations":
        """Return the work since an earlier reading."""
        return _Operations(
            self.statements - before.statements, self.transactions - before.transactions, self.rows - before.rows
        )


class _Counting:
    """The thesis' example, a global count with a given number of records per batch; Postgres counts its own work."""

    def __init__(self, bench: Bench, made: Project, name: str, records: int) -> None:
        self.batches = bench.choose(100, 5)
        self.records = records * self.batches
        lists = [[[number] for number in range(records)]] * (1 + self.batches)  # the first one only warms up
        pipeline = Pipeline(name, FixedBatches(lists, {"number": "int"}), {f"count_{name}": State(aggregates={"n": Count()})})
        made.register(pipeline)
        run_in_turn(made.settings, pipeline, f"{name} warm-up", max_batches=1)
        times: list[float] = []
        with _nothing_else_counted(made.settings):
            before = _operations_so_far(made.settings)
            with bench.timed(f"{self.records} records, {records} per batch", times):
                txids = run_in_turn(made.settings, pipeline, name)
            self.operations = _operations_so_far(made.settings).since(before)
        assert made.state(pipeline, f"count_{name}") == [(records * len(lists),)], f"{name} is wrong"
        self.seconds = times[0]
        self.ledger = _ledger(made.settings, name, txids)


def _operations(single: _Counting, batched: _Counting) -> Iterator[Figure]:
    """Compare the work per record: a batch has 100 times the records. Slow batches add a few queries of waiting tasks."""
    alone = "1 record per txid"
    for what in ("statements", "transactions", "rows"):
        costs = [getattr(way.operations, what) / way.records for way in (batched, single)]
        yield compared(
            "designs",
            f"{what} per record, {RECORDS_PER_BATCH} per txid",
            costs[:1],
            alone,
            costs[1:],
            bar=Bar(at_least=0.95 * RECORDS_PER_BATCH),
            unit="",
        )
    speeds = [way.records / way.seconds for way in (batched, single)]
    what = f"records per second, {RECORDS_PER_BATCH} per txid"
    yield compared("designs", what, speeds[:1], alone, speeds[1:], unit="/s", is_speed=False)


class _Balanced:
    """A pipeline whose processing is lengthened until it takes as long as its commit."""

    def __init__(self, bench: Bench, made: Project, name: str, slowed: Slowed) -> None:
        self.keys = bench.choose(100_000, 40_000)
        self._most_keys = bench.choose(400_000, 40_000)
        self.batches = bench.choose(24, 4)
        self.in_turn: list[list[_Batch]] = []
        self.pipelined: list[list[_Batch]] = []
        self._bench = bench
        self._project = made
        self._slowed = slowed
        self.added_seconds = 0.0
        self._arrivals = 0
        self._source = made.home / "data" / name
        # One shuffle partition, and one file below Spark's least split: each phase is one task's work.
        self._settings = replace(made.settings, staging_connections=1)
        schema = {"user_id": "bigint", "amount": "bigint"}
        # Opaque: the commit of each key costs more than staging it, so that there is something to balance.
        per_user = State({"user_id": "bigint"}, {"events": Count(), "amount": Sum("amount")}, kind="opaque")
        source = _SlowFiles(f"data/{name}", glob="*.parquet", schema=schema, min_age_seconds=0)
        self._pipeline = Pipeline(name, source, {f"{name}_users": per_user}, concurrency=CONCURRENCY)
        made.register(self._pipeline)

    @property
    def balance(self) -> float:
        """Return the ratio of processing time to commit time, measured while the phases did not overlap."""
        process, commit = _medians(list(chain(*self.in_turn)))
        return process / commit

    def calibrate(self) -> None:
        """Choose a number of keys with which the commit takes much longer, then the work that makes processing as long."""
        process, commit = self._measure()
        while process > OWN_SHARE * commit and self.keys < self._most_keys:
            self.keys *= 2
            process, commit = self._measure()
        for _ in range(MOST_CALIBRATIONS):
            added = max(0.0, self.added_seconds + commit - process)
            if added == self.added_seconds:
                return
            self.added_seconds = added
            process, commit = self._measure()
            if BALANCED.holds(process / commit):
                return

    def _measure(self) -> tuple[float, float]:
        """Return the times of processing and commit, run in turn, after a warm-up of two batches at once."""
        self._run(CONCURRENCY, run_pipelined)
        self._project.settle()
        process, commit = _medians(self._run(CALIBRATION_BATCHES, run_in_turn))
        self._tell(f"{self.keys:,} keys, {self.added_seconds:.2f} s added", process, commit)
        return process, commit

    def passes(self, passes: int) -> tuple[list[float], list[float]]:
        """Time the batches in turn and pipelined, alternately, after a warm-up; check the results."""
        in_turn: list[float] = []
        pipelined: list[float] = []
        self._run(self.batches, run_pipelined)
        for number in range(1, passes + 1):
            for what, way, times, ledgers in (
                ("in turn", run_in_turn, in_turn, self.in_turn),
                ("pipelined", run_pipelined, pipelined, self.pipelined),
            ):
                self._project.settle()
                ledgers.append(self._run(self.batches, way, times))
                self._tell(f"pass {number}, {what}, {times[-1]:.2f} s", *_medians(ledgers[-1]))
        (state,) = self._pipeline.states
        wanted = events.expected(self._source, "user_id")
        assert self._project.state(self._pipeline, state) == wanted, f"{self._pipeline.name} is wrong"
        return in_turn, pipelined

    def _run(self, batches: int, way: Way, times: list[float] | None = None) -> list[_Batch]:
        """Put the file into the folder several times, run the new batches, and return their times from the ledger."""
        file = _write_keys(self._bench.folder / "raw", self.keys)
        for _ in range(batches):
            self._arrivals += 1
            events.offer([file], self._source, f"{self._arrivals:06d}")
        pipeline = self._slowed(self._pipeline, self.added_seconds)
        start = time.perf_counter()
        txids = way(self._settings, pipeline, f"benchmark {self._arrivals}")
        if times is not None:
            times.append(time.perf_counter() - start)
        return _ledger(self._settings, pipeline.name, txids)

    def _tell(self, what: str, process: float, commit: float) -> None:
        self._bench.tell(f"{self._pipeline.name}, {what}: processing {process:.2f} s, commit {commit:.2f} s")


def run_in_turn(settings: Settings, pipeline: Pipeline, run_id: str, max_batches: int | None = None) -> list[int]:
    """Run the new batches, one phase at a time."""
    txids = steps.plan(settings, pipeline, run_id=run_id, max_batches=max_batches)
    for txid in txids:
        steps.process(settings, pipeline, txid, owner=run_id)
        steps.commit(settings, pipeline, txid, owner=run_id)
    return txids


def run_pipelined(settings: Settings, pipeline: Pipeline, run_id: str) -> list[int]:
    """Run the new batches as the engine does."""
    return run_pipeline(settings, pipeline, run_id=run_id).txids


@dataclass(frozen=True)
class _SlowFiles(Files):
    """Files whose reader waits before it reads a batch; by default not at all."""

    seconds: float = 0.0

    def emitter(self, spark: SparkSession, settings: Settings) -> Emitter:
        """Wait, then return the reader of the files."""
        time.sleep(self.seconds)
        files = Files(**{field.name: getattr(self, field.name) for field in fields(Files) if field.init})
        return emitter_of(files, spark, settings)


def _waiting(pipeline: Pipeline, seconds: float) -> Pipeline:
    """Return the pipeline with a source that answers after this time."""
    return replace(pipeline, source=replace(pipeline.source, seconds=seconds))


def _computing(pipeline: Pipeline, seconds: float) -> Pipeline:
    """Return the pipeline with a transform that returns the rows unchanged, after this much CPU time in the executor.

    It counts the CPU time of its thread, so it takes longer under load, as any work does. Executors get it by value: as a
    function of this module it would import the tests' conftest, which removes their PG* variables.
    """

    def transform(rows: DataFrame) -> DataFrame:
        def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            until, block = time.thread_time() + seconds, bytes(100_000)
            while time.thread_time() < until:
                hashlib.sha256(block).digest()
            yield from batches

        return rows.mapInArrow(pass_on, rows.schema)

    return replace(pipeline, transform=transform)


def _write_keys(folder: Path, keys: int) -> Path:
    """Write a file that has each key once, in random order, so that each merge updates all rows; return its path."""
    file = folder / f"{keys}.parquet"
    if not file.exists():
        folder.mkdir(exist_ok=True)
        with duckdb.connect() as connection:
            connection.execute(
                f"COPY (SELECT i AS user_id, i % 1000 AS amount FROM range({keys}) AS keys(i) ORDER BY hash(i)) "
                f"TO '{file}' (FORMAT parquet)"
            )
    return file


@contextmanager
def _nothing_else_counted(settings: Settings) -> Iterator[None]:
    """Let Postgres log each statement of new connections, Spark's executors included, with autovacuum off."""
    server, database = Server(settings), sql.Identifier(settings.pg_database)
    server.execute(sql.SQL("ALTER DATABASE {} SET log_statement = 'all'").format(database))
    server.execute(sql.SQL("ALTER SYSTEM SET autovacuum = off"))
    server.execute(sql.SQL("SELECT pg_reload_conf()"))
    try:
        yield
    finally:
        server.execute(sql.SQL("ALTER DATABASE {} RESET log_statement").format(database))
        server.execute(sql.SQL("ALTER SYSTEM RESET autovacuum"))
        server.execute(sql.SQL("SELECT pg_reload_conf()"))


def _operations_so_far(settings: Settings) -> _Operations:
    """Return Postgres' own counters after all sessions have ended: a session reports its counts when it ends."""
    server, database = Server(settings), [settings.pg_database]
    connected = sql.SQL("SELECT pid FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'")
    while server.execute(connected, database):
        time.sleep(0.05)
    counters = sql.SQL("SELECT xact_commit, tup_inserted + tup_updated FROM pg_stat_database WHERE datname = %s")
    ((transactions, rows),) = server.execute(counters, database)
    statements = log_file(settings.stack_folder, "postgres").read_bytes().count(b" LOG:  statement: ")
    return _Operations(statements, transactions, rows)


def _ledger(settings: Settings, pipeline: str, txids: Sequence[int]) -> list[_Batch]:
    """Return the phases of each batch, in seconds since the first one started."""
    with StateStore.connect(settings) as store:
        histories = [store.batch_history(pipeline, txid) for txid in txids]
    start: datetime = min(history.attempts[-1]["started_at"] for history in histories)

    def span(row: dict[str, Any], first: str, last: str) -> Span:
        return (row[first] - start).total_seconds(), (row[last] - start).total_seconds()

    return [
        _Batch(txid, span(h.attempts[-1], "started_at", "sealed_at"), span(h.commit, "committed_at", "merged_at"))
        for txid, h in zip(txids, histories, strict=True)
        if h.commit is not None
    ]


def _medians(batches: Sequence[_Batch]) -> tuple[float, float]:
    """Return the median times of processing and of commit."""
    process = statistics.median(b.process[1] - b.process[0] for b in batches)
    return process, statistics.median(b.commit[1] - b.commit[0] for b in batches)


def _draw(axes: Axes, single: Sequence[_Batch], in_turn: Sequence[_Batch], pipelined: Sequence[_Batch]) -> None:
    """Plot each design's phases over time, up to the end of the second design; gaps between the bars are idle time."""
    labels: list[str] = []
    for design, batches in (("one record", single), ("batches", in_turn), ("pipelined", pipelined)):
        end = max(b.commit[1] for b in batches)
        for phase, spans, colour in (
            ("process", [b.process for b in batches], "tab:blue"),
            ("commit", [b.commit for b in batches], "tab:orange"),
        ):
            labels.append(f"{design}: {phase}\n{_busy(spans) / end:.0%} busy")
            lanes = _lanes(spans)
            height = 0.8 / (1 + max(lanes))
            for lane, (start, stop), batch in zip(lanes, spans, batches, strict=True):
                place = (len(labels) - 1.4 + lane * height, height)
                axes.broken_barh([(start, stop - start)], place, color=colour, alpha=1 if batch.txid % 2 else 0.6)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, max(b.commit[1] for b in in_turn))
    axes.set_xlabel("seconds; txids in turn dark and light")


def _busy(spans: Sequence[Span]) -> float:
    """Return the total time that is covered by at least one span."""
    busy = reached = 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return busy


def _lanes(spans: Sequence[Span]) -> list[int]:
    """Return for each span the first lane that is free when it starts."""
    lanes: list[int] = []
    ends: list[float] = []
    for start, stop in spans:
        lane = next((number for number, end in enumerate(ends) if end <= start), len(ends))
        ends[lane:] = [stop, *ends[lane + 1 :]]
        lanes.append(lane)
    return lanes
