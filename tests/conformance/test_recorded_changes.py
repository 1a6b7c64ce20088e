"""Recorded changes, which are divided by ranges of txids: each once, whatever is redone, detached or pruned."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from tests import steps
from tests.conformance.conftest import Flow, Flows, Stream
from tests.sources.in_process import meanwhile
from tests.store import merge_into_states, pruning, range_partitions
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
BATCHES: list[Sums] = [{"a": 1, "b": 2}, {"a": 3}, {"c": 4}, {"a": -4, "b": 5, "c": 6}, {"b": 7}, {"a": 8, "d": 9}]


class Totals(Flow):
    batches: Sequence[Sums] = ()

    def add(self, *batches: Sums, redo: bool = False) -> None:
        for batch in batches:
            txid = len(self.batches) if redo else None
            self.merge(txid, redo=redo, total=batch.items())
            self.batches = [*self.batches[: txid and -1], batch]

    def prune(self, up_to_txid: int) -> pruning.Pruned:
        return steps.prune(self.owner, self.spec, self.spec.states[0], up_to_txid)

    def parts(self) -> dict[str, list[int]]:
        """Return the txids in each table that has some, by what follows the $ in its name."""
        txids = "split_part(tableoid::regclass::text, '$', 2), array_agg(DISTINCT txid ORDER BY txid)"
        found = self.by_hand(f"SELECT {txids} FROM state.total_changes GROUP BY 1 ORDER BY min(txid)")
        return {name.strip('"'): of for name, of in found}

    def check(self, after_txid: int = 0) -> None:
        """Compare the state and the changes of all txids after one with what the batches come to."""
        expected: list[tuple[Any, ...]] = []
        kept: dict[str, tuple[int, int]] = {}
        for txid, batch in enumerate(self.batches, start=1):
            for shop, cents in sorted(batch.items()):
                before = kept.get(shop, (None, None))
                kept[shop] = ((before[0] or 0) + cents, txid)
                expected.append((txid, shop, kept[shop][0], *before))
        names = ("txid", "shop", "cents", "previous_cents", "previous_txid")
        found = [tuple(row[name] for name in names) for row in self.store.changes(self.spec.states[0])]
        assert found == [change for change in expected if change[0] > after_txid]
        assert {row["shop"]: row["cents"] for row in self.rows("total")} == {shop: cents for shop, (cents, _) in kept.items()}


@pytest.fixture
def totals(flows: Flows, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Totals]:
    """A function that registers the pipeline, with so many txids in a partition."""

    def begin(txids: int = EACH) -> Totals:
        monkeypatch.setattr(range_partitions, "TXIDS", txids)
        return flows(Pipeline("shop", Stream("opaque"), TOTALS), Totals)

    return begin


@pytest.mark.promise("limit:TXIDS", "decision:0054")
def test_a_txid_is_in_the_partition_of_its_range(totals: Callable[..., Totals]) -> None:
    flow = totals(FEW)
    for number, size in enumerate([1_000, 1, 1, 1, 500, 1, 500]):
        flow.add({f"{number % 2} {shop}": shop for shop in range(size)})
    flow.check()
    assert flow.parts() == {"0": [1, 2], "3": [3, 4, 5], "6": [6, 7]}
    plan = flow.by_hand("EXPLAIN SELECT count(*) FROM state.total_changes WHERE txid > 3 AND txid <= 5")
    assert [name for name in "036" if f"total_changes${name}" in str(plan)] == ["3"]
    flow.add({}, {})
    assert list(flow.parts()) == ["0", "3", "6"], "txids without changes have no partition"
    noted = flow.by_hand("SELECT partition, lower, upper, every FROM tidegate.state_range ORDER BY 1")
    assert noted == [(f"total_changes${start}", str(start), str(start + 3), "3") for start in (0, 3, 6)]


def test_a_redo_writes_its_changes_in_the_place_of_those_before(totals: Callable[..., Totals]) -> None:
    """Where a partition begins with its txid, and where it has those before, as often as it is made."""
    flow = totals(FEW)
    for batch in BATCHES[:3]:
        flow.add(batch)
        for again in (BATCHES[3], {}, batch):
            flow.add(again, redo=True)
            flow.check()
    assert flow.parts() == {"0": [1, 2], "3": [3]}


def test_every_kind_of_state_is_divided_as_it_is_in_one_table(flows: Flows, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"column_{number}": "bigint" for number in range(merge_into_states.MANY_COLUMNS)}
    recorded: dict[str, list[Any]] = {}
    opaque: dict[str, Any] = {"kind": "opaque", "changes": True}
    for name, txids in (("divided", EACH), ("whole", MANY)):
        monkeypatch.setattr(range_partitions, "TXIDS", txids)
        states = {
            f"means_{name}": State({"shop": "text"}, {"cents": Avg("cents")}, null_keys=True, **opaque),
            f"overall_{name}": State(aggregates={"cents": Sum("cents")}, **opaque),
            f"newest_{name}": Newest({"shop": "text"}, columns=many, order_by={"at": "bigint"}, **opaque),
        }
        flow = flows(Pipeline(f"shop_{name}", Stream("opaque"), states), sizes=[1, 1, 1])
        keys: list[list[list[Any]]] = [[[None], ["a"], ["b"]], [[]], [["a"], ["b"]]]
        for txid, redo in ((1, False), (2, False), (2, True), (3, False)):
            rows = {
                # Of the newest rows, some are newer than those before, and some are older.
                state.name: [key + [(txid + place) % 3 + redo] * len(state.values) for place, key in enumerate(own)]
                for state, own in zip(flow.spec.states, keys, strict=True)
            }
            flow.merge(txid, redo=redo, **rows)
        recorded[name] = [list(flow.store.changes(state)) for state in flow.spec.states]
    assert recorded["divided"] == recorded["whole"]
    # Versions that are older than the kept ones are no changes.
    assert [len(changes) for changes in recorded["divided"]] == [9, 3, 3]
    assert all(change["at"] != change["previous_at"] for change in recorded["divided"][2])
    parts = flow.by_hand("SELECT state FROM tidegate.state_range WHERE state LIKE '%divided%'")
    assert Counter(parts) == {(f"{kind}_divided_changes",): 3 for kind in ("means", "newest", "overall")}


@pytest.mark.promise("limit:ROWS_AT_ONCE", "decision:0054")
def test_partitions_are_removed_as_a_whole_and_the_rest_in_pieces(totals: Callable[..., Totals]) -> None:
    flow = totals(FEW)
    flow.add(*BATCHES)
    assert flow.parts() == {"0": [1, 2], "3": [3, 4, 5], "6": [6]}
    with pytest.raises(RangeRefused, match="has committed up to txid 6"):
        flow.prune(7)
    with patch.object(pruning, "ROWS_AT_ONCE", 2):
        for up_to, rows, partitions in ((1, 2, ()), (2, 0, ("total_changes$0",)), (4, 4, ())):
            assert flow.prune(up_to)[:3] == (up_to, rows, partitions)
            flow.check(up_to)
        assert flow.parts() == {"3": [5], "6": [6]}
        assert [flow.prune(again)[:3] for again in (4, 3)] == [(4, 0, ()), (3, 0, ())]
        assert flow.store.pruned_txid(flow.spec.states[0]) == 4
        assert flow.prune(6)[:3] == (6, 0, ("total_changes$3", "total_changes$6"))
    assert flow.by_hand("SELECT partition FROM tidegate.state_range") == []
    flow.add(BATCHES[0])
    flow.check(6)
    assert flow.parts() == {"6": [7]}
    actions = flow.by_hand("SELECT txid FROM tidegate.operator_action WHERE action = 'prune' ORDER BY acted_at")
    assert actions == [(1,), (2,), (4,), (4,), (3,), (6,)]


def test_a_follower_stops_before_it_plans_a_range_that_lacks_changes(totals: Callable[..., Totals], settings: Settings) -> None:
    """By a policy that hides them, or a removal meanwhile: a dropped partition is gone from snapshots of before, too."""
    flow = totals()
    flow.add(*BATCHES[:3])
    coordinator = coordinator_of(Changes("shop.total"), settings)
    flow.by_hand("ALTER TABLE state.total_changes ENABLE ROW LEVEL SECURITY")
    with pytest.raises(AccessRefused, match="would be affected by row-level security"):
        coordinator.initialize_transaction(1, None, None)
    flow.by_hand("ALTER TABLE state.total_changes DISABLE ROW LEVEL SECURITY")
    assert coordinator.initialize_transaction(1, None, None)["rows"] == 4  # type: ignore[index]
    refused = pytest.raises(SourceChanged, match=r"some up to txid 2 were removed \(tidegate prune\)")
    with meanwhile(changes_source, "_check_kept", lambda: flow.prune(2)), refused:
        coordinator_of(Changes("shop.total"), settings).initialize_transaction(1, None, None)
