"""Partials per key, how batches add up, what of it is hashed, and the keys, values and transforms that are refused."""

import gc
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.connect.proto.base_pb2_grpc import SparkConnectServiceStub
from pyspark.sql.connect.window import Window

from tests import steps
from tests.jobs.conftest import Tables, offenders
from tests.store import NO_TASK, Attempt
from tidegate.jobs import Count, Max, Min, Pipeline, State, Sum
from tidegate.jobs.compute.sessions import session
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.compute.shortcuts import Route, choose
from tidegate.jobs.compute.transform.transform_purity import check_pure
from tidegate.jobs.sources import InputFacts
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import BadKey, DeclarationInvalid

PRICES = State(
    key={"name": "text"},
    null_keys=True,
    aggregates={
        "lines": Count(),
        "known": Count("amount"),
        "amount_sum": Sum("amount"),
        "amount_min": Min("amount"),
        "amount_max": Max("amount"),
        "price_sum": Sum("price", "numeric(38,2)"),
        "price_min": Min("price", "numeric(10,2)"),
        "price_max": Max("price", "numeric(10,2)"),
    },
)
BY_NAME = {"name": "text"}
LINES = {"lines": Count()}
Row = tuple[str | None, int | None, Decimal | None]


SCHEMA = {"name": "string", "amount": "bigint", "price": "decimal(10,2)"}


def clean(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the state of PRICES, computed in plain Python; keys in the order of their bytes, NULL last."""
    groups: dict[str | None, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[0]].append(row)
    result = []
    for name in sorted(groups, key=lambda key: (key is None, (key or "").encode())):
        amounts = [amount for _, amount, _ in groups[name] if amount is not None]
        prices = [price for _, _, price in groups[name] if price is not None]
        result.append(
            {
                "name": name,
                "lines": len(groups[name]),
                "known": len(amounts),
                "amount_sum": sum(amounts),
                "amount_min": min(amounts, default=None),
                "amount_max": max(amounts, default=None),
                "price_sum": sum(prices, Decimal(0)),
                "price_min": min(prices, default=None),
                "price_max": max(prices, default=None),
            }
        )
    return result


def without_digests(pipeline: Pipeline, attempt: Attempt, facts: InputFacts) -> Route:
    return steps.shuffled(pipeline, attempt, replace(facts, is_verified=False))


# How a batch is declared and routed; whether its partials are followed, whether hashes depend on a column that no state uses.
HASHED: dict[str, tuple[dict[str, Any], Any, str | None]] = {
    "partials": ({}, choose, None),
    "no tracking": ({"tracking": "off"}, choose, None),
    "one state unanchored": (
        {"states": {"per_name": PRICES, "overall": State(aggregates=LINES, unanchored=True)}},
        choose,
        "used",
    ),
    "all unanchored": ({"states": {"per_name": replace(PRICES, unanchored=True)}}, choose, "all"),
    "rows": ({}, steps.shuffled, "used"),
    "transformed": ({"transform": lambda rows: rows}, steps.shuffled, None),
    "without digests": ({}, without_digests, "all"),
}


@pytest.mark.promise(
    "performance:of-untouched-files-in-one-task-partials",
    "performance:columns-that-no-state-uses-are-neither",
    "performance:with-transform-over-files-with-digests-source",
)
def test_rows_are_hashed_unless_the_file_vouches_for_them(tables: Tables) -> None:
    schema = {**SCHEMA, "note": "string"}
    tables.put_rows(schema, *[[("a", 1, None, note), ("b", 2, None, note)] for note in ("this", "that")] * len(HASHED))
    found: dict[str, str] = {}
    for number, (name, (declared, routing, _)) in enumerate(HASHED.items()):
        pipeline = tables.declare_over(schema, PRICES, **declared)
        if not number:
            steps.plan(tables.settings, pipeline, run_id="test")
        for txid in (2 * number + 1, 2 * number + 2):
            steps.process(tables.settings, pipeline, txid, owner="test", routing=routing)
        this, that = (steps.history(tables.settings, 2 * number + n).attempts[-1] for n in (1, 2))
        assert this["source_rows"] == this["transformed_rows"] == 2
        assert ("go unnoticed" in "".join(pipeline.lost_tracking)) == (
            name in ("no tracking", *(n for n in HASHED if "unanch" in n))
        )
        sums = (this["source_hash_sum"], that["source_hash_sum"])
        found[name] = "None" if sums == (None, None) else "used" if sums[0] == sums[1] else "all"
    assert found == {name: str(hashed) for name, (_, _, hashed) in HASHED.items()}


@pytest.mark.soak
@pytest.mark.promise("limit:FEW_ROWS", "performance:up-to-10-000-partials-are-copied")
def test_more_partials_than_expected_are_staged_on_executors(tables: Tables) -> None:
    overall = State(aggregates={"amount": Sum("amount")})
    declared = tables.declare_over(SCHEMA, PRICES)
    pipeline = tables.declare(declared.source, states={"overall": overall, "per_name": PRICES}, transform=lambda rows: rows)

    def routing(pipeline: Pipeline, attempt: Attempt, facts: InputFacts) -> Route:
        return replace(choose(pipeline, attempt, facts), most_in_process=3)

    batches: list[list[Row]] = [[(f"n{number % keys}", number, None) for number in range(10)] for keys in (3, 4, 2)]
    tables.put_rows(SCHEMA, *batches)
    for txid in steps.plan(tables.settings, pipeline, run_id="test"):
        steps.process(tables.settings, pipeline, txid, owner="test", commit_ready=True, routing=routing)

    assert tables.rows(pipeline) == clean([row for batch in batches for row in batch])
    assert tables.rows(pipeline, "overall") == [{"amount": 3 * 45}]
    with StateStore.connect(tables.settings) as store:
        histories = [store.batch_history(pipeline.name, txid) for txid in (1, 2, 3)]
    in_process = [{seal["state"] for seal in history.seals if seal["task_attempt"] == NO_TASK} for history in histories]
    assert in_process == [{"overall", "per_name"}, set(), {"overall", "per_name"}]
    assert [history.attempts[-1]["source_rows"] for history in histories] == [10] * 3


@pytest.mark.promise("performance:batch-asks-spark-four-times", "performance:small-files-are-grouped-by-one-task")
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

    rows: list[Row] = [("a", 1, None), ("b", 2, None)]
    pipeline = tables.declare_over(SCHEMA, PRICES)
    tables.put_rows(SCHEMA, rows)
    tables.run(pipeline, "first")  # in a new session, settings are written too
    tables.put_rows(SCHEMA, rows)
    monkeypatch.setattr(SparkConnectServiceStub, "__init__", counting)
    tables.run(pipeline, "second")

    assert len(steps.history(tables.settings, 2).seals) == 1  # one task has grouped it
    assert requests == {"Config": 2, "AnalyzePlan": 1, "ExecutePlan": 1}
    assert tables.rows(pipeline) == clean(rows + rows)


@pytest.mark.promise(
    "performance:python-workers-keep-their-imports-out-of", "performance:arrow-batches-of-short-rows-are-limited"
)
def test_python_workers_get_rows_in_limited_pieces_and_keep_their_imports(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are limited in bytes, or, where rows are short, only in their number; a next version may have longer ones.

    Spark makes each Python worker collect garbage after every task; frozen objects are left out.
    """
    pipeline = tables.declare_over(SCHEMA, PRICES)
    tables.put_rows(SCHEMA, [("a", 1, None)])
    tables.run(pipeline)
    with spark_session(tables.settings, "inbox") as spark:
        (answer,) = spark.range(1, numPartitions=1).mapInArrow(frozen_objects, "frozen long").collect()
    assert answer.frozen > 10_000

    monkeypatch.setattr(session, "LIMITED", "64b")

    def pieces(*, are_short: bool) -> int:
        with spark_session(tables.settings, "inbox", rows_are_short=are_short) as spark:
            return len(spark.range(1_000, numPartitions=1).mapInArrow(sizes, "rows long").collect())

    assert pieces(are_short=True) == 1
    assert pieces(are_short=False) > 10
    assert pieces(are_short=True) == 1


def sizes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})


def frozen_objects(_batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"frozen": [gc.get_freeze_count()]})


# ------------------------------------------------------------------------------------------------------ what is refused


def noise(length: int) -> str:
    dice = random.Random(length)
    return "".join(chr(dice.randrange(0x30, 0x5B)) for _ in range(length))


PAIR = State(key={"name": "text", "number": "integer", "other": "text"}, aggregates=LINES)
FAR = {  # what a transform makes, its type, and how it is shown
    "a date after 9999": ("date_from_unix_date(2932897)", "date", "10000-01-01"),
    "a date before 1": ("date_from_unix_date(-719163)", "date", "0000-12-31"),
    "a time after 9999": ("timestamp_micros(253402300800000000)", "timestamptz", "10000-01-01 00:00:00"),
    "a time before 1": ("timestamp_micros(-62135596800000001)", "timestamptz", "0000-12-31 23:59:59.999999"),
}


def per_name(**aggregates: Any) -> State:
    return State(key=BY_NAME, aggregates=aggregates)


# The columns that a transform makes of one row, the state that they are for, and the refusal.
VALUES: dict[str, tuple[list[str], State, str]] = {
    "too long together": (
        [f"'{noise(1201)}' name", "7 number", f"'{noise(1201)}' other"],
        PAIR,
        rf"BadKey.*name='{noise(1201)[:20]}.*number=7.*takes 2406 bytes",
    ),
    **{
        f"{name} as key": (
            ["'a' name", f"{made} moment"],
            State(key={"name": "text", "moment": kind}, aggregates=LINES),
            f"BadKey.*column moment is {shown}.*Years are kept from 1 to 9999",
        )
        for name, (made, kind, shown) in FAR.items()
    },
    **{
        f"{name} as value": (
            ["'a' name", f"{made} moment"],
            per_name(moment=Max("moment", kind)),
            rf"Overflow.*column moment of the key \(name='a'\) is {shown}.*Years are kept from 1 to 9999",
        )
        for name, (made, kind, shown) in FAR.items()
        if name != "a date before 1"
    },
    "bigint": (["'a' name", "explode(array(9223372036854775807, 1)) v"], per_name(x=Sum("v")), "Overflow"),
    "bigint below": (["'a' name", "explode(array(-9223372036854775807, -2)) v"], per_name(x=Sum("v")), "Overflow"),
    "integer": (["'a' name", "explode(array(2147483647L, 1L)) v"], per_name(x=Sum("v", "integer")), "Overflow"),
    "integer min": (["'a' name", "2147483648L v"], per_name(x=Min("v", "integer")), "Overflow"),
    "numeric(4,2)": (["'a' name", "explode(array(99.99, 0.01)) v"], per_name(x=Sum("v", "numeric(4,2)")), "Overflow"),
    "numeric(38,0)": (
        ["'a' name", f"explode(array({'9' * 38}BD, {'0' * 37}1BD)) v"],
        per_name(x=Sum("v", "numeric(38,0)")),
        "Overflow",
    ),
    "a cast": (["name", "CAST(name AS INT) v"], per_name(x=Sum("v")), "TransformFailed.*CAST_INVALID_INPUT"),
}


FEW = ["too long together", "a time before 1 as value", "bigint", "numeric(38,0)", "a cast"]  # others: test_staging_sink.py


@pytest.mark.promise("limit:MAX_KEY_BYTES", "limit:MAX_KEYS_BYTES", "error:BAD_KEY", "error:OVERFLOW", "error:TRANSFORM_FAILED")
@pytest.mark.parametrize("names", [FEW, pytest.param([*VALUES], marks=pytest.mark.soak)], ids=["few", "all"])
def test_a_key_or_value_that_cannot_be_kept_refuses_its_batch(tables: Tables, names: list[str]) -> None:
    pipeline = tables.declare_over(SCHEMA, PRICES)
    tables.put_rows(SCHEMA, [("none", 1, None)])
    tables.plan(pipeline, "test")
    found = {}
    for number, name in enumerate(names):
        columns, state, _ = VALUES[name]
        pipeline = tables.declare_over(
            SCHEMA, PRICES, lambda rows, columns=columns: rows.selectExpr(*columns), states={f"state_{number}": state}
        )
        # In this process, a refusal would only lead to executors, which raise the error.
        found[name] = tables.outcome(pipeline, routing=steps.ROUTINGS["on executors"])
    assert offenders(found, {name: VALUES[name][2] for name in names}) == {}
    assert steps.history(tables.settings, 1).seals == []

    # What is as long as it may be is kept: the rule does not depend on how well a key compresses.
    longest = [f"'{noise(1198)}' name", "7 number", f"'{noise(1198)}' other"]
    pipeline = tables.declare_over(SCHEMA, PAIR, lambda rows: rows.selectExpr(*longest), states={"longest": PAIR})
    assert tables.outcome(pipeline) == "processed"
    steps.commit(tables.settings, pipeline, 1, owner="test")
    assert len(tables.rows(pipeline, "longest")) == 1

    tables.put_rows(SCHEMA, [("good", 1, None), (None, 2, None)])
    strict = tables.declare_over(
        SCHEMA, PAIR, lambda rows: rows.selectExpr("name", "7 number", "name other"), states={"longest": PAIR}
    )
    assert tables.plan(strict, "refused") == [2]
    with pytest.raises(BadKey, match="key column name is NULL"):
        steps.process(tables.settings, strict, 2, owner="test", routing=steps.ROUTINGS["safe"])
    history = steps.history(tables.settings, 2)
    assert (history.status.phase, history.seals) == ("halted", [])
    assert history.attempts[-1]["error"].startswith("BAD_KEY: ")
    assert len(tables.rows(pipeline, "longest")) == 1


# The columns that a transform makes beside the name, the aggregates that they are for, and the refusal of the declaration.
DECLARED: dict[str, tuple[str, dict[str, Any], str]] = {
    "digits": ("1.005BD amount", {"x": Sum("amount", "numeric(38,2)")}, r"declared numeric\(38,2\), .* returns decimal\(4,3\)"),
    "precision": ("CAST(1 AS DECIMAL(20,2)) amount", {"x": Min("amount", "numeric(10,2)")}, r"returns decimal\(20,2\)"),
    "a product": (
        "CAST(1 AS DECIMAL(38,18)) * CAST(1 AS DECIMAL(38,18)) amount",
        {"x": Min("amount", "numeric(38,18)")},
        r"returns decimal\(38,6\).*cast what it is computed of",
    ),
    "a double": ("1.5D amount", {"x": Sum("amount")}, "declared bigint, but the transform returns double"),
    "a zone": ("timestamp'2013-01-01' amount", {"x": Min("amount", "timestamp")}, "returns timestamp"),
    "bytes": ("X'00' amount", {"x": Min("amount", "uuid")}, "declared uuid, but the transform returns binary"),
    "a decimal": ("CAST(1 AS DECIMAL(10,0)) amount", {"x": Sum("amount")}, r"returns decimal\(10,0\)"),
    "a text": ("'1' amount", {"x": Sum("amount")}, "returns string"),
    "a number": ("1 amount", {"x": Min("amount", "text")}, "declared text, but the transform returns int"),
    "a time": ("timestamp'2013-01-01' amount", {"x": Min("amount", "date")}, "returns timestamp"),
    "no zone": ("timestamp_ntz'2013-01-01' amount", {"x": Min("amount", "timestamptz")}, "returns timestamp_ntz"),
    "missing": ("1 something", {"x": Sum("amount")}, "needs column amount, but the transform returns name, something"),
    "not counted": ("1 something", {"x": Count("amount")}, "needs column amount"),
    "capitals": ("1 Amount", {"x": Sum("amount")}, "needs column amount"),
    "twice": ("1 amount, 2 amount", {"x": Sum("amount")}, "amount"),
    "unknown": ("no_such_column amount", {"x": Sum("amount")}, "no_such_column"),
}


def test_a_transform_that_goes_through_a_view_is_refused(tables: Tables) -> None:
    """Batches share a session: a view would show one batch the rows of another."""

    def through_a_view(rows: Any) -> Any:
        rows.createOrReplaceTempView("lines")
        return rows.sparkSession.sql("SELECT * FROM lines")

    tables.put_rows(SCHEMA, [("a", 1, None)])
    pipeline = tables.declare_over(SCHEMA, PRICES, through_a_view)
    tables.plan(pipeline, "test")
    assert "must not go through views or spark.sql" in tables.refused(pipeline, DeclarationInvalid)


@pytest.mark.soak
@pytest.mark.promise("error:DECLARATION_INVALID")
def test_a_column_that_is_missing_or_would_lose_something_is_refused(tables: Tables) -> None:
    tables.put_rows(SCHEMA, [("a", 1, None)])
    tables.plan(tables.declare_over(SCHEMA, PRICES), "test")
    found = {}
    for number, (name, (columns, aggregates, _)) in enumerate(DECLARED.items()):
        transform = lambda rows, columns=columns: rows.selectExpr("name", *columns.split(", "))  # noqa: E731
        found[name] = tables.outcome(
            tables.declare_over(SCHEMA, PRICES, transform, states={f"state_{number}": State(BY_NAME, aggregates)})
        )
    found["a key"] = tables.outcome(tables.declare_over(SCHEMA, PRICES, states={"misspelt": State({"nam": "text"}, LINES)}))
    found["an impure transform"] = tables.outcome(tables.declare_over(SCHEMA, PRICES, lambda rows: rows.where(F.rand() < 0.5)))
    expected = {name: f"DeclarationInvalid.*{message}" for name, (_, _, message) in DECLARED.items()}
    expected["a key"] = "needs column nam, but the transform returns name"
    expected["an impure transform"] = "DeclarationInvalid.*The transform uses rand"
    assert offenders(found, expected) == {}


IMPURE: dict[str, Any] = {
    "rand()": lambda rows: rows.where(F.rand() < 0.5),
    "rand() in SQL": lambda rows: rows.selectExpr("*", "Rand( ) AS luck"),
    "current_timestamp()": lambda rows: rows.withColumn("at", F.current_timestamp()),
    "current_date() in SQL": lambda rows: rows.where("date'2024-01-01' < current_date"),
    "monotonically_increasing_id()": lambda rows: rows.withColumn("id", F.monotonically_increasing_id()),
    "uuid() in SQL": lambda rows: rows.groupBy("name").agg(F.max(F.expr("uuid()")).alias("name2")),
    "limit()": lambda rows: rows.where("amount > 0").limit(1),
    "sample()": lambda rows: rows.sample(0.5, 1),
    "sampleBy()": lambda rows: rows.sampleBy("name", {"a": 0.5}, seed=1),
    "zipWithIndex()": lambda rows: rows.zipWithIndex(),
    "uuid()": lambda rows: rows.withColumn("id", F.call_function("uuid")),
    "rand() in SQL of a session": lambda rows: rows.sparkSession.sql("SELECT rand() AS luck FROM {rows}", rows=rows),
    "sample() in SQL": lambda rows: rows.sparkSession.sql("SELECT * FROM {r} TABLESAMPLE (5 ROWS)", r=rows),
}
# Only where an order tells rows apart is the result the same each time.
CHOOSING: dict[str, Any] = {
    "dropDuplicates() over some columns": lambda rows: rows.dropDuplicates(["name"]),
    "limit() of sorted rows": lambda rows: rows.sort("amount").limit(1),
    "limit() in SQL": lambda rows: rows.sparkSession.sql("SELECT * FROM {rows} LIMIT 1", rows=rows),
    "first()": lambda rows: rows.groupBy("name").agg(F.first("amount")),
    "any_value() in SQL": lambda rows: rows.groupBy("name").agg(F.expr("any_value(amount)")),
    "collect_list()": lambda rows: rows.groupBy("name").agg(F.concat_ws(",", F.collect_list("amount"))),
    "row_number()": lambda rows: rows.withColumn("place", F.row_number().over(Window.partitionBy("name").orderBy("amount"))),
    "mode()": lambda rows: rows.groupBy("name").agg(F.mode("amount")),
}


def harmless(rows: Any) -> Any:
    """Only look impure: names in texts and of columns, rows that are equal in all columns, and an order that is given."""
    groups = rows.groupBy("name")
    amounts = groups.agg(F.sort_array(F.collect_set("amount")), F.expr("size(collect_list(amount))"), F.mode("amount", True))
    rows = rows.join(amounts, "name").withColumn("now", F.lit("rand()")).withColumn("current_date", F.lit(1))
    return rows.where("now = 'rand()' AND `now` <> \"uuid()\"").dropDuplicates()


def test_a_transform_whose_result_varies_is_refused(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    accepted = []
    with spark_session(tables.settings, "inbox") as spark:
        rows = spark.createDataFrame([("a", 1)], "name string, amount bigint")
        for name, transform in IMPURE.items():
            try:
                check_pure([rows], transform(rows), rows.columns)
            except DeclarationInvalid as refused:
                if f"The transform uses {name.partition(' in SQL')[0]}" in str(refused):
                    continue
            accepted.append(name)
        assert accepted == []
        with caplog.at_level(logging.WARNING):
            check_pure([rows], harmless(rows), rows.columns)
            assert caplog.text == ""
            for name, transform in CHOOSING.items():
                caplog.clear()
                check_pure([rows], transform(rows), rows.columns)
                if f"The transform uses {name.removesuffix(' in SQL')}: that keeps some" not in caplog.text:
                    accepted.append(name)
        assert accepted == []
