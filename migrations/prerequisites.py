"""What a Postgres server must have before the first migration: its version, roles and privileges (docs/postgres.md).

An administrator makes the roles, by the statements of `migrations.database_roles`.
"""

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY

from tidegate.migrations.database_roles import OWNER, ROLES
from tidegate.state_store.base.errors import AccessRefused, PermanentError, SettingsInvalid
from tidegate.state_store.connections import role_settings, statement_text
from tidegate.state_store.connections.table_locks import STAGING
from tidegate.state_store.ledger import schema_revision, tables
from tidegate.state_store.states import state_tables

OLDEST, NEWEST_TESTED = 15, 18
_SCHEMAS = (tables.LEDGER, state_tables.STATE, STAGING)
_OF_ROLES = sa.text("""
SELECT rolname, rolcanlogin, has_database_privilege(rolname, current_database(), 'CONNECT') AS connects
FROM pg_roles WHERE rolname = ANY (:roles)
""").bindparams(sa.bindparam("roles", [*ROLES], type_=ARRAY(sa.Text)))
# Before there is a ledger, whatever has one of our schemas' names is another application's.
_OF_OTHERS = sa.text("""
SELECT nspname FROM pg_namespace
WHERE nspname = ANY (:schemas) AND NOT (:has_ledger AND pg_get_userbyid(nspowner) = current_user) ORDER BY nspname LIMIT 1
""").bindparams(sa.bindparam("schemas", [*_SCHEMAS], type_=ARRAY(sa.Text)))


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
    asked, remedies = role_settings.harmful(connection, [*ROLES])
    if asked:
        raise SettingsInvalid(asked)
    has_ledger = schema_revision.has_ledger(connection)
    statements = [*_missing(connection, database, creates=creates or has_ledger), *remedies.values()]
    if statements:
        settings = f", and has settings under which steps may never end ({'; '.join(remedies)})" if remedies else ""
        raise AccessRefused(
            f"Database {database} lacks what Tidegate needs{settings}. As an administrator, run: {'; '.join(statements)}"
        )
    if (other := connection.scalar(_OF_OTHERS, {"has_ledger": has_ledger})) is not None:
        raise AccessRefused(
            f"Database {database} has a schema {other} that is not Tidegate's, which needs the schemas "
            f"{', '.join(_SCHEMAS)} to itself. Name a database of its own (PGDATABASE)."
        )


def _missing(connection: Connection, database: str, *, creates: bool) -> list[str]:
    """Return the statements that give the roles what they lack."""
    found = {row.rolname: row for row in connection.execute(_OF_ROLES)}
    name = statement_text.quoted(database)
    statements = [f"CREATE ROLE {role} LOGIN" for role in ROLES if role not in found]
    statements += [f"ALTER ROLE {role} LOGIN" for role in ROLES if role in found and not found[role].rolcanlogin]
    connecting = {role for role in found if found[role].connects}
    statements += [f"GRANT CONNECT ON DATABASE {name} TO {role}" for role in ROLES if role not in connecting]
    return statements if creates else [*statements, f"GRANT CREATE ON DATABASE {name} TO {OWNER}"]
