"""The quarantine: what commits move there instead of merging it, what replays take up again, and what people see of it.

    bad records   rows that a source or transform could not use; they wait until a later batch, a replay, reads them
    partials      those that a check or a final window keeps out of a state; never replayed

Either is moved in the commit of its batch, with the reason, so that no row is lost.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.base.errors import RangeRefused
from tidegate.state_store.declarations.pipeline_spec import INPUT_END, PipelineSpec, QuarantineSpec, StateSpec
from tidegate.state_store.declarations.window_spec import CORRECTIONS
from tidegate.state_store.ledger import tables

# No declared column has this name: Postgres would take that column for the whole record.
_RECORD = "_record"
MENDED = ("mended_payload", "mended_at", "mended_by", "mended_reason")
PAYLOAD_CHARACTERS = 10_000  # of a record in a list: one may have millions
Reason = Callable[[sa.ColumnCollection[str, Any]], sa.ColumnElement[str]]


class QuarantineTotals(NamedTuple):
    """What is in quarantine: bad records that wait to be replayed, and partials that commits have set aside."""

    waiting: int
    set_aside: int


# What commits move there


def move_sealed(connection: Connection, staged: QuarantineSpec, txid: int, stage: sa.Table, tasks: Sequence[int]) -> int:
    """Move the bad records that these task attempts have staged for a batch here; return how many."""
    if not tasks:
        return 0
    names = [column.name for column in staged.columns]
    records = sa.select(
        sa.literal(staged.pipeline),
        sa.literal(txid, sa.BigInteger),
        sa.func.row_number().over(order_by=(stage.c.origin, stage.c.payload)),
        *(stage.c[name] for name in names),
    ).where(stage.c.task_attempt.in_(tasks))
    moved: int = connection.execute(
        insert(tables.quarantine).from_select(["pipeline", "txid", "number", *names], records)
    ).rowcount
    return moved


def set_aside(
    connection: Connection, spec: PipelineSpec, state: StateSpec, txid: int, partials: sa.Select[Any], reason: Reason
) -> int:
    """Put partials into quarantine as JSON, numbered after the batch's records there; return how many.

    `reason` gives the text of the reason, from a partial's columns in the JSON.
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


def without_set_aside(spec: PipelineSpec, state: StateSpec, txid: int, partials: sa.Select[Any]) -> sa.Select[Any]:
    """Return a batch's partials without those set aside; the same before and after the batch is merged."""
    q, p = tables.quarantine.c, partials.subquery("partials")
    record = _record_of(state, p.c).correlate(p).lateral(_RECORD)
    # NOT IN looks up hashes. As NOT EXISTS, each partial would be compared with each record: Postgres expects few of these.
    aside = sa.select(q.payload).where(
        *(q.pipeline == spec.name, q.txid == txid, q.state == state.name, q.payload.is_not(None))
    )
    return sa.select(*p.c).select_from(p.join(record, sa.true())).where(_payload_of(record).not_in(aside))


def in_json(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return a column in its form for JSON: a time as text, in UTC whatever the database's time zone."""
    if not isinstance(column.type, sa.TIMESTAMP):
        return column
    form = 'YYYY-MM-DD"T"HH24:MI:SS.US'
    if column.type.timezone:
        return sa.func.to_char(sa.func.timezone("UTC", column), f'{form}"Z"', type_=sa.Text)
    return sa.func.to_char(column, form, type_=sa.Text)


def _record_of(state: StateSpec, partial: sa.ColumnCollection[str, Any]) -> sa.Select[Any]:
    names = [column.name for column in state.columns if column.name != CORRECTIONS]
    return sa.select(*(in_json(partial[name]).label(name) for name in names))


def _payload_of(record: Any) -> sa.ColumnElement[str]:
    return sa.cast(sa.func.row_to_json(record.table_valued()), sa.Text)


# What replays take up


def waits() -> sa.ColumnElement[bool]:
    """Return whether a record waits for a replay. A partial never does."""
    return sa.and_(_is_here(), tables.quarantine.c.state.is_(None))


def is_replay(pipeline: str, txid: Any) -> sa.ColumnElement[bool]:
    """Return whether a batch takes up records that waited."""
    q = tables.quarantine.c
    return sa.exists().where(q.pipeline == pipeline, q.replayed_txid == txid)


def take_up(connection: Connection, pipeline: str, txid: int | None, new_txid: int) -> int:
    """Let a new batch read the waiting records, of one txid or all; return their number."""
    of_txid = _of(pipeline, txid)
    return connection.execute(sa.update(tables.quarantine).where(*of_txid, waits()).values(replayed_txid=new_txid)).rowcount


def records_by_input(connection: Connection, pipeline: str, replayed_txid: int) -> dict[str, int]:
    """Return how many records of each input a batch has taken up, if the pipeline's source has several inputs."""
    q = tables.quarantine.c
    return count_by_input(connection, sa.select(q.origin).where(q.pipeline == pipeline, q.replayed_txid == replayed_txid))


def count_by_input(connection: Connection, origins: sa.Select[Any]) -> dict[str, int]:
    """Return how many records each input has, from the selected column `origin` of some records."""
    records = origins.subquery("records").c
    name = sa.func.split_part(sa.func.coalesce(records.origin, ""), INPUT_END, 1).label("input")
    counted = sa.select(name, sa.func.count()).group_by(name).order_by(name)
    return {row[0]: row[1] for row in connection.execute(counted)}


def put_back(connection: Connection, pipeline: str, replayed_txid: int) -> None:
    """Let the records that a skipped batch has taken up wait again."""
    q = tables.quarantine.c
    returned = sa.update(tables.quarantine).where(q.pipeline == pipeline, q.replayed_txid == replayed_txid)
    connection.execute(returned.values(replayed_txid=None))


def clear(connection: Connection, pipeline: str, txid: int) -> list[sa.Row[Any]]:
    """Remove what a txid that is redone has moved here, and return what was mended, for `mend_again`.

    Raises: RangeRefused if a later batch has taken one up.
    """
    q = tables.quarantine.c
    # Of the others, there may be too many for this process.
    payload = sa.case((q.mended_at.is_not(None), q.payload)).label("payload")
    removed = sa.delete(tables.quarantine).where(q.pipeline == pipeline, q.txid == txid)
    returned = removed.returning(q.replayed_txid, q.origin, q.is_raw, payload, *(q[name] for name in MENDED))
    taken, mended = set(), []
    for record in connection.execute(returned):
        if record.replayed_txid is not None:
            taken.add(record.replayed_txid)
        elif record.mended_at is not None:
            mended.append(record)
    if taken:
        raise RangeRefused(
            f"{pipeline} {txid} cannot be redone: txid {min(taken)} has taken up bad records of it, which would then count "
            "there and wait in quarantine again."
        )
    return mended


def mend_again(connection: Connection, pipeline: str, txid: int, mended: Sequence[sa.Row[Any]]) -> None:
    """Give records that were mended before their txid was redone their corrections, if they are still bad and read the same."""
    q = tables.quarantine.c
    for record in mended:
        same = [q[name].is_not_distinct_from(record._mapping[name]) for name in ("origin", "is_raw", "payload")]
        first = sa.select(sa.func.min(q.number)).where(q.pipeline == pipeline, q.txid == txid, q.mended_at.is_(None), *same)
        this = (q.pipeline == pipeline, q.txid == txid, q.number == first.scalar_subquery())
        values = {name: record._mapping[name] for name in MENDED}
        connection.execute(sa.update(tables.quarantine).where(*this).values(values))


# What people see: records, and partials, which have a `state`


def records(
    connection: Connection, pipeline: str, txid: int | None = None, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield what is in quarantine, of one batch or all, in order of the batches, without holding it in memory."""
    q = tables.quarantine.c
    statement = (
        sa.select(
            *(q.txid, q.number, q.reason, q.origin, q.payload, q.is_raw, q.state, q.quarantined_at),
            *(q[name] for name in MENDED),
        )
        .where(*_of(pipeline, txid), _is_here())
        .order_by(q.txid, q.number)
        .limit(limit)
    )
    yield from map(dict, connection.execution_options(yield_per=10_000).execute(statement).mappings())


def page_of_records(
    connection: Connection, pipeline: str, txid: int | None, after: tuple[int, int] | None, limit: int
) -> list[dict[str, Any]]:
    """Return what is in quarantine, of one batch or all, after a txid and number; long payloads are cut."""
    q = tables.quarantine.c
    conditions = [*_of(pipeline, txid), _is_here()]
    if after is not None:
        conditions.append(sa.tuple_(q.txid, q.number) > sa.tuple_(*(sa.literal(value, sa.BigInteger) for value in after)))
    payloads = [q.payload, q.mended_payload]
    cut = [sa.func.left(payload, PAYLOAD_CHARACTERS).label(payload.name) for payload in payloads]
    is_cut = sa.func.greatest(*(sa.func.length(payload) for payload in payloads)) > PAYLOAD_CHARACTERS
    statement = sa.select(*_shown(), *cut, is_cut.label("is_cut")).where(*conditions).order_by(q.txid, q.number).limit(limit)
    return [dict(row) for row in connection.execute(statement).mappings()]


def record(connection: Connection, pipeline: str, txid: int, number: int) -> dict[str, Any] | None:
    """Return one record with its whole payload, also if a replay has taken it up; None if there is none."""
    q = tables.quarantine.c
    statement = sa.select(*_shown(), q.payload, q.mended_payload).where(*_of(pipeline, txid), q.number == number)
    row = connection.execute(statement).mappings().one_or_none()
    return dict(row) if row else None


def totals(connection: Connection, pipeline: str, txid: int | None = None) -> QuarantineTotals:
    """Return how many records and partials of a txid, or of all, are in quarantine."""
    counts = sa.select(sa.func.count().filter(waits()), sa.func.count().filter(~waits()))
    return QuarantineTotals(*connection.execute(counts.where(*_of(pipeline, txid), _is_here())).one())


def counts(connection: Connection, pipeline: str, txid: int | None = None, *, limit: int | None = None) -> dict[int, int]:
    """Count by txid, or for a given one, what is in quarantine; with `limit`, for the newest ones, in descending order."""
    q = tables.quarantine.c
    statement = sa.select(q.txid, sa.func.count()).where(*_of(pipeline, txid), _is_here()).group_by(q.txid)
    order = q.txid if limit is None else q.txid.desc()
    return {row[0]: row[1] for row in connection.execute(statement.order_by(order).limit(limit))}


def _is_here() -> sa.ColumnElement[bool]:
    return tables.quarantine.c.replayed_txid.is_(None)


def _of(pipeline: str, txid: int | None) -> list[sa.ColumnElement[bool]]:
    q = tables.quarantine.c
    return [q.pipeline == pipeline, *([] if txid is None else [q.txid == txid])]


def _shown() -> list[sa.Column[Any]]:
    q = tables.quarantine.c
    shown = [q.txid, q.number, q.state, q.reason, q.origin, q.is_raw, q.quarantined_at, q.replayed_txid]
    return [*shown, q.mended_at, q.mended_by, q.mended_reason]
