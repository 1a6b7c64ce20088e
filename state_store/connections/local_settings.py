"""Settings of Postgres for one transaction, and how long it may wait or stay open."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.connections.answer_deadlines import MARGIN_SECONDS


def hold_open(connection: Connection) -> None:
    """Let this transaction stay open and idle for any time."""
    connection.execute(sa.select(*local({"idle_in_transaction_session_timeout": "0"}), without_time_limit()))


def wait_at_most(connection: Connection, seconds: float) -> None:
    """Wait so long for the answer to each further statement of this transaction, longer than the server takes at most."""
    connection.connection.driver_connection.answer_seconds = seconds + MARGIN_SECONDS  # type: ignore[union-attr]


def set_local(connection: Connection, settings: Mapping[str, str]) -> None:
    """Change settings of Postgres for this transaction, which works through a connection pooler, too."""
    connection.execute(sa.select(*local(settings)))


def local(settings: Mapping[str, Any]) -> list[sa.ColumnElement[str]]:
    """Return the calls that do so, for a SELECT with others."""
    return [sa.func.set_config(name, value, True) for name, value in settings.items()]


def without_time_limit() -> sa.ColumnElement[Any]:
    """Return the call that lifts a limit on the whole transaction, under which a large merge would never end.

    From Postgres 17 on, a role or a database may set one.
    """
    name = "transaction_timeout"
    return sa.case((sa.func.current_setting(name, True).is_not(None), sa.func.set_config(name, "0", True)))
