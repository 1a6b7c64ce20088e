"""Every kind of state, keyed and global, by the rules of the theory (docs/semantics.md)."""

import random
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from tests.conformance.conftest import (
    BOTH_POSTGRES,
    EXACTLY_ONCE,
    STATE_KINDS,
    Flow,
    Record,
    Stream,
    divide,
    fold,
    fold_all,
    partial,
)
from tests.crashes import Crash, FaultPlan
from tests.integration.conftest import contents, until
from tests.store import (
    LedgerReader,
    NotStarted,
    PipelineSpec,
    QueriedState,
    Redo,
    StateKind,
    StateReader,
    StateSpec,
    ask,
    executor_lookup,
    key_lookup,
    registration,
    state_tables,
    tables,
)
from tidegate import migrations
from tidegate.jobs import Count, History, Pipeline, Query, State, StateQuery
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import (
    AccessRefused,
    CommitOutOfOrder,
    GuardMismatch,
    HoleDetected,
    PermanentError,
    RangeRefused,
    SchemaOutOfDate,
    StagingLost,
    StoreUnavailable,
)

pytestmark = BOTH_POSTGRES
Begin = Callable[..., Flow]
AsOwner = Callable[[sa.Executable], sa.CursorResult]
# The columns of each kind besides the values.
KEPT = {
    "transactional": {"txid"},
    "opaque": {"txid", "previous_txid", "previous_count"},
    "non-transactional": set(),
}


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

    def put(self, word: str, **row: int | None) -> None:
        """Write a row by hand, as the start of an example."""
        table = state_tables.state_table_of(self.spec.states[0])
        with self.owner.engine.begin() as connection:
            connection.execute(sa.select(sa.func.set_config("tidegate.writer", self.spec.name, True)))
            connection.execute(sa.insert(table).values(word=word, **row))

    def of(self, word: str) -> tuple | None:
        """Return a word's count, previous count and txid, as far as its kind keeps them."""
        for row in self.rows("counts"):
            if row["word"] == word:
                return tuple(row[name] for name in ("count", "previous_count", "txid") if name in row)
        return None


def counting(settings: Settings, register: Callable[..., None], state: State) -> Counts:
    """Register a pipeline with a state of counts, and return its flow."""
    pipeline = Pipeline("words", Stream("transactional"), {"counts": state})
    register(pipeline)
    return Counts(settings, pipeline.spec)


@pytest.fixture
def counts(settings: Settings, register: Callable[..., None]) -> Callable[..., Counts]:
    """A function that registers a word count with a state of this kind, and plans some batches."""

    def begin(state: StateKind, batches: int = 3, committed: int = 0) -> Counts:
        source = "opaque" if state == "opaque" else "transactional"
        states = {"counts": State(key={"word": "text"}, aggregates={"count": Count()}, kind=state)}
        pipeline = Pipeline("words", Stream(source), states, guarantee="at_least_once")
        register(pipeline)
        flow = Counts(settings, pipeline.spec)
        flow.plan(*[1] * batches)
        for txid in range(1, committed + 1):
            flow.merge(txid, {})
        return flow

    return begin


# the worked examples of the theory


def test_man_dog_apple(counts: Callable[..., Counts]) -> None:
    """The theory's transactional example: rows with older txids are updated, rows that the batch lacks stay."""
    flow = counts("transactional", committed=2)
    flow.put("man", count=3, txid=1)
    flow.put("dog", count=4, txid=2)
    flow.put("apple", count=6, txid=2)
    flow.merge(3, {"man": 2, "dog": 1})
    assert [flow.of(word) for word in ("man", "dog", "apple")] == [(5, 3), (5, 3), (6, 2)]


def test_4_1_2_becomes_6_4_3(counts: Callable[..., Counts]) -> None:
    """The theory's opaque example: {value 4, previous 1, txid 2}, a partial of 2 in txid 3, makes {6, 4, 3}."""
    flow = counts("opaque", committed=2)
    flow.put("word", count=4, previous_count=1, previous_txid=1, txid=2)
    flow.merge(3, {"word": 2})
    assert flow.of("word") == (6, 4, 3)


def test_4_1_2_becomes_3_1_2(counts: Callable[..., Counts]) -> None:
    """The theory's opaque retry: {value 4, previous 1, txid 2}, a partial of 2 in txid 2 again, makes {3, 1, 2}."""
    flow = counts("opaque", committed=2)
    flow.put("word", count=4, previous_count=1, previous_txid=1, txid=2)
    flow.merge(2, {"word": 2}, redo=True)
    assert flow.of("word") == (3, 1, 2)


def test_a_redo_leaves_nothing_that_a_policy_hides(
    settings: Settings, register: Callable[..., None], as_owner: AsOwner
) -> None:
    """Row-level security may be forced on the owner, who redoes: that is an error."""
    state = State(key={"word": "text"}, aggregates={"count": Count()}, kind="opaque")
    flow = counting(settings, register, state)
    flow.plan(1)
    as_owner(sa.text("ALTER TABLE state.counts ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"))
    as_owner(sa.text("CREATE POLICY of_commits ON state.counts TO tidegate USING (true)"))
    flow.merge(1, {"a": 1})
    with pytest.raises(AccessRefused, match="row-level security policy"):
        flow.merge(1, {}, redo=True)
    assert flow.of("a") == (1, None, 1)
    as_owner(sa.text("ALTER TABLE state.counts NO FORCE ROW LEVEL SECURITY"))
    flow.merge(1, {}, redo=True)
    assert flow.rows("counts") == []
    flow.close()


QUERIED = [StateQuery("words.counts")]
LATEST = [StateQuery("words.counts", as_of="latest", allow_not_repeatable=True)]
ALL = Query(
    "all", lambda states: sa.select(states["words.counts"].c.word).order_by("word"), reads=["words.counts", "words.versions"]
)


def _words(settings: Settings, flow: Flow) -> dict[str, Callable[[], list[str]]]:
    """Return every way to read the words of the counts, and of their versions."""

    def read(of: str, act: Callable[[StateReader], Iterable[Any]]) -> list[str]:
        with StateReader.open(settings, "words", of) as reader:
            return [row["word"] for row in act(reader) if row is not None]

    def scanned(reader: StateReader) -> list[Any]:
        with reader.scan() as (txid, rows):
            assert txid == 1
            return list(rows)

    def answered() -> list[str]:
        with LedgerReader(settings) as reader:
            return [row[0] for row in ask(reader, ALL, {}).rows]

    spec = flow.spec.states[0]
    return {
        "get_many": lambda: read("counts", lambda reader: reader.get_many([("a",), ("b",)]).rows),
        "range": lambda: read("counts", lambda reader: reader.range(limit=9).rows),
        "range of a view": lambda: read("versions", lambda reader: reader.range(limit=9).rows),
        "scan": lambda: read("counts", scanned),
        "query": answered,
        "tidegate get": lambda: [row["word"] for row in key_lookup.get(settings, spec, [("a",), ("b",)]) if row],
        "tidegate inspect": lambda: [row["word"] for row in flow.rows("counts")],
        "state query": lambda: _queried(settings, flow, replace(flow.spec, queries=tuple(q.read for q in QUERIED))),
        "state query as of latest": lambda: _queried(settings, flow, replace(flow.spec, queries=tuple(q.read for q in LATEST))),
    }


def _queried(settings: Settings, flow: Flow, spec: PipelineSpec) -> list[str]:
    with flow.store.queried_states(spec) as states:
        return _asked(settings, states["words.counts"])


def _asked(settings: Settings, state: QueriedState) -> list[str]:
    """Ask for words as a Spark task does."""
    with executor_lookup.connected(settings.conninfo(user=settings.pg_stager), "a test") as connection:
        found = state.reading(2, ["word"]).rows(connection, [("a",), ("b",)])
        return [row[0] for _, row in sorted(found)]


@pytest.fixture
def words(settings: Settings, register: Callable[..., None]) -> Flow:
    """A pipeline whose one batch has counted words, and noted versions of them, that transforms may read."""
    states = {
        "counts": State(key={"word": "text"}, aggregates={"count": Count()}),
        "versions": History({"word": "text"}, {"count": "bigint"}, {"at": "bigint"}),
    }
    pipeline = Pipeline("words", Stream("transactional"), states, transform=lambda rows: rows, queries=QUERIED)
    register(pipeline)
    flow = Flow(settings, pipeline.spec)
    flow.plan(1)
    attempt = flow.start(1)
    counted = flow.stage(attempt, "counts", [("a", 1), ("b", 1)])
    flow.seal(attempt, counted, flow.stage(attempt, "versions", [("a", 0, 1), ("b", 0, 1)]))
    flow.commit(1)
    return flow


@pytest.mark.promise("I17")
def test_a_reader_that_waits_for_a_table_to_be_made_again_finds_its_rows(
    settings: Settings, words: Flow, as_owner: AsOwner
) -> None:
    """It takes its snapshot after it has waited: in an earlier one, the new table has no row."""
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
                divide(connection, state, state)
            answers = {how: threads.submit(read) for how, read in reads.items()}
            until(lambda: as_owner(waiting).scalar() == len(reads))
            registration.register(connection, words.spec)  # makes the view again
        assert {how: answer.result(60) for how, answer in answers.items()} == expected


def test_a_table_is_not_made_again_while_an_attempt_reads_it_as_of_latest(
    settings: Settings, words: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task of the attempt reads the same snapshot; the migration gives up in seconds, and changes nothing."""
    monkeypatch.setattr(migrations, "DDL_LOCK_TIMEOUT_SECONDS", 0.2)
    latest = replace(words.spec, queries=tuple(query.read for query in LATEST))

    def migrate() -> None:
        with migrations.connected(settings) as connection:
            divide(connection, words.spec.states[0], words.spec.states[0])

    with words.store.queried_states(latest) as states:
        assert _asked(settings, states["words.counts"]) == ["a", "b"]
        with pytest.raises(StoreUnavailable, match="migrating: a lock timeout"):
            migrate()
        assert _asked(settings, states["words.counts"]) == ["a", "b"]
    migrate()
    assert _queried(settings, words, latest) == ["a", "b"]


def _is_there(settings: Settings, spec: StateSpec, key: tuple[str]) -> bool:
    try:
        return key_lookup.get(settings, spec, [key])[0] is not None
    except SchemaOutOfDate:
        return False


# the rules, for every kind


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_greater_txids_add_up_and_leave_other_keys_alone(counts: Callable[..., Counts], kind: StateKind) -> None:
    """A new key gets the batch's value, not 1 as in one of the theory's listings; keys that a batch lacks keep theirs."""
    flow = counts(kind)
    for txid, partials in enumerate([{"a": 1, "b": 10}, {"a": 2}, {"a": 3, "c": 5}], start=1):
        flow.merge(txid, partials)
    expected: dict[StateKind, list[tuple]] = {
        "transactional": [(6, 3), (10, 1), (5, 3)],
        "opaque": [(6, 3, 3), (10, None, 1), (5, None, 3)],
        "non-transactional": [(6,), (10,), (5,)],
    }
    assert flow.of("d") is None
    assert all(row.keys() - {"word", "count"} == KEPT[kind] for row in flow.rows("counts"))
    assert [flow.of(word) for word in "abc"] == expected[kind]


@pytest.mark.promise("I8")
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_an_equal_txid_is_done_already(counts: Callable[..., Counts], kind: StateKind) -> None:
    """A committed txid is final: none of its steps changes anything, nor does late staging."""
    flow = counts(kind)
    late = flow.start(1)
    flow.seal(late, flow.stage(late, "counts", [("a", 1)]))
    flow.commit(1)
    before = flow.rows("counts")
    flow.stage(late, "counts", [("a", 100)])
    flow.seal(late)
    assert flow.commit(1).already_committed
    assert flow.process(1).already_committed
    assert flow.rows("counts") == before


@pytest.mark.promise("decision:0010")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "txid"), [("transactional", 2), ("transactional", 2**31 + 5), ("opaque", 2), ("opaque", 3)])
def test_a_row_at_or_ahead_of_the_batchs_txid_is_an_error(
    counts: Callable[..., Counts], settings: Settings, kind: StateKind, txid: int
) -> None:
    """A stale txid: the theory throws for a smaller one, and here only another writer can have written an equal one."""
    flow = counts(kind, committed=1)
    flow.put("ahead", count=1, txid=txid)
    attempt = flow.start(2)
    flow.seal(attempt, flow.stage(attempt, "counts", [("ahead", 1), ("fine", 1)]))
    before = contents(settings)
    with pytest.raises(GuardMismatch, match=r"1 of 2 rows .* at least 2 already: another writer changed them"):
        flow.commit(2)
    assert contents(settings) == before


def test_txids_that_start_again_on_an_old_table_are_an_error(
    counts: Callable[..., Counts], settings: Settings, as_owner: AsOwner
) -> None:
    """If the ledger was emptied but the state was kept, the rows of new batches are not dropped silently."""
    flow = counts("opaque")
    flow.merge(1, {"a": 1})
    flow.merge(2, {"a": 1})
    for table in (tables.commit, tables.seal, tables.run_batch, tables.attempt, tables.batch):
        as_owner(sa.delete(table))
    as_owner(sa.update(tables.cursor).values(txid=0, attempt=None, source_digest=None))
    for name in sa.inspect(flow.store.engine).get_table_names(schema="staging"):
        with flow.store.engine.begin() as connection:
            connection.execute(sa.schema.DropTable(sa.Table(name, sa.MetaData(schema="staging"))))
    with pytest.raises(HoleDetected):
        flow.plan(1, run_id="again")
    shutil.rmtree(flow.store.witness.folder)  # as on a machine that has never committed
    flow.plan(1, run_id="again")
    attempt = flow.start(1)
    flow.seal(attempt, flow.stage(attempt, "counts", [("a", 1)]))
    before = contents(settings)
    with pytest.raises(GuardMismatch):
        flow.commit(1)
    assert contents(settings) == before


@pytest.mark.parametrize(
    ("state", "is_known", "kind"),
    [("per_key", True, "transactional"), ("per_key", False, "opaque"), ("overall", True, "non-transactional")],
)
def test_a_key_in_two_staged_partitions_is_refused(
    flow: Begin, settings: Settings, kind: StateKind, is_known: bool, state: str
) -> None:
    """Spark groups each key before staging; if it did not, no row is dropped silently or merged twice."""
    f = flow("transactional", kind, [("a", 1), ("a", 2), ("a", 3)])
    f.plan(1, 2)
    if is_known:
        f.process(1)
    else:
        f.seal(f.start(1))
    f.commit(1)
    attempt = f.start(2)
    row = [*([] if state == "overall" else ["a"]), *partial([("a", 2)])]
    f.seal(attempt, *(f.stage(attempt, state, [row], partition=number) for number in range(2)))
    before = contents(settings)
    with pytest.raises(PermanentError, match="cannot affect row a second time"):
        f.commit(2)
    assert contents(settings) == before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_updates_of_one_batch_accumulate_in_every_aggregate(flow: Begin, kind: StateKind) -> None:
    """Two batches with several records per key, some without key or amount."""
    records: list[Record] = [("a", 5), ("a", None), (None, 7), ("a", 1), ("", 2), (None, None), ("b", None)]
    f = flow("transactional", kind, [*records, *records])
    f.plan(len(records), len(records))
    for txid in (1, 2):
        f.process(txid)
        f.commit(txid)
        f.check()
    assert f.state()["a"] == (6, 4, 12, 1, 5, 3, 0, 5, [1, 5], [0, 2, 2])
    assert f.state()[None] == (4, 2, 14, 7, 7, 7, 0, 7, [7], [0, 0, 2])
    assert f.state()["b"] == (2, 0, 0, None, None, None, None, None, [], [0, 0, 0])
    assert f.state("overall") == {None: (14, 8, 30, 1, 7, Decimal("3.75"), 0, None, [1, 2, 5, 7], [0, 4, 4])}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_empty_batches_commit_and_a_global_state_gets_its_zero_once(flow: Begin, kind: StateKind) -> None:
    """A batch without records has a txid, commits and advances the cursor; a grouped state stays as it is."""
    f = flow("transactional", kind, [("a", 3)])
    f.plan(0, 0, 1, 0)
    for txid, expected in enumerate([fold_all([])] * 2 + [fold_all([("a", 3)])] * 2, start=1):
        f.process(txid)
        f.commit(txid)
        assert (f.store.committed("flow"), f.state("overall")) == (txid, {None: expected})
        assert len(f.rows("overall")) == 1
        f.check()
    if kind != "non-transactional":
        assert f.rows("per_key")[0]["txid"] == 3  # a row's txid is its last writer, not the progress of the ledger


def test_a_global_state_has_only_one_row(flow: Begin) -> None:
    """The database itself refuses a second row, even by hand."""
    f = flow("transactional", "transactional", [("a", 3)])
    f.plan(1)
    f.process(1)
    f.commit(1)
    columns = "records, known, total, mean_sum, mean_count, amounts, shares, txid"
    for snapshot, constraint in (("true", "pk_overall"), ("false", "ck_overall_snapshot")):
        second = sa.text(
            f"INSERT INTO state.overall (snapshot, {columns}) VALUES ({snapshot}, 1, 1, 1, 1, 1, '{{}}', '{{}}', 1)"
        )
        with f.owner.engine.connect() as connection:
            connection.execute(sa.select(sa.func.set_config("tidegate.writer", "flow", True)))
            with pytest.raises(IntegrityError, match=constraint):
                connection.execute(second)


LARGE = {
    "above a byte": ("opaque", 127),
    "above 32 bits": ("opaque", 2**31 + 7),
    "near the end": ("transactional", 2**63 - 10),
    "without a txid": ("non-transactional", 2**31 - 1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "txid"), LARGE.values(), ids=LARGE.keys())
def test_large_txids_are_compared_as_numbers(flow: Begin, txid: int, kind: StateKind) -> None:
    """The theory's listing compares boxed numbers, which differ above 127: its retries were lost."""
    records: list[Record] = [("a", number) for number in range(6)]
    f = flow("opaque" if kind == "opaque" else "transactional", kind, records)
    f.plan(2)
    f.process(1)
    f.commit(1)
    # Give batch 1's rows to a batch far ahead.
    with f.owner.engine.begin() as connection:
        for name, column in (("batch", "txid"), ("attempt", "txid"), ("commit", "txid"), ("run_batch", "txid")):
            rows = connection.execute(sa.select(getattr(tables, name)).where(getattr(tables, name).c[column] == 1)).mappings()
            for row in rows.all():
                moved = dict(row) | {"txid": txid} | ({"run_id": "moved"} if name == "run_batch" else {})
                connection.execute(sa.insert(getattr(tables, name)).values(moved))
        connection.execute(sa.update(tables.cursor).values(txid=txid))
        connection.execute(sa.select(sa.func.set_config("tidegate.writer", "flow", True)))
        if kind != "non-transactional":
            for state in f.spec.states:
                connection.execute(sa.update(state_tables.state_table_of(state)).values(txid=txid))

    assert f.plan(1, 1, run_id="far") == [txid + 1, txid + 2]
    for number in (1, 2):
        f.process(txid + number)
        with pytest.raises(CommitOutOfOrder):
            f.commit(txid + number + 1)
        assert not f.commit(txid + number).already_committed
        assert f.commit(txid + number).already_committed
        assert f.state() == fold(records[: 2 + number])
    if kind == "opaque":
        f.redo(txid + 2, 2)
        assert f.state() == fold(records[:5])
        assert {row["txid"] for row in f.rows()} == {txid + 2}


# opaque: value, previous value, txid


def opaque_rows(f: Flow) -> dict[str | None, tuple]:
    """Return per key total and least with their txid, and the previous ones with theirs."""
    names = ("total", "least", "txid", "previous_total", "previous_least", "previous_txid")
    return {row["key"]: tuple(row[name] for name in names) for row in f.rows()}


def test_an_opaque_row_keeps_its_values_from_before_its_txid(flow: Begin) -> None:
    """Checked after each commit; a key that a batch lacks keeps its txid and previous values."""
    f = flow("opaque", "opaque", [("a", 5), ("b", 7), ("a", 1), ("c", None), ("c", 4), ("b", 8)])
    f.plan(2, 2, 2)
    for txid in (1, 2, 3):
        f.process(txid)
        f.commit(txid)
        f.check()
        if txid == 2:
            assert opaque_rows(f) == {
                "a": (6, 1, 2, 5, 5, 1),
                "b": (7, 7, 1, None, None, None),
                "c": (0, None, 2, None, None, None),
            }
    assert opaque_rows(f) == {"a": (6, 1, 2, 5, 5, 1), "b": (15, 7, 3, 7, 7, 1), "c": (4, 4, 3, 0, None, 2)}
    (overall,) = f.rows("overall")
    assert (overall["total"], overall["previous_total"], overall["txid"], overall["previous_txid"]) == (25, 13, 3, 2)


REDONE: dict[str, tuple[list[Record], int, int]] = {
    "fewer records": ([("a", 1), ("b", 2), ("a", 3), ("c", 4)], 3, 1),
    "more records": ([("a", 1), ("b", 2), ("a", 3), ("c", 4)], 1, 3),
    "none": ([("a", 1), ("b", 2), ("a", 3), ("c", 4)], 3, 0),
    "some where there were none": ([("a", 1), ("b", 2), ("a", 3), ("c", 4)], 0, 3),
    "none where there were none": ([("a", 1)], 0, 0),
    "the same": ([("a", 1), ("b", 2), ("a", 3), ("c", 4)], 3, 3),
    "missing keys and amounts": ([("a", 1), (None, None), ("a", None), ("", None), (None, 2)], 4, 2),
    "a smaller minimum goes": ([("a", 5), ("a", 9), ("a", 1), ("a", 99)], 3, 1),
}


@pytest.mark.promise("I13", "decision:0010")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("records", "size", "redone"), REDONE.values(), ids=REDONE.keys())
def test_a_redo_has_the_effect_of_the_new_attempt_alone(flow: Begin, records: list[Record], size: int, redone: int) -> None:
    """Keys that it lacks go back to their old values, or disappear if the txid had created them (I13)."""
    f = flow("opaque", "opaque", records)
    f.plan(1, size, 1)
    for txid in (1, 2):
        f.process(txid)
        f.commit(txid)
    first = f.rows() + f.rows("overall")
    f.redo(2, redone)
    f.check()
    assert f.phases() == ["committed", "committed", "planned"]
    f.redo(2, size)
    f.check()
    if size:
        assert [{**row, "previous_txid": 0} for row in f.rows() + f.rows("overall")] == [
            {**row, "previous_txid": 0} for row in first
        ]
    f.redo(2, redone)
    f.check()
    f.process(3, len(records))
    f.settle(3)
    f.check()
    assert f.store.committed("flow") == 3


def test_a_redo_is_recorded_in_the_ledger(flow: Begin) -> None:
    """With owner and reason; the commit names the new attempt, and the next batch continues its input."""
    f = flow("opaque", "opaque", [("a", 1), ("a", 2), ("a", 3)])
    f.plan(2)
    f.process(1)
    f.commit(1)
    done = f.redo(1, 1)
    assert (done.attempt, done.key_count, done.already_committed) == (2, 3, False)
    history = f.store.batch_history("flow", 1)
    assert (history.commit["attempt"], history.commit["owner"]) == (2, "an operator")
    assert f.metadata(1) == {"start": 0, "end": 1}
    with f.owner.engine.connect() as connection:
        (action,) = connection.execute(sa.select(tables.operator_action)).mappings()
    assert (action["txid"], action["action"], action["reason"]) == (1, "redo", "it was wrong")
    f.plan(2, run_id="next")
    assert f.metadata(2) == {"start": 1, "end": 3}
    f.process(2)
    f.commit(2)
    f.check()


@pytest.mark.parametrize("txid", [1, 3])
def test_only_the_last_committed_txid_is_redone(flow: Begin, settings: Settings, txid: int) -> None:
    """Later batches build on its predecessors; its successors have not committed."""
    f = flow("opaque", "opaque", [("a", 1)] * 4)
    f.plan(1, 1, 1, 1)
    for number in (1, 2, 3):
        f.process(number)
    f.commit(1)
    f.commit(2)
    before = contents(settings)
    with pytest.raises(RangeRefused, match="2 is the last committed txid, and only that one can be redone"):
        f.start(txid, mode="redo")
    with pytest.raises(RangeRefused, match="only that one can be redone"):
        f.owner.redo_batch(f.spec, txid, Redo("an operator", "x"))
    assert contents(settings) == before


@pytest.mark.parametrize("kind", ["transactional", "non-transactional"])
def test_a_state_without_previous_values_is_not_redone(flow: Begin, settings: Settings, kind: StateKind) -> None:
    """It is refused before an attempt starts, and again when it would count."""
    f = flow("transactional", kind, [("a", 1)])
    f.plan(1)
    f.process(1)
    f.commit(1)
    before = contents(settings)
    for redo in (lambda: f.start(1, mode="redo"), lambda: f.owner.redo_batch(f.spec, 1, Redo("an operator", "x"))):
        with pytest.raises(RangeRefused, match="state per_key is not opaque, so it does not know what it was before"):
            redo()
    assert contents(settings) == before


def test_a_redo_without_a_new_sealed_attempt_changes_nothing(flow: Begin, settings: Settings) -> None:
    """The committed attempt cannot replace itself, nor can a failed or running attempt."""
    f = flow("opaque", "opaque", [("a", 1), ("b", 2)])
    f.plan(1)
    f.process(1)
    f.commit(1)

    def refused(message: str) -> None:
        before = contents(settings)
        with pytest.raises(StagingLost, match=message):
            f.owner.redo_batch(f.spec, 1, Redo("an operator", "x"))
        assert contents(settings) == before

    refused("no newer attempt than the committed one")
    attempt = f.start(1, 2, mode="redo")
    refused("has not ended")
    f.store.fail_attempt(attempt, "BROKEN: it broke.")
    refused("failed: BROKEN")
    f.check()
    assert f.commit(1).attempt == 1


# anything in any order


@pytest.mark.promise("I1")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("source", "state"), EXACTLY_ONCE, ids=[f"{source} into {state}" for source, state in EXACTLY_ONCE])
def test_the_states_equal_the_model_after_every_step(flow: Begin, source: Any, state: Any, seed: int) -> None:
    """A random walk of plans, attempts, failures, crashes, commits, skips, retries and redos, compared with plain Python."""
    chance = random.Random(f"{source} {state} {seed}")
    records: list[Record] = [
        (chance.choice(["a", "b", "c", "", None]), chance.choice([None, 0, chance.randint(1, 100)])) for _ in range(4000)
    ]
    f = flow(source, state, records)
    story: list[str] = []
    for step in range(40):
        committed = f.store.committed("flow")
        opened = f.store.uncommitted("flow", 100)
        txid = chance.choice(opened[:4]) if opened else None
        size = chance.choice([None, 0, chance.randint(1, 9)]) if source == "opaque" else None
        action = "plan" if not opened else chance.choice(WALK)
        story.append(f"{step}: {action} {txid} {size} after {committed}")
        try:
            walk(f, action, txid, size, committed, chance, f"run {step}")
            f.check()
        except BaseException as error:
            error.add_note("\n".join([f"seed {seed} of {source} into {state}:", *story]))
            raise
    for txid in f.store.uncommitted("flow", 100):
        f.settle(txid)
    f.check()


WALK = [
    "plan",
    *["process"] * 4,
    *["commit"] * 3,
    *["settle"] * 3,
    "fail",
    "restage",
    "crash",
    "skip",
    "retry",
    "redo",
    "zombie",
]


def walk(  # noqa: PLR0912 - a list of possible steps
    f: Flow, action: str, txid: int | None, size: int | None, committed: int, chance: random.Random, run_id: str
) -> None:
    """Take one step; a step that is rightly refused changes nothing."""
    if action == "plan":
        f.plan(*[chance.randint(0, 9) for _ in range(chance.randint(1, 3))], run_id=run_id)
    elif action == "process":
        f.process(txid, size)
    elif action == "restage":
        f.process(txid, size, mode="restage")
    elif action == "commit":
        with suppress(CommitOutOfOrder, StagingLost):
            f.commit(txid)
    elif action == "settle":
        f.settle(committed + 1, size)
    elif action == "fail":
        if not isinstance(attempt := f.take(txid, size, mode="restage"), NotStarted):
            f.store.fail_attempt(attempt, "BROKEN: it broke.", is_poison=chance.random() < 0.5)
    elif action == "crash":
        faults = FaultPlan(chance.randint(1, 40))
        try:
            with faults.armed():
                f.settle(committed + 1, size)
        except Crash:
            f.die()
    elif action == "skip":
        with suppress(RangeRefused, StagingLost):
            f.store.skip_batch(f.spec, txid, "an operator", "it is poison")
    elif action == "retry":
        f.store.retry("flow", chance.choice([None, txid]), "an operator", "fixed")
    elif action == "zombie":
        if not isinstance(older := f.take(txid, size, mode="restage"), NotStarted):
            f.process(txid, None, mode="restage")
            f.stage(older, "overall", [partial([("a", 1000)] * 1000)])
    elif action == "redo" and committed and f.spec.states[0].kind == "opaque":
        f.redo(committed, size)
