"""Finding batches by phase, error, time and txid, compared with a filter in Python over the whole ledger."""

import itertools
import random
from datetime import UTC, datetime, timedelta

import pytest

from tests.integration.conftest import Execute, Tally
from tests.store import PHASES, BatchFilter, BatchStatus, SearchResult, batch_search

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
ERRORS = ("SPARK_FAILED", "SOURCE_CHANGED", "ZeroDivisionError")


@pytest.fixture
def ledger(tally: Tally, as_role: Execute) -> Tally:
    """Tally with 60 batches, one a minute: the first 40 are committed or skipped, the others are in all other phases."""
    chance = random.Random(3)
    tally.plan(60)
    for txid in range(1, 56):
        at = {"at": NOON + timedelta(minutes=txid), "txid": txid, "error": f"{chance.choice(ERRORS)}: a: b"}
        as_role("tidegate_owner", "UPDATE tidegate.batch SET opened_at = %(at)s, attempt = 1 WHERE txid = %(txid)s", at)
        attempt = (
            "INSERT INTO tidegate.attempt (pipeline, txid, attempt, owner, fingerprint, source_digest, started_at, sealed_at, "
            "failed_at, error, is_poison) SELECT 'tally', %(txid)s, 1, 'test', '', '', %(at)s, "
        )
        kind = "committed" if txid <= 40 else chance.choice(["processed", "failed", "halted", "processing"])
        if kind == "committed" and txid % 7 == 0:
            kind = "skipped"
        ends = {"processing": "NULL, NULL, NULL, NULL", "failed": "NULL, %(at)s::timestamptz + interval '5 s', %(error)s, true"}
        ends["halted"] = ends["skipped"] = ends["failed"]
        as_role("tidegate_owner", attempt + ends.get(kind, "%(at)s::timestamptz + interval '5 s', NULL, NULL, NULL"), at)
        if kind in ("committed", "skipped"):
            why = "'no'" if kind == "skipped" else "NULL"
            as_role(
                "tidegate_owner",
                "INSERT INTO tidegate.commit (pipeline, txid, attempt, source_digest, owner, key_count, committed_at, "
                f"skipped_reason) VALUES ('tally', %(txid)s, 1, '', 'test', 0, %(at)s::timestamptz + interval '9 s', {why})",
                at,
            )
        if kind == "halted":
            halt = "UPDATE tidegate.batch SET halted_at = %(at)s::timestamptz + interval '7 s', halted_reason = 'BAD_KEY: x' "
            as_role("tidegate_owner", halt + "WHERE txid = %(txid)s", at)
    as_role("tidegate_owner", "UPDATE tidegate.cursor SET txid = 40")
    as_role("tidegate_owner", "UPDATE tidegate.batch SET opened_at = %s WHERE txid > 55", [NOON + timedelta(hours=1)])
    return tally


def all_of(tally: Tally, wanted: BatchFilter, limit: int) -> list[int]:
    found, before = [], None
    for _ in range(1000):
        answer = tally.store.search("tally", wanted, before=before, limit=limit)
        assert isinstance(answer, SearchResult)
        assert len(answer.batches) <= limit
        found += [batch.txid for batch in answer.batches]
        before = answer.before
        if before is None:
            return found
    raise AssertionError("the search does not end")


def last_event(batch: BatchStatus, as_role: Execute) -> datetime:
    ((failed, halted),) = as_role(
        "tidegate_reader",
        "SELECT a.failed_at, b.halted_at FROM tidegate.batch b LEFT JOIN tidegate.attempt a USING (pipeline, txid) "
        "WHERE b.txid = %s",
        [batch.txid],
    )
    times = (batch.opened_at, batch.started_at, batch.sealed_at, batch.committed_at, failed, halted)
    return max(time for time in times if time is not None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("looked_at", [3, 10_000])
@pytest.mark.parametrize("limit", [1, 4, 1000])
def test_every_combination_finds_what_a_filter_over_all_finds(
    ledger: Tally, as_role: Execute, monkeypatch: pytest.MonkeyPatch, looked_at: int, limit: int
) -> None:
    monkeypatch.setattr(batch_search, "LOOKED_AT", looked_at)
    batches = {batch.txid: (batch, last_event(batch, as_role)) for batch in ledger.store.batch_statuses("tally")}
    assert {batch.phase for batch, _ in batches.values()} == set(PHASES)
    times = [None, NOON + timedelta(minutes=20), NOON + timedelta(minutes=45), NOON + timedelta(hours=2)]
    ranges = [(None, None), (38, 50), (70, None), (None, 5)]
    combinations = list(itertools.product([None, *PHASES], [None, *ERRORS, "BAD_KEY"], times, times, ranges))
    for phase, error, since, until, (first, last) in random.Random(limit).sample(combinations, 60):
        expected = [
            txid
            for txid, (batch, event) in sorted(batches.items(), reverse=True)
            if (phase is None or batch.phase == phase)
            and (error is None or batch.error == error)
            and (since is None or event >= since)
            and (until is None or event <= until)
            and (first or 1) <= txid <= (last or 60)
        ]
        assert all_of(ledger, BatchFilter(phase, error, since, until, first, last), limit) == expected
