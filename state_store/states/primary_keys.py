"""The primary keys of states' tables as they are and as they are declared: Alembic compares columns, and not these."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.schema import AddConstraint, DropConstraint

from tidegate.state_store.connections import statement_text
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.states import state_tables


class KeyChange(NamedTuple):
    """A table whose primary key is another one than is declared: as declared, and the key that it has; None: it has none."""

    table: Table
    found: sa.PrimaryKeyConstraint | None

    @property
    def declared(self) -> sa.PrimaryKeyConstraint | None:
        """Return the declared primary key; None if a key may be NULL, so that it is unique instead."""
        return self.table.primary_key if self.table.primary_key.columns else None


def differing(connection: Connection, schema: str, specs: Sequence[PipelineSpec]) -> list[KeyChange]:
    """Return the existing tables of states whose primary key is another one than is declared."""
    inspector, changes = sa.inspect(connection), []
    for table in state_tables.metadata_of(tuple(specs)).tables.values():
        if not inspector.has_table(table.name, schema=schema):
            continue
        known = inspector.get_pk_constraint(table.name, schema=schema)
        names = known["constrained_columns"]
        if set(names) != {column.name for column in table.primary_key.columns}:
            found = Table(table.name, sa.MetaData(schema=schema), *(sa.Column(name, sa.Text) for name in names))
            key = sa.PrimaryKeyConstraint(*names, name=known["name"]) if names else None
            if key is not None:
                found.append_constraint(key)
            changes.append(KeyChange(table, key))
    return changes


def statements(
    before: sa.PrimaryKeyConstraint | None, after: sa.PrimaryKeyConstraint | None
) -> tuple[Iterator[str], Iterator[str]]:
    """Return the statements that come before and after a change of a table's columns, so that it gets another primary key."""
    first = (str(DropConstraint(key).compile(dialect=statement_text.DIALECT)) for key in (before,) if key is not None)
    last = (str(AddConstraint(key).compile(dialect=statement_text.DIALECT)) for key in (after,) if key is not None)
    return first, last
