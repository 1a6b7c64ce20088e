"""Windows through the real ledger, against plain Python: any split and order of events, late ones and redos."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.conformance.conftest import AGGREGATES as EVERY_AGGREGATE
from tests.conformance.conftest import Flow, Flows, Stream, fold_all, partial
from tests.store import Attempt, LedgerReader, Mend, Redo, StateSpec, event_windows, measures
from tests.windows_model import EPOCH, HOUR, MINUTE, Event, Model, by_txid, events_of, of_row, piece_of, sessions_of
from tidegate import migrations
from tidegate.jobs import Count, Pipeline, Session, Sliding, State, Sum, Tumbling
from tidegate.jobs.windows import Window
from tidegate.state_store.base.errors import AccessRefused, GuardMismatch, RangeRefused

KEY = {"key": "text"}
AGGREGATES = {"events": Count(), "amount": Sum("amount")}
# What a task stages of the events of a piece.
Kept = Callable[[Sequence[Event]], Sequence[Any]]


def declare(window: Window, *, source: Any = "transactional", **changes: Any) -> Pipeline:
    state = State(**{"key": KEY, "aggregates": AGGREGATES, "window": window, **changes})
    return Pipeline("windows", Stream(source), {"per_key": state})


def count_and_sum(events: Sequence[Event]) -> Sequence[Any]:
    return [len(events), sum(amount or 0 for _, _, amount in events)]


class Windows(Flow):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.models = {state.name: Model(state.window) for state in self.spec.states if state.window}

    def prepare(self, events: Sequence[Event], kept: Kept = count_and_sum) -> int:
        """Plan a batch and seal an attempt with these events; return its txid."""
        self.finish_events(self.start(txid := self.next()), events, kept)
        return txid

    def finish_events(self, attempt: Attempt, events: Sequence[Event], kept: Kept = count_and_sum) -> None:
        pieces = [(state.name, _pieces(state, events, kept)) for state in self.spec.states]
        # As two tasks would: which of them has a piece does not matter.
        halves = [(name, rows[number::2], number) for name, rows in pieces for number in (0, 1)]
        self.seal(attempt, *(self.stage(attempt, name, half, partition=number) for name, half, number in halves if half))

    def count(self, events: Sequence[Event], kept: Kept = count_and_sum) -> int:
        self.commit(txid := self.prepare(events, kept))
        self.model(events)
        return txid

    def model(self, events: Sequence[Event]) -> None:
        for state in self.spec.states:
            self.models[state.name].add([event if len(state.keys) > 1 else (None, *event[1:]) for event in events])

    def check_models(self, txid: int) -> None:
        for name, model in self.models.items():
            assert self.found(name) == model.rows(), (txid, name)
            assert self.late(txid, name) == model.late[-1], (txid, name)
            if model.window.emits:
                assert self.emitted(name) == model.recorded(), (txid, name)

    def found(self, state: str = "per_key") -> list[tuple[Any, ...]]:
        return sorted(map(of_row, self.rows(state)), key=repr)

    def late(self, txid: int, state: str = "per_key") -> list[tuple[Any, ...]]:
        records = list(self.store.quarantined(self.spec.name, txid=txid))
        assert [record["number"] for record in records] == list(range(1, len(records) + 1))
        assert all("final" in record["reason"] for record in records)
        return sorted((of_row(json.loads(record["payload"])) for record in records if record["state"] == state), key=repr)

    def emitted(self, state: str = "per_key") -> dict[int, list[tuple[Any, ...]]]:
        return by_txid(self.store.changes(self.spec.state(state)))


def _pieces(state: StateSpec, events: Sequence[Event], kept: Kept) -> list[list[Any]]:
    window: Any = state.window
    pieces: dict[Any, list[Event]] = {}
    for event in events:
        own = [event[0]] if len(state.keys) > 1 else []
        pieces.setdefault((*own, piece_of(window, event[1])), []).append(event)
    rows = []
    for (*own, piece), found in pieces.items():
        times = [time for _, time, _ in found]
        start, end = (min(times), max(times) + window.size) if window.is_session else (piece, piece + window.size)
        rows.append([*own, *(EPOCH + timedelta(microseconds=each) for each in (start, end, max(times))), 0, *kept(found)])
    return rows


def batches_of(seed: int, events: list[Event]) -> list[list[Event]]:
    """Cut events into batches of random sizes, some of them empty, each in another order."""
    rng, batches, rest = random.Random(seed), [], list(events)
    while rest:
        size = rng.choice([0, 1, 3, 8, 20])
        batch, rest = rest[:size], rest[size:]
        batches.append(rng.sample(batch, len(batch)))
    return batches


Begin = Callable[[Pipeline], Windows]


@pytest.fixture
def windows(flows: Flows) -> Begin:
    return lambda pipeline: flows(pipeline, Windows)


FINAL: dict[str, Any] = {"final_after": "1 hour", "emit_final": True}
WINDOWS: dict[str, Window] = {
    "hours": Tumbling("at", "1 hour"),
    "sessions": Session("at", "30 minutes"),
    "from_an_offset_final_at_once": Tumbling("at", "1 hour", offset="7 minutes", final_after="0 seconds", emit_final=True),
    "sliding_final_later": Sliding("at", "1 hour", "15 minutes", offset="5 minutes", **FINAL),
    "sliding_removed_later": Sliding("at", "1 hour", "15 minutes", **FINAL, keep="2 hours"),
    "sessions_final_later": Session("at", "30 minutes", **FINAL),
    "sessions_removed_at_once": Session("at", "30 minutes", **FINAL, keep="1 hour"),
}
CHANGE_OF_CLOCKS = datetime(2026, 3, 29, tzinfo=UTC)
ORIGINS = (-(10**6) * HOUR - 13, 0, (CHANGE_OF_CLOCKS - EPOCH) // timedelta(microseconds=1))


@pytest.mark.promise("I22", "decision:0032")
def test_windows_after_each_batch_are_those_of_plain_python(windows: Begin) -> None:
    """Also where all rows share one key, and where a key may be NULL."""
    states = {name: State(KEY, AGGREGATES, window=window, null_keys=True) for name, window in WINDOWS.items()}
    states["of_all"] = State({}, AGGREGATES, window=WINDOWS["sessions"])
    f = windows(Pipeline("windows", Stream("transactional"), states))
    seen: list[Event] = []
    corrected: set[str] = set()
    for seed, origin in enumerate(ORIGINS):
        events = events_of(seed, 40, origin=origin)
        seen += events
        for batch in batches_of(seed, events):
            f.check_models(f.count(batch))
            corrected |= {name for name, model in f.models.items() if any(kept.corrections for kept in model.kept)}
    sessions = [each.row for each in sessions_of(f.models["sessions"].window, seen)]
    assert [row[:-1] for row in f.found("sessions")] == sorted(sessions, key=repr)
    assert f.store.lag(["windows"])[0].quarantined == 0, "what is late does not wait for a person"
    assert all(any(model.late) for model in f.models.values() if model.window.emits), "no event was late: nothing was tested"
    assert corrected >= {"hours", "sessions", "sliding_final_later", "sessions_final_later"}
    assert [name for name, model in f.models.items() if model.removed_until] == [*WINDOWS][4::2]


@pytest.mark.promise("decision:0032")
def test_every_aggregate_joins_pieces_as_it_joins_batches(windows: Begin) -> None:
    of = {"sliding": Sliding("at", "1 hour", "15 minutes", offset="5 minutes"), "sessions": WINDOWS["sessions"]}
    states = {name: State(KEY, EVERY_AGGREGATE, window=window, null_keys=True) for name, window in of.items()}
    f = windows(Pipeline("windows", Stream("transactional"), states))
    for batch in batches_of(8, [(key, time, amount and amount % 7 - 1) for key, time, amount in events_of(8, 60)]):
        f.count(batch, kept=lambda events: partial([(key, amount) for key, _, amount in events]))
    for name, model in f.models.items():
        rows = [(row["key"], row["window_start"] - EPOCH, *(row[a] for a in EVERY_AGGREGATE)) for row in f.rows(name)]
        kept = [(k, [(key, amount) for key, _, amount in k.events]) for k in model.kept]
        expected = [(k.key, timedelta(microseconds=k.start), *fold_all(records)) for k, records in kept]
        assert sorted(rows, key=repr) == sorted(expected, key=repr)


@pytest.mark.promise("I22")
def test_batches_that_are_merged_together_correct_windows_as_if_one_by_one(windows: Begin) -> None:
    f = windows(declare(WINDOWS["hours"], null_keys=True))
    batches = [*batches_of(1, events_of(1, 60)), [("a", MINUTE, 1)]]
    for batch in batches:
        f.prepare(batch)
        f.model(batch)
    assert len(f.store.commit_ready(f.spec, "test", max_batches=100)) == len(batches)
    assert f.found() == f.models["per_key"].rows()
    assert any(row[-1] > 1 for row in f.found())


def test_a_redo_takes_back_windows_watermark_and_what_became_final(windows: Begin) -> None:
    f = windows(declare(Tumbling("at", "1 hour", **FINAL, keep="1 hour"), source="opaque", kind="opaque", null_keys=True))
    rng = random.Random(3)
    batches = [batch for batch in batches_of(3, events_of(3, 45)) if batch]
    for number, batch in enumerate(batches):
        if number not in (0, 2, len(batches) - 1):
            f.check_models(f.count(batch))
            continue
        # The first attempt has events of the far future, which make everything final; the second one lacks them.
        txid = f.prepare([*batch, ("a", rng.randint(10**4, 10**5) * HOUR, 9), ("b", batch[0][1], 7)])
        f.commit(txid)
        f.finish_events(f.start(txid, mode="redo"), batch)
        f.owner.redo_batch(f.spec, txid, Redo("an operator", "it was wrong"))
        f.model(batch)
        f.check_models(txid)
    assert any(f.models["per_key"].late)


@pytest.mark.promise("I22")
def test_a_moment_at_a_bound_is_on_the_side_that_is_documented(windows: Begin) -> None:
    f = windows(declare(Tumbling("at", "1 hour", **FINAL, keep="2 hours")))
    first, second, third = (("a", hour * HOUR, (hour + 1) * HOUR) for hour in (0, 1, 2))
    f.count([("a", 0, 1), ("a", HOUR, 1)])
    f.count([("a", 1, 1)])
    assert f.found() == [(*first, 1, 2, 2, 1), (*second, HOUR, 1, 1, 0)], "it had ended, and is corrected"
    f.count([("a", 2 * HOUR, 1)])
    assert f.emitted() == {3: [(*first, 1, 2, 2)]}
    txid = f.count([("a", 2, 7), ("a", HOUR + 1, 1), ("a", 2 * HOUR + 1, 1)])
    assert f.late(txid) == [(*first, 2, 1, 7)]
    assert f.found() == [(*first, 1, 2, 2, 1), (*second, HOUR + 1, 2, 2, 1), (*third, 2 * HOUR + 1, 2, 2, 0)]
    f.count([("a", 3 * HOUR, 1)])
    assert len(f.found()) == 4, "the watermark before it was 2 hours and a moment"
    f.count([("a", 2 * HOUR + 2, 1)])
    assert sorted(row[1] for row in f.found()) == [HOUR, 2 * HOUR, 3 * HOUR], "the watermark before it was 3 hours"
    assert f.emitted() == {3: [(*first, 1, 2, 2)], 5: [(*second, HOUR + 1, 2, 2)]}
    assert len(f.late(f.count([("a", 2 * HOUR - 1, 7)]))) == 1, "the watermark is that of 3 hours still"


@pytest.mark.promise("I22")
def test_sessions_a_whole_gap_apart_are_two(windows: Begin) -> None:
    f = windows(declare(WINDOWS["sessions"]))
    f.count([("clock", 60 * MINUTE, 1)])
    f.count([("forward", 0, 1), ("back", 30 * MINUTE, 1), ("at once", 0, 1), ("at once", 30 * MINUTE, 1)])
    f.count([("forward", 30 * MINUTE, 1), ("back", 0, 1)])
    keys = ("at once", "back", "forward")
    own = [(row[0], row[1] // MINUTE, row[2] // MINUTE, row[-1]) for row in f.found() if row[0] in keys]
    assert own == [(key, start, start + 30, 1) for key in keys for start in (0, 30)], "none has changed another"
    f.count([(key, 15 * MINUTE, 1) for key in keys])
    joined = [row for row in f.found() if row[0] in keys]
    assert joined == [(key, 0, 60 * MINUTE, 30 * MINUTE, 3, 3, 3) for key in keys]


@pytest.mark.promise("I22")
def test_what_overlaps_a_final_session_is_late_also_when_that_is_removed(windows: Begin) -> None:
    """The piece alone would still be open: its session is final, and gone after the next batch."""
    f = windows(declare(WINDOWS["sessions_removed_at_once"]))
    f.count([("a", 0, 1)])
    f.count([("clock", 90 * MINUTE, 1)])
    late = ("a", 20 * MINUTE, 50 * MINUTE, 20 * MINUTE, 1, 7)
    assert f.late(f.count([("a", 20 * MINUTE, 7)])) == [late], "the session from 0 to 30 is final"
    assert [row[0] for row in f.found()] == ["clock"], "it is removed"
    assert f.late(f.count([("a", 20 * MINUTE, 7)])) == [late], "none that ended until 30 is kept"
    assert [row[0] for row in f.found()] == ["clock"]
    assert f.emitted() == {2: [("a", 0, 30 * MINUTE, 0, 1, 1)]}


def test_sums_near_the_limit_of_their_type_count(windows: Begin) -> None:
    """What adds up to a possible value is never refused because of how it was divided into pieces."""
    states = {name: State(KEY, AGGREGATES, window=WINDOWS[name]) for name in ("hours", "sessions")}
    f = windows(Pipeline("windows", Stream("transactional"), states))
    most = 2**63 - 1
    f.count([("a", 50 * MINUTE, most)])
    f.count([("a", 58 * MINUTE, -most), ("a", 59 * MINUTE, most)])
    assert [max(row[5] for row in f.found(name)) for name in states] == [most, most]


@pytest.mark.promise("limit:REMOVED_AT_ONCE", "decision:0041")
def test_windows_that_are_kept_for_a_time_later_are_removed_by_and_by(
    windows: Begin, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept_for(keep: str | None) -> Pipeline:
        return declare(Tumbling("at", "1 hour", final_after="0 seconds", keep=keep))

    monkeypatch.setattr(event_windows, "REMOVED_AT_ONCE", 4)
    f = windows(kept_for(None))
    f.count([(key, hour * HOUR, 1) for hour in range(10) for key in "ab"])
    assert "removed" not in str(f.store.event_time(f.spec.states[0]))
    f.spec = kept_for("5 hours").spec
    txid = f.prepare([("a", 9 * HOUR, 1)])
    with pytest.raises(AccessRefused, match=r"permission denied for table per_key\. Run: tidegate migrate, which grants"):
        f.commit(txid)
    register(kept_for("5 hours"))
    remaining = []
    f.commit(txid)
    for _ in range(4):
        remaining.append(sorted({row[1] // HOUR for row in f.found()}))
        f.count([("a", 9 * HOUR, 1)])
    assert remaining == [list(range(first, 10)) for first in (2, 4, 4, 4)]
    progress = f.store.event_time(f.spec.states[0])
    assert str(progress).endswith("Those that ended until 1970-01-01T04:00:00.000000Z are removed.")
    f = windows(kept_for("9 hours"))
    txid = f.count([("a", 0, 1), ("b", 9 * HOUR, 1)])
    assert [row[:2] for row in f.late(txid)] == [("a", 0)]
    assert sorted({row[1] // HOUR for row in f.found()}) == list(range(4, 10))
    assert progress
    assert f.store.event_time(f.spec.states[0]) == replace(progress, txid=txid, late=1)


def test_a_session_of_another_writer_stops_the_commit(windows: Begin) -> None:
    f = windows(declare(WINDOWS["sessions"]))
    f.count([("a", 0, 1)])
    txid = f.prepare([("a", MINUTE, 1)])
    f.by_hand("UPDATE state.per_key SET txid = 7")
    with pytest.raises(GuardMismatch, match="of which 1 carry a txid of at least 2 already"):
        f.commit(txid)
    f.by_hand(
        "UPDATE state.per_key SET txid = 1",
        "CREATE FUNCTION state.keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER keep BEFORE DELETE ON state.per_key FOR EACH ROW EXECUTE FUNCTION state.keep()",
    )
    migrations.accept_table(f.settings, "per_key", "ann")
    with pytest.raises(GuardMismatch, match=r"of 1 sessions in state\.per_key 0 were taken out"):
        f.commit(txid)
    f.by_hand("DROP TRIGGER keep ON state.per_key", "UPDATE tidegate.state_table SET accepted_shape = '{}'")
    f.commit(txid)
    assert f.found() == [("a", 0, 31 * MINUTE, MINUTE, 2, 2, 0)]


def test_a_watermark_of_another_writer_stops_the_commit(windows: Begin) -> None:
    f = windows(declare(Tumbling("at", "1 hour", final_after="1 hour")))
    f.count([("a", 10 * HOUR, 1)])
    txid = f.prepare([("a", HOUR, 1)])
    f.by_hand("UPDATE tidegate.watermark SET txid = 2")
    with pytest.raises(GuardMismatch, match="windows 2: the watermark of state per_key is that of txid 2 already"):
        f.commit(txid)
    f.by_hand("DELETE FROM tidegate.watermark")
    with pytest.raises(GuardMismatch, match=r"state\.per_key has rows, but the ledger has no watermark of it"):
        f.commit(txid)
    columns = "state, pipeline, txid, watermark"
    f.by_hand(f"INSERT INTO tidegate.watermark ({columns}) VALUES ('per_key', 'windows', 1, '1970-01-01 10:00Z')")
    f.commit(txid)
    assert len(f.late(txid)) == 1


def test_what_came_too_late_is_neither_replayed_nor_mended(windows: Begin) -> None:
    f = windows(declare(Tumbling("at", "1 hour", final_after="1 hour")))
    f.count([("a", 10 * HOUR, 1)])
    txid = f.count([("a", HOUR, 5), ("a", 10 * HOUR, 1)])
    (record,) = f.store.quarantined("windows")
    assert json.loads(record["payload"]) == {
        "key": "a", "window_start": "1970-01-01T01:00:00.000000Z", "window_end": "1970-01-01T02:00:00.000000Z",
        "last_event": "1970-01-01T01:00:00.000000Z", "events": 1, "amount": 5,
    }  # fmt: skip
    assert record["reason"] == (
        "late: its window ended at 1970-01-01T02:00:00.000000Z and is final: all that ended until "
        "1970-01-01T09:00:00.000000Z are"
    )
    assert f.store.replay_quarantined(f.spec, "an operator", "why not") is None
    with pytest.raises(RangeRefused, match="its commit has set it aside"):
        f.store.mend_quarantined("windows", txid, 1, Mend("{}", "an operator", "it was early"))
    assert f.store.quarantine_counts("windows") == {txid: 1}
    assert f.store.quarantine_totals("windows") == (0, 1)
    found = []
    for late in ([], [("late", HOUR, 1)], []):  # metrics show when rows came too late, and not as records that wait
        f.count([("a", 10 * HOUR, 1), *late])
        with LedgerReader(f.settings) as reader, reader.snapshot("measuring") as connection:
            found += measures(connection, reader.witness).pipelines
    assert [each.quarantined for each in found] == [0, 0, 0]
    assert None is not found[0].set_aside_at != found[1].set_aside_at == found[2].set_aside_at == found[1].committed_at
