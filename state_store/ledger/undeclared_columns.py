"""Columns that a source has and its declaration leaves out: noted when an attempt seals, told until somebody declares them.

The columns of a pipeline's first batch are its author's choice. Those that come in later batches are new: a producer has added
them, and nobody may know.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import JSONB, aggregate_order_by, insert

from tidegate.state_store.base.errors import one_line, storable
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.ledger import tables

# Of a pipeline. A source whose records have keys of their own, such as one per user, would fill the ledger.
MOST_COLUMNS = 100
NAME_CHARACTERS = 200


def note(connection: Connection, pipeline: str, txid: int, found: Mapping[str, Sequence[str]]) -> None:
    """Record the columns that a batch has, by input, with the first txid that has them."""
    u = tables.undeclared_column.c
    rows = [(pipeline, of, storable(name[:NAME_CHARACTERS]), txid) for of, names in found.items() for name in names]
    if not rows:
        return
    new = sa.values(*(sa.column(c.name, c.type) for c in u), name="new").data(list(dict.fromkeys(rows))[:MOST_COLUMNS])
    known = sa.select(sa.func.count()).where(u.pipeline == pipeline).scalar_subquery()
    statement = insert(tables.undeclared_column).from_select(list(u), sa.select(new).where(known < MOST_COLUMNS))
    earlier = {"txid": statement.excluded.txid}
    connection.execute(statement.on_conflict_do_update(index_elements=list(u)[:3], set_=earlier, where=u.txid > txid))


def forget_declared(connection: Connection, spec: PipelineSpec) -> None:
    """Drop the columns that the source declares, or ignores, by now."""
    u = tables.undeclared_column.c
    for of, names in spec.known_columns.items():
        connection.execute(sa.delete(tables.undeclared_column).where(u.pipeline == spec.name, u.input == of, u.name.in_(names)))


def new_columns(pipeline: sa.ColumnElement[str]) -> sa.ScalarSelect[Any]:
    """Return the columns that came after the first batch of a pipeline, in the order of their txids, as a JSON array."""
    u = tables.undeclared_column.c
    column = sa.func.jsonb_build_object("input", u.input, "column", u.name, "first_txid", u.txid)
    ordered = sa.func.jsonb_agg(aggregate_order_by(column, u.txid, u.input, u.name))
    found = sa.func.coalesce(ordered, sa.text("'[]'::jsonb"), type_=JSONB)
    return sa.select(found).where(u.pipeline == pipeline, u.txid > 1).scalar_subquery()


def sentence(columns: Sequence[Mapping[str, Any]]) -> str:
    """Return which columns are new, and since when."""
    named = []
    for each in columns:
        of_input = f" of input {each['input']}" if each["input"] else ""
        named.append(f"{each['column']}{of_input} (since txid {each['first_txid']})")
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return one_line(f"The source has columns that the schema does not declare: {', '.join(named[:3])}{more}.")
