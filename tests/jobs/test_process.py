"""Partials per key, how batches add up, and the keys and values that are refused."""

import gc
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.connect.proto.base_pb2_grpc import SparkConnectServiceStub

from tests import steps
from tests.jobs.conftest import Tables
from tidegate.jobs import Count, Files, Max, Min, Pipeline, State, Sum
from tidegate.jobs.compute.sessions import session
from tidegate.jobs.compute.sessions.executor_artifacts import modules_of
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.compute.shortcuts import Route, choose
from tidegate.jobs.compute.stage import stage_partials
from tidegate.jobs.sources import InputFacts
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import (
    BadKey,
    DeclarationInvalid,
    MalformedRecord,
    Overflow,
    RowsLost,
    TidegateError,
    TransformFailed,
)
from tidegate.state_store.seal.attempts import Attempt
from tidegate.state_store.seal.staging_tables import NO_TASK

PRICE = pa.decimal128(10, 2)
PRICES = State(
    key={"name": "text"},
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

Row = tuple[str | None, int | None, Decimal | None]


@pytest.fixture(params=["chosen", "safe"])
def either_way(request: pytest.FixtureRequest, tables: Tables) -> None:
    """Batches take all shortcuts that their inputs allow, or none."""
    tables.routing = steps.ROUTINGS[request.param]


def table(rows: list[Row]) -> pa.Table:
    """Return rows of name, amount and price as a table."""
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], []]
    kinds = {"name": pa.string(), "amount": pa.int64(), "price": PRICE}
    return pa.table({name: pa.array(column, kinds[name]) for name, column in zip(kinds, columns, strict=True)})


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


def refusal(tables: Tables, pipeline: Pipeline, error: type[TidegateError]) -> str:
    """Plan the next batch, check that it is refused as a whole, and return the message."""
    (txid,) = tables.plan(pipeline, "refused")
    return tables.refused(pipeline, error, txid)


# ------------------------------------------------------------------------------------------------------- aggregates


def test_aggregates_are_those_of_plain_python(tables: Tables) -> None:
    """Count, count of a column, sum, min and max, with NULLs, negative numbers and decimals, over several batches."""
    first: list[Row] = [("a", 1, Decimal("0.10")), ("a", None, Decimal("0.20")), ("b", -5, None), ("only NULL", None, None)]
    second: list[Row] = [("a", 7, Decimal("-99999999.99")), ("b", None, None), ("new", 2**62, Decimal("99999999.99"))]
    third: list[Row] = [("only NULL", None, None), ("b", 5, Decimal("1.05")), ("new", -(2**62), None)]

    assert tables.aggregate(PRICES, table(first), table(second), table(third)) == clean(first + second + third)


def test_a_key_with_only_nulls_has_sum_zero_and_min_null(tables: Tables) -> None:
    """Without values each aggregate gives its identity, which does not disturb later batches."""
    nothing: list[Row] = [("a", None, None)]
    pipeline = tables.declare_over(table([]).schema, PRICES)
    tables.put(table(nothing))
    tables.run(pipeline, "first")
    (row,) = tables.rows(pipeline)
    assert (row["lines"], row["known"], row["amount_sum"], row["amount_min"], row["amount_max"]) == (1, 0, 0, None, None)
    assert (row["price_sum"], row["price_min"], row["price_max"]) == (0, None, None)

    tables.put(table([("a", 3, Decimal("3.50"))]), table(nothing))
    tables.run(pipeline, "second")
    assert tables.rows(pipeline) == clean([*nothing, ("a", 3, Decimal("3.50")), *nothing])


@pytest.mark.usefixtures("either_way")
def test_an_empty_batch_commits_and_touches_nothing(tables: Tables) -> None:
    """A batch without rows, and one whose rows the transform drops, take their turn like any other."""
    pipeline = tables.declare_over(table([]).schema, PRICES, lambda rows: rows.where("amount > 0"))
    tables.put(table([("a", 1, None)]), table([]), table([("a", -1, None)]), table([("a", 2, None)]))

    assert tables.run(pipeline) == [1, 2, 3, 4]
    assert tables.rows(pipeline) == clean([("a", 1, None), ("a", 2, None)])
    with StateStore.connect(tables.settings) as store:
        statuses = store.batch_statuses("inbox")
    assert [(s.phase, s.source_rows, s.key_count) for s in statuses] == [
        ("committed", 1, 1),
        ("committed", 0, 0),
        ("committed", 1, 0),
        ("committed", 1, 1),
    ]


@pytest.mark.promise("performance:small-files-are-grouped-by-one-task")
@pytest.mark.parametrize("transform", [None, lambda rows: rows.where("amount >= 0")], ids=["as it is", "transformed"])
@pytest.mark.parametrize("one_task", [True, False])
def test_one_task_groups_a_batch_or_a_shuffle_does(tables: Tables, one_task: bool, transform: Any) -> None:
    """With one task, a state has one staged partition, even if the batch is several files."""
    tables.routing = lambda _pipeline, _attempt, _facts: Route(one_task=one_task)
    rows: list[Row] = [(f"name {number % 40}", number, None) for number in range(150)]
    declared = tables.declare_over(table([]).schema, PRICES, transform)
    pipeline = replace(declared, source=replace(declared.source, max_files=2))
    tables.put(table(rows[:50]), table(rows[50:100]), table(rows[100:]))
    with spark_session(tables.settings, "inbox", modules=modules_of(pipeline)) as session:
        # Adaptive execution would make one partition of so few rows in both cases.
        session.conf.set("spark.sql.adaptive.enabled", "false")
        try:
            assert tables.run(pipeline) == [1, 2]
        finally:
            session.conf.unset("spark.sql.adaptive.enabled")

    assert tables.rows(pipeline) == clean(rows)
    with StateStore.connect(tables.settings) as store:
        staged = [len(store.batch_history("inbox", txid).seals) for txid in (1, 2)]
    assert staged == [1, 1] if one_task else min(staged) > 1


@pytest.mark.promise("performance:of-untouched-files-in-one-task-partials")
@pytest.mark.parametrize("tracking", ["full", "off"])
@pytest.mark.parametrize("is_followed", [True, False], ids=["all anchored", "one unanchored"])
def test_rows_are_hashed_unless_the_file_vouches_for_them(tables: Tables, tracking: Any, is_followed: bool) -> None:
    """One task passes on all partials of a file with a digest: then those are followed. A replay may take either way."""
    overall = State(aggregates={"amount": Sum("amount")}, unanchored=not is_followed)
    declared = tables.declare_over(table([]).schema, PRICES)
    pipeline = tables.declare(declared.source, states={**declared.states, "overall": overall}, tracking=tracking)
    batches = [[(f"n{number % 3}", number, None) for number in range(50)] + [("n0", None, None)], []]
    tables.put(*map(table, batches), *map(table, batches))
    steps.plan(tables.settings, pipeline, run_id="test")
    for txid in range(1, 5):
        routing = steps.ROUTINGS["chosen" if txid < 3 else "shuffled"]
        steps.process(tables.settings, pipeline, txid, owner="test", routing=routing)

    with StateStore.connect(tables.settings) as store:
        newest = [store.batch_history(pipeline.name, txid).attempts[-1] for txid in range(1, 5)]
    assert [attempt["source_rows"] for attempt in newest] == [51, 0, 51, 0]
    assert [attempt["transformed_rows"] for attempt in newest] == [51, 0, 51, 0]
    is_hashed = [attempt["source_hash_sum"] is not None for attempt in newest]
    assert is_hashed == ([False] * 4 if tracking == "off" else [not is_followed, not is_followed, True, True])


@pytest.mark.promise(
    "performance:columns-that-no-state-uses-are-neither", "performance:with-transform-over-files-with-digests-source"
)
@pytest.mark.parametrize("how", ["as it is", "transformed", "without digests"])
def test_unused_columns_are_not_hashed_if_a_digest_vouches_for_them(tables: Tables, how: str) -> None:
    """Spark then does not even read them. What a transform uses, Spark finds out; rows without a digest have only the hash."""

    def routing(pipeline: Pipeline, attempt: Attempt, facts: InputFacts) -> Route:
        return steps.shuffled(pipeline, attempt, replace(facts, is_verified=how != "without digests"))

    batches = [table([("a", 1, None)]).append_column("note", pa.array([note])) for note in ("this", "that")]
    tables.put(*batches)
    pipeline = tables.declare_over(batches[0].schema, PRICES, (lambda rows: rows) if how == "transformed" else None)
    steps.plan(tables.settings, pipeline, run_id="test")
    for txid in (1, 2):
        steps.process(tables.settings, pipeline, txid, owner="test", routing=routing)

    with StateStore.connect(tables.settings) as store:
        (this,), (that,) = (store.batch_history(pipeline.name, txid).attempts for txid in (1, 2))
    assert (this["source_hash_sum"] is None) == (how == "transformed")
    assert this["source_rows"] == this["transformed_rows"] == 1
    assert (this["source_hash_sum"] == that["source_hash_sum"]) == (how != "without digests")


def test_a_file_with_another_number_of_rows_than_was_read_is_not_sealed(tables: Tables) -> None:
    """The footer of a Parquet file is an independent count of its rows."""
    pipeline = tables.declare_over(table([]).schema, PRICES)
    tables.put(table([("a", 1, None), ("b", 2, None)]))

    def routing(pipeline: Pipeline, attempt: Attempt, facts: InputFacts) -> Route:
        assert facts.rows == 2
        return choose(pipeline, attempt, replace(facts, rows=3))

    tables.plan(pipeline, "test")
    with pytest.raises(RowsLost, match="of 3 rows 2 arrived in the partials of state per_name"):
        steps.process(tables.settings, pipeline, 1, owner="test", routing=routing)


@pytest.mark.promise("performance:of-untouched-files-in-one-task-partials")
@pytest.mark.parametrize("way", ["stage_on_executors", "stage_in_process"])
@pytest.mark.parametrize(
    ("times", "message"), [(1, "of 2 rows 1 arrived"), (2, "of 2 rows 2 arrived .*sums of their hashes differ by 0x[1-9a-f]")]
)
def test_a_partial_that_is_lost_after_its_task_is_noticed(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, way: str, times: int, message: str
) -> None:
    """Partials are followed from the task that read the file until COPY has written them, even if others replace them."""
    pipeline = tables.declare_over(table([]).schema, PRICES)
    tables.put(table([("a", 1, None), ("b", 2, None)]))
    real = getattr(stage_partials, way)

    def losing(where: Any, attempt: Any, spec: Any, rows: Any, *counter: Any, **limit: Any) -> Any:
        others = rows.where("name <> 'a'").selectExpr(f"explode(array_repeat(1, {times}))", "*").drop("col")
        return real(where, attempt, spec, others, *counter, **limit)

    monkeypatch.setattr(stage_partials, way, losing)
    tables.plan(pipeline, "test")
    routing = choose if way == "stage_in_process" else steps.on_executors
    with pytest.raises(RowsLost, match=message):
        steps.process(tables.settings, pipeline, 1, owner="test", routing=routing)


@pytest.mark.promise("limit:FEW_ROWS", "performance:up-to-10-000-partials-are-copied")
def test_more_partials_than_expected_are_staged_on_executors(tables: Tables) -> None:
    """Their number is guessed from earlier batches; a wrong guess costs time, but neither rows nor sums."""
    overall = State(aggregates={"amount": Sum("amount")})
    declared = tables.declare_over(table([]).schema, PRICES)
    pipeline = tables.declare(
        replace(declared.source, max_files=2), states={"overall": overall, **declared.states}, transform=lambda rows: rows
    )

    def routing(pipeline: Pipeline, attempt: Attempt, facts: InputFacts) -> Route:
        return replace(choose(pipeline, attempt, facts), most_in_process=3)

    batches: list[list[Row]] = [[(f"n{number % keys}", number, None) for number in range(10)] for keys in (2, 3, 4, 2)]
    tables.put(*(table(part) for batch in batches for part in (batch[:5], batch[5:])))
    steps.plan(tables.settings, pipeline, run_id="test")
    for txid in range(1, 5):
        steps.process(tables.settings, pipeline, txid, owner="test", commit_ready=True, routing=routing)

    assert tables.rows(pipeline) == clean([row for batch in batches for row in batch])
    assert tables.rows(pipeline, "overall") == [{"amount": 4 * 45}]
    with StateStore.connect(tables.settings) as store:
        histories = [store.batch_history(pipeline.name, txid) for txid in range(1, 5)]
    in_process = [{seal["state"] for seal in history.seals if seal["task_attempt"] == NO_TASK} for history in histories]
    assert in_process == [{"overall", "per_name"}, {"overall", "per_name"}, set(), {"overall", "per_name"}]
    assert [history.attempts[-1]["source_rows"] for history in histories] == [10] * 4


@pytest.mark.promise("performance:batch-asks-spark-four-times")
def test_a_small_batch_asks_spark_four_times(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question costs time on both sides: two about settings, one about the schema, one for the result; no more."""
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
    pipeline = tables.declare_over(table([]).schema, PRICES)
    tables.put(table(rows))
    tables.run(pipeline, "first")  # in a new session, settings are written too
    tables.put(table(rows))
    monkeypatch.setattr(SparkConnectServiceStub, "__init__", counting)
    tables.run(pipeline, "second")

    assert requests == {"Config": 2, "AnalyzePlan": 1, "ExecutePlan": 1}
    assert tables.rows(pipeline) == clean(rows + rows)


@pytest.mark.promise("performance:python-workers-keep-their-imports-out-of")
def test_a_worker_keeps_its_imports_out_of_its_garbage_collections(tables: Tables) -> None:
    """Spark makes each Python worker collect garbage after every task; frozen objects are left out."""
    pipeline = tables.declare_over(table([]).schema, PRICES)
    tables.put(table([("a", 1, None)]))
    tables.run(pipeline)

    with spark_session(tables.settings, "inbox") as session:
        (answer,) = session.range(1, numPartitions=1).mapInArrow(frozen_objects, "frozen long").collect()

    assert answer.frozen > 10_000


@pytest.mark.promise("performance:arrow-batches-of-short-rows-are-limited")
def test_rows_reach_python_in_limited_pieces_in_a_shared_session(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, or, where rows are short, only in their number; a pipeline's next version may have longer ones."""
    monkeypatch.setattr(session, "LIMITED", "64b")

    def pieces(*, are_short: bool) -> int:
        with spark_session(tables.settings, "inbox", rows_are_short=are_short) as session:
            return len(session.range(1_000, numPartitions=1).mapInArrow(sizes, "rows long").collect())

    assert pieces(are_short=True) == 1
    assert pieces(are_short=False) > 10
    assert pieces(are_short=True) == 1


def sizes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the number of rows of each Arrow batch."""
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})


def frozen_objects(_batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the number of objects that the worker has frozen."""
    yield pa.RecordBatch.from_pydict({"frozen": [gc.get_freeze_count()]})


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_split_of_the_rows_into_batches_gives_the_same_state(tables: Tables, seed: int) -> None:
    """Any split of the same rows, in any order, gives the state of one pass over all of them (I16)."""
    dice = random.Random(seed)
    names = ["a", "b", "", " ", "Zürich", "\U0001f30a", None]
    rows: list[Row] = [
        (
            dice.choice(names),
            dice.choice([None, dice.randint(-(10**12), 10**12)]),
            dice.choice([None, Decimal(dice.randint(-(10**10) + 1, 10**10 - 1)) / 100]),
        )
        for _ in range(200)
    ]
    cuts = sorted(dice.choices(range(len(rows) + 1), k=4))  # some batches may be empty
    parts = [rows[start:end] for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    state = State(key=PRICES.key, aggregates=PRICES.aggregates, null_keys=True)

    assert tables.aggregate(state, *(table(part) for part in parts)) == clean(rows)


@pytest.mark.usefixtures("either_way")
def test_min_and_max_of_every_type_order_values_alike_in_spark_and_postgres(tables: Tables) -> None:
    """Dates, instants, booleans and text: Spark within a batch and Postgres between batches agree on the order."""
    instants = [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(2013, 6, 1, 12, 30, 15, 123456, UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
    ]
    days = [date(1, 1, 1), date(2012, 2, 29), date(9999, 12, 31)]
    texts = ["", "A", "Z", "a", 'quote",\n', "z", "é", "\uffee", "\U0001f30a"]
    columns = {
        "instant": pa.timestamp("us", "UTC"),
        "day": pa.date32(),
        "known": pa.bool_(),
        "text": pa.string(),
    }

    def one(instant: datetime | None, day: date | None, known: bool | None, text: str | None) -> pa.Table:
        values = [instant, day, known, text]
        arrays = {name: pa.array([value], kind) for (name, kind), value in zip(columns.items(), values, strict=True)}
        return pa.table({"name": ["k"], **arrays})

    kinds = {"instant": "timestamptz", "day": "date", "known": "boolean", "text": "text"}
    aggregates = {f"{name}_{which.__name__.lower()}": which(name, kind) for name, kind in kinds.items() for which in (Min, Max)}
    middle = pa.concat_tables([one(instants[1], days[1], None, text) for text in texts[1:-1]])
    rows = tables.aggregate(
        State(key={"name": "text"}, aggregates=aggregates),
        one(instants[2], days[0], True, texts[-1]),
        middle,
        one(instants[0], days[2], False, texts[0]),
        one(None, None, None, None),
    )
    assert rows == [
        {
            "name": "k",
            **{"instant_min": instants[0], "instant_max": instants[2], "day_min": days[0], "day_max": days[2]},
            **{"known_min": False, "known_max": True, "text_min": "", "text_max": "\U0001f30a"},
        }
    ]


NASTY_KEYS = [
    "",
    " ",
    "a",
    "a ",
    "A",
    "\u0131",
    "I",
    "i",
    "\u0130",
    "é",
    "e\u0301",
    "\U0001f30a",
    "NULL",
    "null",
    "\\N",
    "\\.",
    "a\nb",
    "a\r\nb",
    "tab\t",
    "'\";--",
    '"',
    '""',
    ",",
    "{}",
    "%s",
    "\x7f",
    "\ufeff",
    "x" * 2000,
]


@pytest.mark.usefixtures("either_way")
def test_every_text_is_a_key_of_its_own(tables: Tables) -> None:
    """Text is data and compares by bytes: no two keys become one, and each comes back unchanged, in every batch."""
    noise = "".join(chr(random.Random(1).randrange(0x21, 0x7F) ^ n % 2) for n in range(2000))  # hardly compresses
    keys = [*NASTY_KEYS, noise]
    batch = table([(key, number, None) for number, key in enumerate(keys)])

    rows = tables.aggregate(PRICES, batch, batch)
    assert rows == clean([(key, number, None) for number, key in enumerate(keys)] * 2)


@pytest.mark.usefixtures("either_way")
def test_names_that_mean_something_in_sql_are_names(tables: Tables) -> None:
    """A state, a key and a value may be named like SQL keywords."""
    state = State(key={"user": "text", "group": "date"}, aggregates={"order": Count(), "select": Sum("limit")})
    batch = pa.table({"user": ["a"], "group": [date(2013, 1, 1)], "limit": pa.array([2], pa.int32())})
    pipeline = tables.declare(
        Files("inbox", schema={"user": "string", "group": "date", "limit": "int"}), states={"table": state}
    )
    tables.put(batch, batch)
    tables.run(pipeline)

    assert tables.rows(pipeline, "table") == [{"user": "a", "group": date(2013, 1, 1), "order": 2, "select": 4}]


# --------------------------------------------------------------------------------------------------------- bad keys


@pytest.mark.usefixtures("either_way")
def test_a_null_key_fails_the_batch(tables: Tables) -> None:
    """A row without a key is neither dropped nor put under another key."""
    pipeline = tables.declare_over(table([]).schema, PRICES)
    tables.put(table([("a", 1, None), (None, 2, None)]))

    message = refusal(tables, pipeline, BadKey)
    assert "key column name is NULL" in message
    assert "null_keys=True" in message


@pytest.mark.usefixtures("either_way")
def test_null_keys_keeps_rows_without_a_key_as_a_group(tables: Tables) -> None:
    """Rows without a key are then a group like any other, over all batches; parts of a key may be NULL too."""
    state = State(key={"name": "text", "day": "date"}, aggregates={"lines": Count()}, null_keys=True)
    day = date(2013, 1, 1)
    batch = pa.table({"name": ["a", None, None, "a", None], "day": pa.array([day, day, None, None, None], pa.date32())})

    assert tables.aggregate(state, batch, batch) == [
        {"name": "a", "day": day, "lines": 2},
        {"name": "a", "day": None, "lines": 2},
        {"name": None, "day": day, "lines": 2},
        {"name": None, "day": None, "lines": 4},
    ]


@pytest.mark.promise("limit:MAX_KEY_BYTES", "error:BAD_KEY")
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("nul\0inside", "NUL character"),
        ("\0", "NUL character"),
        ("x" * 2001, "2001 bytes"),
        ("é" * 1001, "2002 bytes"),
        ("x" * 10**6, "1000000 bytes"),
    ],
    ids=["NUL", "nothing but NUL", "one byte too long", "too long in bytes", "far too long"],
)
def test_a_text_that_postgres_cannot_index_is_refused_as_key(tables: Tables, key: str, reason: str) -> None:
    """The rule does not depend on how well a key compresses, and earlier batches stay."""
    pipeline = tables.declare_over(table([]).schema, PRICES)
    tables.put(table([("good", 1, None)]))
    tables.run(pipeline)
    tables.put(table([("good", 1, None), (key, 1, None)]))

    message = refusal(tables, pipeline, BadKey)
    assert "column name" in message
    assert reason in message


@pytest.mark.promise("limit:MAX_KEYS_BYTES")
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("length", "reason"), [(1200, None), (1197, None), (1201, "takes 2406 bytes")])
def test_a_key_of_columns_that_are_too_long_together_is_refused(tables: Tables, length: int, reason: str | None) -> None:
    """Each column keeps its limit, but together they exceed an index row: refused before staging, and the key is named."""
    dice = random.Random(1)
    state = State(key={"name": "text", "number": "integer", "other": "text"}, aggregates={"lines": Count()})
    long = ["".join(chr(dice.randrange(0x30, 0x5B)) for _ in range(length - 2 * (reason is None))) for _ in range(2)]
    numbers = pa.array([7, 8], pa.int32())
    batch = pa.table({"name": [long[0], "short"], "number": numbers, "other": [long[1], "short"]})
    pipeline = tables.declare_over(batch.schema, state)
    tables.put(batch)
    if reason is None:
        tables.run(pipeline)
        assert len(tables.rows(pipeline)) == 2
        return
    message = refusal(tables, pipeline, BadKey)
    assert reason in message
    assert f"(name='{long[0][:20]}" in message
    assert "number=7" in message


FAR = {
    "a date after 9999": (pa.array([2_932_897], pa.int32()).view(pa.date32()), "date", "10000-01-01"),
    "a date before 1": (pa.array([-719_163], pa.int32()).view(pa.date32()), "date", "0000-12-31"),
    "a time after 9999": (
        pa.array([253_402_300_800_000_000], pa.int64()).view(pa.timestamp("us", "UTC")),
        "timestamptz",
        "10000-01-01 00:00:00",
    ),
    "a time before 1": (
        pa.array([-62_135_596_800_000_001], pa.int64()).view(pa.timestamp("us", "UTC")),
        "timestamptz",
        "0000-12-31 23:59:59.999999",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("moment", "kind", "shown"), FAR.values(), ids=FAR.keys())
@pytest.mark.parametrize("place", ["key", "value"])
def test_a_date_outside_years_1_to_9999_is_refused_before_staging(
    tables: Tables, moment: pa.Array, kind: str, shown: str, place: str
) -> None:
    """Postgres would take most of them, but a reader of the state could not; here a transform has made it."""
    days = pa.types.is_date(moment.type)
    tick = moment.view(pa.int32() if days else pa.int64())[0].as_py()
    made = f"date_from_unix_date({tick})" if days else f"timestamp_micros({tick})"
    if place == "key":
        state = State(key={"name": "text", "moment": kind}, aggregates={"lines": Count()})
    else:
        state = State(key={"name": "text"}, aggregates={"moment": Max("moment", kind)})
    rows = pa.table({"name": ["a"]})
    pipeline = tables.declare_over(rows.schema, state, lambda rows: rows.selectExpr("name", f"{made} AS moment"))
    tables.put(rows)

    message = refusal(tables, pipeline, BadKey if place == "key" else Overflow)
    assert f"column moment{'' if place == 'key' else chr(32) + 'of the key (name=' + repr('a') + ')'} is {shown}" in message
    assert "Years are kept from 1 to 9999" in message


@pytest.mark.usefixtures("either_way")
def test_columns_of_a_source_may_be_called_anything(tables: Tables) -> None:
    """A dot in a name is not a field of a struct, and a backtick ends nothing; with a transform and without."""
    names = ["a.b", "c`d", "e f", "a", "`"]
    rows = pa.table({"name": ["x", "y"], **{name: pa.array([n, None], pa.int64()) for n, name in enumerate(names, 1)}})
    sums = {f"sum_{n}": Sum(name) for n, name in enumerate(names, 1)}
    state = State(key={"name": "text"}, aggregates={**sums, "known": Count("a.b")})
    expected = [
        {"name": "x", **{f"sum_{n}": n for n in range(1, 6)}, "known": 1},
        {"name": "y", **{f"sum_{n}": 0 for n in range(1, 6)}, "known": 0},
    ]
    assert tables.aggregate(state, rows) == expected
    pipeline = tables.declare_over(rows.schema, state, lambda rows: rows.where("name <> ''"))
    tables.put(rows)
    tables.run(pipeline, "second")
    doubled = [{name: value if name == "name" else 2 * value for name, value in row.items()} for row in expected]
    assert tables.rows(pipeline) == doubled


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
}


@pytest.mark.parametrize("transform", IMPURE.values(), ids=IMPURE.keys())
def test_a_transform_whose_result_varies_is_refused(tables: Tables, transform: Any, request: pytest.FixtureRequest) -> None:
    """A batch that is tried again has to be the same batch; the plan shows that the transform is not a function of its rows."""
    pipeline = tables.declare_over(table([]).schema, PRICES, transform)
    tables.put(table([("a", 1, None)]))

    message = refusal(tables, pipeline, DeclarationInvalid)
    assert f"The transform uses {request.node.callspec.id.removesuffix(' in SQL')}" in message


def test_a_transform_that_only_looks_impure_is_not_refused(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    """Names in texts and of columns, and rows that are equal in all columns. A choice among differing rows gives a warning."""

    def harmless(rows: Any) -> Any:
        rows = rows.withColumn("now", F.lit("rand()")).withColumn("current_date", F.lit(1))
        return rows.where("now = 'rand()' AND `now` <> \"uuid()\"").dropDuplicates()

    pipeline = tables.declare_over(table([]).schema, PRICES, harmless)
    tables.put(table([("a", 1, None)]))
    tables.run(pipeline)
    assert tables.rows(pipeline) == clean([("a", 1, None)])
    assert "which of them stays" not in caplog.text

    pipeline = tables.declare_over(table([]).schema, PRICES, lambda rows: rows.dropDuplicates(["name"]))
    tables.put(table([("b", 1, None)]))
    tables.run(pipeline, "second")
    assert "which of them stays is not the same each time" in caplog.text


def test_a_transform_that_returns_nothing_is_refused(tables: Tables) -> None:
    """The author forgot the `return`."""
    pipeline = tables.declare_over(table([]).schema, PRICES, lambda rows: rows.where("amount > 0") and None)
    tables.put(table([("a", 1, None)]))

    assert "end it with return" in refusal(tables, pipeline, DeclarationInvalid)


def test_a_sum_ignores_nan_that_spark_casts_to_null(tables: Tables) -> None:
    """Spark casts NaN to a decimal as NULL, even in ANSI mode; the documentation of Sum says so, and how to refuse it."""
    rows = pa.table({"name": ["a", "a", "a"], "amount": pa.array([float("nan"), 1.5, float("-inf")])})
    state = State(key={"name": "text"}, aggregates={"amount": Sum("amount", "numeric(10,2)")})
    pipeline = tables.declare_over(
        rows.schema, state, lambda rows: rows.selectExpr("name", "cast(amount AS decimal(10,2)) AS amount")
    )
    tables.put(rows)
    tables.run(pipeline)
    assert tables.rows(pipeline) == [{"name": "a", "amount": Decimal("1.50")}]
    assert "abs(v) < double('inf')" in (Sum.__doc__ or "")

    numbers = replace(pipeline, check={"a number": "abs(amount) < double('inf')"})
    tables.put(rows)
    assert "fails the check 'a number'" in refusal(tables, numbers, MalformedRecord)


def test_a_nul_in_a_value_is_refused(tables: Tables) -> None:
    """Postgres has no text with a NUL in it; the column is named and nothing is cut off."""
    batch = pa.table({"name": ["a"], "text": ["x\0y"]})
    pipeline = tables.declare_over(batch.schema, State(key={"name": "text"}, aggregates={"last": Max("text", "text")}))
    tables.put(batch)

    assert "column last holds a NUL character" in refusal(tables, pipeline, BadKey)


# ------------------------------------------------------------------------------------ values that do not fit a column


@pytest.mark.promise("error:DECLARATION_INVALID")
@pytest.mark.parametrize(
    ("expression", "aggregates", "message"),
    [
        (
            "CAST(1.005 AS DECIMAL(10,3)) AS amount",
            {"x": Sum("amount", "numeric(38,2)")},
            "declared numeric(38,2), but the transform returns decimal(10,3)",
        ),
        ("CAST(1 AS DECIMAL(20,2)) AS amount", {"x": Min("amount", "numeric(10,2)")}, "returns decimal(20,2)"),
        ("CAST(1.5 AS DOUBLE) AS amount", {"x": Sum("amount")}, "declared bigint, but the transform returns double"),
        ("timestamp'2013-01-01' AS amount", {"x": Min("amount", "timestamp")}, "returns timestamp"),
        ("X'00' AS amount", {"x": Min("amount", "uuid")}, "declared uuid, but the transform returns binary"),
        ("CAST(1 AS DECIMAL(10,0)) AS amount", {"x": Sum("amount")}, "returns decimal(10,0)"),
        ("'1' AS amount", {"x": Sum("amount")}, "returns string"),
        ("1 AS amount", {"x": Min("amount", "text")}, "declared text, but the transform returns int"),
        ("timestamp'2013-01-01' AS amount", {"x": Min("amount", "date")}, "returns timestamp"),
        ("timestamp_ntz'2013-01-01' AS amount", {"x": Min("amount", "timestamptz")}, "returns timestamp_ntz"),
        ("1 AS something", {"x": Sum("amount")}, "needs column amount, but the transform returns name, something"),
        ("1 AS something", {"x": Count("amount")}, "needs column amount"),
        ("1 AS Amount", {"x": Sum("amount")}, "needs column amount"),
        ("1 AS amount, 2 AS amount", {"x": Sum("amount")}, "amount"),
        ("no_such_column AS amount", {"x": Sum("amount")}, "no_such_column"),
    ],
)
def test_a_column_that_is_missing_or_would_lose_something_is_refused(
    tables: Tables, expression: str, aggregates: dict[str, Any], message: str
) -> None:
    """Nothing is rounded, cut or guessed: the declaration and the transform's columns must agree."""
    batch = pa.table({"name": ["a"]})
    state = State(key={"name": "text"}, aggregates=aggregates)
    pipeline = tables.declare_over(batch.schema, state, lambda rows: rows.selectExpr("name", *expression.split(", ")))
    tables.put(batch)

    assert message in refusal(tables, pipeline, DeclarationInvalid)


def test_a_missing_key_column_is_refused(tables: Tables) -> None:
    """A key that the transform does not return is named."""
    batch = pa.table({"name": ["a"]})
    pipeline = tables.declare_over(batch.schema, State(key={"nam": "text"}, aggregates={"x": Count()}))
    tables.put(batch)

    assert "needs column nam, but the transform returns name" in refusal(tables, pipeline, DeclarationInvalid)


@pytest.mark.promise("error:OVERFLOW")
@pytest.mark.parametrize(
    ("kind", "aggregate", "values"),
    [
        (pa.int64(), Sum("amount"), [2**63 - 1, 1]),
        (pa.int64(), Sum("amount"), [-(2**63), -1]),
        (pa.int64(), Sum("amount", "integer"), [2**31 - 1, 1]),
        (pa.int64(), Min("amount", "integer"), [2**31]),
        (pa.decimal128(4, 2), Sum("amount", "numeric(4,2)"), [Decimal("99.99"), Decimal("0.01")]),
        (pa.decimal128(38, 0), Sum("amount", "numeric(38,0)"), [Decimal(10**38 - 1), Decimal(1)]),
    ],
    ids=["bigint", "bigint below", "integer", "integer min", "numeric(4,2)", "numeric(38,0)"],
)
def test_a_sum_that_leaves_its_range_in_a_batch_is_refused(
    tables: Tables, kind: pa.DataType, aggregate: Any, values: list[Any]
) -> None:
    """It neither wraps around nor becomes NULL."""
    batch = pa.table({"name": ["a"] * len(values), "amount": pa.array(values, kind)})
    pipeline = tables.declare_over(batch.schema, State(key={"name": "text"}, aggregates={"x": aggregate}))
    tables.put(batch)

    refusal(tables, pipeline, Overflow)


@pytest.mark.parametrize(
    ("kind", "aggregate", "values"),
    [
        (pa.int64(), Sum("amount"), [2**63 - 1, 1]),
        (pa.int32(), Sum("amount", "integer"), [2**31 - 1, 1]),
        (pa.decimal128(4, 2), Sum("amount", "numeric(4,2)"), [Decimal("99.99"), Decimal("0.01")]),
    ],
    ids=["bigint", "integer", "numeric"],
)
def test_a_sum_that_leaves_its_range_between_batches_halts_the_commit(
    tables: Tables, kind: pa.DataType, aggregate: Any, values: list[Any]
) -> None:
    """The whole commit fails: the state keeps the last good batch, and the batch halts with the code of its error."""
    parts = [pa.table({"name": ["a"], "amount": pa.array([value], kind)}) for value in values]
    pipeline = tables.declare_over(parts[0].schema, State(key={"name": "text"}, aggregates={"x": aggregate}))
    tables.put(*parts)

    with pytest.raises(Overflow):
        tables.run(pipeline)
    assert tables.rows(pipeline) == [{"name": "a", "x": values[0]}]
    with StateStore.connect(tables.settings) as store:
        assert store.committed("inbox") == 1
        status = store.batch_history("inbox", 2).status
    assert status.phase == "halted"
    assert "OVERFLOW" in (status.waits_for or "")


@pytest.mark.promise("error:TRANSFORM_FAILED")
def test_an_error_in_a_transform_is_reported_in_one_line(tables: Tables) -> None:
    """Spark's own refusals of data (here a bad cast) blame the content, and fit on a line."""
    pipeline = tables.declare_over(
        table([]).schema, PRICES, lambda rows: rows.selectExpr("name", "CAST(name AS INT) AS amount", "price")
    )
    tables.put(table([("not a number", 1, None)]))

    assert "CAST_INVALID_INPUT" in refusal(tables, pipeline, TransformFailed)
