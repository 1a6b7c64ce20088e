"""Windows over real files through Spark, against plain Python, pandas and DuckDB over the raw rows."""

import random
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from tests import steps
from tests.jobs.conftest import Tables
from tests.windows_model import Event, Model
from tidegate.jobs import Count, Files, Max, Pipeline, Session, Sliding, State, Sum, Tumbling
from tidegate.jobs.windows import Window
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import BadKey

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
    """Return a state per window; the last one is without a key."""
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


@pytest.mark.soak
def test_a_row_without_a_time_fails_its_batch_or_is_set_aside(tables: Tables) -> None:
    source = Files("inbox", schema=SCHEMA)
    window = WINDOWS["sliding"]
    pipeline = tables.declare(source, states={"per_name": State(**KEYED, window=window)})
    tables.put_rows(SCHEMA, [("a", 0, 1), ("b", None, 2)])
    assert tables.refused(pipeline, BadKey, tables.plan(pipeline, "run")[0]).startswith(
        "State per_name: the event time is NULL in 1 group(s), which are in no window."
    )
    tolerant = tables.declare(source, states={"per_name": State(**KEYED, window=window)}, on_poison="quarantine", version=2)
    tables.run(tolerant, "again")
    assert [(row["key"], row["events"]) for row in tables.rows(tolerant)] == [("a", 1)] * window.spec.per_piece
    with StateStore.connect(tables.settings) as store:
        (record,) = store.quarantined("inbox")
    assert (record["reason"], record["state"]) == ("time column at is NULL", None)


def test_times_without_a_zone_and_days(tables: Tables) -> None:
    times = [datetime(2026, 3, 29, hour, minute) for hour in (0, 2, 3, 23) for minute in (0, 59)]
    schema = {"at": "timestamp_ntz", "day": "date"}
    state = State(
        aggregates={"events": Count(), "last": Max("at", "timestamp")}, window=Tumbling("at", "1 day", type="timestamp")
    )
    bare = State(window=Session("at", "1 hour", type="timestamp"))
    pipeline = tables.declare_over(schema, None, states={"per_name": state, "bare": bare})
    tables.put_rows(schema, [(time, date(2026, 3, 29)) for time in times])
    tables.run(pipeline)
    # Without aggregates, a session is when it began and ended.
    assert [(row["window_start"], row["last_event"]) for row in tables.rows(pipeline, "bare")] == [
        (times[0], times[1]),
        (times[2], times[5]),
        (times[6], times[7]),
    ]
    assert tables.rows(pipeline) == [
        {
            "window_start": datetime(2026, 3, 29),
            "window_end": datetime(2026, 3, 30),
            "last_event": times[-1],
            "corrections": 0,
            "events": len(times),
            "last": times[-1],
        }
    ]
