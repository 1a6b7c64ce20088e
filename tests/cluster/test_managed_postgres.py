"""A server that is not ours: exact privileges, TLS, a transaction pooler, and failover to a standby."""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests import steps
from tests.acceptance.conftest import SALES, clean_state, stored_state, write_sales
from tests.chaos.run import background
from tests.conftest import register_pipelines
from tests.integration.conftest import ROW, TALLY, Tally, commit_next, until
from tests.postgres_versions import VERSIONS, AnyPostgres, binaries, running
from tests.statements import execute
from tests.store import Tracked, errors
from tidegate import migrations
from tidegate.jobs import PostgresTable
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.stack.components.server_process import group_of
from tidegate.state_store import Settings, StateStore

PASSWORD = "of an administrator"
ROLES = ("tidegate_owner", "tidegate", "tidegate_stager", "tidegate_reader")
# What a statement leaves in its session, as psycopg2 writes it
LASTING = re.compile(
    r"^\s*(SET (?!LOCAL|TRANSACTION)|LISTEN|PREPARE|LOAD)|set_config\('\w+', '[^']*', false\)|pg_(try_)?advisory_lock|WITH HOLD"
    r"|\bTEMP(ORARY)?\b"
)


def succeed(*command: object, **options: Any) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr


def psql(postgres: AnyPostgres, script: str, answers: str = "") -> None:
    """Run a script by psql without a terminal, as the administrator; `answers` are what it asks for."""
    file = postgres.settings.stack_folder / "script.sql"
    file.write_text(script)
    environment = {**os.environ, "PGPASSFILE": str(postgres.passfile), "PGPORT": str(postgres.port), "PGHOST": postgres.host}
    of_psql = ("--username=administrator", "--dbname=postgres", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={file}")
    # without a terminal, `\password` reads its answers from stdin
    succeed(binaries(max(VERSIONS)) / "psql", *of_psql, input=answers, env=environment, start_new_session=True)


def counted(settings: Settings) -> int:
    """Return how many batches have committed, after comparing it with the sales that the state has counted."""
    with StateStore.connect(settings) as store:
        last, rows = store.committed("tally"), Tally(store).state()
    assert [row[1] for row in rows] == [last]
    return last


def prepare(settings: Settings) -> None:
    migrations.upgrade(settings, [])
    register_pipelines(settings, TALLY)


class Authority:
    """A certificate authority of the test's own, and what it has signed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.certificate = folder, folder / "authority.crt"
        self.sign("authority")

    def sign(self, name: str, *options: str) -> tuple[Path, Path]:
        by = [] if name == "authority" else ["-CA", "authority.crt", "-CAkey", "authority.key"]
        made = ["-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt", "-newkey", "rsa:2048", "-nodes"]
        succeed("openssl", "req", "-x509", *made, *by, *options, cwd=self.folder)
        (self.folder / f"{name}.key").chmod(0o600)
        return self.folder / f"{name}.key", self.folder / f"{name}.crt"

    def protect(self, postgres: AnyPostgres) -> None:
        """Let a running server take encrypted connections only, but for its administrators; the reader needs a certificate."""
        key, certificate = self.sign("db.example", "-addext", "subjectAltName=IP:127.0.0.1")
        for file, name in ((key, "server.key"), (certificate, "server.crt"), (self.certificate, "clients.crt")):
            target = shutil.copy(file, postgres.data / name)
            target.chmod(0o600)
            if postgres.user is not None:
                os.chown(target, postgres.user, group_of(postgres.user))
        (postgres.data / "pg_hba.conf").write_text(
            "hostssl all tidegate_reader 127.0.0.1/32 scram-sha-256 clientcert=verify-full\n"
            "hostssl all all 127.0.0.1/32 scram-sha-256\nhostnossl all postgres,administrator 127.0.0.1/32 scram-sha-256\n"
        )
        try:
            postgres.alter("ssl = on", "ssl_ca_file = 'clients.crt'")
        except psycopg2.errors.InvalidParameterValue as error:
            pytest.skip(f"{postgres.binaries}: {error}")


@contextmanager
def pooler(postgres: AnyPostgres, folder: Path, port: int, *, size: int, most_clients: int = 500) -> Iterator[Settings]:
    """Run PgBouncer in transaction mode in front of a server, with so many connections to it per role."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("No PgBouncer. Install it with: apt-get install pgbouncer")
    folder.mkdir(mode=0o700)
    users = [line.split(":") for line in postgres.passfile.read_text().splitlines()]
    (folder / "users").write_text("".join(f'"{line[3]}" "{line[4]}"\n' for line in users))
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={postgres.host} port={postgres.port}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = scram-sha-256\n"
        f"auth_file = {folder / 'users'}\npool_mode = transaction\ndefault_pool_size = {size}\n"
        f"max_client_conn = {most_clients}\nlogfile = {folder / 'log'}\n"
    )
    if postgres.user is not None:  # it refuses to run as root
        succeed("chown", "-R", postgres.user, folder)
        for place in folder.parents:
            place.chmod(place.stat().st_mode | 0o011)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([program, folder / "pgbouncer.ini"], user=postgres.user, **quiet)
    settings = replace(postgres.settings, pg_port=port)

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with suppress(psycopg2.OperationalError):
            return bool(execute(settings.conninfo(), "SELECT 1"))
        return False

    try:
        until(answers)
        yield settings
    finally:
        process.terminate()
        process.wait(30)


class Pair:
    """A primary and its streaming standby, at two loopback addresses with the same port: one list of hosts leads to both."""

    def __init__(self, folder: Path, port: int) -> None:
        self.primary = AnyPostgres(folder / "primary", port)
        self.standby = AnyPostgres(folder / "standby", port, host="127.0.0.2")

    @property
    def settings(self) -> Settings:
        return replace(self.primary.settings, pg_host=f"{self.primary.host},{self.standby.host}")

    def follow(self) -> None:
        shutil.copytree(self.primary.secrets_folder, self.standby.secrets_folder)
        passwords = dict(line.split(":")[3:] for line in self.primary.passfile.read_text().splitlines())
        data, user = self.standby.data, f"user=postgres password={passwords['postgres']} application_name=second"
        data.mkdir(mode=0o700, parents=True)
        source = f"host={self.primary.host} port={self.primary.port} {user}"
        succeed(self.primary.binaries / "pg_basebackup", "-d", source, "-D", data, "-R", "-X", "stream", "--checkpoint=fast")
        if self.standby.user is not None:
            succeed("chown", "-R", self.standby.user, data)
        self.standby.start()
        until(lambda: self.primary.execute("SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"))

    def wait_for_both(self) -> None:
        ((place,),) = self.primary.execute("SELECT pg_current_wal_flush_lsn()")
        until(lambda: self.standby.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", [place])[0][0])

    def wait_for_each_commit(self) -> None:
        self.primary.alter("synchronous_standby_names = 'second'")
        until(lambda: self.primary.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"))

    def cut(self) -> None:
        """Let nothing more reach the standby, as before the loss of a primary whose standby lags."""
        self.standby.alter("primary_conninfo = ''")
        until(lambda: not self.standby.execute("SELECT 1 FROM pg_stat_wal_receiver"))

    def fail_over(self) -> None:
        self.primary.stop(signal.SIGKILL)
        assert self.standby.execute("SELECT pg_promote()") == [(True,)]
        until(lambda: self.standby.execute("SELECT pg_is_in_recovery()") == [(False,)])


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[AnyPostgres]:
    """A server whose administrator is no superuser, and which hides its identifier from all."""
    folder = tmp_path_factory.mktemp("managed")
    version = int(os.environ.get("POSTGRES_OF_TESTS", min(VERSIONS)))
    with running(AnyPostgres(folder, free_port(), version=version), bootstrap=False) as postgres:
        postgres.execute("CREATE ROLE administrator LOGIN CREATEROLE CREATEDB PASSWORD %s", [PASSWORD])
        with postgres.passfile.open("a") as passfile:
            passfile.write(f"*:*:*:administrator:{PASSWORD}\n")
        postgres.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC", database="template1")
        passwords = dict(line.split(":")[3:5] for line in postgres.passfile.read_text().splitlines())
        answers = "".join(f"{passwords[role]}\n{passwords[role]}\n" for role in ROLES)
        psql(postgres, migrations.roles(postgres.settings), answers)
        yield postgres


def test_a_server_that_is_not_verified_is_refused_for_good(managed: AnyPostgres, tmp_path: Path) -> None:
    """With TLS only, and a certificate of the reader's; the database is made by what the page prints, and is enough."""
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    ours.protect(managed)
    psql(managed, "".join(migrations.roles(replace(managed.settings, pg_database="shop")).partition("CREATE DATABASE")[1:]))
    settings = replace(managed.settings, pg_database="shop", pg_sslmode="verify-full", pg_sslrootcert=ours.certificate)
    prepare(settings)
    assert commit_next(settings, 2) == 2
    ((epoch,),) = execute(settings.conninfo(user="tidegate"), "SELECT tidegate.epoch()")
    assert re.fullmatch(r"ledger \d+/00000001/\d+", epoch)
    for user in ("tidegate", "tidegate_stager"):
        assert execute(settings.conninfo(user=user), "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [(True,)]
    with pytest.raises(errors.AccessRefused, match="certificate"):
        StateStore.connect(settings, user="tidegate_reader")
    key, certificate = ours.sign("tidegate_reader")
    StateStore.connect(replace(settings, pg_sslcert=certificate, pg_sslkey=key), user="tidegate_reader").close()
    refused = {
        "certificate verify failed": replace(settings, pg_sslrootcert=other.certificate),
        "does not match host name": replace(settings, pg_host="localhost"),
        "no encryption": replace(settings, pg_sslmode="disable"),
        "does not exist": replace(settings, pg_sslrootcert=ours.folder / "missing.crt"),
    }
    for message, wrong in refused.items():
        with pytest.raises(errors.AccessRefused, match=message):
            StateStore.connect(wrong)
    StateStore.connect(replace(settings, pg_host="localhost", pg_sslmode="verify-ca")).close()


def test_batches_commit_through_a_transaction_pooler(tmp_path: Path, free_port: Callable[[], int]) -> None:
    options = {"log_statement": "all", "log_line_prefix": "%p "}
    with (
        running(AnyPostgres(tmp_path / "plain", free_port(), **options)) as plain,
        pooler(plain, tmp_path / "pooler", free_port(), size=2) as pooled,
    ):
        prepare(pooled)
        plain.execute("ALTER ROLE tidegate SET timezone = 'Asia/Tokyo'")
        plain.execute("SELECT 'the test begins'")
        with ThreadPoolExecutor(4) as workers:
            list(workers.map(_commit_some, [pooled] * 4))
        with StateStore.connect(pooled) as store, store.engine.connect() as first, store.engine.connect() as second:
            left = store.uncommitted("tally", 100)
            assert [each.scalar(sa.text("SHOW timezone")) for each in (first, second)] == ["UTC", "UTC"]
        assert commit_next(pooled, max(len(left), 1)) == counted(pooled) > 5
        log = plain.log().rpartition("the test begins")[2]
        with (
            pooler(plain, tmp_path / "full", free_port(), size=1, most_clients=1) as full,
            StateStore.connect(full) as store,
            store.engine.connect(),
            pytest.raises(errors.StoreUnavailable, match=r"too many connections \(.*no more connections"),
        ):
            StateStore.connect(full)
    statements = re.findall(r"^\d+ LOG:  statement: (.*(?:\n(?!\d+ LOG).*)*)", log, re.MULTILINE)
    assert len(statements) > 50
    lasting = [text for text in statements if LASTING.search(text)]
    # The pooler itself gives a connection the name of each client that it lends it to; psycopg2 puts back what it has not set.
    assert [text for text in lasting if not re.search("application_name|TO DEFAULT", text)] == []


def _commit_some(settings: Settings) -> None:
    """Plan and process batches of runs of one's own, as several Dag runs would; commit what is ready."""
    with StateStore.connect(settings) as store:
        tally = Tally(store)
        for number in range(5):
            for txid in tally.plan(run_id=f"run {threading.get_ident()} {number}") or ():  # None: another planner was first
                tally.process(txid, ROW)
            store.commit_ready(TALLY.spec, "test")


@pytest.fixture
def pair(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Pair]:
    pair = Pair(tmp_path, free_port())
    with running(pair.primary):
        prepare(pair.primary.settings)
        try:
            pair.follow()
            yield pair
        finally:
            pair.standby.stop()
            pair.standby.delete()


@pytest.mark.promise("decision:0036", "I4")
def test_a_failover_that_loses_commits_halts_until_a_person_accepts(pair: Pair, tmp_path: Path) -> None:
    pair.wait_for_both()
    standby = replace(pair.settings, pg_host=pair.standby.host)
    table = PostgresTable(table="sales", key="id", schema={"id": "bigint"})  # whose open writers cannot be seen there
    with pytest.raises(errors.SourceUnreadable, match="standby"):
        coordinator_of(table, standby).initialize_transaction(1, None, None)
    with StateStore.connect(standby) as store:
        for step in (lambda: Tally(store).plan(), lambda: store.commit_ready(TALLY.spec, "test")):
            with pytest.raises(errors.StoreUnavailable, match="standby"):
                step()
    assert commit_next(replace(pair.settings, pg_host=f"{pair.standby.host},{pair.primary.host}"), 2) == 2
    with StateStore.connect(pair.settings) as store:
        assert Tally(store).plan(run_id="early") == [3]
    pair.wait_for_both()
    pair.cut()
    assert commit_next(pair.settings, 3) == 5
    with StateStore.connect(pair.settings) as store:
        tally = Tally(store)
        (txid,) = tally.plan(run_id="in work")
        zombie = tally.start(txid)  # its fence is lost, too; its process lives on
        pair.fail_over()
        with pytest.raises(errors.HoleDetected, match=r"stands at txid 2, but .* txid 5 committed .*txids 3 to 5 are lost"):
            commit_next(pair.settings)
        elsewhere = replace(pair.settings, witness_folder=tmp_path / "another machine")
        with pytest.raises(errors.HoleDetected, match="restored, promoted or copied"):
            commit_next(elsewhere)  # it has no witness
        assert counted(pair.settings) == 2
        (story,) = migrations.accept_epoch(pair.settings, "an operator").values()
        assert "txids 3 to 5 are lost" in story
        assert commit_next(pair.settings, 3) == 5  # planned again from the source
        (again,) = tally.plan(run_id="again")
        assert again == zombie.txid == 6
        newer = tally.start(again)
        assert newer.number == zombie.number, "the promoted server hands out the same number again"
        staged = [tally.stage(zombie, "per_shop", [("z", 9, 9, 9, 9)]), tally.stage(zombie, "per_day", [])]
        with pytest.raises(errors.AttemptFenced, match="another history"):
            store.seal(zombie, staged, Tracked(0))
        store.seal(newer, [tally.stage(newer, "per_shop", ROW), tally.stage(newer, "per_day", [])], Tracked(0))
        tally.commit(again)
        assert tally.state() == [("a", 6, 6, 1, 1, 6)]


@pytest.mark.promise("fault:synchronous-standby-is-promoted-with-pg_failover-go:commit", "decision:0036")
def test_a_failover_to_a_synchronous_standby_goes_on_by_itself(pair: Pair) -> None:
    settings = replace(pair.settings, pg_failover="go-on")
    pair.wait_for_each_commit()
    reported: list[int] = []

    def work(is_over: threading.Event) -> None:
        while not is_over.wait(0.01):
            with suppress(errors.StoreUnavailable):  # as Airflow's retries do
                reported.append(commit_next(settings))

    with background(work):
        until(lambda: len(reported) >= 10)
        pair.fail_over()
        at_failover = len(reported)
        until(lambda: len(reported) >= at_failover + 10)
    assert len(set(reported)) == len(reported)
    assert commit_next(settings) == counted(settings) > max(reported)

    # Where the promotion may have lost something, the same database halts.
    with pytest.raises(errors.HoleDetected, match="restored, promoted or copied"):
        commit_next(replace(settings, pg_failover="halt"))


def slowly(rows: DataFrame) -> DataFrame:
    return rows.where(F.udf(lambda _: time.sleep(0.125) is None, "boolean")(F.lit(1)))


@pytest.mark.promise("fault:synchronous-standby-is-promoted-with-pg_failover-go:processing")
@pytest.mark.skipif("CLUSTER" not in os.environ, reason="the long form: make cluster-test")
def test_a_failover_in_the_middle_of_a_run_of_spark(pair: Pair, stack: Settings, tmp_path: Path) -> None:
    pipeline = replace(SALES, states={"sales_per_shop": SALES.states["per_shop"]}, transform=slowly, retry_delay_seconds=0)
    of_spark = {"spark_remote": stack.spark_remote, "spark_token_file": stack.spark_token_file, "min_file_age_seconds": 0}
    settings = replace(pair.settings, pg_failover="go-on", home=tmp_path, **of_spark)
    register_pipelines(settings, pipeline)
    write_sales(tmp_path, *(f"{number:02d}" for number in range(1, 25)))
    pair.wait_for_each_commit()

    def found(postgres: AnyPostgres, query: str) -> list[tuple[Any, ...]]:
        return postgres.execute(query, database=postgres.settings.pg_database)

    def committed_at(postgres: AnyPostgres) -> int:
        return int(found(postgres, "SELECT txid FROM tidegate.cursor WHERE pipeline = 'sales'")[0][0])

    def run() -> None:
        for number in count():
            with suppress(errors.RetryableError):
                steps.run(settings, pipeline, f"run {number}")
                return
            time.sleep(0.2)  # as Airflow's retries do

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        until(lambda: committed_at(pair.primary) >= 3)
        # Its tasks stage their rows when the server is gone, or another.
        until(lambda: found(pair.primary, "SELECT 1 FROM tidegate.attempt WHERE pipeline = 'sales' AND sealed_at IS NULL"))
        pair.fail_over()
        assert committed_at(pair.standby) < 12
        running.result(120)
    assert stored_state(settings, pipeline) == clean_state(tmp_path)
    assert committed_at(pair.standby) == 12
