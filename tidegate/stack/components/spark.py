"""The embedded Spark Connect server, from the pyspark package: loopback, with a token."""

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from tidegate.stack.components.postgres import make_secret, write_secret
from tidegate.stack.components.server_process import Component, listens
from tidegate.stack.machine.private_files import private_folder
from tidegate.state_store.base.errors import PermanentError

# The ports that Spark opens for other machines are on loopback and require a secret that Spark generates. As in
# jobs/compute/sessions/session.py, which is not imported because that loads pyspark.
PRIVATE = {"spark.authenticate": "true", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
JAVA_VERSIONS = range(17, 22)
MAX_DRIVER_MEMORY = 4 * 1024**3
# The folder of the module that runs Python's daemons: memory is bounded by what runs, not by what was ever declared.
PYTHON_SETTINGS = Path(__file__).resolve().parents[1] / "spark_settings"
PYTHON_DAEMON = "tidegate_python_daemon"
# Spark's planning code runs a few hundred times per batch: fully compiled only after ten times the default number of calls, a
# small batch takes three quarters of the CPU time. The loops over rows are still compiled in their first batch.
JAVA_OPTIONS = "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"


class EmbeddedSpark:
    """The files and settings of one Spark Connect server."""

    def __init__(self, stack_folder: Path, port: int, stager_passfile: Path) -> None:
        self.port = port
        self._stack_folder = stack_folder
        self.folder = stack_folder / "spark"
        self.token_file = stack_folder / "secrets" / "spark_token"
        self._properties = stack_folder / "secrets" / "spark.conf"
        self._stager_passfile = stager_passfile

    def initialize(self, jars: Sequence[Path] = (), archive: Path | None = None) -> None:
        """Write the token and the server's properties, readable by their owner only.

        The server also loads these jars, and maps this archive of classes if Java finds that it fits.
        """
        private_folder(self.folder)
        private_folder(self.token_file.parent)
        make_secret(self.token_file, lambda: secrets.token_urlsafe(32))
        memory = min(psutil.virtual_memory().total // 6, MAX_DRIVER_MEMORY) // 1024**2
        properties = {
            "spark.master": "local[*]",
            "spark.app.name": "tidegate",
            "spark.driver.memory": f"{memory}m",
            "spark.driver.extraJavaOptions": JAVA_OPTIONS if archive is None else f"{JAVA_OPTIONS} {_mapping(archive)}",
            **PRIVATE,
            "spark.ui.enabled": "false",
            "spark.sql.ui.explainMode": "simple",  # the others describe each query at length, and nothing reads it
            "spark.log.level": "WARN",
            # Unless a task that runs out of memory ends alone, the server ends, with the batches of all pipelines.
            "spark.executor.killOnFatalError.depth": "0",
            "spark.local.dir": str(self.folder / "tmp"),
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.sql.catalogImplementation": "in-memory",
            "spark.sql.ansi.enabled": "true",
            "spark.sql.session.timeZone": "UTC",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.connect.authenticate.token": self.token_file.read_text(),
            # All batches of a pipeline share a session: it must outlive the night (tidegate.jobs.compute.sessions.session).
            "spark.connect.session.manager.defaultSessionTimeout": "30d",
            "spark.python.daemon.module": PYTHON_DAEMON,
        }
        if jars:
            properties["spark.jars"] = ",".join(map(str, jars))
        write_secret(self._properties, "".join(f"{name} {value}\n" for name, value in properties.items()))

    @property
    def remote(self) -> str:
        """The server's address for clients: a number, because a resolver may lead the name localhost to ::1."""
        return f"sc://127.0.0.1:{self.port}"

    def component(self) -> Component:
        """Return how to start the server."""
        home = spark_home()
        command = [home / "bin" / "spark-submit", "--properties-file", self._properties, "--class", SERVER_CLASS]
        environment = {
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,  # executors need this environment's packages
            "PYTHONPATH": os.pathsep.join([str(PYTHON_SETTINGS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PGPASSFILE": str(self._stager_passfile),
            "TIDEGATE_HOME": str(self._stack_folder.parent),
        }
        return Component(
            "spark",
            [*map(str, command), "spark-internal"],
            lambda: listens(self._stack_folder, "spark", self.port),
            environment=environment,
            folder=self.folder,
            ports=[self.port],
            scratch=[self.folder / "tmp"],
            deadline_seconds=120,
        )


def spark_home() -> Path:
    """Return the folder of the installed Spark."""
    package = find_spec("pyspark")
    if package is None or not package.submodule_search_locations:
        raise PermanentError("Spark is not installed. Install pyspark[connect]; in a checkout: make setup")
    return Path(package.submodule_search_locations[0])


def class_archive() -> Path | None:
    """Return the archive of Spark's classes for this Python environment; None if there is none.

    `tidegate.stack.components.spark_class_archive` makes it.
    """
    return file if (file := class_archive_file()).exists() else None


def class_archive_file() -> Path:
    """Return the path for the archive of Spark's classes."""
    return Path(sys.prefix) / "share" / "tidegate" / "spark.jsa"


def _mapping(archive: Path) -> str:
    # No warnings about an archive that does not fit because Java or Spark has changed.
    return f'-XX:SharedArchiveFile="{archive}" -Xshare:auto -Xlog:cds=off -Xlog:class+path=off'


def java_program() -> str:
    """Return the Java program that `check_java` checks."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def check_java() -> None:
    """Check that there is a Java that Spark 4.3 runs on.

    Raises: PermanentError that says what to install.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else None)
    advice = "Install Java 17 or 21 (Debian: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17)."
    if java is None:
        raise PermanentError(f"Java is missing{f' in JAVA_HOME={home}' if home else ''}. {advice}")
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)  # noqa: S603
    version = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    if version is None or int(version[1]) not in JAVA_VERSIONS:
        raise PermanentError(
            f"{java} is Java {version[1] if version else 'of an unknown version'}, which Spark cannot use. {advice}"
        )
