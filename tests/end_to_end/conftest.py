"""A complete stack for the tests: real Airflow, Spark and Postgres, driven by the command line."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest
from psycopg2 import sql

from tests import in_process
from tests.cli.conftest import check_schema, verb_of
from tests.conftest import COMMAND
from tests.examples import EXAMPLES, copy_examples
from tests.servers import do_not_sync
from tests.statements import execute
from tests.store import HOME_VARIABLE
from tidegate import sample_data
from tidegate import stack as embedded
from tidegate.airflow_client import AirflowClient
from tidegate.state_store import Settings

PATIENCE_SECONDS = 400
FILES_PER_BATCH = 15


def wait_for(condition: Callable[[], Any], name: str, seconds: int = PATIENCE_SECONDS, every: float = 0.1) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{name} did not happen within {seconds} s"
        time.sleep(every)
    return found


@dataclass
class Project:
    """A project folder with sample files, and its stack."""

    home: Path
    reservoir: Path
    settings: Settings

    def tidegate(self, *arguments: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        done = in_process.run(arguments, {**os.environ, HOME_VARIABLE: str(self.home)}, self.home)
        assert done.returncode == exit_code, f"tidegate {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
        return done

    def json(self, *arguments: str, exit_code: int = 0) -> Any:
        found = json.loads(self.tidegate(*arguments, "--json", exit_code=exit_code).stdout)
        check_schema(verb_of(arguments), found)
        return found

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [COMMAND, *arguments, "--json"], cwd=self.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def next_flights(self, batches: int) -> list[int]:
        """Let this number of batches of flights arrive; return the txids that they will get."""
        self.add_files("flights", batches * FILES_PER_BATCH)
        last = self.committed("flights")
        return list(range(last + 1, last + batches + 1))

    def add_files(self, folder: str, count: int) -> None:
        target = self.home / "data" / folder
        target.mkdir(parents=True, exist_ok=True)
        waiting = sorted(f for f in (self.reservoir / "data" / folder).iterdir() if not (target / f.name).exists())
        assert len(waiting) >= count, f"{len(waiting)} files are left of {folder}"
        for file in waiting[:count]:
            (target / file.name).write_bytes(file.read_bytes())

    def committed(self, pipeline: str) -> int:
        return int(self.ask("SELECT txid FROM tidegate.cursor WHERE pipeline = %s", pipeline)[0][0])

    def phases(self, pipeline: str, txids: list[int]) -> list[str]:
        query = "SELECT phase FROM tidegate.batches WHERE pipeline = %s AND txid = ANY (%s) ORDER BY txid"
        return [phase for (phase,) in self.ask(query, pipeline, txids)]

    def ask(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Query the ledger and the states directly: a verb for each look would keep a core busy."""
        return execute(self.settings.conninfo(user="postgres"), query, arguments or None)

    def as_administrator(self) -> psycopg2.extensions.connection:
        return psycopg2.connect(**self.settings.conninfo(user="postgres"))

    @contextmanager
    def held(self, table: str) -> Iterator[None]:
        """Hold a lock on a table of the ledger, so that the next process that writes it waits until the block ends."""
        with closing(self.as_administrator()) as connection:
            lock = sql.SQL("LOCK TABLE {} IN EXCLUSIVE MODE").format(sql.Identifier("tidegate", table))
            connection.cursor().execute(lock)
            yield

    def airflow(self) -> AirflowClient:
        return AirflowClient(self.settings)


# Airflow's tasks make themselves undumpable, so that only root sees which connections are theirs.
SEES_CONNECTIONS_OF_TASKS = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root sees which connection belongs to a task of Airflow; run the tests as root"
)


def waiting_process(settings: Settings, statement: str) -> psutil.Process:
    """Wait for a process whose statement is like this and waits for a lock; return the process."""

    def ends_of_its_connection() -> tuple[Any, ...] | None:
        query = "SELECT client_port, inet_server_port() FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
        return next(iter(execute(settings.conninfo(user="postgres"), query, [f"{statement}%"])), None)

    # One local port may belong to connections to several servers at once: both ends identify the process.
    ends = wait_for(ends_of_its_connection, f"waiting in {statement!r}")
    clients = [c for c in psutil.net_connections("tcp") if c.raddr and (c.laddr.port, c.raddr.port) == ends]
    (pid,) = {c.pid for c in clients}
    assert pid is not None, "the system hides whose connection this is"  # without a number, psutil means this very process
    return psutil.Process(pid)


@contextmanager
def running_project(home: Path, reservoir: Path, dags: Path, **variables: str) -> Iterator[Project]:
    """Run a whole stack in a copy of the examples, with these Dags and variables, and prepare the sample data elsewhere."""
    copy_examples(home)
    sample_data.prepare(reservoir)
    for file in (reservoir / "data" / "flights").iterdir():  # a year is not enough; the next one is a copy
        (file.parent / file.name.replace("2013", "2014")).write_bytes(file.read_bytes())
    environ = {**os.environ, "TIDEGATE_HOME": str(home)}
    bundles = [
        {"name": "tests", "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle", "kwargs": {"path": str(dags)}}
    ]
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles), **variables}.items():
            environment.setenv(name, value)
        embedded.up(Settings.load(environ))
    try:
        do_not_sync(Settings.load(environ))
        yield Project(home, reservoir, Settings.load(environ))
    finally:
        embedded.down(Settings.load(environ), delete_data=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose stack is up, with 60 daily files of flights and two texts."""
    home, reservoir = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("reservoir")
    with running_project(home, reservoir, EXAMPLES / "dags") as made:
        made.add_files("flights", 60)
        made.add_files("word_count", 2)
        yield made
