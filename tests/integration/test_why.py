"""The causes of a wait, each reached by bringing a real ledger into that state."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests import command_lines
from tests.integration.conftest import TALLY, Tally
from tests.store import Attempt, BatchStatus, Mark, Tracked, tables
from tidegate import migrations
from tidegate.explain import error_pages, remedies
from tidegate.explain.batch_causes import LONGEST_QUOTE, Cause
from tidegate.explain.why import explain, of_error, root_causes
from tidegate.jobs import Changes, Pipeline
from tidegate.jobs.engine.poison import OUTCOMES
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import RangeRefused, SourceChanged, UnknownBatch, UnknownPipeline

AsOwner = Callable[[sa.Executable], sa.CursorResult]
SHOP = ("a", 1, 10, 10, 10)


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


def fail(tally: Tally, txid: int, error: str, *, is_poison: bool = False) -> None:
    tally.store.fail_attempt(tally.start(txid), error, is_poison=is_poison)


def test_each_step_of_a_batch(tally: Tally) -> None:
    assert codes(tally) == ["IDLE"]
    tally.plan(3)
    (planned,) = causes(tally)
    assert (planned.code, planned.action.verb, planned.command) == ("PLANNED", "trigger", "tidegate trigger tally --wait")
    assert codes(tally, 3) == ["PLANNED", "WAITS_FOR_TXID", "PLANNED"]
    attempt = tally.start(1)
    (at_work,) = causes(tally)
    assert (at_work.code, at_work.advice) == ("IN_WORK", None)
    assert "attempt 1, in try 1 of 6, by test." in at_work.sentence
    assert "one is at work on txid 1" in causes(tally, 3)[0].sentence
    tally.store.fail_attempt(attempt, "SPARK_UNAVAILABLE: Spark's server is away.")
    (failed,) = causes(tally)
    assert (failed.code, failed.error) == ("FAILED", "SPARK_UNAVAILABLE")
    assert "Start Spark (tidegate up)" in failed.advice
    tally.process(2)
    assert codes(tally, 2) == ["WAITS_FOR_TXID", "FAILED"]
    tally.process(1)
    assert codes(tally) == ["WAITS_FOR_COMMIT"]
    tally.commit(1)
    (committed,) = causes(tally, 1)
    assert (committed.code, committed.severity, committed.txid) == ("COMMITTED", "ok", 1)
    tally.commit(2)
    tally.process(3)
    tally.commit(3)
    assert codes(tally) == ["IDLE", "ACK_OUTSTANDING"]
    for commit in tally.store.awaiting_acks("tally", 10):
        tally.store.note_ack("tally", commit.txid, commit.attempt)
    assert codes(tally) == ["IDLE"]


def test_tries_are_counted_and_the_first_failure_of_a_kind_dates_the_outage(tally: Tally, as_owner: AsOwner) -> None:
    """Try 4 of 6 because Spark is away since the first of these failures; an attempt that was fenced is no try."""
    tally.plan(1)
    fail(tally, 1, "SPARK_FAILED: out of memory")
    tally.start(1)
    fail(tally, 1, "SPARK_UNAVAILABLE: away")  # this attempt fences the one before
    since = causes(tally)[0].since
    fail(tally, 1, "SPARK_UNAVAILABLE: still away")
    (failed,) = causes(tally)
    assert "in attempt 4, in try 3 of 6: SPARK_UNAVAILABLE: still away." in failed.sentence
    assert failed.since == since

    tally.start(1)
    at_work, before = causes(tally)
    assert "attempt 5, in try 4 of 6" in at_work.sentence
    assert (before.code, before.error, before.since) == ("FAILED_BEFORE", "SPARK_UNAVAILABLE", since)

    seen = sa.update(tables.attempt)
    as_owner(seen.values(seen_at=sa.func.now() - sa.text("interval '5 minutes'")))
    silent = causes(tally)[0]
    assert (silent.code, silent.action.verb) == ("SILENT", "trigger")
    assert "It has not been heard of for more than 60 s" in silent.sentence
    as_owner(seen.values(seen_at=sa.func.now() + sa.text("interval '5 minutes'")))
    assert codes(tally)[0] == "IN_WORK"

    fail(tally, 1, "SOURCE_CHANGED: a.csv")
    assert "give the batch up" in causes(tally)[-1].advice
    tally.start(1)
    assert codes(tally) == ["IN_WORK", "FAILED_BEFORE"]
    assert "give the batch up" not in causes(tally)[-1].advice
    with pytest.raises(RangeRefused, match="has not failed"):
        tally.store.skip_batch(tally.spec, 1, "ann", "it is wrong")


def test_a_halted_batch_says_the_way_out_of_its_error(tally: Tally) -> None:
    tally.plan(2)
    tally.process(2)
    errors = [code for code in error_pages.codes() if remedies.code_of(code)]
    assert {"SOURCE_CHANGED", "RANGE_EXPIRED", "PERMANENT_ERROR"} <= set(errors)
    for error in errors:
        fail(tally, 1, f"{error}: something is wrong.")
        tally.store.halt_batch("tally", 1, f"{error}: something is wrong.")

        waits, halted = causes(tally, 2)
        assert (waits.code, halted.code, halted.error, halted.severity) == ("WAITS_FOR_TXID", "HALTED", error, "error")
        assert halted.sentence == f"Txid 1 waits for a person: {error}: something is wrong."
        verb = "skip" if error == "RANGE_EXPIRED" else "retry"
        assert (halted.action.verb, halted.action.txid) == (verb, 1)
        assert halted.command.startswith(f"tidegate {verb} tally 1")


def test_a_pause_is_the_root_unless_work_goes_on(tally: Tally) -> None:
    tally.store.pause("tally", "ann", "the warehouse is moved.")
    idle, paused = causes(tally)
    assert (idle.code, paused.code, paused.command) == ("IDLE", "PAUSED", "tidegate resume tally --reason ...")
    assert paused.sentence == "tally was paused by ann: the warehouse is moved. No run and no batch begins."
    tally.store.resume("tally", "ann", "it is there")
    tally.plan(2)
    tally.store.pause("tally", "ann", "again")
    assert codes(tally, 2) == ["PLANNED", "WAITS_FOR_TXID", "PLANNED", "PAUSED"]
    tally.store.resume("tally", "ann", "it is there")
    tally.start(1)
    tally.store.pause("tally", "ann", "again")
    assert codes(tally) == ["IN_WORK"]
    tally.process(1)
    assert codes(tally) == ["WAITS_FOR_COMMIT", "PAUSED"], "without a run, no other begins"

    tally.store.resume("tally", "ann", "it is there")
    tally.commit(1)
    tally.plan(1, run_id="later")
    fail_plan(tally, "RANGE_EXPIRED: the log is gone.")
    assert codes(tally) == ["PLANNED", "PLAN_FAILED"]
    assert codes(tally, 3) == ["PLANNED", "WAITS_FOR_TXID", "PLANNED", "PLAN_FAILED"]
    assert "give the batch up" not in causes(tally)[-1].advice
    tally.start(2)
    assert codes(tally) == ["IN_WORK", "PLAN_FAILED"]
    tally.store.halt_batch("tally", 2, "SOURCE_CHANGED: a.csv")
    assert codes(tally) == ["HALTED", "PLAN_FAILED"]
    assert [lag.failed_plans for lag in tally.store.lag(["tally"])] == [1]


def test_a_ready_batch_waits_to_be_merged_with_others(tally: Tally, as_owner: AsOwner) -> None:
    """As long as the ledger's turns say so. A changed declaration is the root: what was processed before is processed again."""
    tally.plan(3)
    tally.process(1)
    tally.commit(1)
    long = sa.text("interval '2 minutes'")
    as_owner(sa.update(tables.commit).values(merged_at=tables.commit.c.committed_at + long))
    tally.process(2, [SHOP])
    assert not tally.store.turn("tally", 2).opens
    assert codes(tally) == ["WAITS_TO_MERGE"]
    tally.process(3, [SHOP])
    assert codes(tally) == ["WAITS_FOR_COMMIT"]
    as_owner(sa.update(tables.pipeline).values(fingerprint="another"))
    stale, changed = causes(tally)
    assert (stale.code, changed.code, changed.command) == ("STALE", "DECLARATION_CHANGED", "tidegate migrate")
    as_owner(sa.update(tables.pipeline).values(fingerprint=tally.spec.fingerprint))

    for txid in (2, 3):
        tally.commit(txid)
    for txid in (1, 2, 3):
        tally.store.note_ack("tally", txid, 1)
    row = {"pipeline": "tally", "txid": 1, "reason": "<b>bad</b>", "payload": "x", "is_raw": True}
    as_owner(sa.insert(tables.quarantine).values([{**row, "number": number} for number in (1, 2)]))
    idle, waiting = causes(tally)
    assert (idle.code, waiting.code, waiting.severity) == ("IDLE", "QUARANTINED", "info")
    assert (waiting.sentence, waiting.action.verb) == ("2 bad records wait in quarantine.", "replay")


def fail_plan(tally: Tally, error: str, run_id: str = "run") -> None:
    assert tally.store.fail_plan("tally", tally.store.begin_plan("tally", run_id), run_id, error)


def test_a_pipeline_whose_plans_fail_is_not_idle(tally: Tally, as_owner: AsOwner) -> None:
    fail_plan(tally, "SOURCE_UNREADABLE: orders: the folder\nis gone.", "one\nrun")
    (once,) = causes(tally)
    assert (once.code, once.error, once.severity) == ("PLAN_FAILED", "SOURCE_UNREADABLE", "error")
    assert once.sentence == "Planning has failed (one run): SOURCE_UNREADABLE: orders: the folder is gone."
    assert (once.command, once.action.verb) == ("tidegate trigger tally --wait", "trigger")
    assert once.advice == "Make the source readable, as it is declared. Then start a run."
    fail_plan(tally, "SOURCE_UNAVAILABLE: orders: no answer.", "another")
    (again,) = causes(tally)
    assert again.sentence == "Planning has failed 2 times (another): SOURCE_UNAVAILABLE: orders: no answer."
    assert (again.severity, again.since) == ("warning", once.since)

    row = {"pipeline": "tally", "txid": 1, "reason": "bad", "payload": "x", "is_raw": True, "number": 1}
    tally.plan(1)
    tally.process(1)
    tally.commit(1)
    as_owner(sa.insert(tables.quarantine).values(row))
    assert codes(tally) == ["IDLE", "ACK_OUTSTANDING", "QUARANTINED"]  # a plan has succeeded
    fail_plan(tally, "ValueError: an author's")
    failed, *others = causes(tally)
    assert (failed.code, failed.error, [other.code for other in others]) == (
        *("PLAN_FAILED", None),
        ["ACK_OUTSTANDING", "QUARANTINED"],
    )
    assert failed.advice.startswith("Read the whole error (tidegate status --json)")
    tally.store.pause("tally", "ann", "the source is moved")
    assert codes(tally) == ["PLAN_FAILED", "ACK_OUTSTANDING", "QUARANTINED", "PAUSED"]


def test_a_loss_that_is_accepted_is_no_reason_any_more(tally: Tally, as_owner: AsOwner) -> None:
    as_owner(sa.update(tables.cursor).values(epoch="1/2/3"))
    fail_plan(tally, "HOLE_DETECTED: tally: this database was restored.")
    assert codes(tally)[0] == "HOLE_DETECTED"
    assert migrations.accept_epoch(tally.store.settings, "an operator")
    assert codes(tally) == ["IDLE"]


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


def test_what_is_not_there(tally: Tally) -> None:
    with pytest.raises(UnknownBatch, match="tally has no txid 7"):
        explain(tally.store, TALLY, 7)
    with pytest.raises(UnknownPipeline, match="There is no pipeline nothing"):
        explain(tally.store, "nothing")
    (unregistered,) = explain(tally.store, "flights").causes
    assert (unregistered.code, unregistered.error, unregistered.command) == (
        *("NOT_REGISTERED", "SCHEMA_OUT_OF_DATE"),
        "tidegate migrate",
    )
    assert [cause.code for cause in explain(tally.store, "tally").causes] == ["IDLE"]
    tally.plan(1)
    assert [cause.code for cause in explain(tally.store, "tally").causes] == ["PLANNED", "NOT_DECLARED"]


def test_code_that_cannot_be_loaded_is_the_root(tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_tally.py").write_text("raise ZeroDivisionError('by [bold]zero')\n")
    metadata = tmp_path / "broken-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[tidegate.pipelines]\ntally = broken_tally:PIPELINE\n")

    idle, broken = explain(tally.store, "tally").causes
    assert (idle.code, broken.code, broken.severity) == ("IDLE", "NOT_LOADED", "error")
    assert broken.sentence == "The code of tally cannot be loaded: ZeroDivisionError: by [bold]zero."
    assert root_causes(tally.store, ["tally"]) == {"tally": broken}


def test_advice_names_the_batch_and_no_way_out_that_is_none(tally: Tally) -> None:
    tally.plan(1)
    fail(tally, 1, "MALFORMED_RECORD: \x1b[31m<script>\n" + "x" * 100_000)
    (failed,) = causes(tally)
    assert len(failed.sentence) < LONGEST_QUOTE + 100
    assert failed.error == "MALFORMED_RECORD"
    fail(tally, 1, "MALFORMED_RECORD: " + "character " * 200)
    (failed,) = causes(tally)
    assert failed.sentence.endswith("character character...")

    fail(tally, 1, "ValueError: not ours")
    (failed,) = causes(tally)
    assert (failed.error, "tidegate inspect" in failed.advice) == (None, True)
    fail(tally, 1, "ZeroDivisionError: division by zero")
    (failed,) = causes(tally)
    assert "Read the whole error (tidegate inspect tally --txid 1) and fix its cause." in failed.advice
    fail(tally, 1, "SOURCE_CHANGED: it is another one.")
    (changed,) = causes(tally)
    assert 'or give the batch up (tidegate skip tally 1 --reason "..." --yes)' in changed.advice
    follower = replace(TALLY, source=Changes("shop.sales"))
    assert "skip" not in explain(tally.store, follower, 1).causes[0].advice
    planned = of_error(SourceChanged("Changes('shop.sales'): pipeline shop has lost its commit of txid 3."))
    assert planned.advice == "Put the source back as it was planned."

    assert {outcome.name for policies in OUTCOMES.values() for outcome in policies.values()} == {
        *("SKIP", "HALT", "AWAIT", "RETRY", "GO_ON")
    }
    planned = ["METADATA_CORRUPT", "MALFORMED_RECORD", "RANGE_EXPIRED", "SOURCE_CHANGED", "SOURCE_UNREADABLE", "ACCESS_REFUSED"]
    for code in [*planned, "SOURCE_UNAVAILABLE", "PARTITION_UNAVAILABLE", "SETTINGS_INVALID", "DECLARATION_CHANGED", None]:
        assert not re.search(r"\b(batch up|skip|retry|TXID)\b", remedies.fix_of_plan(code)), code


def test_the_number_of_statements_does_not_grow(store: StateStore, register: Callable[..., None]) -> None:
    states = TALLY.states
    pipelines = [
        replace(TALLY, name=f"tally_{number}", states={f"{name}_{number}": state for name, state in states.items()})
        for number in range(12)
    ]
    register(*pipelines)
    statements: list[str] = []
    sa.event.listen(store.engine, "before_cursor_execute", lambda _c, _cursor, statement, *_: statements.append(statement))
    numbers = []
    for shown in (1, 12):
        for pipeline in pipelines[:shown]:
            Tally(store, pipeline.spec).plan(5, run_id=f"run {shown}")
        statements.clear()
        assert {cause.code for cause in root_causes(store, pipelines[:shown]).values()} == {"PLANNED"}
        numbers.append(len(statements))
    assert numbers[0] == numbers[1]


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
