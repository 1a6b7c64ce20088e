"""Sources: two questions, after Storm's ITridentSpout: "what is batch txid?" and "read it".

The answer to the first is metadata, plain JSON data that the store freezes before anything is read. The second gets
nothing but this metadata, so that every attempt reads the same rows.
"""

from typing import TYPE_CHECKING, Literal, Protocol

from jobs.sources.files import Files
from state_store.declaration import SourceMetadata
from state_store.errors import TidegateError
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Coordinator", "Emitter", "Files", "Source"]


class Coordinator(Protocol):
    """Answers "what is batch txid?" for one plan; it may remember what it saw of the source meanwhile."""

    def initialize_transaction(
        self, txid: int, previous_metadata: SourceMetadata | None, current_metadata: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return the metadata of batch txid, given that of txid - 1 (None for the first batch); None: nothing there yet.

        `current_metadata` is what was saved for this txid before; a transactional source returns it unchanged.

        Raises: SourceUnreadable, SourceChanged.
        """


class Emitter(Protocol):
    """Reads what the metadata of one batch names, and nothing else."""

    def emit_batch(self, spark: "SparkSession") -> "DataFrame":
        """Return exactly the rows of the batch; lazily, so failures may also come when the rows are computed.

        Raises: SourceChanged, SourceUnreadable, MalformedRecord.
        """

    def verify_batch(self) -> None:
        """Check after the rows were read that they were those of the metadata; the batch is sealed only then.

        Raises: SourceChanged.
        """

    def explain(self, error: Exception) -> TidegateError | None:
        """Return what a Spark error means in the source's terms (which file, which line), None if it is not about it."""


class Source(Protocol):
    """Where a pipeline's rows come from.

    A transactional source gives the identical rows for a txid on every attempt, each row in exactly one batch, none left
    out (SEMANTICS (a), Sources).
    """

    @property
    def kind(self) -> Literal["transactional"]:
        """What the source promises about replays."""

    @property
    def identity(self) -> str:
        """What is read, in words that change when another set of rows is meant."""

    def coordinator(self, settings: Settings) -> Coordinator:
        """Return the coordinator for one plan."""

    def emitter(self, metadata: SourceMetadata, settings: Settings) -> Emitter:
        """Return the emitter for one attempt at the batch with this metadata."""
