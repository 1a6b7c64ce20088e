"""What is in a step's way: a lock of another session, a deadlock, a full disk, a server process that is stopped."""

import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests import steps
from tests.integration.conftest import ROW, TALLY, Tally, contents, holding, stopped, until
from tests.servers import Server
from tests.small_disk import fill, mounted
from tests.store import LedgerReader, NoAnswer, connect, copy_rows, digest_statement, errors, state_tables
from tidegate import migrations
from tidegate.explain import remedies, why
from tidegate.jobs.sources.postgres.source_connection import connected
from tidegate.jobs.sources.postgres.table_query import TableQuery
from tidegate.state_store import Settings, StateStore

PLAN = "UPDATE tidegate.plan SET failed = 1, failing_since = now(), failed_at = now(), failed_run = 'a run', error = 'gone'"
STAGED = "count(*) FROM pg_class WHERE relnamespace = 'staging'::regnamespace AND relname LIKE 'per_shop_1_%'"
ACKS = "count(*) FROM tidegate.batch WHERE awaits_ack AND txid = 1"
ROW_OF_BATCH = "SELECT FROM tidegate.batch WHERE txid = 1 FOR UPDATE"
# Locks that are held while a plan runs: the words of the log, and what the plan would change.
TABLE_LOCKS = {"LOCK TABLE tidegate.attempt IN EXCLUSIVE MODE": ("dropping old staging of tally", STAGED)}
ROW_LOCKS = {
    "SELECT FROM staging.per_shop_1_1": ("dropping the staging of tally 1:1", STAGED),
    ROW_OF_BATCH: ("noting the ack of tally 1", ACKS),
    "SELECT FROM tidegate.pipeline FOR NO KEY UPDATE": ("noting the window of tally", "in_flight FROM tidegate.pipeline"),
    "SELECT FROM tidegate.source_file FOR UPDATE": ("noting when files of tally", "min(mtime_ns) FROM tidegate.source_file"),
    "SELECT FROM tidegate.plan FOR UPDATE": ("noting that a plan of tally has succeeded", "failed FROM tidegate.plan"),
}


@pytest.fixture
def impatient(settings: Settings) -> Settings:
    return replace(settings, lock_timeout_seconds=1, staging_retention_hours=0)


@pytest.mark.promise("fault:another-session-keeps-lock:processing", "fault:another-session-keeps-lock:after")
@pytest.mark.parametrize("locks", [TABLE_LOCKS, ROW_LOCKS], ids=["tables", "rows"])
def test_a_plan_leaves_for_the_next_one_what_a_lock_is_in_the_way_of(
    tally: Tally, impatient: Settings, caplog: pytest.LogCaptureFixture, locks: dict[str, tuple[str, str]]
) -> None:
    """Staging is old, an ack is due, a file was touched, a plan has failed, the window is another one; and a file is new."""

    def done() -> list[list[tuple]]:
        return [tally.sql(f"SELECT {what}") for _, what in locks.values()]

    pipeline, folder = replace(TALLY, window=7) if locks is ROW_LOCKS else TALLY, impatient.home / "tally"
    folder.mkdir()
    (folder / "1.csv").write_text("a,2026-11-27,1\n")
    assert steps.plan(impatient, TALLY, run_id="first") == [1]
    tally.complete(1, ROW)
    os.utime(folder / "1.csv", (0, 0))
    (folder / "2.csv").write_text("b,2026-11-28,5\n")
    tally.sql(f"UPDATE tidegate.batch SET awaits_ack = true, acked_at = NULL; {PLAN}")
    with StateStore.connect(impatient) as store, holding(impatient, ROW_OF_BATCH):
        store.note_ack("tally", 1, 1)  # after its commit, which that does not fail
    assert tally.sql(f"SELECT {ACKS}") == [(1,)], "the next plan gives it again"

    caplog.clear()
    before = done()
    with ExitStack() as sessions:
        holders = {says: sessions.enter_context(holding(impatient, lock)) for lock, (says, _) in locks.items()}
        assert steps.plan(impatient, pipeline, run_id="held") == [2]
        for says, holder in holders.items():
            assert f"Left for later: {says}" in caplog.text
            assert f"session {holder.info.backend_pid} (user postgres, application psql" in caplog.text
    assert done() == before
    tally.complete(2, ROW)
    assert tally.state() == [("a", 2, 2, 1, 1, 2)]

    caplog.clear()
    assert steps.plan(impatient, pipeline, run_id="free") == []
    assert all(after != earlier for after, earlier in zip(done(), before, strict=True))
    assert "Left for later" not in caplog.text


@pytest.mark.promise("fault:another-session-keeps-lock:commit", "error:LOCK_HELD", "I20")
def test_what_meets_a_lock_names_the_session(tally: Tally, impatient: Settings, waiting: Callable[[], int]) -> None:
    """Not one that reads the same table or holds another row of it; nor by a statement of its: that may hold data.

    A reader alone would not be in a commit's way: a migration waits for the reader, and the commit for the migration.
    """
    tally.having(2, 1)

    def refusal(step: Callable[[], object], says: str = "a lock timeout") -> errors.LockHeld:
        with pytest.raises(errors.LockHeld, match=says) as refused:
            step()
        return refused.value

    def commit() -> None:
        with StateStore.connect(impatient) as store:
            store.commit_batch(tally.spec, 1, "test")

    other_row = "SELECT FROM tidegate.cursor; SELECT FROM tidegate.batch WHERE txid = 2 FOR UPDATE"
    for statement in ("SELECT FROM tidegate.cursor FOR UPDATE", ROW_OF_BATCH, "LOCK TABLE state.per_shop"):
        with holding(impatient, other_row) as other, holding(impatient, statement) as holder:
            error, pid, uninvolved = refusal(commit), holder.info.backend_pid, other.info.backend_pid
        assert f"The lock is held by session {pid} (user postgres, application psql)." in str(error)
        assert f"SELECT pg_terminate_backend({pid})" in str(error)
        assert str(uninvolved) not in str(error)
        assert "tidegate up" not in why.of_error(error).advice
    assert remedies.command_of("LOCK_HELD") == "tidegate error LOCK_HELD"

    with holding(impatient, "SELECT 'a secret' FROM tidegate.cursor FOR UPDATE", impatient.pg_user):
        says = str(refusal(commit))
    assert re.search(r"\(user tidegate, application psql, idle in transaction, since \d{4}-.* UTC\)", says)
    assert "secret" not in says

    with ThreadPoolExecutor(1) as pool:
        with holding(impatient, "SELECT FROM state.per_shop") as reader:
            migrating = pool.submit(tally.sql, "BEGIN; LOCK TABLE state.per_shop; END", role="postgres")
            until(waiting)
            refusal(commit, rf"The lock is held by one of: .*\bsession {reader.info.backend_pid} ")
        migrating.result()

    # Longer than all reads.
    lock = "SET idle_in_transaction_session_timeout = '30s'; LOCK TABLE tidegate.pipeline, tidegate.batch"
    with StateStore.connect(impatient) as store, holding(impatient, lock) as holder:

        def read() -> None:
            with LedgerReader(impatient) as reader, reader.snapshot("reading", timeout_seconds=1) as connection:
                connection.execute(sa.text("SELECT FROM tidegate.batch"))

        for step in (lambda: store.batch_history("tally", 1), lambda: store.waits({"tally": None}), store.lag, read):
            refusal(step, rf"The lock is held by session {holder.info.backend_pid} .*psql")
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
    tally.having(1, processed=int(step == "commit"))
    before = contents(settings)
    # Our step looks for the deadlock, and so is the one that ends.
    lock = f"SET deadlock_timeout = '1h'; LOCK TABLE {wanted} IN SHARE MODE"
    with ThreadPoolExecutor(1) as pool, holding(settings, lock) as person:
        done = pool.submit(getattr(tally, step), 1)
        until(waiting)
        person.cursor().execute(f"SELECT FROM {held} FOR UPDATE")
        with pytest.raises(errors.StoreUnavailable, match="a deadlock"):
            done.result()
    assert contents(settings) == before
    if step == "start":
        tally.process(1, ROW)
    assert tally.commit(1).txid == 1


@pytest.fixture
def disk(settings: Settings, server: Server) -> Iterator[Path]:
    """A disk on which the tables are that a test makes; the database goes with it."""
    with mounted("2m") as disk:
        ((data_folder,),) = server.execute("SHOW data_directory")
        of_server = Path(data_folder).stat()
        (place := disk / "tables").mkdir()
        os.chown(place, of_server.st_uid, of_server.st_gid)
        server.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
        server.execute("GRANT CREATE ON TABLESPACE small TO PUBLIC")
        server.execute(f"ALTER DATABASE {settings.pg_database} SET default_tablespace = small")
        try:
            yield disk
        finally:
            server.drop_database(settings.pg_database)
            server.execute("DROP TABLESPACE small")


@pytest.mark.promise("fault:disk-is-full:processing", "fault:disk-is-full:commit")
@pytest.mark.parametrize("step", ["processing", "commit"])
def test_what_finds_the_disk_full_leaves_nothing_and_is_tried_again(disk: Path, tally: Tally, step: str) -> None:
    rows = [(f"shop {number}", 1, 1, 1, 1) for number in range(50)]
    tally.having(1, processed=int(step == "commit"), shops=rows)
    before = contents(tally.store.settings)
    ballast = fill(disk)
    with pytest.raises(errors.StoreUnavailable, match="No space left on device"):
        tally.commit(1) if step == "commit" else tally.process(1, rows)
    ballast.unlink()
    if step == "commit":
        assert contents(tally.store.settings) == before
    else:
        tally.process(1, rows)
    assert tally.commit(1).key_count == len(tally.state()) == len(rows)


class _Slow(io.BytesIO):
    """Content whose second block takes longer than the server may take for an answer, or stops the server."""

    def __init__(self, rows: bytes, pause: Callable[[], object]) -> None:
        super().__init__(rows)
        self._pause = pause

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() == 100:
            self._pause()
        return super().read(100 if self.tell() == 0 else size)


@pytest.mark.promise("fault:postgres-backend-is-stopped:processing", "limit:LONGEST_ANSWER_SECONDS")
def test_a_copy_into_staging_waits_for_its_rows_but_not_for_a_process_that_is_stopped(tally: Tally, settings: Settings) -> None:
    tally.plan()
    attempt, spec = tally.start(1), TALLY.spec.states[0]
    table = state_tables.staging_table_of(spec, 1, attempt.number)
    rows = b"".join(b"shop %d,1,2,2,2,7\n" % number for number in range(10))
    with closing(connect(settings.conninfo(user=settings.pg_stager))) as connection, connection.cursor() as cursor:

        def copied(pause: Callable[[], object]) -> int:
            columns, digest = list(table.c.keys()), digest_statement(spec, 1, attempt.number)
            return copy_rows(cursor, table.name, columns, _Slow(rows, pause), 7, digest)[0]

        assert connection.answer_seconds == 630
        connection.answer_seconds = 1
        pid = connection.info.backend_pid
        assert copied(lambda: threading.Event().wait(2)) == 10
        with ExitStack() as until_then, pytest.raises(NoAnswer, match=f"session {pid} .*has not answered for 1 s"):
            copied(lambda: until_then.enter_context(stopped(pid)))


@pytest.mark.promise("limit:LONGEST_SOURCE_ANSWER_SECONDS", "limit:LONGEST_STATEMENT_SECONDS")
def test_no_read_or_migration_waits_for_a_process_that_is_stopped(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, at their end, from a source. A statement that writes all rows of a table may take long, but not for ever."""
    for is_closed in (False, True):
        with closing(connect(settings.conninfo())) as connection, ThreadPoolExecutor(1) as pool:
            connection.answer_seconds = 1
            cursor = connection.cursor("in_blocks")
            cursor.itersize = 1
            cursor.execute("SELECT generate_series(1, 3)")
            rows = iter(cursor)
            assert next(rows) == (1,)
            with stopped(connection.info.backend_pid), pytest.raises(NoAnswer, match="has not answered for 1 s"):
                pool.submit(cursor.close if is_closed else rows.__next__).result(20)

    monkeypatch.setattr("tidegate.jobs.sources.postgres.source_connection.LONGEST_SOURCE_ANSWER_SECONDS", 1)
    monkeypatch.setattr("tidegate.state_store.connections.local_settings.MARGIN_SECONDS", 1)
    monkeypatch.setattr("tidegate.migrations.LONGEST_STATEMENT_SECONDS", 1)
    query, says = TableQuery("t", ("public", "t"), "", ("id",), {}), r"session .* has not answered for {} s"
    refused = pytest.raises(errors.SourceUnavailable, match=says.format(1))
    with refused, connected(settings.conninfo(), query) as source, stopped(source.info.backend_pid):
        source.cursor().execute("SELECT 1")
    refused = pytest.raises(errors.StoreUnavailable, match=says.format(2))
    with refused, migrations.connected(settings) as session, stopped(session.connection.driver_connection.info.backend_pid):
        session.exec_driver_sql("SELECT 1")
