"""Every aggregate: any split and order of the rows into batches gives the value of one pass over all rows (I16)."""

import math
import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext
from functools import reduce
from itertools import permutations
from operator import and_, or_, xor
from typing import Any

import pytest

from tests.jobs.conftest import Staged, Tables
from tidegate.jobs import (
    Avg,
    BitAnd,
    BitOr,
    BitXor,
    BoolAnd,
    BoolOr,
    CollectList,
    CollectSet,
    Count,
    First,
    Histogram,
    Largest,
    Last,
    Newest,
    Smallest,
    State,
    StdDev,
    Variance,
)
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import Overflow

Row = dict[str, Any]
SCHEMA = {
    "name": "string",
    "n": "bigint",
    "small": "int",
    "price": "decimal(10,2)",
    "ratio": "double",
    "ok": "boolean",
    "label": "string",
    "at": "timestamp",
    "day": "date",
}
BY = {"at": "timestamptz", "n": "bigint"}
AGGREGATES = {
    "lines": Count(),
    "mean": Avg("n"),
    "mean_price": Avg("price", scale=2, digits=4),
    "mean_ratio": Avg("ratio", scale=3, digits=8),
    "spread": Variance("small"),
    "spread_all": Variance("price", scale=2, digits=5, population=True),
    "deviation": StdDev("ratio", scale=3),
    "all_ok": BoolAnd("ok"),
    "any_ok": BoolOr("ok"),
    "bits_all": BitAnd("n"),
    "bits_any": BitOr("small", "integer"),
    "bits_odd": BitXor("n"),
    "first_label": First("label", "text", BY),
    "last_label": Last("label", "text", BY),
    "labels": CollectSet("label", "text"),
    "days": CollectSet("day", "date"),
    "prices": CollectList("price", "numeric(10,2)", most=1000),
    "moments": CollectList("at", "timestamptz", most=1000),
    "least": Smallest("n", 3),
    "most": Largest("label", 2, "text"),
    "shares": Histogram("ratio", ["-0.5", 0, "0.125", 3], "numeric(10,3)"),
}
# What Spark, CSV, arrays and JSON might take for something else.
LABELS = ["", "a", "A", "b,c", 'say "x"', "back\\slash", "{curly}", "NULL", "null", " ", "ä", "𝄞", "line\nbreak", None]
START = datetime(2026, 1, 1, tzinfo=UTC)


def rows_of(seed: int, count: int) -> list[Row]:
    rng = random.Random(seed)

    def known(value: Any) -> Any:
        return None if rng.random() < 0.2 else value

    rows = [
        {
            "name": rng.choice(["a", "b", "only NULL"]),
            "n": known(rng.choice([0, -1, 7, 2**62, -(2**62), rng.randint(-9, 9)])),
            "small": known(rng.randint(-(2**31), 2**31 - 1)),
            "price": known(Decimal(rng.randint(-999, 999)).scaleb(-2)),
            "ratio": known(rng.randint(-4000, 4000) / 1000),
            "ok": known(rng.random() < 0.8),
            "label": rng.choice(LABELS),
            "at": known(START + timedelta(microseconds=rng.randint(0, 3))),
            "day": known(date(2026, 1, rng.randint(1, 5))),
        }
        for _ in range(count)
    ]
    return [{**dict.fromkeys(SCHEMA), "name": row["name"]} if row["name"] == "only NULL" else row for row in rows]


def rounded(value: Decimal, digits: int) -> Decimal:
    return value.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)


def encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def one_pass(rows: list[Row]) -> Row:
    """Return what the aggregates keep of some rows, computed in plain Python."""

    def known(column: str, convert: Callable[[Any], Any] = lambda value: value) -> list[Any]:
        return [convert(row[column]) for row in rows if row[column] is not None]

    def exact(column: str) -> list[Decimal]:
        return known(column, lambda value: Decimal(str(value)))

    def mean(column: str, digits: int) -> Decimal | None:
        found = exact(column)
        return rounded(sum(found) / len(found), digits) if found else None

    def variance(column: str, *, sample: bool) -> Decimal | None:
        found = exact(column)
        if len(found) < 1 + sample:
            return None
        return (sum(v * v for v in found) - sum(found) ** 2 / len(found)) / (len(found) - sample)

    def in_order(*, last: bool) -> Row:
        def place(row: Row) -> list[tuple[bool, Any]]:
            parts = [row["at"], row["n"], encoded(row["label"])]
            return [((part is not None) == last, 0 if part is None else part) for part in parts]

        return (max if last else min)(rows, key=place)

    def text_order(texts: list[str]) -> list[str]:
        return sorted(texts, key=str.encode)

    bounds = [Decimal("-0.5"), Decimal(0), Decimal("0.125"), Decimal(3)]
    first, last = in_order(last=False), in_order(last=True)
    with localcontext(prec=80):
        spread, spread_all = variance("small", sample=True), variance("price", sample=False)
        deviation = variance("ratio", sample=True)
        return {
            "lines": len(rows),
            "mean": mean("n", 6),
            "mean_price": mean("price", 4),
            "mean_ratio": mean("ratio", 8),
            "spread": None if spread is None else rounded(spread, 6),
            "spread_all": None if spread_all is None else rounded(spread_all, 5),
            "deviation": None if deviation is None else rounded(deviation.sqrt(), 6),
            "all_ok": all(known("ok")) if known("ok") else None,
            "any_ok": any(known("ok")) if known("ok") else None,
            "bits_all": reduce(and_, known("n")) if known("n") else None,
            "bits_any": reduce(or_, known("small")) if known("small") else None,
            "bits_odd": reduce(xor, known("n")) if known("n") else None,
            "first_label": first["label"],
            "first_label_at": first["at"],
            "first_label_n": first["n"],
            "last_label": last["label"],
            "last_label_at": last["at"],
            "last_label_n": last["n"],
            "labels": text_order(list(set(known("label")))),
            "days": sorted(set(known("day"))),
            "prices": sorted(known("price")),
            "moments": sorted(known("at")),
            "least": sorted(known("n"))[:3],
            "most": text_order(known("label"))[::-1][:2],
            "shares": [
                sum(low <= v < high for v in exact("ratio"))
                for low, high in zip([-math.inf, *bounds], [*bounds, math.inf], strict=True)
            ],
        }


VERSIONS = Newest(
    key={"name": "text"}, columns={"label": "text", "price": "numeric(10,2)"}, order_by={"at": "timestamptz"}, deleted="ok"
)


def newest(rows: list[Row]) -> Row:
    def place(row: Row) -> list[tuple[bool, Any]]:
        parts = [row["at"], row["ok"], encoded(row["label"]), row["price"]]
        return [(part is not None, 0 if part is None else part) for part in parts]

    last = max(rows, key=place)
    return {column: last[column] for column in ("at", "ok", "label", "price")}


@pytest.mark.promise("I16", "decision:0028")
def test_any_split_and_order_of_the_rows_gives_the_value_of_one_pass(tables: Tables) -> None:
    """By key and in all, beginning with no rows; of newest rows, too, whose parts come in every order."""
    rng = random.Random(5)
    rows, per_part = rows_of(rng.randint(0, 10**9), 120), 40
    parts = [rows[start : start + per_part] for start in range(0, 120, per_part)]
    states = {"per_name": State({"name": "text"}, AGGREGATES), "overall": State(aggregates=AGGREGATES), "newest": VERSIONS}
    pipeline = tables.declare_over(SCHEMA, None, states=states)
    orders = [*permutations(parts)]
    batches = [[row | {"name": f"{row['name']} {n}"} for n, order in enumerate(orders) for row in order[i]] for i in range(3)]
    tables.put_rows(SCHEMA, [], *batches)
    tables.run_mixed(pipeline, ["chosen", "safe", "safe", "chosen"])
    everything = [row for batch in batches for row in batch]
    names = {row["name"] for row in everything}

    def kept(state: str) -> dict[str, Row]:
        without = ("name", "_sum", "_count", "_squares")
        found = tables.rows(pipeline, state)
        return {row.get("name"): {name: row[name] for name in row if not name.endswith(without)} for row in found}

    by_name = {name: [row for row in everything if row["name"] == name] for name in names}
    assert kept("per_name") == {name: one_pass(of) for name, of in by_name.items()}
    assert kept("overall") == {None: one_pass(everything)}
    assert kept("newest") == {name: newest(of) for name, of in by_name.items()}


def test_a_key_that_gets_too_many_values_in_the_course_of_batches_stops_the_commit(tables: Tables) -> None:
    state = State(key={"name": "text"}, aggregates={"values": CollectSet("n", "bigint", most=3)})
    pipeline = tables.declare_over(SCHEMA, state)
    with StateStore.connect(tables.settings) as store:
        flow = Staged(store, pipeline.spec)
        for values in ("{1,2}", "{2,3}", "{3,4}"):
            flow.batch(per_name=[("a", values)], is_committed=False)
        with pytest.raises(Overflow, match="a key would have 4 values"):  # together they are refused
            store.commit_ready(pipeline.spec, "test")
        for txid in (1, 2):
            flow.commit(txid)
        with pytest.raises(Overflow, match="a key would have 4 values, and keeps at most 3"):
            flow.commit(3)
    assert tables.rows(pipeline) == [{"name": "a", "values": [1, 2, 3]}]
