"""Dates and times in a session: in UTC, whatever time zone the server, a role or PGTZ sets; and those that Python lacks.

A time zone decides what a time without one means in a key, and the day of a time in an author's statement. Dates and times
before the year 1 and after 9999, and infinite ones, are read as Postgres' text.
"""

from typing import Any

from psycopg2 import extensions

_READERS = ((1082, extensions.PYDATE), (1114, extensions.PYDATETIME), (1184, extensions.PYDATETIMETZ))


def prepare_times(connection: Any) -> None:
    """Put a new connection's session into UTC, and make it return far dates as text, where psycopg2 would refuse the row."""
    if connection.get_parameter_status("TimeZone") != "UTC":
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SET TIME ZONE 'UTC'")  # a pooler keeps this setting for its client
        connection.autocommit = False
    for oid, reader in _READERS:
        extensions.register_type(extensions.new_type((oid,), "FAR_DATE", _Reader(reader)), connection)


class _Reader:
    """Reads one column of dates or times."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __call__(self, value: Any, cursor: Any) -> Any:
        """Return a date or time, or the text if Python cannot represent it."""
        if value is not None and value.endswith("infinity"):  # psycopg2 would give the first or the last one that Python has
            return value
        try:
            return self._reader(value, cursor)
        except (ValueError, OverflowError):
            return value
