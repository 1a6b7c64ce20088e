"""Backups of the embedded stack's ledger and states: dumps by `pg_dump`, and `restore`, which replaces the database by one.

Ledger and states are in one database, so a dump is one moment of both. It holds no passwords: each stack has its own. A
restored database has another identity, so its pipelines halt until a person has accepted the loss since the dump.
"""

import os
import secrets
import subprocess
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import psycopg2
from psycopg2 import errors, sql

from tidegate.stack.components.postgres import ADMINISTRATOR, EmbeddedPostgres
from tidegate.stack.layout import Layout
from tidegate.stack.machine.private_files import private
from tidegate.state_store.base.errors import PermanentError, SchemaOutOfDate, StoreUnavailable, UsageError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.ledger import schema_revision, tables

DATABASE, OWNER = "tidegate", "tidegate_owner"
PATIENCE_SECONDS = 30.0


def backup(settings: Settings, file: Path) -> None:
    """Write a dump of ledger and states, complete or not at all; pipelines may run meanwhile.

    Raises: UsageError if the file exists or there is no embedded stack here, PermanentError, StoreUnavailable.
    """
    postgres = _postgres_of(settings)
    _check_new(file)
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(4)}.unfinished")  # another backup may have the same name
    try:
        with open(unfinished, "wb", opener=private) as output:
            _run(postgres, "pg_dump", ["--format=custom", f"--dbname={DATABASE}"], stdout=output)
            os.fsync(output.fileno())
        _check_new(file)
        unfinished.rename(file)
    except OSError as error:
        raise PermanentError(f"{file} cannot be written: {error.strerror}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _check_new(file: Path) -> None:
    if file.exists():
        raise UsageError(f"{file} exists. Name a new file: a backup replaces none.")


def restore(settings: Settings, file: Path) -> str:
    """Replace the database by a dump, keep the old one under another name, and return that name.

    Nothing changes before the dump is complete in the server. Connections to the database are ended.

    Raises: UsageError if there is no such file, or it holds something else, or there is no embedded stack here;
    SchemaOutOfDate if other code made its ledger; PermanentError, StoreUnavailable.
    """
    postgres = _postgres_of(settings)
    if not file.is_file():
        raise UsageError(f"There is no file {file}.")
    moment = f"{datetime.now(UTC):%Y%m%d_%H%M%S}"
    restored, kept = f"{DATABASE}_restored_{moment}", f"{DATABASE}_before_{moment}"
    with closing(_connect(postgres)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(restored), sql.Identifier(OWNER)))
            try:
                with file.open("rb") as dump:
                    # A dump is code: it gets the rights of the database's owner, who owns all that it makes.
                    arguments = ["--exit-on-error", "--no-owner", f"--dbname={restored}"]
                    _run(postgres, "pg_restore", arguments, user=OWNER, stdin=dump)
                _check_ledger(postgres, restored, file)
                _exchange(cursor, restored, kept)
            except BaseException:
                cursor.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(restored)))
                raise
    postgres.bootstrap()  # the dump holds no rights to connect
    return kept


def _check_ledger(postgres: EmbeddedPostgres, database: str, file: Path) -> None:
    """Refuse a dump of another database, in whose place all pipelines would begin again, and one that this code cannot use."""
    version = sql.Identifier(tables.LEDGER, schema_revision.VERSION_TABLE)
    with closing(_connect(postgres, database)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass(%s)", [version.as_string(connection)])
        if cursor.fetchone() == (None,):
            raise UsageError(f"{file} is a dump of another database: it holds no ledger of Tidegate's. Nothing has changed.")
        cursor.execute(sql.SQL("SELECT max(version_num) FROM {}").format(version))
        (found,) = cursor.fetchone() or (None,)
    if found != schema_revision.DIGEST:
        raise SchemaOutOfDate(f"{file} is a dump of a database that {schema_revision.made_by(found)} Nothing has changed.")


def _exchange(cursor: psycopg2.extensions.cursor, restored: str, kept: str) -> None:
    """Rename both in one transaction; that needs a moment without connections."""
    rename = sql.SQL("BEGIN; ALTER DATABASE {} RENAME TO {}; ALTER DATABASE {} RENAME TO {}; COMMIT").format(
        *map(sql.Identifier, (DATABASE, kept, restored, DATABASE))
    )
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname IN (%s, %s)", [DATABASE, restored])
        try:
            cursor.execute(rename)
        except errors.ObjectInUse as busy:
            cursor.execute("ROLLBACK")
            if time.monotonic() >= ends_at:
                raise StoreUnavailable(
                    f"Others connect to database {DATABASE} again and again. Pause the pipelines, or start the stack with "
                    "`tidegate up --without-airflow`, then try again."
                ) from busy
            time.sleep(0.1)
        else:
            return


def _postgres_of(settings: Settings) -> EmbeddedPostgres:
    if (layout := Layout.find(settings.home)) is None:
        raise UsageError(
            f"There is no embedded stack in {settings.home}. docs/backup.md says how to back up a server of your own."
        )
    _connect(layout.postgres).close()
    return layout.postgres


def _connect(postgres: EmbeddedPostgres, database: str = "postgres") -> psycopg2.extensions.connection:
    try:
        return postgres.connect(database)
    except psycopg2.OperationalError as error:
        raise StoreUnavailable(f"The stack's Postgres does not answer: {str(error).strip()}. Start it: tidegate up") from error


def _run(postgres: EmbeddedPostgres, tool: str, arguments: list[str], *, user: str = ADMINISTRATOR, **streams: object) -> None:
    where = ["--host=127.0.0.1", f"--port={postgres.port}", f"--username={user}", "--no-password"]
    environment = {**os.environ, "PGPASSFILE": str(postgres.passfile), "PGREQUIREAUTH": "scram-sha-256"}
    command = [str(postgres.binaries / tool), *where, *arguments]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, check=False, **streams)  # type: ignore[call-overload]  # noqa: S603 - our own command, no shell
    if done.returncode:
        raise PermanentError(f"{tool} failed: {done.stderr.decode(errors='replace').strip()}")
