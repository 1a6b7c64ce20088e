"""A stack for the benchmarks, whose Airflow runs their Dags."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import psutil
import psycopg2
import sqlalchemy as sa

from benchmarks.pipelines import PIPELINES
from tests.conftest import register_pipelines
from tidegate import migrations
from tidegate import stack as embedded
from tidegate.airflow_client import AirflowClient
from tidegate.commands.act.run_verbs import FINISHED
from tidegate.jobs import Pipeline
from tidegate.stack.components.server_process import RunFolder, wait_until
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.project import STACK_FOLDER

DAG = "from tidegate.dags.batch_dag import batch_dag\n\ndag = batch_dag({name!r}, concurrency={concurrency})\n"
# A Dag of empty tasks, for the time of Airflow itself: N groups of two tasks, like our batches.
FLOOR = '''\
"""Two empty tasks for each of N."""
from datetime import UTC, datetime
from airflow.sdk import DAG, task, task_group

with DAG("floor", start_date=datetime(2024, 1, 1, tzinfo=UTC), schedule=None, params={"max_batches": 1}) as dag:
    @task
    def plan(params):
        return list(range(params["max_batches"]))

    @task(max_active_tis_per_dag=8)
    def process(txid):
        pass

    @task(weight_rule="absolute", priority_weight=10)
    def commit(txid):
        pass

    @task_group
    def batch(txid):
        process(txid) >> commit(txid)

    batch.expand(txid=plan())
'''
BUNDLE = "airflow.dag_processing.bundles.local.LocalDagBundle"


class DagRun(NamedTuple):
    """The seconds of a Dag run from its trigger. A run goes on after the last commit, while tasks find their batches done."""

    to_commit: float
    to_end: float


@dataclass
class Project:
    """A project folder and its running stack."""

    home: Path
    settings: Settings

    def register(self, *pipelines: Pipeline) -> None:
        """Create the states of pipelines, as their migrations would, and register them."""
        register_pipelines(self.settings, *pipelines)

    def administrator(self) -> psycopg2.extensions.connection:
        """Connect as the administrator, outside transactions."""
        connection = psycopg2.connect(**self.settings.conninfo(user="postgres"))
        connection.autocommit = True
        return connection

    def as_owner(self, *statements: sa.Executable) -> None:
        """Run statements as the owner of the tables."""
        with migrations.connected(self.settings) as connection:
            for statement in statements:
                connection.execute(statement)

    def core_seconds(self) -> dict[str, float]:
        """Return the processor time that each component and what it started have used so far; of Airflow, by process."""
        return {name: _core_seconds(process) for name, process in self._components().items()}

    def memory(self) -> int:
        """Return the bytes of memory that all components and what they started have; what processes share counts once."""
        total = 0
        for component in self._components().values():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(map(share_of_memory, (component, *component.children(recursive=True))))
        return total

    def _components(self) -> dict[str, psutil.Process]:
        run = RunFolder(self.home / STACK_FOLDER)
        found = {name: identity.process() for name in run.names() if (identity := run.read(name))}
        return {name: process for name, process in found.items() if process}

    def log_position(self) -> int:
        """Return how many bytes of WAL the server has written."""
        with contextlib.closing(self.administrator()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint")
            ((position,),) = cursor.fetchall()
        return int(position)

    def settle(self) -> None:
        """Write a checkpoint and vacuum, so that no measurement pays for an earlier one."""
        with contextlib.closing(self.administrator()) as connection, connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE")
            cursor.execute("CHECKPOINT")
            session = connection.info.backend_pid
        # A session's end takes time too, on the other core: it unmaps the shared memory.
        assert wait_until(lambda: not psutil.pid_exists(session), 10, every=0.005), f"session {session} does not end"

    def state(self, pipeline: Pipeline, state: str) -> list[tuple[object, ...]]:
        """Return a state's rows in key order: key and values."""
        spec = next(s for s in pipeline.spec.states if s.name == state)
        names = [column.name for column in spec.columns]
        with StateStore.connect(self.settings) as store:
            return [tuple(row[name] for name in names) for row in store.state_rows(spec)]

    def dag_run(self, name: str, parameters: Mapping[str, int], *, committed: int = 0, seconds: int = 1800) -> DagRun:
        """Trigger a Dag; return the times to the commit of this txid, if there is one, and to the end of the run."""
        with (
            contextlib.closing(AirflowClient(self.settings)) as airflow,
            contextlib.closing(StateStore.connect(self.settings)) as store,
        ):
            start = time.perf_counter()
            run_id = airflow.trigger(name, dict(parameters))

            def has_ended() -> bool:
                return airflow.run_state(name, run_id) in FINISHED

            def has_committed() -> bool:
                return not committed or store.committed(name) >= committed

            assert wait_until(has_committed, seconds, every=0.05), f"{name} {run_id}: no commit after {seconds} s"
            to_commit = time.perf_counter() - start
            assert wait_until(has_ended, seconds, every=0.05), f"{name} {run_id}: has not ended after {seconds} s"
            to_end = time.perf_counter() - start
            state = airflow.run_state(name, run_id)
            assert state == "success", f"{name} {run_id} ended as {state}"
            return DagRun(to_commit, to_end)


def _core_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process, of its live descendants, and of those that have ended and were waited for."""
    spent = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            spent += times.user + times.system + times.children_user + times.children_system
    return spent


def share_of_memory(process: psutil.Process) -> int:
    """Return a process's bytes, each page divided by the number of processes that have it; 0 if it has just ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


@contextmanager
def repeated(call: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call a function again and again in a thread, with pauses, until the block ends."""
    has_ended = threading.Event()

    def loop() -> None:
        while not has_ended.wait(seconds):
            call()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def publish(folder: Path, names: Collection[str]) -> None:
    """Make a folder that, on Python's path, provides the named pipelines, as another package would."""
    metadata = folder / "tidegate_benchmarks-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tidegate-benchmarks\nVersion: 1\n")
    points = "".join(f"{name} = benchmarks.pipelines:PUBLISHED.{name}\n" for name in names)
    (metadata / "entry_points.txt").write_text(f"[tidegate.pipelines]\n{points}")


@contextmanager
def stack_without_airflow(home: Path) -> Iterator[Project]:
    """Run Postgres and Spark only."""
    home.mkdir(parents=True, exist_ok=True)
    with _running({"TIDEGATE_HOME": str(home)}, without_airflow=True) as settings:
        yield Project(home, settings)


@contextmanager
def project(home: Path, names: Collection[str]) -> Iterator[Project]:
    """Run a whole stack with the Dags of the named pipelines, and the Dag of empty tasks."""
    dags, packages = home / "dags", home / "packages"
    publish(packages, names)
    dags.mkdir()
    for name in names:
        (dags / f"{name}.py").write_text(DAG.format(name=name, concurrency=PIPELINES[name].concurrency))
    (dags / "floor.py").write_text(FLOOR)
    bundles = [{"name": "benchmarks", "classpath": BUNDLE, "kwargs": {"path": str(dags)}}]
    environ = {
        "TIDEGATE_HOME": str(home),
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles),
        # On the path of Airflow's processes from their start, like an installed package.
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(packages),
    }
    with _running(environ) as settings:
        made = Project(home, settings)
        made.register(*(PIPELINES[name] for name in names))
        yield made


@contextmanager
def _running(environ: Mapping[str, str], *, without_airflow: bool = False) -> Iterator[Settings]:
    """Run a stack as users do: with Java's second compiler, and a Postgres that syncs, which the stacks of tests lack."""
    with mock.patch.dict(os.environ, environ):
        embedded.up(Settings.load(), without_airflow=without_airflow)
        try:
            yield Settings.load()
        finally:
            embedded.down(Settings.load(), delete_data=True)
