"""Batches are opened once, and the newest attempt owns a batch: nothing that older attempts do counts."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg2
import pytest

from tests import store as ledger
from tests.integration.conftest import ROW, TALLY, Tally, TallyOf, contents, frozen, holding, listening, until
from tests.store import MAX_METADATA_BYTES, MAX_TXID, STAGING_DROPS_PER_PLAN, BatchInput, Mode, NotStarted, attempts, errors
from tidegate import migrations
from tidegate.dags import further_batches
from tidegate.jobs import Pipeline, StateQuery
from tidegate.jobs.engine import worker
from tidegate.jobs.engine.processing import Done, Processed
from tidegate.state_store import Settings, StateStore


def seen_batch(txid: int) -> BatchInput:
    return BatchInput(txid, {}, b"digest", None)


@pytest.mark.promise("limit:MAX_METADATA_BYTES")
def test_a_plan_continues_what_was_opened_and_is_made_once(tally: Tally, settings: Settings) -> None:
    """A run gets its first answer again, whatever the source holds by now; a planner with a stale view has to look again."""
    open_batches = partial(tally.store.open_batches, tally.spec)
    assert tally.plan(2, run_id="monday") == [1, 2]
    before = contents(settings)
    assert open_batches("monday", [], seen_batch(2), frozen(3, 4)) == [1, 2]
    assert open_batches("monday", [], None, []) == [1, 2]
    assert tally.store.run_txids("tally", "monday") == [1, 2]
    assert open_batches("stale", [], None, frozen(1, 2, 3)) is None
    longest = MAX_METADATA_BYTES
    for seen, metadata, says in (
        (7, frozen(8), "tally has no txid 7 for others to follow: that would leave a gap"),
        (MAX_TXID, frozen(1), "tally has used up its txids"),
        (2, [*frozen(3), bytes(longest + 1)], f"takes {longest + 1} bytes, the limit is {longest}"),
    ):
        with pytest.raises(errors.RangeRefused, match=says):
            open_batches("next", [], seen_batch(seen), metadata)
    assert contents(settings) == before

    assert open_batches("stale", [], tally.store.last_opened("tally"), frozen(3)) == [3]
    assert tally.store.uncommitted("tally", 10) == [1, 2, 3]
    assert open_batches("next", [1, 2, 3], seen_batch(3), frozen(4)) == [1, 2, 3, 4]


def test_a_plan_that_runs_twice_at_once_is_one_plan(tally: Tally, settings: Settings, waiting: Callable[[], int]) -> None:
    tally.plan(2, run_id="before")
    faster = "INSERT INTO tidegate.run_batch (pipeline, run_id, position, txid) VALUES ('tally', 'run', 0, 1)"
    with holding(settings, faster) as twin, ThreadPoolExecutor(1) as thread:
        slower = thread.submit(tally.store.open_batches, tally.spec, "run", [1, 2], seen_batch(2), [])
        until(waiting)
        twin.commit()
        assert slower.result() is None, "it had seen one more batch"
    assert tally.store.open_batches(tally.spec, "run", [1, 2], seen_batch(2), []) == [1]


def test_a_plan_of_the_former_declaration_opens_nothing_during_a_migration(tally: Tally, waiting: Callable[[], int]) -> None:
    changed = replace(tally.spec, source_identity="elsewhere", version=2)
    with ThreadPoolExecutor(1) as thread:
        with migrations.connected(tally.store.settings) as connection:
            ledger.registration.register(connection, changed)
            planning = thread.submit(tally.plan)
            until(lambda: waiting() == 1)
        with pytest.raises(errors.DeclarationChanged):
            planning.result()


def test_an_attempt_that_reads_its_own_states_locks_batches_in_their_order(tally_of: TallyOf) -> None:
    """As a retirement does: of the two, none ends by a deadlock."""
    queried = replace(TALLY, transform=lambda rows: rows, queries=[StateQuery("tally.per_shop")])
    tally, locked = tally_of(queried).having(2, 1, 1), []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if "FROM tidegate.batch" in statement and "FOR NO KEY UPDATE" in statement:
            locked.append(parameters["txid_1"])

    with listening(tally.store, "before_cursor_execute", note):
        tally.start(2)
    assert locked == [1, 2]


FROZEN = frozen(1)[0]
# What is saved, and what the digest is of.
CORRUPTIONS = [
    *((content, FROZEN) for content in (FROZEN.replace(b"1", b"0", 1), FROZEN[:-1], b"", FROZEN + b" ")),
    (FROZEN, b"other"),
    *((content, content) for content in (b'{"metadata":{},"version":2}', b'{"metadata":{}}', b'{"version":1}', b"[1]")),
    *((content, content) for content in (b'{"version":1', b"", b'{"version":1,"metadata":{"a":"\xff"}}')),
    (frozen(2)[0], frozen(2)[0]),  # what no attempt has read
]


@pytest.mark.promise("I19", "fault:metadata-is-damaged:processing", "fault:metadata-is-damaged:commit")
@pytest.mark.promise("error:METADATA_CORRUPT")
def test_altered_metadata_halts_every_step_of_its_batch(tally: Tally) -> None:
    def alter(content: bytes, digest_of: bytes) -> None:
        tally.sql("UPDATE tidegate.batch SET source_metadata = %s, source_digest = sha256(%s)", [content, digest_of])

    tally.plan(1)
    for content in (b'{"metadata":{},"version":2}', b'{"metadata":{}}'):  # the digest is right; no attempt has read anything
        alter(content, content)
        says = r"tally 1: the saved source metadata has version .*, this code reads 1"
        tally.refuses(errors.MetadataCorrupt, says, partial(tally.start, 1))
    alter(FROZEN, FROZEN)
    tally.process(1, ROW)
    for content, digest_of in CORRUPTIONS:
        alter(content, digest_of)
        tally.refuses(
            errors.MetadataCorrupt,
            r"tally 1: the saved source metadata .* Restore tidegate\.batch from a backup\.",
            partial(tally.store.last_opened, "tally"),
            partial(tally.start, 1, mode="restage"),
            partial(tally.commit, 1),
            partial(tally.store.batch_history, "tally", 1),
        )


@pytest.mark.promise("I4", "error:ATTEMPT_FENCED", "I5", "decision:0002")
@pytest.mark.promise("fault:process-is-stopped-and-goes-on-later:processing")
def test_a_newer_attempt_fences_the_older_whenever_that_goes_on(tally: Tally) -> None:
    tally.plan(2)
    beside, older, newer = tally.start(2), tally.start(1), tally.start(1)
    assert (older.number, newer.number) == (1, 2)

    def zombie_stages() -> None:
        staged = tally.stage(older, "per_shop", [("a", 9, 9, 9, 9), ("zombie", 9, 9, 9, 9)])
        says = "tally 1:1 is fenced: attempt 2 owns the batch now"
        tally.refuses(errors.AttemptFenced, says, partial(tally.store.seal, older, [staged], attempts.Tracked(9)))

    zombie_stages()
    tally.store.seal(beside, [], attempts.Tracked(0))  # at another batch, which has a fence of its own
    tally.store.seal(newer, [tally.stage(newer, "per_shop", ROW)], attempts.Tracked(1))
    with pytest.raises(errors.AttemptFenced):
        tally.store.fail_attempt(older, "SPARK_UNAVAILABLE: gone")
    tally.store.fail_attempt(newer, "too late: it is sealed")
    found = [row["error"] for row in tally.store.batch_history("tally", 1).attempts]
    assert found == ["ATTEMPT_FENCED: attempt 2 took over.", None]
    zombie_stages()
    assert tally.commit(1).attempt == 2
    zombie_stages()
    assert tally.state() == [("a", 1, 1, 1, 1, 1)]


@pytest.mark.promise("I4")
def test_an_attempt_from_before_an_accepted_loss_is_fenced(tally: Tally, settings: Settings) -> None:
    tally.plan(1)
    attempt = tally.start(1)
    staged = tally.stage(attempt, "per_shop", ROW)
    tally.sql("UPDATE tidegate.cursor SET epoch = '7000000000000000000/00000001'")
    assert migrations.accept_epoch(settings, "an operator")
    tally.refuses(
        errors.AttemptFenced,
        "has begun another history",
        lambda: tally.store.seal(attempt, [staged], attempts.Tracked(1)),
        lambda: tally.store.fail_attempt(attempt, "SPARK_UNAVAILABLE: gone"),
    )
    assert tally.process(1, ROW).number == tally.commit(1).attempt == 2


@pytest.mark.promise("fault:process-dies-at-any-statement:processing")
def test_a_retry_keeps_what_was_sealed_and_begins_again_after_all_else(tally: Tally, settings: Settings) -> None:
    tally.plan(2)
    tally.start(1)
    tally.sql("INSERT INTO staging.per_shop_1_1 VALUES ('lost', 1, 1, 1, 1, 1)", role="tidegate_stager")
    sealed = tally.process(1, ROW)
    before = contents(settings)
    assert tally.store.start_attempt(tally.spec, 1, "again") is NotStarted.SEALED
    tally.store.seal(sealed, [], attempts.Tracked(99))  # its first answer was lost
    assert contents(settings) == before
    assert (tally.commit(1).key_count, sealed.number) == (1, 2)
    assert tally.state() == [("a", 1, 1, 1, 1, 1)]

    tally.start(2)
    failed = tally.start(2)
    staged = tally.stage(failed, "per_shop", ROW)
    tally.store.fail_attempt(failed, "MALFORMED_RECORD: line 7")
    tally.store.halt_batch("tally", 2, "MALFORMED_RECORD: line 7")
    says = "recorded as failed: MALFORMED_RECORD: line 7"
    tally.refuses(errors.AttemptFenced, says, partial(tally.store.seal, failed, [staged], attempts.Tracked(1)))
    assert tally.store.batch_statuses("tally")[-1].phase == "halted"
    tally.process(2)
    assert tally.process(2, mode="restage").number == 4
    assert tally.store.batch_statuses("tally")[-1].phase == "processed"


@pytest.mark.promise("I16", "error:DECLARATION_CHANGED", "fault:declaration-changed-in-between:processing")
@pytest.mark.promise("fault:declaration-changed-in-between:commit")
def test_after_a_deploy_neither_old_code_nor_old_partials_count(tally: Tally, settings: Settings, register: Callable) -> None:
    tally.having(2, 1)
    deployed = Tally(tally.store, replace(tally.spec, version=2))
    register(replace(TALLY, version=2))
    says = "tally: this code's declaration is not the registered one"
    _, *steps = tally.next_steps(1)
    tally.refuses(errors.DeclarationChanged, says, *steps, partial(tally.start, 1, mode="restage"))
    says = "tally 1:1 was computed by another declaration of the pipeline"
    deployed.refuses(errors.Unprocessed, says, partial(deployed.commit, 1))
    before = contents(settings)
    assert deployed.commit_ready() == []
    assert contents(settings) == before
    deployed.process(1, [("a", 2, 2, 2, 2)])  # although the newest is sealed
    assert deployed.commit(1).attempt == 2
    assert tally.state() == [("a", 2, 2, 2, 2, 1)]


@pytest.mark.promise("fault:clocks-step-by-any-amount:processing")
@pytest.mark.parametrize("step", ["-1 day", "1 day"])
def test_a_clock_that_steps_lets_no_second_attempt_count(tally: Tally, step: str) -> None:
    """Another may begin in the place of one that only seems to be silent: one of them counts."""
    tally.plan(1)
    first = tally.start(1)
    tally.sql(f"UPDATE tidegate.attempt SET started_at = started_at - interval '{step}', seen_at = seen_at - interval '{step}'")
    for attempt in (first, tally.store.start_attempt(tally.spec, 1, "another")):
        if isinstance(attempt, attempts.Attempt):
            with suppress(errors.AttemptFenced):
                tally.store.seal(attempt, [tally.stage(attempt, "per_shop", ROW)], attempts.Tracked(0))
    tally.commit(1)
    assert tally.state() == [("a", 1, 1, 1, 1, 1)]


LONG_AGO = (
    "UPDATE tidegate.commit SET committed_at = now() - interval '49 hours' WHERE txid < {0}; "
    "UPDATE tidegate.attempt SET started_at = now() - interval '50 hours' WHERE txid < {0}"
)
STAGING_TABLES = "SELECT array_agg(relname::text ORDER BY relname) FROM pg_class WHERE relname ~ '^per_shop_[0-9]_[0-9]$'"


@pytest.mark.promise("limit:STAGING_DROPS_PER_PLAN")
def test_a_plan_drops_the_staging_of_a_few_attempts(tally: Tally) -> None:
    tally.spec = replace(tally.spec, window=STAGING_DROPS_PER_PLAN + 1)
    tally.seal_empty(*tally.plan(STAGING_DROPS_PER_PLAN + 1))
    tally.commit_ready()
    tally.sql(LONG_AGO.format(STAGING_DROPS_PER_PLAN + 2))
    assert [tally.store.drop_old_staging(tally.spec) for _ in range(3)] == [STAGING_DROPS_PER_PLAN, 1, 0]


@pytest.mark.promise("I18", "decision:0002")
def test_staging_is_kept_until_its_batch_committed_and_the_retention_is_over(tally: Tally, settings: Settings) -> None:
    """Of two batches that committed two days ago, the first with two attempts, one that committed now, and one uncommitted."""
    tally.plan(4)
    tally.start(1)
    for txid in (1, 2, 3):
        tally.complete(txid, ROW)
    tally.process(4, ROW)
    tally.sql(LONG_AGO.format(3) + "; UPDATE tidegate.attempt SET started_at = now() - interval '1 year' WHERE txid = 4")
    state, drop = tally.state(), partial(tally.store.drop_old_staging, tally.spec)
    with StateStore.connect(replace(settings, staging_retention_hours=50)) as patient:
        assert patient.drop_old_staging(tally.spec) == 0
    tally.sql("UPDATE tidegate.attempt SET started_at = now() WHERE txid = 1 AND attempt = 2")
    with holding(settings, "SELECT FROM staging.per_shop_1_1", "tidegate_stager"):
        assert drop() == 1
        assert tally.sql(STAGING_TABLES) == [(["per_shop_1_1", "per_shop_1_2", "per_shop_3_1", "per_shop_4_1"],)]
    assert drop() == 1
    tally.sql("UPDATE tidegate.attempt SET started_at = now() - interval '50 hours' WHERE txid = 1")
    assert [drop(), drop()] == [1, 0]
    assert tally.sql(STAGING_TABLES) == [(["per_shop_3_1", "per_shop_4_1"],)]
    assert tally.state() == state
    assert tally.commit(1).already_committed
    tally.commit(4)


def test_staging_of_a_state_that_is_not_declared_any_more_is_dropped(tally: Tally, register: Callable[..., None]) -> None:
    tally.having(1, 1)
    fewer = replace(TALLY, states={"per_shop": TALLY.states["per_shop"]})
    mine = Pipeline("mine", TALLY.source, states={"my_days": TALLY.states["per_day"]})
    register(fewer, mine)
    other, tally.spec = Tally(tally.store, mine.spec), fewer.spec
    other.plan()
    other.process(1, my_days=[])
    tally.process(1, per_shop=ROW)
    tally.commit(1)
    tally.sql(LONG_AGO.format(2))
    assert tally.store.drop_old_staging(tally.spec) == 2
    assert tally.sql("SELECT relname FROM pg_class WHERE relnamespace = 'staging'::regnamespace") == [("my_days_1_1",)]


def test_texts_are_staged_as_utf8_whatever_the_session_has(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role, a database, the server or PGCLIENTENCODING may set another: the bytes would be taken for other characters."""
    tally.sql(f"ALTER DATABASE {tally.store.settings.pg_database} SET client_encoding = 'LATIN1'", role="postgres")
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    tally.having(1, 1, 1, shops=[("Zürich €", 1, 1, 1, 1)])
    assert [row[0] for row in tally.state()] == ["Zürich €"]


OTHER = "tidegate another"


def start_elsewhere(tally: Tally, txid: int) -> attempts.Attempt:
    """Start an attempt as of another process, by the name of its session."""
    attempt = tally.start(txid)
    tally.sql(f"UPDATE tidegate.attempt SET session = '{OTHER}' WHERE txid = {txid}")
    return attempt


def unbegun(tally: Tally, run_id: str = "run") -> list[int]:
    found = [0]
    while (txid := tally.store.next_unbegun("tally", run_id, after=found[-1])) is not None:
        found.append(txid)
    return found[1:]


@pytest.mark.promise("performance:task-that-is-finished-goes-on-with")
def test_an_idle_task_finds_the_batches_that_no_task_has_begun_in_order(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that has helped for long gives its place back, which other pipelines may need; the batches are not lost."""
    tally.plan(6)
    tally.plan(1, run_id="another")
    monkeypatch.setattr(further_batches, "LONGEST_SECONDS", 0.0)
    further_batches.process_further_batches(worker.Worker(tally.store, TALLY, "helper"), "run")
    assert unbegun(tally) == [1, 2, 3, 4, 5, 6]
    tally.complete(1)
    tally.start(3)
    tally.fail(5)
    assert tally.store.give_up("tally", 5, "the pipeline's policy", "its file is bad")
    assert [unbegun(tally, run_id) for run_id in ("run", "another", "no such run")] == [[2, 4, 6], [7], []]

    tally.process(2)
    tally.fail(6, "STORE_UNAVAILABLE: gone", is_poison=False)
    begun = [tally.store.start_attempt(tally.spec, txid, "slow", mode="first") for txid in (3, 5, 2, 6)]
    assert begun == [NotStarted.BEGUN, NotStarted.GIVEN_UP, NotStarted.SEALED, NotStarted.BEGUN]
    assert len(tally.store.batch_history("tally", 3).attempts) == 1


@pytest.mark.parametrize("end", ["killed", "suspended"])
def test_a_process_that_is_gone_holds_no_other_up(tally: Tally, settings: Settings, end: str) -> None:
    tally.plan(1)
    with closing(psycopg2.connect(**settings.conninfo(), application_name=OTHER)) as session:
        start_elsewhere(tally, 1)
        assert tally.store.is_in_work("tally", 1)
        last_seen = {"killed": "1 hour", "suspended": "-61 s"}[end]
        tally.sql(f"UPDATE tidegate.attempt SET seen_at = now() + interval '{last_seen}'")
        if end == "killed":
            session.close()
        until(lambda: not tally.store.is_in_work("tally", 1))
        assert not tally.store.processing([("tally", 1)])["tally", 1].is_in_work


@pytest.mark.promise("limit:POLL_SECONDS")
def test_who_would_process_a_batch_waits_for_the_process_at_work(tally: Tally, settings: Settings) -> None:
    """Until that has ended, or has taken longer than an attempt may, or the wait is stopped; decided under the batch's lock."""
    tally.plan(2)

    def process(txid: int, stopped: threading.Event, *, seconds: int = 60) -> list[str]:
        got: list[str] = []

        def step(mode: Mode) -> Processed:
            begun = tally.store.start_attempt(tally.spec, txid, "test", mode=mode)
            got.append(begun.name if isinstance(begun, NotStarted) else "attempt")
            return Processed("tally", txid, None, begun if isinstance(begun, NotStarted) else Done.SEALED)

        impatient = worker.Worker(tally.store, replace(TALLY, message_timeout_seconds=seconds), "test")
        impatient.after_others(txid, step, stopped=stopped)
        return got

    goes_on, stopped = threading.Event(), threading.Event()
    stopped.set()
    with closing(psycopg2.connect(**settings.conninfo(), application_name=OTHER)), ThreadPoolExecutor(1) as pool:
        attempt = start_elsewhere(tally, 1)
        waits = pool.submit(process, 1, goes_on)
        with pytest.raises(TimeoutError):
            waits.result(3 * worker.POLL_SECONDS)
        tally.store.seal(attempt, [], attempts.Tracked(0))
        assert waits.result(30) == ["IN_WORK", "SEALED"]
        start_elsewhere(tally, 2)
        assert process(2, stopped) == ["IN_WORK"]
        began_at = time.monotonic()
        assert process(2, goes_on, seconds=1) == ["IN_WORK", "attempt"]
        assert 1 <= time.monotonic() - began_at < 30
