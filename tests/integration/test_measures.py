"""Measures equal what plain SQL counts, and cost the same after many commits as after few."""

from collections.abc import Callable

import pytest

from tests.integration.conftest import TALLY, Execute, Tally
from tests.store import LedgerReader, PipelineMeasures, Tracked, measures
from tidegate.state_store import Settings, StateStore

COUNTED = """
SELECT (SELECT txid FROM tidegate.cursor WHERE pipeline = 'tally'),
       (SELECT coalesce(max(txid), 0) FROM tidegate.batch WHERE pipeline = 'tally'),
       (SELECT count(*) FROM tidegate.quarantine WHERE pipeline = 'tally' AND replayed_txid IS NULL),
       (SELECT max(committed_at) FROM tidegate.commit WHERE pipeline = 'tally' AND skipped_reason IS NOT NULL),
       (SELECT coalesce(max(b.attempt), 0) FROM tidegate.batch b JOIN tidegate.cursor k USING (pipeline)
         WHERE b.pipeline = 'tally' AND b.txid > k.txid),
       (SELECT count(*) FROM tidegate.attempt WHERE pipeline = 'tally' AND dropped_at IS NULL),
       (SELECT count(*) FROM tidegate.batch b JOIN tidegate.commit c USING (pipeline, txid)
         WHERE b.pipeline = 'tally' AND b.awaits_ack)
"""


@pytest.fixture
def agree(tally: Tally, as_role: Execute) -> Callable[[], PipelineMeasures]:
    def compare() -> PipelineMeasures:
        (measured,) = measured_of(tally.store.settings)
        ((committed, opened, waiting, skipped_at, tries, staged, acks),) = as_role("tidegate_reader", COUNTED)
        assert (measured.committed, measured.opened, measured.quarantined) == (committed, opened, waiting)
        assert (measured.skipped_at, measured.tries) == (skipped_at, tries)
        assert (measured.staged_attempts, measured.acks_due) == (staged, acks)
        phases = [status.phase for status in tally.store.batch_statuses(TALLY.name) if status.txid > committed]
        assert {phase: count for phase, count in measured.phases.items() if count} == {p: phases.count(p) for p in set(phases)}
        return measured

    return compare


def measured_of(settings: Settings) -> list[PipelineMeasures]:
    with LedgerReader(settings) as reader, reader.snapshot("measuring") as connection:
        return measures(connection, reader.witness).pipelines


def seal(tally: Tally, txid: int, rows: int) -> None:
    tally.store.seal(tally.start(txid), [], Tracked(rows, quarantined_rows=0, staged_bytes=10 * rows))


def test_measures_follow_the_ledger_step_by_step(tally: Tally, agree: Callable[[], PipelineMeasures]) -> None:
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
    assert agree().tries == 2
    tally.store.fail_attempt(second, "MALFORMED_RECORD: a.csv, line 3: x.", is_poison=True)
    tally.store.halt_batch(TALLY.name, 4, "MALFORMED_RECORD: a.csv, line 3: x.")
    seal(tally, 5, 7)
    measured = agree()
    assert measured.errors == {("halted", "MALFORMED_RECORD"): 1}
    assert measured.lag_seconds > 0
    assert first.number == 1
    tally.store.skip_batch(tally.spec, 4, "me", "it cannot be mended")
    assert agree().skipped_at is not None
    tally.commit(5)
    for txid in (6, 7, 8):
        seal(tally, txid, 1)
        tally.commit(txid)
        agree()


def test_a_skip_is_shown_until_many_have_committed_since(
    tally: Tally, agree: Callable[[], PipelineMeasures], monkeypatch: pytest.MonkeyPatch, as_role: Execute, store: StateStore
) -> None:
    """So that its alert ends, and no scrape reads all commits. A pause shows since when."""
    monkeypatch.setattr("tidegate.state_store.read_ledger.pipeline_facts.RECENT", 3)
    tally.plan(4)
    tally.start(1)
    tally.store.halt_batch(TALLY.name, 1, "its task was killed in try 6.")
    tally.store.skip_batch(tally.spec, 1, "me", "it hangs")
    for txid in (2, 3):
        seal(tally, txid, 1)
        tally.commit(txid)
        assert agree().skipped_at is not None
    seal(tally, 4, 1)
    tally.commit(4)
    assert measured_of(tally.store.settings)[0].skipped_at is None

    store.pause(TALLY.name, "me", "a test")
    assert measured_of(store.settings)[0].paused_at is not None
    store.resume(TALLY.name, "me", "over")
    measured = measured_of(store.settings)[0]
    assert (measured.paused_at, measured.is_whole) == (None, True)
    as_role("tidegate_owner", "UPDATE tidegate.cursor SET txid = 0, attempt = NULL, source_digest = NULL")
    assert not measured_of(store.settings)[0].is_whole
