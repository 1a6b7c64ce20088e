"""Combiners: how values become one, in SQL, for each kind of merge.

    merged     the kept value and the partial of one batch, in an upsert
    combined   the partials of several batches, in a query that groups by key

Both give the same, in any order and grouping of the partials (I16). A value of no rows is NULL, or for sums and arrays 0 or {},
and changes nothing.
"""

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, aggregate_order_by

from state_store.declaration import ARRAY_MERGES, ValueColumn

Columns = sa.ColumnCollection[str, Any]
# Postgres' operators, and its aggregates of the same meaning.
_BITS = {"bit_and": "&", "bit_or": "|", "bit_xor": "#"}


def merged(value: ValueColumn, kept: Columns, partial: Columns) -> sa.ColumnElement[Any]:
    """Return the value of a key after a batch, from its row and the partial of the batch."""
    ours, theirs = kept[value.name], partial[value.name]
    found: sa.ColumnElement[Any]
    merge = value.merge
    if merge == "sum":
        found = ours + theirs
    elif merge in ("min", "max"):
        found = sa.func.least(ours, theirs) if merge == "min" else sa.func.greatest(ours, theirs)
    elif merge in _BITS:
        found = sa.func.coalesce(ours.bool_op(_BITS[merge])(theirs), ours, theirs)
    elif merge in ARRAY_MERGES:  # by functions and aggregates of the ledger (schema.sql)
        found = getattr(sa.func.tidegate, f"{merge}_of_two")(ours, theirs, *_limit(value))
    else:
        is_before = {"first": sa.func.record_lt, "last": sa.func.record_gt}[merge](_place(value, partial), _place(value, kept))
        found = sa.case((is_before, theirs), else_=ours)
    return found


def combined(value: ValueColumn, partials: Columns) -> sa.ColumnElement[Any]:
    """Return the combined value of a key over several batches, in the type of the column.

    A sum is NULL, which no state accepts, if it came near the limit of its type on the way.
    """
    column, merge = partials[value.name], value.merge
    if merge == "sum":
        # The sum of all absolute values: then no partial sum in any order is larger.
        sizes = _sum(sa.func.abs(column, type_=column.type))
        return sa.case((sizes <= half_of(column.type), sa.cast(_sum(column), column.type)))
    if merge in ARRAY_MERGES:
        joined: sa.ColumnElement[Any] = getattr(sa.func.tidegate, f"{merge}_of_all")(column, *_limit(value), type_=column.type)
        return joined
    if merge in ("first", "last"):
        order = [partials[name] for name in value.order]
        return _first(column, *(o.desc().nulls_last() if merge == "last" else o.asc().nulls_last() for o in order))
    if isinstance(column.type, sa.Uuid | BYTEA):  # Postgres 15 has no min and max for these
        return _first(column, column.desc().nulls_last() if merge == "max" else column.asc())
    name: str = merge
    if isinstance(column.type, sa.Boolean):
        name = {"min": "bool_and", "max": "bool_or"}[merge]
    return sa.cast(getattr(sa.func, name)(column), column.type)


def near_the_limit(value: ValueColumn, changed: sa.ColumnElement[Any], column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return a merged sum of several batches, or NULL, which no state accepts, if it comes near the limit of its type."""
    half = half_of(column.type)
    return sa.case((changed.between(-half, half), changed)) if value.merge == "sum" else changed


def half_of(kind: Any) -> sa.ColumnElement[Any]:
    """Return half of the largest value of a number's type.

    If neither the absolute values of a key's partials add up to more than that, nor the merged value is more, then the partials
    would have fitted one by one too. So whether a value leaves its column's range does not depend on the grouping.
    """
    if isinstance(kind, sa.Numeric):
        limit = Decimal(10) ** ((kind.precision or 0) - (kind.scale or 0)) / 2
    else:
        limit = Decimal(2 ** (62 if isinstance(kind, sa.BigInteger) else 30) - 1)
    return sa.literal_column(f"{limit:f}")


def _sum(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.tidegate.add_up(column, type_=column.type) if isinstance(column.type, sa.BigInteger) else sa.func.sum(column)


def _first(column: sa.ColumnElement[Any], *order: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    found = sa.func.array_agg(aggregate_order_by(column, *order), type_=ARRAY(column.type))
    return sa.cast(found[1], column.type)


def _place(value: ValueColumn, row: Columns) -> sa.ColumnElement[Any]:
    """Return the place of a row in the order that decides about the first or last value; no row comes after all others.

    Compared as a record, because a comparison of rows is NULL if it meets a NULL.
    """
    # A boolean before each column, by which a NULL loses.
    is_null: Callable[[Any], Any] = (lambda c: c.is_(None)) if value.merge == "first" else (lambda c: c.is_not(None))
    parts: Iterable[Any] = (part for name in value.order for part in (is_null(row[name]), row[name]))
    return sa.func.row(*parts)


def _limit(value: ValueColumn) -> list[sa.ColumnElement[int]]:
    return [] if value.most is None else [sa.literal_column(f"{value.most}", sa.Integer)]
