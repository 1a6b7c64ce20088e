"""A component of the embedded stack: a process, how to tell that it is well, and how to end it for certain.

A component runs in a session of its own, so that everything it starts (Spark's Python workers, Airflow's forked tasks)
can be found and ended even when the component, or the supervisor, was killed.
"""

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

LOG_KEPT_BYTES = 20 * 1024 * 1024
STOP_SECONDS = 15
# Below the ports that the kernel gives to outgoing connections: one of those may be taken again before a restart.
FREE_PORTS = range(20_000, 32_000)
# Every process of a stack carries the stack's folder in its environment, and its component's name.
STACK_VARIABLE = "TIDEGATE_STACK"
COMPONENT_VARIABLE = "TIDEGATE_COMPONENT"

# Returns None when the component is well, else what is missing.
HealthCheck = Callable[[], str | None]


@dataclass(frozen=True)
class Component:
    """What to start, and when it counts as up."""

    name: str
    command: Sequence[str]
    check: HealthCheck
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    user: int | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    deadline_seconds: int = 90
    grace_seconds: int = 20


@dataclass(frozen=True)
class Identity:
    """A process that cannot be mistaken for another one with the same number."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> "Identity":
        """Return the identity of a live process."""
        return cls(pid, psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """Return the process if it still runs."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if process.create_time() == self.created and is_alive(process):
                return process
        return None


class RunFolder:
    """``.tidegate/run``: which process is which component. Hints only: a stale entry matches no process."""

    def __init__(self, stack_folder: Path) -> None:
        self.stack_folder = stack_folder
        self._folder = stack_folder / "run"

    @property
    def status_file(self) -> Path:
        """Where the supervisor tells how it goes."""
        return self._folder / "stack.status"

    def write(self, name: str, identity: Identity) -> None:
        """Remember a component's process, at once and whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{name}.json", json.dumps(asdict(identity)))

    def read(self, name: str) -> Identity | None:
        """Return what was remembered; None if there is nothing, or nothing legible."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Identity(**json.loads((self._folder / f"{name}.json").read_text()))
        return None

    def names(self) -> list[str]:
        """Return the components that were remembered."""
        return sorted(file.stem for file in self._folder.glob("*.json"))

    def forget(self, name: str) -> None:
        """Forget a component."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def sessions(self) -> set[int]:
        """Return the sessions that components lead, or led until they were killed."""
        found = set()
        for name in self.names():
            if identity := self.read(name):
                with contextlib.suppress(psutil.Error):
                    if psutil.Process(identity.pid).create_time() != identity.created:
                        continue  # the number belongs to somebody else by now, so its old session is long empty
                found.add(identity.pid)
        return found


def start(component: Component, stack_folder: Path) -> subprocess.Popen[bytes]:
    """Start a component in a session of its own, its output appended to its log."""
    log = log_file(stack_folder, component.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_KEPT_BYTES:
        log.replace(log.with_suffix(".log.1"))
    environment = {**os.environ, **component.environment}
    environment |= {STACK_VARIABLE: str(stack_folder), COMPONENT_VARIABLE: component.name}
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own commands, no shell
            component.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=component.folder or stack_folder,
            user=component.user,
            group=component.user,
            extra_groups=[] if component.user else None,
            start_new_session=True,
        )
    RunFolder(stack_folder).write(component.name, Identity.of(process.pid))
    return process


def write_whole(file: Path, content: str) -> None:
    """Write a file so that whoever reads it sees the old content or the new, never half of it."""
    unfinished = file.with_name(f".{file.name}.tmp")
    unfinished.write_text(content)
    unfinished.rename(file)


def log_file(stack_folder: Path, name: str) -> Path:
    """Return where a component's output goes."""
    return stack_folder / "logs" / f"{name}.log"


def members(run: RunFolder) -> list[psutil.Process]:
    """Return every live process of the stack: by its environment, its session, or its ancestors."""
    sessions, marker = run.sessions(), str(run.stack_folder)
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getsid(process.pid) in sessions or process.environ().get(STACK_VARIABLE) == marker:
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
    return list(found.values())


def end(processes: Sequence[psutil.Process], seconds: float = STOP_SECONDS) -> None:
    """Ask processes to end; kill those that have not after some seconds."""
    for ask, patience in ((psutil.Process.terminate, seconds), (psutil.Process.kill, STOP_SECONDS)):
        for process in filter(is_alive, processes):
            with contextlib.suppress(psutil.Error):
                ask(process)
        if wait_until(lambda: not any(map(is_alive, processes)), patience):
            return


def is_alive(process: psutil.Process) -> bool:
    """Tell whether a process still runs. One that has ended counts as gone even if its parent never asks for its exit code."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def reserve_port(usual: int | None, until: contextlib.ExitStack) -> int:
    """Return the usual port if nobody has it, else another; until `until` closes, no other stack of this user gets it.

    Asking alone would not do: between the answer and the component's start another stack could ask too.
    """
    folder = Path(tempfile.gettempdir()) / f"tidegate-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for port in (*([usual] if usual else []), *random.SystemRandom().sample(FREE_PORTS, 100)):
        lock = (folder / str(port)).open("w")
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_free(port):
                until.callback(lock.close)
                return port
        lock.close()
    raise OSError("no free port on 127.0.0.1")


def is_free(port: int) -> bool:
    """Tell whether nobody listens on a loopback port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return True
    return False


def listens(stack_folder: Path, name: str, port: int) -> str | None:
    """Check that this component, and nobody else who was faster, listens on a loopback port."""
    identity = RunFolder(stack_folder).read(name)
    with contextlib.suppress(psutil.Error):
        # Whose port it is takes a walk through all processes. Usually, while a stack starts on busy cores, it is nobody's.
        if identity and not is_free(port) and (leader := identity.process()):
            for process in (leader, *leader.children(recursive=True)):
                listening = (c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
                if any(connection.laddr.port == port for connection in listening):
                    return None
    return f"it does not listen on 127.0.0.1:{port}"


def wait_until(condition: Callable[[], bool], seconds: float, every: float = 0.1) -> bool:
    """Wait for a fact with a deadline; tell whether it came true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
