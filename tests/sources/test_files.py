"""`Files` reads records exactly, and refuses bad ones with file and line: parsers and planner, in this process."""

import codecs
import io
import os
import random
import re
from collections.abc import Callable, Iterable
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
TEXT = Files("inbox", glob="*.txt*", format="text", max_files=10)
PARQUET = Files("inbox", glob="*.parquet", schema=SCHEMA, max_files=10)
HEADER = "name,amount\n"

NAMES_OF_FILES = [
    *("with space.csv", " spaces around .csv", "[brackets].csv", "{braces}.csv", "star*.csv", "question?.csv"),
    *("back\\slash.csv", "100%25.csv", "plus+and&.csv", "hash#.csv", "quote'\".csv", "semi;colon,comma.csv"),
    *("~tilde^`$.csv", "Zürich.csv", "Zu\u0308rich.csv", "\U0001f30a.csv", "at 10:30/2024-01-01T10:00:00.csv"),
]


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
    record = {"csv": f"{HEADER}a,{number}\n", "text": f"{number}\n", "json": f'{{"name": "a", "amount": {number}}}\n'}[form]
    return record.encode()


def in_order(rows: Iterable[tuple]) -> list[tuple]:
    return sorted(rows, key=repr)


def check_refusals(folder: Folder, cases: Iterable[tuple[Files, str, bytes | str, str]], error: Any = MalformedRecord) -> None:
    """Check that each file, alone in the folder, is refused by a message that begins with its path and a text."""
    wrong = []
    for source, name, bytes_, message in cases:
        folder.clear()
        file = folder.write(name, bytes_)
        try:
            found = folder.refused(source, error)
        except (AssertionError, pytest.fail.Exception) as failure:
            found = repr(failure)
        if not found.startswith(f"{file}{message}"):
            wrong.append((bytes_[:80], message, found))
    assert wrong == []


# ------------------------------------------------------------------------------------------------------- read right


@pytest.mark.parametrize("last", ["", "x,y,z\r\n"], ids=["regular", "beside a bad record"])
def test_a_declared_line_end_is_the_only_one(folder: Folder, last: str) -> None:
    folder.write("01.csv", "amount,name\n1,k\r\n2,k\n3,\r\n" + last)
    source = Files("inbox", format="csv", schema={"amount": "int", "name": "string"}, options={"lineSep": "\n"})
    found = {record["name"]: record["amount"] for record in folder.records(source) if record[REFUSAL] is None}
    assert found == {"k\r": 1, "k": 2, "\r": 3}
    why = f", line 2: {NO_FIT}column amount: '1\\r' is no int"
    check_refusals(folder, [(replace(CSV, options={"lineSep": "\n"}), "1.csv", HEADER + "k,1\r\n", why)])


def test_a_key_that_no_record_of_a_json_file_has_is_refused_or_declared(folder: Folder) -> None:
    lines = ['{"name": "a", "Amount": 1}', '{"name": "amount", "x": {"amount": 1}}', '{"name": "\\"amount\\": 5"}']
    file = folder.write("01.json", "\n".join(lines))
    assert folder.refused(JSON).startswith(f"{file}: none of its 3 record(s) has the key amount")

    ignoring = replace(JSON, ignored_columns=["Amount"])
    lenient = replace(ignoring, missing="null")
    assert lenient.identity == JSON.identity
    assert folder.read(lenient) == in_order([("a", None), ("amount", None), ('"amount": 5', None)])
    folder.write("01.json", "\n".join([*lines, '{"name": "b", "\\u0061mount": 2}']))
    assert len(folder.read(ignoring)) == 4


def test_any_file_name_is_read_and_named(folder: Folder) -> None:
    source = Files("inbox", glob="**/*", format="csv", schema=SCHEMA, max_files=100)
    for number, name in enumerate(NAMES_OF_FILES):
        folder.write(name, f"{HEADER}file,{number}\n")
    folder.write("star of another file.csv", HEADER + "other,99\n")
    assert folder.read(source) == in_order([*(("file", n) for n in range(len(NAMES_OF_FILES))), ("other", 99)])
    for name in NAMES_OF_FILES:
        whole = (folder.path / name).read_bytes()
        file = folder.write(name, HEADER + "a,1\nb,two\n")
        assert folder.refused(source).startswith(f"{file}, line 3: {NO_FIT}column amount: 'two' is no int")
        folder.write(name, whole)


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


def test_a_pattern_that_leaves_a_part_open_is_refused_when_declared() -> None:
    """Spark would fill it in, by 1970 or midnight."""
    open_patterns = {
        "make up a part of the date": [
            *("MM-dd", "yyyy", "yyyy-MM", "yyyy-dd", "HH:mm", "", "yyyy-MM[-dd]", "'y'MM-dd", "yyyy-MM[[-dd] HH"),
        ],
        "make up the hour": ["yyyy-MM-dd hh:mm", "yyyy-MM-dd mm", "yyyy-MM-dd[ KK]", "yyyy-MM-dd hh[ a]"],
        "reads no dates or times with the letter": ["uuuu-MM-dd", "YYYY-MM-dd", "E yyyy-MM-dd"],
    }  # fmt: skip
    for option in ("dateFormat", "timestampFormat", "timestampNTZFormat"):
        for why, patterns in open_patterns.items():
            for pattern in patterns:
                for form in ("csv", "json"):
                    with pytest.raises(ValueError, match=f"cannot take the option (?i:{option}).*{why}"):
                        Files("inbox", format=form, schema=SCHEMA, options={option: pattern})  # type: ignore[arg-type]


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
    check_refusals(folder, [(source, "1.csv", text, message) for source, text, message in cases])


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
    cases = [(JSON, "1.json", good + text, f", line 2: {NO_FIT}") for text in second]
    cases += [(JSON, "1.json", text, f", line 1: {NO_FIT}{why}") for text, why in hidden.items()]
    money = replace(JSON, schema={"name": "string", "amount": "decimal(10,2)"})
    cases.append((money, "1.json", '{"name": "a", "amount": 1.500}\n{"name": "b", "amount": 1.005}\n', ", line 2: "))
    check_refusals(folder, cases)


def test_bytes_that_are_not_of_the_encoding_are_refused_with_their_line(folder: Folder) -> None:
    """Spark would replace such bytes silently, and merge several keys."""
    wide = (HEADER + "a,1\n").encode("utf-16") + b"\x00"
    cases: list[tuple[Files, str, bytes | str, str]] = [
        (TEXT, "1.txt", b"a\nb\n\xed\xa0\x80\n", ", line 3: byte 0xed is not UTF-8."),
        (TEXT, "1.txt", b"a\nb\ncaf\xc3", ", line 3: byte 0xc3 is not UTF-8."),
        (TEXT, "1.txt", b"x" * (1 << 20) + b"\n\xff", ", line 2: byte 0xff is not UTF-8."),
        (CSV, "1.csv", b"name,amount\ncaf\xe9,1\n", ", line 2: byte 0xe9 is not UTF-8."),
        (JSON, "1.json", b'{"name": "caf\xe9", "amount": 1}\n', ", line 1: byte 0xe9 is not UTF-8."),
        (replace(CSV, options={"encoding": "UTF-16"}), "1.csv", wide, ", line 3: byte 0x00 is not utf-16."),
        (replace(TEXT, options={"encoding": "utf-16"}), "1.txt", b"a\x00b\x00", ", line 1: it is not utf-16"),
        (replace(TEXT, options={"encoding": "utf-8-sig"}), "1.txt", b"\xef", ", line 1: byte 0xef is not UTF-8."),
    ]
    check_refusals(folder, cases)


# ------------------------------------------------------------------------------------------------------------ Parquet


def test_a_parquet_file_that_is_damaged_or_has_other_columns_is_refused(folder: Folder) -> None:
    chance = random.Random(1)
    whole = parquet_of(people([f"{chance.getrandbits(200):x}" for _ in range(1000)], list(range(1000))))
    damaged = [whole[:-20], b"", whole[: len(whole) // 2], b"name,amount\na,1\n"]
    cases: list[tuple[Files, str, bytes | str, str]] = [
        *((PARQUET, "02.parquet", damage, " is not a whole Parquet file that can be read: ") for damage in damaged),
        (PARQUET, "02.parquet", whole[:100] + bytes(2000) + whole[2100:], " cannot be read: "),
    ]
    check_refusals(folder, cases, SourceUnreadable)
    twice = [pa.array(["a"]), pa.array([1], pa.int32()), pa.array([2], pa.int32())]
    others = {
        "column amount of the schema is missing; it has name": pa.table({"name": ["a"]}),
        "amount is int64, and the schema says int": people(["a"], [1], pa.int64()),
        "amount is string, and the schema says int": pa.table({"name": ["a"], "amount": ["1"]}),
        "amount is uint32, and the schema says int": people(["a"], [1], pa.uint32()),
        "it has Amount: upper and lower": pa.table({"name": ["a"], "Amount": pa.array([1], pa.int32())}),
        "column amount is there 2 times": pa.Table.from_arrays(twice, ["name", "amount", "amount"]),
    }
    folder.clear()
    folder.write("01.parquet", parquet_of(people(["a"], [1])))
    for message_part, table in others.items():
        file = folder.write("02.parquet", parquet_of(table))
        message = folder.refused(PARQUET)
        assert message.startswith(f"{file}: ")
        assert message_part in message
        assert "schema" in message.partition(message_part)[2] or "Declare" in message


@pytest.mark.parametrize("kind", [pa.int32(), pa.int16()], ids=["as declared", "narrower"])
def test_a_column_that_a_parquet_file_lacks_is_refused_or_declared_null(folder: Folder, kind: pa.DataType) -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    times = pa.table({"amount": pa.array([1, 2], kind), "at": pa.array([at.replace(tzinfo=None), None])})
    folder.write("1.parquet", parquet_of(times, use_deprecated_int96_timestamps=True))
    folder.write("2.parquet", parquet_of(pa.table({"name": ["c"], "amount": pa.array([3], kind)})))
    folder.write("3.parquet", parquet_of(pa.table({"other": [4, 5]})))
    lenient = replace(PARQUET, schema={**SCHEMA, "at": "timestamp"}, missing="null")
    rows = [(None, 1, at), (None, 2, None), ("c", 3, None), (None, None, None), (None, None, None)]
    assert folder.read(lenient) == in_order(rows)
    assert "column name of the schema is missing; it has amount, at" in folder.refused(replace(lenient, missing="refuse"))
    folder.write("2.parquet", parquet_of(pa.table({"Name": ["d"], "amount": pa.array([3], kind)})))
    assert "it has Name: upper and lower case differ" in folder.refused(lenient)


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


FAR_ROWS = {
    "nanoseconds": (pa.array([1_000, 1_001], pa.timestamp("ns", "UTC")), "timestamp", False, "00:00:00.000001001Z"),
    "INT96": (pa.array([1_000, 1_001], pa.timestamp("ns")), "timestamp", True, "00:00:00.000001001Z"),
    "a year after 9999": (pa.array([0, 2_932_897], pa.int32()).view(pa.date32()), "date", False, "10000-01-01"),
    "the year 0": (pa.array([0, -719_163], pa.int32()).view(pa.date32()), "date", False, "0000-12-31"),
    "too large": (pa.array([0, 2**63], pa.uint64()), "bigint", False, "9223372036854775808"),
    "no UTF-8": (pa.array([b"a", b"\xff"]), "string", False, "udcff"),
}


@pytest.mark.parametrize(("values", "declared", "int96", "shown"), FAR_ROWS.values(), ids=FAR_ROWS.keys())
def test_a_parquet_value_that_does_not_fit_is_refused_or_set_aside_with_its_row(
    folder: Folder, values: pa.Array, declared: str, int96: bool, shown: str
) -> None:
    table = pa.table({"name": ["a", "b"], "v": values})
    file = folder.write("01.parquet", parquet_of(table, use_deprecated_int96_timestamps=int96))
    source = replace(PARQUET, schema={"name": "string", "v": declared})
    message = folder.refused(source)
    assert message.startswith(f"{file}, row 2: {NO_FIT}column v: ")
    assert shown in message
    good, bad = folder.records(source)
    assert (good["name"], good[REFUSAL], bad["name"], bad[ORIGIN]) == ("a", None, None, "01.parquet, row 2")
    assert shown in bad[PAYLOAD]


@pytest.mark.promise("limit:LONG_ROW_BYTES")
def test_a_parquet_row_that_is_longer_than_a_record_is_refused_and_many_long_ones_are_read_in_pieces(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("parquet_columns", "parquet_tasks"):
        monkeypatch.setattr(f"tidegate.jobs.sources.files.formats.parquet_files.{module}.MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr("tidegate.jobs.sources.files.formats.parquet_files.parquet_columns.LONG_ROW_BYTES", 50)
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


def test_a_file_without_rows_is_a_batch_without_rows(folder: Folder) -> None:
    """So that it is not read again."""
    empty = {"json": b"", "text": b"", "csv": HEADER.encode(), "csv of no bytes": b"", "csv of a mark": codecs.BOM_UTF8}
    for form, nothing in {**empty, "parquet": parquet_of(people([], []))}.items():
        source = {"json": JSON, "text": TEXT, "csv": CSV, "parquet": PARQUET}[form.partition(" ")[0]]
        folder.write("01", nothing)
        assert folder.read(replace(source, glob="*"), files=1) == [], form


# ------------------------------------------------------------------------------------------------- what is planned


def unreadable(path: Path) -> None:
    path.write_text(HEADER)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user (root) may read every file")


# A reader that opens a pipe blocks for ever; metadata is UTF-8; Hadoop takes a colon for the end of a URI's scheme, and
# brackets for a pattern, so both together cannot be written.
NO_FILES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a folder": ("02.csv", Path.mkdir, r"inbox/02\.csv "),
    "a dangling link": ("02.csv", lambda path: path.symlink_to("nowhere"), r"inbox/02\.csv "),
    "a pipe": ("02.csv", os.mkfifo, r"inbox/02\.csv "),
    "packed": ("02.csv.Zip", Path.touch, r"inbox/02\.csv\.Zip is packed in a way that is not read"),
    "unreadable": ("02.csv", unreadable, r"inbox/02\.csv "),
    "no UTF-8": (os.fsdecode(b"\xff.csv"), Path.touch, r"\.csv"),
    "no URI": ("{[10:30]}.parquet", Path.touch, r"Spark cannot open a Parquet file with a colon and one of \[\]\{\}"),
}


@pytest.mark.parametrize(("name", "make", "message"), NO_FILES.values(), ids=NO_FILES.keys())
@pytest.mark.timeout(60)
def test_a_name_that_is_no_readable_file_is_refused_when_planned(
    folder: Folder, name: str, make: Callable[[Path], Any], message: str
) -> None:
    folder.write("01.csv", HEADER + "a,1\n")
    make(folder.path / name)
    with pytest.raises(SourceUnreadable, match=message) as refusal:
        folder.plan(PARQUET if name.endswith(".parquet") else CSV)
    assert "\n" not in str(refusal.value)
    str(refusal.value).encode()  # it can be printed and stored


@pytest.mark.promise("error:SOURCE_UNREADABLE")
def test_a_folder_that_does_not_exist_is_refused(folder: Folder) -> None:
    assert folder.plan(CSV) is None, "an empty folder has no batch"
    folder.path.rmdir()
    with pytest.raises(SourceUnreadable, match=f"The source folder {folder.path} does not exist"):
        folder.plan(CSV)
    folder.path.write_text("a file of that name")
    with pytest.raises(SourceUnreadable, match=f"The source folder {folder.path} "):
        folder.plan(CSV)


@pytest.mark.parametrize(("form", "payload"), [("csv", "a,7"), ("json", '{"name":"a","amount":7}'), ("text", "7")])
def test_names_of_folders_are_columns(folder: Folder, form: Any, payload: str) -> None:
    day = date(2024, 1, 5)
    folders = {
        "dt=2024-01-05/shop=a b": (day, "a b"),
        "dt=2024-01-05/shop=10%3A30": (day, "10:30"),
        "dt=__HIVE_DEFAULT_PARTITION__/shop=a b": (None, "a b"),
        "shop=x/dt=2024-01-05": (day, "x"),
    }
    for number, name in enumerate(folders):
        folder.write(f"{name}/one.{form}", of_form(form, number))
    schema = {} if form == "text" else SCHEMA
    source = Files("inbox", "**/*", form, schema, partitions={"dt": "date", "shop": "string"}, max_files=10)
    rows = [(*((str(number),) if form == "text" else ("a", number)), *of) for number, of in enumerate(folders.values())]
    assert folder.read(source, files=4) == in_order(rows)
    waiting = {ORIGIN: f"dt=2024-01-05/shop=10%3A30/x.{form}, line 2", PAYLOAD: payload}
    (again,) = folder.replayed(source, waiting)
    assert (again["dt"], again["shop"], again[REFUSAL]) == (day, "10:30", None)


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_a_column_that_is_in_files_and_folders_is_never_guessed(folder: Folder, form: Any) -> None:
    source = Files("inbox", glob="**/*", format=form, schema=SCHEMA)
    folder.write(f"amount=7/x.{form}", of_form(form, 1))
    message = folder.refused(replace(source, schema={"name": "string"}, partitions={"amount": "int"}))
    assert "amount" in message
    assert "so has the name of a folder" in message
    folder.clear()
    folder.write(f"dt=2024-1-5/x.{form}", of_form(form, 1))
    for missing in ("refuse", "null"):
        message = folder.refused(replace(source, schema={**SCHEMA, "dt": "date"}, missing=missing))  # type: ignore[arg-type]
        assert "declare partitions={'dt': 'date'} instead of it in the schema." in message
    message = folder.refused(replace(source, partitions={"dt": "date"}))
    assert f"inbox/dt=2024-1-5/x.{form}: partition dt=2024-1-5: '2024-1-5' is no date" in message


def test_a_link_out_of_the_folder_is_refused_when_it_is_read(folder: Folder) -> None:
    secret = folder.settings.home / "secret.csv"
    secret.write_text(HEADER + "a,1\n")
    link = folder.write("01.csv", HEADER + "a,1\n")
    planned = folder.plan(CSV)
    assert planned
    link.unlink()
    link.symlink_to(secret)
    with pytest.raises(SourceUnreadable, match=r"01\.csv leads out of .*inbox: it is really .*/secret\.csv"):
        emitter_of(CSV, None, folder.settings).emit_batch(Attempt("inbox", 1, 1, planned), planned)  # type: ignore[arg-type]
    assert folder.read(replace(CSV, follow_links=True)) == [("a", 1)]


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


def test_another_source_of_files_is_another_declaration() -> None:
    files = Files("inbox", format="csv", schema=SCHEMA)
    assert replace(files, max_files=7, max_bytes=10, min_age_seconds=5).identity == files.identity
    for change in (
        {"folder": "other"},
        {"glob": "*.csv"},
        {"header": False},
        {"schema": {**SCHEMA, "amount": "bigint"}},
        {"schema": dict(reversed(SCHEMA.items()))},
        {"options": {"sep": ";"}},
        {"format": "json"},
    ):
        assert replace(files, **change).identity != files.identity, change  # type: ignore[arg-type]


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
                *("mode", "inferSchema", "header", "enforceSchema", "columnNameOfCorruptRecord", "pathGlobFilter"),
                *("modifiedBefore", "modifiedAfter", "ignoreCorruptFiles", "ignoreMissingFiles", "recursiveFileLookup", "path"),
            )
        ),
        ({"format": "csv", "schema": SCHEMA, "options": {"sep": "||"}}, "one character"),
        ({"format": "csv", "schema": SCHEMA, "options": {"encoding": "klingon"}}, "klingon is not known"),
        ({"format": "csv", "schema": SCHEMA, "options": {"unescapedQuoteHandling": "x"}}, "cannot take the option unescaped"),
        ({"format": "json", "schema": SCHEMA, "options": {"allowComments": "true"}}, "cannot take the option allowComments"),
        ({"format": "csv", "schema": SCHEMA, "options": {"timestampFormat": "ss.SSSSSSSSS"}}, "cut off what follows micros"),
        ({"format": "csv", "schema": {"a": "interval day"}}, "is not a type"),
        ({"format": "csv", "schema": {"_tidegate_id": "int"}}, "names like that are Tidegate's own"),
        ({"format": "json", "schema": SCHEMA, "missing": "guess"}, "use 'refuse' or 'null'"),
        ({"format": "text", "done_folder": "inbox/done"}, "inside it: they would be read again"),
    ],
)
def test_a_source_that_cannot_keep_the_promise_is_refused_when_declared(arguments: dict[str, Any], message: str) -> None:
    """The constructor refuses options that would make Spark drop, guess or repair rows."""
    with pytest.raises(ValueError, match=message):
        Files("inbox", **arguments)
