"""Real servers for the tests: one embedded Postgres and one Spark Connect server for all processes, a database per test."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.psycopg2 import PGDialect_psycopg2
from sqlalchemy.util import LRUCache
from xdist.scheduler import LoadFileScheduling

from tests.databases import Pool
from tests.examples import EXAMPLES  # noqa: F401 - this process has their pipelines
from tests.jars import pytest_sessionstart  # noqa: F401 - a hook of this file
from tests.postgres_versions import running_version
from tests.reaper import die_with_make, pytest_configure, pytest_unconfigure  # noqa: F401 - hooks of this file
from tests.servers import Server, fetch_kafka, shared_stack, shared_template, show_transactions
from tests.store import registration, state_tables
from tidegate import migrations
from tidegate.jobs import Pipeline
from tidegate.stack.components.server_process import reserve_port
from tidegate.state_store import Settings, StateStore

for _name in [name for name in os.environ if name.startswith(("TIDEGATE_", "PG"))]:
    del os.environ[_name]  # tests must not reach the developer's own database
os.environ["TIDEGATE_MIN_FILE_AGE_SECONDS"] = "0"  # a test's files are complete when they appear
os.environ["TIDEGATE_STAGING_CONNECTIONS"] = "2"  # several tasks, and no more than a run's cores have time for
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background job ignores SIGINT, and every process that a test starts and interrupts would inherit that. A
    # handler that does nothing has the same effect here, but is not inherited.
    signal.signal(signal.SIGINT, lambda *_: None)
die_with_make()

# SQLAlchemy compiles each statement once per process: by itself, it would once per database, so for every test. Servers of
# another version have their own.
_compiled: LRUCache[object, object] = LRUCache(2000)
PGDialect_psycopg2.__eq__ = lambda one, other: type(one) is type(other) and one.server_version_info == other.server_version_info
PGDialect_psycopg2.__hash__ = lambda _: hash(PGDialect_psycopg2)
PGDialect_psycopg2.engine_created = lambda engine: engine.update_execution_options(compiled_cache=_compiled)

COMMAND = Path(sys.executable).with_name("tidegate")
# Three processes take their files in turn: the longest first. As `testpaths`, pytest's first process would load each conftest.
FOLDERS = ["end_to_end", "acceptance", "integration", "model", "conformance", "sources", "jobs", "cli", "page"]
FOLDERS += ["stack", "dags", "fuzz", "readme", "unit", "observability", "chaos", "cluster"]
PAGE = "tests/page/"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest first; leave out what is for `make soak`: what is `soak`, and of `sampled(n)`, all but n parameters."""
    if [Path(argument).name for argument in config.args] == ["tests"]:
        order = {folder: number for number, folder in enumerate(FOLDERS)}
        items.sort(key=lambda item: order.get(item.nodeid.split("/")[1], len(order)))  # a new folder is the last
    if os.environ.get("SOAK"):
        return
    items[:] = [item for item in items if not item.get_closest_marker("soak")]
    sampled: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            sampled.setdefault((item.nodeid.partition("[")[0], *marker.args), []).append(item)
    for (_, most), of_a_test in sampled.items():
        kept = {of_a_test[round(number * (len(of_a_test) - 1) / max(most - 1, 1))] for number in range(most)}
        items[:] = [item for item in items if item in kept or item not in of_a_test]


class ByFile(LoadFileScheduling):
    """As by itself, but one process has all files of the page: each would make Airflow's app, for seven core seconds."""

    def _split_scope(self, nodeid: str) -> str:
        return PAGE if nodeid.startswith(PAGE) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def free_port() -> Iterator[Callable[[], int]]:
    """A function that returns a loopback port and reserves it until the tests end."""
    with ExitStack() as held:
        yield lambda: reserve_port(None, held)


@pytest.fixture(scope="session")
def whole_stack(request: pytest.FixtureRequest) -> Settings:
    """Settings of the run's stack: Postgres, Spark Connect, and Kafka if any test of the run needs it and it can be fetched."""
    if home := os.environ.get("STACK_OF_TESTS"):  # one that runs already: tests/mutants has the same for many runs
        return Settings.load({**os.environ, "TIDEGATE_HOME": home})
    if any("kafka_stack" in getattr(item, "fixturenames", ()) for item in request.session.items):
        with suppress(pytest.skip.Exception):  # tests of Kafka will say so
            fetch_kafka()
            return shared_stack("kafka")
    return shared_stack()


@pytest.fixture(scope="session")
def stack(whole_stack: Settings) -> Settings:
    """Settings of the run's stack as one without Kafka; a test that stops or changes a server uses `tests.lone_stack`."""
    return replace(whole_stack, kafka_bootstrap=None, kafka_properties_file=None)


@pytest.fixture(scope="session")
def kafka_stack(whole_stack: Settings) -> Settings:
    fetch_kafka()
    return whole_stack


@pytest.fixture(scope="session")
def server(stack: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The stack's Postgres, or one of the version in POSTGRES_OF_TESTS."""
    if (version := os.environ.get("POSTGRES_OF_TESTS")) is None:
        yield Server(stack)
        return
    with running_version(int(version), tmp_path_factory.mktemp(f"postgres_{version}"), stack) as settings:
        show_transactions(settings)
        yield Server(settings)


@pytest.fixture(scope="session")
def template(server: Server) -> str:
    return shared_template(server)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[tuple[Path, int, str], Pool]]:
    """The databases of this process, by server and template; they go with their servers."""
    made: dict[tuple[Path, int, str], Pool] = {}
    yield made
    if "STACK_OF_TESTS" in os.environ:
        for pool in made.values():
            pool.drop_all()


@pytest.fixture
def settings(server: Server, template: str, pools: dict[tuple[Path, int, str], Pool], tmp_path: Path) -> Iterator[Settings]:
    """Settings with a database and a project folder of the test's own."""
    pool = pools.setdefault((server.settings.home, server.settings.pg_port, template), Pool(server, template))
    name = pool.take()
    yield replace(server.settings, pg_database=name, home=tmp_path)
    pool.give_back(name)


def create_states(settings: Settings, *pipelines: Pipeline) -> None:
    """Create the state tables of pipelines, as their migrations would."""
    with migrations.connected(settings) as connection:
        state_tables.metadata_of(tuple(pipeline.spec for pipeline in pipelines)).create_all(connection)


def register_pipelines(settings: Settings, *pipelines: Pipeline) -> None:
    create_states(settings, *pipelines)
    with migrations.connected(settings) as connection:
        for pipeline in pipelines:
            registration.register(connection, pipeline.spec)


@pytest.fixture
def register(settings: Settings) -> Callable[..., None]:
    return partial(register_pipelines, settings)


@pytest.fixture
def store(settings: Settings) -> Iterator[StateStore]:
    """A store on the test's database, as the worker role."""
    with StateStore.connect(settings) as connected:
        yield connected


@cache  # OpenTelemetry takes one provider per process
def _memory_of_spans() -> Any:
    from opentelemetry import trace  # noqa: PLC0415 - few tests need it
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: PLC0415

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def exporter() -> Any:
    """OpenTelemetry's InMemorySpanExporter, empty."""
    _memory_of_spans().clear()
    return _memory_of_spans()


@pytest.fixture
def as_owner(settings: Settings) -> Callable[[sa.Executable], sa.CursorResult]:

    def execute(statement: sa.Executable) -> sa.CursorResult:
        with migrations.connected(settings) as connection:
            return connection.execute(statement)

    return execute
