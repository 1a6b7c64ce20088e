"""The embedded Airflow: api-server, scheduler, Dag processor and triggerer on loopback, metadata in the same Postgres."""

import base64
import json
import os
import secrets
import shlex
import site
import subprocess
import sys
from collections.abc import Callable
from http.client import OK, HTTPConnection, HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from tidegate.stack.components.airflow_login import POSTGRES_USER_VARIABLE
from tidegate.stack.components.postgres import EmbeddedPostgres, make_secret, write_secret
from tidegate.stack.components.server_process import COMPONENT_VARIABLE, STACK_VARIABLE, Component, listens, log_file
from tidegate.stack.machine.private_files import private, private_folder
from tidegate.state_store.base import project
from tidegate.state_store.base.errors import PermanentError

PROJECT = Path(__file__).resolve().parents[3]
LOCAL_SETTINGS = Path(__file__).resolve().parents[1] / "airflow_settings"
USER = "admin"
USERS_VARIABLE = "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"  # users besides the administrator, such as admin:admin,anna:viewer
PROCESSES = ("api-server", "scheduler", "dag-processor", "triggerer")
HEALTH_BYTES = 65536  # many times what Airflow's health page has
RUNS_TASKS = ("scheduler", "triggerer")
_PARTS = {"api-server": "metadatabase", "dag-processor": "dag_processor"}  # of the health page; others have the process's name


def airflow_settings() -> dict[str, str]:
    """Return the settings that the embedded stack and the team server share, by environment variable."""
    lines = (Path(__file__).resolve().parents[1] / "airflow.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def airflow_settings_of_caller() -> dict[str, str]:
    """Return those of `airflow_settings` that this process' environment sets to another value, by environment variable."""
    ours = airflow_settings()
    return {name: os.environ[name] for name in ours if os.environ.get(name, ours[name]) != ours[name]}


class EmbeddedAirflow:
    """The files and settings of one Airflow."""

    def __init__(self, stack_folder: Path, ports: dict[str, int], postgres: EmbeddedPostgres) -> None:
        self.folder = stack_folder / "airflow"
        self.url = f"http://127.0.0.1:{ports['airflow']}"
        self.password_file = stack_folder / "secrets" / "airflow_password"
        self.metrics_token_file = stack_folder / "secrets" / "metrics_token"
        self._ports = ports
        self._secrets = stack_folder / "secrets"
        self._stack_folder = stack_folder
        self._postgres_user = postgres.user
        self._database = f"airflow@127.0.0.1:{postgres.port}/airflow?passfile={quote(str(postgres.passfile))}"

    def initialize(self) -> None:
        """Write password, scrape token and keys, unless they exist."""
        private_folder(self.folder)
        private_folder(self._secrets)
        make_secret(self.password_file, lambda: secrets.token_urlsafe(16))
        make_secret(self.metrics_token_file, lambda: secrets.token_urlsafe(32))
        self._write_passwords()
        for key in ("jwt_secret", "api_secret_key"):
            make_secret(self._secrets / key, lambda: secrets.token_urlsafe(48))
        make_secret(self._secrets / "fernet_key", lambda: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode())

    def _write_passwords(self) -> None:
        """Write the administrator's password for Airflow, and one for each other user, which stays as it is."""
        file = self._secrets / "airflow_passwords.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        others = {user.strip().partition(":")[0] for user in os.environ.get(USERS_VARIABLE, USER).split(",")} - {USER}
        # Airflow would print a password that it had to make to its log.
        passwords = {name: known.get(name) or secrets.token_urlsafe(16) for name in sorted(others)}
        write_secret(file, json.dumps({USER: self.password_file.read_text(), **passwords}))

    def environment(self) -> dict[str, str]:
        """Return the environment of every Airflow process, on top of the caller's; secrets are named by file, not contained.

        What the stack itself decides, such as addresses, folders and keys, wins over the caller's environment; that
        wins over what `airflow_settings` proposes.
        """
        user = {} if self._postgres_user is None else {POSTGRES_USER_VARIABLE: str(self._postgres_user)}
        # Tasks reach the api-server directly, past any proxy that the shell has set.
        past_proxy = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]))
        was_found = {} if os.environ.get(project.HOME_VARIABLE) else {project.FOUND_VARIABLE: "1"}
        modules = [*_checkout(), str(LOCAL_SETTINGS), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **airflow_settings(),
            **airflow_settings_of_caller(),
            **user,
            **was_found,
            "AIRFLOW_HOME": str(self.folder),
            "AIRFLOW__CORE__DAGS_FOLDER": str(project.folder_of(self._stack_folder.parent, "dags")),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self._secrets / "airflow_passwords.json"),
            "AIRFLOW__CORE__FERNET_KEY_CMD": _print_file(self._secrets / "fernet_key"),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self._ports["airflow"]),
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__SECRET_KEY_CMD": _print_file(self._secrets / "api_secret_key"),
            "AIRFLOW__API_AUTH__JWT_SECRET_CMD": _print_file(self._secrets / "jwt_secret"),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://{self._database}&require_auth=scram-sha-256",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": f"postgresql+asyncpg://{self._database}",
            "NO_PROXY": past_proxy,
            "no_proxy": past_proxy,
            "PYTHONPATH": os.pathsep.join(modules),
            "TIDEGATE_HOME": str(self._stack_folder.parent),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        }

    def migrate(self) -> None:
        """Migrate Airflow's metadata database to the installed version, unless this was done before."""
        marker = self.folder / "migrated_to"
        if marker.exists() and marker.read_text() == version("apache-airflow"):
            return
        log = log_file(self._stack_folder, "airflow-migrate")
        environment = {
            **os.environ,
            **self.environment(),
            STACK_VARIABLE: str(self._stack_folder),
            COMPONENT_VARIABLE: "airflow-migrate",
        }
        with open(log, "ab", opener=private) as output:
            done = subprocess.run(
                [sys.executable, "-m", "airflow", "db", "migrate"],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                check=False,
            )
        if done.returncode:
            raise PermanentError(f"Airflow's database could not be migrated. See {log}")
        marker.write_text(version("apache-airflow"))

    def components(self) -> list[Component]:
        """Return how to start Airflow's processes."""
        return [
            Component(
                f"airflow-{process}",
                # The servers for task logs would listen on every address; the api-server reads the files itself.
                [sys.executable, "-m", "airflow", process, *(["--skip-serve-logs"] if process in RUNS_TASKS else [])],
                self._check(process),
                environment=self.environment(),
                folder=self.folder,
                ports=[self._ports["airflow"]] if process == "api-server" else [],
                deadline_seconds=180,
                # The triggerer would wait for its triggers. They hold nothing: killing it costs nothing.
                grace_seconds=2 if process == "triggerer" else 20,
            )
            for process in PROCESSES
        ]

    def history(self) -> Component:
        """Return how to remove old runs and logs once."""
        return Component(
            "airflow-history",
            [sys.executable, "-m", "tidegate.stack.components.airflow_cleanup"],
            lambda: None,
            environment=self.environment(),
            folder=self.folder,
        )

    def silent(self) -> set[str]:
        """Return the components whose heartbeat Airflow's health page misses; none while it cannot be asked."""
        try:
            health = self._health(timeout_seconds=1)
        except _NoAnswerError:
            return set()
        if health.get("metadatabase") != "healthy":
            return set()
        return {f"airflow-{process}" for process in PROCESSES if health.get(_PARTS.get(process, process)) == "unhealthy"}

    def _check(self, process: str) -> Callable[[], str | None]:
        def check() -> str | None:
            if process == "api-server" and (
                missing := listens(self._stack_folder, "airflow-api-server", self._ports["airflow"])
            ):
                return missing
            try:
                status = self._health(timeout_seconds=5).get(_PARTS.get(process, process))
            except _NoAnswerError as error:
                return str(error)
            return None if status == "healthy" else f"Airflow's health page says that the {process} is {status}"

        return check

    def _health(self, timeout_seconds: int) -> dict[str, str | None]:
        """Return what Airflow's health page says of each part: whether its heartbeat is recent.

        Raises: _NoAnswerError.
        """
        # `tidegate.airflow_client` is slow to import, and this is a page on loopback.
        connection = HTTPConnection("127.0.0.1", self._ports["airflow"], timeout=timeout_seconds)
        try:
            connection.request("GET", "/api/v2/monitor/health")
            answer = connection.getresponse()
            if answer.status != OK:
                raise _NoAnswerError(f"{self.url} answers with {answer.status}")
            return {part: (found or {}).get("status") for part, found in json.loads(answer.read(HEALTH_BYTES)).items()}
        except (OSError, HTTPException):
            raise _NoAnswerError(f"nothing answers at {self.url}") from None
        except (ValueError, AttributeError, RecursionError):  # another program's JSON
            raise _NoAnswerError(f"{self.url} answers, but not as Airflow does") from None
        finally:
            connection.close()


class _NoAnswerError(Exception):
    """Airflow's health page cannot be read; why."""


def _checkout() -> list[str]:
    """Return the folder of this checkout; none if this is an installed wheel.

    Python looks there anyway, and later: on the PYTHONPATH, whatever is installed would come before Python's own modules.
    """
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    return [] if PROJECT in [Path(folder).resolve() for folder in installed] else [str(PROJECT)]


def _print_file(file: Path) -> str:
    return f"cat {shlex.quote(str(file))}"
