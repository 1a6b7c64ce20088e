"""Reads the range of one batch: each Spark executor COPYs a part of it and converts the text to Arrow, exactly.

A part is one COPY, so one snapshot. Its rows are spooled first, in memory or on the executor's disk: the transaction on the
source ends when the rows have arrived, even if the transform is slow, and memory holds one block of rows. Spark may read a part
again (a retry, speculation, a second state): the database is queried again, and nothing changes there.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from psycopg2 import sql
from pyarrow import csv

from tidegate.jobs.sources import Emitter
from tidegate.jobs.sources.postgres.source import PostgresTable, check_range
from tidegate.jobs.sources.postgres.source_connection import check_primary, connected, transaction
from tidegate.jobs.sources.postgres.table_origin import check_same_origin, read_origin
from tidegate.jobs.sources.postgres.table_query import Position, TableQuery, rows_now
from tidegate.jobs.spark.numbered_tasks import NumberedTasks
from tidegate.jobs.spark.task_connections import conninfo_of_tasks, on_executor
from tidegate.state_store.base.errors import MalformedRecord, SourceChanged, SourceUnreadable, TidegateError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidegate.state_store.attempt.attempts import Attempt

# Rows are parsed in blocks of about this size; a longer row is a block of its own.
BLOCK_BYTES = 1 << 20
MEMORY_BYTES = 8 << 20
SHOWN_VALUE_CHARACTERS = 200
# Everything but NULL is in quotes, so that "" stays the empty text; an empty line is a row whose only column is NULL.
_COPY = "COPY ({}) TO STDOUT WITH (FORMAT csv, FORCE_QUOTE *)"
_RANGE = "SELECT {} FROM {} WHERE {}"
_ALL = "SELECT {} FROM {} ORDER BY {}"
_PARSING = csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
KeyRange = tuple[Position | None, Position]


class PostgresReader(Emitter):
    """Reads the range that the metadata names, with one connection per part."""

    def __init__(self, source: PostgresTable, spark: "SparkSession", settings: Settings) -> None:
        self._spark = spark
        self._query = source.selection
        self._kind = source.kind
        self._conninfo = self._executors_conninfo = source.conninfo(settings, "read")
        if source.connection is None:
            named = {"application_name": self._conninfo["application_name"]}
            self._executors_conninfo = {**conninfo_of_tasks(settings), **named}

    def row_schema(self) -> str:
        """Return the declared columns."""
        return self._query.row_schema

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":  # noqa: ARG002
        """Return the rows of the range; each part is read when Spark requests it."""
        with connected(self._conninfo, self._query, SourceChanged) as connection, transaction(connection) as cursor:
            self._check_origin(cursor, metadata)
        parts = parts_of(metadata)
        numbers = self._spark.range(0, len(parts), 1, max(len(parts), 1))
        return numbers.mapInArrow(PartsReader(self._executors_conninfo, self._query, parts), self.row_schema())

    def expected_rows(self, metadata: SourceMetadata) -> int | None:
        """Return the planned number of rows; None for an opaque source, which may have lost some since."""
        rows: int = metadata["rows"]
        return rows if self._kind == "transactional" else None

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:  # noqa: ARG002
        """Check that the range still has its planned rows and keys; an opaque source may have lost some."""
        if self._kind != "transactional":
            return
        with connected(self._conninfo, self._query, SourceChanged) as connection, transaction(connection) as cursor:
            self._check_origin(cursor, metadata)
            now = rows_now(cursor, self._query, metadata)
        if now:
            raise SourceChanged(
                f"{self._query.name} has {now}. Rows that were read once must stay as they are, and new ones have higher keys."
            )

    def _check_origin(self, cursor: Any, metadata: SourceMetadata) -> None:
        check_range(metadata)
        origin = read_origin(cursor, self._query, SourceChanged)
        check_same_origin(self._query, metadata.get("origin"), origin, metadata["generation"])


def parts_of(metadata: SourceMetadata) -> list[KeyRange]:
    """Return the parts of a batch's range, which cover it without overlap."""
    if metadata["to"] is None:  # the source was empty when the batch was planned
        return []
    ends = [*metadata["splits"], metadata["to"]]
    return list(zip([metadata["after"], *ends[:-1]], ends, strict=True))


@dataclass(frozen=True)
class PartsReader(NumberedTasks):
    """Reads the parts of a range."""

    conninfo: dict[str, Any]
    query: TableQuery
    parts: list[KeyRange]

    def read_task(self, number: int) -> Iterator[pa.RecordBatch]:
        """Read one part."""
        yield from read_part(on_executor(self.conninfo), self.query, self.parts[number])


def read_part(conninfo: dict[str, Any], query: TableQuery, part: KeyRange) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one part.

    Raises: the errors of `connected`; MalformedRecord for a value that does not fit, naming column and key; SourceUnreadable
    on a standby.
    """
    rows = sql.SQL(_RANGE).format(query.values, query.relation, query.between(*part))
    yield from _read(conninfo, query, rows, SourceChanged)


def read_all(conninfo: dict[str, Any], query: TableQuery) -> Iterator[pa.RecordBatch]:
    """Yield all rows, in the order of the key.

    Raises: as `read_part`.
    """
    yield from _read(conninfo, query, sql.SQL(_ALL).format(query.values, query.relation, query.keys), SourceUnreadable)


def _read(
    conninfo: dict[str, Any], query: TableQuery, rows: sql.Composed, refusal: type[TidegateError]
) -> Iterator[pa.RecordBatch]:
    with SpooledTemporaryFile(MEMORY_BYTES) as file:
        spool = _Spool(file)
        with connected(conninfo, query, refusal) as connection, transaction(connection) as cursor:
            check_primary(cursor, query)
            if refusal is SourceUnreadable:  # of all rows; those of a part have been checked for the batch
                query.check_columns(cursor)
            cursor.copy_expert(sql.SQL(_COPY).format(rows), spool)
        for block in spool.blocks():
            yield from _Parser(query).parse(block)


class _Spool:
    """Keeps the output of COPY, and the sizes of blocks of whole rows."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._sizes: list[int] = []
        self._size = 0

    def write(self, row: bytes) -> None:
        """Keep one row: libpq passes whole rows, one at a time."""
        self._file.write(row)
        self._size += len(row)
        if self._size >= BLOCK_BYTES:
            self._sizes.append(self._size)
            self._size = 0

    def blocks(self) -> Iterator[bytes]:
        """Yield the rows in blocks of whole rows."""
        self._file.seek(0)
        for size in [*self._sizes, self._size]:
            if size:
                yield self._file.read(size)


def arrow_schema(query: TableQuery) -> pa.Schema:
    """Return the declared columns as Arrow has them."""
    return pa.schema({name: kind.arrow for name, kind in query.columns.items()})


class _Parser:
    """Converts CSV to Arrow batches of the declared types, or names the value that does not fit."""

    def __init__(self, query: TableQuery) -> None:
        self._query = query
        self._types = {name: kind.arrow for name, kind in query.columns.items()}
        self._binaries = [name for name, kind in query.columns.items() if kind.family == "binary"]

    def parse(self, block: bytes) -> list[pa.RecordBatch]:
        """Return the rows of a block.

        Raises: MalformedRecord.
        """
        types = {name: pa.string() if name in self._binaries else kind for name, kind in self._types.items()}
        try:
            table = _parsed(block, types)
            table.validate(full=True)  # parsing accepts a decimal with too many digits before the point
        except pa.ArrowInvalid:
            raise self._refusal(block) from None
        for name in self._binaries:
            values = [None if text is None else bytes.fromhex(text) for text in table[name].to_pylist()]
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.binary()))
        batches: list[pa.RecordBatch] = table.to_batches()
        return batches

    def _refusal(self, block: bytes) -> MalformedRecord:
        """Find the first row that does not fit, by halving, and return its error."""
        try:
            rows = _parsed(block, dict.fromkeys(self._types, pa.string()))
        except pa.ArrowInvalid:
            return MalformedRecord(f"{self._query.name} has a text that is not UTF-8 ({block[:SHOWN_VALUE_CHARACTERS]!r}...).")
        while rows.num_rows > 1:
            first = rows.slice(0, rows.num_rows // 2)
            rows = first if self._misfits(first) else rows.slice(first.num_rows)
        misfit = next(name for name in self._types if self._misfits(rows.select([name])))
        [row] = rows.to_pylist()
        key = ", ".join(f"{name}={row[name]}" for name in self._query.key)
        return MalformedRecord(
            f"{self._query.name}, row {key}: {misfit}={row[misfit][:SHOWN_VALUE_CHARACTERS]!r} does not fit "
            f"{self._query.columns[misfit].name}. Correct the schema and raise the pipeline's version, or read the "
            f"column by a query, as CASE WHEN ... THEN {misfit} END; a query that leaves the row out is refused."
        )

    def _misfits(self, rows: pa.Table) -> bool:
        block = io.BytesIO()
        csv.write_csv(rows, block, csv.WriteOptions(include_header=False))
        try:
            _parsed(block.getvalue(), {name: self._types[name] for name in rows.column_names}).validate(full=True)
        except pa.ArrowInvalid:
            return True
        return False


def _parsed(block: bytes, types: dict[str, pa.DataType]) -> pa.Table:
    converting = csv.ConvertOptions(
        column_types=types,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        true_values=["t"],
        false_values=["f"],
    )
    reading = csv.ReadOptions(column_names=list(types), block_size=len(block) + 1, use_threads=False)
    return csv.read_csv(io.BytesIO(block), reading, _PARSING, converting)
