"""`Files` reads records exactly, and refuses bad ones with file and line."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from tests import steps
from tests.checkout import REPOSITORY
from tests.sources.conftest import PER_NAME, Inbox
from tests.sources.in_process import NO_FIT, SCHEMA, Folder, names, overwrite, plan, raises, read
from tests.sources.lake_tables import parquet_of, rows_of
from tests.store import Attempt
from tidegate.explain.why import explain
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.files import content as content_of_files
from tidegate.jobs.sources.files.formats.parquet_files import parquet_footers, parquet_tasks
from tidegate.jobs.sources.files.formats.records import typed_values
from tidegate.jobs.sources.files.formats.text_files import text_reader, text_scan
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import MalformedRecord, RowsLost, SourceChanged, SourceUnreadable

FORMATS = ("csv", "json", "parquet")
OVER: dict[str, Any] = {format: Files("inbox", f"**/*.{format}", format, SCHEMA, max_files=9) for format in FORMATS}
CSV, JSON, PARQUET = OVER.values()
HEADER = "name,amount\n"


def test_the_rules_of_a_zone_hold_beyond_the_tables_of_its_past() -> None:
    texts = ["2036-07-01 12:00:00", "2037-07-01 12:00:00", "2050-07-01 12:00:00", "2050-01-01 12:00:00", "9999-07-01 12:00:00"]
    for zone, *no_one_moment in (
        ("Europe/Berlin", "2024-10-27 02:30:00", "2024-03-31 02:30:00", "2050-10-30 02:30:00"),
        ("America/New_York", "2024-11-03 01:30:00", "2024-03-10 02:30:00", "2050-11-06 01:30:00"),
    ):
        column, bad = typed_values.from_texts(parse_type("timestamp"), pa.array([*texts, None, *no_one_moment]), zone)
        moments = [datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)) for text in texts]
        assert (column.to_pylist()[:6], list(bad)) == ([*moments, None], [6, 7, 8])


def test_a_float_is_the_nearest_one() -> None:
    column, bad = typed_values.from_texts(parse_type("float"), pa.array(["1.00000017881393432617187499"]))
    assert (column.to_pylist(), bad) == ([1.00000011920928955078125], {}), "as a double it is half-way to the next"


GOOD = '{"name": "a", "amount": 1}\n'
ONE_NAME, MONEY = {"schema": {"name": "string"}}, {"schema": {**SCHEMA, "amount": "decimal(10,2)"}}
# Files that have a bad record: what they hold, and what is said of it.
BAD_CSV: list[tuple[Files, str, str]] = [
    (CSV, HEADER + "a,1\nb,2,3\n", f", line 3: {NO_FIT}it has 3 value(s), the 2 columns need"),
    (CSV, HEADER + "b,2\nb\n", f", line 3: {NO_FIT}it has 1 value(s)"),  # like a good line's beginning
    (CSV, HEADER + "a,1\nb,3000000000\n", f", line 3: {NO_FIT}column amount: '3000000000' is no int"),
    (CSV, HEADER + "a,1\nb, 2\n", f", line 3: {NO_FIT}column amount: ' 2' is no int"),
    (CSV, HEADER + "\n\n\na,1\nb,two\n", f", line 6: {NO_FIT}column amount: 'two' is no int"),
    (CSV, HEADER + "a,1\n" + "b" * 300 + ",1\n" + "b" * 300 + ",two\n", f", line 4: {NO_FIT}column amount"),
    (CSV, HEADER + '"two\nlines",1\nplain,2,3\n', f", line 4: {NO_FIT}it has 3 value(s)"),
    (CSV, HEADER + 'a,1\n"b,2\n', f", line 3: {NO_FIT}a quote is opened and never closed"),
    (CSV, HEADER + 'a,1\n"b"c",2\n', f", line 3: {NO_FIT}text follows a closing quote"),
    (replace(CSV, **MONEY), f"{HEADER}a,1.500\nb,1.005\n", ", line 3: "),
    (CSV, "name,amount\ra,1\rb,two\r", f", line 3: {NO_FIT}column amount"),
    (CSV, "id,name,note,amount\n7,b,2\n", f", line 2: {NO_FIT}it has 3 value(s), the 4 columns need"),
    (replace(CSV, **ONE_NAME), "name\na\n\nb\n", f", line 3: {NO_FIT}an empty line may be an empty value"),
    *((CSV, text, ", line 1: the header is ") for text in ("a,1\nb,2\n", "name\na\n", "name, amount\na,1\n")),
    (CSV, "name,amount,name\na,1,b\n", ", line 1: the header is name,amount,name, in which name comes twice"),
]
SECOND = ("not json", '{"name": "b", "amount": "2"}', '{"name": "b", "amount": true}', "5", "null", '{"name": "b"} tail')
SEVERAL = "one record a line is read, but this looks like JSON over several"
BAD_JSON: list[tuple[Files, str, str]] = [
    *((JSON, GOOD + text, f", line 2: {NO_FIT}") for text in SECOND),
    (JSON, '{"name": "a", "amount": 1}] junk', f", line 1: {NO_FIT}something follows the record: '] junk'"),
    (JSON, '{"name": "a", "amount": 1}][{"name": "b", "amount": 2}', f", line 1: {NO_FIT}something follows the record"),
    (JSON, '{"name": "a\\ud800b", "amount": 1}', f", line 1: {NO_FIT}column name: half of a surrogate pair stands alone"),
    (JSON, '{\n  "name": "a",\n  "amount": 1\n}', f", line 1: {NO_FIT}{SEVERAL}"),
    (JSON, '[{"name": "a", "amount": 1},\n{"name": "b", "amount": 2}]', f", line 1: {NO_FIT}{SEVERAL}"),
    (JSON, '{"name": "a", "amount": 1\n, "amount": 2}', f", line 1: {NO_FIT}it is no JSON: Expecting ',' delimiter at char"),
    (JSON, '{"name": "a", "amount": 01}', f", line 1: {NO_FIT}it is no JSON"),
    (JSON, '{"name": "a", "amount": NaN}', f", line 1: {NO_FIT}column amount: 'NaN' is no int"),
    (JSON, '{"name": "a", "amount": 1' + "0" * 5000 + "}", f", line 1: {NO_FIT}it has a number of thousands of digits"),
    (JSON, "[" * 100_000, f", line 1: {NO_FIT}it is nested too deeply"),
    (replace(JSON, **MONEY), '{"name": "a", "amount": 1.500}\n{"name": "b", "amount": 1.005}\n', ", line 2: "),
]


@pytest.mark.promise("error:MALFORMED_RECORD")
def test_a_bad_record_is_refused_with_file_and_line(folder: Folder) -> None:
    for source, content, message in [*BAD_CSV, *BAD_JSON]:
        file = folder.write(f"1.{source.format}", content)
        assert folder.refused(source).startswith(f"{file}{message}"), content[:80]


def test_the_line_of_bytes_that_are_no_text_is_named_by_any_line_ends(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    declared: Any = [(b"\n", {"lineSep": "\n"}), (b"<>", {"lineSep": "<>"})]
    for size, (end, options) in product((1, 2, 1 << 20), [(b"\r", {}), (b"\r\n", {}), *declared]):
        monkeypatch.setattr(content_of_files, "READ_BLOCK_BYTES", size)
        folder.write("1.csv", end.join([b"name,amount", b"a\r,1" if options else b"a,1", b"b,2", b"\xff,3"]))
        assert ", line 4: byte 0xff is not UTF-8" in folder.refused(replace(CSV, options=options)), (size, end)


def test_a_csv_file_of_blank_lines_has_no_rows_unless_its_lines_may_be_values(folder: Folder) -> None:
    folder.write("1.csv", "\n\n")
    for schema in (SCHEMA, {"name": "string"}):
        assert folder.rows(replace(CSV, schema=schema)) == []
    assert "an empty line may be an empty value" in folder.refused(replace(CSV, schema={"name": "string"}, header=False))


def test_a_json_number_is_a_text_as_it_is_written(folder: Folder) -> None:
    folder.write("1.json", '{"t": -0, "s": {"a": [-0, 0, -0.0, -1e1], "n": -0, "d": 7}}\n')
    source = replace(JSON, schema={"t": "string", "s": "struct<a: array<string>, n: int, d: decimal(3,1)>"})
    assert folder.rows(source) == [("-0", {"a": ["-0", "0", "-0.0", "-1e1"], "n": 0, "d": 7})]


def test_a_parquet_uuid_is_no_text(folder: Folder) -> None:
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"AAAABBBBCCCCDDDD"], pa.binary(16)))
    folder.write("01.parquet", parquet_of(pa.table({"id": ids, "of": pa.StructArray.from_arrays([ids], ["id"])})))
    for schema in ({"id": "string"}, {"of": "struct<id: string>"}):
        assert "A UUID is 16 bytes and no text: declare binary" in folder.refused(replace(PARQUET, schema=schema))
    assert folder.rows(replace(PARQUET, schema={"id": "binary"})) == [(b"AAAABBBBCCCCDDDD",)]


def test_a_column_that_a_parquet_file_lacks_is_refused_or_declared_null(folder: Folder) -> None:
    folder.write("1.parquet", parquet_of(rows_of(("a", 1)).select(["amount"])))
    folder.write("2.parquet", parquet_of(pa.table({"other": [4]})))
    assert folder.rows(replace(PARQUET, missing="null")) == [(None, 1), (None, None)]
    assert "column name of the schema is missing; it has amount" in folder.refused(PARQUET)


def test_a_parquet_row_with_a_value_that_does_not_fit_is_set_aside(folder: Folder) -> None:
    table = pa.table({"name": ["a", "b"], "v": pa.array([1_000, 1_001], pa.timestamp("ns", "UTC"))})
    folder.write("01.parquet", parquet_of(table))
    source = replace(PARQUET, schema={"name": "string", "v": "timestamp"})
    assert folder.refused(source).startswith(f"{folder.path}/01.parquet, row 2: {NO_FIT}column v: ")
    good, bad = folder.read(source, flagged=True)
    assert (good["name"], good[REFUSAL], bad["name"], bad[ORIGIN]) == ("a", None, None, "01.parquet, row 2")
    assert "00:00:00.000001001Z" in bad[PAYLOAD]


@pytest.mark.parametrize(("version", "kept"), [("2.4.8", ""), ("3.0.3", "day days"), ("3.1.0", "day days at")])
def test_days_in_an_old_spark_s_calendar_are_refused(folder: Folder, version: str, kept: str) -> None:
    day, at = date(1500, 3, 10), datetime(1500, 3, 10, tzinfo=UTC)
    days = pa.array([{"a": [("b", [day])]}], pa.struct({"a": pa.map_(pa.string(), pa.list_(pa.date32()))}))
    table = pa.table({"day": [day], "days": days, "at": pa.array([at], pa.timestamp("us", "UTC"))})
    table = table.replace_schema_metadata({"org.apache.spark.version": version})
    folder.write("01.parquet", parquet_of(table, use_deprecated_int96_timestamps=True))
    for name, kind in {"day": "date", "days": "struct<a: map<string, array<date>>>", "at": "timestamp"}.items():
        source = replace(PARQUET, schema={name: kind})
        if name in kept.split():
            assert folder.rows(source) == [(table[name][0].as_py(),)]
        else:
            assert "of what Spark wrote before 3.1, no time before 1900 is read here" in folder.refused(source)


@pytest.mark.promise("limit:LONG_ROW_BYTES")
@patch.object(parquet_footers, "LONG_ROW_BYTES", 50)
@patch.object(parquet_footers, "MAX_RECORD_BYTES", 1000)
@patch.object(parquet_tasks, "MAX_RECORD_BYTES", 1000)
def test_a_parquet_row_that_is_longer_than_a_record_is_refused_and_many_long_ones_are_read_in_pieces(folder: Folder) -> None:
    columns = [f"c{number}" for number in range(9)]
    wide = replace(PARQUET, schema=dict.fromkeys(columns, "string"))
    row, longer = (dict.fromkeys(columns, "x" * size) | {"c3": "y" * 7 * size} for size in (100, 1000))
    file = folder.write("01.parquet", parquet_of(pa.Table.from_pylist([longer])))
    of_group = r", row group 1: the row has \d+ bytes, of which 7\d{3} are in column c3, and a record has at"
    assert re.match(re.escape(str(file)) + of_group, folder.refused(wide))
    folder.write("01.parquet", parquet_of(pa.Table.from_pylist([*[dict.fromkeys(columns, "")] * 6, row])))
    of_row = f"{file}, row 7: the row has 1500 bytes, of which 700 are in column c3"
    assert folder.refused(wide).startswith(of_row)
    raises(MalformedRecord, lambda: folder.read(wide, flagged=True), re.escape(of_row))
    nested = pa.table({"name": ["", "", ""], "v": [["z" * 900], ["z"] * 3, ["z" * 990, "z" * 100]]})
    folder.write("01.parquet", parquet_of(nested, use_dictionary=False))
    assert folder.refused(replace(PARQUET, schema={"name": "string", "v": "array<string>"})).startswith(f"{file}, row 3: ")
    for texts in ([], [f"{number:03d}" * 200 for number in range(30)], ["y" * 600] * 30):
        folder.write("01.parquet", parquet_of(rows_of(*(rows := [(text, n) for n, text in enumerate(texts)]))))
        assert folder.rows(PARQUET) == sorted(rows, key=repr)


@pytest.mark.promise("error:SOURCE_UNREADABLE")
def test_a_folder_that_does_not_exist_is_refused(folder: Folder) -> None:
    assert folder.plan(CSV) is None, "an empty folder has no batch"
    folder.path.rmdir()
    raises(SourceUnreadable, lambda: folder.plan(CSV), f"The source folder {folder.path} does not exist")
    folder.path.write_text("a file of that name")
    raises(SourceUnreadable, lambda: folder.plan(CSV), f"The source folder {folder.path} ")


def test_names_of_folders_are_columns_also_of_a_record_that_is_replayed(folder: Folder) -> None:
    folder.write("dt=2024-01-05/shop=10%3A30/one.csv", HEADER + "a,1\n")
    folder.write("shop=x/dt=__HIVE_DEFAULT_PARTITION__/one.csv", HEADER + "a,2\n")
    source = Files("inbox", "**/*", "csv", SCHEMA, partitions={"dt": "date", "shop": "string"}, max_files=10)
    assert folder.rows(source) == [("a", 1, date(2024, 1, 5), "10:30"), ("a", 2, None, "x")]
    (again,) = folder.replayed(source, {ORIGIN: "dt=2024-01-05/shop=10%3A30/one.csv, line 2", PAYLOAD: "a,7"})
    assert (again["dt"], again["shop"], again[REFUSAL]) == (date(2024, 1, 5), "10:30", None)


@pytest.mark.parametrize("format", FORMATS)
def test_a_column_that_is_in_files_and_folders_is_never_guessed(folder: Folder, format: Any) -> None:
    folder.write(f"amount=7/dt=1/x.{format}", file_of(format, ROW))
    source = Files("inbox", "**/*", format, {"name": "string"}, partitions={"amount": "int"})
    assert "so has the name of a folder" in folder.refused(source)
    is_null = replace(source, schema={**SCHEMA, "dt": "int"}, partitions={}, missing="null")
    assert "declare partitions={" in folder.refused(is_null)


@pytest.mark.parametrize(
    ("most", "size", "cut"),
    [
        *((1, None, "1 2 3 4 5"), (2, None, "12 34 5"), (9, None, "12345"), (9, 30, "12 3 4 5"), (9, 29, "1 2 3 4 5")),
        *((9, 110, "123 45"), (2, 1000, "12 34 5"), (9, 1, "1 2 3 4 5")),
    ],
)
def test_batches_are_cut_by_files_and_bytes(folder: Folder, most: int, size: int | None, cut: str) -> None:
    for name, length in {"1": 10, "2": 20, "3": 80, "4": 25, "5": 50}.items():
        folder.write(name, "x" * length)
    coordinator = coordinator_of(Files("inbox", format="text", max_files=most, max_bytes=size), folder.settings)
    found: list[Any] = [None]
    while batch := coordinator.initialize_transaction(len(found), found[-1], None):
        found.append(batch)
    assert " ".join("".join(names(batch)) for batch in found[1:]) == cut


def change_a_byte(path: Path) -> None:
    overwrite(path, path.read_bytes().replace(b"1", b"2", 1))


@pytest.mark.promise("I11", "error:SOURCE_CHANGED")
@pytest.mark.parametrize("change", [change_a_byte, lambda path: path.write_text(f"{HEADER}a,1\nb,2\n"), Path.unlink])
def test_a_planned_file_that_changed_is_refused_until_it_is_back(folder: Folder, change: Callable[[Path], None]) -> None:
    file = folder.write("01.csv", f"{HEADER}a,1\n")
    planned, metadata = file.read_bytes(), folder.plan(CSV)
    attempt, emitter = Attempt("inbox", 1, 1, metadata), emitter_of(CSV, None, folder.settings)
    change(file)
    message = raises(SourceChanged, lambda: emitter.facts(attempt, metadata))
    assert message.startswith(f"{file} ")
    grown = f"Its first {len(planned)} bytes are what was planned. Put the planned content back, and what was added, as whole"
    assert (grown in message) == (file.exists() and file.stat().st_size > len(planned))
    file.write_bytes(planned)  # the time is another one now, but the content is what was planned
    assert emitter.facts(attempt, metadata).rows == 1
    change(file)
    raises(SourceChanged, lambda: emitter.verify_batch(attempt, metadata))


@pytest.mark.parametrize("put_back", [Path.replace, shutil.copyfile])
def test_a_file_that_is_another_one_only_while_it_is_read_is_found_before_the_seal(folder: Folder, put_back: Any) -> None:
    file = folder.write("01.csv", f"{HEADER}a,1\n")
    metadata = folder.plan(CSV)
    attempt, emitter = Attempt("inbox", 1, 1, metadata), emitter_of(CSV, None, folder.settings)
    emitter.facts(attempt, metadata)
    aside = file.rename(file.with_name("aside"))
    folder.write("01.csv", f"{HEADER}a,2\n")
    put_back(aside, file)
    with pytest.raises(RowsLost, match=r"01\.csv was touched, or replaced and put back, while it was read"):
        emitter.verify_batch(attempt, metadata)


@pytest.mark.promise("I16")
def test_another_source_of_files_is_another_declaration() -> None:
    files = Files("inbox", format="csv", schema=SCHEMA)
    assert replace(files, max_files=7, max_bytes=10, min_age_seconds=5).identity == files.identity
    changes = {"folder": "other", "glob": "*.csv", "header": False, "options": {"sep": ";"}, "format": "json"}
    for name, value in [*changes.items(), ("schema", dict(reversed(SCHEMA.items())))]:
        assert replace(files, **{name: value}).identity != files.identity, name


def test_an_option_by_which_values_are_dropped_made_up_or_cut_off_is_refused() -> None:
    times = [("timestampFormat", f"yyyy-MM-dd {form}") for form in ("hh:mm", "HH:mm:ss.SSSSSSSSS", "HH:mm VV", "HH:mm[ z]")]
    for option, value in [("mode", "DROPMALFORMED"), ("dateFormat", "MM-dd"), *times, ("lineSep", ""), ("escape", "")]:
        with pytest.raises(ValueError, match=f"cannot take the option (?i:{option})"):
            Files("inbox", format="csv", schema=SCHEMA, options={option: value})


# With Spark, which returns what parsers read in this process; what it refuses or loses is never sealed.


def by_spark(inbox: Inbox, source: Files, metadata: Any, *, flagged: bool) -> list[dict[str, Any]]:
    with spark_session(inbox.settings, "inbox") as spark:
        return read(inbox.settings, source, metadata, spark=spark, flagged=flagged)


NUMBERS = {"n": "int", "big": "bigint", "price": "decimal(38,4)", "yes": "boolean", "rate": "double", "list": "array<int>"}
OTHERS = {"name": "string", "day": "date", "at": "timestamp", "local": "timestamp_ntz", "raw": "binary"}
NESTED = {"map": "map<string, double>", "struct": "struct<`a b`: string>"}
VALUES = ["-7", "9223372036854775807", "-0.0001", "true", "0.1", "[1, null]", '"é \U0001f30a\\t"', '"9999-12-31"']
VALUES += ['"0001-01-01T00:00:00Z"', '"2026-03-29T02:30:00.000001"', '"YQ=="', '{"k": 0.5}', '{"a b": "c"}']


@pytest.mark.soak
@pytest.mark.promise("decision:0018")
def test_spark_returns_what_is_read_in_this_process(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = NUMBERS | OTHERS | NESTED
    good = "{" + ", ".join(f'"{name}": {value}' for name, value in zip(schema, VALUES, strict=True)) + "}"
    source = Files("inbox", "**/*", "json", schema, partitions={"dt": "date", "shop": "string"}, max_files=9)
    for name in ("dt=2024-01-05/shop=a b", "dt=__HIVE_DEFAULT_PARTITION__/shop=10%3A30", "dt=2024-01-06/shop=[x]{y}*"):
        inbox.write(f"{name}/1.json", "\n".join([good, '{"name": null}', good.replace("-7", '"-7"'), good] * 3))
    metadata = plan(inbox.settings, source)
    expected = read(inbox.settings, source, metadata, flagged=True)
    assert sum(record[REFUSAL] is not None for record in expected) == 9
    assert by_spark(inbox, source, metadata, flagged=True) == expected
    monkeypatch.setattr(text_reader, "HERE_BYTES", 0)
    monkeypatch.setattr(text_scan, "RANGE_BYTES", 100)
    monkeypatch.setattr(text_scan, "OPEN_BYTES", 0)
    in_tasks = by_spark(inbox, source, metadata, flagged=True)
    assert sorted(in_tasks, key=lambda row: row[ORIGIN]) == sorted(expected, key=lambda row: row[ORIGIN])


def test_spark_opens_parquet_files_of_any_name_and_no_others(inbox: Inbox) -> None:
    """Although Spark expands patterns, and Hadoop takes a colon for the end of a scheme."""
    names = ["at 10:30.csv", "back\\slash.csv", "hash#100%25.csv", "star of another.csv", "star*.csv", "{braces} [x]?.csv"]
    for number, name in enumerate(names):
        inbox.write(name, parquet_of(rows_of((name, number))))
    source = Files("inbox", schema=SCHEMA, max_files=9)
    metadata: Any = plan(inbox.settings, source)
    for some in (metadata["files"], [file for file in metadata["files"] if file["name"] == "star*.csv"]):
        rows = by_spark(inbox, source, {**metadata, "files": some}, flagged=False)
        assert sorted(row["name"] for row in rows) == [file["name"] for file in some]


MISFIT, NO_MOMENT = "is no {} of the form {}", "is no one moment of the years 1 to 9999 in Europe/Berlin"
NO_DAYS = ["05.01.2024\x01", "05.01.2024\x01junk", "\x01", "05.01.2024 ", "05.01.0000", "31.02.2024", "5.1.2024"]
# By type and pattern: what each text is read as, or why it is refused.
PATTERNS: dict[tuple[str, str], dict[str, Any]] = {
    ("date", "dd.MM.yyyy"): {"05.01.2024": date(2024, 1, 5), "31.12.9999": date.max, **dict.fromkeys(NO_DAYS, MISFIT)},
    ("timestamp", "dd.MM.yyyy HH:mm"): {
        "29.03.2026 03:30": datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
        "01.07.2050 12:00": datetime(2050, 7, 1, 10, tzinfo=UTC),
        **dict.fromkeys(["29.03.2026 02:30", "25.10.2026 02:30", "30.10.2050 02:30", "01.01.0001 00:00"], NO_MOMENT),
    },
    ("timestamp", "yyyy-MM-dd HH:mm[XXX]"): {
        "2026-10-25 02:30+02:00": datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
        "2026-10-25 02:30+01:00": datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
        "2026-07-01 12:00": datetime(2026, 7, 1, 10, tzinfo=UTC),
        "2026-10-25 02:30": NO_MOMENT,
    },
    ("timestamp_ntz", "yyyy-DDD hh:mm a"): {"2024-060 12:30 AM": datetime(2024, 2, 29, 0, 30)},
}
OPTIONS = {"date": "dateFormat", "timestamp": "timestampFormat", "timestamp_ntz": "timestampNTZFormat"}


def test_a_text_is_read_to_its_end_by_a_pattern_as_one_moment(inbox: Inbox) -> None:
    for number, ((kind, pattern), texts) in enumerate(PATTERNS.items()):
        inbox.write(f"{number}/01", "\n".join(json.dumps({"at": text}) for text in texts))
        options = {OPTIONS[kind]: pattern, "timeZone": "Europe/Berlin"}
        source = Files(f"inbox/{number}", format="json", schema={"at": kind}, options=options)
        rows = by_spark(inbox, source, plan(inbox.settings, source), flagged=True)
        found = sorted(rows, key=lambda row: int(row[ORIGIN].rpartition(" ")[2]))
        for row, (text, value) in zip(found, texts.items(), strict=True):
            if isinstance(value, str):
                assert row[REFUSAL].startswith(f"column at: '{text}' {value.format(kind, pattern)}")
            else:
                assert (row["at"], row[REFUSAL]) == (value, None)


@pytest.mark.promise("decision:0018")
def test_records_that_spark_does_not_see_are_missed(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "HERE_BYTES", 0)
    monkeypatch.setattr(text_scan, "RANGE_BYTES", 1)
    for number in range(3):
        inbox.write(f"0{number}.csv", HEADER + "a,1\n" * 100)
    pipeline = inbox.declare(CSV)
    inbox.plan(pipeline, "run")
    real = text_scan.in_tasks
    monkeypatch.setattr(text_reader, "in_tasks", lambda ranges: real(ranges)[1:])
    with pytest.raises(RowsLost, match="of 300 rows 200 arrived in the partials of state per_name"):
        steps.process(inbox.settings, pipeline, 1, owner="test")
    monkeypatch.setattr(text_reader, "in_tasks", real)
    assert inbox.run(pipeline, "again") == [1]
    assert inbox.rows(pipeline) == [{"name": "a", "lines": 300, "amount": 300}]


# New columns: one that a producer adds and is not declared is reported with the first txid that has it, or halts its batch.

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
        assert f"{column['column']} (since txid {column['first_txid']})" in sentences[0]
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
    assert "channel, n is missing. If the file is older than that, missing='null' makes it NULL" in folder.refused(source)
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


# Processes share a Spark server, whose caches of one process must not reach the next.
SOURCE = Files("inbox", schema=SCHEMA, kind="opaque", done_folder="done")
PIPELINE = Pipeline("inbox", SOURCE, {"sums": replace(PER_NAME, kind="opaque")}, lambda rows: rows.where("amount > 0"))
NEXT = """import pickle, sys; from tests.sources.test_files import PIPELINE, run_pipeline
run_pipeline(pickle.load(sys.stdin.buffer), PIPELINE, run_id="next")"""


@pytest.mark.promise("performance:one-session-per-pipeline", "decision:0003")
def test_a_file_is_read_as_it_is_even_if_an_earlier_process_read_another_of_its_name(inbox: Inbox) -> None:
    inbox.register(PIPELINE)
    inbox.write("1.parquet", parquet_of(rows_of(("a", 1), ("a", 2))))
    run_pipeline(inbox.settings, PIPELINE, run_id="earlier")
    inbox.write("1.parquet", parquet_of(rows_of(*(("a", amount) for amount in range(1, 1001)))))
    subprocess.run([sys.executable, "-c", NEXT], input=pickle.dumps(inbox.settings), cwd=REPOSITORY, check=True, timeout=300)
    assert inbox.counts(PIPELINE) == {"a": (1002, 3 + 500500)}
