"""The three steps of a batch, as Airflow's tasks and `tidegate run` both call them: plan, process, commit.

Each may be repeated, interrupted and run twice at once; what counts is decided in Postgres.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from jobs.history import LedgerHistory
from jobs.pipeline import Pipeline
from jobs.poison import Outcome, fault_of, outcome_of
from jobs.process import stage_batch
from jobs.ranges import MAX_BATCHES_PER_RUN, check_range
from jobs.registry import find_pipeline
from jobs.spark import spark_session
from state_store import StateStore
from state_store.attempts import AirflowTry, Attempt, CutWanted, Recut, Settled
from state_store.batches import QUARANTINED, encode_metadata, position_of
from state_store.commits import Commit
from state_store.declaration import SourceMetadata
from state_store.errors import (
    AttemptFenced,
    BatchRetried,
    Fault,
    PermanentError,
    SourceUnavailable,
    StagingLost,
    StoreUnavailable,
    TidegateError,
    UsageError,
)
from state_store.settings import Settings

logger = logging.getLogger(__name__)

RESTAGE_TRIES = 3
POLICY = "the pipeline's policy"  # who gives a batch up, in the ledger
SECONDS_BETWEEN_LOOKS = 0.1
LONGEST_WAIT_FOR_THIEF_SECONDS = 10.0  # to begin, from when it says that it is at a batch
# How long a task stays for the commit of what it has processed, and how often it looks: a merge of many keys takes seconds.
LONGEST_STAY_SECONDS, SECONDS_BETWEEN_TURNS = 30.0, 0.5


@dataclass(frozen=True)
class Processed:
    """How processing a batch ended: sealed by this attempt, sealed before, committed before, or not begun: `is_ahead`."""

    pipeline: str
    txid: int
    attempt: int | None
    outcome: str
    is_ahead: bool = False

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
    gets the same answer, so a repeated plan changes nothing. Acks that earlier runs owe the source are made up for.

    Raises: RangeRefused if the range is upside down or would leave a gap; PipelinePaused; the source's errors;
    UnknownPipeline.
    """
    pipeline = find_pipeline(pipeline)
    with StateStore.connect(settings) as store:
        if not store.run_txids(pipeline.name, run_id):  # a run that has planned goes on
            store.check_not_paused(pipeline.name)
        check_range(pipeline.name, store.committed(pipeline.name), from_txid, to_txid, max_batches)
        _make_up_for_acks(store, pipeline)
        limit = min(max_batches or MAX_BATCHES_PER_RUN, MAX_BATCHES_PER_RUN)
        while (txids := _plan_once(store, pipeline, run_id, from_txid, to_txid, limit)) is None:
            logger.info("%s: another run planned at the same moment; looking again", pipeline.name)
        if dropped := store.drop_old_staging(pipeline.spec):
            logger.info("%s: dropped the staging of %d old attempts", pipeline.name, dropped)
        return txids


def process_batch(
    settings: Settings,
    pipeline: Pipeline | str,
    txid: int,
    *,
    owner: str,
    airflow: AirflowTry | None = None,
    restage: bool = False,
    commit_ready: bool = False,
    only_first: bool = False,
) -> Processed:
    """Process a batch under a new attempt, unless its newest attempt is sealed, or it has committed or was given up.

    Nor is it begun while the pipeline's window is full: `Turn.begins` tells when to come again.

    With `only_first`, not if it has an attempt already, in whichever state.

    With `commit_ready`, whoever finishes what the next commit waits for commits it, with all that is ready behind it, unless
    somebody is committing: so nobody has to be started for that first. The batch's own commit then finds it done.

    A permanent error is written into the ledger, so that later txids of the run stop waiting for this one; unless the
    pipeline skips poison: then the batch is tried again, and given up after the last try.

    Raises: AttemptFenced if a newer attempt took over meanwhile; BatchRetried; what `stage_batch` and the source's
    coordinator raise.
    """
    pipeline = find_pipeline(pipeline)
    with StateStore.connect(settings) as store, _halting(store, pipeline.name, txid):
        attempt = _start_attempt(store, pipeline, txid, owner, airflow=airflow, restage=restage, only_first=only_first)
        if isinstance(attempt, Settled):
            return Processed(pipeline.name, txid, None, attempt.value, is_ahead=attempt is Settled.AHEAD)
        if isinstance(attempt, Commit):
            return Processed(pipeline.name, txid, attempt.attempt, "committed already")
        try:
            _stage(store, pipeline, attempt)
        except AttemptFenced:
            raise  # the newer attempt's row tells the story
        except Exception as error:
            if not _give_up(store, pipeline, attempt, error):
                raise
            return Processed(pipeline.name, txid, attempt.number, Settled.GIVEN_UP.value)
        if commit_ready:
            _commit_while_ready(store, pipeline, owner)
        return Processed(pipeline.name, txid, attempt.number, "processed")


def steal_batches(settings: Settings, pipeline: Pipeline | str, airflow: AirflowTry) -> None:
    """Process the batches of an Airflow run that nobody has begun, one after another and first ones first, and commit.

    It ends when there are none, or at the first that fails: that one is left to its own task, which tries again and reports.
    As long as this is at a batch, and alive, the batch's own task waits (`await_thief`).
    """
    pipeline = find_pipeline(pipeline)
    with StateStore.connect(settings) as store, closing(store.unbegun(pipeline.name, airflow.run_id)) as unbegun:
        for txid in unbegun:
            try:
                processed = process_batch(
                    settings, pipeline, txid, owner=str(airflow), airflow=airflow, commit_ready=True, only_first=True
                )
            except Exception as error:
                logger.warning("%s %s is left to its own task: %s", pipeline.name, txid, _told(error), exc_info=True)
                return
            logger.info("%s", processed)


def await_thief(settings: Settings, pipeline: Pipeline | str, txid: int) -> None:
    """Wait while another task, which has stolen this batch, is at it; no longer than an attempt may take.

    A thief begins at once. To go on too early costs work, and nothing else: the newer attempt fences the thief's.
    """
    pipeline = find_pipeline(pipeline)
    with StateStore.connect(settings) as store:
        begins_by = time.monotonic() + LONGEST_WAIT_FOR_THIEF_SECONDS
        ends_at = time.monotonic() + (pipeline.message_timeout_seconds or settings.attempt_timeout_seconds)
        while store.is_stolen(pipeline.name, txid, only_begun=time.monotonic() >= begins_by) and time.monotonic() < ends_at:
            time.sleep(SECONDS_BETWEEN_LOOKS)


def await_commit(settings: Settings, pipeline: Pipeline | str, txid: int, *, owner: str) -> bool:
    """Stay while nothing but commits lies before a batch's own, for LONGEST_STAY_SECONDS at most; tell whether it is through.

    Most often somebody is at it. A worker that left meanwhile would make place for the next task, which finds its work done: a
    few of these take as much CPU as the merge, at the same time. Whoever stays commits what is ready if nobody else does,
    because they died; and leaves if that fails, for the batch's own commit to tell why.

    Raises: StoreUnavailable.
    """
    pipeline = find_pipeline(pipeline)
    ends_at = time.monotonic() + LONGEST_STAY_SECONDS
    with StateStore.connect(settings) as store:
        while not store.turn(pipeline.name, txid).done:
            if time.monotonic() >= ends_at or not store.only_commits_before(pipeline.name, txid):
                return False
            try:
                if _opens(store, pipeline, store.committed(pipeline.name) + 1):
                    if _commit_together(store, pipeline, owner, wait=False):
                        continue
                    return store.turn(pipeline.name, txid).done  # somebody was quicker, or the next one is to be skipped
            except StoreUnavailable as busy:
                logger.debug("%s %s stays: %s", pipeline.name, txid, busy)
            except Exception as error:  # noqa: BLE001 - the batch's own commit tells
                _tell_why_not_together(pipeline, error)
                return False
            time.sleep(SECONDS_BETWEEN_TURNS)
    return True


def commit_batch(
    settings: Settings, pipeline: Pipeline | str, txid: int, *, owner: str, airflow: AirflowTry | None = None
) -> Commit:
    """Commit a batch, together with its neighbours in order that are ready; report if it had committed before.

    Staging that is missing, damaged or failed is made again from the saved metadata: a failure in either phase repeats
    both (docs/protocol.md). Then the source gets its ack.

    Raises: CommitOutOfOrder, AttemptNotSealed, StoreUnavailable (retryable); permanent errors.
    """
    pipeline = find_pipeline(pipeline)
    with StateStore.connect(settings) as store, _halting(store, pipeline.name, txid):
        for tries_left in reversed(range(RESTAGE_TRIES)):
            try:
                together = {commit.txid: commit for commit in _commit_ready(store, pipeline, owner)}
                done = together.get(txid) or store.commit_batch(
                    pipeline.spec, txid, owner, attempt_timeout_seconds=pipeline.message_timeout_seconds
                )
                break
            except StagingLost as lost:
                if not tries_left:
                    raise
                logger.warning("%s", lost)
                process_batch(settings, pipeline, txid, owner=owner, airflow=airflow, restage=True)
        is_told = done.already_committed and store.turn(pipeline.name, txid).done
        if txid not in together and not is_told:
            _ack(store, pipeline, done)
        if not done.already_committed:
            _drain(store, pipeline, max(together, default=txid) + 1, owner)
        return done


def redo_batch(settings: Settings, pipeline: Pipeline | str, txid: int, *, owner: str, reason: str) -> Commit:
    """Process the last committed batch again, and put the result in the place of what it did to the states (I13).

    An opaque source cuts it anew; then later batches that were planned are cut anew too. For opaque states only. If the
    process dies before the end, the states are as they were.

    Raises: RangeRefused; what `process_batch` raises; AccessRefused without the password of the tables' owner.
    """
    pipeline = find_pipeline(pipeline)
    StateStore.connect(settings, user=settings.pg_owner).close()  # to be refused in the end would waste the processing
    with StateStore.connect(settings) as store:
        attempt = _start_attempt(store, pipeline, txid, owner, redo=True)
        assert isinstance(attempt, Attempt), "a redo always gets its attempt, or an error"
        try:
            _stage(store, pipeline, attempt)
        except Exception as error:
            store.fail_attempt(attempt, _told(error), is_poison=fault_of(error) is Fault.CONTENT)
            raise
    with StateStore.connect(settings, user=settings.pg_owner) as store:
        done = store.redo_batch(pipeline.spec, txid, owner, reason)
        _ack(store, pipeline, done)
        return done


def report_exhausted(settings: Settings, pipeline: str, txid: int, reason: str) -> None:
    """Write into the ledger that nobody retries this batch by itself any more; a later run lifts it again.

    A pipeline that skips poison gives it up instead, if the batch has failed by its content as often as it may, and in its
    newest attempt: whatever ended the task says nothing about the batch.
    """
    with StateStore.connect(settings) as store:
        if tries := store.poison_tries(pipeline, txid):
            declared = find_pipeline(pipeline)
            told = f"it failed in try {tries} of {declared.tries}; at last its task ended: {reason}"
            if declared.on_poison == "skip" and store.give_up(pipeline, txid, POLICY, told, tries=declared.tries):
                return
        store.halt_batch(pipeline, txid, reason)


def _plan_once(
    store: StateStore, pipeline: Pipeline, run_id: str, from_txid: int | None, to_txid: int | None, limit: int
) -> list[int] | None:
    """Plan against one look at the ledger; None if another planner was faster."""
    if planned := store.run_txids(pipeline.name, run_id):
        return planned
    after = store.last_opened(pipeline.name)
    last, position = (after.txid, position_of(after.metadata)) if after else (0, None)
    last_wanted = last + limit if to_txid is None else to_txid
    pending = [txid for txid in store.uncommitted(pipeline.name, limit) if (from_txid or 1) <= txid <= last_wanted]
    metadata: list[bytes] = []
    if len(pending) < limit and last < last_wanted:
        coordinator = pipeline.source.coordinator(store.settings)
        coordinator.look_back(LedgerHistory(store, pipeline.name))
        coordinator.success(store.committed(pipeline.name))
        for txid in range(last + 1, min(last_wanted, last + limit - len(pending)) + 1):
            if not coordinator.is_ready(txid):
                break
            position = coordinator.initialize_transaction(txid, position, None)
            if position is None:
                break
            metadata.append(encode_metadata(position))
    return store.open_batches(pipeline.spec, run_id, pending, after, metadata, awaits_ack=pipeline.source.wants_acks)


def _start_attempt(
    store: StateStore,
    pipeline: Pipeline,
    txid: int,
    owner: str,
    *,
    airflow: AirflowTry | None = None,
    restage: bool = False,
    redo: bool = False,
    only_first: bool = False,
) -> Attempt | Commit | Settled:
    """Take the batch's fence, after the source has cut the batch anew if that is due."""
    recut: Recut | None = None
    while True:
        begun = store.start_attempt(
            pipeline.spec, txid, owner, airflow=airflow, restage=restage, redo=redo, only_first=only_first, recut=recut
        )
        if not isinstance(begun, CutWanted):
            return begun
        metadata = _cut_anew(store, pipeline, txid, begun)
        recut = Recut(encode_metadata(metadata), begun.continues)


def _cut_anew(store: StateStore, pipeline: Pipeline, txid: int, wanted: CutWanted) -> SourceMetadata:
    before = position_of(wanted.previous)
    if QUARANTINED in wanted.current:  # the records stay; only the position that they carry along may have moved
        return {**wanted.current, "source": before}
    coordinator = pipeline.source.coordinator(store.settings)
    coordinator.look_back(LedgerHistory(store, pipeline.name))
    metadata = coordinator.initialize_transaction(txid, before, wanted.current)
    if metadata is None:
        raise SourceUnavailable(
            f"{pipeline.name} {txid}: the source has nothing to put in the place of what it planned.", pipeline=pipeline.name
        )
    return metadata


def _stage(store: StateStore, pipeline: Pipeline, attempt: Attempt) -> None:
    with spark_session(store.settings, pipeline.name, rows_are_short=pipeline.stages_short_rows) as spark:
        stage_batch(store, pipeline, attempt, spark)


def _give_up(store: StateStore, pipeline: Pipeline, attempt: Attempt, error: Exception) -> bool:
    """Write into the ledger why an attempt failed and tell the source; then decide by the policy what becomes of the batch.

    True: the batch was given up, and is skipped in its turn. False: the error takes its course.

    Raises: BatchRetried if the policy wants another try; AttemptFenced.
    """
    told = _told(error)
    tries = store.fail_attempt(attempt, told, is_poison=fault_of(error) is Fault.CONTENT)
    _call_back(f"{attempt}: fail", lambda: pipeline.source.fail(attempt, error, store.settings))
    if outcome_of(error, pipeline) is not Outcome.SKIP:
        return False
    reason = f"it failed in try {tries} of {pipeline.tries}, with {told}"
    if store.give_up(pipeline.name, attempt.txid, POLICY, reason, tries=pipeline.tries):
        logger.error("%s: the last of %d tries failed, the batch is given up: %s", attempt, pipeline.tries, told)
        return True
    raise BatchRetried(
        f"{attempt}: try {tries} of {pipeline.tries} failed, it is tried again: {told}",
        pipeline=attempt.pipeline,
        txid=attempt.txid,
        attempt=attempt.number,
    ) from error


def _ack(store: StateStore, pipeline: Pipeline, done: Commit) -> bool:
    """Tell the source that the batch counts, or never will; then note that, so it happens at least once for each txid.

    False if the source raises: that is logged, the batch counts all the same, and the next plan tells the source again.
    """
    if not pipeline.source.wants_acks:
        return True
    metadata = store.source_metadata(pipeline.name, done.txid)
    if QUARANTINED not in metadata:
        attempt = Attempt(pipeline.name, done.txid, done.attempt, metadata)
        if not _call_back(
            f"{attempt}: ack failed; the next run tries again", lambda: pipeline.source.ack(attempt, store.settings)
        ):
            return False
    store.note_ack(pipeline.name, done.txid)
    return True


def _make_up_for_acks(store: StateStore, pipeline: Pipeline) -> None:
    """Tell the source of commits of which it was not told: the process died before it could, or the source raised.

    It ends at the first that fails: the next would most often fail for the same reason, and take its time.
    """
    if not pipeline.source.wants_acks:
        return
    for done in store.awaiting_acks(pipeline.name, MAX_BATCHES_PER_RUN):
        if not _ack(store, pipeline, done):
            return
        logger.info("%s %s: its ack was made up for", pipeline.name, done.txid)


def _call_back(what: str, call: Callable[[], None]) -> bool:
    """Call the source back; what it raises is for people to read, and changes nothing. False if it raises."""
    try:
        call()
    except Exception:
        logger.exception("%s", what)
        return False
    return True


def _told(error: Exception) -> str:
    code = error.code if isinstance(error, TidegateError) else type(error).__name__
    return f"{code}: {error}"


def _opens(store: StateStore, pipeline: Pipeline, txid: int) -> bool:
    turn = store.turn(pipeline.name, txid)
    return turn.opens and not turn.halted


def _commit_while_ready(store: StateStore, pipeline: Pipeline, owner: str) -> None:
    """Commit what is ready, unless somebody else is committing, and tell the source.

    What others commit meanwhile needs no second look at the cursor: a turn that is over counts as open, and the commit
    itself begins behind the cursor.
    """
    following = store.committed(pipeline.name) + 1
    while _opens(store, pipeline, following) and (done := _commit_ready(store, pipeline, owner, wait=False)):
        following = done[-1].txid + 1


def _drain(store: StateStore, pipeline: Pipeline, txid: int, owner: str) -> None:
    """Commit this batch and those that directly follow as long as it is their turn: several together, or one by itself.

    Whatever stops it is met again, and reported, by the commit that the batch's own task tries.
    """
    together = True
    while _opens(store, pipeline, txid):
        try:
            following = _commit_ready(store, pipeline, owner) if together else []
            # What failed together would do so again before each of the batches that are in it.
            together = bool(following)
            following = following or [
                store.commit_batch(pipeline.spec, txid, owner, attempt_timeout_seconds=pipeline.message_timeout_seconds)
            ]
        except TidegateError as stop:
            logger.info("%s %s is left to its own task: %s", pipeline.name, txid, stop)
            return
        if following[-1].already_committed:
            return
        txid = following[-1].txid + 1


def _commit_ready(store: StateStore, pipeline: Pipeline, owner: str, *, wait: bool = True) -> list[Commit]:
    """Commit the next batches in one transaction if they are ready.

    If somebody else is committing, or anything is wrong with one of them, they are left: to whoever holds the cursor, and to
    be committed one by one. That is so for any error at all: what one of them does by itself is found out there.
    """
    try:
        return _commit_together(store, pipeline, owner, wait=wait)
    except Exception as error:  # noqa: BLE001 - each batch's own commit tells
        _tell_why_not_together(pipeline, error)
        return []


def _tell_why_not_together(pipeline: Pipeline, error: Exception) -> None:
    unexpected = None if isinstance(error, TidegateError) else error
    level = logging.WARNING if unexpected else logging.INFO
    logger.log(level, "%s: the next batches are not committed together: %s", pipeline.name, error, exc_info=unexpected)


def _commit_together(store: StateStore, pipeline: Pipeline, owner: str, *, wait: bool) -> list[Commit]:
    done = store.commit_ready(pipeline.spec, owner, wait=wait)
    for commit in done:
        logger.info("%s", commit)
        _ack(store, pipeline, commit)
    return done


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
