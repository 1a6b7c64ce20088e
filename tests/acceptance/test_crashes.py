"""For every kind of state: after deaths around each COMMIT, of a redo too, it is what DuckDB makes of the rows."""

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any

import duckdb
import pytest

from tests import steps
from tests.acceptance.test_every_source import run_once
from tests.crashes import EachPoint
from tidegate.jobs import Count, FixedBatches, History, Newest, Pipeline, Ranges, Rows, State, Sum, Tumbling
from tidegate.state_store import Settings, StateStore

HOUR = 3600
Row = tuple[str, int, int]  # name, amount, and the second at which it came
BATCHES: list[list[Row]] = [
    [("a", 1, 0), ("b", 2, 10), ("a", 3, HOUR)],
    [("a", 4, HOUR + 1), ("c", 5, 20), ("b", 6, 5), ("a", 8, 2 * HOUR), ("d", 9, 0)],
]
SECOND = {"second": "bigint"}
PIPELINE = Pipeline(
    "every",
    FixedBatches(BATCHES, {"name": "string", "amount": "bigint", **SECOND}, kind="opaque"),
    {
        "sums": State({"name": "text"}, {"lines": Count(), "amount": Sum("amount")}, kind="opaque", changes=True),
        "overall": State(aggregates={"amount": Sum("amount")}, kind="opaque"),
        "newest": Newest({"name": "text"}, {"amount": "bigint"}, SECOND, kind="opaque"),
        "versions": History({"name": "text"}, {"amount": "bigint"}, SECOND, kind="opaque"),
        "log": Rows({"name": "text", "amount": "bigint"}, range_partitions=Ranges("amount", 2)),
        "hours": State({"name": "text"}, {"amount": Sum("amount")}, kind="opaque", window=Tumbling("at", "1 hour")),
    },
    transform=lambda rows: rows.selectExpr("*", "timestamp_seconds(second) AS at"),
    retry_delay_seconds=0,
)


# What each state has, of the rows of the committed batches.
EXPECTED = {
    "sums": "SELECT name, count(*) AS lines, sum(amount) AS amount FROM lines GROUP BY name",
    "overall": "SELECT sum(amount) AS amount FROM lines HAVING count(*) > 0",
    "newest": "SELECT name, arg_max(amount, second) AS amount, max(second) AS second FROM lines GROUP BY name",
    "versions": "SELECT name, amount, second FROM lines",
    "log": "SELECT txid, name, amount FROM lines",
    "hours": f"SELECT name, second // {HOUR} * {HOUR} AS window_start, sum(amount) AS amount FROM lines GROUP BY ALL",
}


@cache
def expected(committed: int) -> dict[str, tuple[list[str], list[Any]]]:
    """Return what DuckDB makes of so many batches: by state, its columns and its rows in their order."""
    with duckdb.connect() as oracle:
        oracle.execute("CREATE TABLE lines (txid int, name text, amount int, second int)")
        for txid, batch in enumerate(BATCHES[:committed], start=1):
            oracle.executemany("INSERT INTO lines VALUES (?, ?, ?, ?)", [(txid, *row) for row in batch])
        return {name: ((found := oracle.sql(query)).columns, sorted(found.fetchall())) for name, query in EXPECTED.items()}


def check(settings: Settings, at: object) -> None:
    """Compare every state, and the changes of one, with those of the committed batches."""
    with StateStore.connect(settings) as store:
        oracle = expected(store.committed("every"))
        for state in PIPELINE.spec.states:
            columns, rows = oracle[state.name]
            found = [[row[column] for column in columns] for row in store.state_rows(state)]
            found = [tuple(v.timestamp() if isinstance(v, datetime) else v for v in row) for row in found]
            assert sorted(found) == rows, (state.name, at)
        gained = Counter[str]()
        for change in store.changes(PIPELINE.spec.states[0]):
            gained[change["name"]] += change["amount"] - (change["previous_amount"] or 0)
        assert gained == {name: amount for name, _, amount in oracle["sums"][1]}, at


@pytest.mark.promise("I2", "I13", "fault:process-dies-at-any-statement:commit")
def test_deaths_around_each_commit_leave_every_kind_of_state_whole(settings: Settings, register: Callable[..., None]) -> None:
    """All kinds in one pipeline, in one history: of plan, process and commit, and then of a redo of the last batch."""
    register(PIPELINE)
    deaths = EachPoint()
    for crash in deaths.deaths(lambda: run_once(settings, PIPELINE, f"run {len(deaths.points) // 2}")):
        check(settings, crash)
    check(settings, deaths.points)
    before = len(deaths.points)
    for crash in deaths.deaths(lambda: steps.redo(settings, PIPELINE, len(BATCHES), owner="test", reason="it was wrong")):
        check(settings, crash)
    check(settings, deaths.points)
    redone = deaths.points[before:]
    for state in ("sums", "newest", "versions", "log", "hours"):
        assert any(f"INSERT INTO state.{state}" in point for point in redone), redone
