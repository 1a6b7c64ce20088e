"""Several inputs in one pipeline, merged or joined, and references of a frozen version, against plain Python."""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import functions as F

from tests import steps
from tests.sources.conftest import PER_NAME, SCHEMA, Inbox
from tests.sources.feeds import TableFeed
from tests.sources.in_process import counted_here
from tidegate.jobs import Files, Inputs, Pipeline, Reference, Rows
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    DeclarationChanged,
    DeclarationInvalid,
    RowsLost,
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


def test_inputs_of_different_types_are_not_merged(inbox: Inbox) -> None:
    """Spark would find a common type, and with it other values."""
    merged = inbox.declare(Inputs({"a": files("a"), "b": files("b", {"name": "string", "amount": "bigint"})}))
    inbox.put("a", [("N1", 1)])
    inbox.put("b", [("N1", 1)])
    assert inbox.plan(merged, "run") == [1]
    message = inbox.refused(merged, DeclarationInvalid)
    assert "Inputs a and b are merged, but amount is int in a, and bigint in b." in message


# joins within a batch


def test_a_side_of_a_join_is_read_to_its_end(inbox: Inbox) -> None:
    """Also if the other side is exhausted, and each is a single task, so that Spark would join them without a shuffle."""

    def joined(inputs: Any) -> Any:
        return inputs["a"].where("amount > 100").join(inputs["b"].hint("merge"), "name")

    pipeline = inbox.declare(Inputs({"a": files("a"), "b": files("b", SEATS)}), transform=joined)
    inbox.put("a", [(f"N{number}", 1) for number in range(20)])
    inbox.put("b", [(f"N{number}", 1) for number in range(20)], columns=SEATS)
    assert inbox.run(pipeline, "run") == [1]
    assert steps.history(inbox.settings, 1).status.source_rows == 40


@pytest.mark.soak
def test_a_join_that_reads_rows_twice_says_what_to_do(inbox: Inbox) -> None:
    def joined(inputs: Any, *, mark: Callable[[Any], Any]) -> Any:
        return inputs["a"].join(mark(inputs["b"].select("seats")), F.expr("amount < seats")).select("name", "amount")

    source = Inputs({"a": files("a"), "b": files("b", SEATS)})
    pipeline = inbox.declare(source, transform=partial(joined, mark=lambda rows: rows))
    inbox.put("a", [("N1", 1), ("N2", 2), ("N3", 9)])
    inbox.put("b", [("N1", 2), ("N2", 9)], columns=SEATS)
    assert inbox.plan(pipeline, "run") == [1]
    with pytest.raises(RowsLost, match=r"a join without equal columns, in which one side must be marked by broadcast\(\)"):
        steps.process(inbox.settings, pipeline, 1, owner="run")
    marked = replace(pipeline, transform=partial(joined, mark=F.broadcast))
    steps.complete(inbox.settings, marked, 1)
    assert inbox.counts(marked) == summed([("N1", 1), ("N1", 1), ("N2", 2)])


MISUSES: list[tuple[Callable[..., Any], str]] = [
    (lambda inputs: inputs["a"], "The transform does not use planes"),
    (lambda inputs: inputs["planes"].selectExpr("name", "seats AS amount"), "The transform does not use a:"),
    (lambda inputs: inputs["plane"], "The transform asks for input 'plane'; the pipeline has a, planes"),
    (lambda inputs: inputs, "The transform returns Frames"),
]


def test_a_transform_that_misuses_its_inputs_is_refused(inbox: Inbox) -> None:
    inbox.put("a", [("N1", 1)])
    inbox.put("planes", [("N1", 100)], columns=SEATS)
    for version, (transform, message) in enumerate(MISUSES, start=1):
        pipeline = inbox.declare(Inputs({"a": files("a"), "planes": PLANES}), transform=transform, version=version)
        assert inbox.plan(pipeline, f"run {version}") == [1]
        with pytest.raises(DeclarationInvalid, match=message):
            steps.process(inbox.settings, pipeline, 1, owner="run")


# replays


def test_a_row_that_moves_to_another_input_is_found_by_the_acker(settings: Settings, register: Callable[..., None]) -> None:
    one, other = TableFeed(settings, by_time=False), TableFeed(settings, by_time=False)
    source = Inputs({"a": one.source, "b": other.source})
    pipeline = Pipeline(name="inbox", source=source, states={"per_name": PER_NAME})
    register(pipeline)
    one.put(2)
    other.put(2)
    other._run(f"UPDATE {other.table} SET name = 'N' || id, amount = 7")
    assert steps.plan(settings, pipeline, run_id="run") == [1]
    steps.process(settings, pipeline, 1, owner="first")
    steps.process(settings, pipeline, 1, owner="second", mode="restage")
    before = one._run(f"SELECT id, name, amount FROM {one.table} WHERE id = 1")[0]
    after = other._run(f"SELECT id, name, amount FROM {other.table} WHERE id = 1")[0]
    assert before != after
    for feed, (number, name, amount) in ((one, after), (other, before)):
        feed._run(f"UPDATE {feed.table} SET name = %s, amount = %s WHERE id = %s", (name, amount, number))
    with pytest.raises(SourceChanged, match="replays the identical rows"):
        steps.process(settings, pipeline, 1, owner="third", mode="restage")


# references


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


@pytest.mark.soak
def test_rows_of_a_reference_may_be_used_twice(inbox: Inbox) -> None:
    states = {"per_name": PER_NAME, "route": Rows({"name": "text", "amount": "integer"})}

    def both_ends(inputs: Any) -> Any:
        planes = inputs["planes"]
        first = inputs["a"].join(planes, "name")
        second = planes.selectExpr("name AS other", "seats AS more")
        return first.join(second, F.col("other") == F.col("name"), "left").selectExpr("name", "seats + more AS amount")

    pipeline = inbox.declare(Inputs({"a": files("a"), "planes": PLANES}), transform=both_ends, states=states)
    inbox.put("planes", [(f"N{number}", number) for number in range(50)], columns=SEATS)
    inbox.put("a", [(f"N{number % 60}", 0) for number in range(300)])
    assert [done.txid for done in run_pipeline(inbox.settings, pipeline, run_id="run").commits] == [1]
    expected: dict[str, list[int]] = defaultdict(list)
    for number in range(300):
        if number % 60 < 50:
            expected[f"N{number % 60}"].append(2 * (number % 60))
    assert inbox.counts(pipeline) == {name: (len(amounts), sum(amounts)) for name, amounts in expected.items()}


# declarations that change


@by_ledger
def test_inputs_may_come_and_go_with_the_version(inbox: Inbox, register: Callable[..., None]) -> None:
    one = Inputs({"a": files("a"), "b": files("b")})
    first = inbox.declare(one)
    rows = [("N1", 1), ("N2", 2), ("N3", 3), ("N4", 4)]
    inbox.put("a", rows[:1])
    inbox.put("b", rows[1:2])
    assert inbox.run(first, "first") == [1]

    two = replace(first, source=Inputs({"b": files("b"), "c": files("c")}))
    with pytest.raises(DeclarationChanged, match="raise the pipeline's version"):
        register(two)
    two = replace(two, version=2)
    register(two)
    inbox.put("c", rows[2:3])
    assert inbox.run(two, "second") == [2]
    three = replace(first, source=Inputs({"a": files("a"), "c": files("c")}), version=3)
    register(three)
    inbox.put("a", rows[3:])
    assert inbox.run(three, "third") == [3]
    assert inbox.counts(three) == summed(rows)


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
    without_b = replace(first, source=Inputs({"a": files("a"), "c": files("c")}), version=2)
    assert "planned with input b, which the pipeline does not declare any more" in inbox.refused(without_b, SourceChanged)
    with_planes = replace(first, source=Inputs({**first.source.sources, "planes": PLANES}), version=3, transform=seats_of)  # type: ignore[attr-defined]
    register(with_planes)
    inbox.put("planes", [("N1", 1)], columns=SEATS)
    assert "planned without reference planes" in inbox.refused(with_planes, SourceChanged)
