"""Sources that read the data files of a table in the order of its own log: Delta Lake, Iceberg."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from tidegate.jobs.sources import Coordinator, Source
from tidegate.state_store.base.errors import SourceChanged
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata


class DataFilesSource(Source):
    """A table; a batch has up to `max_files` data files, and more than one only if they fit into `max_bytes`."""

    table: str
    schema: Mapping[str, str]
    ignored_columns: Sequence[str]
    max_files: int
    max_bytes: int | None
    generation: int  # from 1 on; raised by the author to read the table from its start again

    @property
    def known_columns(self) -> Mapping[str, Sequence[str]]:
        """The columns that are declared or ignored."""
        return {"": (*self.schema, *getattr(self, "partitions", ()), *self.ignored_columns)}

    def has_rows(self, metadata: SourceMetadata) -> bool:
        """Return whether the batch has data files; without any, it only moves the position."""
        return bool(metadata["data_files"])

    @property
    def reads_files(self) -> bool:
        """True: sizes and numbers of rows are known before reading."""
        return True


class DataFile(Protocol):
    """A data file of a table."""

    @property
    def size(self) -> int | None:
        """The size in bytes; None if the log does not say it."""
        ...


File = TypeVar("File", bound=DataFile)
Position = TypeVar("Position")


class DataFilesCoordinator(Coordinator, Generic[File, Position]):
    """Divides new data files into batches; a subclass finds the files, and writes the metadata."""

    OWN: ClassVar[str]  # a key that only the metadata of this table format has

    def __init__(self, source: DataFilesSource, place: object) -> None:
        self._limits = source
        self._place = place  # the table's name in messages
        self._new: Iterator[tuple[File | None, Position]] | None = None
        self._next: tuple[File | None, Position] | None = None

    def initialize_transaction(
        self,
        txid: int,  # noqa: ARG002 - not a position: batches of quarantined records have txids too
        previous_metadata: SourceMetadata | None,
        current_metadata: SourceMetadata | None,
    ) -> SourceMetadata | None:
        """Return the metadata of the next data files; None if there are none.

        Raises: SourceUnreadable, SourceUnavailable; SourceChanged if rows were removed, or the table was replaced; RangeExpired
        if a part of the log, or a file, is gone.
        """
        if current_metadata is not None:
            return current_metadata
        if self._new is None:
            self._new = self._find_new(previous_metadata)
        files, position = self._take(self._new)
        return None if position is None else self._metadata(files, position)

    @abstractmethod
    def version(self, most_files: int) -> SourceMetadata:
        """Return the table's current files, the first `most_files` at most, as the metadata of one batch.

        Raises: SourceUnreadable, SourceUnavailable; RangeExpired for a file that is gone.
        """

    @abstractmethod
    def _find_new(self, previous: SourceMetadata | None) -> Iterator[tuple[File | None, Position]]:
        """Yield each new file with the position after it; no file for a log entry that adds no rows."""

    @abstractmethod
    def _metadata(self, files: list[File], position: Position) -> SourceMetadata:
        """Return the metadata of a batch of these files."""

    def _goes_with(self, file: File, others: list[File]) -> bool:  # noqa: ARG002 - for overrides
        """Return whether a file may share a batch with others."""
        return True

    def _take(self, new: Iterator[tuple[File | None, Position]]) -> tuple[list[File], Position | None]:
        """Take new files until the batch is full; return them and the position after them, None if unmoved."""
        most_bytes, files, size = self._limits.max_bytes, list[File](), 0
        position: Position | None = None
        while len(files) < self._limits.max_files:
            file, after = self._next or next(new, (None, None))
            self._next = None
            if after is None:
                break
            if file is not None:
                size += file.size or 0
                is_too_large = most_bytes is not None and size > most_bytes
                if files and (is_too_large or not self._goes_with(file, files)):
                    self._next = file, after
                    break
                files.append(file)
            position = after
        return files, position

    def _begins_again(self, previous: SourceMetadata) -> bool:
        """Return whether to read from the start: the generation was raised, or another source came before.

        Raises: SourceChanged if a newer generation was read already.
        """
        before, now = previous["generation"] if self.OWN in previous else 0, self._limits.generation
        if before > now:
            raise SourceChanged(
                f"Generation {before} of {self._place} was read already, so it cannot be read as generation {now} any more. "
                "Declare the newer one again."
            )
        return bool(before < now)

    def _other_table(self, reason: str) -> SourceChanged:
        return SourceChanged(
            f"{self._place} is another table than the one that has been read: {reason}. Nothing is planned. Put the table "
            f"back, or declare generation={self._limits.generation + 1} and raise the pipeline's version, to count what it has "
            "now as well."
        )
