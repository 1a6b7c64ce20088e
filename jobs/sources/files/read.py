"""Reads the files of one batch with Spark, checked against the plan and the declaration.

Spark's readers guess: they turn values that do not fit into NULL, round decimals, and drop text after a JSON record. Here the
first record that does not fit fails the batch, with an error that names the place. Each format has a module of its own.
"""

import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from tidegate.jobs.sources import Emitter, InputFacts
from tidegate.jobs.sources.column_types import columns_of
from tidegate.jobs.sources.files.content import COMPRESSED, digest_of, grown_from, open_file
from tidegate.jobs.sources.files.formats.text_files.text_options import zone_of
from tidegate.jobs.sources.files.identity import planned_files
from tidegate.jobs.sources.files.partition_columns import PartitionColumns, folders_of
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_places import (
    ObjectPath,
    Place,
    describe,
    for_spark,
    libraries_of,
    pinned,
    place_of,
)
from tidegate.jobs.spark.task_errors import reported_in
from tidegate.state_store.base.errors import (
    ExecutorsUnprepared,
    MalformedRecord,
    RowsLost,
    SettingsInvalid,
    SourceChanged,
    SourceUnavailable,
    SourceUnreadable,
    TidegateError,
    skip_command,
)
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.counted_files import FILES

if TYPE_CHECKING:
    from tidegate.jobs.sources.files.formats.file_part_tasks import TaskReader
    from tidegate.state_store.attempt.attempts import Attempt

MOST_BYTES_HERE = 16 * 1024 * 1024  # go to Spark in one message
# Of Spark's errors: the store refuses Spark.
REFUSED = r"(AccessDeniedException|AccessControlException|NoAuthWithAWSException|NoAwsCredentialsException)[^\n]*"
SHOWN_COLUMNS = 5
# An open file's device, inode number, and last change of content or attributes in nanoseconds; an object's description.
Inode = tuple[int, int, int] | ObjectInfo


@dataclass
class BatchFile:
    """A file of a batch: its entry in the metadata, where it is, and the values of the columns that are not in it.

    `within` is the folder that it must lie in; None if it may be a link to any place, or is an object. `inode` is what was
    found when it was checked.
    """

    entry: dict[str, Any]
    path: Place
    within: Path | None = None
    values: dict[str, pa.Array] = field(default_factory=dict)
    inode: Inode | None = None

    @property
    def name(self) -> str:
        """The file's name in the source, even if it is in the done folder."""
        return str(self.entry["name"])


class FileReader(Emitter):
    """Reads the named files of a folder; base class of all formats. A batch's metadata list them as `listed_as`."""

    def __init__(self, spark: SparkSession, source: Files, home: Path, listed_as: str = FILES) -> None:
        self._listed_as = listed_as
        self._spark = spark
        self._source = source
        self._home = home
        self._folder = place_of(home, source.folder)
        self._done = source.done(home)
        self._schema = source.schema
        self._partitions = PartitionColumns(source.partitions, zone_of(source.options))
        self._columns = {**(source.schema or {"value": "string"}), **source.partitions}  # text has no schema
        self._files: list[BatchFile] = []  # those of the batch; filled by the first read
        self._undeclared: set[str] = set()

    def row_schema(self) -> str:
        """Return the declared columns, with partition columns last."""
        return columns_of(self._columns)

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> DataFrame:
        """Return the rows of the files, after checking the files' digests and, for text formats, their encoding."""
        self._check_files(attempt, metadata)
        return self._read(flagged=False) if self._files else self._spark.createDataFrame([], self.row_schema())

    def emit_records(self, attempt: "Attempt", metadata: SourceMetadata) -> DataFrame:
        """Return the rows with their file as ORIGIN; records that do not fit the schema are flagged by a REFUSAL.

        An error of a whole file, such as in its header or encoding, still fails the batch.
        """
        if not planned_files(metadata, self._listed_as):
            return super().emit_records(attempt, metadata)
        self._check_files(attempt, metadata)
        return self._read(flagged=True)

    def facts(self, attempt: "Attempt", metadata: SourceMetadata) -> InputFacts:
        """Return the number of files, their size on disk, and their number of rows."""
        files = planned_files(metadata, self._listed_as)
        if len(self._files) != len(files):
            self._check_files(attempt, metadata)
        return InputFacts(len(files), sum(file["size"] for file in files), self.expected_rows(metadata), is_verified=True)

    def expected_rows(self, metadata: SourceMetadata) -> int | None:
        """Return the number of rows in the checked files, counted without Spark."""
        del metadata
        return sum(map(self._count_rows, self._files))

    def undeclared(self) -> Mapping[str, Sequence[str]]:
        """Return the columns of the files, and of their folders' names, that are neither declared nor ignored."""
        return {"": sorted(self._undeclared)}

    def _note_columns(self, path: Place, names: Iterable[str]) -> None:
        """Take note of a file's columns.

        Raises: SourceUnreadable if others than the declared ones are to halt the batch.
        """
        new = sorted(set(names) - set(self._source.known_columns[""]))
        if new and self._source.on_new_column == "block":
            raise SourceUnreadable(
                f"{path} has {'columns' if len(new) > 1 else 'the column'} {', '.join(new[:SHOWN_COLUMNS])}, which the source "
                "does not declare, and it says on_new_column='block'. Add it to the schema and to the states that need it, and "
                "raise the pipeline's version; or name it in the source's ignored_columns. Then run: tidegate migrate"
            )
        self._undeclared.update(new)

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:  # noqa: ARG002 - as it was read
        """Check the digests again, to find files that changed during the read.

        A file that was replaced and put back meanwhile, or changed and changed back, is found too: its inode, or the time of
        its last change, differs.

        Raises: RowsLost, SourceChanged, SourceUnavailable, SourceUnreadable.
        """
        for file in self._files:
            if self._check_planned(file) != file.inode:
                raise RowsLost(
                    f"{file.path} was touched, or replaced and put back, while it was read: what was read may not be what is "
                    "there. The batch is read again."
                )

    def explain(self, error: Exception) -> TidegateError | None:
        """Return the error for a changed object, a store that Spark or its executors cannot read, or an unreadable file."""
        text = str(error)
        if problem := self._changed_object() or unsupported_store(text, str(self._folder)):
            return problem
        if "FAILED_READ_FILE" in text or "CANNOT_READ_FILE_FOOTER" in text:
            return SourceUnreadable(f"{text.strip().splitlines()[0]} Write the file again.")
        return None

    @abstractmethod
    def _read(self, *, flagged: bool) -> DataFrame:
        """Return the rows of the batch's files; unless they are flagged, the first record that does not fit ends the query."""

    def _rows_of(self, reader: "TaskReader", schema: T.StructType, *, read_here: bool) -> DataFrame:
        """Return what a reader reads: in tasks or, faster for a few short rows than starting a worker, in this process."""
        count = len(reader.tasks)
        if not read_here:
            return self._spark.range(0, count, 1, count).mapInArrow(reader, schema)
        try:
            batches, size = [], 0
            for batch in chain.from_iterable(map(reader.read_task, range(count))):
                batches.append(batch)
                if (size := size + batch.nbytes) > MOST_BYTES_HERE:
                    return self._rows_of(reader, schema, read_here=False)
        except ValueError as error:
            raise reported_in(error) or self.explain(error) or error from None
        return self._spark.createDataFrame(pa.Table.from_batches(batches), schema)

    def _check_files(self, attempt: "Attempt", metadata: SourceMetadata) -> None:
        """Find the planned files and check their content; those of a committed batch are in the done folder."""
        self._files = []
        self._folder = place_of(self._home, metadata.get("root", self._source.folder))
        for entry in planned_files(metadata, self._listed_as):
            path: Place = self._folder / entry["name"]
            if isinstance(path, ObjectPath):
                path = pinned(path, entry)
            if self._done and self._done.has(attempt.txid, entry["name"]):  # one of this name in the folder is then a new one
                path = self._done.path(attempt.txid, entry["name"])
            file = BatchFile(entry, path, self._folder_of(path))
            file.inode = self._check_planned(file)
            file.values = self._partition_values(file)
            self._files.append(file)
            if "partition" not in entry:
                self._note_columns(path, (column for column, _ in folders_of(file.name)))
            self._check_content(file)

    @abstractmethod
    def _count_rows(self, file: BatchFile) -> int:
        """Return the number of rows in a checked file."""

    def _check_content(self, file: BatchFile) -> None:
        """Refuse a file whose content does not have the declared format."""

    def _check_planned(self, file: BatchFile) -> Inode:
        path, entry = file.path, file.entry
        if isinstance(path, ObjectPath):
            return self._check_object(entry, path)
        try:
            with open_file(path, file.within) as content:
                status = os.fstat(content.fileno())
                size = status.st_size
                digest = digest_of(content) if size == entry["size"] else None
        except FileNotFoundError:
            raise self._changed(f"{path} is gone since its batch was planned.", "Put it back, unchanged.") from None
        except OSError as error:
            raise SourceUnreadable(f"{path} cannot be read: {error.strerror}.") from error
        if digest != entry["sha256"]:
            what = f"{path} changed since its batch was planned ({entry['size']} bytes then, {size} now)."
            if grown_from(path, entry["size"], entry["sha256"], within=file.within):
                what += f" Its first {entry['size']} bytes are what was planned."
            advice = "Put the planned content back, and what was added, as whole records, into a file of another name."
            if COMPRESSED.search(path.name):  # nothing can be divided there, and a broken one had to be repaired
                advice = f"Put the planned content back; or, to read it as it is now, give the batch up: {skip_command()}"
            raise self._changed(what, advice)
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def _check_object(self, entry: dict[str, Any], path: ObjectPath) -> ObjectInfo:
        """Compare an object with the plan by its ETag or, if the store has none, by its content."""
        try:
            info = describe(path)
        except FileNotFoundError:
            raise self._replaced(entry, path, "is gone", "Put it back, unchanged.") from None
        identity = info.identity
        if "etag" not in entry and info.size == entry["size"]:
            with path.open() as content:
                identity = digest_of(content)
        if (info.size, identity) != (entry["size"], entry["sha256"]):
            sizes = f" ({entry['size']} bytes then, {info.size} now)"
            advice = "Put the planned content back, and what is new into an object of another name."
            raise self._replaced(entry, path, "was overwritten", advice, sizes)
        return info

    def _replaced(self, entry: dict[str, Any], path: ObjectPath, what: str, advice: str, sizes: str = "") -> TidegateError:
        """Return the error for an object that is not as planned; one with a version that was planned is read again by that."""
        if "version" in entry and path.version is None:
            return RowsLost(f"{path} {what} while it was read. The batch is read again, by the version that was planned.")
        missing = " and does not have the version that was planned" if "version" in entry else ""
        return self._changed(f"{path} {what} since its batch was planned{sizes}{missing}.", advice)

    def _changed_object(self) -> TidegateError | None:
        """Return the error for an object that is not as planned any more, a likely cause of another error."""
        try:
            for file in self._files:
                if isinstance(file.path, ObjectPath):
                    self._check_object(file.entry, file.path)
        except TidegateError as error:
            return error
        return None

    def _partition_values(self, file: BatchFile) -> dict[str, pa.Array]:
        """Return the values that the file's metadata has or, without them, those in the names of its folders."""
        try:
            if "partition" in file.entry:
                return self._partitions.parsed(file.entry["partition"])
            return self._partitions.values_of(file.name)
        except ValueError as error:
            raise MalformedRecord(f"{file.path}: {error}.") from None

    def _folder_of(self, path: Place) -> Path | None:
        """Return the folder that a file must lie in; None if it may be a link to any place, or is an object."""
        if self._source.follow_links or isinstance(path, ObjectPath) or isinstance(self._folder, ObjectPath):
            return None
        return self._folder if path.is_relative_to(self._folder) or self._done is None else self._done.done

    def _changed(self, what: str, advice: str) -> TidegateError:
        """Return the error for a file that is not as planned; an opaque source plans such a batch again, with other files."""
        if self._source.kind == "opaque":
            return SourceUnavailable(f"{what} The batch is planned again, unless a rebuild does it: then put the file back.")
        return SourceChanged(f"{what} {self.advice or advice}")


def unsupported_store(text: str, folder: str) -> TidegateError | None:
    """Return our error if, by Spark's, Spark or its executors lack a library for the store, or it refuses Spark; else None."""
    if match := re.search(r"No FileSystem for scheme \"?(\w+)|Class (org\.apache\.hadoop\.fs\.\S+) not found", text):
        return SettingsInvalid(
            f"Spark cannot read {folder}: it has no library for it ({match[0]}). Name it in the setting spark_packages, and "
            "start Spark again (docs/storage.md)."
        )
    if (match := re.search(r"No module named '(\w+)'", text)) and match[1] in libraries_of(folder):
        return ExecutorsUnprepared(
            f"Spark's executors lack the Python package {match[1]}, by which tasks read {folder}: Spark's own reader would "
            "misread a file of this batch, or finds another version of it. Install it for the Python that executors run "
            f"(PYSPARK_PYTHON): python -m pip install '{match[1]}=={version(match[1])}'."
        )
    if match := re.search(REFUSED, text):
        return SourceUnreadable(
            f"Spark may not read {folder}, though the planner may: {match[0][:200]}. Give Spark's process and its executors "
            "the credentials, in their environment or by a role (docs/storage.md)."
        )
    return None


def literal_path(path: Place) -> str:
    """Return a path that Spark takes literally; otherwise it would expand *, ?, [] and {} in names."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", for_spark(path))
