"""Bad records, which a source's parser or an author's check has flagged: refused, or set aside in quarantine.

A bad record is flagged: column REFUSAL has the reason. A record that is set aside keeps the reason, its origin, and its
payload: the raw record if the parser refused it, its columns as JSON if a check did. It is staged beside the partials and moves
into ``tidegate.quarantine`` in the commit of its batch, so that each record either reaches the states or waits there.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidegate.jobs.sources import HIDDEN, ORIGIN, PAYLOAD, REFUSAL
from tidegate.jobs.sources.column_types import quoted
from tidegate.jobs.spark.task_errors import refusal
from tidegate.state_store.base.errors import MalformedRecord
from tidegate.state_store.declarations.pipeline_spec import INPUT_END

SHOWN_CHARACTERS = 200
# By default, Spark writes times into JSON with three digits of a second.
JSON_TIMES = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_AS_JSON = {"ignoreNullFields": "false", **JSON_TIMES}
# Marks the payload of a refused record that is not raw. No raw payload has this character: Postgres' text cannot hold it.
NOT_RAW = "\0"


def with_input(records: DataFrame, name: str) -> DataFrame:
    """Begin the origin of records with the name of their input, by which a replay finds them; a single source has none."""
    return records.withColumn(ORIGIN, F.concat_ws(INPUT_END, F.lit(name), F.col(ORIGIN))) if name else records


def without_input(origin: str | None, name: str) -> str | None:
    """Return an origin as the input itself names it."""
    return origin if not name else (origin or "").partition(INPUT_END)[2] or None


def good(records: DataFrame) -> DataFrame:
    """Return the records that are not flagged, without the hidden columns."""
    return records.where(F.col(REFUSAL).isNull()).drop(*HIDDEN)


def good_or_refuse(records: DataFrame) -> DataFrame:
    """Return all records; the query fails with MalformedRecord at the first flagged one."""
    refused = refusal(
        MalformedRecord,
        "{place}a record is bad ({reason}): {payload}. Fix the schema or the check and raise the pipeline's version, or "
        "declare on_poison='quarantine' to set such records aside.",
        place=F.concat(F.col(ORIGIN), F.lit(": ")),
        reason=F.col(REFUSAL),
        payload=F.substring(_payload(records), 1, SHOWN_CHARACTERS),
    )
    return records.where(F.when(F.col(REFUSAL).isNull(), F.lit(True)).otherwise(refused.cast("boolean"))).drop(*HIDDEN)


def bad(records: DataFrame) -> DataFrame:
    """Return the flagged records as quarantine keeps them."""
    return records.where(F.col(REFUSAL).isNotNull()).select(
        F.col(REFUSAL).alias("reason"),
        F.col(ORIGIN).alias("origin"),
        _payload(records).alias("payload"),
        (F.col(PAYLOAD).isNotNull() & ~F.startswith(F.col(PAYLOAD), F.lit(NOT_RAW))).alias("is_raw"),
    )


def _payload(records: DataFrame) -> Column:
    columns = [F.col(quoted(name)) for name in records.columns if name not in HIDDEN]
    payload = F.ltrim(F.col(PAYLOAD), F.lit(NOT_RAW))
    return F.coalesce(payload, F.to_json(F.struct(*columns), _AS_JSON))
