"""Range partitions: the table of appended rows, split into one table per day, week, month, year or so many numbers of a column.

Which ranges there will be is not known when the table is made: the commit that brings the first row of a range has its
partition made, in its own transaction. The ledger notes each, so that one that was detached by hand is missed, and `tidegate
prune` removes old ones as a whole. Their names are the table's, a $ and the start of the range.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any

import sqlalchemy as sa
from psycopg2.errors import DuplicateTable, LockNotAvailable
from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DataError, OperationalError, ProgrammingError

from tidegate.state_store.base.errors import BadKey, Overflow, SchemaOutOfDate, UsageError
from tidegate.state_store.connections.database import set_local
from tidegate.state_store.declarations.pipeline_spec import Ranges, StateSpec
from tidegate.state_store.ledger import tables

# A transaction makes or removes no more partitions: each takes some five entries of Postgres' table of locks. More new ranges
# in one batch are a mistake rather than a history.
MOST_AT_ONCE = 400
# While a removal waits for readers, commits and new readers wait for it. So it gives up soon, and is tried again; not before
# Postgres ends an autovacuum that is in the way, after its deadlock_timeout of usually a second.
LOCK_TIMEOUT = "1200ms"
_LEAST = {"integer": -(2**31), "bigint": -(2**63)}
_SHOWN = 5
_LONGEST_NAME = 63  # of Postgres
_SQL_TYPES: dict[str, Any] = {
    "integer": sa.Integer(),
    "bigint": sa.BigInteger(),
    "date": sa.Date(),
    "timestamp": sa.TIMESTAMP(),
    "timestamptz": sa.TIMESTAMP(timezone=True),
}
_PARTITIONS_SET_ASIDE = """DO $do$
DECLARE
    part regclass;
BEGIN
    FOR part IN SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = '{table}'::regclass
    LOOP
        EXECUTE format('ALTER TABLE %s RENAME TO %I', part, 'before$' || part::oid);
    END LOOP;
END
$do$"""
# For rows that are there already, where the migration runs, as databases differ.
_PARTITIONS_MADE = """DO $do$
DECLARE
    new record;
BEGIN
    IF EXISTS ({without}) THEN
        RAISE 'state {state} has rows without {column}, by which they are to be divided: delete these, or give them a value';
    END IF;
    PERFORM set_config('tidegate.writer', {owner}, true);
    FOR new IN {needed}
    LOOP
        PERFORM tidegate.add_range('{state}', new.partition, new.lower, new.upper, '{every}');
    END LOOP;
    PERFORM set_config('tidegate.writer', '', true);
END
$do$"""


def partitioned_by(ranges: Ranges) -> str:
    """Return the SQL of what the table is partitioned by."""
    return f"RANGE ({postgresql.dialect().identifier_preparer.quote(ranges.column)})"  # type: ignore[no-untyped-call]


def add_missing(connection: Connection, state: StateSpec, rows: sa.Select[Any]) -> None:
    """Make the partitions that these rows of a batch need and the state does not have.

    Raises: BadKey for a row without a value; Overflow for rows in too many new ranges; SchemaOutOfDate if the table is divided
    by other ranges, or a table that was detached by hand is in the way.
    """
    assert state.ranges is not None, "only a state with ranges is divided by them"
    needed = _needed(state, rows)
    r = tables.state_range.c
    is_there = sa.exists().where(r.state == state.name, r.partition == needed.c.partition)
    missing = connection.execute(
        sa.select(needed).where(sa.not_(is_there)).order_by(needed.c.start).limit(MOST_AT_ONCE + 1)
    ).all()
    if any(new.partition is None for new in missing):
        raise BadKey(
            f"State {state.name}: column {state.ranges.column}, by which its rows are divided, is NULL or infinite in a row."
        )
    if len(missing) > MOST_AT_ONCE:
        raise Overflow(
            f"State {state.name}: by column {state.ranges.column}, the batch has rows in more than {MOST_AT_ONCE} new "
            f"ranges, from {missing[0].lower} to {missing[-1].lower} and on. If these are no mistakes, use smaller batches, or "
            "longer ranges."
        )
    if missing:
        _check_every(connection, state, state.ranges)
    for new in missing:
        bounds = (new.partition, new.lower, new.upper, str(state.ranges.every))
        add(connection, sa.select(sa.func.tidegate.add_range(state.name, *bounds)), state, new.partition)


def add(connection: Connection, statement: sa.Select[Any], state: StateSpec, partition: str) -> Any:
    """Have a function of the owner make a partition, and return its result.

    Raises: SchemaOutOfDate if a table that was detached by hand is in the way.
    """
    try:
        return connection.scalar(statement)
    except ProgrammingError as error:
        if not isinstance(error.orig, DuplicateTable):
            raise
        raise SchemaOutOfDate(
            f"State {state.name} gets a partition again that was detached: table state.{partition} is in the way. Rename it, "
            "move it to another schema, or drop it."
        ) from error


def _check_every(connection: Connection, state: StateSpec, ranges: Ranges) -> None:
    """Refuse to add to ranges of another length, which a migration has made since this process read the declaration.

    Raises: SchemaOutOfDate.
    """
    r = tables.state_range.c
    other = connection.scalar(sa.select(r.every).where(r.state == state.name, r.every != str(ranges.every)).limit(1))
    if other is not None:
        raise SchemaOutOfDate(
            f"State {state.name} is divided by ranges of {other}, and this process would add one of {ranges.every}. If the "
            "declaration has changed, run: tidegate migrate --new; if that was done since this process began, restart the "
            "stack: tidegate down && tidegate up"
        )


def _needed(state: StateSpec, rows: sa.Select[Any]) -> sa.Subquery:
    """Return the ranges of rows: where each starts, its partition's name, and its bounds, without one where it is open."""
    assert state.ranges is not None, "only a state with ranges is divided by them"
    value, every = rows.selected_columns[state.ranges.column], state.ranges.every
    kind = _kind(state)
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
        name = _written(starts.c.start, "YYYYMMDD")
        lower, upper = (_written(bound, "YYYY-MM-DD") for bound in (starts.c.start, end))
    partition = sa.literal(f"{state.table_name}$", sa.Text).concat(name)
    labelled = {"partition": partition, "lower": lower, "upper": upper}
    return sa.select(starts.c.start, *(column.label(label) for label, column in labelled.items())).subquery("needed")


def _written(time: sa.ColumnElement[Any], pattern: str) -> sa.ColumnElement[str]:
    """Return a time as text; before the year 1, years are counted back. An infinite one has none."""
    before_christ = time < sa.literal_column("TIMESTAMP '0001-01-01'")
    return sa.func.to_char(time, sa.case((before_christ, f"{pattern} BC"), else_=pattern))


def ended(connection: Connection, state: StateSpec, before: str) -> list[str]:
    """Return the partitions whose ranges end at or before a value, the oldest first.

    Raises: UsageError if the value is none of the column's type.
    """
    assert state.ranges is not None, "only a state with ranges is divided by them"
    kind, r = _kind(state), tables.state_range.c
    upper = sa.cast(r.upper, _SQL_TYPES[kind])
    found = sa.select(r.partition).where(r.state == state.name, upper <= sa.cast(sa.literal(before, sa.Text), _SQL_TYPES[kind]))
    try:
        with connection.begin_nested():
            set_local(connection, {"timezone": "UTC"})
            return list(connection.scalars(found.order_by(upper)))
    except DataError as error:
        raise UsageError(
            f"{before!r} is no value of column {state.ranges.column} of state {state.name}: its type is {kind}."
        ) from error


def newest_txid(connection: Connection, partition: str) -> int:
    """Return the last txid that has a row in a partition, without those that inherit from it; 0 if it has none."""
    rows = sa.table(partition, sa.column("txid"), schema="state")
    return connection.scalar(sa.select(sa.func.max(rows.c.txid)).with_hint(rows, "ONLY", "postgresql")) or 0


def lock(connection: Connection, names: Sequence[str]) -> bool:
    """Lock tables in schema state, without what inherits from them, against readers; False if some hold one for too long.

    The first one is that by which readers read the others: they lock it first, too.
    """
    listed = ", ".join(f"ONLY {_table(name)}" for name in names)
    try:
        with connection.begin_nested():
            set_local(connection, {"lock_timeout": LOCK_TIMEOUT})
            connection.execute(sa.DDL(f"LOCK TABLE {listed} IN ACCESS EXCLUSIVE MODE"))  # type: ignore[no-untyped-call]
    except OperationalError as error:
        if not isinstance(error.orig, LockNotAvailable):
            raise
        return False
    return True


def drop(connection: Connection, table: str, partition: str) -> None:
    """Drop a partition of a table, and remove the note of it."""
    connection.execute(sa.DDL(f"DROP TABLE {_table(partition)}"))  # type: ignore[no-untyped-call]
    forget(connection, table, partition)


def detach(connection: Connection, state: StateSpec, partition: str) -> str:
    """Detach a partition, remove the note of it, and return the name that its table gets: a later row may need its own."""
    names = (f"{partition}$kept{number or ''}"[-_LONGEST_NAME:] for number in count())
    kept = next(name for name in names if not connection.scalar(sa.select(sa.func.to_regclass(_table(name)))))
    detached = f"ALTER TABLE state.{state.table_name} DETACH PARTITION {_table(partition)}"
    for step in (detached, f"ALTER TABLE {_table(partition)} RENAME TO {_quoted(kept)}"):
        connection.execute(sa.DDL(step))  # type: ignore[no-untyped-call]
    forget(connection, state.name, partition)
    return kept


def forget(connection: Connection, table: str, partition: str) -> None:
    """Remove the note of a partition of a table."""
    r = tables.state_range.c
    connection.execute(sa.delete(tables.state_range).where(r.state == table, r.partition == partition))


def _table(name: str) -> str:
    return f"state.{_quoted(name)}"


def _quoted(name: str) -> str:
    return postgresql.dialect().identifier_preparer.quote(name)  # type: ignore[no-untyped-call]


def _kind(state: StateSpec) -> str:
    """Return the type of the column that divides a state."""
    assert state.ranges is not None, "only a state with ranges is divided by them"
    column = state.ranges.column
    return next(value.type.name for value in state.values if value.name == column)


def length(connection: Connection, state: StateSpec, column: str) -> str | int:
    """Return the length of the ranges of a table that is divided by a column: the declared one, if there are none yet."""
    r = tables.state_range.c
    noted = connection.scalar(sa.select(sa.func.max(r.every)).where(r.state == state.name))
    if noted is not None:
        return int(noted) if noted.isdecimal() else str(noted)
    if state.ranges and state.ranges.column == column:
        return state.ranges.every
    kind = next((value.type.name for value in state.values if value.name == column), "")
    return 1_000_000 if kind in _LEAST else "month"


def why_not_whole(table: str, missing: Collection[str], *, inherit: bool = False) -> SchemaOutOfDate | None:
    """Return the error for a table that lacks these partitions, which `inherit` from it or not; None if it lacks none."""
    if not missing:
        return None
    shown = ", ".join(sorted(missing)[:_SHOWN]) + (" ..." if len(missing) > _SHOWN else "")
    attach = f"ALTER TABLE ... INHERIT {table}" if inherit else f"ALTER TABLE {table} ATTACH PARTITION ..."
    bounds = "" if inherit else ", with the bounds that tidegate.state_range has for it"
    return SchemaOutOfDate(
        f"Table {table} lacks {len(missing)} of the partitions that commits have made, with all their rows: {shown}. What was "
        f"detached has to be attached again{bounds} ({attach}). If it is to be gone: tidegate prune. Nothing was changed."
    )


def set_aside(state: StateSpec, table: Table) -> Iterator[str]:
    """Yield the statements that make room for the partitions of a table of the same name: those of this one are renamed."""
    yield _one_line(_PARTITIONS_SET_ASIDE.format(table=table.fullname))
    yield _literal(sa.delete(tables.state_range).where(tables.state_range.c.state == state.name))


def made_for(state: StateSpec, before: sa.TableClause) -> Iterator[str]:
    """Yield the statement that makes the partitions for the rows of a table that was set aside, where the migration runs.

    It fails if a row has no value in the column that divides them.
    """
    assert state.ranges is not None, "only a state with ranges is divided by them"
    column = before.c[state.ranges.column]
    needed = _needed(state, sa.select(column).where(column.is_not(None)))
    without: sa.Select[Any] = sa.select(sa.literal_column("1")).select_from(before).where(column.is_(None))
    t = tables.state_table.c
    statement = _PARTITIONS_MADE.format(
        without=_literal(without),
        owner=_literal(sa.select(t.pipeline).where(t.state == state.name).scalar_subquery()),
        needed=_literal(sa.select(needed).order_by(needed.c.start)),
        state=state.name,
        column=state.ranges.column,
        every=state.ranges.every,
    )
    yield _one_line(statement)


def _literal(statement: Any) -> str:
    return str(statement.compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True}))  # type: ignore[no-untyped-call]


def _one_line(statement: str) -> str:
    """Return a statement as a migration has it."""
    return " ".join(statement.split())
