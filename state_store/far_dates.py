"""Dates and times before the year 1 and after 9999, and infinite ones, which Python lacks: read as Postgres' text."""

from typing import Any

from psycopg2 import extensions

_READERS = ((1082, extensions.PYDATE), (1114, extensions.PYDATETIME), (1184, extensions.PYDATETIMETZ))


def read_far_dates(connection: Any) -> None:
    """Make a connection return such dates as text, where psycopg2 would refuse the whole row."""
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
