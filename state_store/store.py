"""StateStore: one public method per step of a batch's life, question or action.

A step is exactly one transaction. Methods that look up the outcome of a COMMIT, read long lists or remove old rows run several.
No function below this facade opens or ends a transaction. Numbers such as I6 are rules of docs/protocol.md.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from tidegate.state_store.attempt import attempts, staging_tables
from tidegate.state_store.attempt.attempts import AirflowTry, Attempt
from tidegate.state_store.base.errors import LockHeld, StoreUnavailable
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
from tidegate.state_store.connections import role_settings
from tidegate.state_store.connections.database import DDL_LOCK_TIMEOUT_SECONDS, Database, left_for_later
from tidegate.state_store.connections.local_settings import hold_open
from tidegate.state_store.connections.steps import reads, reads_rows, reads_snapshot, writes, writes_later
from tidegate.state_store.connections.table_locks import hold
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, SourceMetadata, StateSpec
from tidegate.state_store.ledger import batches, counted_files, cursors, plan_outcomes, schema_revision, stopped_batches
from tidegate.state_store.ledger import followers as ledger_followers
from tidegate.state_store.ledger.batches import BatchInput
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.ledger.counted_files import TakenFile
from tidegate.state_store.operate import mended_records, pruning, recorded_actions, redo_refusals
from tidegate.state_store.pipeline_changes import rebuilds, retirement
from tidegate.state_store.read_ledger import batch_search, batch_status, registered_pipelines, trace_times, wait_facts
from tidegate.state_store.read_ledger.wait_facts import Wait
from tidegate.state_store.read_states import state_rows as rows_of_states
from tidegate.state_store.read_states import transform_reads
from tidegate.state_store.read_states.transform_reads import QueriedState
from tidegate.state_store.states import range_partitions
from tidegate.state_store.turns import batch_turns, begin_attempt
from tidegate.state_store.turns.batch_turns import UNREGISTERED, Turn
from tidegate.state_store.turns.begin_attempt import Mode, NewInput, NotStarted, ReplanNeeded

logger = logging.getLogger(__name__)

STAGING_DROPS_PER_PLAN = 20
RESOLVE_TRIES = 5
SEAL_PATIENCE_SECONDS = 30
FILES_AT_ONCE = 10_000  # most names in one statement, so most files held in memory at once
SECONDS_BETWEEN_REMOVALS = 0.1  # so that the next one does not overtake commits and readers that have waited
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _commits(
    doing: str, function: Callable[Concatenate[Connection, Witness, PipelineSpec, _P], _R]
) -> Callable[Concatenate["StateStore", PipelineSpec, _P], _R]:
    """Return a step that may commit batches of a pipeline (`steps`); the witness then marks the last one."""

    @wraps(function)
    def step(self: "StateStore", spec: PipelineSpec, /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        with self._commit_transaction(spec.name, doing.format(spec.name, *arguments)) as connection:
            return function(connection, self.witness, spec, *arguments, **named)

    return step


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

    fail_plan = writes("recording that a plan has failed", plan_outcomes.note_failure)
    last_opened = reads("reading the ledger", batches.last_opened)
    committed = reads("reading the cursor", cursors.committed)
    uncommitted = reads("reading the ledger", batches.uncommitted)

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

    def files_of_times(
        self, pipeline: str, times: Collection[int], inodes: Collection[str], before_txid: int
    ) -> Sequence[TakenFile]:
        """Return the files with these modification times that batches before a txid have read or will read.

        Those with a time of whole seconds are left out unless one of these inode numbers is theirs.

        Raises: MetadataCorrupt.
        """
        with self._transaction("reading which files have counted") as connection:
            planned = counted_files.planned(batches.uncommitted_inputs(connection, pipeline, before_txid)).values()
            counted = counted_files.counted_of_times(connection, pipeline, times, inodes, before_txid)
        return [file for files in planned for file in files if counted_files.may_be_same(file, times, inodes)] + counted

    note_times = writes_later("noting when files of {} were touched", counted_files.note_times)
    run_txids = reads("reading the run", batches.run_txids)

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
            if new:
                batches.keep_declaration(connection, spec.name)
            recorded_actions.check_not_paused(connection, spec.name)
            registered = commit_facts.check_history(connection, spec.name, self.witness)
            if new:  # what another declaration has planned would count even if that is never registered
                verdicts.check_declaration(spec, registered)
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

    batches_to_rebuild = reads("reading which batches to rebuild", rebuilds.next_batches)
    begin_rebuild = writes("beginning to rebuild {}", rebuilds.begin)

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

    next_unbegun = reads("looking for a batch that has not begun", batch_turns.next_unbegun)
    is_in_work = reads("looking for a running attempt", batch_turns.is_in_work)
    keep_alive = writes("looking after {}", attempts.keep_alive)
    note_spark = writes_later("noting where {} computes", attempts.write_spark)

    stage = reads("staging {1}", staging_tables.fill)
    seal = writes("sealing {}", attempts.seal, lock_timeout_seconds=SEAL_PATIENCE_SECONDS)
    fail_attempt = writes("failing {}", attempts.fail)
    poison_tries = reads("counting tries", attempts.poison_tries)

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
            return stopped_batches.give_up(connection, pipeline, txid, owner, reason)

    halt_batch = writes("halting a batch", stopped_batches.halt)

    # commit

    note_ack = writes_later("noting the ack of {} {}", batches.note_ack)
    awaiting_acks = reads("looking for acks that are due", commit_record.awaiting_acks)

    def commit_batch(self, spec: PipelineSpec, txid: int, owner: str, *, attempt_timeout_seconds: int | None = None) -> Commit:
        """Commit the batch, or report that it has committed already: in txid order, each exactly once (I1-I4, I8).

        If the connection breaks, the outcome is found out under the cursor's lock on a new one, which waits for the old
        transaction to end (I10). An attempt that has not ended within the timeout (None: that of the settings) is taken for
        dead.

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

    commit_ready = _commits("committing what is ready of {}", ordered_commit.commit_ready)
    check_not_followed = reads("reading who follows states", redo_refusals.check_not_followed)
    redo_batch = _commits("redoing {} {}", recorded_actions.redo)

    # by hand

    followers = reads("reading who follows a state", ledger_followers.followers)
    pruned_txid = reads("reading what was removed of state {}", pruning.pruned_txid)
    has_changes = reads("looking for changes of state {}", pruning.has_changes)

    def prune_changes(
        self, spec: PipelineSpec, state: StateSpec, so_far: pruning.Pruned, owner: str, reason: str
    ) -> pruning.Pruned:
        """Remove some recorded changes (`pruning.prune`), as the owner; repeat it with what it returns while there are more.

        Raises: what `pruning.prune` and a commit raise; LockHeld also if readers hold the tables for long.
        """
        if so_far.changes or so_far.partitions:
            time.sleep(SECONDS_BETWEEN_REMOVALS)
        action = (owner, reason)
        step = partial(pruning.prune, spec=spec, state=state, so_far=so_far, action=action, witness=self.witness)
        return self._removed(spec, state, step)

    def prune_ranges(
        self, spec: PipelineSpec, state: StateSpec, removal: pruning.Removal, owner: str, reason: str
    ) -> pruning.PrunedRanges:
        """Remove range partitions of appended rows (`pruning.prune_ranges`), as the owner of the tables.

        Raises: what `pruning.prune_ranges` and a commit raise; LockHeld also if readers hold the tables for long.
        """
        action = (owner, reason)
        step = partial(pruning.prune_ranges, spec=spec, state=state, removal=removal, action=action, witness=self.witness)
        return self._removed(spec, state, step)

    def _removed(self, spec: PipelineSpec, state: StateSpec, remove: Callable[[Connection], _R]) -> _R:
        """Run a transaction that removes something; again while readers hold the tables, so that commits come in between."""
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

    skip_batch = _commits("skipping {} {}", recorded_actions.skip)
    retry = writes("letting batches be tried again", recorded_actions.retry)
    pause = writes("pausing a pipeline", recorded_actions.pause)
    in_flight = reads("counting batches in flight", batches.in_flight)
    resume = writes("resuming a pipeline", recorded_actions.resume)
    retire = writes("retiring {}", retirement.retire)
    reinstate = writes("reinstating {}", retirement.reinstate)
    retired_pipelines = reads("reading which pipelines are retired", retirement.retired_pipelines)

    def drop_staging_of_retired(self, pipeline: str) -> int:
        """Drop some staging of a retired pipeline; return the number of its attempts. Call it until there is none.

        What another session has locked is left.
        """
        with self._transaction_for_later(f"dropping the staging of the retired pipeline {pipeline}") as connection:
            return retirement.drop_staging(connection, pipeline, STAGING_DROPS_PER_PLAN)
        return 0

    check_not_paused = reads("reading the pipeline", recorded_actions.check_not_paused)

    def replay_quarantined(
        self, spec: PipelineSpec, owner: str, reason: str, *, txid: int | None = None, beside: SourceMetadata | None = None
    ) -> tuple[int, int] | None:
        """Open a batch of quarantined records, which the next run processes (`recorded_actions.replay_quarantined`).

        Raises: what that raises; HoleDetected, SchemaOutOfDate.
        """
        while True:
            with self._write_transaction("replaying quarantined records") as connection:
                commit_facts.check_history(connection, spec.name, self.witness)
                opened = recorded_actions.replay_quarantined(connection, spec, owner, reason, txid, beside or {})
                if opened is not False:
                    return opened
                connection.rollback()  # another planner was faster: its batch has the txid

    mend_quarantined = writes("mending a quarantined record", mended_records.mend)

    def _resolve(self, pipeline: str, txid: int) -> Commit | None:
        """Return the commit of a txid, looked up under the cursor's lock; None if it did not commit."""
        for tries_left in reversed(range(RESOLVE_TRIES)):
            try:
                with self._commit_transaction(pipeline, "finding out whether a commit landed") as connection:
                    commit_facts.lock_and_read(connection, pipeline, self.witness)
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

    turns = reads("reading whose turn it is", batch_turns.turns)

    def turn(self, pipeline: str, txid: int) -> Turn:
        """Return whether a txid may commit now, as far as is known without the cursor's lock."""
        return self.turns([(pipeline, txid)]).get((pipeline, txid), UNREGISTERED)

    processing = reads("reading what is processed", batch_turns.processing)
    lag = reads("reading the lag", registered_pipelines.lag)

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
            pipelines = registered_pipelines.pipeline_names(connection)
        return {name: loss for name, wait in self.waits(dict.fromkeys(pipelines)).items() if (loss := wait.loss)}

    def harmful_settings(self) -> list[str]:
        """Return sentences on settings of our roles and sessions under which steps may never end, or write nothing."""
        roles = [self.settings.pg_user, self.settings.pg_owner, self.settings.pg_stager, self.settings.pg_reader]
        with self._transaction("reading the settings of roles") as connection:
            return role_settings.sentences(connection, roles)

    def check_history(self, pipeline: str) -> None:
        """Refuse to go on in a database that lacks commits of the pipeline, or may.

        Raises: HoleDetected, SchemaOutOfDate if it is not registered, PipelineRetired.
        """
        with self._transaction("reading the cursor") as connection:
            commit_facts.check_history(connection, pipeline, self.witness)

    batch_statuses = reads("reading the ledger", batch_status.batch_statuses)
    search = reads_snapshot("searching the ledger", batch_search.search)
    batch_history = reads("reading a batch", batch_status.batch_history)
    attempt_times = reads("reading when attempts ran", trace_times.attempt_times)
    quarantined = reads_rows("reading the quarantine", quarantined_records.records)
    quarantine_counts = reads("reading the quarantine", quarantined_records.counts)
    quarantine_totals = reads("reading the quarantine", quarantined_records.totals)
    try_merge = reads("trying a merge", merge_into_states.try_merge)
    state_rows = reads_rows("reading state {}", rows_of_states.kept_rows)
    event_time = reads("reading the watermark of state {}", event_windows.progress)
    changes = reads_rows("reading the changes of state {}", rows_of_states.changes)
