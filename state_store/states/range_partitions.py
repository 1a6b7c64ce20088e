"""Range partitions: tables that are split into one per day, week, month, year or so many numbers of a column.

Appended rows are divided by the column that is declared, and what states record, changes or final windows, by txid.

Which ranges there will be is not known when the table is made: the commit that brings the first row of a range has its
partition made, in its own transaction. The ledger notes each, so that one that was detached by hand is missed, and `tidegate
prune` removes old ones as a whole. Their names are the table's, a $ and the start of the range.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.exc import DataError, OperationalError

from tidegate.state_store.base.errors import BadKey, Overflow, SchemaOutOfDate, UsageError
from tidegate.state_store.connections import lock_holders
from tidegate.state_store.connections.local_settings import set_local
from tidegate.state_store.connections.statement_text import ddl, in_state, quoted
from tidegate.state_store.declarations.column_spec import TXID, ColumnType
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, Ranges, StateSpec
from tidegate.state_store.ledger import tables
from tidegate.state_store.states.state_tables import STATE, sql_type, state_table_of

# A transaction makes or removes no more partitions: each takes some five entries of Postgres' table of locks. More new ranges
# in one batch are a mistake rather than a history.
MOST_AT_ONCE = 400
# While a removal waits for readers, commits and new readers wait for it. So it gives up soon, and is tried again; not before
# Postgres ends an autovacuum that is in the way, after its deadlock_timeout of usually a second.
LOCK_TIMEOUT = "1200ms"
# How many txids a partition of recorded changes has: less than a day of batches if there is one per minute, so that there are
# hundreds of partitions after a year in which none was removed. Commits refuse to add ranges of another number to those of a
# table: it needs a migration that divides the tables again.
TXIDS = 1000
_LEAST = {"integer": -(2**31), "bigint": -(2**63)}
_LONGEST_NAME = 63  # of Postgres
# A partition that is being detached concurrently, or whose detaching was broken off, is gone for every query.
_FOUND = sa.text("""
SELECT (SELECT attname FROM pg_partitioned_table JOIN pg_attribute ON attrelid = partrelid AND attnum = ANY (partattrs::int2[])
        WHERE partrelid = pg_class.oid),
    array(SELECT relname::text FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
          WHERE inhparent = pg_class.oid AND NOT inhdetachpending),
    array(SELECT attname::text FROM pg_attribute WHERE attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped)
FROM pg_class WHERE oid = to_regclass(:table)
""")


class Divided(NamedTuple):
    """A table that is divided: its name, its ranges, and the type of the column whose ranges these are."""

    table: str
    ranges: Ranges
    kind: str


class _Found(NamedTuple):
    """A table: the column by whose ranges it is divided, if it is, its attached partitions, and its columns."""

    column: str | None
    parts: list[str]
    columns: list[str]


def rows_of(state: StateSpec) -> Divided:
    """Return the table of a state of rows that is divided by ranges."""
    assert state.ranges is not None, "only a state with ranges is divided by them"
    column = state.ranges.column
    return Divided(state.name, state.ranges, next(value.type.name for value in state.values if value.name == column))


def changes_of(state: StateSpec) -> Divided:
    """Return the table of what a state records: its changes, or its final windows. It is divided by ranges of txids."""
    assert state.records is not None, "only what is recorded is divided by txid"
    return Divided(state.records, Ranges(TXID.name, TXIDS), TXID.type.name)


def partition_of(state: StateSpec, txid: int) -> str:
    """Return the name of the partition that has what a txid has the state record."""
    return f"{state.records}${txid // TXIDS * TXIDS}"


def add_missing(connection: Connection, divided: Divided, rows: sa.Select[Any], *, most: int | None = MOST_AT_ONCE) -> None:
    """Make the partitions that these rows need and the table does not have; for those of a batch, at most so many.

    Raises: BadKey for a row without a value; Overflow for rows in too many new ranges; SchemaOutOfDate if the table is divided
    by other ranges; the driver's errors, also if a table that was detached by hand is in the way.
    """
    needed = _needed(divided, rows)
    r = tables.state_range.c
    is_there = sa.exists().where(r.state == divided.table, r.partition == needed.c.partition)
    missing = connection.execute(
        sa.select(needed).where(sa.not_(is_there)).order_by(needed.c.start).limit(most and most + 1)
    ).all()
    if any(new.partition is None for new in missing):
        raise BadKey(
            f"State {divided.table}: column {divided.ranges.column}, by which its rows are divided, is NULL or infinite in a "
            "row."
        )
    if most is not None and len(missing) > most:
        raise Overflow(
            f"State {divided.table}: by column {divided.ranges.column}, the batch has rows in more than {most} new "
            f"ranges, from {missing[0].lower} to {missing[-1].lower} and on. If these are no mistakes, use smaller batches, or "
            "longer ranges."
        )
    if missing:
        _check_every(connection, divided)
    for new in missing:
        bounds = (new.partition, new.lower, new.upper, str(divided.ranges.every))
        connection.execute(sa.select(sa.func.tidegate.add_range(divided.table, *bounds)))


def begin_txid(connection: Connection, state: StateSpec, txid: int) -> None:
    """Make the partition that takes what a txid has the state record, if there is none.

    Raises: SchemaOutOfDate.
    """
    add_missing(connection, changes_of(state), sa.select(sa.literal(txid, sa.BigInteger).label(TXID.name)))


def _check_every(connection: Connection, divided: Divided) -> None:
    """Refuse to add to ranges of another length, which a migration has made since this process read the declaration."""
    r, every = tables.state_range.c, str(divided.ranges.every)
    other = connection.scalar(sa.select(r.every).where(r.state == divided.table, r.every != every).limit(1))
    if other is not None:
        raise SchemaOutOfDate(
            f"State {divided.table} is divided by ranges of {other}, and this process would add one of {every}. If the "
            "declaration has changed, run: tidegate migrate; if that was done since this process began, restart the stack: "
            "tidegate down && tidegate up"
        )


def _needed(divided: Divided, rows: sa.Select[Any]) -> sa.Subquery:
    """Return the ranges of rows: where each starts, its partition's name, and its bounds, without one where it is open."""
    value, every, kind = rows.selected_columns[divided.ranges.column], divided.ranges.every, divided.kind
    if isinstance(every, int):
        number, length = sa.cast(value, sa.BigInteger), sa.literal(every, sa.BigInteger)
        # The division of Postgres rounds towards zero.
        start: sa.ColumnElement[Any] = sa.case((number >= 0, number // length), else_=(number + 1) // length - 1)
        starts = rows.with_only_columns(start.label("start")).distinct().subquery()
        least = sa.cast(starts.c.start, sa.Numeric) * length
        lowest, highest = (sa.literal(bound, sa.Numeric) for bound in (_LEAST[kind], -_LEAST[kind] - 1))
        name: sa.ColumnElement[str] = sa.cast(least, sa.Text)
        lower: Any = sa.case((least >= lowest, name))
        upper: Any = sa.case((least + length <= highest, sa.cast(least + length, sa.Text)))
    else:
        time = sa.func.timezone("UTC", value) if kind == "timestamptz" else sa.cast(value, sa.TIMESTAMP)
        starts = rows.with_only_columns(sa.func.date_trunc(every, time).label("start")).distinct().subquery()
        end = starts.c.start + sa.literal_column(f"INTERVAL '1 {every}'")  # one of `PERIODS`
        name = sa.func.to_char(starts.c.start, "YYYYMMDD")
        lower, upper = (sa.func.to_char(bound, "YYYY-MM-DD") for bound in (starts.c.start, end))
    partition = sa.literal(f"{divided.table}$", sa.Text).concat(name)
    labelled = {"partition": partition, "lower": lower, "upper": upper}
    return sa.select(starts.c.start, *(column.label(label) for label, column in labelled.items())).subquery("needed")


def ended(connection: Connection, divided: Divided, before: str) -> list[str]:
    """Return the partitions whose ranges end at or before a value, the oldest first.

    Raises: UsageError if the value is none of the column's type.
    """
    kind, r = divided.kind, tables.state_range.c
    upper, bound = (sa.cast(value, sql_type(ColumnType(kind))) for value in (r.upper, sa.literal(before, sa.Text)))
    found = sa.select(r.partition).where(r.state == divided.table, upper <= bound)
    try:
        with connection.begin_nested():
            set_local(connection, {"timezone": "UTC"})
            return list(connection.scalars(found.order_by(upper)))
    except DataError as error:
        raise UsageError(
            f"{before!r} is no value of column {divided.ranges.column} of state {divided.table}: its type is {kind}."
        ) from error


def newest_txid(connection: Connection, partition: str) -> int:
    """Return the last txid that has a row in a partition; 0 if it has none."""
    rows = sa.table(partition, sa.column("txid"), schema="state")
    return connection.scalar(sa.select(sa.func.max(rows.c.txid))) or 0


def remove_rows(connection: Connection, partition: str, txids: tuple[int, int], most: int) -> tuple[int, int]:
    """Delete the first rows of these txids from one partition, at most so many; return their number and last txid."""
    set_local(connection, {"enable_sort": "off"})  # in the order of the index: of a new table, Postgres knows no sizes
    rows = sa.table(partition, sa.column("txid", sa.BigInteger), sa.column("ctid"), schema="state")
    old = rows.alias("old")
    first = sa.select(old.c.ctid).where(old.c.txid.between(*txids)).order_by(old.c.txid).limit(most)
    delete = sa.delete(rows).where(rows.c.ctid == sa.any_(sa.func.array(first.scalar_subquery())))
    removed = delete.returning(rows.c.txid).cte("removed")
    count, last = connection.execute(sa.select(sa.func.count(), sa.func.max(removed.c.txid))).one()
    return count, last or 0


class PartitionsHeld(Exception):
    """Other transactions hold partitions that are to be removed; its text says which."""


def lock(connection: Connection, names: Sequence[str]) -> None:
    """Lock a table in schema state, and some of its partitions, against readers.

    The table is the first: readers lock it first, too.

    Raises: PartitionsHeld if some hold one for too long.
    """
    listed = ", ".join(f"ONLY {in_state(name)}" for name in names)
    try:
        with connection.begin_nested():
            set_local(connection, {"lock_timeout": LOCK_TIMEOUT})
            ddl(connection, f"LOCK TABLE {listed} IN ACCESS EXCLUSIVE MODE")
    except OperationalError as error:
        if not lock_holders.is_lock_timeout(error.orig):
            raise
        raise PartitionsHeld(lock_holders.of(error.orig, connection.connection.driver_connection)) from error


def drop(connection: Connection, table: str, partition: str) -> None:
    """Drop a partition of a table, and remove the note of it."""
    ddl(connection, f"DROP TABLE {in_state(partition)}")
    forget(connection, table, partition)


def detach(connection: Connection, table: str, partition: str) -> str:
    """Detach a partition, remove the note of it, and return the name that its table gets: a later row may need its own."""
    names = (f"{partition}$kept{number or ''}"[-_LONGEST_NAME:] for number in count())
    kept = next(name for name in names if not connection.scalar(sa.select(sa.func.to_regclass(in_state(name)))))
    ddl(connection, f"ALTER TABLE {in_state(table)} DETACH PARTITION {in_state(partition)}")
    ddl(connection, f"ALTER TABLE {in_state(partition)} RENAME TO {quoted(kept)}")
    forget(connection, table, partition)
    return kept


def forget(connection: Connection, table: str, partition: str) -> None:
    """Remove the note of a partition of a table."""
    r = tables.state_range.c
    connection.execute(sa.delete(tables.state_range).where(r.state == table, r.partition == partition))


def attached(connection: Connection, table: str) -> set[str]:
    """Return the names of the partitions that a table in schema state has."""
    found = _find(connection, table)
    return set(found.parts) if found else set()


def dividing_column(connection: Connection, table: str) -> str | None:
    """Return the column by whose ranges a table in schema state is divided; None if it is not, or is not there."""
    found = _find(connection, table)
    return found.column if found else None


def divided_otherwise(connection: Connection, specs: Sequence[PipelineSpec]) -> list[tuple[StateSpec, str | None]]:
    """Return the states of rows whose tables are not divided as is declared, with the column that divides each now, if any.

    Those are left out whose tables lack a column of the key that they are to have, such as the one that is to divide them.
    """
    differing = []
    for state in (state for spec in specs for state in spec.readable if state.appends):
        if (found := _find(connection, state.name)) is None:
            continue
        column, every = (state.ranges.column, str(state.ranges.every)) if state.ranges else (None, None)
        if column == found.column and (column is None or _length(connection, state) in (None, every)):
            continue
        if {key.name for key in state_table_of(state).primary_key}.issubset(found.columns):
            differing.append((state, found.column))
    return differing


def _find(connection: Connection, table: str) -> _Found | None:
    row = connection.execute(_FOUND, {"table": f"{STATE}.{table}"}).one_or_none()
    return _Found(*row) if row else None


def _length(connection: Connection, state: StateSpec) -> str | None:
    r = tables.state_range.c
    every: str | None = connection.scalar(sa.select(sa.func.max(r.every)).where(r.state == state.name))
    return every
