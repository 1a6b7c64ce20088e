"""Components of the embedded stack: a process each, with its health check, ports and reliable end.

A component runs in a session of its own, so everything that it starts (Spark's Python workers, Airflow's forked tasks) can be
found and ended even when the component, or the supervisor, was killed.
"""

import contextlib
import fcntl
import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tidegate.stack.machine.private_files import private, private_folder
from tidegate.state_store.base.errors import PermanentError
from tidegate.state_store.base.project import account_name

LOG_KEPT_BYTES = 20 * 1024 * 1024
STOP_SECONDS = 15
# Below the ports that the kernel gives to outgoing connections, which could take one of them before a restart.
FREE_PORTS = range(20_000, 32_000)
# Every process of a stack has the stack's folder and its component's name in its environment.
STACK_VARIABLE = "TIDEGATE_STACK"
COMPONENT_VARIABLE = "TIDEGATE_COMPONENT"
BOOT = Path("/proc/sys/kernel/random/boot_id")

# Returns None when the component is healthy, else what is missing.
HealthCheck = Callable[[], str | None]


@dataclass(frozen=True)
class Component:
    """A program to start, and the check that says whether it is up."""

    name: str
    command: Sequence[str]
    check: HealthCheck
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    user: int | None = None
    ports: Sequence[int] = ()
    scratch: Sequence[Path] = ()  # folders that only the live process needs; a killed one does not remove them
    # Finds processes of a killed component that neither its session nor its environment identifies.
    left_behind: Callable[[], Sequence[psutil.Process]] = list
    stop_signal: signal.Signals = signal.SIGTERM
    deadline_seconds: int = 90
    grace_seconds: int = 20


@dataclass(frozen=True)
class Identity:
    """A process, identified by number and start; independent of changes to the clock."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "Identity":
        """Return the identity of a live process.

        Raises: psutil.NoSuchProcess.
        """
        return cls(pid, _started(pid))

    def is_of(self, pid: int) -> bool:
        """Return whether the process that has this number now is this one, ended or not."""
        with contextlib.suppress(psutil.Error):
            return self == Identity.of(pid)
        return False

    def process(self) -> psutil.Process | None:
        """Return the process if it still runs."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if self.is_of(self.pid) and is_alive(process):
                return process
        return None


def _started(pid: int) -> str:
    """Return when a process started: the boot's id and the kernel's ticks since then.

    The time of day would not do: psutil counts it from a time of boot that moves when the clock is set, or when a suspended
    machine wakes up.
    """
    if not BOOT.exists():  # no Linux
        return str(psutil.Process(pid).create_time())
    try:
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    return f"{BOOT.read_text().strip()} {int(ticks)}"


class RunFolder:
    """The folder ``.tidegate/run``: each component's process. Hints only: a stale entry matches no process.

    Each entry names the folder that it was written in, as the file system knows it: a moved stack keeps its processes, and a
    copied one does not take the other's for its own.
    """

    def __init__(self, stack_folder: Path) -> None:
        self.stack_folder = stack_folder
        self._folder = stack_folder / "run"

    @property
    def status_file(self) -> Path:
        """The file for the supervisor's status."""
        return self._folder / "stack.status"

    def write(self, name: str, identity: Identity) -> None:
        """Record a component's process, atomically."""
        private_folder(self._folder)
        write_whole(self._folder / f"{name}.json", json.dumps({**asdict(identity), "folder": self._place()}))

    def read(self, name: str) -> Identity | None:
        """Return the recorded process; None if there is no record, an illegible one, or that of the stack this is a copy of."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = dict(json.loads((self._folder / f"{name}.json").read_text()))
            place = self._place()
            if record.pop("folder", None) == place:
                return Identity(**record)
        return None

    def _place(self) -> str:
        found = self._folder.stat()
        return f"{found.st_dev}:{found.st_ino}"

    def names(self) -> list[str]:
        """Return the names of the recorded components."""
        return sorted(file.stem for file in self._folder.glob("*.json"))

    def forget(self, name: str) -> None:
        """Delete a component's record."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def sessions(self) -> set[int]:
        """Return the sessions that components lead, or led until they were killed."""
        found = set()
        for name in self.names():
            identity = self.read(name)
            # If another process has the number by now, the old session is empty.
            if identity and (identity.is_of(identity.pid) or not psutil.pid_exists(identity.pid)):
                found.add(identity.pid)
        return found


def start(component: Component, stack_folder: Path) -> subprocess.Popen[bytes]:
    """Start a component in a session of its own, its output appended to its log.

    Raises: OSError if it cannot be started, or its log and process number cannot be written.
    """
    log = log_file(stack_folder, component.name)
    private_folder(log.parent)
    environment = {**os.environ, **component.environment}
    environment |= {STACK_VARIABLE: str(stack_folder), COMPONENT_VARIABLE: component.name}
    with open(log, "ab", opener=private) as output:
        process = subprocess.Popen(  # noqa: S603 - our own commands, no shell
            component.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=component.folder or stack_folder,
            user=component.user,
            group=None if component.user is None else group_of(component.user),
            extra_groups=[] if component.user else None,
            start_new_session=True,
            umask=0o077,  # its files are private
        )
    try:
        RunFolder(stack_folder).write(component.name, Identity.of(process.pid))
    except OSError:  # without a record it could not be found again
        process.kill()
        process.wait()
        raise
    return process


def group_of(user: int) -> int:
    """Return the group of an account."""
    try:
        return pwd.getpwuid(user).pw_gid
    except KeyError:
        return user


def unfinished_name(file: Path) -> Path:
    """Return the name under which a file is written before it takes the place of the old one."""
    return file.with_name(f".{file.name}.tmp")


def write_whole(file: Path, content: str, *, durable: bool = False) -> None:
    """Write a file atomically: readers see the old content or the new; if durable, after a power cut too."""
    unfinished = unfinished_name(file)
    with open(unfinished, "w", opener=private) as output:
        output.write(content)
        if durable:
            output.flush()
            os.fsync(output.fileno())
    unfinished.rename(file)
    if durable:
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def log_file(stack_folder: Path, name: str) -> Path:
    """Return the file for a component's output."""
    return stack_folder / "logs" / f"{name}.log"


def truncate_log(log: Path) -> None:
    """Keep the last part of a log that is too long under another name, and empty the log.

    Its writer keeps it open and appends, so it continues at the new end; a line written in between may be lost.

    Raises: OSError if the copy cannot be written; then the log is unchanged.
    """
    if not log.exists() or log.stat().st_size <= LOG_KEPT_BYTES:
        return
    kept = log.with_suffix(".log.1")
    with log.open("rb") as whole, open(kept, "wb", opener=private) as copy:
        whole.seek(-LOG_KEPT_BYTES, os.SEEK_END)
        shutil.copyfileobj(whole, copy)
    os.truncate(log, 0)


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
    """Terminate processes; kill those that still run after `seconds`."""
    for send_signal, patience in ((psutil.Process.terminate, seconds), (psutil.Process.kill, STOP_SECONDS)):
        for process in filter(is_alive, processes):
            with contextlib.suppress(psutil.Error):
                send_signal(process)
        if wait_until(lambda: not any(map(is_alive, processes)), patience):
            return


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie does not."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def reserve_port(usual: int | None, until: contextlib.ExitStack) -> int:
    """Return the usual port if it is free, else another; until `until` closes, no other stack of this user gets it.

    A check alone would not do: another stack could check before the component has started.
    """
    with contextlib.ExitStack() as opened:
        folder = _claims_folder()
        opened.callback(os.close, folder)
        for port in (*([usual] if usual else []), *random.SystemRandom().sample(FREE_PORTS, 100)):
            # A link is not followed, and a file not emptied: only its lock is needed.
            claim = os.open(str(port), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_free(port):
                    until.callback(os.close, claim)
                    return port
            os.close(claim)
    raise OSError("no free port on 127.0.0.1")


def _claims_folder() -> int:
    """Open the folder of this account's claims to ports, below its home, or in the folder for temporary files without one.

    Raises: PermanentError if the folder belongs to another account.
    """
    name = f"tidegate-ports-{os.geteuid()}"
    places = [Path(tempfile.gettempdir())]
    with contextlib.suppress(KeyError):  # HOME may be another account's, or missing
        places.insert(0, Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".cache")
    refusal: Exception | None = None
    for folder in [place / name for place in places]:
        try:
            if folder.parent.parent.is_dir():
                folder.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            refusal = error
            continue
        found = os.fstat(opened)
        if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return opened
        os.close(opened)
        refusal = PermanentError(f"it belongs to user {account_name(found.st_uid)}, or others may write into it")
    raise PermanentError(f"Ports are claimed in {folder}, but that cannot be used: {refusal}. Remove it.") from refusal


def is_free(port: int) -> bool:
    """Return whether a loopback port has no listener."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return True
    return False


def holder(port: int) -> str:
    """Return a description of the process that listens on a port; only root sees those of other users."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                return f"process {process.pid} ({process.name()}) of user {process.username()}"
    return "another user's process"


def listens(stack_folder: Path, name: str, port: int) -> str | None:
    """Check that this component, not another process, listens on a loopback port; return None or what is wrong."""
    identity = RunFolder(stack_folder).read(name)
    with contextlib.suppress(psutil.Error):
        # Finding the listener means a walk through all processes; while a stack starts, the port is usually still free.
        if identity and not is_free(port) and (leader := identity.process()):
            if _has_listener(leader, port):
                return None
            if any(_has_listener(child, port) for child in leader.children(recursive=True)):
                return None
    return f"it does not listen on 127.0.0.1:{port}"


def _has_listener(process: psutil.Process, port: int) -> bool:
    listening = (connection for connection in process.net_connections("tcp") if connection.status == psutil.CONN_LISTEN)
    return any(connection.laddr.port == port for connection in listening)


def wait_until(condition: Callable[[], bool], seconds: float, every: float = 0.1) -> bool:
    """Wait until a condition holds, at most `seconds`; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
