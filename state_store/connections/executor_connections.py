"""Connections of Spark's tasks: while the server, or the role, has no free one, a task waits for it.

A cluster has more tasks than Postgres has connections. `ALTER ROLE tidegate_stager CONNECTION LIMIT` caps them over all
sessions and pipelines. Runs on executors, so it imports nothing but psycopg2.
"""

import logging
import time
from typing import Any

import psycopg2

from tidegate.state_store.connections.answer_deadlines import open_connection
from tidegate.state_store.connections.postgres_errors import has_no_free_connection

logger = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 300.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0


def connect(conninfo: dict[str, Any], *, longest_wait_seconds: float = LONGEST_WAIT_SECONDS) -> Any:
    """Return a connection, after a wait for a free one if necessary.

    Raises: psycopg2.OperationalError, at once for any other reason.
    """
    deadline, pause = time.monotonic() + longest_wait_seconds, FIRST_PAUSE_SECONDS
    while True:
        try:
            return psycopg2.connect(**conninfo, connection_factory=open_connection)
        except psycopg2.OperationalError as error:
            if not has_no_free_connection(error) or time.monotonic() + pause > deadline:
                raise
            logger.info("waiting for a free connection: %s", str(error).strip())
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
