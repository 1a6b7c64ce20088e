"""The causes of a wait, each reached by bringing a real ledger into that state."""

from tests.integration.conftest import TALLY, Tally
from tidegate.why import explain


def codes(tally: Tally, txid: int | None = None) -> list[str]:
    """Return the codes of the causes, nearest first."""
    return [cause.code for cause in explain(tally.store, TALLY, txid).causes]


def test_each_step_of_a_batch(tally: Tally) -> None:
    """A batch's own state is its cause, and the pipeline's if it comes next."""
    assert codes(tally) == ["IDLE"]
    tally.plan(3)
    assert codes(tally) == ["PLANNED"]
    assert codes(tally, 3) == ["PLANNED", "WAITS_FOR_TXID", "PLANNED"]
    attempt = tally.start(1)
    assert codes(tally) == ["IN_WORK"]
    tally.store.fail_attempt(attempt, "SPARK_UNAVAILABLE: away")
    assert codes(tally) == ["FAILED"]
    tally.process(2)
    tally.store.halt_batch("tally", 1, "MALFORMED_RECORD: line 2")
    assert codes(tally, 2) == ["WAITS_FOR_TXID", "HALTED"]
    tally.process(1)
    tally.commit(1)
    assert codes(tally, 1) == ["COMMITTED"]
    assert codes(tally) == ["WAITS_FOR_COMMIT"]
