"""What each component of a deployment needs: one list, for `tidegate doctor` and the table in docs/airflow-workers.md.

Components may be on different machines. Each is checked where it runs, with its own environment, for what it needs itself.
No check changes anything, and none shows a secret.
"""

import configparser
import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from http.client import OK, HTTPConnection, HTTPException, HTTPSConnection
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from tidegate.state_store.base.errors import SettingsInvalid, TidegateError
from tidegate.state_store.base.settings import Settings

# What runs where, in the order of the table.
COMPONENTS = {
    "scheduler": "decides which task is due",
    "dag-processor": "reads the Dag files, and reports tasks that died",
    "api-server": "Airflow's pages and API, and Tidegate's page",
    "triggerer": "holds the waits of batches",
    "worker": "runs tasks: a Celery worker, a pod, or the scheduler's machine with LocalExecutor",
    "executor": "Spark's, which stages rows",
    "command-line": "`tidegate` in the hands of a person",
}
PACKAGES = ("pyarrow", "numpy", "psycopg2", "pyspark")
PROVIDERS = {
    "CeleryExecutor": "apache-airflow-providers-celery",
    "KubernetesExecutor": "apache-airflow-providers-cncf-kubernetes",
}
REACH_SECONDS = 15.0  # an api-server prepares itself for tasks when it is first asked


@dataclass(frozen=True)
class Surroundings:
    """A component's own settings of Tidegate and Airflow."""

    settings: Settings
    environ: Mapping[str, str]

    def airflow(self, section: str, name: str) -> str | None:
        """Return a setting of Airflow, from the environment or airflow.cfg; None if it is not set.

        As in Airflow, a command may print it. One that a secrets backend holds counts as set: it cannot be looked up here.
        """
        variable = variable_of(section, name)
        for suffix in ("", "_CMD", "_SECRET"):
            if found := self.environ.get(variable + suffix):
                return _output_of(found) if suffix == "_CMD" else found
        if found := self._file.get(section, name, fallback=None):
            return found
        command = self._file.get(section, f"{name}_cmd", fallback=None)
        return _output_of(command) if command else self._file.get(section, f"{name}_secret", fallback=None)

    @cached_property
    def executor(self) -> str:
        """The class of Airflow's executor, without its module."""
        return (self.airflow("core", "executor") or "LocalExecutor").rpartition(".")[2]

    @cached_property
    def _file(self) -> configparser.ConfigParser:
        home = self.environ.get("AIRFLOW_HOME") or "~/airflow"
        found = configparser.ConfigParser(interpolation=None, strict=False)
        file = self.environ.get("AIRFLOW_CONFIG") or Path(home).expanduser() / "airflow.cfg"
        try:
            found.read(file)
        except (configparser.Error, ValueError) as error:  # whose message quotes lines, which may hold a password
            raise SettingsInvalid(f"{file} cannot be read: {type(error).__name__}. Correct it; Airflow reads it too.") from None
        return found


# Yields a sentence for each thing that is missing: what is wrong, and what to do.
Check = Callable[[Surroundings], Iterator[str]]


@dataclass(frozen=True)
class Need:
    """One thing that components need: its settings, what it is for, and how it is checked."""

    name: str
    settings: Sequence[str]
    purpose: str
    components: Sequence[str]
    check: Check


@dataclass(frozen=True)
class Missing:
    """Something that a component lacks."""

    need: str
    settings: Sequence[str]
    problem: str


def needs_of(component: str) -> list[Need]:
    """Return what a component needs."""
    return [need for need in NEEDS if component in need.components]


def missing(component: str, settings: Settings, environ: Mapping[str, str] = os.environ) -> list[Missing]:
    """Return what a component lacks here, with this environment."""
    surroundings = Surroundings(settings, environ)
    return [
        Missing(need.name, need.settings, problem) for need in needs_of(component) for problem in _problems(need, surroundings)
    ]


def table() -> str:
    """Return the table of needs in Markdown."""
    lines = [["what", "settings", "for", "needed by"], ["---"] * 4]
    for need in NEEDS:
        settings = ", ".join(f"`{name}`" for name in need.settings)
        lines.append([need.name, settings, need.purpose, ", ".join(need.components)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def variable_of(section: str, name: str) -> str:
    """Return the environment variable of a setting of Airflow."""
    return f"AIRFLOW__{section.upper()}__{name.upper()}"


def _problems(need: Need, here: Surroundings) -> Iterator[str]:
    try:
        yield from need.check(here)
    except TidegateError as error:
        yield str(error)


def _output_of(command: str) -> str | None:
    """Return what a command prints, as Airflow reads a secret; None if it is missing, fails or prints nothing."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)  # noqa: S603 - Airflow's own
    except (OSError, ValueError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


# -- checks ------------------------------------------------------------------------------------------------------------


def _home(here: Surroundings) -> Iterator[str]:
    if not here.environ.get("TIDEGATE_HOME"):
        yield "TIDEGATE_HOME is not set, so settings depend on the folder in which the process starts. Set it to a folder."
    elif not here.settings.home.is_dir():
        yield f"TIDEGATE_HOME is {here.settings.home}, which is no folder. Create it."


def _ledger(here: Surroundings) -> Iterator[str]:
    from tidegate.state_store import StateStore  # noqa: PLC0415 - not every component has a database

    with StateStore.connect(here.settings) as store:
        yield from (f"{loss} See: tidegate error HOLE_DETECTED" for loss in store.losses().values())
        for setting, remedy in store.harmful_settings().items():
            yield f"Role {setting}, under which steps may never end, or write nothing. As an administrator: {remedy}"


def _reader(here: Surroundings) -> Iterator[str]:
    from tidegate.state_store.read_ledger.ledger_reader import LedgerReader  # noqa: PLC0415

    with LedgerReader(here.settings) as reader, reader.snapshot("checking the reading role"):
        yield from ()


def _stager(here: Surroundings) -> Iterator[str]:
    import psycopg2  # noqa: PLC0415

    from tidegate.state_store.connections.postgres_errors import translate  # noqa: PLC0415

    try:
        psycopg2.connect(**here.settings.conninfo(user=here.settings.pg_stager)).close()
    except psycopg2.Error as error:
        raise translate(error, f"connecting as {here.settings.pg_stager}") from error
    yield from ()


def _spark(here: Surroundings) -> Iterator[str]:
    yield from _file(here.settings.spark_token_file, "TIDEGATE_SPARK_TOKEN_FILE")
    from tidegate.jobs.compute.sessions.session import check_reachable  # noqa: PLC0415 - loads pyspark

    check_reachable(here.settings)


def _sources(here: Surroundings) -> Iterator[str]:
    from tidegate.jobs.registry import find_pipeline, pipeline_names  # noqa: PLC0415

    for name in pipeline_names():
        try:
            find_pipeline(name).source.left_alone(here.settings)
        except Exception as error:  # noqa: BLE001 - an author's module may raise anything; the others are still checked
            yield f"{name}: {error}"


def _witness(here: Surroundings) -> Iterator[str]:
    folder = here.settings.witness_folder or here.settings.stack_folder / "witness"
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield f"{existing} cannot be written, so commits are not marked outside Postgres. Set TIDEGATE_WITNESS_FOLDER."


def _kafka(here: Surroundings) -> Iterator[str]:
    if here.settings.kafka_bootstrap:  # not every project reads topics
        yield from _file(here.settings.kafka_properties_file, "TIDEGATE_KAFKA_PROPERTIES_FILE")
        first = here.settings.kafka_bootstrap.split(",")[0]
        yield from _listener(urlsplit(f"kafka://{first.strip()}"), 9092, "TIDEGATE_KAFKA_BOOTSTRAP")


def _airflow_login(here: Surroundings) -> Iterator[str]:
    from tidegate.airflow_client import AirflowClient  # noqa: PLC0415 - takes a while to import

    AirflowClient(here.settings).close()
    yield from ()


def _metrics_token(here: Surroundings) -> Iterator[str]:
    yield from _file(here.settings.metrics_token_file, "TIDEGATE_METRICS_TOKEN_FILE")


def _airflow_database(here: Surroundings) -> Iterator[str]:
    import sqlalchemy as sa  # noqa: PLC0415

    variable = variable_of("database", "sql_alchemy_conn")
    if (address := here.airflow("database", "sql_alchemy_conn")) is None:
        yield f"Airflow's database is not set. Set {variable}, or {variable}_CMD to a command that prints it."
        return
    if variable + "_SECRET" in here.environ:
        return  # the address is in Airflow's secrets backend
    try:
        engine = sa.create_engine(address, poolclass=sa.NullPool)
        with engine.connect():
            pass
    except (sa.exc.SQLAlchemyError, ImportError) as error:  # neither message has the address, which may hold a password
        reason = str(getattr(error, "orig", None) or type(error).__name__).strip().splitlines()[0]
        yield f"Airflow's database does not answer: {reason}. Correct {variable}."


def _execution_api(here: Surroundings) -> Iterator[str]:
    variable = variable_of("core", "execution_api_server_url")
    if (address := here.airflow("core", "execution_api_server_url")) is None:
        yield f"Tasks do not know where the api-server is. Set {variable} to http://HOST:PORT/execution/."
        return
    url = urlsplit(address)
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    with closing(kind(url.hostname or "", url.port, timeout=REACH_SECONDS)) as connection:
        try:
            connection.request("GET", f"{url.path.rstrip('/')}/health")
            status = connection.getresponse().status
        except (OSError, HTTPException) as error:
            yield f"Nothing answers at {_shown(url)}: {error}. Start the api-server, or correct {variable}."
            return
    if status != OK:
        yield f"{_shown(url)}/health answers with {status}, so tasks could not report. Correct {variable}."


def _secret(section: str, name: str, why: str) -> Check:
    """Return the check that a secret is set, which has to be the same wherever it is needed."""

    def check(here: Surroundings) -> Iterator[str]:
        if here.airflow(section, name) is None:
            variable = variable_of(section, name)
            yield f"{variable} is not set: {why}. Set it, or {variable}_CMD, to the same everywhere."

    return check


def _log_key(here: Surroundings) -> Iterator[str]:
    if (here.airflow("logging", "remote_logging") or "").lower() not in ("true", "1"):
        yield from _secret("api", "secret_key", "the api-server could not fetch the logs of tasks from here")(here)


def _dag_files(here: Surroundings) -> Iterator[str]:
    if here.airflow("dag_processor", "dag_bundle_config_list"):
        return  # Airflow fetches them by itself
    variable = variable_of("core", "dags_folder")
    if (folder := here.airflow("core", "dags_folder")) is None:
        yield f"{variable} is not set. Set it to a folder with the same Dag files as everywhere; its path may differ."
    elif not any(Path(folder).expanduser().glob("**/*.py")):
        yield f"There is no Dag file in {folder}. Copy them there, or correct {variable}."


def _executors_own(here: Surroundings) -> Iterator[str]:
    """Check what the configured executor needs in scheduler and worker."""
    provider = PROVIDERS.get(here.executor)
    if provider is None:
        return
    try:
        distribution(provider)
    except PackageNotFoundError:
        yield f"{here.executor} needs the package {provider}, which is missing. Install the version of requirements-dev.txt."


def _broker(here: Surroundings) -> Iterator[str]:
    if here.executor != "CeleryExecutor":
        return
    for name, port in (("broker_url", 6379), ("result_backend", None)):
        variable = variable_of("celery", name)
        if (address := here.airflow("celery", name)) is None:
            yield f"{variable} is not set. Set it, or {variable}_CMD, to the same in scheduler and workers."
        elif port and variable + "_SECRET" not in here.environ:
            yield from _listener(urlsplit(address), port, variable)


def _pod_template(here: Surroundings) -> Iterator[str]:
    if here.executor != "KubernetesExecutor":
        return
    variable = variable_of("kubernetes_executor", "pod_template_file")
    file = here.airflow("kubernetes_executor", "pod_template_file")
    if file is None or not Path(file).is_file():
        yield f"{variable} names no file. Set it to a copy of deploy/worker-pod.yaml."


def _packages(_: Surroundings) -> Iterator[str]:
    for name in PACKAGES:
        if find_spec(name) is None:
            yield f"Python package {name} is not installed here. Install it in the Python that Spark's workers run."


def _file(file: Path | None, variable: str) -> Iterator[str]:
    """Check that a file can be read, if one is set; it may hold a secret."""
    if file is not None:
        try:
            file.read_bytes()
        except OSError as error:
            yield f"{file} cannot be read: {error.strerror}. Put it there, or correct {variable}."


def _listener(address: SplitResult, usual_port: int, variable: str) -> Iterator[str]:
    try:
        host, port = address.hostname or "", address.port or usual_port
    except ValueError:
        yield f"{variable} has no valid port. Correct it."
        return
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError as error:
        yield f"Nothing answers at {host}:{port}: {error}. Start it, or correct {variable}."


def _shown(url: SplitResult) -> str:
    """Return an address without the user and the password that it may hold."""
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl().rstrip("/")


NEEDS = (
    Need(
        "Project folder",
        ["TIDEGATE_HOME"],
        "settings do not depend on where a process starts",
        ("dag-processor", "api-server", "triggerer", "worker", "command-line"),
        _home,
    ),
    Need(
        "Ledger",
        ["PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSFILE"],
        "turns, batches, commits, as `tidegate`",
        ("dag-processor", "api-server", "triggerer", "worker", "command-line"),
        _ledger,
    ),
    Need(
        "Reading role",
        ["TIDEGATE_PG_READER", "PGPASSFILE"],
        "the page, its metrics, queries",
        ("api-server", "command-line"),
        _reader,
    ),
    Need("Staging role", ["TIDEGATE_PG_STAGER", "PGPASSFILE"], "staging of rows", ("executor",), _stager),
    Need("Packages", [], f"{', '.join(PACKAGES)} for Spark's Python workers", ("executor",), _packages),
    Need(
        "Spark",
        ["TIDEGATE_SPARK_REMOTE", "TIDEGATE_SPARK_TOKEN_FILE"],
        "processing of batches",
        ("worker", "command-line"),
        _spark,
    ),
    Need("Sources", [], "planning and checks of what a batch reads", ("worker", "command-line"), _sources),
    Need(
        "Kafka",
        ["TIDEGATE_KAFKA_BOOTSTRAP", "TIDEGATE_KAFKA_PROPERTIES_FILE"],
        "topics, if pipelines read any",
        ("worker", "executor", "command-line"),
        _kafka,
    ),
    Need(
        "Witness",
        ["TIDEGATE_WITNESS_FOLDER"],
        "an older copy of the database is noticed; best one folder for all",
        ("dag-processor", "api-server", "worker", "command-line"),
        _witness,
    ),
    Need(
        "Airflow's API for people",
        ["TIDEGATE_AIRFLOW_URL", "TIDEGATE_AIRFLOW_USER", "TIDEGATE_AIRFLOW_PASSWORD_FILE"],
        "`trigger`, `retry`",
        ("command-line",),
        _airflow_login,
    ),
    Need(
        "Metrics token", ["TIDEGATE_METRICS_TOKEN_FILE"], "metrics for Prometheus, if wanted", ("api-server",), _metrics_token
    ),
    Need(
        "Airflow's database",
        [variable_of("database", "sql_alchemy_conn")],
        "runs and tasks",
        ("scheduler", "dag-processor", "api-server", "triggerer"),
        _airflow_database,
    ),
    Need(
        "Airflow's API for tasks",
        [variable_of("core", "execution_api_server_url")],
        "a task's start, heartbeats and end",
        ("worker",),
        _execution_api,
    ),
    Need(
        "Key of tokens",
        [variable_of("api_auth", "jwt_secret")],
        "tasks are let in to the API",
        ("scheduler", "api-server"),
        _secret("api_auth", "jwt_secret", "the api-server would refuse every task"),
    ),
    Need(
        "Key of waits",
        [variable_of("core", "fernet_key")],
        "what a wait is for is stored encrypted",
        ("scheduler", "api-server", "triggerer"),
        _secret("core", "fernet_key", "the triggerer could not read what to wait for"),
    ),
    Need(
        "Key of logs",
        [variable_of("api", "secret_key")],
        "logs of tasks are fetched from where they ran",
        ("api-server", "triggerer", "worker"),
        _log_key,
    ),
    Need(
        "Dag files",
        [variable_of("core", "dags_folder")],
        "the same files; the path may differ",
        ("dag-processor", "worker"),
        _dag_files,
    ),
    Need(
        "Executor",
        [variable_of("core", "executor")],
        "its package, if it is another than LocalExecutor",
        ("scheduler", "worker"),
        _executors_own,
    ),
    Need(
        "Broker",
        [variable_of("celery", "broker_url"), variable_of("celery", "result_backend")],
        "with CeleryExecutor",
        ("scheduler", "worker"),
        _broker,
    ),
    Need(
        "Pod template",
        [variable_of("kubernetes_executor", "pod_template_file")],
        "with KubernetesExecutor",
        ("scheduler",),
        _pod_template,
    ),
)
