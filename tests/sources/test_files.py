"""`Files` reads records exactly, and refuses bad ones with file and line: parsers and planner, in this process."""

import io
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sources.conftest import SCHEMA
from tests.sources.in_process import NO_FIT, Folder, folder
from tests.store import Attempt
from tidegate.jobs import Files
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.files.formats import parquet
from tidegate.jobs.sources.files.formats.records import typed_values
from tidegate.state_store.base.errors import MalformedRecord, RowsLost, SourceChanged, SourceUnreadable

__all__ = ["folder"]  # a fixture

CSV = Files("inbox", glob="*.csv*", format="csv", schema=SCHEMA, max_files=10)
JSON = Files("inbox", glob="*.json*", format="json", schema=SCHEMA, max_files=10)
PARQUET = Files("inbox", glob="*.parquet", schema=SCHEMA, max_files=10)
HEADER = "name,amount\n"


def parquet_of(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def people(names: list[str | None], amounts: list[int | None], kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"name": pa.array(names, pa.string()), "amount": pa.array(amounts, kind or pa.int32())})


def of_form(form: str, number: int) -> bytes:
    """Return a file of one record, whose amount is the number, in a format."""
    if form == "parquet":
        return parquet_of(people(["a"], [number]))
    return (f"{HEADER}a,{number}\n" if form == "csv" else f'{{"name": "a", "amount": {number}}}\n').encode()


def in_order(rows: Iterable[tuple]) -> list[tuple]:
    return sorted(rows, key=repr)


def check_refusals(folder: Folder, cases: Iterable[tuple[Files, str, str]]) -> None:
    """Check that each file, alone in the folder, is refused by a message that begins with its path and a text."""
    for source, content, message in cases:
        file = folder.write(f"1.{source.format}", content)
        assert folder.refused(source).startswith(f"{file}{message}"), content[:80]


# ---------------------------------------------------------------------------------------------------- dates and times


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
def test_the_rules_of_a_zone_hold_beyond_the_tables_of_its_past(zone: str) -> None:
    texts = ["2036-07-01 12:00:00", "2037-07-01 12:00:00", "2050-07-01 12:00:00", "2050-01-01 12:00:00", "9999-07-01 12:00:00"]
    column, bad = typed_values.from_texts(parse_type("timestamp"), pa.array([*texts, None]), zone)
    assert bad == {}
    assert column.to_pylist() == [*(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)) for text in texts), None]
    no_one_moment = {
        "Europe/Berlin": ("2024-10-27 02:30:00", "2024-03-31 02:30:00", "2050-10-30 02:30:00"),
        "America/New_York": ("2024-11-03 01:30:00", "2024-03-10 02:30:00", "2050-11-06 01:30:00"),
    }
    for text in no_one_moment[zone]:
        assert list(typed_values.from_texts(parse_type("timestamp"), pa.array([text]), zone)[1]) == [0], text


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.promise("error:MALFORMED_RECORD")
def test_a_bad_csv_record_is_refused_with_file_and_line(folder: Folder) -> None:
    one = replace(CSV, schema={"name": "string"})
    money = replace(CSV, schema={**SCHEMA, "amount": "decimal(10,2)"})
    cases = [
        (CSV, "a,1\nb,2,3\n", f", line 3: {NO_FIT}it has 3 value(s), the 2 columns need"),
        (CSV, "b,2\nb\n", f", line 3: {NO_FIT}it has 1 value(s)"),  # like a good line's beginning
        (CSV, "a,1\nb,3000000000\n", f", line 3: {NO_FIT}column amount: '3000000000' is no int"),
        (CSV, "a,1\nb, 2\n", f", line 3: {NO_FIT}column amount: ' 2' is no int"),
        (CSV, "\n\n\na,1\nb,two\n", f", line 6: {NO_FIT}column amount: 'two' is no int"),
        (CSV, "a,1\n" + "b" * 300 + ",1\n" + "b" * 300 + ",two\n", f", line 4: {NO_FIT}column amount"),
        (CSV, '"two\nlines",1\nplain,2,3\n', f", line 4: {NO_FIT}it has 3 value(s)"),
        (CSV, 'a,1\n"b,2\n', f", line 3: {NO_FIT}a quote is opened and never closed"),
        (CSV, 'a,1\n"b"c",2\n', f", line 3: {NO_FIT}text follows a closing quote"),
        (money, "a,1.500\nb,1.005\n", ", line 3: "),
    ]  # fmt: skip
    cases = [(source, HEADER + text, message) for source, text, message in cases]
    cases += [
        (CSV, "name,amount\ra,1\rb,two\r", f", line 3: {NO_FIT}column amount"),
        (CSV, "id,name,note,amount\n7,b,2\n", f", line 2: {NO_FIT}it has 3 value(s), the 4 columns need"),
        (one, "name\na\n\nb\n", f", line 3: {NO_FIT}an empty line may be an empty value"),
        *((CSV, text, ", line 1: the header is ") for text in ("a,1\nb,2\n", "name\na\n", "name, amount\na,1\n")),
        (CSV, "name,amount,name\na,1,b\n", ", line 1: the header is name,amount,name, in which name comes twice"),
    ]
    check_refusals(folder, cases)


def test_a_bad_json_record_is_refused_with_file_and_line(folder: Folder) -> None:
    good = '{"name": "a", "amount": 1}\n'
    second = ["not json", '{"name": "b", "amount": "2"}', '{"name": "b", "amount": true}', "5", "null", '{"name": "b"} tail']
    hidden = {
        '{"name": "a", "amount": 1}] junk': "something follows the record: '] junk'",
        '{"name": "a", "amount": 1}][{"name": "b", "amount": 2}': "something follows the record",
        '{"name": "a\\ud800b", "amount": 1}': "column name: half of a surrogate pair stands alone",
        '{\n  "name": "a",\n  "amount": 1\n}': "one record a line is read, but this looks like JSON over several",
        '[{"name": "a", "amount": 1},\n{"name": "b", "amount": 2}]': "one record a line is read, but this looks",
        '{"name": "a", "amount": 1\n, "amount": 2}': "it is no JSON: Expecting ',' delimiter at character 26",
        '{"name": "a", "amount": 01}': "it is no JSON",
        '{"name": "a", "amount": NaN}': "column amount: 'NaN' is no int",
        '{"name": "a", "amount": 1' + "0" * 5000 + "}": "it has a number of thousands of digits",
        "[" * 100_000: "it is nested too deeply",
    }
    cases = [(JSON, good + text, f", line 2: {NO_FIT}") for text in second]
    cases += [(JSON, text, f", line 1: {NO_FIT}{why}") for text, why in hidden.items()]
    money = replace(JSON, schema={"name": "string", "amount": "decimal(10,2)"})
    cases.append((money, '{"name": "a", "amount": 1.500}\n{"name": "b", "amount": 1.005}\n', ", line 2: "))
    check_refusals(folder, cases)


# ------------------------------------------------------------------------------------------------------------ Parquet


def test_a_column_that_a_parquet_file_lacks_is_refused_or_declared_null(folder: Folder) -> None:
    folder.write("1.parquet", parquet_of(people(["a"], [1]).select(["amount"])))
    folder.write("2.parquet", parquet_of(pa.table({"other": [4]})))
    lenient = replace(PARQUET, missing="null")
    assert folder.read(lenient) == [(None, 1), (None, None)]
    assert "column name of the schema is missing; it has amount" in folder.refused(PARQUET)


@pytest.mark.promise("limit:TASK_BYTES")
def test_pandas_default_parquet_is_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "TASK_BYTES", 1_000)
    frame = pd.DataFrame({"t": pd.date_range("2024-01-01", periods=300, freq="1s"), "n": range(300)}, index=range(5, 305))
    frame.iloc[1:].to_parquet(folder.path / "01.parquet", row_group_size=50)
    instants = pa.table({"t": frame["t"].dt.tz_localize("UTC"), "n": frame["n"]})
    folder.write("02.parquet", parquet_of(instants, use_deprecated_int96_timestamps=True, compression="brotli"))

    local = folder.read(Files("inbox", glob="01*", schema={"n": "bigint", "t": "timestamp_ntz"}))
    assert sorted(local) == [(n, t.to_pydatetime()) for n, t in enumerate(frame["t"])][1:]
    there = folder.read(Files("inbox", glob="02*", schema={"n": "decimal(19,0)", "t": "timestamp"}))
    assert sorted(there) == [(n, t.to_pydatetime().replace(tzinfo=UTC)) for n, t in enumerate(frame["t"])]


def test_a_parquet_row_with_a_value_that_does_not_fit_is_set_aside(folder: Folder) -> None:
    table = pa.table({"name": ["a", "b"], "v": pa.array([1_000, 1_001], pa.timestamp("ns", "UTC"))})
    folder.write("01.parquet", parquet_of(table))
    source = replace(PARQUET, schema={"name": "string", "v": "timestamp"})
    assert folder.refused(source).startswith(f"{folder.path}/01.parquet, row 2: {NO_FIT}column v: ")
    good, bad = folder.records(source)
    assert (good["name"], good[REFUSAL], bad["name"], bad[ORIGIN]) == ("a", None, None, "01.parquet, row 2")
    assert "00:00:00.000001001Z" in bad[PAYLOAD]


@pytest.mark.promise("limit:LONG_ROW_BYTES")
def test_a_parquet_row_that_is_longer_than_a_record_is_refused_and_many_long_ones_are_read_in_pieces(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("parquet_footers", "parquet_tasks"):
        monkeypatch.setattr(f"tidegate.jobs.sources.files.formats.parquet_files.{module}.MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr("tidegate.jobs.sources.files.formats.parquet_files.parquet_footers.LONG_ROW_BYTES", 50)
    wide = {f"c{number}": "string" for number in range(9)}
    row, longer = (dict.fromkeys(wide, "x" * size) | {"c3": "y" * 7 * size} for size in (100, 1000))
    file = folder.write("01.parquet", parquet_of(pa.Table.from_pylist([longer])))
    refused = (
        re.escape(f"{file}, row group 1: the row has ") + r"\d+ bytes, of which 7\d{3} are in column c3, and a record has at"
    )
    assert re.match(refused, folder.refused(replace(PARQUET, schema=wide)))
    folder.write("01.parquet", parquet_of(pa.Table.from_pylist([*[dict.fromkeys(wide, "")] * 6, row])))
    told = f"{file}, row 7: the row has 1500 bytes, of which 700 are in column c3"
    assert folder.refused(replace(PARQUET, schema=wide)).startswith(told)
    with pytest.raises(MalformedRecord, match=re.escape(told)):
        folder.records(replace(PARQUET, schema=wide))
    nested = pa.table({"name": ["", "", ""], "v": [["z" * 900], ["z"] * 3, ["z" * 990, "z" * 100]]})
    folder.write("01.parquet", parquet_of(nested, use_dictionary=False))
    assert folder.refused(replace(PARQUET, schema={"name": "string", "v": "array<string>"})).startswith(f"{file}, row 3: ")

    folder.write("01.parquet", parquet_of(people([], [], pa.uint32())))
    assert folder.read(replace(PARQUET, schema={"name": "string", "amount": "bigint"})) == []
    texts = [f"{number:03d}" * 200 for number in range(30)]
    for each in (texts, ["y" * 600] * 30):
        folder.write("01.parquet", parquet_of(people(each, list(range(30)), pa.uint32())))
        assert folder.read(replace(PARQUET, schema={"name": "string", "amount": "bigint"})) == in_order(
            list(zip(each, range(30), strict=True))
        )


# ------------------------------------------------------------------------------------------------- what is planned


@pytest.mark.promise("error:SOURCE_UNREADABLE")
def test_a_folder_that_does_not_exist_is_refused(folder: Folder) -> None:
    assert folder.plan(CSV) is None, "an empty folder has no batch"
    folder.path.rmdir()
    with pytest.raises(SourceUnreadable, match=f"The source folder {folder.path} does not exist"):
        folder.plan(CSV)
    folder.path.write_text("a file of that name")
    with pytest.raises(SourceUnreadable, match=f"The source folder {folder.path} "):
        folder.plan(CSV)


def test_names_of_folders_are_columns_also_of_a_record_that_is_replayed(folder: Folder) -> None:
    folder.write("dt=2024-01-05/shop=10%3A30/one.csv", HEADER + "a,1\n")
    folder.write("shop=x/dt=__HIVE_DEFAULT_PARTITION__/one.csv", HEADER + "a,2\n")
    source = Files("inbox", "**/*", "csv", SCHEMA, partitions={"dt": "date", "shop": "string"}, max_files=10)
    assert folder.read(source, files=2) == [("a", 1, date(2024, 1, 5), "10:30"), ("a", 2, None, "x")]
    (again,) = folder.replayed(source, {ORIGIN: "dt=2024-01-05/shop=10%3A30/one.csv, line 2", PAYLOAD: "a,7"})
    assert (again["dt"], again["shop"], again[REFUSAL]) == (date(2024, 1, 5), "10:30", None)


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_a_column_that_is_in_files_and_folders_is_never_guessed(folder: Folder, form: Any) -> None:
    folder.write(f"amount=7/dt=1/x.{form}", of_form(form, 1))
    source = Files("inbox", "**/*", form, {"name": "string"}, partitions={"amount": "int"})
    assert "so has the name of a folder" in folder.refused(source)
    is_null = replace(source, schema={**SCHEMA, "dt": "int"}, partitions={}, missing="null")
    assert "declare partitions={" in folder.refused(is_null)


def test_batches_are_cut_by_files_and_bytes(folder: Folder) -> None:
    for name, size in {"1": 10, "2": 20, "3": 80, "4": 25, "5": 50}.items():
        folder.write(name, "x" * size)
    expected: dict[tuple[int, int | None], list[str]] = {
        (1, None): ["1", "2", "3", "4", "5"],
        (2, None): ["12", "34", "5"],
        (9, None): ["12345"],
        (9, 30): ["12", "3", "4", "5"],
        (9, 29): ["1", "2", "3", "4", "5"],
        (9, 110): ["123", "45"],
        (2, 1000): ["12", "34", "5"],
        (9, 1): ["1", "2", "3", "4", "5"],
    }
    found = {
        (most, size): ["".join(cut) for cut in folder.batches(Files("inbox", format="text", max_files=most, max_bytes=size))]
        for most, size in expected
    }  # fmt: skip
    assert found == expected


# ------------------------------------------------------------------------------------------------ changed after all


def change_a_byte(path: Path) -> None:
    """Change one byte, but not size or time."""
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)


@pytest.mark.promise("I11", "error:SOURCE_CHANGED")
def test_a_planned_file_that_changed_is_refused_until_it_is_back(folder: Folder) -> None:
    file = folder.write("01.csv", HEADER + "a,1\n")
    planned, metadata = file.read_bytes(), folder.plan(CSV)
    assert metadata
    attempt = Attempt("inbox", 1, 1, metadata)
    for change in (change_a_byte, lambda path: path.write_bytes(planned + b"b,2\n"), Path.unlink):
        emitter = emitter_of(CSV, None, folder.settings)  # type: ignore[arg-type]
        change(file)
        with pytest.raises(SourceChanged) as refusal:
            emitter.facts(attempt, metadata)
        assert str(refusal.value).startswith(f"{file} ")
        grown = (
            f"Its first {len(planned)} bytes are what was planned. Put the planned content back, and what was added, as whole"
        )
        assert (grown in str(refusal.value)) == (file.exists() and file.stat().st_size > len(planned))
        file.write_bytes(planned)  # the time is another one now, but the content is what was planned
        assert emitter.facts(attempt, metadata).rows == 1
        change(file)
        with pytest.raises(SourceChanged):
            emitter.verify_batch(attempt, metadata)
        file.write_bytes(planned)


@pytest.mark.parametrize("puts_back", ["the file itself", "its content"])
def test_a_file_that_is_another_one_only_while_it_is_read_is_found_before_the_seal(folder: Folder, puts_back: str) -> None:
    file = folder.write("01.csv", HEADER + "a,1\n")
    planned, aside, metadata = file.read_bytes(), file.with_name("aside"), folder.plan(CSV)
    assert metadata
    attempt, emitter = Attempt("inbox", 1, 1, metadata), emitter_of(CSV, None, folder.settings)  # type: ignore[arg-type]
    emitter.facts(attempt, metadata)
    file.rename(aside)
    folder.write("01.csv", HEADER + "a,2\n")
    if puts_back == "its content":
        file.write_bytes(planned)
    else:
        aside.replace(file)
    with pytest.raises(RowsLost, match=r"01\.csv was touched, or replaced and put back, while it was read"):
        emitter.verify_batch(attempt, metadata)


# ------------------------------------------------------------------------------------------------ declared


@pytest.mark.promise("I16")
def test_another_source_of_files_is_another_declaration() -> None:
    files = Files("inbox", format="csv", schema=SCHEMA)
    assert replace(files, max_files=7, max_bytes=10, min_age_seconds=5).identity == files.identity
    changes: list[Any] = [
        {"folder": "other"},
        {"glob": "*.csv"},
        {"header": False},
        {"options": {"sep": ";"}},
        {"format": "json"},
    ]
    for change in [*changes, {"schema": dict(reversed(SCHEMA.items()))}]:
        assert replace(files, **change).identity != files.identity, change  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mode", "DROPMALFORMED"),
        ("dateFormat", "MM-dd"),
        ("timestampFormat", "yyyy-MM-dd hh:mm"),
        ("timestampFormat", "yyyy-MM-dd HH:mm:ss.SSSSSSSSS"),
    ],
)
def test_an_option_by_which_values_are_dropped_made_up_or_cut_off_is_refused(option: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"cannot take the option (?i:{option})"):
        Files("inbox", format="csv", schema=SCHEMA, options={option: value})
