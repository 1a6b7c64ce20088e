"""What is shown of a ledger, by whatever it went through: batches that are searched, measures, causes of a wait, spans."""

import itertools
import logging
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests import command_lines
from tests.integration.conftest import TALLY, Tally
from tests.store import PHASES, BatchFilter, LedgerReader, Mark, Tracked, batch_search, measures
from tidegate.explain import error_pages, remedies
from tidegate.explain.batch_causes import Cause
from tidegate.explain.why import explain, root_causes
from tidegate.jobs.engine.spans import Spans
from tidegate.state_store import StateStore

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
ERRORS = ("SPARK_FAILED", "SOURCE_CHANGED", "ZeroDivisionError")
AT = f"timestamptz '{NOON}' + txid * interval '1 minute'"
# As if each batch had been taken up in the minute of its txid.
MOVED = f"""
UPDATE tidegate.batch SET opened_at = {AT}, halted_at = {AT} + (halted_at - opened_at);
UPDATE tidegate.attempt SET started_at = {AT}, sealed_at = {AT} + (sealed_at - started_at),
    failed_at = {AT} + (failed_at - started_at);
UPDATE tidegate.commit SET committed_at = {AT} + interval '9 s'
"""
LAST_EVENTS = """
SELECT txid, greatest(opened_at, started_at, sealed_at, failed_at, halted_at, committed_at)
FROM tidegate.batch LEFT JOIN tidegate.attempt USING (pipeline, txid) LEFT JOIN tidegate.commit USING (pipeline, txid)
"""
COUNTED = """
SELECT (SELECT txid FROM tidegate.cursor),
       (SELECT max(txid) FROM tidegate.batch),
       (SELECT count(*) FROM tidegate.quarantine WHERE replayed_txid IS NULL),
       (SELECT max(committed_at) FROM tidegate.commit WHERE skipped_reason IS NOT NULL),
       (SELECT coalesce(max(b.attempt), 0) FROM tidegate.batch b JOIN tidegate.cursor k USING (pipeline) WHERE b.txid > k.txid),
       (SELECT count(*) FROM tidegate.attempt WHERE dropped_at IS NULL),
       (SELECT count(*) FROM tidegate.batch b JOIN tidegate.commit c USING (pipeline, txid) WHERE b.awaits_ack)
"""


def all_of(tally: Tally, wanted: BatchFilter, limit: int) -> list[int]:
    found, before = [], None
    for _ in range(1000):
        answer = tally.store.search("tally", wanted, before=before, limit=limit)
        assert len(answer.batches) <= limit
        found += [batch.txid for batch in answer.batches]
        if (before := answer.before) is None:
            return found
    raise AssertionError("the search does not end")


def test_searches_and_measures_are_what_python_and_plain_sql_find(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    tally.spec = replace(TALLY, window=30).spec
    tally.plan(26)
    for txid in range(1, 25):
        if txid % 4 == 0:
            tally.process(txid)
        elif txid % 4 == 1 and txid > 12:
            tally.start(txid)
        else:
            tally.fail(txid, f"{ERRORS[txid // 4 % 3]}: a: b")
        if txid <= 12:
            tally.store.give_up("tally", txid, "the pipeline's policy", "no")
            tally.commit(txid)
        elif txid % 4 == 2:
            tally.store.halt_batch("tally", txid, "BAD_KEY: x")
    tally.sql(MOVED)
    events = dict(tally.sql(LAST_EVENTS))
    batches = sorted(tally.store.batch_statuses("tally"), key=lambda batch: -batch.txid)
    assert {batch.phase for batch in batches} == set(PHASES)
    times = [None, NOON + timedelta(minutes=8), NOON + timedelta(minutes=20), NOON + timedelta(hours=2)]
    ranges = [(None, None), (10, 20), (70, None), (None, 5)]
    combinations = list(itertools.product([None, *PHASES], [None, *ERRORS, "BAD_KEY"], times, times, ranges))
    draw = random.Random(1)
    for number, (phase, error, since, until, (first, last)) in enumerate(draw.sample(combinations, 120)):
        expected = [
            batch.txid
            for batch in batches
            if (phase is None or batch.phase == phase)
            and (error is None or batch.error == error)
            and (since is None or events[batch.txid] >= since)
            and (until is None or events[batch.txid] <= until)
            and (first or 1) <= batch.txid <= (last or 26)
        ]
        wanted = error and draw.choice([error, error.upper()])
        looked_at, limit = ((3, 1), (10_000, 1000))[number % 2]
        monkeypatch.setattr(batch_search, "LOOKED_AT", looked_at)
        assert all_of(tally, BatchFilter(phase, wanted, since, until, first, last), limit) == expected

    with LedgerReader(tally.store.settings) as reader, reader.snapshot("measuring") as connection:
        (found,) = measures(connection, reader.witness).pipelines
    assert found.lag_seconds > 0
    assert tally.sql(COUNTED) == [
        (found.committed, found.opened, found.quarantined, found.skipped_at, found.tries, found.staged_attempts, found.acks_due)
    ]
    waiting = [batch for batch in batches if batch.txid > found.committed]
    assert Counter(found.phases) == Counter(batch.phase for batch in waiting)
    assert found.errors == Counter((batch.phase, batch.error) for batch in waiting if batch.phase in ("failed", "halted"))


def causes(tally: Tally, txid: int | None = None) -> tuple[Cause, ...]:
    """Return the causes, nearest first, after checking what holds for all."""
    found = explain(tally.store, TALLY, txid).causes
    for cause in found:
        assert cause.sentence.endswith(".")
        assert "\n" not in cause.sentence
        assert cause.since is None or datetime.fromisoformat(cause.since).utcoffset() is not None
        assert cause.error is None or error_pages.has_page(cause.error)
        if cause.command is not None:
            command_lines.check(cause.command)
        assert cause.advice or cause.severity not in ("warning", "error")
    if txid is None:
        roots = root_causes(tally.store, [TALLY, "no such pipeline"])
        urgent = [cause for cause in found if cause.severity in ("warning", "error")]
        assert {name: settled(root) for name, root in roots.items()} == {"tally": settled((urgent or found)[-1])}
    return found


def settled(cause: Cause) -> Cause | str:
    """Return a cause; one name for two that follow each other as time passes."""
    return "commits soon" if cause.code in ("WAITS_TO_MERGE", "WAITS_FOR_COMMIT") else cause


def test_a_halted_batch_says_the_way_out_of_its_error(tally: Tally) -> None:
    tally.plan(2)
    tally.process(2)
    codes = [code for code in error_pages.codes() if remedies.code_of(code)]
    assert {"SOURCE_CHANGED", "RANGE_EXPIRED", "PERMANENT_ERROR"} <= set(codes)
    for code in codes:
        error = f"{code}: something is wrong."
        tally.fail(1, error, is_poison=False)
        tally.store.halt_batch("tally", 1, error)
        waits, halted = causes(tally, 2)
        assert (waits.code, halted.code, halted.error, halted.severity) == ("WAITS_FOR_TXID", "HALTED", code, "error")
        verb, says = "skip" if code == "RANGE_EXPIRED" else "retry", f"Txid 1 waits for a person: {error}"
        assert (halted.sentence, halted.action.verb, halted.action.txid) == (says, verb, 1)
        assert halted.command.startswith(f"tidegate {verb} tally 1")


def test_a_restored_database_is_the_root(tally: Tally) -> None:
    tally.having(2, 2, 1)
    ((epoch, history),) = tally.sql("SELECT epoch, history FROM tidegate.cursor")
    tally.sql("UPDATE tidegate.cursor SET epoch = '1/2/3'")
    (restored,) = causes(tally)
    assert (restored.code, restored.command) == ("HOLE_DETECTED", "tidegate migrate --accept-epoch")
    assert [cause.code for cause in causes(tally, 2)] == ["HOLE_DETECTED"]  # and not: it commits within seconds
    assert "restored, promoted or copied" in restored.sentence
    tally.sql("UPDATE tidegate.cursor SET epoch = %s, txid = 2", [epoch])
    (hole,) = causes(tally, 2)
    assert "has passed txid 2, which has no commit" in hole.sentence
    tally.sql("UPDATE tidegate.cursor SET txid = 1")
    tally.store.witness.advance(Mark("tally", str(history), epoch, 9, 1, "2026-11-25T10:00:00+00:00"))
    assert "txids 2 to 9 are lost" in causes(tally)[-1].sentence


def test_each_batch_waits_for_what_the_view_says(tally: Tally) -> None:
    tally.spec = replace(TALLY, window=8).spec
    assert causes(tally)[0].code == "IDLE"
    tally.plan(9)
    tally.start(2)
    for txid in (3, 4, 6):
        tally.fail(txid)
    tally.start(4)
    tally.store.halt_batch("tally", 5, "RuntimeError: odd")
    tally.store.give_up("tally", 6, "the pipeline's policy", "it failed")
    tally.process(7)

    view = [status.waits_for for status in tally.store.batch_statuses("tally")]
    assert view[:4] == ["a run that processes it", "attempt 1 by test", "MALFORMED_RECORD: a.csv, line 3.", "attempt 2 by test"]
    assert view[4:7] == ["RuntimeError: odd", "its turn to be skipped: it failed", "txid 1 to commit"]
    assert view[7:] == ["a run that processes it", "txid 1 to commit: the window is full"]
    assert [cause.code for cause in causes(tally, 9)] == ["WINDOW_FULL", "PLANNED"]
    own = [["PLANNED"], ["IN_WORK"], ["FAILED"], ["IN_WORK", "FAILED_BEFORE"], ["HALTED"], ["GIVEN_UP"], [], ["PLANNED"]]
    for following, expected in enumerate(own, start=1):
        chain = causes(tally)
        if expected:
            assert [cause.code for cause in chain] == expected
        for txid in range(following + 1, 9):
            found = causes(tally, txid)
            assert [cause.code for cause in found[: -len(chain)]] == [*own[txid - 1], "WAITS_FOR_TXID"]
            assert found[0].txid == txid
            assert settled(found[-1]) == settled(chain[-1])
        assert {cause.txid for cause in chain} == {following}
        if expected not in ([], ["GIVEN_UP"]):
            tally.process(following)
        tally.commit(following)


def test_spans_have_the_times_of_the_ledger_and_the_codes_of_errors(
    tally: Tally, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    """The task that took over records what it has fenced; an error's text may quote data, and a trace is not private."""

    def seconds(span: ReadableSpan) -> tuple[float, float]:
        return span.start_time / 1e9, span.end_time / 1e9

    tally.plan(2)
    fenced, failed = tally.start(1), tally.start(1)
    tally.store.fail_attempt(failed, "MALFORMED_RECORD: a.csv, line 3: hunter2", is_poison=True)
    tally.store.seal(tally.start(1), [], Tracked(source_rows=7, staged_at=datetime.now(UTC)))
    tally.commit(1)
    with trace.get_tracer("test").start_as_current_span("task"):
        recorded = Spans.here()
        recorded.on_attempts(tally.store, "tally", 1, {fenced.number, failed.number, 3})
        recorded.on_commit_task(tally.store, "tally", 1)
        away = StateStore(replace(tally.store.settings, pg_port=9))
        with caplog.at_level(logging.WARNING):
            recorded.on_commit_task(away, "tally", 1)
        ended = exporter.get_finished_spans()
    assert [record.getMessage() for record in caplog.records] == ["tally: a span is missing in the trace."]

    spans = {(span.name, span.attributes["tidegate.attempt"]): span for span in ended}
    ledger = tally.store.attempt_times("tally", [1])[-1]
    names = ("process", "stage", "seal", "wait", "commit")
    assert sorted(spans) == sorted([("process", 1), ("process", 2), *((name, 3) for name in names)])
    assert len(spans) == len(ended)
    assert [spans["process", number].status.description for number in (1, 2, 3)] == ["ATTEMPT_FENCED", "MALFORMED_RECORD", None]
    assert not any("hunter2" in span.to_json() for span in ended)
    process, stage, seal, wait, commit = (spans[name, 3] for name in names)
    assert seconds(process) == pytest.approx((ledger.started_at.timestamp(), ledger.sealed_at.timestamp()))
    assert seconds(stage)[1] == seconds(seal)[0]
    assert {span.parent.span_id for span in (stage, seal)} == {process.context.span_id}
    assert seconds(wait) == (seconds(process)[1], seconds(commit)[0])
    assert seconds(commit)[1] == pytest.approx(ledger.merged_at.timestamp())
