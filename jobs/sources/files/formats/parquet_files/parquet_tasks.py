"""Reads Parquet files exactly where Spark's reader would refuse, round or cut off values.

A value that does not fit its declared type ends the query, or its row is flagged with the reason.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.jobs.sources.files.formats.file_part_tasks import SHOWN_RECORD_CHARACTERS, TaskReader, flagged_batch, malformed
from tidegate.jobs.sources.files.formats.parquet_files.parquet_footers import too_long
from tidegate.jobs.sources.files.formats.records.text_records import MAX_RECORD_BYTES
from tidegate.jobs.sources.files.stores.object_places import Place, for_arrow
from tidegate.state_store.base.errors import MalformedRecord, SourceUnreadable
from tidegate.state_store.declarations.column_spec import DAYS, TICKS

BATCH_ROWS = 10_000
_DICTIONARIES = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY"})
# The year 1900, in days and in microseconds: earlier times that an old version of Spark wrote are in another calendar.
_YEAR_1900 = (-25_567, -2_208_988_800_000_000)
_OF_OLD_SPARK = ": of what Spark wrote before 3.1, no time before 1900 is read here. Write the file again by a later version"


@dataclass(frozen=True)
class RowGroups:
    """A row group of one file, with its first row's number and its bytes; `legacy` are columns in an old calendar.

    `values` are those of the columns that are not in the file.
    """

    path: Place
    name: str
    values: dict[str, pa.Array]
    groups: tuple[int, ...]
    first_row: int
    rows: int
    bytes: int
    int96: frozenset[str]
    legacy: frozenset[str]


@dataclass(frozen=True)
class RowsReader(TaskReader):
    """Reads rows as the declared types."""

    types: dict[str, pa.DataType]
    declared: dict[str, str]
    flagged: bool

    def read(self, part: RowGroups) -> Iterator[pa.RecordBatch]:
        """Read one part."""
        row = part.first_row
        batches = _batches(part, {name: kind for name, kind in self.types.items() if name not in part.values})
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (OSError, pa.ArrowException) as error:
                reason = str(error).partition("\n")[0]
                unreadable = f"{part.path} cannot be read: {reason}. Write the file again, in a usual encoding."
                raise SourceUnreadable(unreadable) from error
            for start, length in _pieces(part, batch, row):
                yield self._converted(part, _decoded(batch.slice(start, length)), row + start)
            row += batch.num_rows

    def _converted(self, part: RowGroups, batch: pa.RecordBatch, row: int) -> pa.RecordBatch:
        columns: dict[str, pa.Array] = {}
        bad: dict[int, str] = {}
        for name, kind in self.types.items():
            if name in part.values:
                columns[name] = pa.repeat(part.values[name][0], batch.num_rows)
                continue
            columns[name], refused = convert(batch.column(name), kind, is_legacy=name in part.legacy)
            why = _OF_OLD_SPARK if name in part.legacy and refused else ""
            for number in refused:
                value = _shown_value(batch, name, number, kind)
                bad.setdefault(number, f"column {name}: {value} does not fit {self.declared[name]}{why}")
        if not self.flagged:
            if bad:
                first = min(bad)
                raise malformed(f"{part.path}, row {row + first}", bad[first], self._payload(part, batch, first))
            return pa.RecordBatch.from_pydict(columns)
        origins = [f"{part.name}, row {number}" for number in range(row, row + batch.num_rows)]
        return flagged_batch(columns, bad, origins, lambda number: self._payload(part, batch, number))

    def _payload(self, part: RowGroups, batch: pa.RecordBatch, number: int) -> str:
        """Return the row as JSON, with all values in full and those of its folders' names."""
        values = {name: _value_of(batch, name, number, self.types[name]) for name in batch.schema.names}
        for name in part.legacy:  # a replay would take its days for those of our calendar
            if convert(batch.column(name).slice(number, 1), self.types[name], is_legacy=True)[1]:
                values[name] = f"{values[name]} in another calendar"
        return json.dumps({**values, **{name: _json_of(value[0]) for name, value in part.values.items()}})


def convert(stored: pa.Array, kind: pa.DataType, *, is_legacy: bool = False) -> tuple[pa.Array, list[int]]:
    """Return values in the declared type, and the indexes of those that do not fit it without loss; these are NULL."""
    if isinstance(stored, pa.ExtensionArray):
        stored = stored.storage
    try:
        column = _cast(stored, kind, is_legacy)
    except pa.ArrowInvalid:
        if len(stored) == 1:
            return pa.nulls(1, kind), [0]
        half = len(stored) // 2
        left, bad = convert(stored[:half], kind, is_legacy=is_legacy)
        right, more = convert(stored[half:], kind, is_legacy=is_legacy)
        return pa.concat_arrays([left, right]), bad + [half + number for number in more]
    return column, []


def _cast(stored: pa.Array, kind: pa.DataType, is_legacy: bool) -> pa.Array:
    """Cast values, all of them or none.

    Raises: pyarrow.ArrowInvalid.
    """
    if pa.types.is_timestamp(kind) and pa.types.is_timestamp(stored.type) and stored.type.tz and stored.type.tz != "UTC":
        stored = stored.cast(pa.timestamp(stored.type.unit, "UTC"))
    if stored.type != kind:
        stored = stored.cast(kind)
    elif pa.types.is_string(kind):
        stored.validate(full=True)  # finds text that is not UTF-8, with its row
    _check_years(stored, is_legacy)
    return stored


def _check_years(column: pa.Array, is_legacy: bool) -> None:
    """Check the years of dates and times, also inside nested values.

    Raises: pyarrow.ArrowInvalid.
    """
    kind = column.type
    if pa.types.is_map(kind):
        _check_years(column.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))), is_legacy)
    elif pa.types.is_nested(kind):
        for part in column.flatten() if pa.types.is_struct(kind) else [column.flatten()]:
            _check_years(part, is_legacy)
    elif pa.types.is_date(kind):
        _check_bounds(column.view(pa.int32()), _YEAR_1900[0] if is_legacy else DAYS[0], DAYS[1])
    elif pa.types.is_timestamp(kind):
        _check_bounds(column.view(pa.int64()), _YEAR_1900[1] if is_legacy else TICKS[0], TICKS[1])


def _check_bounds(ticks: pa.Array, first: int, last: int) -> None:
    bounds = pc.min_max(ticks).as_py()
    if bounds["min"] is not None and not (first <= bounds["min"] and bounds["max"] <= last):
        raise pa.ArrowInvalid("a year that not all can read")


def _batches(part: RowGroups, types: dict[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches. Texts are as the file has them: one that many rows have is in memory once."""
    names = list(types)
    with pq.ParquetFile(for_arrow(part.path)) as file:
        group = file.metadata.row_group(part.groups[0])
        chunks = [group.column(number) for number in range(group.num_columns)]
        small = [chunk for chunk in chunks if chunk.total_uncompressed_size <= MAX_RECORD_BYTES]  # others have few repetitions
        repeated = {chunk.path_in_schema for chunk in small if not _DICTIONARIES.isdisjoint(chunk.encodings)}
        texts = [field.name for field in file.schema_arrow if field.name in repeated and _is_text(field.type)]
    rows_at_once = max(1, min(BATCH_ROWS, MAX_RECORD_BYTES * part.rows // max(1, part.bytes)))
    with pq.ParquetFile(for_arrow(part.path), coerce_int96_timestamp_unit="us", read_dictionary=texts) as file:
        batches = file.iter_batches(rows_at_once, row_groups=list(part.groups), columns=names)
        if not part.int96:
            yield from (_completed(batch, types) for batch in batches)
            return
        int96 = sorted(part.int96)
        with pq.ParquetFile(for_arrow(part.path)) as again:
            exact = again.iter_batches(rows_at_once, row_groups=list(part.groups), columns=int96)
            for batch, nanoseconds in zip(batches, exact, strict=True):
                instants = {name: _instants_of_int96(batch.column(name), nanoseconds.column(name)) for name in int96}
                columns = {name: batch.column(name) for name in batch.schema.names}
                yield _completed(pa.RecordBatch.from_pydict(columns | instants), types)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _pieces(part: RowGroups, batch: pa.RecordBatch, row: int) -> Iterator[tuple[int, int]]:
    """Yield first row and number of rows of pieces of a batch, none of which has more bytes than a record may have.

    Raises: MalformedRecord for a longer row.
    """
    sizes = {name: _bytes_of_rows(batch.column(name)) for name in batch.schema.names}
    ends = np.cumsum(np.sum(list(sizes.values()), axis=0)) if sizes else np.zeros(batch.num_rows)
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        if ends[start] - before > MAX_RECORD_BYTES:
            reason = too_long({name: int(each[start]) for name, each in sizes.items()})
            raise MalformedRecord(f"{part.path}, row {row + start}: {reason}")
        end = int(np.searchsorted(ends, before + MAX_RECORD_BYTES, side="right"))
        yield start, end - start
        start = end


def _bytes_of_rows(column: pa.Array) -> Any:
    """Return the bytes of each value; of nested ones exactly only if one may be too long."""
    kind = column.type
    if pa.types.is_dictionary(kind) and _is_text(kind.value_type):
        lengths = pc.binary_length(column.dictionary).take(column.indices)
    elif _is_text(kind):
        lengths = pc.binary_length(column)
    elif column.nbytes > MAX_RECORD_BYTES:
        lengths = pa.array([column.slice(row, 1).nbytes for row in range(len(column))])
    else:
        return np.full(len(column), column.nbytes // max(1, len(column)))
    return lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with each text in full."""
    columns = [column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _completed(batch: pa.RecordBatch, types: dict[str, pa.DataType]) -> pa.RecordBatch:
    """Return rows with NULL in the columns that their file lacks, where the source allows that."""
    lacking = [name for name in types if name not in batch.schema.names]
    if not lacking:
        return batch
    columns = {name: batch.column(name) for name in batch.schema.names}
    return pa.RecordBatch.from_pydict(columns | {name: pa.nulls(batch.num_rows, types[name]) for name in lacking})


def _instants_of_int96(microseconds: pa.Array, nanoseconds: pa.Array) -> pa.Array:
    """Return INT96 values as instants: in microseconds or, if not all are whole ones, in nanoseconds.

    Arrow cuts off what is not a whole microsecond, and has nanoseconds modulo 2^64.

    Raises: pyarrow.ArrowInvalid if there are such instants beside some that are too far away for nanoseconds.
    """
    ticks, exact = microseconds.view(pa.int64()), nanoseconds.view(pa.int64())
    if pc.multiply(ticks, 1000).equals(exact):
        return ticks.view(pa.timestamp("us", "UTC"))
    pc.multiply_checked(ticks, 1000)
    return exact.view(pa.timestamp("ns", "UTC"))


def _shown_value(batch: pa.RecordBatch, name: str, number: int, kind: pa.DataType) -> str:
    value = _value_of(batch, name, number, kind)
    text = value.encode(errors="backslashreplace").decode() if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN_RECORD_CHARACTERS else f"{text[:SHOWN_RECORD_CHARACTERS]}..."


def _value_of(batch: pa.RecordBatch, name: str, number: int, kind: pa.DataType) -> Any:
    """Return a value for JSON; a text that is not UTF-8 with all of its bytes.

    Such bytes become lone surrogates, which are no text either: a replay refuses them again.
    """
    value = batch.column(name)[number]
    if pa.types.is_string(kind) and value.is_valid and isinstance(value, pa.BinaryScalar | pa.StringScalar):
        return value.as_buffer().to_pybytes().decode(errors="surrogateescape")
    return _json_of(value)


def _json_of(value: pa.Scalar) -> Any:
    """Return a value for JSON: numbers and texts unchanged, other types as Arrow writes them."""
    if not value.is_valid:
        return None
    kind = value.type
    if isinstance(value, pa.ExtensionScalar):
        return _json_of(value.value)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return value.as_py()
    if pa.types.is_temporal(kind):
        text: str = value.cast(pa.string()).as_py()
        return text
    if pa.types.is_dictionary(kind):
        return _json_of(value.value)
    if isinstance(value, pa.MapScalar):
        return {str(key): _json_of(part["value"]) for key, part in zip(value.keys(), value.values, strict=True)}
    if isinstance(value, pa.ListScalar):
        return [_json_of(part) for part in value.values]
    if isinstance(value, pa.StructScalar):
        return {name: _json_of(value[name]) for name in value}
    plain = value.as_py()
    return base64.b64encode(plain).decode() if isinstance(plain, bytes) else str(plain)
