"""Attempts are watched while Spark works for them: heartbeats, and interruption when one is overdue, fenced or unanswered."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidegate.jobs.spark.library_internals import close_channel
from tidegate.state_store.attempt.attempts import Attempt
from tidegate.state_store.base.errors import AttemptTimedOut, SparkUnavailable, TidegateError

logger = logging.getLogger(__name__)

# How often an attempt reports that it is alive, and checks whether a newer one has fenced it; one small query each.
HEARTBEAT_SECONDS = 5.0
# A server that accepts connections is given up after this time without an answer.
LONGEST_SERVER_SILENCE_SECONDS = 60.0


def tag_of(pipeline: str, txid: int, number: int) -> str:
    """Return the tag of an attempt's Spark operations."""
    return f"tidegate-{pipeline}-{txid}-{number}"


@contextmanager
def interruptible(spark: SparkSession, attempt: Attempt, timeout_seconds: int, is_fenced: Callable[[], bool]) -> Iterator[str]:
    """Tag this thread's operations, and interrupt them when the attempt is overdue or fenced by a newer one. Yields the tag.

    The attempts that this one has fenced are interrupted first: their work is never committed. One that is just starting an
    operation may be missed, so each attempt also polls whether it is fenced. It also polls whether the server answers; a
    server that is silent for LONGEST_SERVER_SILENCE_SECONDS is given up.

    Raises: AttemptTimedOut, SparkUnavailable.
    """
    for number in attempt.fenced:
        spark.interruptTag(tag_of(attempt.pipeline, attempt.txid, number))
    tag = tag_of(attempt.pipeline, attempt.txid, attempt.number)
    has_ended, is_overdue, is_lost = Event(), Event(), Event()
    deadline = time.monotonic() + timeout_seconds

    def watch() -> None:
        answered_at = time.monotonic()
        while not has_ended.wait(max(0.1, min(HEARTBEAT_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                is_overdue.set()
            try:
                if is_overdue.is_set() or is_fenced():
                    spark.interruptTag(tag)
            except (TidegateError, PySparkException, grpc.RpcError) as error:
                logger.info("%s: cannot check now whether it is fenced, or interrupt it: %s", attempt, error)
            if has_ended.is_set() or _answers(spark):
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at >= LONGEST_SERVER_SILENCE_SECONDS:
                is_lost.set()
                close_channel(spark)

    watcher = Thread(target=watch, name=f"watch {attempt}", daemon=True)
    spark.addTag(tag)
    watcher.start()
    try:
        yield tag
    except Exception as error:
        if is_overdue.is_set():
            raise AttemptTimedOut(
                f"{attempt} took longer than its message timeout of {timeout_seconds} s, and was interrupted. Nothing of "
                "it counts."
            ) from error
        if is_lost.is_set():
            raise SparkUnavailable(
                f"{attempt}: Spark's server has not answered for {LONGEST_SERVER_SILENCE_SECONDS:.0f} s, though it is there. "
                "If that does not pass, restart it: tidegate down, tidegate up."
            ) from error
        raise
    finally:
        has_ended.set()
        watcher.join()
        spark.removeTag(tag)


def _answers(spark: SparkSession) -> bool:
    try:
        spark.conf.get("spark.app.id", None)
    except (PySparkException, grpc.RpcError, ValueError):  # ValueError: the channel was closed
        return False
    return True
