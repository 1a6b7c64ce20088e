"""Another session keeps a lock: what can be done later is left for later, and what cannot names the session."""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import psycopg2
import pytest
import sqlalchemy as sa

from tests import steps
from tests.integration.conftest import TALLY, Execute, Tally, contents, until
from tests.store import LedgerReader
from tidegate.explain import remedies, why
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import LockHeld, StoreUnavailable

PLAN = "UPDATE tidegate.plan SET failed = 1, failing_since = now(), failed_at = now(), failed_run = 'a run', error = 'gone'"
FAILED = "SELECT failed FROM tidegate.plan"
TOUCHED = "SELECT count(*) FROM tidegate.source_file WHERE mtime_ns = 0"
STAGED = "SELECT count(*) FROM pg_class WHERE relnamespace = 'staging'::regnamespace AND relname LIKE 'per_shop_1_%'"
ACKS = "SELECT count(*) FROM tidegate.batch WHERE awaits_ack AND txid = 1"
WINDOW = "SELECT count(*) FROM tidegate.pipeline WHERE in_flight = 7"
# A lock that a session holds while a plan runs: what it does, the words of the log, and what is left, once for each: count.
LOCKS = {
    "table of attempts": ("LOCK TABLE tidegate.attempt IN EXCLUSIVE MODE", "dropping old staging of tally", STAGED),
    "row of an attempt's table": ("SELECT FROM staging.per_shop_1_1", "dropping the staging of tally 1:1", STAGED),
    "row of a batch": ("SELECT FROM tidegate.batch WHERE txid = 1 FOR UPDATE", "noting the ack of tally 1", ACKS),
    "row of the window": ("SELECT FROM tidegate.pipeline FOR NO KEY UPDATE", "noting the window of tally", WINDOW),
    "row of a file": ("SELECT FROM tidegate.source_file FOR UPDATE", "noting when files of tally were touched", TOUCHED),
    "row of plans": ("SELECT FROM tidegate.plan FOR UPDATE", "noting that a plan of tally has succeeded", FAILED),
}


@contextmanager
def holding(settings: Settings, statement: str, user: str = "postgres") -> Iterator[int]:
    """Run a statement in a session that calls itself psql, leave its transaction open, and yield its process id."""
    with closing(psycopg2.connect(**settings.conninfo(user=user), application_name="psql")) as holder:
        holder.cursor().execute(statement)
        yield holder.info.backend_pid
        holder.rollback()  # closing alone would not wait until the server has released the lock


@pytest.fixture
def impatient(settings: Settings) -> Settings:
    """Settings with a short wait for locks, by which staging is old at once."""
    return replace(settings, lock_timeout_seconds=1, staging_retention_hours=0)


@pytest.fixture
def old(tally: Tally, impatient: Settings, as_role: Execute) -> Tally:
    """A batch that has committed, with old staging, an ack due, a touched file and a failed plan; its source has a new file."""
    folder = impatient.home / "tally"
    folder.mkdir()
    (folder / "1.csv").write_text("a,2026-11-27,1\n")
    assert steps.plan(impatient, TALLY, run_id="first") == [1]
    tally.process(1, [("a", 1, 1, 1, 1)])
    tally.commit(1)
    os.utime(folder / "1.csv", (0, 0))
    as_role("tidegate_owner", "UPDATE tidegate.batch SET awaits_ack = true, acked_at = NULL")
    as_role("tidegate_owner", PLAN)
    (folder / "2.csv").write_text("b,2026-11-28,5\n")
    return tally


@pytest.mark.promise("fault:another-session-keeps-lock:processing")
@pytest.mark.parametrize("locks", [["table of attempts"], [name for name in LOCKS if name.startswith("row")]], ids=str)
def test_a_plan_leaves_for_the_next_one_what_a_lock_is_in_the_way_of(
    old: Tally, impatient: Settings, as_role: Execute, caplog: pytest.LogCaptureFixture, locks: list[str]
) -> None:
    pipeline = replace(TALLY, window=7) if "row of the window" in locks else TALLY
    before = {lock: as_role("postgres", LOCKS[lock][2]) for lock in locks}
    with ExitStack() as sessions:
        holders = {lock: sessions.enter_context(holding(impatient, LOCKS[lock][0])) for lock in locks}
        assert steps.plan(impatient, pipeline, run_id="held") == [2]
        for lock, holder in holders.items():
            assert f"Left for later: {LOCKS[lock][1]}" in caplog.text
            assert f"session {holder} (user postgres, application psql" in caplog.text
    assert {lock: as_role("postgres", LOCKS[lock][2]) for lock in locks} == before
    old.process(2, [("b", 1, 5, 5, 5)])
    old.commit(2)
    assert old.state() == [("a", 1, 1, 1, 1, 1), ("b", 1, 5, 5, 5, 2)]

    caplog.clear()
    assert steps.plan(impatient, pipeline, run_id="free") == []
    for lock in locks:
        assert as_role("postgres", LOCKS[lock][2]) != before[lock], lock
    assert "Left for later" not in caplog.text


@pytest.mark.promise("fault:another-session-keeps-lock:after")
def test_a_commit_is_not_failed_by_an_ack_that_cannot_be_noted(old: Tally, impatient: Settings, as_role: Execute) -> None:
    """The ack is still due afterwards, so that the next plan gives it again."""
    with StateStore.connect(impatient) as store, holding(impatient, "SELECT FROM tidegate.batch WHERE txid = 1 FOR UPDATE"):
        store.note_ack("tally", 1, 1)
    assert as_role("postgres", ACKS) == [(1,)]


@pytest.mark.promise("fault:another-session-keeps-lock:commit", "error:LOCK_HELD", "I20")
def test_what_meets_a_lock_names_the_session(tally: Tally, impatient: Settings, waiting: Callable[[], int]) -> None:
    """Not one that reads the same table or holds another row of it; and the advice is right for a lock.

    So do verbs that only look, and the page.

    Of a session of the same role, it says since when its transaction is open, and what it does, but not by which statement:
    that may hold data. A reader alone would not be in a commit's way: a migration waits for the reader, and the commit for the
    migration.
    """

    def migrate() -> None:
        with holding(impatient, "LOCK TABLE state.per_shop"):
            pass

    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1)])
    for statement in (
        "SELECT FROM tidegate.cursor FOR UPDATE",
        "SELECT FROM tidegate.batch WHERE txid = 1 FOR UPDATE",
        "LOCK TABLE state.per_shop",
    ):
        with (
            StateStore.connect(impatient) as store,
            holding(impatient, "SELECT FROM tidegate.cursor; SELECT FROM tidegate.batch WHERE txid = 2 FOR UPDATE") as other,
            holding(impatient, statement) as holder,
            pytest.raises(LockHeld, match="a lock timeout") as refused,
        ):
            store.commit_batch(tally.spec, 1, "test")
        told = str(refused.value)
        assert f"The lock is held by session {holder} (user postgres, application psql)." in told
        assert f"SELECT pg_terminate_backend({holder})" in told
        assert str(other) not in told
        assert "tidegate up" not in why.of_error(refused.value).advice
    assert remedies.command_of("LOCK_HELD") == "tidegate error LOCK_HELD"

    with (
        StateStore.connect(impatient) as store,
        holding(impatient, "SELECT 'a secret' FROM tidegate.cursor FOR UPDATE", impatient.pg_user),
        pytest.raises(LockHeld) as refused,
    ):
        store.commit_batch(tally.spec, 1, "test")
    assert re.search(r"\(user tidegate, application psql, idle in transaction, since \d{4}-.* UTC\)", str(refused.value))
    assert "secret" not in str(refused.value)

    with StateStore.connect(impatient) as store, ThreadPoolExecutor(1) as pool:
        with holding(impatient, "SELECT FROM state.per_shop") as reader:
            migrating = pool.submit(migrate)
            until(waiting)
            with pytest.raises(LockHeld, match=rf"The lock is held by one of: .*\bsession {reader} "):
                store.commit_batch(tally.spec, 1, "test")
        migrating.result()

    # Longer than all reads.
    lock = "SET idle_in_transaction_session_timeout = '30s'; LOCK TABLE tidegate.pipeline, tidegate.batch"
    with StateStore.connect(impatient) as store, holding(impatient, lock) as pid:
        for read in (lambda: store.batch_history("tally", 1), lambda: store.waits({"tally": None}), store.lag):
            with pytest.raises(LockHeld, match=rf"The lock is held by session {pid} .*psql"):
                read()
        with (
            LedgerReader(impatient) as reader,
            pytest.raises(LockHeld, match=rf"The lock is held by session {pid} .*psql"),
            reader.snapshot("reading", timeout_seconds=1) as connection,
        ):
            connection.execute(sa.text("SELECT FROM tidegate.batch"))
    assert tally.commit(1).txid == 1


@pytest.mark.promise("fault:deadlock-statement-timeout:commit", "fault:deadlock-statement-timeout:processing")
@pytest.mark.parametrize(
    ("step", "wanted", "held"),
    [("commit", "state.per_shop", "tidegate.cursor"), ("start", "tidegate.attempt", "tidegate.batch")],
    ids=["commit", "processing"],
)
def test_a_step_that_a_deadlock_ends_leaves_nothing_and_is_tried_again(
    tally: Tally, settings: Settings, waiting: Callable[[], int], step: str, wanted: str, held: str
) -> None:
    tally.plan(1)
    if step == "commit":
        tally.process(1, [("a", 1, 1, 1, 1)])
    before = contents(settings)
    with ThreadPoolExecutor(1) as pool, closing(psycopg2.connect(**settings.conninfo(user="postgres"))) as person:
        with person.cursor() as cursor:
            cursor.execute("SET deadlock_timeout = '1h'")  # our step looks for the deadlock, and so is the one that ends
            cursor.execute(f"LOCK TABLE {wanted} IN SHARE MODE")
            done = pool.submit(getattr(tally, step), 1)
            until(waiting)
            cursor.execute(f"SELECT FROM {held} FOR UPDATE")
        with pytest.raises(StoreUnavailable, match="a deadlock"):
            done.result()
        person.rollback()
    assert contents(settings) == before
    if step == "start":
        tally.process(1, [("a", 1, 1, 1, 1)])
    assert tally.commit(1).txid == 1
