"""Decides how a Parquet column becomes a declared one: unchanged, widened without loss, or refused.

Spark's reader is used where it is known to return each value as it was written. Values that fit, but that it refuses, cuts off
or rounds, are read by `parquet_tasks`: unsigned numbers, nanoseconds that are whole microseconds, INT96, wider numbers. This
module chooses between the two for each batch, by the footers alone.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from tidegate.jobs.sources.column_types import in_another_case
from tidegate.jobs.sources.files.formats.records.text_records import MAX_RECORD_BYTES
from tidegate.jobs.sources.files.partition_columns import IN_THE_FILES
from tidegate.jobs.sources.files.stores.object_places import Place, for_arrow
from tidegate.state_store.base.errors import DeclarationInvalid, MalformedRecord, SourceUnreadable

# Known to be readable by Spark, which has no library for other codecs, and no decoder for other encodings.
_CODECS = frozenset({"UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD"})
_ENCODINGS = frozenset(
    {
        *("PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"),
        *("DELTA_BINARY_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"),
    }
)
# What marks dates before 1582 and times before 1900 as old Spark's, in another calendar, by whether a column is INT96: a key,
# or an earlier version than this one. Spark's reader compares versions as texts, too.
_LEGACY = {False: (b"org.apache.spark.legacyDateTime", b"3.0.0"), True: (b"org.apache.spark.legacyINT96", b"3.1.0")}
_OF_TIME = re.compile(r"(?:date32|timestamp)\[")
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}
# Spark's reader keeps 4,096 rows of a row group in memory. In a group that is larger than a record may be, and whose rows are
# as long as this on average, it could need more than there is.
LONG_ROW_BYTES = 8 * 1024
# So often a value may be in its column: headers of pages repeat it, as the least and the greatest one.
_TIMES = 8
_ADVICE = "Declare the column so that every value fits, or write the file again."


@dataclass(frozen=True)
class Footer:
    """Facts from a footer: rows and bytes per row group, INT96 columns, whether Spark's reader would not do (needs_care).

    The bytes are those of the declared columns before compression; a value that is repeated may count once. `legacy` are
    columns with an old Spark's calendar, `names` all columns of the file.
    """

    rows: list[int]
    bytes: list[int]
    needs_care: bool
    int96: frozenset[str]
    legacy: frozenset[str]
    names: tuple[str, ...]


def arrow_types(schema: T.StructType) -> dict[str, pa.DataType]:
    """Return the declared columns' Arrow types.

    Raises: DeclarationInvalid for a type that no Parquet file can be read as.
    """
    types = {}
    for column in schema:
        try:
            types[column.name] = to_arrow_type(column.dataType, timezone="UTC")
        except PySparkException as error:
            raise DeclarationInvalid(
                f"Column {column.name} cannot be read from Parquet as {column.dataType.simpleString()}. Declare another type."
            ) from error
    return types


def count_rows(path: Place) -> int:
    """Return the number of rows in a file, by its footer.

    Raises: SourceUnreadable.
    """
    with _open(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _open(path: Place) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(for_arrow(path)) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise SourceUnreadable(
            f"{path} is not a whole Parquet file that can be read: {str(error).splitlines()[0]}. Write it again."
        ) from error


def read_footer(
    path: Place,
    types: dict[str, pa.DataType],
    declared: Mapping[str, str],
    partitions: Collection[str] = (),
    advice: str = "",
    *,
    may_lack: Collection[str] = (),
) -> Footer:
    """Read a footer and compare its columns with the declared ones, by name; other columns are ignored.

    `partitions` are the columns in the names of folders; `advice` is added to the error for a missing column. Those that the
    file `may_lack` are NULL instead.

    Raises: MalformedRecord if a declared column is missing, present twice, or of a type that does not fit without loss;
    SourceUnreadable.
    """
    with _open(path) as file:
        schema, metadata, leaves = file.schema_arrow, file.metadata, file.schema
    types = _without_lacking(types, schema.names, may_lack)
    _check_names(path, schema.names, types, partitions, advice)
    places = {leaves.column(number).path: number for number in range(len(leaves))}
    all_int96 = {number for number in places.values() if leaves.column(number).physical_type == "INT96"}
    int96 = frozenset(name for name in types if places.get(name) in all_int96)
    columns = {name: pa.timestamp("ns", "UTC") if name in int96 else schema.field(name).type for name in types}
    for name, kind in types.items():
        if name not in int96 and not all_int96.isdisjoint(_leaves_of(name, places)):
            raise _misfit(path, name, "INT96 inside a nested value", kind, declared[name])
        if not _fits(columns[name], kind):
            raise _misfit(path, name, str(columns[name]), kind, declared[name])
    lower = [name.lower() for name in schema.names]
    needs_care = (
        any(
            not _is_native(columns[name], kind) or _may_have_far_times(metadata, places.get(name), kind)
            for name, kind in types.items()
        )
        or any(lower.count(name.lower()) > 1 for name in types)  # Spark ignores case
        or not _can_be_decoded(metadata, {leaf for name in types for leaf in _leaves_of(name, places)})
    )
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    sizes = [_size(f"{path}, row group {n + 1}", metadata.row_group(n), types, places) for n in range(len(rows))]
    needs_care |= any(size > max(MAX_RECORD_BYTES, LONG_ROW_BYTES * count) for size, count in zip(sizes, rows, strict=True))
    return Footer(rows, sizes, needs_care, int96, _legacy(metadata.metadata or {}, types, int96), tuple(schema.names))


def _legacy(facts: Mapping[bytes, bytes], types: Mapping[str, pa.DataType], int96: Collection[str]) -> frozenset[str]:
    of_time = {name for name, kind in types.items() if _OF_TIME.search(str(kind))}
    return frozenset(name for name in of_time if _is_legacy(facts, is_int96=name in int96))


def _is_legacy(facts: Mapping[bytes, bytes], *, is_int96: bool) -> bool:
    key, first = _LEGACY[is_int96]
    return key in facts or facts.get(b"org.apache.spark.version", first) < first


def _size(place: str, group: pq.RowGroupMetaData, names: Iterable[str], places: dict[str, int]) -> int:
    """Return the bytes of these columns in a row group before compression.

    Raises: MalformedRecord if its rows are certainly longer than a record may be.
    """
    sizes = {name: sum(group.column(leaf).total_uncompressed_size for leaf in _leaves_of(name, places)) for name in names}
    if sum(sizes.values()) > _TIMES * MAX_RECORD_BYTES * max(1, group.num_rows):
        raise MalformedRecord(f"{place}: {too_long(sizes, group.num_rows)}")
    return sum(sizes.values())


def too_long(sizes: Mapping[str, int], rows: int = 1) -> str:
    """Return the reason why rows of these bytes by column are refused."""
    longest = max(sizes, key=lambda name: sizes[name])
    return (
        f"{'the row has' if rows == 1 else f'its {rows} rows have'} {sum(sizes.values())} bytes, of which {sizes[longest]} are "
        f"in column {longest}, and a record has at most {MAX_RECORD_BYTES}. Write shorter values, or leave the column out of "
        "the schema."
    )


def _can_be_decoded(metadata: pq.FileMetaData, leaves: Collection[int]) -> bool:
    """Return whether Spark knows the codecs and the encodings of these columns in all row groups."""
    chunks = (metadata.row_group(group).column(leaf) for group in range(metadata.num_row_groups) for leaf in leaves)
    return all(chunk.compression in _CODECS and _ENCODINGS.issuperset(chunk.encodings) for chunk in chunks)


def _check_names(path: Place, names: list[str], declared: Iterable[str], partitions: Collection[str], advice: str) -> None:
    if twice := [name for name in partitions if name in names]:
        raise MalformedRecord(f"{path}: it has the column {twice[0]}, and so has the name of a folder. {IN_THE_FILES}")
    if missing := [name for name in declared if name not in names]:
        hint = in_another_case(missing, names) or f"; it has {', '.join(names[:20])}"
        raise MalformedRecord(
            f"{path}: column {', '.join(missing)} of the schema is missing{hint}. Correct the schema and raise the pipeline's "
            f"version, or write the file with it.{advice}"
        )
    if twice := [name for name in declared if names.count(name) > 1]:
        raise MalformedRecord(
            f"{path}: column {twice[0]} is there {names.count(twice[0])} times, so nothing tells which one is meant. Write the "
            "file with names of their own, or leave the column out of the schema."
        )


def _without_lacking(types: dict[str, pa.DataType], names: list[str], may_lack: Collection[str]) -> dict[str, pa.DataType]:
    """Return the columns that a file has or must have; one in another case is there, as Spark would take it for the same."""
    lower = {name.lower() for name in names}
    return {name: kind for name, kind in types.items() if name not in may_lack or name.lower() in lower}


def _misfit(path: Place, name: str, stored: str, kind: pa.DataType, declared: str) -> MalformedRecord:
    advice = "A UUID is 16 bytes and no text: declare binary, or write texts." if "arrow.uuid" in stored else _ADVICE
    if "timestamp" in stored and pa.types.is_timestamp(kind):
        advice = (
            "A time without a zone is no instant: declare the column timestamp_ntz, or write it with a zone."
            if kind.tz
            else "It is an instant, with a zone: declare the column timestamp."
        )
    return MalformedRecord(
        f"{path}: column {name} is {stored}, and the schema says {declared}: that could lose something. {advice}"
    )


def _leaves_of(name: str, places: dict[str, int]) -> Iterator[int]:
    return (number for path, number in places.items() if path == name or path.startswith(f"{name}."))


def _may_have_far_times(metadata: pq.FileMetaData, place: int | None, kind: pa.DataType) -> bool:
    """Return whether a column may have dates or times that Python lacks: before the year 1, or after 9999."""
    if place is None or not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        return False
    for group in range(metadata.num_row_groups):
        chunk = metadata.row_group(group).column(place)
        statistics = chunk.statistics
        if statistics is None:
            return True
        if statistics.has_null_count and statistics.null_count == chunk.num_values:
            continue
        try:
            if not statistics.has_min_max or statistics.min is None or statistics.max is None:
                return True
        except (ValueError, OverflowError):
            return True
    return False


def _is_native(stored: Any, kind: Any) -> bool:
    """Return whether Spark's reader returns this type unchanged."""
    if isinstance(stored, pa.BaseExtensionType) or pa.types.is_null(stored) or pa.types.is_time(stored):
        return False
    if pa.types.is_dictionary(stored):
        return _is_native(stored.value_type, kind)
    if pa.types.is_nested(stored):
        return _all_inside(_is_native, stored, kind)
    if _is_text(stored):
        return bool(pa.types.is_string(kind))
    if _is_binary(stored):
        return bool(pa.types.is_binary(kind))
    if pa.types.is_timestamp(stored):
        return stored.unit in ("ms", "us") and _time_fits(stored, kind)
    if pa.types.is_decimal(stored):
        return pa.types.is_decimal(kind) and (stored.precision, stored.scale) == (kind.precision, kind.scale)
    return bool(stored == kind)


def _fits(stored: Any, kind: Any) -> bool:
    """Return whether values of a type fit a declared one; some types are also checked value by value."""
    if isinstance(stored, pa.BaseExtensionType):
        return _storage_fits(stored, kind)
    if pa.types.is_dictionary(stored):
        return _fits(stored.value_type, kind)
    if pa.types.is_null(stored) or stored == kind:
        return True
    if pa.types.is_integer(stored):
        return _integer_fits(stored, kind)
    if pa.types.is_floating(stored):
        return bool(pa.types.is_floating(kind) and stored.bit_width <= kind.bit_width)
    if pa.types.is_decimal(stored):
        return _decimal_fits(stored, kind)
    if pa.types.is_temporal(stored):
        return _time_fits(stored, kind)
    if _is_text(stored):
        return bool(pa.types.is_string(kind))
    if _is_binary(stored):  # old writers do not mark texts as text
        return bool(pa.types.is_binary(kind) or pa.types.is_string(kind))
    return _all_inside(_fits, stored, kind)


def _storage_fits(stored: Any, kind: Any) -> bool:
    return _fits(stored.storage_type, kind) and not (stored == pa.uuid() and pa.types.is_string(kind))


def _all_inside(holds: Callable[[Any, Any], bool], stored: Any, kind: Any) -> bool:
    """Return whether nested types have the same shape, and `holds` is true of each pair of types inside."""
    if _is_list(stored):
        return _is_list(kind) and holds(stored.value_type, kind.value_type)
    if pa.types.is_map(stored):
        return pa.types.is_map(kind) and holds(stored.key_type, kind.key_type) and holds(stored.item_type, kind.item_type)
    if pa.types.is_struct(stored):
        return (
            pa.types.is_struct(kind)
            and [field.name for field in stored] == [field.name for field in kind]
            and all(holds(one.type, other.type) for one, other in zip(stored, kind, strict=True))
        )
    return False


def _time_fits(stored: Any, kind: Any) -> bool:
    if pa.types.is_timestamp(stored):
        return pa.types.is_timestamp(kind) and bool(stored.tz) == bool(kind.tz)
    return bool(pa.types.is_date(stored) and pa.types.is_date(kind))


def _integer_fits(stored: Any, kind: Any) -> bool:
    is_signed = pa.types.is_signed_integer(stored)
    if pa.types.is_integer(kind):
        # No larger integer type takes a uint64, so it is checked value by value.
        return bool(
            stored.bit_width <= kind.bit_width if is_signed else stored.bit_width < kind.bit_width or kind.bit_width == 64
        )
    if pa.types.is_decimal(kind):
        digits = 19 if is_signed and stored.bit_width == 64 else _DIGITS[stored.bit_width]
        return _digits_fit(digits, 0, kind)
    return bool(pa.types.is_floating(kind) and 2 * stored.bit_width <= kind.bit_width)


def _decimal_fits(stored: Any, kind: Any) -> bool:
    if pa.types.is_integer(kind):
        return bool(stored.scale == 0 and stored.precision < _DIGITS[kind.bit_width])
    return pa.types.is_decimal(kind) and _digits_fit(stored.precision - stored.scale, stored.scale, kind)


def _digits_fit(before: int, after: int, kind: Any) -> bool:
    return bool(before <= kind.precision - kind.scale and after <= kind.scale)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
