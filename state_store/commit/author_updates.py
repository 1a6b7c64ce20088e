"""An author's own update: statements that run in the commit of a batch, under the cursor's lock, over the batch's rows.

They take effect with the batch, once, in txid order. So an update must not end the transaction, nor change the role or a
setting of what follows:

- Postgres refuses a COMMIT in the middle: the table ``open_commit`` has a row until the end, and a deferred trigger refuses a
  transaction that leaves it there.
- After each update, transaction, role and settings have to be the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg2
import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from tidegate.state_store.base import process_exits
from tidegate.state_store.base.errors import DeclarationInvalid, TidegateError, class_and_text
from tidegate.state_store.connections import lock_holders
from tidegate.state_store.connections.postgres_errors import translate
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.ledger import tables

# The transaction, its role, the pipeline whose states it may write, and what its session has set.
_AROUND = sa.text("""
SELECT concat_ws(' ', pg_current_xact_id(), current_user, current_setting('tidegate.writer', true),
    string_agg(name || '=' || setting, ' ' ORDER BY name))
FROM pg_settings WHERE source = 'session'
""")


@dataclass(frozen=True)
class UpdateBatch:
    """What an update gets: its batch, and the way to Postgres.

    `rows` are the batch's rows as a table: the declared columns, and `position`, which is different for each row.
    """

    pipeline: str
    txid: int
    rows: sa.FromClause
    _connection: Connection = field(repr=False)

    def execute(self, statement: sa.Executable, parameters: Any = None) -> sa.CursorResult[Any]:
        """Execute a statement of SQLAlchemy in the batch's transaction, as the role that commits (setting `pg_user`).

        Raises: the errors of SQLAlchemy.
        """
        return self._connection.execute(statement, parameters)


@contextmanager
def unfinished(connection: Connection, pipeline: str) -> Iterator[str]:
    """Make Postgres refuse the transaction's COMMIT within the block; yield what `run` has to find `around` each update."""
    connection.execute(sa.insert(tables.open_commit).values(pipeline=pipeline))
    yield connection.execute(_AROUND).scalar_one()
    connection.execute(sa.delete(tables.open_commit).where(tables.open_commit.c.pipeline == pipeline))


def run(connection: Connection, batch: UpdateBatch, state: StateSpec, around: str, *, before: bool) -> None:
    """Run a state's update for a batch, or its code for `before` the other states are merged.

    Raises: DeclarationInvalid if the update fails by itself, or does what it must not do; the driver's errors, translated.
    """
    name = f"The update {state.name} of pipeline {batch.pipeline}"
    code = state.before if before else state.update
    if code is None:
        raise DeclarationInvalid(f"{name} is code, and this process does not have it: commit where the pipeline is declared.")
    try:
        with process_exits.as_errors():
            code(batch)
        is_as_it_was = connection.scalar(_AROUND) == around
    except (TidegateError, MemoryError):
        raise
    except (DBAPIError, psycopg2.Error) as error:
        driver_error = error.orig if isinstance(error, DBAPIError) else error
        if lock_holders.waited(driver_error):
            raise  # who holds the lock is asked on another connection, as this transaction has failed
        raise translate(driver_error, f"running the update {state.name}") from error
    except (Exception, SystemExit) as error:
        raise DeclarationInvalid(f"{name} failed: {class_and_text(error)}") from error
    if not is_as_it_was:
        raise DeclarationInvalid(
            f"{name} has ended the transaction of its batch, or changed its role or a setting. It may only read and write."
        )
