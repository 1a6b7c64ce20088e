"""A real api-server of Airflow with the page, and a Postgres of its own, in processes: for benchmarks."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

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


@dataclass(frozen=True)
class ApiServer:
    """A server that runs, and where."""

    settings: Settings
    url: str


@contextmanager
def running_server(home: Path) -> Iterator[ApiServer]:
    """Run an api-server in an empty folder."""
    (home / ".tidegate").mkdir(mode=0o711)
    write_authors(home / "authors")
    with ExitStack() as until:
        layout = Layout.choose(home, until)
        settings = Settings.load({"TIDEGATE_HOME": str(home)})  # with the ports that were chosen

        def start(component: Component) -> None:
            process = psutil.Process(components.start(component, settings.stack_folder).pid)
            until.callback(lambda: components.end([process, *process.children(recursive=True)]))
            is_up = components.wait_until(lambda: component.check() is None, PATIENCE_SECONDS)
            assert is_up, (component.check(), log_file(settings.stack_folder, component.name).read_text()[-4000:])

        layout.postgres.initialize()
        until.callback(layout.postgres.delete)
        start(layout.postgres.component())
        layout.postgres.bootstrap()
        do_not_sync(settings)
        migrations.upgrade(settings, [])
        layout.airflow.initialize()
        (settings.stack_folder / "secrets" / "airflow_passwords.json").write_text(passwords())
        layout.airflow.migrate()
        (api_server,) = [each for each in layout.airflow.components() if each.name == "airflow-api-server"]
        of_tests = {
            "AIRFLOW__CORE__AUTH_MANAGER": AUTH_MANAGER,
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": USERS,
            "PYTHONPATH": os.pathsep.join([layout.airflow.environment()["PYTHONPATH"], str(home / "authors")]),
        }
        start(replace(api_server, environment={**api_server.environment, **of_tests}))
        register_pipelines(settings, *REGISTERED)
        yield ApiServer(settings, layout.airflow.url)
