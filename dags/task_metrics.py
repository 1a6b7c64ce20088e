"""Metrics of the moment, sent by tasks wherever Airflow's own settings send its metrics: StatsD or OpenTelemetry.

    tidegate.batch.processed, .failed, .fenced    attempts that have ended
    tidegate.batch.committed, .skipped            batches, sent by the task that has committed them
    tidegate.rows                                 source rows of the committed batches
    tidegate.phase.process, .seal, .wait, .commit how long each took, of attempts and of commits
    tidegate.latency                              from the seal to the merge

Tags: `pipeline`, and `code` of a failure; plain StatsD has no tags. Each event is sent at most once, because a killed task
sends nothing: exact numbers are those of the ledger (docs/observability.md). Nothing is sent, or read for it, while Airflow's
metrics are off.
"""

from collections.abc import Container, Sequence
from datetime import datetime, timedelta

from airflow.sdk.configuration import conf
from airflow.sdk.observability import stats

from tidegate.jobs.engine.listeners import Listener, harmless
from tidegate.state_store import StateStore
from tidegate.state_store.attempt.attempts import FENCED
from tidegate.state_store.base.errors import code_and_fault
from tidegate.state_store.read_ledger.trace_times import AttemptTimes

SWITCHES = ("statsd_on", "statsd_datadog_enabled", "otel_on")
MISSING = "some of Airflow's metrics are missing."


def metrics_listeners() -> tuple[Listener, ...]:
    """Return what sends metrics from this task; nothing if Airflow sends none."""
    return (TaskMetrics(),) if any(conf.getboolean("metrics", name, fallback=False) for name in SWITCHES) else ()


class TaskMetrics(Listener):
    """Sends a worker's metrics by Airflow."""

    def on_attempts(self, store: StateStore, pipeline: str, txid: int, numbers: Container[int]) -> None:
        """Send how attempts have ended, and how long those took that were sealed."""
        with harmless(pipeline, MISSING):
            for times in store.attempt_times(pipeline, [txid]):
                if times.attempt in numbers:
                    _send_attempt(times)

    def on_committed(self, store: StateStore, pipeline: str, txids: Sequence[int]) -> None:
        """Send what has committed, and how long it waited and took."""
        with harmless(pipeline, MISSING):
            for times in store.attempt_times(pipeline, txids):
                if times.committed_at is not None:
                    _send_commit(times)


def _send_attempt(times: AttemptTimes) -> None:
    tags = {"pipeline": times.pipeline}
    if times.sealed_at is not None:
        stats.incr("tidegate.batch.processed", tags=tags)
        _send_time("tidegate.phase.process", times.started_at, times.staged_at, tags)
        _send_time("tidegate.phase.seal", times.staged_at, times.sealed_at, tags)
    elif times.error is not None:
        code, _ = code_and_fault(times.error)
        if code == FENCED:
            stats.incr("tidegate.batch.fenced", tags=tags)
        else:
            stats.incr("tidegate.batch.failed", tags={**tags, "code": code})


def _send_commit(times: AttemptTimes) -> None:
    tags = {"pipeline": times.pipeline}
    if times.skipped_reason is not None:
        stats.incr("tidegate.batch.skipped", tags=tags)
        return
    stats.incr("tidegate.batch.committed", tags=tags)
    stats.incr("tidegate.rows", times.source_rows or 0, tags=tags)
    _send_time("tidegate.phase.wait", times.sealed_at, times.committed_at, tags)
    _send_time("tidegate.phase.commit", times.committed_at, times.merged_at, tags)
    _send_time("tidegate.latency", times.sealed_at, times.merged_at, tags)


def _send_time(name: str, begin: datetime | None, end: datetime | None, tags: dict[str, str]) -> None:
    """Send a duration; two machines' clocks, or a commit that had begun before the seal, may give less than nothing."""
    if begin is not None and end is not None:
        stats.timing(name, max(end - begin, timedelta()), tags=tags)
