"""A state's rows page by page, each after the end of the last; and all of them as text."""

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.exc import DataError

from state_store import schema
from state_store.columns import KeyColumn
from state_store.declaration import StateSpec
from state_store.errors import UsageError
from state_store.lookup import no_such_key

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
