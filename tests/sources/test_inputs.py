"""Several inputs in one pipeline, merged, joined or set aside, and references of a frozen version, against plain Python."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import functions as F

from tests import steps
from tests.sources.conftest import PER_NAME, SCHEMA, Inbox
from tests.sources.in_process import counted_here
from tidegate.jobs import Files, Inputs, Pipeline, Reference
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.compute.stage.row_tracking import row_id
from tidegate.jobs.sources.binding import replayed_with
from tidegate.jobs.sources.files.formats.text_files import text_reader
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import (
    DeclarationChanged,
    DeclarationInvalid,
    RangeRefused,
    SourceChanged,
    TidegateError,
)

__all__ = ["counted_here"]  # a fixture

Row = tuple[str, int]
SEATS = {"name": "string", "seats": "int"}


def files(folder: str, schema: dict[str, str] | None = None, **source: Any) -> Files:
    return Files(folder, format="csv", schema=schema or SCHEMA, **source)


def summed(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    lines, amounts = Counter[str](), Counter[str]()
    for name, amount in rows:
        lines[name] += 1
        amounts[name] += amount
    return {name: (lines[name], amounts[name]) for name in lines}


PLANES = Reference(files("planes", SEATS))


def seats_of(inputs: Any) -> Any:
    return inputs["a"].join(inputs["planes"], "name").selectExpr("name", "seats AS amount")


def _seats_here(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    planes = rows["planes"]
    return [
        {"name": row["name"], "amount": plane["seats"]} for row in rows["a"] for plane in planes if plane["name"] == row["name"]
    ]


seats_of.in_process = _seats_here  # type: ignore[attr-defined]
by_ledger = pytest.mark.usefixtures("counted_here")  # its batches go through the real ledger, and are counted without Spark


# merges


@pytest.mark.promise("decision:0030")
@pytest.mark.parametrize("routing", ["chosen", pytest.param("safe", marks=pytest.mark.soak)])
def test_merged_inputs_count_each_row_once(inbox: Inbox, routing: str) -> None:
    merged = inbox.declare(Inputs({"a": files("a"), "b": files("b", {"amount": "int", "name": "string"}, max_files=2)}))
    rows: list[Row] = [(f"N{number % 7}", number) for number in range(40)]
    for number in range(3):
        inbox.put("a", rows[number * 4 : number * 4 + 4])
    for number in range(3, 6):
        backwards = [(amount, name) for name, amount in rows[number * 4 : number * 4 + 4]]
        inbox.put("b", backwards, columns=("amount", "name"))
    assert inbox.run(merged, "first", routing=steps.ROUTINGS[routing]) == [1, 2, 3]
    assert inbox.counts(merged) == summed(rows[:24])

    (inbox.settings.home / "a/000.csv").touch()
    (inbox.settings.home / "b/000.csv").touch()
    assert inbox.run(merged, "touched") == []
    inbox.put("b", [(9, "N9")], columns=("amount", "name"))
    assert inbox.run(merged, "second", routing=steps.ROUTINGS[routing]) == [4]
    assert inbox.counts(merged) == summed([*rows[:24], ("N9", 9)])
    with StateStore.connect(inbox.settings) as store, store.engine.connect() as connection:
        names = connection.scalars(sa.text("SELECT name FROM tidegate.source_file ORDER BY name")).all()
    assert names == [f"{name}/00{number}.csv" for name, count in (("a", 3), ("b", 4)) for number in range(count)]


def test_equal_rows_of_two_inputs_have_different_hashes(inbox: Inbox) -> None:
    """So that a replay in which a row has moved from one to the other is refused."""
    with spark_session(inbox.settings, "inbox") as spark:
        rows = spark.range(1)
        ids = rows.select(*(row_id(rows.schema, ["id"], name) for name in ("", "a", "b"))).first()
    assert len(set(ids)) == 3


def test_inputs_of_different_types_are_not_merged(inbox: Inbox) -> None:
    """Spark would find a common type, and with it other values."""
    merged = inbox.declare(Inputs({"a": files("a"), "b": files("b", {"name": "string", "amount": "bigint"})}))
    inbox.put("a", [("N1", 1)])
    inbox.put("b", [("N1", 1)])
    assert inbox.plan(merged, "run") == [1]
    message = inbox.refused(merged, DeclarationInvalid)
    assert "Inputs a and b are merged, but amount is int in a, and bigint in b." in message


# joins and references


def test_a_side_of_a_join_is_read_although_the_other_is_empty(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a single task, so that Spark would join them without a shuffle."""
    monkeypatch.setattr(text_reader, "HERE_BYTES", 0)

    def joined(inputs: Any) -> Any:
        return inputs["a"].join(inputs["b"].where("seats > 100").hint("shuffle_hash"), "name")

    pipeline = inbox.declare(Inputs({"a": files("a"), "b": files("b", SEATS)}), transform=joined)
    inbox.put("a", [("N1", 1)])
    inbox.put("b", [("N1", 1)], columns=SEATS)
    assert inbox.run(pipeline, "run") == [1]


@by_ledger
@pytest.mark.promise("I11", "fault:reference-is-replaced-before-batch-has-committed:processing")
def test_a_batch_is_refused_until_its_version_is_back(inbox: Inbox) -> None:
    pipeline = inbox.declare(Inputs({"a": files("a"), "planes": PLANES}), transform=seats_of)
    planes = inbox.put("planes", [("N1", 100)], columns=SEATS)
    inbox.put("a", [("N1", 0)])
    assert inbox.plan(pipeline, "run") == [1]
    content = planes.read_text()
    advice = "It is a reference of this batch: put back what was planned until the batch has committed"
    planes.write_text(content.replace("100", "101"))
    message = inbox.refused(pipeline, SourceChanged)
    assert f"{planes} changed since its batch was planned" in message
    assert advice in message
    planes.unlink()
    assert f"{planes} is gone since its batch was planned. {advice}" in inbox.refused(pipeline, SourceChanged)
    planes.write_text(content)
    inbox.put("planes", [("N1", 7)], columns=SEATS)
    steps.process(inbox.settings, pipeline, 1, owner="first")
    planes.write_text(content + "N2,7\n")
    assert advice in inbox.refused(pipeline, SourceChanged, mode="restage")
    planes.write_text(content)
    steps.process(inbox.settings, pipeline, 1, owner="again", mode="restage")
    steps.commit(inbox.settings, pipeline, 1, owner="again")
    assert inbox.counts(pipeline) == {"N1": (1, 100)}


@pytest.mark.soak
@pytest.mark.promise("fault:reference-is-replaced-before-batch-has-committed:processing")
def test_a_reference_that_changes_during_the_read_is_found(inbox: Inbox) -> None:
    planes = inbox.put("planes", [("N1", 100)], columns=SEATS)

    def changing(inputs: Any) -> Any:
        planes.write_text(planes.read_text().replace("100", "101"))
        return seats_of(inputs)

    pipeline = inbox.declare(Inputs({"a": files("a"), "planes": PLANES}), transform=changing)
    inbox.put("a", [("N1", 0)])
    assert inbox.plan(pipeline, "run") == [1]
    assert "changed since its batch was planned" in inbox.refused(pipeline, SourceChanged)


@by_ledger
@pytest.mark.promise("fault:reference-is-replaced-before-batch-has-committed:processing")
def test_kept_versions_survive_their_files(inbox: Inbox) -> None:
    kept = replace(PLANES, keep_folder="kept")
    pipeline = inbox.declare(Inputs({"a": files("a"), "planes": kept}), transform=seats_of)
    inbox.put("planes", [("N1", 100)], columns=SEATS, name="planes.csv")
    inbox.put("a", [("N1", 0)])
    assert inbox.plan(pipeline, "first") == [1]
    inbox.put("planes", [("N1", 200)], columns=SEATS, name="planes.csv")
    inbox.put("a", [("N1", 0)])
    assert inbox.plan(pipeline, "second") == [1, 2]
    shutil.rmtree(inbox.settings.home / "planes")
    for txid, mode in ((1, "resume"), (2, "resume"), (1, "restage")):
        steps.process(inbox.settings, pipeline, txid, owner="run", mode=mode)
    for txid in (1, 2):
        steps.commit(inbox.settings, pipeline, txid, owner="run")
    assert inbox.counts(pipeline) == {"N1": (2, 300)}
    assert len(list((inbox.settings.home / "kept").rglob("planes.csv"))) == 2


@by_ledger
@pytest.mark.promise("fault:reference-is-replaced-before-batch-has-committed:processing")
def test_an_opaque_batch_is_planned_again_with_the_new_version(inbox: Inbox) -> None:
    per_name = replace(PER_NAME, kind="opaque")
    source = Inputs({"a": files("a"), "planes": PLANES}, kind="opaque")
    pipeline = inbox.declare(source, transform=seats_of, states={"per_name": per_name})
    planes = inbox.put("planes", [("N1", 100)], columns=SEATS)
    inbox.put("a", [("N1", 0)])
    inbox.put("a", [("N1", 0)])
    assert inbox.plan(pipeline, "run") == [1, 2]
    inbox.put("planes", [("N1", 200)], columns=SEATS, name=planes.name)
    with pytest.raises(TidegateError, match="The batch is planned again"):
        steps.process(inbox.settings, pipeline, 1, owner="first")
    inbox.run(pipeline, "again")
    assert inbox.counts(pipeline) == {"N1": (2, 400)}
    inbox.put("planes", [("N1", 1)], columns=SEATS, name=planes.name)
    steps.redo(inbox.settings, pipeline, 2, owner="test", reason="other seats")
    assert inbox.counts(pipeline) == {"N1": (2, 201)}


# declarations that change


@by_ledger
def test_a_change_that_would_read_an_input_again_is_refused(inbox: Inbox, register: Callable[..., None]) -> None:
    first = inbox.declare(Inputs({"a": files("a"), "b": files("b")}))
    inbox.put("a", [("N1", 1)])
    inbox.put("b", [("N1", 1)])
    assert inbox.plan(first, "run") == [1]
    single = Pipeline("single", files("a"), {"alone": PER_NAME})
    register(single)
    assert inbox.run(single) == [1]
    with pytest.raises(DeclarationChanged, match=r"single has batches of one source: files .*new names"):
        register(replace(single, source=first.source, version=2))
    renamed = replace(first, source=Inputs({"a": files("a"), "bees": files("b")}), version=2)
    with pytest.raises(DeclarationChanged, match=r"input b is called bees now.*Call it b again"):
        register(renamed)
    with pytest.raises(DeclarationChanged, match=r"inbox has batches of several inputs: .*new names"):
        register(replace(first, source=files("a"), version=2))
    register(replace(first, source=Inputs({"a": files("a"), "c": files("c")}), version=2))


# quarantine


def setting_aside(inbox: Inbox, source: Inputs, **more: Any) -> Pipeline:
    return inbox.declare(source, **{"on_poison": "quarantine", "retry_delay_seconds": 0, **more})


def united(inputs: Any) -> Any:
    rows = inputs["a"].unionByName(inputs["b"].selectExpr("name", "miles AS amount"))
    return rows.join(F.broadcast(inputs["planes"]), "name", "left").selectExpr("name", "amount * coalesce(seats, 0) AS amount")


UNITED = Inputs({"a": files("a"), "b": files("b", {"name": "string", "miles": "int"}), "planes": PLANES})


@pytest.mark.promise("decision:0050")
def test_a_replayed_record_is_joined_with_the_reference_as_of_now(inbox: Inbox) -> None:
    planes = inbox.put("planes", [("x", 10), ("y", 20)], columns=SEATS)
    inbox.put("a", [("x", 1), ("y", "two")], name="1.csv")
    inbox.put("b", [("x", -3), ("y", 4), ("z", "five")], columns=("name", "miles"), name="1.csv")
    check: dict[str, Any] = {"b": {"far": "miles > 0"}}
    pipeline = setting_aside(inbox, UNITED, transform=united, check=check)
    assert inbox.run(pipeline, "run") == [1]
    assert inbox.counts(pipeline) == summed([("x", 10), ("y", 80)])
    records = {record["origin"]: record for record in steps.waiting(inbox.settings)}
    assert {origin: record["reason"] for origin, record in records.items()} == {
        "a: 1.csv, line 3": "column amount: 'two' is no int",
        "b: 1.csv, line 2": "fails the check 'far'",
        "b: 1.csv, line 4": "column miles: 'five' is no int",
    }
    steps.mend(inbox.settings, records["a: 1.csv, line 3"], "y,2")
    steps.mend(inbox.settings, records["b: 1.csv, line 2"], '{"name": "x", "miles": 3}')
    steps.mend(inbox.settings, records["b: 1.csv, line 4"], "z,5")
    inbox.put("planes", [("x", 100), ("z", 300)], columns=SEATS, name=planes.name)
    with StateStore.connect(inbox.settings) as store:
        with pytest.raises(RangeRefused, match="joined with reference planes"):
            store.replay_quarantined(pipeline.spec, "test", "as the page does")
        assert len(steps.waiting(inbox.settings)) == 3
        beside = replayed_with(pipeline.source, inbox.settings)
        assert store.replay_quarantined(pipeline.spec, "test", "mended", beside=beside) == (2, 3)
    assert steps.metadata(inbox.settings, 2)["records"] == {"a": 1, "b": 2}
    content = planes.read_text()
    inbox.put("planes", [("x", 7)], columns=SEATS, name=planes.name)
    assert inbox.plan(pipeline, "replay") == [2]
    assert "put back what was planned until the batch has committed" in inbox.refused(pipeline, SourceChanged, 2)
    planes.write_text(content)
    inbox.run(pipeline, "again")
    expected = summed([("x", 10), ("y", 80), ("y", 0), ("x", 300), ("z", 1500)])
    assert inbox.counts(pipeline) == expected
    assert steps.waiting(inbox.settings) == []


def joined(inputs: Any) -> Any:
    return inputs["a"].join(inputs["b"].select("name"), "name", "left")


MEETINGS: dict[str, Callable[[Any], Any]] = {
    "left": joined,
    "inner": lambda inputs: inputs["b"].select("name").join(inputs["a"], "name"),
    "semi": lambda inputs: inputs["a"].join(inputs["b"], "name", "left_semi"),
    "after a union": lambda inputs: inputs["a"].join(inputs["a"].unionByName(inputs["b"]).select("name"), "name"),
    "below a filter": lambda inputs: joined(inputs).where("amount > 0").groupBy("name").agg(F.sum("amount").alias("amount")),
    "subtracted": lambda inputs: inputs["a"].exceptAll(inputs["b"]),
    "in a subquery": lambda inputs: inputs["a"].where(F.col("amount") > inputs["b"].agg(F.max("amount")).scalar()),
    "of groups": lambda inputs: (
        inputs["a"]
        .groupBy("name")
        .cogroup(inputs["b"].groupBy("name"))
        .applyInPandas(lambda left, _right: left, "name string, amount int")
    ),
}


@pytest.mark.soak
@pytest.mark.promise("decision:0050")
def test_inputs_that_are_joined_are_refused(inbox: Inbox) -> None:
    source = Inputs({"a": files("a"), "b": files("b")})
    inbox.put("a", [("x", 1)])
    (inbox.settings.home / "b").mkdir()
    for version, transform in enumerate(MEETINGS.values(), start=1):
        pipeline = setting_aside(inbox, source, transform=transform, version=version)
        assert inbox.plan(pipeline, f"run {version}") == [1]
        message = inbox.refused(pipeline, DeclarationInvalid)
        assert "joins input a with input b" in message or "joins input b with input a" in message
        assert "so bad records cannot be set aside: one that is taken up later would miss the rows" in message
    blocking = setting_aside(inbox, source, transform=joined, on_poison="block", version=version + 1)
    inbox.run(blocking, "block")
    assert inbox.counts(blocking) == {"x": (1, 1)}
