"""References: file sets that batches are joined with, each batch with the version that was there when it was planned.

    version = {"files": [{"name", "size", "mtime_ns", "sha256", "etag"?, "version"?}, ...]}

or, of a table of Delta Lake or Iceberg, what a batch of it would have in its metadata.

The version is part of the batch's metadata, so an attempt reads exactly these bytes or none (I11). On a disk, a plan reads all
files of the reference, to know their digests; each attempt reads them twice more, before and after Spark. With a keep folder, a
version names copies of the files instead, which are made when it is planned. In a store, ETags or versions say what is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tidegate.jobs.sources import Dataset, LeftAlone
from tidegate.jobs.sources.delta.source import Delta
from tidegate.jobs.sources.files.listing import list_files, matching_objects
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place
from tidegate.jobs.sources.iceberg.source import Iceberg
from tidegate.jobs.sources.postgres.source import PostgresTable
from tidegate.state_store.base.errors import SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

MOST_FILES = 1000  # each batch's metadata lists them all
# What a reference to a table may declare.
OF_TABLES = ("table", "schema", "partitions", "kind", "on_new_column", "ignored_columns")
OF_POSTGRES = ("table", "query", "key", "schema", "connection", "kind")


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
        for field in fields(table):
            if field.name not in declared and getattr(table, field.name) != field.default:
                raise ValueError(f"Reference to {self.name!r} is read whole by each batch: leave {field.name} out.")

    @property
    def identity(self) -> str:
        """Return what identifies the rows, whatever the version."""
        place = f", kept in {self.keep_folder}" if self.keep_folder else ""
        return f"reference to {self.files.identity}{place}"

    def as_read(self, *, is_replanned: bool = False) -> Files | Delta | Iceberg:
        """Return the source of a version's rows: as declared, or in the keep folder if there is one.

        With `is_replanned`, a batch with another version of files is planned again.
        """
        table = self.files
        files = Files(str(self.keep_folder), schema=table.schema) if isinstance(table, PostgresTable) else table
        if not isinstance(files, Files):
            return files
        if self.keep_folder is not None:
            files = replace(files, folder=self.keep_folder, follow_links=False)
        # By versions, every batch can be read as it was planned.
        return replace(files, kind="opaque" if is_replanned and not files.versions else "transactional")

    def datasets(self, version: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return the folder, and the version's files as the locations within it."""
        return self.as_read().datasets(version, settings)

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
            objects_of(self.files, place)
        else:
            names_of(self.files, settings)
        return self.files.held_back(settings)


def names_of(files: Files, settings: Settings) -> tuple[Path, list[str]]:
    """Return the folder of a reference, and the names of its files there.

    Raises: SourceUnreadable, also if there are none or too many.
    """
    folder = settings.home / files.folder
    names = list_files(folder, files.glob, follow_links=files.follow_links).names
    check_count(folder, len(names), files.glob)
    return folder, names


def objects_of(files: Files, place: ObjectPath) -> dict[str, ObjectInfo]:
    """Return the objects of a reference by name.

    Raises: SourceUnreadable, also if there are none or too many; SourceUnavailable.
    """
    objects: dict[str, ObjectInfo] = {}
    for page in matching_objects(place, files.glob):
        objects |= page
        if len(objects) > MOST_FILES:
            break
    check_count(place, len(objects), files.glob)
    return objects


def check_count(where: Place | str, files: int, glob: str = "") -> None:
    """Refuse a reference without files, or with too many."""
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
