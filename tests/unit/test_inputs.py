"""Several inputs and references: what may be declared, and what a plan freezes, without Spark and Postgres."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tidegate.jobs import Delta, Files, FixedBatches, Inputs, Kafka, Reference
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SourceUnavailable, SourceUnreadable

COLUMNS = {"tail": "string", "amount": "int"}
PLANES = Reference(Files("planes", format="csv", schema={"tail": "string", "seats": "int"}))


def files(folder: str, **source: Any) -> Files:
    return Files(folder, format="csv", **{"schema": COLUMNS, **source})


def lists(*batches: list[tuple], **source: Any) -> FixedBatches:
    return FixedBatches(batches, COLUMNS, **source)


# what may be declared


def test_the_kind_is_that_of_the_weakest_input() -> None:
    assert Inputs({"a": files("a"), "b": files("b")}).kind == "transactional"
    assert Inputs({"a": files("a"), "b": files("b", kind="opaque"), "planes": PLANES}).kind == "opaque"
    assert Inputs({"a": Kafka("a", kind="opaque"), "b": lists(kind="non-transactional")}).kind == "non-transactional"
    assert Inputs({"a": files("a"), "planes": PLANES}, kind="opaque").kind == "opaque"


# what a plan freezes


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a project folder, in which files count as complete at once."""
    return Settings(home=tmp_path, min_file_age_seconds=0)


@pytest.fixture
def write(settings: Settings) -> Callable[..., Path]:
    def write(name: str, text: str = "tail,amount\nN1,1\n") -> Path:
        path = settings.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


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

    start = {
        "partitions": {},
        "idle": {"0": {"start": 9, "end": 9}},
    }  # from where on "latest" reads, which the first plan fixes
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
    with pytest.raises(SourceUnavailable, match="is away"):
        coordinator_of(Inputs({"a": lists(*rows), "b": Away(gone, COLUMNS, kind="opaque")}), settings).initialize_transaction(
            4, second, third
        )


# references


def test_nothing_is_planned_without_the_reference(settings: Settings, write: Callable[..., Path]) -> None:
    source = Inputs({"a": lists([("N1", 1)]), "planes": PLANES})
    with pytest.raises(SourceUnreadable, match="planes does not exist"):
        plan(source, settings)
    (settings.home / "planes").mkdir()
    with pytest.raises(SourceUnreadable, match="The reference has no files"):
        plan(source, settings)
    path = write("planes/1.csv", "tail,seats\nN1,100\n")
    old = replace(settings, min_file_age_seconds=60)
    assert plan(source, old) == []
    assert "1 file(s) changed less than 60 s ago" in (source.held_back(old) or "")
    os.utime(path, (time.time() - 90, time.time() - 90))
    assert len(plan(source, old)) == 1
    assert source.held_back(old) is None
