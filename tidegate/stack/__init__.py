"""The embedded stack: Postgres, Spark Connect, Airflow and optionally Kafka on this machine, all below ``.tidegate``.

    up      one supervisor process in the background, which starts, watches and restarts the components
    status  the state of each component
    down    ends the supervisor, the components, and every process that they started

Any of these processes may be killed at any time: `up` restores what is missing, `down` finds everything by session and
environment instead of trusting records.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from tidegate.stack.components import java_libraries, kafka
from tidegate.stack.components import server_process as components
from tidegate.stack.components.postgres import EmbeddedPostgres
from tidegate.stack.components.server_process import Component, RunFolder, log_file
from tidegate.stack.components.spark import check_java
from tidegate.stack.layout import Layout, spark_packages
from tidegate.stack.machine import code_digest, disk_checks
from tidegate.stack.machine.private_files import check_ours, private, private_folder
from tidegate.state_store.base.errors import PermanentError, RetryableError
from tidegate.state_store.base.project import STACK_FOLDER
from tidegate.state_store.base.settings import Settings

SUPERVISOR_SECONDS = 30
LOCK_NOTICE_SECONDS = 1
LOG_LINES_SHOWN = 5


class StackUnavailable(RetryableError):
    """A component did not come up in time."""


@dataclass(frozen=True)
class ComponentStatus:
    """The state of one component."""

    name: str
    state: str
    address: str
    log: str
    pid: int | None = None
    restarts: int = 0
    reason: str | None = None


Watcher = Callable[[list[ComponentStatus]], None]


def up(
    settings: Settings,
    *,
    without_airflow: bool = False,
    extras: Collection[str] = (),
    wait_seconds: int = 300,
    watch: Watcher = lambda _statuses: None,
    tell: java_libraries.Teller = lambda _text: None,
) -> list[ComponentStatus]:
    """Start the parts of the stack that do not run and wait until all are healthy. Quick if they already are.

    Extras stay part of the stack until `down`. What they need from Maven Central is fetched before anything is stopped.

    Raises: PermanentError (no Java, no Maven Central, a component that cannot start), StackUnavailable, which names component
    and log.
    """
    check_java()
    folder = settings.stack_folder
    with disk_checks.named(folder):
        private_folder(
            folder, passable=os.geteuid() == 0
        )  # root's Postgres runs under another account, which must be able to pass
    with disk_checks.named(folder), _locked(folder, tell):
        disk_checks.check_room(folder / "run", folder / "logs", EmbeddedPostgres(folder, 0).data.parent)
        earlier = Layout.find(settings.home)
        all_extras = sorted({*extras, *(earlier.extras if earlier else ())})
        java_libraries.fetch(spark_packages(settings, all_extras), tell)
        if "kafka" in all_extras:
            java_libraries.fetch(kafka.PACKAGES, tell)
        status = _supervisor_status(folder)
        if status is None or _is_to_restart(status, without_airflow, all_extras):
            airflow_stays = status is not None and not status["failure"] and not status["without_airflow"]
            _stop(folder)
            _start_supervisor(settings.home, without_airflow and not airflow_stays, all_extras)
        return _await_components(settings.home, without_airflow, wait_seconds, watch)


def down(settings: Settings, *, delete_data: bool = False, tell: java_libraries.Teller = lambda _text: None) -> int:
    """End every process of the stack, orphans included; return their number.

    With `delete_data`, ledger, states, secrets and logs are deleted too, irrevocably.
    """
    folder = settings.stack_folder
    if not folder.is_dir():
        return _stop(folder)  # it may have been deleted under a running stack
    check_ours(folder)  # or its files could make us end any process of this account
    with disk_checks.named(folder), _locked(folder, tell):
        ended = _stop(folder)
        if layout := Layout.find(settings.home):
            layout.forget_extras()
        if delete_data:
            EmbeddedPostgres(folder, 0).delete()  # outside the folder if root runs the stack
            _delete(folder)
        return ended


def _delete(folder: Path) -> None:
    """Delete a folder; of one that is a link, such as to a larger disk, the target stays, empty: it may be a mount point."""
    if not folder.is_symlink():
        shutil.rmtree(folder)
        return
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
    folder.unlink()


def status(settings: Settings) -> list[ComponentStatus]:
    """Return the state of each component; empty if no stack was ever started here."""
    if (layout := Layout.find(settings.home)) is None:
        return []
    supervised = _supervisor_status(layout.folder)
    expected = _components(layout, without_airflow=bool(supervised and supervised["without_airflow"]))
    return _statuses(layout, expected, supervised)


def advice(settings: Settings) -> str | None:
    """Return why the running stack should be restarted; None if it should not, or nothing runs."""
    supervised = _supervisor_status(settings.stack_folder)
    if supervised is None or supervised["code"] == code_digest.version():
        return None
    return "The running stack has older code in memory than is installed. Restart it: tidegate down && tidegate up"


def warnings(settings: Settings) -> list[str]:
    """Return warnings from the running stack: the pipelines that could not be registered."""
    supervised = _supervisor_status(settings.stack_folder)
    return list(supervised.get("warnings", ())) if supervised else []


def _components(layout: Layout, *, without_airflow: bool) -> list[Component]:
    extras = [layout.kafka.component()] if "kafka" in layout.extras else []
    airflow = [] if without_airflow else layout.airflow.components()
    return [layout.postgres.component(), layout.spark.component(), *extras, *airflow]


def _statuses(layout: Layout, expected: Sequence[Component], supervised: dict | None) -> list[ComponentStatus]:  # type: ignore[type-arg]
    """Check all components at once: one that is starting may answer slowly."""
    with ThreadPoolExecutor(len(expected)) as pool:
        return list(pool.map(lambda component: _status_of(layout, component, supervised), expected))


def _status_of(layout: Layout, component: Component, supervised: dict | None) -> ComponentStatus:  # type: ignore[type-arg]
    known = (supervised or {"components": {}})["components"].get(component.name, {})
    address = {
        "postgres": f"127.0.0.1:{layout.ports['postgres']}",
        "spark": layout.spark.remote,
        "kafka": layout.kafka.bootstrap,
    }
    reason = known.get("gave_up")
    state = "gave up" if reason else "stopped" if supervised is None else "starting"
    if state == "starting" and known.get("pid") and (reason := component.check()) is None:
        state = "up"
    elif state == "starting":
        reason = known.get("hindrance") or reason
    return ComponentStatus(
        name=component.name,
        state=state,
        address=address.get(component.name, layout.airflow.url if component.name == "airflow-api-server" else ""),
        log=str(log_file(layout.folder, component.name)),
        pid=known.get("pid"),
        restarts=known.get("restarts", 0),
        reason=reason,
    )


def _await_components(home: Path, without_airflow: bool, wait_seconds: int, watch: Watcher) -> list[ComponentStatus]:
    deadline, layout = time.monotonic() + wait_seconds, Layout.load(home)
    expected = _components(layout, without_airflow=without_airflow)
    while True:
        supervised = _supervisor_status(layout.folder)
        if supervised is None:
            raise PermanentError(f"The supervisor ended. {_tail(log_file(layout.folder, 'supervisor'))}")
        if supervised["failure"]:
            raise PermanentError(f"The stack cannot start: {supervised['failure']}")
        statuses = _statuses(layout, expected, supervised)
        watch(statuses)
        if all(status.state == "up" for status in statuses):
            return statuses
        late = next((s for s in statuses if s.state == "gave up"), None)
        if late is None and time.monotonic() > deadline:
            late = next(s for s in statuses if s.state != "up")
        if late:
            raise StackUnavailable(f"{late.name} did not come up: {late.reason}. {_tail(Path(late.log))}")
        time.sleep(0.5)  # as often as the supervisor reports: each look asks every server


def _supervisor_status(folder: Path) -> dict | None:  # type: ignore[type-arg]
    run = RunFolder(folder)
    identity = run.read("supervisor")
    if identity is None or identity.process() is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(run.status_file.read_text()))
    return None


def _is_to_restart(status: dict, without_airflow: bool, extras: Collection[str]) -> bool:  # type: ignore[type-arg]
    """Return whether a running stack lacks something that is requested, could not start, or has given up a component."""
    lacks_airflow = status["without_airflow"] and not without_airflow
    gave_up = any(known["gave_up"] for known in status["components"].values())
    return bool(status["failure"]) or lacks_airflow or not set(extras) <= set(status["extras"]) or gave_up


def _start_supervisor(home: Path, without_airflow: bool, extras: Collection[str]) -> None:
    folder = home / STACK_FOLDER
    log = log_file(folder, "supervisor")
    command = [
        sys.executable,
        "-m",
        "tidegate.stack.supervisor",
        str(home),
        *(["--without-airflow"] if without_airflow else []),
        *extras,
    ]
    process = components.start(Component("supervisor", command, lambda: None), folder)
    if not components.wait_until(
        lambda: process.poll() is not None or _supervisor_status(folder) is not None, SUPERVISOR_SECONDS
    ):
        raise StackUnavailable(f"The supervisor did not start. {_tail(log)}")
    if process.poll() is not None:
        raise PermanentError(f"The supervisor ended at once. {_tail(log)}")


def _stop(folder: Path) -> int:
    """End the supervisor, which ends the components; then every process that is left of an earlier one."""
    run = RunFolder(folder)
    cluster = EmbeddedPostgres(folder, 0)

    def members() -> list[psutil.Process]:
        return list({process.pid: process for process in (*components.members(run), *cluster.processes())}.values())

    before = len(members())
    identity = run.read("supervisor")
    if identity and (process := identity.process()):
        process.terminate()
        process.resume()  # it may have been stopped by SIGSTOP
        components.wait_until(lambda: not components.is_alive(process), 120)
    components.end(members())
    for name in run.names():
        run.forget(name)
    run.status_file.unlink(missing_ok=True)
    return before


@contextlib.contextmanager
def _locked(folder: Path, tell: java_libraries.Teller) -> Iterator[None]:
    """Hold the stack's lock, which `up` and `down` take, and name its holder if it is taken. It ends with the process."""
    file = folder / "lock"
    while True:
        with open(file, "a+", opener=private) as lock:
            if not components.wait_until(lambda: _is_taken(lock), LOCK_NOTICE_SECONDS):
                lock.seek(0)
                tell(f"Waiting for process {lock.read() or '?'}, which works on this stack too.")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists() or not os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                continue  # it was replaced meanwhile
            with contextlib.suppress(OSError):  # the text is a courtesy, and the disk may be full
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), f"{os.getpid()} ({' '.join(sys.argv)})".encode())
            yield
            return


def _is_taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tail(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return f"It wrote no log ({log})."
    return f"Its log {log} ends with: {' | '.join(lines[-LOG_LINES_SHOWN:])}"
