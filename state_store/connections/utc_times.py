"""Dates and times in a session: in UTC, whatever time zone the server, a role or PGTZ sets.

A time zone decides what a time without one means in a key, and the day of a time in an author's statement.
"""

from typing import Any


def prepare_times(connection: Any) -> None:
    """Put a new connection's session into UTC. The connection is psycopg2's."""
    if connection.get_parameter_status("TimeZone") != "UTC":
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SET TIME ZONE 'UTC'")  # a pooler keeps this setting for its client
        connection.autocommit = False
