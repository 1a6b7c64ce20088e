"""Dates and times that Postgres has and Python has not, before the year 1 and after 9999: read as Postgres writes them."""

from typing import Any

from psycopg2 import extensions

_READERS = ((1082, extensions.PYDATE), (1114, extensions.PYDATETIME), (1184, extensions.PYDATETIMETZ))


def read_far_dates(connection: Any) -> None:
    """Have a connection return such a date as text, where psycopg2 would refuse the whole row."""
    for oid, reader in _READERS:
        extensions.register_type(extensions.new_type((oid,), "FAR_DATE", _Reader(reader)), connection)


class _Reader:
    """Reads one column of dates or times."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __call__(self, value: Any, cursor: Any) -> Any:
        """Return a date or time, or the text if Python cannot have it."""
        try:
            return self._reader(value, cursor)
        except (ValueError, OverflowError):
            return value
