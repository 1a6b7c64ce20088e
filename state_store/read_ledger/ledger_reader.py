"""LedgerReader: read-only snapshots of ledger and states, for people and for programs that read them often.

It logs in as a role that can change nothing, bounds every statement, and opens few connections, so that readers do not slow
down commits.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection

from tidegate.state_store.base.settings import Settings
from tidegate.state_store.connections.database import Database
from tidegate.state_store.connections.local_settings import set_local, wait_at_most
from tidegate.state_store.declarations.column_spec import NAME
from tidegate.state_store.ledger import schema_revision
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.read_ledger import wait_facts
from tidegate.state_store.read_ledger.wait_facts import Marks, Wait

MOST_CONNECTIONS, PATIENCE_SECONDS = 8, 5
STATEMENT_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class Moment:
    """A snapshot that also shows what pipelines wait for."""

    connection: Connection
    settings: Settings
    _marks: Marks
    _witness: Witness

    def waits(self, requested: Mapping[str, int | None]) -> dict[str, Wait]:
        """Return what each of these pipelines, and its requested txid (a batch's number) if any, waits for."""
        return wait_facts.read(self.connection, requested, self._marks, self._witness)


class LedgerReader(Database):
    """Ledger and states of all pipelines, read by the role `pg_reader`. Thread-safe; one for each process."""

    def __init__(self, settings: Settings) -> None:
        """Prepare a reader. Nothing is connected yet."""
        super().__init__(
            settings, user=settings.pg_reader, most_connections=MOST_CONNECTIONS, patience_seconds=PATIENCE_SECONDS
        )
        self._witness = Witness(settings)

    @contextmanager
    def moment(self, doing: str, pipelines: Sequence[str]) -> Iterator[Moment]:
        """Yield a snapshot that also shows what these pipelines wait for.

        Raises: the errors of `snapshot`.
        """
        with self.snapshot(doing) as connection:
            marks = wait_facts.marks(connection, pipelines, self._witness)  # before the snapshot that is compared with them
        with self.snapshot(doing) as connection:
            yield Moment(connection, self.settings, marks, self._witness)

    @contextmanager
    def snapshot(
        self, doing: str, *, states: Sequence[str] = (), timeout_seconds: int = STATEMENT_TIMEOUT_SECONDS
    ) -> Iterator[Connection]:
        """Yield a connection whose statements all see one snapshot; each takes at most `timeout_seconds`.

        The caller names the `states` that it will read, so that no migration replaces their tables meanwhile.

        Raises: StoreUnavailable, AccessRefused; SchemaOutOfDate if the ledger is older or newer than this code.
        """
        names = [name for name in states if NAME.fullmatch(name)]  # no state has another name
        with self._snapshot(doing, states=names, lock_timeout_seconds=timeout_seconds) as connection:
            wait_at_most(connection, timeout_seconds)
            set_local(connection, {"statement_timeout": f"{timeout_seconds}s"})
            schema_revision.check_ledger(connection)
            yield connection
