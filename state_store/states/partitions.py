"""The tables of states that are divided into partitions: whether they have all of them, and how one is made again.

How they are divided is in `range_partitions`. What reads or takes back rows refuses a table that lacks a partition, because its
rows would be missing in silence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, Table

from tidegate.state_store.connections import statement_text
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, Ranges, StateSpec
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import key_lookup, range_partitions, state_tables, team_additions

# A partition that is being detached concurrently, or whose detaching was broken off, is gone for every query.
_DIVIDED = sa.text("""
SELECT attname, array(
    SELECT relname::text FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
    WHERE inhparent = partrelid AND NOT inhdetachpending
)
FROM pg_partitioned_table JOIN pg_attribute ON attrelid = partrelid AND attnum = ANY (partattrs::int2[])
WHERE partrelid = to_regclass(:table)
""")


class _Found(NamedTuple):
    """How a table is divided: by the ranges of which column, and the names of its attached partitions."""

    column: str
    parts: set[str]


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


def attached(connection: Connection, table: str) -> set[str]:
    """Return the names of the partitions that a table in schema state has."""
    found = _divided(connection, f"{state_tables.STATE}.{table}")
    return found.parts if found else set()


def differing(connection: Connection, schema: str, specs: Sequence[PipelineSpec]) -> list[tuple[StateSpec, StateSpec]]:
    """Return the states whose tables are divided otherwise than is declared: as declared, and as found."""
    differing = []
    for state in (state for spec in specs for state in spec.readable):
        if not sa.inspect(connection).has_table(state.table_name, schema=schema):
            continue
        found = _divided(connection, f"{schema}.{state.table_name}")
        ranges = Ranges(found.column, range_partitions.length(connection, state, found.column)) if found else None
        if ranges != state.ranges:
            differing.append((state, replace(state, ranges=ranges)))
    return differing


def losing_their_column(connection: Connection, schema: str, specs: Sequence[PipelineSpec]) -> dict[str, str]:
    """Return a sentence for each pipeline with a state that no longer has the column by which its table is divided."""
    sentences = {}
    for spec in specs:
        for state in spec.readable:
            found = _divided(connection, f"{schema}.{state.table_name}")
            if found and found.column not in {value.name for value in state.values}:
                sentences[spec.name] = (
                    f"State {state.name} of pipeline {spec.name} cannot lose column {found.column}, by whose ranges its table "
                    "is divided. First declare other range_partitions, or none, with that column, and let a migration divide "
                    "the table so; then take the column out."
                )
    return sentences


def _divided(connection: Connection, table: str) -> _Found | None:
    """Return how a table is divided; None if it is not, or there is none."""
    row = connection.execute(_DIVIDED, {"table": table}).one_or_none()
    return _Found(row[0], set(row[1])) if row else None


def set_aside(table: Table, state: StateSpec) -> Iterator[str]:
    """Yield the statements that rename a table, its partitions and indexes, to make room for one with the same names."""
    if state.ranges:
        yield from range_partitions.set_aside(state, table)
    yield f"ALTER TABLE {table.schema}.{table.name} RENAME TO {table.name}$before"
    for name in sorted(str(part.name) for part in _indexed(table)):
        yield f"ALTER INDEX {table.schema}.{name} RENAME TO {name}$before"


def moved_back(table: Table, state: StateSpec) -> Iterator[str]:
    """Yield the statements that copy the table that was set aside, but for its declaration, and drop it."""
    before = sa.table(
        f"{table.name}$before", *(sa.column(c.name, c.type) for c in table.columns if c.computed is None), schema=table.schema
    )
    if state.ranges:
        yield from range_partitions.made_for(state, before)
    copy = sa.insert(table).from_select(before.c.keys(), sa.select(before))
    # The trigger, which refuses all writers but the pipeline's commits, would refuse this copy.
    yield f"ALTER TABLE {table.fullname} DISABLE TRIGGER single_writer"
    yield str(copy.compile(dialect=statement_text.DIALECT))
    yield f"ALTER TABLE {table.fullname} ENABLE ALWAYS TRIGGER single_writer"
    for statement in (team_additions.refused(table, before.fullname), team_additions.replaced(table, before.fullname)):
        yield " ".join(statement.split())  # one line of the migration


def _indexed(table: Table) -> Iterator[sa.PrimaryKeyConstraint | sa.UniqueConstraint | sa.Index]:
    for part in (*table.constraints, *table.indexes):
        if isinstance(part, sa.PrimaryKeyConstraint | sa.UniqueConstraint | sa.Index) and part.columns:
            yield part  # SQLAlchemy gives each table a primary key, without columns if there is none
