"""What the ledger knows of a pipeline's earlier batches, for the coordinators that ask (`jobs.sources.History`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from state_store import StateStore
from state_store.source_files import TakenFile


@dataclass(frozen=True)
class LedgerHistory:
    """The ledger as one pipeline's coordinator sees it."""

    store: StateStore
    pipeline: str

    def committed(self) -> int:
        """Return the last committed txid."""
        return self.store.committed(self.pipeline)

    def taken_files(self, names: Sequence[str], before_txid: int) -> Iterator[tuple[str, Sequence[TakenFile]]]:
        """Yield each name with its files in batches before a txid."""
        return self.store.taken_files(self.pipeline, names, before_txid)

    def note_times(self, files: Sequence[TakenFile]) -> None:
        """Write down when files that have counted were touched since."""
        self.store.note_times(self.pipeline, files)
