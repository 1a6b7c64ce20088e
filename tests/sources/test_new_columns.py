"""A column that a producer adds and nobody declares is told with the first txid that has it, or halts its batch."""

import io
import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sources.conftest import SCHEMA, Inbox
from tests.sources.in_process import Folder, counted_here, folder
from tidegate.explain.why import explain
from tidegate.jobs import Files, Pipeline
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import MalformedRecord, SourceUnreadable

__all__ = ["counted_here", "folder"]  # fixtures


def csv_of(row: dict[str, Any]) -> bytes:
    return f"{','.join(row)}\n{','.join(map(str, row.values()))}\n".encode()


def json_of(row: dict[str, Any]) -> bytes:
    return f"{json.dumps(row)}\n".encode()


def parquet_of(row: dict[str, Any]) -> bytes:
    pq.write_table(
        pa.table({n: pa.array([v], pa.int32() if n == "amount" else None) for n, v in row.items()}), sink := io.BytesIO()
    )
    return sink.getvalue()


FORMATS = {"csv": csv_of, "json": json_of, "parquet": parquet_of}
OVER: dict[str, Files] = {
    format: Files("inbox", glob=f"**/*.{format}", format=format, schema=SCHEMA)  # type: ignore[arg-type]
    for format in FORMATS
}
JSON = OVER["json"]
ROW = {"name": "a", "amount": 1}
NEW = {**ROW, "discount": 5}


def told(inbox: Inbox, pipeline: Pipeline) -> list[tuple[str, str, int]]:
    """Return the new columns that the ledger tells of, the same ones in all places."""
    with StateStore.connect(inbox.settings) as store:
        (lag,) = store.lag([pipeline.name])
        causes = explain(store, pipeline).causes
    sentences = [cause.sentence for cause in causes if cause.code == "NEW_COLUMNS"]
    assert len(sentences) == bool(lag.new_columns)
    for column in lag.new_columns[:3]:
        assert f"{column['column']}" in sentences[0]
        assert f"(since txid {column['first_txid']})" in sentences[0]
    return [(column["input"], column["column"], column["first_txid"]) for column in lag.new_columns]


@pytest.mark.usefixtures("counted_here")
@pytest.mark.parametrize("format", ["csv", "json"])
def test_a_new_column_is_told_with_its_first_txid_until_it_is_ignored(inbox: Inbox, format: str) -> None:
    pipeline = inbox.declare(OVER[format])
    for number, row in enumerate([{**ROW, "city": "x"}, ROW, NEW, {**NEW, "city": "y"}], start=1):
        inbox.write(f"{number}.{format}", FORMATS[format](row))
    inbox.run(pipeline, "first")
    assert told(inbox, pipeline) == [("", "discount", 3)]
    ignoring = inbox.declare(replace(OVER[format], ignored_columns=["discount"]))
    assert told(inbox, ignoring) == []
    inbox.write(f"9.{format}", FORMATS[format](NEW))
    inbox.run(ignoring, "second")
    assert told(inbox, ignoring) == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_batch_with_a_new_column_is_halted_if_the_source_says_so(folder: Folder, format: Any) -> None:
    source = replace(OVER[format], on_new_column="block")
    folder.write(f"a.{format}", FORMATS[format](ROW))
    assert folder.read(source) == [("a", 1)]
    folder.clear()
    folder.write(f"b.{format}", FORMATS[format](NEW))
    message = folder.refused(source, SourceUnreadable)
    assert f"b.{format} has the column discount, which the source does not declare" in message
    assert "ignored_columns" in message
    assert folder.read(replace(source, ignored_columns=["discount"])) == [("a", 1)]
    folder.clear()
    folder.write(f"country=pt/c.{format}", FORMATS[format](ROW))
    assert "has the column country" in folder.refused(source, SourceUnreadable)


@pytest.mark.parametrize("missing", ["refuse", "null"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_column_in_another_case_is_named_and_never_null(folder: Folder, format: Any, missing: Any) -> None:
    """Whether columns may lack or not; in JSON also in a single record, and in a field of a struct."""
    source = replace(OVER[format], missing=missing)
    folder.write(f"a.{format}", FORMATS[format]({"NAME": "a", "amount": 1}))
    assert "name" in (message := folder.refused(source, MalformedRecord))
    assert "(it has NAME: upper and lower case differ)" in message
    if format == "json":
        folder.write("a.json", json_of(ROW) + json_of({**ROW, "NAME": "b"}) + json_of({"Name": "a", "amount": 1}))
        message = folder.refused(source, MalformedRecord)
        assert "a.json, line 3" in message
        assert "it has no key name (it has Name: upper and lower case differ)" in message
        assert folder.read(replace(source, ignored_columns=["Name"])) == [("a", 1), ("a", 1), (None, 1)]
        nested = replace(source, schema={"shop": "struct<id: int, Code: string>"})
        folder.write("a.json", json_of({"shop": {"id": 1, "code": "x"}}))
        assert "it has no field Code (it has code: upper" in folder.refused(nested, MalformedRecord)


def test_a_key_of_one_record_in_the_middle_is_seen(folder: Folder) -> None:
    folder.write("a.json", b"".join([*[json_of(ROW)] * 977, json_of(NEW), *[json_of(ROW)] * 2000]))
    assert "column discount" in folder.refused(replace(JSON, on_new_column="block"), SourceUnreadable)


@pytest.mark.promise("limit:MOST_COLUMNS")
@pytest.mark.usefixtures("counted_here")
def test_keys_without_number_do_not_fill_the_ledger(inbox: Inbox) -> None:
    """Such as one per user; also a name that Postgres cannot hold."""
    pipeline = inbox.declare(JSON)
    inbox.write("1.json", json_of(ROW))
    inbox.write("2.json", json_of({**ROW, "\0": 1, " \ud800": 2, **{f"user {n}": n for n in range(300)}}))
    inbox.write("3.json", json_of({**ROW, **{f"user {n}": n for n in range(1000, 1300)}}))
    inbox.run(pipeline, "first")
    columns = [column for _, column, _ in told(inbox, pipeline)]
    assert len(columns) == 100
    assert {"\\0", " \\ud800"} <= set(columns)


def test_csv_files_that_are_older_than_a_column_have_null(folder: Folder) -> None:
    folder.write("1.csv", b'name,amount\na,1\n"b\nc",2\n')
    folder.write("2.csv", b"amount,channel,name\n3,web,d\n")
    source = replace(OVER["csv"], schema={**SCHEMA, "channel": "string", "n": "int"}, max_files=9)
    message = folder.refused(source)
    assert "channel, n is missing. If the file is older than that, missing='null' makes it NULL" in message
    nulls = replace(source, missing="null")
    assert folder.read(nulls) == [("a", 1, None, None), ("b\nc", 2, None, None), ("d", 3, "web", None)]
    folder.write("3.csv", b"name,amount\ne,x\n")
    (bad,) = (record for record in folder.records(nulls) if record["_tidegate_refusal"])
    (again,) = folder.replayed(nulls, {**bad, "_tidegate_payload": bad["_tidegate_payload"].replace("e,x", "e,5")})
    assert (again["name"], again["amount"], again["channel"]) == ("e", 5, None)


def test_spark_reads_and_the_ledger_tells(inbox: Inbox) -> None:
    pipeline = inbox.declare(Files("inbox", schema=SCHEMA))
    for number, row in enumerate([ROW, NEW], start=1):
        inbox.write(f"{number}.parquet", parquet_of(row))
    inbox.run(pipeline, "first")
    assert told(inbox, pipeline) == [("", "discount", 2)]
