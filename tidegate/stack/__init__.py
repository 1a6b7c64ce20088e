"""The embedded stack: Postgres, Spark Connect and Airflow on this machine, all below ``.tidegate``.

    up      one supervisor process in the background, which starts, watches and restarts the components
    status  what each component is doing
    down    ends the supervisor, the components, and whatever any of them left behind

Any of these processes may be killed at any time: `up` makes whole what is missing, `down` finds everything by session and
environment, not by what it remembers.
"""

import contextlib
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from state_store.errors import PermanentError, RetryableError
from state_store.settings import Settings
from tidegate.stack import component as components
from tidegate.stack.component import Component, RunFolder, log_file
from tidegate.stack.layout import Layout
from tidegate.stack.spark import check_java

SUPERVISOR_SECONDS = 30
LOG_LINES_SHOWN = 5


class StackUnavailable(RetryableError):
    """A component did not come up in time."""


@dataclass(frozen=True)
class ComponentStatus:
    """How one component is."""

    name: str
    state: str
    address: str
    log: str
    pid: int | None = None
    restarts: int = 0
    reason: str | None = None


Watcher = Callable[[list[ComponentStatus]], None]


def up(
    settings: Settings, *, without_airflow: bool = False, wait_seconds: int = 300, watch: Watcher = lambda _statuses: None
) -> list[ComponentStatus]:
    """Start whatever of the stack does not run and wait until all of it is well. Quick if it already is.

    Raises: PermanentError (no Java, a component that cannot start) and StackUnavailable, both naming component and log.
    """
    check_java()
    folder = settings.stack_folder
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    with _only_one(folder):
        status = _supervisor_status(folder)
        gave_up = status and any(known["gave_up"] for known in status["components"].values())
        if status is None or (status["without_airflow"] and not without_airflow) or status["failure"] or gave_up:
            _stop(folder)
            _start_supervisor(settings.home, without_airflow)
        return _await_components(settings.home, without_airflow, wait_seconds, watch)


def down(settings: Settings, *, delete_data: bool = False) -> int:
    """End the stack and everything it left behind; return how many processes that were.

    With `delete_data`, ledger, states, secrets and logs go too: there is no way back.
    """
    folder = settings.stack_folder
    if not folder.is_dir():
        return 0
    with _only_one(folder):
        ended = _stop(folder)
        if delete_data:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(Layout.load(settings.home).postgres.data)  # elsewhere, if root runs the stack
            shutil.rmtree(folder)
        return ended


def status(settings: Settings) -> list[ComponentStatus]:
    """Return how each component is; empty if no stack was ever started here."""
    try:
        layout = Layout.load(settings.home)
    except FileNotFoundError:
        return []
    supervised = _supervisor_status(layout.folder)
    wanted = _wanted(layout, without_airflow=bool(supervised and supervised["without_airflow"]))
    return [_status_of(layout, component, supervised) for component in wanted]


def _wanted(layout: Layout, *, without_airflow: bool) -> list[Component]:
    return [layout.postgres.component(), layout.spark.component(), *([] if without_airflow else layout.airflow.components())]


def _status_of(layout: Layout, component: Component, supervised: dict | None) -> ComponentStatus:  # type: ignore[type-arg]
    known = (supervised or {"components": {}})["components"].get(component.name, {})
    address = {"postgres": f"127.0.0.1:{layout.ports['postgres']}", "spark": f"sc://localhost:{layout.ports['spark']}"}
    reason = known.get("gave_up")
    state = "gave up" if reason else "stopped" if supervised is None else "starting"
    if state == "starting" and known.get("pid") and (reason := component.check()) is None:
        state = "up"
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
    layout = Layout.load(home)
    wanted = _wanted(layout, without_airflow=without_airflow)
    deadline = time.monotonic() + wait_seconds
    while True:
        supervised = _supervisor_status(layout.folder)
        if supervised is None:
            raise PermanentError(f"The supervisor ended. {_tail(log_file(layout.folder, 'supervisor'))}")
        if supervised["failure"]:
            raise PermanentError(f"The stack cannot start: {supervised['failure']}")
        statuses = [_status_of(layout, component, supervised) for component in wanted]
        watch(statuses)
        if all(status.state == "up" for status in statuses):
            return statuses
        late = next((s for s in statuses if s.state == "gave up"), None)
        if late is None and time.monotonic() > deadline:
            late = next(s for s in statuses if s.state != "up")
        if late:
            raise StackUnavailable(f"{late.name} did not come up: {late.reason}. {_tail(Path(late.log))}")
        time.sleep(0.2)


def _supervisor_status(folder: Path) -> dict | None:  # type: ignore[type-arg]
    run = RunFolder(folder)
    identity = run.read("supervisor")
    if identity is None or identity.process() is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(run.status_file.read_text()))
    return None


def _start_supervisor(home: Path, without_airflow: bool) -> None:
    folder = home / ".tidegate"
    log = log_file(folder, "supervisor")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "tidegate.stack.supervisor",
        str(home),
        *(["--without-airflow"] if without_airflow else []),
    ]
    process = components.start(Component("supervisor", command, lambda: None), folder)
    if not components.wait_until(
        lambda: process.poll() is not None or _supervisor_status(folder) is not None, SUPERVISOR_SECONDS
    ):
        raise StackUnavailable(f"The supervisor did not start. {_tail(log)}")
    if process.poll() is not None:
        raise PermanentError(f"The supervisor ended at once. {_tail(log)}")


def _stop(folder: Path) -> int:
    """End the supervisor, which ends the components; then whatever is left of an earlier one."""
    run = RunFolder(folder)
    before = len(components.members(run))
    identity = run.read("supervisor")
    if identity and (process := identity.process()):
        process.terminate()
        components.wait_until(lambda: not components.is_alive(process), 120)
    components.end(components.members(run))
    for name in run.names():
        run.forget(name)
    run.status_file.unlink(missing_ok=True)
    return before


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Let one `up` or `down` at a time work on a stack; the lock ends with the process."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tail(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return f"It wrote no log ({log})."
    return f"Its log {log} ends with: {' | '.join(lines[-LOG_LINES_SHOWN:])}"
