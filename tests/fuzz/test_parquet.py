"""Random odd Parquet files are read as pyarrow and Python read them, or refused.

Types, encodings, codecs, row groups, NULLs, page versions, dictionaries, INT96 and declared types are drawn; the oracle
converts each value on its own with Python's numbers. SOAK=1 draws many more; SEED=... draws others.
"""

import os
import random
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sources.in_process import by_own_tasks
from tests.store import Attempt
from tidegate.jobs import Files
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.spark.task_errors import reported_in
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import MalformedRecord, SourceUnreadable

INPUTS = int(os.environ.get("FUZZ_INPUTS", "3000" if os.environ.get("SOAK") else "80"))
SEED = int(os.environ.get("SEED", "1"))
EPOCH, FIRST_DAY = datetime(1970, 1, 1), date(1970, 1, 1)
MICROSECONDS = {"s": 10**6, "ms": 1000, "us": 1}
CODECS = ["none", "snappy", "gzip", "zstd", "lz4", "brotli"]
# Stored types and the declared types that must read them exactly; other pairs may be refused, but not misread.
INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
DECLARED = [
    *INTEGERS,
    *("float", "double", "string", "binary", "boolean", "date", "timestamp", "timestamp_ntz"),
    *("decimal(5,0)", "decimal(10,2)", "decimal(20,0)", "decimal(38,18)", "array<int>", "array<bigint>", "array<string>"),
    "array<timestamp>",
]


class Unequal(AssertionError):
    """A value was read as another value."""


def integers(draw: random.Random, bits: int, *, is_signed: bool) -> Callable[[], int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    return lambda: draw.choice([low, high, 0, 1, draw.randint(low, high), min(high, draw.randint(0, 99))])


def ticks(draw: random.Random, unit: str) -> Callable[[], int]:
    """Return a function that draws times: some before 1582, some far away, some with nanoseconds."""
    if unit == "ns":
        return lambda: draw.choice([draw.randint(-(2**62), 2**62), 1000 * draw.randint(-(2**52), 2**52), 0, 1])
    per_second = 10**6 // MICROSECONDS[unit]
    years = [-62_135_596_800, -12_219_292_800, 0, 1_700_000_000, 253_402_300_799, 253_402_300_800, -62_135_596_801]
    return lambda: (
        draw.choice([draw.choice(years), draw.randint(years[0], years[4])]) * per_second
        + draw.choice([0, draw.randrange(per_second)])
    )


def column(draw: random.Random, rows: int) -> tuple[pa.Array, list[Any]]:
    """Draw a type and values of it; the second result is plain: numbers, texts, and times as numbers of their unit."""
    kind, value = draw.choice(kinds(draw))
    nulls = draw.choice([0, 0.1, 1])
    values = [None if draw.random() < nulls else value() for _ in range(rows)]
    if pa.types.is_temporal(kind):
        whole = pa.int32() if kind.bit_width == 32 else pa.int64()
        return pa.array(values, whole).view(kind), values
    if pa.types.is_list(kind):
        if pa.types.is_timestamp(kind.value_type):
            return pa.array(values, pa.list_(pa.int64())).cast(kind), values
        return pa.array(values, kind), values
    found = pa.array(values, kind)
    if draw.random() < 0.2 and (pa.types.is_string(kind) or pa.types.is_integer(kind)):
        found = found.dictionary_encode()
    return found, values


def kinds(draw: random.Random) -> list[tuple[pa.DataType, Callable[[], Any]]]:
    texts = ["", "a", "a", "é\U0001f30a", "x" * 300, "NULL", "2024-01-01", "1"]
    whole: list[tuple[pa.DataType, Callable[[], Any]]] = [
        (getattr(pa, f"{'' if is_signed else 'u'}int{bits}")(), integers(draw, bits, is_signed=is_signed))
        for bits in (8, 16, 32, 64)
        for is_signed in (True, False)
    ]
    times: list[tuple[pa.DataType, Callable[[], Any]]] = [
        (pa.timestamp(unit, zone), ticks(draw, unit))
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC", "Europe/Berlin")
    ]
    decimals: list[tuple[pa.DataType, Callable[[], Any]]] = [
        (pa.decimal128(p, s), lambda p=p, s=s: Decimal(draw.randint(-(10**p) + 1, 10**p - 1)).scaleb(-s))  # type: ignore[misc]
        for p, s in ((4, 0), (5, 2), (10, 2), (18, 0), (18, 9), (25, 5))
    ]
    return [
        *whole,
        *times,
        *decimals,
        (
            pa.date32(),
            lambda: draw.choice([0, -719_162, 2_932_896, -141_428, 2_932_897, -719_163, draw.randint(-700_000, 90_000)]),
        ),
        (pa.string(), lambda: draw.choice(texts)),
        (pa.string_view(), lambda: draw.choice(texts)),
        (pa.large_string(), lambda: draw.choice(texts)),
        (pa.binary(), lambda: draw.choice([b"", b"a", b"\xff\x00", b"text"])),
        (pa.binary(4), lambda: draw.randbytes(4)),
        (pa.bool_(), lambda: draw.random() < 0.5),
        (pa.float16(), lambda: draw.choice([0.0, -0.5, 1.5, float("inf"), 65504.0])),
        (pa.float32(), lambda: draw.choice([0.0, 0.5, -1.25, float("inf"), 2.0**100])),
        (pa.float64(), lambda: draw.choice([0.1, 5e-324, float("-inf"), draw.random()])),
        (pa.list_(pa.int32()), lambda: [draw.choice([None, 1, -(2**31)]) for _ in range(draw.randint(0, 3))]),
        (pa.list_(pa.field("element", pa.int16(), nullable=False)), lambda: [7] * draw.randint(0, 3)),
        (pa.list_(pa.string()), lambda: [draw.choice([None, "", "a"]) for _ in range(draw.randint(0, 2))]),
        (pa.list_(pa.timestamp("ms", "UTC")), lambda: [draw.randrange(2**40) for _ in range(draw.randint(0, 2))]),
        (pa.null(), lambda: None),
    ]


def expected(kind: pa.DataType, value: Any, declared: str) -> Any:  # noqa: PLR0912 - a table of types
    """Return a value in its declared type.

    Raises: ValueError if it does not fit.
    """
    if value is None or pa.types.is_null(kind):
        return None
    if pa.types.is_dictionary(kind):
        return expected(kind.value_type, value, declared)
    if pa.types.is_list(kind):
        if not declared.startswith("array<"):
            raise ValueError("a list")
        return [expected(kind.value_type, part, declared[6:-1]) for part in value]
    if pa.types.is_timestamp(kind):
        if declared != ("timestamp" if kind.tz else "timestamp_ntz"):
            raise ValueError("another kind of moment")
        micros, rest = (value, 0) if kind.unit != "ns" else divmod(value, 1000)
        micros *= MICROSECONDS.get(kind.unit, 1)
        if rest or not -62_135_596_800_000_000 <= micros <= 253_402_300_799_999_999:
            raise ValueError("nanoseconds, or a far year")
        return micros
    if pa.types.is_date(kind):
        if declared != "date" or not -719_162 <= value <= 2_932_896:
            raise ValueError("no date")
        return value
    if pa.types.is_boolean(kind) or declared == "boolean":
        if not (pa.types.is_boolean(kind) and declared == "boolean"):
            raise ValueError("no truth value")
        return value
    if isinstance(value, int | Decimal) and (declared in INTEGERS or declared.startswith("decimal")):
        return _exact_number(value, declared)
    if isinstance(value, int) and declared in ("float", "double"):
        if int(float(value)) != value or (declared == "float" and abs(value) > 2**24):
            raise ValueError("rounded")
        return float(value)
    if isinstance(value, float) and declared in ("float", "double"):
        if declared == "float" and pa.types.is_float64(kind):
            raise ValueError("narrower")
        return value
    if isinstance(value, str) and declared == "string":
        return value
    if isinstance(value, bytes) and declared in ("string", "binary"):
        return value if declared == "binary" else value.decode()
    raise ValueError("another type")


def read_as(kind: pa.DataType, values: list[Any], declared: str) -> list[Any] | None:
    """Return values in their declared type; None if one does not fit."""
    try:
        return [expected(kind, value, declared) for value in values]
    except ValueError:
        return None


def _exact_number(value: int | Decimal, declared: str) -> int | Decimal:
    if declared in INTEGERS:
        bits = INTEGERS[declared]
        if value != int(value) or not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise ValueError("out of range")
        return int(value)
    precision, scale = map(int, declared[8:-1].split(","))
    found = Decimal(value)
    if abs(found) >= Decimal(10) ** (precision - scale) or -found.as_tuple().exponent > scale:  # type: ignore[operator]
        raise ValueError("digits")
    return found.quantize(Decimal(1).scaleb(-scale), context=Context(prec=60))


def plain(value: Any) -> Any:
    if isinstance(value, datetime):
        gone = value.astimezone(UTC).replace(tzinfo=None) - EPOCH if value.tzinfo else value - EPOCH
        return gone.days * 86_400 * 10**6 + gone.seconds * 10**6 + gone.microseconds
    if isinstance(value, date):
        return (value - FIRST_DAY).days
    return [plain(part) for part in value] if isinstance(value, list) else value


class Fuzzer:
    """Writes files, has each read as a batch, and compares."""

    def __init__(self, settings: Settings, spark: Any, seed: int) -> None:
        self.settings, self.spark, self.seed = settings, spark, seed
        self.outcomes = {"equal": 0, "refused": 0}

    def one(self) -> None:
        """Draw a file with some columns, and read it.

        Raises: Unequal.
        """
        draw = random.Random(self.seed)
        rows = draw.choice([0, 1, 2, 5, 50, 500])
        columns = [column(draw, rows) for _ in range(draw.randint(1, 4))]
        names = draw.sample(["a", "b", "a.b", "c`d", "E", "e f", "txid"], len(columns))
        table = pa.table({name: array for name, (array, _) in zip(names, columns, strict=True)})
        path = self.settings.home / "inbox" / "1.parquet"
        int96 = draw.random() < 0.1
        try:
            self._write(draw, table, path, int96=int96)
        except (pa.ArrowException, OSError):
            return  # pyarrow has no such file
        schema: dict[str, str] = {}
        due: list[list[Any] | None] = []
        for name, (array, values) in draw.sample(list(zip(names, columns, strict=True)), draw.randint(1, len(names))):
            kind = pa.timestamp(array.type.unit, "UTC") if int96 and pa.types.is_timestamp(array.type) else array.type
            known = [value for value in values if value is not None][:1]
            likely = [] if draw.random() < 0.07 else [each for each in DECLARED if read_as(kind, known, each) is not None]
            schema[name] = draw.choice(likely or DECLARED)
            due.append(read_as(kind, values, schema[name]))
        self._compare(path, schema, due, f"seed {self.seed}: {table.schema} as {schema}, int96={int96}")

    def _write(self, draw: random.Random, table: pa.Table, path: Path, *, int96: bool) -> None:
        path.unlink(missing_ok=True)
        plain_names = [n for n in table.schema.names if not any(map(pa.types.is_nested, [table.schema.field(n).type]))]
        encodings = ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"]
        encoding = {draw.choice(plain_names): draw.choice(encodings)} if plain_names and draw.random() < 0.3 else None
        pq.write_table(
            table, path, compression=draw.choice(CODECS), row_group_size=draw.choice([1, 3, 100, 10_000]),
            use_dictionary=False if encoding else draw.random() < 0.6, column_encoding=encoding,
            data_page_version=draw.choice(["1.0", "2.0"]), version=draw.choice(["1.0", "2.4", "2.6"]),
            write_statistics=draw.random() < 0.8, store_schema=draw.random() < 0.7,
            use_deprecated_int96_timestamps=int96, data_page_size=draw.choice([None, 64]),
        )  # fmt: skip

    def _compare(self, path: Path, schema: dict[str, str], columns: list[list[Any] | None], case: str) -> None:
        source = Files("inbox", schema=schema, min_age_seconds=0)
        metadata = coordinator_of(source, self.settings).initialize_transaction(1, None, None)
        assert metadata is not None
        emitter = emitter_of(source, self.spark, self.settings)
        attempt = Attempt("inbox", 1, 1, metadata)
        try:
            if self.spark is None:
                found = [[plain(value) for value in row.values()] for row in by_own_tasks(emitter, attempt, metadata)]
            else:
                rows = emitter.emit_batch(attempt, metadata)
                found = [[plain(row[name]) for name in range(len(schema))] for row in rows.collect()]
        except Exception as error:
            refusal = error if isinstance(error, (MalformedRecord, SourceUnreadable)) else reported_in(error)
            if refusal is None:
                raise Unequal(f"{case}: {type(error).__name__}: {error}") from error
            assert str(path) in str(refusal), case
            assert isinstance(refusal, SourceUnreadable) or any(name in str(refusal) for name in schema), case
            self.outcomes["refused"] += 1
            return
        if None in columns:
            raise Unequal(f"{case}: read, though a value does not fit")
        there = [list(row) for row in zip(*filter(None, columns), strict=True)]
        if sorted(map(repr, found)) != sorted(map(repr, there)):
            raise Unequal(f"{case}: {found[:3]} ... where {there[:3]} ... was expected")
        if emitter.expected_rows(metadata) != len(there):
            raise Unequal(f"{case}: {emitter.expected_rows(metadata)} rows expected, {len(there)} there")
        self.outcomes["equal"] += 1


def test_our_tasks_read_drawn_parquet_files_as_they_are_or_refuse_them(tmp_path: Path) -> None:
    check(Fuzzer(Settings(home=tmp_path, min_file_age_seconds=0), None, SEED))


@pytest.mark.soak
@pytest.mark.promise("name:Files")
def test_drawn_parquet_files_are_read_as_they_are_or_refused(settings: Settings) -> None:
    with spark_session(settings, "inbox") as spark:
        check(Fuzzer(settings, spark, SEED))


def check(fuzzer: Fuzzer) -> None:
    """Read as many files as are asked for, and show what was found."""
    (fuzzer.settings.home / "inbox").mkdir()
    failures = []
    for seed in range(SEED * 1_000_000, SEED * 1_000_000 + INPUTS):
        fuzzer.seed = seed
        try:
            fuzzer.one()
        except AssertionError as error:
            failures.append(str(error))
    if failures:
        pytest.fail(f"{len(failures)} of {INPUTS}, {fuzzer.outcomes}:\n" + "\n".join(failures[:25]))
    assert fuzzer.outcomes["equal"] > INPUTS // 4
    assert fuzzer.outcomes["refused"]
