"""Sources that read the data files of a table in the order of its own log: Delta Lake, Iceberg.

Their batches are read as those of `Files` are, by `tidegate.jobs.sources.files.formats.parquet`: metadata list the files under
`data_files`, each with the values of the columns that are not in it.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from tidegate.jobs.sources import Coordinator, Dataset, Source
from tidegate.jobs.sources.files.identity import identity_of
from tidegate.jobs.sources.files.source import Files, OnNewColumn
from tidegate.jobs.sources.files.stores.object_places import Place
from tidegate.state_store.base.errors import RangeExpired, SourceChanged, SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

logger = logging.getLogger(__name__)


class DataFilesSource(Source):
    """A table; a batch has up to `max_files` data files, and more than one only if they fit into `max_bytes`."""

    table: str
    schema: Mapping[str, str]
    on_new_column: OnNewColumn
    ignored_columns: Sequence[str]
    max_files: int
    max_bytes: int | None
    generation: int  # from 1 on; raised by the author to read the table from its start again

    @property
    @abstractmethod
    def root(self) -> str:
        """The place of the data files, if the metadata of batches do not say it."""

    @property
    def beside_files(self) -> Mapping[str, str]:
        """The columns, with types, whose values a file's entry in the metadata has, as they may be missing in the file."""
        return {}

    def check(self) -> None:
        """Check what all tables declare.

        Raises: ValueError.
        """
        me = f"{type(self).__name__}({self.table!r})"
        try:
            self.files()  # checks place, columns and numbers
        except ValueError as error:
            raise ValueError(str(error).replace(f"Files({self.root!r})", me, 1)) from None
        if self.generation < 1:
            raise ValueError(f"{me} cannot have generation {self.generation}: the first one is 1.")

    def files(self, root: str | None = None) -> Files:
        """Return a `Files` source for data files below a place."""
        return Files(
            self.root if root is None else root,
            glob="**",
            schema=self.schema,
            partitions=self.beside_files,
            missing="null",
            max_files=self.max_files,
            max_bytes=self.max_bytes,
            on_new_column=self.on_new_column,
            ignored_columns=self.ignored_columns,
        )

    @property
    def known_columns(self) -> Mapping[str, Sequence[str]]:
        """The columns that are declared or ignored."""
        return self.files().known_columns

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return the root of the table's files, with the batch's data files as its locations."""
        return self.files(metadata.get("root")).datasets({"files": metadata["data_files"]}, settings)

    def has_rows(self, metadata: SourceMetadata) -> bool:
        """Return whether the batch has data files; without any, it only moves the position."""
        return bool(metadata["data_files"])

    @property
    def reads_files(self) -> bool:
        """True: sizes and numbers of rows are known before reading."""
        return True


class DataFile(Protocol):
    """A data file of a table: its name below the place of the files, and its size in bytes; None if the log does not say it."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def size(self) -> int | None: ...  # noqa: D102


File = TypeVar("File", bound=DataFile)
Position = TypeVar("Position")


class DataFilesCoordinator(Coordinator, Generic[File, Position]):
    """Divides new data files into batches; a subclass finds the files, and writes the metadata."""

    OWN: ClassVar[str]  # a key that only the metadata of this table format has

    def __init__(self, source: DataFilesSource, name: object) -> None:
        self._limits = source
        self._files = source.files()
        self._name = name  # the table's, in messages
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

    def _identity(self, file: File, place: Place, named_by: str, gone: str) -> dict[str, Any]:
        """Return by what attempts recognize a file; `gone` goes on after "which", `named_by` says where its size stands.

        Raises: RangeExpired if it is gone; SourceUnreadable.
        """
        with suppress(FileNotFoundError):
            if identity := identity_of(self._files, place, file.name):
                if file.size not in (None, identity["size"]):
                    sizes = f"{identity['size']} bytes, and {file.size}"
                    raise SourceUnreadable(f"{place / file.name} has {sizes} {named_by}.")
                return identity
        raise RangeExpired(f"{place / file.name}, which {gone}, and raise the pipeline's version.")

    def _pass_change(self, what: str, effect: str, option: str, advice: str = "") -> None:
        """Refuse to go on after a log entry that takes rows away, unless an option of the source says to leave such out."""
        what = f"{what} deletes or rewrites rows"
        if not getattr(self._limits, option):
            raise SourceChanged(
                f"{what} that may have counted: {effect}. Nothing new is planned meanwhile. Declare "
                f"{type(self._limits).__name__}(..., {option}=True) to go on without what such commits change{advice}."
            )
        logger.warning("%s: it is not read, as %s says.", what, option)

    def _begins_again(self, previous: SourceMetadata) -> bool:
        """Return whether to read from the start: the generation was raised, or another source came before.

        Raises: SourceChanged if a newer generation was read already.
        """
        before, now = previous["generation"] if self.OWN in previous else 0, self._limits.generation
        if before > now:
            raise SourceChanged(
                f"Generation {before} of {self._name} was read already, so it cannot be read as generation {now} any more. "
                "Declare the newer one again."
            )
        return bool(before < now)

    def _other_table(self, reason: str) -> SourceChanged:
        return SourceChanged(
            f"{self._name} is another table than the one that has been read: {reason}. Nothing is planned. Put the table "
            f"back, or declare generation={self._limits.generation + 1} and raise the pipeline's version, to count what it has "
            "now as well."
        )
