"""LedgerReader: read-only snapshots of ledger and states, for people and for programs that read them often.

It logs in as a role that can change nothing, bounds every statement, and opens few connections, so that readers do not slow
down commits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection

from tidegate.state_store.base.settings import Settings
from tidegate.state_store.connections.database import Database
from tidegate.state_store.connections.local_settings import set_local, wait_at_most
from tidegate.state_store.declarations.column_spec import NAME
from tidegate.state_store.ledger import schema_revision
from tidegate.state_store.ledger.commit_witness import Witness

MOST_CONNECTIONS, PATIENCE_SECONDS = 8, 5
STATEMENT_TIMEOUT_SECONDS = 10


class LedgerReader(Database):
    """Ledger and states of all pipelines, read by the role `pg_reader`. Thread-safe; one for each process."""

    def __init__(self, settings: Settings) -> None:
        """Prepare a reader. Nothing is connected yet."""
        super().__init__(
            settings, user=settings.pg_reader, most_connections=MOST_CONNECTIONS, patience_seconds=PATIENCE_SECONDS
        )
        self.witness = Witness(settings.marks_folder, trusts_promotions=settings.trusts_promotions)

    @contextmanager
    def snapshot(
        self, doing: str, *, states: Sequence[str] = (), timeout_seconds: int = STATEMENT_TIMEOUT_SECONDS
    ) -> Iterator[Connection]:
        """Yield a connection whose statements all see one snapshot; each takes at most `timeout_seconds`.

        The caller names the `states` that it will read, so that no migration replaces their tables meanwhile.

        Raises: StoreUnavailable, AccessRefused; SchemaOutOfDate if the ledger is older or newer than this code.
        """
        names = [name for name in states if NAME.fullmatch(name)]  # no state has another name
        # A lock is given up first: only then does the error say who holds it.
        limits = {"statement_timeout": f"{timeout_seconds}s", "lock_timeout": f"{timeout_seconds * 800}ms"}
        with self._snapshot(doing, states=names, lock_timeout_seconds=timeout_seconds) as connection:
            wait_at_most(connection, timeout_seconds)
            set_local(connection, limits)
            schema_revision.check_ledger(connection)
            yield connection
