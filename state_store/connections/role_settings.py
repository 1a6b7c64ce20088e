"""Settings of Postgres that were given to roles or a database, and under which steps may never end, or write nothing."""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY

# By name: the value under which Tidegate works. A long read or a copy into staging has no limit of its own; writes have.
NEUTRAL = {
    "statement_timeout": "0",
    "transaction_timeout": "0",
    "default_transaction_read_only": "off",
    "session_replication_role": "origin",
}
# The setting of a role in a database comes before that of the role, and this before that of the database.
_SETTINGS = sa.text("""
SELECT DISTINCT ON (role, name) role, name, value, quote_ident(current_database())
FROM unnest(:roles) AS role
CROSS JOIN pg_db_role_setting AS s
CROSS JOIN unnest(setconfig) AS line
CROSS JOIN LATERAL (SELECT split_part(line, '=', 1), substr(line, strpos(line, '=') + 1)) AS set (name, value)
WHERE setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = role))
    AND setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
ORDER BY role, name, setrole = 0, setdatabase = 0
""").bindparams(sa.bindparam("roles", type_=ARRAY(sa.Text)))


def remedies(connection: Connection, roles: Sequence[str]) -> dict[str, str]:
    """Return, by each harmful setting that one of these roles has in this database (``role: name = value``), what ends it."""
    found = {}
    for role, name, value, database in connection.execute(_SETTINGS, {"roles": list(roles)}):
        if name in NEUTRAL and _plain(value) != NEUTRAL[name]:
            found[f"{role}: {name} = {value}"] = f"ALTER ROLE {role} IN DATABASE {database} SET {name} = {NEUTRAL[name]}"
    return found


def _plain(value: str) -> str:
    """Return a value as Postgres shows it: a time of nothing may have a unit."""
    return "0" if value.rstrip("msinhd ") == "0" else {"false": "off", "no": "off"}.get(value.lower(), value.lower())
