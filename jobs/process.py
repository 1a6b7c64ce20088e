"""The processing phase: read the frozen slice, transform, aggregate per key, stage, seal. Any number of batches at once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that PySpark's users know
from pyspark.sql import types as T  # noqa: N812

from jobs import quarantine, staging, state_columns
from jobs.acker import HASH, ID, ROWS, Observed, Sums, check_complete, hash_sum, used_columns
from jobs.pipeline import Pipeline, State, Transform
from jobs.purity import check_pure
from jobs.sources import ORIGIN, REFUSAL, Emitter
from jobs.spark import application_of, expect_brief, interruptible
from jobs.spark_errors import meaning_of
from jobs.staging import LeftToTasks, StagedRows
from state_store import StateStore, errors
from state_store.attempts import Attempt, Tracked
from state_store.batches import QUARANTINED
from state_store.declaration import QuarantineSpec, StateSpec
from state_store.settings import Settings

logger = logging.getLogger(__name__)

# The batch of one file is grouped by the task that reads it. Up to the first size Spark reads a file by one task anyway
# (spark.sql.files.openCostInBytes). Up to the second it would share it among tasks, which takes more work in all than it saves
# while other batches keep the other cores busy; not so if a transform may be what takes the time.
UNSPLIT_BYTES, UNSHARED_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024


def stage_batch(store: StateStore, pipeline: Pipeline, attempt: Attempt, spark: SparkSession) -> None:
    """Compute the attempt's partials, stage and seal them.

    If the process dies on the way, nothing was sealed and nothing counts. Rows are checked against the frozen metadata
    before they are read and again before the seal, and the acker's sums have to meet (`jobs.acker`).

    Raises: the source's errors, DeclarationInvalid, MalformedRecord, TransformFailed, BadKey, Overflow (all permanent);
    RowsLost, AttemptTimedOut, SparkFailed, SparkUnavailable, StoreUnavailable (retryable); AttemptFenced.
    """
    emitter = pipeline.source.emitter(spark, store.settings)
    timeout = pipeline.message_timeout_seconds or store.settings.attempt_timeout_seconds
    with (
        _spark_errors(emitter, attempt),
        interruptible(spark, attempt, timeout, lambda: not store.keep_alive(attempt)) as tag,
    ):
        store.note_spark(attempt, application_of(spark), tag)
        records, rows_told = _records(store.settings, pipeline, attempt, emitter, spark)
        few = _states_of_few_rows(pipeline, attempt, rows_told)
        try:
            done = _compute(store, pipeline, attempt, emitter, records, rows_told, few)
        except LeftToTasks as why:
            logger.info("%s is left to Spark's tasks: %s", attempt, why)
            done = _compute(store, pipeline, attempt, emitter, records, rows_told, frozenset())
        if QUARANTINED in attempt.source_metadata:
            quarantine.check_all_read(attempt, attempt.source_metadata[QUARANTINED], done.emitted.rows)
        else:
            emitter.verify_batch(attempt, attempt.source_metadata)
    sums = Tracked(
        source_rows=done.emitted.rows,
        source_hash_sum=done.emitted.hash,
        quarantined_rows=done.emitted.flagged,
        transformed_rows=done.returned.rows,
        transformed_hash_sum=done.returned.hash,
        staged_bytes=sum(staged.bytes for staged in done.staged),
        staged_at=done.staged_at,
    )
    store.seal(attempt, [partition for staged in done.staged for partition in staged.partitions], sums)
    logger.info("%s sealed: %d source rows, %d partials", attempt, done.emitted.rows, sum(s.rows for s in done.staged))


@dataclass(frozen=True)
class _Computed:
    """What came of one pass over a batch: the acker's sums at the source and behind the transform, and what was staged."""

    emitted: Sums
    returned: Sums
    staged: list[StagedRows]
    staged_at: datetime


def _compute(
    store: StateStore,
    pipeline: Pipeline,
    attempt: Attempt,
    emitter: Emitter,
    records: DataFrame,
    rows_told: int | None,
    few: frozenset[str],
) -> _Computed:
    """Read the batch, transform it, and stage the partials of all states: from here if in `few`, else by Spark's tasks.

    Raises: LeftToTasks if that does not do for those in `few`; then nothing counts of what was staged. RowsLost.
    """
    # A second pass observes anew: the sums of the first may be of what was read until it stopped.
    place = f"{attempt}, {'from here' if few else 'by tasks'}"
    is_untouched = pipeline.transform is None and REFUSAL not in records.schema.names
    if rows_told is not None and is_untouched and emitter.has_digests and not pipeline.lost_tracking:
        return _compute_whole_file(store, pipeline, attempt, records, rows_told, few, place)
    schema = records.schema
    is_flagged = REFUSAL in schema.names
    tracked = None if pipeline.tracking == "off" else [name for name in schema.names if name not in (ORIGIN, REFUSAL)]
    used = used_columns(pipeline)
    # Rows that nothing has touched since the source was observed are the transformed rows: they are observed once.
    if is_untouched and emitter.has_digests and used is not None:
        tracked = used
    source, transformed = Observed(f"source of {place}"), Observed(f"transform of {place}")
    rows = records = source.attach(records, schema, tracked, F.col(REFUSAL).isNotNull() if is_flagged else None)
    if not is_untouched:
        rows = records = records.drop(ID)
        if is_flagged:
            rows = quarantine.good(records) if pipeline.spec.quarantines else quarantine.good_or_refuse(records)
        if pipeline.transform:
            rows = _transformed(pipeline.transform, rows, schema.names)
        schema = rows.schema
        rows = transformed.attach(rows, schema, used)
    staged: list[StagedRows] = []
    for name, state in pipeline.states.items():
        spec = state.spec(name)
        partials = aggregate(rows, schema, state, spec, follow=None if used is None or state.unanchored else "rows")
        staged.append(_stage(store, attempt, state, spec, partials, few))
    emitted = source.sums()
    _check_expected(attempt, emitter, emitted.rows)
    returned = Sums(emitted.rows, emitted.hash if used is not None else None) if is_untouched else transformed.sums()
    if pipeline.transform is None:
        good = emitted.rows - emitted.flagged
        check_complete(attempt, "the rows without a transform", Sums(good), Sums(returned.rows))
    for (name, state), done in zip(pipeline.states.items(), staged, strict=True):
        if used is not None and not state.unanchored:
            check_complete(attempt, f"state {name}", returned, done.acked)
    if emitted.flagged:
        bad = staging.stage_by_tasks(store.settings, attempt, QuarantineSpec(pipeline.name), quarantine.bad(records))
        check_complete(attempt, "the quarantine", Sums(emitted.flagged), Sums(bad.rows))
        staged.append(bad)
    return _Computed(emitted, returned, staged, datetime.now(UTC))


def _check_expected(attempt: Attempt, emitter: Emitter, rows: int) -> None:
    """Refuse an attempt for which Spark read more or fewer rows than the source itself counts.

    Raises: RowsLost; what `Emitter.verify_batch` raises if the source has changed since it was planned.
    """
    if QUARANTINED in attempt.source_metadata:
        return
    expected = emitter.expected_rows(attempt.source_metadata)
    if expected not in (None, rows):
        emitter.verify_batch(attempt, attempt.source_metadata)
        raise errors.RowsLost(
            f"{attempt}: the source has {expected} rows, {rows} arrived in Spark. Either Spark lost or repeated some, or the "
            "transform does not read all rows, as with limit(): it has to."
        )


def _transformed(transform: Transform, rows: DataFrame, columns: list[str]) -> DataFrame:
    """Return what the transform makes of the rows: a plan, mostly, of which no row is read yet.

    Raises: DeclarationInvalid if the code is at fault. What it may raise because something is away is passed on.
    """
    try:
        returned = transform(rows)
    except (errors.TidegateError, PySparkException, grpc.RpcError, OSError, MemoryError, ImportError):
        raise
    except (Exception, SystemExit) as error:
        raise errors.DeclarationInvalid(f"The transform failed: {type(error).__name__}: {error}") from error
    if returned is None:
        raise errors.DeclarationInvalid(
            "The transform returns nothing: end it with return, and the DataFrame that it has made."
        )
    if not isinstance(returned, DataFrame):
        raise errors.DeclarationInvalid(f"The transform returns {type(returned).__name__}; it has to return a DataFrame.")
    check_pure(rows, returned, columns)
    return returned


def _compute_whole_file(
    store: StateStore,
    pipeline: Pipeline,
    attempt: Attempt,
    records: DataFrame,
    rows_told: int,
    few: frozenset[str],
    place: str,
) -> _Computed:
    """Do the same where one task reads the file, whose digest vouches for the rows, and hands over all partials of a state."""
    staged: list[StagedRows] = []
    for name, state in pipeline.states.items():
        spec, handed_over = state.spec(name), Observed(f"state {name} of {place}")
        partials = aggregate(records, records.schema, state, spec, follow="partials")
        staged.append(_stage(store, attempt, state, spec, handed_over.attach_partials(partials, _counter(state)), few))
        found = handed_over.sums()
        check_complete(attempt, f"the partials of state {name}", Sums(rows_told), Sums(found.rows))
        check_complete(attempt, f"state {name}", found, staged[-1].acked)
    return _Computed(Sums(rows_told), Sums(rows_told), staged, datetime.now(UTC))


def _stage(
    store: StateStore, attempt: Attempt, state: State, spec: StateSpec, partials: DataFrame, few: frozenset[str]
) -> StagedRows:
    if spec.name in few:
        return staging.stage_from_here(store, attempt, spec, partials, _counter(state))
    return staging.stage_by_tasks(store.settings, attempt, spec, partials, _counter(state))


def _states_of_few_rows(pipeline: Pipeline, attempt: Attempt, rows_told: int | None) -> frozenset[str]:
    """Return the states of which the batch is expected to have few partials, of limited size.

    As few as in the last batches, or as there are rows. It is a guess, at which `staging.stage_from_here` looks again.
    """

    def is_few(spec: StateSpec) -> bool:
        most = attempt.rows_before.get(spec.name, rows_told) if spec.keys else 1
        if pipeline.transform is None and rows_told is not None and most is not None:
            most = min(most, rows_told)
        has_texts = any(value.type.name in ("text", "bytea") for value in spec.values)
        return most is not None and most <= staging.FEW_ROWS and not has_texts

    return frozenset(name for name, state in pipeline.states.items() if is_few(state.spec(name)))


def _records(
    settings: Settings, pipeline: Pipeline, attempt: Attempt, emitter: Emitter, spark: SparkSession
) -> tuple[DataFrame, int | None]:
    """Return the batch's rows; with the columns of `Emitter.emit_records` if some of them may be bad.

    With them, if one task takes all of them from their file into partials: how many the file says it has.
    """
    metadata = attempt.source_metadata
    if QUARANTINED in metadata:
        tasks = settings.staging_connections
        records = quarantine.waiting_records(
            spark, emitter, staging.conninfo_of_tasks(settings), pipeline.name, attempt.txid, tasks
        )
        return quarantine.with_checks(records, pipeline.check, _storable(pipeline)), None
    if pipeline.spec.quarantines or pipeline.check:
        records = quarantine.with_checks(emitter.emit_records(attempt, metadata), pipeline.check, _storable(pipeline))
    else:
        records = emitter.emit_batch(attempt, metadata)
    file = emitter.one_file(metadata)
    if file is None or file.bytes > (UNSPLIT_BYTES if pipeline.transform else UNSHARED_BYTES):
        return records, None
    if file.bytes <= UNSPLIT_BYTES:
        expect_brief(spark)
    return records.coalesce(1), file.rows


def _storable(pipeline: Pipeline) -> list[State]:
    """Return the states whose keys and texts are looked at while it is known which record they come from."""
    return list(pipeline.states.values()) if pipeline.spec.quarantines and pipeline.transform is None else []


def aggregate(
    rows: DataFrame, schema: T.StructType, state: State, spec: StateSpec, *, follow: Literal["rows", "partials"] | None = None
) -> DataFrame:
    """Return the partials of one state: a row per key with the state's columns, in their declared types.

    `schema` is the rows' own: asking the DataFrame for it costs a round trip each time. To `follow` something, each partial
    also tells how many rows it was made of, and the sum of their ids, or an id of its own.

    Raises: DeclarationInvalid if a column is missing or has a type that would lose something.
    """
    keys = [state_columns.column_of(schema, spec, key.name, key.type).alias(key.name) for key in spec.keys]
    values = []
    for value in spec.values:
        declared = state.aggregates[value.name]
        if declared.column is None:
            values.append(F.count(F.lit(1)).alias(value.name))
            continue
        exact = declared.function != "count"
        column = state_columns.column_of(schema, spec, declared.column, value.type if exact else None)
        result: Column = getattr(F, declared.function)(column)
        if declared.function == "sum":
            result = F.coalesce(result, F.lit(0))
        values.append(result.cast(state_columns.spark_type(value.type)).alias(value.name))
    types = {column.name: state_columns.spark_type(column.type) for column in spec.columns}
    if follow and _counter(state) == ROWS:
        values.append(F.count(F.lit(1)).alias(ROWS))
        types[ROWS] = T.LongType()
    if follow == "rows":
        values.append(hash_sum(ID).alias(HASH))
    partials = rows.groupBy(*keys).agg(*values)
    if follow == "partials":
        partials = partials.withColumn(HASH, F.xxhash64(*types))
    if follow:
        types[HASH] = T.LongType()
    # Nothing is converted; but mapInArrow would ask the server for the columns, which analyses the whole query once more.
    return partials.to(T.StructType([T.StructField(name, kind) for name, kind in types.items()]))


def _counter(state: State) -> str:
    """Return the column that tells of how many rows a partial was made: one of the state's own, if it counts them anyway."""
    return next((name for name, a in state.aggregates.items() if a.function == "count" and a.column is None), ROWS)


@contextmanager
def _spark_errors(emitter: Emitter, attempt: Attempt) -> Iterator[None]:
    """Turn Spark's errors into ours: the source's if it knows better, else what `meaning_of` finds."""
    identity = _identity(attempt)
    try:
        yield
    except errors.TidegateError as error:
        told = emitter.explain(error) or error
        raise type(told)(str(told).removeprefix(f"{attempt}: "), **identity) from error
    except (PySparkException, grpc.RpcError) as error:
        if explained := quarantine.explain(error) or state_columns.explain(error) or emitter.explain(error):
            raise type(explained)(str(explained), **identity) from error
        raise meaning_of(error, **identity) from error


def _identity(attempt: Attempt) -> dict[str, Any]:
    return {"pipeline": attempt.pipeline, "txid": attempt.txid, "attempt": attempt.number}
