"""Spark on other machines: code and password travel, and what a cluster does to its tasks changes no result."""

import importlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests import steps
from tests.chaos.wire import Wire
from tests.checkout import REPOSITORY
from tests.cluster.spark_cluster import SparkCluster, command_lines, standalone_cluster
from tests.conftest import register_pipelines
from tests.servers import Server
from tests.statements import execute
from tidegate import sample_data
from tidegate.jobs import Pipeline
from tidegate.jobs.compute import shortcuts
from tidegate.jobs.engine.local_run import RunResult, run_pipeline
from tidegate.jobs.pipelines import flights
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import ExecutorsUnprepared

pytestmark = pytest.mark.skipif("CLUSTER" not in os.environ, reason="takes minutes: make cluster-test")
DAYS = 20
FILES_PER_BATCH = 10
BEHIND_GATE = "127.0.0.2"
AUTHORS = '''
"""Routes of flights: an author's package, outside the project."""

import os
import re
import time
from importlib.resources import files

from tidegate import Count, Files, Max, Pipeline, State, Sum

SCHEMA = {"carrier": "string", "flight": "int", "origin": "string", "dest": "string", "distance": "int"}
SEEN = "carrier string, flight int, origin string, dest string, distance int, label string"


def labelled(batches):
    from shop.labels import label_of

    from tidegate.jobs.pipelines import flights

    assert re.search(r"/tidegate_[0-9a-f]{20}[.]zip/tidegate/jobs/pipelines/flights[.]py$", flights.__file__), flights.__file__
    assert not os.access("PROJECT", os.R_OK), "an executor can read the project's folder"
    suffix = files("shop").joinpath("suffix.txt").read_text()
    for rows in batches:
        time.sleep(PAUSE)
        yield rows.assign(label=[label_of(*place) + suffix for place in zip(rows["origin"], rows["dest"])])


def transform(rows):
    rows = rows.select("carrier", "flight", "origin", "dest", "distance").repartition(4, "flight")
    return rows.mapInPandas(labelled, SEEN)


PIPELINE = Pipeline(
    name="routes",
    source=Files("data/flights", glob="*.csv", format="csv", schema=SCHEMA, max_files=FILES_PER_BATCH, min_age_seconds=0),
    transform=transform,
    states={
        "per_route": State(
            key={"carrier": "text", "flight": "integer", "origin": "text", "dest": "text"},
            aggregates={"flights": Count(), "miles": Sum("distance"), "label": Max("label", "text")},
        )
    },
    concurrency=2,
)
'''
LABELS = """
def label_of(origin, dest):
    return f"{origin}ARROW{dest}"
"""
ROUTES = """
    SELECT carrier, flight::int, origin, dest, count(*), sum(distance)::bigint, max(origin || {arrow} || dest || '!')
    FROM read_csv('{files}') GROUP BY ALL ORDER BY ALL
"""
DAILY = """
    SELECT carrier, make_date(year, month, day) AS date, count(*), count(*) FILTER (dep_time IS NULL),
           coalesce(sum(dep_delay), 0)::bigint, min(dep_delay)::int, max(dep_delay)::int, sum(distance)::bigint
    FROM read_csv('{files}') GROUP BY ALL ORDER BY ALL
"""


PROPERTIES = {
    "spark.decommission.enabled": "true",
    "spark.speculation": "true",
    "spark.speculation.interval": "20ms",
    "spark.speculation.quantile": "0.01",
    "spark.speculation.multiplier": "1.0",
    "spark.speculation.minTaskRuntime": "0ms",
    # A stage with one task has no others to compare it with; nor is a task spared because it is as quick as they are.
    "spark.speculation.task.duration.threshold": "50ms",
    "spark.speculation.efficiency.enabled": "false",
}


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("sample")
    sample_data.prepare(home)
    return sorted((home / "data" / "flights").glob("*.csv"))


@pytest.fixture(scope="module")
def gate(stack: Settings) -> Iterator[Wire]:
    gate = Wire(lambda: (stack.pg_host, stack.pg_port), (BEHIND_GATE, stack.pg_port))
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def whole_cluster(stack: Settings, gate: Wire, free_port: Callable[[], int]) -> Iterator[SparkCluster]:
    """Two workers that repeat every task, if there is room; the second one reaches Postgres through the gate."""
    # Over any parameter, libpq prefers this variable as the address of the host.
    with standalone_cluster(stack, free_port, properties=PROPERTIES, second_worker={"PGHOSTADDR": BEHIND_GATE}) as started:
        yield started


@pytest.fixture
def cluster(whole_cluster: SparkCluster, server: Server, template: str, tmp_path: Path) -> Iterator[SparkCluster]:
    home = whole_cluster.settings.home / tmp_path.name  # the name of a database comes again
    (home / "data" / "flights").mkdir(parents=True)
    with server.database(template) as name:
        yield replace(whole_cluster, settings=replace(whole_cluster.settings, pg_database=name, home=home))


class Routes:
    """An author's pipeline in a package that only this process can import, `shop`, with files that all machines can read."""

    def __init__(self, cluster: SparkCluster, folder: Path, days: list[Path]) -> None:
        self.settings, self.package, self.days = cluster.settings, folder / "shop", days
        self.files = f"{self.settings.home}/data/flights/*.csv"

    def declare(self, *, pause: float = 0.0, files_per_batch: int = FILES_PER_BATCH, tries: int = 6) -> Pipeline:
        self.package.mkdir()
        text = AUTHORS.replace("PAUSE", str(pause)).replace("FILES_PER_BATCH", str(files_per_batch))
        text = text.replace("PROJECT", str(REPOSITORY / "jobs/__init__.py") if os.geteuid() == 0 else "")
        (self.package / "__init__.py").write_text(text)
        (self.package / "suffix.txt").write_text("!")
        self.write_labels("-")
        pipeline = replace(self.load(), tries=tries, retry_delay_seconds=1)
        register_pipelines(self.settings, pipeline)
        self.put(0, DAYS)
        return pipeline

    def write_labels(self, arrow: str) -> None:
        """Write, or change, the module that only executors import."""
        (self.package / "labels.py").write_text(LABELS.replace("ARROW", arrow))

    def load(self) -> Pipeline:
        sys.modules.pop("shop", None)
        importlib.invalidate_caches()
        pipeline: Pipeline = importlib.import_module("shop").PIPELINE
        return pipeline

    def put(self, first: int, last: int) -> None:
        folder = self.settings.home / "data" / "flights"
        for file in self.days[first:last]:
            shutil.copy(file, folder)
        for path in (folder.parent, folder, *folder.iterdir()):
            path.chmod(0o755)

    def check(self, arrow: str = "'-'") -> None:
        assert rows_of(self.settings, self.load()) == duckdb.sql(ROUTES.format(files=self.files, arrow=arrow)).fetchall()


@pytest.fixture
def routes(cluster: SparkCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: list[Path]) -> Iterator[Routes]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Routes(cluster, tmp_path, days)
    sys.modules.pop("shop", None)


def rows_of(settings: Settings, pipeline: Pipeline) -> list[tuple[Any, ...]]:
    spec = pipeline.spec.states[0]
    return sorted(tuple(row[column.name] for column in spec.columns) for row in steps.rows(settings, pipeline))


def served(cluster: SparkCluster) -> str:
    base = f"http://127.0.0.1:{cluster.ui_port}"
    with urllib.request.urlopen(f"{base}/api/v1/applications") as answer:
        api = f"{base}/api/v1/applications/{json.load(answer)[0]['id']}"
    names = ("environment", "jobs", "stages?details=true", "sql?details=true&length=1000", "allexecutors")
    pages = [f"{api}/{name}" for name in names]
    pages += [f"{base}/{name}/" for name in ("environment", "jobs", "stages", "SQL", "executors", "connect")]
    return "".join(urllib.request.urlopen(page).read().decode(errors="replace") for page in pages)


def assert_secret(cluster: SparkCluster) -> None:
    password = cluster.settings.executor_passfile.read_text().strip().rpartition(":")[2]
    shown = {"events": cluster.events(), "pages": served(cluster), "processes": command_lines()}
    shown |= {f"log of {machine.home.name}": machine.log.read_text() for machine in (cluster.server, *cluster.workers)}
    assert "StagingSink" in shown["events"] or "mapinarrow" in shown["events"].lower()
    assert "tidegate_passfile" in shown["pages"] + shown["events"], "the file itself is known by its name"
    assert [place for place, text in shown.items() if password in text] == []
    travelled = [[*machine.home.rglob("tidegate_passfile_*")] for machine in cluster.workers]
    assert all(travelled), "both had tasks"
    assert any(path.read_text().strip().endswith(password) for paths in travelled for path in paths)


@pytest.mark.promise("fault:spark-task-runs-twice-or-is-speculated:processing", "decision:0035")
def test_two_pipelines_run_on_two_workers(cluster: SparkCluster, routes: Routes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings, pipeline = cluster.settings, routes.declare(pause=0.3)
    register_pipelines(settings, flights.PIPELINE)
    assert len(run_pipeline(settings, flights.PIPELINE, run_id="run").commits) == 2
    assert len(run_pipeline(settings, pipeline, run_id="run").commits) == DAYS / FILES_PER_BATCH

    assert rows_of(settings, flights.PIPELINE) == duckdb.sql(DAILY.format(files=routes.files)).fetchall()
    routes.check()
    assert_secret(cluster)
    fenced = [record.getMessage() for record in caplog.records if "no seal names it" in record.getMessage()]
    assert '"Speculative":true' in cluster.events()
    named = r"routes \d:\d: Spark's task attempt \d+ staged \d+ rows of per_route too; no seal names it"
    assert all(re.match(named, line) for line in fenced), "how many there are depends on which copy ends first"

    routes.write_labels(">")  # the next batch has the author's new code
    routes.put(DAYS, DAYS + 2)
    assert len(run_pipeline(settings, routes.load(), run_id="again").commits) == 1
    routes.check(f"CASE WHEN day <= {DAYS} THEN '-' ELSE '>' END")


@pytest.mark.promise("fault:spark-executor-or-worker-process-dies:processing")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGPWR], ids=["killed", "decommissioned"])
def test_an_executor_ends_in_mid_batch(cluster: SparkCluster, routes: Routes, how: signal.Signals) -> None:
    pipeline = routes.declare(pause=0.2, files_per_batch=2)
    before, ended = len(cluster.events()), 0
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(run_pipeline, cluster.settings, pipeline, run_id="run")
        for worker in (cluster.workers[0], cluster.workers[1], cluster.workers[0]):
            await_staging(cluster.settings, run)
            for executor in worker.running("CoarseGrainedExecutorBackend"):
                executor.send_signal(how)
                ended += 1
    assert ended
    assert len(run.result().commits) == DAYS / 2
    if how is signal.SIGPWR:
        assert wait_until(lambda: "is decommissioned" in cluster.events()[before:], 60)
    routes.check()


@pytest.mark.promise("fault:executor-does-not-reach-postgres-or-no:processing")
def test_an_executor_is_cut_off_from_postgres(
    cluster: SparkCluster, gate: Wire, routes: Routes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = routes.declare(pause=0.2, files_per_batch=1, tries=10)
    before, closed = len(cluster.events()), 0

    def has_failed() -> bool:
        return "while staging per_route on " in caplog.text + cluster.events()[before:]

    monkeypatch.setattr(shortcuts, "FEW_ROWS", 0)  # executors stage all batches, not only the first
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(run_pipeline, cluster.settings, pipeline, run_id="run")
        while not run.done() and closed < 5:
            if gate.links:
                gate.close()
                closed += 1
                time.sleep(5)
                gate.open()
                if has_failed():
                    break  # else the task had ended just before
            time.sleep(0.005)
    assert len(run.result().commits) == DAYS
    assert closed, "no task of an executor beyond the gate has staged"
    assert wait_until(has_failed, 60)
    routes.check()


@pytest.mark.promise("fault:executor-does-not-reach-postgres-or-no:processing")
def test_tasks_wait_for_a_connection(cluster: SparkCluster, routes: Routes, server: Server) -> None:
    pipeline = routes.declare()
    server.execute("ALTER ROLE tidegate_stager CONNECTION LIMIT 1")
    try:
        assert len(run_pipeline(cluster.settings, pipeline, run_id="run").commits) == DAYS / FILES_PER_BATCH
    finally:
        server.execute("ALTER ROLE tidegate_stager CONNECTION LIMIT -1")
    routes.check()
    assert [len(steps.history(cluster.settings, txid, pipeline.name).attempts) for txid in (1, 2)] == [1, 1]


@pytest.mark.promise("error:EXECUTORS_UNPREPARED")
def test_executors_without_a_driver_of_postgres_are_refused(cluster: SparkCluster, routes: Routes) -> None:
    def without_imports() -> None:
        for daemon in (daemon for worker in cluster.workers for daemon in worker.running("pyspark.daemon")):
            daemon.kill()

    # a pause of its own makes new code, and so a new session
    pipeline, driver = routes.declare(pause=0.001), cluster.packages / "psycopg2"
    away = driver.rename(driver.with_name("away"))
    without_imports()
    try:
        with pytest.raises(ExecutorsUnprepared, match=r"lack Python packages: psycopg2 on .*pip install 'psycopg2-binary==2"):
            run_pipeline(cluster.settings, pipeline, run_id="run")
    finally:
        away.rename(driver)
        without_imports()


def await_staging(settings: Settings, run: Future[RunResult]) -> None:
    """Wait until a task has a connection for staging that was not there at the call."""
    look = "SELECT max(backend_start) FROM pg_stat_activity WHERE application_name = 'tidegate staging' AND datname = %s"
    conninfo = {**settings.conninfo(user="postgres"), "dbname": "postgres"}
    before = execute(conninfo, look, [settings.pg_database])
    assert wait_until(lambda: execute(conninfo, look, [settings.pg_database]) != before or run.done(), 180)
