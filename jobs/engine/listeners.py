"""Listeners hear from a worker what it has done, right after it: those of a trace, those of Airflow's metrics."""

import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from state_store import StateStore

logger = logging.getLogger(__name__)


class Listener:
    """Is called with what has happened. By default it does nothing; it never fails the work, so it catches its own errors.

    A process that is killed makes no more calls, and a step that is repeated may make them again: the ledger has the truth.
    """

    def on_plan(self, pipeline: str, begun: datetime, txids: Sequence[int]) -> None:
        """Hear that a plan ends now."""

    def on_attempts(self, store: StateStore, pipeline: str, txid: int, numbers: Container[int]) -> None:
        """Hear that attempts at a batch have ended: the worker's own, and those that it has fenced."""

    def on_committed(self, store: StateStore, pipeline: str, txids: Sequence[int]) -> None:
        """Hear that this process has committed or skipped batches just now."""

    def on_commit_task(self, store: StateStore, pipeline: str, txid: int) -> None:
        """Hear that a batch's own commit task is over, whichever process has committed the batch."""


@contextmanager
def harmless(pipeline: str, missing: str) -> Iterator[None]:
    """Log a listener's error, and nothing else: the work counts whether it is reported or not."""
    try:
        yield
    except Exception:
        logger.warning("%s: %s", pipeline, missing, exc_info=True)
