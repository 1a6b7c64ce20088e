"""The ordered commit counts each txid once, in order and whole, whatever happens to the connection."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import psycopg2
import pytest
import sqlalchemy as sa

from tests.integration.conftest import (
    BIGINT_MAX,
    PATIENCE_SECONDS,
    TALLY,
    Execute,
    Tally,
    TallyOf,
    contents,
    merge_steps,
    until,
)
from tests.store import Commit, Tracked, cursors, schema_revision
from tidegate import migrations
from tidegate.jobs import Count, Files, Max, Min, Pipeline, State, Sum
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    AttemptNotSealed,
    CommitOutOfOrder,
    DeclarationChanged,
    GuardMismatch,
    HoleDetected,
    Overflow,
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
    """Each commit merges its partials into the existing rows and stamps them; other rows keep their txid.

    A batch that is ready early is refused with the txids and a command, and nothing of it is visible (I3). A committed txid
    always answers with its first commit (I8). A txid that Postgres took for an int4 would be converted row by row, in a
    separate and costly step.
    """
    tally.plan(3)
    tally.process(2, [("b", 1, 7, 7, 7), ("c", 1, -1, -1, -1)], [("2013-01-01", 1), ("2013-01-02", 1)])
    tally.process(3, [("a", 1, 1, 1, 1)])
    before = contents(settings)
    with pytest.raises(CommitOutOfOrder, match=r"tally cannot commit txid 3: 0 is the last.*until 2 .*tidegate inspect tally"):
        tally.commit(3)
    with pytest.raises(CommitOutOfOrder, match="tally cannot commit txid 2"):
        tally.commit(2)
    assert contents(settings) == before

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

    def refused(error: type[Exception], match: str, commit: Callable[[], object] = lambda: tally.commit(1)) -> None:
        before = contents(settings)
        with pytest.raises(error, match=match):
            commit()
        assert contents(settings) == before

    refused(PermanentError, "cannot affect row a second time")  # partials of one key in two partitions were not grouped
    tally.process(1, [("a", 1, 1, 1, 1)], mode="restage")
    ((version,),) = as_role("tidegate_owner", "SELECT version_num FROM tidegate.alembic_version")
    as_role("tidegate_owner", "UPDATE tidegate.alembic_version SET version_num = '0123456789ab'")
    refused(SchemaOutOfDate, r"schema\.sql 0123456789ab.*restart the stack")
    refused(SchemaOutOfDate, "made by another revision", lambda: tally.store.commit_ready(tally.spec, "test"))
    as_role("tidegate_owner", "UPDATE tidegate.alembic_version SET version_num = %s", [version])
    as_role("tidegate_owner", "DELETE FROM tidegate.state_table WHERE state = 'per_day'")
    refused(DeclarationChanged, "tally does not own the states it declares")  # not even a batch that would not touch it


def test_a_migration_of_states_and_commits_do_not_wait_for_each_other(
    tally: Tally, settings: Settings, as_role: Execute
) -> None:
    tally.plan(1)
    tally.process(1, [("a", 1, 1, 1, 1)])
    with tally.store.engine.begin() as commit:
        cursors.lock(commit, "tally")
        with migrations.connected(settings) as connection:
            connection.execute(sa.text("SET LOCAL lock_timeout = '500ms'"))
            schema_revision.lock_revision(connection)
    as_role("tidegate_owner", "CREATE TABLE tidegate.alembic_version_of_project AS SELECT '9999' AS version_num")
    with migrations.connected(settings) as connection:
        schema_revision.lock_revision(connection)
        assert tally.commit(1).txid == 1


def test_a_row_that_no_longer_fits_into_a_page_is_named(settings: Settings, tally_of: TallyOf) -> None:
    """An opaque state keeps the values before the last txid too, so a row may be too large from its first update on."""
    many = [f"text_{number}" for number in range(250)]
    wide = Pipeline(
        name="wide",
        source=Files("wide", glob="*.csv", format="csv", schema=dict.fromkeys(["shop", *many], "string")),
        states={"texts": State({"shop": "text"}, {name: Max(name, "text") for name in many}, kind="opaque")},
    )
    tally = tally_of(wide)
    tally.plan(2)
    for txid in (1, 2):
        row = ["a", *(f"{txid}{number:019d}" for number in range(250))]
        tally.process_states(txid, {"texts": [row]})
    tally.commit(1)
    before = contents(settings)
    with pytest.raises(Overflow, match=r"row of state texts does not fit into a page of Postgres: row is too big: size \d+"):
        tally.commit(2)
    assert contents(settings) == before


@pytest.mark.promise("I7", "I20", "error:ATTEMPT_NOT_SEALED", "error:UNKNOWN_BATCH", "limit:LONGEST_SILENCE_SECONDS")
def test_only_a_sealed_attempt_commits(tally: Tally, settings: Settings, as_role: Execute) -> None:
    """One that is at work is waited for (I7), until it has failed, or is silent or at work for too long (I20)."""

    def refused(error: type[Exception], match: str) -> None:
        before = contents(settings)
        with pytest.raises(error, match=match):
            tally.commit(1)
        assert contents(settings) == before

    refused(UnknownBatch, "tally has no txid 1")
    with pytest.raises(SchemaOutOfDate, match=r"Pipeline other is not registered in this database\. Run: tidegate migrate"):
        tally.store.commit_batch(replace(tally.spec, name="other"), 1, "test")
    tally.plan(1)
    refused(Unprocessed, "tally 1 has not been processed yet")
    tally.store.fail_attempt(tally.start(1), "MALFORMED_RECORD: a.csv, line 7.")
    refused(Unprocessed, r"tally 1:1 failed: MALFORMED_RECORD: a\.csv, line 7\.")

    attempt = tally.start(1)
    tally.stage(attempt, "per_shop", [("a", 1, 1, 1, 1)])
    refused(AttemptNotSealed, r"tally 1:2 is still processing \(test, for \d+ s\)")
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET seen_at = now() - interval '61 s'")
    refused(Unprocessed, r"tally 1:2 has not been heard of for 6\d s: its process \(test\) died")
    assert tally.store.keep_alive(attempt)
    refused(AttemptNotSealed, "tally 1:2 is still processing")
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET started_at = now() - interval '3601 s'")
    refused(Unprocessed, "tally 1:2 has not ended within 3600 s")
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
        before = contents(settings)
        lost = rf"staging of state per_(shop|day), batch 1, attempt {number} cannot be used: .* again\."
        for commit in (tally.commit, lambda _: tally.store.commit_ready(tally.spec, "test")):
            with pytest.raises(Unprocessed, match=lost):
                commit(1)
        assert contents(settings) == before

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
        before = contents(settings)
        with pytest.raises(
            GuardMismatch, match=r"tally 2:1: 1 of 3 rows of state\.per_shop carry a txid of at least 2 already"
        ):
            tally.commit(2)
        assert contents(settings) == before


# merging stored values with a partial: sum, min and max of bigint, numeric, date and text
MERGES = Pipeline(
    name="merges",
    source=Files("merges", glob="*.csv", format="csv", schema={"k": "string"}),
    states={
        "merged": State(
            key={"k": "text"},
            aggregates={
                "number": Count(),
                "amount": Sum("amount", "numeric(10,2)"),
                "first_day": Min("day", "date"),
                "last_word": Max("word", "text"),
            },
            null_keys=True,
        )
    },
)


@pytest.mark.promise("security:author-of-data")
def test_partials_merge_by_the_rules_of_their_aggregates(store: StateStore, register: Callable[..., None]) -> None:
    """Sums add, NULL is the identity of min and max, text compares by bytes, and NULLs are one key of their own (I16).

    So is any text, also one that folds to another or looks special.
    """
    register(MERGES)
    tally, identity = Tally(store, MERGES.spec), (0, "0.00", None, None)
    cases = {
        "nothing": (identity, identity, ("0", "0.00", None, None)),
        "first": (identity, (2, "-1.50", "2013-05-01", ""), ("2", "-1.50", "2013-05-01", "")),
        "": ((2, "-1.50", "2013-05-01", ""), identity, ("2", "-1.50", "2013-05-01", "")),
        None: ((1, "0.01", "2013-05-01", "a"), (1, "0.02", "2012-12-31", "B"), ("2", "0.03", "2012-12-31", "a")),
        "far": (
            (1, "99999999.98", "0001-01-01", "é"),
            (1, "0.01", "9999-12-31", "z"),
            ("2", "99999999.99", "0001-01-01", "é"),
        ),
    }
    folds = ["a", "a ", "A", "i", "\u0130", "\u0131", "e\u0301", "\u00e9", "\U0001f6a2"]
    looks_special = [" ", "a,b\nc", "a\r", "\\N", "\\.", "NULL", '"', "'\";--", "{}", "%s"]
    for number, text in enumerate([*folds, *looks_special]):
        once = (number, "0.00", None, None)
        cases[text] = (once, once, (str(2 * number), "0.00", None, None))
    for txid in tally.plan(2):
        rows = [(key, *case[txid - 1]) for key, case in cases.items()]
        tally.process_states(txid, {"merged": rows})
        assert tally.commit(txid).key_count == len(cases)
    found = {key: tuple(None if value is None else str(value) for value in row) for key, *row, _ in tally.state("merged")}
    assert found == {key: expected for key, (_, _, expected) in cases.items()}


@pytest.mark.promise("I2", "error:OVERFLOW")
def test_an_overflow_in_the_last_state_rolls_back_the_whole_batch(tally: Tally, settings: Settings) -> None:
    """All states of a batch, its commit record and the cursor change together or not at all; no retry can help (I2)."""
    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1)], [("2013-01-01", BIGINT_MAX)])
    tally.commit(1)
    tally.process(2, [("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1)], [("2013-01-01", 1)])
    before = contents(settings)

    with pytest.raises(Overflow, match=r"committing tally 2.*Widen the column's type") as refused:
        tally.commit(2)
    assert isinstance(refused.value, PermanentError)
    assert contents(settings) == before


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
        before = contents(settings)
        with pytest.raises(HoleDetected, match=message):
            tally.commit(txid)
        with pytest.raises(HoleDetected, match=r"tally: the cursor is at txid \d, but the ledger committed \d"):
            tally.store.commit_ready(tally.spec, "test")
        assert contents(settings) == before


class Wire:
    """The network between one store and Postgres; a test decides what happens to the next COMMIT that travels on it."""

    def __init__(self, settings: Settings) -> None:
        self._server = (settings.pg_host, settings.pg_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.fault: Callable[[Link], None] | None = None
        self.reached = threading.Event()
        self.threads: list[threading.Thread] = []
        self.run(self._accept)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                Link(self, self._listener.accept()[0], socket.create_connection(self._server))

    def run(self, target: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=target, daemon=True))
        self.threads[-1].start()

    def close(self) -> None:
        """Accept no further connection, and wait for the existing ones to end."""
        Link.cut(self._listener)
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)


class Link:
    """One connection: bytes travel both ways, until a COMMIT meets the fault."""

    def __init__(self, wire: Wire, client: socket.socket, server: socket.socket) -> None:
        self._wire = wire
        self.client, self.server = client, server
        self.answered = threading.Event()
        self.muted = False
        wire.run(self._upwards)
        wire.run(self._downwards)

    def _upwards(self) -> None:
        with suppress(OSError):
            while content := self.client.recv(1 << 16):
                fault = self._wire.fault
                if fault and content.endswith(b"COMMIT\0"):
                    self._wire.fault = None
                    self.muted = True
                    self._wire.reached.set()
                    self.commit = content
                    fault(self)
                    self.muted = False
                else:
                    self.server.sendall(content)
        self.cut(self.server)

    def _downwards(self) -> None:
        with suppress(OSError):
            while content := self.server.recv(1 << 16):
                self.answered.set()
                if not self.muted:
                    self.client.sendall(content)
        self.cut(self.client)

    def deliver(self) -> None:
        """Let the COMMIT reach the server, and wait for its answer, which the client does not get."""
        self.answered.clear()
        self.server.sendall(self.commit)
        assert self.answered.wait(10)

    @staticmethod
    def cut(end: socket.socket) -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@pytest.fixture
def wire(settings: Settings) -> Iterator[Wire]:
    wire = Wire(settings)
    yield wire
    wire.close()


@pytest.fixture
def ready(tally: Tally) -> Tally:
    """Tally with one committed batch and another that waits for its commit."""
    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1)])
    tally.commit(1)
    tally.process(2, [("a", 1, 5, 5, 5), ("b", 1, 2, 2, 2)])
    return tally


AFTER_BOTH = [("a", 2, 6, 1, 5, 2), ("b", 1, 2, 2, 2, 2)]


@pytest.fixture(params=["network", "administrator"])
def end(request: pytest.FixtureRequest, as_role: Execute) -> Callable[[Link], None]:
    """A function that ends a connection, as the network would, or an administrator at the server."""

    def cut(link: Link) -> None:
        link.cut(link.client)
        link.cut(link.server)

    def terminate(link: Link) -> None:
        statement = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE client_port = %s"
        assert as_role("postgres", statement, [link.server.getsockname()[1]]) == [(True,)]
        link.muted = False
        link.server.sendall(link.commit)

    return cut if request.param == "network" else terminate


@pytest.mark.promise("I10", "fault:connection-breaks-before-commit-arrives:commit")
def test_a_connection_that_ends_before_its_commit_arrives_commits_nothing(
    ready: Tally, settings: Settings, wire: Wire, end: Callable[[Link], None]
) -> None:
    """The outcome is looked up, not guessed: nothing landed, so the retry commits and counts once (I10, rows 8, 28)."""
    before = contents(settings)
    with StateStore.connect(replace(settings, pg_port=wire.port)) as store:
        wire.fault = end
        with pytest.raises(StoreUnavailable):
            store.commit_batch(ready.spec, 2, "test")
        assert wire.reached.is_set()
        assert contents(settings) == before
        assert store.commit_batch(ready.spec, 2, "test").already_committed is False
    assert ready.state() == AFTER_BOTH


@pytest.mark.promise("I10", "fault:connection-breaks-before-answer-arrives:commit")
def test_a_lost_answer_to_a_commit_that_landed_is_found_in_the_cursor(
    ready: Tally,
    settings: Settings,
    wire: Wire,
    as_role: Execute,
    caplog: pytest.LogCaptureFixture,
    end: Callable[[Link], None],
) -> None:
    """The same error as for a commit that never arrived, but it succeeded: the cursor shows it (I10, row 9)."""

    def deliver_and_end(link: Link) -> None:
        link.deliver()
        with suppress(OSError):
            end(link)

    with StateStore.connect(replace(settings, pg_port=wire.port)) as store, caplog.at_level(logging.WARNING):
        wire.fault = deliver_and_end
        found = store.commit_batch(ready.spec, 2, "first")
        again = store.commit_batch(ready.spec, 2, "second")

    assert wire.reached.is_set()
    assert (found.txid, found.attempt, found.key_count, found.already_committed) == (2, 1, 2, True)
    assert again == found
    assert "The cursor says that it committed." in caplog.text
    assert ready.state() == AFTER_BOTH
    assert as_role("tidegate_owner", "SELECT owner FROM tidegate.commit WHERE txid = 2") == [("first",)]


@pytest.mark.promise("I10")
@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_in_a_half_open_connection_is_waited_for(
    ready: Tally, settings: Settings, wire: Wire, waiting: Callable[[], int], *, arrives: bool
) -> None:
    """The old transaction's outcome is open while the server holds it: the retry waits for the cursor's lock (row 10)."""

    def delay(link: Link) -> None:
        link.cut(link.client)
        until(waiting)
        if arrives:
            link.deliver()
        link.cut(link.server)

    with StateStore.connect(replace(settings, pg_port=wire.port)) as store:
        wire.fault = delay
        if arrives:
            assert store.commit_batch(ready.spec, 2, "test").already_committed
        else:
            with pytest.raises(StoreUnavailable):
                store.commit_batch(ready.spec, 2, "test")
            assert store.commit_batch(ready.spec, 2, "test").already_committed is False

    assert wire.reached.is_set()
    assert ready.state() == AFTER_BOTH


@pytest.mark.promise("I20", "fault:process-is-stopped-and-goes-on-later:commit")
def test_a_committer_that_is_paused_loses_its_transaction(ready: Tally, settings: Settings, wire: Wire) -> None:
    """It delays others by a configured time, and still succeeds when it wakes up (I20, row 11)."""
    awake = threading.Event()

    def pause(link: Link) -> None:
        assert awake.wait(30)
        link.muted = False
        link.server.sendall(link.commit)

    impatient = replace(settings, idle_timeout_seconds=1)
    with StateStore.connect(replace(impatient, pg_port=wire.port)) as paused, ThreadPoolExecutor(1) as thread:
        wire.fault = pause
        slow = thread.submit(paused.commit_batch, ready.spec, 2, "slow")
        assert wire.reached.wait(10)
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


@pytest.mark.promise("fault:another-session-keeps-lock:commit", "error:STORE_UNAVAILABLE", "I19")
def test_a_cursor_that_stays_locked_delays_its_pipeline_by_the_lock_timeout_only(
    ready: Tally, settings: Settings, register: Callable[..., None]
) -> None:
    """The refusal is retryable, and leaves nothing when the lock is free again (row 27).

    Each pipeline has its own lock, and its own halt (I19).
    """
    register(MERGES)
    other = Tally(ready.store, MERGES.spec)
    other.plan()
    other.process_states(1, {"merged": [("k", 1, "1.00", None, None)]}, source_rows=1)
    with (
        closing(psycopg2.connect(**settings.conninfo())) as holder,
        holder.cursor() as cursor,
        StateStore.connect(replace(settings, lock_timeout_seconds=1)) as store,
    ):
        cursor.execute("SELECT FROM tidegate.cursor WHERE pipeline = 'tally' FOR UPDATE")
        assert other.commit(1).already_committed is False
        before, began = contents(settings), time.monotonic()
        with pytest.raises(StoreUnavailable, match="a lock timeout"):
            store.commit_batch(ready.spec, 2, "test")
        assert time.monotonic() - began < 3
        holder.rollback()
        assert contents(settings) == before
        assert store.commit_batch(ready.spec, 2, "test").already_committed is False


# giving a batch up


def test_a_failed_batch_can_be_skipped_and_order_goes_on(tally: Tally, settings: Settings) -> None:
    """A commit without rows takes its place, with owner and reason; staged rows and a late attempt never count."""
    tally.plan(3)
    tally.process(1, [("a", 1, 1, 1, 1)])
    tally.commit(1)
    late = tally.start(2)
    tally.stage(late, "per_shop", [("a", 5, 5, 5, 5)])
    tally.store.fail_attempt(late, "MALFORMED_RECORD: a.csv, line 3")
    tally.process(3, [("a", 1, 1, 1, 1)])

    skipped = tally.store.skip_batch(TALLY.spec, 2, "an operator", "cut off by the exporter")

    assert (skipped.key_count, skipped.skipped_reason, skipped.already_committed) == (0, "cut off by the exporter", False)
    assert [status.phase for status in tally.store.batch_statuses("tally")] == ["committed", "skipped", "processed"]
    history = tally.store.batch_history("tally", 2)
    assert history.commit is not None
    assert (history.commit["owner"], history.commit["skipped_reason"]) == ("an operator", "cut off by the exporter")
    assert tally.commit(3).key_count == 1
    before = contents(settings)
    assert tally.store.skip_batch(TALLY.spec, 2, "another", "again").already_committed
    assert str(tally.commit(2)) == "tally 2:1 already skipped, 0 keys"
    assert contents(settings) == before


def test_a_batch_that_could_still_commit_is_not_skipped(tally: Tally, settings: Settings) -> None:
    tally.plan(3)
    tally.process(1)
    tally.commit(1)
    tally.process(2)
    tally.store.halt_batch("tally", 3, "SOURCE_CHANGED: a.csv")
    before = contents(settings)

    for txid in (2, 3):  # one that has not failed, one whose turn it is not
        with pytest.raises(RangeRefused, match=r"has not failed|waits for txid 2"):
            tally.store.skip_batch(TALLY.spec, txid, "an operator", "out of impatience")

    assert contents(settings) == before
