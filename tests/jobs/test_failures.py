"""The table of `tidegate.jobs.engine.poison` by row, with real failures of code and memory.

All pipelines here skip poison after one try: a failure that is wrongly taken for content would leave rows out at once.
"""

import json
import os
import re
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from tests.jobs.conftest import Tables, offenders
from tests.sources.conftest import Inbox
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.spark.spark_errors import meaning_of
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import PermanentError, SparkFailed

CSV = Files("inbox", format="csv", schema={"name": "string", "amount": "int"})


def skipping(inbox: Inbox, transform: Any = None, **pipeline: Any) -> Pipeline:
    return inbox.declare(CSV, **{"transform": transform, "on_poison": "skip", "tries": 1, "retry_delay_seconds": 0, **pipeline})


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


def raising(error: BaseException) -> Callable[[DataFrame], DataFrame]:
    def transform(_rows: DataFrame) -> DataFrame:
        raise error

    return transform


IMITATED = 'TIDEGATE_ERROR {"error": "StoreUnavailable", "message": "try again"}'
CONTENT, RETRIED, CODE = "^given up", "^SparkFailed", "^DeclarationInvalid"
CHANGES, ANSI, ZONE = f"{CODE}.*The transform changes spark.sql", "spark.sql.ansi.enabled", "spark.sql.session.timeZone"
# In a worker of Spark by classes, in SQL by SQLSTATEs: errors about values are content; others may pass, or are the code's.
MEANINGS: dict[str, tuple[Callable[[DataFrame], Any], str]] = {
    "a value with half a character": (in_a_worker(r"raise ValueError('unknown shop \ud83d')"), CONTENT),
    "a value that says what a task would": (in_a_worker(f"raise ValueError({IMITATED!r})"), CONTENT),
    "a crash": (in_a_worker("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), RETRIED),
    "a value that a missing file made": (in_a_worker("try:\n  open('/nonexistent')\nexcept OSError:\n  int('two')"), RETRIED),
    "a cast": (in_sql("cast(name AS int)"), CONTENT),
    "a misspelt column": (in_sql("amuont"), CODE),
    "an error that Spark does not name": (in_sql("xpath_int(name, '//x')"), RETRIED),
    "ValueError": (raising(ValueError("no")), f"{CODE}.*The transform failed: ValueError: no"),
    "a setting": (lambda rows: rows.sparkSession.conf.set(ANSI, "false") or rows, f"{CHANGES}.ansi.enabled, though"),
    "in SQL": (lambda rows: rows.sparkSession.sql(f"SET {ZONE} = 'Asia/Tokyo'") and rows, f"{CHANGES}.session.timeZone"),
    "the end of the session": (lambda rows: rows.sparkSession.stop() or rows, f"{CODE}.*The transform stops its session"),
    # What would show one batch the rows of another, as they share a session.
    "a view": (
        lambda rows: rows.createOrReplaceTempView("lines") or rows.sparkSession.sql("SELECT * FROM lines"),
        f"{CODE}.*must not go through views or spark.sql",
    ),
    # Deeper than Python's stack.
    "a deep plan": (
        lambda rows: reduce(lambda of, _: of.withColumn("amount", of["amount"]), range(1500), rows),
        f"{CODE}.*nested too deeply. Where it calls withColumn",
    ),
    "os._exit": (lambda _: os._exit(3), f"{CODE}.*The transform failed: SystemExit: 3"),
    "a cancelled wait": (raising(CancelledError()), f"{CODE}.*The transform failed: CancelledError"),
    "no return": (lambda rows: rows.where("amount > 0") and None, f"{CODE}.*The transform returns nothing: end it with return"),
}


@pytest.mark.promise("error:SPARK_FAILED", "fault:spark-executor-or-worker-process-dies:processing")
def test_only_errors_about_values_are_content(tables: Tables, store: StateStore, request: pytest.FixtureRequest) -> None:
    for number in range(len(MEANINGS)):
        tables.write(f"{number:02d}.csv", "name,amount\na,1\n")
    tables.plan(skipping(tables, window=len(MEANINGS)), "run")
    found = {
        name: tables.outcome(skipping(tables, transform, window=len(MEANINGS)), txid)
        for txid, (name, (transform, _)) in enumerate(MEANINGS.items(), start=1)
    }
    assert offenders(found, {name: meaning for name, (_, meaning) in MEANINGS.items()}) == {}
    given_up = {name for txid, name in enumerate(MEANINGS, start=1) if store.turn("inbox", txid).given_up}
    poison = {name for txid, name in enumerate(MEANINGS, start=1) if store.poison_tries("inbox", txid)}
    assert given_up == poison == {name for name, (_, meaning) in MEANINGS.items() if meaning == CONTENT}
    request.getfixturevalue("counted_here")
    fixed = skipping(tables, version=2)
    tables.run(fixed, "second")
    assert tables.counts(fixed) == {"a": (len(MEANINGS) - len(given_up),) * 2}


def test_a_batch_that_needs_more_memory_than_spark_has_fails_alone_and_is_tried_once_more(tables: Tables) -> None:
    tables.write("1.csv", "name,amount\na,1\n")
    tables.plan(skipping(tables), "run")
    too_much = skipping(tables, in_sql("length(repeat(name, 2147483647))"))
    with spark_session(tables.settings, "another") as others:
        says = "Spark ran out of memory over this batch (OutOfMemoryError: "
        assert tables.outcome(too_much, 1).startswith(f"SparkFailed: {says}")
        assert tables.outcome(too_much, 1).startswith(f"PermanentError: {says}")
        assert others.range(3).count() == 3
    tables.run(fixed := skipping(tables, version=2), "second")
    assert tables.counts(fixed) == {"a": (1, 1)}


OUT_OF_MEMORY = [
    *("AGGREGATE_OUT_OF_MEMORY", "POINTER_ARRAY_OUT_OF_MEMORY", "UNABLE_TO_ACQUIRE_MEMORY"),
    *("_LEGACY_ERROR_TEMP_2105", "_LEGACY_ERROR_TEMP_2107", "_LEGACY_ERROR_TEMP_2250"),  # the last one is a broadcast's
]


@pytest.mark.promise("error:SPARK_FAILED")
def test_what_spark_says_when_it_is_out_of_memory_is_known() -> None:
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-common-utils_*.jar")
    conditions = json.loads(ZipFile(jar).read("error/error-conditions.json"))
    for condition in OUT_OF_MEMORY:
        words = re.sub("<[^>]*>", "1", " ".join(conditions[condition]["message"]))
        for attempt, kind in ((1, SparkFailed), (2, PermanentError)):
            error = meaning_of(PySparkException(words), attempt)
            assert type(error) is kind, condition
            assert "Spark ran out of memory over this batch (" in str(error)
