"""Quarantine, giving up, retry, pause and the acker's sums in the ledger."""

from dataclasses import replace

import pytest

from tests.conformance.conftest import Begin, Flow, Record, declare, fold
from tests.integration.conftest import refused
from tests.store import Attempt, Mend, NotStarted, QuarantineSpec, Redo, Tracked, errors
from tidegate.state_store import Settings

MIXED: list[Record] = [("a", 1), ("b", -2), ("a", -3), ("c", 4), ("b", 5), ("c", -6), ("a", 7), ("d", 8)]
BAD = ["a:-3", "b:-2"]
FOUR: list[Record] = [("a", 1)] * 4


@pytest.fixture
def mixed(flow: Begin) -> Flow:
    return flow("opaque", MIXED, 4, 2, 2, on_poison="quarantine")


@pytest.mark.promise("I7", "decision:0012")
def test_bad_records_are_set_aside_by_the_commit_of_their_batch_and_replaced_by_a_redo(mixed: Flow, settings: Settings) -> None:
    attempt = mixed.process(1)
    assert isinstance(attempt, Attempt)
    mixed.stage(attempt, QuarantineSpec("flow"), [("it is negative", None, "b:-2", True)])  # no seal names it
    assert mixed.quarantined() == []
    mixed.commit(1)
    assert mixed.quarantined() == BAD
    assert mixed.store.batch_history("flow", 1).commit["quarantined_rows"] == 2
    mixed.check()
    assert mixed.commit(1).already_committed
    number = next(bad["number"] for bad in mixed.store.quarantined("flow") if bad["payload"] == "b:-2")
    mixed.store.mend_quarantined("flow", 1, number, Mend("b:2", "an operator", "a typo"))
    mixed.redo(1, 2)
    assert mixed.quarantined() == ["b:-2"]
    mixed.redo(1, 4)
    assert mixed.quarantined() == BAD
    mends = {bad["payload"]: bad["mended_payload"] for bad in mixed.store.quarantined("flow")}
    assert mends == {**dict.fromkeys(BAD), "b:-2": "b:2"}
    mixed.check()
    mixed.store.replay_quarantined(mixed.spec, "an operator", "x")
    mixed.finish(mixed.start(1, 4, mode="redo"))
    with refused(settings, errors.RangeRefused, match="flow 1 cannot be redone: txid 4 has taken up bad records of it"):
        mixed.owner.redo_batch(mixed.spec, 1, Redo("an operator", "x"))


def test_a_replay_is_a_separate_batch_and_counts_once(mixed: Flow) -> None:
    mixed.complete(1, 2)
    assert mixed.quarantined() == [*BAD, "c:-6"]
    assert mixed.store.replay_quarantined(mixed.spec, "an operator", "parser fixed", txid=1) == (4, 2)
    assert mixed.quarantined() == ["c:-6"]
    assert mixed.store.replay_quarantined(mixed.spec, "an operator", "again", txid=1) is None
    assert mixed.plan(2, run_id="next") == [5]
    for txid in (3, 4, 5):
        mixed.process(txid)
        mixed.settle(txid)
    assert mixed.state() == fold([("a", 1), ("b", 2), ("a", 3), ("c", 4), ("b", 5), ("a", 7), ("d", 8)])
    assert mixed.metadata(5) == {"start": 8, "end": 10}
    assert [due.txid for due in mixed.store.awaiting_acks("flow", 10)] == [1, 2, 3, 5], "nothing of a source was replayed"


def test_a_replay_that_is_skipped_gives_its_records_back(mixed: Flow) -> None:
    mixed.complete(1)
    assert mixed.store.replay_quarantined(mixed.spec, "an operator", "x") == (4, 2)
    mixed.fail(4)
    mixed.complete(2, 3)
    assert mixed.quarantined() == ["c:-6"]
    mixed.settle(3)
    mixed.store.skip_batch(mixed.spec, 4, "an operator", "not yet")
    with pytest.raises(errors.RangeRefused, match=r"of the 2 records .* it still has 0, as it was skipped.*replay flow"):
        mixed.redo(4)
    assert mixed.quarantined() == [*BAD, "c:-6"]
    mixed.check()
    assert mixed.store.replay_quarantined(mixed.spec, "an operator", "now") == (5, 3)
    mixed.complete(5)
    assert mixed.state() == fold([(key, abs(amount)) for key, amount in MIXED])


def test_bad_records_do_not_vanish_with_the_policy_that_set_them_aside(mixed: Flow) -> None:
    """Processed under quarantine, committed by code that does not quarantine: they would neither count nor wait."""
    mixed.process(1)
    with pytest.raises(errors.Unprocessed, match="set bad records aside; the pipeline no longer does so"):
        mixed.store.commit_batch(replace(mixed.spec, quarantines=False), 1, "test")
    mixed.commit(1)
    assert mixed.quarantined() == BAD


@pytest.mark.promise("decision:0013")
def test_a_batch_that_is_given_up_waits_for_its_turn(flow: Begin) -> None:
    f = flow("transactional", FOUR, 1, 1, 1)
    f.fail(2)
    assert f.store.skip_batch(f.spec, 2, "an operator", "it is poison") is None
    assert f.process(2) is NotStarted.GIVEN_UP
    f.process(3)
    with pytest.raises(errors.CommitOutOfOrder):
        f.commit(2)
    f.complete(1)
    with pytest.raises(errors.CommitOutOfOrder):
        f.commit(3)
    skipped = f.commit(2)
    assert (skipped.skipped_reason, skipped.key_count) == ("it is poison", 0)
    assert f.store.batch_history("flow", 2).commit["owner"] == "an operator"
    f.commit(3)
    f.check()
    assert f.ranges() == [(0, 1, True), (1, 2, False), (2, 3, True)]


@pytest.mark.promise("decision:0024")
def test_a_retry_revokes_a_decision_to_skip(flow: Begin) -> None:
    f = flow("transactional", FOUR, 1, 1, 1)
    assert [f.fail(2, is_poison=is_poison) for is_poison in (False, True, True, False, True)] == [0, 1, 2, 2, 3]
    f.store.give_up("flow", 2, "the pipeline's policy", "3 tries failed")
    f.store.halt_batch("flow", 3, "BROKEN")
    assert f.store.retry("flow", None, "an operator", "fixed") == [2, 3]
    assert f.store.poison_tries("flow", 2) == 0
    assert f.fail(2) == 1
    f.complete(1, 2, 3)
    assert f.store.retry("flow", 1, "an operator", "too late") == []
    f.check()


@pytest.mark.promise("error:PIPELINE_PAUSED")
def test_a_paused_pipeline_plans_nothing_and_ends_only_what_has_begun(flow: Begin) -> None:
    f = flow("transactional", FOUR, 1, 1)
    assert f.fail(1) == 1
    assert f.store.pause("flow", "an operator", "maintenance")
    assert not f.store.pause("flow", "another", "too")
    with pytest.raises(errors.PipelinePaused, match=r"flow was paused by an operator on .*: maintenance"):
        f.plan(1, run_id="next")
    assert f.plan(1) == [1, 2]
    assert f.store.in_flight("flow") == (1, 1)
    assert [f.store.turn("flow", txid).begins for txid in (1, 2)] == [True, False]
    assert f.store.next_unbegun("flow", "run") is None
    f.complete(1)
    assert f.store.start_attempt(f.spec, 2, "a task") is NotStarted.PAUSED
    assert f.store.resume("flow", "an operator", "done")
    f.complete(2)
    assert not f.store.resume("flow", "an operator", "done")
    assert f.plan(1, run_id="next") == [3]


def replay(f: Flow, tracked: Tracked) -> None:
    f.seal(f.start(1, mode="restage"), tracked=tracked)


@pytest.mark.promise("I11")
def test_a_transactional_replay_with_other_sums_is_refused(flow: Begin, settings: Settings) -> None:
    f = flow("transactional", FOUR, 1)
    replay(f, Tracked(2, 42))
    for sums in (Tracked(3, 42), Tracked(2, 43)):
        attempt = f.start(1, mode="restage")
        with refused(settings, errors.SourceChanged, "emitted . rows, sum of hashes .*, attempt 1 at the same batch 2"):
            f.seal(attempt, tracked=sums)
    replay(f, Tracked(2, 42))
    assert f.commit(1).attempt == 4


def test_sums_are_not_compared_without_a_promise(flow: Begin) -> None:
    f = flow("transactional", FOUR, 1)
    for tracked in (Tracked(2), Tracked(3), Tracked(4, 42)):
        replay(f, tracked)
    f = flow("transactional", version=2)
    replay(f, Tracked(5, 43))
    with pytest.raises(errors.SourceChanged):
        replay(f, Tracked(4, 42))
    states = {f"{name}_too": state for name, state in declare("opaque").states.items()}
    opaque = flow("opaque", FOUR, 1, name="other", states=states)
    replay(opaque, Tracked(2, 42))
    replay(opaque, Tracked(3, 43))
    assert opaque.commit(1).attempt == 2
