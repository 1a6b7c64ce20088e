"""Every kind of state, keyed and global, by the rules of the theory (docs/semantics.md)."""

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from itertools import groupby, product
from typing import Any

import pytest
import sqlalchemy as sa

from tests import store as ledger
from tests.conformance.conftest import Begin, Flow, Flows, Record, Stream
from tests.integration.conftest import refused, until
from tidegate import migrations
from tidegate.jobs import CollectSet, Count, History, Newest, Pipeline, Query, Rows, State, StateQuery
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import AccessRefused, GuardMismatch, Overflow, RangeRefused, StoreUnavailable, Unprocessed


def test_a_redo_leaves_nothing_that_a_policy_hides(flows: Flows) -> None:
    flow = flows(Pipeline("words", Stream("opaque"), {"counts": replace(COUNTS, kind="opaque")}))
    flow.by_hand(
        "ALTER TABLE state.counts ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
        "CREATE POLICY of_commits ON state.counts TO tidegate USING (true)",
    )
    flow.merge(counts=[("a", 1)])
    with pytest.raises(AccessRefused, match="row-level security policy"):
        flow.merge(1, redo=True, counts=[])
    assert [row["count"] for row in flow.rows("counts")] == [1]
    flow.by_hand("ALTER TABLE state.counts NO FORCE ROW LEVEL SECURITY")
    flow.merge(1, redo=True, counts=[])
    assert flow.rows("counts") == []


COUNTS = State(key={"word": "text"}, aggregates={"count": Count()})
LATEST = StateQuery("words.counts", as_of="latest", allow_not_repeatable=True)
ALL = Query("all", lambda of: sa.select(of["words.counts"].c.word).order_by("word"), reads=["words.counts", "words.versions"])


def _words(settings: Settings, flow: Flow) -> dict[str, Callable[[], list[str]]]:
    """Return every way to read the words of the counts, and of their versions."""

    def read(of: str, act: Callable[[ledger.StateReader], Iterable[Any]]) -> list[str]:
        with ledger.StateReader.open(settings, "words", of) as reader:
            return [row["word"] for row in act(reader) if row is not None]

    def scanned(reader: ledger.StateReader) -> list[Any]:
        with reader.scan() as (_, rows):
            return list(rows)

    def answered() -> list[str]:
        with ledger.LedgerReader(settings) as reader:
            return [row[0] for row in ledger.ask(reader, ALL, {}).rows]

    def queried(query: StateQuery) -> list[str]:
        with flow.store.queried_states(replace(flow.spec, queries=(query.read,))) as states:
            return _asked(settings, states["words.counts"])

    spec, keys = flow.spec.states[0], [("a",), ("b",)]
    return {
        "get_many": lambda: read("counts", lambda reader: reader.get_many(keys).rows),
        "range of a view": lambda: read("versions", lambda reader: reader.range(limit=9).rows),
        "scan": lambda: read("counts", scanned),
        "query": answered,
        "tidegate get": lambda: [row["word"] for row in ledger.key_lookup.get(settings, spec, keys) if row],
        "tidegate inspect": lambda: [row["word"] for row in flow.rows("counts")],
        "state query": lambda: queried(StateQuery("words.counts")),
        "state query as of latest": lambda: queried(LATEST),
    }


def _asked(settings: Settings, state: ledger.QueriedState) -> list[str]:
    with ledger.executor_lookup.connected(settings.conninfo(user=settings.pg_stager), "a test") as connection:
        return [row[0] for _, row in sorted(state.reading(2, ["word"]).rows(connection, [("a",), ("b",)]))]


@pytest.mark.promise("I17")
def test_a_reader_that_waits_for_a_table_to_be_made_again_finds_its_rows(
    settings: Settings, flows: Flows, waiting: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"counts": COUNTS, "versions": History({"word": "text"}, {"count": "bigint"}, {"at": "bigint"})}
    queries = [StateQuery("words.counts")]
    words = flows(Pipeline("words", Stream("transactional"), states, transform=lambda rows: rows, queries=queries))
    words.merge(counts=[("a", 1), ("b", 1)], versions=[("a", 0, 1), ("b", 0, 1)])
    reads = _words(settings, words)
    expected = {how: ["a", "b"] for how in reads}
    assert {how: read() for how, read in reads.items()} == expected
    with ThreadPoolExecutor(len(reads)) as threads:
        with migrations.connected(settings) as connection:
            for state in words.spec.states:
                ledger.table_swap.make_again(connection, "words", state)
            answers = {how: threads.submit(read) for how, read in reads.items()}
            until(lambda: waiting() == len(reads))
            ledger.registration.register(connection, words.spec)  # makes the view again
        assert {how: answer.result(60) for how, answer in answers.items()} == expected
    monkeypatch.setattr(migrations, "DDL_LOCK_TIMEOUT_SECONDS", 0.2)
    with words.store.queried_states(replace(words.spec, queries=(LATEST.read,))) as queried:
        assert _asked(settings, queried["words.counts"]) == ["a", "b"]
        locked = pytest.raises(StoreUnavailable, match="migrating: a lock timeout")
        with locked, migrations.connected(settings) as connection:
            ledger.table_swap.make_again(connection, "words", words.spec.states[0])
        assert _asked(settings, queried["words.counts"]) == ["a", "b"]


def test_updates_of_one_batch_accumulate_in_every_aggregate(flow: Begin) -> None:
    """And those of two; what is greatest, or known at all, comes with the first or with the second one."""
    first: list[Record] = [("a", 5), ("a", None), (None, 7), ("a", 1), ("", 2), (None, None), ("b", None), ("c", 4)]
    second: list[Record] = [("a", 1), ("b", 6), ("c", None), (None, 2), ("", None)]
    f = flow("transactional", [*first, *second], len(first), len(second))
    f.complete(1, 2)
    f.check()
    assert f.state()["a"] == (4, 3, 7, 1, 5, Decimal("2.333"), 5, 5, [1, 5], [0, 2, 1])
    assert f.state()[None] == (3, 2, 9, 2, 7, Decimal("4.5"), 5, 7, [2, 7], [0, 1, 1])
    assert f.state("overall") == {None: (13, 8, 28, 1, 7, Decimal("3.5"), 0, 4, [1, 2, 4, 5, 6, 7], [0, 5, 3])}


# The records, how many the second batch has at first, and how many in its redo.
REDONE: list[tuple[list[Record], int, int]] = [
    ([("a", 1), ("b", 2), ("a", 3), ("c", 4)], 0, 3),
    ([("a", 5), (None, None), ("a", 1), ("", None), ("b", 99), (None, 2)], 4, 1),
]


@pytest.mark.promise("I13", "decision:0010")
@pytest.mark.parametrize(("records", "size", "redone"), REDONE, ids=["more records", "fewer, without a minimum"])
def test_a_redo_has_the_effect_of_the_new_attempt_alone(flow: Begin, records: list[Record], size: int, redone: int) -> None:
    f = flow("opaque", records, 1, size, 1)
    f.complete(1, 2)
    first = [{**row, "previous_txid": 0} for row in f.rows() + f.rows("overall")]
    f.redo(2, redone)
    f.check()
    f.redo(2, size)
    f.check()
    assert not size or [{**row, "previous_txid": 0} for row in f.rows() + f.rows("overall")] == first
    f.redo(2, redone)
    f.process(3, len(records))
    f.settle(3)
    f.check()


def test_only_a_new_sealed_attempt_at_the_last_committed_txid_is_redone(flow: Begin, settings: Settings) -> None:
    f = flow("opaque", [("a", 1), ("a", 2), ("a", 3), ("b", 4)], 1, 2, 1)
    f.complete(1, 2)
    f.process(3)

    def redo_is_refused(error: type[Exception], message: str, txid: int = 2) -> None:
        with refused(settings, error, match=message):
            f.owner.redo_batch(f.spec, txid, ledger.Redo("an operator", "x"))

    for txid in (1, 3):  # later batches build on the one; the other has not committed
        redo_is_refused(RangeRefused, "only that one can be redone", txid)
        with pytest.raises(RangeRefused, match="2 is the last committed txid, and only that one can be redone"):
            f.start(txid, mode="redo")
    redo_is_refused(Unprocessed, "no newer attempt than the committed one")
    attempt = f.start(2, 1, mode="redo")
    redo_is_refused(Unprocessed, "has not ended")
    f.store.fail_attempt(attempt, "BROKEN: it broke.", is_poison=True)
    redo_is_refused(Unprocessed, "failed: BROKEN")
    assert not f.store.give_up("flow", 2, "the pipeline's policy", "it broke")
    committed = f.commit(2)
    assert (committed.attempt, committed.skipped_reason) == (1, None)
    done = f.redo(2, 1)
    assert (done.attempt, done.key_count, done.already_committed) == (3, 3, False)
    committed = f.store.batch_history("flow", 2).commit
    assert (committed["attempt"], committed["owner"]) == (3, "an operator")
    actions = f.by_hand("SELECT txid, action, reason FROM tidegate.operator_action")
    assert actions == [(2, "redo", "it was wrong")]
    f.settle(3, 2)
    assert f.metadata(3) == {"start": 2, "end": 4}
    f.check()


def test_a_state_without_previous_values_is_not_redone(flow: Begin, settings: Settings) -> None:
    """It is refused before an attempt starts, and again when it would count."""
    f = flow("transactional", [("a", 1)], 1)
    f.complete(1)
    for redo in (lambda: f.start(1, mode="redo"), lambda: f.owner.redo_batch(f.spec, 1, ledger.Redo("an operator", "x"))):
        with refused(settings, RangeRefused, "state per_key is not opaque, so it does not know what it was before"):
            redo()


def test_a_key_that_gets_too_many_values_in_the_course_of_batches_stops_the_commit(flows: Flows) -> None:
    states = {"few": State(key={"name": "text"}, aggregates={"values": CollectSet("n", "bigint", most=3)})}
    f = flows(Pipeline("sets", Stream("transactional"), states), sizes=[1, 1, 1])
    for txid, values in enumerate(("{1,2}", "{2,3}", "{3,4}"), start=1):
        f.put(txid, few=[("a", values)])
    with pytest.raises(Overflow, match="a key would have 4 values"):  # together they are refused
        f.store.commit_ready(f.spec, "test")
    f.commit(1)
    f.commit(2)
    with pytest.raises(Overflow, match="a key would have 4 values, and keeps at most 3"):
        f.commit(3)
    assert [row["values"] for row in f.rows("few")] == [[1, 2, 3]]


def test_null_in_a_key_is_a_key_as_any_other(flows: Flows) -> None:
    """Of a history, whose versions are looked up by more columns than the index is used for where they may be NULL."""
    names = ("site", "floor", "room", "shelf")
    places = History(dict.fromkeys(names, "text"), {"label": "text"}, {"at": "bigint"}, deleted="gone", null_keys=True)
    f = flows(Pipeline("places", Stream("transactional"), {"places": places, "joined": replace(places, collapse=True)}))
    chance, keys = random.Random("nulls"), [*product(["a", "b", None], repeat=len(names))]
    versions = {each: chance.choice([(True, None), (False, "x"), (None, "x"), (False, "")]) for each in product(keys, range(9))}
    rows = [(*key, at, *values) for (key, at), values in chance.sample([*versions.items()], len(versions))]
    f.merge(places=rows[:300], joined=rows[:300])
    for own in (rows[300:500], rows[500:]):
        f.put(f.next(), places=own, joined=own)
    assert f.store.commit_ready(f.spec, "together")
    for state in ("places", "joined"):
        expected = set()
        for key in keys:
            shown = [(at, *versions[key, at]) for at in range(9)]
            if state == "joined":
                shown = [next(same) for _, same in groupby(shown, key=lambda version: (bool(version[1]), version[2]))]
            ends = [*(at for at, *_ in shown[1:]), None]
            expected |= {(*key, at, label, end) for (at, gone, label), end in zip(shown, ends, strict=True) if not gone}
        found = [tuple(row[name] for name in (*names, "at", "label", "valid_to")) for row in f.rows(state)]
        assert (len(found), set(found)) == (len(expected), expected)
    stored = ledger.state_table_of(f.spec.states[0])
    txids = set(f.by_hand(sa.select(*(stored.c[name] for name in (*names, "at", "txid")))))
    for row in f.rows("places"):
        key = tuple(row[name] for name in names)
        assert {(*key, row["at"], row["txid"]), (*key, row["valid_to"] or row["at"], row["to_txid"] or row["txid"])} <= txids


def test_a_row_of_another_writer_stops_the_commit_of_rows(flows: Flows, settings: Settings) -> None:
    """A row in the place of one that is to be appended is an alarm; nothing of the batch counts. Rows are found by place."""
    f = flows(Pipeline("rows", Stream("transactional"), {"log": Rows({"name": "text"})}))
    f.merge(log=[(0, "a"), (1, "b")])
    found = ledger.key_lookup.get(settings, f.spec.states[0], [["1", "1"], ["2", "0"]])
    assert found == [{"txid": 1, "position": 1, "name": "b"}, None]
    f.put(f.next(), log=[(0, "c")])
    f.by_hand("INSERT INTO state.log (txid, position, name) VALUES (2, 0, 'another')")
    with pytest.raises(GuardMismatch, match=r"the 1 rows of log_2_1 cannot be appended to state\.log: one is there already"):
        f.commit(2)
    assert [row["name"] for row in f.rows("log")] == ["a", "b", "another"]
    f.by_hand(
        "DELETE FROM state.log WHERE txid = 2",
        "CREATE FUNCTION state.keep_out() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER keep_out BEFORE INSERT ON state.log FOR EACH ROW EXECUTE FUNCTION state.keep_out()",
    )
    migrations.accept_table(settings, "log", "ann")
    with pytest.raises(GuardMismatch, match=r"the 1 rows of log_2_1 cannot be appended .* a trigger or a rule keeps 1 out"):
        f.commit(2)
    assert [row["name"] for row in f.rows("log")] == ["a", "b"]


VERSION: dict[str, Any] = {"columns": {"label": "text", "number": "bigint"}, "order_by": {"at": "bigint"}, "deleted": "gone"}


@pytest.mark.promise("performance:first-column-of-order-is-compared-before")
def test_newest_rows_are_the_same_compared_by_columns_or_as_a_whole(flows: Flows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches one by one, then three together, whose changes are not recorded."""
    draw, choices = random.Random(1), ([None, 1, 2], [None, True, False], [None, "", "x"], [None, 0, 7])
    batches = [[[key, *map(draw.choice, choices)] for key in draw.sample([*"abcde", None], 4)] for _ in range(6)]
    found = []
    for name, many, record in (("narrow", 30, 1_000), ("wide", 0, 1_000), ("wider", 0, 3)):
        monkeypatch.setattr(ledger.merge_into_states, "MANY_COLUMNS", many)
        monkeypatch.setattr(ledger.merge_expressions, "MOST_IN_RECORD", record)
        newest = Newest({"key": "text"}, **VERSION, null_keys=True)
        opaque = replace(newest, kind="opaque", changes=True)
        f = flows(Pipeline(name, Stream("transactional"), {f"{name}_newest": newest}))
        changing = flows(Pipeline(f"{name}_changing", Stream("transactional"), {f"{name}_opaque": opaque}))
        for rows in batches[:3]:
            f.merge(**{f"{name}_newest": rows})
        for rows in batches[3:]:
            f.put(f.next(), **{f"{name}_newest": rows})
        for rows in batches:
            changing.merge(**{f"{name}_opaque": rows})
        assert len(f.store.commit_ready(f.spec, "test", max_batches=3)) == 3
        rows_of = [sorted(of.rows(of.spec.states[0].name), key=repr) for of in (f, changing)]
        found.append([*rows_of, list(changing.store.changes(changing.spec.states[0]))])
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == 6


def test_a_row_of_another_writer_stops_the_commit_of_whole_rows(flows: Flows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger.merge_into_states, "MANY_COLUMNS", 0)
    f = flows(Pipeline("wide", Stream("transactional"), {"wide": Newest({"key": "text"}, **VERSION)}))
    f.merge(wide=[["older", 0, False, "x", 1], ["newer", 1, False, "x", 1]])
    f.put(f.next(), wide=[["older", 0, False, "x", 2], ["newer", 2, False, "x", 2]])
    for key in ("older", "newer"):
        f.by_hand(f"UPDATE state.wide SET txid = 2 WHERE key = '{key}'")
        with pytest.raises(GuardMismatch, match=r"1 of 2 rows of state.wide carry a txid of at least 2 already"):
            f.commit(2)
        f.by_hand(f"UPDATE state.wide SET txid = 1 WHERE key = '{key}'")
    f.commit(2)
