"""The servers of a test run: one Postgres and one Spark Connect server, with Kafka if needed, for all its processes.

The first process that needs them starts them, in a folder of the run, under a lock; the others join. They stay until the run
ends, and its reaper ends them (`tests.reaper`).
"""

import fcntl
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from psycopg2 import sql

from tests import supervisor
from tests.jars import fetch_or_skip
from tests.reaper import VARIABLE, Run
from tests.statements import execute
from tests.store import STACK_FOLDER
from tidegate import migrations
from tidegate import stack as embedded
from tidegate.stack.components import kafka, server_process
from tidegate.stack.components.server_process import Component, reserve_port
from tidegate.stack.layout import USUAL_PORTS
from tidegate.state_store import Settings

# Tests end before Java's second compiler, and threads that collect garbage, have paid for themselves.
# With the 48 MB for compiled code that this level has by default, the shared server runs out of room late in the run: then a
# call ends with NoSuchMethodException.
# Classes that were released are not verified again.
QUICK_TO_START = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
# But for `make soak`: most queries are new, and have few rows. Spark's expressions are interpreted,
# as compiling those takes a quarter of the server's processor time. Those with Airflow compile.
INTERPRETED = "-Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
# Names of databases are used again, so that a process's tests find the Spark session that earlier ones left on the server.
_used: set[str] = set()


class Server:
    """A Postgres server, for its administrator."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def execute(self, statement: str | sql.Composable, parameters: object = None) -> list[tuple]:
        return execute({**self.settings.conninfo(user="postgres"), "dbname": "postgres"}, statement, parameters)

    def create_database(self, template: str | None = None) -> str:
        name = next(name for number in count(1) if (name := f"tidegate_test_{os.getpid()}_{number}") not in _used)
        _used.add(name)
        self.execute(f"CREATE DATABASE {name} OWNER tidegate_owner TEMPLATE {template or 'template0'}")
        return name

    @contextmanager
    def database(self, template: str | None = None) -> Iterator[str]:
        name = self.create_database(template)
        try:
            yield name
        finally:
            self.drop_database(name)

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        _used.discard(name)


def shared_template(server: Server) -> str:
    """Return the name of a migrated database without pipelines on one of the run's servers, of which tests get copies."""
    name = f"tidegate_template_{Run.of(os.environ[VARIABLE]).owner.pid}"

    def make(_home: Path) -> None:
        in_work = f"{name}_in_work"
        server.drop_database(in_work)
        server.execute(f"CREATE DATABASE {in_work} OWNER tidegate_owner TEMPLATE template0")
        migrations.upgrade(replace(server.settings, pg_database=in_work), [])
        server.execute(f"ALTER DATABASE {in_work} RENAME TO {name}")

    _joined(f"template_{server.settings.pg_port}", make)
    return name


@contextmanager
def migrated_database(server: Server) -> Iterator[str]:
    with server.database() as name:
        migrations.upgrade(replace(server.settings, pg_database=name), [])
        yield name


def shared_stack(*extras: str) -> Settings:
    """Return settings of the run's stack; start it if no other process has."""
    home = _joined("stack", lambda home: _start(home, extras))
    return Settings.load({**os.environ, "TIDEGATE_HOME": str(home)})


def _joined(name: str, start: Callable[[Path], None]) -> Path:
    """Return the folder of this name in the run's, in which one process of the run has started something."""
    folder = Run.of(os.environ[VARIABLE]).shared
    folder.mkdir(exist_ok=True)
    home, is_started = folder / name, folder / f"{name}.started"
    with (folder / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_started.exists():
            home.mkdir(exist_ok=True)
            start(home)
            is_started.touch()
    return home


def fetch_kafka() -> None:
    fetch_or_skip(*kafka.PACKAGES)
    fetch_or_skip(*kafka.SPARK_PACKAGES)


@contextmanager
def running_stack(home: Path) -> Iterator[Settings]:
    """Run an embedded stack without Airflow in an empty folder, for tests that stop or change servers; delete it at the end."""
    try:
        _start(home)
        yield Settings.load({**os.environ, "TIDEGATE_HOME": str(home)})
    finally:
        embedded.down(Settings.load({**os.environ, "TIDEGATE_HOME": str(home)}), delete_data=True)


def _start(home: Path, extras: tuple[str, ...] = ()) -> None:
    java_options = QUICK_TO_START if "SOAK" in os.environ else f"{QUICK_TO_START} {INTERPRETED}"
    # The usual ports are left to the tests of whole stacks, which run at the same time.
    stack_file = home / STACK_FOLDER / "stack.json"
    stack_file.parent.mkdir(mode=0o711, exist_ok=True)
    with ExitStack() as chosen:
        stack_file.write_text(json.dumps({"ports": {name: reserve_port(None, chosen) for name in USUAL_PORTS}}))
    environ, start = {**os.environ, "TIDEGATE_HOME": str(home)}, server_process.start

    def start_ours(component: Component, stack_folder: Path) -> subprocess.Popen[bytes]:
        command = [supervisor.__name__ if word == supervisor.USUAL else word for word in component.command]
        return start(replace(component, command=command), stack_folder)

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JDK_JAVA_OPTIONS", java_options)
        patched.setattr(server_process, "start", start_ours)
        embedded.up(Settings.load(environ), without_airflow=True, extras=extras)
    log_in_quickly(Settings.load(environ))
    show_transactions(Settings.load(environ))


def log_in_quickly(settings: Settings) -> None:
    """Let passwords be hashed once instead of 4,096 times: tests connect tens of thousands of times."""
    lines = [line for file in (settings.stack_folder / "secrets").glob("pgpass*") for line in file.read_text().splitlines()]
    alter = sql.SQL("SET scram_iterations = 1; ALTER ROLE {} PASSWORD {}")
    for role, password in {tuple(line.split(":")[3:5]) for line in lines}:
        Server(settings).execute(alter.format(sql.Identifier(role), sql.Literal(password)))


def do_not_sync(settings: Settings) -> None:
    """Let a test's Postgres leave syncing to the operating system: killed processes lose nothing by it, only machines do."""
    server = Server(settings)
    server.execute("ALTER SYSTEM SET fsync = off")
    server.execute("SELECT pg_reload_conf()")


def show_transactions(settings: Settings) -> None:
    """Let sources see when open transactions began, as reading by time requires: once, as roles are the whole server's."""
    Server(settings).execute("GRANT pg_read_all_stats TO tidegate_stager, tidegate_owner")
