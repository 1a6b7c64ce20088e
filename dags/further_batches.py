"""A task whose own batch is processed goes on with further batches of its run, so that no process has to start for them."""

import logging
import time
from typing import TYPE_CHECKING

from tidegate.jobs.engine.log_fields import about
from tidegate.state_store.base.errors import describe

if TYPE_CHECKING:
    from tidegate.jobs.engine.worker import Worker

logger = logging.getLogger(__name__)

# After this long the task ends, so that a run of many batches leaves room in Airflow for other pipelines. If nothing else
# waits, the next task of the run starts within seconds.
LONGEST_SECONDS = 60.0


def process_further_batches(worker: "Worker", run_id: str) -> None:
    """Process and commit batches of a run that no task has begun, one after another in order.

    It ends when there are none, after LONGEST_SECONDS, or at the first failure: the failed batch is left to its own task,
    which tries again and reports.
    """
    ends_at = time.monotonic() + LONGEST_SECONDS
    txid = 0
    while (unbegun := worker.store.next_unbegun(worker.name, run_id, after=txid)) is not None:
        txid = unbegun
        if time.monotonic() >= ends_at:
            logger.info("%s: this task ends, to make room for other pipelines; others go on with the run", worker.name)
            return
        with about(worker.name, txid):
            try:
                worker.process_and_commit(txid, mode="first")
            except Exception as error:
                logger.warning("%s %s is left to its own task: %s", worker.name, txid, describe(error), exc_info=True)
                return
