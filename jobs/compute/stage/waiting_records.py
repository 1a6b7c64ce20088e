"""The quarantined records that a replay takes up, parsed by today's declaration, and as a person has corrected them."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from tidegate.jobs.compute.stage.bad_records import NOT_RAW, without_input
from tidegate.jobs.compute.stage.record_checks import with_checks
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL, Emitter
from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.files.formats.records.json_records import JsonParser
from tidegate.jobs.sources.files.formats.text_files.text_tasks import PayloadsReader, mended_payload, schema_of
from tidegate.jobs.sources.files.partition_columns import PartitionColumns
from tidegate.jobs.spark.numbered_tasks import NumberedTasks
from tidegate.jobs.spark.task_connections import on_executor
from tidegate.state_store.base.errors import SourceChanged, skip_command
from tidegate.state_store.connections.executor_connections import connect
from tidegate.state_store.declarations.pipeline_spec import INPUT_END

if TYPE_CHECKING:
    from tidegate.jobs.pipeline import Pipeline
    from tidegate.state_store.attempt.attempts import Attempt
    from tidegate.state_store.operate.mended_records import Original

# Of records that a task holds at a time, besides ROWS_AT_ONCE: each may have some megabytes.
BLOCK_BYTES, ROWS_AT_ONCE = 16 * 1024 * 1024, 20
ROWS_PER_BLOCK = 10_000
_WAITING = pa.schema([(ORIGIN, pa.string()), (PAYLOAD, pa.string())])
_WAITING_OF = """
SELECT origin, payload, mended_payload FROM tidegate.quarantine
WHERE pipeline = %s AND replayed_txid = %s AND number %% %s = %s
  AND is_raw = %s AND (%s = '' OR split_part(origin, %s, 1) = %s)
ORDER BY txid, number
"""


def waiting_records(spark: SparkSession, emitter: Emitter, reader: "WaitingReader") -> DataFrame:
    """Return the quarantined records that a batch replays, parsed by today's declaration, with the hidden columns.

    A record that a person has corrected is read as corrected.
    """

    def waiting(*, are_raw: bool) -> DataFrame:
        tasks = spark.range(0, reader.tasks, 1, reader.tasks)
        return tasks.mapInArrow(replace(reader, are_raw=are_raw), f"{ORIGIN} string, {PAYLOAD} string")

    columns = T.StructType.fromDDL(emitter.row_schema())
    assert isinstance(columns, T.StructType)
    return _rows_kept_by_columns(waiting(are_raw=False), columns).unionByName(emitter.parse_payloads(waiting(are_raw=True)))


def describe_fault(spark: SparkSession, pipeline: "Pipeline", emitter: Emitter, record: "Original", mended: str) -> str | None:
    """Return why a replay would set a mended record aside again; None if source and checks take it. No transform is tried."""
    name = (record.origin or "").partition(INPUT_END)[0] if pipeline.source.input_names else ""
    emitter = emitter.of_input(name)
    text = mended_payload(record.payload, mended) if record.is_raw else mended
    waiting = spark.createDataFrame([(without_input(record.origin, name), text)], f"{ORIGIN} string, {PAYLOAD} string")
    columns = T.StructType.fromDDL(emitter.row_schema())
    assert isinstance(columns, T.StructType)
    rows = emitter.parse_payloads(waiting) if record.is_raw else _rows_kept_by_columns(waiting, columns)
    flagged = with_checks(rows, pipeline.check_of(name), list(pipeline.states.values()) if pipeline.transform is None else ())
    reasons = flagged.where(F.col(REFUSAL).isNotNull()).select(REFUSAL).limit(1).collect()
    return reasons[0][0] if reasons else None


def _rows_kept_by_columns(records: DataFrame, columns: T.StructType) -> DataFrame:
    """Return the rows of records that were kept by their columns; those whose columns are others today are flagged.

    Such a record, mended or not, has all columns that it had then. If it lacks one of today's and has one that is no more, that
    was renamed rather than added, and its value must not become NULL.
    """
    names = F.array(*(F.lit(field.name) for field in columns))
    keys = F.json_object_keys(PAYLOAD)
    lacking, more = F.array_except(names, keys), F.array_except(keys, names)
    is_renamed = F.coalesce((F.size(lacking) > 0) & (F.size(more) > 0), F.lit(False))  # NULL: Spark cannot read it
    reason = F.concat(
        F.lit("it has no column "), lacking[0], F.lit(", but "), more[0], F.lit(", which the schema does not name")
    )
    renamed = records.where(is_renamed).withColumn(REFUSAL, reason)
    return _rows_of_json(records.where(~is_renamed), columns).unionByName(_flagged(renamed, columns))


def _rows_of_json(records: DataFrame, columns: T.StructType) -> DataFrame:
    """Return the rows of records in JSON; those that do not fit the columns exactly are flagged, all if text lacks their types.

    Spark's `from_json` would round decimals, and turn unreadable values into NULL.
    """
    try:
        parser = JsonParser({field.name: parse_type(field.dataType.simpleString()) for field in columns}, by_spark=True)
    except ValueError as error:
        return _flagged(records.withColumn(REFUSAL, F.lit(f"it cannot be read from JSON: {error}")), columns)
    return _not_raw(records.mapInArrow(PayloadsReader(parser, PartitionColumns({})), schema_of(parser.types, flagged=True)))


def _flagged(records: DataFrame, columns: T.StructType) -> DataFrame:
    empty = [F.lit(None).cast(field.dataType).alias(field.name) for field in columns]
    return _not_raw(records.select(*empty, ORIGIN, REFUSAL, PAYLOAD))


def _not_raw(rows: DataFrame) -> DataFrame:
    return rows.withColumn(PAYLOAD, F.when(F.col(REFUSAL).isNotNull(), F.concat(F.lit(NOT_RAW), F.col(PAYLOAD))))


def check_all_read(attempt: "Attempt", planned: int, count: int) -> None:
    """Refuse a replay that read more or fewer records than were taken out of quarantine for it.

    Raises: SourceChanged.
    """
    if planned != count:
        raise SourceChanged(
            f"{attempt}: {planned} records were taken out of quarantine for this batch, but {count} are there. Put back the "
            f"rows of tidegate.quarantine with replayed_txid {attempt.txid}; or give the batch up: "
            f"{skip_command(attempt.pipeline, attempt.txid)}; those that are left wait in quarantine again."
        )


@dataclass(frozen=True)
class WaitingReader(NumberedTasks):
    """Reads shares of the raw records, or of those kept by their columns; of several inputs, those of the input `of`."""

    conninfo: dict[str, Any]
    pipeline: str
    txid: int
    tasks: int
    are_raw: bool = False
    of: str = ""

    def read_task(self, number: int) -> Iterator[pa.RecordBatch]:
        """Read one share."""
        with closing(connect(on_executor(self.conninfo))) as connection, connection.cursor("waiting") as cursor:
            cursor.itersize = ROWS_AT_ONCE
            place = [self.pipeline, self.txid, self.tasks, number]
            cursor.execute(_WAITING_OF, [*place, self.are_raw, self.of, INPUT_END, self.of])
            yield from self._blocks(cursor)

    def _blocks(self, rows: Iterator[tuple[Any, ...]]) -> Iterator[pa.RecordBatch]:
        block: list[tuple[str | None, str]] = []
        size = 0
        for origin, original, mended in rows:
            payload = self._payload(original, mended)
            block.append((without_input(origin, self.of), payload))
            size += len(payload)
            if size >= BLOCK_BYTES or len(block) >= ROWS_PER_BLOCK:
                yield _batch(block)
                block, size = [], 0
        if block:
            yield _batch(block)

    def _payload(self, original: str, mended: str | None) -> str:
        if mended is None:
            return original
        return mended_payload(original, mended) if self.are_raw else mended


def _batch(records: Sequence[tuple[str | None, str]]) -> pa.RecordBatch:
    texts = [pa.array(column, pa.string()) for column in zip(*records, strict=True)]
    return pa.RecordBatch.from_arrays(texts, schema=_WAITING)
