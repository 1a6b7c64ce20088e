"""Decisions about a batch during its seal or commit: they lock the batch first and decide then."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.conftest import PATIENCE_SECONDS, ROW, TALLY, Tally, TallyOf, listening, until
from tests.store import Redo, Tracked, errors, rebuilds
from tidegate import migrations
from tidegate.jobs import Changes, Count, Pipeline, State
from tidegate.state_store import Settings, StateStore

Step = Callable[[StateStore], Any]
MeanwhileDecide = Callable[[Step, Callable[[], Any]], Any]


@pytest.fixture
def meanwhile(settings: Settings, waiting: Callable[[], int]) -> MeanwhileDecide:
    """A function that returns a decision made while another process has a step uncommitted: it waits for that to commit."""

    def decided(step: Step, decide: Callable[[], Any]) -> Any:
        is_open, may_commit = threading.Event(), threading.Event()

        def hold(_connection: object) -> None:
            is_open.set()
            assert may_commit.wait(PATIENCE_SECONDS)

        # Other settings give another Engine, so other connections.
        with (
            StateStore.connect(replace(settings, staging_connections=3)) as store,
            listening(store, "commit", hold),
            ThreadPoolExecutor(2) as threads,
        ):
            holder = threads.submit(step, store)
            try:
                assert is_open.wait(PATIENCE_SECONDS)
                decision = threads.submit(decide)
                until(waiting)
            finally:
                may_commit.set()
            holder.result(PATIENCE_SECONDS)
            return decision.result(PATIENCE_SECONDS)

    return decided


@pytest.fixture
def poisoned(tally: Tally) -> Tally:
    tally.plan(2)
    tally.fail(1)
    return tally


def test_a_batch_that_is_being_sealed_is_not_given_up(poisoned: Tally, meanwhile: MeanwhileDecide) -> None:
    attempt = poisoned.start(1)
    staged = [poisoned.stage(attempt, "per_shop", ROW)]
    is_given_up = meanwhile(
        lambda other: other.seal(attempt, staged, Tracked(1)),
        lambda: poisoned.store.give_up("tally", 1, "the pipeline's policy", "its first try failed"),
    )
    assert is_given_up is False
    assert poisoned.commit(1).skipped_reason is None
    assert poisoned.state() == [("a", 1, 1, 1, 1, 1)]


@pytest.mark.promise("limit:Pipeline.tries")
def test_a_batch_has_all_its_tries(poisoned: Tally) -> None:
    given_up = ("tally", 1, "the pipeline's policy", "2 tries failed")
    assert not poisoned.store.give_up(*given_up, tries=2)
    attempt = poisoned.start(1)
    assert not poisoned.store.give_up(*given_up, tries=2)
    assert poisoned.store.fail_attempt(attempt, "MALFORMED_RECORD: line 1", is_poison=True) == 2
    assert poisoned.store.give_up(*given_up, tries=2)


@pytest.mark.parametrize("named", [True, False])
def test_a_batch_that_is_being_skipped_cannot_be_tried_again(poisoned: Tally, meanwhile: MeanwhileDecide, named: bool) -> None:
    assert poisoned.store.give_up("tally", 1, "the pipeline's policy", "it failed")
    reopened = meanwhile(
        lambda other: other.commit_batch(poisoned.spec, 1, "test"),
        lambda: poisoned.store.retry("tally", 1 if named else None, "ann", "the file is fixed"),
    )
    assert reopened == poisoned.sql("SELECT action FROM tidegate.operator_action") == []
    assert poisoned.sql("SELECT skip_reason FROM tidegate.batch WHERE txid = 1") == [("it failed",)]


def test_a_batch_that_is_being_committed_or_was_given_up_meanwhile_is_not_halted(
    poisoned: Tally, meanwhile: MeanwhileDecide
) -> None:
    tally = poisoned
    tally.process(1)
    tally.fail(2)
    decisions: dict[int, Step] = {
        1: lambda other: other.commit_batch(tally.spec, 1, "test"),
        2: lambda other: other.give_up("tally", 2, "the pipeline's policy", "it failed"),
    }
    for txid, step in decisions.items():
        meanwhile(step, lambda txid=txid: tally.store.halt_batch("tally", txid, "its task was killed"))
    found = tally.sql("SELECT halted_reason, skip_reason FROM tidegate.batch ORDER BY txid")
    assert found == [(None, None), (None, "it failed")]
    assert tally.store.turn("tally", 1).halted is None


def test_a_redo_is_refused_if_a_pipeline_has_begun_to_follow_meanwhile(
    tally_of: TallyOf, owner: StateStore, register: Callable[..., None]
) -> None:
    followed = {name: replace(state, kind="opaque", changes=True) for name, state in TALLY.states.items()}
    tally = tally_of(replace(TALLY, states=followed)).having(1, 1, 1)
    owner.check_not_followed(tally.spec, 1)
    register(Pipeline("follower", Changes("tally.per_shop"), {"changes": State(aggregates={"changes": Count()})}))
    with pytest.raises(errors.RangeRefused, match=r"pipeline follower follows its state per_shop, .* add --without follower\."):
        owner.redo_batch(tally.spec, 1, Redo("an operator", "it was wrong"))


def test_a_rebuild_that_has_all_batches_and_lacks_a_commit_does_not_take_its_pipelines_place(
    tally: Tally, settings: Settings, owner: StateStore
) -> None:
    def found() -> Any:
        with migrations.connected(settings) as connection:
            return rebuilds.find(connection, [changed])

    tally.having(2, 2, 2)
    changed = replace(tally.spec, version=2)
    owner.begin_rebuild(changed)
    rebuild = Tally(owner, rebuilds.rebuild_of(changed))
    for txid in rebuild.plan(2):
        rebuild.process(txid, per_shop__v2=ROW)
    rebuild.commit(1)
    assert found().ready == []
    assert "tally__v2 has committed 1 of its 2 batches" in found().pending["tally"]
    rebuild.commit(2)
    assert found().ready == [changed]
