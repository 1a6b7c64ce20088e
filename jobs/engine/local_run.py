"""Local runs: plan, process and commit in one process without Airflow, for `tidegate run`, notebooks, tests and benchmarks."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from tidegate.jobs.compute.sessions.session import check_reachable
from tidegate.jobs.engine.log_fields import about
from tidegate.jobs.engine.processing import Processed
from tidegate.jobs.engine.retries import with_retries, with_servers
from tidegate.jobs.engine.worker import Worker
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store.base.errors import AttemptFenced, AttemptNotSealed, StoreUnavailable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.commit.commit_record import Commit

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # between checks of a batch that is processed here or in another run
WINDOW_POLL_SECONDS = 0.05  # between checks whether a batch may begin, while too many are in flight
Progress = Callable[[int, str], None]  # called with a txid and what has happened to its batch


@dataclass(frozen=True)
class RunResult:
    """The result of a run: the txids it covered, in order, with their commits."""

    txids: list[int]
    commits: list[Commit]


def run_pipeline(
    settings: Settings,
    pipeline: Pipeline | str,
    *,
    run_id: str,
    from_txid: int | None = None,
    to_txid: int | None = None,
    max_batches: int | None = None,
    progress: Progress = lambda _txid, _event: None,
) -> RunResult:
    """Plan, process batches concurrently within the pipeline's limits, and commit in order in the caller's thread.

    A sealed batch, whose staging is complete, waits briefly for others, to commit in the same transaction.

    `progress` is called from several threads, with a txid and one of planned, processed, committed, skipped. If the process
    dies, the next run continues with the planned batches; commits stay. A batch with a temporary failure is tried up to the
    pipeline's `tries`, with growing pauses. Postgres and Spark must answer when the run starts; if one goes away later, the
    run waits for it, up to `retries.SERVER_PATIENCE_SECONDS`. Any other error ends the run; sealed batches stay sealed. If the
    pipeline is paused meanwhile, the run ends when the batches have committed that had begun.

    Raises: the errors of `Worker.plan`, `Worker.process` and `Worker.commit`.
    """
    with Worker.open(settings, find_pipeline(pipeline), owner=run_id) as worker:
        txids = with_servers(
            settings,
            lambda: worker.plan(run_id, from_txid=from_txid, to_txid=to_txid, max_batches=max_batches),
        )
        for txid in txids:
            progress(txid, "planned")
        if txids:
            check_reachable(settings)
        return RunResult(txids, _process_and_commit(worker, txids, progress))


def _process_and_commit(worker: Worker, txids: list[int], progress: Progress) -> list[Commit]:
    """Process batches at the pipeline's concurrency, while this thread commits in order; return the commits."""
    settings, pipeline, store = worker.store.settings, worker.pipeline, worker.store
    stopped = threading.Event()

    def process_once(txid: int) -> Processed:
        return worker.after_others(txid, lambda mode: worker.process(txid, mode=mode), stopped=stopped)

    def process(txid: int) -> None:
        try:
            while with_retries(settings, pipeline, lambda: process_once(txid), stopped).must_wait:
                while not with_servers(settings, lambda: store.turn(pipeline.name, txid).begins, stopped):
                    with_servers(settings, lambda: store.check_not_paused(pipeline.name), stopped)
                    if stopped.wait(WINDOW_POLL_SECONDS):
                        return
        except AttemptFenced as fenced:
            with about(pipeline.name, txid):
                logger.warning("%s", fenced)  # the batch's commit waits for the newer attempt, or processes the batch again
        progress(txid, "processed")

    commits: list[Commit] = []

    def commit_up_to(number: int) -> None:
        for txid in txids[len(commits) : number]:
            commits.append(_commit(worker, txid))
            progress(txid, "committed" if commits[-1].skipped_reason is None else "skipped")

    def commit_due_up_to(number: int) -> None:
        try:
            is_due = len(commits) < number and store.turn(pipeline.name, txids[len(commits)]).opens
        except StoreUnavailable as unavailable:
            logger.info("%s", unavailable)
            return
        if is_due:
            commit_up_to(number)

    with ThreadPoolExecutor(pipeline.concurrency, thread_name_prefix=f"{pipeline.name}-process") as pool:
        processing = [pool.submit(process, txid) for txid in txids]
        try:
            for number, processed in enumerate(processing, start=1):
                while not wait([processed], POLL_SECONDS).done:
                    commit_due_up_to(number - 1)
                try:
                    processed.result()
                except Exception:
                    commit_up_to(number - 1)
                    raise
                commit_due_up_to(number)
            commit_up_to(len(txids))
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    return commits


def _commit(worker: Worker, txid: int) -> Commit:
    """Commit a batch; wait while another run processes it, at most until that attempt's timeout."""
    while True:
        try:
            return with_retries(worker.store.settings, worker.pipeline, lambda: worker.commit(txid))
        except AttemptNotSealed as not_sealed:
            with about(worker.name, txid):
                logger.info("%s", not_sealed)
            time.sleep(POLL_SECONDS)
