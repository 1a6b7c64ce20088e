"""Quarantine of several inputs: bad records are set aside with their input's name, and replayed as records of that input."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import functions as F

from tests import steps
from tests.sources.conftest import SCHEMA, Inbox
from tests.sources.test_inputs import PLANES, SEATS, files, summed
from tidegate.jobs import FixedBatches, Inputs, Pipeline
from tidegate.jobs.sources.binding import replayed_with
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import DeclarationInvalid, RangeRefused, SourceChanged

CHECK = {"not negative": "amount >= 0"}
# The two inputs' files look alike only at first sight: a record that the wrong input reads is bad, or another one.
SOURCE = Inputs(
    {"a": files("a", max_files=1), "b": files("b", {"amount": "int", "name": "string"}, options={"sep": ";"}, max_files=2)}
)


@pytest.fixture(autouse=True)
def _folders(inbox: Inbox) -> None:
    for name in ("a", "b"):
        (inbox.settings.home / name).mkdir()


def declare(inbox: Inbox, source: Inputs = SOURCE, **more: Any) -> Pipeline:
    return inbox.declare(source, **{"on_poison": "quarantine", "retry_delay_seconds": 0, **more})


def open_replay(inbox: Inbox, pipeline: Pipeline, **of: Any) -> tuple[int, int] | None:
    beside = replayed_with(pipeline.source, inbox.settings)
    with StateStore.connect(inbox.settings) as store:
        return store.replay_quarantined(pipeline.spec, "test", "mended", beside=beside, **of)


def replay(inbox: Inbox, pipeline: Pipeline, **options: Any) -> int:
    opened = open_replay(inbox, pipeline)
    assert opened is not None
    assert inbox.run(pipeline, f"replay {opened[0]}", **options) == [opened[0]]
    return opened[0]


def write(inbox: Inbox, folder: str, name: str, lines: Iterable[str]) -> Path:
    path = inbox.settings.home / folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.soak
def test_a_replay_is_the_same_in_each_attempt(inbox: Inbox) -> None:
    lists = FixedBatches([[("x", 1), ("y", 2), (None, 3)]], SCHEMA)
    write(inbox, "a", "1.csv", ["name,amount", "x,-1"])
    pipeline = declare(inbox, Inputs({"lists": lists, "a": files("a")}), check={"lists": {"known": "amount <> 2"}, **CHECK})
    assert inbox.run(pipeline, "run") == [1]
    assert {(r["origin"], r["reason"]) for r in steps.waiting(inbox.settings)} == {
        ("lists", "key column name is NULL"),
        ("lists", "fails the check 'known'"),
        ("a: 1.csv, line 2", "fails the check 'not negative'"),
    }
    for record in steps.waiting(inbox.settings):
        payload = json.loads(record["payload"])
        amount = 7 if payload["amount"] == 2 else abs(payload["amount"])
        steps.mend(inbox.settings, record, json.dumps({"name": payload["name"] or "z", "amount": amount}))
    assert open_replay(inbox, pipeline) == (2, 3)
    assert inbox.plan(pipeline, "replay") == [2]
    for owner, mode in (("first", "resume"), ("second", "restage")):
        steps.process(inbox.settings, pipeline, 2, owner=owner, mode=mode)  # type: ignore[arg-type]

    def alter(change: str) -> None:
        owner = replace(inbox.settings, pg_user=inbox.settings.pg_owner)
        with StateStore.connect(owner) as store, store.engine.begin() as connection:
            statement = f"UPDATE tidegate.quarantine SET {change} WHERE origin = 'a: 1.csv, line 2'"
            assert connection.execute(sa.text(statement)).rowcount == 1

    alter("mended_payload = replace(mended_payload, '1', '9')")
    assert "replays the identical rows" in inbox.refused(pipeline, SourceChanged, 2, mode="restage")
    alter("mended_payload = replace(mended_payload, '9', '1')")
    steps.process(inbox.settings, pipeline, 2, owner="third", mode="restage")
    alter("origin = replace(origin, 'a:', 'c:')")
    message = inbox.refused(pipeline, SourceChanged, 2, mode="restage")
    assert "3 records were taken out of quarantine for this batch, but 2 are there" in message


@pytest.mark.soak
def test_records_of_an_input_that_is_gone_are_refused(inbox: Inbox) -> None:
    """When they would be taken up, and when they have been; given up, they wait again; with the input back, they count."""
    write(inbox, "a", "1.csv", ["name,amount", "x,1"])
    write(inbox, "b", "1.csv", ["amount;name", "two;y"])
    pipeline = declare(inbox)
    assert inbox.run(pipeline, "run") == [1]
    others = Inputs({"a": SOURCE.parts["a"], "c": files("c")})
    (inbox.settings.home / "c").mkdir()
    without = declare(inbox, others, version=2)
    with pytest.raises(RangeRefused, match="records of input b wait in quarantine, and the pipeline does not declare it"):
        open_replay(inbox, without)
    assert len(steps.waiting(inbox.settings)) == 1
    back = declare(inbox, version=3)
    steps.mend(inbox.settings, steps.waiting(inbox.settings)[0], "2;y")
    assert open_replay(inbox, back) == (2, 1)
    gone = declare(inbox, others, version=4)
    assert inbox.plan(gone, "gone") == [2]
    assert "input b, which the pipeline does not declare any more" in inbox.refused(gone, SourceChanged, 2)
    with StateStore.connect(inbox.settings) as store:
        store.skip_batch(gone.spec, 2, "test", "b is to come back")
    assert [record["mended_payload"] for record in steps.waiting(inbox.settings)] == ["2;y"]
    again = declare(inbox, version=5)
    assert replay(inbox, again) == 3
    assert inbox.counts(again) == summed([("x", 1), ("y", 2)])


# joins


def united(inputs: Any) -> Any:
    rows = inputs["a"].unionByName(inputs["b"].selectExpr("name", "miles AS amount"))
    return rows.join(F.broadcast(inputs["planes"]), "name", "left").selectExpr("name", "amount * coalesce(seats, 0) AS amount")


UNITED = Inputs({"a": files("a"), "b": files("b", {"name": "string", "miles": "int"}), "planes": PLANES})


@pytest.mark.promise("decision:0050")
def test_a_replayed_record_is_joined_with_the_reference_as_of_now(inbox: Inbox) -> None:
    planes = inbox.put("planes", [("x", 10), ("y", 20)], columns=SEATS)
    write(inbox, "a", "1.csv", ["name,amount", "x,1", "y,two"])
    write(inbox, "b", "1.csv", ["name,miles", "x,-3", "y,4", "z,five"])
    check: dict[str, Any] = {"b": {"far": "miles > 0"}}
    pipeline = declare(inbox, UNITED, transform=united, check=check)
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
    with StateStore.connect(inbox.settings) as store, pytest.raises(RangeRefused, match="joined with reference planes"):
        store.replay_quarantined(pipeline.spec, "test", "as the page does")
    assert len(steps.waiting(inbox.settings)) == 3
    assert open_replay(inbox, pipeline) == (2, 3)
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
    write(inbox, "a", "1.csv", ["name,amount", "x,1"])
    for version, transform in enumerate(MEETINGS.values(), start=1):
        pipeline = declare(inbox, source, transform=transform, version=version)
        assert inbox.plan(pipeline, f"run {version}") == [1]
        message = inbox.refused(pipeline, DeclarationInvalid)
        assert "joins input a with input b" in message or "joins input b with input a" in message
        assert "so bad records cannot be set aside: one that is taken up later would miss the rows" in message
    blocking = declare(inbox, source, transform=joined, on_poison="block", version=version + 1)
    inbox.run(blocking, "block")
    assert inbox.counts(blocking) == {"x": (1, 1)}
