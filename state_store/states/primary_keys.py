"""The primary keys of states' tables as they are and as they are declared: Alembic compares columns, and not these."""

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.schema import AddConstraint

from tidegate.state_store.connections.statement_text import DIALECT, in_state, quoted
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.states import state_tables


class KeyChange(NamedTuple):
    """A table whose primary key is another one than is declared: as declared, and the name of the key that it has, if any."""

    table: Table
    found: str | None


def differing(connection: Connection, schema: str, specs: Sequence[PipelineSpec]) -> list[KeyChange]:
    """Return the existing tables of states whose primary key is another one than is declared."""
    inspector, changes = sa.inspect(connection), []
    for table in state_tables.metadata_of(tuple(specs)).tables.values():
        if not inspector.has_table(table.name, schema=schema):
            continue
        found = inspector.get_pk_constraint(table.name, schema=schema)
        if set(found["constrained_columns"]) != {column.name for column in table.primary_key.columns}:
            changes.append(KeyChange(table, found["name"]))
    return changes


def statements(change: KeyChange) -> tuple[list[str], list[str]]:
    """Return the statements that come before and after a change of a table's columns, so that it gets the declared key.

    A key that may be NULL is unique instead.
    """
    key, in_the_way = change.table.primary_key, change.found
    first = [f"ALTER TABLE {in_state(change.table.name)} DROP CONSTRAINT {quoted(in_the_way)}"] if in_the_way else []
    last = [str(AddConstraint(key).compile(dialect=DIALECT))] if key.columns else []
    return first, last
