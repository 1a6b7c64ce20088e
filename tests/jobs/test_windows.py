"""Windows over real files through Spark, against plain Python, pandas and DuckDB over the raw rows."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from tests import steps
from tests.jobs.conftest import Tables
from tests.windows_model import Event, Model
from tidegate.jobs import Count, Files, Pipeline, Session, Sliding, State, Sum, Tumbling
from tidegate.jobs.windows import Window
from tidegate.state_store import StateStore

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
MINUTE, HOUR = 60_000_000, 3_600_000_000
SCHEMA = {"key": "string", "at": "timestamp", "amount": "bigint"}
AGGREGATES = {"events": Count(), "amount": Sum("amount")}
FINAL = {"final_after": "2 hours", "emit_final": True}
WINDOWS: dict[str, Window] = {
    "hourly": Tumbling("at", "1 hour", offset="10 minutes", **FINAL),
    "sliding": Sliding("at", "1 hour", "20 minutes", **FINAL),
    "visits": Session("at", "30 minutes", **FINAL),
    "all_visits": Session("at", "25 minutes"),
}
KEYED = {"key": {"key": "text"}, "aggregates": AGGREGATES}


def states_of(windows: dict[str, Window]) -> dict[str, State]:
    *first, last = windows
    keyed = {name: State(**KEYED, window=windows[name]) for name in first}
    return {**keyed, last: State(aggregates={"events": Count(), "amount": Sum("amount")}, window=windows[last])}


def of_row(row: Any, *, with_corrections: bool = False) -> tuple[Any, ...]:
    times = [(row[name] - EPOCH) // MICROSECOND for name in ("window_start", "window_end", "last_event")]
    more = [row["corrections"]] if with_corrections else []
    return (row.get("key"), *times, row["events"], row["amount"], *more)


def random_batches(seed: int, count: int) -> list[list[Event]]:
    """Return batches of events that mostly go forward, with many at bounds, and before and after 1970."""
    rng = random.Random(seed)
    batches: list[list[Event]] = [[]]
    for number in range(240):
        back = rng.choice([0, 0, 0, 10, 25, 30, 61, 250])
        time = (number * 4 - 480 - back) * MINUTE + rng.choice([0, 0, -1, 1])
        batches[-1].append((rng.choice("abc"), time, rng.choice([None, 3, -1, 2**40])))
        if number % (240 // count) == 0 and number:
            batches.append([])
    return batches


def test_windows_are_those_of_plain_python(tables: Tables) -> None:
    """By two routes; each row is followed, although a sliding window counts it several times."""
    batches = random_batches(6, 2)
    pipeline = tables.declare(Files("inbox", schema=SCHEMA), states=states_of(WINDOWS))
    tables.put_rows(SCHEMA, *batches)
    for number, txid in enumerate(tables.plan(pipeline, "run")):
        routing = steps.ROUTINGS[("chosen", "safe")[number % 2]]
        steps.process(tables.settings, pipeline, txid, owner="test", routing=routing)
        steps.commit(tables.settings, pipeline, txid, owner="test")
    for name, window in WINDOWS.items():
        model = Model(window.spec)
        for batch in batches:
            model.add([(None, *event[1:]) for event in batch] if name == "all_visits" else batch)
        found = [of_row(row, with_corrections=True) for row in tables.rows(pipeline, name)]
        assert sorted(found, key=repr) == model.rows(), name
        if window.spec.emits:
            assert any(model.late), name
            assert recorded(tables, pipeline, name) == model.recorded(), name


def recorded(tables_: Tables, pipeline: Pipeline, state: str) -> dict[int, list[tuple[Any, ...]]]:
    spec = pipeline.spec.state(state)
    assert spec is not None
    found: dict[int, list[tuple[Any, ...]]] = {}
    with StateStore.connect(tables_.settings) as store:
        for row in store.changes(spec):
            found.setdefault(row["txid"], []).append(of_row(row))
    return {txid: sorted(rows, key=repr) for txid, rows in found.items()}
