"""Windows over real files through Spark, against plain Python over the raw rows."""

import random

from tests import steps
from tests.jobs.conftest import Tables
from tests.windows_model import MINUTE, Event, Model, by_txid, of_row
from tidegate.jobs import Count, Session, Sliding, State, Sum, Tumbling
from tidegate.jobs.windows import Window
from tidegate.state_store import StateStore

SCHEMA = {"key": "string", "at": "timestamp", "amount": "bigint"}
FINAL = {"final_after": "2 hours", "emit_final": True}
WINDOWS: dict[str, Window] = {
    "hourly": Tumbling("at", "1 hour", offset="10 minutes", **FINAL),
    "sliding": Sliding("at", "1 hour", "20 minutes", **FINAL),
    "visits": Session("at", "30 minutes", **FINAL),
    "all_visits": Session("at", "25 minutes"),
}


def test_windows_are_those_of_plain_python(tables: Tables) -> None:
    """By two routes; each row is followed, although a sliding window counts it several times. Many events are at bounds."""
    rng, events = random.Random(6), list[Event]()
    for number in range(240):
        back = rng.choice([0, 0, 0, 10, 25, 30, 61, 250])
        time = (number * 4 - 480 - back) * MINUTE + rng.choice([0, 0, -1, 1])
        events.append((rng.choice("abc"), time, rng.choice([None, 3, -1, 2**40])))
    batches = [events[:120], events[120:]]
    aggregates = {"events": Count(), "amount": Sum("amount")}
    keys = {name: {} if name == "all_visits" else {"key": "text"} for name in WINDOWS}
    states = {name: State(keys[name], aggregates, window=window) for name, window in WINDOWS.items()}
    pipeline = tables.declare_over(SCHEMA, None, states=states)
    tables.put_rows(SCHEMA, *batches)
    for txid, route in zip(tables.plan(pipeline, "run"), ("chosen", "safe"), strict=True):
        steps.complete(tables.settings, pipeline, txid, routing=steps.ROUTINGS[route])
    with StateStore.connect(tables.settings) as store:
        for state in pipeline.spec.states:
            assert state.window
            model = Model(state.window)
            for batch in batches:
                model.add(batch if keys[state.name] else [(None, *event[1:]) for event in batch])
            assert sorted(map(of_row, tables.rows(pipeline, state.name)), key=repr) == model.rows(), state.name
            if state.window.emits:
                assert any(model.late), state.name
                assert by_txid(store.changes(state)) == model.recorded(), state.name
