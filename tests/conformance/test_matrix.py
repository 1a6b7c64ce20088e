"""Kinds of source and state that go together, and batches planned again."""

from collections.abc import Callable
from itertools import product
from typing import get_args

import pytest
import sqlalchemy as sa

from tests.conformance.conftest import Begin, Record, declare
from tests.integration.conftest import refused
from tests.store import Attempt, NotStarted, SourceKind, StateKind, tables
from tidegate.jobs import Pipeline
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import DeclarationChanged, MetadataCorrupt, Unprocessed

RECORDS: list[Record] = [(key, number) for number, key in enumerate("abcabdabeabfabgabh")]
REMEDIES = {
    "transactional": "Declare state per_key transactional or opaque, or say",
    "opaque": "Declare state per_key opaque, or say",
    "non-transactional": "Use a source that can replay, or say",
}


def test_only_pairs_that_give_exactly_once_are_accepted_unless_at_least_once_is_declared() -> None:
    right = [("transactional", "transactional"), ("transactional", "opaque"), ("opaque", "opaque")]
    for source, state in product(get_args(SourceKind), get_args(StateKind)):
        if (source, state) in right:
            assert declare(source, state, guarantee="exactly_once").is_exactly_once
            continue
        with pytest.raises(ValueError, match=f"an? {source} source and the {state} state per_key do not .* {REMEDIES[source]}"):
            declare(source, state, guarantee="exactly_once")
        assert not declare(source, state).is_exactly_once
    states = {"per_key": declare("opaque").states["per_key"], "overall": declare("transactional").states["overall"]}
    with pytest.raises(ValueError, match="an opaque source and the transactional state overall do not give exactly-once"):
        Pipeline("flow", declare("opaque").source, states)


def test_no_source_gets_transactional_while_a_batch_waits_for_a_new_plan(flow: Begin, register: Callable[..., None]) -> None:
    """Before the first commit, or by a rebuild, kinds may change; but no run would plan that batch again: it is stuck."""
    f = flow("opaque", RECORDS, 3, 4)
    register(declare("transactional", "opaque"))
    register(declare("opaque"))
    f.fail(1)
    f.fail(1, 5)
    with pytest.raises(DeclarationChanged, match="flow 2 has to be planned again"):
        register(declare("transactional", "opaque"))
    f.settle(1, 2)
    with pytest.raises(DeclarationChanged, match="flow 2 has to be planned again"):
        f.owner.begin_rebuild(declare("transactional", "opaque", version=2).spec)
    f.settle(2, 3)
    f.check()


@pytest.mark.promise("I6", "I12", "fault:source-changed:processing", "decision:0009")
def test_later_batches_follow_a_batch_that_is_planned_again(flow: Begin) -> None:
    f = flow("opaque", RECORDS, 3, 3, 3, 3)
    assert f.start(1, 2).source_metadata["end"] == 3, "the first attempt reads the plan"
    f.process(2)  # sealed
    f.start(3)  # processing; 4 is planned
    f.process(1, 1)
    f.commit(1)
    with pytest.raises(Unprocessed, match="flow 2 continues another batch than the one that committed as 1"):
        f.commit(2)
    assert f.store.commit_ready(f.spec, "test") == []
    for txid in (2, 3, 4):
        f.settle(txid, 3)
        f.check()
    assert f.ranges() == [(0, 1, True), (1, 4, True), (4, 7, True), (7, 10, True)]


def test_a_sealed_batch_is_processed_again_as_soon_as_its_predecessor_is_planned_again(flow: Begin) -> None:
    f = flow("opaque", RECORDS, 3, 3)
    f.process(1)
    f.process(2)
    assert f.process(2) is NotStarted.SEALED
    f.process(1, 2, mode="restage")
    again = f.process(2)
    assert isinstance(again, Attempt)
    assert again.source_metadata == {"start": 2, "end": 6}
    f.commit(1)
    f.commit(2)
    f.check()


def test_a_skip_leaves_no_record_between_it_and_the_previous_batch(flow: Begin) -> None:
    f = flow("opaque", RECORDS, 5, 5)
    f.fail(2)
    f.fail(1)
    f.process(1, 3)
    f.commit(1)
    with pytest.raises(Unprocessed, match=r"flow 2 continues another batch .* It is planned and processed again"):
        f.store.skip_batch(f.spec, 2, "an operator", "it is poison")
    assert f.fail(2) == 2
    assert f.metadata(2) == {"start": 3, "end": 10}
    assert f.store.skip_batch(f.spec, 2, "an operator", "it is poison").skipped_reason == "it is poison"
    f.check()
    assert f.ranges() == [(0, 3, True), (3, 10, False)]


@pytest.mark.promise("fault:metadata-is-damaged:commit")
def test_a_transactional_chain_that_is_broken_is_corrupt(flow: Begin, settings: Settings) -> None:
    f = flow("transactional", RECORDS, 2, 2)
    f.complete(1)
    f.process(2)
    f.by_hand(sa.update(tables.attempt).where(tables.attempt.c.txid == 2).values(previous_digest=b"x" * 32))
    with refused(settings, MetadataCorrupt, match=r"flow 2 continues another .* Restore tidegate\.batch from a backup"):
        f.commit(2)
    f.store.halt_batch("flow", 2, "METADATA_CORRUPT")
    with pytest.raises(MetadataCorrupt):
        f.store.skip_batch(f.spec, 2, "an operator", "x")
