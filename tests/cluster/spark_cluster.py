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

from tests.checkout import REPOSITORY
from tidegate.stack.components.server_process import wait_until
from tidegate.stack.components.spark import SERVER_CLASS, spark_home
from tidegate.state_store import Settings

PAGE = REPOSITORY / "docs" / "spark-cluster.md"
# What executors need, and what these need.
PACKAGES = ("pyarrow", "numpy", "pandas", "psycopg2-binary", "python-dateutil", "six", "pytz", "tzdata")
ACCOUNTS = ("nobody", "daemon", "games")  # every Debian has them
LEFT_OUT = shutil.ignore_patterns("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "lib2to3", "tkinter")
START_SECONDS = 300
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
OF_FILE = ("--properties-file", "{properties}")
# Enters an account that has no way to the project: an empty folder lies over it.
HIDING = 'mount --bind "$1" "$2" && shift 2 && exec setpriv --reuid="$0" --regid="$(id -g "$0")" --clear-groups "$@"'


def _link(source: str, target: str) -> None:
    try:
        os.link(Path(source).resolve(), target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def install(folder: Path) -> Path:
    """Install by links, outside this project, Spark and a Python for executors; return the folder of its packages."""
    shutil.copytree(spark_home(), folder / "spark", copy_function=_link, ignore=shutil.ignore_patterns("__pycache__"))
    library, python = Path(sysconfig.get_path("stdlib")), folder / "python"
    packages = python / "lib" / library.name / "site-packages"
    shutil.copytree(library, packages.parent, copy_function=_link, ignore=LEFT_OUT)
    for file in (file for name in PACKAGES for file in distribution(name).files or [] if ".." not in file.parts):
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        _link(str(file.locate()), str(packages / file))
    (python / "bin").mkdir()
    _link(sys.executable, str(program := python / "bin" / library.name))
    if shared := sysconfig.get_config_var("Py_ENABLE_SHARED") and sysconfig.get_config_var("INSTSONAME"):
        _link(str(Path(sysconfig.get_config_var("LIBDIR")) / shared), str(python / "lib" / shared))
    (python / "run").write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={python}/lib exec {program} "$@"\n')
    (python / "run").chmod(0o755)
    return packages


@dataclass
class Machine:
    """A machine: an account, its home, which is its working folder, and the processes that it runs."""

    home: Path
    account: str | None
    environment: Mapping[str, str]
    # Executors of one address are one host to Spark, which starts no speculative task on the host of the first.
    address: str = "127.0.0.1"
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, number: int, address: str = "127.0.0.1", **environment: str) -> "Machine":
        """Set up a machine with a home that no other account can enter, and what is installed in the folder."""
        account = ACCOUNTS[number] if os.geteuid() == 0 else None
        made = cls(folder / f"machine_{number}", account, {"PYSPARK_PYTHON": f"{folder}/python/run", **environment}, address)
        made.home.mkdir(mode=0o700)
        (made.home / "hidden").mkdir()
        (made.home / "spark").mkdir()  # Spark writes into its own folder in some places
        for entry in (folder / "spark").iterdir():
            (made.home / "spark" / entry.name).symlink_to(entry)
        made._own(made.home, made.home / "spark")
        return made

    @property
    def log(self) -> Path:
        return self.home / "output.log"

    def start(self, program: str, *arguments: str, properties: Mapping[str, str], port: int | None = None) -> None:
        """Start one of Spark's programs, with properties in a file that only this account can read; wait until it listens."""
        file = self.home / f"properties_{len(self.processes)}"
        file.write_text("".join(f"{name} {value}\n" for name, value in properties.items()))
        file.chmod(0o600)
        self._own(file)
        environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG", "JAVA_HOME", "TESTS_OF_TIDEGATE") if name in os.environ},
            "HOME": str(self.home),
            "SPARK_HOME": str(self.home / "spark"),
            "SPARK_LOCAL_IP": self.address,
            "SPARK_DAEMON_MEMORY": "640m" if SERVER_CLASS in arguments else "256m",
            **self.environment,
        }
        whole = [f"{self.home}/spark/bin/{program}", *(word.format(properties=file) for word in arguments)]
        if self.account:
            hidden = [self.account, str(self.home / "hidden"), str(REPOSITORY)]
            whole = ["unshare", "--mount", "--propagation", "private", "sh", "-c", HIDING, *hidden, *whole]
        options = {"cwd": self.home, "env": environment, "start_new_session": True}
        with self.log.open("ab") as output:
            process = subprocess.Popen(whole, stdout=output, stderr=output, **options)  # type: ignore[call-overload]
        self.processes.append(process)

        def listens() -> bool:
            assert process.poll() is None, self.log.read_text()[-4000:]
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        assert port is None or wait_until(listens, START_SECONDS)

    def running(self, what: str) -> list[psutil.Process]:
        found = []
        for process in self.processes:
            with suppress(psutil.Error):
                found += psutil.Process(process.pid).children(recursive=True)
        return [process for process in found if what in " ".join(_command_line(process))]

    def end(self) -> None:
        family = self.running("")
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for child in family:
            with suppress(psutil.Error):
                child.kill()

    def _own(self, *paths: Path) -> None:
        if self.account:
            user = pwd.getpwnam(self.account)
            for path in paths:
                os.chown(path, user.pw_uid, user.pw_gid)


def _command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):  # it has ended, as Python workers do all the time
        return list(process.cmdline())
    return []


def command_lines() -> str:
    return "\n".join(line for process in psutil.process_iter() for line in _command_line(process))


@dataclass
class SparkCluster:
    settings: Settings
    server: Machine
    workers: list[Machine]
    packages: Path
    ui_port: int

    def events(self) -> str:
        return "".join(file.read_text() for file in sorted(self.server.home.glob("*app-*")) if file.is_file())


def documented_properties() -> dict[str, str]:
    """Return the properties of all processes: those of docs/spark-cluster.md, and the secret that they ask for."""
    (block,) = re.findall(r"^ *```properties\n(.*?)^ *```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    documented = dict(line.split() for line in block.strip().splitlines())
    assert documented["spark.authenticate"] == "true"
    own = {"spark.master.rest.enabled": "false", "spark.log.level": "WARN"}
    return {**documented, "spark.authenticate.secret": secrets.token_urlsafe(16), **own}


@contextmanager
def standalone_cluster(
    stack: Settings, free_port: Callable[[], int], *, properties: Mapping[str, str], second_worker: Mapping[str, str]
) -> Iterator[SparkCluster]:
    """A master, two workers with an executor of two cores each, and a Connect server: four processes on three machines."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-cluster-"))
    folder.chmod(0o755)
    packages = install(folder)
    machines = [Machine.make(folder, 0), Machine.make(folder, 1), Machine.make(folder, 2, "127.0.0.3", **second_worker)]
    server, *workers = machines
    (home := folder / "project").mkdir()  # with the data, which every machine can read
    (token := folder / "token").write_text(secrets.token_urlsafe(16))
    token.chmod(0o600)
    common, master_port, port, ui_port = documented_properties(), free_port(), free_port(), free_port()
    master = f"spark://127.0.0.1:{master_port}"
    of_server = {
        "spark.master": master,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "640m",
        "spark.executor.memory": "512m",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.authenticate.token": token.read_text(),
        "spark.ui.enabled": "true",
        "spark.ui.port": str(ui_port),
        # Executors of one host would read each other's files, which are of different accounts here.
        "spark.shuffle.readHostLocalDisk": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(server.home),
        "spark.sql.warehouse.dir": str(server.home / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.local.dir": str(server.home),
    }
    settings = replace(
        stack,
        home=home,
        spark_remote=f"sc://127.0.0.1:{port}",
        spark_token_file=token,
        trusted_users=",".join(ACCOUNTS),
        spark_executors="elsewhere",
        staging_connections=4,
        executor_passfile=stack.stack_folder / "secrets" / "pgpass_stager",
    )
    try:
        ports = ("--host", "127.0.0.1", "--port", str(master_port), "--webui-port", str(free_port()))
        server.start("spark-class", MASTER, *ports, *OF_FILE, properties=common, port=master_port)
        for worker in workers:
            options = ["--host", worker.address, "--port", str(free_port()), "--webui-port", str(free_port())]
            options += ["--cores", "2", "--memory", "768m", "--work-dir", str(worker.home / "work"), *OF_FILE]
            worker.start("spark-class", WORKER, *options, master, properties=common)
        whole = {**common, **of_server, **properties}
        server.start("spark-submit", *OF_FILE, "--class", SERVER_CLASS, "spark-internal", properties=whole, port=port)
        yield SparkCluster(settings, server, workers, packages, ui_port)
    finally:
        for machine in machines:
            machine.end()
        shutil.rmtree(folder, ignore_errors=True)
