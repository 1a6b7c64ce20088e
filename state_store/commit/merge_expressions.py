"""Combiners: how values become one, in SQL, for each kind of merge.

    merged     the kept value and the partial of one batch, in an upsert
    combined   the partials of several batches, in a query that groups by key

Both give the same result, in any order and grouping of the partials
(I16 in docs/protocol.md). The value of no rows is NULL, or for sums and arrays 0 or {}, and changes nothing.
"""

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, aggregate_order_by

from tidegate.state_store.base.errors import DeclarationInvalid
from tidegate.state_store.declarations.column_spec import ARRAY_MERGES, DerivedColumn, ValueColumn

Columns = sa.ColumnCollection[str, Any]
MOST_IN_RECORD = 1_000  # Postgres compares records of up to 1,664 values
# Postgres' operators, and its aggregates of the same meaning.
_BITS = {"bit_and": "&", "bit_or": "|", "bit_xor": "#"}


def merged(value: ValueColumn, kept: Columns, partial: Columns) -> sa.ColumnElement[Any]:
    """Return the value of a key after a batch, from its row and the partial of the batch."""
    ours, theirs = kept[value.name], partial[value.name]
    result: sa.ColumnElement[Any]
    merge = value.merge
    if merge == "sum":
        result = ours + theirs
    elif merge in ("min", "max"):
        result = sa.func.least(ours, theirs) if merge == "min" else sa.func.greatest(ours, theirs)
    elif merge in _BITS:
        result = sa.func.coalesce(ours.bool_op(_BITS[merge])(theirs), ours, theirs)
    elif merge == "own":
        result = _own(value, ours, theirs)
    elif merge in ARRAY_MERGES:  # by functions and aggregates of the ledger (schema.sql)
        result = getattr(sa.func.tidegate, f"{merge}_of_two")(ours, theirs, *_limit(value))
    else:
        wins, loses, wins_by_all = _comparisons(value, kept, partial)
        result = sa.case((wins, theirs), (loses, ours), (wins_by_all, theirs), else_=ours)
    return result


def is_ahead(value: ValueColumn, kept: Columns, partial: Columns) -> sa.ColumnElement[bool]:
    """Return whether the partial, and not the kept row, is the first or last one of a key."""
    wins, loses, wins_by_all = _comparisons(value, kept, partial)
    return sa.case((wins, sa.true()), (loses, sa.false()), else_=wins_by_all)


def combined(
    value: ValueColumn, partials: Columns, derived: Sequence[DerivedColumn] = (), *, of_one_batch: bool = False
) -> sa.ColumnElement[Any]:
    """Return the combined value of a key over several batches, or over several rows of one, in the column's type.

    Over several batches, a sum is NULL, which no state accepts, if that of some of them, or what is `derived` from it, could
    come near the limit of its type. Within one batch, only a result that does not fit is an error.
    """
    column, merge = partials[value.name], value.merge
    if merge == "sum" and of_one_batch:
        return sa.cast(sa.func.sum(column), column.type)
    if merge == "sum":
        # The sum of all absolute values: no sum of some of them is larger, in any order.
        sizes = _sum(sa.func.abs(column, type_=column.type))
        return sa.case((sizes <= half_of(value, column.type, derived), sa.cast(_sum(column), column.type)))
    if merge in ARRAY_MERGES:
        joined: sa.ColumnElement[Any] = getattr(sa.func.tidegate, f"{merge}_of_all")(column, *_limit(value), type_=column.type)
        return joined
    if merge in ("first", "last"):
        return _first(column, *in_order(value, partials))
    if isinstance(column.type, sa.Uuid | BYTEA):  # Postgres 15 has no min and max for these
        return _first(column, column.desc().nulls_last() if merge == "max" else column.asc())
    name: str = merge
    if isinstance(column.type, sa.Boolean):
        name = {"min": "bool_and", "max": "bool_or"}[merge]
    return sa.cast(getattr(sa.func, name)(column), column.type)


def in_order(value: ValueColumn, partials: Columns) -> list[sa.ColumnElement[Any]]:
    """Return the order in which the first row decides the first or last value."""
    columns = [partials[name] for name in value.order]
    return [c.desc().nulls_last() if value.merge == "last" else c.asc().nulls_last() for c in columns]


def near_the_limit(
    value: ValueColumn, changed: sa.ColumnElement[Any], column: sa.ColumnElement[Any], derived: Sequence[DerivedColumn]
) -> sa.ColumnElement[Any]:
    """Return a merged sum of several batches; NULL, which no state accepts, if it comes near a limit, as in `combined`."""
    half = half_of(value, column.type, derived)
    return sa.case((changed.between(-half, half), changed)) if value.merge == "sum" else changed


def half_of(value: ValueColumn, kind: Any, derived: Sequence[DerivedColumn]) -> sa.ColumnElement[Any]:
    """Return half of the largest value of a sum's type; less if a value that is derived from it has a smaller range.

    If neither the absolute values of a key's partials add up to more, nor the merged value is more, the partials fit one by
    one, too: whether a value leaves its column's range does not depend on the grouping.
    """
    # A mean is no larger than its sum, and a variance no larger than its sum of squares.
    if isinstance(kind, sa.Numeric):
        limits = [Decimal(10) ** ((kind.precision or 0) - (kind.scale or 0)) / 2]
    else:
        limits = [Decimal(2 ** (62 if isinstance(kind, sa.BigInteger) else 30) - 1)]
    for each in derived:
        largest = each.made_of[0 if each.formula == "mean" else 1] if len(each.made_of) > 1 else None
        if value.name == largest and each.type.precision_and_scale is not None:
            precision, scale = each.type.precision_and_scale
            limits.append(Decimal(max(10 ** (precision - scale) // 2 - 1, 0)))  # twice as much fits, however it is rounded
    return sa.literal_column(f"{min(limits):f}")


def _sum(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.tidegate.add_up(column, type_=column.type) if isinstance(column.type, sa.BigInteger) else sa.func.sum(column)


def _first(column: sa.ColumnElement[Any], *order: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    values = sa.func.array_agg(aggregate_order_by(column, *order), type_=ARRAY(column.type))
    return sa.cast(values[1], column.type)


def _comparisons(value: ValueColumn, kept: Columns, partial: Columns) -> tuple[sa.ColumnElement[bool], ...]:
    """Return whether a partial wins over the kept row by the order's first column, loses by it, and wins by all columns."""
    # The first column decides most often, and is compared in less time than a record. NULL decides nothing.
    mine, new = kept[value.order[0]], partial[value.order[0]]
    ours, theirs = _place(value, kept), _place(value, partial)
    if value.merge == "first":
        return new < mine, new > mine, sa.func.record_lt(theirs, ours)
    return new > mine, new < mine, sa.func.record_gt(theirs, ours)


def _place(value: ValueColumn, row: Columns) -> sa.ColumnElement[Any]:
    """Return the place of a row in the order that decides the first or last value; NULL never wins."""
    # A record, because a comparison of rows is NULL if it meets a NULL; of records, if there are many columns.
    # The boolean before each column makes a NULL lose.
    is_null: Callable[[Any], Any] = (lambda c: c.is_(None)) if value.merge == "first" else (lambda c: c.is_not(None))
    parts: Sequence[Any] = [part for name in value.order for part in (is_null(row[name]), row[name])]
    if len(parts) > MOST_IN_RECORD:
        parts = [sa.func.row(*parts[at : at + MOST_IN_RECORD]) for at in range(0, len(parts), MOST_IN_RECORD)]
    return sa.func.row(*parts)


def _own(value: ValueColumn, ours: sa.ColumnElement[Any], theirs: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return two values combined by the author's code; NULL, the value of no rows, changes nothing."""
    assert value.combine is not None, "a spec that was read from the ledger lacks the code"
    try:
        both = sa.cast(value.combine(ours, theirs), ours.type)
    except Exception as error:
        raise DeclarationInvalid(f"The combiner of {value.name} ({value.computed}) failed: {error}") from error
    return sa.case((theirs.is_(None), ours), (ours.is_(None), theirs), else_=both)


def _limit(value: ValueColumn) -> list[sa.ColumnElement[int]]:
    return [] if value.most is None else [sa.literal_column(f"{value.most}", sa.Integer)]
