"""Reads text files in Spark's tasks, part by part.

Spark's own readers are not used: they list the files again, drop some lines as blank, and misread some quotes and numbers.
Here records are split by the rules that counted them for the plan, each with its line number.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from tidegate.jobs.sources import HIDDEN
from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.files.content import text_of
from tidegate.jobs.sources.files.formats.file_part_tasks import SHOWN_RECORD_CHARACTERS, TaskReader, flagged_batch, malformed
from tidegate.jobs.sources.files.formats.records.record_parser import RecordParser
from tidegate.jobs.sources.files.formats.records.text_records import Chunk, chunks
from tidegate.jobs.sources.files.formats.records.typed_values import from_texts
from tidegate.jobs.sources.files.formats.text_files.text_scan import FileRange
from tidegate.jobs.sources.files.partition_columns import PartitionColumns
from tidegate.state_store.base.errors import MalformedRecord

# The JSON key of a wrapped record: one that Postgres' text cannot hold, or that needs its file's header.
WRAPPED = "_tidegate_record"
# Of a bad record of more than KEPT_BYTES, only the beginning is kept: staging takes texts of up to 64 MiB, and JSON may need
# six bytes for one.
KEPT_BYTES, KEPT_BEGINNING = 8 * 1024 * 1024, 64 * 1024


def schema_of(types: dict[str, pa.DataType], *, flagged: bool) -> T.StructType:
    """Return the Spark schema, with origin, refusal and payload (HIDDEN) if rows are flagged."""
    fields = [T.StructField(name, from_arrow_type(kind, prefer_timestamp_ntz=True)) for name, kind in types.items()]
    return T.StructType([*fields, *(T.StructField(name, T.StringType()) for name in HIDDEN if flagged)])


@dataclass(frozen=True)
class RecordsReader(TaskReader):
    """Reads records: refuses the first bad one, or flags all bad ones with the reason as REFUSAL."""

    parser: RecordParser
    encoding: str
    flagged: bool

    def read(self, part: FileRange) -> Iterator[pa.RecordBatch]:
        """Read one part."""
        grammar, file = self.parser.grammar_of(part.names), part.file
        for chunk in chunks(text_of(file.path, self.encoding, part.start, part.end, within=file.within), grammar, part.line):
            if len(records := chunk.only(chunk.lines > part.header_line)):
                yield self._batch(part, records)

    def _batch(self, part: FileRange, chunk: Chunk) -> pa.RecordBatch:
        columns, bad = self.parser.parse(chunk, part.names)
        columns |= {name: pa.repeat(value[0], len(chunk)) for name, value in part.file.values.items()}
        if not self.flagged:
            if bad:
                first = min(bad)
                line, shown = int(chunk.lines[first]), chunk.record(first)[: 4 * SHOWN_RECORD_CHARACTERS]
                raise malformed(f"{part.file.path}, line {line}", bad[first], shown.decode(errors="ignore"))
            return pa.RecordBatch.from_pydict(columns)
        origins = [f"{part.file.name}, line {line}" for line in chunk.lines.tolist()]
        names = part.names if part.names and list(part.names) != list(self.parser.types) else None

        def payload(number: int) -> str:
            return payload_of(chunk.record(number), names)

        return flagged_batch(columns, bad, origins, payload, keeps_all=bool(self.parser.formatted))


@dataclass(frozen=True)
class LocalTimes:
    """Converts local times to moments in a Spark task, for `pyspark.sql.functions.arrow_udf`."""

    zone: str

    def moments(self, times: pa.Array) -> pa.Array:
        """Return the moments of times such as ``2024-01-05 10:00:00``; NULL if clocks repeat or skip that time."""
        return from_texts(parse_type("timestamp"), times, self.zone)[0]


@dataclass(frozen=True)
class PayloadsReader:
    """Parses raw records from quarantine (columns ORIGIN and PAYLOAD) as `RecordsReader` does."""

    parser: RecordParser
    partitions: PartitionColumns

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Parse records one at a time, because their files' columns may differ."""
        types = {**self.parser.types, **self.partitions.types}
        for batch in batches:
            for origin, payload in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                try:
                    record, names = record_of(payload)
                    columns, bad = self.parser.parse(self.parser.again(record, names), names)
                    columns |= self.partitions.values_of((origin or "").rpartition(", line ")[0])
                except (ValueError, MalformedRecord) as error:
                    columns, bad = {name: pa.nulls(1, kind) for name, kind in types.items()}, {0: str(error)}
                yield flagged_batch(columns, bad, [origin], [payload].__getitem__, keeps_all=bool(self.parser.formatted))


def payload_of(record: bytes, names: Iterable[str] | None) -> str:
    """Return a record for quarantine: raw, or in JSON if it needs its columns, has a NUL, or is too long."""
    if len(record) > KEPT_BYTES:
        beginning = record[:KEPT_BEGINNING].decode(errors="ignore")
        summary = {"bytes": len(record), "sha256": hashlib.sha256(record).hexdigest(), "beginning": beginning}
        return json.dumps({WRAPPED: None, "columns": None if names is None else list(names), **summary})
    text = record.decode()
    if names is None and "\0" not in text and not text.startswith(f'{{"{WRAPPED}"'):
        return text
    return json.dumps({WRAPPED: text, "columns": None if names is None else list(names)})


def mended_payload(original: str, mended: str) -> str:
    """Return a corrected record for `record_of`, with the columns of its file, if the original has them."""
    if not original.startswith(f'{{"{WRAPPED}"') or mended.startswith(f'{{"{WRAPPED}"'):
        return mended
    return payload_of(mended.encode(), json.loads(original)["columns"])


def record_of(payload: str) -> tuple[bytes, list[str] | None]:
    """Return the record in a payload, and its file's columns if other than declared.

    Raises: MalformedRecord if the record was too long to be kept.
    """
    if not payload.startswith(f'{{"{WRAPPED}"'):
        return payload.encode(), None
    wrapped = json.loads(payload)
    if wrapped[WRAPPED] is None:
        raise MalformedRecord(f"it was too long to be kept: only the beginning of its {wrapped['bytes']} bytes is here")
    return wrapped[WRAPPED].encode(), wrapped["columns"]
