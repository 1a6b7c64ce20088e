"""Size partitions: what a state records, its changes or final windows, goes on in another table when the last has become large.

The table of that name has the first txids. The others inherit from it, so that it is read with all of them; their names are its
name, a $ and their first txid, and the ledger notes them. Where one ends is not known when it is made: Postgres' own partitions
by range would have to be detached and attached again with other bounds, and that waits for readers, under the cursor's lock. So
a commit, which has this lock, itself writes into the last one. A table from before there were partitions is the first one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import BigInteger, Connection, Table
from sqlalchemy.dialects import postgresql

from tidegate.state_store.connections.database import LARGE_PARTITION_MIB, set_local
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import key_lookup, range_partitions, state_tables

# Readers open every partition. For each so many that there are, the next ones may grow by that size more.
MANY = 64
# A partition has each column from its own creation, too, so it keeps one that its table drops.
_COLUMNS_DROPPED = """DO $do$
DECLARE
    part regclass;
BEGIN
    FOR part IN
        SELECT inhrelid::regclass FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
        WHERE inhparent = '{table}'::regclass AND starts_with(relname, '{name}$')
    LOOP
        EXECUTE format('ALTER TABLE %s {drops}', part);
    END LOOP;
END
$do$"""
# The last partition that begins up to a txid, its first txid, whether it is attached, and whether it is large. As text, because
# each commit needs it soon.
_LAST = sa.text("""
    SELECT name, coalesce(first_txid, 0), first_txid IS NULL OR EXISTS (
        SELECT FROM pg_catalog.pg_inherits
        WHERE inhrelid = to_regclass(format('state.%I', name)) AND inhparent = to_regclass(format('state.%I', recorded))
    ), pg_total_relation_size(to_regclass(format('state.%I', name))) >= 1024 * 1024 * (1 + made / :many)
        * nullif(current_setting(:large_mib, true), '')::numeric
    FROM (SELECT cast(:recorded AS text) AS recorded) AS what
    CROSS JOIN LATERAL (SELECT count(*) AS made FROM tidegate.state_range WHERE state = recorded) AS counted
    LEFT JOIN LATERAL (
        SELECT partition, lower::bigint AS first_txid FROM tidegate.state_range
        WHERE state = recorded AND lower::bigint <= :txid ORDER BY lower::bigint DESC LIMIT 1
    ) AS last ON true
    CROSS JOIN LATERAL (SELECT coalesce(partition, recorded) AS name) AS named
""")


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
    given = {"recorded": recorded.name, "txid": txid, "many": MANY, "large_mib": LARGE_PARTITION_MIB}
    into, first_txid, is_attached, is_large = connection.execute(_LAST, given).one()
    _refuse(recorded, [] if is_attached else [into])
    if is_large and first_txid < txid:
        new = f"{recorded.name}${txid}"
        added = sa.select(sa.func.tidegate.add_partition(recorded.name, txid))
        if range_partitions.add(connection, added, state, new):
            into = new
    return sa.table(into, *(sa.column(column.name, column.type) for column in recorded.c), schema=recorded.schema)


def noted(connection: Connection, state: StateSpec) -> list[SizePartition]:
    """Return the partitions that commits have made of what a state records, the oldest first."""
    assert state.records is not None, "only what is recorded has these partitions"
    r = tables.state_range.c
    first_txid = sa.cast(r.lower, BigInteger)
    rows = connection.execute(sa.select(r.partition, first_txid).where(r.state == state.records).order_by(first_txid))
    missing = set(_missing(connection, state.records))
    return [SizePartition(name, first, name not in missing) for name, first in rows]


def remove_rows(connection: Connection, name: str, txids: tuple[int, int], most: int) -> tuple[int, int]:
    """Delete the first rows of these txids from one partition, at most so many; return their number and last txid."""
    set_local(connection, {"enable_sort": "off"})  # in the order of the index: of a new table, Postgres knows no sizes
    rows = sa.table(name, sa.column("txid", BigInteger), sa.column("ctid"), schema=state_tables.STATE)
    old = rows.alias("old")
    first = sa.select(old.c.ctid).where(old.c.txid.between(*txids)).order_by(old.c.txid).limit(most)
    places = sa.func.array(first.with_hint(old, "ONLY", "postgresql").scalar_subquery())
    delete = sa.delete(rows).with_hint("ONLY", dialect_name="postgresql").where(rows.c.ctid == sa.any_(places))
    removed = delete.returning(rows.c.txid).cte("removed")
    count, last = connection.execute(sa.select(sa.func.count(), sa.func.max(removed.c.txid))).one()
    return count, last or 0


def columns_dropped(schema: str | None, table: str, columns: Sequence[str]) -> str:
    """Return the statement that follows a drop of columns of a table, and drops them in its partitions."""
    quote = postgresql.dialect().identifier_preparer.quote  # type: ignore[no-untyped-call]
    drops = ", ".join(f"DROP COLUMN IF EXISTS {quote(column)}" for column in columns)
    return " ".join(_COLUMNS_DROPPED.format(table=f"{schema}.{table}", name=table, drops=drops).split())


def empty(connection: Connection, name: str) -> None:
    """Remove all rows of the table of the state's name, as quickly as a partition is dropped, and of no other."""
    connection.execute(sa.DDL(f"TRUNCATE ONLY {state_tables.STATE}.{name}"))  # type: ignore[no-untyped-call]


def check_whole(connection: Connection, state: StateSpec) -> None:
    """Refuse what a state records if it lacks a partition: pipelines that follow the state would miss its txids.

    Raises: SchemaOutOfDate.
    """
    if state.records:
        _refuse(state_tables.changes_table_of(state), _missing(connection, state.records))


def _missing(connection: Connection, recorded: str) -> Sequence[str]:
    return key_lookup.missing_ranges(connection.connection.driver_connection, recorded)


def _refuse(recorded: Table, missing: Sequence[str]) -> None:
    if refusal := range_partitions.why_not_whole(recorded.fullname, missing, inherit=True):
        raise refusal
