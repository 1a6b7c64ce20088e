"""The same engine without Airflow: plan, process and commit in one process, for notebooks, tests and benchmarks."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from jobs import phases
from jobs.pipeline import Pipeline
from jobs.registry import find_pipeline
from state_store.commits import Commit
from state_store.errors import AttemptFenced, AttemptNotSealed, BatchRetried, RetryableError
from state_store.settings import Settings
from state_store.store import StateStore

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.5
LONGEST_RETRY_DELAY_SECONDS = 120
Progress = Callable[[int, str], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class RunResult:
    """What a run did: the txids it covered, in order, with their commits."""

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
    """Plan, then process up to the pipeline's window of batches at once while the caller's thread commits in order.

    Batches that are ready wait for others that could be merged with them, for a while (`state_store.queries.PATIENCE`).

    `progress` is called with a txid and one of planned, processed, committed, skipped; from several threads. If it dies,
    the next run picks up what was planned; what was committed stays. A batch that fails by itself, for a reason that may
    pass, is tried again as often as the pipeline says, with growing pauses. Any other error ends the run: later batches that
    are already processed keep their work.

    Raises: what `plan_batches`, `process_batch` and `commit_batch` raise.
    """
    pipeline = find_pipeline(pipeline)
    txids = phases.plan_batches(
        settings, pipeline, run_id=run_id, from_txid=from_txid, to_txid=to_txid, max_batches=max_batches
    )
    for txid in txids:
        progress(txid, "planned")

    def process(txid: int) -> None:
        try:
            _with_retries(pipeline, lambda: phases.process_batch(settings, pipeline, txid, owner=run_id))
        except AttemptFenced as fenced:
            logger.warning("%s", fenced)  # the commit below waits for, or repeats, the work of the newer attempt
        progress(txid, "processed")

    commits: list[Commit] = []

    def commit_first(number: int) -> None:
        for txid in txids[len(commits) : number]:
            commits.append(_commit(settings, pipeline, txid, run_id))
            progress(txid, "committed" if commits[-1].skipped_reason is None else "skipped")

    def commit_due(number: int) -> None:
        if len(commits) < number and store.turn(pipeline.name, txids[len(commits)]).opens:
            commit_first(number)

    with (
        StateStore.connect(settings) as store,
        ThreadPoolExecutor(pipeline.window, thread_name_prefix=f"{pipeline.name}-process") as pool,
    ):
        processing = [pool.submit(process, txid) for txid in txids]
        try:
            for number, processed in enumerate(processing, start=1):
                while not wait([processed], SECONDS_BETWEEN_LOOKS).done:
                    commit_due(number - 1)
                try:
                    processed.result()
                except Exception:
                    commit_first(number - 1)
                    raise
                commit_due(number)
            commit_first(len(txids))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return RunResult(txids, commits)


def _commit(settings: Settings, pipeline: Pipeline, txid: int, owner: str) -> Commit:
    """Commit a batch; if another run has taken it over, wait for that one. An attempt that never ends becomes overdue."""
    while True:
        try:
            return _with_retries(pipeline, lambda: phases.commit_batch(settings, pipeline, txid, owner=owner))
        except AttemptNotSealed as elsewhere:
            logger.info("%s", elsewhere)
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _with_retries(pipeline: Pipeline, step: Callable[[], Result]) -> Result:
    """Repeat a step while the batch fails by itself for a reason that may pass; servers that are away end the run."""
    for failed in range(1, pipeline.tries + 1):
        try:
            return step()
        except RetryableError as error:
            if failed == pipeline.tries or not (error.is_poison or isinstance(error, BatchRetried)):
                raise
            delay = min(pipeline.retry_delay_seconds * 2 ** (failed - 1), LONGEST_RETRY_DELAY_SECONDS)
            logger.warning("%s Next try in %d s.", error, delay)
            time.sleep(delay)
    raise AssertionError("the last try returns or raises")
