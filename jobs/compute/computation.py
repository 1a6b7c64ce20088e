"""One attempt, step by step: read the frozen input, transform, aggregate per key, stage, reconcile, seal.

`jobs.compute.route` decides which shortcuts it takes. Any number of attempts may run at once.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that PySpark's users know
from pyspark.sql import types as T  # noqa: N812

from jobs.compute import arrays, quarantine, staging, state_columns
from jobs.compute.aggregate import aggregate, counter_of
from jobs.compute.purity import check_pure
from jobs.compute.route import Route, Routing, choose, is_flagged, is_untouched
from jobs.compute.session import application_of, expect_brief, interruptible
from jobs.compute.spark_errors import meaning_of
from jobs.compute.staging import NeedsExecutors, StagedRows
from jobs.compute.tracking import ID, RowSums, Tracker, check_complete, used_columns
from jobs.pipeline import Pipeline, Transform
from jobs.sources import ORIGIN, REFUSAL, Emitter, InputFacts
from jobs.states import AnyState
from state_store import StateStore, errors
from state_store.attempts import Attempt, Tracked
from state_store.batches import QUARANTINED
from state_store.declaration import QuarantineSpec, StateSpec

logger = logging.getLogger(__name__)


def stage_batch(
    store: StateStore, pipeline: Pipeline, attempt: Attempt, spark: SparkSession, *, routing: Routing = choose
) -> None:
    """Compute the attempt's partials, stage and seal them.

    If the process dies before the end, nothing was sealed and nothing counts. Rows are checked against the frozen metadata
    before they are read and again before the seal, and the sums of their hashes have to agree (`jobs.compute.tracking`).

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
        done = _Computation(store, pipeline, attempt, emitter, spark).run(routing)
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
    """The result of one pass over a batch: the row sums at the source and after the transform, and the staged rows."""

    emitted: RowSums
    returned: RowSums
    staged: list[StagedRows]
    staged_at: datetime


class _Computation:
    """One attempt's passes over its batch."""

    def __init__(self, store: StateStore, pipeline: Pipeline, attempt: Attempt, emitter: Emitter, spark: SparkSession) -> None:
        self._store = store
        self._pipeline = pipeline
        self._attempt = attempt
        self._emitter = emitter
        self._spark = spark
        self._is_replay = QUARANTINED in attempt.source_metadata

    def run(self, routing: Routing) -> _Computed:
        """Compute and stage by the chosen route; on executors if staging in process turns out to be impossible.

        Raises: the errors of `stage_batch`.
        """
        attempt, records = self._attempt, self._read()
        # Of records from quarantine, the source knows nothing in advance.
        facts = InputFacts() if self._is_replay else self._emitter.facts(attempt, attempt.source_metadata)
        route = routing(self._pipeline, attempt, facts)
        if route.is_brief:
            expect_brief(self._spark)
        if route.one_task:
            records = records.coalesce(1)
        try:
            return self._pass(records, route)
        except NeedsExecutors as why:
            logger.info("%s is staged on executors: %s", attempt, why)
            return self._pass(records, replace(route, in_process=frozenset()))

    def _read(self) -> DataFrame:
        """Return the batch's rows; with the columns of `Emitter.emit_records` if some of them may be bad."""
        pipeline, attempt, emitter = self._pipeline, self._attempt, self._emitter
        # Keys and texts are checked where it is known which record they come from.
        storable = list(pipeline.states.values()) if pipeline.spec.quarantines and pipeline.transform is None else []
        if self._is_replay:
            settings = self._store.settings
            conninfo, tasks = staging.conninfo_of_tasks(settings), settings.staging_connections
            records = quarantine.waiting_records(self._spark, emitter, conninfo, pipeline.name, attempt.txid, tasks)
        elif is_flagged(pipeline, attempt):
            records = emitter.emit_records(attempt, attempt.source_metadata)
        else:
            return emitter.emit_batch(attempt, attempt.source_metadata)
        return quarantine.with_checks(records, pipeline.check, storable)

    def _pass(self, records: DataFrame, route: Route) -> _Computed:
        # A second pass needs trackers of its own: the sums of the first may cover only the rows that it read before it stopped.
        place = f"{self._attempt}, {'in process' if route.in_process else 'on executors'}"
        if route.follows_partials is not None:
            return self._follow_partials(records, route, route.follows_partials, place)
        return self._follow_rows(records, route, place)

    def _follow_rows(self, records: DataFrame, route: Route, place: str) -> _Computed:
        """Reconcile row by row: the source's rows are counted and hashed, the transform's are followed into staging.

        Raises: NeedsExecutors, and then none of the staged rows count; RowsLost.
        """
        pipeline, attempt = self._pipeline, self._attempt
        used, untouched = used_columns(pipeline), is_untouched(pipeline, attempt)
        source, transformed = Tracker(f"source of {place}"), Tracker(f"transform of {place}")
        schema = records.schema  # asking a DataFrame for it costs a round trip each time
        rows = records = self._track_source(source, records, schema, route)
        if not untouched:
            records = records.drop(ID)
            rows = self._transformed(records, schema)
            schema = rows.schema
            rows = transformed.attach(rows, schema, used)
        staged: list[StagedRows] = []
        for name, state in pipeline.states.items():
            spec = state.spec(name)
            partials = aggregate(rows, schema, state, spec, follow=None if used is None or state.unanchored else "rows")
            staged.append(self._stage(state, spec, partials, route))
        emitted = source.sums()
        self._check_expected(emitted.rows)
        # Rows that nothing has touched since the source are the transformed rows: they are counted once.
        returned = RowSums(emitted.rows, emitted.hash if used is not None else None) if untouched else transformed.sums()
        if pipeline.transform is None:
            good = emitted.rows - emitted.flagged
            check_complete(attempt, "the rows without a transform", RowSums(good), RowSums(returned.rows))
        for (name, state), done in zip(pipeline.states.items(), staged, strict=True):
            if used is not None and not state.unanchored:
                check_complete(attempt, f"state {name}", returned, done.reconciled)
        if emitted.flagged:
            staged.append(self._stage_bad(records, emitted))
        return _Computed(emitted, returned, staged, datetime.now(UTC))

    def _follow_partials(self, records: DataFrame, route: Route, expected_rows: int, place: str) -> _Computed:
        """Reconcile partial by partial, where the source vouches for the rows and for their number.

        Raises: NeedsExecutors, and then none of the staged rows count; RowsLost.
        """
        schema = records.schema
        staged: list[StagedRows] = []
        for name, state in self._pipeline.states.items():
            spec, followed = state.spec(name), Tracker(f"state {name} of {place}")
            partials = aggregate(records, schema, state, spec, follow="partials")
            partials = followed.attach_partials(partials, counter_of(state))
            staged.append(self._stage(state, spec, partials, route))
            found = followed.sums()
            if found.rows != expected_rows:  # a source that has changed says so first
                self._emitter.verify_batch(self._attempt, self._attempt.source_metadata)
            check_complete(self._attempt, f"the partials of state {name}", RowSums(expected_rows), RowSums(found.rows))
            check_complete(self._attempt, f"state {name}", found, staged[-1].reconciled)
        return _Computed(RowSums(expected_rows), RowSums(expected_rows), staged, datetime.now(UTC))

    def _track_source(self, source: Tracker, records: DataFrame, schema: T.StructType, route: Route) -> DataFrame:
        """Return the records, counted and, unless tracking is off, hashed."""
        columns: list[str] | None = None
        if route.hashes_used_columns:
            columns = used_columns(self._pipeline)
        elif self._pipeline.tracking != "off":
            columns = [name for name in schema.names if name not in (ORIGIN, REFUSAL)]
        flag = F.col(REFUSAL).isNotNull() if REFUSAL in schema.names else None
        return source.attach(records, schema, columns, flag)

    def _transformed(self, records: DataFrame, schema: T.StructType) -> DataFrame:
        """Return the rows that reach the states: without the bad ones, and transformed."""
        rows = records
        if REFUSAL in schema.names:
            rows = quarantine.good(records) if self._pipeline.spec.quarantines else quarantine.good_or_refuse(records)
        if self._pipeline.transform:
            rows = apply_transform(self._pipeline.transform, rows, schema.names)
        return rows

    def _stage(self, state: AnyState, spec: StateSpec, partials: DataFrame, route: Route) -> StagedRows:
        counter = counter_of(state)
        if spec.name in route.in_process:
            most = route.most_in_process
            return staging.stage_in_process(self._store, self._attempt, spec, partials, counter, most=most)
        return staging.stage_on_executors(self._store.settings, self._attempt, spec, partials, counter)

    def _stage_bad(self, records: DataFrame, emitted: RowSums) -> StagedRows:
        """Stage the flagged records, all of them."""
        spec = QuarantineSpec(self._pipeline.name)
        bad = staging.stage_on_executors(self._store.settings, self._attempt, spec, quarantine.bad(records))
        check_complete(self._attempt, "the quarantine", RowSums(emitted.flagged), RowSums(bad.rows))
        return bad

    def _check_expected(self, rows: int) -> None:
        """Refuse an attempt for which Spark read more or fewer rows than the source itself counts.

        Raises: RowsLost; the errors of `Emitter.verify_batch` if the source has changed since it was planned.
        """
        if self._is_replay:
            return
        attempt, emitter = self._attempt, self._emitter
        expected = emitter.expected_rows(attempt.source_metadata)
        if expected not in (None, rows):
            emitter.verify_batch(attempt, attempt.source_metadata)
            raise errors.RowsLost(
                f"{attempt}: the source has {expected} rows, {rows} arrived in Spark. Either Spark lost or repeated some, or "
                "the transform does not read all rows, as with limit(): it has to."
            )


def apply_transform(transform: Transform, rows: DataFrame, columns: list[str]) -> DataFrame:
    """Return the transformed rows: most often just a plan, and no row has been read.

    Raises: DeclarationInvalid if the code is at fault. Errors that may mean that something is away are passed on.
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


@contextmanager
def _spark_errors(emitter: Emitter, attempt: Attempt) -> Iterator[None]:
    """Turn Spark's errors into ours: the source's explanation if it has one, else that of `meaning_of`."""
    try:
        yield
    except errors.TidegateError as error:
        explained = emitter.explain(error) or error
        raise type(explained)(str(explained).removeprefix(f"{attempt}: "), **attempt.identity) from error
    except (PySparkException, grpc.RpcError) as error:
        if cause := _explain(error) or emitter.explain(error):
            raise type(cause)(str(cause), **attempt.identity) from error
        raise meaning_of(error, **attempt.identity) from error


def _explain(error: Exception) -> errors.TidegateError | None:
    """Return what a query of ours has refused; None if the error is about something else."""
    return quarantine.explain(error) or state_columns.explain(error) or arrays.explain(error)
