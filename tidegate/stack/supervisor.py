"""The supervisor: starts the components in order, restarts those that die or fall silent, and ends all of them on SIGTERM.

Run as ``python -m tidegate.stack.supervisor HOME [--without-airflow] [EXTRA ...]`` by `tidegate up`. It reports its status in
``.tidegate/run/stack.status``, one JSON document; `tidegate status` and `up` read it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import psutil

from tidegate.stack.components import airflow_cleanup, java_libraries
from tidegate.stack.components import server_process as components
from tidegate.stack.components.server_process import Component, Identity, RunFolder
from tidegate.stack.components.spark import class_archive
from tidegate.stack.layout import Layout, spark_packages
from tidegate.stack.machine import code_digest
from tidegate.state_store.base.errors import PermanentError
from tidegate.state_store.base.settings import Settings

POLL_SECONDS = 0.5
MAX_RESTARTS, WITHIN_SECONDS = 5, 60
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 15.0
# A component that keeps dying, or cannot be started, may work again once there is room on the disk.
TRY_AGAIN_SECONDS = 30
WELL_SECONDS = 20  # a component that has lived this long no longer counts as one that keeps dying
LOGS_EVERY_SECONDS = 10
# A scheduler that lost its database may wait for a worker for ever. Airflow's health page misses a heartbeat only after the
# threshold of airflow.env; so long after that, the component is killed.
LISTEN_EVERY_SECONDS, HUNG_AFTER_SECONDS = 10, 180


class Supervised:
    """One component under supervision."""

    def __init__(self, component: Component, stack_folder: Path) -> None:
        self.component = component
        self.process: subprocess.Popen[bytes] | None = None
        self.gave_up: str | None = None
        self.hindrance: str | None = None
        self.restarts = -1
        self._stack_folder = stack_folder
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._not_before = 0.0
        self._started = 0.0
        self._silent_since: float | None = None

    def keep_alive(self) -> None:
        """Start the component if it does not run; try less often if it keeps dying."""
        now = time.monotonic()
        if self.process and self.process.poll() is None:
            if now - self._started > WELL_SECONDS:
                self.gave_up = None
            return
        if self.process:
            self._note_death(now)
            # Orphans of the dead process (Java's workers, forked tasks) would hold ports and locks.
            components.end(_rest_of_session(self.process.pid), seconds=2)
            self.process = None
        if now < self._not_before:
            return
        self.hindrance = self._find_hindrance()
        if self.hindrance is None:
            for folder in self.component.scratch:
                shutil.rmtree(folder, ignore_errors=True)
            try:
                self.process = components.start(self.component, self._stack_folder)
            except OSError as error:
                self.hindrance = f"it cannot be started: {error}"
                self._not_before = now + TRY_AGAIN_SECONDS
                return
            self._started, self._silent_since = now, None
            self.restarts += 1

    def note_silence(self, is_silent: bool, now: float) -> None:
        """Kill the component if it lives, but has sent no heartbeat for too long; `keep_alive` starts it again."""
        self._silent_since = (self._silent_since or now) if is_silent else None
        if self.process and self._silent_since is not None and now - self._silent_since > HUNG_AFTER_SECONDS:
            silence = f"{now - self._silent_since:.0f} s"
            _log(f"{self.component.name} has sent no heartbeat for {silence}: it is killed, and started again\n")
            self.process.kill()

    def _note_death(self, now: float) -> None:
        self._deaths.append(now)
        if len(self._deaths) == MAX_RESTARTS and now - self._deaths[0] < WITHIN_SECONDS:
            often = f"{self.component.name} died {MAX_RESTARTS} times within {WITHIN_SECONDS} s"
            self.gave_up = f"{often}; it is tried again every {TRY_AGAIN_SECONDS} s"
            self._deaths.clear()
        pause = min(FIRST_BACKOFF_SECONDS * 2 ** max(len(self._deaths) - 1, 0), MAX_BACKOFF_SECONDS)
        self._not_before = now + (TRY_AGAIN_SECONDS if self.gave_up else pause)

    def _find_hindrance(self) -> str | None:
        """Return what would make the component die at start, after trying to remove it; None if nothing would."""
        components.end(self.component.left_behind(), seconds=2)
        if left := [str(process.pid) for process in self.component.left_behind()]:
            return f"it waits for the end of process {', '.join(left)}, a remnant of its killed predecessor"
        taken = next((port for port in self.component.ports if not components.is_free(port)), None)
        if taken is None:
            return None
        return f"port {taken} belongs to {components.holder(taken)}: end that, or choose other ports by tidegate down and up"

    def ask_to_stop(self) -> None:
        """Signal the component to end, without waiting for it."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(self.component.stop_signal)

    def stop(self) -> None:
        """Wait for the end of the component and its session; kill processes that take too long."""
        if self.process and self.process.poll() is None:
            try:
                self.process.wait(self.component.grace_seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process:
            components.end(_rest_of_session(self.process.pid), seconds=2)
            components.end(self.component.left_behind(), seconds=2)
        with contextlib.suppress(OSError):
            RunFolder(self._stack_folder).forget(self.component.name)


class Supervisor:
    """Runs one stack until it gets a signal to stop."""

    def __init__(self, home: Path, *, without_airflow: bool, extras: Collection[str]) -> None:
        self._code = code_digest.version()
        self._ports = contextlib.ExitStack()  # held until this process ends
        self._layout = Layout.choose(home, self._ports, extras)
        self._run = RunFolder(self._layout.folder)
        self._without_airflow = without_airflow
        self._supervised: list[Supervised] = []
        self._failure: str | None = None
        self._warnings: list[str] = []
        self._stopping = threading.Event()
        self._cannot_report = False
        self._logs_looked_at = 0.0
        self._listened_at = 0.0
        self._removing_history: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start the stack, watch it, stop it. What the machine refuses meanwhile, such as disk space, is tried again."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self._run.write("supervisor", Identity.of(os.getpid()))
        with ThreadPoolExecutor(1) as background:
            starting = background.submit(self._start)
            while not self._stopping.is_set():
                for supervised in list(self._supervised):
                    supervised.keep_alive()
                if self._failure is None and starting.done() and (error := starting.exception()):
                    self._failure = str(error) or repr(error)
                    _log("".join(traceback.format_exception(error)))
                self._end_silent()
                self._truncate_logs()
                self._report()
                if not self._layout.folder.exists():  # deleted or moved: the components would write to deleted files
                    self._stopping.set()
                self._stopping.wait(POLL_SECONDS)
            self._stop_components()
        with contextlib.suppress(OSError):
            self._run.status_file.unlink(missing_ok=True)
            self._run.forget("supervisor")

    def _stop_components(self) -> None:
        if self._removing_history is not None and self._removing_history.poll() is None:
            components.end([psutil.Process(self._removing_history.pid), *_rest_of_session(self._removing_history.pid)])
        # Postgres last: the others still write into it. All others at once, because some are slow to end.
        postgres, others = self._supervised[:1], self._supervised[1:]
        for together in (others, postgres):
            for supervised in together:
                supervised.ask_to_stop()
            for supervised in together:
                supervised.stop()

    def _start(self) -> None:
        """Start Postgres, Spark and the extras at once, then migrate Tidegate's tables, then start Airflow."""
        postgres, spark, airflow = self._layout.postgres, self._layout.spark, self._layout.airflow
        settings = Settings.load({**os.environ, "TIDEGATE_HOME": str(self._layout.folder.parent)})
        packages = spark_packages(settings, self._layout.extras)
        java_libraries.fetch(packages)
        spark.initialize(java_libraries.spark_jars(packages), class_archive())
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
            if warnings := migrated.result():
                _log("".join(f"{warning}\n" for warning in warnings))
            self._warnings = warnings
        if not self._without_airflow:
            for process in airflow.components():
                self._supervise(process)

    def _supervise(self, component: Component) -> None:
        self._supervised.append(Supervised(component, self._layout.folder))

    def _await(self, component: Component) -> None:
        def is_over() -> bool:
            return self._stopping.is_set() or component.check() is None

        if not components.wait_until(is_over, component.deadline_seconds) or self._stopping.is_set():
            raise PermanentError(f"{component.name} did not come up: {component.check()}")

    def _end_silent(self) -> None:
        """Kill those of Airflow's processes that have long sent no heartbeat, though they live."""
        if self._without_airflow or time.monotonic() < self._listened_at + LISTEN_EVERY_SECONDS:
            return
        silent, self._listened_at = self._layout.airflow.silent(), time.monotonic()
        for supervised in self._supervised:
            supervised.note_silence(supervised.component.name in silent, self._listened_at)

    def _truncate_logs(self) -> None:
        if time.monotonic() < self._logs_looked_at + LOGS_EVERY_SECONDS:
            return
        self._logs_looked_at = time.monotonic()
        self._remove_history()
        for name in ["supervisor", "airflow-history", *(s.component.name for s in self._supervised)]:
            with contextlib.suppress(OSError):  # the disk may be full: the log is unchanged, and is tried again
                components.truncate_log(components.log_file(self._layout.folder, name))

    def _remove_history(self) -> None:
        """Start the removal of Airflow's old runs and logs once a day while Airflow runs."""
        if self._removing_history is not None:
            if (exit_code := self._removing_history.poll()) is None:
                return
            self._removing_history = None
            if exit_code:
                log = components.log_file(self._layout.folder, "airflow-history")
                _log(f"Airflow's old runs and logs could not be removed; it is tried again in a day. See {log}\n")
        runs = any(supervised.component.name == "airflow-scheduler" for supervised in self._supervised)
        with contextlib.suppress(OSError):  # the disk may be full: it is tried again
            if runs and airflow_cleanup.is_due(self._layout.airflow.folder):
                airflow_cleanup.marker(self._layout.airflow.folder).touch()
                self._removing_history = components.start(self._layout.airflow.history(), self._layout.folder)

    def _report(self) -> None:
        status = {
            "code": self._code,
            "without_airflow": self._without_airflow,
            "extras": self._layout.extras,
            "failure": self._failure,
            "warnings": self._warnings,
            "components": {
                s.component.name: {
                    "pid": s.process.pid if s.process else None,
                    "restarts": max(s.restarts, 0),
                    "gave_up": s.gave_up,
                    "hindrance": s.hindrance,
                }
                for s in self._supervised
            },
        }
        try:
            components.write_whole(self._run.status_file, json.dumps(status))
            self._cannot_report = False
        except OSError as error:  # such as a full disk: the components must be watched all the same
            if not self._cannot_report:
                _log(f"{self._run.status_file} cannot be written: {error}\n")
            self._cannot_report = True

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping.set()


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end the supervisor
        sys.stderr.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}")
        sys.stderr.flush()


def _rest_of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.pid != session:
                found.append(process)
    return found


if __name__ == "__main__":
    home, *words = sys.argv[1:]
    requested = [word for word in words if word != "--without-airflow"]
    Supervisor(Path(home), without_airflow="--without-airflow" in words, extras=requested).run()
