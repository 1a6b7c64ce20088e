"""A server process that is stopped: whoever waits for its answer gives up, and what it was asked to do is looked up."""

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from tests.integration.conftest import IN_COMMIT, TALLY, WAITS, Execute, Tally, holding, until
from tests.store import DeadlineConnection, NoAnswer, connect, copy_rows, digest_statement, state_tables
from tidegate import migrations
from tidegate.explain import why
from tidegate.jobs.sources.postgres.source_connection import connected
from tidegate.jobs.sources.postgres.table_query import TableQuery
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SourceUnavailable, StoreUnavailable

STORE = "tidegate.state_store.connections"


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def impatient(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tally]:
    """A pipeline whose store waits a second longer than its server for an answer."""
    monkeypatch.setattr(f"{STORE}.database.MARGIN_SECONDS", 1)
    settings = replace(settings, commit_timeout_seconds=2, lock_timeout_seconds=1)
    with StateStore.connect(settings) as store:
        yield Tally(store)


@pytest.mark.promise("I10", "fault:postgres-backend-is-stopped:commit")
@pytest.mark.parametrize(
    ("lock", "waits"),
    [("SELECT pg_advisory_xact_lock(7)", "query = 'COMMIT'"), ("LOCK TABLE state.per_shop", "query ~ 'INSERT INTO state'")],
    ids=["commit", "merge"],
)
def test_a_commit_whose_process_is_stopped_is_given_up_and_looked_up(
    impatient: Tally, tally: Tally, as_role: Execute, monkeypatch: pytest.MonkeyPatch, lock: str, waits: str
) -> None:
    """It may still commit when it goes on; until then nobody takes it for failed, nor for done, and `why` names the session."""
    monkeypatch.setattr("tidegate.state_store.store.RESOLVE_TRIES", 1)
    as_role("postgres", IN_COMMIT)
    impatient.plan()
    impatient.process(1, [("a", 1, 2, 2, 2)], [("2026-11-27", 1)])
    with ThreadPoolExecutor() as threads, holding(impatient.store.settings, lock) as holder:
        commit = threads.submit(impatient.commit, 1)
        ((pid,),) = until(lambda: as_role("postgres", WAITS.format(waits)))
        with stopped(pid):
            holder.rollback()
            with pytest.raises(StoreUnavailable, match=rf"session {pid} .*kill -CONT {pid}"):
                commit.result(60)
            assert f"Session {pid} of Postgres holds its cursor" in why.explain(tally.store, TALLY).causes[0].sentence
            assert impatient.store.poison_tries("tally", 1) == 0
    tally.commit(1)  # or is told that it has
    assert [row[:2] for row in tally.state()] == [("a", 1)]


class _Slow(io.BytesIO):
    """Content that takes longer to make than the server may take for an answer, or whose second block stops the server."""

    def __init__(self, rows: bytes, pause: Callable[[], object]) -> None:
        super().__init__(rows)
        self._pause = pause

    def read(self, size: int | None = -1) -> bytes:
        if self.tell():
            self._pause()
        return super().read(100 if self.tell() == 0 else size)


@pytest.mark.promise("fault:postgres-backend-is-stopped:processing", "limit:LONGEST_ANSWER_SECONDS")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_copy_into_staging_waits_for_its_rows_but_not_for_a_process_that_is_stopped(
    tally: Tally, settings: Settings, *, is_stopped: bool
) -> None:
    tally.plan()
    attempt = tally.start(1)
    spec = TALLY.spec.states[0]
    table = state_tables.staging_table_of(spec, 1, attempt.number)
    rows = b"".join(b"shop %d,1,2,2,2,7\n" % number for number in range(10))
    digest = digest_statement(spec, 1, attempt.number)
    with closing(connect(settings.conninfo(user=settings.pg_stager))) as connection, connection.cursor() as cursor:
        assert isinstance(connection, DeadlineConnection)
        assert connection.answer_seconds == 630
        connection.answer_seconds = 1
        pid = connection.info.backend_pid
        if not is_stopped:
            slow = _Slow(rows, lambda: threading.Event().wait(2))
            assert copy_rows(cursor, table.name, list(table.c.keys()), slow, 7, digest)[0] == 10
            return
        try:
            with pytest.raises(NoAnswer, match=f"session {pid} .*has not answered for 1 s"):
                copy_rows(
                    cursor, table.name, list(table.c.keys()), _Slow(rows, lambda: os.kill(pid, signal.SIGSTOP)), 7, digest
                )
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_read_in_blocks_does_not_wait_for_a_process_that_is_stopped(settings: Settings, *, is_closed: bool) -> None:
    with closing(connect(settings.conninfo())) as connection, ThreadPoolExecutor(1) as pool:
        connection.answer_seconds = 1
        cursor = connection.cursor("in_blocks")
        cursor.itersize = 1
        cursor.execute("SELECT generate_series(1, 3)")
        rows = iter(cursor)
        assert next(rows) == (1,)
        with stopped(connection.info.backend_pid), pytest.raises(NoAnswer, match="has not answered for 1 s"):
            pool.submit(cursor.close if is_closed else rows.__next__).result(20)


@pytest.mark.promise("limit:LONGEST_SOURCE_ANSWER_SECONDS")
def test_a_source_whose_process_is_stopped_is_away(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "tidegate.jobs.sources.postgres.source_connection"
    monkeypatch.setattr(f"{module}.LONGEST_SOURCE_ANSWER_SECONDS", 1)
    query = TableQuery("t", ("public", "t"), "", ("id",), {})
    refused = pytest.raises(SourceUnavailable, match=r"session .* has not answered for 1 s")
    with refused, connected(settings.conninfo(), query) as connection, stopped(connection.info.backend_pid):
        connection.cursor().execute("SELECT 1")


@pytest.mark.promise("limit:LONGEST_STATEMENT_SECONDS")
def test_a_migration_whose_process_is_stopped_is_given_up(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement that writes all rows of a table may take long, but not for ever."""
    monkeypatch.setattr(f"{STORE}.local_settings.MARGIN_SECONDS", 1)
    monkeypatch.setattr("tidegate.migrations.LONGEST_STATEMENT_SECONDS", 1)
    refused = pytest.raises(StoreUnavailable, match=r"session .* has not answered for 2 s")
    with refused, migrations.connected(settings) as connection:
        backend = connection.connection.driver_connection.info.backend_pid
        with stopped(backend):
            connection.exec_driver_sql("SELECT 1")
