"""Several inputs, references and partitions: what a plan freezes, without Spark and Postgres."""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.store import SourceMetadata
from tidegate.jobs import Delta, Files, FixedBatches, Inputs, Kafka, Reference
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.jobs.sources.partitioned import PartitionedCoordinator
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import PartitionUnavailable, SourceUnavailable, SourceUnreadable

COLUMNS = {"tail": "string", "amount": "int"}
PLANES = Reference(Files("planes", format="csv", schema={"tail": "string", "seats": "int"}))


def lists(*batches: list[tuple], **source: Any) -> FixedBatches:
    return FixedBatches(batches, COLUMNS, **source)


def test_the_kind_is_that_of_the_weakest_input() -> None:
    a = Files("a", format="csv", schema=COLUMNS)
    opaque = replace(a, folder="b", kind="opaque")
    assert Inputs({"a": a, "b": replace(opaque, kind="transactional")}).kind == "transactional"
    assert Inputs({"a": a, "b": opaque, "planes": PLANES}).kind == "opaque"
    assert Inputs({"a": Kafka("a", kind="opaque"), "b": lists(kind="non-transactional")}).kind == "non-transactional"
    assert Inputs({"a": a, "planes": PLANES}, kind="opaque").kind == "opaque"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, min_file_age_seconds=0)


def plan(source: Inputs, settings: Settings, previous: Any = None, txid: int = 1) -> list[Any]:
    coordinator, found = coordinator_of(source, settings), []
    while (previous := coordinator.initialize_transaction(txid + len(found), previous, None)) is not None:
        found.append(previous)
    return found


def test_each_input_moves_on_by_itself(settings: Settings) -> None:
    a, b = [[("N1", 1)], [("N2", 2)]], [[("N3", 3)]]
    source = Inputs({"a": lists(*a), "b": lists(*b, kind="opaque")})
    first, second = plan(source, settings)
    assert {name: part["position"] for name, part in first["inputs"].items()} == {"a": 0, "b": 0}
    assert first["idle"] == {}
    assert second == {"inputs": {"a": second["inputs"]["a"]}, "idle": {"b": first["inputs"]["b"]}, "references": {}}
    b.append([("N4", 4)])
    without_a = Inputs({"b": lists(*b, kind="opaque"), "c": lists([("N5", 5)], kind="opaque")})
    (third,) = plan(without_a, settings, second, 3)
    assert third["inputs"]["b"]["position"] == 1
    assert third["idle"] == {"a": second["inputs"]["a"]}
    a.append([("N6", 6)])
    (fourth,) = plan(Inputs({"a": lists(*a), "b": lists(*b, kind="opaque")}), settings, third, 4)
    assert fourth["inputs"] == {"a": {**fourth["inputs"]["a"], "position": 2}}
    assert fourth["idle"] == {"b": third["inputs"]["b"], "c": third["inputs"]["c"]}


def test_a_slice_that_only_moves_a_position_is_nobodys_partner(settings: Settings) -> None:
    table = settings.home / "table"
    rows = pa.table({"tail": ["N1"], "amount": pa.array([1], pa.int32())})
    write_deltalake(str(table), rows)
    a = lists([("N1", 1)], [("N2", 2)], [("N3", 3)])
    source = Inputs({"a": a, "b": Delta("table", schema=COLUMNS)}, wait_for_all=True)
    (first,) = plan(source, settings)
    assert set(first["inputs"]) == {"a", "b"}
    write_deltalake(str(table), rows.slice(0, 0), mode="append")  # as OPTIMIZE and the like, it adds no rows
    (second,) = plan(source, settings, first, 2)
    assert (set(second["inputs"]), set(second["idle"])) == ({"b"}, {"a"})
    assert second["inputs"]["b"]["data_files"] == []
    write_deltalake(str(table), rows, mode="append")
    (third,) = plan(source, settings, second, 3)
    assert third["inputs"]["a"]["position"] == 1
    assert len(third["inputs"]["b"]["data_files"]) == 1
    start = {"partitions": {}, "idle": {"0": {"start": 9, "end": 9}}}  # where "latest" begins, which the first plan fixes
    assert not Kafka("topic", start="latest").has_rows(start)
    assert Kafka("topic").has_rows({**start, "partitions": {"1": {"start": 1, "end": 2}}})


@dataclass(frozen=True)
class Away(FixedBatches):
    """Lists whose server is away; `tries` has an entry for each try to reach it."""

    tries: list[str] = field(default_factory=list)

    def coordinator(self, settings: Settings) -> Any:  # noqa: ARG002 - as every source
        self.tries.append("a try")
        raise SourceUnavailable("The server of the lists is away.")


@pytest.mark.promise("error:SOURCE_UNAVAILABLE")
def test_an_input_that_is_away_is_left_out_if_it_is_opaque(settings: Settings) -> None:
    rows, gone = [[("N1", 1)], [("N2", 2)]], [[("N3", 3)]]
    away = Away(gone, COLUMNS, kind="opaque")
    first, second = plan(Inputs({"a": lists(*rows), "b": away}), settings)
    assert len(away.tries) == 1, "a plan of many batches would wait for the server as often"
    assert [set(batch["inputs"]) for batch in (first, second)] == [{"a"}, {"a"}]
    (third,) = plan(Inputs({"a": lists(*rows), "b": lists(*gone, kind="opaque")}), settings, second, 3)
    assert third["inputs"] == {"b": {**third["inputs"]["b"], "position": 0}}
    assert plan(Inputs({"a": lists(*rows), "b": Away(gone, COLUMNS, kind="opaque")}, wait_for_all=True), settings) == []
    with pytest.raises(SourceUnavailable, match="is away"):
        plan(Inputs({"a": lists(*rows), "b": Away(gone, COLUMNS)}), settings)
    again = coordinator_of(Inputs({"a": lists(*rows), "b": Away(gone, COLUMNS, kind="opaque")}), settings)
    with pytest.raises(SourceUnavailable, match="is away"):
        again.initialize_transaction(4, second, third)


def test_nothing_is_planned_without_the_reference(settings: Settings) -> None:
    source = Inputs({"a": lists([("N1", 1)]), "planes": PLANES})
    with pytest.raises(SourceUnreadable, match="planes does not exist"):
        plan(source, settings)
    (settings.home / "planes").mkdir()
    with pytest.raises(SourceUnreadable, match="The reference has no files"):
        plan(source, settings)
    (path := settings.home / "planes/1.csv").write_text("tail,seats\nN1,100\n")
    old = replace(settings, min_file_age_seconds=60)
    assert plan(source, old) == []
    assert "1 file(s) changed less than 60 s ago" in (source.held_back(old) or "")
    os.utime(path, (time.time() - 90, time.time() - 90))
    assert len(plan(source, old)) == 1
    assert source.held_back(old) is None


@dataclass
class Counters:
    """Partitions whose slices are numbers one after another; those that are out of reach have no next one."""

    exist: list[str]
    out_of_reach: str = ""

    def names(self) -> Collection[str]:
        return self.exist

    def next_slice(self, partition: str, previous: SourceMetadata | None) -> SourceMetadata | None:
        if partition == self.out_of_reach:
            raise PartitionUnavailable(f"{partition} has no leader")
        return {"at": previous["at"] + 1 if previous else 1}


@pytest.mark.parametrize("away", [Counters(["a"]), Counters(["a", "b"], "b")], ids=["vanished", "out of reach"])
def test_a_partition_that_is_away_stops_a_transactional_source_only(away: Counters) -> None:
    first = PartitionedCoordinator("opaque", Counters(["a", "b"])).initialize_transaction(1, None, None)
    assert first == {"partitions": {"a": {"at": 1}, "b": {"at": 1}}, "idle": {}}
    with pytest.raises(PartitionUnavailable, match="b"):
        PartitionedCoordinator("transactional", away).initialize_transaction(2, first, None)
    second = PartitionedCoordinator("opaque", away).initialize_transaction(2, first, None)
    assert second == {"partitions": {"a": {"at": 2}}, "idle": {"b": {"at": 1}}}
    third = PartitionedCoordinator("opaque", Counters(["a", "b"])).initialize_transaction(3, second, None)
    assert third == {"partitions": {"a": {"at": 3}, "b": {"at": 2}}, "idle": {}}
