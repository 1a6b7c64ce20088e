"""The supervisor: starts the components in their order, restarts what dies, and ends everything when it is told to.

Run as ``python -m tidegate.stack.supervisor HOME [--without-airflow] [EXTRA ...]`` by `tidegate up`. It tells how it goes in
``.tidegate/run/stack.status``, one JSON document; `tidegate status` and `up` read it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import psutil

from state_store.errors import PermanentError, TidegateError
from state_store.settings import Settings
from tidegate.stack import component as components
from tidegate.stack import maven
from tidegate.stack.component import Component, Identity, RunFolder
from tidegate.stack.layout import Layout, spark_packages
from tidegate.stack.spark import class_archive

POLL_SECONDS = 0.5
MAX_RESTARTS, WITHIN_SECONDS = 5, 60
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 15.0


class Supervised:
    """One component under supervision."""

    def __init__(self, component: Component, stack_folder: Path) -> None:
        self.component = component
        self.process: subprocess.Popen[bytes] | None = None
        self.gave_up: str | None = None
        self.restarts = -1
        self._stack_folder = stack_folder
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._not_before = 0.0

    def keep_alive(self) -> None:
        """Start the component if it is not there; give up when it dies too often."""
        if self.gave_up or (self.process and self.process.poll() is None):
            return
        now = time.monotonic()
        if self.process:
            self._deaths.append(now)
            if len(self._deaths) == MAX_RESTARTS and now - self._deaths[0] < WITHIN_SECONDS:
                self.gave_up = f"{self.component.name} died {MAX_RESTARTS} times within {WITHIN_SECONDS} s"
                return
            self._not_before = now + min(FIRST_BACKOFF_SECONDS * 2 ** (len(self._deaths) - 1), MAX_BACKOFF_SECONDS)
            # What the dead process left behind (Java's workers, forked tasks) would hold ports and locks.
            components.end(_rest_of_session(self.process.pid), seconds=2)
            self.process = None
        if now < self._not_before:
            return
        self.process = components.start(self.component, self._stack_folder)
        self.restarts += 1

    def ask_to_stop(self) -> None:
        """Tell the component to end, without waiting for it."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(self.component.stop_signal)

    def stop(self) -> None:
        """Wait for the end of the component and everything in its session, which is certain to come."""
        if self.process and self.process.poll() is None:
            try:
                self.process.wait(self.component.grace_seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process:
            components.end(_rest_of_session(self.process.pid), seconds=2)
        RunFolder(self._stack_folder).forget(self.component.name)


class Supervisor:
    """Runs one stack until it is told to stop."""

    def __init__(self, home: Path, *, without_airflow: bool, extras: Collection[str]) -> None:
        self._ports = contextlib.ExitStack()  # held until this process ends
        self._layout = Layout.choose(home, self._ports, extras)
        self._run = RunFolder(self._layout.folder)
        self._without_airflow = without_airflow
        self._supervised: list[Supervised] = []
        self._failure: str | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        """Start the stack, watch it, stop it."""
        self._run.write("supervisor", Identity.of(os.getpid()))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        with ThreadPoolExecutor(1) as background:
            starting = background.submit(self._start)
            while not self._stopping.is_set():
                for supervised in list(self._supervised):
                    supervised.keep_alive()
                if starting.done() and self._failure is None and (error := starting.exception()):
                    self._failure = str(error)
                    if not isinstance(error, TidegateError):
                        raise error
                self._report()
                self._stopping.wait(POLL_SECONDS)
            # Postgres last: the others still write into it. All others at once, because some take their time.
            postgres, others = self._supervised[:1], self._supervised[1:]
            for together in (others, postgres):
                for supervised in together:
                    supervised.ask_to_stop()
                for supervised in together:
                    supervised.stop()
        self._run.status_file.unlink(missing_ok=True)
        self._run.forget("supervisor")

    def _start(self) -> None:
        """Start Postgres, Spark and the extras at once, Airflow when its database is ready; then Tidegate's own tables."""
        postgres, spark, airflow = self._layout.postgres, self._layout.spark, self._layout.airflow
        settings = Settings.load({**os.environ, "TIDEGATE_HOME": str(self._layout.folder.parent)})
        packages = spark_packages(settings, self._layout.extras)
        maven.fetch(packages)
        spark.initialize(maven.spark_jars(packages), class_archive())
        postgres.initialize()
        self._supervise(postgres.component())
        self._supervise(spark.component())
        if "kafka" in self._layout.extras:
            self._layout.kafka.initialize()
            self._supervise(self._layout.kafka.component())
        self._await(postgres.component())
        postgres.bootstrap()
        with ThreadPoolExecutor(1) as both:
            migrated = both.submit(self._layout.migrate)
            if not self._without_airflow:
                airflow.initialize()
                airflow.migrate()
            migrated.result()
        if not self._without_airflow:
            for process in airflow.components():
                self._supervise(process)

    def _supervise(self, component: Component) -> None:
        self._supervised.append(Supervised(component, self._layout.folder))

    def _await(self, component: Component) -> None:
        def ready() -> bool:
            return self._stopping.is_set() or component.check() is None

        if not components.wait_until(ready, component.deadline_seconds) or self._stopping.is_set():
            raise PermanentError(f"{component.name} did not come up: {component.check()}")

    def _report(self) -> None:
        status = {
            "without_airflow": self._without_airflow,
            "extras": self._layout.extras,
            "failure": self._failure,
            "components": {
                s.component.name: {
                    "pid": s.process.pid if s.process else None,
                    "restarts": max(s.restarts, 0),
                    "gave_up": s.gave_up,
                }
                for s in self._supervised
            },
        }
        components.write_whole(self._run.status_file, json.dumps(status))

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping.set()


def _rest_of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.pid != session:
                found.append(process)
    return found


if __name__ == "__main__":
    home, *words = sys.argv[1:]
    wanted = [word for word in words if word != "--without-airflow"]
    Supervisor(Path(home), without_airflow="--without-airflow" in words, extras=wanted).run()
