"""The schema revisions of code and database: which code may use a ledger.

A revision is the number of a migration, which changes the ledger (schema ``tidegate``), or states only. A project with its own
pipelines numbers the migrations of its states separately, so that those of a newer Tidegate never come in between.
"""

from itertools import pairwise
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.schema import SetTableComment

from tidegate.state_store.base import project
from tidegate.state_store.base.errors import SchemaOutOfDate, SettingsInvalid, TidegateError
from tidegate.state_store.declarations.pipeline_spec import RebuildName, rebuilt_by
from tidegate.state_store.ledger import tables

VERSIONS = Path(__file__).resolve().parents[2] / "migrations" / "versions"
LEDGER_COMMENT = "ledger revision "
OF_STATES_ONLY = "# Of states only:"  # as in migrations/script.py.mako
VERSION_TABLE = "alembic_version"
PROJECT_VERSION_TABLE = "alembic_version_of_project"


def head_revision() -> str:
    """Return the newest revision, from the last file name."""
    return _last(VERSIONS) or ""


def project_head() -> str | None:
    """Return the newest revision of a project's own migrations; None if it has none."""
    own = project.own("migrations")
    return None if own is None else _last(own)


def _last(folder: Path) -> str | None:
    return max((file.name[:4] for file in folder.glob("[0-9]*.py")), default=None)


def ledger_revision() -> str:
    """Return the newest revision that changes the ledger, not just states."""
    numbered = sorted(VERSIONS.glob("[0-9]*.py"), reverse=True)
    return next(file.name[:4] for file in numbered if OF_STATES_ONLY not in file.read_text())


# The ledger revision that this code needs, read when the module is imported. While a process runs, a newer version may be
# installed in the same place: its files say nothing about the running code.
KNOWN_LEDGER = ledger_revision()


def check_numbers(folder: Path) -> None:
    """Refuse migrations of which several have one number: a database knows only the number, so it would have one of them.

    Raises: SchemaOutOfDate.
    """
    names = sorted(file.name for file in folder.glob("[0-9]*.py"))
    for name, following in pairwise(names):
        if name[:4] == following[:4]:
            raise SchemaOutOfDate(
                f"Migrations {name} and {following} in {folder} have the same number, as if each of two branches had written "
                "one. Keep the one that your databases have had, delete the other, and write that again with the next number: "
                "tidegate migrate --new 'what it was'. Nothing was changed."
            )


def current_revision(connection: Connection, version_table: str = VERSION_TABLE) -> str | None:
    """Return the database's revision, or, with their version table, that of a project's own migrations; None without one."""
    exists = _has_table(connection, version_table)
    return connection.scalar(sa.select(_version(version_table))) if exists else None


def _has_table(connection: Connection, version_table: str) -> bool:
    return connection.scalar(sa.select(sa.func.to_regclass(f"{tables.LEDGER}.{version_table}"))) is not None


def _version(version_table: str = VERSION_TABLE) -> sa.ColumnClause[str]:
    return sa.table(version_table, sa.column("version_num", sa.Text), schema=tables.LEDGER).c.version_num


def lock_revision(connection: Connection) -> None:
    """Wait for another migration to end, so that this one starts from its revision.

    If it will migrate the ledger, it waits for commits, too, and later commits wait for it: they lock a cursor before they read
    the revision.
    """
    if current_revision(connection) is None:
        return
    connection.execute(sa.text(f"LOCK TABLE {tables.LEDGER}.{VERSION_TABLE} IN SHARE ROW EXCLUSIVE MODE"))
    revision, noted = _revisions(connection)
    if (noted or revision) < ledger_revision():
        connection.execute(sa.text(f"LOCK TABLE {tables.LEDGER}.{tables.cursor.name} IN EXCLUSIVE MODE"))


def check_not_newer(connection: Connection) -> None:
    """Refuse a database that newer code has migrated.

    Raises: SchemaOutOfDate.
    """
    revision = current_revision(connection)
    if revision is not None and revision > (head := head_revision()):
        database = connection.scalar(sa.select(sa.func.current_database()))
        raise SchemaOutOfDate(f"Database {database} is at revision {revision}, newer than this code ({head}). Update the code.")
    own, revision = project.own("migrations"), current_revision(connection, PROJECT_VERSION_TABLE)
    if revision is None:
        return
    database = connection.scalar(sa.select(sa.func.current_database()))
    if own is None:
        raise SchemaOutOfDate(
            f"Database {database} is at revision {revision} of a project's migrations, and {project.find() or Path.cwd()} has "
            f"no folder pipelines. Go into that project's folder, or let {project.HOME_VARIABLE} name it."
        )
    if (head := project_head() or "none") == "none" or revision > head:
        raise SchemaOutOfDate(
            f"Database {database} is at revision {revision} of a project's migrations, newer than those in {own} ({head}). "
            "Update the project."
        )
    _check_same_migration(connection, own, revision)


def _check_same_migration(connection: Connection, own: Path, revision: str) -> None:
    """Refuse a project in which the last migration that the database had is another file: it is of another branch or project.

    Raises: SchemaOutOfDate.
    """
    table = sa.cast(f"{tables.LEDGER}.{PROJECT_VERSION_TABLE}", REGCLASS)
    noted = connection.scalar(sa.select(sa.func.coalesce(sa.func.obj_description(table, "pg_class"), "")))
    names = [file.name for file in own.glob(f"{revision}*.py")]
    if names and noted.startswith(revision) and noted not in names:
        database = connection.scalar(sa.select(sa.func.current_database()))
        raise SchemaOutOfDate(
            f"Database {database} has had migration {noted} of a project, and {own} has {names[0]} in its place, which would "
            "never be run: they are of two branches, or of two projects. Use the database of this branch or project; or write "
            "that migration again with the next number, after the other one."
        )


def check_revision(connection: Connection) -> None:
    """Refuse a database that is older or newer than this code.

    Raises: SchemaOutOfDate with the command to type.
    """
    revision = current_revision(connection)
    _check_known(connection, revision)
    if is_migrated(connection):
        if (own := project.own("migrations")) and (of_project := project_head()):
            _check_same_migration(connection, own, of_project)
        return
    check_not_newer(connection)
    if revision is not None and _is_rebuilding(connection):
        return
    check_migrated(connection)


def is_migrated(connection: Connection) -> bool:
    """Return whether the database is at the revisions of this code and of the project."""
    of_project = current_revision(connection, PROJECT_VERSION_TABLE) if project.own("migrations") else None
    return (current_revision(connection), of_project) == (head_revision(), project_head())


def check_migrated(connection: Connection) -> None:
    """Refuse a database to which not all migrations of this code and of the project have been applied.

    Raises: SchemaOutOfDate with the command to type.
    """
    if is_migrated(connection):
        return
    revision, head = current_revision(connection), head_revision()
    database = connection.scalar(sa.select(sa.func.current_database()))
    if revision is None:
        raise SchemaOutOfDate(f"Database {database} has no Tidegate tables. Run: tidegate migrate")
    if revision != head:
        raise SchemaOutOfDate(f"Database {database} is at revision {revision}, this code needs {head}. Run: tidegate migrate")
    raise SchemaOutOfDate(
        f"Database {database} is at revision {current_revision(connection, PROJECT_VERSION_TABLE) or 'none'} of the project's "
        f"migrations, which are at {project_head()}. Run: tidegate migrate"
    )


def check_all_but_states(connection: Connection) -> None:
    """Refuse a database that newer code has migrated, or that lacks a migration of the ledger; those of states may wait.

    Raises: SchemaOutOfDate with the command to type.
    """
    revision = current_revision(connection)
    _check_known(connection, revision)
    check_not_newer(connection)
    if needs_ledger(connection):
        check_migrated(connection)


def _is_rebuilding(connection: Connection) -> bool:
    """Return whether only migrations of states are missing, and a pipeline is rebuilt, for whose end they wait.

    A commit needs no more than that its declaration is the registered one.
    """
    return not needs_ledger(connection) and bool(rebuilds_in_service(connection))


def rebuilds_in_service(connection: Connection) -> dict[str, RebuildName]:
    """Return the registered rebuilds that are not retired, by their names: until they end, migrations of states may wait."""
    p = tables.pipeline.c
    named_so = sa.select(p.declaration).where(p.pipeline.regexp_match("__v[0-9]+$"), p.retired_at.is_(None))
    found = ((each["name"], rebuilt_by(each)) for each in connection.scalars(named_so))
    return {name: rebuild for name, rebuild in found if rebuild is not None}


def needs_ledger(connection: Connection) -> bool:
    """Return whether a migration of the ledger is missing."""
    revision = current_revision(connection)
    return revision is None or max(revision, _revisions(connection)[1] or "") < ledger_revision()


def refusal(connection: Connection) -> TidegateError | None:
    """Return the error if the database's revision stops every step of the code installed here; else None."""
    try:
        check_revision(connection)
    except (SchemaOutOfDate, SettingsInvalid) as error:
        return error
    return None


def check_ledger(connection: Connection) -> None:
    """Refuse a database whose ledger is older or newer than this process needs, whatever the revision of states.

    Raises: SchemaOutOfDate with the command to type.
    """
    revision = current_revision(connection)
    _check_known(connection, revision)
    if revision is None or revision < KNOWN_LEDGER:
        database = connection.scalar(sa.select(sa.func.current_database()))
        state = "has no Tidegate tables" if revision is None else f"is at revision {revision}, this code needs {KNOWN_LEDGER}"
        raise SchemaOutOfDate(f"Database {database} {state}. Run: tidegate migrate")


def note_project(connection: Connection, own: Path) -> None:
    """Record which file was the last of a project's own migrations, and let all roles read that and its number."""
    if revision := current_revision(connection, PROJECT_VERSION_TABLE):
        name = next((file.name for file in own.glob(f"{revision}*.py")), None)
        table = sa.Table(PROJECT_VERSION_TABLE, sa.MetaData(), schema=tables.LEDGER, comment=name)
        connection.execute(SetTableComment(table))
    if _has_table(connection, PROJECT_VERSION_TABLE):
        connection.execute(sa.text(f"GRANT SELECT ON {tables.LEDGER}.{PROJECT_VERSION_TABLE} TO tidegate, tidegate_reader"))


def note_ledger(connection: Connection, revision: str) -> None:
    """Record, in a migration, the newest revision that has changed the ledger, as a comment on a table."""
    table = sa.Table(VERSION_TABLE, sa.MetaData(), schema=tables.LEDGER, comment=f"{LEDGER_COMMENT}{revision}")
    connection.execute(SetTableComment(table))


def check_known(connection: Connection) -> None:
    """Refuse a ledger that was migrated to a newer revision than the code of this process knows.

    A commit first locks a cursor: from then on, a migration of the ledger waits for it.

    Raises: SchemaOutOfDate.
    """
    revision, noted = _revisions(connection)
    if revision > KNOWN_LEDGER and noted is not None and noted > KNOWN_LEDGER:
        raise SchemaOutOfDate(
            f"The ledger was migrated to revision {noted}, but this process was started with code for {KNOWN_LEDGER}. "
            "Restart the stack: tidegate down && tidegate up"
        )


def _check_known(connection: Connection, revision: str | None) -> None:
    if revision is not None and revision > KNOWN_LEDGER:
        check_known(connection)


def _revisions(connection: Connection) -> tuple[str, str | None]:
    """Return a migrated database's revision and, if it is recorded, the newest that has changed its ledger."""
    version_table = sa.cast(f"{tables.LEDGER}.{VERSION_TABLE}", REGCLASS)
    comment = sa.func.coalesce(sa.func.obj_description(version_table, "pg_class"), "")
    revision, noted = connection.execute(sa.select(_version(), comment)).one()
    return revision, noted.removeprefix(LEDGER_COMMENT) if noted.startswith(LEDGER_COMMENT) else None
