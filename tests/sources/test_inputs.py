"""Several inputs in one pipeline, merged, joined or set aside, and references of a frozen version, against plain Python."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import functions as F

from tests import steps
from tests.sources.conftest import PER_NAME, Inbox
from tests.sources.in_process import SCHEMA, raises, summed, twin
from tests.sources.lake_tables import DeltaLakeTable, IcebergTable, path_of, rows_of
from tests.statements import execute
from tests.store import errors
from tidegate.jobs import Files, Inputs, Pipeline, PostgresTable, Reference, Rows
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.compute.stage.row_tracking import row_id
from tidegate.jobs.sources.binding import coordinator_of, replayed_with
from tidegate.jobs.sources.files.formats.text_files import text_reader
from tidegate.jobs.sources.inputs import reference
from tidegate.jobs.sources.inputs.reference_versions import version_of
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import DeclarationChanged, DeclarationInvalid, SourceChanged, SourceUnreadable

SEATS = {"name": "string", "seats": "int"}


def files(folder: str, schema: dict[str, str] | None = None, **source: Any) -> Files:
    return Files(folder, format="csv", schema=schema or SCHEMA, **source)


PLANES = Reference(files("planes", SEATS))
A_AND_B = Inputs({"a": files("a"), "b": files("b")})


@twin
def seats_of(inputs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    seats = {plane["name"]: plane["seats"] for plane in inputs["planes"]}
    return [{"name": row["name"], "amount": seats[row["name"]]} for row in inputs["a"]]


def with_seats(inbox: Inbox, kind: Any = "transactional") -> Pipeline:
    """Declare a pipeline whose rows have the seats of planes as their amounts."""
    source = Inputs({"a": files("a"), "planes": PLANES}, kind=kind)
    return inbox.declare(source, transform=seats_of, states={"per_name": replace(PER_NAME, kind=kind)})


def seats(inbox: Inbox, number: int) -> Any:
    return inbox.put("planes", [("N1", number)], columns=SEATS, name="planes.csv")


@pytest.mark.promise("decision:0030")
@pytest.mark.parametrize("routing", ["chosen", pytest.param("safe", marks=pytest.mark.soak)])
def test_merged_inputs_count_each_row_once(inbox: Inbox, routing: str) -> None:
    merged = inbox.declare(Inputs({"a": files("a"), "b": files("b", {"amount": "int", "name": "string"}, max_files=2)}))
    rows = [(f"N{number % 7}", number) for number in range(24)]
    for start in (0, 4, 8):
        inbox.put("a", rows[start : start + 4])
        inbox.put("b", [(amount, name) for name, amount in rows[start + 12 : start + 16]], columns=("amount", "name"))
    assert inbox.run(merged, "first", routing=steps.ROUTINGS[routing]) == [1, 2, 3]
    assert inbox.counts(merged) == summed(rows)
    (inbox.settings.home / "a/000.csv").touch()
    (inbox.settings.home / "b/000.csv").touch()
    assert inbox.run(merged, "touched") == []
    inbox.put("b", [(9, "N9")], columns=("amount", "name"))
    assert inbox.run(merged, "second", routing=steps.ROUTINGS[routing]) == [4]
    assert inbox.counts(merged) == summed([*rows, ("N9", 9)])
    names = execute(inbox.settings.conninfo(), "SELECT name FROM tidegate.source_file ORDER BY name")
    assert names == [(f"{name}/00{number}.csv",) for name, count in (("a", 3), ("b", 4)) for number in range(count)]


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
    assert "Inputs a and b are merged, but amount is int in a, and bigint in b." in inbox.refused(merged, DeclarationInvalid)


def test_a_side_of_a_join_is_read_although_the_other_is_empty(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a single task, so that Spark would join them without a shuffle."""
    monkeypatch.setattr(text_reader, "HERE_BYTES", 0)
    pipeline = inbox.declare(
        Inputs({"a": files("a"), "b": files("b", SEATS)}),
        transform=lambda inputs: inputs["a"].join(inputs["b"].where("seats > 100").hint("shuffle_hash"), "name"),
    )
    inbox.put("a", [("N1", 1)])
    inbox.put("b", [("N1", 1)], columns=SEATS)
    assert inbox.run(pipeline, "run") == [1]


@pytest.mark.usefixtures("counted_here")
@pytest.mark.promise("I11", "fault:reference-is-replaced-before-batch-has-committed:processing")
def test_a_batch_is_refused_until_its_version_is_back(inbox: Inbox) -> None:
    pipeline, planes = with_seats(inbox), seats(inbox, 100)
    inbox.put("a", [("N1", 0)])
    assert inbox.plan(pipeline, "run") == [1]
    advice = "It is a reference of this batch: put back what was planned until the batch has committed"
    seats(inbox, 101)
    message = inbox.refused(pipeline, SourceChanged)
    assert f"{planes} changed since its batch was planned" in message
    assert advice in message
    planes.unlink()
    assert f"{planes} is gone since its batch was planned. {advice}" in inbox.refused(pipeline, SourceChanged)
    seats(inbox, 100)
    inbox.put("planes", [("N1", 7)], columns=SEATS)
    steps.process(inbox.settings, pipeline, 1, owner="first")
    seats(inbox, 102)
    assert advice in inbox.refused(pipeline, SourceChanged, mode="restage")
    seats(inbox, 100)
    steps.complete(inbox.settings, pipeline, 1, owner="again", mode="restage")
    assert inbox.counts(pipeline) == {"N1": (1, 100)}


@pytest.mark.usefixtures("counted_here")
@pytest.mark.promise("fault:reference-is-replaced-before-batch-has-committed:processing")
def test_an_opaque_batch_is_planned_again_with_the_new_version(inbox: Inbox) -> None:
    pipeline = with_seats(inbox, kind="opaque")
    seats(inbox, 100)
    inbox.put("a", [("N1", 0)])
    inbox.put("a", [("N1", 0)])
    assert inbox.plan(pipeline, "run") == [1, 2]
    seats(inbox, 200)
    with pytest.raises(errors.SourceUnavailable, match="The batch is planned again"):
        steps.process(inbox.settings, pipeline, 1, owner="first")
    inbox.run(pipeline, "again")
    assert inbox.counts(pipeline) == {"N1": (2, 400)}
    seats(inbox, 1)
    steps.redo(inbox.settings, pipeline, 2, owner="test", reason="other seats")
    assert inbox.counts(pipeline) == {"N1": (2, 201)}


@pytest.mark.usefixtures("counted_here")
def test_a_change_that_would_read_an_input_again_is_refused(inbox: Inbox, register: Callable[..., None]) -> None:
    first = inbox.declare(A_AND_B)
    inbox.put("a", [("N1", 1)])
    inbox.put("b", [("N1", 1)])
    assert inbox.plan(first, "run") == [1]
    single = Pipeline("single", files("a"), {"alone": PER_NAME})
    register(single)
    assert inbox.run(single) == [1]
    for pipeline, source, refusal in (
        (single, first.source, r"single has batches of one source: files .*new names"),
        (first, Inputs({"a": files("a"), "bees": files("b")}), r"input b is called bees now.*Call it b again"),
        (first, files("a"), r"inbox has batches of several inputs: .*new names"),
    ):
        with pytest.raises(DeclarationChanged, match=refusal):
            register(replace(pipeline, source=source, version=2))
    register(replace(first, source=Inputs({"a": files("a"), "c": files("c")}), version=2))


def united(inputs: Any) -> Any:
    rows = inputs["a"].unionByName(inputs["b"].selectExpr("name", "miles AS amount"))
    return rows.join(F.broadcast(inputs["planes"]), "name", "left").selectExpr("name", "amount * coalesce(seats, 0) AS amount")


UNITED = Inputs({"a": files("a"), "b": files("b", {"name": "string", "miles": "int"}), "planes": PLANES})
QUARANTINE: dict[str, Any] = {"on_poison": "quarantine", "retry_delay_seconds": 0}


@pytest.mark.promise("decision:0050")
def test_a_replayed_record_is_joined_with_the_reference_as_of_now(inbox: Inbox, store: StateStore) -> None:
    planes = inbox.put("planes", [("x", 10), ("y", 20)], columns=SEATS)
    inbox.put("a", [("x", 1), ("y", "two")], name="1.csv")
    inbox.put("b", [("x", -3), ("y", 4), ("z", "five")], columns=("name", "miles"), name="1.csv")
    pipeline = inbox.declare(UNITED, transform=united, check={"b": {"far": "miles > 0"}}, **QUARANTINE)
    assert inbox.run(pipeline, "run") == [1]
    assert inbox.counts(pipeline) == summed([("x", 10), ("y", 80)])
    records = {(record["origin"], record["reason"]): record for record in steps.waiting(inbox.settings)}
    mended = {
        ("a: 1.csv, line 3", "column amount: 'two' is no int"): "y,2",
        ("b: 1.csv, line 2", "fails the check 'far'"): '{"name": "x", "miles": 3}',
        ("b: 1.csv, line 4", "column miles: 'five' is no int"): "z,5",
    }
    assert records.keys() == mended.keys()
    for key, payload in mended.items():
        steps.mend(inbox.settings, records[key], payload)
    inbox.put("planes", [("x", 100), ("z", 300)], columns=SEATS, name=planes.name)
    with pytest.raises(errors.RangeRefused, match="joined with reference planes"):
        store.replay_quarantined(pipeline.spec, "test", "as the page does")
    beside = replayed_with(pipeline.source, inbox.settings)
    assert store.replay_quarantined(pipeline.spec, "test", "mended", beside=beside) == (2, 3)
    assert steps.metadata(inbox.settings, 2)["records"] == {"a": 1, "b": 2}
    content = planes.read_text()
    inbox.put("planes", [("x", 7)], columns=SEATS, name=planes.name)
    assert inbox.plan(pipeline, "replay") == [2]
    assert "put back what was planned until the batch has committed" in inbox.refused(pipeline, SourceChanged, 2)
    planes.write_text(content)
    inbox.run(pipeline, "again")
    assert inbox.counts(pipeline) == summed([("x", 10), ("y", 80), ("y", 0), ("x", 300), ("z", 1500)])
    assert steps.waiting(inbox.settings) == []


MEETINGS: tuple[Callable[[Any], Any], ...] = (
    lambda inputs: inputs["a"].join(inputs["b"].select("name"), "name", "left"),
    lambda inputs: inputs["a"].join(inputs["b"], "name", "left_semi"),
    lambda inputs: inputs["a"].join(inputs["a"].unionByName(inputs["b"]).select("name"), "name"),
    lambda inputs: inputs["a"].exceptAll(inputs["b"]),
    lambda inputs: inputs["a"].where(F.col("amount") > inputs["b"].agg(F.max("amount")).scalar()),
    lambda inputs: (
        inputs["a"]
        .groupBy("name")
        .cogroup(inputs["b"].groupBy("name"))
        .applyInPandas(lambda left, _: left, "name string, amount int")
    ),
)


@pytest.mark.soak
@pytest.mark.promise("decision:0050")
def test_inputs_that_are_joined_are_refused(inbox: Inbox) -> None:
    inbox.put("a", [("x", 1)])
    (inbox.settings.home / "b").mkdir()
    for version, transform in enumerate(MEETINGS, start=1):
        pipeline = inbox.declare(A_AND_B, transform=transform, version=version, **QUARANTINE)
        assert inbox.plan(pipeline, f"run {version}") == [1]
        message = inbox.refused(pipeline, DeclarationInvalid)
        assert "joins input a with input b" in message or "joins input b with input a" in message
        assert "so bad records cannot be set aside: one that is taken up later would miss the rows" in message
    blocking = inbox.declare(A_AND_B, transform=MEETINGS[0], version=len(MEETINGS) + 1, retry_delay_seconds=0)
    inbox.run(blocking, "block")
    assert inbox.counts(blocking) == {"x": (1, 1)}


class DeltaPrices(DeltaLakeTable):
    def write(self, **prices: int) -> None:
        self.append(*prices.items(), mode="overwrite")

    def forget(self) -> None:
        self.delta.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


class IcebergPrices(IcebergTable):
    def write(self, **prices: int) -> None:
        self.iceberg.overwrite(rows_of(*prices.items()))

    def forget(self) -> None:
        kept = {path_of(task.file.file_path) for task in self.iceberg.scan().plan_files()}
        for path in {*self.folder.rglob("*.parquet")} - kept:
            path.unlink()


class PostgresPrices:
    def __init__(self, settings: Settings) -> None:
        self._owner = settings.conninfo(user="tidegate_owner")
        self.copies = settings.home / "kept"
        self.source = PostgresTable(table="prices", key="name", schema=SCHEMA)
        create = "CREATE TABLE prices (name text PRIMARY KEY, amount int); GRANT SELECT ON prices TO tidegate_stager"
        execute(self._owner, create)

    def write(self, **prices: int) -> None:
        execute(self._owner, "TRUNCATE prices")
        for price in prices.items():
            execute(self._owner, "INSERT INTO prices VALUES (%s, %s)", price)

    def forget(self) -> None:
        shutil.rmtree(self.copies)


@pytest.fixture(params=[DeltaPrices, IcebergPrices, PostgresPrices], ids=["Delta", "Iceberg", "Postgres"])
def prices(request: pytest.FixtureRequest, settings: Settings) -> Any:
    made = request.param(settings)
    made.write()
    return made


@pytest.fixture
def with_prices(inbox: Inbox, prices: Any) -> Pipeline:
    kept = {"keep_folder": "kept"} if isinstance(prices, PostgresPrices) else {}
    return inbox.declare(
        Inputs({"sold": Files("inbox", format="text"), "prices": Reference(prices.source, **kept)}),
        transform=lambda inputs: inputs["sold"].withColumnRenamed("value", "name").join(inputs["prices"], "name", "left"),
        states={"sold": Rows({"name": "text", "amount": "integer"})},
        retry_delay_seconds=0,
    )


def test_a_copy_of_a_table_of_postgres_loses_no_digits(settings: Settings) -> None:
    copied = Reference(replace(PostgresPrices(settings).source, schema={"name": "string", "amount": "float"}), "kept")
    raises(SourceUnreadable, lambda: version_of(copied, settings, coordinator_of), "amount is integer, which cannot be read as")


def sell(inbox: Inbox, number: int, *names: str) -> None:
    inbox.write(f"{number}.txt", "".join(f"{name}\n" for name in names))


@pytest.mark.promise("decision:0030", "fault:reference-is-replaced-before-batch-has-committed:processing")
@pytest.mark.sampled(2)
def test_each_batch_has_the_version_of_its_plan(inbox: Inbox, with_prices: Pipeline, prices: Any) -> None:
    sell(inbox, 1, "a")
    inbox.run(with_prices, "empty")
    prices.write(a=1, b=2)
    sell(inbox, 2, "a", "b")
    inbox.plan(with_prices, "first")
    prices.write(a=10, c=30)
    inbox.run(with_prices, "first")
    assert inbox.tuples(with_prices) == [("a", 1), ("a", None), ("b", 2)]
    sell(inbox, 3, "a", "b", "c")
    inbox.run(with_prices, "second")
    assert inbox.tuples(with_prices) == [("a", 1), ("a", 10), ("a", None), ("b", 2), ("b", None), ("c", 30)]
    sell(inbox, 4, "c")
    inbox.plan(with_prices, "third")
    prices.write(c=300)
    prices.forget()
    with pytest.raises(SourceChanged, match=r"is gone since its batch was planned.* It is a reference of this batch: put back"):
        inbox.run(with_prices, "third")
    assert len(inbox.tuples(with_prices)) == 6


@pytest.mark.promise("limit:MOST_FILES")
@pytest.mark.parametrize("prices", [DeltaPrices], indirect=True)
def test_a_table_of_too_many_files_is_refused(inbox: Inbox, with_prices: Pipeline, prices: Any) -> None:
    prices.write(a=1)
    sell(inbox, 1, "a")
    refusal = r"The reference has 1 files or more in .*: the most is 0"
    with patch.object(reference, "MOST_FILES", 0), pytest.raises(SourceUnreadable, match=refusal):
        inbox.run(with_prices, "refused")
