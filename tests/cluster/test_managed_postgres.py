"""A server that is not ours: exact privileges, TLS, a transaction pooler, and failover to a standby."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa
from psycopg2 import sql
from pyspark.sql import DataFrame

from tests import steps
from tests.acceptance.conftest import SALES, clean_state, stored_state, write_sales
from tests.cluster.managed_postgres import (
    LONG,
    PASSWORD,
    ROW,
    Authority,
    beside_spark,
    commit_next,
    committed,
    demand_tls,
    pooler,
    prepare,
    psql,
    running_pair,
    scalar,
    sold,
)
from tests.conftest import register_pipelines
from tests.integration.conftest import TALLY, Tally, until
from tests.postgres_versions import VERSIONS, AnyPostgres, running
from tests.statements import execute
from tests.store import Tracked
from tidegate import migrations
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    AccessRefused,
    AttemptFenced,
    HoleDetected,
    PermanentError,
    SourceUnreadable,
    StoreUnavailable,
    TidegateError,
)

ROLES = ("tidegate_owner", "tidegate", "tidegate_stager", "tidegate_reader")


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[AnyPostgres]:
    """A server whose administrator is no superuser, and which hides its identifier from all."""
    folder = tmp_path_factory.mktemp("managed")
    version = int(os.environ.get("POSTGRES_OF_TESTS", min(VERSIONS)))
    with running(AnyPostgres(folder, free_port(), version=version), bootstrap=False) as postgres:
        postgres.execute(
            sql.SQL("CREATE ROLE administrator LOGIN CREATEROLE CREATEDB PASSWORD {}").format(sql.Literal(PASSWORD))
        )
        with postgres.passfile.open("a") as passfile:
            passfile.write(f"*:*:*:administrator:{PASSWORD}\n")
        postgres.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC", database="template1")
        passwords = dict(line.split(":")[3:5] for line in postgres.passfile.read_text().splitlines())
        answers = "".join(f"{passwords[role]}\n{passwords[role]}\n" for role in ROLES)
        psql(postgres, migrations.roles(postgres.settings), user="administrator", answers=answers)
        yield postgres


# What a statement leaves in its session, as psycopg2 writes it.
LASTING = re.compile(
    r"^\s*(SET (?!LOCAL|TRANSACTION)|LISTEN|PREPARE|LOAD)|set_config\('\w+', '[^']*', false\)|pg_(try_)?advisory_lock|WITH HOLD"
    r"|\bTEMP(ORARY)?\b"
)


# TLS


def test_a_server_that_is_not_verified_is_refused_for_good(managed: AnyPostgres, tmp_path: Path) -> None:
    """With TLS only, and a certificate of the reader's; the database is made by what the page prints, and is enough."""
    ours, other = Authority.make(tmp_path / "ours"), Authority.make(tmp_path / "other")
    demand_tls(
        *(managed, *ours.sign("server", common_name="db.example", alternative="IP:127.0.0.1"), ours),
        with_certificate="tidegate_reader",
    )
    of_database = migrations.roles(replace(managed.settings, pg_database="shop")).partition("CREATE DATABASE")
    psql(managed, "".join(of_database[1:]), user="administrator")
    settings = replace(managed.settings, pg_database="shop", pg_sslmode="verify-full", pg_sslrootcert=ours.certificate)
    prepare(settings)
    assert commit_next(settings, 2) == 2
    assert re.fullmatch(r"ledger \d+/00000001/\d+", str(scalar(settings, "tidegate", "SELECT tidegate.epoch()")))
    for user in ("tidegate", "tidegate_stager"):
        assert execute(settings.conninfo(user=user), "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [(True,)]
    with pytest.raises(AccessRefused, match="certificate"):
        StateStore.connect(settings, user="tidegate_reader")
    key, certificate = ours.sign("reader", common_name="tidegate_reader")
    StateStore.connect(replace(settings, pg_sslcert=certificate, pg_sslkey=key), user="tidegate_reader").close()
    refused = {
        "certificate verify failed": replace(settings, pg_sslrootcert=other.certificate),
        "does not match host name": replace(settings, pg_host="localhost"),
        "no encryption": replace(settings, pg_sslmode="disable"),
        "does not exist": replace(settings, pg_sslrootcert=ours.folder / "missing.crt"),
    }
    for message, wrong in refused.items():
        with pytest.raises(AccessRefused, match=message):
            StateStore.connect(wrong)
    StateStore.connect(replace(settings, pg_host="localhost", pg_sslmode="verify-ca")).close()


# pooler


def test_batches_commit_through_a_transaction_pooler(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """They leave nothing behind in its sessions, and are in UTC whatever these have."""
    options = {"log_statement": "all", "log_line_prefix": "%p "}
    with (
        running(AnyPostgres(tmp_path / "plain", free_port(), **options)) as plain,
        pooler(plain, tmp_path / "pooler", free_port(), size=2) as pooled,
    ):
        prepare(pooled)
        plain.execute("ALTER ROLE tidegate SET timezone = 'Asia/Tokyo'")
        plain.execute("SELECT 'the test begins'")
        with ThreadPoolExecutor(4) as workers:
            for worker in [workers.submit(_commit_some, pooled, 5) for _ in range(4)]:
                worker.result()
        with StateStore.connect(pooled) as store:
            left = store.uncommitted("tally", 100)
            with store.engine.connect() as first, store.engine.connect() as second:
                assert [each.scalar(sa.text("SHOW timezone")) for each in (first, second)] == ["UTC", "UTC"]
        commit_next(pooled, max(len(left), 1))
        assert sold(pooled) == committed(pooled) > 5
        log = plain.log().rpartition("the test begins")[2]
        with (
            pooler(plain, tmp_path / "full", free_port(), size=1, most_clients=1) as full,
            StateStore.connect(full) as store,
            store.engine.connect(),
            pytest.raises(StoreUnavailable, match=r"too many connections \(.*no more connections"),
        ):
            StateStore.connect(full)
    statements = re.findall(r"^\d+ LOG:  statement: (.*(?:\n(?!\d+ LOG).*)*)", log, re.MULTILINE)
    assert len(statements) > 50
    lasting = [text for text in statements if LASTING.search(text)]
    # The pooler itself gives a connection the name of each client that it lends it to; psycopg2 puts back what it has not set.
    assert [text for text in lasting if not re.search("application_name|TO DEFAULT", text)] == []


def _commit_some(settings: Settings, number: int) -> None:
    """Plan and process batches of a run of one's own, as several Dag runs would; commit what is ready."""
    with StateStore.connect(settings) as store:
        tally = Tally(store)
        for _ in range(number):
            try:
                for txid in tally.plan(run_id=f"run {threading.get_ident()} {_}"):
                    tally.process(txid, ROW)
            except AssertionError:  # another planner was first
                pass
            store.commit_ready(TALLY.spec, "test")


# failover


@pytest.fixture
def pair(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Any]:
    with running_pair(tmp_path, free_port()) as running:
        yield running


@pytest.mark.promise("decision:0036", "I4")
def test_a_failover_that_loses_commits_halts_until_a_person_accepts(pair: Any, tmp_path: Path) -> None:
    pair.wait_for_both()
    standby = replace(pair.settings, pg_host=pair.standby.host)
    table = PostgresTable(table="sales", key="id", schema={"id": "bigint"})  # whose open writers cannot be seen there
    with pytest.raises(SourceUnreadable, match="standby"):
        coordinator_of(table, standby).initialize_transaction(1, None, None)
    with StateStore.connect(standby) as store:
        for step in (lambda: Tally(store).plan(), lambda: store.commit_ready(TALLY.spec, "test")):
            with pytest.raises(StoreUnavailable, match="standby"):
                step()
    reversed_hosts = replace(pair.settings, pg_host=f"{pair.standby.host},{pair.primary.host}")
    assert commit_next(reversed_hosts, 2) == 2
    with StateStore.connect(pair.settings) as store:
        assert Tally(store).plan(run_id="early") == [3]
    pair.wait_for_both()
    pair.cut()
    assert commit_next(pair.settings, 3) == 5
    with StateStore.connect(pair.settings) as store:
        tally = Tally(store)
        (txid,) = tally.plan(run_id="in work")
        zombie = tally.start(txid)  # its fence is lost, too; its process lives on
        pair.primary.stop(signal.SIGKILL)
        pair.promote()

        with pytest.raises(HoleDetected, match=r"stands at txid 2, but .* txid 5 committed .*txids 3 to 5 are lost"):
            commit_next(pair.settings)
        elsewhere = replace(pair.settings, witness_folder=tmp_path / "another machine")
        with pytest.raises(HoleDetected, match="restored, promoted or copied"):
            commit_next(elsewhere)  # it has no witness
        assert committed(pair.settings) == 2

        (story,) = migrations.accept_epoch(pair.settings, "an operator").values()
        assert "txids 3 to 5 are lost" in story
        assert commit_next(pair.settings, 3) == 5  # planned again from the source
        (again,) = tally.plan(run_id="again")
        assert again == zombie.txid == 6
        newer = tally.start(again)
        assert newer.number == zombie.number, "the promoted server hands out the same number again"
        staged = [tally.stage(zombie, "per_shop", [("z", 9, 9, 9, 9)]), tally.stage(zombie, "per_day", [])]
        with pytest.raises(AttemptFenced, match="another history"):
            store.seal(zombie, staged, Tracked(0))
        store.seal(newer, [tally.stage(newer, "per_shop", ROW), tally.stage(newer, "per_day", [])], Tracked(0))
        tally.commit(again)
        assert tally.state() == [("a", 6, 6, 1, 1, 6)]


@pytest.mark.promise("fault:synchronous-standby-is-promoted-with-pg_failover-go:commit", "decision:0036")
def test_a_failover_to_a_synchronous_standby_goes_on_by_itself(pair: Any) -> None:
    settings = replace(pair.settings, pg_failover="go-on")
    pair.wait_for_each_commit()
    reported: list[int] = []
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            try:
                reported.append(commit_next(settings))
            except StoreUnavailable:  # as Airflow's retries do
                is_over.wait(0.2)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            until(lambda: len(reported) >= 10)
            pair.primary.stop(signal.SIGKILL)
            at_failover = len(reported)
            pair.promote()
            until(lambda: working.done() or len(reported) >= at_failover + 10)
        finally:
            is_over.set()
        working.result()
    assert len(set(reported)) == len(reported)
    commit_next(settings)
    assert sold(settings) == committed(settings) > max(reported)

    # Where the promotion may have lost something, the same database halts.
    with pytest.raises(HoleDetected, match="restored, promoted or copied"):
        commit_next(replace(settings, pg_failover="halt"))


def _while_spark_computes(pair: Any) -> None:
    """Wait for an attempt that has begun: its tasks stage their rows when the server is gone, or another."""
    is_begun = "SELECT 1 FROM tidegate.attempt WHERE pipeline = 'sales' AND sealed_at IS NULL"
    until(lambda: pair.primary.execute(is_begun, database=pair.primary.settings.pg_database))


def _while_a_commit_waits(pair: Any) -> None:
    """Hold the cursor's row, and wait until a commit waits for it."""
    hold = "BEGIN; SELECT FROM tidegate.cursor WHERE pipeline = 'sales' FOR UPDATE; SELECT pg_sleep(120)"
    threading.Thread(target=_execute_until_killed, args=[pair.primary, hold], daemon=True).start()
    until(lambda: pair.primary.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))


def slowly(rows: DataFrame) -> DataFrame:
    return rows.where("coalesce(java_method('java.lang.Thread', 'sleep', 125L), 'over') <> ''")


def _execute_until_killed(postgres: AnyPostgres, statement: str) -> None:
    with pytest.raises(psycopg2.OperationalError):
        postgres.execute(statement, database=postgres.settings.pg_database)


@pytest.mark.promise("fault:synchronous-standby-is-promoted-with-pg_failover-go:processing")
@LONG
@pytest.mark.parametrize("moment", [_while_spark_computes, _while_a_commit_waits])
@pytest.mark.parametrize("failover", ["go-on", "halt"])
def test_a_failover_in_the_middle_of_a_run_of_spark(
    pair: Any, stack: Settings, tmp_path: Path, failover: str, moment: Callable[[Any], None]
) -> None:
    states = {"sales_per_shop": SALES.states["per_shop"]}  # tally has the other name
    pipeline = replace(SALES, states=states, transform=slowly, retry_delay_seconds=0)
    settings = replace(beside_spark(pair.settings, stack, tmp_path), pg_failover=failover)
    register_pipelines(settings, pipeline)
    write_sales(tmp_path, *(f"{number:02d}" for number in range(1, 25)))
    if failover == "go-on":
        pair.wait_for_each_commit()

    def run() -> PermanentError | None:
        numbers = count()
        while True:
            try:
                steps.run(settings, pipeline, f"run {next(numbers)}")
            except PermanentError as error:
                return error
            except TidegateError:
                time.sleep(0.2)  # as Airflow's retries do
            else:
                return None

    running = ThreadPoolExecutor(1).submit(run)
    until(lambda: _sales_committed(pair.primary) >= 3)
    if failover == "halt":
        pair.wait_for_both()
        pair.cut()
        kept = _sales_committed(pair.standby)
        until(lambda: _sales_committed(pair.primary) >= kept + 2)
    moment(pair)
    pair.primary.stop(signal.SIGKILL)
    pair.promote()
    assert _sales_committed(pair.standby) < 12
    halted_by = running.result(120)
    assert isinstance(halted_by, HoleDetected) == (failover == "halt")
    if failover == "halt":
        assert 3 <= _sales_committed(pair.standby) <= kept
        migrations.accept_epoch(settings, "an operator")
        assert run() is None
    assert stored_state(settings, pipeline) == clean_state(tmp_path)
    assert _sales_committed(pair.standby) == 12


def _sales_committed(postgres: AnyPostgres) -> int:
    query = "SELECT txid FROM tidegate.cursor WHERE pipeline = 'sales'"
    ((txid,),) = postgres.execute(query, database=postgres.settings.pg_database)
    return int(txid)
