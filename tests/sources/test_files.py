"""The Files source reads records exactly and once, and refuses bad ones with file and line."""

import bz2
import codecs
import csv
import gzip
import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import steps
from tests.sources.conftest import SCHEMA, Inbox
from tidegate.jobs import Count, Files, Max, Pipeline, State, Sum
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL
from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.files import content
from tidegate.jobs.sources.files.formats import parquet
from tidegate.jobs.sources.files.formats.records import typed_values
from tidegate.jobs.sources.files.formats.text_files import text_reader, text_scan
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import DeclarationInvalid, MalformedRecord, RowsLost, SourceChanged, SourceUnreadable
from tidegate.state_store.ledger.batches import encode_metadata
from tidegate.state_store.seal.attempts import Attempt

CSV = Files("inbox", glob="*.csv*", format="csv", schema=SCHEMA, max_files=10)
JSON = Files("inbox", glob="*.json*", format="json", schema=SCHEMA, max_files=10)
TEXT = Files("inbox", glob="*.txt*", format="text", max_files=10)
PARQUET = Files("inbox", glob="*.parquet", schema=SCHEMA, max_files=10)
HEADER = "name,amount\n"
NO_FIT = "the record does not fit the schema: "

# Texts found in CSV files: separators, quotes, backslashes, other alphabets, spaces at the ends.
NAMES = [
    "plain",
    "Doe, Jane",
    'says "hi"',
    'says "hi", leaves',
    '"',
    "back\\slash",
    "end\\",
    "Zürich",
    "\U0001f30a",
    " padded ",
]


def write_parquet(inbox: Inbox, name: str, table: pa.Table) -> Path:
    """Write one Parquet file."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return inbox.write(name, sink.getvalue())


def people(names: list[str | None], amounts: list[int | None], kind: pa.DataType | None = None) -> pa.Table:
    """Return a table that fits the schema."""
    return pa.table({"name": pa.array(names, pa.string()), "amount": pa.array(amounts, kind or pa.int32())})


def plan(inbox: Inbox, source: Files) -> dict[str, Any]:
    """Return the first batch's metadata."""
    metadata = source.coordinator(inbox.settings).initialize_transaction(1, None, None)
    assert metadata is not None
    return metadata


def batches(inbox: Inbox, source: Files) -> list[list[str]]:
    """Return the names of the files in each batch of one plan."""
    coordinator, previous, cut = source.coordinator(inbox.settings), None, []
    while metadata := coordinator.initialize_transaction(len(cut) + 1, previous, None):
        cut.append([file["name"] for file in metadata["files"]])
        previous = metadata
    return cut


# ------------------------------------------------------------------------------------------------------- read right


def test_csv_reads_what_python_and_duckdb_read(inbox: Inbox) -> None:
    """Spark reads CSV's quotes, separators, backslashes and other alphabets as other readers do."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerows([["name", "amount"], *([name, number] for number, name in enumerate(NAMES))])
    file = inbox.write("01.csv", content.getvalue())

    expected = sorted(((name, number) for number, name in enumerate(NAMES)), key=repr)
    by_duckdb = duckdb.sql(f"SELECT * FROM read_csv('{file}', columns={{'name': 'VARCHAR', 'amount': 'INT'}})").fetchall()
    assert sorted(by_duckdb, key=repr) == expected
    assert inbox.read(CSV) == expected


def test_json_reads_what_pandas_and_duckdb_read(inbox: Inbox) -> None:
    """Spark reads JSON's escapes, NULLs, missing and reordered keys as other readers do."""
    records = [{"name": name, "amount": number} for number, name in enumerate(NAMES)]
    records += [{"name": "null", "amount": None}, {"name": "left out"}, {"amount": 7, "name": "turned"}]
    lines = [json.dumps(record, ensure_ascii=position % 2 == 0) for position, record in enumerate(records)]
    file = inbox.write("01.json", "\n".join(lines) + "\n")

    expected = sorted(((record["name"], record.get("amount")) for record in records), key=repr)
    by_pandas = pd.read_json(file, lines=True, dtype={"amount": "Int32"}, convert_dates=False)
    assert [None if pd.isna(amount) else int(amount) for amount in by_pandas["amount"]] == [r.get("amount") for r in records]
    by_duckdb = duckdb.sql(f"SELECT * FROM read_json('{file}', columns={{'name': 'VARCHAR', 'amount': 'INT'}})").fetchall()
    assert sorted(by_duckdb, key=repr) == expected
    assert inbox.read(JSON) == expected


def test_text_reads_every_line_as_it_is(inbox: Inbox) -> None:
    """A line of text arrives unchanged, even if it is empty, has spaces or is the last without an end."""
    lines = ["first", "", "  spaces  ", "tab\tin", 'quotes "', "Zürich \U0001f30a", "last"]
    inbox.write("01.txt", "\n".join(lines))

    assert inbox.read(TEXT) == sorted(((line,) for line in lines), key=repr)


def test_parquet_reads_what_pandas_reads(inbox: Inbox) -> None:
    """All column types that a state can have arrive from Parquet as they were written."""
    table = pa.table(
        {
            "name": ["a", None, "c"],
            "small": pa.array([1, None, -(2**15)], pa.int16()),
            "large": pa.array([2**62, None, -(2**62)], pa.int64()),
            "price": pa.array([Decimal("1.05"), None, Decimal("-99999999.99")], pa.decimal128(10, 2)),
            "day": pa.array([pd.Timestamp("2013-01-01").date(), None, pd.Timestamp("1900-02-28").date()], pa.date32()),
            "known": pa.array([True, None, False]),
        }
    )
    file = write_parquet(inbox, "01.parquet", table)
    schema = {
        "name": "string",
        "small": "smallint",
        "large": "bigint",
        "price": "decimal(10,2)",
        "day": "date",
        "known": "boolean",
    }

    frame = pd.read_parquet(file, dtype_backend="pyarrow").astype(object)
    expected = frame.where(frame.notna(), None).itertuples(index=False, name=None)
    assert inbox.read(Files("inbox", schema=schema)) == sorted(expected, key=repr)


@pytest.mark.parametrize(
    ("source", "suffix", "compress"),
    [(CSV, ".gz", gzip.compress), (JSON, ".gz", gzip.compress), (TEXT, ".gz", gzip.compress), (TEXT, ".bz2", bz2.compress)],
    ids=["csv.gz", "json.gz", "txt.gz", "txt.bz2"],
)
def test_compressed_files_read_like_plain_ones(inbox: Inbox, source: Files, suffix: str, compress: Callable) -> None:
    """A compressed file has the same rows as the file in it."""
    content = {"csv": HEADER + "Zürich,1\n", "json": '{"name": "Zürich", "amount": 1}\n', "text": "Zürich"}[source.format]
    inbox.write(f"01.{source.glob[2:-1]}{suffix}", compress(content.encode()))

    assert inbox.read(source) == [("Zürich",) if source is TEXT else ("Zürich", 1)]


def test_an_empty_quoted_text_is_not_null(inbox: Inbox) -> None:
    """Two quotes are the empty text, no text at all is NULL."""
    inbox.write("01.csv", HEADER + '"",1\n,2\nname,\n')

    assert inbox.read(CSV) == [("", 1), ("name", None), (None, 2)]


@pytest.mark.parametrize("options", [{}, {"multiLine": "true"}], ids=["by default", "multiLine"])
def test_a_newline_inside_quotes_belongs_to_its_record(inbox: Inbox, options: dict[str, str]) -> None:
    """It follows RFC 4180, declared or not, and a bad record after it is still found on its own line."""
    source = Files("inbox", format="csv", schema=SCHEMA, options=options)
    inbox.write("01.csv", HEADER + '"two\nlines",1\nplain,2\n')
    assert inbox.read(source) == [("plain", 2), ("two\nlines", 1)]

    file = inbox.write("01.csv", HEADER + '"two\nlines",1\nplain,2,3\n')
    pipeline = inbox.declare(source)
    inbox.plan(pipeline, "run")
    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 4: {NO_FIT}it has 3 value(s)")


def test_columns_of_csv_are_read_by_their_names(inbox: Inbox) -> None:
    """Each file's header assigns its columns, in any order and among others."""
    inbox.write("01.csv", "amount,name\n1,a\n")
    inbox.write("02.csv", 'id,name,note,amount\n7,b,"x, y",2\n')
    inbox.write("03.csv", "name,amount\nc,3\n")
    assert inbox.read(CSV, files=3) == [("a", 1), ("b", 2), ("c", 3)]

    file = inbox.write("04.csv", "id,name,note,amount\n7,b,2\n")
    pipeline = inbox.declare(CSV)
    inbox.plan(pipeline, "run")
    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 2: {NO_FIT}it has 3 value(s), the 4 columns need")


@pytest.mark.parametrize("separator", ["\t", "\x01", ";"], ids=["tab", "x01", "semicolon"])
def test_records_made_of_separators_only_count(inbox: Inbox, separator: str) -> None:
    """All their values are NULL, but they are records; an empty line is not."""
    schema = {"name": "string", "amount": "int", "other": "int"}
    lines = ["name,amount,other", "x,1,2", ",,", "", "y,3,4"]
    inbox.write("01.csv", "\n".join(lines).replace(",", separator) + "\n")
    source = Files("inbox", format="csv", schema=schema, options={"sep": separator})

    assert inbox.read(source) == [("x", 1, 2), ("y", 3, 4), (None, None, None)]


@pytest.mark.parametrize("separator", ["¦", "\u3001"], ids=["broken bar", "ideographic comma"])
def test_a_separator_of_several_bytes_is_one_character(inbox: Inbox, separator: str) -> None:
    """It may be any character, even one of several bytes in UTF-8."""
    inbox.write("01.csv", f'name{separator}amount\n"a{separator}b"{separator}1\nc"d{separator}2\n')

    assert inbox.read(Files("inbox", format="csv", schema=SCHEMA, options={"sep": separator})) == [
        (f"a{separator}b", 1),
        ('c"d', 2),
    ]


@pytest.mark.parametrize(
    ("encoding", "codec"),
    [("ISO-8859-1", "latin-1"), ("windows-1252", "cp1252"), ("UTF-16", "utf-16"), ("UTF-16LE", "utf-16-le"), ("utf8", "utf-8")],
)
@pytest.mark.parametrize("form", ["csv", "json", "text"])
def test_another_encoding_is_read_where_it_is_declared(inbox: Inbox, form: Any, encoding: str, codec: str) -> None:
    """The option decides the meaning of the bytes, for every text format."""
    name = "Zürich é"
    content = {"csv": f'{HEADER}"{name}\n",1\n', "json": f'{{"name": "{name}\\n", "amount": 1}}\n', "text": f"{name}\n"}[form]
    source = Files("inbox", format=form, schema={} if form == "text" else SCHEMA, options={"encoding": encoding})
    inbox.write("01", content.encode(codec))

    assert inbox.read(source) == [(name,) if form == "text" else (f"{name}\n", 1)]


def test_bytes_that_are_not_of_the_declared_encoding_are_refused(inbox: Inbox) -> None:
    """The error names the declared encoding and the line."""
    pipeline = inbox.declare(Files("inbox", format="csv", schema=SCHEMA, options={"encoding": "UTF-16"}))
    file = inbox.write("01.csv", (HEADER + "a,1\n").encode("utf-16") + b"\x00")
    inbox.plan(pipeline, "run")
    assert inbox.refused(pipeline, MalformedRecord) == f"{file}, line 3: byte 0x00 is not utf-16."


DIGITS = ["0.1234567890123456789", "1234567.12345678901", "12345678.90", "0.0001", "10000000.00", "-0", "1e-3", "12E2"]


def test_numbers_in_json_keep_their_digits(inbox: Inbox) -> None:
    """Decimals and texts keep the written digits: neither passes through a double."""
    inbox.write("01.json", "".join(f'{{"name": {number}, "amount": {number}}}\n' for number in DIGITS))
    source = Files("inbox", format="json", schema={"name": "string", "amount": "decimal(38,19)"})

    scale = Decimal(1).scaleb(-19)
    assert inbox.read(source) == sorted(((number, Decimal(number).quantize(scale)) for number in DIGITS), key=repr)


def test_a_json_value_that_is_no_text_is_read_as_written(inbox: Inbox) -> None:
    """A text column takes the JSON as written, digit for digit, for the transform to parse."""
    lines = ['{"name": {"a": 1.10, "b": [1, "x y"]}, "amount": 1}', '{"amount": 2, "name": true}', '{"name": [1.0, null]}']
    inbox.write("01.json", "\n".join(lines))

    assert inbox.read(JSON) == sorted([('{"a":1.10,"b":[1,"x y"]}', 1), ("true", 2), ("[1.0,null]", None)], key=repr)


NO_TIMES = [
    *("10:00", "T10:00", "10:00:00", "today", "now", "2024", "2024-01", "2024-01-05 garbage", "2024-01-05T99:99", "24:00"),
    *("2024-01-05T10:00:00.1234567", "2024-02-30", "0000-01-01", "2024-01-05T10:00:60", "2024-1-5", "+12024-01-01", ""),
    *("2024-01-05T10:00:00 Europe/Berlin", "9999-12-31T23:59:59-01:00", " 2024-01-05", "1704448800", "10000-01-01"),
]


@pytest.mark.parametrize("kind", ["date", "timestamp", "timestamp_ntz"])
@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_time_without_its_full_form_is_refused(inbox: Inbox, form: Any, kind: str) -> None:
    """No part is cut off or guessed, nor taken from the day of the run: each of these goes to quarantine."""
    quoted = [f'"{text}"' for text in NO_TIMES]
    lines = (
        [f"a,{text}" for text in quoted]
        if form == "csv"
        else [f'{{"name": "a", "amount": {t}}}' for t in [*quoted, "5", "1.5"]]
    )
    good = "2024-01-05" if kind == "date" else "2024-01-05T10:00:00.123456"
    lines.append(f"b,{good}" if form == "csv" else f'{{"name": "b", "amount": "{good}"}}')
    inbox.write("01", (HEADER if form == "csv" else "") + "\n".join(lines))
    source = Files("inbox", format=form, schema={"name": "string", "amount": kind})
    states = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count()})}
    pipeline = inbox.declare(source, states=states, on_poison="quarantine")

    inbox.run(pipeline)
    assert inbox.rows(pipeline) == [{"name": "b", "lines": 1}]
    with StateStore.connect(inbox.settings) as store:
        waiting = list(store.quarantined("inbox"))
    assert sorted(record["payload"] for record in waiting) == sorted(lines[:-1])
    assert all(record["reason"].startswith("column amount: ") for record in waiting)


def test_full_dates_and_times_are_read(inbox: Inbox) -> None:
    """They are read as by Python, with and without a zone, from the first to the last year."""
    texts = [
        "2024-01-05",
        "2024-01-05T10:00",
        "0001-01-01 00:00:00",
        "9999-12-31T23:59:59.999999Z",
        "2024-02-29T23:30:00.5+0530",
    ]
    inbox.write("01.csv", "at\n" + "\n".join(texts))
    source = Files("inbox", format="csv", schema={"at": "timestamp"})
    states = {"per_name": State(key={"at": "timestamptz"}, aggregates={"lines": Count()})}
    pipeline = inbox.declare(source, states=states)

    inbox.run(pipeline)
    found = [row["at"] for row in inbox.rows(pipeline)]
    parsed = [datetime.fromisoformat(text) for text in texts]
    assert found == sorted(time if time.tzinfo else time.replace(tzinfo=UTC) for time in parsed)


@pytest.mark.parametrize(
    ("lines", "line", "why"),
    [
        (['{"name": "a", "amount": 1}] junk'], 1, "something follows the record: '] junk'"),
        (['{"name": "a", "amount": 1}][{"name": "b", "amount": 2}'], 1, "something follows the record"),
        (['{"name": "a\\ud800b", "amount": 1}'], 1, "column name: half of a surrogate pair stands alone"),
        (["{", '  "name": "a",', '  "amount": 1', "}"], 1, "one record a line is read, but this looks like JSON over several"),
        (['[{"name": "a", "amount": 1},', '{"name": "b", "amount": 2}]'], 1, "one record a line is read, but this looks"),
        (['{"name": "a", "amount": 1', ', "amount": 2}'], 1, "it is no JSON: Expecting ',' delimiter at character 26"),
        (["{'name': 'a', 'amount': 1}"], 1, "it is no JSON"),
        (['{"name": "a", "amount": 01}'], 1, "it is no JSON"),
        (['{"name": "a", "amount": NaN}'], 1, "column amount: 'NaN' is no int"),
        (['{"name": "a", "amount": 1' + "0" * 5000 + "}"], 1, "it has a number of thousands of digits"),
        (["[" * 100_000], 1, "it is nested too deeply"),
    ],
)
def test_a_json_line_with_hidden_defects_is_refused(inbox: Inbox, lines: list[str], line: int, why: str) -> None:
    """No text after the record is dropped, no character is replaced, and one record is one line."""
    pipeline = inbox.declare(JSON)
    file = inbox.write("01.json", "\n".join(lines))
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line {line}: {NO_FIT}{why}")


def test_a_key_that_no_record_of_a_json_file_has_is_refused_or_declared(inbox: Inbox) -> None:
    """It may be misspelt, unless `missing` allows its absence everywhere. Single records may always lack it."""
    lines = ['{"name": "a", "Amount": 1}', '{"name": "amount", "x": {"amount": 1}}', '{"name": "\\"amount\\": 5"}']
    file = inbox.write("01.json", "\n".join(lines))
    pipeline = inbox.declare(JSON)
    inbox.plan(pipeline, "run")
    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}: none of its 3 record(s) has the key amount")

    lenient = Files("inbox", glob="*.json", format="json", schema=SCHEMA, missing="null")
    assert lenient.identity == Files("inbox", glob="*.json", format="json", schema=SCHEMA).identity
    assert inbox.read(lenient) == sorted([("a", None), ("amount", None), ('"amount": 5', None)], key=repr)
    inbox.write("01.json", "\n".join([*lines, '{"name": "b", "\\u0061mount": 2}']))
    assert len(inbox.read(JSON)) == 4


@pytest.mark.parametrize("kind", [pa.int32(), pa.int16()], ids=["Spark's reader", "our tasks"])
def test_a_column_that_a_parquet_file_lacks_is_refused_or_declared_null(inbox: Inbox, kind: pa.DataType) -> None:
    """Also beside INT96 and in a file that lacks all columns, but not if the file has it in another case."""
    times = pa.array([datetime(2026, 1, 2), None])
    pq.write_table(
        pa.table({"amount": pa.array([1, 2], kind), "at": times}),
        inbox.folder / "1.parquet",
        use_deprecated_int96_timestamps=True,
    )
    pq.write_table(pa.table({"name": ["c"], "amount": pa.array([3], kind)}), inbox.folder / "2.parquet")
    pq.write_table(pa.table({"other": [4, 5]}), inbox.folder / "3.parquet")
    schema = {**SCHEMA, "at": "timestamp"}
    lenient = Files("inbox", glob="*.parquet", schema=schema, missing="null", max_files=3)
    at = datetime(2026, 1, 2, tzinfo=UTC).astimezone().replace(tzinfo=None)
    rows = [(None, 1, at), (None, 2, None), ("c", 3, None), (None, None, None), (None, None, None)]
    assert inbox.read(lenient) == sorted(rows, key=repr)
    with pytest.raises(MalformedRecord, match=r"column name of the schema is missing; it has amount, at"):
        inbox.read(replace(lenient, missing="refuse"))
    pq.write_table(pa.table({"Name": ["d"], "amount": pa.array([3], kind)}), inbox.folder / "2.parquet")
    with pytest.raises(MalformedRecord, match=r"it has Name: upper and lower case differ"):
        inbox.read(lenient)


@pytest.mark.parametrize(
    ("content", "line", "why"),
    [
        ('1,"a\n2,b\n3,c', 2, "a quote is opened and never closed"),
        ('1,"a"b\n2,c\n', 2, "text follows a closing quote"),
        ('1,a\n2,"b"c"\n', 3, "text follows a closing quote"),
        ("1,a\n   \n", 3, "it has 1 value(s), the 2 columns need one each"),
    ],
)
def test_quotes_that_make_no_record_are_refused(inbox: Inbox, content: str, line: int, why: str) -> None:
    """A quote that stays open does not swallow the file; its own line is named."""
    pipeline = inbox.declare(Files("inbox", format="csv", schema={"amount": "int", "name": "string"}))
    file = inbox.write("01.csv", "amount,name\n" + content)
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line {line}: {NO_FIT}{why}")


def test_an_empty_line_of_one_column_is_refused(inbox: Inbox) -> None:
    """It may be a value or no record: neither is guessed."""
    pipeline = inbox.declare(Files("inbox", format="csv", schema={"name": "string"}), transform=one_each)
    file = inbox.write("01.csv", "name\na\n\nb\n")
    inbox.plan(pipeline, "run")
    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 3: {NO_FIT}an empty line may be an empty value")
    inbox.write("02.csv", 'name\na\n   \n""\n')
    one = Files("inbox", glob="02.csv", format="csv", schema={"name": "string"})
    assert inbox.read(one) == [("   ",), ("",), ("a",)]


def test_zeros_after_a_gzip_member_are_no_data(inbox: Inbox) -> None:
    """Tapes and some uploads fill up the last block with zeros; other bytes are refused."""
    inbox.write("01.txt.gz", gzip.compress(b"a\n") + gzip.compress(b"b\n") + bytes(1000))
    assert inbox.read(TEXT) == [("a",), ("b",)]

    pipeline = inbox.declare(TEXT, transform=text_as_name)
    file = inbox.write("01.txt.gz", gzip.compress(b"a\n") + b"junk")
    inbox.plan(pipeline, "run")
    assert str(file) in inbox.refused(pipeline, SourceUnreadable)


def test_a_damaged_second_stream_of_bzip2_is_refused(inbox: Inbox) -> None:
    """The damage is not taken for the end of the file."""
    inbox.write("01.txt.bz2", bz2.compress(b"a\n") + bz2.compress(b"b\n"))
    assert inbox.read(TEXT) == [("a",), ("b",)]

    pipeline = inbox.declare(TEXT, transform=text_as_name)
    file = inbox.write("01.txt.bz2", bz2.compress(b"a\n") + b"x" + bz2.compress(b"b\n")[1:])
    inbox.plan(pipeline, "run")
    assert str(file) in inbox.refused(pipeline, SourceUnreadable)


def test_a_large_file_is_read_in_pieces_at_its_records(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece starts at a record, despite newlines in quotes; records arrive once, with the file's line numbers."""
    monkeypatch.setattr(text_scan, "RANGE_BYTES", 1 << 20)
    records = [f'"name{n % 10}\n{"x" * (n % 50)}",{n}\n' for n in range(60_000)]
    file = inbox.write("01.csv", codecs.BOM_UTF8 + (HEADER + "".join(records)).encode())
    found = text_scan.scan(
        text_scan.TextFile(file, "01.csv", "utf-8"), CSV.emitter(Any, inbox.settings)._parser, has_header=True, may_lack=False
    )  # type: ignore[arg-type,attr-defined]
    assert len(found.ranges) > 1

    assert [amount for _, amount in sorted(inbox.read(CSV), key=lambda row: row[1])] == list(range(60_000))
    file = inbox.write("01.csv", HEADER + "".join(records) + "z,x\n")
    pipeline = inbox.declare(CSV)
    inbox.plan(pipeline, "run")
    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 120002: {NO_FIT}column amount: 'x' is no int")


@pytest.mark.promise("decision:0018")
def test_records_that_spark_does_not_see_are_missed(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are also counted without Spark: an attempt that read fewer is not sealed."""
    for number in range(3):
        inbox.write(f"0{number}.csv", HEADER + "a,1\n" * 100_000)
    pipeline = inbox.declare(CSV)
    inbox.plan(pipeline, "run")
    real = text_scan.in_tasks
    monkeypatch.setattr(text_reader, "in_tasks", lambda ranges: real(ranges[:-1]))

    with pytest.raises(RowsLost, match="of 300000 rows 200000 arrived in the partials of state per_name"):
        steps.process(inbox.settings, pipeline, 1, owner="test")
    monkeypatch.undo()
    assert inbox.run(pipeline, "again") == [1]
    assert inbox.rows(pipeline) == [{"name": "a", "lines": 300_000, "amount": 300_000}]


@pytest.mark.parametrize(
    "text",
    ["9" * 39, "9" * 20 + "." + "9" * 19, "340282366920938463463374607431768211457", "1e38", "1E39", "0." + "9" * 39, "1e-39"],
)
def test_a_decimal_of_too_many_digits_does_not_become_another_number(inbox: Inbox, text: str) -> None:
    """Arrow's own cast counts from the other end where 128 bits are not enough."""
    for name in ("decimal(38,0)", "decimal(38,19)"):
        kind = parse_type(name)
        column, bad = typed_values.from_texts(kind, pa.array(["1", text]))
        assert column.to_pylist()[1] is None
        assert list(bad) == [1]
    source = Files("inbox", format="csv", schema={"name": "string", "amount": "decimal(38,0)"})
    inbox.write("01.csv", f"{HEADER}a,{'9' * 38}\nb,{'0' * 40}1\nc,12.50e1\n")
    assert inbox.read(source) == [("a", Decimal("9" * 38)), ("b", Decimal(1)), ("c", Decimal(125))]


def test_blank_lines_before_the_header_of_one_column_are_no_header(inbox: Inbox) -> None:
    """The header itself is not a record then."""
    inbox.write("01.csv", "\n\nname\na\n")
    assert inbox.read(Files("inbox", format="csv", schema={"name": "string"})) == [("a",)]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
def test_the_rules_of_a_zone_hold_beyond_the_tables_of_its_past(zone: str) -> None:
    """Summer in 2050 is summer time, as in Python, and a repeated hour is refused."""
    texts = ["2036-07-01 12:00:00", "2037-07-01 12:00:00", "2050-07-01 12:00:00", "2050-01-01 12:00:00", "9999-07-01 12:00:00"]
    column, bad = typed_values.from_texts(parse_type("timestamp"), pa.array([*texts, None]), zone)
    assert bad == {}
    assert column.to_pylist() == [*(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)) for text in texts), None]
    twice = {"Europe/Berlin": "2050-10-30 02:30:00", "America/New_York": "2050-11-06 01:30:00"}[zone]
    assert list(typed_values.from_texts(parse_type("timestamp"), pa.array([twice]), zone)[1]) == [0]


@pytest.mark.parametrize("last", ["", "x,y,z\r\n"], ids=["regular", "beside a bad record"])
def test_a_declared_line_end_is_the_only_one(inbox: Inbox, last: str) -> None:
    """A carriage return belongs to the value before a declared line feed, whatever its neighbours are."""
    inbox.write("01.csv", "amount,name\n1,k\r\n2,k\n3,\r\n" + last)
    source = Files("inbox", format="csv", schema={"amount": "int", "name": "string"}, options={"lineSep": "\n"})
    states = {"per_name": State(key={"name": "text"}, aggregates={"amount": Sum("amount")})}
    pipeline = inbox.declare(source, states=states, on_poison="quarantine")

    inbox.run(pipeline)
    assert {row["name"]: row["amount"] for row in inbox.rows(pipeline)} == {"k\r": 1, "k": 2, "\r": 3}


def test_a_number_before_a_carriage_return_is_none_if_lines_end_otherwise(inbox: Inbox) -> None:
    """It is refused in regular files, too."""
    inbox.write("01.csv", "name,amount\nk,1\r\n")
    pipeline = inbox.declare(replace(CSV, options={"lineSep": "\n"}))
    inbox.plan(pipeline, "run")
    assert r"'1\r' is no int" in inbox.refused(pipeline, MalformedRecord)


def test_a_mark_at_the_start_of_a_value_is_kept(inbox: Inbox) -> None:
    """U+FEFF is a character of the first value like any other, also in the first record after the header."""
    inbox.write("01.csv", HEADER + "\ufeffk,1\nk,2\n\ufeffk,4\n")
    assert sorted(inbox.read(CSV)) == [("k", 2), ("\ufeffk", 1), ("\ufeffk", 4)]


def read_by_pattern(inbox: Inbox, form: Any, kind: str, options: dict[str, str], texts: list[str]) -> dict[str, Any]:
    """Return the value of each text, or the reason why it is refused."""
    lines = [f'{n},"{text}"' if form == "csv" else json.dumps({"n": n, "at": text}) for n, text in enumerate(texts)]
    inbox.write("01", "\n".join(["n,at", *lines] if form == "csv" else lines))
    source = Files("inbox", format=form, schema={"at": kind, "n": "int"}, options=options)
    metadata = source.coordinator(inbox.settings).initialize_transaction(1, None, None)
    assert metadata is not None
    with spark_session(inbox.settings, "inbox") as spark:
        emitter = source.emitter(spark, inbox.settings)
        rows = emitter.emit_records(Attempt("inbox", 1, 1, metadata), metadata).toArrow().to_pylist()
    assert len(rows) == len(texts)
    line = 2 if form == "csv" else 1
    by_line = {int(row[ORIGIN].rpartition(" ")[2]) - line: row[REFUSAL] or row["at"] for row in rows}
    return {text: by_line[number] for number, text in enumerate(texts)}


@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_time_of_a_pattern_is_one_moment_in_its_zone(inbox: Inbox, form: Any) -> None:
    """An hour that the clocks leave out or repeat is refused, as without a pattern, also in years beyond their tables."""
    options = {"timestampFormat": "dd.MM.yyyy HH:mm", "timeZone": "Europe/Berlin"}
    bad = ["29.03.2026 02:30", "25.10.2026 02:30", "30.10.2050 02:30", "01.01.0001 00:00"]
    good = ["29.03.2026 01:30", "29.03.2026 03:30", "25.10.2026 01:30", "25.10.2026 03:30", "01.07.2050 12:00"]
    found = read_by_pattern(inbox, form, "timestamp", options, bad + good)

    for text in bad:
        assert found[text].startswith(f"column at: '{text}' is no one moment of the years 1 to 9999 in Europe/Berlin")
    zone = ZoneInfo("Europe/Berlin")
    assert {text: found[text] for text in good} == {
        text: datetime.strptime(text, "%d.%m.%Y %H:%M").replace(tzinfo=zone) for text in good
    }


@pytest.mark.parametrize("pattern", ["yyyy-MM-dd HH:mmXXX", "yyyy-MM-dd HH:mm[XXX]"], ids=["always", "maybe"])
def test_a_zone_in_a_text_says_which_moment_it_is(inbox: Inbox, pattern: str) -> None:
    """Both hours of a night in autumn can be written then; without its zone, such a text is refused."""
    texts = ["2026-10-25 02:30+02:00", "2026-10-25 02:30+01:00", "2026-10-25 02:30Z", "2026-07-01 12:00", "2026-10-25 02:30"]
    options = {"timestampFormat": pattern, "timeZone": "Europe/Berlin"}
    found = read_by_pattern(inbox, "csv", "timestamp", options, texts)

    assert {text: found[text] for text in texts[:3]} == {text: datetime.fromisoformat(text) for text in texts[:3]}
    if "[" in pattern:
        assert found[texts[3]] == datetime(2026, 7, 1, 10, tzinfo=UTC)
        assert "is no one moment" in found[texts[4]]
    else:
        assert all("is no timestamp of the form" in found[text] for text in texts[3:])


@pytest.mark.parametrize("form", ["csv", "json"])
@pytest.mark.parametrize("kind", ["date", "timestamp", "timestamp_ntz"])
def test_a_text_of_a_pattern_is_read_to_its_end(inbox: Inbox, form: Any, kind: str) -> None:
    """What follows is not cut off, and the years are those that Postgres, Spark and Python share."""
    bad = ["05.01.2024\x01", "05.01.2024\x01junk", "\x0105.01.2024", "\x01", "05.01.2024 ", "05.01.0000", "", "31.02.2024"]
    bad += ["05.01.12024", "5.1.2024", "05.01.2024\\", "\u0660\u0665.01.2024", "05.01.2024\njunk"]
    options = dict.fromkeys(("dateFormat", "timestampFormat", "timestampNTZFormat"), "dd.MM.yyyy")
    found = read_by_pattern(inbox, form, kind, options, ["05.01.2024", "31.12.9999", "01.01.0001", *bad])

    day = {"date": date, "timestamp": partial(datetime, tzinfo=UTC), "timestamp_ntz": datetime}[kind]
    days = [found.pop(text) for text in ("05.01.2024", "31.12.9999", "01.01.0001")]
    assert days == [day(2024, 1, 5), day(9999, 12, 31), day(1, 1, 1)]
    assert found == {text: f"column at: '{text}' is no {kind} of the form dd.MM.yyyy" for text in bad}


def test_patterns_are_read_as_by_python(inbox: Inbox) -> None:
    """Twelve hours with AM or PM, days of the year, names of months, and literals."""
    for pattern, text, expected in (
        ("yyyy-MM-dd hh:mm a", "2024-01-05 12:30 AM", datetime(2024, 1, 5, 0, 30, tzinfo=UTC)),
        ("yyyy-DDD HH:mm:ss.SSSSSS", "2024-060 23:59:59.000001", datetime(2024, 2, 29, 23, 59, 59, 1, tzinfo=UTC)),
        ("dd/MMM/yyyy:HH:mm:ss Z", "05/Jan/2024:10:00:00 +0200", datetime(2024, 1, 5, 8, tzinfo=UTC)),
        ("yyyy-MM-dd'T'HH:mm[:ss]", "2024-01-05T10:00", datetime(2024, 1, 5, 10, tzinfo=UTC)),
    ):
        assert read_by_pattern(inbox, "csv", "timestamp", {"timestampFormat": pattern}, [text]) == {text: expected}


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        *((pattern, "make up a part of the date") for pattern in ("MM-dd", "yyyy", "yyyy-MM", "yyyy-dd", "HH:mm", "")),
        *((pattern, "make up a part of the date") for pattern in ("yyyy-MM[-dd]", "'y'MM-dd", "yyyy-MM[[-dd] HH")),
        *((pattern, "make up the hour") for pattern in ("yyyy-MM-dd hh:mm", "yyyy-MM-dd mm", "yyyy-MM-dd[ KK]")),
        ("yyyy-MM-dd hh[ a]", "make up the hour"),
        *((pattern, "reads no dates or times with the letter") for pattern in ("uuuu-MM-dd", "YYYY-MM-dd", "E yyyy-MM-dd")),
    ],
)
@pytest.mark.parametrize("option", ["dateFormat", "timestampFormat", "timestampNTZFormat"])
def test_a_pattern_that_leaves_a_part_open_is_refused_when_declared(option: str, pattern: str, why: str) -> None:
    """Spark would fill it in, by 1970 or midnight."""
    for form in ("csv", "json"):
        with pytest.raises(ValueError, match=f"cannot take the option (?i:{option}).*{why}"):
            Files("inbox", format=form, schema=SCHEMA, options={option: pattern})  # type: ignore[arg-type]


def test_a_character_that_two_blocks_share_is_one(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The byte order mark is one, too, and so are characters in JSON."""
    monkeypatch.setattr(content, "READ_BLOCK_BYTES", 1)
    inbox.write("01.json", codecs.BOM_UTF8 + '{"name": "\u00e9", "amount": 1}\n{"name": "\U0001f30a", "amount": 2}'.encode())
    assert inbox.read(JSON) == [("\u00e9", 1), ("\U0001f30a", 2)]


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("01.txt.gz", gzip.compress(b"a\n" * 9)[:10] + b"\xff" * 20, {}),
        ("01.txt", b"a\x00b\x00", {"encoding": "utf-16"}),
        ("01.txt", b"\xef", {"encoding": "utf-8-sig"}),
    ],
    ids=["no deflate", "no mark", "part of a mark"],
)
def test_content_of_another_encoding_or_form_is_refused(
    inbox: Inbox, name: str, content: bytes, options: dict[str, str]
) -> None:
    """The error has the file's name and no traceback, and the file is not left out."""
    source = Files("inbox", glob="*.txt*", format="text", options=options)
    pipeline = inbox.declare(source, transform=text_as_name)
    file = inbox.write(name, content)
    inbox.plan(pipeline, "run")
    assert str(file) in inbox.refused(pipeline, SourceUnreadable if name.endswith(".gz") else MalformedRecord)


@pytest.mark.parametrize(
    ("source", "content", "row"),
    [
        (CSV, HEADER + "a,1\n", ("a", 1)),
        (Files("inbox", format="csv", schema=SCHEMA, header=False), "a,1\n", ("a", 1)),
        (Files("inbox", format="csv", schema=SCHEMA, options={"multiLine": "true"}), HEADER + "a,1\n", ("a", 1)),
        (JSON, '{"name": "a", "amount": 1}\n', ("a", 1)),
        (TEXT, "a\n", ("a",)),
    ],
    ids=["csv", "csv without header", "csv multiLine", "json", "text"],
)
def test_a_byte_order_mark_is_no_data(inbox: Inbox, source: Files, content: str, row: tuple) -> None:
    """The mark that Windows programs write before UTF-8 belongs to no column."""
    inbox.write({"csv": "01.csv", "json": "01.json", "text": "01.txt"}[source.format], codecs.BOM_UTF8 + content.encode())

    assert inbox.read(source) == [row]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old mac"])
def test_every_kind_of_line_end_ends_a_line(inbox: Inbox, end: str) -> None:
    """Line ends of other systems are no data, even if the last line lacks one; blank lines are no records."""
    inbox.write("01.csv", end.join(["name,amount", "a,1", "", "b,2"]))
    inbox.write("02.csv", end.join(["name,amount", "c,3", ""]))

    assert inbox.read(CSV, files=2) == [("a", 1), ("b", 2), ("c", 3)]


NAMES_OF_FILES = [
    "with space.csv",
    " spaces around .csv",
    "[brackets].csv",
    "{braces}.csv",
    "star*.csv",
    "question?.csv",
    "back\\slash.csv",
    "100%25.csv",
    "plus+and&.csv",
    "hash#.csv",
    "quote'\".csv",
    "semi;colon,comma.csv",
    "~tilde^`$.csv",
    "Zürich.csv",
    "Zu\u0308rich.csv",
    "\U0001f30a.csv",
]


def test_any_file_name_is_read(inbox: Inbox) -> None:
    """A name is never a pattern, an escape or an address. Each file is read once, and only it."""
    for number, name in enumerate(NAMES_OF_FILES):
        inbox.write(name, f"{HEADER}file,{number}\n")
    inbox.write("star of another file.csv", HEADER + "other,99\n")
    source = Files("inbox", format="csv", schema=SCHEMA, max_files=100)

    assert inbox.read(source) == sorted([*(("file", n) for n in range(len(NAMES_OF_FILES))), ("other", 99)], key=repr)
    one_each = Files("inbox", format="csv", schema=SCHEMA, max_files=1)
    metadata = {"files": [file for file in plan(inbox, source)["files"] if file["name"] == "star*.csv"], "files_before": 0}
    with spark_session(inbox.settings, "inbox") as spark:
        emitter = one_each.emitter(spark, inbox.settings)
        rows = emitter.emit_batch(Attempt("inbox", 1, 1, metadata), metadata).collect()
    assert [tuple(row) for row in rows] == [("file", 4)]


def test_a_bad_record_names_its_file_even_if_its_name_needs_escaping(inbox: Inbox) -> None:
    """The right file of several is named, even if Spark needs its name escaped."""
    inbox.write("!first.csv", HEADER + "a,1\n")
    for name in NAMES_OF_FILES:
        file = inbox.write(name, HEADER + "a,1\nb,two\n")
        metadata = plan(inbox, CSV)
        with spark_session(inbox.settings, "inbox") as spark:
            emitter = CSV.emitter(spark, inbox.settings)
            with pytest.raises(MalformedRecord) as refusal:
                emitter.emit_batch(Attempt("inbox", 1, 1, metadata), metadata)
        assert str(refusal.value).startswith(f"{file}, line 3: {NO_FIT}column amount: 'two' is no int")
        file.unlink()


# ---------------------------------------------------------------------------------------------------------- refused


WRONG_COLUMNS: dict[str, Callable[[Any], Any]] = {
    "selectExpr": lambda rows: rows.selectExpr("nam AS name", "amount"),
    "item": lambda rows: rows.where(rows["nam"] == "a"),
    "aggregate": lambda rows: rows.groupBy("name").agg({"nam": "max"}),
    "name with a dot": lambda rows: rows.selectExpr("name", "`nam.e` AS amount"),
}


@pytest.mark.parametrize(("source", "policy"), [(CSV, "block"), (JSON, "quarantine")], ids=["csv", "json, quarantine"])
@pytest.mark.parametrize("wrong", WRONG_COLUMNS.values(), ids=WRONG_COLUMNS.keys())
def test_a_misspelt_column_in_a_transform_is_named(inbox: Inbox, source: Files, wrong: Callable, policy: str) -> None:
    """The error is one line and blames the declaration."""
    pipeline = inbox.declare(source, transform=wrong, on_poison=policy)
    inbox.write("01.csv", HEADER + "a,1\n")
    inbox.write("01.json", '{"name": "a", "amount": 1}\n')
    inbox.plan(pipeline, "run")
    assert "nam" in inbox.refused(pipeline, DeclarationInvalid).replace("name", "")


def test_a_column_whose_name_has_a_dot_is_summed(inbox: Inbox) -> None:
    """It is no field of a struct."""
    schema = {"name": "string", "a.b": "int", "c`d": "int"}
    states = {"per_name": State(key={"name": "text"}, aggregates={"one": Sum("a.b"), "two": Max("c`d")})}
    pipeline = inbox.declare(Files("inbox", glob="*.csv", format="csv", schema=schema), states=states)
    inbox.write("01.csv", "name,a.b,c`d\na,1,2\na,3,4\n")
    inbox.run(pipeline)
    assert inbox.rows(pipeline) == [{"name": "a", "one": 4, "two": 4}]


@pytest.mark.promise("error:MALFORMED_RECORD")
@pytest.mark.parametrize(
    ("content", "line"),
    [
        (HEADER + "a,1\nb,2,3\n", 3),
        (HEADER + "a,1\nb\n", 3),
        (HEADER + "b,2\nb\n", 3),
        (HEADER + "a,1\nb,two\n", 3),
        (HEADER + "a,1\nb,3000000000\n", 3),
        (HEADER + "a,1\nb,1.5\n", 3),
        (HEADER + "a,1\nb, 2\n", 3),
        (HEADER + 'a,1\n"b,2\n', 3),
        (HEADER + "a,1\nname,amount\n", 3),
        (HEADER + "\n\n\na,1\nb,two\n", 6),
        (HEADER.replace("\n", "\r") + "a,1\rb,two\r", 3),
        (HEADER + "a,1\n" + "b" * 300 + ",1\n" + "b" * 300 + ",two\n", 4),
    ],
    ids=[
        "too many fields",
        "too few fields",
        "too few fields, like a good line's beginning",
        "not a number",
        "number out of range",
        "fraction",
        "number with a space",
        "quote never closed",
        "header again",
        "after blank lines",
        "old mac line ends",
        "long record like another's beginning",
    ],
)
def test_a_bad_csv_record_is_refused_with_file_and_line(inbox: Inbox, content: str, line: int) -> None:
    """A record that does not fit fails its batch, with its place; earlier batches stay."""
    pipeline = inbox.declare(Files("inbox", format="csv", schema=SCHEMA))
    inbox.write("01.csv", HEADER + "a,1\n")
    inbox.run(pipeline)
    file = inbox.write("02.csv", content)
    inbox.plan(pipeline, "second")

    assert inbox.refused(pipeline, MalformedRecord, txid=2).startswith(f"{file}, line {line}: ")
    assert inbox.rows(pipeline) == [{"name": "a", "lines": 1, "amount": 1}]


@pytest.mark.parametrize(
    "content",
    [
        "a,1\nb,2\n",
        "name\na\n",
        "name, amount\na,1\n",
        "name;amount\na;1\n",
        "name,amount,name\na,1,b\n",
    ],
    ids=["no header", "one less", "a space", "other separator", "a column twice"],
)
def test_a_csv_file_with_another_header_is_refused(inbox: Inbox, content: str) -> None:
    """Columns are never confused, and a first row is not taken for a header: it must name the schema's columns."""
    pipeline = inbox.declare(CSV)
    file = inbox.write("01.csv", content)
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 1: the header is ")


def test_a_compressed_csv_file_with_another_header_is_refused(inbox: Inbox) -> None:
    """Compression hides no header."""
    pipeline = inbox.declare(Files("inbox", format="csv", schema={"name": "string", "note": "string"}), transform=one_each)
    file = inbox.write("01.csv.gz", gzip.compress(b"name,notes\na,hello\n"))
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 1: the header is ")


def one_each(rows):
    """Give an amount to rows without one."""
    return rows.selectExpr("name", "1 AS amount")


@pytest.mark.parametrize(
    "record",
    [
        '{"name": "b", "amount": ',
        "not json",
        '{"name": "b", "amount": "two"}',
        '{"name": "b", "amount": "2"}',
        '{"name": "b", "amount": 1.5}',
        '{"name": "b", "amount": 3000000000}',
        '{"name": "b", "amount": {"n": 1}}',
        '{"name": "b", "amount": [1]}',
        '{"name": "b", "amount": true}',
        "5",
        '"text"',
        "null",
        '{"name": "b", "amount": 2} tail',
        '{"name": "b", "amount": 2}{"name": "c", "amount": 3}',
    ],
    ids=[
        "cut off",
        "not JSON",
        "text for a number",
        "number in quotes",
        "fraction",
        "out of range",
        "object",
        "list",
        "boolean",
        "bare number",
        "bare text",
        "bare null",
        "something after it",
        "two records in a line",
    ],
)
def test_a_bad_json_record_is_refused_with_file_and_line(inbox: Inbox, record: str) -> None:
    """A line that is not one object of the schema's types fails its batch; no part is dropped or made NULL."""
    pipeline = inbox.declare(JSON)
    file = inbox.write("01.json", '{"name": "a", "amount": 1}\n' + record + "\n")
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 2: ")


@pytest.mark.parametrize("source", [CSV, JSON], ids=lambda source: source.format)
def test_a_decimal_with_more_digits_than_its_column_is_refused(inbox: Inbox, source: Files) -> None:
    """There is no implicit rounding: rounded rows would have another sum."""
    source = Files("inbox", format=source.format, schema={"name": "string", "amount": "decimal(10,2)"})
    pipeline = inbox.declare(source, states={"per_name": State(key={"name": "text"}, aggregates={"lines": Count()})})
    good = {"csv": HEADER + "a,1.500\n", "json": '{"name": "a", "amount": 1.500}\n'}
    bad = {"csv": "b,1.005\n", "json": '{"name": "b", "amount": 1.005}\n'}
    inbox.write("01", good[source.format])
    assert inbox.read(source) == [("a", Decimal("1.50"))]

    file = inbox.write("01", good[source.format] + bad[source.format])
    inbox.plan(pipeline, "run")
    assert inbox.refused(pipeline, MalformedRecord).startswith(str(file))


@pytest.mark.parametrize(
    ("name", "bytes_", "line"),
    [
        ("01.txt", b"a\ncaf\xe9\n", 2),
        ("01.txt", b"a\nb\n\xed\xa0\x80\n", 3),
        ("01.txt", b"a\nb\ncaf\xc3", 3),
        ("01.txt", b"x" * (1 << 20) + b"\n\xff", 2),
        ("01.csv", b"name,amount\ncaf\xe9,1\n", 2),
        ("01.json", b'{"name": "caf\xe9", "amount": 1}\n', 1),
        ("01.txt.gz", gzip.compress(b"a\ncaf\xe9\n"), 2),
    ],
    ids=["latin 1", "surrogate", "cut off at the end", "after the first block", "csv", "json", "gz"],
)
def test_bytes_that_are_not_utf8_are_refused_with_their_line(inbox: Inbox, name: str, bytes_: bytes, line: int) -> None:
    """Spark would replace such bytes silently, and merge several keys."""
    source = {"txt": TEXT, "csv": CSV, "json": JSON}[name.split(".")[1]]
    pipeline = inbox.declare(source, transform=text_as_name if source is TEXT else None)
    file = inbox.write(name, bytes_)
    inbox.plan(pipeline, "run")

    message = inbox.refused(pipeline, MalformedRecord)
    assert message.startswith(f"{file}, line {line}: ")
    assert message.endswith(" is not UTF-8.")


@pytest.mark.parametrize("source", [CSV, TEXT], ids=lambda source: source.format)
@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda _: b"no gzip at all"], ids=["cut off", "not gzip"])
def test_a_damaged_compressed_file_is_refused(inbox: Inbox, source: Files, damage: Callable[[bytes], bytes]) -> None:
    """A file that does not decompress to its end is not read as a shorter file."""
    pipeline = inbox.declare(source, transform=None if source is not TEXT else text_as_name)
    content = {"csv": HEADER + "a,1\n" * 1000, "text": "a\n" * 1000}
    file = inbox.write(f"01.{source.glob[2:-1]}.gz", damage(gzip.compress(content[source.format].encode())))
    inbox.plan(pipeline, "run")

    assert str(file) in inbox.refused(pipeline, SourceUnreadable)


def text_as_name(lines):
    """Give lines of text the columns of the other formats."""
    return lines.selectExpr("value AS name", "1 AS amount")


PARQUET_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-20],
    "cut to nothing": lambda _: b"",
    "cut in the middle": lambda data: data[: len(data) // 2],
    "not Parquet": lambda _: b"name,amount\na,1\n",
    "zeros in the data": lambda data: data[:100] + bytes(2000) + data[2100:],
}


@pytest.mark.parametrize("damage", PARQUET_DAMAGES.values(), ids=PARQUET_DAMAGES.keys())
def test_a_damaged_parquet_file_is_refused(inbox: Inbox, damage: Callable[[bytes], bytes]) -> None:
    """An incomplete file fails its batch, and the error names it."""
    pipeline = inbox.declare(PARQUET)
    names: list[str | None] = [f"{random.Random(n).getrandbits(200):x}" for n in range(1000)]
    write_parquet(inbox, "01.parquet", people(["a"], [1]))
    file = write_parquet(inbox, "02.parquet", people(names, list(range(1000))))
    file.write_bytes(damage(file.read_bytes()))
    inbox.plan(pipeline, "run")

    assert str(file) in inbox.refused(pipeline, SourceUnreadable)


PARQUET_OTHERS = {
    "missing column": (pa.table({"name": ["a"]}), "column amount of the schema is missing; it has name"),
    "wider": (people(["a"], [1], pa.int64()), "amount is int64, and the schema says int"),
    "text for a number": (pa.table({"name": ["a"], "amount": ["1"]}), "amount is string, and the schema says int"),
    "unsigned": (people(["a"], [1], pa.uint32()), "amount is uint32, and the schema says int"),
    "column in another case": (
        pa.table({"name": ["a"], "Amount": pa.array([1], pa.int32())}),
        "it has Amount: upper and lower",
    ),
    "column twice": (
        pa.Table.from_arrays(
            [pa.array(["a"]), pa.array([1], pa.int32()), pa.array([2], pa.int32())], ["name", "amount", "amount"]
        ),
        "column amount is there 2 times",
    ),
}


@pytest.mark.parametrize(("table", "message_part"), PARQUET_OTHERS.values(), ids=PARQUET_OTHERS.keys())
def test_a_parquet_file_with_other_columns_is_refused(inbox: Inbox, table: pa.Table, message_part: str) -> None:
    """A missing column is not NULL, and a type that could lose something is not cast; the error gives advice."""
    pipeline = inbox.declare(PARQUET)
    write_parquet(inbox, "01.parquet", people(["a"], [1]))
    file = write_parquet(inbox, "02.parquet", table)
    inbox.plan(pipeline, "run")

    message = inbox.refused(pipeline, MalformedRecord)
    assert message.startswith(f"{file}: ")
    assert message_part in message
    assert "schema" in message.partition(message_part)[2] or "Declare" in message


UTC_US, LOCAL_US = pa.timestamp("us", "UTC"), pa.timestamp("us")
WIDENED = {
    "int32 as bigint": (pa.array([2**31 - 1, None], pa.int32()), "bigint", [2**31 - 1, None]),
    "int8 as smallint": (pa.array([-128, None], pa.int8()), "smallint", [-128, None]),
    "uint32 as bigint": (pa.array([2**32 - 1, None], pa.uint32()), "bigint", [2**32 - 1, None]),
    "uint64 as bigint": (pa.array([2**63 - 1, None], pa.uint64()), "bigint", [2**63 - 1, None]),
    "uint64 as decimal": (pa.array([2**64 - 1, None], pa.uint64()), "decimal(20,0)", [Decimal(2**64 - 1), None]),
    "decimal": (pa.array([Decimal("-1.05"), None], pa.decimal128(10, 2)), "decimal(12,2)", [Decimal("-1.05"), None]),
    "decimal of more places": (
        pa.array([Decimal("1.05"), None], pa.decimal128(10, 2)),
        "decimal(38,18)",
        [Decimal("1.050000000000000000"), None],
    ),
    "half a float": (pa.array([1.5, None], pa.float16()), "double", [1.5, None]),
    "float as double": (pa.array([1.5, None], pa.float32()), "double", [1.5, None]),
    "string_view": (pa.array(["é", None], pa.string_view()), "string", ["é", None]),
    "categories": (pa.array(["a", None]).dictionary_encode(), "string", ["a", None]),
    "nothing but NULL": (pa.nulls(2), "int", [None, None]),
    "nanoseconds": (pa.array([1_000, None], pa.timestamp("ns")), "timestamp_ntz", [datetime(1970, 1, 1, 0, 0, 0, 1), None]),
    "lists without NULL": (
        pa.array([[1], None], pa.list_(pa.field("element", pa.int32(), nullable=False))),
        "array<int>",
        [[1], None],
    ),
    "lists of smaller numbers": (pa.array([[1, None], None], pa.list_(pa.int16())), "array<bigint>", [[1, None], None]),
}


@pytest.mark.parametrize(("values", "declared", "expected"), WIDENED.values(), ids=WIDENED.keys())
def test_parquet_is_widened_where_nothing_is_lost(inbox: Inbox, values: pa.Array, declared: str, expected: list[Any]) -> None:
    """Every value arrives as it was written; other columns, even odd ones, are left out."""
    write_parquet(inbox, "01.parquet", pa.table({"v": values, "V": values, "__index_level_0__": [5, 7]}))

    assert inbox.read(Files("inbox", schema={"v": declared})) == sorted([(value,) for value in expected], key=repr)


@pytest.mark.parametrize("rows", [3, 30_000], ids=["read here", "read by tasks"])
def test_pandas_default_parquet_is_read(inbox: Inbox, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """It has an index, nanoseconds, several files; an INT96 is an instant; brotli needs no library of Spark's."""
    monkeypatch.setattr(parquet, "TASK_BYTES", 10_000)
    frame = pd.DataFrame(
        {"t": pd.date_range("2024-01-01", periods=rows, freq="1s"), "n": range(rows)}, index=range(5, 5 + rows)
    )
    frame.iloc[1:].to_parquet(inbox.folder / "01.parquet")
    instants = pa.table({"t": frame["t"].dt.tz_localize("UTC"), "n": frame["n"]})
    pq.write_table(instants, inbox.folder / "02.parquet", use_deprecated_int96_timestamps=True, compression="brotli")

    local = inbox.read(Files("inbox", glob="01*", schema={"n": "bigint", "t": "timestamp_ntz"}))
    assert sorted(local) == [(n, t.to_pydatetime()) for n, t in enumerate(frame["t"])][1:]
    there = inbox.read(Files("inbox", glob="02*", schema={"n": "decimal(19,0)", "t": "timestamp"}))
    assert sorted(n for n, _ in there) == list(range(rows))


FAR_ROWS = {
    "nanoseconds": (pa.array([1_000, 1_001], pa.timestamp("ns", "UTC")), "timestamp", {}, "00:00:00.000001001Z"),
    "INT96": (
        pa.array([1_000, 1_001], pa.timestamp("ns")),
        "timestamp",
        {"use_deprecated_int96_timestamps": True},
        "00:00:00.000001001Z",
    ),
    "a year after 9999": (pa.array([0, 2_932_897], pa.int32()).view(pa.date32()), "date", {}, "10000-01-01"),
    "the year 0": (pa.array([0, -719_163], pa.int32()).view(pa.date32()), "date", {}, "0000-12-31"),
    "too large": (pa.array([0, 2**63], pa.uint64()), "bigint", {}, "9223372036854775808"),
    "no UTF-8": (pa.array([b"a", b"\xff"]), "string", {}, "udcff"),
}


@pytest.mark.parametrize(("values", "declared", "options", "shown"), FAR_ROWS.values(), ids=FAR_ROWS.keys())
def test_a_parquet_value_that_does_not_fit_is_refused_or_set_aside_with_its_row(
    inbox: Inbox, values: pa.Array, declared: str, options: dict[str, Any], shown: str
) -> None:
    """File, row, column and value are named; with quarantine the other rows count, and a replay refuses it as before."""
    file = inbox.folder / "01.parquet"
    pq.write_table(pa.table({"name": ["a", "b"], "v": values}), file, **options)
    states = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count()})}
    source = Files("inbox", schema={"name": "string", "v": declared})
    pipeline = inbox.declare(source, states=states)
    inbox.plan(pipeline, "run")
    message = inbox.refused(pipeline, MalformedRecord)
    assert message.startswith(f"{file}, row 2: ")
    assert "column v: " in message
    assert shown in message

    tolerant = inbox.declare(source, states=states, on_poison="quarantine")
    assert inbox.run(tolerant, "second") == [1]
    assert inbox.rows(tolerant) == [{"name": "a", "lines": 1}]
    with StateStore.connect(inbox.settings) as store:
        (record,) = store.quarantined("inbox")
    assert record["origin"] == "01.parquet, row 2"
    assert shown in record["payload"]
    assert record["is_raw"]
    with spark_session(inbox.settings, "inbox") as spark:
        kept = spark.createDataFrame([("01.parquet, row 2", record["payload"])], f"{ORIGIN} string, {PAYLOAD} string")
        ((refusal,),) = source.emitter(spark, inbox.settings).parse_payloads(kept).select(REFUSAL).collect()
    assert refusal is not None


@pytest.mark.parametrize(
    ("source", "name", "content"),
    [
        (JSON, "01.json", b""),
        (TEXT, "01.txt", b""),
        (CSV, "01.csv", HEADER.encode()),
        (CSV, "01.csv", b""),
        (CSV, "01.csv", codecs.BOM_UTF8),
        (PARQUET, "01.parquet", None),
    ],
    ids=["json", "text", "csv", "csv of no bytes", "csv of a byte order mark", "parquet"],
)
def test_a_file_without_rows_is_a_batch_without_rows(inbox: Inbox, source: Files, name: str, content: bytes | None) -> None:
    """It commits, so that the file is not read again, and changes no state."""
    pipeline = inbox.declare(source, transform=None if source is not TEXT else text_as_name)
    if content is None:
        write_parquet(inbox, name, people([], []))
    else:
        inbox.write(name, content)

    assert inbox.run(pipeline) == [1]
    assert inbox.rows(pipeline) == []
    with StateStore.connect(inbox.settings) as store:
        assert store.batch_history("inbox", 1).status.source_rows == 0


# ------------------------------------------------------------------------------------------------- what is planned


def test_an_empty_folder_has_no_batch(inbox: Inbox) -> None:
    """There is no work, and no txid is spent."""
    pipeline = inbox.declare(CSV)

    assert inbox.plan(pipeline, "run") == []
    with StateStore.connect(inbox.settings) as store:
        assert store.last_opened("inbox") is None


@pytest.mark.promise("error:SOURCE_UNREADABLE")
def test_a_folder_that_does_not_exist_is_refused(inbox: Inbox) -> None:
    """A missing folder is not an empty one: its name may be wrong, or a disk is not mounted."""
    pipeline = inbox.declare(CSV)
    inbox.folder.rmdir()

    with pytest.raises(SourceUnreadable, match=f"The source folder {inbox.folder} does not exist"):
        inbox.plan(pipeline, "run")
    inbox.folder.write_text("a file of that name")
    with pytest.raises(SourceUnreadable, match=f"The source folder {inbox.folder} "):
        inbox.plan(pipeline, "run")


def make_directory(path: Path) -> None:
    """Put a folder where a file is expected."""
    path.mkdir()


def make_dangling_link(path: Path) -> None:
    """Put a link to nothing where a file is expected."""
    path.symlink_to("nowhere")


def make_pipe(path: Path) -> None:
    """Put a pipe where a file is expected: a reader that opens it blocks for ever."""
    os.mkfifo(path)


def make_unreadable(path: Path) -> None:
    """Put a file without read permission where a file is expected."""
    path.write_text(HEADER)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user (root) may read every file")


@pytest.mark.parametrize(
    "make", [make_directory, make_dangling_link, make_pipe, make_unreadable], ids=lambda make: make.__name__
)
@pytest.mark.timeout(60)
def test_a_name_that_is_no_readable_file_is_refused_when_planned(inbox: Inbox, make: Callable[[Path], None]) -> None:
    """The error names it; it is not skipped, and no other file is planned without it."""
    pipeline = inbox.declare(CSV)
    inbox.write("01.csv", HEADER + "a,1\n")
    make(inbox.folder / "02.csv")

    with pytest.raises(SourceUnreadable, match=r"inbox/02\.csv ") as refusal:
        inbox.plan(pipeline, "run")
    assert "\n" not in str(refusal.value)
    with StateStore.connect(inbox.settings) as store:
        assert store.last_opened("inbox") is None


@pytest.mark.parametrize("source", [CSV, JSON, TEXT, PARQUET], ids=lambda source: source.format)
@pytest.mark.parametrize("folder", ["", "at 10:30/", "{[10:30]}/"])
def test_a_name_with_a_colon_is_read(inbox: Inbox, source: Files, folder: str) -> None:
    """Times are usual file names, although Hadoop takes a colon for the end of a URI's scheme."""
    content = {"csv": HEADER + "a,1\n", "json": '{"name": "a", "amount": 1}\n', "text": "a,1"}.get(source.format, b"")
    if source.format == "parquet":
        sink = io.BytesIO()
        pq.write_table(people(["a"], [1]), sink)
        content = sink.getvalue()
    inbox.write(f"{folder}2024-01-01T10:00:00.{source.glob.strip('*.')[:7]}", content)

    deep = replace(source, glob=f"**/{source.glob}")
    if source.format == "parquet" and "[" in folder:
        with pytest.raises(SourceUnreadable, match=r"Spark cannot open a Parquet file with a colon and one of \[\]\{\}"):
            plan(inbox, deep)
        return
    found = inbox.read(deep, files=1)
    assert found == ([("a,1",)] if source.format == "text" else [("a", 1)])


# ------------------------------------------------------------------------------------------------------- partitions

DAYS = {"dt": "date", "shop": "string"}


def write_in_form(inbox: Inbox, form: str, name: str, number: int) -> None:
    """Write a file of one record, whose amount is the number, in a format."""
    content: bytes | str = {"csv": f"{HEADER}a,{number}\n", "text": f"{number}\n"}.get(
        form, f'{{"name": "a", "amount": {number}}}\n'
    )
    if form == "parquet":
        sink = io.BytesIO()
        pq.write_table(people(["a"], [number]), sink)
        content = sink.getvalue()
    inbox.write(name, content)


@pytest.mark.parametrize("form", ["csv", "json", "text", "parquet"])
def test_names_of_folders_are_columns(inbox: Inbox, form: Any) -> None:
    """Columns that Hive, Spark and pyarrow write into folder names are added to the rows, in every format."""
    folders = [
        "dt=2024-01-05/shop=a b",
        "dt=2024-01-05/shop=10%3A30",
        "dt=__HIVE_DEFAULT_PARTITION__/shop=a b",
        "shop=x/dt=2024-01-05",
    ]
    for number, folder in enumerate(folders):
        write_in_form(inbox, form, f"{folder}/one.{form}", number)
    write_in_form(inbox, form, f"{folders[0]}/two.{form}", 9)
    schema = {} if form == "text" else SCHEMA
    source = Files("inbox", glob="**/*", format=form, schema=schema, partitions=DAYS, max_files=10)
    day = datetime(2024, 1, 5, tzinfo=UTC).date()

    folder_values = [(day, "a b"), (day, "10:30"), (None, "a b"), (day, "x"), (day, "a b")]
    rows = [
        (*((str(n),) if form == "text" else ("a", n)), *values)
        for n, values in zip([0, 1, 2, 3, 9], folder_values, strict=True)
    ]
    assert inbox.read(source, files=5) == sorted(rows, key=repr)


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_partition_columns_are_grouped_checked_and_quarantined_like_any_column(inbox: Inbox, form: Any) -> None:
    """A bad record is kept with its file's name, which gives the partition columns at its replay."""
    source = Files("inbox", glob="**/*", format=form, schema=SCHEMA, partitions={"dt": "date"}, max_files=10)
    per_day = State(key={"dt": "date"}, aggregates={"lines": Count(), "amount": Sum("amount")})
    pipeline = inbox.declare(source, states={"per_day": per_day}, check={"small": "amount < 100"}, on_poison="quarantine")
    for number, day in ((1, "05"), (2, "06"), (500, "06"), (4, "05")):
        write_in_form(inbox, form, f"dt=2024-01-{day}/{number}.{form}", number)
    if form != "parquet":
        inbox.write(f"dt=2024-01-07/bad.{form}", f"{HEADER}a,x\n" if form == "csv" else '{"name": "a", "amount": "x"}\n')

    assert inbox.run(pipeline) == [1]
    fifth, sixth = (datetime(2024, 1, day, tzinfo=UTC).date() for day in (5, 6))
    assert inbox.rows(pipeline, "per_day") == [
        {"dt": fifth, "lines": 2, "amount": 5},
        {"dt": sixth, "lines": 1, "amount": 2},
    ]
    with StateStore.connect(inbox.settings) as store:
        waiting = list(store.quarantined("inbox"))
    assert len(waiting) == (1 if form == "parquet" else 2)

    emitter_rows = _parsed_again(
        inbox, source, f"dt=2024-01-07/bad.{form}, line 2", "a,7" if form == "csv" else '{"name": "a", "amount": 7}'
    )
    if form != "parquet":
        assert emitter_rows == [("a", 7, datetime(2024, 1, 7, tzinfo=UTC).date(), None)]


def _parsed_again(inbox: Inbox, source: Files, origin: str, payload: str) -> list[tuple]:
    if source.format == "parquet":
        return []
    with spark_session(inbox.settings, "inbox") as spark:
        payloads = spark.createDataFrame([(origin, payload)], f"{ORIGIN} string, {PAYLOAD} string")
        rows = source.emitter(spark, inbox.settings).parse_payloads(payloads)
        return [tuple(row) for row in rows.select("name", "amount", "dt", REFUSAL).collect()]


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_a_column_that_is_in_the_files_too_is_refused(inbox: Inbox, form: Any) -> None:
    """The author has to say which of the two is meant."""
    write_in_form(inbox, form, f"amount=7/x.{form}", 1)
    source = Files("inbox", glob="**/*", format=form, schema={"name": "string"}, partitions={"amount": "int"})
    pipeline = inbox.declare(source, states={"per_name": State(key={"name": "text"}, aggregates={"lines": Count()})})
    assert inbox.plan(pipeline, "run") == [1]

    message = inbox.refused(pipeline, MalformedRecord)
    assert "amount" in message
    assert "so has the name of a folder" in message


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
@pytest.mark.parametrize("missing", ["refuse", "null"])
def test_a_column_that_only_folders_have_is_never_silently_null(inbox: Inbox, form: Any, missing: Any) -> None:
    """The schema names it, the files lack it, and their folders have it: the author meant partitions."""
    write_in_form(inbox, form, f"dt=2024-01-05/x.{form}", 1)
    pipeline = inbox.declare(Files("inbox", glob="**/*", format=form, schema={**SCHEMA, "dt": "date"}, missing=missing))
    assert inbox.plan(pipeline, "run") == [1]

    assert "declare partitions={'dt': 'date'} instead of it in the schema." in inbox.refused(pipeline, MalformedRecord)


def test_a_folder_of_another_form_is_refused_with_its_file(inbox: Inbox) -> None:
    """The value is not NULL: the file is named, and its batch does not count."""
    write_in_form(inbox, "json", "dt=2024-1-5/x.json", 1)
    pipeline = inbox.declare(Files("inbox", glob="**/*", format="json", schema=SCHEMA, partitions={"dt": "date"}))
    assert inbox.plan(pipeline, "run") == [1]

    assert "inbox/dt=2024-1-5/x.json: partition dt=2024-1-5: '2024-1-5' is no date" in inbox.refused(pipeline, MalformedRecord)


# ------------------------------------------------------------------------------------------------------- links


def test_a_link_out_of_the_folder_is_refused_when_planned_and_when_read(inbox: Inbox) -> None:
    """A file that becomes a link between plan and read is refused too, even with the same bytes."""
    secret = inbox.settings.home / "secret.csv"
    secret.write_text(HEADER + "a,1\n")
    pipeline = inbox.declare(CSV)
    (inbox.folder / "01.csv").symlink_to(secret)
    with pytest.raises(SourceUnreadable, match=r"01\.csv leads out of .*inbox: it is really .*/secret\.csv"):
        inbox.plan(pipeline, "run")

    (inbox.folder / "01.csv").unlink()
    inbox.write("01.csv", HEADER + "a,1\n")
    assert inbox.plan(pipeline, "again") == [1]
    (inbox.folder / "01.csv").unlink()
    (inbox.folder / "01.csv").symlink_to(secret)
    assert "01.csv leads out of" in inbox.refused(pipeline, SourceUnreadable)
    assert inbox.read(replace(CSV, follow_links=True)) == [("a", 1)]


def test_a_file_name_that_is_not_utf8_is_refused(inbox: Inbox) -> None:
    """Metadata is UTF-8 and cannot hold such a name, so an error names the file instead of dropping it."""
    pipeline = inbox.declare(CSV)
    Path(os.fsdecode(bytes(inbox.folder) + b"/\xff.csv")).write_text(HEADER)

    with pytest.raises(SourceUnreadable, match=r"\.csv") as refusal:
        inbox.plan(pipeline, "run")
    str(refusal.value).encode()  # it can be printed and stored


def test_unfinished_and_hidden_files_are_left_alone(inbox: Inbox) -> None:
    """Writers' auxiliary files, and files that they have not finished, are no data."""
    inbox.write("01.csv", HEADER)
    for name in (
        ".hidden.csv",
        "_SUCCESS.csv",
        "_temporary/01.csv",
        "02.csv.tmp",
        "02.csv.part",
        "02.csv.INPROGRESS",
        ".dir/02.csv",
    ):
        inbox.write(name, "not for us")
    inbox.write("sub/02.csv", HEADER)

    assert batches(inbox, Files("inbox", glob="**/*.csv*", format="csv", schema=SCHEMA)) == [["01.csv"], ["sub/02.csv"]]


@pytest.mark.parametrize("pattern", ["**/**/*.json", "**/**/**", "**/*.json"])
def test_a_file_that_a_glob_finds_in_several_ways_counts_once(inbox: Inbox, pattern: str) -> None:
    """``**/**`` reaches a file once for each folder above it; its rows count once."""
    for name, count in (("c.json", 1), ("x/b.json", 2), ("x/y/a.json", 3)):
        inbox.write(name, f'{{"name": "{name}", "amount": {count}}}\n')
    source = Files("inbox", glob=pattern, format="json", schema=SCHEMA, max_files=10)

    assert [file["name"] for file in plan(inbox, source)["files"]] == ["c.json", "x/b.json", "x/y/a.json"]
    assert inbox.read(source) == [("c.json", 1), ("x/b.json", 2), ("x/y/a.json", 3)]


def test_a_young_file_waits(inbox: Inbox) -> None:
    """A file that was just written may grow; later ones are taken."""
    for name in ("01.csv", "02.csv", "03.csv"):
        os.utime(inbox.write(name, HEADER), (1_000_000_000, 1_000_000_000))
    source = Files("inbox", format="csv", schema=SCHEMA, max_files=5, min_age_seconds=3600)
    assert batches(inbox, source) == [["01.csv", "02.csv", "03.csv"]]

    (inbox.folder / "02.csv").touch()
    assert batches(inbox, source) == [["01.csv", "03.csv"]]


@pytest.mark.parametrize(
    ("max_files", "max_bytes", "expected"),
    [
        (1, None, ["1", "2", "3", "4", "5"]),
        (2, None, ["12", "34", "5"]),
        (9, None, ["12345"]),
        (9, 30, ["12", "3", "4", "5"]),
        (9, 29, ["1", "2", "3", "4", "5"]),
        (9, 110, ["123", "45"]),
        (2, 1000, ["12", "34", "5"]),
        (9, 1, ["1", "2", "3", "4", "5"]),
    ],
)
def test_batches_are_cut_by_files_and_bytes(inbox: Inbox, max_files: int, max_bytes: int | None, expected: list[str]) -> None:
    """A batch is the next files within both limits, and never less than one file."""
    for name, size in {"1": 10, "2": 20, "3": 80, "4": 25, "5": 50}.items():
        inbox.write(name, "x" * size)
    source = Files("inbox", format="text", max_files=max_files, max_bytes=max_bytes)

    assert batches(inbox, source) == [list(batch) for batch in expected]


def test_replay_gets_the_very_same_metadata(inbox: Inbox) -> None:
    """A second plan of a txid, with or without its saved metadata, gives the same bytes."""
    for name in ("01.csv", "02.csv", "03.csv"):
        inbox.write(name, HEADER + f"{name},1\n")
    source = Files("inbox", format="csv", schema=SCHEMA, max_files=2)
    first = plan(inbox, source)
    second = source.coordinator(inbox.settings).initialize_transaction(2, first, None)
    inbox.write("04.csv", HEADER)

    assert encode_metadata(plan(inbox, source)) == encode_metadata(first)
    again = source.coordinator(inbox.settings).initialize_transaction(2, first, second)
    assert again == second != source.coordinator(inbox.settings).initialize_transaction(2, first, None)


def test_only_new_files_are_read_the_next_time(inbox: Inbox) -> None:
    """Each file belongs to exactly one batch, at any timing of the runs; source_rows has the rows read."""
    pipeline = inbox.declare(CSV)
    inbox.write("01.csv", HEADER + "a,1\n")
    inbox.write("02.csv", HEADER + "a,2\nb,3\n")
    assert inbox.run(pipeline, "first") == [1]
    inbox.write("03.csv", HEADER + "b,4\n")
    assert inbox.run(pipeline, "second") == [2]
    assert inbox.run(pipeline, "third") == []

    with StateStore.connect(inbox.settings) as store:
        histories = [store.batch_history("inbox", txid) for txid in (1, 2)]
    assert [[file["name"] for file in h.source_metadata["files"]] for h in histories] == [["01.csv", "02.csv"], ["03.csv"]]
    assert [h.status.source_rows for h in histories] == [3, 1]
    assert inbox.rows(pipeline) == [{"name": "a", "lines": 2, "amount": 3}, {"name": "b", "lines": 2, "amount": 7}]


@pytest.mark.parametrize("name", ["00.csv", "015.csv", "01.CSV.csv"])
def test_a_late_file_that_sorts_before_planned_ones_is_taken(inbox: Inbox, name: str) -> None:
    """The next batch has it, before new files with later names."""
    pipeline = inbox.declare(Files("inbox", format="csv", schema=SCHEMA))
    inbox.write("01.csv", HEADER + "a,1\n")
    inbox.write("02.csv", HEADER + "a,2\n")
    inbox.run(pipeline)
    inbox.write(name, HEADER + "late,1\n")
    inbox.write("03.csv", HEADER + "a,3\n")

    assert inbox.run(pipeline, "second") == [3, 4]
    assert inbox.rows(pipeline) == [{"name": "a", "lines": 3, "amount": 6}, {"name": "late", "lines": 1, "amount": 1}]


# ------------------------------------------------------------------------------------------------ changed after all


def change_a_byte(path: Path) -> None:
    """Change one byte, but not size or time."""
    times = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"1", b"2", 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)


def append_a_row(path: Path) -> None:
    """Let the file grow."""
    path.write_bytes(path.read_bytes() + b"b,2\n")


def remove(path: Path) -> None:
    """Remove the file."""
    path.unlink()


@pytest.mark.promise("I11", "fault:source-changed:processing", "error:SOURCE_CHANGED")
@pytest.mark.parametrize("change", [change_a_byte, append_a_row, remove], ids=lambda change: change.__name__)
def test_a_planned_file_that_changed_halts_its_batch_until_it_is_back(inbox: Inbox, change: Callable[[Path], None]) -> None:
    """A replay reads the planned bytes or none: the batch halts, names the file, and goes on when they are back."""
    pipeline = inbox.declare(CSV)
    inbox.write("01.csv", HEADER + "a,1\n")
    file = inbox.write("02.csv", HEADER + "a,1\n")
    planned = file.read_bytes()
    inbox.plan(pipeline, "first")
    change(file)

    assert inbox.refused(pipeline, SourceChanged).startswith(f"{file} ")
    file.write_bytes(planned)  # the time is another one now, but the content is what was planned
    assert inbox.run(pipeline, "second") == [1]
    assert inbox.rows(pipeline) == [{"name": "a", "lines": 2, "amount": 2}]


def test_a_file_that_changes_while_it_is_read_is_found_before_the_seal(inbox: Inbox) -> None:
    """Rows that were read from other than the planned bytes are never sealed."""
    file = inbox.write("01.csv", HEADER + "a,1\n")

    def meddle(rows):
        change_a_byte(file)
        return rows

    pipeline = inbox.declare(CSV, transform=meddle)
    inbox.plan(pipeline, "run")
    assert inbox.refused(pipeline, SourceChanged).startswith(f"{file} ")


@pytest.mark.parametrize("puts_back", ["the file itself", "its content"])
def test_a_file_that_is_another_one_only_while_it_is_read_is_found_before_the_seal(inbox: Inbox, puts_back: str) -> None:
    """Its digest is right before and after the read, and so is the number of rows, but the values are another file's."""
    file = write_parquet(inbox, "01.parquet", people(["a"], [1]))
    planned, aside, metadata = file.read_bytes(), file.with_name("aside"), plan(inbox, PARQUET)
    with spark_session(inbox.settings, "inbox") as spark:
        emitter = PARQUET.emitter(spark, inbox.settings)
        rows = emitter.emit_batch(Attempt("inbox", 1, 1, metadata), metadata)
        file.rename(aside)
        write_parquet(inbox, "01.parquet", people(["a"], [2]))
        assert [tuple(row) for row in rows.collect()] == [("a", 2)]
        if puts_back == "its content":
            file.write_bytes(planned)
        else:
            aside.replace(file)

        with pytest.raises(RowsLost, match=r"01\.parquet was touched, or replaced and put back, while it was read"):
            emitter.verify_batch(Attempt("inbox", 1, 1, metadata), metadata)


def test_another_source_of_files_is_another_declaration() -> None:
    """The choice of rows is part of the pipeline's fingerprint; their division into batches is not."""

    def fingerprint(**changes: Any) -> str:
        files = {"folder": "inbox", "format": "csv", "schema": SCHEMA, **changes}
        states = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count()})}
        return Pipeline(name="inbox", source=Files(**files), states=states).spec.fingerprint

    same = fingerprint()
    assert fingerprint(max_files=7, max_bytes=10, min_age_seconds=5) == same
    for change in (
        {"folder": "other"},
        {"glob": "*.csv"},
        {"header": False},
        {"schema": {**SCHEMA, "amount": "bigint"}},
        {"schema": dict(reversed(SCHEMA.items()))},
        {"options": {"sep": ";"}},
        {"format": "json"},
    ):
        assert fingerprint(**change) != same, change


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "xml", "schema": SCHEMA}, "cannot read 'xml'"),
        ({"format": "csv"}, "needs a schema"),
        ({"format": "text", "schema": SCHEMA}, "leave schema out"),
        ({"schema": SCHEMA, "max_files": 0}, "at least 1"),
        ({"schema": SCHEMA, "max_bytes": 0}, "at least 1"),
        *(
            ({"format": "csv", "schema": SCHEMA, "options": {option: "x"}}, f"cannot take the option {option}")
            for option in (
                "mode",
                "inferSchema",
                "header",
                "enforceSchema",
                "columnNameOfCorruptRecord",
                "pathGlobFilter",
                "modifiedBefore",
                "modifiedAfter",
                "ignoreCorruptFiles",
                "ignoreMissingFiles",
                "recursiveFileLookup",
                "path",
            )
        ),
        ({"format": "csv", "schema": SCHEMA, "options": {"sep": "||"}}, "one character"),
        ({"format": "csv", "schema": SCHEMA, "options": {"encoding": "klingon"}}, "klingon is not known"),
        ({"format": "csv", "schema": SCHEMA, "options": {"unescapedQuoteHandling": "x"}}, "cannot take the option unescaped"),
        ({"format": "json", "schema": SCHEMA, "options": {"allowComments": "true"}}, "cannot take the option allowComments"),
        (
            {"format": "csv", "schema": SCHEMA, "options": {"timestampFormat": "ss.SSSSSSSSS"}},
            "cut off what follows microseconds",
        ),
        ({"format": "csv", "schema": {"a": "interval day"}}, "is not a type"),
        ({"format": "csv", "schema": {"_tidegate_id": "int"}}, "names like that are Tidegate's own"),
        ({"format": "json", "schema": SCHEMA, "missing": "guess"}, "use 'refuse' or 'null'"),
    ],
)
def test_a_source_that_cannot_keep_the_promise_is_refused_when_declared(arguments: dict[str, Any], message: str) -> None:
    """The constructor refuses options that would make Spark drop, guess or repair rows."""
    with pytest.raises(ValueError, match=message):
        Files("inbox", **arguments)
