"""Real servers for the tests: one embedded Postgres and one Spark Connect server per session, a database per test."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg2
import pytest
import sqlalchemy as sa
from psycopg2 import sql

from tests.examples import EXAMPLES  # noqa: F401 - this process has their pipelines
from tests.jars import fetch_or_skip
from tests.postgres_versions import running_version
from tests.reaper import die_with_make, reaper  # noqa: F401 - a fixture of every test
from tidegate import migrations
from tidegate import stack as embedded
from tidegate.jobs import Pipeline
from tidegate.stack.components import kafka, spark
from tidegate.stack.components.server_process import reserve_port
from tidegate.stack.layout import USUAL_PORTS
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.project import STACK_FOLDER
from tidegate.state_store.pipeline_changes import registration
from tidegate.state_store.states import state_tables

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

for _name in [name for name in os.environ if name.startswith(("TIDEGATE_", "PG"))]:
    del os.environ[_name]  # tests must not reach the developer's own database
os.environ["TIDEGATE_MIN_FILE_AGE_SECONDS"] = "0"  # a test's files are complete when they appear
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background job ignores SIGINT, and every process that a test starts and interrupts would inherit that. A
    # handler that does nothing has the same effect here, but is not inherited.
    signal.signal(signal.SIGINT, lambda *_: None)
die_with_make()

COMMAND = Path(sys.executable).with_name("tidegate")
TEMPLATE = "tidegate_template"
# Tests end before Java's second compiler has paid for itself: without it, they take a seventh less processor time.
QUICK_TO_COMPILE = "-XX:TieredStopAtLevel=1"
DRIVER_MEMORY = 1024**3  # of a stack's Spark: with four test processes, ten stacks may run at once
BUDGET_MINUTES = os.environ.get("BUDGET_MINUTES", "inf")
_ENDS = time.monotonic() + 60 * float(BUDGET_MINUTES)
_numbers = count(1)


class Server:
    """The test session's Postgres server, for its administrator."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def execute(self, statement: sql.Composable, parameters: object = None) -> list[tuple]:
        """Run one statement outside any transaction."""
        connection = psycopg2.connect(**{**self.settings.conninfo(user="postgres"), "dbname": "postgres"})
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement, parameters)
                return cursor.fetchall() if cursor.description else []
        finally:
            connection.close()

    def create_database(self, template: str | None = None) -> str:
        """Create a database that the owner role owns; return its name."""
        name = f"tidegate_test_{os.getpid()}_{next(_numbers)}"  # several runs may share a server
        statement = sql.SQL("CREATE DATABASE {} OWNER tidegate_owner TEMPLATE {}")
        self.execute(statement.format(sql.Identifier(name), sql.Identifier(template or "template0")))
        return name

    @contextmanager
    def shows_transactions_to(self, *roles: str) -> Iterator[None]:
        """Let roles see the start of other sessions' transactions, which reading a table by time needs."""
        names = sql.SQL(", ").join(map(sql.Identifier, roles))
        self.execute(sql.SQL("GRANT pg_read_all_stats TO {}").format(names))
        yield
        self.execute(sql.SQL("REVOKE pg_read_all_stats FROM {}").format(names))

    def drop_database(self, name: str) -> None:
        """Drop a database and end its connections."""
        self.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip what begins after the time that `make test` has: where a machine is much slower than usual, the rest still tells."""
    if time.monotonic() > _ENDS:
        pytest.skip(f"make test has used its {BUDGET_MINUTES} minutes on this machine; for the rest: make test BUDGET=600")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make soak` runs: what is marked `soak`, and of a test that is `sampled(n)`, all but n parameters."""
    if os.environ.get("SOAK"):
        return
    left_out = {item for item in items if item.get_closest_marker("soak")}
    sampled: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if item not in left_out and (marker := item.get_closest_marker("sampled")):
            sampled.setdefault((item.nodeid.partition("[")[0], *marker.args), []).append(item)
    for (_, most), of_a_test in sampled.items():
        kept = {of_a_test[round(number * (len(of_a_test) - 1) / max(most - 1, 1))] for number in range(most)}
        left_out.update(set(of_a_test) - kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def free_port() -> Iterator[Callable[[], int]]:
    """A function that returns a loopback port and reserves it until the tests end."""
    with ExitStack() as held:
        yield lambda: reserve_port(None, held)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a running embedded stack without Airflow: Postgres and Spark Connect."""
    if home := os.environ.get("STACK_OF_TESTS"):  # one that runs already: tests/mutants has the same for many runs
        yield Settings.load({**os.environ, "TIDEGATE_HOME": home})
        return
    with running_stack(tmp_path_factory.mktemp("stack"), java_options=QUICK_TO_COMPILE) as settings:
        yield settings


@pytest.fixture(scope="module")
def kafka_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a running embedded stack of its own, without Airflow, with Kafka; it takes 2 GB, and ends with the module."""
    fetch_kafka()
    with running_stack(tmp_path_factory.mktemp("kafka_stack"), "kafka", java_options=QUICK_TO_COMPILE) as settings:
        yield settings


def fetch_kafka() -> None:
    """Fetch Kafka's libraries into the user's cache, or skip the test."""
    fetch_or_skip(*kafka.PACKAGES)
    fetch_or_skip(*kafka.SPARK_PACKAGES)


@contextmanager
def running_stack(home: Path, *extras: str, java_options: str = "") -> Iterator[Settings]:
    """Run an embedded stack without Airflow in an empty folder, and delete it at the end."""
    # The usual ports are left to the tests of whole stacks, which run at the same time.
    stack_file = home / STACK_FOLDER / "stack.json"
    stack_file.parent.mkdir(mode=0o711)
    with ExitStack() as chosen:
        stack_file.write_text(json.dumps({"ports": {name: reserve_port(None, chosen) for name in USUAL_PORTS}}))
    environ = {**os.environ, "TIDEGATE_HOME": str(home)}
    settings = Settings.load(environ)
    with pytest.MonkeyPatch.context() as environment:
        if java_options:
            environment.setenv("JDK_JAVA_OPTIONS", java_options)
        environment.setattr(spark, "MAX_DRIVER_MEMORY", DRIVER_MEMORY)
        embedded.up(settings, without_airflow=True, extras=extras)
    try:
        settings = Settings.load(environ)
        do_not_sync(settings)
        yield settings
    finally:
        embedded.down(settings, delete_data=True)


def do_not_sync(settings: Settings) -> None:
    """Let a test's Postgres leave syncing to the operating system: killed processes lose nothing by it, only machines do.

    Dropping a test's database then takes a seventh of the time.
    """
    server = Server(settings)
    server.execute(sql.SQL("ALTER SYSTEM SET fsync = off"))
    server.execute(sql.SQL("SELECT pg_reload_conf()"))


@contextmanager
def usual_server(stack: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield the stack's Postgres, or one of the version in POSTGRES_OF_TESTS."""
    version = os.environ.get("POSTGRES_OF_TESTS")
    if version is None:
        yield Server(stack)
        return
    with running_version(int(version), tmp_path_factory.mktemp(f"postgres_{version}"), stack) as settings:
        yield Server(settings)


@pytest.fixture(scope="session")
def server(stack: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The Postgres server of the session."""
    with usual_server(stack, tmp_path_factory) as usual:
        yield usual


@contextmanager
def migrated_database(server: Server) -> Iterator[str]:
    """Create a migrated database without pipelines on a server, and drop it at the end."""
    name = server.create_database()
    migrations.upgrade(replace(server.settings, pg_database=name), [])
    yield name
    server.drop_database(name)


@pytest.fixture(scope="session")
def template(server: Server) -> Iterator[str]:
    """A migrated database without pipelines; each test gets a copy."""
    with migrated_database(server) as name:
        yield name


@pytest.fixture
def settings(server: Server, template: str, tmp_path: Path) -> Iterator[Settings]:
    """Settings with a database and a project folder of the test's own."""
    name = server.create_database(template)
    yield replace(server.settings, pg_database=name, home=tmp_path)
    server.drop_database(name)


def create_states(settings: Settings, *pipelines: Pipeline) -> None:
    """Create the state tables of pipelines, as their migrations would."""
    with migrations.connected(settings) as connection:
        state_tables.metadata_of(tuple(pipeline.spec for pipeline in pipelines)).create_all(connection)


def register_pipelines(settings: Settings, *pipelines: Pipeline) -> None:
    """Create the state tables of pipelines, as their migrations would, and register them."""
    specs = tuple(pipeline.spec for pipeline in pipelines)
    with migrations.connected(settings) as connection:
        state_tables.metadata_of(specs).create_all(connection)
        for spec in specs:
            registration.register(connection, spec)


@contextmanager
def copied(server: Server, settings: Settings) -> Iterator[Settings]:
    """Copy a database, let its pipelines go on in the copy, and drop it at the end."""
    copy = replace(settings, pg_database=server.create_database(settings.pg_database))
    try:
        migrations.accept_epoch(copy, "a test")
        yield copy
    finally:
        server.drop_database(copy.pg_database)


@pytest.fixture
def register(settings: Settings) -> Callable[..., None]:
    """A function that creates the state tables of pipelines, as their migrations would, and registers them."""
    return partial(register_pipelines, settings)


@pytest.fixture
def store(settings: Settings) -> Iterator[StateStore]:
    """A store on the test's database, as the worker role."""
    with StateStore.connect(settings) as connected:
        yield connected


@pytest.fixture(scope="session")
def spans_in_memory() -> "InMemorySpanExporter":
    """The memory in which this process' spans end: OpenTelemetry takes one provider per process."""
    from opentelemetry import trace  # noqa: PLC0415 - few tests need it
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: PLC0415

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def exporter(spans_in_memory: "InMemorySpanExporter") -> "InMemorySpanExporter":
    """An empty memory for this process' spans."""
    spans_in_memory.clear()
    return spans_in_memory


@pytest.fixture
def as_owner(settings: Settings) -> Callable[[sa.Executable], sa.CursorResult]:
    """A function that runs one statement as the owner of the tables, as an administrator could."""

    def execute(statement: sa.Executable) -> sa.CursorResult:
        with migrations.connected(settings) as connection:
            return connection.execute(statement)

    return execute
