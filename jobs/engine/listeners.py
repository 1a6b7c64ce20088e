"""Listeners: called by a worker right after each of its steps, to record traces or Airflow's metrics."""

import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from tidegate.state_store import StateStore

logger = logging.getLogger(__name__)


class Listener:
    """A listener with methods that do nothing; a subclass overrides some. It must catch its own errors.

    A process that is killed makes no more calls, and a step that is repeated may make them again: only the ledger is complete.
    """

    def on_plan(self, pipeline: str, started_at: datetime, txids: Sequence[int]) -> None:
        """Hear that a plan ends now with these txids."""

    def on_attempts(self, store: StateStore, pipeline: str, txid: int, numbers: Container[int]) -> None:
        """Hear that attempts at a batch have ended: the worker's own, and those that it has fenced."""

    def on_committed(self, store: StateStore, pipeline: str, txids: Sequence[int]) -> None:
        """Hear that this process has committed or skipped batches just now."""

    def on_commit_task(self, store: StateStore, pipeline: str, txid: int) -> None:
        """Hear that a batch's own commit task is over, whichever process has committed the batch."""


@contextmanager
def harmless(pipeline: str, missing: str) -> Iterator[None]:
    """Log an error of the block, and what is `missing` by it, instead of raising it."""
    try:
        yield
    except Exception:
        logger.warning("%s: %s", pipeline, missing, exc_info=True)
