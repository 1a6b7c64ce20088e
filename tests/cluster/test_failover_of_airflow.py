"""The server of ledger and states dies while Airflow's workers are busy: a standby takes over, and nothing is lost or doubled.

Airflow's own database is on another server: that it survives a failover is Airflow's business.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.celery_fixtures import (
    PER_BATCH,
    ROWS,
    SECONDS,
    TXIDS,
    WORKERS,
    celery_cluster,
    check_state,
    load_flights,
    of_airflow,
    own_pipeline,
    trigger_when_read,
    wait_until_ready,
)
from tests.cluster.managed_postgres import beside_spark, running_pair
from tests.conftest import register_pipelines
from tests.end_to_end.conftest import wait_for
from tests.integration.conftest import until
from tests.servers import Server
from tidegate import migrations
from tidegate.state_store import Settings

pytestmark = pytest.mark.skipif("CLUSTER" not in os.environ, reason="the long form: make cluster-test")

COMMITTED = "SELECT max(txid) FROM tidegate.commit WHERE pipeline = 'table_of_flights'"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("failover", ["go-on", "halt"])
def test_a_failover_below_airflow_loses_nothing_and_doubles_nothing(
    tmp_path: Path, server: Server, stack: Settings, free_port: Callable[[], int], failover: str
) -> None:
    """With a synchronous standby, the run goes on by itself; or it halts, until a person has accepted what may be lost."""
    pipeline = own_pipeline(tmp_path, PER_BATCH)
    with running_pair(tmp_path, free_port()) as pair:
        of_executors = tmp_path / "pgpass_of_executors"  # for both servers
        lines = pair.primary.passfile.read_text().splitlines(keepends=True)
        of_executors.write_text("".join(line for line in lines if ":tidegate_stager:" in line))
        settings = replace(beside_spark(pair.settings, stack, tmp_path), pg_failover=failover, executor_passfile=of_executors)
        register_pipelines(settings, pipeline)
        raw = load_flights(settings, ROWS)
        pair.primary.execute("ALTER SYSTEM SET synchronous_standby_names = 'second'")
        pair.primary.execute("SELECT pg_reload_conf()")
        until(lambda: pair.primary.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"))
        with celery_cluster(tmp_path / "machines", server, settings, free_port, WORKERS) as cluster:
            wait_until_ready(cluster, WORKERS)
            airflow = of_airflow(cluster)
            run_id = wait_for(lambda: trigger_when_read(airflow), "the Dag", SECONDS, 1)
            database = settings.pg_database
            wait_for(lambda: (pair.primary.execute(COMMITTED, database=database)[0][0] or 0) >= 2, "two commits", 200)
            pair.primary.stop(signal.SIGKILL)
            pair.promote()
            at_failover = pair.standby.execute(COMMITTED, database=database)[0][0]
            assert at_failover < TXIDS[-1], "the failover came too late"

            def ended() -> str | None:
                state = airflow.run_state("table_of_flights", run_id)
                return state if state in ("success", "failed") else None

            state = wait_for(ended, "the end of the run", 600, 1)
            if failover == "halt":
                assert state == "failed"
                assert pair.standby.execute(COMMITTED, database=database) == [(at_failover,)]
                story = migrations.accept_epoch(settings, "an operator")["table_of_flights"]
                assert f"goes on after txid {at_failover}" in story
                assert cluster.machines["command-line"].run("retry", "table_of_flights").returncode == 0
                again = of_airflow(cluster)
                run_id = wait_for(lambda: trigger_when_read(again), "another run", SECONDS, 1)
                state = wait_for(ended, "the end of the next run", 600, 1)
            assert state == "success", "\n".join(machine.log[-3000:] for machine in cluster.machines.values())
        check_state(settings, pipeline, raw, TXIDS[-1])
