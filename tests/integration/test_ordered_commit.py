"""The ordered commit counts each txid once, in order and whole, whatever happens to the connection."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import sqlalchemy as sa

from tests.integration.conftest import (
    BIGINT_MAX,
    IN_COMMIT,
    PATIENCE_SECONDS,
    TALLY,
    WAITS,
    Execute,
    Tally,
    contents,
    holding,
    merge_steps,
    refused,
    until,
)
from tests.relay import Relay
from tests.store import Commit, Tracked
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    AttemptNotSealed,
    CommitOutOfOrder,
    DeclarationChanged,
    GuardMismatch,
    HoleDetected,
    PermanentError,
    RangeRefused,
    SchemaOutOfDate,
    StoreUnavailable,
    UnknownBatch,
    Unprocessed,
)


@pytest.mark.promise(
    "performance:nothing-is-checked-per-row-that-is",
    "I3",
    "error:COMMIT_OUT_OF_ORDER",
    "I8",
    "fault:process-dies-at-any-statement:after",
)
def test_batches_add_up_in_txid_order(tally: Tally, settings: Settings) -> None:
    """Each commit merges its partials into the existing rows and stamps them; other rows keep their txid."""
    tally.plan(3)
    tally.process(2, [("b", 1, 7, 7, 7), ("c", 1, -1, -1, -1)], [("2013-01-01", 1), ("2013-01-02", 1)])
    tally.process(3, [("a", 1, 1, 1, 1)])
    with refused(settings, CommitOutOfOrder, r"tally cannot commit txid 3: 0 is the last.*until 2 .*tidegate inspect tally"):
        tally.commit(3)
    with refused(settings, CommitOutOfOrder, "tally cannot commit txid 2"):
        tally.commit(2)

    tally.process(1, [("a", 2, 30, 10, 20), ("b", 1, 5, 5, 5)], [("2013-01-01", 3)])
    done: list[Commit] = []
    steps = merge_steps(tally, lambda: done.append(tally.commit(1)))
    assert [step["Node Type"] for step in steps] == ["ModifyTable", "Sort", "Seq Scan"]
    done.append(tally.commit(2))
    assert tally.state() == [("a", 2, 30, 10, 20, 1), ("b", 2, 12, 5, 7, 2), ("c", 1, -1, -1, -1, 2)]
    days = [(str(day), sold, txid) for day, sold, txid in tally.state("per_day")]
    assert days == [("2013-01-01", 4, 2), ("2013-01-02", 1, 2)]
    assert [(commit.txid, commit.key_count, commit.already_committed) for commit in done] == [(1, 3, False), (2, 4, False)]
    assert tally.store.committed("tally") == 2

    before, repeated = contents(settings), [replace(commit, already_committed=True) for commit in done]
    assert [tally.commit(1), tally.commit(2)] == repeated
    assert [tally.store.start_attempt(tally.spec, txid, "late", mode="restage") for txid in (1, 2)] == repeated
    assert contents(settings) == before


@pytest.mark.promise("I15")
def test_a_ledger_that_is_not_that_of_the_code_commits_nothing(tally: Tally, settings: Settings, as_role: Execute) -> None:
    """A process that has connected before is refused as a new one is; so is a pipeline that has lost a state."""
    tally.plan(1)
    attempt = tally.start(1)
    staged = [tally.stage(attempt, "per_shop", [("a", 1, 1, 1, 1)], partition=number) for number in (0, 1)]
    tally.store.seal(attempt, staged, Tracked(2))

    with refused(settings, PermanentError, "cannot affect row a second time"):  # one key in two partitions: it was not grouped
        tally.commit(1)
    tally.process(1, [("a", 1, 1, 1, 1)], mode="restage")
    ((version,),) = as_role("tidegate_owner", "SELECT version_num FROM tidegate.alembic_version")
    as_role("tidegate_owner", "UPDATE tidegate.alembic_version SET version_num = '0123456789ab'")
    with refused(settings, SchemaOutOfDate, r"schema\.sql 0123456789ab.*restart the stack"):
        tally.commit(1)
    with refused(settings, SchemaOutOfDate, "made by another revision"):
        tally.store.commit_ready(tally.spec, "test")
    as_role("tidegate_owner", "UPDATE tidegate.alembic_version SET version_num = %s", [version])
    as_role("tidegate_owner", "DELETE FROM tidegate.state_table WHERE state = 'per_day'")
    with refused(settings, DeclarationChanged, "tally does not own the states it declares"):
        tally.commit(1)  # although it would not touch that state


@pytest.mark.promise("I7", "I20", "error:ATTEMPT_NOT_SEALED", "error:UNKNOWN_BATCH", "limit:LONGEST_SILENCE_SECONDS")
def test_only_a_sealed_attempt_commits(tally: Tally, settings: Settings, as_role: Execute) -> None:
    """One that is at work is waited for (I7), until it has failed, or is silent or at work for too long (I20)."""

    def commit_is_refused(error: type[Exception], match: str) -> None:
        with refused(settings, error, match=match):
            tally.commit(1)

    commit_is_refused(UnknownBatch, "tally has no txid 1")
    with pytest.raises(SchemaOutOfDate, match=r"Pipeline other is not registered in this database\. Run: tidegate migrate"):
        tally.store.commit_batch(replace(tally.spec, name="other"), 1, "test")
    tally.plan(1)
    commit_is_refused(Unprocessed, "tally 1 has not been processed yet")
    tally.store.fail_attempt(tally.start(1), "MALFORMED_RECORD: a.csv, line 7.")
    commit_is_refused(Unprocessed, r"tally 1:1 failed: MALFORMED_RECORD: a\.csv, line 7\.")

    attempt = tally.start(1)
    tally.stage(attempt, "per_shop", [("a", 1, 1, 1, 1)])
    commit_is_refused(AttemptNotSealed, r"tally 1:2 is still processing \(test, for \d+ s\)")
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET seen_at = now() - interval '61 s'")
    commit_is_refused(Unprocessed, r"tally 1:2 has not been heard of for 6\d s: its process \(test\) died")
    assert tally.store.keep_alive(attempt)
    commit_is_refused(AttemptNotSealed, "tally 1:2 is still processing")
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET started_at = now() - interval '3601 s'")
    commit_is_refused(Unprocessed, "tally 1:2 has not ended within 3600 s")
    tally.start(1)
    assert not tally.store.keep_alive(attempt)


@pytest.mark.promise("I2", "I3", "fault:airflow-loses-repeats-or-reorders-tasks:commit", "decision:0001")
def test_many_committers_of_many_txids_make_one_commit_each(tally: Tally, settings: Settings, as_role: Execute) -> None:
    """One of a txid commits, the others see that it has, and who is too early is refused and retries (I2, I3)."""
    txids = tally.plan(4)
    for txid in txids:
        tally.process(txid, [(f"shop {number}", 1, txid, txid, txid) for number in range(200)])
    start = threading.Barrier(12)

    def commit(txid: int) -> tuple[int, bool]:
        with StateStore.connect(settings) as store:
            start.wait()
            while True:
                with suppress(CommitOutOfOrder):
                    return txid, store.commit_batch(tally.spec, txid, "test").already_committed

    with ThreadPoolExecutor(12) as threads:
        outcomes = sorted(threads.map(commit, [*reversed(txids)] * 3))

    assert outcomes == [(txid, is_repeated) for txid in txids for is_repeated in (False, True, True)]
    assert {row[1:] for row in tally.state()} == {(4, 10, 1, 4, 4)}
    commits = "SELECT array_agg(txid ORDER BY xmin::text::bigint), sum(key_count) FROM tidegate.commit"
    assert as_role("tidegate_owner", commits) == [(txids, 800)]


DAMAGE = {
    "table dropped": "DROP TABLE {day}",
    "table emptied": "TRUNCATE {shop}",
    "row deleted": "DELETE FROM {shop} WHERE shop = 'a'",
    "row added": "INSERT INTO {shop} SELECT 'z', 1, 1, 1, 1, task_attempt FROM {shop} LIMIT 1",
    "value altered": "UPDATE {shop} SET cents = cents + 1 WHERE shop = 'b'",
    "values swapped": "UPDATE {shop} SET least = most, most = least WHERE shop = 'b'",
    "key altered": "UPDATE {shop} SET shop = 'A' WHERE shop = 'a'",
    "key and value change places": "UPDATE {shop} SET sold = 5 - sold WHERE shop <> 'c'",
    "value set to NULL": "UPDATE {shop} SET least = NULL WHERE shop = 'b'",
    "value moved beside its NULL": "UPDATE {shop} SET least = most, most = NULL WHERE shop = 'c'",
    "task attempt altered": "UPDATE {shop} SET task_attempt = task_attempt + 1 WHERE shop = 'a'",
}


@pytest.mark.promise(
    "I7",
    "fault:staging-is-lost-or-damaged:processing",
    "error:UNPROCESSED",
    "performance:digests-of-staging-are-chained-hashes-of",
)
def test_staging_that_differs_from_its_seal_never_counts(tally: Tally, settings: Settings, as_role: Execute) -> None:
    shops = [("a", 1, 3, 3, 3), ("b", 4, 10, 1, 9), ("c", 1, 0, None, 5)]
    tally.plan(1)
    for number, damage in enumerate(DAMAGE.values(), start=1):
        tally.process(1, shops, [("2013-01-01", 5)], mode="restage")
        as_role("tidegate", damage.format(shop=f"staging.per_shop_1_{number}", day=f"staging.per_day_1_{number}"))
        lost = rf"staging of state per_(shop|day), batch 1, attempt {number} cannot be used: .* again\."
        for commit in (tally.commit, lambda _: tally.store.commit_ready(tally.spec, "test")):
            with refused(settings, Unprocessed, lost):
                commit(1)

    tally.process(1, shops, [("2013-01-01", 5)], mode="restage")
    assert tally.commit(1).attempt == len(DAMAGE) + 1
    assert tally.state() == [(*row, 1) for row in shops]


@pytest.mark.promise(
    "I7", "fault:spark-task-runs-twice-or-is-speculated:processing", "fault:spark-task-runs-twice-or-is-speculated:commit"
)
def test_rows_that_no_seal_names_do_not_count(tally: Tally, caplog: pytest.LogCaptureFixture) -> None:
    """A Spark task that ran twice staged twice; the merge reads only what the seal names (I7), and the log names the others."""
    tally.plan(1)
    attempt = tally.start(1)
    tally.stage(attempt, "per_shop", [("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1)])
    staged = [
        tally.stage(attempt, "per_shop", [("a", 1, 1, 1, 1)], partition=0),
        tally.stage(attempt, "per_shop", [("b", 1, 1, 1, 1)], partition=1),
    ]
    tally.store.seal(attempt, staged, Tracked(2))
    late = tally.stage(attempt, "per_shop", [("c", 1, 1, 1, 1)])

    assert tally.commit(1).key_count == 2
    assert tally.state() == [("a", 1, 1, 1, 1, 1), ("b", 1, 1, 1, 1, 1)]
    assert f"1:1: Spark's task attempt {late.task_attempt} staged 1 rows of per_shop too; no seal names it" in caplog.text
    assert caplog.text.count("no seal names it") == 2


@pytest.mark.promise(
    "I14",
    "fault:another-program-writes-state-table:commit",
    "fault:another-program-writes-state-table:after",
    "error:GUARD_MISMATCH",
    "decision:0001",
)
def test_a_state_row_ahead_of_the_ledger_halts(tally: Tally, settings: Settings, as_role: Execute) -> None:
    """The guard is an alarm: another writer's row is not skipped silently, and no other row is written (I14)."""
    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1)])
    tally.commit(1)
    tally.process(2, [("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1), ("c", 1, 1, 1, 1)])
    for txid in (2, 3, BIGINT_MAX):
        as_role("tidegate_owner", f"SET tidegate.writer = tally; UPDATE state.per_shop SET txid = {txid} WHERE shop = 'b'")
        with refused(settings, GuardMismatch, r"tally 2:1: 1 of 3 rows of state\.per_shop carry a txid of at least 2 already"):
            tally.commit(2)


@pytest.mark.promise("I9", "error:HOLE_DETECTED")
def test_a_cursor_that_disagrees_with_the_commits_halts(tally: Tally, settings: Settings, as_role: Execute) -> None:
    """A ledger that was edited or half restored neither repeats nor skips a batch (I9)."""
    for number in tally.plan(3):
        tally.process(number, [("a", 1, 1, 1, 1)])
    tally.commit(1)
    tally.commit(2)
    back, at_start, gone = (
        "UPDATE tidegate.cursor SET txid = 1",
        "UPDATE tidegate.cursor SET txid = 0",
        "UPDATE tidegate.cursor SET txid = 2; DELETE FROM tidegate.commit WHERE txid = 2",
    )
    for tampering, txid, message in (
        (back, 2, "tally: the cursor is at txid 1, but the ledger committed 2"),
        (back, 3, "tally: the cursor is at txid 1, but the ledger committed 2"),
        (at_start, 1, "tally: the cursor is at txid 0, but the ledger committed 2"),
        (gone, 2, "tally: the cursor is at txid 2, but txid 2 has no commit record"),
        (gone, 3, "tally: the cursor is at txid 2, but the ledger committed 1"),
    ):
        as_role("tidegate_owner", tampering)
        with refused(settings, HoleDetected, message):
            tally.commit(txid)
        with refused(settings, HoleDetected, r"tally: the cursor is at txid \d, but the ledger committed \d"):
            tally.store.commit_ready(tally.spec, "test")


@pytest.fixture
def ready(tally: Tally) -> Tally:
    """Tally with one committed batch and another that waits for its commit."""
    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1)])
    tally.commit(1)
    tally.process(2, [("a", 1, 5, 5, 5), ("b", 1, 2, 2, 2)])
    return tally


AFTER_BOTH = [("a", 2, 6, 1, 5, 2), ("b", 1, 2, 2, 2, 2)]
END = "SELECT pg_terminate_backend(%s, 5000)"


@pytest.mark.promise("I10", "fault:connection-breaks-before-commit-arrives:commit")
@pytest.mark.parametrize("by", ["network", "administrator"])
def test_a_connection_that_ends_before_its_commit_arrives_commits_nothing(
    ready: Tally, settings: Settings, as_role: Execute, by: str
) -> None:
    """The outcome is looked up, not guessed: nothing landed, so the retry commits and counts once (I10, rows 8, 28)."""
    relay = Relay(settings.pg_port)

    def end(connection: sa.Connection) -> None:
        if by == "network":
            relay.cut()
        else:
            assert as_role("postgres", END, [connection.connection.dbapi_connection.info.backend_pid]) == [(True,)]

    with StateStore.connect(replace(settings, pg_port=relay.port)) as store:
        sa.event.listen(store.engine, "commit", end, once=True)
        with refused(settings, StoreUnavailable):
            store.commit_batch(ready.spec, 2, "test")
        assert store.commit_batch(ready.spec, 2, "test").already_committed is False
    assert ready.state() == AFTER_BOTH


@pytest.mark.promise("I10", "fault:connection-breaks-before-answer-arrives:commit")
@pytest.mark.parametrize("lands", [True, False])
def test_the_outcome_of_a_commit_whose_answer_is_lost_is_waited_for(
    ready: Tally,
    settings: Settings,
    waiting: Callable[[], int],
    as_role: Execute,
    caplog: pytest.LogCaptureFixture,
    lands: bool,
) -> None:
    """It is open while the server holds the transaction: who looks it up waits for the cursor's lock (I10, rows 9, 10)."""
    as_role("postgres", IN_COMMIT)
    relay = Relay(settings.pg_port)
    with (
        caplog.at_level(logging.WARNING),
        holding(settings, "SELECT pg_advisory_xact_lock(7)") as holder,
        StateStore.connect(replace(settings, pg_port=relay.port)) as store,
        ThreadPoolExecutor(1) as thread,
    ):
        commit = thread.submit(store.commit_batch, ready.spec, 2, "first")
        ((pid,),) = until(lambda: as_role("postgres", WAITS.format("query = 'COMMIT'")))
        relay.cut()
        until(lambda: waiting() == 2)
        if not lands:
            assert as_role("postgres", END, [pid]) == [(True,)]
        holder.rollback()
        if lands:
            found = commit.result(PATIENCE_SECONDS)
            assert (found.txid, found.attempt, found.key_count, found.already_committed) == (2, 1, 2, True)
            assert store.commit_batch(ready.spec, 2, "second") == found
            assert "The cursor says that it committed." in caplog.text
        else:
            with pytest.raises(StoreUnavailable):
                commit.result(PATIENCE_SECONDS)
            assert store.commit_batch(ready.spec, 2, "second").already_committed is False
    assert ready.state() == AFTER_BOTH
    owner = "first" if lands else "second"
    assert as_role("tidegate_owner", "SELECT owner FROM tidegate.commit WHERE txid = 2") == [(owner,)]


@pytest.mark.promise("I20", "fault:process-is-stopped-and-goes-on-later:commit")
def test_a_committer_that_is_paused_loses_its_transaction(ready: Tally, settings: Settings) -> None:
    """It delays others by a configured time, and still succeeds when it wakes up (I20, row 11)."""
    reached, awake = threading.Event(), threading.Event()

    def pause(_connection: object) -> None:
        reached.set()
        assert awake.wait(PATIENCE_SECONDS)

    with StateStore.connect(replace(settings, idle_timeout_seconds=1)) as paused, ThreadPoolExecutor(1) as thread:
        sa.event.listen(paused.engine, "commit", pause, once=True)
        slow = thread.submit(paused.commit_batch, ready.spec, 2, "slow")
        assert reached.wait(10)
        try:
            fast = ready.store.commit_batch(ready.spec, 2, "fast")
        finally:
            awake.set()
        assert slow.result(30).already_committed

    assert fast.already_committed is False
    assert ready.state() == AFTER_BOTH


def test_a_limit_on_whole_transactions_does_not_stop_a_commit(ready: Tally, settings: Settings, as_role: Execute) -> None:
    """Its statements and pauses have limits of their own; a merge that takes longer than the role's would never commit."""
    ((version,),) = as_role("postgres", "SELECT current_setting('server_version_num')::int")
    if version < 170_000:
        pytest.skip("this server has no transaction_timeout")
    as_role("postgres", f"ALTER DATABASE {settings.pg_database} SET transaction_timeout = '500ms'")

    def take_long(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "INTO state.per_shop" in statement:
            time.sleep(1)

    with StateStore.connect(replace(settings, lock_timeout_seconds=59)) as store:
        sa.event.listen(store.engine, "before_cursor_execute", take_long)
        assert store.commit_batch(ready.spec, 2, "test").already_committed is False
    assert ready.state() == AFTER_BOTH


# giving a batch up


def test_a_batch_that_could_still_commit_is_not_skipped(tally: Tally, settings: Settings) -> None:
    tally.plan(3)
    tally.process(1)
    tally.commit(1)
    tally.process(2)
    tally.store.halt_batch("tally", 3, "SOURCE_CHANGED: a.csv")

    for txid in (2, 3):  # one that has not failed, one whose turn it is not
        with refused(settings, RangeRefused, r"has not failed|waits for txid 2"):
            tally.store.skip_batch(TALLY.spec, txid, "an operator", "out of impatience")
