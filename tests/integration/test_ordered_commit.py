"""The ordered commit counts each txid once, in order and whole, whatever happens to the connection."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import sqlalchemy as sa

from tests.chaos.wire import Wire
from tests.integration.conftest import BIGINT_MAX, ROW, TALLY, Tally, contents, holding, merge_steps, stopped, until
from tests.store import Commit, Tracked, errors, schema_revision
from tidegate.explain import why
from tidegate.state_store import Settings, StateStore


@pytest.mark.promise("performance:nothing-is-checked-per-row-that-is", "I3", "error:COMMIT_OUT_OF_ORDER", "I8")
@pytest.mark.promise("fault:process-dies-at-any-statement:after")
def test_batches_add_up_in_txid_order(tally: Tally, settings: Settings) -> None:
    tally.plan(3)
    tally.process(2, [("b", 1, 7, 7, 7), ("c", 1, -1, -1, -1)], [("2013-01-01", 1), ("2013-01-02", 1)])
    tally.process(3, ROW)
    for txid in (3, 2):
        early = rf"tally cannot commit txid {txid}: 0 is the last.*until {txid - 1} .*tidegate inspect tally"
        tally.refuses(errors.CommitOutOfOrder, early, partial(tally.commit, txid))

    tally.process(1, [("a", 2, 30, 10, 20), ("b", 1, 5, 5, 5)], [("2013-01-01", 3)])
    done: list[Commit] = []
    steps = merge_steps(tally, lambda: done.append(tally.commit(1)))
    assert [step["Node Type"] for step in steps] == ["ModifyTable", "Sort", "Seq Scan"]
    done.append(tally.commit(2))
    assert tally.state() == [("a", 2, 30, 10, 20, 1), ("b", 2, 12, 5, 7, 2), ("c", 1, -1, -1, -1, 2)]
    assert [(day.day, sold, txid) for day, sold, txid in tally.state("per_day")] == [(1, 4, 2), (2, 1, 2)]
    assert [(commit.txid, commit.key_count, commit.already_committed) for commit in done] == [(1, 3, False), (2, 4, False)]
    assert tally.store.committed("tally") == 2

    before, repeated = contents(settings), [replace(commit, already_committed=True) for commit in done]
    assert [tally.commit(1), tally.commit(2)] == repeated
    assert [tally.store.start_attempt(tally.spec, txid, "late", mode="restage") for txid in (1, 2)] == repeated
    assert contents(settings) == before


@pytest.mark.promise("I15")
def test_a_ledger_that_is_not_that_of_the_code_commits_nothing(tally: Tally) -> None:
    """A process that has connected before is refused as a new one is; so is a pipeline that has lost a state."""
    tally.plan(1)
    attempt, commit = tally.start(1), partial(tally.commit, 1)
    tally.store.seal(attempt, [tally.stage(attempt, "per_shop", ROW, partition=number) for number in (0, 1)], Tracked(2))
    tally.refuses(errors.PermanentError, "cannot affect row a second time", commit)  # a key that was not grouped
    tally.process(1, ROW, mode="restage")
    tally.sql("UPDATE tidegate.alembic_version SET version_num = '0123456789ab'")
    says = r"made by another revision .*schema\.sql 0123456789ab.*restart the stack"
    tally.refuses(errors.SchemaOutOfDate, says, commit, tally.commit_ready)
    tally.sql("UPDATE tidegate.alembic_version SET version_num = %s", [schema_revision.DIGEST])
    tally.sql("DELETE FROM tidegate.state_table WHERE state = 'per_day'")  # which the commit would not touch
    tally.refuses(errors.DeclarationChanged, "tally does not own the states it declares", commit)


@pytest.mark.promise("I7", "I20", "error:ATTEMPT_NOT_SEALED", "error:UNKNOWN_BATCH", "limit:LONGEST_SILENCE_SECONDS")
def test_only_a_sealed_attempt_commits(tally: Tally) -> None:

    def commit_is_refused(error: type[Exception], match: str) -> None:
        tally.refuses(error, match, partial(tally.commit, 1))

    commit_is_refused(errors.UnknownBatch, "tally has no txid 1")
    with pytest.raises(errors.SchemaOutOfDate, match=r"Pipeline other is not registered in this database\. Run: tidegate"):
        tally.store.commit_batch(replace(tally.spec, name="other"), 1, "test")
    tally.plan(1)
    commit_is_refused(errors.Unprocessed, "tally 1 has not been processed yet")
    tally.fail(1)
    commit_is_refused(errors.Unprocessed, r"tally 1:1 failed: MALFORMED_RECORD: a\.csv, line 3\.")

    attempt = tally.start(1)
    tally.stage(attempt, "per_shop", ROW)
    commit_is_refused(errors.AttemptNotSealed, r"tally 1:2 is still processing \(test, for \d+ s\)")
    tally.sql("UPDATE tidegate.attempt SET seen_at = now() - interval '61 s'")
    commit_is_refused(errors.Unprocessed, r"tally 1:2 has not been heard of for 6\d s: its process \(test\) died")
    assert tally.store.keep_alive(attempt)
    commit_is_refused(errors.AttemptNotSealed, "tally 1:2 is still processing")
    tally.sql("UPDATE tidegate.attempt SET started_at = now() - interval '3601 s'")
    commit_is_refused(errors.Unprocessed, "tally 1:2 has not ended within 3600 s")
    tally.start(1)
    assert not tally.store.keep_alive(attempt)


@pytest.mark.promise("I2", "I3", "fault:airflow-loses-repeats-or-reorders-tasks:commit", "decision:0001")
def test_many_committers_of_many_txids_make_one_commit_each(tally: Tally, settings: Settings) -> None:
    tally.having(4, 4, shops=[(f"shop {number}", 1, 2, 2, 2) for number in range(200)])
    start = threading.Barrier(12)

    def commit(txid: int) -> tuple[int, bool]:
        with StateStore.connect(settings) as store:
            start.wait()
            while True:
                with suppress(errors.CommitOutOfOrder):
                    return txid, store.commit_batch(tally.spec, txid, "test").already_committed

    with ThreadPoolExecutor(12) as threads:
        outcomes = sorted(threads.map(commit, [4, 3, 2, 1] * 3))

    assert outcomes == [(txid, is_repeated) for txid in (1, 2, 3, 4) for is_repeated in (False, True, True)]
    assert {row[1:] for row in tally.state()} == {(4, 8, 2, 2, 4)}
    commits = "SELECT array_agg(txid ORDER BY xmin::text::bigint), sum(key_count) FROM tidegate.commit"
    assert tally.sql(commits) == [([1, 2, 3, 4], 800)]


DAMAGE = [
    "DROP TABLE {day}",
    "TRUNCATE {shop}",
    "DELETE FROM {shop} WHERE shop = 'a'",
    "INSERT INTO {shop} SELECT 'z', 1, 1, 1, 1, task_attempt FROM {shop} LIMIT 1",
    "UPDATE {shop} SET cents = cents + 1 WHERE shop = 'b'",
    "UPDATE {shop} SET least = most, most = least WHERE shop = 'b'",
    "UPDATE {shop} SET shop = 'A' WHERE shop = 'a'",
    "UPDATE {shop} SET sold = 5 - sold WHERE shop <> 'c'",  # a and b change places
    "UPDATE {shop} SET least = NULL WHERE shop = 'b'",
    "UPDATE {shop} SET least = most, most = NULL WHERE shop = 'c'",
    "UPDATE {shop} SET task_attempt = task_attempt + 1 WHERE shop = 'a'",
]


@pytest.mark.promise("I7", "fault:staging-is-lost-or-damaged:processing", "error:UNPROCESSED")
@pytest.mark.promise("performance:digests-of-staging-are-chained-hashes-of")
def test_staging_that_differs_from_its_seal_never_counts(tally: Tally) -> None:
    shops = [("a", 1, 3, 3, 3), ("b", 4, 10, 1, 9), ("c", 1, 0, None, 5)]
    tally.plan(1)
    for number, damage in enumerate(DAMAGE, start=1):
        tally.process(1, shops, [("2013-01-01", 5)], mode="restage")
        tally.sql(damage.format(shop=f"staging.per_shop_1_{number}", day=f"staging.per_day_1_{number}"), role="tidegate")
        lost = rf"staging of state per_(shop|day), batch 1, attempt {number} cannot be used: .* again\."
        tally.refuses(errors.Unprocessed, lost, partial(tally.commit, 1), tally.commit_ready)
    tally.process(1, shops, [("2013-01-01", 5)], mode="restage")
    assert tally.commit(1).attempt == len(DAMAGE) + 1
    assert tally.state() == [(*row, 1) for row in shops]


@pytest.mark.promise("I7", "fault:spark-task-runs-twice-or-is-speculated:processing")
@pytest.mark.promise("fault:spark-task-runs-twice-or-is-speculated:commit")
def test_rows_that_no_seal_names_do_not_count(tally: Tally, caplog: pytest.LogCaptureFixture) -> None:
    tally.plan(1)
    attempt, other = tally.start(1), [("b", 1, 1, 1, 1)]
    tally.stage(attempt, "per_shop", ROW + other)
    staged = [tally.stage(attempt, "per_shop", rows, partition=number) for number, rows in enumerate([ROW, other])]
    tally.store.seal(attempt, staged, Tracked(2))
    late = tally.stage(attempt, "per_shop", [("c", 1, 1, 1, 1)])
    assert tally.commit(1).key_count == 2
    assert tally.state() == [("a", 1, 1, 1, 1, 1), ("b", 1, 1, 1, 1, 1)]
    assert f"1:1: Spark's task attempt {late.task_attempt} staged 1 rows of per_shop too; no seal names it" in caplog.text
    assert caplog.text.count("no seal names it") == 2


@pytest.mark.promise("I9", "I14", "fault:another-program-writes-state-table:commit", "decision:0001")
@pytest.mark.promise("fault:another-program-writes-state-table:after", "error:GUARD_MISMATCH", "error:HOLE_DETECTED")
def test_a_state_or_a_cursor_that_disagrees_with_the_commits_halts(tally: Tally) -> None:
    """Another writer's row is not skipped silently (I14); a ledger that was edited neither repeats nor skips a batch (I9)."""
    tally.having(3, 3, 2, shops=[("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1), ("c", 1, 1, 1, 1)])
    write = "SET tidegate.writer = tally; UPDATE state.per_shop SET txid = {} WHERE shop = 'b'"
    for txid in (3, 4, BIGINT_MAX):
        tally.sql(write.format(txid))
        says = r"tally 3:1: 1 of 3 rows of state\.per_shop carry a txid of at least 3 already"
        tally.refuses(errors.GuardMismatch, says, partial(tally.commit, 3))
    tally.sql(write.format(2))
    lose = "DELETE FROM tidegate.commit WHERE txid = 2"
    for cursor, commits in (
        ("txid = 1", {2: "1, but the ledger committed 2", 3: "1, but the ledger committed 2"}),
        ("txid = 0", {1: "0, but the ledger committed 2"}),
        (f"txid = 2; {lose}", {2: "2, but txid 2 has no commit record", 3: "2, but the ledger committed 1"}),
    ):
        tally.sql(f"UPDATE tidegate.cursor SET {cursor}")
        for txid, says in commits.items():
            tally.refuses(errors.HoleDetected, f"tally: the cursor is at txid {says}", partial(tally.commit, txid))
        tally.refuses(errors.HoleDetected, r"tally: the cursor is at txid \d, but the ledger committed \d", tally.commit_ready)


@pytest.fixture
def ready(tally: Tally) -> Tally:
    return tally.having(2, 2, 1)


AFTER_BOTH = [("a", 2, 2, 1, 1, 2)]
WAITS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND {}"
# Commits wait for a session that holds this lock after everything else, in the COMMIT itself.
LOCK = "SELECT pg_advisory_xact_lock(7)"
IN_COMMIT = """
CREATE FUNCTION public.waits() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON tidegate.commit DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION public.waits()
"""


@pytest.mark.promise("I10", "fault:connection-breaks-before-commit-arrives:commit")
def test_a_connection_that_ends_before_its_commit_arrives_commits_nothing(ready: Tally, settings: Settings) -> None:
    wire = Wire(lambda: (settings.pg_host, settings.pg_port))
    with StateStore.connect(replace(settings, pg_port=wire.port)) as store:
        sa.event.listen(store.engine, "commit", lambda _: wire.cut(), once=True)
        ready.refuses(errors.StoreUnavailable, "", lambda: store.commit_batch(ready.spec, 2, "test"))
        assert store.commit_batch(ready.spec, 2, "test").already_committed is False
    assert ready.state() == AFTER_BOTH


@pytest.mark.promise("I10", "fault:connection-breaks-before-answer-arrives:commit")
@pytest.mark.parametrize("lands", [True, False])
def test_the_outcome_of_a_commit_whose_answer_is_lost_is_waited_for(
    ready: Tally, settings: Settings, waiting: Callable[[], int], caplog: pytest.LogCaptureFixture, lands: bool
) -> None:
    """It is open while the server holds the transaction: who looks it up waits for the cursor's lock (I10)."""
    ready.sql(IN_COMMIT, role="postgres")
    wire = Wire(lambda: (settings.pg_host, settings.pg_port))
    with (
        caplog.at_level(logging.WARNING),
        holding(settings, LOCK) as holder,
        StateStore.connect(replace(settings, pg_port=wire.port)) as store,
        ThreadPoolExecutor(1) as thread,
    ):
        commit = thread.submit(store.commit_batch, ready.spec, 2, "first")
        ((pid,),) = until(lambda: ready.sql(WAITS.format("query = 'COMMIT'"), role="postgres"))
        wire.cut()
        until(lambda: waiting() == 2)
        if not lands:
            assert ready.sql("SELECT pg_terminate_backend(%s, 5000)", [pid], role="postgres") == [(True,)]
        holder.rollback()
        if lands:
            found = commit.result(60)
            assert (found.txid, found.attempt, found.key_count, found.already_committed) == (2, 1, 1, True)
            assert store.commit_batch(ready.spec, 2, "second") == found
            assert "The cursor says that it committed." in caplog.text
        else:
            with pytest.raises(errors.StoreUnavailable):
                commit.result(60)
            assert store.commit_batch(ready.spec, 2, "second").already_committed is False
    assert ready.state() == AFTER_BOTH
    assert ready.sql("SELECT owner FROM tidegate.commit WHERE txid = 2") == [("first" if lands else "second",)]


@pytest.mark.promise("I10", "fault:postgres-backend-is-stopped:commit")
@pytest.mark.parametrize(
    ("lock", "waits"),
    [(LOCK, "query = 'COMMIT'"), ("LOCK TABLE state.per_shop", "query ~ 'INSERT INTO state'")],
    ids=["commit", "merge"],
)
def test_a_commit_whose_process_is_stopped_is_given_up_and_looked_up(
    ready: Tally, settings: Settings, monkeypatch: pytest.MonkeyPatch, lock: str, waits: str
) -> None:
    """It may still commit when it goes on; until then it is neither failed nor done, and `why` names the session."""
    monkeypatch.setattr("tidegate.state_store.store.RESOLVE_TRIES", 1)
    monkeypatch.setattr("tidegate.state_store.connections.database.MARGIN_SECONDS", 1)
    ready.sql(IN_COMMIT, role="postgres")
    impatient = replace(settings, commit_timeout_seconds=2, lock_timeout_seconds=1)
    with StateStore.connect(impatient) as store, ThreadPoolExecutor() as threads, holding(settings, lock) as holder:
        commit = threads.submit(store.commit_batch, ready.spec, 2, "test")
        ((pid,),) = until(lambda: ready.sql(WAITS.format(waits), role="postgres"))
        with stopped(pid):
            holder.rollback()
            with pytest.raises(errors.StoreUnavailable, match=rf"session {pid} .*kill -CONT {pid}"):
                commit.result(60)
            assert f"Session {pid} of Postgres holds its cursor" in why.explain(ready.store, TALLY).causes[0].sentence
            assert store.poison_tries("tally", 2) == 0
    ready.commit(2)  # or hears that it has
    assert ready.state() == AFTER_BOTH


@pytest.mark.promise("I20", "fault:process-is-stopped-and-goes-on-later:commit")
def test_a_committer_that_is_paused_loses_its_transaction(ready: Tally, settings: Settings) -> None:
    done: list[Commit] = []
    with StateStore.connect(replace(settings, idle_timeout_seconds=1)) as paused:
        sa.event.listen(paused.engine, "commit", lambda _: done.append(ready.commit(2)), once=True)
        assert paused.commit_batch(ready.spec, 2, "slow").already_committed
    assert [commit.already_committed for commit in done] == [False]
    assert ready.state() == AFTER_BOTH


def test_a_limit_on_whole_transactions_does_not_stop_a_commit(ready: Tally, settings: Settings) -> None:
    if ready.sql("SELECT current_setting('server_version_num')::int < 170000") == [(True,)]:
        pytest.skip("this server has no transaction_timeout")
    ready.sql(f"ALTER DATABASE {settings.pg_database} SET transaction_timeout = '500ms'", role="postgres")
    with StateStore.connect(replace(settings, lock_timeout_seconds=59)) as store:
        sa.event.listen(store.engine, "commit", lambda _: time.sleep(1))
        assert store.commit_batch(ready.spec, 2, "test").already_committed is False


def test_a_batch_that_could_still_commit_is_not_skipped(tally: Tally) -> None:
    tally.having(3, 2, 1)
    tally.store.halt_batch("tally", 3, "SOURCE_CHANGED: a.csv")
    for txid in (2, 3):  # one that has not failed, one whose turn it is not
        skip = partial(tally.store.skip_batch, TALLY.spec, txid, "an operator", "out of impatience")
        tally.refuses(errors.RangeRefused, r"has not failed|waits for txid 2", skip)
