"""Two Celery workers on machines of their own; one dies in the middle of a commit, and the state is as in a clean run."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import psutil
import psycopg2
import pytest

from jobs import Pipeline
from state_store import Settings, StateStore
from tests.cluster.celery_fixtures import PIPELINE, Cluster, Machine, celery_cluster, load_flights
from tests.conftest import Server, register_pipelines
from tests.end_to_end.conftest import FLIGHTS_FROM_RAW_FILES, SEES_CONNECTIONS_OF_TASKS, wait_for
from tidegate.airflow_client import AirflowClient

pytestmark = pytest.mark.skipif("CLUSTER" not in os.environ, reason="the long form: make cluster-test")

ROWS, PER_BATCH = 80_000, 10_000
TXIDS = list(range(1, ROWS // PER_BATCH + 1))
WORKERS = ("worker-1", "worker-2")
SECONDS = 400


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    """The pipeline that each machine has a copy of."""
    file = tmp_path / "own.py"
    file.write_text(PIPELINE % PER_BATCH)
    spec = importlib.util.spec_from_file_location("own_of_celery", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PIPELINE


@pytest.fixture
def raw(settings: Settings, pipeline: Pipeline) -> Path:
    """The raw data, loaded into a table too, and the pipeline's registration."""
    register_pipelines(settings, pipeline)
    return load_flights(settings, ROWS)


@pytest.fixture
def cluster(raw: Path, tmp_path: Path, server: Server, settings: Settings, free_port: Callable[[], int]) -> Iterator[Cluster]:
    """All components, healthy, with the Dag in place."""
    with celery_cluster(tmp_path / "machines", server, settings, free_port, WORKERS) as running:
        command_line = running.machines["command-line"]
        wait_for(
            lambda: command_line.run("doctor", "--component", "command-line").returncode == 0, "Airflow's start", SECONDS, 1
        )
        wait_for(lambda: all("ready." in running.machines[name].log for name in WORKERS), "the workers' start", SECONDS)
        yield running


def of_airflow(cluster: Cluster) -> AirflowClient:
    """Log in to Airflow as the command line's machine does."""
    environment = cluster.machines["command-line"].environment
    return AirflowClient(Settings.load(environment))


def killed_in_commit(cluster: Cluster) -> Machine:
    """Wait until a task is in the middle of its commit, kill the whole machine that it runs on, and return that machine."""

    def waiting() -> tuple[int, int] | None:
        with looking.cursor() as cursor:
            cursor.execute(
                "SELECT client_port, inet_server_port() FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO tidegate.commit%'"
            )
            return cursor.fetchone()

    administrator = cluster.settings.conninfo(user="postgres")
    with closing(psycopg2.connect(**administrator)) as holding, closing(psycopg2.connect(**administrator)) as looking:
        looking.autocommit = True
        with holding.cursor() as cursor:
            cursor.execute("LOCK TABLE tidegate.commit IN EXCLUSIVE MODE")
        ends = wait_for(waiting, "a commit", SECONDS)
        (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.raddr and (c.laddr.port, c.raddr.port) == ends}
        (machine,) = [m for m in cluster.machines.values() if pid in {process.pid for process in m.processes()}]
        machine.kill()
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        holding.rollback()
    return machine


@SEES_CONNECTIONS_OF_TASKS
@pytest.mark.timeout(900)
def test_a_worker_that_dies_in_mid_commit_loses_nothing_and_doubles_nothing(
    cluster: Cluster, settings: Settings, pipeline: Pipeline, raw: Path
) -> None:
    """The other worker ends the run, and the state equals DuckDB's over the raw data."""
    for name in (*WORKERS, "scheduler", "triggerer", "dag-processor", "api-server"):
        component = "worker" if name in WORKERS else name
        machine = cluster.machines[name]
        wait_for(
            lambda m=machine, c=component: m.run("doctor", "--component", c).stdout == "", f"all that {name} needs", SECONDS, 1
        )
    airflow = of_airflow(cluster)
    run_id = wait_for(lambda: _trigger(airflow), "the Dag", SECONDS, 1)

    dead = killed_in_commit(cluster)

    assert dead.name in WORKERS
    state = wait_for(
        lambda: (found := airflow.run_state("table_of_flights", run_id)) in ("success", "failed") and found, "the end", 600, 1
    )
    (alive,) = [cluster.machines[name] for name in WORKERS if name != dead.name]
    assert state == "success", alive.log[-5000:]
    assert "execute_workload" in dead.log
    assert "execute_workload" in alive.log
    with StateStore.connect(settings) as store:
        assert store.committed("table_of_flights") == TXIDS[-1]
        spec = pipeline.spec.state("per_day")
        assert spec is not None
        rows = [{name: value for name, value in row.items() if name != "txid"} for row in store.state_rows(spec)]
    found = duckdb.execute(FLIGHTS_FROM_RAW_FILES, [str(raw)])
    names = [column[0] for column in found.description]
    expected = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    assert sorted(rows, key=_key) == sorted(expected, key=_key)
    _check_that_nothing_is_shared(cluster)


def _trigger(airflow: AirflowClient) -> str | None:
    """Start a run, as soon as Airflow has read the Dag."""
    from state_store.errors import UnknownPipeline  # noqa: PLC0415

    try:
        return airflow.trigger("table_of_flights", {})
    except UnknownPipeline:
        return None


def _key(row: dict[str, object]) -> tuple[object, ...]:
    return row["carrier"], row["date"]


def _check_that_nothing_is_shared(cluster: Cluster) -> None:
    """No component has a file open in the folder of another one, and none knows of another's folder."""
    for machine in cluster.machines.values():
        others = [str(other.folder) + os.sep for other in cluster.machines.values() if other is not machine]
        assert not any(place in value for place in others for value in machine.environment.values())
        if machine.process is None:
            continue
        assert not [place for place in others if place in machine.log]
        for process in machine.processes():
            opened = {file.path for file in process.open_files()}
            assert not [path for path in opened for place in others if path.startswith(place)]
