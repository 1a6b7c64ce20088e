"""Spark on other machines, as far as one machine can be several: accounts, homes and folders of their own.

Each process has what a machine of a cluster has: Spark, Java, and a Python with the packages that do not travel. None of them
can read this project: it is hidden from them, if the tests run as root, and they run under other accounts.
"""

import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import distribution
from pathlib import Path

import psutil

from tidegate.stack.components.server_process import wait_until
from tidegate.stack.components.spark import SERVER_CLASS, spark_home
from tidegate.state_store import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "spark-cluster.md"
# What executors need, and what these need.
PACKAGES = ("pyarrow", "numpy", "pandas", "psycopg2-binary", "python-dateutil", "six", "pytz", "tzdata")
ACCOUNTS = ("nobody", "daemon", "games")  # every Debian has them
NOT_FOR_EXECUTORS = shutil.ignore_patterns(
    "site-packages", "dist-packages", "test", "idlelib", "ensurepip", "lib2to3", "tkinter"
)
START_SECONDS = 300
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
EXECUTOR = "CoarseGrainedExecutorBackend"
# Enters an account that has no way to the project: an empty folder lies over it.
HIDING = 'mount --bind "$1" "$2" && shift 2 && exec setpriv --reuid="$0" --regid="$(id -g "$0")" --clear-groups "$@"'


def _link(source: str, target: str) -> None:
    try:
        os.link(Path(source).resolve(), target)
    except OSError:  # another disk
        shutil.copy2(source, target)


@dataclass(frozen=True)
class Installation:
    """What is installed on every machine: Spark, and a Python for executors, outside this project."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, *, without: str | None = None) -> "Installation":
        """Install by links; `without` leaves out one of the packages."""
        made = cls(folder)
        shutil.copytree(spark_home(), made.spark, copy_function=_link, ignore=shutil.ignore_patterns("__pycache__"))
        library = Path(sysconfig.get_path("stdlib"))
        target = made.folder / "python" / "lib" / library.name
        shutil.copytree(library, target, copy_function=_link, ignore=NOT_FOR_EXECUTORS)
        for name in PACKAGES:
            for file in distribution(name).files or [] if name != without else []:
                if ".." not in file.parts:
                    place = target / "site-packages" / file
                    place.parent.mkdir(parents=True, exist_ok=True)
                    _link(str(file.locate()), str(place))
        program = made.folder / "python" / "bin" / library.name
        program.parent.mkdir()
        _link(sys.executable, str(program))
        if shared := sysconfig.get_config_var("Py_ENABLE_SHARED") and sysconfig.get_config_var("INSTSONAME"):
            _link(str(Path(sysconfig.get_config_var("LIBDIR")) / shared), str(made.folder / "python" / "lib" / shared))
        made.python.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={made.folder}/python/lib exec {program} "$@"\n')
        made.python.chmod(0o755)
        return made

    @property
    def spark(self) -> Path:
        return self.folder / "spark"

    @property
    def python(self) -> Path:
        return self.folder / "python" / "run"


def _runs_an_executor(process: psutil.Process) -> bool:
    try:
        return EXECUTOR in " ".join(process.cmdline())
    except psutil.Error:
        return False  # it has ended, as Python workers do all the time


@dataclass
class Machine:
    """A machine: an account, its home, which is its working folder, and the processes that it runs."""

    home: Path
    account: str | None
    installation: Installation
    environment: Mapping[str, str] = field(default_factory=dict)
    # Executors of one address are one host to Spark, which starts no speculative task on the host of the first.
    address: str = "127.0.0.1"
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, number: int, installation: Installation, **environment: str) -> "Machine":
        """Set up a machine with a home that no other account can enter."""
        home = folder / f"machine_{number}"
        home.mkdir(mode=0o700)
        (home / "hidden").mkdir()
        account = ACCOUNTS[number % len(ACCOUNTS)] if os.geteuid() == 0 else None
        machine = cls(home, account, installation, environment)
        machine._own(home)
        # Spark writes into its own folder in some places.
        machine.spark.mkdir()
        for entry in installation.spark.iterdir():
            (machine.spark / entry.name).symlink_to(entry)
        machine._own(machine.spark)
        return machine

    @property
    def spark(self) -> Path:
        return self.home / "spark"

    @property
    def log(self) -> Path:
        return self.home / "output.log"

    def start(self, *command: str, properties: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start one of Spark's programs with properties in a file that only this account can read."""
        file = self.home / f"properties_{len(self.processes)}"
        file.write_text("".join(f"{name} {value}\n" for name, value in properties.items()))
        file.chmod(0o600)
        self._own(file)
        environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG", "JAVA_HOME", "TESTS_OF_TIDEGATE") if name in os.environ},
            "HOME": str(self.home),
            "SPARK_HOME": str(self.spark),
            "SPARK_LOCAL_IP": self.address,
            "SPARK_DAEMON_MEMORY": "640m" if SERVER_CLASS in command else "256m",
            "PYSPARK_PYTHON": str(self.installation.python),
            **self.environment,
        }
        whole = [word.format(properties=file) for word in command]
        if self.account:
            hidden = [self.account, str(self.home / "hidden"), str(REPOSITORY)]
            whole = ["unshare", "--mount", "--propagation", "private", "sh", "-c", HIDING, *hidden, *whole]
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                whole, cwd=self.home, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.processes.append(process)
        return process

    def executors(self) -> list[psutil.Process]:
        children: list[psutil.Process] = []
        for process in self.processes:
            with suppress(psutil.Error):
                children += psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if _runs_an_executor(child)]

    def end(self) -> None:
        for process in self.processes:
            family: list[psutil.Process] = []
            with suppress(psutil.Error):
                family = psutil.Process(process.pid).children(recursive=True)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for child in family:
                with suppress(psutil.Error):
                    child.kill()

    def _own(self, path: Path) -> None:
        if self.account:
            user = pwd.getpwnam(self.account)
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


@dataclass
class SparkCluster:
    """A Connect server and its cluster, as its clients see it."""

    settings: Settings
    server: Machine
    workers: list[Machine]
    events: Path
    ui_port: int


def common_properties(secret: str) -> dict[str, str]:
    """Return the properties of all processes: those of docs/spark-cluster.md, and the secret that they ask for."""
    (block,) = re.findall(r"^ *```properties\n(.*?)^ *```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    documented = dict(line.split() for line in block.strip().splitlines())
    assert documented["spark.authenticate"] == "true"
    own = {"spark.authenticate.secret": secret, "spark.master.rest.enabled": "false", "spark.log.level": "WARN"}
    return {**documented, **own}


def server_properties(machine: Machine, port: int, ui_port: int, token: str) -> dict[str, str]:
    """Return the properties of a Connect server that keeps a log of events and shows its page."""
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "640m",
        "spark.executor.memory": "512m",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.authenticate.token": token,
        "spark.ui.enabled": "true",
        "spark.ui.port": str(ui_port),
        # Executors of one host would read each other's files, which are of different accounts here.
        "spark.shuffle.readHostLocalDisk": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(machine.home),
        "spark.sql.warehouse.dir": str(machine.home / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.local.dir": str(machine.home),
    }


def start_server(machine: Machine, port: int, properties: Mapping[str, str]) -> None:
    """Start a Connect server on a machine, and wait until it listens."""
    submit = str(machine.spark / "bin" / "spark-submit")
    machine.start(submit, "--properties-file", "{properties}", "--class", SERVER_CLASS, "spark-internal", properties=properties)
    await_port(machine, port)


def await_port(machine: Machine, port: int) -> None:
    """Wait until a machine's last process listens."""

    def listens() -> bool:
        assert machine.processes[-1].poll() is None, machine.log.read_text()[-4000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    assert wait_until(listens, START_SECONDS)


@contextmanager
def folder_for_all() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-cluster-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def client_settings(settings: Settings, folder: Path, port: int, token: str) -> Settings:
    """Return the settings of a client; its project folder, with the data, is one that every machine can read."""
    home = folder / "project"
    home.mkdir(exist_ok=True)
    token_file = folder / "token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    return replace(
        settings,
        home=home,
        spark_remote=f"sc://127.0.0.1:{port}",
        spark_token_file=token_file,
        trusted_users=",".join(ACCOUNTS),
        spark_executors="elsewhere",
        staging_connections=4,
        executor_passfile=settings.stack_folder / "secrets" / "pgpass_stager",
    )


@contextmanager
def small_cluster(stack: Settings, free_port: Callable[[], int], *, without: str | None = None) -> Iterator[SparkCluster]:
    """The smallest cluster: a Connect server that starts its executor as a process of its own (Spark's local-cluster).

    `without` is a package that its Python lacks.
    """
    with folder_for_all() as folder:
        machine = Machine.make(folder, 0, Installation.make(folder / "installed", without=without))
        token, port, ui_port = secrets.token_urlsafe(16), free_port(), free_port()
        properties = common_properties(secrets.token_urlsafe(16)) | server_properties(machine, port, ui_port, token)
        try:
            start_server(machine, port, properties | {"spark.master": "local-cluster[1,2,768]"})
            settings = client_settings(stack, folder, port, token)
            yield SparkCluster(settings, machine, [machine], machine.home, ui_port)
        finally:
            machine.end()


@contextmanager
def standalone_cluster(
    stack: Settings,
    free_port: Callable[[], int],
    *,
    properties: Mapping[str, str],
    second_worker: Mapping[str, str],
) -> Iterator[SparkCluster]:
    """A master, two workers with an executor of two cores each, and a Connect server: four processes on three machines."""
    with folder_for_all() as folder:
        installation = Installation.make(folder / "installed")
        server = Machine.make(folder, 0, installation)
        workers = [Machine.make(folder, 1, installation), Machine.make(folder, 2, installation, **second_worker)]
        workers[1].address = "127.0.0.3"
        token, common = secrets.token_urlsafe(16), common_properties(secrets.token_urlsafe(16))
        master_port, port, ui_port = free_port(), free_port(), free_port()
        run = "bin/spark-class"
        try:
            ports = ("--host", "127.0.0.1", "--port", str(master_port), "--webui-port", str(free_port()))
            server.start(str(server.spark / run), MASTER, *ports, "--properties-file", "{properties}", properties=common)
            await_port(server, master_port)
            master = f"spark://127.0.0.1:{master_port}"
            for worker in workers:
                options = ["--host", worker.address, "--port", str(free_port()), "--webui-port", str(free_port())]
                options += ["--cores", "2", "--memory", "768m", "--work-dir", str(worker.home / "work")]
                options += ["--properties-file", "{properties}"]
                worker.start(str(worker.spark / run), WORKER, *options, master, properties=common)
            own_properties = common | server_properties(server, port, ui_port, token)
            start_server(server, port, {**own_properties, "spark.master": master, **properties})
            settings = client_settings(stack, folder, port, token)
            yield SparkCluster(settings, server, workers, server.home, ui_port)
        finally:
            for machine in (server, *workers):
                machine.end()
