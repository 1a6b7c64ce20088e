"""For every kind of state: after deaths around each COMMIT, of a redo too, it is what plain Python makes of the rows."""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

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


def expected(batches: list[list[Row]]) -> dict[str, Any]:
    """Compute each state in plain Python."""
    rows = [(txid, *row) for txid, batch in enumerate(batches, start=1) for row in batch]
    lines, sums, hours = Counter[str](), Counter[str](), Counter[tuple[str, datetime]]()
    for _, name, amount, second in rows:
        lines[name] += 1
        sums[name] += amount
        hours[name, datetime.fromtimestamp(second // HOUR * HOUR, UTC)] += amount
    newest = {name: max((second, amount) for _, other, amount, second in rows if other == name) for name in sums}
    return {
        "sums": sorted((name, lines[name], sums[name]) for name in sums),
        "overall": [(sum(sums.values()),)] if batches else [],
        "newest": sorted((name, amount, second) for name, (second, amount) in newest.items()),
        "versions": sorted((name, amount, second) for _, name, amount, second in rows),
        "log": sorted((txid, name, amount) for txid, name, amount, _ in rows),
        "hours": sorted((*window, amount) for window, amount in hours.items()),
    }


COLUMNS = {
    "sums": ("name", "lines", "amount"),
    "overall": ("amount",),
    "newest": ("name", "amount", "second"),
    "versions": ("name", "amount", "second"),
    "log": ("txid", "name", "amount"),
    "hours": ("name", "window_start", "amount"),
}


def check(settings: Settings, at: object) -> None:
    """Compare every state, and the changes of one, with those of the committed batches."""
    with StateStore.connect(settings) as store:
        batches = BATCHES[: store.committed("every")]
        states = {state.name: store.state_rows(state) for state in PIPELINE.spec.states}
        found = {name: sorted(tuple(row[c] for c in COLUMNS[name]) for row in rows) for name, rows in states.items()}
        gained = Counter[str]()
        for change in store.changes(PIPELINE.spec.states[0]):
            gained[change["name"]] += change["amount"] - (change["previous_amount"] or 0)
    assert found == expected(batches), at
    assert sorted(gained.items()) == [(name, amount) for name, _, amount in found["sums"]], at


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
