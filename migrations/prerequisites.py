"""What a Postgres server must have before the first migration: its version, roles and privileges (docs/postgres.md).

No role of Tidegate is a superuser or may make roles. An administrator makes them, by the statements of `roles`, which need no
superuser either: CREATEROLE and CREATEDB do, as managed services give them.
"""

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import psycopg2

from tidegate.state_store.base.errors import AccessRefused, PermanentError, SettingsInvalid
from tidegate.state_store.connections import role_settings
from tidegate.state_store.connections.table_locks import STAGING
from tidegate.state_store.ledger import tables
from tidegate.state_store.ledger.schema_revision import VERSION_TABLE
from tidegate.state_store.states import state_tables

OLDEST, NEWEST_TESTED = 15, 18
OWNER = "tidegate_owner"
# The migrations grant to these names.
ROLES = {
    OWNER: "owns the tables, migrates them",
    "tidegate": "plans, processes, commits",
    "tidegate_stager": "Spark's executors: stages rows",
    "tidegate_reader": "people and the page: reads",
}
_SCHEMAS = (tables.LEDGER, state_tables.STATE, STAGING)
_quote = psycopg2.dialect().identifier_preparer.quote  # type: ignore[no-untyped-call]


def roles(database: str) -> str:
    """Return the statements with which an administrator prepares a server, for psql, which asks for the passwords."""
    name = _quote(database)
    makes = [f"CREATE ROLE {role} LOGIN; -- {work}\n\\password {role}\n" for role, work in ROLES.items()]
    others = ", ".join(role for role in ROLES if role != OWNER)
    return (
        "".join(makes)
        + f"CREATE DATABASE {name} ENCODING 'UTF8';\n"
        + f"REVOKE ALL ON DATABASE {name} FROM PUBLIC;\n"
        + f"GRANT CONNECT, CREATE ON DATABASE {name} TO {OWNER};\n"
        + f"GRANT CONNECT ON DATABASE {name} TO {others};\n"
    )


def check(connection: Connection) -> None:
    """Refuse a server that lacks something; the message has the statements that an administrator runs.

    Raises: PermanentError for its version, or the encoding of its texts; SettingsInvalid for PGOPTIONS; AccessRefused for a
    role, its settings or privileges, or for schemas that others use.
    """
    version = int(connection.exec_driver_sql("SHOW server_version_num").scalar_one())
    if version < OLDEST * 10_000:
        raise PermanentError(
            f"This server is PostgreSQL {version // 10_000}. Tidegate needs {OLDEST} or newer, and is tested up to "
            f"{NEWEST_TESTED}. Upgrade the server, or name another one (PGHOST)."
        )
    if (encoding := connection.exec_driver_sql("SHOW server_encoding").scalar_one()) != "UTF8":
        raise PermanentError(
            f"This database keeps texts in {encoding}, in which most characters cannot be kept, such as in a name of a file. "
            "Make another one, CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0, and name it (PGDATABASE)."
        )
    database, user = connection.execute(sa.select(sa.func.current_database(), sa.func.current_user())).one()
    creates = connection.scalar(sa.select(sa.func.has_database_privilege(sa.func.current_database(), "CREATE")))
    if user != OWNER and not creates:
        raise AccessRefused(
            f"Migrations are run by role {OWNER}, to which the ledger's grants are made, but pg_owner names {user}. "
            "Correct that setting (tidegate settings)."
        )
    if asked := role_settings.of_this_process(connection):
        raise SettingsInvalid(asked)
    if statements := _missing(connection, database, creates=creates or _has_tables(connection)):
        harmful = role_settings.remedies(connection, [*ROLES])
        settings = f", and has settings under which steps may never end ({'; '.join(harmful)})" if harmful else ""
        raise AccessRefused(
            f"Database {database} lacks what Tidegate needs{settings}. As an administrator, run: {'; '.join(statements)}"
        )
    if others := _of_others(connection, user):
        raise AccessRefused(
            f"Database {database} has a schema {others[0]} that is not Tidegate's, which needs the schemas "
            f"{', '.join(_SCHEMAS)} to itself. Name a database of its own (PGDATABASE)."
        )


def _missing(connection: Connection, database: str, *, creates: bool) -> list[str]:
    """Return the statements that give what is missing."""
    r = sa.table("pg_roles", sa.column("rolname"), sa.column("rolcanlogin"))
    known = connection.execute(sa.select(r.c.rolname, r.c.rolcanlogin).where(r.c.rolname.in_(ROLES)))
    found = {row.rolname: row.rolcanlogin for row in known}
    statements = [f"CREATE ROLE {role} LOGIN" for role in ROLES if role not in found]
    statements += [f"ALTER ROLE {role} LOGIN" for role in ROLES if found.get(role) is False]
    connects = sa.func.has_database_privilege(r.c.rolname, sa.func.current_database(), "CONNECT")
    connecting = set(connection.scalars(sa.select(r.c.rolname).where(r.c.rolname.in_(ROLES), connects)))
    name = _quote(database)
    statements += [f"GRANT CONNECT ON DATABASE {name} TO {role}" for role in ROLES if role not in connecting]
    statements += role_settings.remedies(connection, [*ROLES]).values()
    if not creates:
        statements.append(f"GRANT CREATE ON DATABASE {name} TO {OWNER}")
    return statements


def _has_tables(connection: Connection) -> bool:
    return connection.scalar(sa.select(sa.func.to_regclass(f"{tables.LEDGER}.{VERSION_TABLE}"))) is not None


def _of_others(connection: Connection, user: str) -> list[str]:
    """Return the schemas with our names that another application has made."""
    n = sa.table("pg_namespace", sa.column("nspname"), sa.column("nspowner"))
    owner = sa.func.pg_get_userbyid(n.c.nspowner)
    statement = sa.select(n.c.nspname).where(n.c.nspname.in_(_SCHEMAS)).order_by(n.c.nspname)
    is_another = owner != user if _has_tables(connection) else sa.true()
    return list(connection.scalars(statement.where(is_another)))
