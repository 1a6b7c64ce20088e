"""Two Celery workers on machines of their own; one dies in the middle of a commit, and the state is as in a clean run."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import psycopg2
import pytest

from tests.cluster.celery_fixtures import (
    PER_BATCH,
    ROWS,
    SECONDS,
    TXIDS,
    WORKERS,
    Cluster,
    Machine,
    celery_cluster,
    check_state,
    load_flights,
    of_airflow,
    own_pipeline,
    trigger_when_read,
    wait_until_ready,
)
from tests.conftest import register_pipelines
from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, wait_for
from tests.servers import Server
from tidegate.jobs import Pipeline
from tidegate.state_store import Settings

pytestmark = pytest.mark.skipif("CLUSTER" not in os.environ, reason="the long form: make cluster-test")


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return own_pipeline(tmp_path, PER_BATCH)


@pytest.fixture
def raw(settings: Settings, pipeline: Pipeline) -> Path:
    register_pipelines(settings, pipeline)
    return load_flights(settings, ROWS)


@pytest.fixture
def cluster(raw: Path, tmp_path: Path, server: Server, settings: Settings, free_port: Callable[[], int]) -> Iterator[Cluster]:
    with celery_cluster(tmp_path / "machines", server, settings, free_port, WORKERS) as running:
        wait_until_ready(running, WORKERS)
        yield running


def killed_in_commit(cluster: Cluster) -> Machine:
    """Wait until a task is in the middle of its commit, kill the whole machine that it runs on, and return that machine."""

    def waiting() -> tuple[int, int] | None:
        with looking.cursor() as cursor:
            cursor.execute(
                "SELECT client_port, inet_server_port() FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND query LIKE '%INSERT INTO tidegate.commit%'"
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
    for name in (*WORKERS, "triggerer", "dag-processor", "api-server"):
        component = "worker" if name in WORKERS else name
        machine = cluster.machines[name]
        wait_for(
            lambda m=machine, c=component: m.run("doctor", "--component", c).stdout == "", f"all that {name} needs", SECONDS, 1
        )
    airflow = of_airflow(cluster)
    run_id = wait_for(lambda: trigger_when_read(airflow), "the Dag", SECONDS, 1)

    dead = killed_in_commit(cluster)

    assert dead.name in WORKERS
    state = wait_for(
        lambda: (found := airflow.run_state("table_of_flights", run_id)) in ("success", "failed") and found, "the end", 600, 1
    )
    (alive,) = [cluster.machines[name] for name in WORKERS if name != dead.name]
    assert state == "success", alive.log[-5000:]
    assert "execute_workload" in dead.log
    assert "execute_workload" in alive.log
    check_state(settings, pipeline, raw, TXIDS[-1])
    _check_that_nothing_is_shared(cluster)


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
