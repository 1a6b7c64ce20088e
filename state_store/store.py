"""StateStore: one public method per step of a batch's life, each exactly one transaction.

Only this module opens and ends transactions, and only it turns driver errors into ours.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from state_store import attempts, batches, commits, queries, schema, staging, tables
from state_store.attempts import Attempt, StagedPartition
from state_store.commits import Commit
from state_store.declaration import PipelineSpec, SourceMetadata, StateSpec
from state_store.driver_errors import translate
from state_store.engine import create_engine
from state_store.errors import RangeRefused, StoreUnavailable
from state_store.queries import BatchHistory, BatchStatus, Lag, Turn
from state_store.settings import Settings

logger = logging.getLogger(__name__)

STAGING_DROPS_PER_PLAN = 20
RESOLVE_TRIES = 5
SEAL_PATIENCE_SECONDS = 30


class StateStore:
    """The ledger and the state of all pipelines in one Postgres database. Thread-safe; nothing is shared between calls.

    Every method that changes something is safe to call again after a crash at any point: it finds its own work done, or
    does it once.
    """

    def __init__(self, engine: sa.Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings

    @classmethod
    def connect(cls, settings: Settings, *, user: str | None = None) -> Self:
        """Return a store after checking that the database answers and has the revision this code needs.

        Raises: StoreUnavailable, AccessRefused, SchemaOutOfDate.
        """
        store = cls(create_engine(settings, user=user), settings)
        with store._transaction("connecting") as connection:
            schema.check_revision(connection)
        return store

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # plan

    def last_opened(self, pipeline: str) -> tuple[int, SourceMetadata | None]:
        """Return the newest opened txid and its metadata; 0 and None before the first."""
        with self._transaction("reading the ledger") as connection:
            return batches.last_opened(connection, pipeline)

    def committed(self, pipeline: str) -> int:
        """Return the last committed txid; 0 before the first.

        Raises: SchemaOutOfDate if the pipeline is not registered.
        """
        with self._transaction("reading the cursor") as connection:
            return commits.committed(connection, pipeline)

    def uncommitted(self, pipeline: str, limit: int) -> list[int]:
        """Return the opened txids that have not committed, in order, at most `limit`."""
        with self._transaction("reading the ledger") as connection:
            return batches.uncommitted(connection, pipeline, limit)

    def run_txids(self, pipeline: str, run_id: str) -> list[int]:
        """Return the txids that a run covers, in order; empty if it has not planned yet."""
        with self._transaction("reading the run") as connection:
            return batches.run_txids(connection, pipeline, run_id)

    def open_batches(
        self, spec: PipelineSpec, run_id: str, pending: Sequence[int], after: int, metadata: Sequence[bytes]
    ) -> list[int] | None:
        """Freeze the metadata of the batches after txid `after`, and give them with the `pending` ones to the run.

        Returns the run's txids; those of its first plan if it has planned before; None if another planner was first, and
        then nothing is written: look again. All or nothing (CONTRACT I6).

        Raises: RangeRefused near the last possible txid.
        """
        if after + len(metadata) > batches.MAX_TXID:
            raise RangeRefused(f"{spec.name} has used up its txids.", pipeline=spec.name, txid=after)
        for content in metadata:
            if len(content) > batches.MAX_METADATA_BYTES:
                raise RangeRefused(
                    f"{spec.name}: the metadata of one batch takes {len(content)} bytes, the limit is "
                    f"{batches.MAX_METADATA_BYTES}. Make the source's batches smaller.",
                    pipeline=spec.name,
                )
        with self._transaction("opening batches") as connection:
            commits.set_limits(connection, self.settings.lock_timeout_seconds, self.settings.commit_timeout_seconds)
            if planned := batches.run_txids(connection, spec.name, run_id):
                return planned
            commits.check_epoch(connection, spec.name)
            if metadata and not batches.insert_batches(connection, spec.name, after, metadata, run_id):
                connection.rollback()
                return None
            txids = [*pending, *range(after + 1, after + 1 + len(metadata))]
            if txids and not batches.assign_to_run(connection, spec.name, run_id, txids):
                connection.rollback()
                return None
            return txids

    def drop_old_staging(self, spec: PipelineSpec) -> int:
        """Drop staging that is past the retention, some at a time; return of how many attempts."""
        with self._transaction("dropping old staging") as connection:
            commits.set_limits(connection, 1, self.settings.commit_timeout_seconds)
            return attempts.drop_old_staging(connection, spec, self.settings.staging_retention_hours, STAGING_DROPS_PER_PLAN)

    # process

    def start_attempt(self, spec: PipelineSpec, txid: int, owner: str, *, restage: bool = False) -> Attempt | Commit | None:
        """Take the fence of an uncommitted batch, with new staging tables; every older attempt is fenced from now on.

        Returns the commit if the batch has committed, None if its newest attempt is sealed already (its work is kept,
        unless `restage`). If the process dies afterwards, the next attempt fences this one.

        Raises: UnknownBatch, MetadataCorrupt, HoleDetected, SchemaOutOfDate, DeclarationChanged.
        """
        with self._transaction("starting an attempt") as connection:
            commits.set_limits(connection, self.settings.lock_timeout_seconds, self.settings.commit_timeout_seconds)
            batch = attempts.lock_batch(connection, spec.name, txid)
            if done := commits.find(connection, spec.name, txid):
                return done
            commits.check_epoch(connection, spec.name)
            commits.check_declaration(connection, spec)
            newest = attempts.newest(connection, spec.name, txid, batch.attempt)
            if newest and newest.sealed_at and newest.fingerprint == spec.fingerprint and not restage:
                return None
            attempt = attempts.take_fence(connection, spec, batch, owner)
            for state in spec.states:
                grant = staging.STAGER_GRANT.against(tables.staging_table_of(state, txid, attempt.number))
                connection.execute(grant)
            return attempt

    def seal(self, attempt: Attempt, partitions: Sequence[StagedPartition], source_rows: int) -> None:
        """Declare the attempt's staging complete: exactly these rows count. Sealing twice changes nothing.

        Raises: AttemptFenced if a newer attempt owns the batch.
        """
        with self._transaction(f"sealing {attempt}") as connection:
            commits.set_limits(connection, SEAL_PATIENCE_SECONDS, self.settings.commit_timeout_seconds)
            batch = attempts.lock_batch(connection, attempt.pipeline, attempt.txid)
            attempts.check_fence(batch, attempt)
            newest = attempts.newest(connection, attempt.pipeline, attempt.txid, attempt.number)
            if newest is not None and newest.sealed_at is None:
                attempts.write_seal(connection, attempt, partitions, source_rows)

    def fail_attempt(self, attempt: Attempt, error: str) -> None:
        """Write down why an attempt gave up; its staging will never count."""
        with self._transaction(f"failing {attempt}") as connection:
            attempts.write_failure(connection, attempt, error)

    def halt_batch(self, pipeline: str, txid: int, reason: str) -> None:
        """Say that nobody retries this batch by itself any more, so that later ones stop waiting for it in their run."""
        with self._transaction("halting a batch") as connection:
            batches.halt(connection, pipeline, txid, reason)

    # commit

    def commit_batch(self, spec: PipelineSpec, txid: int, owner: str) -> Commit:
        """Commit the batch, or report that it already counts. In txid order, each exactly once (CONTRACT I1-I4, I8).

        If the connection breaks, the outcome is unknown; it is found out by locking the cursor on a new connection,
        which waits for the old transaction to end (CONTRACT I10). It is never guessed.

        Raises: CommitOutOfOrder, AttemptNotSealed, StagingLost (process it again), StoreUnavailable, and the permanent
        errors of `commits.merge_and_advance`.
        """
        try:
            with self._transaction(f"committing {spec.name} {txid}") as connection:
                self._set_commit_limits(connection)
                return commits.merge_and_advance(connection, spec, txid, owner, self.settings.attempt_timeout_seconds)
        except StoreUnavailable as unknown:
            answer = unknown.__cause__
            if isinstance(answer, DBAPIError) and not answer.connection_invalidated:
                raise  # Postgres said no, so nothing was committed: only a lost connection leaves that open
            if (done := self._resolve(spec.name, txid)) is None:
                raise
            logger.warning("%s %s: %s The cursor says that it committed.", spec.name, txid, unknown)
            return done

    def skip_batch(self, spec: PipelineSpec, txid: int, owner: str, reason: str) -> Commit:
        """Let order go on without a batch that has failed: a commit without rows takes its place, with who and why.

        Whatever its attempts have staged never counts. Says so if the txid has committed, or was skipped, before.

        Raises: RangeRefused if the pipeline waits for another txid or this one has not failed; UnknownBatch.
        """
        with self._transaction(f"skipping {spec.name} {txid}") as connection:
            self._set_commit_limits(connection)
            return commits.skip(connection, spec, txid, owner, reason)

    def _resolve(self, pipeline: str, txid: int) -> Commit | None:
        """Find out under the cursor's lock whether txid committed; None if it did not."""
        for tries_left in reversed(range(RESOLVE_TRIES)):
            try:
                with self._transaction("finding out whether a commit landed") as connection:
                    self._set_commit_limits(connection)
                    commits.lock_cursor(connection, pipeline)
                    return commits.find(connection, pipeline, txid)
            except StoreUnavailable:
                if not tries_left:
                    raise
                time.sleep(1)  # the server may be restarting; the caller would only come back later
        return None

    def _set_commit_limits(self, connection: Connection) -> None:
        commits.set_limits(connection, self.settings.lock_timeout_seconds, self.settings.commit_timeout_seconds)

    # queries

    def turns(self, waiting: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Turn]:
        """Tell for each (pipeline, txid) whether it may commit now. A hint: the commit itself checks under the lock."""
        with self._transaction("reading whose turn it is") as connection:
            return queries.turns(connection, waiting)

    def lag(self, pipelines: Sequence[str] | None = None) -> list[Lag]:
        """Return how far each pipeline is."""
        with self._transaction("reading the lag") as connection:
            return queries.lag(connection, pipelines)

    def batch_statuses(self, pipeline: str, txids: Sequence[int] | None = None, limit: int = 100) -> list[BatchStatus]:
        """Return ledger rows in txid order: the given txids, or the newest `limit`."""
        with self._transaction("reading the ledger") as connection:
            return queries.batch_statuses(connection, pipeline, txids, limit)

    def batch_history(self, pipeline: str, txid: int) -> BatchHistory:
        """Return everything the ledger knows of one batch."""
        with self._transaction("reading a batch") as connection:
            return queries.batch_history(connection, pipeline, txid)

    def state_rows(self, state: StateSpec, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield a state's rows in key order from one snapshot, without holding them all."""
        with self._transaction(f"reading state {state.name}") as connection:
            yield from queries.state_rows(connection, state, limit)

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[Connection]:
        try:
            with self.engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            raise translate(error.orig, doing) from error
