"""Every kind of state, keyed and global, by the rules of the theory (docs/semantics.md)."""

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conformance.conftest import EXACTLY_ONCE, STATE_KINDS, Flow, Record, Stream, partial
from tests.crashes import Crash, FaultPlan
from tests.integration.conftest import refused, until
from tests.store import (
    LedgerReader,
    NotStarted,
    QueriedState,
    Redo,
    StateKind,
    StateReader,
    ask,
    executor_lookup,
    key_lookup,
    registration,
    table_swap,
    tables,
)
from tidegate import migrations
from tidegate.jobs import Count, History, Pipeline, Query, State, StateQuery
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import (
    AccessRefused,
    AttemptNotSealed,
    CommitOutOfOrder,
    RangeRefused,
    StoreUnavailable,
    Unprocessed,
)

Begin = Callable[..., Flow]
AsOwner = Callable[[sa.Executable], sa.CursorResult]


class Counts(Flow):
    """A state of words and their counts, with partials that the test provides."""

    def merge(self, txid: int, partials: dict[str, int], *, redo: bool = False) -> None:
        """Process a batch with these partials, and commit it or redo the committed one."""
        attempt = self.start(txid, mode="redo" if redo else "resume")
        self.seal(attempt, self.stage(attempt, "counts", partials.items()))
        if redo:
            self.owner.redo_batch(self.spec, txid, Redo("an operator", "it was wrong"))
        else:
            self.commit(txid)

    def of(self, word: str) -> tuple | None:
        """Return a word's count, previous count and txid, as far as its kind keeps them."""
        rows = [row for row in self.rows("counts") if row["word"] == word]
        return tuple(rows[0][name] for name in ("count", "previous_count", "txid") if name in rows[0]) if rows else None


@pytest.fixture
def counts(settings: Settings, register: Callable[..., None]) -> Callable[..., Counts]:
    """A function that registers a word count with a state of this kind, and plans three batches."""

    def begin(state: StateKind) -> Counts:
        source = "opaque" if state == "opaque" else "transactional"
        states = {"counts": State(key={"word": "text"}, aggregates={"count": Count()}, kind=state)}
        pipeline = Pipeline("words", Stream(source), states, guarantee="at_least_once")
        register(pipeline)
        flow = Counts(settings, pipeline.spec)
        flow.plan(1, 1, 1)
        return flow

    return begin


def test_a_redo_leaves_nothing_that_a_policy_hides(counts: Callable[..., Counts], as_owner: AsOwner) -> None:
    flow = counts("opaque")
    as_owner(sa.text("ALTER TABLE state.counts ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"))
    as_owner(sa.text("CREATE POLICY of_commits ON state.counts TO tidegate USING (true)"))
    flow.merge(1, {"a": 1})
    with pytest.raises(AccessRefused, match="row-level security policy"):
        flow.merge(1, {}, redo=True)
    assert flow.of("a") == (1, None, 1)
    as_owner(sa.text("ALTER TABLE state.counts NO FORCE ROW LEVEL SECURITY"))
    flow.merge(1, {}, redo=True)
    assert flow.rows("counts") == []


# readers, and tables that are made again

QUERIED, LATEST = StateQuery("words.counts"), StateQuery("words.counts", as_of="latest", allow_not_repeatable=True)
ALL = Query(
    "all", lambda states: sa.select(states["words.counts"].c.word).order_by("word"), reads=["words.counts", "words.versions"]
)


def _words(settings: Settings, flow: Flow) -> dict[str, Callable[[], list[str]]]:
    """Return every way to read the words of the counts, and of their versions."""

    def read(of: str, act: Callable[[StateReader], Iterable[Any]]) -> list[str]:
        with StateReader.open(settings, "words", of) as reader:
            return [row["word"] for row in act(reader) if row is not None]

    def scanned(reader: StateReader) -> list[Any]:
        with reader.scan() as (_, rows):
            return list(rows)

    def answered() -> list[str]:
        with LedgerReader(settings) as reader:
            return [row[0] for row in ask(reader, ALL, {}).rows]

    def queried(query: StateQuery) -> list[str]:
        with flow.store.queried_states(replace(flow.spec, queries=(query.read,))) as states:
            return _asked(settings, states["words.counts"])

    spec, keys = flow.spec.states[0], [("a",), ("b",)]
    return {
        "get_many": lambda: read("counts", lambda reader: reader.get_many(keys).rows),
        "range of a view": lambda: read("versions", lambda reader: reader.range(limit=9).rows),
        "scan": lambda: read("counts", scanned),
        "query": answered,
        "tidegate get": lambda: [row["word"] for row in key_lookup.get(settings, spec, keys) if row],
        "tidegate inspect": lambda: [row["word"] for row in flow.rows("counts")],
        "state query": lambda: queried(QUERIED),
        "state query as of latest": lambda: queried(LATEST),
    }


def _asked(settings: Settings, state: QueriedState) -> list[str]:
    with executor_lookup.connected(settings.conninfo(user=settings.pg_stager), "a test") as connection:
        return [row[0] for _, row in sorted(state.reading(2, ["word"]).rows(connection, [("a",), ("b",)]))]


@pytest.mark.promise("I17")
def test_a_reader_that_waits_for_a_table_to_be_made_again_finds_its_rows(
    settings: Settings, register: Callable[..., None], as_owner: AsOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {
        "counts": State(key={"word": "text"}, aggregates={"count": Count()}),
        "versions": History({"word": "text"}, {"count": "bigint"}, {"at": "bigint"}),
    }
    pipeline = Pipeline("words", Stream("transactional"), states, transform=lambda rows: rows, queries=[QUERIED])
    register(pipeline)
    words = Flow(settings, pipeline.spec)
    words.plan(1)
    attempt = words.start(1)
    counted = words.stage(attempt, "counts", [("a", 1), ("b", 1)])
    words.seal(attempt, counted, words.stage(attempt, "versions", [("a", 0, 1), ("b", 0, 1)]))
    words.commit(1)
    reads = _words(settings, words)
    expected = {how: ["a", "b"] for how in reads}
    assert {how: read() for how, read in reads.items()} == expected
    waiting = sa.text(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database "
        "WHERE datname = current_database())"
    )
    with ThreadPoolExecutor(len(reads)) as threads:
        with migrations.connected(settings) as connection:
            for state in words.spec.states:
                table_swap.make_again(connection, words.spec.name, state)
            answers = {how: threads.submit(read) for how, read in reads.items()}
            until(lambda: as_owner(waiting).scalar() == len(reads))
            registration.register(connection, words.spec)  # makes the view again
        assert {how: answer.result(60) for how, answer in answers.items()} == expected

    def migrate() -> None:
        with migrations.connected(settings) as connection:
            table_swap.make_again(connection, words.spec.name, words.spec.states[0])

    monkeypatch.setattr(migrations, "DDL_LOCK_TIMEOUT_SECONDS", 0.2)
    with words.store.queried_states(replace(words.spec, queries=(LATEST.read,))) as queried:
        assert _asked(settings, queried["words.counts"]) == ["a", "b"]
        with pytest.raises(StoreUnavailable, match="migrating: a lock timeout"):
            migrate()
        assert _asked(settings, queried["words.counts"]) == ["a", "b"]


# the rules, for every kind


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_updates_of_one_batch_accumulate_in_every_aggregate(flow: Begin, kind: StateKind) -> None:
    records: list[Record] = [("a", 5), ("a", None), (None, 7), ("a", 1), ("", 2), (None, None), ("b", None)]
    f = flow("transactional", kind, [*records, *records])
    f.plan(len(records), len(records))
    for txid in (1, 2):
        f.complete(txid)
        f.check()
    assert f.state()["a"] == (6, 4, 12, 1, 5, 3, 0, 5, [1, 5], [0, 2, 2])
    assert f.state()[None] == (4, 2, 14, 7, 7, 7, 0, 7, [7], [0, 0, 2])
    assert f.state("overall") == {None: (14, 8, 30, 1, 7, Decimal("3.75"), 0, None, [1, 2, 5, 7], [0, 4, 4])}


# opaque: value, previous value, txid


def test_an_opaque_row_keeps_its_values_from_before_its_txid(flow: Begin) -> None:
    f = flow("opaque", "opaque", [("a", 5), ("b", 7), ("a", 1), ("c", None), ("c", 4), ("b", 8)])
    f.plan(2, 2, 2)
    for txid in (1, 2, 3):
        f.complete(txid)
        f.check()
    names = ("total", "least", "txid", "previous_total", "previous_least", "previous_txid")
    found = {row["key"]: tuple(row[name] for name in names) for row in f.rows()}
    assert found == {"a": (6, 1, 2, 5, 5, 1), "b": (15, 7, 3, 7, 7, 1), "c": (4, 4, 3, 0, None, 2)}
    (overall,) = f.rows("overall")
    assert (overall["total"], overall["previous_total"], overall["txid"], overall["previous_txid"]) == (25, 13, 3, 2)


REDONE: dict[str, tuple[list[Record], int, int]] = {
    "fewer records": ([("a", 1), ("b", 2), ("a", 3), ("c", 4)], 3, 1),
    "some where there were none": ([("a", 1), ("b", 2), ("a", 3), ("c", 4)], 0, 3),
    "missing keys and amounts": ([("a", 1), (None, None), ("a", None), ("", None), (None, 2)], 4, 2),
    "a smaller minimum goes": ([("a", 5), ("a", 9), ("a", 1), ("a", 99)], 3, 1),
}


@pytest.mark.promise("I13", "decision:0010")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("records", "size", "redone"), REDONE.values(), ids=REDONE.keys())
def test_a_redo_has_the_effect_of_the_new_attempt_alone(flow: Begin, records: list[Record], size: int, redone: int) -> None:
    f = flow("opaque", "opaque", records)
    f.plan(1, size, 1)
    f.complete(1, 2)
    first = [{**row, "previous_txid": 0} for row in f.rows() + f.rows("overall")]
    f.redo(2, redone)
    f.check()
    assert f.phases() == ["committed", "committed", "planned"]
    f.redo(2, size)
    f.check()
    assert not size or [{**row, "previous_txid": 0} for row in f.rows() + f.rows("overall")] == first
    f.redo(2, redone)
    f.process(3, len(records))
    f.settle(3)
    f.check()


def test_only_a_new_sealed_attempt_at_the_last_committed_txid_is_redone(flow: Begin, settings: Settings) -> None:
    f = flow("opaque", "opaque", [("a", 1), ("a", 2), ("a", 3), ("b", 4)])
    f.plan(1, 2, 1)
    for txid in (1, 2, 3):
        f.process(txid)

    def redo_is_refused(error: type[Exception], message: str, txid: int = 2) -> None:
        with refused(settings, error, match=message):
            f.owner.redo_batch(f.spec, txid, Redo("an operator", "x"))

    f.commit(1)
    f.commit(2)
    for txid in (1, 3):  # later batches build on the one; the other has not committed
        redo_is_refused(RangeRefused, "only that one can be redone", txid)
        with pytest.raises(RangeRefused, match="2 is the last committed txid, and only that one can be redone"):
            f.start(txid, mode="redo")
    redo_is_refused(Unprocessed, "no newer attempt than the committed one")
    attempt = f.start(2, 1, mode="redo")
    redo_is_refused(Unprocessed, "has not ended")
    f.store.fail_attempt(attempt, "BROKEN: it broke.")
    redo_is_refused(Unprocessed, "failed: BROKEN")
    assert f.commit(2).attempt == 1
    done = f.redo(2, 1)
    assert (done.attempt, done.key_count, done.already_committed) == (3, 3, False)
    history = f.store.batch_history("flow", 2)
    assert (history.commit["attempt"], history.commit["owner"]) == (3, "an operator")
    with f.owner.engine.connect() as connection:
        (action,) = connection.execute(sa.select(tables.operator_action)).mappings()
    assert (action["txid"], action["action"], action["reason"]) == (2, "redo", "it was wrong")
    f.settle(3, 2)
    assert f.metadata(3) == {"start": 2, "end": 4}
    f.check()


def test_a_state_without_previous_values_is_not_redone(flow: Begin, settings: Settings) -> None:
    """It is refused before an attempt starts, and again when it would count."""
    f = flow("transactional", "transactional", [("a", 1)])
    f.plan(1)
    f.complete(1)
    for redo in (lambda: f.start(1, mode="redo"), lambda: f.owner.redo_batch(f.spec, 1, Redo("an operator", "x"))):
        with refused(settings, RangeRefused, "state per_key is not opaque, so it does not know what it was before"):
            redo()


# anything in any order


def _planned(f: Flow, chance: random.Random, run_id: str) -> None:
    f.plan(*[chance.randint(0, 9) for _ in range(chance.randint(1, 3))], run_id=run_id)


def _failed(f: Flow, txid: int, size: int | None, chance: random.Random) -> None:
    if not isinstance(attempt := f.take(txid, size, mode="restage"), NotStarted):
        f.store.fail_attempt(attempt, "BROKEN: it broke.", is_poison=chance.random() < 0.5)


def _crashed(f: Flow, txid: int, size: int | None, chance: random.Random) -> None:
    try:
        with FaultPlan(chance.randint(1, 40)).armed():
            f.settle(txid, size)
    except Crash:
        f.die()


def _overtaken(f: Flow, txid: int, size: int | None) -> None:
    if not isinstance(older := f.take(txid, size, mode="restage"), NotStarted):
        f.process(txid, None, mode="restage")
        f.stage(older, "overall", [partial([("a", 1000)] * 1000)])


@pytest.mark.promise("I1")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("source", "state"), EXACTLY_ONCE[::-1], ids=[" into ".join(pair) for pair in EXACTLY_ONCE[::-1]])
def test_the_states_equal_the_model_after_every_step(flow: Begin, source: Any, state: Any) -> None:
    chance = random.Random(f"{source} {state}")
    records: list[Record] = [
        (chance.choice(["a", "b", "c", "", None]), chance.choice([None, 0, chance.randint(1, 100)])) for _ in range(4000)
    ]
    f = flow(source, state, records)
    story: list[str] = []
    weights = [1, 4, 3, 3, 1, 1, 1, 1, 1, 1]
    for step in range(40):
        committed, opened = f.store.committed("flow"), f.store.uncommitted("flow", 100)
        txid: Any = chance.choice(opened[:4]) if opened else None
        size = chance.choice([None, 0, chance.randint(1, 9)]) if source == "opaque" else None
        steps: dict[str, Callable[..., Any]] = {
            "plan": lambda step=step: _planned(f, chance, f"run {step}"),
            "process": lambda txid=txid, size=size: f.process(txid, size, mode=chance.choice(["resume", "restage"])),
            "commit": lambda txid=txid: f.commit(txid),
            "settle": lambda txid=committed + 1, size=size: f.settle(txid, size),
            "fail": lambda txid=txid, size=size: _failed(f, txid, size, chance),
            "crash": lambda txid=committed + 1, size=size: _crashed(f, txid, size, chance),
            "skip": lambda txid=txid: f.store.skip_batch(f.spec, txid, "an operator", "it is poison"),
            "retry": lambda txid=txid: f.store.retry("flow", chance.choice([None, txid]), "an operator", "fixed"),
            "zombie": lambda txid=txid, size=size: _overtaken(f, txid, size),
            "redo": lambda txid=committed, size=size: f.redo(txid, size) if txid and state == "opaque" else None,
        }
        action = chance.choices(list(steps), weights)[0] if opened else "plan"
        story.append(f"{step}: {action} {txid} {size} after {committed}")
        try:
            # A crash may leave an attempt that is not silent yet.
            refusals = {"commit": [CommitOutOfOrder, Unprocessed, AttemptNotSealed], "skip": [RangeRefused, Unprocessed]}
            with suppress(*refusals.get(action, [])):
                steps[action]()
            f.check()
        except BaseException as error:
            error.add_note("\n".join(story))
            raise
    for txid in f.store.uncommitted("flow", 100):
        f.settle(txid)
    f.check()
