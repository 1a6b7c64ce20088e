"""Which rows are hashed, what a batch asks of Spark and its Python workers; transforms that are refused."""

import gc
import logging
import re
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.connect.proto.base_pb2_grpc import SparkConnectServiceStub

from tests import steps
from tests.jobs.conftest import Tables
from tests.sources.conftest import PER_NAME
from tests.sources.in_process import meanwhile
from tests.statements import execute
from tidegate.jobs import State, Sum
from tidegate.jobs.compute.batch_attempt import _Computation
from tidegate.jobs.compute.sessions import session
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.compute.shortcuts import choose
from tidegate.jobs.compute.transform.transform_purity import check_pure
from tidegate.stack.components.server_process import wait_until
from tidegate.stack.components.spark import PYTHON_DAEMON, PYTHON_SETTINGS
from tidegate.state_store.base.errors import DeclarationInvalid, TidegateError

SCHEMA = {"name": "string", "amount": "bigint"}
ROWS = [("a", 1), ("b", 2)]
LOST = {"per_name": PER_NAME, "overall": State(aggregates={"amount": Sum("amount")}, unanchored=True)}


# How a batch is declared and routed; whether its partials are followed, whether hashes depend on a column that no state uses.
HASHED: dict[str, tuple[dict[str, Any], Any, str | None]] = {
    "partials": ({}, choose, None),
    "no tracking": ({"tracking": "off"}, choose, None),
    "one state unanchored": ({"states": LOST}, choose, "used"),
    "all unanchored": ({"states": {"per_name": replace(PER_NAME, unanchored=True)}}, choose, "all"),
    "rows": ({}, steps.shuffled, "used"),
    "transformed": ({"transform": lambda rows: rows}, steps.shuffled, None),
    "without digests": ({}, lambda of, attempt, facts: steps.shuffled(of, attempt, replace(facts, is_verified=False)), "all"),
}


@pytest.mark.promise("performance:of-untouched-files-in-one-task-partials")
@pytest.mark.promise("performance:columns-that-no-state-uses-are-neither")
@pytest.mark.promise("performance:with-transform-over-files-with-digests-source")
def test_rows_are_hashed_unless_the_file_vouches_for_them(tables: Tables) -> None:
    schema = {**SCHEMA, "note": "string"}
    tables.put_rows(schema, *[[("a", 1, note), ("b", 2, note)] for note in ("this", "that")] * len(HASHED))
    tables.plan(tables.declare_over(schema, PER_NAME), "test")
    found: dict[str, str] = {}
    for number, (name, (declared, routing, _)) in enumerate(HASHED.items()):
        pipeline = tables.declare_over(schema, PER_NAME, **declared)
        assert ("go unnoticed" in "".join(pipeline.lost_tracking)) == name.endswith(("tracking", "unanchored"))
        sums = []
        for txid in (2 * number + 1, 2 * number + 2):
            if sums != [None]:  # what is not hashed
                steps.process(tables.settings, pipeline, txid, owner="test", routing=routing)
                attempt = steps.history(tables.settings, txid).attempts[-1]
                assert attempt["source_rows"] == attempt["transformed_rows"] == 2
                sums.append(attempt["source_hash_sum"])
        found[name] = "None" if sums == [None] else "used" if sums[0] == sums[1] else "all"
    assert found == {name: str(hashed) for name, (_, _, hashed) in HASHED.items()}


@pytest.mark.promise("performance:batch-asks-spark-four-times", "performance:small-files-are-grouped-by-one-task")
@pytest.mark.promise("performance:groups-are-kept-in-one-hash-table")
def test_a_small_batch_asks_spark_four_times(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: Counter[str] = Counter()
    connect = SparkConnectServiceStub.__init__

    def counting(stub: SparkConnectServiceStub, channel: Any) -> None:
        connect(stub, channel)
        for name, call in list(vars(stub).items()):
            setattr(stub, name, partial(count, name, call))

    def count(name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        requests[name] += 1
        return call(*arguments, **named)

    pipeline = tables.declare_over(SCHEMA, PER_NAME)
    tables.put_rows(SCHEMA, ROWS)
    tables.run(pipeline, "first")  # in a new session, settings are written too
    tables.put_rows(SCHEMA, ROWS)
    monkeypatch.setattr(SparkConnectServiceStub, "__init__", counting)
    tables.run(pipeline, "second")
    assert len(steps.history(tables.settings, 2).seals) == 1  # one task has grouped it
    assert requests == {"Config": 2, "AnalyzePlan": 1, "ExecutePlan": 1}
    with spark_session(tables.settings, "inbox") as spark:
        assert {name: spark.conf.get(name) for name in session.QUICK} == session.QUICK
    assert tables.counts(pipeline) == {"a": (2, 2), "b": (2, 4)}


@pytest.mark.promise("performance:python-workers-keep-their-imports-out-of")
@pytest.mark.promise("performance:arrow-batches-of-short-rows-are-limited")
def test_python_workers_get_limited_pieces_and_keep_their_imports(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are limited in bytes, or, where rows are short, only in their number; a next version may have longer ones."""
    pipeline = tables.declare_over(SCHEMA, PER_NAME)
    tables.put_rows(SCHEMA, [("a", 1)])
    tables.run(pipeline, routing=steps.on_executors)

    def frozen_objects(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"frozen": [gc.get_freeze_count()]})

    def pieces(rows: int, partitions: int, *, are_short: bool) -> list[int]:
        with spark_session(tables.settings, "inbox", rows_are_short=are_short) as spark:
            found = spark.range(rows, numPartitions=partitions).mapInArrow(frozen_objects, "frozen long")
            return [piece.frozen for piece in found.collect()]

    # Tasks take the workers in turn, of which earlier tests may have left some that never staged.
    assert max(pieces(8, 8, are_short=False)) > 10_000
    monkeypatch.setattr(session, "LIMITED", "64b")
    assert len(pieces(1_000, 1, are_short=True)) == 1
    assert len(pieces(1_000, 1, are_short=False)) > 10
    assert len(pieces(1_000, 1, are_short=True)) == 1


IMPURE: dict[str, Any] = {
    "rand()": lambda rows: rows.where(F.rand() < 0.5),
    "rand() in SQL": lambda rows: rows.selectExpr("*", "Rand( ) AS luck"),
    "current_timestamp()": lambda rows: rows.withColumn("at", F.current_timestamp()),
    "session_user()": lambda rows: rows.withColumn("by", F.session_user()),
    "user() in SQL": lambda rows: rows.selectExpr("*", "User( ) AS by"),
    "monotonically_increasing_id()": lambda rows: rows.withColumn("id", F.monotonically_increasing_id()),
    "limit()": lambda rows: rows.where("amount > 0").limit(1),
    "sample()": lambda rows: rows.sample(0.5, 1),
    "rand() in SQL of a session": lambda rows: rows.sparkSession.sql("SELECT rand() AS luck FROM {rows}", rows=rows),
    "sample() in SQL": lambda rows: rows.sparkSession.sql("SELECT * FROM {r} TABLESAMPLE (5 ROWS)", r=rows),
    "rand() in SQL in quotes": lambda rows: rows.selectExpr("*", "`rand`() AS luck"),
    "reflect()": lambda rows: rows.withColumn("at", F.reflect(F.lit("java.util.UUID"), F.lit("randomUUID"))),
    "_metadata": lambda rows: rows.withColumn("file", F.col("_metadata.file_path")),
    "aes_encrypt() without a vector": lambda rows: rows.withColumn("x", F.aes_encrypt("name", F.lit("0123456789abcdef"))),
    "'now' as a time": lambda rows: rows.withColumn("at", F.lit("now").cast("timestamp")),
    "'today' as a time": lambda rows: rows.withColumn("at", F.to_date(F.lit("today"))),
    "'today' as a time in SQL": lambda rows: rows.where("at = 'today'"),
    "'tomorrow' as a time": lambda rows: rows.where(F.col("at").isin("2020-01-01", "Tomorrow")),
    "'yesterday' as a time": lambda rows: rows.where(F.col("name") < "yesterday "),
}
# Only where an order tells rows apart is the result the same each time.
CHOOSING: dict[str, Any] = {
    "dropDuplicates() over some columns": lambda rows: rows.dropDuplicates(["name"]),
    "limit() of sorted rows": lambda rows: rows.sort("amount").limit(1),
    "limit() in SQL": lambda rows: rows.sparkSession.sql("SELECT * FROM {rows} LIMIT 1", rows=rows),
    "first()": lambda rows: rows.groupBy("name").agg(F.first("amount")),
    "collect_list()": lambda rows: rows.groupBy("name").agg(F.concat_ws(",", F.collect_list("amount"))),
}


def harmless(rows: Any) -> Any:
    """Only look impure: names in texts and of columns, rows that are equal in all columns, and an order that is given."""
    groups = rows.groupBy("name")
    amounts = groups.agg(F.sort_array(F.collect_set("amount")), F.expr("size(collect_list(amount))"), F.mode("amount", True))
    rows = rows.join(amounts, "name").withColumn("now", F.lit("rand()")).withColumn("current_date", F.lit(1))
    rows = rows.withColumn("user", F.lit("me")).where("user = 'me'").where(F.col("name").isin("now", "today"))
    rows = rows.where("name <> 'now'").where(F.aes_encrypt("name", F.lit("key"), F.lit("ECB")) > F.lit("now").cast("binary"))
    return rows.where("now = 'rand()' AND `now` <> \"uuid()\"").dropDuplicates()


def test_a_transform_whose_result_varies_is_refused(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    with spark_session(tables.settings, "inbox") as spark, caplog.at_level(logging.WARNING):
        rows = spark.createDataFrame([("a", 1)], "name string, amount bigint").withColumn("at", F.to_date(F.lit("2020-01-01")))
        for name, transform in IMPURE.items():
            with pytest.raises(DeclarationInvalid, match=re.escape(f"The transform uses {name.partition(' in SQL')[0]}")):
                check_pure([rows], transform(rows), rows.columns)
        check_pure([rows], harmless(rows), rows.columns)
        assert caplog.text == ""
        for name, transform in CHOOSING.items():
            caplog.clear()
            check_pure([rows], transform(rows), rows.columns)
            assert f"The transform uses {name.removesuffix(' in SQL')}: that keeps some" in caplog.text


KEEP_OUT = """
CREATE FUNCTION public.keep_out() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER no BEFORE INSERT ON staging.per_name_1_1 FOR EACH ROW EXECUTE FUNCTION public.keep_out();
"""


@pytest.mark.promise("error:TIDEGATE_ERROR")
def test_rows_that_staging_does_not_take_fail_the_attempt(tables: Tables) -> None:
    tables.put_rows(SCHEMA, ROWS)
    pipeline = tables.declare_over(SCHEMA, PER_NAME)
    steps.plan(tables.settings, pipeline, run_id="test")
    refused = pytest.raises(TidegateError, match=r"COPY wrote 0 rows of 2")
    superuser = tables.settings.conninfo(user="postgres")
    with meanwhile(_Computation, "_stage", lambda: execute(superuser, KEEP_OUT)), refused as failure:
        steps.process(tables.settings, pipeline, 1, owner="test")
    assert failure.value.code == "TIDEGATE_ERROR"
    steps.process(tables.settings, pipeline, 1, owner="test", commit_ready=True)
    assert tables.counts(pipeline) == {"a": (1, 1), "b": (1, 2)}


@pytest.mark.promise("decision:0037")
def test_a_daemon_ends_after_its_last_worker_and_not_before() -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", f"import {PYTHON_DAEMON} as it; it.SECONDS_BETWEEN_LOOKS = 0.05; it.main()"],
        env={"PYTHONPATH": str(PYTHON_SETTINGS), "PYTHON_WORKER_FACTORY_SECRET": "secret", "SPARK_REUSE_WORKER": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert daemon.stdout
    try:
        (port,) = struct.unpack("!i", daemon.stdout.read(4))
        with closing(socket.create_connection(("127.0.0.1", port), 20)) as connection:
            (worker,) = struct.unpack("!i", connection.recv(4))
            assert not wait_until(lambda: daemon.poll() is not None, 1), "it left its worker alone"
            assert psutil.Process(worker).ppid() == daemon.pid
        assert wait_until(lambda: daemon.poll() is not None, 20)
    finally:
        daemon.kill()
        daemon.wait(20)
