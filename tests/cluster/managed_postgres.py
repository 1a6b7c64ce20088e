"""Servers as a managed service gives them: administrators without superuser, TLS, a transaction pooler, a standby."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg2
import pytest
import sqlalchemy as sa

from tests.conftest import register_pipelines
from tests.integration.conftest import TALLY, Tally, until
from tests.postgres_versions import VERSIONS, AnyPostgres, binaries
from tidegate import migrations
from tidegate.stack.components.server_process import group_of
from tidegate.state_store import Settings, StateStore

LONG = pytest.mark.skipif("CLUSTER" not in os.environ, reason="the long form: make cluster-test")
ROW = [("a", 1, 1, 1, 1)]
PASSWORD = "of an administrator"
STANDBY_HOST = "127.0.0.2"
NEW_KEY = "req -newkey rsa:2048 -nodes"


def psql(postgres: AnyPostgres, script: str, *, user: str, database: str = "postgres", answers: str = "") -> None:
    """Run a script by psql without a terminal; `answers` are what it asks for."""
    file = postgres.settings.stack_folder / "script.sql"
    file.write_text(script)
    environment = {**os.environ, "PGPASSFILE": str(postgres.passfile), "PGPORT": str(postgres.port)}
    command = [binaries(max(VERSIONS)) / "psql", "--host", postgres.host, "--username", user, "--dbname", database]
    done = subprocess.run(
        [*map(str, command), "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={file}"],
        input=answers,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # without a terminal, `\password` reads its answers from stdin
    )
    assert done.returncode == 0, done.stderr


def commit_next(settings: Settings, number: int = 1) -> int:
    """Commit planned batches, or new ones, each with one sale in shop a; return the last txid."""
    with StateStore.connect(settings) as store:
        tally = Tally(store)
        txids = store.uncommitted("tally", number)
        if number > len(txids):
            txids += tally.plan(number - len(txids), run_id=f"run {time.monotonic_ns()}")
        for txid in txids:
            tally.process(txid, ROW, mode="restage")  # an earlier try may have sealed it
            tally.commit(txid)
    return txids[-1]


def sold(settings: Settings) -> int:
    """Return how many sales the state has counted: as many as batches have committed."""
    with StateStore.connect(settings) as store:
        rows = Tally(store).state()
    return rows[0][1] if rows else 0


def committed(settings: Settings) -> int:
    with StateStore.connect(settings) as store:
        return store.committed("tally")


def prepare(settings: Settings) -> None:
    migrations.upgrade(settings, [])
    register_pipelines(settings, TALLY)


# TLS


@dataclass(frozen=True)
class Authority:
    """A certificate authority of the test's own, and what it has signed."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        folder.mkdir()
        made = cls(folder)
        made._run(f"{NEW_KEY} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.crt")
        return made

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    def sign(self, name: str, *, common_name: str, alternative: str = "") -> tuple[Path, Path]:
        self._run(f"{NEW_KEY} -subj /CN={common_name} -keyout {name}.key -out {name}.csr")
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={alternative}\n" if alternative else "")
        signed = "-CA ca.crt -CAkey ca.key -CAcreateserial -days 2"
        self._run(f"x509 -req -in {name}.csr {signed} -extfile {name}.ext -out {name}.crt")
        (self.folder / f"{name}.key").chmod(0o600)
        return self.folder / f"{name}.key", self.folder / f"{name}.crt"

    def _run(self, arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments.split()], cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def give_to(postgres: AnyPostgres, file: Path, name: str) -> None:
    target = postgres.data / name
    shutil.copyfile(file, target)
    target.chmod(0o600)
    if postgres.user is not None:
        os.chown(target, postgres.user, group_of(postgres.user))


def demand_tls(postgres: AnyPostgres, key: Path, certificate: Path, authority: Authority, *, with_certificate: str) -> None:
    """Let a running server take encrypted connections only, but for its administrators; one role needs a certificate."""
    for file, name in ((key, "server.key"), (certificate, "server.crt"), (authority.certificate, "clients.crt")):
        give_to(postgres, file, name)
    (postgres.data / "pg_hba.conf").write_text(
        f"hostssl all {with_certificate} 127.0.0.1/32 scram-sha-256 clientcert=verify-full\n"
        "hostssl all all 127.0.0.1/32 scram-sha-256\nhostnossl all postgres,administrator 127.0.0.1/32 scram-sha-256\n"
    )
    try:
        postgres.execute("ALTER SYSTEM SET ssl = on")
    except psycopg2.errors.InvalidParameterValue as error:
        pytest.skip(f"{postgres.binaries}: {error}")
    postgres.execute("ALTER SYSTEM SET ssl_ca_file = 'clients.crt'")
    postgres.execute("SELECT pg_reload_conf()")


# pooler


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
        subprocess.run(["chown", "-R", str(postgres.user), folder], check=True)
        reach = [place for place in folder.parents if not place.stat().st_mode & 0o001]
        for place in reach:
            place.chmod(place.stat().st_mode | 0o011)
    process = subprocess.Popen(
        [program, folder / "pgbouncer.ini"], user=postgres.user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    settings = replace(postgres.settings, pg_port=port)

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            psycopg2.connect(**settings.conninfo()).close()
        except psycopg2.OperationalError:
            return False
        return True

    try:
        until(answers)
        yield settings
    finally:
        process.terminate()
        process.wait(30)


# standby


class Pair:
    """A primary and its streaming standby, at two loopback addresses with the same port: one list of hosts leads to both."""

    def __init__(self, folder: Path, port: int) -> None:
        self.primary = AnyPostgres(folder / "primary", port)
        self.standby = AnyPostgres(folder / "standby", port, host=STANDBY_HOST)

    @property
    def settings(self) -> Settings:
        return replace(self.primary.settings, pg_host=f"{self.primary.host},{self.standby.host}")

    def follow(self) -> None:
        shutil.copytree(self.primary.secrets_folder, self.standby.secrets_folder)
        data = self.standby.data
        data.mkdir(mode=0o700, parents=True)
        environment = {**os.environ, "PGPASSFILE": str(self.primary.passfile)}
        source = ["-h", self.primary.host, "-p", str(self.primary.port), "-U", "postgres"]
        backup = [self.primary.binaries / "pg_basebackup", *source, "-D", data, "-X", "stream", "--checkpoint=fast"]
        done = subprocess.run([*map(str, backup)], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        rows = [line.split(":") for line in self.primary.passfile.read_text().splitlines()]
        (password,) = [row[4] for row in rows if row[3] == "postgres"]
        (data / "standby.signal").touch()
        with (data / "postgresql.auto.conf").open("a") as settings:
            settings.write(
                f"primary_conninfo = 'host={self.primary.host} port={self.primary.port} user=postgres password={password} "
                "application_name=second'\n"
            )
        if self.standby.user is not None:
            subprocess.run(["chown", "-R", str(self.standby.user), data], check=True)
        self.standby.start()
        until(lambda: self.primary.execute("SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"))

    def wait_for_both(self) -> None:
        """Wait until the standby has all that the primary has."""
        ((place,),) = self.primary.execute("SELECT pg_current_wal_flush_lsn()")
        until(lambda: self.standby.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", [place])[0][0])

    def wait_for_each_commit(self) -> None:
        """Let the standby be a synchronous one."""
        self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = 'second'")
        self.primary.execute("SELECT pg_reload_conf()")
        until(lambda: self.primary.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"))

    def cut(self) -> None:
        """Let nothing more reach the standby, as before the loss of a primary whose standby lags."""
        self.standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
        self.standby.execute("SELECT pg_reload_conf()")
        until(lambda: not self.standby.execute("SELECT 1 FROM pg_stat_wal_receiver"))

    def promote(self) -> None:
        assert self.standby.execute("SELECT pg_promote()") == [(True,)]
        until(lambda: self.standby.execute("SELECT pg_is_in_recovery()") == [(False,)])


@contextmanager
def running_pair(folder: Path, port: int) -> Iterator[Pair]:
    """Run both, with pipeline tally on the primary and, in the end, on none."""
    pair = Pair(folder, port)
    try:
        pair.primary.initialize()
        pair.primary.start()
        pair.primary.bootstrap()
        prepare(pair.primary.settings)
        pair.follow()
        yield pair
    finally:
        for postgres in (pair.standby, pair.primary):
            postgres.stop()
            postgres.delete()


def beside_spark(settings: Settings, stack: Settings, home: Path) -> Settings:
    """Return settings of a server that is not the stack's, with Spark's server of the stack."""
    spark = {"spark_remote": stack.spark_remote, "spark_token_file": stack.spark_token_file}
    return replace(settings, **spark, home=home, min_file_age_seconds=0)


def scalar(settings: Settings, user: str, statement: str) -> object:
    """Return the only value of a statement, by the engine that the ledger uses."""
    with StateStore.connect(settings, user=user) as store, store.engine.connect() as connection:
        return connection.scalar(sa.text(statement))
