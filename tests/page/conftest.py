"""A real api-server of Airflow with the page, on a real Postgres; no other process of Airflow, and no Spark."""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen

import httpx
import psutil
import pytest

from tests.conftest import do_not_sync, register_pipelines
from tests.page.pipelines import REGISTERED
from tidegate import migrations
from tidegate.stack.components import server_process as components
from tidegate.stack.components.server_process import Component, log_file
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings, StateStore

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 300
USERS = {"admin": "admin", "viewer": "viewer", "clerk": "viewer", "nobody": "viewer"}  # name: role; see `auth_manager`
NO_IDLE_CONNECTIONS = httpx.Limits(max_keepalive_connections=0)  # the server ends them after some seconds
SMALL_BUFFER = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)]  # so that a download waits for its reader
ACTION = {"X-Tidegate-Action": "1"}


class Server:
    """The page's server: Postgres and Airflow's api-server, each in a process of its own."""

    def __init__(self, home: Path, ports: ExitStack) -> None:
        self.home = home
        self.layout = Layout.choose(home, ports)
        self.settings = Settings.load({"TIDEGATE_HOME": str(home)})
        self.url = self.layout.airflow.url
        self._processes: dict[str, Popen[bytes]] = {}

    def start(self) -> None:
        """Start both, with migrated databases."""
        self.layout.postgres.initialize()
        self.start_postgres()
        self.layout.postgres.bootstrap()
        do_not_sync(self.settings)
        migrations.upgrade(self.settings, [])
        self.layout.airflow.initialize()
        passwords = json.dumps({name: f"password of {name}" for name in USERS})
        (self.settings.stack_folder / "secrets" / "airflow_passwords.json").write_text(passwords)
        self.layout.airflow.migrate()
        self.start_api_server()

    def start_postgres(self) -> None:
        """Start Postgres and wait for it."""
        self._start(self.layout.postgres.component())

    def start_api_server(self) -> None:
        """Start the api-server and wait for it."""
        (api_server,) = [each for each in self.layout.airflow.components() if each.name == "airflow-api-server"]
        self._start(replace(api_server, environment={**api_server.environment, **self._environment()}))

    def stop(self, name: str) -> None:
        """End one of both, if it runs."""
        if process := self._processes.pop(name, None):
            components.end([psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)])
            process.wait()

    def log(self) -> str:
        """Return the end of the api-server's log."""
        return log_file(self.settings.stack_folder, "airflow-api-server").read_text()[-6000:]

    def _environment(self) -> dict[str, str]:
        authors = self.home / "authors"
        return {
            "AIRFLOW__CORE__AUTH_MANAGER": "tests.page.auth_manager.PerDagAuthManager",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{name}:{role}" for name, role in USERS.items()),
            "PYTHONPATH": os.pathsep.join([self.layout.airflow.environment()["PYTHONPATH"], str(authors)]),
        }

    def _start(self, component: Component) -> None:
        self._processes[component.name] = components.start(component, self.settings.stack_folder)
        failures: list[str | None] = [None]

        def is_up() -> bool:
            failures[0] = component.check()
            return failures[0] is None

        up = components.wait_until(is_up, PATIENCE_SECONDS)
        assert up, (component.name, failures, log_file(self.settings.stack_folder, component.name).read_text()[-4000:])


@dataclass
class Visitor:
    """One user's browser, or a program without a login."""

    http: httpx.Client

    def get(self, path: str, **parameters: object) -> httpx.Response:
        """Request something of the page."""
        return self.http.get(f"/tidegate{path}", params=_given(parameters) or None)

    def json(self, path: str, **parameters: object) -> dict:
        """Request something of the page's API, which has to be there."""
        answer = self.get(f"/api{path}", **parameters)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    def act(self, pipeline: str, verb: str, *, txid: int | None = None, reason: str = "a test") -> httpx.Response:
        """Act as the page's buttons do."""
        path = f"/tidegate/api/pipelines/{pipeline}/actions/{verb}"
        return self.http.post(path, json={"txid": txid, "reason": reason}, headers=ACTION)


Visit = Callable[..., Visitor]


def _given(parameters: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in parameters.items() if value is not None}


@contextmanager
def running_server(home: Path) -> Iterator[Server]:
    """Run a server in an empty folder, with the test's pipelines registered and authors' code for some of them."""
    (home / ".tidegate").mkdir(mode=0o711)
    _write_authors(home / "authors")
    with ExitStack() as ports:
        made = Server(home, ports)
        try:
            made.start()
            register_pipelines(made.settings, *REGISTERED)
            yield made
        finally:
            for name in ("airflow-api-server", "postgres"):
                made.stop(name)
            made.layout.postgres.delete()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server."""
    with running_server(tmp_path_factory.mktemp("page")) as made:
        yield made


def _write_authors(folder: Path) -> None:
    """Write another package that declares clicks, and broken, whose module raises."""
    metadata = folder / "authors-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: authors\nVersion: 1\n")
    points = "clicks = tests.page.pipelines:CLICKS\nbroken = broken_pipeline:BROKEN\n"
    (metadata / "entry_points.txt").write_text(f"[tidegate.pipelines]\n{points}")
    (folder / "broken_pipeline.py").write_text("raise RuntimeError('this module cannot be imported')\n")


def token_of(server: Server, name: str) -> str:
    """Log a user in; return what their browser keeps as cookie `_token`."""
    login = {"username": name, "password": f"password of {name}"}
    answer = httpx.post(f"{server.url}/auth/token", json=login, timeout=400)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["access_token"])


@pytest.fixture(scope="module")
def visit(server: Server) -> Iterator[Visit]:
    """A function that returns a user's browser, after logging in; nobody's without a name."""
    with ExitStack() as opened:

        def visitor(name: str | None = None) -> Visitor:
            transport = httpx.HTTPTransport(limits=NO_IDLE_CONNECTIONS, socket_options=SMALL_BUFFER)
            http = opened.enter_context(httpx.Client(base_url=server.url, timeout=400, transport=transport))
            if name:
                http.cookies.set("_token", token_of(server, name))
            return Visitor(http)

        yield visitor


@pytest.fixture
def store(server: Server) -> Iterator[StateStore]:
    """A store on the server's ledger, as the worker role."""
    with StateStore.connect(server.settings) as connected:
        yield connected
