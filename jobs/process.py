"""The processing phase: read the frozen slice, transform, aggregate per key, stage, seal. Any number of batches at once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that PySpark's users know
from pyspark.sql import types as T  # noqa: N812

from jobs import staging_sink
from jobs.pipeline import Pipeline, State
from jobs.sources import Emitter
from jobs.spark import LOCAL
from state_store import StateStore, errors
from state_store.attempts import Attempt, StagedPartition
from state_store.declaration import ColumnType, StateSpec
from state_store.settings import Settings
from state_store.tables import staging_table_of

logger = logging.getLogger(__name__)

# Which Spark types a Postgres column takes without loss.
_INTEGRAL = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_ACCEPTED: dict[str, tuple[type[T.DataType], ...]] = {
    "text": (T.StringType,),
    "boolean": (T.BooleanType,),
    "integer": _INTEGRAL,
    "bigint": _INTEGRAL,
    "date": (T.DateType,),
    "timestamptz": (T.TimestampType,),
}
_SPARK_TYPES = {"text": "string", "integer": "int", "timestamptz": "timestamp"}
_OVERFLOWS = ("ARITHMETIC_OVERFLOW", "NUMERIC_VALUE_OUT_OF_RANGE", "CAST_OVERFLOW")
# Errors in the data or the code: Spark finds them again however often it tries.
_PERMANENT_SQLSTATES = ("22", "42", "P0", "0A")


def stage_batch(store: StateStore, pipeline: Pipeline, attempt: Attempt, spark: SparkSession) -> None:
    """Compute the attempt's partials, stage and seal them.

    If the process dies on the way, nothing was sealed and nothing counts. Rows are checked against the frozen metadata
    before they are read and again before the seal.

    Raises: the source's errors, DeclarationInvalid, MalformedRecord, BadKey, Overflow (all permanent); SparkUnavailable,
    StoreUnavailable (retryable); AttemptFenced.
    """
    emitter = pipeline.source.emitter(spark, store.settings)
    with _spark_errors(emitter, attempt):
        # Named after the attempt: batches share a session, and an observation of the same name would answer for another.
        counted = Observation(f"source of {attempt}")
        rows = emitter.emit_batch(attempt, attempt.source_metadata).observe(counted, F.count(F.lit(1)).alias("rows"))
        if pipeline.transform:
            rows = pipeline.transform(rows)
        staged: list[StagedPartition] = []
        for name, state in pipeline.states.items():
            spec = state.spec(name)
            partials = aggregate(rows, state, spec)
            table = staging_table_of(spec, attempt.txid, attempt.number).name
            sink = staging_sink.staging_sink(_conninfo(store.settings), table, spec)
            for answer in partials.mapInArrow(sink, staging_sink.ANSWER).collect():  # one row per partition
                if answer.refusal:
                    raise getattr(errors, answer.refusal)(
                        f"{attempt}: {answer.reason}",
                        pipeline=attempt.pipeline,
                        txid=attempt.txid,
                        attempt=attempt.number,
                    )
                staged.append(StagedPartition(name, answer.partition, answer.task_attempt, answer.rows, answer.digest))
        source_rows = int(counted.get["rows"])
        emitter.verify_batch(attempt, attempt.source_metadata)
    store.seal(attempt, staged, source_rows)
    logger.info("%s sealed: %d source rows, %d partials", attempt, source_rows, sum(p.rows for p in staged))


def aggregate(rows: DataFrame, state: State, spec: StateSpec) -> DataFrame:
    """Return the partials of one state: a row per key with the state's columns, in their declared types.

    Raises: DeclarationInvalid if a column is missing or has a type that would lose something.
    """
    keys = [_column(rows, spec, key.name, key.type).alias(key.name) for key in spec.keys]
    values = []
    for value in spec.values:
        declared = state.aggregates[value.name]
        if declared.column is None:
            values.append(F.count(F.lit(1)).alias(value.name))
            continue
        exact = declared.function != "count"
        column = _column(rows, spec, declared.column, value.type if exact else None)
        result: Column = getattr(F, declared.function)(column)
        if declared.function == "sum":
            result = F.coalesce(result, F.lit(0))
        values.append(result.cast(_spark_type(value.type)).alias(value.name))
    return rows.groupBy(*keys).agg(*values)


def _column(rows: DataFrame, state: StateSpec, name: str, declared: ColumnType | None) -> Column:
    field = next((field for field in rows.schema if field.name == name), None)
    if field is None:
        raise errors.DeclarationInvalid(
            f"State {state.name} needs column {name}, but the transform returns {', '.join(rows.columns)}. Add it there."
        )
    if declared is None:
        return rows[name]
    found = field.dataType
    fits = isinstance(found, _ACCEPTED.get(declared.name, ()))
    if numeric := declared.precision_and_scale:
        precision, scale = numeric
        fits = isinstance(found, _INTEGRAL) or (
            isinstance(found, T.DecimalType) and found.scale <= scale and found.precision - found.scale <= precision - scale
        )
    if not fits:
        raise errors.DeclarationInvalid(
            f"State {state.name}: column {name} is declared {declared.name}, but the transform returns {found.simpleString()}. "
            "Cast it in the transform, where what is lost is your decision."
        )
    return rows[name].cast(_spark_type(declared))


def _spark_type(declared: ColumnType) -> str:
    return _SPARK_TYPES.get(declared.name, declared.name.replace("numeric", "decimal"))


def _conninfo(settings: Settings) -> dict[str, Any]:
    """Return where executors connect to; the password is theirs to find, unless they are this very process."""
    conninfo = {**settings.conninfo(user=settings.pg_stager), "application_name": "tidegate staging"}
    if not LOCAL.fullmatch(settings.spark_remote):
        conninfo.pop("passfile", None)
    return conninfo


@contextmanager
def _spark_errors(emitter: Emitter, attempt: Attempt) -> Iterator[None]:
    """Turn Spark's errors into ours: the source's if it knows better, permanent if they lie in data or code."""
    identity: dict[str, Any] = {"pipeline": attempt.pipeline, "txid": attempt.txid, "attempt": attempt.number}
    try:
        yield
    except errors.TidegateError as error:
        raise type(error)(str(error).removeprefix(f"{attempt}: "), **identity) from error
    except (PySparkException, grpc.RpcError) as error:
        if explained := emitter.explain(error):
            raise type(explained)(str(explained), **identity) from error
        condition = error.getCondition() if isinstance(error, PySparkException) else None
        state = (error.getSqlState() or "") if isinstance(error, PySparkException) else ""
        message = " ".join(str(error).strip().splitlines()[:1])
        if condition and condition.startswith(_OVERFLOWS):
            raise errors.Overflow(f"A value is out of range: {message}", **identity) from error
        if isinstance(error, AnalysisException) or state.startswith(_PERMANENT_SQLSTATES):
            raise errors.DeclarationInvalid(f"Spark refused the batch: {message}", **identity) from error
        raise errors.SparkUnavailable(f"Spark failed: {message}", **identity) from error
