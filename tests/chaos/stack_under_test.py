"""A whole embedded stack whose tasks reach Postgres through a wire, its processes as victims, and its steady supply of work."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import psycopg2

from tests.chaos import pipelines
from tests.chaos.wire import Link, Wire
from tests.conftest import register_pipelines
from tests.servers import QUICK_TO_START, do_not_sync
from tests.statements import execute
from tidegate import stack as embedded
from tidegate.airflow_client import AirflowClient
from tidegate.stack.components.server_process import RunFolder
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import RetryableError, TidegateError

# Killed tasks are tried again soon: the longer pauses of the default would leave nothing to kill. So is what a stopped process
# holds.
DAG = """\
from datetime import timedelta

from tidegate.dags.batch_dag import batch_dag

dag = batch_dag("{name}", concurrency=2, default_args={{"retry_delay": timedelta(seconds=1), "retry_exponential_backoff": 1}})
"""
MODULE = 'from tests.chaos.pipelines import PIPELINES\n\nPIPELINE = PIPELINES["{name}"]\n'
IDLE_TIMEOUT_SECONDS = 5
SECONDS_BETWEEN_LOOKS = 1.0
UP_TRIES = 3
AWAY = (psycopg2.OperationalError, psycopg2.InterfaceError)


class StackUnderTest:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.wire = Wire(lambda: ("127.0.0.1", Layout.load(home).ports["postgres"]))
        self.failed_triggers = 0
        self._stopped: set[psutil.Process] = set()

    @property
    def settings(self) -> Settings:
        """The settings of the driver, which goes past the wire; the stack may have moved to other ports."""
        return Settings.load({"TIDEGATE_HOME": str(self.home)})

    @classmethod
    @contextmanager
    def running(cls, home: Path) -> Iterator["StackUnderTest"]:
        for name in pipelines.PIPELINES:
            (home / "data" / name).mkdir(parents=True)
            for folder, content in (("dags", DAG), ("pipelines", MODULE)):
                (home / folder).mkdir(exist_ok=True)
                (home / folder / f"{name}.py").write_text(content.format(name=name))
        (home / "tidegate.toml").touch()
        stack = cls(home)
        # The supervisor hands these on to all that it starts.
        variables = {
            "PGPORT": str(stack.wire.port),
            "TIDEGATE_IDLE_TIMEOUT_SECONDS": str(IDLE_TIMEOUT_SECONDS),
            "JDK_JAVA_OPTIONS": QUICK_TO_START,
        }
        with patch.dict(os.environ, variables):
            try:
                stack.up()
                do_not_sync(stack.settings)
                register_pipelines(stack.settings, *pipelines.PIPELINES.values())
                yield stack
            finally:
                stack.wake()
                embedded.down(stack.settings)  # the logs stay
                stack.wire.close()

    def up(self) -> Any:
        """Restore what is missing, as a person would by `tidegate up`, and again if something is away meanwhile."""
        for _ in range(UP_TRIES - 1):
            with suppress(RetryableError):
                return embedded.up(self.settings)
        return embedded.up(self.settings)

    @property
    def administrator(self) -> dict[str, Any]:
        return self.settings.conninfo(user="postgres")

    def component(self, name: str) -> list[psutil.Process]:
        """Return the processes of a component, its own last; none if it does not run."""
        identity = RunFolder(self.home / ".tidegate").read(name)
        leader = identity.process() if identity else None
        if leader is None:
            return []
        with suppress(psutil.NoSuchProcess):
            return [*leader.children(recursive=True), leader]
        return []

    def client(self, link: Link) -> list[psutil.Process]:
        """Return the process at the near end of a connection; root alone sees which it is, as tasks are undumpable."""
        return _owner(link.client_port, self.wire.port)

    def backend(self, link: Link) -> list[psutil.Process]:
        return _owner(self.settings.pg_port, link.server_port)

    def stop(self, processes: Sequence[psutil.Process], seconds: float) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                self._stopped.add(process)
        later = threading.Timer(seconds, self.wake, [processes])
        later.daemon = True
        later.start()

    def wake(self, processes: Sequence[psutil.Process] | None = None) -> None:
        for process in tuple(self._stopped) if processes is None else processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
            self._stopped.discard(process)

    def feed(self, until: threading.Event, *, with_new_files: bool) -> None:
        """Start a run of each pipeline whenever it has none and files are left; an Airflow that is away is asked again."""
        while not until.is_set():
            with suppress(*AWAY):
                for name, left in self.uncounted().items():
                    if due := with_new_files and left < pipelines.FILES_PER_RUN[name]:
                        pipelines.add_files(self.home, name)
                    if left or due:
                        self._start_run(name)
            until.wait(SECONDS_BETWEEN_LOOKS)

    def uncounted(self) -> dict[str, int]:
        counted = dict(execute(self.administrator, "SELECT pipeline, count(*) FROM tidegate.source_file GROUP BY pipeline"))
        return {name: pipelines.file_count(self.home, name) - counted.get(name, 0) for name in pipelines.PIPELINES}

    def await_all_counted(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(*AWAY):
                if not any(self.uncounted().values()):
                    return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _start_run(self, name: str) -> None:
        query = "SELECT 1 FROM dag_run WHERE dag_id = %s AND state IN ('queued', 'running')"
        if not execute(self.administrator | {"dbname": "airflow"}, query, [name]):
            try:
                with closing(AirflowClient(self.settings)) as airflow:
                    airflow.trigger(name, {})
            except TidegateError:  # it is away
                self.failed_triggers += 1


def _owner(local_port: int, remote_port: int) -> list[psutil.Process]:
    """Return the process whose connection has these two ends; one local port may belong to several connections."""
    for connection in psutil.net_connections("tcp"):
        if connection.raddr and (connection.laddr.port, connection.raddr.port) == (local_port, remote_port) and connection.pid:
            with suppress(psutil.NoSuchProcess):
                return [psutil.Process(connection.pid)]
    return []
