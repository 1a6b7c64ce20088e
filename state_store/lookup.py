"""Point lookups: the rows of some keys. Imports psycopg2 alone, so that a command starts quickly."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import psycopg2
from psycopg2 import sql
from psycopg2.extras import execute_values

from state_store.declaration import StateSpec
from state_store.driver_errors import translate
from state_store.errors import UsageError
from state_store.held_tables import STATE, hold
from state_store.session_times import prepare_times
from state_store.settings import Settings

KEYS_PER_STATEMENT = 1000
# A row per partition of a divided table, or one with NULL if it has lost all of them; none if the table is not divided.
_MODULI = r"""
    SELECT substring(pg_get_expr(part.relpartbound, part.oid) FROM 'modulus (\d+)')::integer
    FROM pg_catalog.pg_class AS divided
    LEFT JOIN pg_catalog.pg_inherits ON inhparent = divided.oid AND NOT inhdetachpending
    LEFT JOIN pg_catalog.pg_class AS part ON part.oid = inhrelid
    WHERE divided.oid = to_regclass(%s) AND divided.relkind = 'p'
"""
# Partitions that commits have made of a state that is divided by ranges, and that its table does not have any more.
_MISSING_RANGES = """
    SELECT made.partition FROM tidegate.state_range AS made WHERE made.state = %s AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_inherits JOIN pg_catalog.pg_class AS part ON part.oid = inhrelid
        WHERE inhparent = to_regclass(format('state.%%I', made.state)) AND part.relname = made.partition
            AND NOT inhdetachpending
    )
"""


def get(settings: Settings, state: StateSpec, keys: Sequence[Sequence[str]]) -> list[Mapping[str, Any] | None]:
    """Return the rows of these keys from one snapshot, None where there is none.

    A key is given as its values in text, in the order of the key's columns; Postgres converts them. A state without key columns
    has the empty key.

    Raises: UsageError for a value that its column cannot hold, or a wrong number of values; StoreUnavailable, AccessRefused,
    SchemaOutOfDate, also if a partition of the table is missing: its keys would have no rows.
    """
    check_widths(state, keys)
    result: list[Mapping[str, Any] | None] = [None] * len(keys)
    try:
        with closing(psycopg2.connect(**settings.conninfo(), application_name="tidegate get")) as connection:
            prepare_times(connection)
            connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
            hold(connection, [state.name])
            for position, row in rows(connection, state, keys):
                result[position] = row
            if (state.hash_partitions > 1 or state.ranges) and None in result:
                _check_whole(connection, state)
    except (psycopg2.DataError, ValueError) as error:  # psycopg2 itself refuses NUL and text that is not UTF-8
        raise no_such_key(state, error) from error
    except psycopg2.Error as error:
        raise translate(error, f"looking up keys in state {state.name}") from error
    return result


def _check_whole(connection: Any, state: StateSpec) -> None:
    """Refuse a table that lacks a partition.

    Raises: SchemaOutOfDate.
    """
    table = f"{STATE}.{state.table_name}"
    moduli: list[int | None] = []
    missing: list[str] = []
    if state.ranges:
        missing = missing_ranges(connection, state.name)
    else:
        with connection.cursor() as cursor:
            cursor.execute(_MODULI, [table])
            moduli = [modulus for (modulus,) in cursor]
    if not missing and (not moduli or set(moduli) == {len(moduli)}):
        return
    from state_store import hash_partitions, range_partitions  # noqa: PLC0415 - SQLAlchemy takes longer than the command

    refusal = range_partitions.why_not_whole(table, missing)
    refusal = refusal or hash_partitions.why_not_whole(table, [modulus for modulus in moduli if modulus])
    if refusal:
        raise refusal


def missing_ranges(connection: Any, state: str) -> list[str]:
    """Return the partitions that a state lacks of those that commits have made by ranges. The connection is psycopg2's."""
    with connection.cursor() as cursor:
        cursor.execute(_MISSING_RANGES, [state])
        return [name for (name,) in cursor]


def check_widths(state: StateSpec, keys: Sequence[Sequence[Any]]) -> None:
    """Refuse a key that has not one value for each of the key's columns.

    Raises: UsageError.
    """
    columns = [column.name for column in state.row_key]
    if (wrong := next((key for key in keys if len(key) != len(columns)), None)) is not None:
        names = ", ".join(columns) or "nothing"
        raise UsageError(f"State {state.name} is keyed by {names}: give {len(columns)} values, not {len(wrong)}.")


def no_such_key(state: StateSpec, error: BaseException | None) -> UsageError:
    """Return the error for a value that a column of the key cannot hold, from that of the driver."""
    return UsageError(f"State {state.name} has no such key: {str(error).splitlines()[0].rstrip('.')}.")


def rows(connection: Any, state: StateSpec, keys: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of keys that exist, each with the key's position among those given. The connection is psycopg2's.

    None in a key finds the row with NULL there.

    Raises: the driver's DataError for a value that its column cannot hold.
    """
    names = [column.name for column in state.shown]
    alike: dict[tuple[bool, ...], list[tuple[Any, ...]]] = {}
    for position, key in enumerate(keys):
        given = (value for value in key if value is not None)
        alike.setdefault(tuple(value is None for value in key), []).append((position, *given))
    with connection.cursor() as cursor:
        for nulls, numbered in alike.items():
            statement = _statement(state, names, nulls)
            for start in range(0, len(numbered), KEYS_PER_STATEMENT):
                for position, *row in execute_values(
                    cursor, statement, numbered[start : start + KEYS_PER_STATEMENT], fetch=True
                ):
                    yield position, dict(zip(names, row, strict=True))


def _statement(state: StateSpec, names: Sequence[str], nulls: Sequence[bool]) -> sql.Composable:
    """Return the statement for keys with NULL in these columns: IS NULL uses an index, IS NOT DISTINCT FROM does not."""
    requested = [sql.Identifier(f"key_{place}") for place, is_null in enumerate(nulls) if not is_null]
    same = [
        sql.SQL("{} IS NULL").format(sql.Identifier("s", key.name))
        if is_null
        # The type's name comes from the closed list in columns.ColumnType; without precision and scale, to which a cast
        # would round: a key with more digits than its column is simply not found.
        else sql.SQL("{} = requested.{}::{}").format(
            sql.Identifier("s", key.name), sql.Identifier(f"key_{place}"), sql.SQL(key.type.name.partition("(")[0])
        )
        for place, (key, is_null) in enumerate(zip(state.row_key, nulls, strict=True))
    ]
    return sql.SQL(
        "SELECT requested.position, {columns} FROM (VALUES %s) AS requested ({requested}) JOIN {table} AS s ON {same}"
    ).format(
        columns=sql.SQL(", ").join(sql.Identifier("s", name) for name in names),
        requested=sql.SQL(", ").join([sql.Identifier("position"), *requested]),
        table=sql.Identifier(STATE, state.name),
        same=sql.SQL(" AND ").join(same) if same else sql.SQL("true"),
    )
