"""An author's own aggregates: through Spark and Postgres like all others, and the check that tells a wrong one."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import functions as F

from tests.jobs.conftest import Tables
from tidegate.jobs import ApproxDistinct, Combiner, Count, Files, Pipeline, State
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


def wrong(combine: Callable[[Any, Any], Any], zero: int = 0) -> Aggregate:
    """Return a sum whose values are combined so, but for zeros, which change nothing."""

    def combined(_self: CappedSum, kept: Any, new: Any) -> Any:
        return sa.case((kept == 0, new), (new == 0, kept), else_=combine(kept, new))

    return type("Wrong", (CappedSum,), {"combine": combined, "zero": zero})("n", cap=5000)


SCHEMA = {"name": "string", "label": "string", "n": "bigint"}


def test_a_pipeline_with_combiners_gives_the_value_of_one_pass(tables: Tables) -> None:
    rng, labels = random.Random(3), ["", "é", "zz", "aaa", None]
    rows: list[Any] = [(rng.choice("ab"), rng.choice(labels), rng.choice([1, 2, 300, None])) for _ in range(40)]
    rows = [("then NULL", "x", 3), *rows, ("only NULL", None, None), ("then NULL", None, None)]
    aggregates = {"lines": Count(), "capped": CappedSum("n", cap=700), "longest": Longest("label"), "times": Product("n")}
    pipeline = tables.declare_over(SCHEMA, State(key={"name": "text"}, aggregates=aggregates))
    tables.put_rows(SCHEMA, rows[:15], rows[15:20], rows[20:])
    tables.run_mixed(pipeline, ["safe"])
    for row in tables.rows(pipeline):
        own = [each for each in rows if each[0] == row["name"]]
        numbers = [n for *_, n in own if n is not None]
        longest = max((label for _, label, _ in own if label is not None), key=lambda each: (len(each), each), default=None)
        kept = {"capped": min(sum(numbers), 700), "longest": longest, "times": prod(numbers)}
        assert row == {"name": row["name"], "lines": len(own), **kept}
    assert {row["name"] for row in tables.rows(pipeline)} == {name for name, *_ in rows}


WRONG: list[tuple[Aggregate, Any, str]] = [
    (wrong(lambda kept, new: kept - new), BrokenPromise, "any split and order of .*: value is"),
    (wrong(lambda kept, new: (kept + new) / 2), BrokenPromise, "any split and order of .*: value is"),  # not associative
    (wrong(lambda kept, new: kept + new, zero=5), BrokenPromise, "no rows change nothing: value is"),
    (Product("n", "numeric(6,0)"), Overflow, "range|cannot be represented"),
    (wrong(lambda kept, new: kept.nothing + new), DeclarationInvalid, "The combiner of value .* failed"),
    (
        type("Drawing", (CappedSum,), {"partial": lambda *_: F.count(F.rand())})("n"),
        DeclarationInvalid,
        "of state .* uses rand",
    ),
]


@pytest.mark.promise("testing:check_aggregate")
def test_the_check_tells_what_keeps_the_promise_from_what_does_not(settings: Settings) -> None:
    """A broken law with the values that differ; what does not fit, by its name. No table is made."""
    rows = [(n, n if n is None else f'{n},é"') for n in (None, 0, 3, 3, -7, 5, None, 400, 2, 999)]
    with spark_session(settings, "inbox") as spark:
        given = spark.createDataFrame(rows, "n bigint, label string")
        check_aggregate(Longest("label"), given, settings, splits=2)
        check_aggregate(ApproxDistinct("label", "text", error=0.1), given, settings, splits=2)
        check_aggregate(CappedSum("n", cap=500), given.where("n >= 0 OR n IS NULL"), settings, splits=3)
        with pytest.raises(BrokenPromise):
            check_aggregate(CappedSum("n", cap=500), given, settings, splits=10)
        for aggregate, error, message in WRONG:
            with pytest.raises(error, match=message):
                check_aggregate(aggregate, given.where("n > 0"), settings)


def test_another_meaning_of_a_combiner_is_another_declaration() -> None:
    newer = type("Product", (Product,), {"version": 2})
    tried = (Product("n"), Product("n", read_as="integer"), newer("n"))
    declared = [Pipeline("inbox", Files("inbox", schema=SCHEMA), {"one": State({}, {"times": each})}) for each in tried]
    assert len({pipeline.spec.fingerprint for pipeline in declared}) == len(tried)
