"""Files reads what is there exactly, exactly once, and refuses what it cannot read by its name and line."""

import bz2
import codecs
import csv
import gzip
import io
import json
import os
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from jobs import Count, Files, Pipeline, State, phases
from state_store import StateStore
from state_store.attempts import Attempt
from state_store.batches import encode_metadata
from state_store.errors import MalformedRecord, SourceChanged, SourceUnreadable
from tests.sources.conftest import SCHEMA, Inbox

CSV = Files("inbox", glob="*.csv*", format="csv", schema=SCHEMA, max_files=10)
JSON = Files("inbox", glob="*.json*", format="json", schema=SCHEMA, max_files=10)
TEXT = Files("inbox", glob="*.txt*", format="text", max_files=10)
PARQUET = Files("inbox", glob="*.parquet", schema=SCHEMA, max_files=10)
HEADER = "name,amount\n"

# What people write into CSV files: separators, quotes, backslashes, other alphabets, spaces at the ends.
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
    """Return a table as the schema wants it."""
    return pa.table({"name": pa.array(names, pa.string()), "amount": pa.array(amounts, kind or pa.int32())})


def plan(inbox: Inbox, source: Files) -> dict[str, Any]:
    """Return the first batch's metadata."""
    metadata = source.coordinator(inbox.settings).initialize_transaction(1, None, None)
    assert metadata is not None
    return metadata


def batches(inbox: Inbox, source: Files) -> list[list[str]]:
    """Return the names of the files in each batch that one plan cuts."""
    coordinator, previous, cut = source.coordinator(inbox.settings), None, []
    while metadata := coordinator.initialize_transaction(len(cut) + 1, previous, None):
        cut.append([file["name"] for file in metadata["files"]])
        previous = metadata
    return cut


# ------------------------------------------------------------------------------------------------------- read right


def test_csv_reads_what_python_and_duckdb_read(inbox: Inbox) -> None:
    """Quotes, separators, backslashes and other alphabets in CSV mean to Spark what they mean to everybody else."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerows([["name", "amount"], *([name, number] for number, name in enumerate(NAMES))])
    file = inbox.write("01.csv", content.getvalue())

    expected = sorted(((name, number) for number, name in enumerate(NAMES)), key=repr)
    by_duckdb = duckdb.sql(f"SELECT * FROM read_csv('{file}', columns={{'name': 'VARCHAR', 'amount': 'INT'}})").fetchall()
    assert sorted(by_duckdb, key=repr) == expected
    assert inbox.read(CSV) == expected


def test_json_reads_what_pandas_and_duckdb_read(inbox: Inbox) -> None:
    """Escapes, NULLs, keys left out and keys in another order mean to Spark what they mean to everybody else."""
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
    """A line of text arrives as it stands: empty ones, spaces and a last one without an end too."""
    lines = ["first", "", "  spaces  ", "tab\tin", 'quotes "', "Zürich \U0001f30a", "last"]
    inbox.write("01.txt", "\n".join(lines))

    assert inbox.read(TEXT) == sorted(((line,) for line in lines), key=repr)


def test_parquet_reads_what_pandas_reads(inbox: Inbox) -> None:
    """All column types that a state can be made of arrive from Parquet as they were written."""
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
    """Two quotes are the empty text, nothing at all is NULL."""
    inbox.write("01.csv", HEADER + '"",1\n,2\nname,\n')

    assert inbox.read(CSV) == [("", 1), ("name", None), (None, 2)]


def test_a_quoted_newline_is_read_where_it_is_declared(inbox: Inbox) -> None:
    """With multiLine a record may span lines, and a bad record is still found."""
    source = Files("inbox", format="csv", schema=SCHEMA, options={"multiLine": "true"})
    inbox.write("01.csv", HEADER + '"two\nlines",1\nplain,2\n')
    assert inbox.read(source) == [("plain", 2), ("two\nlines", 1)]

    inbox.write("01.csv", HEADER + '"two\nlines",1\nplain,2,3\n')
    pipeline = inbox.declare(source)
    inbox.plan(pipeline, "run")
    assert "01.csv" in inbox.refused(pipeline, MalformedRecord)


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
    """The mark that Windows programs put before UTF-8 belongs to no column."""
    inbox.write({"csv": "01.csv", "json": "01.json", "text": "01.txt"}[source.format], codecs.BOM_UTF8 + content.encode())

    assert inbox.read(source) == [row]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old mac"])
def test_every_kind_of_line_end_ends_a_line(inbox: Inbox, end: str) -> None:
    """A line end of another system is no data, with or without one at the end of the file; blank lines are no records."""
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
    """A name is a name: nothing in it is a pattern, an escape or an address. Each is read once, and only it."""
    for number, name in enumerate(NAMES_OF_FILES):
        inbox.write(name, f"{HEADER}file,{number}\n")
    inbox.write("star of another file.csv", HEADER + "other,99\n")
    source = Files("inbox", format="csv", schema=SCHEMA, max_files=100)

    assert inbox.read(source) == sorted([*(("file", n) for n in range(len(NAMES_OF_FILES))), ("other", 99)], key=repr)
    one_each = Files("inbox", format="csv", schema=SCHEMA, max_files=1)
    metadata = {"files": [file for file in plan(inbox, source)["files"] if file["name"] == "star*.csv"], "files_before": 0}
    with phases.spark_session(inbox.settings, "inbox") as spark:
        emitter = one_each.emitter(spark, inbox.settings)
        rows = emitter.emit_batch(Attempt("inbox", 1, 1, metadata), metadata).collect()
    assert [tuple(row) for row in rows] == [("file", 4)]


def test_a_bad_record_names_its_file_whatever_that_is_called(inbox: Inbox) -> None:
    """Of several files the right one is named, also where its name needs escaping on the way through Spark."""
    inbox.write("!first.csv", HEADER + "a,1\n")
    for name in NAMES_OF_FILES:
        file = inbox.write(name, HEADER + "a,1\nb,two\n")
        metadata = plan(inbox, CSV)
        with phases.spark_session(inbox.settings, "inbox") as spark:
            emitter = CSV.emitter(spark, inbox.settings)
            rows = emitter.emit_batch(Attempt("inbox", 1, 1, metadata), metadata)
            with pytest.raises(PySparkException) as failure:
                rows.collect()
        explained = emitter.explain(failure.value)
        assert isinstance(explained, MalformedRecord)
        assert str(explained).startswith(f"{file}, line 3: ")
        file.unlink()


# ---------------------------------------------------------------------------------------------------------- refused


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
        (HEADER + 'a,1\n"b\nc",2\n', 3),
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
        "newline in quotes",
        "quote never closed",
        "header again",
        "after blank lines",
        "old mac line ends",
        "long record like another's beginning",
    ],
)
def test_a_bad_csv_record_is_refused_with_file_and_line(inbox: Inbox, content: str, line: int) -> None:
    """A record that does not fit fails its batch, with the place to look at; the batches before it stay."""
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
        "amount,name\n1,a\n",
        "name,amount,more\na,1,2\n",
        "name\na\n",
        "name, amount\na,1\n",
        "name;amount\na;1\n",
        "",
    ],
    ids=["no header", "other order", "one more", "one less", "a space", "other separator", "empty file"],
)
def test_a_csv_file_with_another_header_is_refused(inbox: Inbox, content: str) -> None:
    """Columns are never mixed up, and no first row is taken for a header: the header must be the schema's columns."""
    pipeline = inbox.declare(CSV)
    file = inbox.write("01.csv", content)
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 1: the header is ")


def test_a_compressed_csv_file_with_another_header_is_refused(inbox: Inbox) -> None:
    """Compression hides no header."""
    pipeline = inbox.declare(Files("inbox", format="csv", schema={"name": "string", "note": "string"}), transform=one_each)
    file = inbox.write("01.csv.gz", gzip.compress(b"note,name\nhello,a\n"))
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 1: the header is ")


def one_each(rows):
    """Give rows without an amount one."""
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
        "something behind it",
        "two records in a line",
    ],
)
def test_a_bad_json_record_is_refused_with_file_and_line(inbox: Inbox, record: str) -> None:
    """A line that is not one object of the schema's types fails its batch; nothing of it is dropped or turned into NULL."""
    pipeline = inbox.declare(JSON)
    file = inbox.write("01.json", '{"name": "a", "amount": 1}\n' + record + "\n")
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}, line 2: ")


@pytest.mark.parametrize("source", [CSV, JSON], ids=lambda source: source.format)
def test_a_decimal_with_more_digits_than_its_column_is_refused(inbox: Inbox, source: Files) -> None:
    """No rounding that nobody asked for: rounded rows add up to another sum (CONTRACT section 4)."""
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
    ids=["latin 1", "surrogate", "cut off at the end", "behind the first block", "csv", "json", "gz"],
)
def test_bytes_that_are_not_utf8_are_refused_with_their_line(inbox: Inbox, name: str, bytes_: bytes, line: int) -> None:
    """Spark would replace such bytes silently, and make one key out of several."""
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
    """A file that does not decompress to its end is no shorter file."""
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
    """A file that is not whole fails its batch by its name."""
    pipeline = inbox.declare(PARQUET)
    names: list[str | None] = [f"{random.Random(n).getrandbits(200):x}" for n in range(1000)]
    write_parquet(inbox, "01.parquet", people(["a"], [1]))
    file = write_parquet(inbox, "02.parquet", people(names, list(range(1000))))
    file.write_bytes(damage(file.read_bytes()))
    inbox.plan(pipeline, "run")

    assert str(file) in inbox.refused(pipeline, SourceUnreadable)


PARQUET_OTHERS = {
    "missing column": pa.table({"name": ["a"]}),
    "extra column": people(["a"], [1]).append_column("more", pa.array([1])),
    "column of another type": people(["a"], [1], pa.int64()),
    "text for a number": pa.table({"name": ["a"], "amount": ["1"]}),
    "unsigned": people(["a"], [1], pa.uint32()),
    "column in another case": pa.table({"name": ["a"], "Amount": pa.array([1], pa.int32())}),
    "column twice": pa.Table.from_arrays(
        [pa.array(["a"]), pa.array([1], pa.int32()), pa.array([2], pa.int32())], ["name", "amount", "amount"]
    ),
}


@pytest.mark.parametrize("table", PARQUET_OTHERS.values(), ids=PARQUET_OTHERS.keys())
def test_a_parquet_file_with_other_columns_is_refused(inbox: Inbox, table: pa.Table) -> None:
    """A column that is missing is not NULL, one that was added is not ignored, another type is not cast."""
    pipeline = inbox.declare(PARQUET)
    write_parquet(inbox, "01.parquet", people(["a"], [1]))
    file = write_parquet(inbox, "02.parquet", table)
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}: ")


def test_a_parquet_file_with_nanoseconds_is_refused(inbox: Inbox) -> None:
    """Spark keeps microseconds: what it would cut off is refused."""
    source = Files("inbox", schema={"name": "string", "amount": "timestamp"})
    pipeline = inbox.declare(source, states={"per_name": State(key={"name": "text"}, aggregates={"lines": Count()})})
    sink = io.BytesIO()
    pq.write_table(pa.table({"name": ["a"], "amount": pa.array([1], pa.timestamp("ns", "UTC"))}), sink, version="2.6")
    file = inbox.write("01.parquet", sink.getvalue())
    inbox.plan(pipeline, "run")

    assert inbox.refused(pipeline, MalformedRecord).startswith(f"{file}: column amount ")


@pytest.mark.parametrize(
    ("source", "name", "content"),
    [(JSON, "01.json", b""), (TEXT, "01.txt", b""), (CSV, "01.csv", HEADER.encode()), (PARQUET, "01.parquet", None)],
    ids=["json", "text", "csv", "parquet"],
)
def test_a_file_without_rows_is_a_batch_without_rows(inbox: Inbox, source: Files, name: str, content: bytes | None) -> None:
    """It commits, so that it is not met again, and touches no state."""
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
    """Nothing there is nothing to do, and no txid is spent."""
    pipeline = inbox.declare(CSV)

    assert inbox.plan(pipeline, "run") == []
    with StateStore.connect(inbox.settings) as store:
        assert store.last_opened("inbox") is None


def test_a_folder_that_does_not_exist_is_refused(inbox: Inbox) -> None:
    """A missing folder is no empty folder: its name may be wrong, or a disk is not there."""
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
    """Put a pipe where a file is expected: whoever opens it waits for ever."""
    os.mkfifo(path)


def make_unreadable(path: Path) -> None:
    """Put a file there that its reader may not open."""
    path.write_text(HEADER)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user (root) may read every file")


@pytest.mark.parametrize(
    "make", [make_directory, make_dangling_link, make_pipe, make_unreadable], ids=lambda make: make.__name__
)
@pytest.mark.timeout(60)
def test_what_cannot_be_read_as_a_file_is_refused_when_planned(inbox: Inbox, make: Callable[[Path], None]) -> None:
    """It is named, and neither skipped nor is anything else planned without it."""
    pipeline = inbox.declare(CSV)
    inbox.write("01.csv", HEADER + "a,1\n")
    make(inbox.folder / "02.csv")

    with pytest.raises(SourceUnreadable, match=r"inbox/02\.csv ") as refusal:
        inbox.plan(pipeline, "run")
    assert "\n" not in str(refusal.value)
    with StateStore.connect(inbox.settings) as store:
        assert store.last_opened("inbox") is None


def test_a_file_name_that_spark_cannot_open_is_refused_when_planned(inbox: Inbox) -> None:
    """A colon ends Hadoop's reading of a name: a batch with such a file could be planned, but never read."""
    pipeline = inbox.declare(CSV)
    file = inbox.write("col:on.csv", HEADER + "a,1\n")

    with pytest.raises(SourceUnreadable, match=str(file)):
        inbox.plan(pipeline, "run")


def test_a_file_name_that_is_not_utf8_is_refused(inbox: Inbox) -> None:
    """Metadata is UTF-8; such a name cannot be written down, so it is named in an error and not dropped."""
    pipeline = inbox.declare(CSV)
    Path(os.fsdecode(bytes(inbox.folder) + b"/\xff.csv")).write_text(HEADER)

    with pytest.raises(SourceUnreadable, match=r"\.csv") as refusal:
        inbox.plan(pipeline, "run")
    str(refusal.value).encode()  # it can be printed and stored


def test_unfinished_and_hidden_files_are_left_alone(inbox: Inbox) -> None:
    """What writers leave beside their files, and files that they have not finished, are no data."""
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


def test_a_young_file_and_those_behind_it_wait(inbox: Inbox) -> None:
    """A file that was just written may grow; one behind it must not overtake it, or it would come late."""
    for name in ("01.csv", "02.csv", "03.csv"):
        os.utime(inbox.write(name, HEADER), (1_000_000_000, 1_000_000_000))
    source = Files("inbox", format="csv", schema=SCHEMA, max_files=5, min_age_seconds=3600)
    assert batches(inbox, source) == [["01.csv", "02.csv", "03.csv"]]

    (inbox.folder / "02.csv").touch()
    assert batches(inbox, source) == [["01.csv"]]


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
    """A batch is the next files up to both limits, and never less than one file."""
    for name, size in {"1": 10, "2": 20, "3": 80, "4": 25, "5": 50}.items():
        inbox.write(name, "x" * size)
    source = Files("inbox", format="text", max_files=max_files, max_bytes=max_bytes)

    assert batches(inbox, source) == [list(batch) for batch in expected]


def test_replay_gets_the_very_same_metadata(inbox: Inbox) -> None:
    """Asked again for a txid, with or without what was saved for it, the source gives the same bytes."""
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
    """Each file belongs to exactly one batch, however the runs fall; source_rows shows what was read."""
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
def test_a_late_file_that_sorts_before_planned_ones_is_refused(inbox: Inbox, name: str) -> None:
    """It would never be read, so somebody has to rename it; until then nothing new is planned."""
    pipeline = inbox.declare(Files("inbox", format="csv", schema=SCHEMA))
    inbox.write("01.csv", HEADER + "a,1\n")
    inbox.write("02.csv", HEADER + "a,2\n")
    inbox.run(pipeline)
    late = inbox.write(name, HEADER + "late,1\n")
    inbox.write("03.csv", HEADER + "a,3\n")

    with pytest.raises(SourceChanged, match=name.replace(".", r"\.")):
        inbox.plan(pipeline, "second")
    with StateStore.connect(inbox.settings) as store:
        assert store.last_opened("inbox").txid == 2

    late.rename(inbox.folder / "04.csv")
    assert inbox.run(pipeline, "third") == [3, 4]
    assert inbox.rows(pipeline) == [{"name": "a", "lines": 3, "amount": 6}, {"name": "late", "lines": 1, "amount": 1}]


# ------------------------------------------------------------------------------------------------ changed after all


def change_a_byte(path: Path) -> None:
    """Change one byte, and nothing that a listing shows."""
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


@pytest.mark.parametrize("change", [change_a_byte, append_a_row, remove], ids=lambda change: change.__name__)
def test_a_planned_file_that_changed_halts_its_batch_until_it_is_back(inbox: Inbox, change: Callable[[Path], None]) -> None:
    """A replay reads the planned bytes or nothing: the batch halts by the file's name, and goes on when they are back."""
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
    """Nothing that was read from other bytes than the planned ones is ever sealed."""
    file = inbox.write("01.csv", HEADER + "a,1\n")

    def meddle(rows):
        change_a_byte(file)
        return rows

    pipeline = inbox.declare(CSV, transform=meddle)
    inbox.plan(pipeline, "run")
    assert inbox.refused(pipeline, SourceChanged).startswith(f"{file} ")


def test_another_source_of_files_is_another_declaration() -> None:
    """What decides which rows are read is part of the pipeline's fingerprint; how they are cut into batches is not."""

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
    ],
)
def test_a_source_that_cannot_keep_the_promise_is_refused_when_declared(arguments: dict[str, Any], message: str) -> None:
    """Whatever would make Spark drop, guess or repair rows is refused on construction, in words."""
    with pytest.raises(ValueError, match=message):
        Files("inbox", **arguments)
