"""Sources plan batches and read them, as Storm's ITridentSpout does.

A `Coordinator` answers "what is batch txid?" with metadata: plain JSON data that the store freezes before anything is read.
An `Emitter` reads the batch and gets nothing but this metadata. A source's kind is its promise about a second attempt at
the same txid:

    transactional      the identical rows; each row in exactly one batch, none left out
    opaque             perhaps other rows, but each row counts in exactly one batch: an attempt may leave out what cannot be
                       reached now, and a later batch reads it
    non-transactional  nothing: rows may be lost or read twice

A new source is one file: a frozen dataclass that inherits `Source`, its `Coordinator`, its `Emitter`. Sources with
partitions start from `tidegate.jobs.sources.partitioned`. `tidegate.jobs.testing` checks that a source keeps the promise of its
kind.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from tidegate.state_store.base.errors import DeclarationInvalid, TidegateError, one_line, skip_command
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceKind, SourceMetadata

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tidegate.state_store.attempt.attempts import Attempt
    from tidegate.state_store.ledger.counted_files import TakenFile

# Columns that `Emitter.emit_records` adds: the record's place, why it cannot be read (NULL: it can), and its raw text.
HIDDEN = ORIGIN, REFUSAL, PAYLOAD = "_tidegate_origin", "_tidegate_refusal", "_tidegate_payload"
OF_ANOTHER_SOURCE = (
    "The batch was planned from another kind of source. Declare that one until the batch has committed, or give the batch up: "
    f"{skip_command()}"
)


class History(Protocol):
    """The ledger's record of earlier batches, for sources whose position is more than the previous metadata."""

    def committed(self) -> int:
        """Return the last committed txid."""

    def taken_files(self, names: Sequence[str], before_txid: int) -> "Iterator[tuple[str, Sequence[TakenFile]]]":
        """Yield each name with the files of that name in batches before a txid, one entry for each content."""

    def files_of_times(self, times: Collection[int], inodes: Collection[str], before_txid: int) -> "Sequence[TakenFile]":
        """Return the files with these modification times in batches before a txid, whatever their names.

        Those with a time of whole seconds, which many files may share, only if one of these inode numbers is theirs.
        """

    def note_times(self, files: "Sequence[TakenFile]") -> None:
        """Record new modification times of files that have counted; `mtime_ns` is the new one."""


class Coordinator(Protocol):
    """Answers "what is batch txid?" for one plan, and may cache what it saw of the source."""

    def is_ready(self, txid: int) -> bool:
        """Return whether a new batch may be opened now. Not called for a txid that has metadata: replays need no readiness."""
        del txid
        return True

    def look_back(self, history: History) -> None:
        """Receive the history of earlier batches; called before the first batch is requested."""
        del history

    def initialize_transaction(
        self, txid: int, previous_metadata: SourceMetadata | None, current_metadata: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return the metadata of batch txid, or None if there is no new data yet.

        `previous_metadata` belongs to txid - 1 (None for the first batch); `current_metadata` was saved for this txid
        before. A transactional source returns the latter unchanged. An opaque source may plan the batch again, always from
        the end of `previous_metadata`, and then never returns None: a batch without rows has metadata too, so that the
        position is not lost.

        Raises: SourceUnavailable, SourceUnreadable, SourceChanged, RangeExpired.
        """

    def success(self, txid: int) -> None:
        """Take note that all batches up to txid have committed; called before new batches are planned."""
        del txid


@dataclass(frozen=True)
class LeftAlone:
    """Names at a source that are not read, by reason; a reason continues "it ...". `read` counts the other names."""

    place: str
    pattern: str
    read: int
    names: Mapping[str, Sequence[str]]

    @property
    def count(self) -> int:
        """Return how many names are left alone."""
        return sum(map(len, self.names.values()))

    def sentence(self) -> str | None:
        """Return a summary in one line, with some of the names; None if there is nothing to report."""
        if not self.count:
            return f"{self.place} is empty." if not self.read else None
        reasons = [f"{reason}: {len(names)}, such as {names[0]}" for reason, names in self.names.items()]
        few = f"{self.pattern} matches nothing there" if not self.read else f"{self.read} match {self.pattern}"
        return one_line(f"In {self.place} {self.count} name(s) are left alone, {few}. It {'; it '.join(reasons)}.")


@dataclass(frozen=True)
class InputFacts:
    """Facts about a batch before Spark reads it; they affect speed, never results. None is unknown.

    `bytes` and `rows` are totals over all `files`. `is_verified` says that `Emitter.verify_batch` compares all of the content
    with the planned digests.
    """

    files: int = 0
    bytes: int | None = None
    rows: int | None = None
    is_verified: bool = False


@dataclass(frozen=True)
class Dataset:
    """A dataset as OpenLineage names it; `locations` are the places in it that a batch reads, empty if it has no places."""

    namespace: str
    name: str
    locations: Sequence[str] = ()


@dataclass(frozen=True)
class BatchPart:
    """A share of what a batch reads: the rows of an input or a reference; `idle`, without rows, for an input without new data.

    `expected` returns the number of rows, counted without Spark; it is called after Spark has read them. None: unknown.
    `replayed` are the columns that every attempt reads the same; None: all.
    """

    rows: "DataFrame"
    role: Literal["input", "reference", "idle"]
    expected: Callable[[], int | None]
    replayed: Collection[str] | None = None


class Emitter(Protocol):
    """Reads exactly the rows that the metadata of one batch names. One emitter serves one attempt."""

    advice: str | None = None  # in errors about files that are not as planned, instead of the usual one

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return exactly the rows of the batch, lazily: failures may also come when the rows are computed.

        Raises: SourceChanged, SourceUnavailable, SourceUnreadable, RangeExpired, MalformedRecord.
        """

    def emit_records(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return good and bad records, with the columns ORIGIN, REFUSAL and PAYLOAD.

        Called instead of `emit_batch` when the pipeline quarantines bad records. A source whose records cannot be
        malformed keeps this default; its rows then have no origin.
        """
        from pyspark.sql import functions as F  # noqa: PLC0415 - declaring a pipeline must not load pyspark

        nothing = F.lit(None).cast("string")
        return self.emit_batch(attempt, metadata).withColumns({ORIGIN: nothing, REFUSAL: nothing, PAYLOAD: nothing})

    def emit_parts(
        self, attempt: "Attempt", metadata: SourceMetadata, *, flagged: bool, with_idle: bool = True
    ) -> Mapping[str, BatchPart]:
        """Return what the batch reads by input, as `emit_records` if `flagged`; a single source has the one input "".

        `with_idle` asks also for inputs that have no new rows.

        Raises: the errors of `emit_batch`.
        """
        del with_idle
        emit = self.emit_records if flagged else self.emit_batch
        expected, replayed = partial(self.expected_rows, metadata), self.replayed_columns(metadata)
        return {"": BatchPart(emit(attempt, metadata), "input", expected, replayed)}

    def replayed_columns(self, metadata: SourceMetadata) -> Collection[str] | None:
        """Return the columns that every attempt at a batch reads the same; None: all. Others have come since it was planned."""
        del metadata
        return None

    def row_schema(self) -> str:
        """Return the columns of `emit_batch` as Spark writes them: ``name string, amount int``. Quarantine needs them."""
        raise DeclarationInvalid(
            f"{type(self).__name__} does not tell its columns: define row_schema. Records in quarantine need them, and so "
            "does an input without new rows."
        )

    def parse_payloads(self, payloads: "DataFrame") -> "DataFrame":
        """Parse quarantined raw records (ORIGIN and PAYLOAD) as `emit_records` would return them today.

        A source whose records cannot be malformed keeps this default: it has put none into quarantine.
        """
        from pyspark.sql import functions as F  # noqa: PLC0415

        row = F.from_json(F.col(PAYLOAD), self.row_schema())
        refusal = F.lit(f"{type(self).__name__} has no raw records").alias(REFUSAL)
        return payloads.select(row.alias("row"), ORIGIN, refusal, PAYLOAD).select("row.*", ORIGIN, REFUSAL, PAYLOAD)

    def replay_parts(self, attempt: "Attempt", waiting: "Waiting", *, with_idle: bool = True) -> Mapping[str, BatchPart]:
        """Return what a batch of quarantined records reads, as flagged `emit_parts`: these, and what they are joined with.

        `waiting` returns the records of an input as its emitter parses them.
        """
        del with_idle
        replayed = self.replayed_columns(attempt.source_metadata["source"] or {})  # the metadata of the batch before
        return {"": BatchPart(waiting("", self), "input", lambda: None, replayed)}

    def verify_replay(self, attempt: "Attempt") -> None:
        """Check, after the read, what a batch of quarantined records was joined with.

        Raises: as `verify_batch`.
        """
        del attempt

    def of_input(self, name: str) -> "Emitter":
        """Return the emitter that parses the records of an input; a single source has the one input "".

        Raises: SourceChanged if it is not declared any more.
        """
        del name
        return self

    def facts(self, attempt: "Attempt", metadata: SourceMetadata) -> InputFacts:
        """Return what is known of the batch without Spark; may be called before or after the rows are read.

        Raises: the errors of `emit_batch`.
        """
        del attempt, metadata
        return InputFacts()

    def expected_rows(self, metadata: SourceMetadata) -> int | None:
        """Return the batch's number of rows, counted without Spark; None if it is unknown.

        Called after the rows were computed. An attempt that read another number of rows is not sealed.
        """
        del metadata
        return None

    def undeclared(self) -> Mapping[str, Sequence[str]]:
        """Return, by input, columns that the batch has and nobody declares or ignores; called after the rows were read."""
        return {}

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:
        """Check, after the read, that the rows were those of the metadata; only then is the batch sealed.

        Raises: SourceChanged, RangeExpired, SourceUnavailable, SourceUnreadable, RowsLost.
        """
        del attempt, metadata

    def explain(self, error: Exception) -> TidegateError | None:
        """Return an error of the attempt in the source's terms (which file, which line), None if it has another cause."""
        del error
        return None


# The quarantined records of an input, by its name, as an emitter parses them.
Waiting = Callable[[str, Emitter], "DataFrame"]


@runtime_checkable
class Source(Protocol):
    """The origin of a pipeline's rows.

    The ledger keeps its position under the pipeline's name, so that one source may serve many pipelines.

    An author's own source has two more methods: ``coordinator(settings)`` returns its `Coordinator` for one plan, and
    ``emitter(spark, settings)`` its `Emitter` for one attempt.
    """

    @property
    def kind(self) -> SourceKind:
        """The source's promise about replays."""

    @property
    def identity(self) -> str:
        """A text that changes when the source stands for another set of rows. It holds no secrets: the ledger shows it."""

    @property
    def known_columns(self) -> Mapping[str, Sequence[str]]:
        """By input, the columns of which nobody has to be told; a source that looks for others declares or ignores these."""
        return {}

    def left_alone(self, settings: Settings) -> LeftAlone | None:
        """Return the names at the source that are not read; None if it has no names.

        Raises: SourceUnavailable, SourceUnreadable.
        """
        del settings
        return None

    def held_back(self, settings: Settings) -> str | None:
        """Return a sentence on what is at the source and not planned yet, because it may still change; None if nothing is.

        Raises: SourceUnavailable, SourceUnreadable, AccessRefused.
        """
        del settings
        return None

    def has_rows(self, metadata: SourceMetadata) -> bool:
        """Return whether a batch may have rows; if not, its metadata only move the position. Asks no server."""
        del metadata
        return True

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return the datasets that a batch reads, as OpenLineage names them. Asks no server."""
        del metadata, settings
        return ()

    def check_pipeline(
        self, pipeline: str, *, has_transform: bool, quarantines: bool, check: Mapping[str, str | Mapping[str, str]]
    ) -> None:
        """Refuse, at its declaration, a pipeline that cannot have this source; `check` are its conditions for records.

        Raises: ValueError.
        """
        del has_transform, quarantines, check
        if self.follows == pipeline:
            raise ValueError(f"Pipeline {pipeline} follows itself: each batch would make the next one, without an end.")

    @property
    def parts(self) -> "Mapping[str, Source]":
        """The sources of which this source is composed, by input; a single source has the one input ""."""
        return {"": self}

    @property
    def input_names(self) -> Sequence[str]:
        """The names of the inputs of which this source is composed; none for any other source."""
        return tuple(filter(None, self.parts))

    @property
    def follows(self) -> str | None:
        """The pipeline whose states are this source; None for any other source."""
        return None

    @property
    def executor_packages(self) -> Sequence[str]:
        """The Python packages that tasks need besides what all tasks need, if executors are on other machines."""
        return ()

    @property
    def keeps_files(self) -> bool:
        """Whether metadata lists files under `files`; the ledger then keeps them, so that each content counts once."""
        return False

    @property
    def reads_files(self) -> bool:
        """Whether batches are files whose sizes and numbers of rows are known before Spark reads them."""
        return self.keeps_files

    @property
    def wants_acks(self) -> bool:
        """Whether `ack` does anything; otherwise no task is started to call it."""
        return type(self).ack is not Source.ack

    def ack(self, attempt: "Attempt", settings: Settings) -> None:
        """Do what is due after the commit, such as updating lag tools. Called at least once, also for old batches.

        An exception is logged, and the batch counts all the same; a later run calls `ack` again.
        """
        del attempt, settings

    def fail(self, attempt: "Attempt", error: Exception, settings: Settings) -> None:
        """Do what is due after an attempt has failed. An exception is logged and changes nothing."""
        del attempt, error, settings
