"""Rows of a state from one snapshot: by key, in a range, page by page, or all.

    with StateReader.open(settings, "flights", "daily") as daily:
        found = daily.get_many([("UA", "2013-01-01"), ("AA", "2013-01-01")])
        print(found.txid, found.rows)

A snapshot has all of a batch or nothing of it. Its txid is that of the last batch in it, and never lower in a later read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.exc import DataError

from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.column_spec import SNAPSHOT, KeyColumn
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.ledger import cursors, tables
from tidegate.state_store.read_ledger import registered_pipelines
from tidegate.state_store.read_ledger.ledger_reader import LedgerReader
from tidegate.state_store.states import key_lookup, partitions, state_tables
from tidegate.state_store.states.key_lookup import Row

MOST_KEYS = 100_000  # in one read, which holds all their rows in memory
SCAN_SECONDS = 3600
PAGE_CHARACTERS = 4_000_000  # the most in a page, which is held in memory; a longer row is a page by itself
ROWS_PER_FETCH = 20  # while a page is read: its rows may be long
ROWS_AT_ONCE = 2_000

Key = Sequence[Any]


@dataclass(frozen=True)
class AsOf:
    """The rows of a read, and the last txid that had committed in their snapshot."""

    txid: int
    rows: Sequence[Row | None]


@dataclass(frozen=True)
class Version:
    """A pipeline's last commit, what it declares, and its range partitions: while all stay the same, so do its states' rows.

    A rebuild changes rows without a commit, and the declaration; `tidegate prune` removes rows, and partitions.
    """

    txid: int
    attempt: int | None
    history: str
    fingerprint: str
    partitions: int

    def __str__(self) -> str:
        return f"{self.history}-{self.txid}-{self.attempt or 0}-{self.fingerprint[:12]}-{self.partitions}"


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
        """Return the rows of keys, in their order; None for a key without a row.

        A key has a value per key column, in Python's type or as text; without key columns it is empty. None means NULL.

        Raises: UsageError for a key of another length, a value that its column cannot hold, or more than MOST_KEYS;
        UnknownPipeline, StoreUnavailable, AccessRefused, SchemaOutOfDate.
        """
        with self._snapshot() as (connection, state, txid):
            return AsOf(txid, rows_of(connection, state, keys))

    def range(self, first: Key = (), last: Key = (), *, limit: int) -> AsOf:
        """Return at most `limit` rows in key order, from a key up to and including another one.

        A bound of fewer columns includes all keys that begin with it. Keys with NULL in a compared column are left out.

        Raises: as `get_many`.
        """
        with self._snapshot() as (connection, state, txid):
            statement = _within(connection, state, first, last).limit(limit)
            try:
                return AsOf(txid, [dict(row) for row in connection.execute(statement).mappings()])
            except (DataError, ValueError) as error:  # psycopg2 itself refuses NUL and text that is not UTF-8
                raise key_lookup.no_such_key(state, getattr(error, "orig", error)) from error

    @contextmanager
    def scan(self) -> Iterator[tuple[int, Iterator[Row]]]:
        """Yield the txid, and all rows in key order without holding them in memory.

        Raises: as `get_many`.
        """
        with self._snapshot(timeout_seconds=SCAN_SECONDS) as (connection, state, txid):
            rows = connection.execution_options(yield_per=10_000).execute(_within(connection, state, (), ())).mappings()
            yield txid, map(dict, rows)

    @contextmanager
    def _snapshot(self, **limits: int) -> Iterator[tuple[Connection, StateSpec, int]]:
        with self._reader.snapshot(f"reading state {self._state}", states=[self._state], **limits) as connection:
            state = registered_pipelines.spec_of_pipeline(connection, self._pipeline).state(self._state)
            if state is None or not state.is_table:
                raise UsageError(f"Pipeline {self._pipeline} has no state {self._state}.")
            yield connection, state, cursors.committed(connection, self._pipeline)


def version_of(connection: Connection, pipeline: str) -> Version:
    """Return the version of a pipeline's states in this snapshot."""
    c, p, r, s = tables.cursor.c, tables.pipeline.c, tables.state_range.c, tables.state_table.c
    made = sa.select(sa.func.count()).select_from(tables.state_range).join(tables.state_table, r.state == s.state)
    partitions_of = made.where(s.pipeline == p.pipeline).correlate(tables.pipeline).scalar_subquery()
    known = sa.join(tables.cursor, tables.pipeline, c.pipeline == p.pipeline)
    statement = sa.select(c.txid, c.attempt, c.history, p.fingerprint, partitions_of).select_from(known)
    txid, attempt, history, fingerprint, count = connection.execute(statement.where(c.pipeline == pipeline)).one()
    return Version(txid, attempt, str(history), fingerprint, count)


def rows_of(
    connection: Connection, state: StateSpec, keys: Sequence[Key], *, most_characters: int | None = None
) -> list[Row | None]:
    """Return the rows of keys, in their order; None for a key without a row.

    Raises: what `key_lookup.found` raises; UsageError for too many keys.
    """
    if len(keys) > MOST_KEYS:
        raise UsageError(f"{len(keys)} keys are requested; at most {MOST_KEYS} at a time.")
    driver: Any = connection.connection.driver_connection
    return key_lookup.found(driver, state, keys, most_characters=most_characters)


def rows_after(
    connection: Connection, state: StateSpec, after: Sequence[str | None] | None, limit: int
) -> tuple[list[Sequence[Any]], bool]:
    """Return a page of rows in key order, after a key given as text or from the beginning; and whether more follow.

    A page has at most `limit` rows and, unless it is a single row, PAGE_CHARACTERS.

    Raises: UsageError if `after` cannot be a key of this state.
    """
    key_lookup.check_widths(state, [] if after is None else [after])
    rows: list[Sequence[Any]] = []
    characters = 0
    try:
        for row in _rows_after(connection, state, after, limit + 1):
            characters += sum(len(str(value)) for value in row)
            if len(rows) == limit or (rows and characters > PAGE_CHARACTERS):
                return rows, True
            rows.append(row)
    except (DataError, ValueError) as error:  # psycopg2 itself refuses text that is not UTF-8
        raise key_lookup.no_such_key(state, getattr(error, "orig", error)) from error
    return rows, False


def all_rows(connection: Connection, state: StateSpec) -> Iterator[Sequence[str | None]]:
    """Yield all rows in key order, every value as Postgres' text, without holding them in memory."""
    rows = _in_order(state, partitions.readable_table(connection, state))
    as_text = rows.with_only_columns(*(sa.cast(column, sa.Text) for column in rows.selected_columns))
    yield from connection.execution_options(yield_per=ROWS_AT_ONCE).execute(as_text)


def kept_rows(connection: Connection, state: StateSpec, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield all rows in key order with all columns, so also previous values, without holding them in memory."""
    table = partitions.readable_table(connection, state)
    columns = [column for column in table.c if column.name != SNAPSHOT]
    statement = sa.select(*columns).order_by(*(table.c[key.name] for key in state.row_key)).limit(limit)
    yield from map(dict, connection.execution_options(yield_per=10_000).execute(statement).mappings())


def changes(
    connection: Connection, state: StateSpec, after_txid: int = 0, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield what the txids after the given one changed in a state, by txid and key, without holding it all.

    A change has the key, the values after the txid, and those before it as ``previous_<value>``: NULL for a new key. For
    appended rows and recorded final windows, it is the row or window itself.

    Raises: ValueError for a state that does not record changes; SchemaOutOfDate if a partition is missing.
    """
    if state.stream is None:
        raise ValueError(f"State {state.name} does not record changes.")
    after: Any = after_txid
    if state.appends:
        table = partitions.readable_table(connection, state)
    else:
        table, s = state_tables.changes_table_of(state), tables.state_table.c
        partitions.check_whole(connection, table.name)
        # `tidegate prune` may have removed a part of a txid so far.
        after = sa.func.greatest(after, sa.select(s.pruned_txid).where(s.state == table.name).scalar_subquery())
    order = [table.c.txid, *(table.c[key.name] for key in state.keys)]
    columns = [table.c[column.name] for column in state.stream[1]]
    statement = sa.select(*columns).where(table.c.txid > after).order_by(*order).limit(limit)
    yield from map(dict, connection.execution_options(yield_per=10_000).execute(statement).mappings())


def _in_order(state: StateSpec, table: Table) -> sa.Select[Any]:
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
            texts = [f"\\x{v.hex()}" if isinstance(v, bytes) else str(v) for v in bound]
            # A cast to a numeric column's own precision and scale would round the bound.
            types = [sa.Numeric() if isinstance(column.type, sa.Numeric) else column.type for column in columns]
            given = sa.tuple_(*(sa.cast(sa.literal(text), each) for text, each in zip(texts, types, strict=True)))
            statement = statement.where(sa.tuple_(*columns) >= given if is_first else sa.tuple_(*columns) <= given)
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
    """Yield conditions that together find the rows after a key, in key order; each reads one range of the key's index.

    Without NULLs, one comparison of rows is enough. NULLs come last; so with them, a condition fixes the first columns, and
    takes greater values or NULL in the next one. Conditions that fix most columns come first.
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
