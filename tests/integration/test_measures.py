"""Measures equal what plain SQL counts, for every process that asks, and cost the same after many commits as after few."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import Server
from tests.integration.conftest import TALLY, Execute, Tally
from tidegate.state_store import Settings, StateStore, totals
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.read_ledger.ledger_reader import LedgerReader
from tidegate.state_store.read_ledger.metric_values import PipelineMeasures, measures
from tidegate.state_store.seal.attempts import Tracked
from tidegate.state_store.totals import BOUNDS_SECONDS, PHASES, Settled

COUNTED = """
SELECT (SELECT txid FROM tidegate.cursor WHERE pipeline = 'tally'),
       (SELECT coalesce(max(txid), 0) FROM tidegate.batch WHERE pipeline = 'tally'),
       (SELECT count(*) FROM tidegate.quarantine WHERE pipeline = 'tally' AND replayed_txid IS NULL),
       (SELECT count(*) FROM tidegate.commit WHERE pipeline = 'tally' AND skipped_reason IS NOT NULL),
       (SELECT coalesce(sum(a.source_rows), 0) FROM tidegate.commit c JOIN tidegate.attempt a USING (pipeline, txid, attempt)
         WHERE c.pipeline = 'tally' AND c.skipped_reason IS NULL),
       (SELECT count(*) FROM tidegate.attempt WHERE pipeline = 'tally' AND dropped_at IS NULL),
       (SELECT count(*) FROM tidegate.batch b JOIN tidegate.commit c USING (pipeline, txid)
         WHERE b.pipeline = 'tally' AND b.awaits_ack)
"""
LATENCIES = """
SELECT extract(epoch FROM c.merged_at - a.sealed_at)::float8
FROM tidegate.commit c JOIN tidegate.attempt a USING (pipeline, txid, attempt)
WHERE c.pipeline = 'tally' AND c.skipped_reason IS NULL
"""
ENDS = (
    "SELECT sealed_at IS NOT NULL, split_part(error, ':', 1) FROM tidegate.attempt WHERE coalesce(sealed_at, failed_at) < now()"
)


@pytest.fixture
def agree(tally: Tally, as_role: Execute) -> Callable[[], PipelineMeasures]:
    """A function that compares a process that has asked before, one that asks for the first time, and SQL."""
    known = Settled()

    def compare() -> PipelineMeasures:
        (measured,) = measured_of(tally.store.settings, known)
        (fresh,) = measured_of(tally.store.settings)
        assert replace(measured, lag_seconds=0) == replace(fresh, lag_seconds=0)
        assert measured.totals is not None
        ((committed, opened, waiting, skipped, rows, staged, acks),) = as_role("tidegate_reader", COUNTED)
        assert (measured.committed, measured.opened, measured.quarantined) == (committed, opened, waiting)
        assert (measured.totals.skipped, measured.totals.source_rows) == (skipped, rows)
        assert (measured.staged_attempts, measured.acks_due) == (staged, acks)
        ends = ["sealed" if sealed else error for sealed, error in as_role("tidegate_reader", ENDS)]
        assert measured.totals.attempts == {name: ends.count(name) for name in set(ends)}
        phases = [status.phase for status in tally.store.batch_statuses(TALLY.name) if status.txid > committed]
        assert {phase: count for phase, count in measured.phases.items() if count} == {p: phases.count(p) for p in set(phases)}
        latencies = [row[0] for row in as_role("tidegate_reader", LATENCIES)]
        found = measured.totals.seconds["latency"]
        for position, bound in enumerate(BOUNDS_SECONDS):
            assert sum(found.counts[: position + 1]) == sum(seconds <= bound for seconds in latencies)
        assert found.microseconds == round(sum(latencies) * 1_000_000)
        return measured

    return compare


def measured_of(settings: Settings, known: Settled | None = None) -> list[PipelineMeasures]:
    """Measure as the page does, in a process that remembers something, or in a new one."""
    with LedgerReader(settings) as reader, reader.snapshot("measuring") as connection:
        return measures(connection, known or Settled(), Witness(settings)).pipelines


def seal(tally: Tally, txid: int, rows: int) -> None:
    """Process a batch of this many source rows."""
    tally.store.seal(tally.start(txid), [], Tracked(rows, quarantined_rows=0, staged_bytes=10 * rows))


def test_measures_follow_the_ledger_step_by_step(
    tally: Tally, agree: Callable[[], PipelineMeasures], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits, failures, fences, halts and skips are seen at once, by old and new processes alike."""
    monkeypatch.setattr(totals, "TXIDS_AT_ONCE", 2)  # several rounds
    assert agree().lag_seconds == 0
    tally.plan(9)
    assert agree().phases["planned"] == 9
    for txid in (1, 2, 3):
        seal(tally, txid, 100 * txid)
        agree()
        tally.commit(txid)
        agree()
    first = tally.start(4)
    agree()
    second = tally.start(4)  # fences the first
    assert agree().totals.attempts["ATTEMPT_FENCED"] == 1
    tally.store.fail_attempt(second, "MALFORMED_RECORD: a.csv, line 3: x.", is_poison=True)
    tally.store.halt_batch(TALLY.name, 4, "MALFORMED_RECORD: a.csv, line 3: x.")
    seal(tally, 5, 7)
    measured = agree()
    assert measured.errors == {("halted", "MALFORMED_RECORD"): 1}
    assert measured.lag_seconds > 0
    assert first.number == 1
    tally.store.skip_batch(tally.spec, 4, "me", "it cannot be mended")
    assert agree().totals.skipped == 1
    tally.commit(5)
    for txid in (6, 7, 8):
        seal(tally, txid, 1)
        tally.commit(txid)
        agree()
    assert agree().totals.source_rows == 100 + 200 + 300 + 7 + 3


def test_an_attempt_that_ends_after_its_batch_was_skipped_is_counted_once(
    tally: Tally, agree: Callable[[], PipelineMeasures]
) -> None:
    """Its task was taken for dead, the batch was skipped and others have committed; then it reports after all."""
    tally.plan(4)
    late = tally.start(1)
    tally.store.halt_batch(TALLY.name, 1, "its task was killed in try 6.")
    tally.store.skip_batch(tally.spec, 1, "me", "it hangs")
    for txid in (2, 3, 4):
        seal(tally, txid, 1)
        tally.commit(txid)
        agree()
    tally.store.fail_attempt(late, "SPARK_FAILED: x", is_poison=False)
    assert agree().totals.attempts["SPARK_FAILED"] == 1
    assert agree().totals.attempts["SPARK_FAILED"] == 1


def test_a_ledger_that_was_put_back_begins_its_sums_anew(
    tally: Tally, settings: Settings, server: Server, store: StateStore
) -> None:
    """A process that has seen more does not add the old sums to the new ledger's, whatever commits there afterwards."""
    tally.plan(6)
    for txid in (1, 2):
        seal(tally, txid, 10)
        tally.commit(txid)
    known = Settled()
    measured_of(settings, known)
    store.engine.dispose()  # a database is copied only while no session uses it
    older = server.create_database(settings.pg_database)
    try:
        for txid in (3, 4, 5):
            seal(tally, txid, 10)
            tally.commit(txid)
        assert measured_of(settings, known)[0].totals.source_rows == 50
        restored = replace(settings, pg_database=older)
        (measured,) = measured_of(restored, known)
        assert (measured.committed, measured.totals.source_rows) == (2, 20)
        assert not measured.is_whole
        assert measured.totals == measured_of(restored)[0].totals
    finally:
        server.drop_database(older)


def test_a_cursor_behind_its_commits_is_not_whole(tally: Tally, as_role: Execute, store: StateStore) -> None:
    """A hole is seen by measuring, before any run meets it."""
    tally.plan(2)
    seal(tally, 1, 1)
    tally.commit(1)
    assert measured_of(tally.store.settings)[0].is_whole
    as_role("tidegate_owner", "UPDATE tidegate.cursor SET txid = 0, attempt = NULL, source_digest = NULL")
    assert not measured_of(tally.store.settings)[0].is_whole


def test_a_pause_shows_since_when(tally: Tally, store: StateStore) -> None:
    """An alert about a pause that was forgotten needs its time."""
    store.pause(TALLY.name, "me", "a test")
    assert measured_of(store.settings)[0].paused_at is not None
    store.resume(TALLY.name, "me", "over")
    assert measured_of(store.settings)[0].paused_at is None


PIPELINES, BATCHES = 20, 5_000
MANY = """
INSERT INTO tidegate.pipeline (pipeline, source_kind, fingerprint, declaration)
    SELECT 'p' || n, 'transactional', 'x', '{{}}' FROM generate_series(1, {pipelines}) n;
INSERT INTO tidegate.cursor (pipeline, txid, attempt, epoch)
    SELECT 'p' || n, {batches}, 1, 'x' FROM generate_series(1, {pipelines}) n;
INSERT INTO tidegate.batch (pipeline, txid, source_metadata, source_digest, opened_by, attempt, awaits_ack)
    SELECT 'p' || n, t, '', '', 'x', 1, false FROM generate_series(1, {pipelines}) n, generate_series(1, {batches} + 50) t;
INSERT INTO tidegate.attempt
    (pipeline, txid, attempt, owner, fingerprint, source_digest, staged_at, sealed_at, source_rows, dropped_at)
    SELECT 'p' || n, t, 1, 'x', 'x', '', now(), now(), 10, now()
    FROM generate_series(1, {pipelines}) n, generate_series(1, {batches}) t;
INSERT INTO tidegate.commit (pipeline, txid, attempt, source_digest, owner, key_count, merged_at)
    SELECT 'p' || n, t, 1, '', 'x', 1, now() + interval '1 second'
    FROM generate_series(1, {pipelines}) n, generate_series(1, {batches}) t;
"""


def rows_read(plan: dict[str, Any]) -> float:
    """Return how many rows the scans of a plan have looked at."""
    seen = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
    own = seen * plan["Actual Loops"] if "Scan" in plan["Node Type"] else 0
    return own + sum(map(rows_read, plan.get("Plans", ())))


LARGE = ("batch", "attempt", "commit")


@pytest.mark.parametrize("analyzed", [LARGE, ("batch",), ()], ids=["all statistics", "statistics of batches", "no statistics"])
def test_after_the_first_time_measuring_reads_few_rows(store: StateStore, as_role: Execute, analyzed: tuple[str, ...]) -> None:
    """100,000 committed batches: the second time, rows are read of open batches only, whatever Postgres knows of the tables."""
    for table in LARGE:  # autovacuum would decide in the middle of the test which statistics there are
        as_role("tidegate_owner", f"ALTER TABLE tidegate.{table} SET (autovacuum_enabled = false)")
    as_role("tidegate_owner", MANY.format(pipelines=PIPELINES, batches=BATCHES))
    for table in analyzed:
        as_role("tidegate_owner", f"ANALYZE tidegate.{table}")
    known = Settled()
    for _ in range(20):
        found = measured_of(store.settings, known)
        if all(each.totals for each in found):
            break
    assert {(each.totals.source_rows, each.phases["planned"]) for each in found} == {(10 * BATCHES, 50)}
    assert {sum(each.totals.seconds[phase].counts) for each in found for phase in PHASES} == {BATCHES}

    plans: list[float] = []

    def explain(_connection: object, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if "FROM tidegate" in statement or "JOIN tidegate" in statement:
            cursor.execute(f"EXPLAIN (ANALYZE, FORMAT json) {statement}", parameters)
            plans.append(rows_read(cursor.fetchone()[0][0]["Plan"]))

    sa.event.listen(sa.Engine, "before_cursor_execute", explain)
    try:
        again = measured_of(store.settings, known)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", explain)
    assert [each.totals for each in again] == [each.totals for each in found]
    assert len(plans) > 4
    assert sum(plans) < PIPELINES * 1000, plans
