"""One attempt, step by step: read the frozen input, transform, aggregate per key, stage, reconcile, seal.

Reconciling compares counts and hash sums of rows at two places, such as the source and staging; a difference fails the
attempt. A partial is the result for one key. Column REFUSAL of a flagged row says why it is bad. A pass is one
computation of the whole batch, with the shortcuts of its route. Any number of attempts may run at once.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from tidegate.jobs.compute.partials.rows_to_partials import aggregate, counter_of
from tidegate.jobs.compute.sessions.interruption import interruptible
from tidegate.jobs.compute.sessions.session import application_of
from tidegate.jobs.compute.shortcuts import SAFE, Route, Routing, choose, is_flagged, is_untouched
from tidegate.jobs.compute.stage import bad_records, row_tracking, stage_partials, waiting_records
from tidegate.jobs.compute.stage.record_checks import with_checks
from tidegate.jobs.compute.stage.row_tracking import RowSums, Tracker, check_complete, is_followed
from tidegate.jobs.compute.stage.stage_partials import NeedsExecutors, StagedRows
from tidegate.jobs.compute.transform.run_transform import Frames, apply_transform, check_united, check_used
from tidegate.jobs.compute.transform.state_query_answers import StateAnswers
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL, BatchPart, Emitter, InputFacts
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.inputs.read import merged
from tidegate.jobs.spark.library_internals import disable_reattach
from tidegate.jobs.spark.spark_errors import meaning_of
from tidegate.jobs.spark.task_connections import conninfo_of_tasks
from tidegate.jobs.spark.task_errors import reported_in
from tidegate.jobs.state_queries import answered_by
from tidegate.jobs.states import AnyState
from tidegate.state_store import StateStore
from tidegate.state_store.attempt.attempts import Attempt, Tracked
from tidegate.state_store.base import errors
from tidegate.state_store.declarations.pipeline_spec import QuarantineSpec, StateSpec
from tidegate.state_store.ledger.batches import QUARANTINED
from tidegate.state_store.read_states.transform_reads import QueriedState

logger = logging.getLogger(__name__)

# More tasks than any DataFrame has: coalesce() then merges none, but hides from Spark that there may be just one. Spark would
# join two sides of one task each without a shuffle, and stop reading one side when the other ends: rows would go uncounted.
UNKNOWN_TASKS = 100_000


def stage_batch(
    store: StateStore, pipeline: Pipeline, attempt: Attempt, spark: SparkSession, *, routing: Routing = choose
) -> None:
    """Compute the attempt's partials, stage and seal them.

    If the process dies first, nothing is sealed, so no staged row reaches a state. The source checks its data against the
    frozen metadata before the read and before the seal.

    Raises: the source's errors; SettingsInvalid, SchemaOutOfDate, DeclarationInvalid, MalformedRecord, TransformFailed, BadKey,
    Overflow (permanent); RowsLost, AttemptTimedOut, SparkFailed, SparkUnavailable, StoreUnavailable (retryable); AttemptFenced.
    """
    emitter = emitter_of(pipeline.source, spark, store.settings)
    timeout = pipeline.message_timeout_seconds or store.settings.attempt_timeout_seconds
    with (
        _spark_errors(emitter, attempt),
        interruptible(spark, attempt, timeout, lambda: not store.keep_alive(attempt)) as tag,
    ):
        store.note_spark(attempt, application_of(spark), tag)
        with store.queried_states(pipeline.spec) as states:
            computed = _Computation(store, pipeline, attempt, emitter, spark, states).run(routing)
        if QUARANTINED in attempt.source_metadata:
            waiting_records.check_all_read(attempt, attempt.source_metadata[QUARANTINED], computed.emitted.rows)
            emitter.verify_replay(attempt)
        else:
            emitter.verify_batch(attempt, attempt.source_metadata)
    sums = Tracked(
        source_rows=computed.emitted.rows,
        source_hash_sum=computed.emitted.hash,
        quarantined_rows=computed.emitted.flagged,
        transformed_rows=computed.returned.rows,
        transformed_hash_sum=computed.returned.hash,
        staged_bytes=sum(staged.bytes for staged in computed.staged),
        staged_at=computed.staged_at,
    )
    partitions = [partition for staged in computed.staged for partition in staged.partitions]
    store.seal(attempt, partitions, sums, emitter.undeclared())
    logger.info("%s sealed: %d source rows, %d partials", attempt, computed.emitted.rows, sum(s.rows for s in computed.staged))


@dataclass(frozen=True)
class _Computed:
    """The result of one pass: the row sums at the source and after the transform, and the staged rows."""

    emitted: RowSums
    returned: RowSums
    staged: list[StagedRows]
    staged_at: datetime


class _Computation:
    """Computes and stages one attempt's batch, in one pass, or in two if its route fails."""

    def __init__(
        self,
        store: StateStore,
        pipeline: Pipeline,
        attempt: Attempt,
        emitter: Emitter,
        spark: SparkSession,
        states: Mapping[str, QueriedState],
    ) -> None:
        conninfo, tasks = conninfo_of_tasks(store.settings), store.settings.staging_connections
        self._answers = StateAnswers(states, attempt.txid, conninfo, tasks)
        self._store = store
        self._pipeline = pipeline
        self._attempt = attempt
        self._emitter = emitter
        self._spark = spark
        self._is_replay = QUARANTINED in attempt.source_metadata
        self._route = SAFE  # of the present pass

    def run(self, routing: Routing) -> _Computed:
        """Compute and stage by the chosen route; if this process cannot stage the partials, repeat all on executors.

        Raises: the errors of `stage_batch`.
        """
        attempt, parts = self._attempt, self._read()
        # A replay reads records from quarantine, of which the source knows no facts.
        facts = InputFacts() if self._is_replay else self._emitter.facts(attempt, attempt.source_metadata)
        self._route = route = routing(self._pipeline, attempt, facts)
        if route.is_brief:
            disable_reattach(self._spark)
        if route.one_task and (len(parts) == 1 or self._pipeline.transform is None):
            parts = {name: replace(part, rows=part.rows.coalesce(1)) for name, part in parts.items()}
        try:
            return self._pass(parts)
        except NeedsExecutors as reason:
            logger.info("%s is staged on executors: %s", attempt, reason)
            self._route = replace(route, in_process=frozenset())
            return self._pass(parts)

    def _read(self) -> Mapping[str, BatchPart]:
        """Return the batch's rows by input; if some may be bad, with columns for origin, refusal and payload."""
        pipeline, attempt, emitter = self._pipeline, self._attempt, self._emitter
        flagged, with_idle = is_flagged(pipeline, attempt), pipeline.transform is not None
        if self._is_replay:
            parts = emitter.replay_parts(attempt, self._waiting, with_idle=with_idle)
        else:
            parts = emitter.emit_parts(attempt, attempt.source_metadata, flagged=flagged, with_idle=with_idle)
        if not flagged:
            return parts
        # Without a transform, keys and texts that Postgres refuses are flagged here, where each row is still one source record.
        checked_states = list(pipeline.states.values()) if pipeline.spec.quarantines and pipeline.transform is None else []
        checked = {
            name: replace(
                part,
                rows=with_checks(bad_records.with_input(part.rows, name), pipeline.check_of(name), checked_states),
            )
            for name, part in parts.items()
            if part.role == "input"
        }
        return {**parts, **checked}

    def _waiting(self, name: str, emitter: Emitter) -> DataFrame:
        blocks = 1 + self._attempt.source_metadata[QUARANTINED] // waiting_records.ROWS_PER_BLOCK
        conninfo, tasks = conninfo_of_tasks(self._store.settings), min(blocks, self._store.settings.staging_connections)
        reader = waiting_records.WaitingReader(conninfo, self._pipeline.name, self._attempt.txid, tasks, of=name)
        return waiting_records.waiting_records(self._spark, emitter, reader)

    def _pass(self, parts: Mapping[str, BatchPart]) -> _Computed:
        if self._route.follows_partials is not None:
            return self._follow_partials(parts, self._route.follows_partials)
        return self._follow_rows(parts)

    @property
    def _pass_name(self) -> str:
        """The pass, for the names of its trackers: those of a failed first pass may have counted only some rows."""
        return f"{self._attempt}, {'in process' if self._route.in_process else 'on executors'}"

    def _follow_rows(self, parts: Mapping[str, BatchPart]) -> _Computed:
        """Compute and stage; compare the sums of the transformed rows with those in the staged partials.

        Raises: NeedsExecutors, and then nothing is sealed; RowsLost; DeclarationInvalid.
        """
        pipeline = self._pipeline
        used = row_tracking.used_columns(pipeline) if row_tracking.is_tracked(pipeline) else None
        untouched = is_untouched(pipeline, self._attempt)
        tracked = {name: self._track(name, part) for name, part in parts.items()}
        transformed = Tracker(f"transform of {self._pass_name}")
        if untouched:
            rows, schema = _merge_inputs(tracked, self._route)
        else:
            rows = self._transform(tracked)
            schema = rows.schema
            rows = transformed.attach(rows, schema, used)
        first, *others = pipeline.states.items()
        staged = [self._aggregate_and_stage(*first, rows, schema)]
        if others and not untouched:
            # The other states compute the rows again. Their sums must equal those of the rows of the first state.
            rows = self._transform({name: replace(each, rows=parts[name].rows, tracker=None) for name, each in tracked.items()})
            rows = rows if used is None else row_tracking.with_id(rows, schema, used)
        staged += [self._aggregate_and_stage(*each, rows, schema) for each in others]
        emitted = self._input_sums(tracked)
        # Without transform and flags, the source's rows are the transformed rows, and are counted only once.
        returned = RowSums(emitted.rows, emitted.hash if used is not None else None) if untouched else transformed.sums()
        self._reconcile(emitted, returned, staged)
        if emitted.flagged:
            staged.append(self._stage_bad([each for each in tracked.values() if each.part.role == "input"], emitted))
        return _Computed(emitted, returned, staged, datetime.now(UTC))

    def _reconcile(self, emitted: RowSums, returned: RowSums, staged: Sequence[StagedRows]) -> None:
        """Compare the sums of rows at the source, after the transform, and in each state's staging."""
        pipeline, attempt = self._pipeline, self._attempt
        if pipeline.transform is None:
            good = emitted.rows - emitted.flagged
            check_complete(attempt, "the rows without a transform", RowSums(good), RowSums(returned.rows))
        for (name, state), rows in zip(pipeline.states.items(), staged, strict=True):
            if is_followed(pipeline, state):
                check_complete(attempt, f"state {name}", returned, rows.reconciled)

    def _aggregate_and_stage(self, name: str, state: AnyState, rows: DataFrame, schema: T.StructType) -> StagedRows:
        spec = state.spec(name)
        partials = aggregate(rows, schema, state, spec, follow="rows" if is_followed(self._pipeline, state) else None)
        return self._stage(state, spec, partials)

    def _follow_partials(self, parts: Mapping[str, BatchPart], expected_rows: int) -> _Computed:
        """Compute and stage; follow only partials, as the source vouches for the rows and their number.

        Raises: NeedsExecutors, and then nothing is sealed; RowsLost; errors of `Emitter.verify_batch`.
        """
        records, schema = _merge_inputs(
            {name: _TrackedPart(part, part.rows, part.rows.schema) for name, part in parts.items()}, self._route
        )
        staged: list[StagedRows] = []
        for name, state in self._pipeline.states.items():
            spec, followed = state.spec(name), Tracker(f"state {name} of {self._pass_name}")
            partials = aggregate(records, schema, state, spec, follow="partials")
            partials = followed.attach_partials(partials, counter_of(state))
            staged.append(self._stage(state, spec, partials))
            sums = followed.sums()
            if sums.rows != expected_rows:  # if the source has changed, its error is raised rather than RowsLost
                self._emitter.verify_batch(self._attempt, self._attempt.source_metadata)
            check_complete(self._attempt, f"the partials of state {name}", RowSums(expected_rows), RowSums(sums.rows))
            check_complete(self._attempt, f"state {name}", sums, staged[-1].reconciled)
        return _Computed(RowSums(expected_rows), RowSums(expected_rows), staged, datetime.now(UTC))

    def _track(self, name: str, part: BatchPart) -> "_TrackedPart":
        """Return a part's rows, counted unless it is idle; an input's rows are also hashed, as the route says."""
        schema = part.rows.schema  # asking a DataFrame for it costs a round trip each time
        if part.role == "idle":
            return _TrackedPart(part, part.rows, schema)
        what = f"{part.role} {name}" if name else "source"
        tracker = Tracker(f"{what} of {self._pass_name}", name)
        columns: list[str] | None = None
        if part.role == "input" and self._route.hashed == "used":
            columns = row_tracking.used_columns(self._pipeline)
        elif part.role == "input" and self._route.hashed == "all" and self._pipeline.tracking != "off":
            columns = [column for column in schema.names if column not in (ORIGIN, REFUSAL)]
            if part.replayed is not None:
                columns = [column for column in columns if column in (*part.replayed, PAYLOAD)]
        flag = F.col(REFUSAL).isNotNull() if REFUSAL in schema.names else None
        return _TrackedPart(part, tracker.attach(part.rows, schema, columns, flag), schema, tracker)

    def _input_sums(self, tracked: "Mapping[str, _TrackedPart]") -> RowSums:
        """Return the sums of all inputs, after checking that each input and reference was read completely."""
        sums: list[RowSums] = []
        for name, each in tracked.items():
            if each.tracker is None:
                continue
            if each.part.role == "input":
                sums.append(each.tracker.sums())
            self._check_expected(name, each.tracker.sums().rows, each.part)
        return row_tracking.total(sums)

    def _transform(self, tracked: "Mapping[str, _TrackedPart]") -> DataFrame:
        """Return the transformed rows; flagged rows are left out, or fail the query."""
        inputs: dict[str, _TrackedPart] = {}
        for name, each in tracked.items():
            rows = each.rows.drop(row_tracking.ID) if each.part.role == "input" else each.rows
            if len(tracked) > 1:
                rows = rows.coalesce(UNKNOWN_TASKS)
            if REFUSAL in each.schema.names:
                rows = bad_records.good(rows) if self._pipeline.spec.quarantines else bad_records.good_or_refuse(rows)
            inputs[name] = replace(each, rows=rows)
        if self._pipeline.transform is None:
            return _merge_inputs(inputs, SAFE)[0]
        frames = Frames({name: each.rows for name, each in inputs.items()})
        columns = {column for each in inputs.values() for column in each.schema.names}
        with answered_by(self._answers):
            returned = apply_transform(self._pipeline.transform, frames, columns)
        check_used(returned, {name: frames[name] for name, each in inputs.items() if name and each.tracker})
        if self._pipeline.spec.quarantines or self._is_replay:
            check_united(returned, {name: frames[name] for name, each in inputs.items() if each.part.role != "reference"})
        return returned

    def _stage(self, state: AnyState, spec: StateSpec, partials: DataFrame) -> StagedRows:
        counter = counter_of(state)
        if spec.name in self._route.in_process:
            most = self._route.most_in_process
            return stage_partials.stage_in_process(self._store, self._attempt, spec, partials, counter, most=most)
        return stage_partials.stage_on_executors(self._store.settings, self._attempt, spec, partials, counter)

    def _stage_bad(self, inputs: "Sequence[_TrackedPart]", emitted: RowSums) -> StagedRows:
        """Stage all flagged records, for quarantine. Inputs have different columns, their bad records have the same."""
        spec = QuarantineSpec(self._pipeline.name)
        records = reduce(DataFrame.unionByName, [bad_records.bad(each.rows.drop(row_tracking.ID)) for each in inputs])
        bad = stage_partials.stage_on_executors(self._store.settings, self._attempt, spec, records)
        check_complete(self._attempt, "the quarantine", RowSums(emitted.flagged), RowSums(bad.rows))
        return bad

    def _check_expected(self, name: str, rows: int, part: BatchPart) -> None:
        """Refuse an attempt that read more or fewer rows than the source itself counts."""
        attempt, expected = self._attempt, part.expected()
        if expected not in (None, rows):
            self._emitter.verify_batch(attempt, attempt.source_metadata)
            place = f"{part.role} {name}" if name else "the source"
            joins = " or a join without equal columns, in which one side must be marked by broadcast()" if name else ""
            raise errors.RowsLost(
                f"{attempt}: {place} has {expected} rows, {rows} arrived in Spark. Either Spark lost or repeated some, or "
                f"the transform does not read each row exactly once, as with limit(){joins}."
            )


@dataclass(frozen=True)
class _TrackedPart:
    """A part of a batch: `rows` as observed by `tracker`, if it has one, and `schema`, the columns without the added hash."""

    part: BatchPart
    rows: DataFrame
    schema: T.StructType
    tracker: Tracker | None = None


def _merge_inputs(tracked: Mapping[str, _TrackedPart], route: Route) -> tuple[DataFrame, T.StructType]:
    """Return the rows of all inputs as one DataFrame, and its columns."""
    inputs = {name: each for name, each in tracked.items() if each.part.role == "input"}
    schemas = {name: each.schema for name, each in inputs.items()}
    rows = merged({name: each.rows for name, each in inputs.items()}, schemas)
    if route.one_task and len(inputs) > 1:
        rows = rows.coalesce(1)
    return rows, next(iter(schemas.values()))


@contextmanager
def _spark_errors(emitter: Emitter, attempt: Attempt) -> Iterator[None]:
    """Raise Spark's errors as ours: one that a task reported, else the source's explanation, else `meaning_of`."""
    try:
        yield
    except errors.TidegateError as error:
        explained = emitter.explain(error) or error
        raise type(explained)(str(explained).removeprefix(f"{attempt}: ")) from error
    except (PySparkException, grpc.RpcError) as error:
        if cause := reported_in(error) or emitter.explain(error):
            raise cause from error
        raise meaning_of(error, attempt.number) from error
