"""Rows of a state from one snapshot: by key, in a range, page by page, or all. Its txid is the last committed batch's number.

    with StateReader.open(settings, "flights", "daily") as daily:
        found = daily.get_many([("UA", "2013-01-01"), ("AA", "2013-01-01")])
        print(found.txid, found.rows)

A snapshot has all of a batch or nothing of it, and the txid of later reads is never lower.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import psycopg2
import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.exc import DataError

from state_store import lookup, overview, partitions, state_tables, tables
from state_store.columns import KeyColumn
from state_store.declaration import StateSpec
from state_store.errors import UsageError
from state_store.ledger_reader import LedgerReader
from state_store.settings import Settings

MOST_KEYS = 100_000  # in one read, which holds all of them in memory
SCAN_SECONDS = 3600
PAGE_CHARACTERS = 4_000_000  # of a page of rows, which is held in memory; a longer row is a page of its own
ROWS_PER_FETCH = 20  # of a page, whose rows may be long
ROWS_AT_ONCE = 2_000

Row = Mapping[str, Any]
Key = Sequence[Any]


@dataclass(frozen=True)
class AsOf:
    """The rows of a read, and the last txid that had committed in their snapshot."""

    txid: int
    rows: Sequence[Row | None]


@dataclass(frozen=True)
class Version:
    """A pipeline's last commit: while it is the same, all rows of its states are."""

    txid: int
    attempt: int | None
    history: str

    def __str__(self) -> str:
        return f"{self.history}-{self.txid}-{self.attempt or 0}"


class StateReader:
    """Reads one state as the role `pg_reader`, which can change nothing. Thread-safe."""

    def __init__(self, reader: LedgerReader, pipeline: str, state: str) -> None:
        """Read a state through a ledger reader that the caller has opened."""
        self._reader = reader
        self._pipeline = pipeline
        self._state = state

    @classmethod
    def open(cls, settings: Settings, pipeline: str, state: str) -> Self:
        """Return a reader with connections of its own. Nothing is connected yet."""
        return cls(LedgerReader(settings), pipeline, state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._reader.close()

    def get_many(self, keys: Sequence[Key]) -> AsOf:
        """Return the rows of keys, None for each that has none, in the order of the keys.

        A key has a value for each key column, in Python's type or as text; a state without key columns has the empty key. None
        finds the row with NULL there, if the state keeps NULLs as a group.

        Raises: UsageError for a key of another length, a value that its column cannot hold, or more than MOST_KEYS;
        UnknownPipeline, StoreUnavailable, AccessRefused, SchemaOutOfDate.
        """
        with self._snapshot() as (connection, state, version):
            return AsOf(version.txid, rows_of(connection, state, keys))

    def range(self, first: Key = (), last: Key = (), *, limit: int) -> AsOf:
        """Return the rows from a key up to and including another one, in the order of the keys, at most `limit`.

        Either may have the leading columns only, and then stands for all keys that begin with these. Keys with NULL there are
        left out.

        Raises: as `get_many`.
        """
        with self._snapshot() as (connection, state, version):
            statement = _within(connection, state, first, last).limit(limit)
            try:
                return AsOf(version.txid, [dict(row) for row in connection.execute(statement).mappings()])
            except (DataError, ValueError) as error:  # psycopg2 itself refuses NUL and text that is not UTF-8
                raise lookup.no_such_key(state, getattr(error, "orig", error)) from error

    @contextmanager
    def scan(self) -> Iterator[tuple[int, Iterator[Row]]]:
        """Yield the txid and all rows in the order of the keys, without holding them all.

        Raises: as `get_many`.
        """
        with self._snapshot(timeout_seconds=SCAN_SECONDS) as (connection, state, version):
            rows = connection.execution_options(yield_per=10_000).execute(_within(connection, state, (), ())).mappings()
            yield version.txid, map(dict, rows)

    @contextmanager
    def _snapshot(self, **limits: int) -> Iterator[tuple[Connection, StateSpec, Version]]:
        with self._reader.snapshot(f"reading state {self._state}", states=[self._state], **limits) as connection:
            state = overview.spec_of_pipeline(connection, self._pipeline).state(self._state)
            if state is None or not state.is_table:
                raise UsageError(f"Pipeline {self._pipeline} has no state {self._state}.")
            yield connection, state, version_of(connection, self._pipeline)


def version_of(connection: Connection, pipeline: str) -> Version:
    """Return the version of a pipeline's states in this snapshot."""
    c = tables.cursor.c
    row = connection.execute(sa.select(c.txid, c.attempt, c.history).where(c.pipeline == pipeline)).one()
    return Version(row.txid, row.attempt, str(row.history))


def rows_of(connection: Connection, state: StateSpec, keys: Sequence[Key]) -> list[Row | None]:
    """Return the rows of keys, None for each that has none.

    Raises: UsageError; SchemaOutOfDate also if a partition is missing.
    """
    if len(keys) > MOST_KEYS:
        raise UsageError(f"{len(keys)} keys are requested; at most {MOST_KEYS} at a time.")
    lookup.check_widths(state, keys)
    partitions.check_whole(connection, state_tables.STATE, state)
    rows: list[Row | None] = [None] * len(keys)
    driver: Any = connection.connection.driver_connection
    try:
        for position, row in lookup.rows(driver, state, keys):
            rows[position] = row
    except (psycopg2.DataError, ValueError) as error:
        raise lookup.no_such_key(state, error) from error
    return rows


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
    lookup.check_widths(state, [] if after is None else [after])
    rows: list[Sequence[Any]] = []
    characters = 0
    try:
        for row in _rows_after(connection, state, after, limit + 1):
            characters += sum(len(str(value)) for value in row)
            if len(rows) == limit or (rows and characters > PAGE_CHARACTERS):
                return rows, True
            rows.append(row)
    except (DataError, ValueError) as error:  # psycopg2 itself refuses text that is not UTF-8
        raise lookup.no_such_key(state, getattr(error, "orig", error)) from error
    return rows, False


def all_rows(connection: Connection, state: StateSpec) -> Iterator[Sequence[str | None]]:
    """Yield all rows of a state in the order of its keys, every value as Postgres writes it, without holding them all."""
    rows = _in_order(state, partitions.readable_table(connection, state))
    as_text = rows.with_only_columns(*(sa.cast(column, sa.Text) for column in rows.selected_columns))
    yield from connection.execution_options(yield_per=ROWS_AT_ONCE).execute(as_text)


def _in_order(state: StateSpec, table: Table) -> sa.Select[Any]:
    """Return the query of a state's rows as readers see them, in the order of the keys."""
    shown = [table.c[column.name] for column in state.shown]
    return sa.select(*shown).order_by(*(table.c[key.name] for key in state.row_key))


def _within(connection: Connection, state: StateSpec, first: Key, last: Key) -> sa.Select[Any]:
    table = partitions.readable_table(connection, state)
    key = [table.c[column.name] for column in state.row_key]
    statement = _in_order(state, table)
    for bound, is_first in ((first, True), (last, False)):
        if len(bound) > len(key):
            raise UsageError(f"State {state.name} is keyed by {len(key)} columns, and {len(bound)} values are given.")
        if any(value is None for value in bound):
            raise UsageError(f"State {state.name} has no range from or to NULL: give the leading columns only, or no bound.")
        if bound:
            columns = key[: len(bound)]
            here = sa.tuple_(*columns)
            texts = [f"\\x{v.hex()}" if isinstance(v, bytes) else str(v) for v in bound]
            # Without precision and scale, to which a cast would round the bound.
            kinds = [sa.Numeric() if isinstance(column.type, sa.Numeric) else column.type for column in columns]
            there = sa.tuple_(*(sa.cast(sa.literal(text), kind) for text, kind in zip(texts, kinds, strict=True)))
            statement = statement.where(here >= there if is_first else here <= there)
    return statement


def _rows_after(
    connection: Connection, state: StateSpec, after: Sequence[str | None] | None, limit: int
) -> Iterator[Sequence[Any]]:
    table = partitions.readable_table(connection, state)
    statement = _in_order(state, table).limit(limit).execution_options(yield_per=ROWS_PER_FETCH)
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
