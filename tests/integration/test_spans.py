"""Spans tell what the ledger says, whatever happened to its clocks, attempts and server."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.integration.conftest import Tally
from tests.store import Tracked, tables
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


def test_nothing_is_told_outside_a_recorded_span(exporter: InMemorySpanExporter) -> None:
    """So tracing that is off costs nothing, and a run that was not sampled is not traced in part."""
    assert Spans.here() is None
    unsampled = trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=True))
    with trace.use_span(unsampled):
        assert Spans.here() is None


def test_an_attempt_and_its_commit_are_recorded_with_the_ledgers_times(tally: Tally, recorded: Recorded) -> None:
    (txid,) = tally.plan()
    attempt = tally.start(txid)
    staged_at = datetime.now(UTC)
    tally.store.seal(attempt, [], Tracked(source_rows=7, staged_at=staged_at))
    tally.commit(txid)
    recorded.spans.on_attempts(tally.store, "tally", txid, {1})
    recorded.spans.on_commit_task(tally.store, "tally", txid)

    spans, (ledger,) = recorded.by_name(), tally.store.attempt_times("tally", [txid])
    assert spans.keys() == {f"{name}:1" for name in ("process", "stage", "seal", "wait", "commit")}
    for span in spans.values():
        assert {name: span.attributes[f"tidegate.{name}"] for name in ("pipeline", "txid")} == {
            "pipeline": "tally",
            "txid": txid,
        }
        assert span.status.status_code is trace.StatusCode.UNSET
    process, stage, seal, wait, commit = (spans[f"{name}:1"] for name in ("process", "stage", "seal", "wait", "commit"))
    assert process.attributes["tidegate.source_rows"] == 7
    assert commit.attributes["tidegate.keys"] == 0
    assert seconds(process) == pytest.approx((ledger.started_at.timestamp(), ledger.sealed_at.timestamp()))
    assert seconds(stage)[1] == seconds(seal)[0] == pytest.approx(staged_at.timestamp())
    assert {span.parent.span_id for span in (stage, seal)} == {process.context.span_id}
    assert seconds(wait) == (seconds(process)[1], seconds(commit)[0])
    assert seconds(commit)[1] == pytest.approx(ledger.merged_at.timestamp())


def test_an_attempt_that_did_not_count_is_recorded_by_its_code(
    tally: Tally, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    """The task that took over records what it has fenced, and not itself while it works."""
    away = StateStore(replace(tally.store.settings, pg_port=9))
    with caplog.at_level(logging.WARNING):
        recorded.spans.on_attempts(away, "tally", 1, {1})
        recorded.spans.on_commit_task(away, "tally", 1)
    assert recorded.by_name() == {}
    assert [record.getMessage() for record in caplog.records] == ["tally: a span is missing in the trace."] * 2

    (txid,) = tally.plan()
    tally.start(txid)
    newer = tally.start(txid)
    recorded.spans.on_attempts(tally.store, "tally", txid, newer.fenced)
    recorded.spans.on_attempts(tally.store, "tally", txid, {newer.number})
    (span,) = recorded.by_name().values()
    assert (span.name, span.attributes["tidegate.attempt"]) == ("process", 1)
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, "ATTEMPT_FENCED")
    assert span.attributes["error.type"] == "ATTEMPT_FENCED"

    tally.store.fail_attempt(newer, "MALFORMED_RECORD: a.csv, line 3: hunter2", is_poison=True)
    recorded.spans.on_attempts(tally.store, "tally", txid, {2})
    failed = recorded.by_name()["process:2"]
    assert failed.status.description == "MALFORMED_RECORD"
    assert "hunter2" not in failed.to_json()

    assert tally.store.give_up("tally", txid, "somebody", "it is broken")
    tally.commit(txid)
    recorded.spans.on_commit_task(tally.store, "tally", txid)
    assert recorded.by_name()["commit:2"].attributes["tidegate.skipped"] is True
    assert "wait:2" not in recorded.by_name()


def test_a_commit_that_began_before_the_seal_was_not_waited_for(tally: Tally, recorded: Recorded, as_owner: Any) -> None:
    """Its transaction had waited for the cursor's lock while the batch was still processed."""
    (txid,) = tally.plan()
    tally.process(txid)
    tally.commit(txid)
    as_owner(sa.update(tables.commit).values(committed_at=tables.commit.c.committed_at - timedelta(seconds=5)))
    recorded.spans.on_commit_task(tally.store, "tally", txid)

    spans, (ledger,) = recorded.by_name(), tally.store.attempt_times("tally", [txid])
    assert ledger.committed_at < ledger.sealed_at < ledger.merged_at
    assert spans["wait:1"].start_time == spans["wait:1"].end_time == spans["commit:1"].start_time
    assert seconds(spans["commit:1"]) == pytest.approx((ledger.sealed_at.timestamp(), ledger.merged_at.timestamp()))
