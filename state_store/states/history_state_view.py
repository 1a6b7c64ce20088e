"""Histories: the view that says until when each version of a key is valid.

A version is a row of the table: what a key was from some time on. Until when it is valid follows from the key's next version,
which the view looks up by the index of keys. So a late version, a redo and the merge of several batches change no other rows.
The view follows from the state's declaration; `tidegate migrate` creates it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, FromClause, Table
from sqlalchemy.schema import CreateView

from tidegate.state_store.base.errors import DeclarationChanged
from tidegate.state_store.connections import statement_text
from tidegate.state_store.declarations.column_spec import TO_TXID, VALID_TO
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateSpec, Validity
from tidegate.state_store.states import state_tables

# Of columns that may be NULL, so many are looked up by the index; each doubles the number of lookups in the view's text.
MOST_LOOKED_UP = 3

Direction = Callable[[sa.ColumnElement[Any]], sa.ColumnElement[Any]]
# The privileges of views beyond their owner's, as statements that give and take them.
_PRIVILEGES = sa.text("""
    SELECT relname, pg_class.oid, coalesce((
        SELECT jsonb_agg(jsonb_build_object(
            'grant', format('GRANT %s ON state.%I TO %s', privilege_type, relname, named) || given,
            'revoke', format('REVOKE %s ON state.%I FROM %s', privilege_type, relname, named)
        ) ORDER BY ordinality)
        FROM aclexplode(relacl) WITH ORDINALITY
        CROSS JOIN LATERAL (SELECT CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS given) AS how
        CROSS JOIN LATERAL (SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END AS named) AS who
        WHERE grantee <> relowner
    ), '[]')
    FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = 'state' AND relkind = 'v' AND relname = ANY (:names)
""")


def put_view(connection: Connection, state: StateSpec, versions: Table, *, is_changed: bool) -> None:
    """Create the view of a history over its table of versions, or replace it if the declaration has changed.

    It keeps its privileges, and views that people made over it stay: a column that comes is its last one. If one goes, these
    views have to be dropped first, and `privileges_kept` keeps the privileges.

    Raises: DeclarationChanged if there is a table of its name.
    """
    inspector = sa.inspect(connection)
    if state.name in inspector.get_table_names(versions.schema):
        raise DeclarationChanged(
            f"History {state.name} is read by a view of this name, and there is a table {versions.schema}.{state.name}, of an "
            "earlier declaration. Drop it, or give the history another name."
        )
    exists = inspector.has_table(state.name, schema=versions.schema)
    columns = [column["name"] for column in inspector.get_columns(state.name, versions.schema)] if exists else []
    shown = [column.name for column in state.shown]
    if set(columns) - set(shown):
        connection.execute(sa.text(state_tables.drop_of_view(versions.schema, state)))
        columns = []
    elif exists and not is_changed and len(columns) == len(shown):
        return
    connection.execute(_view(state, versions, [*columns, *(name for name in shown if name not in columns)]))


@contextmanager
def privileges_kept(connection: Connection, specs: Sequence[PipelineSpec]) -> Iterator[None]:
    """Give the views of histories that are made again within the block the privileges that they had before."""
    names = [state.name for spec in specs for state in spec.readable if state.history]
    before = {name: (oid, grants) for name, oid, grants in connection.execute(_PRIVILEGES, {"names": names})}
    yield
    for name, oid, grants in connection.execute(_PRIVILEGES, {"names": list(before)}).all():
        if oid != before[name][0] and grants != before[name][1]:
            for statement in (*(grant["revoke"] for grant in grants), *(grant["grant"] for grant in before[name][1])):
                statement_text.ddl(connection, statement)


def _view(state: StateSpec, versions: Table, names: Sequence[str]) -> CreateView:
    """Return the view of a history with columns of these names, which are all that are shown, in this order."""
    assert state.history is not None, "only a history has a view"
    of = _Neighbours(state, state.history)
    version = versions.alias("version")
    later, earlier = versions.alias("later"), versions.alias("earlier")
    ends = [later.c[state.history.order[0]].label(VALID_TO), *([later.c.txid.label(TO_TXID)] if state.has_txid else [])]
    after = sa.select(*ends).where(of.place(later) > of.place(version))
    conditions = []
    if state.history.deleted:
        conditions.append(version.c[state.history.deleted].is_not(sa.true()))
    if state.history.collapses:
        # A version ends at the next one that differs; one that does not differ from the version before is not shown.
        after = after.where(of.values(later).is_distinct_from(of.values(version)))
        before = sa.select(of.values(earlier).is_not_distinct_from(of.values(version)).label("is_same"))
        before = before.where(of.place(earlier) < of.place(version))
        nearest = of.nearest(before, earlier, version, lambda column: column.desc())
        conditions.append(nearest.scalar_subquery().is_not(sa.true()))
    end = of.nearest(after, later, version, lambda column: column).lateral("next_version")
    ends_by = {column.name for column in state.validity}
    shown = [(end if name in ends_by else version).c[name] for name in names]
    query = sa.select(*shown).select_from(version.outerjoin(end, sa.true())).where(*conditions)
    return CreateView(query, state.name, schema=versions.schema, or_replace=True)


class _Neighbours:
    """The conditions that relate two versions of a key."""

    def __init__(self, state: StateSpec, history: Validity) -> None:
        keys = [key for key in state.keys if key.name not in history.order]
        self._keys = [key.name for key in keys]
        self._has_nulls = any(key.nullable for key in keys)
        self._values = [value.name for value in state.values]
        self._history = history

    def nearest(
        self, versions: sa.Select[Any], one: FromClause, other: FromClause, direction: Direction
    ) -> sa.Select[Any] | sa.CompoundSelect[Any]:
        """Return the first of the versions `one` of the key of `other`, in ascending or descending order.

        A lookup by IS NULL uses an index, which IS NOT DISTINCT FROM does not. So where keys may be NULL, there is a lookup for
        each way in which they can be, of which at most one runs: the others see by `other` alone that they find nothing.
        """
        order = [direction(column) for column in self.order(one)]
        first = versions.limit(sa.literal_column("1"))
        if not self._has_nulls:
            return first.where(*(one.c[name] == other.c[name] for name in self._keys)).order_by(*order)
        # In the order of the whole index: Postgres does not see that a column that is NULL does not change the order.
        whole = [*(direction(one.c[name]) for name in self._keys), *order]
        same = [(one.c[name] == other.c[name], sa.and_(one.c[name].is_(None), other.c[name].is_(None))) for name in self._keys]
        compared = [sa.or_(*either) for either in same[MOST_LOOKED_UP:]]
        ways = product(*same[:MOST_LOOKED_UP])
        return sa.union_all(*(first.where(*way, *compared).order_by(*whole).correlate(other) for way in ways))

    def order(self, version: FromClause) -> list[sa.ColumnElement[Any]]:
        return [version.c[name] for name in self._history.order]

    def place(self, version: FromClause) -> sa.ColumnElement[Any]:
        return sa.tuple_(*self.order(version))

    def values(self, version: FromClause) -> sa.ColumnElement[Any]:
        """Return what may differ, as a record: NULL equals NULL, and `deleted` is true or false."""
        deleted = self._history.deleted
        return sa.func.row(*(version.c[n].is_(sa.true()) if n == deleted else version.c[n] for n in self._values))
