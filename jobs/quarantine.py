"""Bad records: found by the source's parser or by the author's checks; refused, or set aside, or taken up again.

A record that is set aside keeps the reason, where it stood, and its payload: the raw record if the parser refused it, its
columns as JSON if a check did. It is staged beside the partials and moves into ``tidegate.quarantine`` in the commit of its
batch, so that each record of a batch either counts or waits there.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg2
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that PySpark's users know

from jobs.sources import ORIGIN, PAYLOAD, REFUSAL, Emitter
from state_store.errors import MalformedRecord

HIDDEN = (ORIGIN, REFUSAL, PAYLOAD)
MARK = "TIDEGATE_FAILED_CHECK"
SHOWN_CHARACTERS = 200
ROWS_PER_BLOCK = 10_000
_WAITING = pa.schema([(ORIGIN, pa.string()), (PAYLOAD, pa.string()), ("is_raw", pa.bool_())])
_WAITING_OF = (
    "SELECT origin, payload, is_raw FROM tidegate.quarantine "
    "WHERE pipeline = %s AND replayed_txid = %s AND number %% %s = %s ORDER BY txid, number"
)


def with_checks(records: DataFrame, checks: Mapping[str, str]) -> DataFrame:
    """Flag the records that fail one of the author's checks, with the first one's name as the reason."""
    refusal = F.when(F.col(REFUSAL).isNotNull(), F.col(REFUSAL))
    for name, condition in checks.items():
        refusal = refusal.when(~F.coalesce(F.expr(condition), F.lit(False)), F.lit(f"fails the check {name!r}"))
    return records.withColumn(REFUSAL, refusal)


def good(records: DataFrame) -> DataFrame:
    """Return the records that are not flagged, without the hidden columns."""
    return records.where(F.col(REFUSAL).isNull()).drop(*HIDDEN)


def good_or_refuse(records: DataFrame) -> DataFrame:
    """Return all records, or fail at the first one that is flagged, with what `explain` reads."""
    told = F.struct(
        F.col(REFUSAL).alias("reason"),
        F.col(ORIGIN).alias("origin"),
        F.substring(_payload(records), 1, SHOWN_CHARACTERS).alias("payload"),
    )
    refuse = F.raise_error(F.concat(F.lit(f"{MARK} "), F.to_json(told))).cast("boolean")
    return records.where(F.when(F.col(REFUSAL).isNull(), F.lit(True)).otherwise(refuse)).drop(*HIDDEN)


def explain(error: Exception) -> MalformedRecord | None:
    """Return which record failed which check, None if the error is about something else."""
    text = str(error)
    if (start := text.find(MARK)) < 0:
        return None
    found, _ = json.JSONDecoder().raw_decode(text, text.index("{", start))
    place = f"{found['origin']}: " if found.get("origin") else ""
    return MalformedRecord(
        f"{place}a record is bad ({found['reason']}): {found.get('payload')}. Mend schema or check and raise the "
        "pipeline's version, or declare on_poison='quarantine' to set such records aside."
    )


def bad(records: DataFrame) -> DataFrame:
    """Return the flagged records as quarantine keeps them."""
    return records.where(F.col(REFUSAL).isNotNull()).select(
        F.col(REFUSAL).alias("reason"),
        F.col(ORIGIN).alias("origin"),
        _payload(records).alias("payload"),
        F.col(PAYLOAD).isNotNull().alias("is_raw"),
    )


def waiting_records(
    spark: SparkSession, emitter: Emitter, conninfo: dict[str, Any], pipeline: str, txid: int, tasks: int
) -> DataFrame:
    """Return the quarantined records that batch txid takes up, as `Emitter.emit_records` would return them today."""
    reader = _WaitingReader(conninfo, pipeline, txid, tasks)
    waiting = spark.range(0, tasks, 1, tasks).mapInArrow(reader, f"{ORIGIN} string, {PAYLOAD} string, is_raw boolean")
    columns = emitter.row_schema()
    row = F.from_json(F.col(PAYLOAD), columns)
    nothing = F.lit(None).cast("string")
    rows = (
        waiting.where(~F.col("is_raw"))
        .select(row.alias("row"), ORIGIN)
        .select("row.*", ORIGIN, nothing.alias(REFUSAL), nothing.alias(PAYLOAD))
    )
    return rows.unionByName(emitter.parse_payloads(waiting.where("is_raw").select(ORIGIN, PAYLOAD)))


def _payload(records: DataFrame) -> Column:
    columns = [F.col(f"`{name.replace('`', '``')}`") for name in records.columns if name not in HIDDEN]
    return F.coalesce(F.col(PAYLOAD), F.to_json(F.struct(*columns), {"ignoreNullFields": "false"}))


@dataclass(frozen=True)
class _WaitingReader:
    """What each of Spark's tasks does with its number, for `DataFrame.mapInArrow`: read its share of the records, in blocks.

    A class, for the reason given in `jobs.staging_sink`.
    """

    conninfo: dict[str, Any]
    pipeline: str
    txid: int
    tasks: int

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read one share."""
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                with closing(psycopg2.connect(**self.conninfo)) as connection, connection.cursor("waiting") as cursor:
                    cursor.itersize = ROWS_PER_BLOCK
                    cursor.execute(_WAITING_OF, [self.pipeline, self.txid, self.tasks, number])
                    while rows := cursor.fetchmany(ROWS_PER_BLOCK):
                        records = [dict(zip(_WAITING.names, row, strict=True)) for row in rows]
                        yield pa.RecordBatch.from_pylist(records, _WAITING)
