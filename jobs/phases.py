"""The three steps of a batch, as Airflow's tasks and `tidegate run` both call them: plan, process, commit.

Each may be repeated, interrupted and run twice at once; what counts is decided in Postgres.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jobs.pipeline import Pipeline
from jobs.process import stage_batch
from jobs.ranges import check_range
from jobs.registry import find_pipeline
from jobs.spark import spark_session
from state_store import StateStore
from state_store.attempts import Attempt
from state_store.batches import encode_metadata
from state_store.commits import Commit
from state_store.errors import (
    AttemptFenced,
    PermanentError,
    RetryableError,
    StagingLost,
    TidegateError,
    UsageError,
)
from state_store.settings import Settings

logger = logging.getLogger(__name__)

# Airflow maps at most 1,024 tasks by default; a run that leaves work behind is followed by another.
MAX_BATCHES_PER_RUN = 1000
RESTAGE_TRIES = 3


@dataclass(frozen=True)
class Processed:
    """How processing a batch ended: sealed by this attempt, sealed before, or committed before."""

    pipeline: str
    txid: int
    attempt: int | None
    outcome: str

    def __str__(self) -> str:
        number = f":{self.attempt}" if self.attempt else ""
        return f"{self.pipeline} {self.txid}{number} {self.outcome}"


def plan_batches(
    settings: Settings,
    pipeline: Pipeline | str,
    *,
    run_id: str,
    from_txid: int | None = None,
    to_txid: int | None = None,
    max_batches: int | None = None,
) -> list[int]:
    """Decide which txids a run covers, left-over ones first, and freeze the metadata of the new ones; [] is nothing to do.

    Without a range: everything that is uncommitted, then as many new batches as the source has, up to `max_batches`. With
    a range: what of it is uncommitted; batches up to `to_txid` are opened if the source has them. The same `run_id` always
    gets the same answer, so a repeated plan changes nothing.

    Raises: RangeRefused if the range is upside down or would leave a gap; the source's errors; UnknownPipeline.
    """
    pipeline = find_pipeline(pipeline)
    with StateStore.connect(settings) as store:
        check_range(pipeline.name, store.committed(pipeline.name), from_txid, to_txid, max_batches)
        limit = min(max_batches or MAX_BATCHES_PER_RUN, MAX_BATCHES_PER_RUN)
        while (txids := _plan_once(store, pipeline, run_id, from_txid, to_txid, limit)) is None:
            logger.info("%s: another run planned at the same moment; looking again", pipeline.name)
        if dropped := store.drop_old_staging(pipeline.spec):
            logger.info("%s: dropped the staging of %d old attempts", pipeline.name, dropped)
        return txids


def process_batch(settings: Settings, pipeline: Pipeline | str, txid: int, *, owner: str, restage: bool = False) -> Processed:
    """Process a batch under a new attempt, unless its newest attempt is sealed or it has committed.

    A permanent error is written into the ledger, so that later txids of the run stop waiting for this one.

    Raises: AttemptFenced if a newer attempt took over meanwhile; what `stage_batch` raises.
    """
    pipeline = find_pipeline(pipeline)
    with StateStore.connect(settings) as store, _halting(store, pipeline.name, txid):
        attempt = store.start_attempt(pipeline.spec, txid, owner, restage=restage)
        if attempt is None:
            return Processed(pipeline.name, txid, None, "processed already")
        if isinstance(attempt, Commit):
            return Processed(pipeline.name, txid, attempt.attempt, "committed already")
        with _recording_failure(store, attempt), spark_session(settings, pipeline.name) as spark:
            stage_batch(store, pipeline, attempt, spark)
        return Processed(pipeline.name, txid, attempt.number, "processed")


def commit_batch(settings: Settings, pipeline: Pipeline | str, txid: int, *, owner: str) -> Commit:
    """Commit a batch, then those that directly follow and are ready; report if it had committed before.

    Staging that is missing, damaged or failed is made again from the saved metadata: a failure in either phase repeats
    both (SEMANTICS (a), Pipelined design).

    Raises: CommitOutOfOrder, AttemptNotSealed, StoreUnavailable (retryable); permanent errors.
    """
    pipeline = find_pipeline(pipeline)
    with StateStore.connect(settings) as store, _halting(store, pipeline.name, txid):
        for tries_left in reversed(range(RESTAGE_TRIES)):
            try:
                done = store.commit_batch(pipeline.spec, txid, owner)
                break
            except StagingLost as lost:
                if not tries_left:
                    raise
                logger.warning("%s", lost)
                process_batch(settings, pipeline, txid, owner=owner, restage=True)
        _drain(store, pipeline, done, owner)
        return done


def report_exhausted(settings: Settings, pipeline: str, txid: int, reason: str) -> None:
    """Write into the ledger that nobody retries this batch by itself any more; a later run lifts it again."""
    with StateStore.connect(settings) as store:
        store.halt_batch(pipeline, txid, reason)


def _plan_once(
    store: StateStore, pipeline: Pipeline, run_id: str, from_txid: int | None, to_txid: int | None, limit: int
) -> list[int] | None:
    """Plan against one look at the ledger; None if another planner was faster."""
    if planned := store.run_txids(pipeline.name, run_id):
        return planned
    after, previous = store.last_opened(pipeline.name)
    last_wanted = after + limit if to_txid is None else to_txid
    pending = [txid for txid in store.uncommitted(pipeline.name, limit) if (from_txid or 1) <= txid <= last_wanted]
    metadata: list[bytes] = []
    if len(pending) < limit and after < last_wanted:
        coordinator = pipeline.source.coordinator(store.settings)
        for txid in range(after + 1, min(last_wanted, after + limit - len(pending)) + 1):
            previous = coordinator.initialize_transaction(txid, previous, None)
            if previous is None:
                break
            metadata.append(encode_metadata(previous))
    return store.open_batches(pipeline.spec, run_id, pending, after, metadata)


def _drain(store: StateStore, pipeline: Pipeline, done: Commit, owner: str) -> None:
    """Commit the batches that directly follow, each in its own transaction, as long as they are ready.

    Whatever stops it is met again, and reported, by the commit that the batch's own task tries.
    """
    if done.already_committed:
        return
    txid = done.txid + 1
    while (turn := store.turns([(pipeline.name, txid)]).get((pipeline.name, txid))) and turn.opens and not turn.halted:
        try:
            following = store.commit_batch(pipeline.spec, txid, owner)
        except (RetryableError, UsageError) as stop:
            logger.info("%s %s is left to its own task: %s", pipeline.name, txid, stop)
            return
        if following.already_committed:
            return
        logger.info("%s", following)
        txid += 1


@contextmanager
def _recording_failure(store: StateStore, attempt: Attempt) -> Iterator[None]:
    """Write into the ledger why an attempt gave up, whatever the reason, and pass the reason on."""
    try:
        yield
    except AttemptFenced:
        raise  # the newer attempt's row tells the story
    except Exception as error:
        code = error.code if isinstance(error, TidegateError) else type(error).__name__
        store.fail_attempt(attempt, f"{code}: {error}")
        raise


@contextmanager
def _halting(store: StateStore, pipeline: str, txid: int) -> Iterator[None]:
    """Mark the batch as halted when an error is permanent: nobody retries it by itself."""
    try:
        yield
    except UsageError:
        raise
    except PermanentError as error:
        store.halt_batch(pipeline, txid, f"{error.code}: {error}")
        raise
