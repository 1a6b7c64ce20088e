"""The ledger's schema and the revisions of states: which code may use which database.

``schema.sql`` makes the ledger (schema ``tidegate``), of which the digest of that file is the version. A project numbers the
migrations of its states: their revisions.
"""

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY, REGCLASS
from sqlalchemy.schema import SetTableComment

from tidegate.state_store.base import project
from tidegate.state_store.base.errors import SchemaOutOfDate, SettingsInvalid, TidegateError
from tidegate.state_store.declarations.pipeline_spec import RebuildName, rebuilt_by
from tidegate.state_store.ledger import tables

DIGEST = hashlib.sha256(tables.SCHEMA.encode()).hexdigest()[:12]
VERSION_TABLE = "alembic_version"
PROJECT_VERSION_TABLE = "alembic_version_of_project"
# Under these, a statement finds or writes other rows of the ledger than it says. A trigger that comes after a row changes none.
_IN_THE_WAY = sa.text("""
SELECT format('%s of %s.%I', kind, relnamespace::regnamespace, relname) AS kind FROM pg_class CROSS JOIN LATERAL (
    SELECT 'row-level security' WHERE relrowsecurity
    UNION ALL SELECT format('rule %I', rulename) FROM pg_rewrite WHERE ev_class = pg_class.oid AND ev_enabled <> 'D'
    UNION ALL SELECT format('trigger %I', tgname) FROM pg_trigger
    WHERE tgrelid = pg_class.oid AND NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 3 = 3 -- before each row
) AS given (kind)
WHERE relnamespace = CAST(:schema AS regnamespace) AND relname = ANY (:tables) LIMIT 1
""").bindparams(
    sa.bindparam("schema", tables.LEDGER),
    sa.bindparam("tables", [VERSION_TABLE, *(table.name for table in tables.ledger.sorted_tables)], type_=ARRAY(sa.Text)),
)


def project_head() -> str | None:
    """Return the newest revision of a project's own migrations; None if it has none."""
    own = project.own("migrations")
    return None if own is None else max((file.name[:4] for file in own.glob("[0-9]*.py")), default=None)


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


def has_ledger(connection: Connection) -> bool:
    """Return whether the database has a ledger, of whatever code."""
    return _has_table(connection, VERSION_TABLE)


def current_revision(connection: Connection) -> str | None:
    """Return the database's revision of a project's own migrations; None without one."""
    if not _has_table(connection, PROJECT_VERSION_TABLE):
        return None
    return connection.scalar(sa.select(_version(PROJECT_VERSION_TABLE)))


def _version(version_table: str) -> sa.ColumnClause[str]:
    return sa.table(version_table, sa.column("version_num", sa.Text), schema=tables.LEDGER).c.version_num


def _has_table(connection: Connection, version_table: str) -> bool:
    return connection.scalar(sa.select(sa.func.to_regclass(f"{tables.LEDGER}.{version_table}"))) is not None


def lock_revision(connection: Connection) -> None:
    """Wait for another migration to end, so that this one starts from its revision."""
    if has_ledger(connection):
        connection.execute(sa.text(f"LOCK TABLE {tables.LEDGER}.{VERSION_TABLE} IN SHARE ROW EXCLUSIVE MODE"))


def check_ledger(connection: Connection) -> None:
    """Refuse a database without a ledger, or with one that other code has made than this process has.

    Raises: SchemaOutOfDate with the command to type.
    """
    if not has_ledger(connection):
        database = connection.scalar(sa.select(sa.func.current_database()))
        raise SchemaOutOfDate(f"Database {database} has no Tidegate tables. Run: tidegate migrate")
    check_known(*connection.execute(sa.select(sa.func.current_database(), *of_ledger())).one())


def of_ledger() -> list[sa.ColumnElement[Any]]:
    """Return as columns which schema.sql has made the ledger, and what is in the way of its rows, such as a trigger."""
    in_the_way = _IN_THE_WAY.columns(sa.column("kind", sa.Text)).subquery("in_the_way")
    return [sa.select(_version(VERSION_TABLE)).scalar_subquery(), sa.select(in_the_way.c.kind).scalar_subquery()]


def check_known(database: str, version: str | None, in_the_way: str | None) -> None:
    """Refuse a ledger of this version if other code has made it than this process has, or something is in the way of its rows.

    Raises: SchemaOutOfDate with what to do.
    """
    if in_the_way is not None:
        raise SchemaOutOfDate(
            f"Database {database} has {in_the_way}, a table of the ledger, which would find or keep other rows than are "
            "written. Nothing goes on until you drop or disable that; a trigger that comes AFTER a row may stay."
        )
    if version != DIGEST:
        raise SchemaOutOfDate(f"Database {database} {made_by(version)}")


def made_by(found: str | None) -> str:
    """Return which code has made a ledger of this version, which is not this code's, and what to do."""
    return (
        f"was made by another revision of Tidegate (schema.sql {found}) than this process was started with ({DIGEST}). If the "
        "code was updated since, restart the stack: tidegate down && tidegate up. If not, use the code that made it; or "
        "make a new database and read the sources again (docs/projects.md)."
    )


def check_not_newer(connection: Connection) -> None:
    """Refuse a ledger that other code has made, and states that a newer or another project has migrated.

    Raises: SchemaOutOfDate.
    """
    if has_ledger(connection):
        check_ledger(connection)
    own, revision = project.own("migrations"), current_revision(connection)
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
    """Refuse a project in which the last migration that the database had is another file, of another branch or project."""
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
    """Refuse a database whose ledger or states are not those of this code and project.

    Raises: SchemaOutOfDate with the command to type.
    """
    check_ledger(connection)
    if is_migrated(connection):
        if (own := project.own("migrations")) and (of_project := project_head()):
            _check_same_migration(connection, own, of_project)
        return
    check_not_newer(connection)
    # Migrations of states wait for the end of a rebuild. A commit needs only that its declaration is the registered one.
    if not rebuilds_in_service(connection):
        check_migrated(connection)


def is_migrated(connection: Connection) -> bool:
    """Return whether all migrations of the project have been applied to the database, which has a ledger."""
    return project.own("migrations") is None or current_revision(connection) == project_head()


def check_migrated(connection: Connection) -> None:
    """Refuse a database to which not all migrations of the project have been applied.

    Raises: SchemaOutOfDate with the command to type.
    """
    if not is_migrated(connection):
        database = connection.scalar(sa.select(sa.func.current_database()))
        raise SchemaOutOfDate(
            f"Database {database} is at revision {current_revision(connection) or 'none'} of the project's migrations, "
            f"which are at {project_head()}. Run: tidegate migrate"
        )


def rebuilds_in_service(connection: Connection) -> dict[str, RebuildName]:
    """Return the registered rebuilds that are not retired, by their names: until they end, migrations of states may wait."""
    p = tables.pipeline.c
    named_so = sa.select(p.declaration).where(p.pipeline.regexp_match("__v[0-9]+$"), tables.IN_SERVICE)
    found = ((each["name"], rebuilt_by(each)) for each in connection.scalars(named_so))
    return {name: rebuild for name, rebuild in found if rebuild is not None}


def refusal(connection: Connection) -> TidegateError | None:
    """Return the error if the database's revision stops every step of the code installed here; else None."""
    try:
        check_revision(connection)
    except (SchemaOutOfDate, SettingsInvalid) as error:
        return error
    return None


def note_project(connection: Connection, own: Path) -> None:
    """Record which file was the last of a project's own migrations, and let all roles read that and its number."""
    if revision := current_revision(connection):
        name = next((file.name for file in own.glob(f"{revision}*.py")), None)
        table = sa.Table(PROJECT_VERSION_TABLE, sa.MetaData(), schema=tables.LEDGER, comment=name)
        connection.execute(SetTableComment(table))
    if _has_table(connection, PROJECT_VERSION_TABLE):
        connection.execute(sa.text(f"GRANT SELECT ON {tables.LEDGER}.{PROJECT_VERSION_TABLE} TO tidegate, tidegate_reader"))
