"""An author's own aggregates: through Spark and Postgres like all others, and the check that tells a wrong one."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import functions as F

from tests.jobs.conftest import Tables
from tidegate.jobs import ApproxDistinct, ApproxQuantiles, Avg, CollectList, Combiner, Count, Files, Last, Pipeline, State
from tidegate.jobs.aggregates import Aggregate
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.testing import BrokenPromise, check_aggregate
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import DeclarationInvalid, Overflow


@dataclass(frozen=True)
class CappedSum(Combiner):
    column: str
    type: str = "bigint"
    cap: int = 1000
    zero = 0

    def partial(self, values: Any) -> Any:
        return F.least(F.sum(values), F.lit(self.cap))

    def combine(self, kept: Any, new: Any) -> Any:
        return sa.func.least(kept + new, self.cap)


@dataclass(frozen=True)
class Longest(Combiner):
    """The longest text, of several the greatest; a reducer: there is none of no rows."""

    column: str
    type: str = "text"

    def partial(self, values: Any) -> Any:
        return F.max_by(values, F.struct(F.char_length(values), values))

    def combine(self, kept: Any, new: Any) -> Any:
        stays = sa.tuple_(sa.func.char_length(kept), kept) >= sa.tuple_(sa.func.char_length(new), new)
        return sa.case((stays, kept), else_=new)


@dataclass(frozen=True)
class Product(Combiner):
    column: str
    type: str = "numeric(38,0)"
    read_as: str = "bigint"
    zero = 1

    def partial(self, values: Any) -> Any:
        one = F.lit(1).cast("decimal(38,0)")
        return F.aggregate(F.collect_list(values), one, lambda a, b: (a * b).cast("decimal(38,0)"))

    def combine(self, kept: Any, new: Any) -> Any:
        return kept * new


class Difference(CappedSum):
    def combine(self, kept: Any, new: Any) -> Any:
        return kept - new


class Mean(CappedSum):
    """Commutative, but not associative."""

    def combine(self, kept: Any, new: Any) -> Any:
        return (kept + new) / 2


class NoIdentity(CappedSum):
    zero = 5


class Broken(CappedSum):
    def combine(self, kept: Any, new: Any) -> Any:
        return kept.nothing + new


Row = tuple[str, str | None, int | None]


SCHEMA = {"name": "string", "label": "string", "n": "bigint"}


def test_a_pipeline_with_combiners_gives_the_value_of_one_pass(tables: Tables) -> None:
    rng = random.Random(3)
    rows: list[Row] = [
        (rng.choice("ab"), rng.choice(["", "é", "zz", "aaa", None]), rng.choice([1, 2, 300, None])) for _ in range(40)
    ]
    rows.append(("only NULL", None, None))
    rng.shuffle(rows)
    rows = [("then NULL", "x", 3), *rows, ("then NULL", None, None)]
    aggregates: dict[str, Aggregate] = {
        "lines": Count(),
        "capped": CappedSum("n", cap=700),
        "longest": Longest("label"),
        "times": Product("n"),
    }
    pipeline = tables.declare_over(SCHEMA, State(key={"name": "text"}, aggregates=aggregates))
    tables.put_rows(SCHEMA, rows[:15], rows[15:20], rows[20:])
    tables.run_mixed(pipeline, ["safe"])
    found = {row["name"]: row for row in tables.rows(pipeline)}
    for name in ("a", "b", "only NULL", "then NULL"):
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


KEPT: dict[str, Aggregate] = {
    "an author's": Longest("label"),
    "a mean": Avg("price", scale=2),
    "a row": Last("label", "text", {"at": "timestamptz"}),
    "a list": CollectList("label", "text"),
    "a sketch": ApproxDistinct("label", "text", error=0.1),
    "another sketch": ApproxQuantiles("n", 500, signed=True, error=0.1),
}
WRONG: list[tuple[Aggregate, Any, str]] = [
    (Difference("n"), BrokenPromise, "value is"),
    (Mean("n"), BrokenPromise, "value is"),
    (NoIdentity("n", cap=5000), BrokenPromise, "no rows change nothing: value is"),
    (Product("n", "numeric(6,0)"), Overflow, "range|cannot be represented"),
    (Broken("n"), DeclarationInvalid, "The combiner of value .* failed"),
]


@pytest.mark.promise("testing:check_aggregate")
@pytest.mark.parametrize("names", [["an author's", "a sketch"], pytest.param(KEPT, marks=pytest.mark.soak)], ids=["few", "all"])
def test_the_check_tells_what_keeps_the_promise_from_what_does_not(settings: Settings, names: Collection[str]) -> None:
    """A broken law with the values that differ; what does not fit, by its name. No table is made."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    values = [None, 0, 3, 3, -7, 5, None, 400, 2, 999]
    rows = [n if n is None else (n, f'{n},é"', start + timedelta(microseconds=n), Decimal(n) / 4) for n in values]
    with spark_session(settings, "inbox") as spark:
        given = spark.createDataFrame(
            [row or (None,) * 4 for row in rows], "n bigint, label string, at timestamp, price decimal(10,2)"
        )
        for name in names:
            check_aggregate(KEPT[name], given, settings, splits=2)
        check_aggregate(CappedSum("n", cap=500), given.where("n >= 0 OR n IS NULL"), settings, splits=3)
        with pytest.raises(BrokenPromise):
            check_aggregate(CappedSum("n", cap=500), given, settings, splits=10)
        for aggregate, error, message in WRONG:
            with pytest.raises(error, match=message):
                check_aggregate(aggregate, given.where("n > 0"), settings)


def test_another_meaning_of_a_combiner_is_another_declaration() -> None:
    class Newer(Product):
        version = 2

    Newer.__qualname__ = Product.__qualname__
    tried = (Product("n"), Product("n", read_as="integer"), Newer("n"))
    declared = [Pipeline("inbox", Files("inbox", schema=SCHEMA), {"one": State({}, {"times": each})}) for each in tried]
    assert len({pipeline.spec.fingerprint for pipeline in declared}) == len(tried)
