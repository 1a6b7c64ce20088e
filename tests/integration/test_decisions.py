"""Decisions about a batch during its seal or commit: they lock the batch first and decide then."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.conftest import PATIENCE_SECONDS, TALLY, Execute, Tally, until
from tests.store import Redo, Tracked, rebuilds
from tidegate import migrations
from tidegate.jobs import Changes, Count, Pipeline, State
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import RangeRefused


@contextmanager
def held_open(settings: Settings, step: Callable[[StateStore], Any]) -> Iterator[Callable[[], Any]]:
    """Take a step in another process up to its COMMIT; yield a function that commits and returns the result."""
    is_open, may_commit = threading.Event(), threading.Event()

    def hold(_connection: object) -> None:
        is_open.set()
        assert may_commit.wait(PATIENCE_SECONDS)

    # Other settings give another Engine, so other connections.
    with StateStore.connect(replace(settings, staging_connections=3)) as store, ThreadPoolExecutor(1) as thread:
        sa.event.listen(store.engine, "commit", hold)
        holder: Future[Any] = thread.submit(step, store)

        def commit() -> Any:
            may_commit.set()
            return holder.result(PATIENCE_SECONDS)

        try:
            assert is_open.wait(PATIENCE_SECONDS)
            yield commit
        finally:
            may_commit.set()
            holder.result(PATIENCE_SECONDS)
            sa.event.remove(store.engine, "commit", hold)


def while_it_is_held(
    settings: Settings, step: Callable[[StateStore], Any], waiting: Callable[[], int], decide: Callable[[], Any]
) -> Any:
    """Return the decision made while another transaction has a step uncommitted: it waits for that transaction."""
    with held_open(settings, step) as commit, ThreadPoolExecutor(1) as thread:
        decision = thread.submit(decide)
        until(waiting)
        commit()
        return decision.result(PATIENCE_SECONDS)


@pytest.fixture
def poisoned(tally: Tally) -> Tally:
    tally.plan(1)
    tally.store.fail_attempt(tally.start(1), "MALFORMED_RECORD: line 1", is_poison=True)
    return tally


def test_a_batch_that_is_being_sealed_is_not_given_up(poisoned: Tally, settings: Settings, waiting: Callable[[], int]) -> None:
    attempt = poisoned.start(1)
    staged = [poisoned.stage(attempt, "per_shop", [("a", 1, 1, 1, 1)])]

    is_given_up = while_it_is_held(
        settings,
        lambda other: other.seal(attempt, staged, Tracked(1)),
        waiting,
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
def test_a_batch_that_is_being_skipped_cannot_be_tried_again(
    poisoned: Tally, settings: Settings, waiting: Callable[[], int], as_role: Execute, *, named: bool
) -> None:
    assert poisoned.store.give_up("tally", 1, "the pipeline's policy", "it failed")

    reopened = while_it_is_held(
        settings,
        lambda other: other.commit_batch(poisoned.spec, 1, "test"),
        waiting,
        lambda: poisoned.store.retry("tally", 1 if named else None, "ann", "the file is fixed"),
    )

    assert reopened == []
    assert as_role("tidegate_owner", "SELECT action FROM tidegate.operator_action") == []
    assert as_role("tidegate_owner", "SELECT skip_reason FROM tidegate.batch") == [("it failed",)]


def test_a_batch_that_is_being_committed_or_was_given_up_meanwhile_is_not_halted(
    tally: Tally, settings: Settings, waiting: Callable[[], int], as_role: Execute
) -> None:
    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1)])
    tally.store.fail_attempt(tally.start(2), "MALFORMED_RECORD: line 1", is_poison=True)
    decisions: dict[int, Callable[[StateStore], Any]] = {
        1: lambda other: other.commit_batch(tally.spec, 1, "test"),
        2: lambda other: other.give_up("tally", 2, "the pipeline's policy", "it failed"),
    }
    for txid, step in decisions.items():
        while_it_is_held(settings, step, waiting, lambda n=txid: tally.store.halt_batch("tally", n, "its task was killed"))

    found = as_role("tidegate_owner", "SELECT halted_reason, skip_reason FROM tidegate.batch ORDER BY txid")
    assert found == [(None, None), (None, "it failed")]
    assert tally.store.turn("tally", 1).halted is None


def test_a_redo_is_refused_if_a_pipeline_has_begun_to_follow_meanwhile(
    settings: Settings, register: Callable[..., None]
) -> None:
    followed = {name: replace(state, kind="opaque", changes=True) for name, state in TALLY.states.items()}
    upstream = replace(TALLY, states=followed)
    register(upstream)
    with StateStore.connect(settings, user=settings.pg_owner) as owner:
        tally = Tally(owner, upstream.spec)
        tally.plan(1)
        tally.process(1, [("a", 1, 1, 1, 1)])
        tally.commit(1)
        owner.check_not_followed(tally.spec, 1)
        register(Pipeline("follower", Changes("tally.per_shop"), {"changes": State(aggregates={"changes": Count()})}))
        with pytest.raises(RangeRefused, match=r"pipeline follower follows its state per_shop, .* add --without follower\."):
            owner.redo_batch(tally.spec, 1, Redo("an operator", "it was wrong"))


def test_a_rebuild_that_has_all_batches_and_lacks_a_commit_does_not_take_its_pipelines_place(
    tally: Tally, settings: Settings
) -> None:
    for txid in tally.plan(2):
        tally.process(txid, [("a", 1, txid, txid, txid)])
        tally.commit(txid)
    changed = replace(tally.spec, version=2)
    with StateStore.connect(settings, user=settings.pg_owner) as owner:
        owner.begin_rebuild(changed)
        rebuild = Tally(owner, rebuilds.rebuild_of(changed))
        for txid in rebuild.plan(2):
            rebuild.process_states(txid, {"per_shop__v2": [("a", 1, txid, txid, txid)]}, source_rows=1)
        rebuild.commit(1)
        with migrations.connected(settings) as connection:
            found = rebuilds.find(connection, [changed])
        assert found.ready == []
        assert "tally__v2 has committed 1 of its 2 batches" in found.pending["tally"]
        rebuild.commit(2)
        with migrations.connected(settings) as connection:
            assert rebuilds.find(connection, [changed]).ready == [changed]
