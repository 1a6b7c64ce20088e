"""Measures equal what plain SQL counts."""

from tests.integration.conftest import TALLY, Execute, Tally
from tests.store import LedgerReader, PipelineMeasures, measures

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


def test_measures_are_what_plain_sql_counts(tally: Tally, as_role: Execute) -> None:
    def measured() -> PipelineMeasures:
        with LedgerReader(tally.store.settings) as reader, reader.snapshot("measuring") as connection:
            (found,) = measures(connection, reader.witness).pipelines
        return found

    tally.plan(9)
    for txid in (1, 2, 3, 5):
        tally.process(txid)
    for txid in (1, 2, 3):
        tally.commit(txid)
    tally.start(4)
    tally.store.fail_attempt(tally.start(4), "MALFORMED_RECORD: a.csv, line 3: x.", is_poison=True)
    tally.store.halt_batch(TALLY.name, 4, "MALFORMED_RECORD: a.csv, line 3: x.")
    halted = measured()
    assert (halted.errors, halted.skipped_at) == ({("halted", "MALFORMED_RECORD"): 1}, None)
    tally.store.skip_batch(tally.spec, 4, "me", "it cannot be mended")
    for found in (halted, measured()):
        assert found.lag_seconds > 0
    assert as_role("tidegate_reader", COUNTED) == [
        (found.committed, found.opened, found.quarantined, found.skipped_at, found.tries, found.staged_attempts, found.acks_due)
    ]
    phases = [status.phase for status in tally.store.batch_statuses(TALLY.name) if status.txid > found.committed]
    assert {phase: count for phase, count in found.phases.items() if count} == {p: phases.count(p) for p in set(phases)}
