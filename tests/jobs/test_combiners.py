"""An author's own aggregates: through Spark and Postgres like all others, and the check that tells a wrong one."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from pyspark.sql import functions as F

from tests import steps
from tests.jobs.conftest import Tables
from tests.jobs.test_aggregates import run_together
from tidegate.jobs import ApproxDistinct, ApproxQuantiles, Avg, CollectList, Combiner, Count, Last, State
from tidegate.jobs.aggregates import Aggregate
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.testing import BrokenPromise, check_aggregate
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import DeclarationChanged, DeclarationInvalid, Overflow


@dataclass(frozen=True)
class CappedSum(Combiner):
    """A sum that stays at its cap."""

    column: str
    type: str = "bigint"
    cap: int = 1000
    zero = 0

    def partial(self, values: Any) -> Any:
        """Return the value of a batch."""
        return F.least(F.sum(values), F.lit(self.cap))

    def combine(self, kept: Any, new: Any) -> Any:
        """Return the value of both."""
        return sa.func.least(kept + new, self.cap)


@dataclass(frozen=True)
class Longest(Combiner):
    """The longest text, of several the greatest; a reducer: there is none of no rows."""

    column: str
    type: str = "text"

    def partial(self, values: Any) -> Any:
        """Return the value of a batch."""
        return F.max_by(values, F.struct(F.char_length(values), values))

    def combine(self, kept: Any, new: Any) -> Any:
        """Return the value of both."""
        is_longer = sa.tuple_(sa.func.char_length(new), new) > sa.tuple_(sa.func.char_length(kept), kept)
        return sa.case((is_longer, new), else_=kept)


@dataclass(frozen=True)
class Product(Combiner):
    """A product, exactly."""

    column: str
    type: str = "numeric(38,0)"
    read_as: str = "bigint"
    zero = 1

    def partial(self, values: Any) -> Any:
        """Return the value of a batch."""
        one = F.lit(1).cast("decimal(38,0)")
        return F.aggregate(F.collect_list(values), one, lambda a, b: (a * b).cast("decimal(38,0)"))

    def combine(self, kept: Any, new: Any) -> Any:
        """Return the value of both."""
        return kept * new


class Difference(CappedSum):
    """Neither commutative nor associative."""

    def combine(self, kept: Any, new: Any) -> Any:
        """Return the value of both."""
        return kept - new


class Mean(CappedSum):
    """Commutative, but not associative."""

    def combine(self, kept: Any, new: Any) -> Any:
        """Return the value of both."""
        return (kept + new) / 2


class NoIdentity(CappedSum):
    """A zero that changes something."""

    zero = 5


class Broken(CappedSum):
    """Code that fails."""

    def combine(self, kept: Any, new: Any) -> Any:
        """Return the value of both."""
        return kept.nothing + new


Row = tuple[str, str | None, int | None]


def as_table(rows: list[Row]) -> pa.Table:
    """Return rows as an Arrow table."""
    kinds = {"name": pa.string(), "label": pa.string(), "n": pa.int64()}
    return pa.table({name: pa.array([row[i] for row in rows], kind) for i, (name, kind) in enumerate(kinds.items())})


def test_a_pipeline_with_combiners_gives_the_value_of_one_pass(tables: Tables) -> None:
    """Random rows with NULLs in random batches, staged by tasks and ready at once; a key without values has zero, or NULL."""
    tables.routing = steps.ROUTINGS["safe"]
    rng = random.Random(3)
    rows: list[Row] = [
        (rng.choice("ab"), rng.choice(["", "é", "zz", "aaa", None]), rng.choice([1, 2, 300, None])) for _ in range(40)
    ]
    rows.append(("only NULL", None, None))
    rng.shuffle(rows)
    aggregates: dict[str, Aggregate] = {
        "lines": Count(),
        "capped": CappedSum("n", cap=700),
        "longest": Longest("label"),
        "times": Product("n"),
    }
    pipeline = tables.declare_over(as_table([]).schema, State(key={"name": "text"}, aggregates=aggregates))
    tables.put(as_table(rows[:15]), as_table([]), as_table(rows[15:20]), as_table(rows[20:]))
    run_together(tables, pipeline)
    found = {row["name"]: row for row in tables.rows(pipeline)}
    for name in ("a", "b", "only NULL"):
        labels = [label for key, label, _ in rows if key == name and label is not None]
        numbers = [n for key, _, n in rows if key == name and n is not None]
        product = Decimal(1)
        for n in numbers:
            product *= n
        longest = max(labels, key=lambda label: (len(label), label.encode()), default=None)
        assert found[name] == {
            "name": name, "lines": sum(row[0] == name for row in rows), "capped": min(sum(numbers), 700), "longest": longest,
            "times": product,
        }  # fmt: skip


def test_a_value_that_does_not_fit_is_named_and_changes_nothing(tables: Tables) -> None:
    """In a batch, by Spark, and in the merge, by Postgres."""
    state = State(key={"name": "text"}, aggregates={"times": Product("n", "numeric(20,0)")})
    pipeline = tables.declare_over(as_table([]).schema, state)
    tables.put(as_table([("a", None, 10**15)]), as_table([("a", None, 10**6)]))
    txids = tables.plan(pipeline, "run")
    for txid in txids:
        steps.process(tables.settings, pipeline, txid, owner="test")
    steps.commit(tables.settings, pipeline, txids[0], owner="test")
    with pytest.raises(Overflow):
        steps.commit(tables.settings, pipeline, txids[1], owner="test")
    assert tables.rows(pipeline) == [{"name": "a", "times": 10**15}]


def test_another_meaning_is_another_declaration(tables: Tables, register: Any) -> None:
    """A field or the version: after a commit, it is refused like any changed aggregate."""

    class Newer(CappedSum):
        version = 2

    Newer.__qualname__ = CappedSum.__qualname__
    pipeline = tables.declare_over(as_table([]).schema, State(aggregates={"capped": CappedSum("n")}))
    tables.put(as_table([("a", None, 1)]))
    tables.run(pipeline)
    for changed in (CappedSum("n", cap=1), Newer("n")):
        with pytest.raises(DeclarationChanged, match="has committed a batch into other states"):
            tables.declare_over(as_table([]).schema, State(aggregates={"capped": changed}))


@pytest.fixture
def numbers(settings: Settings) -> Iterator[Any]:
    """Rows of every type with NULLs, repeated values, and both ends of a range."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        (
            n,
            None if n is None else f'{n},é"',
            None if n is None else start + timedelta(microseconds=n),
            None if n is None else Decimal(n) / 4,
        )
        for n in [None, 0, 3, 3, -7, 5, None, 400, 2, 999]
    ]
    with spark_session(settings, "combiners") as spark:
        yield spark.createDataFrame(rows, "n bigint, label string, at timestamp, price decimal(10,2)")


@pytest.mark.promise("testing:check_aggregate")
@pytest.mark.parametrize(
    "aggregate",
    [
        Longest("label"),
        Avg("price", scale=2),
        Last("label", "text", {"at": "timestamptz"}),
        CollectList("label", "text"),
        ApproxDistinct("label", "text", error=0.1),
        ApproxQuantiles("n", 500, signed=True, error=0.1),
    ],
    ids=lambda aggregate: type(aggregate).__name__,
)
def test_the_check_accepts_what_keeps_the_promise(numbers: Any, settings: Settings, aggregate: Aggregate) -> None:
    """Own aggregates and those that are shipped; no table is made."""
    check_aggregate(aggregate, numbers, settings, splits=2)


def test_the_check_accepts_a_sum_with_a_cap(numbers: Any, settings: Settings) -> None:
    """If no value is negative: otherwise the cap would come too early in some orders."""
    check_aggregate(CappedSum("n", cap=500), numbers.where("n >= 0 OR n IS NULL"), settings)
    with pytest.raises(BrokenPromise):
        check_aggregate(CappedSum("n", cap=500), numbers, settings, splits=10)


@pytest.mark.promise("testing:check_aggregate")
@pytest.mark.parametrize(
    ("aggregate", "error", "message"),
    [
        (Difference("n"), BrokenPromise, "value is"),
        (Mean("n"), BrokenPromise, "value is"),
        (NoIdentity("n", cap=5000), BrokenPromise, "no rows change nothing: value is"),
        (Product("n", "numeric(6,0)"), Overflow, "range|cannot be represented"),
        (Broken("n"), DeclarationInvalid, "The combiner of value .* failed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_check_tells_what_is_wrong(
    numbers: Any, settings: Settings, aggregate: Aggregate, error: Any, message: str
) -> None:
    """A broken law with the values that differ; what does not fit, by its name."""
    with pytest.raises(error, match=message):
        check_aggregate(aggregate, numbers.where("n > 0"), settings)


def test_a_combiner_is_a_dataclass() -> None:
    """Its fields are part of the fingerprint; without them, another meaning would go unnoticed."""

    class Plain(Combiner):
        partial = combine = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match="has to be a frozen dataclass"):
        State(aggregates={"x": Plain()}).spec("s")
