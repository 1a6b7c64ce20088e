"""Sources: two questions, after Storm's ITridentSpout: "what is batch txid?" and "read it".

The answer to the first is metadata, plain JSON data that the store freezes before anything is read. The second gets
nothing but this metadata. What a source promises about a second attempt at the same txid is its kind:

    transactional      the identical rows; each row in exactly one batch, none left out
    opaque             perhaps other rows, but each row counts in exactly one batch: an attempt may leave out what cannot be
                       reached now, and a later batch has it
    non-transactional  nothing: rows may be lost or come twice

A new source is one file: a frozen dataclass that inherits `Source`, its `Coordinator`, its `Emitter`. Sources made of
partitions start from `jobs.sources.partitioned`. `jobs.testing` tells whether the result keeps the promise of its kind.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from state_store.declaration import SourceKind, SourceMetadata
from state_store.errors import DeclarationInvalid, TidegateError
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_store.attempts import Attempt
    from state_store.source_files import TakenFile

__all__ = ["ORIGIN", "PAYLOAD", "REFUSAL", "Coordinator", "Emitter", "History", "InputFacts", "LeftAlone", "Source"]

# What `Emitter.emit_records` adds to each row: where the record stood, why it cannot be read (NULL: it can), its raw text.
ORIGIN, REFUSAL, PAYLOAD = "_tidegate_origin", "_tidegate_refusal", "_tidegate_payload"


class History(Protocol):
    """What the ledger knows of a pipeline's earlier batches, for sources whose position is more than one batch's metadata."""

    def committed(self) -> int:
        """Return the last committed txid."""

    def taken_files(self, names: Sequence[str], before_txid: int) -> "Iterator[tuple[str, Sequence[TakenFile]]]":
        """Yield each name with the files of this name that batches before a txid read or have read, each content one."""

    def note_times(self, files: "Sequence[TakenFile]") -> None:
        """Write down when files that have counted were touched since: their `mtime_ns` is the new one."""


class Coordinator(Protocol):
    """Answers "what is batch txid?" for one plan; it may remember what it saw of the source meanwhile."""

    def is_ready(self, txid: int) -> bool:
        """Tell whether a new batch may be opened now. Not asked for a txid that has metadata: replays need no readiness."""
        del txid
        return True

    def look_back(self, history: History) -> None:
        """Take what the ledger knows of earlier batches; called before the first batch is asked for."""
        del history

    def initialize_transaction(
        self, txid: int, previous_metadata: SourceMetadata | None, current_metadata: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return the metadata of batch txid, given that of txid - 1 (None for the first batch); None: nothing there yet.

        `current_metadata` is what was saved for this txid before. A transactional source returns it unchanged. An opaque
        one may cut the batch anew, always from where `previous_metadata` ends, and never returns None then: a batch
        without rows has metadata too, so that the position is not lost.

        Raises: SourceUnavailable, SourceUnreadable, SourceChanged, RangeExpired.
        """

    def success(self, txid: int) -> None:
        """Take note that everything up to txid has committed; called before new batches are planned."""
        del txid


@dataclass(frozen=True)
class LeftAlone:
    """What lies at a source and is not read: names by the reason, in words that go on after "it". `read` counts the others."""

    place: str
    pattern: str
    read: int
    names: Mapping[str, Sequence[str]]

    @property
    def count(self) -> int:
        """Return how many names are left alone."""
        return sum(map(len, self.names.values()))

    def sentence(self) -> str | None:
        """Return the whole in a line, with some of the names; None if there is nothing to tell."""
        if not self.count:
            return f"{self.place} is empty." if not self.read else None
        reasons = [f"{why}: {len(names)}, such as {names[0]}" for why, names in self.names.items()]
        few = f"{self.pattern} matches nothing there" if not self.read else f"{self.read} match {self.pattern}"
        return f"In {self.place} {self.count} name(s) are left alone, {few}. It {'; it '.join(reasons)}."


@dataclass(frozen=True)
class InputFacts:
    """What a source knows of a batch before Spark reads it; None is unknown. It decides about speed, never about results.

    `bytes` and `rows` are of all `files` together. `is_verified` says that `verify_batch` compares all of the content with
    digests that were planned.
    """

    files: int = 0
    bytes: int | None = None
    rows: int | None = None
    is_verified: bool = False


class Emitter(Protocol):
    """Reads what the metadata of one batch names, and nothing else; one emitter serves one attempt."""

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return exactly the rows of the batch; lazily, so failures may also come when the rows are computed.

        Raises: SourceChanged, SourceUnavailable, SourceUnreadable, RangeExpired, MalformedRecord.
        """

    def emit_records(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows of `emit_batch` and those that it would refuse, with the columns ORIGIN, REFUSAL and PAYLOAD.

        Asked for instead of `emit_batch` when the pipeline quarantines bad records. A source whose records cannot be
        malformed keeps this; its rows then have no origin.
        """
        from pyspark.sql import functions as F  # noqa: PLC0415, N812 - declaring a pipeline must not load pyspark

        nothing = F.lit(None).cast("string")
        return self.emit_batch(attempt, metadata).withColumns({ORIGIN: nothing, REFUSAL: nothing, PAYLOAD: nothing})

    def row_schema(self) -> str:
        """Return the columns of `emit_batch` as Spark writes them: ``name string, amount int``. Asked for by quarantine."""
        raise DeclarationInvalid(f"{type(self).__name__} does not tell its columns, so its records cannot be quarantined.")

    def parse_payloads(self, payloads: "DataFrame") -> "DataFrame":
        """Return quarantined raw records, rows of ORIGIN and PAYLOAD, as `emit_records` would return them today.

        A source whose records cannot be malformed keeps this: it has put none into quarantine.
        """
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        row = F.from_json(F.col(PAYLOAD), self.row_schema())
        refusal = F.lit(f"{type(self).__name__} has no raw records").alias(REFUSAL)
        return payloads.select(row.alias("row"), ORIGIN, refusal, PAYLOAD).select("row.*", ORIGIN, REFUSAL, PAYLOAD)

    def facts(self, attempt: "Attempt", metadata: SourceMetadata) -> InputFacts:
        """Return what is known of the batch without Spark; may be asked for before or after the rows.

        Raises: as `emit_batch`.
        """
        del attempt, metadata
        return InputFacts()

    def expected_rows(self, metadata: SourceMetadata) -> int | None:
        """Return how many rows the batch has by a count that is not Spark's; None if there is none.

        Asked after the rows were computed. An attempt that read another number of rows is not sealed.
        """
        del metadata
        return None

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:
        """Check after the rows were read that they were those of the metadata; the batch is sealed only then.

        Raises: SourceChanged, RangeExpired.
        """
        del attempt, metadata

    def explain(self, error: Exception) -> TidegateError | None:
        """Return what a Spark error means in the source's terms (which file, which line), None if it is not about it."""
        del error
        return None


class Source(Protocol):
    """Where a pipeline's rows come from.

    Its position is kept in the ledger under the pipeline's name, so that the same source may serve many pipelines.
    """

    @property
    def kind(self) -> SourceKind:
        """What the source promises about replays."""

    @property
    def identity(self) -> str:
        """What is read, in words that change when another set of rows is meant; no secrets: the ledger shows it."""

    def coordinator(self, settings: Settings) -> Coordinator:
        """Return the coordinator for one plan.

        Raises: SourceUnavailable, SourceUnreadable.
        """

    def emitter(self, spark: "SparkSession", settings: Settings) -> Emitter:
        """Return the emitter for one attempt."""

    def left_alone(self, settings: Settings) -> LeftAlone | None:
        """Return what lies at the source and is not read, for people to see that it is not; None if there can be no such thing.

        Raises: SourceUnavailable, SourceUnreadable.
        """
        del settings
        return None

    @property
    def keeps_files(self) -> bool:
        """Whether metadata lists files under `files`, which the ledger keeps, so that the content of each counts once."""
        return False

    @property
    def wants_acks(self) -> bool:
        """Whether `ack` does anything: if not, nobody is started to call it."""
        return type(self).ack is not Source.ack

    def ack(self, attempt: "Attempt", settings: Settings) -> None:
        """Do what is due after the batch has committed, such as telling lag tools. Called at least once, also for old ones.

        What it raises is logged, and the batch counts all the same; the source is told again by a later run.
        """
        del attempt, settings

    def fail(self, attempt: "Attempt", error: Exception, settings: Settings) -> None:
        """Do what is due after an attempt has failed. What it raises is logged and changes nothing."""
        del attempt, error, settings
