"""Spans tell what the ledger says, whatever happened to its clocks, attempts and server."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.integration.conftest import Tally
from tests.store import Tracked
from tidegate.jobs.engine.spans import Spans
from tidegate.state_store import StateStore


@dataclass
class Recorded:
    """Records spans as children of one of its own, and returns them."""

    exporter: InMemorySpanExporter
    spans: Spans

    def by_name(self) -> dict[str, ReadableSpan]:
        """Return the spans that have ended, by name and attempt, such as process:2."""
        ended = self.exporter.get_finished_spans()
        found = {f"{span.name}:{span.attributes.get('tidegate.attempt')}": span for span in ended}
        assert len(found) == len(ended)
        return found


@pytest.fixture
def recorded(exporter: InMemorySpanExporter) -> Iterator[Recorded]:
    with trace.get_tracer("test").start_as_current_span("task"):
        spans = Spans.here()
        assert spans is not None
        yield Recorded(exporter, spans)


def seconds(span: ReadableSpan) -> tuple[float, float]:
    return span.start_time / 1e9, span.end_time / 1e9


def test_spans_have_the_times_of_the_ledger_and_the_codes_of_errors(
    tally: Tally, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    """The task that took over records what it has fenced; an error's text may quote data, and a trace is not private."""
    assert tally.plan(2) == [1, 2]
    fenced, failed = tally.start(1), tally.start(1)
    tally.store.fail_attempt(failed, "MALFORMED_RECORD: a.csv, line 3: hunter2", is_poison=True)
    tally.store.seal(tally.start(1), [], Tracked(source_rows=7, staged_at=datetime.now(UTC)))
    tally.commit(1)
    recorded.spans.on_attempts(tally.store, "tally", 1, {fenced.number, failed.number, 3})
    recorded.spans.on_commit_task(tally.store, "tally", 1)

    spans, ledger = recorded.by_name(), tally.store.attempt_times("tally", [1])[-1]
    assert spans.keys() == {"process:1", "process:2", *(f"{name}:3" for name in ("process", "stage", "seal", "wait", "commit"))}
    assert [spans[f"process:{number}"].status.description for number in (1, 2, 3)] == [
        *("ATTEMPT_FENCED", "MALFORMED_RECORD"),
        None,
    ]
    assert not any("hunter2" in span.to_json() for span in spans.values())
    process, stage, seal, wait, commit = (spans[f"{name}:3"] for name in ("process", "stage", "seal", "wait", "commit"))
    assert seconds(process) == pytest.approx((ledger.started_at.timestamp(), ledger.sealed_at.timestamp()))
    assert seconds(stage)[1] == seconds(seal)[0]
    assert {span.parent.span_id for span in (stage, seal)} == {process.context.span_id}
    assert seconds(wait) == (seconds(process)[1], seconds(commit)[0])
    assert seconds(commit)[1] == pytest.approx(ledger.merged_at.timestamp())

    away = StateStore(replace(tally.store.settings, pg_port=9))
    with caplog.at_level(logging.WARNING):
        recorded.spans.on_commit_task(away, "tally", 1)
    assert [record.getMessage() for record in caplog.records] == ["tally: a span is missing in the trace."]
