"""What a worker tells of its work, right after it: to a trace, to metrics of Airflow."""

import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from state_store import StateStore

logger = logging.getLogger(__name__)


class Teller:
    """Is told what has happened. By default it does nothing; telling never fails the work, so it catches its own errors.

    A process that is killed tells nothing more, and a step that is repeated may be told again: the ledger has the truth.
    """

    def tell_plan(self, pipeline: str, begun: datetime, txids: Sequence[int]) -> None:
        """Tell of a plan that ends now."""

    def tell_attempts(self, store: StateStore, pipeline: str, txid: int, numbers: Container[int]) -> None:
        """Tell of attempts at a batch that have ended: the worker's own, and those that it has fenced."""

    def tell_committed(self, store: StateStore, pipeline: str, txids: Sequence[int]) -> None:
        """Tell of batches that this process has committed or skipped just now."""

    def tell_commit(self, store: StateStore, pipeline: str, txid: int) -> None:
        """Tell that a batch's own commit task is over, whichever process has committed the batch."""


@contextmanager
def harmless(pipeline: str, missing: str) -> Iterator[None]:
    """Log an error of telling, and nothing else: the work counts whether it is told or not."""
    try:
        yield
    except Exception:
        logger.warning("%s: %s", pipeline, missing, exc_info=True)
