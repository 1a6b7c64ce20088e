"""Recorded changes, which are divided by ranges of txids: each once, whatever is redone, detached or pruned."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import psycopg2
import pytest
import sqlalchemy as sa

from tests import steps
from tests.conformance.conftest import Flow, Stream
from tests.store import PipelineSpec, Redo, merge_into_states, pruning, range_partitions
from tidegate.jobs import Avg, Changes, Newest, Pipeline, State, Sum
from tidegate.jobs.sources import changes as changes_source
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import AccessRefused, RangeRefused, SourceChanged

# How many txids a partition has: one, few, and as many as in use.
EACH, FEW, MANY = 1, 3, range_partitions.TXIDS
# What a batch adds: cents, by shop.
Sums = dict[str, int]
TOTALS = {"total": State(key={"shop": "text"}, aggregates={"cents": Sum("cents")}, kind="opaque", changes=True)}


@dataclass
class Model:
    batches: list[Sums] = field(default_factory=list)

    def changes(self, after_txid: int = 0) -> list[tuple[Any, ...]]:
        """Return txid, shop, cents, and those and the txid before, of all txids after one."""
        kept: dict[str, tuple[int, int]] = {}
        found = []
        for txid, batch in enumerate(self.batches, start=1):
            for shop, cents in sorted(batch.items()):
                before = kept.get(shop, (None, None))
                kept[shop] = ((before[0] or 0) + cents, txid)
                found.append((txid, shop, kept[shop][0], *before))
        return [change for change in found if change[0] > after_txid]

    def state(self) -> Sums:
        counted: Counter[str] = Counter()
        for batch in self.batches:
            counted.update(batch)
        return dict(counted)


class Totals(Flow):
    """Batches of cents by shop, beside the model of what they change."""

    def __init__(self, settings: Settings, spec: PipelineSpec) -> None:
        super().__init__(settings, spec)
        self.model = Model()

    def prepare(self, txid: int, batch: Sums, *, redo: bool = False) -> None:
        """Seal an attempt at a batch, which is planned if it has to be."""
        if not redo:
            assert self.plan(1, run_id=f"run {txid}") == [txid]
        attempt = self.start(txid, mode="redo" if redo else "resume")
        self.seal(attempt, self.stage(attempt, "total", batch.items()))

    def merge(self, batch: Sums) -> int:
        txid = self.store.committed(self.spec.name) + 1
        self.prepare(txid, batch)
        self.commit(txid)
        self.model.batches.append(batch)
        return txid

    def merge_again(self, batch: Sums) -> None:
        txid = self.store.committed(self.spec.name)
        self.prepare(txid, batch, redo=True)
        self.owner.redo_batch(self.spec, txid, Redo("an operator", "it was wrong"))
        self.model.batches[-1] = batch

    def prune(self, up_to_txid: int) -> pruning.Pruned:
        return steps.prune(self.owner, self.spec, self.spec.states[0], up_to_txid)

    def changes(self) -> list[tuple[Any, ...]]:
        names = ("txid", "shop", "cents", "previous_cents", "previous_txid")
        return [tuple(row[name] for name in names) for row in self.store.changes(self.spec.states[0])]

    def parts(self) -> dict[str, list[int]]:
        """Return the txids in each table that has some, by what follows the $ in its name."""
        statement = sa.text(
            "SELECT split_part(relname, '$', 2), array_agg(DISTINCT txid ORDER BY txid) FROM state.total_changes AS c "
            "JOIN pg_class ON pg_class.oid = c.tableoid GROUP BY 1 ORDER BY min(txid)"
        )
        with self.owner.engine.connect() as connection:
            return {name: list(txids) for name, txids in connection.execute(statement)}

    def check(self, after_txid: int = 0) -> None:
        assert self.changes() == self.model.changes(after_txid)
        assert {row["shop"]: row["cents"] for row in self.rows("total")} == self.model.state()


@pytest.fixture
def totals(
    settings: Settings, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Totals]]:
    """A function that registers the pipeline and opens its store, with so many txids in a partition."""
    opened: list[Totals] = []

    def begin(txids: int = EACH) -> Totals:
        monkeypatch.setattr(range_partitions, "TXIDS", txids)
        register(pipeline := Pipeline("shop", Stream("opaque"), TOTALS))
        opened.append(Totals(settings, pipeline.spec))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def as_tables_are(flow: Flow, statement: str) -> list[tuple[Any, ...]]:
    with closing(psycopg2.connect(**flow.settings.conninfo(user="postgres"))) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


@contextmanager
def holding(flow: Flow, statement: str) -> Iterator[Any]:
    """Keep a transaction open that has run a statement as the administrator; yield its cursor."""
    with closing(psycopg2.connect(**flow.settings.conninfo(user="postgres"))) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        yield cursor


BATCHES: list[Sums] = [{"a": 1, "b": 2}, {"a": 3}, {"c": 4}, {"a": -4, "b": 5, "c": 6}, {"b": 7}, {"a": 8, "d": 9}]


# the commit


@pytest.mark.promise("limit:TXIDS", "decision:0054")
def test_a_txid_is_in_the_partition_of_its_range(totals: Callable[..., Totals]) -> None:
    flow = totals(FEW)
    for number, size in enumerate([1_000, 1, 1, 1, 500, 1, 500]):
        flow.merge({f"{number % 2} {shop}": shop for shop in range(size)})
    flow.check()
    assert flow.parts() == {"0": [1, 2], "3": [3, 4, 5], "6": [6, 7]}
    plan = as_tables_are(flow, "EXPLAIN SELECT count(*) FROM state.total_changes WHERE txid > 3 AND txid <= 5")
    assert [name for name in "036" if f"total_changes${name}" in str(plan)] == ["3"]
    flow.merge({})
    flow.merge({})
    assert list(flow.parts()) == ["0", "3", "6"], "txids without changes have no partition"
    noted = as_tables_are(flow, "SELECT partition, lower, upper, every FROM tidegate.state_range ORDER BY 1")
    assert noted == [(f"total_changes${start}", str(start), str(start + 3), "3") for start in (0, 3, 6)]


@pytest.mark.parametrize("txids", [EACH, MANY])
def test_a_redo_writes_its_changes_in_the_place_of_those_before(totals: Callable[..., Totals], txids: int) -> None:
    """Also where a partition begins with its txid, and as often as it is made."""
    flow = totals(txids)
    for batch in BATCHES[:3]:
        flow.merge(batch)
        flow.merge_again(BATCHES[3])
        flow.check()
        flow.merge_again({})
        flow.check()
        flow.merge_again(batch)
        flow.check()
    expected = {"1": [1], "2": [2], "3": [3]} if txids == EACH else {"0": [1, 2, 3]}
    assert flow.parts() == expected


def test_every_kind_of_state_is_divided_as_it_is_in_one_table(
    settings: Settings, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"column_{number}": "bigint" for number in range(merge_into_states.MANY_COLUMNS)}
    kinds: dict[str, Any] = {
        "means": State({"shop": "text"}, {"cents": Avg("cents")}, null_keys=True, kind="opaque", changes=True),
        "overall": State(aggregates={"cents": Sum("cents")}, kind="opaque", changes=True),
        "newest": Newest({"shop": "text"}, columns=many, order_by={"at": "bigint"}, kind="opaque", changes=True),
    }
    recorded: dict[str, list[Any]] = {}
    for name, txids in (("divided", EACH), ("whole", MANY)):
        monkeypatch.setattr(range_partitions, "TXIDS", txids)
        states = {f"{kind}_{name}": state for kind, state in kinds.items()}
        register(pipeline := Pipeline(f"shop_{name}", Stream("opaque"), states))
        flow = Flow(settings, pipeline.spec)
        flow.plan(*[1] * 3)
        for txid, redo in ((1, False), (2, False), (2, True), (3, False)):
            attempt = flow.start(txid, mode="redo" if redo else "resume")
            staged = []
            for state in flow.spec.states:
                shops = [None, "a", "b"][0 if state.keys and state.keys[0].nullable else 1 :]
                # Of the newest rows, some are newer than those before, and some are older.
                keys = [[shop] for shop in shops] if state.keys else [[]]
                numbers = [[(txid + place) % 3 + redo] * len(state.values) for place in range(len(keys))]
                staged.append(flow.stage(attempt, state, [key + own for key, own in zip(keys, numbers, strict=True)]))
            flow.seal(attempt, *staged)
            if redo:
                flow.owner.redo_batch(flow.spec, txid, Redo("an operator", "it was wrong"))
            else:
                flow.commit(txid)
        recorded[name] = [list(flow.store.changes(state)) for state in flow.spec.states]
        flow.close()
    assert recorded["divided"] == recorded["whole"]
    # Versions that are older than the kept ones are no changes.
    assert [len(changes) for changes in recorded["divided"]] == [9, 3, 3]
    assert all(change["at"] != change["previous_at"] for change in recorded["divided"][2])
    counted = "SELECT state, count(*) FROM tidegate.state_range WHERE state LIKE '%divided%' GROUP BY 1 ORDER BY 1"
    parts = as_tables_are(flow, counted)
    assert parts == [("means_divided_changes", 3), ("newest_divided_changes", 3), ("overall_divided_changes", 3)]


# roles


def test_a_policy_that_hides_changes_stops_a_follower(totals: Callable[..., Totals], settings: Settings) -> None:
    """Before it plans a range without them, which a batch would be held to."""
    flow = totals()
    flow.merge(BATCHES[0])
    as_tables_are(flow, "ALTER TABLE state.total_changes ENABLE ROW LEVEL SECURITY")
    coordinator = coordinator_of(Changes("shop.total"), settings)
    with pytest.raises(AccessRefused, match="would be affected by row-level security"):
        coordinator.initialize_transaction(1, None, None)
    as_tables_are(flow, "ALTER TABLE state.total_changes DISABLE ROW LEVEL SECURITY")
    metadata = coordinator.initialize_transaction(1, None, None)
    assert metadata is not None
    assert metadata["rows"] == 2


# what is old


@pytest.mark.promise("limit:ROWS_AT_ONCE", "decision:0054")
def test_partitions_are_removed_as_a_whole_and_the_rest_in_pieces(totals: Callable[..., Totals]) -> None:
    flow = totals(FEW)
    for batch in BATCHES:
        flow.merge(batch)
    assert flow.parts() == {"0": [1, 2], "3": [3, 4, 5], "6": [6]}
    with pytest.raises(RangeRefused, match="has committed up to txid 6"):
        flow.prune(7)
    with patch.object(pruning, "ROWS_AT_ONCE", 2):
        assert flow.prune(1)[:3] == (1, 2, ())
        flow.check(1)
        assert flow.prune(2)[:3] == (2, 0, ("total_changes$0",))
        flow.check(2)
        assert flow.prune(4)[:3] == (4, 4, ())
        flow.check(4)
        assert flow.parts() == {"3": [5], "6": [6]}
        assert flow.prune(4)[:3] == (4, 0, ())
        assert flow.prune(3)[:3] == (3, 0, ())
        assert flow.store.pruned_txid(flow.spec.states[0]) == 4
        assert flow.prune(6)[:3] == (6, 0, ("total_changes$3", "total_changes$6"))
    flow.check(6)
    assert as_tables_are(flow, "SELECT partition FROM tidegate.state_range") == []
    flow.merge(BATCHES[0])
    flow.check(6)
    assert flow.parts() == {"6": [7]}
    actions = as_tables_are(flow, "SELECT txid FROM tidegate.operator_action WHERE action = 'prune' ORDER BY acted_at")
    assert actions == [(1,), (2,), (4,), (4,), (3,), (6,)]


def test_a_pipeline_that_begins_to_follow_during_a_removal_is_refused(
    totals: Callable[..., Totals], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped partition is gone also from a snapshot that was taken before: its changes would be passed in silence."""
    flow = totals()
    for batch in BATCHES[:3]:
        flow.merge(batch)
    look, removals = changes_source._find_upstream, iter([lambda: flow.prune(2)])

    def look_and_remove(connection: Any, source: Changes) -> Any:
        found = look(connection, source)
        next(removals, lambda: None)()
        return found

    monkeypatch.setattr(changes_source, "_find_upstream", look_and_remove)
    with pytest.raises(SourceChanged, match=r"some up to txid 2 were removed \(tidegate prune\)"):
        coordinator_of(Changes("shop.total"), settings).initialize_transaction(1, None, None)
