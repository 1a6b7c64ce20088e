"""Combine the partials of several batches, in parallel Postgres processes where there are many rows.

Postgres runs a query in parallel if its rows go into a new table, but never if they go into an upsert. By default it gives each
process some of the rows, and one process then combines the results of all, key by key. Here each process gets some of the keys,
with all their rows: that is less work, and takes less memory at a time. Rows that tasks have staged in key order are merged in
that order; all others are grouped by hash.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY, distinct_on
from sqlalchemy.schema import DropTable

from tidegate.state_store.commit import merge_expressions
from tidegate.state_store.connections.local_settings import set_local
from tidegate.state_store.connections.table_locks import STAGING
from tidegate.state_store.declarations.pipeline_spec import StateSpec, staged_in_order_of
from tidegate.state_store.states import state_tables
from tidegate.state_store.states.state_tables import StagedBatch

# From this many rows of several batches on, more than one process adds them up.
SHARED_ROWS = 1_000_000
# The size of the sample of the largest batch that decides how to divide the keys.
SAMPLED_ROWS = 10_000
ATTEMPT = 0  # in the name of the table that takes the sums: attempts are numbered from 1
# Memory of one hash table, which may take twice that, or of an upsert's sort: enough for two million keys of two sums.
MEMORY_MIB = 256
# Memory of all sorts together: enough for ten batches of a million keys. Larger ones are sorted in files, which takes longer.
SORTING_MEMORY_MIB = 1024
Columns = sa.ColumnCollection[str, Any]
Part = Callable[[Columns], sa.ColumnElement[bool]]  # the condition for a process' share of the keys
_WORKERS = "max_parallel_workers_per_gather"
_ANALYZE = sa.DDL("ANALYZE %(fullname)s")  # type: ignore[no-untyped-call]


class Combined(NamedTuple):
    """The combined partials of several batches: a query of the state's columns and the last txid, and the number of keys."""

    sums: sa.Select[Any]
    keys: int


@contextmanager
def combined(connection: Connection, state: StateSpec, staged: Sequence[StagedBatch], txid: int) -> Iterator[Combined]:
    """Yield the combined partials of several batches, from `txid` on.

    Many rows are combined into a table that this transaction creates and drops: nothing is left if it fails. A sum that could
    come near the limit of its type is NULL, which no state accepts.
    """
    set_local(connection, {"work_mem": f"{MEMORY_MIB}MB"})
    if sum(batch.rows for batch in staged) < SHARED_ROWS:
        rows = _rows(staged)
        yield Combined(_sums(state, rows), _count_keys(connection, state, rows))
        return
    is_in_order = keeps_whole_rows(state) or (len(state.keys) == 1 and staged_in_order_of(state) is not None)
    rows = _rows(staged, in_order_of=state if is_in_order else None)
    parts, again = _parts(connection, state, staged), _rows(staged, name="again")
    sums = [_sums(state, rows, part, again) for part in parts]
    # Only within a FROM does Postgres give each of these queries its own process.
    query = sa.select(sa.union_all(*sums).subquery("sums")) if parts else _sums(state, rows)
    added = sa.CreateTableAs(query, state_tables.staging_table_of(state, txid, ATTEMPT).name, schema=STAGING)
    with _planned_for(connection, state, staged, len(parts), in_order=is_in_order):
        keys: int = connection.execute(added).rowcount
    yield Combined(sa.select(added.table), keys)
    connection.execute(DropTable(added.table))


def _rows(staged: Sequence[StagedBatch], *, in_order_of: StateSpec | None = None, name: str = "partials") -> sa.Subquery:
    partials = [batch.partials for batch in staged]
    if in_order_of is not None:
        partials = [rows.order_by(*_order(in_order_of, rows.selected_columns)) for rows in partials]
    return sa.union_all(*partials).subquery(name)


def _order(state: StateSpec, columns: Columns) -> list[sa.ColumnElement[Any]]:
    """Return the order by key; where whole rows are kept, it puts the row of each key that is kept first."""
    keys: list[sa.ColumnElement[Any]] = [columns[key.name] for key in state.keys]
    return [*keys, *merge_expressions.in_order(state.values[0], columns)] if keeps_whole_rows(state) else keys


def keeps_whole_rows(state: StateSpec) -> bool:
    """Return whether all values of a key come from one row, the first or last in an order."""
    return bool(state.keys and state.values[0].order) and len({(value.merge, value.order) for value in state.values}) == 1


def _count_keys(connection: Connection, state: StateSpec, rows: sa.Subquery) -> int:
    if not state.keys:
        return 1
    different = sa.select(*(rows.c[key.name] for key in state.keys)).distinct().subquery()
    return connection.execute(sa.select(sa.func.count()).select_from(different)).scalar_one()


def _sums(state: StateSpec, rows: sa.Subquery, part: Part | None = None, again: sa.Subquery | None = None) -> sa.Select[Any]:
    """Return the combined partials of each key, or of those in a part; `again` has the same rows, for a second pass."""
    keys = [rows.c[key.name] for key in state.keys]
    if keeps_whole_rows(state):
        return _whole_rows(state, rows, part, again)
    values = [merge_expressions.combined(value, rows.c, state.derived).label(value.name) for value in state.values]
    stamp = [_last_txid(rows)] if state.has_txid else []
    return sa.select(*keys, *values, *stamp).where(*_in(part, rows)).group_by(*keys)


def _whole_rows(state: StateSpec, rows: sa.Subquery, part: Part | None, again: sa.Subquery | None) -> sa.Select[Any]:
    # Postgres runs no window function in parallel. So parts find the txids by a second pass and a join, unless a key may be
    # NULL: such keys would be joined row by row. The second pass sorts nothing: its groups are few bytes each, and hashed.
    keys = [rows.c[key.name] for key in state.keys]
    kept_rows = sa.select(*keys, *(rows.c[value.name] for value in state.values)).where(*_in(part, rows))
    kept_rows = kept_rows.order_by(*_order(state, rows.c)).ext(distinct_on(*keys))
    if not state.has_txid:
        return kept_rows
    if part is None or again is None or any(key.nullable for key in state.keys):
        return kept_rows.add_columns(sa.func.max(rows.c.txid).over(partition_by=keys).label("txid"))
    keys = [again.c[key.name] for key in state.keys]
    first = kept_rows.subquery("first")
    last = sa.select(*keys, _last_txid(again)).where(part(again.c)).group_by(*keys).subquery("last")
    same = sa.and_(*(first.c[key.name] == last.c[key.name] for key in state.keys))
    return sa.select(*first.c, last.c.txid).join_from(first, last, same)


def _last_txid(rows: sa.FromClause) -> sa.ColumnElement[Any]:
    return sa.func.tidegate.latest(rows.c.txid, type_=sa.BigInteger).label("txid")


def _in(part: Part | None, rows: sa.Subquery) -> list[sa.ColumnElement[bool]]:
    return [] if part is None else [part(rows.c)]


def _parts(connection: Connection, state: StateSpec, staged: Sequence[StagedBatch]) -> list[Part]:
    """Return a condition per process, so that every row meets exactly one; none if only one process can be used.

    They divide the key column with the most different values in a sample, at the sample's quantiles.
    """
    processes = 1 + int(_setting(connection, _WORKERS))
    # Without a txid, so without `tidegate.latest`, Postgres may share each query among all processes.
    if processes == 1 or not state.keys or not state.has_txid:
        return []
    largest = max(staged, key=lambda batch: batch.rows)
    sample = sa.tablesample(largest.stage, sa.func.system(min(100, 100 * SAMPLED_ROWS / largest.rows)))
    at = sa.cast([number / processes for number in range(1, processes)], ARRAY(sa.Double))
    divisions = {}
    for key in state.keys:
        column = sample.c[key.name]
        # As text, because Postgres knows dates and times that Python does not.
        quantiles = sa.cast(sa.func.percentile_disc(at).within_group(column), ARRAY(sa.Text))
        values, bounds = connection.execute(sa.select(sa.func.count(column.distinct()), quantiles)).one()
        divisions[key.name] = (values, list(dict.fromkeys(bounds or ())))
    name, (_, bounds) = max(divisions.items(), key=lambda division: division[1][0])
    if not bounds:
        return []
    return [partial(_is_between, name, *ends) for ends in pairwise([None, *bounds, None])]


def _is_between(name: str, least: str | None, end: str | None, columns: Columns) -> sa.ColumnElement[bool]:
    """Return whether a key column is at least `least` and below `end`; NULL counts as above all."""
    column = columns[name]
    # "Is true" and "is not true", because a NULL key is neither below nor above.
    below = [sa.true() if bound is None else (column < _constant(column, bound)).is_(sa.true()) for bound in (least, end)]
    return below[1] if least is None else sa.and_(sa.not_(below[0]), below[1])


def _constant(column: sa.ColumnElement[Any], value: str) -> sa.ColumnElement[Any]:
    constant = sa.literal(value, sa.Text)
    return constant if isinstance(column.type, sa.Text) else sa.cast(constant, column.type)


@contextmanager
def _planned_for(
    connection: Connection, state: StateSpec, staged: Sequence[StagedBatch], processes: int, *, in_order: bool
) -> Iterator[None]:
    """Make Postgres plan for this many processes, and merge rows that are in key order."""
    # By itself it would not count the leading process, has no statistics of new tables, and cannot know their rows' order.
    # It also takes groups of unknown number for 200, and would join them row by row.
    settings = {"enable_nestloop": "off"}
    if processes:
        set_local(connection, {"default_statistics_target": "1"})  # a sample of a few hundred rows, which is quick
        for batch in staged:
            connection.execute(_ANALYZE.against(batch.stage))
        settings[_WORKERS] = str(processes)
    if in_order:
        settings["enable_hashagg"] = "on" if keeps_whole_rows(state) else "off"
        settings["work_mem"] = f"{SORTING_MEMORY_MIB * 1024 // (len(staged) * max(1, processes))}kB"
    before = {name: _setting(connection, name) for name in settings}
    set_local(connection, settings)
    yield
    set_local(connection, before)


def _setting(connection: Connection, name: str) -> str:
    value: str = connection.execute(sa.select(sa.func.current_setting(name))).scalar_one()
    return value
