"""A column that a producer adds and nobody declares is told with the first txid that has it, or halts its batch."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from tests.sources.conftest import Inbox
from tests.sources.in_process import Folder, counted_here, folder
from tests.sources.planning import SCHEMA
from tests.sources.test_files import parquet_of
from tidegate.explain.why import explain
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.sources import PAYLOAD, REFUSAL
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import SourceUnreadable

__all__ = ["counted_here", "folder"]  # fixtures

FORMATS = ("csv", "json", "parquet")
OVER: dict[str, Any] = {format: Files("inbox", f"**/*.{format}", format, SCHEMA, max_files=9) for format in FORMATS}
ROW = {"name": "a", "amount": 1}
NEW = {**ROW, "discount": 5}


def file_of(format: str, row: dict[str, Any], *more: dict[str, Any]) -> bytes:
    if format == "parquet":
        return parquet_of(pa.table({n: pa.array([v], pa.int32() if n == "amount" else None) for n, v in row.items()}))
    if format == "csv":
        return f"{','.join(row)}\n{','.join(map(str, row.values()))}\n".encode()
    return "".join(f"{json.dumps(each)}\n" for each in (row, *more)).encode()


def noted(inbox: Inbox, pipeline: Pipeline) -> list[tuple[str, int]]:
    """Return the new columns that the ledger tells of, the same ones in all places."""
    with StateStore.connect(inbox.settings) as store:
        (lag,) = store.lag([pipeline.name])
        sentences = [cause.sentence for cause in explain(store, pipeline).causes if cause.code == "NEW_COLUMNS"]
    assert len(sentences) == bool(lag.new_columns)
    for column in lag.new_columns[:3]:
        assert f"{column['column']}" in sentences[0]
        assert f"(since txid {column['first_txid']})" in sentences[0]
    return [(column["column"], column["first_txid"]) for column in lag.new_columns]


@pytest.mark.usefixtures("counted_here")
@pytest.mark.parametrize("format", ["csv", "json"])
def test_a_new_column_is_told_with_its_first_txid_until_it_is_ignored(inbox: Inbox, format: str) -> None:
    source = replace(OVER[format], max_files=1)
    pipeline = inbox.declare(source)
    for number, row in enumerate([{**ROW, "city": "x"}, ROW, NEW, {**NEW, "city": "y"}], start=1):
        inbox.write(f"{number}.{format}", file_of(format, row))
    inbox.run(pipeline, "first")
    assert noted(inbox, pipeline) == [("discount", 3)]
    ignoring = inbox.declare(replace(source, ignored_columns=["discount"]))
    assert noted(inbox, ignoring) == []
    inbox.write(f"9.{format}", file_of(format, NEW))
    inbox.run(ignoring, "second")
    assert noted(inbox, ignoring) == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_batch_with_a_new_column_is_halted_if_the_source_says_so(folder: Folder, format: str) -> None:
    source = replace(OVER[format], on_new_column="block")
    file = folder.write(f"a.{format}", file_of(format, ROW))
    assert folder.rows(source) == [("a", 1)]
    file.write_bytes(file_of(format, NEW))
    message = folder.refused(source, SourceUnreadable)
    assert f"a.{format} has the column discount, which the source does not declare" in message
    assert "ignored_columns" in message
    assert folder.rows(replace(source, ignored_columns=["discount"])) == [("a", 1)]
    file.unlink()
    folder.write(f"country=pt/c.{format}", file_of(format, ROW))
    assert "has the column country" in folder.refused(source, SourceUnreadable)


@pytest.mark.parametrize("missing", ["refuse", "null"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_column_in_another_case_is_named_and_never_null(folder: Folder, format: str, missing: Any) -> None:
    """Whether columns may lack or not; in JSON also in a single record, and in a field of a struct."""
    source = replace(OVER[format], missing=missing)
    file = folder.write(f"a.{format}", file_of(format, {"NAME": "a", "amount": 1}))
    assert "(it has NAME: upper and lower case differ)" in folder.refused(source)
    if format == "json":
        file.write_bytes(file_of(format, ROW, {**ROW, "NAME": "b"}, {"Name": "a", "amount": 1}))
        assert "it has no key name (it has Name: upper and lower case differ)" in (message := folder.refused(source))
        assert "a.json, line 3" in message
        assert folder.rows(replace(source, ignored_columns=["Name"])) == [("a", 1), ("a", 1), (None, 1)]
        file.write_bytes(file_of(format, {"shop": {"id": 1, "code": "x"}}))
        nested = replace(source, schema={"shop": "struct<id: int, Code: string>"})
        assert "it has no field Code (it has code: upper" in folder.refused(nested)


def test_a_key_of_one_record_in_the_middle_is_seen(folder: Folder) -> None:
    folder.write("a.json", file_of("json", *[ROW] * 977, NEW, *[ROW] * 2000))
    assert "column discount" in folder.refused(replace(OVER["json"], on_new_column="block"), SourceUnreadable)


@pytest.mark.promise("limit:MOST_COLUMNS")
@pytest.mark.usefixtures("counted_here")
def test_keys_without_number_do_not_fill_the_ledger(inbox: Inbox) -> None:
    """Such as one per user; also a name that Postgres cannot hold."""
    pipeline = inbox.declare(replace(OVER["json"], max_files=1))
    odd = {"\0": 1, " \ud800": 2}
    for number, new in enumerate([{}, odd | {f"user {n}": n for n in range(300)}, {f"user {n}": n for n in range(1000, 1300)}]):
        inbox.write(f"{number}.json", file_of("json", ROW | new))
    inbox.run(pipeline, "first")
    columns = [column for column, _ in noted(inbox, pipeline)]
    assert len(columns) == 100
    assert {"\\0", " \\ud800"} <= set(columns)


def test_csv_files_that_are_older_than_a_column_have_null(folder: Folder) -> None:
    folder.write("1.csv", 'name,amount\na,1\n"b\nc",2\n')
    folder.write("2.csv", "amount,channel,name\n3,web,d\n")
    source = replace(OVER["csv"], schema={**SCHEMA, "channel": "string", "n": "int"})
    message = folder.refused(source)
    assert "channel, n is missing. If the file is older than that, missing='null' makes it NULL" in message
    nulls = replace(source, missing="null")
    assert folder.rows(nulls) == [("a", 1, None, None), ("b\nc", 2, None, None), ("d", 3, "web", None)]
    folder.write("3.csv", "name,amount\ne,x\n")
    (bad,) = (record for record in folder.read(nulls, flagged=True) if record[REFUSAL])
    (again,) = folder.replayed(nulls, {**bad, PAYLOAD: bad[PAYLOAD].replace("e,x", "e,5")})
    assert (again["name"], again["amount"], again["channel"]) == ("e", 5, None)


def test_spark_reads_and_the_ledger_tells(inbox: Inbox) -> None:
    pipeline = inbox.declare(Files("inbox", schema=SCHEMA))
    for number, row in enumerate([ROW, NEW], start=1):
        inbox.write(f"{number}.parquet", file_of("parquet", row))
    inbox.run(pipeline, "first")
    assert noted(inbox, pipeline) == [("discount", 2)]
