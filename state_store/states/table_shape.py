"""Whether tables of states are as declared: types, collations, keys, foreign triggers; `migrate --accept-table`.

The ledger notes the shape of each table as its declaration makes it (`state_table.shape`, by ``tidegate.table_shape``), and
what a person has accepted beyond that. `table_identity` compares both with the table at each plan, attempt and commit. A team's
own columns, keys, indexes, grants and comments are no difference.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.schema import CreateTable

from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.connections.table_locks import STAGING
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.ledger import schema_revision
from tidegate.state_store.states import state_tables
from tidegate.state_store.states.table_identity import Difference, differences_in

# What was accepted stays so, but for columns and keys that are declared otherwise now.
_NOTE = sa.text("""
UPDATE tidegate.state_table SET shape = :shape, accepted_shape = (
    SELECT coalesce(jsonb_object_agg(key, value), '{}') FROM jsonb_each(accepted_shape)
    WHERE shape IS NULL OR shape -> key IS NOT DISTINCT FROM CAST(:shape AS jsonb) -> key)
WHERE state = :state
""").bindparams(sa.bindparam("shape", type_=JSONB))
_UNKNOWN = sa.text("""
SELECT state FROM tidegate.state_table LEFT JOIN pg_class ON relname = state AND relnamespace = 'state'::regnamespace
WHERE pipeline = :pipeline AND (shape IS NULL OR table_oid IS DISTINCT FROM pg_class.oid)
""")
_SHAPE = sa.text("SELECT tidegate.table_shape(to_regclass(:made))")
_DIFFERENCES = sa.text("""
SELECT pipeline, tidegate.shape_differences(pg_class.oid, shape || accepted_shape) AS differences
FROM tidegate.state_table JOIN pg_class ON relname = state AND relnamespace = 'state'::regnamespace
WHERE state = :state AND shape IS NOT NULL
""")
_ACCEPT = sa.text("UPDATE tidegate.state_table SET accepted_shape = accepted_shape || :found WHERE state = :state").bindparams(
    sa.bindparam("found", type_=JSONB)
)
_COLUMNS = sa.text("""
SELECT state, attname, accepted_shape ? ('column ' || quote_ident(attname)) AS is_accepted
FROM tidegate.state_table JOIN pg_class ON relname = state AND relnamespace = 'state'::regnamespace
JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0 AND shape ? ('column ' || quote_ident(attname))
""")


def note(connection: Connection, spec: PipelineSpec, *, is_changed: bool) -> None:
    """Note the shapes that a pipeline's declaration gives to its tables; only the tables' owner may.

    Those of a declaration that has not changed are known, but for tables that a migration has just made again: how a table is
    divided is no part of the declaration's fingerprint.
    """
    unknown = None if is_changed else set(connection.scalars(_UNKNOWN, {"pipeline": spec.name}))
    for table in (table for state in spec.readable for table in state_tables.tables_of(state)):
        if unknown is None or table.name in unknown:
            connection.execute(_NOTE, {"shape": _declared_shape(connection, table), "state": table.name})


def accept(connection: Connection, state: str) -> tuple[str, list[Difference]]:
    """Take a state's table as it is, from now on; return its pipeline, and what differed. Only the tables' owner may.

    Raises: UsageError if nothing differs, or no batch could be merged, as a declared column or key is gone.
    """
    row = connection.execute(_DIFFERENCES, {"state": state}).one_or_none()
    differences = list(differences_in(row.differences if row else None))
    name = f"{state_tables.STATE}.{state}"
    if row is None or not differences:
        raise UsageError(f"Table {name} is as it is declared, or no registered pipeline owns it: nothing is to be accepted.")
    if bars := [str(each) for each in differences if each.found is None or each.part.startswith("required ")]:
        raise UsageError(f"Table {name} cannot be taken as it is, as no batch could be merged: {bars[0]}. Put it back.")
    connection.execute(_ACCEPT, {"found": {each.part: each.found for each in differences}, "state": state})
    return row.pipeline, differences


def registered_columns(connection: Connection) -> dict[tuple[str, str], bool]:
    """Return, by table and name, whether a person has accepted a column of the registered declarations as it is.

    Any other column of these tables is a team's own.
    """
    if not schema_revision.has_ledger(connection):
        return {}
    return {(state, column): is_accepted for state, column, is_accepted in connection.execute(_COLUMNS)}


def _declared_shape(connection: Connection, table: Table) -> Any:
    """Return the shape of a table that is made as declared: Postgres itself says how types and formulas are written."""
    made = table.to_metadata(sa.MetaData(), schema=STAGING, name=f"{table.name}$shape")
    with connection.begin_nested() as tried:
        connection.execute(CreateTable(made))
        shape = connection.scalar(_SHAPE, {"made": f'{STAGING}."{made.name}"'})
        tried.rollback()
    return shape
