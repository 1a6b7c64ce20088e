"""What Tidegate needs of each component of a deployment: for `tidegate doctor`, and the table in docs/airflow-workers.md.

Components may be on different machines. Each is checked where it runs, with its own environment, for what it needs itself.
No check changes anything, and none shows a secret.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from tidegate.state_store.base.errors import TidegateError
from tidegate.state_store.base.settings import Settings

# `worker` runs tasks: a Celery worker, a pod, or the scheduler's machine with LocalExecutor; `executor` is Spark's.
COMPONENTS = ("dag-processor", "api-server", "triggerer", "worker", "executor", "command-line")
PACKAGES = ("pyarrow", "numpy", "psycopg2", "pyspark")
REACH_SECONDS = 15.0

# Yields a sentence for each thing that is missing: what is wrong, and what to do.
Check = Callable[[Settings], Iterator[str]]


@dataclass(frozen=True)
class Need:
    """One thing that components need: its settings, and how it is checked."""

    name: str
    settings: Sequence[str]
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


def missing(component: str, settings: Settings) -> list[Missing]:
    """Return what a component lacks here."""
    return [Missing(need.name, need.settings, problem) for need in needs_of(component) for problem in _problems(need, settings)]


def _problems(need: Need, settings: Settings) -> Iterator[str]:
    try:
        yield from need.check(settings)
    except TidegateError as error:
        yield str(error)


# -- checks ------------------------------------------------------------------------------------------------------------


def _home(settings: Settings) -> Iterator[str]:
    if not os.environ.get("TIDEGATE_HOME"):
        yield "TIDEGATE_HOME is not set, so settings depend on the folder in which the process starts. Set it to a folder."
    elif not settings.home.is_dir():
        yield f"TIDEGATE_HOME is {settings.home}, which is no folder. Create it."


def _ledger(settings: Settings) -> Iterator[str]:
    from tidegate.state_store import StateStore  # noqa: PLC0415 - not every component has a database

    with StateStore.connect(settings) as store:
        yield from (f"{loss} See: tidegate error HOLE_DETECTED" for loss in store.losses().values())
        yield from store.harmful_settings()


def _reader(settings: Settings) -> Iterator[str]:
    from tidegate.state_store.read_ledger.ledger_reader import LedgerReader  # noqa: PLC0415

    with LedgerReader(settings) as reader, reader.snapshot("checking the reading role"):
        yield from ()


def _stager(settings: Settings) -> Iterator[str]:
    import psycopg2  # noqa: PLC0415

    from tidegate.state_store.connections.postgres_errors import translate  # noqa: PLC0415

    try:
        psycopg2.connect(**settings.conninfo(user=settings.pg_stager)).close()
    except psycopg2.Error as error:
        raise translate(error, f"connecting as {settings.pg_stager}") from error
    yield from ()


def _spark(settings: Settings) -> Iterator[str]:
    yield from _file(settings.spark_token_file, "TIDEGATE_SPARK_TOKEN_FILE")
    from tidegate.jobs.compute.sessions.session import check_reachable  # noqa: PLC0415 - loads pyspark

    check_reachable(settings)


def _sources(settings: Settings) -> Iterator[str]:
    from tidegate.jobs.registry import find_pipeline, pipeline_names  # noqa: PLC0415

    for name in pipeline_names():
        try:
            find_pipeline(name).source.left_alone(settings)
        except Exception as error:  # noqa: BLE001 - an author's module may raise anything; the others are still checked
            yield f"{name}: {error}"


def _witness(settings: Settings) -> Iterator[str]:
    folder = settings.marks_folder
    existing = next(place for place in (folder, *folder.parents) if os.path.exists(place))  # noqa: PTH110 - Path's raises
    if not os.access(existing, os.W_OK | os.X_OK):
        yield f"{existing} cannot be written, so commits are not marked outside Postgres. Set TIDEGATE_WITNESS_FOLDER."


def _kafka(settings: Settings) -> Iterator[str]:
    if settings.kafka_bootstrap:  # not every project reads topics
        yield from _file(settings.kafka_properties_file, "TIDEGATE_KAFKA_PROPERTIES_FILE")
        address = urlsplit(f"kafka://{settings.kafka_bootstrap.split(',')[0].strip()}")
        try:
            socket.create_connection((address.hostname or "", address.port or 9092), REACH_SECONDS).close()
        except (OSError, ValueError) as error:
            yield f"No broker answers at {address.netloc}: {error}. Start it, or correct TIDEGATE_KAFKA_BOOTSTRAP."


def _airflow_login(settings: Settings) -> Iterator[str]:
    from tidegate.airflow_client import AirflowClient  # noqa: PLC0415 - takes a while to import

    AirflowClient(settings).close()
    yield from ()


def _metrics_token(settings: Settings) -> Iterator[str]:
    yield from _file(settings.metrics_token_file, "TIDEGATE_METRICS_TOKEN_FILE")


def _packages(_: Settings) -> Iterator[str]:
    for name in PACKAGES:
        if find_spec(name) is None:
            yield f"Python package {name} is not installed here. Install it in the Python that Spark's workers run."


def _file(file: Path | None, variable: str) -> Iterator[str]:
    if file is not None:
        try:
            file.read_bytes()
        except OSError as error:
            yield f"{file} cannot be read: {error.strerror}. Put it there, or correct {variable}."


_WITH_LEDGER = tuple(component for component in COMPONENTS if component != "executor")
NEEDS = (
    Need("Project folder", ["TIDEGATE_HOME"], _WITH_LEDGER, _home),
    Need("Ledger", ["PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSFILE"], _WITH_LEDGER, _ledger),
    Need("Reading role", ["TIDEGATE_PG_READER", "PGPASSFILE"], ("api-server", "command-line"), _reader),
    Need("Staging role", ["TIDEGATE_PG_STAGER", "PGPASSFILE"], ("executor",), _stager),
    Need("Packages", [], ("executor",), _packages),
    Need("Spark", ["TIDEGATE_SPARK_REMOTE", "TIDEGATE_SPARK_TOKEN_FILE"], ("worker", "command-line"), _spark),
    Need("Sources", [], ("worker", "command-line"), _sources),
    Need(
        "Kafka", ["TIDEGATE_KAFKA_BOOTSTRAP", "TIDEGATE_KAFKA_PROPERTIES_FILE"], ("worker", "executor", "command-line"), _kafka
    ),
    Need("Witness", ["TIDEGATE_WITNESS_FOLDER"], ("dag-processor", "api-server", "worker", "command-line"), _witness),
    Need(
        "Airflow's API for people",
        ["TIDEGATE_AIRFLOW_URL", "TIDEGATE_AIRFLOW_USER", "TIDEGATE_AIRFLOW_PASSWORD_FILE"],
        ("command-line",),
        _airflow_login,
    ),
    Need("Metrics token", ["TIDEGATE_METRICS_TOKEN_FILE"], ("api-server",), _metrics_token),
)
