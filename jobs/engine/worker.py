"""Worker: the steps of a pipeline, for a task of Airflow, `tidegate run` or a test.

    with Worker.open(settings, "flights", owner="me") as worker:
        for txid in worker.plan("my run"):
            worker.process(txid)
            worker.commit(txid)

Each step may be repeated, interrupted and run twice at once; Postgres decides what counts.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Self

from tidegate.jobs.compute.shortcuts import Routing, choose
from tidegate.jobs.engine.committing import Committer
from tidegate.jobs.engine.listeners import Listener
from tidegate.jobs.engine.log_fields import about
from tidegate.jobs.engine.planning import plan_batches
from tidegate.jobs.engine.processing import POLICY, Done, Processed, Processor
from tidegate.jobs.engine.spans import Spans
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store import StateStore
from tidegate.state_store.attempt.attempts import AirflowTry
from tidegate.state_store.base.errors import AttemptFenced
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.turns.begin_attempt import Mode, NotStarted

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Worker:
    """Works on one pipeline, with one store, under one owner's name in the ledger.

    `routing` chooses the shortcuts that an attempt takes through Spark; tests replace it. Threads may share a worker. If only
    the name of the pipeline is known, the first step that needs its declaration loads it: `has_committed` works even if its
    module is broken. `listeners` are called after each step; where a trace is recorded, one of them adds spans to it.
    """

    store: StateStore
    declared: Pipeline | str
    owner: str
    airflow: AirflowTry | None = None
    routing: Routing = choose
    listeners: tuple[Listener, ...] = ()

    @classmethod
    @contextmanager
    def open(
        cls,
        settings: Settings,
        pipeline: Pipeline | str,
        *,
        owner: str,
        airflow: AirflowTry | None = None,
        routing: Routing = choose,
        listeners: tuple[Listener, ...] = (),
    ) -> Iterator[Self]:
        """Connect to the store; close the connections at the end.

        Raises: StoreUnavailable, AccessRefused, SchemaOutOfDate. Steps that need the pipeline raise UnknownPipeline.
        """
        spans = Spans.here()
        with StateStore.connect(settings) as store:
            yield cls(store, pipeline, owner, airflow, routing, (*listeners, spans) if spans else listeners)

    @property
    def name(self) -> str:
        """Return the pipeline's name."""
        return self.declared if isinstance(self.declared, str) else self.declared.name

    @cached_property
    def pipeline(self) -> Pipeline:
        """Return the declared pipeline."""
        return find_pipeline(self.declared)

    @cached_property
    def _processor(self) -> Processor:
        return Processor(self.store, self.pipeline, self.owner, self.airflow, self.routing, self.listeners)

    @cached_property
    def _committer(self) -> Committer:
        return Committer(self.store, self.pipeline, self.owner, self.listeners)

    def plan(
        self, run_id: str, *, from_txid: int | None = None, to_txid: int | None = None, max_batches: int | None = None
    ) -> list[int]:
        """Return the txids that a run covers; freeze the metadata of new batches. If that fails, the ledger says so.

        Raises: the errors of `plan_batches`.
        """
        started_at = datetime.now(UTC)
        txids = plan_batches(
            self.store, self.declared, run_id=run_id, from_txid=from_txid, to_txid=to_txid, max_batches=max_batches
        )
        for listener in self.listeners:
            listener.on_plan(self.name, started_at, txids)
        return txids

    def process(self, txid: int, *, mode: Mode = "resume") -> Processed:
        """Process a batch, if it needs an attempt; commit nothing."""
        return self._processor.process(txid, mode=mode)

    def process_and_commit(self, txid: int, *, mode: Mode = "resume") -> Processed:
        """Process a batch; if it was sealed, commit the sealed batches after the cursor, unless another task is committing."""
        processed = self.process(txid, mode=mode)
        with about(self.name, txid, processed.attempt):
            logger.info("%s", processed)
        if processed.outcome is Done.SEALED:
            self._committer.commit_ready()
        return processed

    def process_in_own_task(self, txid: int, *, mode: Mode = "resume") -> Processed:
        """Process a batch and commit sealed batches, as the batch's own task: after any other process that is at work on it.

        If a newer attempt fences this one, the task waits for that attempt, then processes the batch if it still needs it.
        """
        while True:
            try:
                return self.after_others(txid, lambda mode: self.process_and_commit(txid, mode=mode), mode=mode)
            except AttemptFenced as fenced:
                with about(self.name, txid):
                    logger.warning("%s", fenced)
                mode = "resume"

    def after_others(
        self,
        txid: int,
        process: Callable[[Mode], Processed],
        *,
        mode: Mode = "resume",
        stopped: threading.Event | None = None,
    ) -> Processed:
        """Process a batch in this mode, once no other process is at work on it; before that, if `stopped` is set meanwhile.

        The wait takes no longer than an attempt may, as the other process may hang, connected: then its attempt is fenced.
        """
        stopped = stopped or threading.Event()
        ends_at = time.monotonic() + (self.pipeline.message_timeout_seconds or self.store.settings.attempt_timeout_seconds)
        while (processed := process(mode)).outcome is NotStarted.IN_WORK:
            while self.store.is_in_work(self.name, txid) and time.monotonic() < ends_at:
                if stopped.wait(POLL_SECONDS):
                    return processed
            if time.monotonic() >= ends_at:
                mode = "take over"
        return processed

    def has_committed(self, txid: int) -> bool:
        """Return whether a batch has committed, and its source has got its ack or needs none."""
        return self.store.turn(self.name, txid).done

    def commit(self, txid: int) -> Commit:
        """Commit a batch; process it again if its staging is lost.

        Raises: the errors of `Committer.commit`.
        """
        commit = self._committer.commit(txid, restage=lambda lost: self.process(lost, mode="restage"))
        for listener in self.listeners:
            listener.on_commit_task(self.store, self.name, txid)
        return commit

    def redo(self, txid: int, reason: str, *, without: Collection[str] = ()) -> Commit:
        """Process the last committed batch again, and replace its effect on the states (I13). For opaque states only.

        An opaque source plans the batch again, and later batches that were already planned too. If the process dies before the
        commit, the states are unchanged. Pipelines that follow a state are named in `without` if they are not run any more.

        Raises: RangeRefused; UsageError for a name in `without` that follows no state; Unprocessed; the errors of `process`;
        AccessRefused without the password of the tables' owner.
        """
        settings = self.store.settings
        StateStore.connect(settings, user=settings.pg_owner).close()  # a refusal after the processing would waste it
        self.store.check_not_followed(self.pipeline.spec, txid, without)
        self._processor.stage_for_redo(txid)
        with StateStore.connect(settings, user=settings.pg_owner) as owners_store:
            commit = replace(self, store=owners_store)._committer.redo(txid, reason, without)
        for listener in self.listeners:
            listener.on_commit_task(self.store, self.name, txid)
        return commit

    def report_exhausted(self, txid: int, reason: str) -> None:
        """Halt a batch that no task will retry by itself; a later run clears the halt.

        With the policy "skip", give the batch up instead if its content has failed in all `tries`, and in the newest attempt,
        however its last task ended.
        """
        if tries := self.store.poison_tries(self.name, txid):
            allowed = self.pipeline.tries
            story = f"it failed in try {tries} of {allowed}; at last its task ended: {reason}"
            if self.pipeline.on_poison == "skip" and self.store.give_up(self.name, txid, POLICY, story, tries=allowed):
                return
        self.store.halt_batch(self.name, txid, reason)
