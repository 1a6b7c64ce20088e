"""Airflow's app with the page, in this process, on a ledger of the run's Postgres; no other part of Airflow, and no Spark."""

import io
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

import tests.airflow_home  # noqa: F401 - before anything else imports Airflow
from tests import in_process, servers
from tests.conftest import register_pipelines
from tests.page.pipelines import REGISTERED, write_authors
from tests.page.users import AUTH_MANAGER, USERS, passwords, token_of
from tests.servers import shared_template
from tidegate.page import declared_pipelines, ledger_connection
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings, StateStore

PATIENCE_SECONDS = 300
JWT_SECRET = "the secret of this server's tokens, which has more than 64 bytes as HS512 wants"
METRICS_TOKEN = "the-token-of-the-tests-Prometheus"
NO_IDLE_CONNECTIONS = httpx.Limits(max_keepalive_connections=0)  # the server ends them after some seconds
ACTION = {"X-Tidegate-Action": "1"}


@dataclass
class Server:
    settings: Settings
    url: str
    log: io.StringIO


@dataclass
class Visitor:
    """One user's browser, or a program without a login."""

    http: httpx.Client

    def get(self, path: str, **parameters: object) -> httpx.Response:
        return self.http.get(f"/tidegate{path}", params=parameters or None)

    def json(self, path: str, **parameters: object) -> dict:
        answer = self.get(f"/api{path}", **parameters)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    def browse(self, path: str, of: str, by: str = "after", **parameters: object) -> list:
        """Return what is on all pages."""
        page = self.json(path, **parameters)
        found = page[of]
        while page["next"] is not None:
            page = self.json(path, **parameters, **{by: page["next"]})
            found += page[of]
        return found

    def act(self, pipeline: str, verb: str, *, txid: int | None = None, reason: str = "a test") -> httpx.Response:
        path = f"/tidegate/api/pipelines/{pipeline}/actions/{verb}"
        return self.http.post(path, json={"txid": txid, "reason": reason}, headers=ACTION)


Visit = Callable[..., Visitor]


@cache
def airflows_app() -> FastAPI:
    """Return Airflow's app, with its plugins, its login and its middleware; its own tables are in a file."""
    from airflow import settings  # noqa: PLC0415 - takes seconds
    from airflow.api_fastapi.app import create_app  # noqa: PLC0415
    from airflow.models import import_all_models  # noqa: PLC0415
    from airflow.models.base import Base  # noqa: PLC0415

    import_all_models()
    Base.metadata.create_all(settings.engine)
    return create_app(apps="core")


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert wait_until(lambda: server.started or not thread.is_alive(), PATIENCE_SECONDS)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def server(stack: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    postgres = servers.Server(stack)
    home, name = tmp_path_factory.mktemp("page"), postgres.create_database(shared_template(postgres))
    for file, content in {"metrics_token": METRICS_TOKEN, "passwords.json": passwords()}.items():
        (home / file).touch(0o600)
        (home / file).write_text(content)
    settings = replace(stack, pg_database=name, home=home, metrics_token_file=home / "metrics_token")
    write_authors(home / "authors")
    register_pipelines(settings, *REGISTERED)
    made = Server(settings, "", io.StringIO())
    environment = {
        **in_process.environment_of(settings),
        "PYTHONPATH": str(home / "authors"),
        "AIRFLOW__CORE__AUTH_MANAGER": AUTH_MANAGER,
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": USERS,
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
        "AIRFLOW__API_AUTH__JWT_SECRET": JWT_SECRET,
        "AIRFLOW__API__SECRET_KEY": "another secret",
    }
    handler = logging.StreamHandler(made.log)
    logging.getLogger("tidegate").addHandler(handler)
    try:
        with in_process.started_with(environment, alone=False), _fresh_page(), serving(airflows_app()) as made.url:
            yield made
    finally:
        logging.getLogger("tidegate").removeHandler(handler)
        postgres.drop_database(name)


@contextmanager
def _fresh_page() -> Iterator[None]:
    """Let the page read its settings and load pipelines as in a new process, and forget them at the end."""
    declared = (declared_pipelines._queries, declared_pipelines._names, declared_pipelines._declared)
    remembered = (ledger_connection.settings, ledger_connection.reader, *declared)
    for each in remembered:
        each.cache_clear()
    try:
        yield
    finally:
        if ledger_connection.reader.cache_info().currsize:
            ledger_connection.reader().close()
        for each in remembered:
            each.cache_clear()


@pytest.fixture(scope="module")
def visit(server: Server) -> Iterator[Visit]:
    """A function that returns a user's browser, after logging in; nobody's without a name."""
    with ExitStack() as opened:

        def visitor(name: str | None = None) -> Visitor:
            transport = httpx.HTTPTransport(limits=NO_IDLE_CONNECTIONS)
            http = opened.enter_context(httpx.Client(base_url=server.url, timeout=400, transport=transport))
            if name:
                http.cookies.set("_token", token_of(server.url, name))
            return Visitor(http)

        yield visitor


@pytest.fixture
def store(server: Server) -> Iterator[StateStore]:
    with StateStore.connect(server.settings) as connected:
        yield connected
