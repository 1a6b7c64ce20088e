"""Point lookups: the rows of some keys. Imports psycopg2 alone, so that a command starts quickly."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import psycopg2
from psycopg2 import sql

from tidegate.state_store.base.errors import SchemaOutOfDate, UsageError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.connections.executor_connections import connect
from tidegate.state_store.connections.postgres_errors import translate
from tidegate.state_store.connections.table_locks import STATE, hold
from tidegate.state_store.connections.utc_times import prepare_times
from tidegate.state_store.declarations.pipeline_spec import StateSpec

Row = Mapping[str, Any]
KEYS_PER_STATEMENT = 5000
SHOWN_PARTITIONS = 5
ROW = "s"  # the alias of the state's table in a statement
_ALL = sql.SQL("true")
_IS_SAME = """
    SELECT noted.table_oid IS NOT DISTINCT FROM found.oid FROM tidegate.state_table AS noted
    LEFT JOIN pg_class AS found ON found.relname = noted.state AND found.relnamespace = 'state'::regnamespace
    WHERE noted.state = %s AND noted.table_oid IS NOT NULL
"""
# Range partitions of a state that commits have created, and that its table has lost.
_MISSING_RANGES = """
    SELECT made.partition FROM tidegate.state_range AS made WHERE made.state = %s AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_inherits JOIN pg_catalog.pg_class AS part ON part.oid = inhrelid
        WHERE inhparent = to_regclass(format('state.%%I', made.state)) AND part.relname = made.partition
            AND NOT inhdetachpending
    )
"""


def get(settings: Settings, state: StateSpec, keys: Sequence[Sequence[str | None]]) -> list[Row | None]:
    """Return the rows of these keys from one snapshot, in their order; None for a key without a row.

    A key is its values in text, None for NULL, in the order of the key's columns; without key columns it is empty.

    Raises: what `found` raises; StoreUnavailable, AccessRefused, SchemaOutOfDate.
    """
    try:
        with closing(connect({**settings.conninfo(), "application_name": "tidegate get"})) as connection:
            prepare_times(connection)
            connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
            hold(connection, [state.name])
            return found(connection, state, keys)
    except psycopg2.Error as error:
        raise translate(error, f"looking up keys in state {state.name}") from error


def found(
    connection: Any, state: StateSpec, keys: Sequence[Sequence[Any]], *, most_characters: int | None = None
) -> list[Row | None]:
    """Return the rows of these keys, in their order; None for a key without a row. The connection is psycopg2's.

    Raises: UsageError for a value that its column cannot hold, a wrong number of values, or rows of more characters together;
    SchemaOutOfDate if a row may be missing because a partition is.
    """
    check_widths(state, keys)
    result: list[Row | None] = [None] * len(keys)
    count = characters = 0
    try:
        for position, row in rows(connection, state, keys):
            result[position] = row
            count += 1
            characters += sum(len(str(value)) for value in row.values()) if most_characters else 0
            if most_characters and characters > most_characters and count > 1:
                raise UsageError(f"The rows of these keys have over {most_characters} characters. Ask for fewer at a time.")
    except (psycopg2.DataError, ValueError) as error:  # psycopg2 itself refuses NUL and text that is not UTF-8
        raise no_such_key(state, error) from error
    if None in result:
        check_whole(connection, state.name)
    return result


def check_whole(connection: Any, table: str) -> None:
    """Refuse a table in schema state that lacks a partition, whose rows would be missing. The connection is psycopg2's.

    Raises: SchemaOutOfDate.
    """
    with connection.cursor() as cursor:
        cursor.execute(_MISSING_RANGES, [table])
        missing = [name for (name,) in cursor]
    if missing:
        shown = ", ".join(sorted(missing)[:SHOWN_PARTITIONS]) + (" ..." if len(missing) > SHOWN_PARTITIONS else "")
        name = f"{STATE}.{table}"
        raise SchemaOutOfDate(
            f"Table {name} lacks {len(missing)} of the partitions that commits have made, with all their rows: {shown}. What "
            f"was detached has to be attached again, with the bounds that tidegate.state_range has for it (ALTER TABLE {name} "
            "ATTACH PARTITION ...). If it is to be gone: tidegate prune. Nothing was changed."
        )


def is_same_table(connection: Any, table: str) -> bool:
    """Return whether a state's table is the one that the ledger has noted, if it has. The connection is psycopg2's."""
    with connection.cursor() as cursor:
        cursor.execute(_IS_SAME, [table])
        row = cursor.fetchone()
    return row is None or row[0]


def check_widths(state: StateSpec, keys: Sequence[Sequence[Any]]) -> None:
    """Refuse a key without exactly one value per key column.

    Raises: UsageError.
    """
    columns = [column.name for column in state.row_key]
    if (wrong := next((key for key in keys if len(key) != len(columns)), None)) is not None:
        names = ", ".join(columns) or "nothing"
        raise UsageError(f"State {state.name} is keyed by {names}: give {len(columns)} values, not {len(wrong)}.")


def no_such_key(state: StateSpec, error: BaseException | None) -> UsageError:
    """Return the error for a value that a key column cannot hold, from the driver's."""
    return UsageError(f"State {state.name} has no such key: {str(error).splitlines()[0].rstrip('.')}.")


def rows(connection: Any, state: StateSpec, keys: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Row]]:
    """Yield each existing row, with its key's position among those given. The connection is psycopg2's.

    None in a key means NULL.

    Raises: the driver's DataError for a value that its column cannot hold.
    """
    names = [column.name for column in state.shown]
    selected = [sql.Identifier(ROW, name) for name in names]
    # Without precision and scale, to which a cast would round: a key with more digits than its column is simply not found.
    key_columns = [(key.name, key.type.name.partition("(")[0]) for key in state.row_key]
    with connection.cursor() as cursor:
        for chunk in chunks(keys):
            cursor.execute(statement(state.name, key_columns, chunk.nulls, selected), chunk.arrays)
            for number, *row in cursor.fetchall():
                yield chunk.positions[number], dict(zip(names, row, strict=True))


class Chunk(NamedTuple):
    """Some of the keys: the columns in which they all have NULL, their positions, and arrays for the statement."""

    nulls: tuple[bool, ...]
    positions: list[int]
    arrays: list[list[Any]]


def chunks(keys: Sequence[Sequence[Any]]) -> Iterator[Chunk]:
    """Divide keys by the columns in which they have NULL, at most KEYS_PER_STATEMENT together."""
    alike: dict[tuple[bool, ...], list[int]] = {}
    for position, key in enumerate(keys):
        alike.setdefault(tuple(value is None for value in key), []).append(position)
    for nulls, positions in alike.items():
        for start in range(0, len(positions), KEYS_PER_STATEMENT):
            some = positions[start : start + KEYS_PER_STATEMENT]
            arrays = [[keys[position][place] for position in some] for place, is_null in enumerate(nulls) if not is_null]
            yield Chunk(nulls, some, [*arrays, list(range(len(some)))])


def statement(
    table: str,
    key: Sequence[tuple[str, str]],
    nulls: Sequence[bool],
    selected: Sequence[sql.Composable],
    condition: sql.Composable = _ALL,
) -> sql.Composable:
    """Return the statement that yields, for each key of a chunk that has a row, its number in the chunk and what is `selected`.

    `key` has the key's columns, each with the Postgres type in which its values are sent. `selected` and `condition` name the
    row ROW.
    """
    # IS NULL uses an index, which IS NOT DISTINCT FROM does not.
    same = [
        sql.SQL("{} IS NULL").format(sql.Identifier(ROW, name))
        if is_null
        else sql.SQL("{} = {}").format(sql.Identifier(ROW, name), sql.Identifier("requested", f"key_{place}"))
        for place, ((name, _), is_null) in enumerate(zip(key, nulls, strict=True))
    ]
    sent = [(place, kind) for place, ((_, kind), is_null) in enumerate(zip(key, nulls, strict=True)) if not is_null]
    # The types' names come from the closed list in columns.ColumnType.
    arrays = [sql.SQL("%s::{}[]").format(sql.SQL(kind)) for _, kind in sent]
    names = [sql.Identifier(f"key_{place}") for place, _ in sent]
    return sql.SQL(
        "SELECT requested.number, {selected} FROM unnest({arrays}) AS requested ({names}) "
        "JOIN {table} AS {row} ON {same} WHERE {condition}"
    ).format(
        selected=sql.SQL(", ").join(selected),
        arrays=sql.SQL(", ").join([*arrays, sql.SQL("%s::integer[]")]),
        names=sql.SQL(", ").join([*names, sql.Identifier("number")]),
        table=sql.Identifier(STATE, table),
        row=sql.Identifier(ROW),
        same=sql.SQL(" AND ").join(same) if same else _ALL,
        condition=condition,
    )
