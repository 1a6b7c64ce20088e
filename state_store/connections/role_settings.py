"""Settings of roles or a database under which steps may never end, or write nothing, or any session may write states."""

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY

# By name: the value under which Tidegate works. A long read or a copy into staging has no limit of its own; writes have.
NEUTRAL = {
    "statement_timeout": "0",
    "transaction_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "default_transaction_read_only": "off",
    "session_replication_role": "origin",
    "tidegate.writer": "''",  # by which the guard of states' tables lets sessions pass: of any role
}
# A time as short as this ends steps that go on; managed servers set longer ones.
SHORT_SECONDS = 3600
# The setting of a role in a database comes before that of the role, this before that of the database, and this before that of
# the server (postgresql.conf, ALTER SYSTEM), which a session shows that has none of these. What a process asks for as it
# connects comes before all of them, for each role.
_SETTINGS = sa.text("""
WITH given AS (
    SELECT DISTINCT ON (role, name) role, name, value
    FROM unnest(CAST(:roles AS text[]) || session_user::text || ARRAY(
        SELECT rolname::text FROM pg_db_role_setting JOIN pg_roles ON oid = setrole, unnest(setconfig) AS line
        WHERE line LIKE 'tidegate.writer=%')) AS role
    CROSS JOIN pg_db_role_setting AS s
    CROSS JOIN unnest(setconfig) AS line
    CROSS JOIN LATERAL (SELECT split_part(line, '=', 1), substr(line, strpos(line, '=') + 1)) AS set (name, value)
    WHERE setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = role))
        AND setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
    ORDER BY role, name, setrole = 0, setdatabase = 0
), found AS (
    SELECT role, name, value, '' AS place FROM given WHERE role = ANY(:roles) OR name = 'tidegate.writer'
    UNION ALL
    SELECT owner.role, name, reset_val || coalesce(unit, ''), ' in the configuration of the server'
    FROM unnest(CAST(:roles AS text[])) AS owner (role) CROSS JOIN pg_settings
    WHERE source <> 'client'
        AND NOT EXISTS (SELECT FROM given WHERE given.name = pg_settings.name AND given.role IN (owner.role, session_user))
    UNION ALL
    SELECT NULL, name, reset_val || coalesce(unit, ''), '' FROM pg_settings WHERE source = 'client'
)
SELECT quote_ident(role), name, value, place, quote_ident(current_database()) FROM found
WHERE name = ANY(:names) AND NOT (
    CASE WHEN name LIKE '%timeout' THEN
        extract(epoch FROM (value || CASE WHEN value ~ '^[0-9]+$' THEN 'ms' ELSE '' END)::interval) NOT BETWEEN 0.001 AND :short
    ELSE lower(value) IN ('', 'off', 'false', 'no', '0', 'origin') END
)
ORDER BY role, name
""").bindparams(
    sa.bindparam("roles", type_=ARRAY(sa.Text)),
    sa.bindparam("names", [*NEUTRAL], type_=ARRAY(sa.Text)),
    sa.bindparam("short", SHORT_SECONDS),
)


_HARM = "under which steps may never end, or write nothing, or any session may write states"


class Harmful(NamedTuple):
    """Harmful settings: a sentence on those that this process asks for in each session, whatever its role; None without any.

    `remedies` are, by each setting that a role has in this database (``role: name = value``), what ends it.
    """

    asked: str | None
    remedies: dict[str, str]


def harmful(connection: Connection, roles: Sequence[str]) -> Harmful:
    """Return the harmful settings of this process and of these roles."""
    found = connection.execute(_SETTINGS, {"roles": list(roles)}).all()
    asked = [f"{name} = {value}" for role, name, value, _, _ in found if role is None]
    sentence = (
        f"This process connects with {' and '.join(asked)}, {_HARM}; no setting of a role changes that. Take it out of the "
        "environment variable PGOPTIONS, or out of options in the file of PGSERVICE."
    )
    remedies = {
        f"{role}: {name} = {value}{place}": f"ALTER ROLE {role} IN DATABASE {database} SET {name} = {NEUTRAL[name]}"
        for role, name, value, place, database in found
        if role is not None
    }
    return Harmful(sentence if asked else None, remedies)


def sentences(connection: Connection, roles: Sequence[str]) -> list[str]:
    """Return a sentence on harmful settings that this process asks for, and one for each that one of these roles has."""
    asked, remedies = harmful(connection, roles)
    of_roles = (f"Role {found}, {_HARM}. As an administrator: {remedy}" for found, remedy in remedies.items())
    return [*filter(None, [asked]), *of_roles]
