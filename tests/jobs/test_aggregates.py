"""Every aggregate and window: any split and order of the rows into batches gives the value of one pass over all rows (I16)."""

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext
from functools import reduce
from itertools import groupby, pairwise, permutations
from operator import and_, itemgetter, or_, xor
from statistics import mean, pvariance, variance
from typing import Any

import pytest

from tests.jobs.conftest import Tables
from tests.windows_model import MINUTE, Model, by_txid, events_of, of_row
from tidegate import jobs
from tidegate.jobs.windows import Window
from tidegate.state_store import StateStore

Row = dict[str, Any]
# What Spark, CSV, arrays and JSON might take for something else.
LABELS = ["", "a", "A", "b,c", 'say "x"', "back\\slash", "{curly}", "NULL", "null", " ", "ä", "𝄞", "line\nbreak", None]
COLUMNS: dict[str, tuple[str, Callable[[random.Random], Any]]] = {
    "name": ("string", lambda rng: rng.choice(["a", "b", "only NULL"])),
    "n": ("bigint", lambda rng: rng.choice([0, -1, 7, 2**62, -(2**62), rng.randint(-9, 9)])),
    "small": ("int", lambda rng: rng.randint(-(2**31), 2**31 - 1)),
    "price": ("decimal(10,2)", lambda rng: Decimal(rng.randint(-999, 999)).scaleb(-2)),
    "ratio": ("double", lambda rng: rng.randint(-4000, 4000) / 1000),
    "ok": ("boolean", lambda rng: rng.random() < 0.8),
    "label": ("string", lambda rng: rng.choice(LABELS)),
    "at": ("timestamp", lambda rng: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randint(0, 3))),
    "day": ("date", lambda rng: date(2026, 1, rng.randint(1, 5))),
    "moment": ("bigint", lambda rng: rng.randint(0, 30)),
}
SCHEMA = {name: kind for name, (kind, _) in COLUMNS.items()}
BY = {"at": "timestamptz", "n": "bigint"}
AGGREGATES = {
    "lines": jobs.Count(),
    "mean": jobs.Avg("n"),
    "mean_price": jobs.Avg("price", scale=2, digits=4),
    "mean_ratio": jobs.Avg("ratio", scale=3, digits=8),
    "spread": jobs.Variance("small"),
    "spread_all": jobs.Variance("price", scale=2, digits=5, population=True),
    "deviation": jobs.StdDev("ratio", scale=3),
    "all_ok": jobs.BoolAnd("ok"),
    "any_ok": jobs.BoolOr("ok"),
    "bits_all": jobs.BitAnd("n"),
    "bits_any": jobs.BitOr("small", "integer"),
    "bits_odd": jobs.BitXor("n"),
    "first_label": jobs.First("label", "text", BY),
    "last_label": jobs.Last("label", "text", BY),
    "labels": jobs.CollectSet("label", "text"),
    "days": jobs.CollectSet("day", "date"),
    "prices": jobs.CollectList("price", "numeric(10,2)", most=1000),
    "moments": jobs.CollectList("at", "timestamptz", most=1000),
    "least": jobs.Smallest("n", 3),
    "most": jobs.Largest("label", 2, "text"),
    "shares": jobs.Histogram("ratio", ["-0.5", 0, "0.125", 3], "numeric(10,3)"),
}
VERSIONS = jobs.History({"name": "text"}, {"day": "date"}, {"moment": "bigint"}, deleted="ok")
STATES = {
    "per_name": jobs.State({"name": "text"}, AGGREGATES),
    "overall": jobs.State(aggregates=AGGREGATES),
    "newest": jobs.Newest({"name": "text"}, {"label": "text", "price": "numeric(10,2)"}, {"at": "timestamptz"}, deleted="ok"),
    "versions": VERSIONS,
    "joined": replace(VERSIONS, collapse=True),
}


def row_of(rng: random.Random) -> Row:
    kept = ("name", "moment")
    row = {name: value(rng) if name in kept or rng.random() < 0.8 else None for name, (_, value) in COLUMNS.items()}
    return {name: row[name] if name in kept or row["name"] != "only NULL" else None for name in row}


def place(row: Row, *columns: str, null_is_least: bool = True) -> list[Any]:
    parts = [row[name].encode() if isinstance(row[name], str) else row[name] for name in columns]
    return [((part is not None) == null_is_least, 0 if part is None else part) for part in parts]


def one_pass(rows: list[Row]) -> Row:
    def known(column: str, combine: Callable[[Any], Any], convert: Callable[[Any], Any] = lambda v: v, least: int = 1) -> Any:
        found = [convert(row[column]) for row in rows if row[column] is not None]
        return combine(found) if len(found) >= least else None

    def exact(column: str, combine: Callable[[Any], Any], digits: int, least: int = 1) -> Any:
        with localcontext(prec=80):
            value = known(column, combine, lambda v: Decimal(str(v)), least)
            return value if value is None else value.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)

    bounds = pairwise(map(Decimal, ("-Infinity", "-0.5", "0", "0.125", "3", "Infinity")))
    ratios = known("ratio", list, lambda v: Decimal(str(v)), least=0)
    ends = {
        "first": min(rows, key=lambda row: place(row, "at", "n", "label", null_is_least=False)),
        "last": max(rows, key=lambda row: place(row, "at", "n", "label")),
    }
    columns = {"label": "label", "label_at": "at", "label_n": "n"}
    return {
        "lines": len(rows),
        "mean": exact("n", mean, 6),
        "mean_price": exact("price", mean, 4),
        "mean_ratio": exact("ratio", mean, 8),
        "spread": exact("small", variance, 6, least=2),
        "spread_all": exact("price", pvariance, 5),
        "deviation": exact("ratio", lambda values: variance(values).sqrt(), 6, least=2),
        "all_ok": known("ok", all),
        "any_ok": known("ok", any),
        "bits_all": known("n", lambda values: reduce(and_, values)),
        "bits_any": known("small", lambda values: reduce(or_, values)),
        "bits_odd": known("n", lambda values: reduce(xor, values)),
        **{f"{which}_{column}": row[name] for which, row in ends.items() for column, name in columns.items()},
        "labels": known("label", lambda values: sorted(set(values), key=str.encode), least=0),
        "days": known("day", lambda values: sorted(set(values)), least=0),
        "prices": known("price", sorted, least=0),
        "moments": known("at", sorted, least=0),
        "least": known("n", lambda values: sorted(values)[:3], least=0),
        "most": known("label", lambda values: sorted(values, key=str.encode, reverse=True)[:2], least=0),
        "shares": [sum(low <= ratio < high for ratio in ratios) for low, high in bounds],
    }


def history(rows: list[Row], *, collapses: bool) -> list[tuple[Any, ...]]:
    """Return moment, day and end of each version of a key that is shown."""
    rows = sorted(rows, key=lambda row: place(row, "moment", "ok", "day"))
    versions = [[*same][-1] for _, same in groupby(rows, key=itemgetter("moment"))]
    if collapses:
        versions = [next(same) for _, same in groupby(versions, key=lambda row: (bool(row["ok"]), row["day"]))]
    ends = [*(row["moment"] for row in versions[1:]), None]
    return [(row["moment"], row["day"], end) for row, end in zip(versions, ends, strict=True) if not row["ok"]]


@pytest.mark.promise("I16", "decision:0028")
def test_any_split_and_order_of_the_rows_gives_the_value_of_one_pass(tables: Tables) -> None:
    """By key and in all, beginning with no rows, of parts that come in every order; of versions, too."""
    rng = random.Random(5)
    rows, size = [row_of(rng) for _ in range(120)], 40
    orders = [*permutations(rows[start : start + size] for start in range(0, 120, size))]
    batches = [[row | {"name": f"{row['name']} {n}"} for n, order in enumerate(orders) for row in order[i]] for i in range(3)]
    pipeline = tables.declare_over(SCHEMA, None, states=STATES)
    tables.put_rows(SCHEMA, [], *batches)
    tables.run_mixed(pipeline, ["chosen", "safe", "safe", "chosen"])
    everything = [row for batch in batches for row in batch]
    by_name = {name: [row for row in everything if row["name"] == name] for name in {row["name"] for row in everything}}

    def kept(state: str) -> dict[str, Row]:
        without = ("name", "_sum", "_count", "_squares")
        found = tables.rows(pipeline, state)
        return {row.get("name"): {name: row[name] for name in row if not name.endswith(without)} for row in found}

    assert kept("per_name") == {name: one_pass(of) for name, of in by_name.items()}
    assert kept("overall") == {None: one_pass(everything)}
    columns = ("at", "ok", "label", "price")
    newest = {name: max(of, key=lambda row: place(row, *columns)) for name, of in by_name.items()}
    assert kept("newest") == {name: {column: row[column] for column in columns} for name, row in newest.items()}
    for state in ("versions", "joined"):
        shown = [(row["name"], row["moment"], row["day"], row["valid_to"]) for row in tables.rows(pipeline, state)]
        expected = [(name, *row) for name, of in by_name.items() for row in history(of, collapses=state == "joined")]
        assert sorted(shown, key=repr) == sorted(expected, key=repr)


FINAL = {"final_after": "2 hours", "emit_final": True}
WINDOWS: dict[str, Window] = {
    "hourly": jobs.Tumbling("at", "1 hour", offset="10 minutes", **FINAL),
    "sliding": jobs.Sliding("at", "1 hour", "20 minutes", **FINAL),
    "visits": jobs.Session("at", "30 minutes", **FINAL),
    "all_visits": jobs.Session("at", "25 minutes"),
}


def test_windows_are_those_of_plain_python(tables: Tables, store: StateStore) -> None:
    """By two routes; each row is followed, although a sliding window counts it several times. Many events are at bounds."""
    events = [(key or "c", time, amount) for key, time, amount in events_of(6, 240, origin=-1000 * MINUTE)]
    batches, aggregates = [events[:120], events[120:]], {"events": jobs.Count(), "amount": jobs.Sum("amount")}
    keys = {name: {} if name == "all_visits" else {"key": "text"} for name in WINDOWS}
    states = {name: jobs.State(keys[name], aggregates, window=window) for name, window in WINDOWS.items()}
    schema = {"key": "string", "at": "timestamp", "amount": "bigint"}
    pipeline = tables.declare_over(schema, None, states=states)
    tables.put_rows(schema, *batches)
    tables.run_mixed(pipeline, ["chosen", "safe"])
    for state in pipeline.spec.states:
        model = Model(state.window)
        for batch in batches:
            model.add(batch if keys[state.name] else [(None, *event[1:]) for event in batch])
        assert sorted(map(of_row, tables.rows(pipeline, state.name)), key=repr) == model.rows(), state.name
        if state.window.emits:
            assert any(model.late), state.name
            assert by_txid(store.changes(state)) == model.recorded(), state.name
