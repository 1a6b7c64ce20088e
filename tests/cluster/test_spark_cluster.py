"""Spark on other machines: code and password travel, and what a cluster does to its tasks changes no result.

The machines are accounts of this one, without a way to the project (`tests.cluster.spark_cluster`).
"""

import importlib
import logging
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import psutil
import pytest
from psycopg2 import sql

from tests.cluster.spark_cluster import REPOSITORY, SparkCluster, small_cluster, standalone_cluster
from tests.conftest import register_pipelines
from tests.relay import Relay
from tests.servers import Server
from tests.statements import execute
from tidegate import sample_data
from tidegate.jobs import Pipeline
from tidegate.jobs.compute import shortcuts
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.engine.local_run import RunResult, run_pipeline
from tidegate.jobs.pipelines import flights
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import ExecutorsUnprepared

long = pytest.mark.skipif("CLUSTER" not in os.environ, reason="takes minutes: make cluster-test")
DAYS = 20
FILES_PER_BATCH = 10
BEHIND_GATE = "127.0.0.2"
AUTHORS = '''
"""Routes of flights: an author's package, outside the project."""

import time
from importlib.resources import files

from tidegate import Count, Files, Max, Pipeline, State, Sum

SCHEMA = {"carrier": "string", "flight": "int", "origin": "string", "dest": "string", "distance": "int"}
SEEN = "carrier string, flight int, origin string, dest string, distance int, label string"


def labelled(batches):
    """Add a column by Python code that needs a file of the package."""
    from shop.labels import label_of

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
LABELS = '''
"""Another module of the author's."""


def label_of(origin, dest):
    return f"{origin}ARROW{dest}"
'''
ROUTES = """
    SELECT carrier, flight::int, origin, dest, count(*), sum(distance)::bigint, max(origin || {arrow} || dest || '!')
    FROM read_csv('{files}') GROUP BY ALL ORDER BY ALL
"""
DAILY = """
    SELECT carrier, make_date(year, month, day) AS date, count(*), count(*) FILTER (dep_time IS NULL),
           coalesce(sum(dep_delay), 0)::bigint, min(dep_delay)::int, max(dep_delay)::int, sum(distance)::bigint
    FROM read_csv('{files}') GROUP BY ALL ORDER BY ALL
"""


class Author:
    """An author's package, which only this process can import: `shop`."""

    def __init__(self, folder: Path, *, pause: float = 0.0, files_per_batch: int = FILES_PER_BATCH) -> None:
        self._package = folder / "shop"
        self._package.mkdir()
        (self._package / "__init__.py").write_text(
            AUTHORS.replace("PAUSE", str(pause)).replace("FILES_PER_BATCH", str(files_per_batch))
        )
        (self._package / "suffix.txt").write_text("!")
        self.write_labels("-")

    def write_labels(self, arrow: str) -> None:
        """Write, or change, the module that only executors import."""
        (self._package / "labels.py").write_text(LABELS.replace("ARROW", arrow))

    def module(self) -> ModuleType:
        sys.modules.pop("shop", None)
        importlib.invalidate_caches()
        return importlib.import_module("shop")


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Author]]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda **options: Author(tmp_path, **options)
    sys.modules.pop("shop", None)


@pytest.fixture
def database(server: Server, template: str) -> Iterator[str]:
    name = server.create_database(template)
    yield name
    server.drop_database(name)


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sample")
    sample_data.prepare(home)
    return home / "data" / "flights"


def put(settings: Settings, days: Path, first: int, last: int) -> str:
    """Copy some days to where all machines can read them; return the pattern of all files there."""
    folder = settings.home / "data" / "flights"
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(days.glob("*.csv"))[first:last]:
        (folder / file.name).write_bytes(file.read_bytes())
    for path in (settings.home / "data", folder, *folder.iterdir()):
        path.chmod(0o755)
    return str(folder / "*.csv")


def rows_of(settings: Settings, pipeline: Pipeline) -> list[tuple[Any, ...]]:
    spec = pipeline.spec.states[0]
    with StateStore.connect(settings) as store:
        return sorted(tuple(row[column.name] for column in spec.columns) for row in store.state_rows(spec))


def check_routes(settings: Settings, pipeline: Pipeline, files: str, arrow: str = "'-'") -> None:
    """Compare the author's state with what DuckDB computes from the same files."""
    assert rows_of(settings, pipeline) == duckdb.sql(ROUTES.format(files=files, arrow=arrow)).fetchall()


def served(cluster: SparkCluster) -> str:
    base = f"http://127.0.0.1:{cluster.ui_port}"
    with urllib.request.urlopen(f"{base}/api/v1/applications") as answer:
        application = re.search(rb'"id" : "([^"]+)"', answer.read())[1].decode()
    api = f"{base}/api/v1/applications/{application}"
    pages = [
        f"{api}/{name}"
        for name in ("environment", "jobs", "stages?details=true", "sql?details=true&length=1000", "allexecutors")
    ]
    pages += [f"{base}/{name}/" for name in ("environment", "jobs", "stages", "SQL", "executors", "connect")]
    return "".join(urllib.request.urlopen(page).read().decode(errors="replace") for page in pages)


def command_lines() -> str:
    """Return the command lines of all processes of this machine, as any account sees them."""
    lines = []
    for process in psutil.process_iter():
        try:
            lines += process.cmdline()
        except psutil.Error:
            continue
    return "\n".join(lines)


def assert_secret(cluster: SparkCluster, settings: Settings) -> None:
    """Check that the password is in nothing that Spark writes or shows, and only its owner can read the file that travelled."""
    assert settings.executor_passfile is not None
    password = settings.executor_passfile.read_text().strip().rpartition(":")[2]
    events = events_of(cluster)
    shown = {"events": events, "pages": served(cluster), "processes": command_lines()}
    shown |= {f"log of {machine.home.name}": machine.log.read_text() for machine in (cluster.server, *cluster.workers)}
    assert "StagingSink" in events or "mapInArrow" in events.lower() or "MapInArrow" in events
    assert "tidegate_passfile" in shown["pages"] + events, "the file itself is known by its name"
    assert [place for place, text in shown.items() if password in text] == []
    travelled = [path for machine in cluster.workers for path in machine.home.rglob("tidegate_passfile_*")]
    assert travelled
    assert any(path.read_text().strip().endswith(password) for path in travelled)


@pytest.mark.promise("decision:0035")
@long
def test_code_and_password_travel(
    stack: Settings,
    database: str,
    author: Callable[..., Author],
    days: Path,
    free_port: Callable[[], int],
) -> None:
    package = author(files_per_batch=2)
    with small_cluster(stack, free_port) as cluster:
        settings = replace(cluster.settings, pg_database=database)
        pipeline = package.module().PIPELINE
        register_pipelines(settings, pipeline)
        put(settings, days, 0, 2)
        assert run_pipeline(settings, pipeline, run_id="run").txids == [1]

        package.write_labels(">")
        files = put(settings, days, 2, 4)
        assert run_pipeline(settings, package.module().PIPELINE, run_id="again").txids == [2]
        arrow = "CASE WHEN day <= 2 THEN '-' ELSE '>' END"
        check_routes(settings, pipeline, files, arrow)

        assert_no_project(settings)
        assert_secret(cluster, settings)


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
def gate(stack: Settings) -> Iterator[Relay]:
    """Another way to Postgres."""
    gate = Relay(stack.pg_port, BEHIND_GATE, stack.pg_port)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def whole_cluster(stack: Settings, gate: Relay, free_port: Callable[[], int]) -> Iterator[SparkCluster]:
    """Two workers that repeat every task, if there is room; the second one reaches Postgres through the gate."""
    # Over any parameter, libpq prefers this variable as the address of the host.
    second = {"PGHOSTADDR": BEHIND_GATE}
    with standalone_cluster(stack, free_port, properties=PROPERTIES, second_worker=second) as started:
        yield started


@pytest.fixture
def cluster(whole_cluster: SparkCluster, database: str, tmp_path: Path) -> SparkCluster:
    """The cluster, with a database and a folder of data of the test's own."""
    home = whole_cluster.settings.home / tmp_path.name  # the name of a database comes again
    home.mkdir()
    return replace(whole_cluster, settings=replace(whole_cluster.settings, pg_database=database, home=home))


@pytest.fixture
def routes(cluster: SparkCluster, author: Callable[..., Author], days: Path) -> Callable[..., tuple[Pipeline, str]]:
    """A function that registers an author's pipeline; it returns that and the pattern of its files."""

    def begin(*, tries: int = 6, **options: Any) -> tuple[Pipeline, str]:
        pipeline = replace(author(**options).module().PIPELINE, tries=tries, retry_delay_seconds=1)
        register_pipelines(cluster.settings, pipeline)
        return pipeline, put(cluster.settings, days, 0, DAYS)

    return begin


@pytest.mark.promise("fault:spark-task-runs-twice-or-is-speculated:processing")
@long
def test_two_pipelines_run_on_two_workers(
    cluster: SparkCluster, routes: Callable[..., tuple[Pipeline, str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings, (pipeline, files) = cluster.settings, routes(pause=0.3)
    register_pipelines(settings, flights.PIPELINE)
    assert len(run_pipeline(settings, flights.PIPELINE, run_id="run").commits) == 2
    assert len(run_pipeline(settings, pipeline, run_id="run").commits) == DAYS / FILES_PER_BATCH

    assert rows_of(settings, flights.PIPELINE) == duckdb.sql(DAILY.format(files=files)).fetchall()
    check_routes(settings, pipeline, files)
    assert_no_project(settings)
    assert_secret(cluster, settings)
    assert all(list(worker.home.rglob("tidegate_passfile_*")) for worker in cluster.workers), "both had tasks"
    fenced = [record.getMessage() for record in caplog.records if "no seal names it" in record.getMessage()]
    assert '"Speculative":true' in events_of(cluster)
    named = r"routes \d:\d: Spark's task attempt \d+ staged \d+ rows of per_route too; no seal names it"
    assert all(re.match(named, line) for line in fenced), "how many there are depends on which copy ends first"


@pytest.mark.promise("fault:spark-executor-or-worker-process-dies:processing")
@long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGPWR], ids=["killed", "decommissioned"])
def test_an_executor_ends_in_mid_batch(
    cluster: SparkCluster, routes: Callable[..., tuple[Pipeline, str]], how: signal.Signals
) -> None:
    settings, (pipeline, files) = cluster.settings, routes(pause=0.2, files_per_batch=2)
    before = len(events_of(cluster))
    ended = 0
    with Run(settings, pipeline) as run:
        for worker in (cluster.workers[0], cluster.workers[1], cluster.workers[0]):
            run.await_staging()
            for executor in worker.executors():
                executor.send_signal(how)
                ended += 1
    assert ended
    assert len(run.result.commits) == DAYS / 2
    if how is signal.SIGPWR:
        assert wait_until(lambda: "is decommissioned" in events_of(cluster)[before:], 60)
    check_routes(settings, pipeline, files)


@pytest.mark.promise("fault:executor-does-not-reach-postgres-or-no:processing")
@long
def test_an_executor_is_cut_off_from_postgres(
    cluster: SparkCluster,
    gate: Relay,
    routes: Callable[..., tuple[Pipeline, str]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, (pipeline, files) = cluster.settings, routes(pause=0.2, files_per_batch=1, tries=10)
    before = len(events_of(cluster))

    def has_failed() -> bool:
        return "while staging per_route on " in caplog.text + events_of(cluster)[before:]

    monkeypatch.setattr(shortcuts, "FEW_ROWS", 0)  # executors stage all batches, not only the first
    closed = 0
    with Run(settings, pipeline) as run:
        while run.is_on and closed < 5:
            if gate.is_in_use:
                gate.close()
                closed += 1
                time.sleep(5)
                gate.open()
                if has_failed():
                    break  # else the task had ended just before
            time.sleep(0.005)
    assert closed, "no task of an executor behind the gate has staged"
    assert wait_until(has_failed, 60)
    assert len(run.result.commits) == DAYS
    check_routes(settings, pipeline, files)


@pytest.mark.promise("fault:executor-does-not-reach-postgres-or-no:processing")
@long
def test_tasks_wait_for_a_connection(
    cluster: SparkCluster, routes: Callable[..., tuple[Pipeline, str]], server: Server
) -> None:
    settings, (pipeline, files) = cluster.settings, routes()
    server.execute(sql.SQL("ALTER ROLE tidegate_stager CONNECTION LIMIT 1"))
    try:
        assert len(run_pipeline(settings, pipeline, run_id="run").commits) == DAYS / FILES_PER_BATCH
    finally:
        server.execute(sql.SQL("ALTER ROLE tidegate_stager CONNECTION LIMIT -1"))
    check_routes(settings, pipeline, files)
    with StateStore.connect(settings) as store:
        assert [len(store.batch_history(pipeline.name, txid).attempts) for txid in (1, 2)] == [1, 1]


@pytest.mark.promise("error:EXECUTORS_UNPREPARED")
@long
def test_executors_without_a_driver_of_postgres_are_refused(
    stack: Settings, database: str, author: Callable[..., Author], days: Path, free_port: Callable[[], int]
) -> None:
    with small_cluster(stack, free_port, without="psycopg2-binary") as cluster:
        settings, pipeline = replace(cluster.settings, pg_database=database), author().module().PIPELINE
        register_pipelines(settings, pipeline)
        put(settings, days, 0, 1)
        with pytest.raises(ExecutorsUnprepared, match=r"lack Python packages: psycopg2 on .*pip install 'psycopg2-binary==2"):
            run_pipeline(settings, pipeline, run_id="run")


def events_of(cluster: SparkCluster) -> str:
    """Return what Spark has written about its tasks: where each ran, and how it ended."""
    return "".join(file.read_text() for file in sorted(cluster.events.glob("*app-*")) if file.is_file())


class Run:
    """A run of a pipeline in a thread; its result when the block ends."""

    result: RunResult

    def __init__(self, settings: Settings, pipeline: Pipeline) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1)
        self._running = self._thread.submit(run_pipeline, settings, pipeline, run_id="run")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.result = self._running.result(600)

    @property
    def is_on(self) -> bool:
        return not self._running.done()

    def await_staging(self) -> None:
        """Wait until a task has a connection for staging that no earlier call has seen."""
        before = self._last_start()
        assert wait_until(lambda: self._last_start() != before or not self.is_on, 180)

    def _last_start(self) -> Any:
        look = "SELECT max(backend_start) FROM pg_stat_activity WHERE application_name = 'tidegate staging' AND datname = %s"
        conninfo = {**self._settings.conninfo(user="postgres"), "dbname": "postgres"}
        return execute(conninfo, look, [self._settings.pg_database])[0][0]


def assert_no_project(settings: Settings) -> None:
    """Check that executors import our code from the archive, and that the project's folder is closed to other accounts."""
    here = str(REPOSITORY / "jobs" / "__init__.py")

    def look(batches: Any) -> Any:  # a function within a function travels as code
        from pathlib import Path  # noqa: PLC0415

        import pandas as pd  # noqa: PLC0415

        from tidegate.jobs.pipelines import flights  # noqa: PLC0415

        for _ in batches:
            try:
                Path(here).read_bytes()
                project = "open"
            except OSError:
                project = "closed"
            yield pd.DataFrame({"place": [flights.__file__], "project": [project]})

    with spark_session(settings, "looks") as session:
        (found,) = session.range(0, 1, 1, 1).mapInPandas(look, "place string, project string").collect()
    assert re.search(r"/tidegate_[0-9a-f]{20}\.zip/tidegate/jobs/pipelines/flights\.py$", found.place)
    assert not found.place.startswith(str(REPOSITORY))
    if os.geteuid() == 0:
        assert found.project == "closed"
