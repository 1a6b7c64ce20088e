"""Reads the files of one batch with Spark, and makes sure that they are what was planned and say what was declared.

Spark's readers guess: they turn what does not fit into NULL, round decimals, and drop what follows a JSON record. Here the
first record that does not fit ends the batch, with its place. What is special to a format is in a module of its own.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jobs.sources import ORIGIN, PAYLOAD, REFUSAL, Emitter, InputFacts
from jobs.sources.files.content import digest_of, grown_from, open_file
from jobs.sources.files.done_folder import DoneFolder
from jobs.sources.files.partitions import Partitions, undeclared
from state_store.declaration import SourceMetadata
from state_store.errors import MalformedRecord, RowsLost, SourceChanged, SourceUnavailable, SourceUnreadable, TidegateError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from state_store.attempts import Attempt

# Of an open file: its device, its number there, and when it or its attributes were last changed, in nanoseconds.
Inode = tuple[int, int, int]


class FileReader(Emitter):
    """Reads the named files of a folder: what all formats share."""

    # What its options may be called, in small letters; None leaves them to Spark.
    known_options: ClassVar[tuple[str, ...] | None] = None

    def __init__(
        self,
        spark: "SparkSession",
        folder: Path,
        *,
        done: DoneFolder | None,
        is_opaque: bool,
        schema: Mapping[str, str],
        header: bool,
        separator: str,
        options: Mapping[str, str],
        missing: str,
        follow_links: bool,
        partitions: Partitions,
    ) -> None:
        self._spark = spark
        self._folder = folder
        self._done = done
        self._is_opaque = is_opaque
        # What the batch reads, and where each file lies; known once it is read.
        self._files: list[tuple[dict[str, Any], Path]] = []
        self._inodes: dict[Path, Inode] = {}
        self._schema = schema
        self._header = header
        self._options = options
        self._separator = separator
        self._missing = missing
        self._follow_links = follow_links
        self._partitions = partitions
        # Of each file: its name in the source, and what the names of its folders say.
        self._names: dict[Path, str] = {}
        self._values: dict[Path, dict[str, pa.Array]] = {}

    def row_schema(self) -> str:
        """Return the declared columns, those in the names of folders last."""
        return columns_of({**self._schema, **self._partitions.schema})

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows of the files, after checking the files' digests and, for text formats, their encoding."""
        paths = self._checked_paths(attempt, metadata)
        if not paths:
            return self._spark.createDataFrame([], self.row_schema())
        return self._read(paths)

    def emit_records(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows of the files with their file as ORIGIN; records that do not fit the schema are flagged.

        What is wrong with a whole file, such as its header or its encoding, still fails the batch.
        """
        from pyspark.sql import functions as F  # noqa: PLC0415, N812 - declaring a pipeline must not load pyspark

        if not metadata["files"]:
            return super().emit_records(attempt, metadata)
        paths = self._checked_paths(attempt, metadata)
        return self._read_flagged(paths, F.element_at(F.split(F.col("_metadata.file_path"), "/"), -1))

    def facts(self, attempt: "Attempt", metadata: SourceMetadata) -> InputFacts:
        """Return the files' number and size on disk, and how many rows they have."""
        files = metadata["files"]
        if len(self._files) != len(files):
            self._checked_paths(attempt, metadata)
        return InputFacts(len(files), sum(file["size"] for file in files), self.expected_rows(metadata), is_verified=True)

    def expected_rows(self, metadata: SourceMetadata) -> int | None:
        """Return how many rows the checked files have, counted without Spark."""
        del metadata
        return sum(self._count_rows(path) for _, path in self._files)

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:  # noqa: ARG002 - as it was read
        """Check the digests again: a file that changed during the read is found before the seal.

        So is one that was replaced and put back meanwhile, or changed and changed back: then its inode, or the time of its
        last change, is another one.
        """
        for file, path in self._files:
            if self._check_planned(file, path) != self._inodes[path]:
                raise RowsLost(
                    f"{path} was touched, or replaced and put back, while it was read: what was read may not be what is there. "
                    "The batch is read again."
                )

    def explain(self, error: Exception) -> TidegateError | None:
        """Return what a Spark error means."""
        text = str(error)
        if "FAILED_READ_FILE" in text or "CANNOT_READ_FILE_FOOTER" in text:
            return SourceUnreadable(text.strip().splitlines()[0])
        return None

    def _read(self, paths: list[str]) -> "DataFrame":
        """Return the rows of some files, at least one; the first record that does not fit ends the query."""
        raise NotImplementedError

    def _read_flagged(self, paths: list[str], origin: "Column") -> "DataFrame":
        """Return the rows of some files for `emit_records`; a format whose records always fit keeps this."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        nothing = F.lit(None).cast("string")
        return self._read(paths).select("*", origin.alias(ORIGIN), nothing.alias(REFUSAL), nothing.alias(PAYLOAD))

    def _checked_paths(self, attempt: "Attempt", metadata: SourceMetadata) -> list[str]:
        """Return where the planned files lie, the planned content in them; after their commit that is the done folder."""
        self._files = []
        for file in metadata["files"]:
            path = self._folder / file["name"]
            if self._done and self._done.has(attempt.txid, file["name"]):  # then a file of this name in the folder is a new one
                path = self._done.path(attempt.txid, file["name"])
            self._inodes[path] = self._check_planned(file, path)
            self._values[path] = self._partition_values(file["name"], path)
            self._files.append((file, path))
            self._names[path] = file["name"]
            self._check_content(path)
        return [_literal_path(path) for _, path in self._files]

    def _count_rows(self, path: Path) -> int:
        """Return how many rows a checked file has."""
        raise NotImplementedError

    def _check_content(self, path: Path) -> None:
        """Refuse a file whose content is not what its format says."""

    def _check_planned(self, file: dict[str, Any], path: Path) -> Inode:
        try:
            with open_file(path, self._within(path)) as content:
                found = os.fstat(content.fileno())
                size = found.st_size
                digest = digest_of(content) if size == file["size"] else None
        except FileNotFoundError:
            raise self._changed(f"{path} is gone since its batch was planned.", "Put it back, unchanged.") from None
        except OSError as error:
            raise SourceUnreadable(f"{path} cannot be read: {error.strerror}.") from error
        if digest != file["sha256"]:
            what = f"{path} changed since its batch was planned ({file['size']} bytes then, {size} now)."
            if grown_from(path, file["size"], file["sha256"], within=self._within(path)):
                what += f" Its first {file['size']} bytes are what was planned."
            raise self._changed(
                what,
                "Put the planned content back, and what was added, as whole records, into a file of another name.",
            )
        return found.st_dev, found.st_ino, found.st_ctime_ns

    def _partition_values(self, name: str, path: Path) -> "dict[str, pa.Array]":
        try:
            return self._partitions.values_of(name)
        except ValueError as error:
            raise MalformedRecord(f"{path}: {error}.") from None

    def _name_of(self, path: Path) -> str:
        """Return a file's name in the source, also when it lies in the done folder."""
        return self._names[path]

    def _partition_advice(self, name: str) -> str:
        """Return what to do about a missing column that a file's folders name; nothing if they name none."""
        found = undeclared(name, self._schema)
        shown = ", ".join(f"{column!r}: {kind!r}" for column, kind in found.items())
        return (
            f" The names of its folders have it: declare partitions={{{shown}}} instead of it in the schema." if found else ""
        )

    def _within(self, path: Path) -> Path | None:
        """Return the folder that a file must lie in; None if it may be a link to anywhere."""
        if self._follow_links:
            return None
        return self._folder if path.is_relative_to(self._folder) or self._done is None else self._done.done

    def _changed(self, what: str, advice: str) -> TidegateError:
        """Return the error for a file that is not as planned; an opaque batch is cut anew, with the file as it is then."""
        return SourceUnavailable(f"{what} The batch is cut anew.") if self._is_opaque else SourceChanged(f"{what} {advice}")


def columns_of(schema: Mapping[str, str]) -> str:
    """Return columns as Spark writes them."""
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in schema.items())


def quoted(name: str) -> str:
    """Return a column's name as Spark takes it, whatever is in it."""
    return f"`{name.replace('`', '``')}`"


def _literal_path(path: Path) -> str:
    """Return a path that Spark takes as it is: it would expand *, ?, [] and {} in names."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", str(path))
