"""Plans batches of data files, for tables whose own log says which files come next: those of Delta Lake and of Iceberg."""

from collections.abc import Iterator
from typing import ClassVar, Generic, Protocol, TypeVar

from jobs.sources import Coordinator
from state_store.declaration import SourceMetadata
from state_store.errors import SourceChanged


class DataFile(Protocol):
    """A data file of a table; None if the log does not say its size."""

    @property
    def size(self) -> int | None:
        """The size in bytes."""
        ...


class Table(Protocol):
    """A source whose batches are data files."""

    @property
    def max_files(self) -> int:
        """The most files of a batch."""
        ...

    @property
    def max_bytes(self) -> int | None:
        """The most bytes of a batch of several files."""
        ...

    @property
    def generation(self) -> int:
        """How often the author has begun the table again, from 1 on."""
        ...


File = TypeVar("File", bound=DataFile)
Position = TypeVar("Position")


class DataFilesCoordinator(Coordinator, Generic[File, Position]):
    """Cuts what comes next into batches; what that is, and how metadata say it, is the format's."""

    OWN: ClassVar[str]  # an entry that only metadata of this format have

    def __init__(self, table: Table, place: object) -> None:
        self._limits = table
        self._place = place  # as messages call the table
        self._new: Iterator[tuple[File | None, Position]] | None = None
        self._next: tuple[File | None, Position] | None = None

    def initialize_transaction(
        self,
        txid: int,  # noqa: ARG002 - batches of quarantined records take txids too
        previous_metadata: SourceMetadata | None,
        current_metadata: SourceMetadata | None,
    ) -> SourceMetadata | None:
        """Return the next data files; None if the table has no new ones.

        Raises: SourceUnreadable, SourceUnavailable; SourceChanged if rows were taken away, or it is another table; RangeExpired
        for a part of the log, or a file, that is gone.
        """
        if current_metadata is not None:
            return current_metadata
        if self._new is None:
            self._new = self._find_new(previous_metadata)
        files, position = self._take(self._new)
        return None if position is None else self._metadata(files, position)

    def _find_new(self, previous: SourceMetadata | None) -> Iterator[tuple[File | None, Position]]:
        """Yield each new file with the position after it; no file for a part of the log that adds no rows."""
        raise NotImplementedError

    def _metadata(self, files: list[File], position: Position) -> SourceMetadata:
        """Return the metadata of a batch of these files."""
        raise NotImplementedError

    def _goes_with(self, file: File, others: list[File]) -> bool:  # noqa: ARG002 - of formats whose files differ
        """Return whether a file may be in one batch with those before it."""
        return True

    def _take(self, new: Iterator[tuple[File | None, Position]]) -> tuple[list[File], Position | None]:
        """Take new files until the batch is full; return them, and the position after them, None if it has not moved."""
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
        """Return whether the author has declared a newer generation, or another source before, with an earlier version.

        Raises: SourceChanged if a newer generation was read already.
        """
        before, now = previous["generation"] if self.OWN in previous else 0, self._limits.generation
        if before > now:
            raise SourceChanged(
                f"Generation {before} of {self._place} was read already, so it cannot be read as generation {now} any more. "
                "Declare the newer one again."
            )
        return bool(before < now)
