"""The table of `tidegate.jobs.engine.poison` by row, with real failures: bad code, killed workers, lost folders.

All pipelines here skip poison after one try: a failure that is wrongly taken for content would leave rows out at once.
"""

import json
import os
import re
import signal
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from tests import steps
from tests.jobs.conftest import Tables, offenders
from tests.sources.conftest import Inbox, inbox
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.spark.spark_errors import meaning_of
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import PermanentError, SparkFailed, TidegateError

__all__ = ["inbox"]  # a fixture

CSV = Files("inbox", format="csv", schema={"name": "string", "amount": "int"})
DEADLINE_SECONDS = 240


def skipping(inbox: Inbox, transform: Any = None, **pipeline: Any) -> Pipeline:
    return inbox.declare(CSV, **{"transform": transform, "on_poison": "skip", "tries": 1, "retry_delay_seconds": 0, **pipeline})


def phase_of(inbox: Inbox, txid: int = 1) -> str:
    return steps.history(inbox.settings, txid).status.phase


def counted(inbox: Inbox, pipeline: Pipeline) -> dict[str, int]:
    return {row["name"]: row["amount"] for row in inbox.rows(pipeline)}


def attempts_of(inbox: Inbox, txid: int) -> list[dict[str, Any]]:
    return list(steps.history(inbox.settings, txid).attempts)


# code: in a worker of Spark by classes, in SQL by SQLSTATEs


def in_a_worker(code: str) -> Callable[[DataFrame], DataFrame]:
    """Return a transform that runs a statement on each batch of rows, in one of Spark's Python workers."""

    def transform(rows: DataFrame) -> DataFrame:
        def run(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                exec(code, {"batch": batch})
                yield batch

        return rows.mapInPandas(run, rows.schema)

    return transform


def in_sql(expression: str) -> Callable[[DataFrame], DataFrame]:
    return lambda rows: rows.selectExpr("name", f"{expression} AS amount")


def setting(change: Callable[[Any], Any]) -> Callable[[DataFrame], DataFrame]:

    def transform(rows: DataFrame) -> DataFrame:
        change(rows.sparkSession)
        return rows

    return transform


def through_a_view(rows: DataFrame) -> DataFrame:
    """Go through what would show one batch the rows of another, as they share a session."""
    rows.createOrReplaceTempView("lines")
    return rows.sparkSession.sql("SELECT * FROM lines")


def deep(rows: DataFrame) -> DataFrame:
    """Add a column so often that the plan is deeper than Python's stack."""
    for _ in range(1500):
        rows = rows.withColumn("amount", rows["amount"])
    return rows


def raising(error: BaseException) -> Callable[[DataFrame], DataFrame]:
    def transform(_rows: DataFrame) -> DataFrame:
        raise error

    return transform


CONTENT, RETRIED, CODE = "^given up", "^SparkFailed", "^DeclarationInvalid"
# Errors about values are content; others may pass, and an error of the code would hit every batch.
MEANINGS: dict[str, tuple[Callable[[DataFrame], Any], str]] = {
    "a value with half a character": (in_a_worker(r"raise ValueError('unknown shop \ud83d')"), CONTENT),
    "a crash": (in_a_worker("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), RETRIED),
    "a value that a missing file made": (in_a_worker("try:\n  open('/nonexistent')\nexcept OSError:\n  int('two')"), RETRIED),
    "a cast": (in_sql("cast(name AS int)"), CONTENT),
    "a misspelt column": (in_sql("amuont"), CODE),
    "an error that Spark does not name": (in_sql("int(java_method('java.lang.Integer', 'parseInt', name))"), RETRIED),
    "ValueError": (raising(ValueError("no")), f"{CODE}.*The transform failed: ValueError: no"),
    "a setting that values rest on": (
        setting(lambda spark: spark.conf.set("spark.sql.ansi.enabled", "false")),
        f"{CODE}.*The transform changes spark.sql.ansi.enabled, though other batches share",
    ),
    "such a setting in SQL": (
        setting(lambda spark: spark.sql("SET spark.sql.session.timeZone = 'Asia/Tokyo'")),
        f"{CODE}.*The transform changes spark.sql.session.timeZone",
    ),
    "the end of the session": (setting(lambda spark: spark.stop()), f"{CODE}.*The transform stops its session"),
    "a view": (through_a_view, f"{CODE}.*must not go through views or spark.sql"),
    "a deep plan": (deep, f"{CODE}.*nested too deeply. Where it calls withColumn"),
    "os._exit": (lambda _: os._exit(3), f"{CODE}.*The transform failed: SystemExit: 3"),
    "a cancelled wait": (raising(CancelledError()), f"{CODE}.*The transform failed: CancelledError"),
    "no return": (lambda rows: rows.where("amount > 0") and None, f"{CODE}.*The transform returns nothing: end it with return"),
}
MORE_MEANINGS: dict[str, tuple[Callable[[DataFrame], Any], str]] = {
    "a value": (in_a_worker("int('two')"), CONTENT),
    "KeyError": (raising(KeyError("x")), f"{CODE}.*The transform failed: KeyError: 'x'"),
    "raise_error": (in_sql("int(raise_error('no'))"), CONTENT),
    "a missing file": (in_a_worker("open('/nonexistent')"), RETRIED),
    "a key": (in_a_worker("{}['two']"), CONTENT),
    "NULL": (in_a_worker("None.strip()"), CONTENT),
    "a refusal": (
        in_a_worker("from tidegate.state_store.base.errors import MalformedRecord; raise MalformedRecord('no')"),
        CONTENT,
    ),
    "a refused connection": (in_a_worker("raise ConnectionRefusedError('gone')"), RETRIED),
    "no memory": (in_a_worker("raise MemoryError"), RETRIED),
    "a missing package": (in_a_worker("import nonexistent_package"), RETRIED),
    "an interrupt": (in_a_worker("raise KeyboardInterrupt"), RETRIED),
    "a class of a library": (in_a_worker("import psycopg2; raise psycopg2.OperationalError('gone')"), RETRIED),
    "a misspelt name": (in_a_worker("nonexistent_name"), RETRIED),
    "an exit": (in_a_worker("import os; os._exit(1)"), RETRIED),
    "a division": (in_sql("amount div (amount - amount)"), CONTENT),
    "an overflow": (in_sql("cast(amount + 2147483647 AS int)"), CONTENT),
    "a missing function": (in_sql("nonexistent(amount)"), CODE),
    "GeneratorExit": (raising(GeneratorExit()), f"{CODE}.*The transform failed: GeneratorExit"),
    "SystemExit": (raising(SystemExit(0)), f"{CODE}.*The transform failed: SystemExit: 0"),
    "sys.exit": (in_a_worker("import sys; sys.exit(0)"), RETRIED),
    "a group": (in_a_worker("raise ExceptionGroup('many', [ValueError('a')])"), f"{RETRIED}.*: ExceptionGroup: many .1 sub"),
}


@pytest.mark.promise("error:SPARK_FAILED")
@pytest.mark.parametrize("meanings", [MEANINGS, pytest.param(MORE_MEANINGS, marks=pytest.mark.soak)], ids=["few", "more"])
def test_only_errors_about_values_are_content(tables: Tables, meanings: dict[str, tuple[Any, str]]) -> None:
    for number in range(len(meanings)):
        tables.write(f"{number:02d}.csv", "name,amount\na,1\n")
    tables.plan(skipping(tables, window=len(meanings)), "run")
    found = {
        name: tables.outcome(skipping(tables, transform, window=len(meanings)), txid)
        for txid, (name, (transform, _)) in enumerate(meanings.items(), start=1)
    }
    assert offenders(found, {name: meaning for name, (_, meaning) in meanings.items()}) == {}
    with StateStore.connect(tables.settings) as store:
        given_up = {name for txid, name in enumerate(meanings, start=1) if store.turn("inbox", txid).given_up}
        poison = {name for txid, name in enumerate(meanings, start=1) if store.poison_tries("inbox", txid)}
    assert given_up == poison == {name for name, (_, meaning) in meanings.items() if meaning == CONTENT}
    fixed = skipping(tables, version=2)
    tables.run(fixed, "second")
    assert counted(tables, fixed) == {"a": len(meanings) - len(given_up)}


def test_a_batch_that_needs_more_memory_than_spark_has_fails_alone_and_is_tried_once_more(tables: Tables) -> None:
    for number in range(2):
        tables.write(f"{number:02d}.csv", "name,amount\na,1\n")
    tables.plan(skipping(tables), "run")
    too_much = skipping(tables, in_sql("length(repeat(name, 2147483647))"))
    with spark_session(tables.settings, "another") as others:
        told = "Spark ran out of memory over this batch (OutOfMemoryError: "
        assert tables.outcome(too_much, 1).startswith(f"SparkFailed: {told}")
        assert tables.outcome(too_much, 1).startswith(f"PermanentError: {told}")
        assert others.range(3).count() == 3
    tables.run(skipping(tables, version=2), "second")
    assert counted(tables, skipping(tables, version=2)) == {"a": 2}


@pytest.mark.promise("error:SPARK_FAILED")
@pytest.mark.parametrize(
    "condition",
    [
        *("AGGREGATE_OUT_OF_MEMORY", "POINTER_ARRAY_OUT_OF_MEMORY", "UNABLE_TO_ACQUIRE_MEMORY"),
        *("_LEGACY_ERROR_TEMP_2105", "_LEGACY_ERROR_TEMP_2107", "_LEGACY_ERROR_TEMP_2250"),  # the last one is a broadcast's
    ],
)
def test_what_spark_says_when_it_is_out_of_memory_is_known(condition: str) -> None:
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-common-utils_*.jar")
    words = " ".join(json.loads(ZipFile(jar).read("error/error-conditions.json"))[condition]["message"])
    for attempt, kind in ((1, SparkFailed), (2, PermanentError)):
        error = meaning_of(PySparkException(re.sub("<[^>]*>", "1", words)), attempt)
        assert type(error) is kind
        assert "Spark ran out of memory over this batch (" in str(error)


# Spark's processes


class Held:
    """A transform whose workers wait until they may go on; the first one leaves its process id in a file."""

    def __init__(self, folder: Path) -> None:
        self._worker, self._go_on = folder / "worker", folder / "go_on"

    def transform(self, rows: DataFrame) -> DataFrame:
        first, go_on = self._worker, self._go_on

        def hold(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                part = first.with_name(f"{first.name}.{os.getpid()}")
                part.write_text(str(os.getpid()))
                part.rename(first)
                while not go_on.exists():
                    time.sleep(0.05)
                yield batch

        return rows.mapInPandas(hold, rows.schema)

    @contextmanager
    def when_a_worker_holds_rows(self, act: Callable[[int], None]) -> Iterator[None]:
        """Act, in another thread, as soon as a worker holds rows; then let all workers go on."""
        failed: list[Exception] = []

        def watch() -> None:
            try:
                wait_for(self._worker.exists, "a worker")
                act(int(self._worker.read_text()))
            except Exception as error:  # noqa: BLE001 - the test fails with it in the end
                failed.append(error)
            self._go_on.touch()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(DEADLINE_SECONDS)
        assert not failed


def wait_for(condition: Callable[[], object], name: str) -> None:
    ends_at = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < ends_at, f"{name} did not come"
        time.sleep(0.05)


def failed_while_held(inbox: Inbox, act: Callable[[int], None]) -> TidegateError:
    """Process batch 1; act when a worker holds its rows; return the error, by which no row is left out."""
    inbox.write("1.csv", "name,amount\na,1\n")
    held = Held(inbox.settings.home)
    pipeline = skipping(inbox, held.transform)
    inbox.plan(pipeline, "run")
    with held.when_a_worker_holds_rows(act), pytest.raises(TidegateError) as failure:
        steps.process(inbox.settings, pipeline, 1, owner="test")
    assert phase_of(inbox) == "failed"
    assert [attempt["is_poison"] for attempt in attempts_of(inbox, 1)] == [False]
    return failure.value


@pytest.mark.promise("fault:spark-executor-or-worker-process-dies:processing")
def test_a_worker_that_is_killed_leaves_no_rows_out(inbox: Inbox) -> None:
    assert type(failed_while_held(inbox, lambda worker: os.kill(worker, signal.SIGKILL))) is SparkFailed
    pipeline = skipping(inbox, version=2)
    inbox.run(pipeline, "second")
    assert counted(inbox, pipeline) == {"a": 1}
