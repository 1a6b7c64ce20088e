"""The tables of states and of staging, with Tidegate's own columns, triggers and grants, made from declarations.

Schema ``state`` has one typed table per declared state, and one more for what a state records. Schema ``staging`` has one table
per state and attempt, which is dropped some time after its batch has committed. The ledger's tables are in
`tidegate.state_store.ledger.tables`.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, Index, Table
from sqlalchemy.dialects.postgresql import BYTEA

from tidegate.state_store.connections import statement_text, table_locks
from tidegate.state_store.connections.table_locks import STAGING
from tidegate.state_store.declarations.column_spec import (
    PREVIOUS_TXID,
    SNAPSHOT,
    TXID,
    ColumnType,
    DerivedColumn,
    previous_name,
)
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, Staged, StateSpec
from tidegate.state_store.declarations.window_spec import WINDOW_END

STATE = table_locks.STATE
# Free space on each page lets Postgres keep a new row version beside the old one, without new index entries (a HOT update).
# Frequently updated rows need vacuum long before the default fifth of the table is dead.
STATE_STORAGE = {"fillfactor": 75, "autovacuum_vacuum_scale_factor": 0.02, "autovacuum_vacuum_cost_limit": 2000}

# The database itself refuses a second writer of a state table (I15 in docs/protocol.md): the trigger's function compares the
# transaction's setting tidegate.writer with the pipeline that owns the table.
SINGLE_WRITER = (
    "CREATE OR REPLACE TRIGGER single_writer BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {table} "
    "FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer()"
)
ALWAYS = "ALTER TABLE {table} ENABLE ALWAYS TRIGGER single_writer"  # also in sessions whose session_replication_role is replica
# The role of Spark's tasks. It reads the tables by which other pipelines follow a state: appended rows, changes, final windows.
# `registration.grant_queried` adds the states that transforms read.
STAGER = "tidegate_stager"
GRANT_SELECT_TO_STAGER = f"GRANT SELECT ON {{table}} TO {STAGER}"
# To make one of several sessions, a commit deletes their rows and writes one. It also deletes the windows that are not kept.
GRANT_DELETE = "GRANT DELETE ON {table} TO tidegate"
_TYPES: dict[str, Any] = {
    "text": sa.Text(collation="C"),
    "boolean": sa.Boolean(),
    "integer": sa.Integer(),
    "bigint": sa.BigInteger(),
    "date": sa.Date(),
    "timestamptz": sa.TIMESTAMP(timezone=True),
    "timestamp": sa.TIMESTAMP(),
    "uuid": sa.Uuid(),
    "bytea": BYTEA(),
}
DERIVED_PRECISION = 76
_NAMING = {"ck": "ck_%(table_name)s_%(constraint_name)s"}  # all other constraints have names of their own


class StagedBatch(NamedTuple):
    """The partials of one batch for a state: its staging table, the number of sealed rows, and their query."""

    stage: Table
    rows: int
    partials: sa.Select[Any]


def metadata_of(specs: tuple[PipelineSpec, ...]) -> sa.MetaData:
    """Return the state tables of these pipelines."""
    metadata = sa.MetaData(schema=STATE, naming_convention=_NAMING)
    for spec in specs:
        for state in spec.readable:
            tables_of(state, metadata)
    return metadata


def tables_of(state: StateSpec, metadata: sa.MetaData | None = None) -> list[Table]:
    """Return the tables that commits write for a state: its own, and that of what it records, if it does."""
    recorded = [changes_table_of(state, metadata)] if state.records else []
    return [state_table_of(state, metadata), *recorded]


def state_table_of(state: StateSpec, metadata: sa.MetaData | None = None) -> Table:
    """Return a state's table: key columns, value columns, then the columns of its kind.

    Keys are the primary key; or, where one may be NULL, unique with NULLs equal, so that ON CONFLICT finds the group of NULLs
    too. A global state has one row, which the column `snapshot` ensures. Appended rows are keyed by txid and position, and by
    the column that divides them, if any. An opaque state keeps each value from before the row's txid; `previous_txid` is NULL
    where there was no row. The table of a history has its versions; readers use its view (`readable_of`).
    """
    # No index on a value or on txid: no update could be HOT. Windows that are recorded or removed have one on their end, which
    # no update changes. No CHECK on columns that only commits write: each is evaluated twice per row of a merge.
    keys = [Column(k.name, sql_type(k.type), nullable=k.nullable) for k in state.row_key]
    constraints: list[sa.Constraint] = []
    if not keys:
        keys = [Column(SNAPSHOT, Boolean, nullable=False, server_default=sa.true())]
        constraints.append(CheckConstraint(SNAPSHOT, name=SNAPSHOT))
    values = [Column(v.name, sql_type(v.type), nullable=v.nullable and v.name not in state.required) for v in state.values]
    if any(key.nullable for key in keys):
        constraints.append(sa.UniqueConstraint(*keys, name=f"uq_{state.name}_key", postgresql_nulls_not_distinct=True))
    else:
        divides = [value for value in values if value.name in state.required]  # Postgres wants it in the key of such a table
        constraints.append(sa.PrimaryKeyConstraint(*keys, *divides, name=f"pk_{state.name}"))
    columns = [*keys, *values]
    if state.keeps_previous:
        columns += [Column(previous_name(v.name), sql_type(v.type)) for v in state.values]
        columns.append(Column(PREVIOUS_TXID, BigInteger))
    columns += [_derived_column(derived, state) for derived in state.derived]
    if state.has_txid and not state.appends:
        columns.append(Column("txid", BigInteger, nullable=False, autoincrement=False))
    table = _table(state.table_name, metadata, [*columns, *constraints], _storage(state), after_create(state, state.table_name))
    if state.window and (state.window.emits or state.window.keep is not None):
        Index(f"ix_{state.name}_{WINDOW_END}", table.c[WINDOW_END])
    if state.history:
        sa.event.listen(table, "before_drop", sa.DDL(drop_of_view(STATE, state)))  # type: ignore[no-untyped-call]
    return table


def _storage(state: StateSpec) -> dict[str, Any]:
    if state.ranges:
        return _divided_by(state.ranges.column)
    return {} if state.appends else {"postgresql_with": STATE_STORAGE}  # appended rows are never updated


def _divided_by(column: str) -> dict[str, Any]:
    return {"postgresql_partition_by": f"RANGE ({statement_text.quoted(column)})"}


def drop_of_view(schema: str | None, state: StateSpec) -> str:
    """Return the statement that drops the view of a history, which comes before a change or drop of its table."""
    view = Table(state.name, sa.MetaData(), schema=schema)
    return f"DROP VIEW IF EXISTS {statement_text.DIALECT.identifier_preparer.format_table(view)}"


def readable_of(state: StateSpec) -> Table:
    """Return the table that readers select from, or the view of a history, with the columns that they see."""
    if state.history is None:
        return state_table_of(state)
    columns = (Column(column.name, sql_type(column.type)) for column in state.shown)
    return Table(state.name, sa.MetaData(schema=STATE), *columns)


def changes_table_of(state: StateSpec, metadata: sa.MetaData | None = None) -> Table:
    """Return the table of what a state records: its changes, or its final windows.

    A change has txid and key, the values after the txid, and those before it; `previous_txid` is NULL for a new key. A final
    window has the txid that made it final, key and values. Both have derived values. It is divided by ranges of txids.
    """
    assert state.stream is not None, "only a state that records something has this table"
    name, kept = state.stream
    key = ["txid", *(key.name for key in state.keys)]
    columns = [Column(c.name, sql_type(c.type), nullable=c.nullable) for c in kept]
    unique: sa.Constraint = sa.PrimaryKeyConstraint(*key, name=f"pk_{name}")
    if any(column.nullable for column in state.keys):
        unique = sa.UniqueConstraint(*key, name=f"uq_{name}_key", postgresql_nulls_not_distinct=True)
    parts = [*columns, *(_derived_column(d, state) for d in state.derived), unique]
    return _table(name, metadata, parts, _divided_by(TXID.name), after_create(state, name))


def after_create(state: StateSpec, table: str) -> list[str]:
    """Return the statements that follow the creation of one of a state's tables: trigger and grants.

    `registration.register` grants what may be declared later.
    """
    name = f"{STATE}.{table}"
    is_followed = state.stream is not None and state.stream[0] == table
    joins = state.window is not None and state.window.is_session and table == state.name
    granted = [*([GRANT_SELECT_TO_STAGER] if is_followed else []), *([GRANT_DELETE] if joins else [])]
    return [statement.format(table=name) for statement in (SINGLE_WRITER, *granted)]


def _table(name: str, metadata: sa.MetaData | None, parts: list[Any], storage: dict[str, Any], after: Sequence[str]) -> Table:
    found = sa.MetaData(schema=STATE, naming_convention=_NAMING) if metadata is None else metadata
    table: Table = Table(name, found, *parts, **storage)
    for statement in after:
        sa.event.listen(table, "after_create", sa.DDL(statement))  # type: ignore[no-untyped-call]
    return table


def staging_table_of(staged: Staged, txid: int, attempt_number: int) -> Table:
    """Return the staging table of one attempt, which no other one writes to (I5): staged columns, and the task attempt."""
    # It is logged: a crash of any backend empties UNLOGGED tables without an error.
    return Table(
        f"{staged.name}_{txid}_{attempt_number}",
        sa.MetaData(schema=STAGING),
        *(Column(c.name, sql_type(c.type), nullable=c.nullable) for c in staged.columns),
        Column("task_attempt", BigInteger, nullable=False),
        postgresql_with={"autovacuum_enabled": False},
    )


def _derived_column(derived: DerivedColumn, state: StateSpec) -> Column[Any]:
    made_of = {v.name: sa.column(v.name, sql_type(v.type)) for v in state.values}
    return Column(derived.name, sql_type(derived.type), sa.Computed(derived_from(derived, made_of), persisted=True))


def derived_from(derived: DerivedColumn, values: Mapping[str, sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    """Return the exact expression of a derived value; a cast to its type rounds it."""
    made_of = [values[name] for name in derived.made_of]
    if derived.formula in ("distinct", "quantile"):
        given: Any = (sa.literal_column(f"{Decimal(number):f}") for number in derived.given)
        return getattr(sa.func.tidegate, f"{derived.formula}_of")(*made_of, *given)  # type: ignore[no-any-return]
    total, count = made_of[0], sa.cast(made_of[-1], sa.Numeric)
    assert derived.type.precision_and_scale is not None, "only a numeric is derived"
    digits = derived.type.precision_and_scale[1]

    def divisor(number: Any) -> sa.ColumnElement[Any]:
        # Postgres gives a quotient at least as many decimals as its divisor has.
        return sa.func.nullif(sa.cast(number, sa.Numeric(DERIVED_PRECISION, digits)), 0)

    if derived.formula == "mean":
        formula = total / divisor(count)
    else:
        others = count if derived.formula.endswith("_pop") else count - 1
        squares = made_of[1]
        formula = (count * squares - total * total) / divisor(count * others)
        if derived.formula.startswith("stddev"):
            formula = sa.func.sqrt(formula)
    return formula


def sql_type(declared: ColumnType) -> Any:
    """Return SQLAlchemy's type of a column."""
    if declared.element:
        return sa.ARRAY(sql_type(declared.element))
    numeric = declared.precision_and_scale
    return sa.Numeric(*numeric) if numeric else _TYPES[declared.name]
