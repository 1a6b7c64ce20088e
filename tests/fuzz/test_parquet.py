"""Drawn odd Parquet files are read as pyarrow and Python read them, one value at a time, or refused."""

import os
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from tests.fuzz.harness import draw_inputs
from tests.sources.in_process import plan, read
from tidegate.jobs import Files
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.files.formats import parquet
from tidegate.jobs.spark.task_errors import reported_in
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import MalformedRecord, SourceUnreadable

# Files that are drawn, and how many of them at least fit what is declared: fewer than a quarter of very many.
INPUTS, FITTING = (3000, 600) if os.environ.get("SOAK") else (150, 150 // 4)
INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
DECLARED = [
    *(*INTEGERS, "float", "double", "string", "binary", "boolean", "date", "timestamp", "timestamp_ntz"),
    *("decimal(5,0)", "decimal(10,2)", "decimal(20,0)", "decimal(38,18)"),
    *("array<int>", "array<bigint>", "array<string>", "array<timestamp>"),
]
EPOCH, FIRST_DAY, WIDE = datetime(1970, 1, 1), date(1970, 1, 1), Context(prec=60)
MICROSECONDS = {"s": 10**6, "ms": 1000, "us": 1}
# The first and the last second of the years 1 to 9999, and the first of the calendar of today.
YEAR_1, YEAR_10000, OF_TODAY = -62_135_596_800, 253_402_300_800, -12_219_292_800
NAMES = ["a", "b", "a.b", "c`d", "E", "e f", "txid"]
TEXTS = st.sampled_from(["", "a", "\u00e9\U0001f30a", "x" * 300, "NULL", "2024-01-01", "1"])


def ticks(unit: str) -> st.SearchStrategy[int]:
    """Draw times: some before 1582, some far away, some with nanoseconds."""
    if unit == "ns":
        return st.integers(-(2**62), 2**62) | st.integers(-(2**52), 2**52).map(lambda micros: 1000 * micros)
    per_second = 10**6 // MICROSECONDS[unit]
    seconds = st.integers(YEAR_1 - 1, YEAR_10000) | st.sampled_from([OF_TODAY, OF_TODAY - 1, 0, 1_700_000_000])
    return seconds.flatmap(lambda second: st.integers(second * per_second, (second + 1) * per_second - 1))


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    return st.integers(1 - 10**digits, 10**digits - 1).map(lambda number: Decimal(number).scaleb(-scale, WIDE))


# Stored types and their plain values: numbers, texts, and times as numbers of their unit.
KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    *((getattr(pa, f"int{bits}")(), st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)) for bits in INTEGERS.values()),
    *((getattr(pa, f"uint{bits}")(), st.integers(0, 2**bits - 1)) for bits in INTEGERS.values()),
    *((pa.timestamp(unit, zone), ticks(unit)) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC", "Europe/Berlin")),
    *((pa.decimal128(*size), decimals(*size)) for size in ((4, 0), (5, 2), (10, 2), (18, 0), (18, 9), (25, 5))),
    (pa.date32(), st.integers(-719_163, 2_932_897)),
    *((kind, TEXTS) for kind in (pa.string(), pa.string_view(), pa.large_string())),
    *((pa.binary(), st.binary(max_size=5)), (pa.binary(4), st.binary(min_size=4, max_size=4)), (pa.bool_(), st.booleans())),
    *((pa.float16(), st.floats(width=16, allow_nan=False)), (pa.float32(), st.floats(width=32, allow_nan=False))),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.list_(pa.int32()), st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=3)),
    (pa.list_(pa.field("element", pa.int16(), nullable=False)), st.lists(st.just(7), max_size=3)),
    (pa.list_(pa.string()), st.lists(st.none() | TEXTS, max_size=2)),
    (pa.list_(pa.timestamp("ms", "UTC")), st.lists(st.integers(0, 2**40), max_size=2)),
    (pa.null(), st.none()),
]


def array(draw: Any, kind: pa.DataType, values: list[Any]) -> pa.Array:
    if pa.types.is_temporal(kind):
        return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    if pa.types.is_list(kind) and pa.types.is_timestamp(kind.value_type):
        return pa.array(values, pa.list_(pa.int64())).cast(kind)
    made = pa.array(values, kind)
    return made.dictionary_encode() if kind in (pa.string(), pa.int64(), pa.uint16()) and draw(st.booleans()) else made


class Misfit(ValueError):
    """A value that its declared type does not have."""


def only_if(fits: bool, value: Any) -> Any:
    if not fits:
        raise Misfit
    return value


def expected(kind: pa.DataType, value: Any, declared: str) -> Any:
    if value is None:
        return None
    if pa.types.is_list(kind):
        return only_if(declared.startswith("array<"), [expected(kind.value_type, part, declared[6:-1]) for part in value])
    if pa.types.is_timestamp(kind):
        micros, rest = divmod(value, 1000) if kind.unit == "ns" else (value * MICROSECONDS[kind.unit], 0)
        is_near = YEAR_1 * 10**6 <= micros < YEAR_10000 * 10**6
        return only_if(declared == ("timestamp" if kind.tz else "timestamp_ntz") and is_near and not rest, micros)
    if pa.types.is_date(kind):
        return only_if(declared == "date" and -719_162 <= value <= 2_932_896, value)
    if isinstance(value, bytes) and declared == "string":
        return value.decode()
    if isinstance(value, bool | str | bytes):
        return only_if(declared == {bool: "boolean", str: "string", bytes: "binary"}[type(value)], value)
    return number(kind, value, declared)


def number(kind: pa.DataType, value: Any, declared: str) -> Any:
    if isinstance(value, float):
        return only_if(declared == "double" or (declared == "float" and not pa.types.is_float64(kind)), value)
    if declared in INTEGERS:
        limit = 2 ** (INTEGERS[declared] - 1)
        return only_if(value == int(value) and -limit <= value < limit, int(value))
    if declared.startswith("decimal"):
        digits, scale = map(int, declared[8:-1].split(","))
        found = Decimal(value).quantize(Decimal(1).scaleb(-scale), context=WIDE)
        return only_if(found == value and abs(found) < Decimal(10) ** (digits - scale), found)
    is_exact = isinstance(value, int) and int(float(value)) == value and (declared == "double" or abs(value) <= 2**24)
    return only_if(declared in ("double", "float") and is_exact, float(value))


def read_as(kind: pa.DataType, values: list[Any], declared: str) -> list[Any] | None:
    """Return values in their declared type; None if one does not fit."""
    try:
        return [expected(kind, value, declared) for value in values]
    except (Misfit, UnicodeError):
        return None


def plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return ((value.astimezone(UTC) if value.tzinfo else value).replace(tzinfo=None) - EPOCH) // timedelta(microseconds=1)
    if isinstance(value, date):
        return (value - FIRST_DAY).days
    return [plain(part) for part in value] if isinstance(value, list) else value


def write(draw: Any, table: pa.Table, path: Path, *, int96: bool) -> bool:
    """Write a file in a drawn way; return whether pyarrow has such files."""
    encodings = ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"]
    flat = [column.name for column in table.schema if not pa.types.is_nested(column.type)]
    encoding = {draw(st.sampled_from(flat)): draw(st.sampled_from(encodings))} if flat and not draw(st.integers(0, 2)) else None
    options: dict[str, Any] = {
        "compression": draw(st.sampled_from(["none", "snappy", "gzip", "zstd", "lz4", "brotli"])),
        "row_group_size": draw(st.sampled_from([1, 3, 100, 10_000])),
        "use_dictionary": not encoding and draw(st.booleans()),
        "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
        "version": draw(st.sampled_from(["1.0", "2.4", "2.6"])),
        "write_statistics": draw(st.booleans()),
        "store_schema": draw(st.booleans()),
        "data_page_size": draw(st.sampled_from([None, 64])),
    }
    try:
        pq.write_table(table, path, column_encoding=encoding, use_deprecated_int96_timestamps=int96, **options)
    except (pa.ArrowException, OSError):
        return False
    return True


def check(settings: Settings, spark: Any, draw: Any) -> str:
    """Draw a file with some columns, read it, and compare; return what became of it."""
    path, int96, rows = settings.home / "inbox" / "1.parquet", not draw(st.integers(0, 9)), draw(st.integers(0, 8))
    repeat = draw(st.sampled_from([1, 1, 60]))
    arrays, schema, due = {}, {}, []
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)):
        stored, drawn = draw(st.sampled_from(KINDS))
        some = (st.lists(each, min_size=rows, max_size=rows) for each in (drawn, st.none() | drawn, st.none()))
        values = draw(st.one_of(*some))
        arrays[name] = array(draw, stored, values * repeat)
        kind = pa.timestamp(stored.unit, "UTC") if int96 and pa.types.is_timestamp(stored) else stored
        known = [value for value in values if value is not None][:1]
        likely = [declared for declared in DECLARED if read_as(kind, known, declared) is not None]
        schema[name] = draw(st.sampled_from(likely if likely and draw(st.integers(0, 14)) else DECLARED))
        due.append(read_as(kind, values * repeat, schema[name]))
    stored_order = {name: arrays[name] for name in draw(st.permutations([*arrays]))}
    if not write(draw, pa.table({**stored_order, "not read": [None] * rows * repeat}), path, int96=int96):
        return "not written"
    source = Files("inbox", schema=schema, min_age_seconds=0)
    metadata = plan(settings, source)
    try:
        found = read(settings, source, metadata, spark=spark)
    except Exception as error:
        refusal = error if isinstance(error, MalformedRecord | SourceUnreadable) else reported_in(error)
        if refusal is None:
            raise
        assert str(path) in str(refusal)
        assert isinstance(refusal, SourceUnreadable) or any(name in str(refusal) for name in schema)
        return "refused"
    assert None not in due, "a value does not fit"
    there = [list(row) for row in zip(*filter(None, due), strict=True)]
    assert sorted(repr([plain(row[name]) for name in schema]) for row in found) == sorted(map(repr, there))
    return "equal"


def check_all(settings: Settings, spark: Any) -> None:
    (settings.home / "inbox").mkdir()
    outcomes: Counter[str] = Counter()
    draw_inputs(INPUTS, lambda draw: outcomes.update([check(settings, spark, draw)]))
    assert outcomes["equal"] > FITTING
    assert outcomes["refused"]


@pytest.mark.promise("limit:TASK_BYTES")
def test_our_tasks_read_drawn_parquet_files_as_they_are_or_refuse_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "TASK_BYTES", 1000)
    check_all(Settings(home=tmp_path, min_file_age_seconds=0), None)


@pytest.mark.soak
@pytest.mark.promise("name:Files")
def test_drawn_parquet_files_are_read_as_they_are_or_refused(settings: Settings) -> None:
    with spark_session(settings, "inbox") as spark:
        check_all(settings, spark)
