"""Size partitions: what a state records, its changes or final windows, goes on in another table when the last has become large.

The table of that name has the first txids. The others inherit from it, so that it is read with all of them; their names are its
name, a $ and their first txid, and the ledger notes them. Where one ends is not known when it is made: Postgres' own partitions
by range would have to be detached and attached again with other bounds, and that waits for readers, under the cursor's lock. So
a commit, which has this lock, itself writes into the last one. A table from before there were partitions is the first one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import BigInteger, Connection, Table, Text
from sqlalchemy.dialects.postgresql import OID

from state_store import lookup, range_partitions, state_tables, tables
from state_store.database import LARGE_PARTITION_MIB
from state_store.declaration import StateSpec

# Readers open every partition. For each so many that there are, the next ones may grow by that size more.
MANY = 64
_INHERITS = sa.table("pg_inherits", sa.column("inhrelid"), sa.column("inhparent"), schema="pg_catalog")
_note = tables.state_range.c
_FIRST_TXID = sa.cast(_note.lower, BigInteger)


class SizePartition(NamedTuple):
    """A partition that the ledger notes: its table's name, its first txid, and whether it is attached."""

    name: str
    first_txid: int
    is_attached: bool


def target(connection: Connection, state: StateSpec, txid: int) -> sa.TableClause:
    """Return the table that takes what a txid has the state record: a new one if the last has become large.

    Raises: SchemaOutOfDate if that was detached or dropped by hand, or a detached table is in the way of the new one.
    """
    recorded = state_tables.changes_table_of(state)
    last = _noted(recorded).where(txid >= _FIRST_TXID).order_by(_FIRST_TXID.desc()).limit(1).subquery("last")
    all_of_it = sa.select(sa.literal(recorded.name, Text).label("name")).subquery("recorded")
    name = sa.func.coalesce(last.c.partition, all_of_it.c.name)
    made = sa.select(sa.func.count()).where(_note.state == recorded.name).scalar_subquery()
    large_mib = sa.cast(sa.func.nullif(sa.func.current_setting(LARGE_PARTITION_MIB, True), ""), BigInteger)
    found = sa.select(
        name,
        sa.func.coalesce(last.c.first_txid, 0),
        sa.func.coalesce(last.c.is_attached, sa.true()),
        sa.func.pg_total_relation_size(_oid(name)) >= large_mib * 1024 * 1024 * (1 + made // MANY),
    ).select_from(all_of_it.outerjoin(last, sa.true()))
    into, first_txid, is_attached, is_large = connection.execute(found).one()
    _refuse(recorded, [] if is_attached else [into])
    if is_large and first_txid < txid:
        new = f"{recorded.name}${txid}"
        added = sa.select(sa.func.tidegate.add_partition(recorded.name, txid))
        if range_partitions.add(connection, added, state, new):
            into = new
    return sa.table(into, *(sa.column(column.name, column.type) for column in recorded.c), schema=recorded.schema)


def noted(connection: Connection, state: StateSpec) -> list[SizePartition]:
    """Return the partitions that commits have made of what a state records, the oldest first."""
    recorded = state_tables.changes_table_of(state)
    return list(map(SizePartition._make, connection.execute(_noted(recorded).order_by(_FIRST_TXID))))


def remove_rows(connection: Connection, name: str, txids: tuple[int, int], most: int) -> tuple[int, int]:
    """Delete the first rows of these txids from one partition, at most so many; return their number and last txid."""
    rows = sa.table(name, sa.column("txid", BigInteger), sa.column("ctid"), schema=state_tables.STATE)
    old = rows.alias("old")
    first = sa.select(old.c.ctid).where(old.c.txid.between(*txids)).order_by(old.c.txid).limit(most)
    places = sa.func.array(first.with_hint(old, "ONLY", "postgresql").scalar_subquery())
    delete = sa.delete(rows).with_hint("ONLY", dialect_name="postgresql").where(rows.c.ctid == sa.any_(places))
    removed = delete.returning(rows.c.txid).cte("removed")
    count, last = connection.execute(sa.select(sa.func.count(), sa.func.max(removed.c.txid))).one()
    return count, last or 0


def empty(connection: Connection, name: str) -> None:
    """Remove all rows of the table of the state's name, as quickly as a partition is dropped, and of no other."""
    connection.execute(sa.DDL(f"TRUNCATE ONLY {state_tables.STATE}.{name}"))  # type: ignore[no-untyped-call]


def check_whole(connection: Connection, state: StateSpec) -> None:
    """Refuse what a state records if it lacks a partition: pipelines that follow the state would miss its txids.

    Raises: SchemaOutOfDate.
    """
    if state.records:
        missing = lookup.missing_ranges(connection.connection.driver_connection, state.records)
        _refuse(state_tables.changes_table_of(state), missing)


def _refuse(recorded: Table, missing: Sequence[str]) -> None:
    if refusal := range_partitions.why_not_whole(recorded.fullname, missing, inherit=True):
        raise refusal


def _noted(recorded: Table) -> sa.Select[Any]:
    parent = _oid(sa.literal(recorded.name, Text))
    is_attached = sa.exists().where(_INHERITS.c.inhrelid == _oid(_note.partition), _INHERITS.c.inhparent == parent)
    columns = (_note.partition, _FIRST_TXID.label("first_txid"), is_attached.label("is_attached"))
    return sa.select(*columns).where(_note.state == recorded.name)


def _oid(name: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
    """Return the number of a table in schema state; NULL if there is none of this name."""
    return sa.cast(sa.func.to_regclass(sa.func.format(f"{state_tables.STATE}.%I", name)), OID)
