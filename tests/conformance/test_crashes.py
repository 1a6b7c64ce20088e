"""Deaths around the COMMITs of a quarantine, a replay or a skip lose and repeat nothing."""

from collections.abc import Callable

import pytest

from tests.conformance.conftest import Flow, fold
from tests.crashes import Crash, EachPoint

Begin = Callable[..., Flow]


@pytest.mark.promise("fault:process-dies-at-any-statement:commit")
def test_a_crash_at_any_statement_of_a_commit_with_bad_records_or_of_a_replay_loses_none(flow: Begin) -> None:
    f = flow("transactional", "opaque", [("a", 1), ("b", -2), ("a", -3)] * 400, on_poison="quarantine")
    deaths = EachPoint()
    is_done = False
    start = 0
    while not is_done:
        (txid,) = f.plan(3, run_id=f"run {len(deaths.points)}") or []
        start += 3
        f.process(txid)
        try:
            with deaths.armed():
                f.commit(txid)
                f.store.replay_quarantined(f.spec, "an operator", "x")
            is_done = True
        except Crash:
            f.die()
            if f.commit(txid).already_committed:
                f.store.replay_quarantined(f.spec, "an operator", "x")
            else:
                assert f.store.replay_quarantined(f.spec, "an operator", "x") == (txid + 1, 2)
        f.process(txid + 1)
        f.commit(txid + 1)
        assert f.quarantined() == []
        assert f.state() == fold((key, abs(amount)) for key, amount in f.records[:start])
    for step in ("INSERT INTO tidegate.quarantine", "UPDATE tidegate.quarantine", "INSERT INTO tidegate.operator_action"):
        assert any(step in point for point in deaths.points), f"no crash was injected at {step}"


@pytest.mark.promise("fault:process-dies-at-any-statement:commit")
def test_a_crash_at_any_statement_of_a_skip_in_turn_skips_once(flow: Begin) -> None:
    f = flow("opaque", "opaque", [("a", number) for number in range(1000)])
    deaths = EachPoint()
    is_done = False
    while not is_done:
        first, second, third = f.plan(2, 2, 2, run_id=f"run {len(deaths.points)}") or []
        f.fail(second, 2)
        for txid in (first, third):
            f.process(txid, 2)

        def settle(first: int = first, second: int = second, third: int = third) -> None:
            if f.store.skip_batch(f.spec, second, "an operator", "x") is None:
                f.commit(first)
            f.commit(second)
            f.settle(third, 2)

        try:
            with deaths.armed():
                settle()
            is_done = True
        except Crash:
            f.die()
            if f.store.committed("flow") < first:
                f.commit(first)
            settle()
    f.check()
    assert f.phases() == ["committed", "skipped", "committed"] * (len(deaths.points) + 1)
    for step in ("UPDATE tidegate.batch", "INSERT INTO tidegate.commit", "after COMMIT"):
        assert any(step in point for point in deaths.points), f"no crash was injected at {step}"
