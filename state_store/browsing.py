"""A state's rows and quarantined records page by page, each after the end of the last; and all of a state's rows as text."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.exc import DataError

from state_store import schema, tables
from state_store.columns import KeyColumn
from state_store.declaration import StateSpec
from state_store.errors import UsageError
from state_store.lookup import no_such_key

PAYLOAD_CHARACTERS = 10_000  # of a record in a list: one may have millions
TXIDS_SHOWN = 100
PAGE_CHARACTERS = 4_000_000  # of a page of rows, which is held in memory; a longer row is a page of its own
ROWS_AT_ONCE = 2_000
ROWS_PER_FETCH = 20  # of a page, whose rows may be long


def columns_of(state: StateSpec) -> list[tuple[str, str]]:
    """Return names and types of a state's columns that readers see: keys, values, and the txid that wrote the row last."""
    return [(column.name, column.type.name) for column in state.shown]


def rows_after(
    connection: Connection, state: StateSpec, after: Sequence[str | None] | None, limit: int
) -> tuple[list[Sequence[Any]], bool]:
    """Return a state's rows in the order of its keys, after a key in text, or from the beginning; and whether more follow.

    They are at most `limit`, and end where their values have PAGE_CHARACTERS.

    Raises: UsageError if it is no key of this state.
    """
    if after is not None and len(after) != len(state.row_key):
        raise UsageError(f"State {state.name} is keyed by {len(state.row_key)} columns, and {len(after)} values are given.")
    found: list[Sequence[Any]] = []
    characters = 0
    try:
        for row in _rows_after(connection, state, after, limit + 1):
            characters += sum(len(str(value)) for value in row)
            if len(found) == limit or (found and characters > PAGE_CHARACTERS):
                return found, True
            found.append(row)
    except (DataError, ValueError) as error:  # psycopg2 itself refuses text that is not UTF-8
        raise no_such_key(state, getattr(error, "orig", error)) from error
    return found, False


def all_rows(connection: Connection, state: StateSpec) -> Iterator[Sequence[str | None]]:
    """Yield all rows of a state in the order of its keys, every value as Postgres writes it, without holding them all."""
    table = schema.readable_table(connection, state)
    as_text = (sa.cast(table.c[name], sa.Text) for name, _ in columns_of(state))
    statement = sa.select(*as_text).order_by(*(table.c[key.name] for key in state.row_key))
    yield from connection.execution_options(yield_per=ROWS_AT_ONCE).execute(statement)


def quarantined_after(
    connection: Connection, pipeline: str, txid: int | None, after: tuple[int, int] | None, limit: int
) -> list[dict[str, Any]]:
    """Return what is in quarantine, of one batch (by its txid) or all, after a txid and number; long payloads are cut.

    These are bad records that wait for a replay, and partials (results for a key) that a commit has set aside.
    """
    q = tables.quarantine.c
    conditions = [] if txid is None else [q.txid == txid]
    if after is not None:
        conditions.append(sa.tuple_(q.txid, q.number) > sa.tuple_(*(sa.literal(value, sa.BigInteger) for value in after)))
    statement = _records(PAYLOAD_CHARACTERS).where(q.pipeline == pipeline, q.replayed_txid.is_(None), *conditions)
    return [dict(row) for row in connection.execute(statement.order_by(q.txid, q.number).limit(limit)).mappings()]


def quarantined_record(connection: Connection, pipeline: str, txid: int, number: int) -> dict[str, Any] | None:
    """Return one record with its whole payload, also if it was taken up by a replay; None if there is none."""
    q = tables.quarantine.c
    statement = _records(None).where(q.pipeline == pipeline, q.txid == txid, q.number == number)
    found = connection.execute(statement).mappings().one_or_none()
    return dict(found) if found else None


class QuarantineTotals(NamedTuple):
    """What is in quarantine: bad records that wait to be replayed, and partials that commits have set aside."""

    waiting: int
    set_aside: int


def quarantine_totals(connection: Connection, pipeline: str, txid: int | None) -> QuarantineTotals:
    """Return how many records and partials of a txid, or of all, are in quarantine."""
    q = tables.quarantine.c
    of_batch = [] if txid is None else [q.txid == txid]
    waiting = tables.waits_in_quarantine()
    counts = sa.select(sa.func.count().filter(waiting), sa.func.count().filter(~waiting))
    found = connection.execute(counts.where(q.pipeline == pipeline, q.replayed_txid.is_(None), *of_batch)).one()
    return QuarantineTotals(*found)


def newest_quarantined(connection: Connection, pipeline: str) -> list[tuple[int, int]]:
    """Return txids and how many of their records are in quarantine, the newest first, at most TXIDS_SHOWN."""
    q = tables.quarantine.c
    statement = (
        sa.select(q.txid, sa.func.count())
        .where(q.pipeline == pipeline, q.replayed_txid.is_(None))
        .group_by(q.txid)
        .order_by(q.txid.desc())
        .limit(TXIDS_SHOWN)
    )
    return [(row[0], row[1]) for row in connection.execute(statement)]


def _rows_after(
    connection: Connection, state: StateSpec, after: Sequence[str | None] | None, limit: int
) -> Iterator[Sequence[Any]]:
    table = schema.readable_table(connection, state)
    shown = [table.c[name] for name, _ in columns_of(state)]
    statement = sa.select(*shown).order_by(*(table.c[key.name] for key in state.row_key)).limit(limit)
    statement = statement.execution_options(yield_per=ROWS_PER_FETCH)
    for condition in [[]] if after is None else _parts_after(table, state.row_key, after):
        yield from connection.execute(statement.where(*condition))


def _parts_after(
    table: Table, keys: Sequence[KeyColumn], after: Sequence[str | None]
) -> Iterator[Sequence[sa.ColumnElement[bool]]]:
    """Yield conditions whose rows, one after the other, are those after a key. Each is a range of the key's index.

    Without NULLs, which come last, it is one comparison of rows. With them, each condition is for rows that share the first
    columns of the key, and have a greater value or NULL in the next; those that share most come first.
    """
    columns = [table.c[key.name] for key in keys]
    values = [None if v is None else sa.cast(sa.literal(v, sa.Text), c.type) for v, c in zip(after, columns, strict=True)]
    if not any(key.nullable for key in keys):
        if keys:
            yield [sa.tuple_(*columns) > sa.tuple_(*values)]
        return
    for position in reversed(range(len(keys))):
        same = [c.is_(None) if v is None else c == v for c, v in zip(columns[:position], values[:position], strict=True)]
        if values[position] is not None:
            yield [*same, columns[position] > values[position]]
            yield [*same, columns[position].is_(None)]


def _records(most_characters: int | None) -> sa.Select[Any]:
    q = tables.quarantine.c
    columns = [q.txid, q.number, q.state, q.reason, q.origin, q.is_raw, q.quarantined_at, q.replayed_txid]
    columns += [q.mended_at, q.mended_by, q.mended_reason]
    payloads = [q.payload, q.mended_payload]
    if most_characters is None:
        return sa.select(*columns, *payloads)
    cut = [sa.func.left(payload, most_characters).label(payload.name) for payload in payloads]
    length = sa.func.greatest(*(sa.func.length(payload) for payload in payloads))
    return sa.select(*columns, *cut, (length > most_characters).label("is_cut"))
