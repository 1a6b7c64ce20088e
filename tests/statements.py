"""Runs SQL on a connection of its own."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import psycopg2
from psycopg2 import sql


def execute(conninfo: Mapping[str, Any], statement: str | sql.Composable, parameters: Any = None) -> list[tuple]:
    """Run a statement outside any transaction, or several in one; return the rows of the last."""
    with closing(psycopg2.connect(**conninfo)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        cursor.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []
