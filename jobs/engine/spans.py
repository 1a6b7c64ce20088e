"""Spans of OpenTelemetry about the life of batches, recorded afterwards, with the times in the ledger.

    plan      of a run: recorded by its plan
    process   of an attempt, with its parts stage and seal: recorded when it ends, by the task that ran it, or, if its process
              died, by the task that has fenced it
    wait      from the seal to the begin of the commit's transaction: recorded by the batch's commit task, whichever task
              committed
    commit    that transaction: recorded along with wait

Each is a child of the span that is current when the listener is made: that of Airflow's task, or of a program. No step of
the work has a hook, and a trace shows what the ledger shows. Recording never fails the work, nor waits for a collector.

Where no current span is recorded, this module records nothing, and does not import OpenTelemetry.
"""

import sys
import threading
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Self

from tidegate.jobs.engine.listeners import Listener, harmless
from tidegate.state_store import StateStore
from tidegate.state_store.read_ledger.trace_times import AttemptTimes

if TYPE_CHECKING:
    from opentelemetry.context import Context

NAME = "tidegate"  # the tracer's name, and the prefix of each attribute's name
MISSING = "a span is missing in the trace."
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Attributes = dict[str, str | int | bool | None]


@dataclass(frozen=True)
class Spans(Listener):
    """Records spans as children of one span. Threads may share a recorder."""

    context: "Context"

    @classmethod
    def here(cls) -> Self | None:
        """Return a recorder of children of the current span; None if that span is not recorded."""
        trace = sys.modules.get("opentelemetry.trace")
        if trace is None or not trace.get_current_span().is_recording():
            return None
        from opentelemetry.context import get_current  # noqa: PLC0415 - loaded already, by the maker of the span

        return cls(get_current())

    def on_plan(self, pipeline: str, started_at: datetime, txids: Sequence[int]) -> None:
        """Record a plan that ends now."""
        ends = {"first_txid": txids[0], "last_txid": txids[-1]} if txids else {}
        with harmless(pipeline, MISSING):
            self._record("plan", started_at, datetime.now(UTC), {"pipeline": pipeline, "batches": len(txids), **ends})

    def on_attempts(self, store: StateStore, pipeline: str, txid: int, numbers: Container[int]) -> None:
        """Record these attempts at a batch, as far as they have ended: process, stage and seal."""
        with harmless(pipeline, MISSING):
            for times in store.attempt_times(pipeline, [txid]):
                if times.attempt in numbers:
                    self._record_attempt(times)
            _send()

    def on_commit_task(self, store: StateStore, pipeline: str, txid: int) -> None:
        """Record how a batch has waited for its turn, and its commit."""
        with harmless(pipeline, MISSING):
            self.record_commits(store.attempt_times(pipeline, [txid]))

    def record_commits(self, attempts: Iterable[AttemptTimes]) -> None:
        """Record the spans wait and commit of committed attempts."""
        for times in attempts:
            with harmless(times.pipeline, MISSING):
                self._record_commit(times)

    def _record_attempt(self, times: AttemptTimes) -> None:
        end = times.ended_at
        if end is None:
            return
        code = times.error.partition(":")[0] if times.error else None  # what follows it may quote data
        about = {**_key(times), "owner": times.owner, "source_rows": times.source_rows}
        process = self._record("process", times.started_at, end, about, error=code)
        if times.staged_at is not None and times.sealed_at is not None:
            staged_at = min(max(times.started_at, times.staged_at), end)  # from the worker's clock; the others are Postgres'
            process._record("stage", times.started_at, staged_at, _key(times))
            process._record("seal", staged_at, end, _key(times))

    def _record_commit(self, times: AttemptTimes) -> None:
        if times.committed_at is None or times.merged_at is None:
            return
        # The transaction may have begun before the seal, and waited for the cursor's lock.
        sealed_at = times.ended_at if times.sealed_at is not None else None
        turn_came_at = max(times.committed_at, sealed_at or times.committed_at)
        if sealed_at is not None:
            self._record("wait", sealed_at, turn_came_at, _key(times))
        about = {
            **_key(times),
            "owner": times.committed_by,
            "keys": times.key_count,
            "quarantined_rows": times.quarantined_rows,
            "skipped": times.skipped_reason is not None,
        }
        self._record("commit", turn_came_at, times.merged_at, about)

    def _record(self, name: str, begin: datetime, end: datetime, about: Attributes, *, error: str | None = None) -> Self:
        """Record one span; return a recorder of its children. After a clock was set back, its length is zero, not negative."""
        from opentelemetry import trace  # noqa: PLC0415 - loaded already, see `here`

        attributes = {f"{NAME}.{key}": value for key, value in about.items() if value is not None}
        tracer = trace.get_tracer(NAME)
        span = tracer.start_span(name, self.context, start_time=_nanoseconds(begin), attributes=attributes)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end(_nanoseconds(max(begin, end)))
        return type(self)(trace.set_span_in_context(span, self.context))


def _key(times: AttemptTimes) -> Attributes:
    return {"pipeline": times.pipeline, "txid": times.txid, "attempt": times.attempt}


def _nanoseconds(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1) * 1000


def _send() -> None:
    """Start to send what was recorded, before the process may be killed; a collector that hangs holds up a thread only."""
    from opentelemetry import trace  # noqa: PLC0415 - loaded already, see `Spans.here`

    if flush := getattr(trace.get_tracer_provider(), "force_flush", None):
        threading.Thread(target=flush, name="spans", daemon=True).start()
