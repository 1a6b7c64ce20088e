"""Which kinds of source and state go together, and batches that an opaque source cuts anew: on both Postgres versions."""

import threading
from collections.abc import Callable
from typing import Any, get_args

import pytest
import sqlalchemy as sa

from jobs import Pipeline
from state_store import Settings, tables
from state_store.attempts import Attempt
from state_store.batches import encode_metadata
from state_store.beginning import NewInput, NotStarted, ReplanNeeded
from state_store.declaration import SourceKind, StateKind
from state_store.errors import AttemptFenced, DeclarationChanged, MetadataCorrupt, StagingLost
from tests.conformance.conftest import BOTH_POSTGRES, EXACTLY_ONCE, STATE_KINDS, Flow, Record, declare
from tests.integration.conftest import contents

pytestmark = [BOTH_POSTGRES, pytest.mark.usefixtures("server")]
Begin = Callable[..., Flow]
RECORDS: list[Record] = [(key, number) for number, key in enumerate("abcabdabeabfabgabh")]
OTHERS = [(source, state) for source in get_args(SourceKind) for state in STATE_KINDS if (source, state) not in EXACTLY_ONCE]
WAYS_OUT = {
    "transactional": "Declare state per_key transactional or opaque, or say",
    "opaque": "Declare state per_key opaque, or say",
    "non-transactional": "Use a source that can replay, or say",
}


def named(pairs: list[tuple[SourceKind, StateKind]]) -> Any:
    """Return a parametrisation over pairs of kinds."""
    return pytest.mark.parametrize(("source", "state"), pairs, ids=[f"{source} into {state}" for source, state in pairs])


# the matrix


@named(EXACTLY_ONCE)
def test_a_pair_that_gives_exactly_once_is_accepted(flow: Begin, source: SourceKind, state: StateKind) -> None:
    """Transactional sources with both kinds of state that keep a txid, opaque sources with opaque states; and it does."""
    assert declare(source, state, guarantee="exactly_once").is_exactly_once
    f = flow(source, state, RECORDS, guarantee="exactly_once")
    f.plan(3, 4)
    f.fail(1, 2)
    for txid in (1, 2):
        f.process(txid, 5)
        f.settle(txid, 5)
        f.check()


@named(OTHERS)
def test_any_other_pair_is_refused_unless_at_least_once_will_do(source: SourceKind, state: StateKind) -> None:
    """The message names both kinds, and the ways out."""
    with pytest.raises(ValueError, match=f"a {source} source and the {state} state per_key do not .* {WAYS_OUT[source]}"):
        declare(source, state, guarantee="exactly_once")
    accepted = declare(source, state, guarantee="at_least_once")
    assert not accepted.is_exactly_once


def test_one_state_of_the_wrong_kind_is_enough_to_be_refused() -> None:
    """A pipeline is as good as the weakest of its states."""
    right, wrong = declare("opaque", "opaque"), declare("opaque", "transactional")
    states = {"per_key": right.states["per_key"], "overall": wrong.states["overall"]}
    with pytest.raises(ValueError, match="a opaque source and the transactional state overall do not give exactly-once"):
        Pipeline("flow", right.source, states)


@pytest.mark.parametrize(
    "changes", [("opaque", "opaque"), ("transactional", "transactional")], ids=["of the source", "of the states"]
)
def test_a_kind_cannot_change_once_batches_have_committed(
    flow: Begin, register: Callable[..., None], changes: tuple[SourceKind, StateKind]
) -> None:
    """What has committed would mean something else; not even a raised version allows it."""
    f = flow("transactional", "opaque", RECORDS)
    f.plan(1)
    f.process(1)
    f.commit(1)
    with pytest.raises(DeclarationChanged, match="into other states than these"):
        register(declare(*changes, version=2))


def test_the_ledger_takes_no_other_kind_of_source(flow: Begin) -> None:
    """A kind that nobody knows is refused by the database itself."""
    f = flow("opaque", "opaque")
    with f.owner.engine.connect() as connection, pytest.raises(sa.exc.IntegrityError, match="ck_pipeline_source_kind"):
        connection.execute(sa.update(tables.pipeline).values(source_kind="psychic"))


# cut anew


def test_the_first_attempt_reads_what_was_planned_and_the_next_is_cut_anew(flow: Begin) -> None:
    """An opaque batch may change until it commits; afterwards it is what it was."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(3)
    assert f.start(1).source_metadata == {"start": 0, "end": 3}
    assert f.start(1, 2).source_metadata == {"start": 0, "end": 2}
    assert f.start(1, 5).source_metadata == {"start": 0, "end": 5}
    f.process(1, 4)
    f.commit(1)
    assert f.metadata(1) == {"start": 0, "end": 4}
    assert f.process(1, 1).already_committed
    f.check()
    f.plan(2, run_id="next")
    assert f.metadata(2) == {"start": 4, "end": 6}


@named([("transactional", "transactional"), ("transactional", "opaque")])
def test_a_transactional_batch_is_never_cut_anew(flow: Begin, source: SourceKind, state: StateKind) -> None:
    """Every attempt reads the same bytes, whatever happened to the one before (I6)."""
    f = flow(source, state, RECORDS)
    f.plan(3, 2)
    f.fail(1, 1)
    assert f.start(1, 9).source_metadata == {"start": 0, "end": 3}
    f.process(2, 9)
    f.process(1, 9, mode="restage")
    f.commit(1)
    f.commit(2)
    assert f.ranges() == [(0, 3, True), (3, 5, True)]
    f.check()


@pytest.mark.parametrize("size", [1, 5], ids=["shorter", "longer"])
def test_later_batches_follow_a_batch_that_is_cut_anew(flow: Begin, size: int) -> None:
    """A 1-50 fails, A' is 1-40, then B' is 41-90: planned, processing and sealed batches behind it are all cut anew."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(3, 3, 3, 3)
    f.fail(1)
    f.process(2)  # sealed
    f.start(3)  # processing; 4 is planned
    f.process(1, size)
    f.commit(1)
    with pytest.raises(StagingLost, match="flow 2 was cut behind another batch than the one that committed as 1"):
        f.commit(2)
    f.check()
    for txid in (2, 3, 4):
        f.settle(txid, 3)
        f.check()
    assert f.ranges() == [(0, size, True), *((size + n, size + n + 3, True) for n in (0, 3, 6))]


def test_a_sealed_batch_is_processed_again_as_soon_as_the_one_before_it_was_cut_anew(flow: Begin) -> None:
    """Not only at its commit: a task that asks for its processing gets a new attempt, no "processed already"."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(3, 3)
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


def test_work_behind_a_new_cut_that_reads_the_same_is_kept(flow: Begin) -> None:
    """What counts is what is read, not how often it was tried."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(3, 3)
    f.fail(1)
    f.process(2)
    f.process(1, 3)
    assert f.process(2) is NotStarted.SEALED
    f.commit(1)
    assert f.commit(2).attempt == 1
    f.check()


def test_a_batch_that_was_planned_behind_a_stale_look_is_cut_anew_before_it_is_read(flow: Begin) -> None:
    """A planner may look just before the last batch is cut anew: its own batch then follows nothing."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(5)
    after = f.store.last_opened("flow")
    f.fail(1)
    f.process(1, 2)
    planned = f.store.open_batches(f.spec, "stale", [], after, [encode_metadata({"start": 5, "end": 8})])
    assert planned == [2]
    assert f.start(2).source_metadata == {"start": 2, "end": 8}
    f.settle(1)
    f.settle(2)
    f.check()


def test_two_planners_at_once_share_no_record(flow: Begin, settings: Settings) -> None:
    """One gets the txid and the range, the other has to look again; and so for every batch of an opaque pipeline."""
    f = flow("opaque", "opaque", RECORDS)
    other = Flow(settings, f.spec, RECORDS)
    together = threading.Barrier(2)
    answers: list[Any] = []

    def plan(who: Flow, name: str) -> None:
        for number in range(5):
            together.wait(30)
            while (planned := who.plan(1, run_id=f"{name} {number}")) is None:
                pass
            answers.append(planned)

    threads = [threading.Thread(target=plan, args=(who, name)) for who, name in ((f, "one"), (other, "other"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    other.close()
    assert sorted(answers) == [[txid] for txid in range(1, 11)]
    for txid in range(1, 11):
        f.process(txid)
        f.commit(txid)
    f.check()
    assert f.ranges()[-1][1] == 10


def test_two_attempts_that_cut_the_same_batch_anew_fence_each_other(flow: Begin) -> None:
    """Both ask the source, both take the fence: the later one owns the batch, and its cut is the batch's."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(4, 4)
    f.fail(1)
    wanted = [f.store.start_attempt(f.spec, 1, name) for name in ("one", "other")]
    assert all(isinstance(each, ReplanNeeded) for each in wanted)
    cuts = [NewInput(encode_metadata({"start": 0, "end": end}), None) for end in (2, 3)]
    first, second = (f.store.start_attempt(f.spec, 1, "x", new_input=cut) for cut in cuts)
    f.finish(second)
    with pytest.raises(AttemptFenced):
        f.finish(first)
    f.commit(1)
    f.check()
    assert f.ranges() == [(0, 3, True)]


def test_a_cut_that_comes_too_late_is_asked_for_again(flow: Begin) -> None:
    """While a source cuts batch 2, batch 1 is cut anew: a cut that continues the old one is not taken."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(4, 4)
    f.fail(1)
    f.fail(2)
    wanted = f.store.start_attempt(f.spec, 2, "slow")
    assert isinstance(wanted, ReplanNeeded)
    f.process(1, 2)
    late = NewInput(encode_metadata({"start": 4, "end": 8}), wanted.continues)
    asked = f.store.start_attempt(f.spec, 2, "slow", new_input=late)
    assert isinstance(asked, ReplanNeeded)
    assert asked.previous == {"start": 0, "end": 2}
    f.settle(1)
    f.settle(2, 4)
    f.check()


def test_a_sealed_batch_is_not_cut_anew_by_who_asked_before_the_seal(flow: Begin) -> None:
    """Two tasks try a failed batch; the one that is slow with its cut finds the other's work done."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(4)
    f.fail(1)
    wanted = f.store.start_attempt(f.spec, 1, "slow")
    assert isinstance(wanted, ReplanNeeded)
    f.process(1, 3)
    late = NewInput(encode_metadata({"start": 0, "end": 2}), wanted.continues)
    assert f.store.start_attempt(f.spec, 1, "slow", new_input=late) is NotStarted.SEALED
    f.commit(1)
    assert f.store.start_attempt(f.spec, 1, "slow", new_input=late).already_committed
    f.check()


@pytest.mark.parametrize("how", ["at once", "in turn"])
def test_a_skip_leaves_no_record_between_it_and_the_batch_before(flow: Begin, how: str) -> None:
    """Given up, then the batch before it is cut shorter: what lies between is in neither, so the batch is tried once more."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(5, 5)
    f.fail(2)
    f.fail(1)
    if how == "in turn":
        assert f.store.skip_batch(f.spec, 2, "an operator", "it is poison") is None
    f.process(1, 3)
    f.commit(1)
    if how == "at once":
        with pytest.raises(StagingLost, match=r"flow 2 was cut behind another batch .* It is cut anew and processed again"):
            f.store.skip_batch(f.spec, 2, "an operator", "it is poison")
    assert f.fail(2) == 2
    assert f.metadata(2) == {"start": 3, "end": 10}
    assert f.store.skip_batch(f.spec, 2, "an operator", "it is poison").skipped_reason == "it is poison"
    f.check()
    assert f.ranges() == [(0, 3, True), (3, 10, False)]


def test_a_batch_that_was_given_up_behind_another_cut_is_processed_when_its_turn_comes(flow: Begin) -> None:
    """The commit asks for it, as it does for lost staging; if it works out, it counts."""
    f = flow("opaque", "opaque", RECORDS)
    f.plan(5, 5, 2)
    f.fail(2)
    f.store.give_up("flow", 2, "the pipeline's policy", "2 tries failed")
    assert f.process(2) is NotStarted.GIVEN_UP
    f.process(1, mode="restage")
    f.process(1, 3, mode="restage")
    f.commit(1)
    done = f.settle(2)
    assert (done.skipped_reason, f.ranges()) == (None, [(0, 3, True), (3, 10, True)])
    f.settle(3)
    f.check()


def test_a_transactional_chain_that_is_broken_is_corrupt(flow: Begin, settings: Settings) -> None:
    """No attempt could mend it: the metadata was edited by hand, so the batch does not commit, nor is it skipped."""
    f = flow("transactional", "transactional", RECORDS)
    f.plan(2, 2)
    f.process(1)
    f.commit(1)
    f.process(2)
    with f.owner.engine.begin() as connection:
        connection.execute(sa.update(tables.attempt).where(tables.attempt.c.txid == 2).values(previous_digest=b"x" * 32))
    before = contents(settings)
    with pytest.raises(MetadataCorrupt, match=r"flow 2 was cut behind another .* Restore tidegate\.batch from a backup"):
        f.commit(2)
    assert contents(settings) == before
    f.store.halt_batch("flow", 2, "METADATA_CORRUPT")
    with pytest.raises(MetadataCorrupt):
        f.store.skip_batch(f.spec, 2, "an operator", "x")
