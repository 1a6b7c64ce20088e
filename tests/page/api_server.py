"""A real api-server of Airflow with the page, and a Postgres of its own, in processes: for benchmarks."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

import psutil

from tests.conftest import register_pipelines
from tests.page.pipelines import REGISTERED, write_authors
from tests.page.users import AUTH_MANAGER, USERS, passwords
from tests.servers import do_not_sync
from tidegate import migrations
from tidegate.stack.components import server_process as components
from tidegate.stack.components.server_process import Component, log_file
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings

PATIENCE_SECONDS = 300


class ApiServer:
    """The page's server: Postgres and Airflow's api-server, each in a process of its own."""

    def __init__(self, home: Path, ports: ExitStack) -> None:
        self.home = home
        self.layout = Layout.choose(home, ports)
        self.settings = Settings.load({"TIDEGATE_HOME": str(home)})
        self.url = self.layout.airflow.url
        self._processes: dict[str, Popen[bytes]] = {}

    def start(self) -> None:
        self.layout.postgres.initialize()
        self.start_postgres()
        self.layout.postgres.bootstrap()
        do_not_sync(self.settings)
        migrations.upgrade(self.settings, [])
        self.layout.airflow.initialize()
        (self.settings.stack_folder / "secrets" / "airflow_passwords.json").write_text(passwords())
        self.layout.airflow.migrate()
        self.start_api_server()

    def start_postgres(self) -> None:
        self._start(self.layout.postgres.component())

    def start_api_server(self) -> None:
        (api_server,) = [each for each in self.layout.airflow.components() if each.name == "airflow-api-server"]
        self._start(replace(api_server, environment={**api_server.environment, **self._environment()}))

    def stop(self, name: str) -> None:
        if process := self._processes.pop(name, None):
            components.end([psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)])
            process.wait()

    def _environment(self) -> dict[str, str]:
        authors = self.home / "authors"
        return {
            "AIRFLOW__CORE__AUTH_MANAGER": AUTH_MANAGER,
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": USERS,
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


@contextmanager
def running_server(home: Path) -> Iterator[ApiServer]:
    (home / ".tidegate").mkdir(mode=0o711)
    write_authors(home / "authors")
    with ExitStack() as ports:
        made = ApiServer(home, ports)
        try:
            made.start()
            register_pipelines(made.settings, *REGISTERED)
            yield made
        finally:
            for name in ("airflow-api-server", "postgres"):
                made.stop(name)
            made.layout.postgres.delete()
