"""`inspect` with conditions: by phase, error, time and txid, for people and programs."""

import pytest

from tests.batches import Batches
from tests.cli.conftest import CommandLine
from tidegate.jobs.pipelines import flights
from tidegate.state_store import StateStore

SPEC = flights.PIPELINE.spec


@pytest.fixture
def ledger(tidegate: CommandLine, store: StateStore) -> CommandLine:
    """Flights with txids 1-2 committed, 3 failed, 4 halted, 5-6 planned."""
    batches = Batches(store, flights.PIPELINE)
    batches.plan("run", 6)
    for txid in (1, 2):
        batches.seal(txid)
        batches.commit(txid)
    for txid in (3, 4):
        store.fail_attempt(batches.begin(txid), "SPARK_FAILED: it broke: \x1b[31mred")
    store.halt_batch("flights", 4, "SOURCE_CHANGED: a.csv is gone")
    return tidegate


CHOSEN = {
    (): [1, 2, 3, 4, 5, 6],
    ("--phase", "failed"): [3],
    ("--error", "SOURCE_CHANGED"): [4],
    ("--from-txid", "2", "--to-txid", "4"): [2, 3, 4],
    ("--from-txid", "2", "--phase", "committed", "--since", "3d"): [2],
    ("--limit", "2"): [5, 6],
}


@pytest.mark.promise("verb:inspect", "json:inspect")
def test_conditions_choose_batches(ledger: CommandLine) -> None:
    chosen = {given: [batch["txid"] for batch in ledger.json("inspect", "flights", *given)] for given in CHOSEN}
    assert chosen == CHOSEN
