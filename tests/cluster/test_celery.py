"""Two Celery workers on machines of their own; one dies in the middle of a commit, and the state is as in a clean run."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest

from tests.cluster.celery_fixtures import Cluster, Machine, celery_cluster
from tests.cluster.sales import DIFFERENCE, PER_BATCH, PIPELINE, ROWS, TABLE
from tests.conftest import register_pipelines
from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, wait_for, waiting_process
from tests.servers import Server
from tests.statements import execute
from tidegate.airflow_client import AirflowClient
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import UnknownPipeline

pytestmark = pytest.mark.skipif("CLUSTER" not in os.environ, reason="the long form: make cluster-test")
WORKERS = ("worker-1", "worker-2")


def killed_in_commit(cluster: Cluster) -> Machine:
    """Wait until a task is in the middle of its commit, kill the whole machine that it runs on, and return that machine."""
    with closing(psycopg2.connect(**cluster.settings.conninfo(user="postgres"))) as holding:
        holding.cursor().execute("LOCK TABLE tidegate.commit IN EXCLUSIVE MODE")
        process = waiting_process(cluster.settings, "%INSERT INTO tidegate.commit")
        (machine,) = [machine for machine in cluster.machines.values() if process in machine.processes()]
        machine.kill()
    return machine


@pytest.mark.promise("fault:process-dies-at-any-statement:commit", "fault:airflow-loses-repeats-or-reorders-tasks:commit")
@SEES_CONNECTIONS_OF_TASKS
@pytest.mark.timeout(900)
def test_a_worker_that_dies_in_mid_commit_loses_nothing_and_doubles_nothing(
    settings: Settings, server: Server, free_port: Callable[[], int], tmp_path: Path
) -> None:
    register_pipelines(settings, PIPELINE)
    owner = settings.conninfo(user="tidegate_owner")
    execute(owner, TABLE, {"rows": ROWS})
    with celery_cluster(tmp_path / "machines", server, settings, free_port, WORKERS) as cluster:
        machines = cluster.machines
        for machine in machines.values():
            if machine.component != "scheduler":  # it runs no code of ours
                doctor = ("doctor", "--component", machine.component)
                wait_for(lambda m=machine, d=doctor: m.run(*d).returncode == 0, f"all that {machine.component} needs", every=1)
        wait_for(lambda: all("ready." in machines[name].log for name in WORKERS), "the workers' start")
        airflow = AirflowClient(Settings.load(machines["command-line"].environment))

        def trigger() -> str | None:
            try:
                return airflow.trigger(PIPELINE.name, {})
            except UnknownPipeline:  # the Dag has not been read yet
                return None

        def ended() -> str | None:
            return found if (found := airflow.run_state(PIPELINE.name, run_id)) in ("success", "failed") else None

        run_id = wait_for(trigger, "the Dag", every=1)
        dead = killed_in_commit(cluster)
        assert dead.component == "worker"
        (alive,) = [machines[name] for name in WORKERS if machines[name] is not dead]
        assert wait_for(ended, "the end", 600, 1) == "success", alive.log[-5000:]
        assert "execute_workload" in dead.log
        assert "execute_workload" in alive.log
        assert execute(owner, "SELECT txid FROM tidegate.cursor") == [(ROWS // PER_BATCH,)]
        assert execute(owner, DIFFERENCE) == []
        _check_that_nothing_is_shared(cluster)


def _check_that_nothing_is_shared(cluster: Cluster) -> None:
    """No component has a file open in the folder of another one, and none knows of another's folder."""
    for machine in cluster.machines.values():
        others = [f"{other.folder}{os.sep}" for other in cluster.machines.values() if other is not machine]
        known = [*machine.environment.values(), *([machine.log] if machine.process else [])]
        opened = [file.path for process in machine.processes() for file in process.open_files()]
        assert [place for place in others if any(place in text for text in (*known, *opened))] == []
