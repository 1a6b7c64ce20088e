"""Two Celery workers on machines of their own; one dies in the middle of a commit, and the state is as in a clean run."""

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from cryptography.fernet import Fernet

from tests.cluster.sales import BY_HAND, COUNTED, PER_BATCH, PIPELINE, ROWS, TABLE
from tests.conftest import COMMAND, register_pipelines
from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, wait_for, waiting_process
from tests.integration.conftest import holding
from tests.servers import Server
from tests.statements import execute
from tidegate.airflow_client import AirflowClient
from tidegate.stack.components import server_process as components
from tidegate.stack.components.airflow import LOCAL_SETTINGS, PROJECT, airflow_settings
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import UnknownPipeline

pytestmark = pytest.mark.skipif("CLUSTER" not in os.environ, reason="the long form: make cluster-test")
PYTHON = Path(sys.executable)
WORKERS = ("worker-1", "worker-2")
# A dead worker is noticed after seconds, for the test; docs/airflow-workers.md has the values for production.
SHORT = {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20", "AIRFLOW__CELERY__WORKER_CONCURRENCY": "3"}
DAG = 'from tidegate.dags.batch_dag import batch_dag\n\ndag = batch_dag("sales")\n'
# What each component is given, by docs/airflow-workers.md: roles of Postgres, and secrets.
FERNET, JWT, LOG = "AIRFLOW__CORE__FERNET_KEY_CMD", "AIRFLOW__API_AUTH__JWT_SECRET_CMD", "AIRFLOW__API__SECRET_KEY_CMD"
BROKER, RESULTS = "AIRFLOW__CELERY__BROKER_URL_CMD", "AIRFLOW__CELERY__RESULT_BACKEND_CMD"
SPARK, PASSWORD = "TIDEGATE_SPARK_TOKEN_FILE", "TIDEGATE_AIRFLOW_PASSWORD_FILE"
USERS = "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"
NEEDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "api-server": (("airflow", "tidegate", "tidegate_reader"), (FERNET, JWT, LOG, USERS)),
    "scheduler": (("airflow",), (FERNET, JWT, BROKER, RESULTS)),
    "dag-processor": (("airflow", "tidegate"), ()),
    "triggerer": (("airflow", "tidegate"), (FERNET, LOG)),
    "worker": (("tidegate", "tidegate_stager"), (SPARK, LOG, BROKER, RESULTS)),
    "command-line": (("tidegate", "tidegate_reader"), (SPARK, PASSWORD)),
}
OF_METADATA, WITH_DAGS = ("api-server", "scheduler", "dag-processor", "triggerer"), ("dag-processor", "worker")


@dataclass
class Machine:
    """A component's folder, which stands for a machine, and the process that it runs."""

    component: str
    folder: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        command, place = [PYTHON, "-m", "airflow", *arguments], {"env": self.environment, "cwd": self.folder / "work"}
        with (self.folder / "log").open("ab") as log:
            own = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen(command, **place, **own)

    def is_well(self) -> bool:
        doctor = [COMMAND, "doctor", "--component", self.component]
        options = {"env": self.environment, "cwd": self.folder / "work", "capture_output": True}
        return subprocess.run(doctor, check=False, **options).returncode == 0

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
        for process in (processes := self.processes()):
            process.kill()
        self.process.wait(30)
        assert components.wait_until(lambda: not any(map(components.is_alive, processes)), 30)


def machine(folder: Path, component: str, secrets: Mapping[str, str], environment: Mapping[str, str]) -> Machine:
    """Set up a machine with what its component needs, and no more."""
    roles, variables = NEEDS[component]
    for part in ("home", "work", "tmp", "airflow", "project/pipelines", "secrets", "dags"):
        (folder / part).mkdir(parents=True)
    (folder / "project/pipelines/sales.py").write_text("from tests.cluster.sales import PIPELINE\n")
    (folder / "project/tidegate.toml").touch()
    whole = {
        **{name: os.environ[name] for name in ("LANG", "JAVA_HOME", "TESTS_OF_TIDEGATE") if name in os.environ},
        **airflow_settings(),
        **dict(re.findall(r"^(\w+)=(.*)$", (PROJECT / "deploy/celery.env").read_text(), re.MULTILINE)),
        **SHORT,
        "PATH": f"{PYTHON.parent}:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join([str(PROJECT), str(LOCAL_SETTINGS)]),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "AIRFLOW_HOME": str(folder / "airflow"),
        "TIDEGATE_HOME": str(folder / "project"),
        **environment,
    }
    passwords = [line for line in secrets["PGPASSFILE"].splitlines() if line.split(":")[3] in roles]
    for variable in ("PGPASSFILE", *variables):
        (file := folder / "secrets" / variable).touch(0o600)
        file.write_text("\n".join(passwords) if variable == "PGPASSFILE" else secrets[variable])
        whole[variable] = f"cat {file}" if variable.endswith("_CMD") else str(file)
    if component in WITH_DAGS:
        (folder / "dags/sales.py").write_text(DAG)
        whole["AIRFLOW__CORE__DAGS_FOLDER"] = str(folder / "dags")
    return Machine(component, folder, whole)


@contextmanager
def broker(folder: Path, port: int, password: str) -> Iterator[None]:
    program = shutil.which("redis-server")
    assert program, "This test needs Redis. Install it (Debian: apt-get install redis-server)."
    folder.mkdir()
    options = f'bind 127.0.0.1\nport {port}\ndir {folder}\nsave ""\nrequirepass {password}\n'
    with subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        process.stdin.write(options.encode())
        process.stdin.close()
        try:
            assert components.wait_until(lambda: not components.is_free(port), 20)
            yield
        finally:
            process.terminate()


@contextmanager
def cluster(folder: Path, server: Server, settings: Settings, free_port: Callable[[], int]) -> Iterator[dict[str, Machine]]:
    database = server.create_database()
    server.execute(f"ALTER DATABASE {database} OWNER TO airflow")
    web, redis = free_port(), free_port()
    addresses = {
        "PGHOST": settings.pg_host,
        "PGPORT": str(settings.pg_port),
        "PGDATABASE": settings.pg_database,
        "TIDEGATE_SPARK_REMOTE": settings.spark_remote,
        "TIDEGATE_AIRFLOW_URL": f"http://127.0.0.1:{web}",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{web}/execution/",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(web),
        "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{web}",
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
    }
    password, of_redis = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
    values = {
        "PGPASSFILE": settings.pg_passfile.read_text(),
        SPARK: settings.spark_token_file.read_text(),
        PASSWORD: password,
        USERS: f'{{"admin": "{password}"}}',
        FERNET: Fernet.generate_key().decode(),
        LOG: secrets.token_urlsafe(48),
        JWT: secrets.token_urlsafe(48),
        BROKER: f"redis://:{of_redis}@127.0.0.1:{redis}/0",
        RESULTS: f"redis://:{of_redis}@127.0.0.1:{redis}/1",
    }
    database_at = f"airflow@{settings.pg_host}:{settings.pg_port}/{database}"
    of_metadata = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://{database_at}?require_auth=scram-sha-256",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": f"postgresql+asyncpg://{database_at}",
    }
    machines = {name: machine(folder / name, name, values, addresses | of_metadata) for name in OF_METADATA}
    for name in WORKERS:
        port = {"AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port())}
        machines[name] = machine(folder / name, "worker", values, addresses | port)
    machines["command-line"] = machine(folder / "command-line", "command-line", values, addresses)
    scheduler = machines["scheduler"]
    arguments = {"worker": ("celery", "worker"), "scheduler": ("scheduler", "--skip-serve-logs"), "command-line": ()}
    with ExitStack() as until, broker(folder / "broker", redis, of_redis):
        until.callback(server.drop_database, database)
        migrate = [PYTHON, "-m", "airflow", "db", "migrate"]
        subprocess.run(migrate, env=scheduler.environment, cwd=scheduler.folder, check=True, capture_output=True)
        for name, each in machines.items():
            if given := arguments.get(each.component, (name,)):
                until.callback(lambda each=each: components.end(each.processes(), 10))
                each.start(*given, *(("--celery-hostname", f"{name}@%h") if each.component == "worker" else ()))
        yield machines


@pytest.mark.promise("fault:process-dies-at-any-statement:commit", "fault:airflow-loses-repeats-or-reorders-tasks:commit")
@SEES_CONNECTIONS_OF_TASKS
@pytest.mark.timeout(900)
def test_a_worker_that_dies_in_mid_commit_loses_nothing_and_doubles_nothing(
    settings: Settings, server: Server, free_port: Callable[[], int], tmp_path: Path
) -> None:
    register_pipelines(settings, PIPELINE)
    owner = settings.conninfo(user="tidegate_owner")
    execute(owner, TABLE, {"rows": ROWS})
    with cluster(tmp_path / "machines", server, settings, free_port) as machines:
        for each in machines.values():
            if each.component != "scheduler":  # it runs no code of ours
                wait_for(each.is_well, f"all that {each.component} needs", every=1)
        wait_for(lambda: all("ready." in machines[name].log for name in WORKERS), "the workers' start")
        airflow = AirflowClient(Settings.load(machines["command-line"].environment))

        def trigger() -> str | None:
            with suppress(UnknownPipeline):  # the Dag has not been read yet
                return airflow.trigger(PIPELINE.name, {})
            return None

        def ended() -> str | None:
            return found if (found := airflow.run_state(PIPELINE.name, run_id)) in ("success", "failed") else None

        run_id = wait_for(trigger, "the Dag", every=1)
        with holding(settings, "LOCK TABLE tidegate.commit IN EXCLUSIVE MODE"):
            process = waiting_process(settings, "%INSERT INTO tidegate.commit")
            (dead,) = [each for each in machines.values() if process in each.processes()]
            dead.kill()
        (alive,) = [machines[name] for name in WORKERS if machines[name] is not dead]
        assert wait_for(ended, "the end", seconds=600, every=1) == "success", alive.log[-5000:]
        assert all("execute_workload" in worker.log for worker in (dead, alive))
        assert execute(owner, "SELECT txid FROM tidegate.cursor") == [(ROWS // PER_BATCH,)]
        assert execute(owner, COUNTED) == execute(owner, BY_HAND)
        for each in machines.values():  # nothing is shared: none has a file open in the folder of another, or knows of that
            known = [*each.environment.values(), *([each.log] if each.process else [])]
            known += [file.path for process in each.processes() for file in process.open_files()]
            others = [f"{other.folder}{os.sep}" for other in machines.values() if other is not each]
            assert [place for place in others if any(place in text for text in known)] == []
