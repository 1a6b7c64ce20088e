"""Refuses tables of states that lack a partition: for what reads them or takes rows back, rows would be missing in silence."""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection, Table

from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateSpec
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import key_lookup, state_tables


def check_complete(connection: Connection, specs: Sequence[PipelineSpec]) -> None:
    """Refuse tables that lack a partition: a table created from one would lack the partition's rows.

    Raises: SchemaOutOfDate.
    """
    if not sa.inspect(connection).has_table(tables.state_range.name, schema=tables.LEDGER):
        return
    for table in (table for spec in specs for state in spec.readable for table in state_tables.tables_of(state)):
        check_whole(connection, table.name)


def check_whole(connection: Connection, table: str) -> None:
    """Refuse a table in schema state that lacks a partition: for readers, its rows would be missing.

    Raises: SchemaOutOfDate.
    """
    key_lookup.check_whole(connection.connection.driver_connection, table)


def readable_table(connection: Connection, state: StateSpec) -> Table:
    """Return what readers of a state select from, if it has all rows.

    Raises: SchemaOutOfDate if a partition of its table is missing: its rows would be, too.
    """
    check_whole(connection, state.table_name)
    return state_tables.readable_of(state)
