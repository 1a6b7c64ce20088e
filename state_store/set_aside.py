"""Partials (a batch's results per key) that are set aside: kept in quarantine as JSON with the reason, and not merged.

Unlike bad records of the source, they are never replayed. It happens in the commit of their batch.
"""

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from state_store import tables
from state_store.declaration import PipelineSpec, StateSpec
from state_store.window_spec import CORRECTIONS

# No declared column has this name: Postgres would take that column for the whole record.
_RECORD = "_record"
Reason = Callable[[sa.ColumnCollection[str, Any]], sa.ColumnElement[str]]


def set_aside(
    connection: Connection, spec: PipelineSpec, state: StateSpec, txid: int, partials: sa.Select[Any], reason: Reason
) -> int:
    """Put partials into quarantine, numbered after the batch's records there; return their number.

    `reason` makes the text of the reason from a partial's columns in the JSON.
    """
    q = tables.quarantine.c
    record = _record_of(state, partials.subquery("found").c).subquery(_RECORD)
    last = sa.select(sa.func.coalesce(sa.func.max(q.number), 0)).where(q.pipeline == spec.name, q.txid == txid)
    order = [record.c[key.name] for key in (*state.keys[-1:], *state.keys[:-1])]
    values: dict[str, Any] = {
        "pipeline": sa.literal(spec.name),
        "txid": sa.literal(txid, sa.BigInteger),
        "number": last.scalar_subquery() + sa.func.row_number().over(order_by=order or None),
        "state": sa.literal(state.name),
        "reason": reason(record.c),
        "origin": sa.literal(f"state {state.name}"),
        "payload": _payload_of(record),
        "is_raw": sa.false(),
    }
    rows = sa.select(*values.values()).select_from(record)
    written: int = connection.execute(insert(tables.quarantine).from_select([*values], rows)).rowcount
    return written


def left(spec: PipelineSpec, state: StateSpec, txid: int, partials: sa.Select[Any]) -> sa.Select[Any]:
    """Return a batch's partials without those that it has set aside: the same before and after the batch is merged."""
    q, p = tables.quarantine.c, partials.subquery("brought")
    record = _record_of(state, p.c).correlate(p).lateral(_RECORD)
    # NOT IN looks up hashes. As NOT EXISTS, each partial would be compared with each record: Postgres expects few of these.
    aside = sa.select(q.payload).where(
        *(q.pipeline == spec.name, q.txid == txid, q.state == state.name, q.payload.is_not(None))
    )
    return sa.select(*p.c).select_from(p.join(record, sa.true())).where(_payload_of(record).not_in(aside))


def _record_of(state: StateSpec, partial: sa.ColumnCollection[str, Any]) -> sa.Select[Any]:
    names = [column.name for column in state.columns if column.name != CORRECTIONS]
    return sa.select(*(in_json(partial[name]).label(name) for name in names))


def _payload_of(record: Any) -> sa.ColumnElement[str]:
    return sa.cast(sa.func.row_to_json(record.table_valued()), sa.Text)


def in_json(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return a column in the form for JSON: a time as text, in UTC whatever the time zone of the database."""
    if not isinstance(column.type, sa.TIMESTAMP):
        return column
    form = 'YYYY-MM-DD"T"HH24:MI:SS.US'
    if column.type.timezone:
        return sa.func.to_char(sa.func.timezone("UTC", column), f'{form}"Z"', type_=sa.Text)
    return sa.func.to_char(column, form, type_=sa.Text)
