"""Decisions of people and policies about a batch, or a quarantined record: they lock the batch first and decide then."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.conftest import PATIENCE_SECONDS, ROW, TALLY, Tally, TallyOf, until
from tests.store import MAX_BYTES, Mend, Redo, Tracked, errors, rebuilds
from tidegate import migrations
from tidegate.jobs import Changes, Count, Pipeline, State
from tidegate.state_store import Settings, StateStore

Step = Callable[[StateStore], Any]
MeanwhileDecide = Callable[[Step, Callable[[], Any]], Any]


@pytest.fixture
def meanwhile(settings: Settings, waiting: Callable[[], int]) -> MeanwhileDecide:
    """A function that returns a decision made while another process has a step uncommitted: it waits for that to commit."""

    def decided(step: Step, decide: Callable[[], Any]) -> Any:
        decisions: list[Future[Any]] = []

        def begin(_connection: object) -> None:
            decisions.append(thread.submit(decide))
            until(waiting)

        # Other settings give another Engine, so other connections.
        with StateStore.connect(replace(settings, staging_connections=3)) as store, ThreadPoolExecutor(1) as thread:
            sa.event.listen(store.engine, "commit", begin, once=True)
            step(store)
            return decisions[0].result(PATIENCE_SECONDS)

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


def test_a_batch_that_commits_or_is_given_up_meanwhile_is_not_halted(poisoned: Tally, meanwhile: MeanwhileDecide) -> None:
    poisoned.process(1)
    poisoned.fail(2)
    decisions: dict[int, Step] = {
        1: lambda other: other.commit_batch(poisoned.spec, 1, "test"),
        2: lambda other: other.give_up("tally", 2, "the pipeline's policy", "it failed"),
    }
    for txid, step in decisions.items():
        meanwhile(step, lambda txid=txid: poisoned.store.halt_batch("tally", txid, "its task was killed"))
    found = poisoned.sql("SELECT halted_reason, skip_reason FROM tidegate.batch ORDER BY txid")
    assert found == [(None, None), (None, "it failed")]
    assert poisoned.store.turn("tally", 1).halted is None


def test_a_redo_is_refused_if_a_pipeline_follows_meanwhile(tally_of: TallyOf, owner: StateStore, register: Callable) -> None:
    followed = {name: replace(state, kind="opaque", changes=True) for name, state in TALLY.states.items()}
    tally = tally_of(replace(TALLY, states=followed)).having(1, 1, 1)
    owner.check_not_followed(tally.spec, 1)
    register(Pipeline("follower", Changes("tally.per_shop"), {"changes": State(aggregates={"changes": Count()})}))
    with pytest.raises(errors.RangeRefused, match=r"pipeline follower follows its state per_shop, .* add --without follower\."):
        owner.redo_batch(tally.spec, 1, Redo("an operator", "it was wrong"))


def test_a_rebuild_that_lacks_a_commit_is_not_ready(tally: Tally, settings: Settings, owner: StateStore) -> None:
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


@pytest.mark.promise("I24")
def test_a_retry_leaves_to_a_rebuild_what_its_pipeline_has_skipped(poisoned: Tally, owner: StateStore) -> None:
    assert poisoned.store.skip_batch(poisoned.spec, 1, "ann", "twice") is not None
    changed = replace(poisoned.spec, version=2)
    owner.begin_rebuild(changed)
    rebuild = Tally(owner, rebuilds.rebuild_of(changed))
    rebuild.plan(1)
    retry = partial(owner.retry, "tally__v2", owner="ann", reason="the server was away")
    assert retry(None) == []
    rebuild.refuses(errors.RangeRefused, "tally__v2 1 is skipped as tally has skipped it", partial(retry, 1))
    assert rebuild.commit(1).skipped_reason == "twice"


PARSED = '{"shop":"a","day":"2013-01-01","cents":-5,"ratio":"NaN","open":null,"tags":["x"],"more":{"y":1}}'
RAW, COLUMNS = 1, 2
QUARANTINE = "INSERT INTO tidegate.quarantine SELECT 'tally', 1, n, 'no int', NULL, %s, %s FROM generate_series(%s, %s) AS n"


@pytest.fixture
def quarantined(tally: Tally) -> Tally:
    tally.having(1, 1, 1)
    tally.sql(QUARANTINE, ["a,five", True, RAW, RAW])
    tally.sql(QUARANTINE, [PARSED, False, COLUMNS, COLUMNS])
    return tally


def mend(tally: Tally, number: int, payload: str, *, by: str = "anna", again: bool = False, txid: int = 1) -> object:
    return tally.store.mend_quarantined("tally", txid, number, Mend(payload, by, "the till was wrong", again))


def record(tally: Tally, number: int) -> dict[str, Any]:
    (found,) = (row for row in tally.store.quarantined("tally") if row["number"] == number)
    return found


def test_a_second_mend_says_that_it_replaces_the_first(quarantined: Tally) -> None:
    says = "tally 1 has no record 3 in quarantine|tally has no txid 7"
    for place in ({"number": 3}, {"number": 1, "txid": 7}):
        quarantined.refuses(errors.UnknownBatch, says, partial(mend, quarantined, payload="a,5", **place))
    before = record(quarantined, RAW)
    mend(quarantined, RAW, "a,5")

    after = record(quarantined, RAW)
    mended = {"mended_payload": "a,5", "mended_by": "anna", "mended_reason": "the till was wrong"}
    assert after == before | mended | {"mended_at": after["mended_at"]}
    assert after["mended_at"] > after["quarantined_at"]
    (action,) = quarantined.store.batch_history("tally", 1).actions
    expected = ("mend", 1, "anna", "record 1: the till was wrong")
    assert (action["action"], action["txid"], action["owner"], action["reason"]) == expected

    says = r"record 1, was mended on .* by anna: the till was wrong\. To replace that.*--again"
    quarantined.refuses(errors.RangeRefused, says, partial(mend, quarantined, RAW, "a,6", by="berta"))
    mend(quarantined, RAW, "a,6", by="berta", again=True)
    assert (record(quarantined, RAW)["mended_payload"], record(quarantined, RAW)["mended_by"]) == ("a,6", "berta")
    assert [action["owner"] for action in quarantined.store.batch_history("tally", 1).actions] == ["anna", "berta"]

    # The batch that takes a record up may have read it already. A skipped replay gives it back, with its mend.
    assert quarantined.store.replay_quarantined(quarantined.spec, "anna", "mended") == (2, 2)
    says = r"record 1, was taken up by txid 2, so it is not mended"
    quarantined.refuses(errors.RangeRefused, says, partial(mend, quarantined, RAW, "a,7", again=True))
    quarantined.fail(2, "TEST: failed", is_poison=False)
    assert quarantined.store.skip_batch(quarantined.spec, 2, "anna", "not yet") is not None
    assert record(quarantined, RAW)["mended_payload"] == "a,6"
    mend(quarantined, RAW, "a,7", again=True)
    assert record(quarantined, RAW)["mended_payload"] == "a,7"


@pytest.mark.promise("limit:MAX_BYTES")
def test_a_parsed_record_takes_json_of_its_columns(quarantined: Tally) -> None:
    taken = {
        COLUMNS: [
            PARSED.replace("-5", "5.00"),
            PARSED.replace('"a"', "null"),
            PARSED.replace('"NaN"', "1.5e3"),
            PARSED.replace('"open":null', '"open":true'),
            f" {PARSED.replace(',', ' , ')}\n",
            PARSED.replace('"a"', r'"a\u0000"'),  # what a state can keep is decided by the replay
            PARSED.replace("-5", "9" * 5000),
        ],
        RAW: ['"a\nb",5', "x" * MAX_BYTES],
    }
    for number, payloads in taken.items():
        for payload in payloads:
            mend(quarantined, number, payload, again=True)
            assert record(quarantined, number)["mended_payload"] == payload
    for payload in (
        "{",
        "[]",
        PARSED.replace('"cents":-5,', ""),
        PARSED.replace("{", '{"new":1,', 1),
        PARSED.replace("{", '{"cents":1,', 1),
        PARSED.replace("-5", "NaN"),
    ):
        with pytest.raises(errors.UsageError, match="has to be a JSON object of all its columns"):
            mend(quarantined, COLUMNS, payload, again=True)


def test_of_two_operators_who_mend_at_once_one_is_refused(quarantined: Tally) -> None:
    """The second has not seen the first one's mend, so it does not replace it; many times."""
    quarantined.sql(QUARANTINE, ["a,five", True, 10, 29])
    barrier = threading.Barrier(2)

    def refusal(number: int, name: str) -> str | None:
        barrier.wait()
        try:
            mend(quarantined, number, f"a,{name}", by=name)
        except errors.RangeRefused as refused:
            return str(refused)
        return None

    with ThreadPoolExecutor(2) as threads:
        for number in range(10, 30):
            answers = dict(zip(("anna", "berta"), threads.map(partial(refusal, number), ("anna", "berta")), strict=True))
            (winner,) = (name for name, answer in answers.items() if answer is None)
            (refused,) = filter(None, answers.values())
            assert f"by {winner}: the till was wrong" in refused
            assert record(quarantined, number)["mended_payload"] == f"a,{winner}"
    assert len(quarantined.store.batch_history("tally", 1).actions) == 20
