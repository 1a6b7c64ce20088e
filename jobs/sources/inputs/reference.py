"""References: file sets that batches are joined with, each batch with the version that was there when it was planned.

    version = {"files": [{"name", "size", "mtime_ns", "sha256", "etag"?, "version"?}, ...]}

or, of a table of Delta Lake or Iceberg, what a batch of it would have in its metadata.

The version is part of the batch's metadata, so an attempt reads exactly these bytes or none (I11). On a disk, a plan reads all
files of the reference, to know their digests; each attempt reads them twice more, before and after Spark. With a keep folder, a
version names copies of the files instead, which are made when it is planned. In a store, ETags or versions say what is read.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.jobs.sources import Dataset, LeftAlone
from tidegate.jobs.sources.delta.source import Delta
from tidegate.jobs.sources.files.content import stamp_of
from tidegate.jobs.sources.files.folder_listing import list_files, young_files
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_identity import entry_of, is_too_young, with_identity
from tidegate.jobs.sources.files.stores.object_listing import matching_objects
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place
from tidegate.jobs.sources.iceberg.source import Iceberg
from tidegate.jobs.sources.inputs.reference_copies import keep, keep_rows
from tidegate.jobs.sources.postgres.source import PostgresTable
from tidegate.state_store.base.errors import SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.jobs.sources.delta.read import DeltaReader
    from tidegate.jobs.sources.files.read import FileReader
    from tidegate.jobs.sources.iceberg.read import IcebergReader

# A plan waits for files that may still be written, if that takes no longer than this, and looks at them this often.
LONGEST_WAIT_SECONDS, POLL_SECONDS = 10, 0.1
MOST_FILES = 1000  # each batch's metadata lists them all
# What a reference to a table may declare.
OF_TABLES = ("table", "schema", "partitions", "kind", "on_new_column", "ignored_columns")
OF_POSTGRES = ("table", "query", "key", "schema", "connection", "kind")
ADVICE = (
    "It is a reference of this batch: put back what was planned until the batch has committed; later batches take the new "
    "version. Or give the batch up: tidegate skip."
)


@dataclass(frozen=True)
class Reference:
    """A whole set of files that each batch may be joined with; its rows are not rows of the source.

        Inputs({"flights": Files("data/flights", ...), "planes": Reference(Files("data/planes", ...))})

    `files` says where they are and how they are read. All that are there when a batch is planned are its version: name, size
    and SHA-256 of each are frozen with the batch, and every attempt reads these bytes. Files may be replaced, added and
    removed between batches; later batches take the new version. A batch that has not committed needs the version that it was
    planned with: an attempt that finds another one is refused with SourceChanged, until the files are put back. If the
    `Inputs` are opaque, such a batch is planned again instead, with the version that is there.

    The files may be in a store (docs/storage.md). Where its bucket keeps versions, ``Files(..., versions=True)`` freezes those
    of the objects: they may then be overwritten and deleted at any time.

    On a disk, `keep_folder` does the same: it receives a copy of each file that differs from all before, when it is planned,
    and batches read the copies. Planner and Spark must reach it, and nothing else may write there. Nothing deletes copies:
    those of a version are not needed any more when every batch that was planned with it has committed.

    New files do not make a batch. Nothing is planned while a file of the reference is younger than `min_age_seconds`, or when
    there is none at all: write a new version beside the old one, and rename it.

    `files` may also be a table, ``Reference(Delta("lake/planes", schema=...))`` or ``Reference(Iceberg(...))``: each batch is
    joined with the rows that the table had when it was planned. They stay until the table's owner removes their files. A
    ``PostgresTable`` has no versions, so each plan copies its rows, of one snapshot and in the order of its `key`, into the
    `keep_folder`, where equal rows are kept once.
    """

    files: Files | Delta | Iceberg | PostgresTable
    keep_folder: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.files, PostgresTable):
            if self.keep_folder is None:
                raise ValueError(
                    f"Reference to {self.name!r} needs a keep_folder: a copy of its rows is the version of a batch."
                )
            self._check_left_out(self.files, OF_POSTGRES)
            return
        if isinstance(self.files, Delta | Iceberg):
            if self.keep_folder is not None:
                raise ValueError(f"Reference to {self.name!r} needs no keep_folder: the files of a table are not overwritten.")
            self._check_left_out(self.files, OF_TABLES)
            return
        if not isinstance(self.files, Files):
            raise TypeError(f"Reference takes Files, Delta, Iceberg or PostgresTable, not {type(self.files).__name__}.")
        if self.keep_folder is not None and self.files.objects():
            raise ValueError(
                f"Reference to {self.files.folder!r} cannot be copied to {self.keep_folder!r}: that is for folders on a disk. "
                "Declare versions=True in its Files, if the bucket keeps versions."
            )
        usual = Files(self.files.folder, format="text")
        for name in ("kind", "done_folder", "max_files", "max_bytes", "marker", "names_grow", "manifests"):
            if getattr(self.files, name) != getattr(usual, name):
                raise ValueError(f"Reference to {self.files.folder!r} is read whole by each batch: leave {name} out.")

    @property
    def name(self) -> str:
        """What it refers to: a folder, a table or a query."""
        match self.files:
            case Files():
                return self.files.folder
            case PostgresTable():
                return self.files.table or self.files.query or ""
        return self.files.table

    def _check_left_out(self, table: Delta | Iceberg | PostgresTable, declared: Sequence[str]) -> None:
        """Refuse what has no meaning for a table that is read whole."""
        for field in fields(table):
            if field.name not in declared and getattr(table, field.name) != field.default:
                raise ValueError(f"Reference to {self.name!r} is read whole by each batch: leave {field.name} out.")

    @property
    def identity(self) -> str:
        """Return what identifies the rows, whatever the version."""
        place = f", kept in {self.keep_folder}" if self.keep_folder else ""
        return f"reference to {self.files.identity}{place}"

    def version(self, settings: Settings) -> SourceMetadata | None:
        """Return the files that are there now, with their digests; None while one of them may still be written.

        Raises: SourceUnreadable if there is none, there are too many, or one cannot be read.
        """
        if isinstance(self.files, PostgresTable):
            return {"files": [keep_rows(*self.files.all_rows(settings), settings.home / str(self.keep_folder))]}
        if not isinstance(self.files, Files):
            of_table = self.files.version(settings, MOST_FILES + 1)
            self._check_count(self.files.table, len(of_table["data_files"]) or 1)  # a table may be empty
            return of_table
        min_age = self.files.min_age(settings)
        ends_at = time.monotonic() + (min_age + 1 if 0 < min_age <= LONGEST_WAIT_SECONDS else 0)
        while (version := self._find_version(self.files, settings, min_age)) is None and time.monotonic() < ends_at:
            time.sleep(POLL_SECONDS)
        return version

    def _find_version(self, declared: Files, settings: Settings, min_age: int) -> SourceMetadata | None:
        if place := declared.objects():
            return self._find_objects(declared, place, min_age)
        folder, names = self._list_names(declared, settings)
        if young_files(folder, names, min_age):
            return None
        files = [declared.file_identity(folder, name, min_age) for name in names]
        # A version has the files of one moment: none was added, removed or changed while the others were read.
        if self._list_names(declared, settings)[1] != names or not all(file and _is_unchanged(folder, file) for file in files):
            return None
        entries = [self._entry(declared, settings, folder, file) for file in files if file]
        return None if None in entries else {"files": entries}

    def _find_objects(self, declared: Files, place: ObjectPath, min_age: int) -> SourceMetadata | None:
        listed = self._list_objects(declared, place)
        files = []
        for name, info in listed.items():
            if (whole := with_identity(declared, place / name, info)) is None:
                continue  # it stands for a folder; or it is gone, as the second listing shows
            if is_too_young(whole, min_age):
                return None
            files.append(entry_of(declared, place, name, whole))
        # As on a disk: an object that was overwritten meanwhile has another size, time or ETag.
        return {"files": files} if None not in files and self._list_objects(declared, place) == listed else None

    def _entry(self, declared: Files, settings: Settings, folder: Path, file: dict[str, Any]) -> dict[str, Any] | None:
        """Return the file as batches read it: itself or, with a keep folder, its copy; None if it changes meanwhile."""
        if self.keep_folder is None:
            return file
        return keep(folder / file["name"], file, settings.home / self.keep_folder, None if declared.follow_links else folder)

    def _list_names(self, declared: Files, settings: Settings) -> tuple[Path, list[str]]:
        listing = list_files(settings.home / declared.folder, declared.glob, follow_links=declared.follow_links)
        self._check_count(listing.folder, len(listing.names), declared.glob)
        return listing.folder, listing.names

    def _list_objects(self, declared: Files, place: ObjectPath) -> dict[str, ObjectInfo]:
        objects: dict[str, ObjectInfo] = {}
        for page in matching_objects(place, declared.glob):
            objects |= page
            if len(objects) > MOST_FILES:
                break
        self._check_count(place, len(objects), declared.glob)
        return objects

    def _check_count(self, where: Place | str, files: int, glob: str = "") -> None:
        if not files:
            raise SourceUnreadable(
                f"The reference has no files: nothing in {where} matches {glob}. Put them there, or correct the "
                "pipeline's Reference(...). Nothing is planned meanwhile, because rows would be joined with nothing."
            )
        if files > MOST_FILES:
            raise SourceUnreadable(
                f"The reference has {files} files or more in {where}, and each batch would list them all: the most is "
                f"{MOST_FILES}. Put their rows into fewer files."
            )

    def emitter(
        self, spark: "SparkSession", settings: Settings, *, is_replanned: bool
    ) -> "FileReader | DeltaReader | IcebergReader":
        """Return a reader of a version. With `is_replanned`, a batch with another version of files is planned again."""
        files = self._read
        if isinstance(files, Files):
            # By versions, every batch can be read as it was planned.
            is_opaque = is_replanned and not files.versions
            files = replace(files, kind="opaque" if is_opaque else "transactional")
        reader = files.emitter(spark, settings)
        reader.advice = ADVICE
        return reader

    @property
    def _read(self) -> Files | Delta | Iceberg:
        """Return the files as they are read: those of the keep folder, if there is one."""
        if isinstance(self.files, PostgresTable):
            return Files(str(self.keep_folder), schema=self.files.schema)
        if self.keep_folder is None or not isinstance(self.files, Files):
            return self.files
        return replace(self.files, folder=self.keep_folder, follow_links=False)

    def datasets(self, version: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return the folder, and the version's files as the locations within it."""
        return self._read.datasets(version, settings)

    def left_alone(self, settings: Settings) -> LeftAlone | None:
        """Return the names in the folder that are not read, by reason; None for a table."""
        return self.files.left_alone(settings)

    def held_back(self, settings: Settings) -> str | None:
        """Return a sentence on files that may still be written, by their age.

        Raises: SourceUnreadable if there is none, or there are too many.
        """
        if not isinstance(self.files, Files):
            return None
        if place := self.files.objects():
            self._list_objects(self.files, place)
        else:
            self._list_names(self.files, settings)
        return self.files.held_back(settings)


def _is_unchanged(folder: Path, file: Mapping[str, Any]) -> bool:
    try:
        status = (folder / file["name"]).stat()
    except OSError:
        return False
    return stamp_of(status).is_of(file)
