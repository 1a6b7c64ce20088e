"""StateStore: one public method per step of a batch's life, question or action.

A step is exactly one transaction. Methods that look up the outcome of a COMMIT, read long lists or remove old rows run several.
No function below this facade opens or ends a transaction. Numbers such as I6 are rules of docs/protocol.md.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from tidegate.state_store.attempt import begin_attempt, turns
from tidegate.state_store.attempt.begin_attempt import Mode, NewInput, NotStarted, ReplanNeeded
from tidegate.state_store.attempt.turns import UNREGISTERED, Turn, TurnFacts
from tidegate.state_store.base.errors import LockHeld, StoreUnavailable, storable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.commit import (
    commit_facts,
    commit_record,
    event_windows,
    merge_into_states,
    ordered_commit,
    quarantined_records,
    verdicts,
)
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.commit.event_windows import EventTimeProgress
from tidegate.state_store.connections import role_settings
from tidegate.state_store.connections.copy_into_staging import CsvReader
from tidegate.state_store.connections.database import DDL_LOCK_TIMEOUT_SECONDS, Database, left_for_later
from tidegate.state_store.connections.local_settings import hold_open
from tidegate.state_store.connections.table_locks import hold
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, SourceMetadata, Staged, StateSpec
from tidegate.state_store.ledger import batches, counted_files, cursors, followers, plan_outcomes, schema_revision
from tidegate.state_store.ledger.batches import BatchInput
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.ledger.counted_files import TakenFile
from tidegate.state_store.ledger.followers import Follower
from tidegate.state_store.operate import mended_records, pruning, recorded_actions
from tidegate.state_store.operate.mended_records import Mend, Original
from tidegate.state_store.operate.recorded_actions import Redo
from tidegate.state_store.operate.redo_refusals import check_not_followed
from tidegate.state_store.pipeline_changes import rebuilds, retirement
from tidegate.state_store.read_ledger import batch_search, batch_status, pipeline_overview, wait_facts
from tidegate.state_store.read_ledger.batch_search import BatchFilter, SearchResult
from tidegate.state_store.read_ledger.batch_status import BatchHistory, BatchStatus, Lag
from tidegate.state_store.read_ledger.trace_times import AttemptTimes, attempt_times
from tidegate.state_store.read_ledger.wait_facts import Wait
from tidegate.state_store.read_states import state_rows, transform_reads
from tidegate.state_store.read_states.transform_reads import QueriedState
from tidegate.state_store.seal import attempts, staging_tables
from tidegate.state_store.seal.attempts import AirflowTry, Attempt, StagedPartition, Tracked
from tidegate.state_store.states import range_partitions

logger = logging.getLogger(__name__)

STAGING_DROPS_PER_PLAN = 20
RESOLVE_TRIES = 5
SEAL_PATIENCE_SECONDS = 30
FILES_AT_ONCE = 10_000  # most names in one statement, so most files held in memory at once
SECONDS_BETWEEN_REMOVALS = 0.1  # so that the next one does not overtake commits and readers that have waited
_Removed = TypeVar("_Removed")


class StateStore(Database):
    """The ledger and the states of all pipelines in one Postgres database. Thread-safe; calls share nothing.

    Every method that changes something is safe to call again after a crash at any point: it finds its work done, or does it
    once.
    """

    def __init__(self, settings: Settings, *, user: str | None = None) -> None:
        super().__init__(settings, user=user)
        self.witness = Witness(settings.marks_folder, trusts_promotions=settings.trusts_promotions)

    @classmethod
    def connect(cls, settings: Settings, *, user: str | None = None) -> Self:
        """Return a store, after checking that the database answers and has the revision that this code needs.

        Raises: StoreUnavailable, AccessRefused, SchemaOutOfDate.
        """
        store = cls(settings, user=user)
        try:
            with store._transaction(f"connecting as {user or settings.pg_user}") as connection:
                schema_revision.check_revision(connection)
        except BaseException:
            store.close()
            raise
        return store

    # plan

    def begin_plan(self, pipeline: str, run_id: str) -> plan_outcomes.Beginning:
        """Return where a plan begins. A run that has planned before goes on in a paused pipeline.

        Raises: PipelinePaused; SchemaOutOfDate if the pipeline is not registered.
        """
        with self._transaction("beginning a plan") as connection:
            if not batches.run_txids(connection, pipeline, run_id):
                recorded_actions.check_not_paused(connection, pipeline)
            return plan_outcomes.Beginning(
                cursors.committed(connection, pipeline), plan_outcomes.succeeded(connection, pipeline)
            )

    def fail_plan(self, pipeline: str, began: plan_outcomes.Beginning, run_id: str, error: str) -> bool:
        """Record why a plan failed, for people, until another succeeds; False, unrecorded, if one has since it began."""
        with self._write_transaction("recording that a plan has failed") as connection:
            return plan_outcomes.note_failure(connection, pipeline, began, run_id, storable(error))

    def last_opened(self, pipeline: str) -> BatchInput | None:
        """Return the newest opened batch with its current metadata; None before the first.

        Raises: MetadataCorrupt.
        """
        with self._transaction("reading the ledger") as connection:
            return batches.last_opened(connection, pipeline)

    def committed(self, pipeline: str) -> int:
        """Return the last committed txid; 0 before the first.

        Raises: SchemaOutOfDate if the pipeline is not registered.
        """
        with self._transaction("reading the cursor") as connection:
            return cursors.committed(connection, pipeline)

    def uncommitted(self, pipeline: str, limit: int) -> list[int]:
        """Return the opened txids that have not committed, in order, at most `limit`."""
        with self._transaction("reading the ledger") as connection:
            return batches.uncommitted(connection, pipeline, limit)

    def taken_files(self, pipeline: str, names: Sequence[str], before_txid: int) -> Iterator[tuple[str, Sequence[TakenFile]]]:
        """Yield each name with its files, one per content, that batches before a txid have read or will read.

        In memory are the files of uncommitted batches, and those of FILES_AT_ONCE names.

        Raises: MetadataCorrupt.
        """
        # First of uncommitted batches: one that commits meanwhile is seen twice rather than not at all.
        with self._transaction("reading which files are planned") as connection:
            planned = counted_files.planned(batches.uncommitted_inputs(connection, pipeline, before_txid))
        for start in range(0, len(names), FILES_AT_ONCE):
            chunk = names[start : start + FILES_AT_ONCE]
            with self._transaction("reading which files have counted") as connection:
                counted = counted_files.counted(connection, pipeline, chunk, before_txid)
            for name in chunk:
                yield name, [*planned.get(name, ()), *counted.get(name, ())]

    def note_times(self, pipeline: str, files: Sequence[TakenFile]) -> None:
        """Record the new modification times (`mtime_ns`) of counted files with unchanged content.

        If another session has locked one, none is recorded, and a later plan reads the files once more.
        """
        with self._transaction_for_later(f"noting when files of {pipeline} were touched") as connection:
            counted_files.note_times(connection, pipeline, files)

    def run_txids(self, pipeline: str, run_id: str) -> list[int]:
        """Return the txids that a run covers, in order; empty if it has not planned yet."""
        with self._transaction("reading the run") as connection:
            return batches.run_txids(connection, pipeline, run_id)

    def open_batches(
        self,
        spec: PipelineSpec,
        run_id: str,
        pending: Sequence[int],
        after: BatchInput | None,
        metadata: Sequence[bytes] | None,
        *,
        awaits_ack: bool = True,
    ) -> list[int] | None:
        """Freeze the metadata of the batches after `after`, and assign them and the `pending` batches to the run.

        Without `metadata`, the source was not asked. `awaits_ack` is whether it has to learn of each commit (`note_ack`).

        Returns the run's txids; those of its first plan if it has planned before; None if another planner was first: then
        nothing is written, and the caller plans again. All or nothing (I6).

        Raises: PipelinePaused; RangeRefused without a batch `after`, near the last possible txid, or for too large metadata;
        HoleDetected; SchemaOutOfDate; DeclarationChanged if new batches come from another declaration than the registered one.
        """
        last, new = after.txid if after else 0, metadata or ()
        batches.check_limits(spec.name, last, new)
        with self._write_transaction("opening batches") as connection:
            if planned := batches.run_txids(connection, spec.name, run_id):
                return planned
            recorded_actions.check_not_paused(connection, spec.name)
            cursors.check_history(connection, spec.name, self.witness)
            if new:  # what another declaration has planned would count even if that is never registered
                verdicts.check_declaration(spec, commit_facts.read_registered(connection, spec.name))
            with left_for_later(connection, f"noting the window of {spec.name}"):
                batches.note_window(connection, spec)
            if (committed := cursors.mark(connection, spec.name)) is not None:
                self.witness.advance(committed)  # a process on another machine may have committed it
            if new and not (
                batches.insert_batches(connection, spec.name, after, new, run_id, awaits_ack=awaits_ack)
                and rebuilds.follow_decisions(connection, spec, after, new)
            ):
                connection.rollback()
                return None
            txids = [*pending, *range(last + 1, last + 1 + len(new))]
            if txids and not batches.assign_to_run(connection, spec.name, run_id, txids):
                connection.rollback()
                return None
            if metadata is not None:
                with left_for_later(connection, f"noting that a plan of {spec.name} has succeeded"):
                    plan_outcomes.note_success(connection, spec.name, only_that=not txids)
            return txids

    def batches_to_rebuild(self, spec: PipelineSpec, after: int, most: int) -> list[SourceMetadata]:
        """Return the metadata of the batches of a rebuild after a txid, at most so many: those that its pipeline has committed.

        Raises: MetadataCorrupt; SchemaOutOfDate if one of the two is not registered.
        """
        with self._transaction("reading which batches to rebuild") as connection:
            return rebuilds.next_batches(connection, spec, after, most)

    def begin_rebuild(self, spec: PipelineSpec, *, is_confirmed: bool = True) -> rebuilds.Progress:
        """Register the rebuild of a pipeline, with empty states of its own, as the owner of the tables. Safe to repeat.

        Unless it `is_confirmed`, nothing is done, and this returns how far it is.

        It checks the database's revision itself: migrations of states may be missing, which `connect` refuses.

        Raises: DeclarationChanged if nothing has to be rebuilt, or this pipeline cannot be; SchemaOutOfDate if it is not
        registered; PipelineRetired.
        """
        with self._write_transaction(f"beginning to rebuild {spec.name}") as connection:
            return rebuilds.begin(connection, spec, is_confirmed=is_confirmed)

    def drop_old_staging(self, spec: PipelineSpec) -> int:
        """Drop some staging of attempts whose batches committed before the retention; return their number.

        That of a rebuild is dropped as soon as its batch has committed: its batches are not redone. What another session has
        locked is left for the next call.
        """
        hours = 0 if spec.rebuilds else self.settings.staging_retention_hours
        with self._transaction_for_later(f"dropping old staging of {spec.name}") as connection:
            return staging_tables.drop_old(connection, spec, hours, STAGING_DROPS_PER_PLAN)
        return 0

    # process

    def start_attempt(
        self,
        spec: PipelineSpec,
        txid: int,
        owner: str,
        *,
        mode: Mode = "resume",
        airflow: AirflowTry | None = None,
        new_input: NewInput | None = None,
    ) -> Attempt | Commit | ReplanNeeded | NotStarted:
        """Start an attempt with new staging tables; every older attempt of the batch is fenced from now on.

        Returns the commit if the batch has committed; `NotStarted` if its newest attempt is sealed (unless the mode is
        "restage", for lost staging), if it was given up, if it has an attempt (in mode "first"), or if too many batches are in
        flight; `ReplanNeeded` if the source has to plan the batch again: call again with its plan as `new_input`. Mode "redo"
        starts an attempt at the last committed batch.

        Raises: UnknownBatch, MetadataCorrupt, HoleDetected, SchemaOutOfDate, DeclarationChanged; RangeRefused for a batch
        that cannot be redone.
        """
        with self._write_transaction("starting an attempt") as connection:
            request = begin_attempt.Request(txid, owner, mode, airflow, new_input)
            return begin_attempt.start_attempt(connection, spec, request, self.witness)

    @contextmanager
    def queried_states(self, spec: PipelineSpec) -> Iterator[dict[str, QueriedState]]:
        """Yield the states that a pipeline's transform reads, for as long as an attempt at one of its batches lasts.

        Those read as of "latest" come from one snapshot, whose connection keeps migrations away from their tables.

        Raises: DeclarationInvalid, SchemaOutOfDate, StoreUnavailable.
        """
        doing = f"looking up the states that {spec.name} queries"
        if all(query.as_of != "latest" for query in spec.queries):
            if not spec.queries:
                yield {}
                return
            with self._transaction(doing) as connection:
                states = transform_reads.find(connection, spec, self.settings.pg_stager)
            yield states
            return
        with ExitStack() as kept:
            with self.translated_errors(doing):
                unprepared = kept.enter_context(self.engine.connect())
                connection = unprepared.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                latest = [query.state for query in spec.queries if query.as_of == "latest"]
                patience = self.settings.lock_timeout_seconds
                hold(connection.connection.driver_connection, latest, lock_timeout_seconds=patience)
                hold_open(connection)
                states = transform_reads.find(connection, spec, self.settings.pg_stager)
            try:
                yield states
            finally:
                unprepared.invalidate()  # it may be lost: then tasks that needed its snapshot have failed

    def next_unbegun(self, pipeline: str, run_id: str, after: int = 0) -> int | None:
        """Return a run's next txid after this one that may begin and has not, if any; begin it in mode "first"."""
        with self._transaction("looking for a batch that has not begun") as connection:
            return turns.next_unbegun(connection, pipeline, run_id, after)

    def is_in_work(self, pipeline: str, txid: int) -> bool:
        """Return whether another process runs an attempt at this batch, as far as Postgres knows."""
        with self._transaction("looking for a running attempt") as connection:
            return turns.is_in_work(connection, pipeline, txid)

    def keep_alive(self, attempt: Attempt) -> bool:
        """Send an attempt's heartbeat, so that other tasks wait for it; False if the attempt has ended or is fenced.

        Heartbeat and answer are hints that save work: the seal checks the fence under the batch's lock.
        """
        with self._write_transaction(f"looking after {attempt}") as connection:
            return attempts.keep_alive(connection, attempt)

    def note_spark(self, attempt: Attempt, application: str, tag: str) -> None:
        """Record in which Spark application the attempt computes, and the tag of its operations, unless its row is locked."""
        with self._transaction_for_later(f"noting where {attempt} computes") as connection:
            attempts.write_spark(connection, attempt, application, tag)

    def stage(self, attempt: Attempt, staged: Staged, content: CsvReader) -> StagedPartition:
        """Copy rows into the attempt's staging from this process; return the partition for the seal.

        For few rows, which need no Spark task. Call it once per attempt and state: if the answer is lost, the attempt is not
        sealed, and the next one has its own table.

        Raises: StoreUnavailable, also for an error that `content` raises while it is read.
        """
        with self._transaction(f"staging {staged.name}") as connection:
            return staging_tables.fill(connection, staged, attempt.txid, attempt.number, content)

    def seal(
        self,
        attempt: Attempt,
        partitions: Sequence[StagedPartition],
        tracked: Tracked,
        undeclared: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Declare the attempt's staging complete: exactly these rows count. Sealing twice changes nothing.

        `undeclared` are the columns of each input that the source's declaration leaves out.

        Raises: AttemptFenced if a newer attempt owns the batch, or this one has failed; SourceChanged if a transactional source
        has emitted different rows from those of an earlier attempt.
        """
        with self._write_transaction(f"sealing {attempt}", lock_timeout_seconds=SEAL_PATIENCE_SECONDS) as connection:
            attempts.seal(connection, attempt, partitions, tracked, undeclared)

    def fail_attempt(self, attempt: Attempt, error: str, *, is_poison: bool = False) -> int:
        """Record why an attempt failed, so that its staging never counts; return `poison_tries`.

        Raises: AttemptFenced if a newer attempt owns the batch: then only the newer attempt's outcome matters.
        """
        with self._write_transaction(f"failing {attempt}") as connection:
            return attempts.fail(connection, attempt, storable(error), is_poison=is_poison)

    def poison_tries(self, pipeline: str, txid: int) -> int:
        """Return how many tries have failed by the batch's content since an operator last chose to retry it."""
        with self._transaction("counting tries") as connection:
            return attempts.poison_tries(connection, pipeline, txid)

    def source_metadata(self, pipeline: str, txid: int) -> SourceMetadata:
        """Return the metadata that a batch reads, or has read if it has committed.

        Raises: UnknownBatch, MetadataCorrupt.
        """
        with self._transaction("reading a batch") as connection:
            return batches.existing_input(connection, pipeline, txid).metadata

    def give_up(self, pipeline: str, txid: int, owner: str, reason: str, *, tries: int = 1) -> bool:
        """Give up a batch after `tries` failures by its content: it is skipped when its turn comes.

        Returns False, having changed nothing, if the batch has committed or is given up already, has failed less often, or if
        its newest attempt has not failed by the content.
        """
        with self._write_transaction("giving up a batch") as connection:
            batch = attempts.lock_batch(connection, pipeline, txid)
            if not attempts.is_poison(connection, batch) or attempts.poison_tries(connection, pipeline, txid) < tries:
                return False
            return batches.give_up(connection, pipeline, txid, owner, storable(reason))

    def halt_batch(self, pipeline: str, txid: int, reason: str) -> None:
        """Exclude the batch from automatic retries, so that later batches of the run end instead of waiting for it."""
        with self._write_transaction("halting a batch") as connection:
            batches.halt(connection, pipeline, txid, storable(reason))

    # commit

    def note_ack(self, pipeline: str, txid: int, attempt: int) -> None:
        """Record that the source has learned of the batch's commit, so that no task is needed for it any more.

        Nothing is changed if that is no longer the commit by this attempt: a redo's own ack is still due. Nor is it if another
        session has locked the batch: then the next plan gives the ack again.
        """
        with self._transaction_for_later(f"noting the ack of {pipeline} {txid}") as connection:
            batches.note_ack(connection, pipeline, txid, attempt)

    def awaiting_acks(self, pipeline: str, limit: int) -> list[Commit]:
        """Return the commits of which the source has yet to learn, in order, at most `limit`."""
        with self._transaction("looking for acks that are due") as connection:
            txids = batches.awaiting_acks(connection, pipeline, limit)
            return [done for txid in txids if (done := commit_record.find(connection, pipeline, txid))]

    def commit_batch(self, spec: PipelineSpec, txid: int, owner: str, *, attempt_timeout_seconds: int | None = None) -> Commit:
        """Commit the batch, or report that it has committed already: in txid order, each exactly once (I1-I4, I8).

        If the connection breaks, the outcome is found out under the cursor's lock on a new one, which waits for the old
        transaction to end (I10). An attempt that has not ended within the timeout (None:
        that of the settings) is taken for dead.

        Raises: CommitOutOfOrder, AttemptNotSealed, Unprocessed (process it again), StoreUnavailable; permanent errors, such as
        HoleDetected.
        """
        try:
            with self._commit_transaction(spec.name, f"committing {spec.name} {txid}") as connection:
                timeout = attempt_timeout_seconds or self.settings.attempt_timeout_seconds
                return ordered_commit.commit_batch(connection, spec, txid, owner, timeout, self.witness)
        except StoreUnavailable as unknown:
            cause = unknown.__cause__
            if isinstance(cause, DBAPIError) and not cause.connection_invalidated:
                raise  # Postgres refused, so nothing was committed: only a lost connection leaves that open
            if (done := self._resolve(spec.name, txid)) is None:
                raise
            logger.warning("%s %s: %s The cursor says that it committed.", spec.name, txid, unknown)
            return done

    def commit_ready(
        self, spec: PipelineSpec, owner: str, *, max_batches: int = ordered_commit.MAX_BATCHES_TOGETHER, wait: bool = True
    ) -> list[Commit]:
        """Commit all sealed batches that directly follow the last commit, in order, in one transaction; return them.

        The states, the cursor and every commit's row are as if each had committed alone, but the states between them are never
        visible. If the connection breaks, the next commit finds out the outcome. Without `wait`, it is an error if another
        process is committing: that process will look for further batches.

        Raises: what `commit_batch` raises. Then nothing was committed; committing one by one shows which batch is at fault.
        """
        with self._commit_transaction(spec.name, f"committing what is ready of {spec.name}") as connection:
            return ordered_commit.commit_ready(connection, spec, owner, self.witness, max_batches=max_batches, wait=wait)

    def check_not_followed(self, spec: PipelineSpec, txid: int, without: Collection[str] = ()) -> None:
        """Refuse to redo a txid if a pipeline besides `without` follows a state. A hint: `redo_batch` decides.

        Raises: RangeRefused; UsageError if one of `without` follows no state.
        """
        with self._transaction("reading who follows states") as connection:
            check_not_followed(connection, spec, txid, without)

    def redo_batch(self, spec: PipelineSpec, txid: int, request: Redo) -> Commit:
        """Replace the effect of the last committed txid by that of its newest attempt. As the owner of the tables only.

        Raises: RangeRefused if it cannot be redone; UsageError; what `commit_batch` raises.
        """
        with self._commit_transaction(spec.name, f"redoing {spec.name} {txid}") as connection:
            return recorded_actions.redo(
                connection, spec, txid, replace(request, reason=storable(request.reason)), self.witness
            )

    # by hand

    def followers(self, pipeline: str, state: str) -> list[Follower]:
        """Return the inputs of registered pipelines that follow a state."""
        with self._transaction("reading who follows a state") as connection:
            return followers.followers(connection, pipeline, state)

    def pruned_txid(self, state: StateSpec) -> int:
        """Return the txid up to which a state's recorded changes were removed; 0 if none were."""
        with self._transaction(f"reading what was removed of state {state.name}") as connection:
            return pruning.pruned_txid(connection, state)

    def has_changes(self, state: StateSpec, up_to_txid: int) -> bool:
        """Return whether there are recorded changes of txids up to this one."""
        with self._transaction(f"looking for changes of state {state.name}") as connection:
            return pruning.has_changes(connection, state, up_to_txid)

    def prune_changes(
        self, spec: PipelineSpec, state: StateSpec, so_far: pruning.Pruned, owner: str, reason: str
    ) -> pruning.Pruned:
        """Remove some of the recorded changes of txids up to one; repeat it with what it returns while there are more.

        As the owner of the tables only. No follower needs them, as the caller has checked
        (`tidegate.jobs.sources.changes.removable`).

        Raises: RangeRefused if the txid has not committed; what `commit_batch` raises, LockHeld also if readers hold
        the tables for long.
        """
        if so_far.changes or so_far.partitions:
            time.sleep(SECONDS_BETWEEN_REMOVALS)
        action = (owner, storable(reason))
        step = partial(pruning.prune, spec=spec, state=state, so_far=so_far, action=action, witness=self.witness)
        return self._removed(spec, state, step)

    def prune_ranges(
        self, spec: PipelineSpec, state: StateSpec, removal: pruning.Removal, owner: str, reason: str
    ) -> pruning.PrunedRanges:
        """Remove range partitions of appended rows, as the owner of the tables (`pruning.prune_ranges`).

        Raises: UsageError if `removal.before` is no value of the column; what `commit_batch` raises, LockHeld also if
        readers hold the tables for long.
        """
        action = (owner, storable(reason))
        step = partial(pruning.prune_ranges, spec=spec, state=state, removal=removal, action=action, witness=self.witness)
        return self._removed(spec, state, step)

    def _removed(self, spec: PipelineSpec, state: StateSpec, remove: Callable[[Connection], _Removed]) -> _Removed:
        """Run a transaction that removes something; again while readers hold the tables, so that commits come in between.

        Raises: LockHeld if they hold them for long.
        """
        doing, deadline = f"removing what is old of state {state.name}", time.monotonic() + DDL_LOCK_TIMEOUT_SECONDS
        while True:
            try:
                with self._commit_transaction(spec.name, doing) as connection:
                    return remove(connection)
            except range_partitions.PartitionsHeld as held:
                if time.monotonic() >= deadline:
                    raise LockHeld(
                        f"Partitions of state {state.name} are not removed: transactions that read it have held them for "
                        f"{DDL_LOCK_TIMEOUT_SECONDS} s. {held}"
                    ) from held
            time.sleep(SECONDS_BETWEEN_REMOVALS)

    def skip_batch(self, spec: PipelineSpec, txid: int, owner: str, reason: str) -> Commit | None:
        """Skip a failed batch: a commit without rows takes its place and records the owner and the reason.

        Returns the commit, also if the txid has committed or was skipped before; None if earlier txids have to commit first:
        it is skipped when its turn comes.

        Raises: RangeRefused if the batch has not failed; Unprocessed if its source has to plan it again first; SourceChanged,
        HoleDetected, MetadataCorrupt, UnknownBatch, SchemaOutOfDate.
        """
        with self._commit_transaction(spec.name, f"skipping {spec.name} {txid}") as connection:
            return recorded_actions.skip(connection, spec, txid, owner, storable(reason), self.witness)

    def retry(self, pipeline: str, txid: int | None, owner: str, reason: str) -> list[int]:
        """Let a batch be tried again, or, without a txid, all that were halted or given up; return the txids."""
        with self._write_transaction("letting batches be tried again") as connection:
            return recorded_actions.retry(connection, pipeline, txid, owner, storable(reason))

    def pause(self, pipeline: str, owner: str, reason: str) -> bool:
        """Let no run and no batch of the pipeline begin; what has begun ends. False if it was paused already."""
        with self._write_transaction("pausing a pipeline") as connection:
            return recorded_actions.pause(connection, pipeline, owner, storable(reason))

    def in_flight(self, pipeline: str) -> tuple[int, int]:
        """Return how many uncommitted batches have begun, and how many have not."""
        with self._transaction("counting batches in flight") as connection:
            return batches.in_flight(connection, pipeline)

    def resume(self, pipeline: str, owner: str, reason: str) -> bool:
        """Let runs and batches of the pipeline begin again. False if it was not paused."""
        with self._write_transaction("resuming a pipeline") as connection:
            return recorded_actions.resume(connection, pipeline, owner, storable(reason))

    def retire(self, pipeline: str, request: retirement.Request) -> retirement.Retirement:
        """Retire a pipeline: from the commit of this on, no plan, attempt or commit of it goes on. As the owner only.

        With `drops_states`, its tables are dropped, a limited number at a time: call it again while there are more.

        Raises: UnknownPipeline if it is not registered; AttemptNotSealed while an attempt is alive; UsageError if another
        pipeline reads its states, or something else depends on a table that is to be dropped.
        """
        with self._write_transaction(f"retiring {pipeline}") as connection:
            return retirement.retire(connection, pipeline, replace(request, reason=storable(request.reason)))

    def reinstate(self, pipeline: str, owner: str, reason: str) -> bool:
        """Let a retired pipeline go on where it stood, as the owner of the tables. False if it was not retired.

        Raises: UnknownPipeline if it is not registered; RangeRefused if its states were dropped; PipelineRetired if one whose
        states it reads is retired.
        """
        with self._write_transaction(f"reinstating {pipeline}") as connection:
            return retirement.reinstate(connection, pipeline, owner, storable(reason))

    def retired_pipelines(self) -> list[retirement.RetiredPipeline]:
        """Return the retired pipelines, in the order of their names."""
        with self._transaction("reading which pipelines are retired") as connection:
            return retirement.retired_pipelines(connection)

    def drop_staging_of_retired(self, pipeline: str) -> int:
        """Drop some staging of a retired pipeline; return the number of its attempts. Call it until there is none.

        What another session has locked is left.
        """
        with self._transaction_for_later(f"dropping the staging of the retired pipeline {pipeline}") as connection:
            return retirement.drop_staging(connection, pipeline, STAGING_DROPS_PER_PLAN)
        return 0

    def check_not_paused(self, pipeline: str) -> None:
        """Refuse to go on if the pipeline is paused.

        Raises: PipelinePaused, with operator, time and reason; PipelineRetired.
        """
        with self._transaction("reading the pipeline") as connection:
            recorded_actions.check_not_paused(connection, pipeline)

    def replay_quarantined(
        self, spec: PipelineSpec, owner: str, reason: str, *, txid: int | None = None, beside: SourceMetadata | None = None
    ) -> tuple[int, int] | None:
        """Open a batch of the quarantined records of one txid or all; return its txid and their number; None without records.

        The next run processes the batch. All or nothing. `beside` is what its source freezes with such a batch: the versions of
        references.

        Raises: HoleDetected, MetadataCorrupt, SchemaOutOfDate; RangeRefused if the input of a record is not declared any more,
        or the version of a reference is missing.
        """
        while True:
            with self._write_transaction("replaying quarantined records") as connection:
                cursors.check_history(connection, spec.name, self.witness)
                opened = recorded_actions.replay_quarantined(connection, spec, owner, storable(reason), txid, beside or {})
                if opened is not False:
                    return opened
                connection.rollback()  # another planner was faster: its batch has the txid

    def mend_quarantined(self, pipeline: str, txid: int, number: int, mend: Mend) -> Original:
        """Keep a corrected payload beside a record that waits in quarantine, and return the original.

        The replay that takes the record up reads the corrected payload instead.

        Raises: UnknownBatch if there is no such record; RangeRefused if it may not be corrected, or not `again`; UsageError
        for a payload that cannot be stored, or is not JSON of the record's columns where the original is.
        """
        with self._write_transaction("mending a quarantined record") as connection:
            return mended_records.mend(connection, pipeline, txid, number, replace(mend, reason=storable(mend.reason)))

    def _resolve(self, pipeline: str, txid: int) -> Commit | None:
        """Return the commit of a txid, looked up under the cursor's lock; None if it did not commit."""
        for tries_left in reversed(range(RESOLVE_TRIES)):
            try:
                with self._commit_transaction(pipeline, "finding out whether a commit landed") as connection:
                    cursors.lock_cursor(connection, pipeline, self.witness, may_be_retired=True)
                    return commit_record.find(connection, pipeline, txid)
            except StoreUnavailable:
                if not tries_left:
                    raise
                time.sleep(1)  # the server may be restarting; the caller could do nothing but try again
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _commit_transaction(self, pipeline: str, doing: str) -> Iterator[Connection]:
        """Run a transaction that may commit batches, then record the last commit in the witness."""
        with self._write_transaction(doing, writer=pipeline) as connection:
            yield connection
            committed = cursors.mark(connection, pipeline)
        if committed is not None:
            self.witness.advance(committed)

    # queries

    def turns(self, waiting: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Turn]:
        """Return for each (pipeline, txid) whether it may commit now. A hint: the commit checks under the lock."""
        with self._transaction("reading whose turn it is") as connection:
            return turns.turns(connection, waiting)

    def turn(self, pipeline: str, txid: int) -> Turn:
        """Return whether a txid may commit now, as far as is known without the cursor's lock."""
        return self.turns([(pipeline, txid)]).get((pipeline, txid), UNREGISTERED)

    def processing(self, waiting: Sequence[tuple[str, int]]) -> dict[tuple[str, int], TurnFacts]:
        """Return for each batch whether its processing `is_over`, or it `is_in_work`. A hint: `start_attempt` decides."""
        with self._transaction("reading what is processed") as connection:
            return turns.processing(connection, waiting)

    def lag(self, pipelines: Sequence[str] | None = None) -> list[Lag]:
        """Return how far each pipeline is."""
        with self._transaction("reading the lag") as connection:
            return batch_status.lag(connection, pipelines)

    def waits(self, requested: Mapping[str, int | None]) -> dict[str, Wait]:
        """Return what each of these pipelines, and its requested txid, waits for, as of one moment.

        Pipelines that are not registered are left out.
        """
        with self._transaction("reading the cursors") as connection:
            marked = wait_facts.marks(connection, list(requested), self.witness)
        with self._snapshot("reading what is waited for") as connection:
            return wait_facts.read(connection, requested, marked, self.witness)

    def losses(self) -> dict[str, str]:
        """Return a sentence for each pipeline that is halted because this database lacks commits, or may."""
        with self._transaction("reading which pipelines there are") as connection:
            pipelines = pipeline_overview.pipeline_names(connection)
        return {name: loss for name, wait in self.waits(dict.fromkeys(pipelines)).items() if (loss := wait.loss)}

    def harmful_settings(self) -> dict[str, str]:
        """Return, by each setting of our roles under which steps may never end, or write nothing, what ends it."""
        roles = [self.settings.pg_user, self.settings.pg_owner, self.settings.pg_stager, self.settings.pg_reader]
        with self._transaction("reading the settings of roles") as connection:
            return role_settings.remedies(connection, roles)

    def check_history(self, pipeline: str) -> None:
        """Refuse to go on in a database that lacks commits of the pipeline, or may.

        Raises: HoleDetected, SchemaOutOfDate if it is not registered, PipelineRetired.
        """
        with self._transaction("reading the cursor") as connection:
            cursors.check_history(connection, pipeline, self.witness)

    def batch_statuses(self, pipeline: str, txids: Sequence[int] | None = None, limit: int = 100) -> list[BatchStatus]:
        """Return ledger rows in txid order: the given txids, or the newest `limit`."""
        with self._transaction("reading the ledger") as connection:
            return batch_status.batch_statuses(connection, pipeline, txids, limit)

    def search(self, pipeline: str, wanted: BatchFilter, *, before: int | None = None, limit: int = 100) -> SearchResult:
        """Return some batches that fulfil all conditions, newest first, and where to go on; by statements of bounded work."""
        with self._snapshot("searching the ledger") as connection:
            return batch_search.search(connection, pipeline, wanted, before, limit)

    def batch_history(self, pipeline: str, txid: int) -> BatchHistory:
        """Return everything that the ledger knows of one batch."""
        with self._transaction("reading a batch") as connection:
            return batch_status.batch_history(connection, pipeline, txid)

    def attempt_times(self, pipeline: str, txids: Sequence[int]) -> list[AttemptTimes]:
        """Return when the attempts at some batches ran, and when those that counted were committed."""
        with self._transaction("reading when attempts ran") as connection:
            return attempt_times(connection, pipeline, txids)

    def quarantined(self, pipeline: str, *, txid: int | None = None, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the records that wait in quarantine, in the order of their batches, without holding them all."""
        with self._transaction("reading the quarantine") as connection:
            yield from quarantined_records.records(connection, pipeline, txid, limit)

    def quarantine_counts(self, pipeline: str, txid: int | None = None) -> dict[int, int]:
        """Return how many records and partials of each txid, or of the given one, are in quarantine."""
        with self._transaction("reading the quarantine") as connection:
            return quarantined_records.counts(connection, pipeline, txid)

    def quarantine_totals(self, pipeline: str, txid: int | None = None) -> quarantined_records.QuarantineTotals:
        """Return how many records wait in quarantine, and how many partials commits have set aside."""
        with self._transaction("reading the quarantine") as connection:
            return quarantined_records.totals(connection, pipeline, txid)

    def try_merge(
        self, state: StateSpec, kept: merge_into_states.TextRow | None, partial: merge_into_states.TextRow
    ) -> merge_into_states.TextRow:
        """Return what a state keeps of a row, or none, and a partial, as Postgres' text: for tests of aggregates.

        Raises: the errors of a merge, such as Overflow.
        """
        with self._transaction("trying a merge") as connection:
            return merge_into_states.try_merge(connection, state, kept, partial)

    def state_rows(self, state: StateSpec, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield a state's rows in key order from one snapshot, without holding them all."""
        with self._transaction(f"reading state {state.name}") as connection:
            yield from state_rows.kept_rows(connection, state, limit)

    def event_time(self, state: StateSpec) -> EventTimeProgress | None:
        """Return how far event time has come in a state with windows; None before its first batch."""
        with self._transaction(f"reading the watermark of state {state.name}") as connection:
            return event_windows.progress(connection, state)

    def changes(self, state: StateSpec, after_txid: int = 0, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield what each txid after one changed in a state, by txid and key, from one snapshot, without holding it all.

        A change has the key, the values after the txid, and those before it as ``previous_<value>``: NULL for a new key. For
        appended rows and recorded final windows, it is the row or window itself.

        Raises: ValueError for a state that does not record changes.
        """
        with self._transaction(f"reading the changes of state {state.name}") as connection:
            yield from state_rows.changes(connection, state, after_txid, limit)
