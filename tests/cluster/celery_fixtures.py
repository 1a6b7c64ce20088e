"""Airflow with CeleryExecutor on several "machines": each component has its own home, folders, secrets and copy of the Dags.

They share network addresses and the installed packages, as machines with the same image do, and nothing else: no folder of one
is named to another.
"""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from cryptography.fernet import Fernet
from psycopg2 import sql

from tests.conftest import COMMAND
from tests.servers import Server
from tidegate.stack.components import server_process as components
from tidegate.stack.components.airflow import LOCAL_SETTINGS, PROJECT, airflow_settings
from tidegate.state_store import Settings

PYTHON = Path(sys.executable)
# A dead worker is noticed after seconds, for the test; docs/airflow-workers.md has the values for production.
SHORT = {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20", "AIRFLOW__CELERY__WORKER_CONCURRENCY": "3"}
OF_THE_SYSTEM = ("LANG", "JAVA_HOME", "TESTS_OF_TIDEGATE")
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
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
        with (self.folder / "log").open("ab") as output:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "airflow", *arguments], env=self.environment, cwd=self.folder / "work", stdout=output, **quiet
            )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "timeout": 400}
        return subprocess.run([COMMAND, *arguments], env=self.environment, cwd=self.folder / "work", check=False, **options)

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

    def add(self, name: str, component: str) -> Machine:
        """Set up a machine with what a component needs, each secret in a file of its own."""
        folder, (roles, variables) = self.folder / name, NEEDS[component]
        for part in ("home", "work", "tmp", "airflow", "project/pipelines", "secrets", "dags"):
            (folder / part).mkdir(parents=True)
        (folder / "project/pipelines/sales.py").write_text("from tests.cluster.sales import PIPELINE\n")
        (folder / "project/tidegate.toml").touch()
        lines = [line for line in self.secrets["PGPASSFILE"].splitlines() if line.split(":")[3] in roles]
        environment = {
            **{name: os.environ[name] for name in OF_THE_SYSTEM if name in os.environ},
            **airflow_settings(),
            **dict(
                line.split("=", 1)
                for line in (PROJECT / "deploy/celery.env").read_text().splitlines()
                if line and not line.startswith("#")
            ),
            **SHORT,
            **self.addresses,
            "PATH": f"{PYTHON.parent}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join([str(PROJECT), str(LOCAL_SETTINGS)]),
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "AIRFLOW_HOME": str(folder / "airflow"),
            "TIDEGATE_HOME": str(folder / "project"),
        }
        for variable in ("PGPASSFILE", *variables):
            file = folder / "secrets" / variable
            file.touch(0o600)
            file.write_text("".join(f"{line}\n" for line in lines) if variable == "PGPASSFILE" else self.secrets[variable])
            environment[variable] = f"cat {file}" if variable.endswith("_CMD") else str(file)
        if component in WITH_DAGS:
            (folder / "dags/sales.py").write_text(DAG)
            environment["AIRFLOW__CORE__DAGS_FOLDER"] = str(folder / "dags")
        self.machines[name] = Machine(component, folder, environment)
        return self.machines[name]


@contextmanager
def broker(folder: Path, port: int, password: str) -> Iterator[None]:
    program = shutil.which("redis-server")
    assert program, "This test needs Redis. Install it (Debian: apt-get install redis-server)."
    folder.mkdir()
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


@contextmanager
def celery_cluster(
    folder: Path, server: Server, settings: Settings, free_port: Callable[[], int], workers: Sequence[str]
) -> Iterator[Cluster]:
    """Run Airflow's components and these workers, each on a machine of its own; Airflow's own database is on `server`."""
    database = server.create_database()
    server.execute(sql.SQL("ALTER DATABASE {} OWNER TO airflow").format(sql.Identifier(database)))
    web, redis, port = free_port(), free_port(), server.settings.pg_port
    assert settings.pg_passfile
    assert settings.spark_token_file
    assert server.settings.pg_passfile
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
    password, of_redis = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
    values = {
        "PGPASSFILE": server.settings.pg_passfile.read_text().replace(":*:*:", f":{port}:*:")
        + settings.pg_passfile.read_text(),
        SPARK: settings.spark_token_file.read_text(),
        PASSWORD: password,
        USERS: f'{{"admin": "{password}"}}',
        FERNET: Fernet.generate_key().decode(),
        LOG: secrets.token_urlsafe(48),
        JWT: secrets.token_urlsafe(48),
        BROKER: f"redis://:{of_redis}@127.0.0.1:{redis}/0",
        RESULTS: f"redis://:{of_redis}@127.0.0.1:{redis}/1",
    }
    cluster = Cluster(folder, settings, addresses, values)
    airflow = f"airflow@127.0.0.1:{port}/{database}"
    for name in OF_METADATA:
        cluster.add(name, name).environment |= {
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://{airflow}?require_auth=scram-sha-256",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": f"postgresql+asyncpg://{airflow}",
        }
    for name in workers:
        cluster.add(name, "worker").environment["AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT"] = str(free_port())
    cluster.add("command-line", "command-line")
    scheduler = cluster.machines["scheduler"]
    with ExitStack() as until, broker(folder / "broker", redis, of_redis):
        until.callback(server.drop_database, database)
        migrate = [PYTHON, "-m", "airflow", "db", "migrate"]
        subprocess.run(migrate, env=scheduler.environment, cwd=scheduler.folder, check=True, capture_output=True)
        for name, machine in cluster.machines.items():
            until.callback(machine.end)
            match machine.component:
                case "worker":
                    machine.start("celery", "worker", "--celery-hostname", f"{name}@%h")
                case "scheduler":
                    machine.start("scheduler", "--skip-serve-logs")
                case "api-server" | "dag-processor" | "triggerer":
                    machine.start(name)
        yield cluster
