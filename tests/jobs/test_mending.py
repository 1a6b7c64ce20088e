"""Mended records, through Spark: after the replay the state is that of a source that was right from the start."""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import steps
from tests.jobs.test_policies import KEPT_EXACTLY, two_records_of
from tests.sources.conftest import Inbox
from tidegate.jobs import Count, Files, FixedBatches, Pipeline, State, Sum
from tidegate.jobs.compute.stage.bad_records import BLOCK_BYTES, WaitingReader
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.operate.mended_records import Mend

SCHEMA = {"name": "string", "amount": "int"}
CHECK = {"not negative": "amount >= 0"}


@pytest.fixture
def inbox(settings: Settings, register: Callable[..., None]) -> Inbox:
    """An empty folder and a pipeline over it."""
    return Inbox(settings, register)


def files(kind: str, **more: Any) -> Files:
    """Return a source of text files, one a batch."""
    return Files("inbox", format=kind, schema=SCHEMA, max_files=1, **more)


def declare(inbox: Inbox, source: Any, **more: Any) -> Pipeline:
    """Declare and register a pipeline that sets bad records aside."""
    return inbox.declare(source, **{"on_poison": "quarantine", "check": CHECK, **more})


def waiting(inbox: Inbox) -> list[dict[str, Any]]:
    """Return the records in quarantine."""
    with StateStore.connect(inbox.settings) as store:
        return list(store.quarantined("inbox"))


def mend(inbox: Inbox, record: Mapping[str, Any], payload: str) -> None:
    """Mend one record."""
    with StateStore.connect(inbox.settings) as store:
        store.mend_quarantined("inbox", record["txid"], record["number"], Mend(payload, "test", "it was wrong"))


def replay(inbox: Inbox, pipeline: Pipeline) -> None:
    """Take all records up, process and commit them."""
    with StateStore.connect(inbox.settings) as store:
        opened = store.replay_quarantined(pipeline.spec, "test", "mended")
    assert opened is not None
    assert inbox.run(pipeline, f"replay {opened[0]}") == [opened[0]]


def totals(records: list[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Return what the state should hold, by plain Python."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, amount in records:
        lines, total = found[name]
        found[name] = (lines + 1, total + amount)
    return dict(found)


def counted(inbox: Inbox, pipeline: Pipeline) -> dict[str, tuple[int, int]]:
    """Return the state by name."""
    return {row["name"]: (row["lines"], row["amount"]) for row in inbox.rows(pipeline)}


def test_mended_records_count_as_if_the_source_had_been_right(inbox: Inbox) -> None:
    """Raw and parsed ones, over several batches and tasks; compared with plain Python over the right records."""
    chance = random.Random(7)
    right: dict[str, tuple[str, int]] = {}
    pipeline = declare(inbox, files("csv"))
    for number in range(3):
        lines = []
        for line in range(2, 202):
            record = (chance.choice("abcdé"), chance.randrange(1000))
            right[f"{number}.csv, line {line}"] = record
            wrong = chance.choice([f"{record[0]},{record[1]}x", f"{record[0]},-{record[1] + 1}", "", f"{record[0]}"])
            lines.append(",".join(map(str, record)) if chance.random() < 0.8 else wrong or f"{record[0]},1,1")
        inbox.write(f"{number}.csv", "name,amount\n" + "".join(f"{line}\n" for line in lines))
    assert inbox.run(pipeline) == [1, 2, 3]
    bad = waiting(inbox)
    assert {record["is_raw"] for record in bad} == {True, False}
    assert len(bad) > 50

    for record in bad:
        name, amount = right[record["origin"]]
        mend(inbox, record, f"{name},{amount}" if record["is_raw"] else json.dumps({"amount": amount, "name": name}))
    replay(inbox, pipeline)

    assert counted(inbox, pipeline) == totals(list(right.values()))
    assert waiting(inbox) == []


def test_records_that_are_not_mended_are_read_as_they_stood(inbox: Inbox) -> None:
    """A replay takes up both; those that are still bad wait again."""
    inbox.write("1.csv", "name,amount\na,-1\nb,x\nc,-3\nd,y\n")
    pipeline = declare(inbox, files("csv"))
    inbox.run(pipeline)
    by_origin = {record["origin"]: record for record in waiting(inbox)}
    mend(inbox, by_origin["1.csv, line 2"], '{"name": "a", "amount": 1}')
    mend(inbox, by_origin["1.csv, line 3"], "b,2")

    replay(inbox, pipeline)

    assert counted(inbox, pipeline) == {"a": (1, 1), "b": (1, 2)}
    assert [(r["txid"], r["origin"], r["payload"], r["mended_payload"]) for r in waiting(inbox)] == [
        (2, "1.csv, line 4", '{"name":"c","amount":-3}', None),
        (2, "1.csv, line 5", "d,y", None),
    ]


STILL_BAD = {
    "fails the check": ({"name": "b", "amount": -9}, "fails the check 'not negative'"),
    "a key is NULL": ({"name": None, "amount": 1}, "key column name is NULL"),
    "a NUL character": ({"name": "a\0b", "amount": 1}, "column name holds a NUL character"),
    "too large": ({"name": "b", "amount": 2**31}, "column amount: 2147483648 is no int"),
    "a fraction": ({"name": "b", "amount": 1.5}, "column amount: 1.5 is no int"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mended", "reason"), STILL_BAD.values(), ids=STILL_BAD.keys())
def test_a_mended_record_that_is_still_bad_waits_again(inbox: Inbox, mended: dict[str, Any], reason: str) -> None:
    """With its origin, as JSON that can be mended again; the original stays in the ledger."""
    inbox.write("1.csv", "name,amount\na,1\nb,-2\n")
    pipeline = declare(inbox, files("csv"))
    inbox.run(pipeline)
    (original,) = waiting(inbox)
    mend(inbox, original, json.dumps(mended))

    replay(inbox, pipeline)

    assert counted(inbox, pipeline) == {"a": (1, 1)}
    (record,) = waiting(inbox)
    assert (record["txid"], record["origin"], record["is_raw"], record["mended_at"]) == (2, "1.csv, line 3", False, None)
    assert json.loads(record["payload"]) == mended
    assert reason in record["reason"]
    with StateStore.connect(inbox.settings) as store, store.engine.connect() as connection:
        kept = connection.exec_driver_sql(
            "SELECT payload, mended_payload, mended_by FROM tidegate.quarantine WHERE txid = 1 AND replayed_txid = 2"
        ).all()
    assert [tuple(row) for row in kept] == [('{"name":"b","amount":-2}', json.dumps(mended), "test")]

    mend(inbox, record, '{"name": "b", "amount": 2}')
    replay(inbox, pipeline)
    assert counted(inbox, pipeline) == {"a": (1, 1), "b": (1, 2)}


def test_a_raw_record_that_is_still_bad_waits_as_it_was_mended(inbox: Inbox) -> None:
    """Its origin stays, and it is parsed by the same rules as its file."""
    inbox.write("1.csv", "name,amount\nb,two\n")
    pipeline = declare(inbox, files("csv"))
    inbox.run(pipeline)
    (original,) = waiting(inbox)
    mend(inbox, original, '"b,\nb",zwei')
    replay(inbox, pipeline)
    (record,) = waiting(inbox)
    assert (record["origin"], record["payload"], record["is_raw"]) == ("1.csv, line 2", '"b,\nb",zwei', True)
    assert record["reason"] == "column amount: 'zwei' is no int"

    mend(inbox, record, '"b,\nb",2')
    replay(inbox, pipeline)
    assert counted(inbox, pipeline) == {"b,\nb": (1, 2)}


@pytest.mark.parametrize("as_wrapped", [False, True])
def test_a_record_of_a_file_with_other_columns_is_mended_as_it_stands_there(inbox: Inbox, as_wrapped: bool) -> None:
    """The columns of its file are kept with the original: the values do not change places."""
    inbox.write("1.csv", "amount,name\nx1,10\n")
    pipeline = declare(inbox, files("csv"))
    inbox.run(pipeline)
    (original,) = waiting(inbox)
    wrapped = json.loads(original["payload"])
    assert wrapped == {"_tidegate_record": "x1,10", "columns": ["amount", "name"]}
    mend(inbox, original, json.dumps({**wrapped, "_tidegate_record": "1,10"}) if as_wrapped else "1,10")
    replay(inbox, pipeline)
    assert counted(inbox, pipeline) == {"10": (1, 1)}


def test_a_record_that_was_too_long_to_be_kept_can_be_mended(inbox: Inbox) -> None:
    """With the columns of its file, too."""
    inbox.write("1.csv", f"amount,name\ntwo,{'x' * 9_000_000}\n")
    pipeline = declare(inbox, files("csv"))
    inbox.run(pipeline)
    (original,) = waiting(inbox)
    assert "beginning" in json.loads(original["payload"])
    mend(inbox, original, "2,x")
    replay(inbox, pipeline)
    assert counted(inbox, pipeline) == {"x": (1, 2)}


def test_a_replay_of_long_records_holds_few_of_them_at_a_time(inbox: Inbox) -> None:
    """A task's memory does not grow with their number, and no Arrow batch gets longer than Arrow's texts can be."""
    inbox.write("1.csv", "name,amount\n" + "".join(f"{number}{'a' * 2**20},x\n" for number in range(40)))
    pipeline = declare(inbox, files("csv"))
    inbox.run(pipeline)
    with StateStore.connect(inbox.settings) as store:
        assert store.replay_quarantined(pipeline.spec, "test", "mended") == (2, 40)
    numbers = pa.RecordBatch.from_pydict({"id": pa.array([0], pa.int64())})
    conninfo = inbox.settings.conninfo(user=inbox.settings.pg_stager)
    batches = list(WaitingReader(conninfo, "inbox", 2, 1, are_raw=True)(iter([numbers])))
    assert sum(batch.num_rows for batch in batches) == 40
    assert max(batch.nbytes for batch in batches) < BLOCK_BYTES + 2 * 2**20


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_partition_columns_belong_to_a_parsed_record(inbox: Inbox, kind: str) -> None:
    """They came from the folder's name, and can be mended like the others; of a raw record the folder's name decides."""
    source = files(kind, partitions={"dt": "date"}, glob="**/*")
    states = {"per_day": State(key={"dt": "date"}, aggregates={"lines": Count(), "amount": Sum("amount")})}
    good, bad, broken = {
        "csv": ("a,1", "b,-2", "c,x"),
        "json": ('{"name": "a", "amount": 1}', '{"name": "b", "amount": -2}', '{"name": "c", "amount": "x"}'),
    }[kind]
    header = "name,amount\n" if kind == "csv" else ""
    inbox.write(f"dt=2026-11-05/1.{kind}", f"{header}{good}\n{bad}\n{broken}\n")
    pipeline = declare(inbox, source, states=states)
    inbox.run(pipeline)
    for record in waiting(inbox):
        parsed = '{"name": "b", "amount": 2, "dt": "2026-11-06"}'
        mend(inbox, record, broken.replace('"x"', "4").replace("x", "4") if record["is_raw"] else parsed)
    replay(inbox, pipeline)
    found = {str(row["dt"]): (row["lines"], row["amount"]) for row in inbox.rows(pipeline, "per_day")}
    assert found == {"2026-11-05": (2, 5), "2026-11-06": (1, 2)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KEPT_EXACTLY)
def test_the_columns_that_are_not_mended_lose_nothing(inbox: Inbox, kind: str) -> None:
    """Copied from the original's JSON, each type is read back as what it was."""
    pipeline = declare(inbox, **two_records_of(inbox, kind))
    inbox.run(pipeline)
    (original,) = waiting(inbox)
    mend(inbox, original, original["payload"].replace('"amount":-1', '"amount":1'))
    replay(inbox, pipeline)
    assert inbox.rows(pipeline) == [{"name": "a", "text": KEPT_EXACTLY[kind][1], "lines": 2}]


def test_a_decimal_is_not_rounded(inbox: Inbox) -> None:
    """Spark's own reading of JSON would round it."""
    source = Files("inbox", format="csv", schema={"name": "string", "amount": "decimal(10,2)"}, max_files=1)
    states = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount", "numeric(20,2)")})}
    inbox.write("1.csv", "name,amount\na,-1.00\n")
    pipeline = declare(inbox, source, states=states)
    inbox.run(pipeline)
    (original,) = waiting(inbox)
    mend(inbox, original, '{"name":"a","amount":1.005}')
    replay(inbox, pipeline)
    (record,) = waiting(inbox)
    assert record["reason"] == "column amount: '1.005' is no decimal(10,2) (nothing is rounded)"
    mend(inbox, record, '{"name":"a","amount":1.0050e1}')
    replay(inbox, pipeline)
    assert [(row["name"], str(row["amount"])) for row in inbox.rows(pipeline)] == [("a", "10.05")]


def test_a_record_of_a_source_without_files_is_mended(settings: Settings, register: Callable[..., None]) -> None:
    """Such records have no origin, and are always columns."""
    source = FixedBatches([[("a", 1), ("b", -2)]], schema=SCHEMA)
    state = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})
    pipeline = Pipeline(name="inbox", source=source, states={"per_name": state}, on_poison="quarantine", check=CHECK)
    inbox = Inbox(settings, register)
    register(pipeline)
    inbox.run(pipeline)
    (original,) = waiting(inbox)
    assert original["origin"] is None
    mend(inbox, original, '{"name": "b", "amount": 2}')
    replay(inbox, pipeline)
    assert counted(inbox, pipeline) == {"a": (1, 1), "b": (1, 2)}


def test_another_attempt_at_a_replay_reads_the_same(inbox: Inbox) -> None:
    """The first attempt dies; what it would have read cannot be mended meanwhile."""
    inbox.write("1.csv", "name,amount\nb,-2\nc,three\n")
    pipeline = declare(inbox, files("csv"))
    inbox.run(pipeline)
    parsed, raw = sorted(waiting(inbox), key=lambda record: record["is_raw"])
    mend(inbox, parsed, '{"name": "b", "amount": 2}')
    mend(inbox, raw, "c,3")
    with StateStore.connect(inbox.settings) as store:
        store.replay_quarantined(pipeline.spec, "test", "mended")
        store.start_attempt(pipeline.spec, 2, "dies")
    for _ in range(2):
        steps.process(inbox.settings, pipeline, 2, owner="test", mode="restage")
    steps.commit(inbox.settings, pipeline, 2, owner="test")
    assert counted(inbox, pipeline) == {"b": (1, 2), "c": (1, 3)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("before", "kept", "after", "waits"),
    [
        ({"amount": "string"}, "12x", {"amount": "int"}, "column amount: '12x' is no int"),
        ({"amount": "decimal(10,4)"}, "-1.2345", {"amount": "decimal(10,2)"}, "is no decimal(10,2) (nothing is rounded)"),
        ({"amount": "int"}, "-5", {"cents": "int"}, "it has no column cents, but amount, which the schema does not name"),
        ({"amount": "int"}, "-5", {"amount": "bigint"}, None),
        ({"amount": "int"}, "-5", {"amount": "int", "shop": "string"}, None),
        ({"amount": "int", "shop": "string"}, "-5", {"amount": "int"}, None),
    ],
)
def test_a_record_that_a_check_set_aside_fits_the_schema_of_today_or_waits(
    inbox: Inbox, before: dict[str, str], kept: str, after: dict[str, str], waits: str | None
) -> None:
    """It never becomes NULL or is rounded, whatever the new version of the pipeline makes of its columns."""

    def version(number: int, columns: dict[str, str], check: dict[str, str]) -> Pipeline:
        source = Files("inbox", format="json", schema={"name": "string", **columns}, max_files=1)
        given = {"transform": lambda rows: rows.selectExpr("name", f"cast({next(iter(columns))} as int) amount")}
        return declare(inbox, source, version=number, check=check, **given)

    value = kept if before["amount"] != "string" else json.dumps(kept)
    inbox.write("1.json", f'{{"name": "a", "amount": {value}, "shop": "s"}}\n')
    inbox.run(version(1, before, {"fits": "try_cast(amount as decimal(10,4)) >= 0"}))
    assert len(waiting(inbox)) == 1
    later = version(2, after, {})
    replay(inbox, later)
    if waits is None:
        assert counted(inbox, later) == {"a": (1, -5)}
        assert waiting(inbox) == []
    else:
        assert waits in waiting(inbox)[0]["reason"]
        assert counted(inbox, later) == {}


def test_a_mended_record_whose_column_was_renamed_since_waits(inbox: Inbox) -> None:
    """It has the columns that it had when it was set aside: its amount must not become NULL, which no sum shows."""

    def version(number: int, column: str) -> Pipeline:
        source = Files("inbox", format="json", schema={"name": "string", column: "int"}, max_files=1)
        given = {"transform": lambda rows: rows.selectExpr("name", f"{column} amount")}
        return declare(inbox, source, version=number, check={"not negative": f"{column} >= 0"} if number == 1 else {}, **given)

    inbox.write("1.json", '{"name": "a", "amount": -5}\n')
    inbox.run(version(1, "amount"))
    (original,) = waiting(inbox)
    mend(inbox, original, '{"name": "a", "amount": 5}')
    later = version(2, "cents")
    replay(inbox, later)
    assert counted(inbox, later) == {}
    (again,) = waiting(inbox)
    assert again["reason"] == "it has no column cents, but amount, which the schema does not name"
    assert json.loads(again["payload"]) == {"name": "a", "amount": 5}


def test_a_record_of_types_that_text_does_not_have_waits(inbox: Inbox) -> None:
    """A map by numbers, of Parquet, with the reason; the other records of the replay count."""
    sold = pa.array([[(1, 2.5)]], pa.map_(pa.int32(), pa.float64()))
    pq.write_table(pa.table({"name": ["a"], "amount": pa.array([-2], pa.int32()), "sold": sold}), inbox.folder / "1.parquet")
    source = Files("inbox", schema={**SCHEMA, "sold": "map<int,double>"}, max_files=1, glob="*.parquet")
    inbox.run(declare(inbox, source))
    later = declare(inbox, source, version=2, check={})
    replay(inbox, later)
    assert waiting(inbox)[0]["reason"] == "it cannot be read from JSON: map<int, double> is not a type that text can have"
