"""Processing a batch: begin an attempt, let Spark stage it, seal it, and decide what an error means for the batch."""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from tidegate.jobs.compute.batch_attempt import stage_batch
from tidegate.jobs.compute.sessions.executor_artifacts import modules_of
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.compute.shortcuts import Routing, has_short_rows
from tidegate.jobs.engine.acks import call_source
from tidegate.jobs.engine.listeners import Listener
from tidegate.jobs.engine.log_fields import about
from tidegate.jobs.engine.planning import replan
from tidegate.jobs.engine.poison import Outcome, fault_of, outcome_of
from tidegate.jobs.pipeline import Pipeline
from tidegate.state_store import StateStore
from tidegate.state_store.attempt.attempts import AirflowTry, Attempt
from tidegate.state_store.base.errors import AttemptFenced, BatchRetried, Fault, PermanentError, UsageError, describe
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.ledger.batches import encode_metadata
from tidegate.state_store.turns.begin_attempt import Mode, NewInput, NotStarted, ReplanNeeded

logger = logging.getLogger(__name__)

POLICY = "the pipeline's policy"  # the ledger's entry for "given up by"


class Done(Enum):
    """What a call that has processed a batch, or has found it committed, made of it."""

    SEALED = "processed"
    COMMITTED = "committed already"
    GIVEN_UP = NotStarted.GIVEN_UP.value


@dataclass(frozen=True)
class Processed:
    """The result of processing a batch: what was done, or why no attempt began."""

    pipeline: str
    txid: int
    attempt: int | None
    outcome: Done | NotStarted

    def __str__(self) -> str:
        number = f":{self.attempt}" if self.attempt else ""
        return f"{self.pipeline} {self.txid}{number} {self.outcome.value}"

    @property
    def must_wait(self) -> bool:
        """Return whether the batch begins later: the pipeline's window is full, or the pipeline is paused."""
        return self.outcome in (NotStarted.AHEAD, NotStarted.PAUSED)


class Processor:
    """Processes batches of one pipeline on behalf of one owner."""

    def __init__(
        self,
        store: StateStore,
        pipeline: Pipeline,
        owner: str,
        airflow: AirflowTry | None,
        routing: Routing,
        listeners: Sequence[Listener],
    ) -> None:
        self._store = store
        self._pipeline = pipeline
        self._owner = owner
        self._airflow = airflow
        self._routing = routing
        self._listeners = listeners

    def process(self, txid: int, *, mode: Mode = "resume") -> Processed:
        """Process a batch under a new attempt, unless it is sealed, committed, given up, or beyond the pipeline's window.

        An error is recorded and raised again, unless the pipeline's policy then gives the batch up; a permanent one also halts
        the batch, so that later txids of the run stop waiting for it.

        Raises: AttemptFenced if a newer attempt took over; BatchRetried; errors of `StateStore.start_attempt`, `stage_batch`,
        and the coordinator.
        """
        store, pipeline = self._store, self._pipeline
        with halting(store, pipeline.name, txid):
            attempt = self._begin(txid, mode)
            if isinstance(attempt, NotStarted):
                return Processed(pipeline.name, txid, None, attempt)
            if isinstance(attempt, Commit):
                return Processed(pipeline.name, txid, attempt.attempt, Done.COMMITTED)
            with self._observed(attempt):
                try:
                    self._stage(attempt)
                except AttemptFenced:
                    raise  # the newer attempt's row in the ledger has the reason
                except Exception as error:
                    if not self._give_up(attempt, error):
                        raise
                    return Processed(pipeline.name, txid, attempt.number, Done.GIVEN_UP)
                return Processed(pipeline.name, txid, attempt.number, Done.SEALED)

    def stage_for_redo(self, txid: int) -> None:
        """Process the last committed batch again, up to the seal; the states stay as they are.

        Raises: RangeRefused for any other batch; the errors of `process`.
        """
        attempt = self._begin(txid, "redo")
        assert isinstance(attempt, Attempt), "a redo always gets its attempt, or an error"
        with self._observed(attempt):
            try:
                self._stage(attempt)
            except Exception as error:
                self._store.fail_attempt(attempt, describe(error), is_poison=fault_of(error) is Fault.CONTENT)
                raise

    @contextmanager
    def _observed(self, attempt: Attempt) -> Iterator[None]:
        """Name the attempt in log lines of the block; notify listeners of attempts that it has fenced, and of its own end."""
        is_fenced = False
        self._notify(attempt, attempt.fenced)
        try:
            with about(attempt.pipeline, attempt.txid, attempt.number):
                yield
        except AttemptFenced:
            is_fenced = True  # the task of the newer attempt reports it
            raise
        finally:
            self._notify(attempt, () if is_fenced else [attempt.number])

    def _notify(self, attempt: Attempt, ended: Collection[int]) -> None:
        for listener in self._listeners if ended else ():
            listener.on_attempts(self._store, attempt.pipeline, attempt.txid, ended)

    def _begin(self, txid: int, mode: Mode) -> Attempt | Commit | NotStarted:
        """Begin an attempt, with a new plan of the batch if the store asks for one."""
        new_input: NewInput | None = None
        while True:
            attempt = self._store.start_attempt(
                self._pipeline.spec, txid, self._owner, mode=mode, airflow=self._airflow, new_input=new_input
            )
            if not isinstance(attempt, ReplanNeeded):
                return attempt
            metadata = replan(self._store, self._pipeline, txid, attempt)
            new_input = NewInput(encode_metadata(metadata), attempt.continues)

    def _stage(self, attempt: Attempt) -> None:
        pipeline = self._pipeline
        joined = spark_session(
            self._store.settings,
            pipeline.name,
            rows_are_short=has_short_rows(pipeline),
            modules=modules_of(pipeline),
            packages=pipeline.source.executor_packages,
        )
        with joined as spark:
            stage_batch(self._store, pipeline, attempt, spark, routing=self._routing)

    def _give_up(self, attempt: Attempt, error: Exception) -> bool:
        """Record why an attempt failed, call `Source.fail`, and return whether the pipeline's policy gives the batch up.

        Raises: BatchRetried if the policy wants another try; AttemptFenced.
        """
        store, pipeline = self._store, self._pipeline
        story = describe(error)
        tries = store.fail_attempt(attempt, story, is_poison=fault_of(error) is Fault.CONTENT)
        call_source(f"{attempt}: fail", lambda: pipeline.source.fail(attempt, error, store.settings))
        if outcome_of(error, pipeline) is not Outcome.SKIP:
            return False
        reason = f"it failed in try {tries} of {pipeline.tries}, with {story}"
        if store.give_up(pipeline.name, attempt.txid, POLICY, reason, tries=pipeline.tries):
            logger.error("%s: the last of %d tries failed, the batch is given up: %s", attempt, pipeline.tries, story)
            return True
        raise BatchRetried(f"{attempt}: try {tries} of {pipeline.tries} failed, it is tried again: {story}") from error


@contextmanager
def halting(store: StateStore, pipeline: str, txid: int) -> Iterator[None]:
    """Halt the batch if the block raises a permanent error, but no UsageError: no task retries it by itself."""
    try:
        yield
    except UsageError:
        raise
    except PermanentError as error:
        store.halt_batch(pipeline, txid, describe(error))
        raise
