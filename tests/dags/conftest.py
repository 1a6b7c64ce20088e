"""Airflow in the test process, and batches in a real ledger, without Spark."""

from collections.abc import Callable
from pathlib import Path

import pytest

import tests.airflow_home  # noqa: F401 - before anything else imports Airflow
from tests.store import Attempt, Commit, Tracked, encode_metadata
from tidegate.jobs import Count, Files, Pipeline, State
from tidegate.state_store import StateStore

REPOSITORY = Path(__file__).resolve().parents[2]
CLICKS = Pipeline(
    name="clicks",
    source=Files("clicks", glob="*.csv", format="csv", schema={"page": "string"}),
    states={"per_page": State(key={"page": "text"}, aggregates={"clicks": Count()})},
)


class Batches:
    """Moves batches of pipeline clicks through the real ledger: batches without rows need no Spark."""

    def __init__(self, store: StateStore) -> None:
        self.store = store

    def plan(self, run_id: str, count: int, *, awaits_ack: bool = False) -> list[int]:
        """Open `count` batches and give them to a run."""
        after = self.store.last_opened(CLICKS.name)
        metadata = [encode_metadata({"files": [], "number": number}) for number in range(count)]
        return self.store.open_batches(CLICKS.spec, run_id, [], after, metadata, awaits_ack=awaits_ack)

    def begin(self, txid: int) -> Attempt:
        """Start an attempt."""
        attempt = self.store.start_attempt(CLICKS.spec, txid, "test")
        assert isinstance(attempt, Attempt)
        return attempt

    def seal(self, txid: int) -> None:
        """Process a batch."""
        self.store.seal(self.begin(txid), [], Tracked(0))

    def give_up(self, txid: int) -> None:
        """Fail a batch permanently: its pipeline's policy gives it up."""
        self.store.fail_attempt(self.begin(txid), "MALFORMED_RECORD: a.csv, line 3.", is_poison=True)
        self.store.give_up(CLICKS.name, txid, "the pipeline's policy", "6 tries failed")

    def commit(self, txid: int) -> Commit:
        """Commit a batch that was processed or given up."""
        return self.store.commit_batch(CLICKS.spec, txid, "test")


@pytest.fixture
def batches(store: StateStore, register: Callable[..., None]) -> Batches:
    """Register pipeline clicks, without a batch yet."""
    register(CLICKS)
    return Batches(store)
