"""Retries of a failed step of a batch while its error may pass, and waits for a server that is away."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tidegate.jobs.compute.sessions.session import check_reachable
from tidegate.jobs.engine.poison import Outcome, outcome_of, pause_after
from tidegate.jobs.pipeline import Pipeline
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import BatchRetried, SparkUnavailable, StoreUnavailable
from tidegate.state_store.base.settings import Settings

logger = logging.getLogger(__name__)

# How long a server may be away: its own restart takes seconds, the restart of its machine some minutes.
SERVER_PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.5
# A server may answer and still refuse the work, while it recovers or is full: pauses keep this from being a tight loop.
LONGEST_PAUSE_SECONDS = 5.0
NEVER = threading.Event()  # of a step that nothing stops
Result = TypeVar("Result")


def with_retries(
    settings: Settings, pipeline: Pipeline, step: Callable[[], Result], stopped: threading.Event = NEVER
) -> Result:
    """Try a step of a batch, which must be safe to repeat, as often as the pipeline says; wait for servers that are away.

    Once `stopped` is set, nothing is tried again, and no pause goes on.

    Raises: the step's error if another try cannot help, or none is left; what `with_servers` raises.
    """
    failures = 0
    while True:
        try:
            return with_servers(settings, step, stopped)
        except (StoreUnavailable, SparkUnavailable):
            raise  # after SERVER_PATIENCE_SECONDS
        except Exception as error:
            failures += 1
            pause = pause_after(error, pipeline, failures)
            goes_on = outcome_of(error, pipeline) is Outcome.GO_ON and not isinstance(error, BatchRetried)
            if pause is None or goes_on:
                raise
            logger.warning("%s Next try in %d s.", error, pause)
            if stopped.wait(pause):
                raise


def with_servers(settings: Settings, step: Callable[[], Result], stopped: threading.Event = NEVER) -> Result:
    """Repeat a step that failed because Postgres or Spark is away, as soon as the server answers again.

    The server is polled twice a second. Pauses grow only while it answers and the step fails nevertheless. Once `stopped` is
    set, the wait ends with the step's error.

    Raises: the step's other errors; StoreUnavailable or SparkUnavailable SERVER_PATIENCE_SECONDS after the first failure.
    """
    ends_at: float | None = None
    pause = POLL_SECONDS
    while True:
        try:
            return step()
        except (StoreUnavailable, SparkUnavailable) as error:
            now = time.monotonic()
            ends_at = now + SERVER_PATIENCE_SECONDS if ends_at is None else ends_at
            if now >= ends_at:
                raise
            logger.warning("%s Waiting for it, %d s at most.", error, ends_at - now)
            if stopped.wait(pause):
                raise
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            while time.monotonic() < ends_at and not _answers(settings, error):
                if stopped.wait(POLL_SECONDS):
                    raise


def _answers(settings: Settings, error: StoreUnavailable | SparkUnavailable) -> bool:
    try:
        if isinstance(error, SparkUnavailable):
            check_reachable(settings)
        else:
            StateStore.connect(settings).close()
    except (StoreUnavailable, SparkUnavailable):
        return False
    return True
