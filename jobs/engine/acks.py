"""Acks: notify a source that its batch has committed, at least once for each txid, even if the source raises."""

import logging
from collections.abc import Callable

from tidegate.jobs.engine.txid_ranges import MAX_BATCHES_PER_RUN
from tidegate.jobs.pipeline import Pipeline
from tidegate.state_store import StateStore
from tidegate.state_store.attempt.attempts import Attempt
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.ledger.batches import QUARANTINED

logger = logging.getLogger(__name__)

MOST_FAILED_ACKS = 10


def ack(store: StateStore, pipeline: Pipeline, commit: Commit) -> bool:
    """Give the source the ack of a committed or skipped batch; then record the ack.

    Return False if the source raises: the error is logged, the batch stays committed, and the next plan gives the ack again.
    """
    if not pipeline.wants_acks:
        return True
    metadata = store.source_metadata(pipeline.name, commit.txid)
    if QUARANTINED not in metadata:
        attempt = Attempt(pipeline.name, commit.txid, commit.attempt, metadata)
        message = f"{attempt}: ack failed; the next run tries again"
        if not call_source(message, lambda: pipeline.source.ack(attempt, store.settings)):
            return False
    store.note_ack(pipeline.name, commit.txid, commit.attempt)
    return True


def give_overdue_acks(store: StateStore, pipeline: Pipeline) -> None:
    """Give the acks that earlier runs owe the source, because they died before the ack or the source raised.

    An ack that fails keeps no other waiting, but after MOST_FAILED_ACKS the rest is left: it would most often fail for the
    same reason, slowly. A source that wants none, because it was declared otherwise when a batch was planned, is owed none any
    more.
    """
    failed = 0
    for commit in store.awaiting_acks(pipeline.name, MAX_BATCHES_PER_RUN):
        if not pipeline.wants_acks:
            store.note_ack(pipeline.name, commit.txid, commit.attempt)
        elif ack(store, pipeline, commit):
            logger.info("%s %s: its overdue ack was given", pipeline.name, commit.txid)
        elif (failed := failed + 1) == MOST_FAILED_ACKS:
            return


def call_source(message: str, call: Callable[[], None]) -> bool:
    """Call the source; if it raises, log the message and return False."""
    try:
        call()
    except Exception:
        logger.exception("%s", message)
        return False
    return True
