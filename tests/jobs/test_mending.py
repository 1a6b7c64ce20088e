"""Mended records, through Spark: after the replay the state is that of a source that was right from the start."""

import json
import random
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest

from tests import steps
from tests.jobs.test_policies import NOT_NEGATIVE, PER_NAME, SCHEMA, by_line, counted
from tests.sources.conftest import Inbox, inbox
from tests.store import Original
from tidegate.jobs import Files, Pipeline, Rows
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.compute.stage import bad_records
from tidegate.jobs.compute.stage.bad_records import BLOCK_BYTES, WaitingReader, describe_fault
from tidegate.jobs.sources.binding import emitter_of
from tidegate.state_store import Settings, StateStore

__all__ = ["inbox"]  # a fixture


def files(kind: str, **more: Any) -> Files:
    return Files("inbox", format=kind, **{"schema": SCHEMA, **more})


def declare(inbox: Inbox, source: Any, **more: Any) -> Pipeline:
    return inbox.declare(source, **{"states": PER_NAME, "on_poison": "quarantine", "check": NOT_NEGATIVE, **more})


def replay(inbox: Inbox, pipeline: Pipeline) -> None:
    with StateStore.connect(inbox.settings) as store:
        opened = store.replay_quarantined(pipeline.spec, "test", "mended")
    assert opened is not None
    assert inbox.run(pipeline, f"replay {opened[0]}") == [opened[0]]


def totals(records: list[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, amount in records:
        lines, total = found[name]
        found[name] = (lines + 1, total + amount)
    return dict(found)


def test_mended_records_count_as_if_the_source_had_been_right(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw and parsed ones, over several batches and tasks, compared with plain Python; another attempt reads the same.

    Those that are not mended are read as they stood, and wait again.
    """
    monkeypatch.setattr(bad_records, "ROWS_PER_BLOCK", 5)
    chance = random.Random(7)
    right: dict[str, tuple[str, int]] = {}
    pipeline = declare(inbox, files("csv"))
    for number in range(2):
        lines = []
        for line in range(2, 42):
            record = (chance.choice("abcdé"), chance.randrange(1000))
            right[f"{number}.csv, line {line}"] = record
            wrong = chance.choice([f"{record[0]},{record[1]}x", f"{record[0]},-{record[1] + 1}", "", f"{record[0]}"])
            lines.append(",".join(map(str, record)) if chance.random() < 0.8 else wrong or f"{record[0]},1,1")
        inbox.write(f"{number}.csv", "name,amount\n" + "".join(f"{line}\n" for line in lines))
    assert inbox.run(pipeline) == [1, 2]
    bad = steps.waiting(inbox.settings)
    assert len(bad) > 10
    left = [next(record for record in bad if record["is_raw"] is is_raw) for is_raw in (True, False)]
    for record in bad:
        if record not in left:
            name, amount = right[record["origin"]]
            steps.mend(
                inbox.settings, record, f"{name},{amount}" if record["is_raw"] else json.dumps({"amount": amount, "name": name})
            )
    with StateStore.connect(inbox.settings) as store:
        store.replay_quarantined(pipeline.spec, "test", "mended")
        store.start_attempt(pipeline.spec, 3, "dies")
    for _ in range(2):
        steps.process(inbox.settings, pipeline, 3, owner="test", mode="restage")
    steps.commit(inbox.settings, pipeline, 3, owner="test")

    missing = [record["origin"] for record in left]
    assert counted(inbox, pipeline) == totals([record for origin, record in right.items() if origin not in missing])
    assert sorted((r["txid"], r["origin"], r["payload"], r["mended_payload"]) for r in steps.waiting(inbox.settings)) == sorted(
        (3, record["origin"], record["payload"], None) for record in left
    )


EXACTLY: dict[str, tuple[str, str]] = {  # a value of each type as a file has it, and as Spark shows it
    "timestamp": ("2024-01-05T10:00:00.123456Z", "2024-01-05 10:00:00.123456"),
    "timestamp_ntz": ("0001-01-01T00:00:00.000001", "0001-01-01 00:00:00.000001"),
    "date": ("0001-01-01", "0001-01-01"),
    "decimal(38,18)": ("12345678901234567890.123456789012345678", "12345678901234567890.123456789012345678"),
    "bigint": ("-9223372036854775808", "-9223372036854775808"),
    "smallint": ("-32768", "-32768"),
    "boolean": ("true", "true"),
    "double": ("5e-324", "4.9E-324"),
    "float": ("16777216.0", "1.6777216E7"),
    "double NaN": ("NaN", "NaN"),
    "float -Infinity": ("-Infinity", "-Infinity"),
    "binary": ("\u00e9", "\u00e9"),
    "string": ("1.10 \u00e9\u2028", "1.10 \u00e9\u2028"),
}


@pytest.mark.soak
def test_a_record_that_waited_has_lost_nothing(inbox: Inbox) -> None:
    """Six digits of a second, all digits of a number, whether another column was mended or not: as in a clean run.

    A new version may lack one of the record's columns.
    """
    columns = {f"v{number}": kind.partition(" ")[0] for number, kind in enumerate(EXACTLY)}
    texts = [f"CAST({name} AS string) {name}" for name in columns]
    declared: dict[str, Any] = {
        "states": {"log": Rows({"amount": "integer", **dict.fromkeys(columns, "text")})},
        "transform": lambda rows: rows.selectExpr("amount", *texts),
    }
    values = ",".join(text for text, _ in EXACTLY.values())
    inbox.write(
        "1.csv",
        "".join(f"{line}\n" for line in [",".join(["amount", *columns, "shop"]), *(f"{n},{values},s" for n in (1, -1, -2))]),
    )
    inbox.run(declare(inbox, files("csv", schema={"amount": "int", **columns, "shop": "string"}), **declared))
    assert not any(record["is_raw"] for record in steps.waiting(inbox.settings))
    (_, record) = by_line(inbox)
    steps.mend(inbox.settings, record, record["payload"].replace('"amount":-2', '"amount":2'))
    today = files("csv", schema={"amount": "int", **columns})
    milder = declare(inbox, today, **declared, version=2, check={"not far below": "amount >= -1"})
    replay(inbox, milder)
    shown = {f"v{number}": shown for number, (_, shown) in enumerate(EXACTLY.values())}
    found = [{name: value for name, value in row.items() if name != "position"} for row in inbox.rows(milder, "log")]
    assert sorted(found, key=lambda row: row["amount"]) == [{"amount": n, **shown} for n in (-1, 1, 2)]


@pytest.mark.soak
def test_a_record_of_a_file_with_other_columns_or_of_great_length_is_mended_as_it_stands_there(inbox: Inbox) -> None:
    """The columns of its file are kept with it: the values do not change places. One that is too long keeps its beginning.

    If that is replayed unmended, it says that the rest is missing.
    """
    inbox.write("1.csv", f"amount,name\nx1,10\nx2,20\ntwo,{'x' * 9_000_000}\ntoo,{'y' * 9_000_000}\n")
    pipeline = declare(inbox, files("csv"))
    inbox.run(pipeline)
    one, two, long, left = by_line(inbox)
    wrapped = json.loads(one["payload"])
    assert wrapped == {"_tidegate_record": "x1,10", "columns": ["amount", "name"]}
    kept = json.loads(left["payload"])
    assert (kept["bytes"], kept["beginning"][:9]) == (9_000_004, "too," + "y" * 5)
    steps.mend(inbox.settings, one, "1,10")
    steps.mend(inbox.settings, two, json.dumps({**wrapped, "_tidegate_record": "2,20"}))
    steps.mend(inbox.settings, long, "3,x")
    replay(inbox, pipeline)
    assert counted(inbox, pipeline) == {"10": (1, 1), "20": (1, 2), "x": (1, 3)}
    (record,) = steps.waiting(inbox.settings)
    assert record["reason"] == "it was too long to be kept: only the beginning of its 9000004 bytes is here"
    assert json.loads(record["payload"]) == kept


@pytest.mark.soak
def test_a_replay_of_long_records_holds_few_of_them_at_a_time(inbox: Inbox) -> None:
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


# The columns of today, an amount as it was set aside, and why it would wait again.
VERSIONS: dict[str, tuple[dict[str, str], str, str | None]] = {
    "a text": ({"amount": "int"}, '"12x"', "column amount: '12x' is no int"),
    "digits": ({"amount": "decimal(10,2)"}, "-1.2345", "column amount: '-1.2345' is no decimal(10,2) (nothing is rounded)"),
    "a digit": ({"amount": "decimal(10,2)"}, "1.0050e1", None),
    "renamed": ({"cents": "int"}, "-5", "it has no column cents, but amount, which the schema does not name"),
    "wider": ({"amount": "bigint"}, "-5", None),
    "one more": ({"amount": "int", "shop": "string"}, "-5", None),
    "one less": ({}, "-5", None),
    "a map by numbers": (
        {"amount": "int", "sold": "map<int,double>"},
        "-5",
        "it cannot be read from JSON: map<int, double> is not a type that text can have",
    ),
}


@pytest.mark.soak
def test_a_record_fits_the_schema_of_today_or_waits(settings: Settings) -> None:
    """Its amount never becomes NULL, which no sum shows, or is rounded, whatever a new version makes of its columns.

    Nor if it was mended: it has the columns that it had when it was set aside.
    """
    found: dict[str, str | None] = {}
    with spark_session(settings, "inbox") as spark:
        for name, (columns, amount, _) in VERSIONS.items():
            pipeline = Pipeline(
                "inbox", files("parquet", schema={"name": "string", **columns}), PER_NAME, transform=lambda rows: rows
            )
            original = Original("1.json, line 1", f'{{"name": "a", "amount": {amount}}}', is_raw=False)
            emitter = emitter_of(pipeline.source, spark, settings)
            found[name] = describe_fault(spark, pipeline, emitter, original, original.payload)
    assert found == {name: reason for name, (*_, reason) in VERSIONS.items()}
