"""The causes of a wait, each reached by bringing a real ledger into that state."""

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

import pytest
import sqlalchemy as sa

from tests import command_lines
from tests.integration.conftest import TALLY, Tally
from tests.store import Attempt, BatchStatus, Mark, Tracked, tables
from tidegate.explain import error_pages, remedies
from tidegate.explain.batch_causes import Cause
from tidegate.explain.why import explain, root_causes
from tidegate.jobs import Pipeline
from tidegate.state_store import StateStore

AsOwner = Callable[[sa.Executable], sa.CursorResult]


def causes(tally: Tally, txid: int | None = None, pipeline: Pipeline = TALLY) -> tuple[Cause, ...]:
    """Return the causes, nearest first, after checking what holds for all."""
    found = explain(tally.store, pipeline, txid).causes
    for cause in found:
        assert cause.sentence.endswith(".")
        assert "\n" not in cause.sentence
        assert cause.since is None or datetime.fromisoformat(cause.since).utcoffset() is not None
        assert cause.error is None or error_pages.has_page(cause.error)
        if cause.command is not None:
            command_lines.check(cause.command)
        if cause.severity in ("warning", "error"):
            assert cause.advice
    if txid is None:
        roots = root_causes(tally.store, [pipeline, "no such pipeline"])
        urgent = [cause for cause in found if cause.severity in ("warning", "error")]
        assert {name: settled(root) for name, root in roots.items()} == {pipeline.name: settled((urgent or found)[-1])}
    return found


def settled(cause: Cause) -> Cause | str:
    """Return a cause; one name for two that follow each other as time passes."""
    return "commits soon" if cause.code in ("WAITS_TO_MERGE", "WAITS_FOR_COMMIT") else cause


def codes(tally: Tally, txid: int | None = None, pipeline: Pipeline = TALLY) -> list[str]:
    return [cause.code for cause in causes(tally, txid, pipeline)]


def test_a_halted_batch_says_the_way_out_of_its_error(tally: Tally) -> None:
    tally.plan(2)
    tally.process(2)
    errors = [code for code in error_pages.codes() if remedies.code_of(code)]
    assert {"SOURCE_CHANGED", "RANGE_EXPIRED", "PERMANENT_ERROR"} <= set(errors)
    for error in errors:
        tally.store.fail_attempt(tally.start(1), f"{error}: something is wrong.")
        tally.store.halt_batch("tally", 1, f"{error}: something is wrong.")

        waits, halted = causes(tally, 2)
        assert (waits.code, halted.code, halted.error, halted.severity) == ("WAITS_FOR_TXID", "HALTED", error, "error")
        assert halted.sentence == f"Txid 1 waits for a person: {error}: something is wrong."
        verb = "skip" if error == "RANGE_EXPIRED" else "retry"
        assert (halted.action.verb, halted.action.txid) == (verb, 1)
        assert halted.command.startswith(f"tidegate {verb} tally 1")


def test_a_restored_database_is_the_root(tally: Tally, as_owner: AsOwner) -> None:
    tally.plan(2)
    tally.process(1)
    tally.commit(1)
    store, cursor = tally.store, tables.cursor.c
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(cursor.history, cursor.epoch)).one()
    file = store.witness.file_of("tally", str(row.history))
    kept = file.read_text()
    tally.process(2)

    as_owner(sa.update(tables.cursor).values(epoch="1/2/3"))
    (restored,) = causes(tally)
    assert (restored.code, restored.command) == ("HOLE_DETECTED", "tidegate migrate --accept-epoch")
    assert codes(tally) == codes(tally, 2) == ["HOLE_DETECTED"]  # and not: it commits within seconds
    assert "restored, promoted or copied" in restored.sentence
    as_owner(sa.update(tables.cursor).values(epoch=row.epoch))

    store.witness.advance(Mark("tally", str(row.history), row.epoch, 9, 1, "2026-11-25T10:00:00+00:00"))
    assert "txids 2 to 9 are lost" in causes(tally)[-1].sentence
    file.write_text("{")
    assert "is damaged" in causes(tally)[-1].sentence
    file.write_text(kept)
    assert codes(tally) == ["WAITS_FOR_COMMIT"]

    as_owner(sa.update(tables.cursor).values(txid=0))
    assert "cursor of tally is at txid 0, but the ledger committed 1" in causes(tally)[-1].sentence
    as_owner(sa.update(tables.cursor).values(txid=2))
    (hole,) = causes(tally, 2)
    assert "has passed txid 2, which has no commit" in hole.sentence


# -- random ledgers ----------------------------------------------------------------------------------------------------

PHASES = {
    "planned": {"PLANNED"},
    "processing": {"IN_WORK", "FAILED_BEFORE"},
    "failed": {"FAILED"},
    "halted": {"HALTED"},
    "processed": {"WAITS_FOR_COMMIT", "WAITS_TO_MERGE"},
}
ERRORS = ("SPARK_UNAVAILABLE: away", "SOURCE_CHANGED: a.csv", "MALFORMED_RECORD: a.csv, line 1", "RuntimeError: odd")


def step(tally: Tally, dice: random.Random) -> None:
    store = tally.store
    committed, newest = store.committed("tally"), store.last_opened("tally")
    open_txids = range(committed + 1, (newest.txid if newest else 0) + 1)
    if not open_txids or dice.random() < 0.15:
        tally.plan(dice.randint(1, 3), run_id=f"run {dice.random()}")
        return
    txid = dice.choice(open_txids)
    choice = dice.choice(["start", "fail", "seal", "halt", "give up", "retry", "commit", "commit", "pause", "resume"])
    started = store.start_attempt(tally.spec, txid, "test") if choice in ("start", "fail", "seal") else None
    if choice == "fail" and isinstance(started, Attempt):
        error = dice.choice(ERRORS)
        store.fail_attempt(started, error, is_poison=error.startswith("MALFORMED"))
    elif choice == "seal" and isinstance(started, Attempt):
        staged = [tally.stage(started, name, []) for name in ("per_shop", "per_day")]
        store.seal(started, staged, Tracked(0))
    elif choice == "halt":
        store.halt_batch("tally", txid, dice.choice(ERRORS))
    elif choice == "give up":
        store.give_up("tally", txid, "the pipeline's policy", f"it failed, with {ERRORS[2]}", tries=1)
    elif choice == "retry":
        store.retry("tally", txid, "ann", "fixed")
    elif choice == "commit":
        store.commit_ready(tally.spec, "test")
    elif choice == "pause":
        store.pause("tally", "ann", "for a while")
        store.resume("tally", "ann", "over")


def own_codes(status: BatchStatus, following: int) -> set[str]:
    """Return which codes the nearest cause of a batch may have, from what the view says of it."""
    waits_for = status.waits_for or ""
    if waits_for.startswith("its turn to be skipped"):
        return {"GIVEN_UP"}
    if waits_for.endswith("the window is full"):
        assert waits_for.startswith(f"txid {following} to commit")
        return {"WINDOW_FULL"} if status.txid > following else {"PLANNED"}
    if waits_for == f"txid {following} to commit":
        return {"WAITS_FOR_TXID"}
    return PHASES[status.phase]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_causes_agree_with_the_view_whatever_was_done(store: StateStore, register: Callable[..., None], seed: int) -> None:
    register(TALLY)
    dice = random.Random(seed)
    tally = Tally(store, replace(TALLY, window=4).spec)
    for _ in range(20):
        step(tally, dice)
        (lag,) = store.lag(["tally"])
        chain = causes(tally)
        if lag.waits_for is None:
            assert chain[0].code == "IDLE"
            continue
        statuses = [status for status in store.batch_statuses("tally", limit=50) if status.txid > lag.committed]
        following = lag.committed + 1
        for status in statuses:
            found = causes(tally, status.txid)
            nearest = own_codes(status, following)
            assert found[0].code in nearest, (status, found)
            assert found[0].txid == status.txid
            assert settled(found[-1]) == settled(chain[-1]), (status, found)
            if status.txid > following:
                assert {"WAITS_FOR_TXID", "WINDOW_FULL"} & {cause.code for cause in found}
        assert chain[0].txid == following
        assert chain[-1].txid == following
        quoted = (lag.waits_for or "").removeprefix(f"txid {following}: ")
        if chain[0].code in ("FAILED", "HALTED"):
            assert quoted in chain[0].sentence
