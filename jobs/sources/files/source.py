"""A source that reads a folder, or a bucket, of Parquet, CSV, JSON-lines or text files.

Files are ordered by name; a batch is the next few of them. Its metadata names each file with size, modification time and
SHA-256. The digest is the identity: it is checked before and after every read, so that a batch is sealed only if Spark
saw the planned bytes (I11). An object's identity is its ETag; the digest is then that of the ETag.

The ledger keeps each file of a committed batch, by name and digest: the file has counted. Each plan compares the folder with
these files (`tidegate.jobs.sources.files.plan`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from tidegate.jobs.sources import Dataset, LeftAlone, Source
from tidegate.jobs.sources.column_types import check_names, parse_type
from tidegate.jobs.sources.files.done_folder import DoneFolder
from tidegate.jobs.sources.files.file_globs import Glob
from tidegate.jobs.sources.files.formats import Format
from tidegate.jobs.sources.files.formats.text_files.text_options import check_options
from tidegate.jobs.sources.files.listing import EVERYTHING, Listing, first_objects, list_files
from tidegate.jobs.sources.files.partition_columns import PartitionColumns
from tidegate.jobs.sources.files.stores.object_places import (
    ObjectPath,
    check_url,
    dataset_of,
    is_url,
    libraries_of,
    place_of,
    without_password,
)
from tidegate.state_store.base.errors import one_line
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    from tidegate.state_store.attempt.attempts import Attempt

OnNewColumn = Literal["notice", "block"]


@dataclass(frozen=True)
class Files(Source):
    """A folder of files of one format, each read exactly once, in the order of their names.

    A relative `folder` starts at the project folder. A batch is the next `max_files` files that no batch has taken yet, in the
    order of their names, or fewer when they would exceed `max_bytes`. A file that arrives late is taken too, even if its name
    comes before those already read. A file is known by name and content: if it was touched, moved away and back, or restored,
    it does not count again; if its content has changed since it counted, it is refused. Names that start with ``.`` or ``_``,
    or end like unfinished files, are left alone unless `glob` (see `tidegate.jobs.sources.files.file_globs`) asks for them;
    ``tidegate inspect PIPELINE --source`` lists them.

    A file that changed less than `min_age_seconds` ago, or while it was examined, may still be written: it is left to a later
    plan, with a log message. So is one with a time up to half an hour ahead of the clock here. The default is the setting
    `min_file_age_seconds`. If there is nothing else to do and the age is short, the plan waits. Use 0 where files get their
    names when they are whole, as by `mv` within the file system.

    `schema` maps columns to Spark types; a file's other columns are left out. Text has the one column ``value``. `options` have
    the names of Spark's reader options, such as
    ``{"sep": ";", "nullValue": "NA", "dateFormat": "dd.MM.yyyy", "encoding": "latin-1"}``. A record that does not fit the
    schema fails the batch with its file, line and column: it never becomes NULL, a number keeps its digits, a decimal is
    never rounded, and a date or time has a full form, its own or that of a declared pattern. A local time that a change of
    clocks in the option `timeZone` leaves out or repeats does not fit. A CSV record may span lines inside quotes. Lines may
    have any of the usual ends, but a declared `lineSep` is the only one. In JSON, a key that a record lacks is NULL; one that
    all records of a file lack is refused, unless `missing` is ``"null"``. Text may be compressed by gzip or bzip2. In Parquet,
    a column that a file lacks is refused, and NULL if `missing` is ``"null"``. A column that is there in another case is never
    NULL: it is refused, unless, in JSON, `ignored_columns` name it.

    A column that came after the first batch and that nobody declares is told by ``tidegate status``, `why`, the page and an
    alert, until the schema has it or `ignored_columns` name it. With ``on_new_column="block"`` a batch that has a column which
    neither of them names is halted.

    `partitions` maps columns in the names of folders, as Hive writes them, to types: with ``{"dt": "date"}`` each row of
    ``dt=2024-01-05/x.parquet`` has this ``dt``. These columns are not in the files.

    A link is followed within the folder. A link that leads out of it is refused, unless `follow_links` states that everyone
    who may write into the folder may also choose what else is read.

    `marker` names a file by which the writer of a folder says that it is complete, such as ``"_SUCCESS"``: files are taken once
    it stands in their folder, or in one above it (`tidegate.jobs.sources.files.completeness_markers`).

    `kind="opaque"` is for folders whose files may be missing for a while: a planned file that is gone or changed when it is
    read is left to a later batch. The states must be opaque too.

    `done_folder` receives the files of each batch after its commit, of links a copy, in a folder named by its txid. It must
    belong to this pipeline alone, and both folders must be writable. After the move, a file of the same name with other
    content is a new file. Only one pipeline can read a folder whose files are moved away.

    `folder` may be a place in a store, such as ``s3a://bucket/prefix`` (also gs, abfss; docs/storage.md): the names of
    its objects are relative to it. An object is known by its name and ETag. It is whole once it is
    listed, so `min_age_seconds` is 0 unless it is given. Nothing is moved, and there are no links.
    `names_grow` says that each new object has a name after those of all earlier ones: then a plan lists only what comes after
    the last name taken, and an object that comes with an earlier name is never read. `versions` says that the bucket keeps
    versions: a batch names those that it was planned with, and reads them even if an object was overwritten or deleted since.

    `manifests` is a folder below the place, or a place of its own in the store, with lists of new objects, which the program
    that writes these leaves there: then no objects are listed, and only those that a manifest names are read, in its order.
    Each new manifest has a name after those of all earlier ones (docs/storage.md).
    """

    folder: str
    glob: str = "*"
    format: Format = "parquet"
    schema: Mapping[str, str] = field(default_factory=dict)
    max_files: int = 1
    max_bytes: int | None = None
    header: bool = True
    options: Mapping[str, str] = field(default_factory=dict)
    missing: Literal["refuse", "null"] = "refuse"
    min_age_seconds: int | None = None
    kind: Literal["transactional", "opaque"] = "transactional"
    done_folder: str | None = None
    follow_links: bool = False
    partitions: Mapping[str, str] = field(default_factory=dict)
    names_grow: bool = False
    versions: bool = False
    marker: str | None = None
    manifests: str | None = None
    on_new_column: OnNewColumn = "notice"
    ignored_columns: Sequence[str] = ()

    def __post_init__(self) -> None:
        for is_wrong, what in chain(self._wrong_with_place(), self._wrong_with_format(), self._wrong_with_names()):
            if is_wrong:
                raise ValueError(f"Files({without_password(self.folder)!r}) {what}")
        try:
            PartitionColumns(self.partitions)
        except ValueError as error:
            raise ValueError(f"Files({self.folder!r}) cannot have such partitions: {error}.") from None
        try:
            check_names((*self.schema, *self.partitions))
            check_options(self.format, self.options)
            for kind in self.schema.values() if self.format != "parquet" else ():
                parse_type(kind)
        except ValueError as error:
            raise ValueError(f"Files({self.folder!r}): {error}") from None

    def _wrong_with_place(self) -> Iterator[tuple[bool, str]]:
        """Yield what only a disk or only a store has, and what excludes one another; each with whether that is so."""
        is_other = self.kind not in ("transactional", "opaque")
        yield is_other, f"cannot be {self.kind!r}: files replay, so use transactional or opaque."
        of_stores = {"versions": self.versions, "names_grow": self.names_grow, "manifests": self.manifests is not None}
        given = [name for name, is_given in of_stores.items() if is_given]
        if not is_url(self.folder):
            yield bool(given), f"is a folder on a disk: {', '.join(given)} is for a store, such as s3a://."
            is_inside = self.done_folder is not None and Path(self.done_folder).is_relative_to(self.folder)
            yield is_inside, f"cannot move files to {self.done_folder!r} inside it: they would be read again."
            return
        self._check_places()
        yield (
            self.done_folder is not None,
            "cannot move objects to a done folder: a store has no move that happens whole or not at all. Leave done_folder "
            "out; the ledger knows what has counted.",
        )
        yield (
            self.kind == "opaque" and bool(given),
            f"cannot be opaque with {', '.join(given)}: by versions every batch can be read again, and a name that is passed "
            "is never read, though its object was away only for a while.",
        )
        yield self.follow_links, "has no links to follow: leave follow_links out."
        listed = {"a glob": self.glob != "*", "names_grow": self.names_grow, "a marker": self.marker is not None}
        unwanted = [what for what, is_given in listed.items() if is_given and self.manifests is not None]
        yield bool(unwanted), f"cannot have {', '.join(unwanted)}: its manifests name what is read."

    def _check_places(self) -> None:
        folder = self.manifests
        if (
            folder is not None
            and not is_url(folder)
            and any(part in ("", ".", "..") for part in folder.removesuffix("/").split("/"))
        ):
            raise ValueError(
                f"Files({without_password(self.folder)!r}) cannot have its manifests in {folder!r}: write a folder below it, "
                "such as '_manifests', or a place such as s3a://bucket/manifests."
            )
        for place in (self.folder, str(self.manifests_place() or self.folder)):
            try:
                check_url(place)
            except ValueError as error:
                raise ValueError(f"Files({without_password(place)!r}): {error}.") from None

    def _wrong_with_format(self) -> Iterator[tuple[bool, str]]:
        """Yield mistakes in format, columns and options, each with whether it is made."""
        formats = get_args(Format)
        yield self.format not in formats, f"cannot read {self.format!r}: use one of {', '.join(formats)}."
        yield self.format == "text" and bool(self.schema), "of text has the one column value; leave schema out."
        yield self.format != "text" and not self.schema, "needs a schema, such as {'name': 'string', 'amount': 'int'}."
        yield (
            self.on_new_column not in get_args(OnNewColumn) or isinstance(self.ignored_columns, str),
            "needs on_new_column 'notice' or 'block', and a list of ignored_columns.",
        )
        least = min(self.max_files, 1 if self.max_bytes is None else self.max_bytes)
        yield least < 1, "needs max_files and max_bytes of at least 1."
        yield len(self.separator) != 1, f"cannot be separated by {self.separator!r}: use one character."
        yield self.missing not in ("refuse", "null"), f"cannot take missing={self.missing!r}: use 'refuse' or 'null'."

    def _wrong_with_names(self) -> Iterator[tuple[bool, str]]:
        """Yield mistakes in the names of columns and files, each with whether it is made."""
        reserved = [name for name in (*self.schema, *self.partitions) if name.lower().startswith("_tidegate_")]
        yield bool(reserved), f"cannot have a column {', '.join(reserved)}: names like that are Tidegate's own."
        in_files = {name.lower() for name in self.schema or ("value",)}
        twice = [name for name in self.partitions if name.lower() in in_files]
        yield bool(twice), f"has the column {', '.join(twice)} in schema and in partitions: say where it stands."
        try:
            glob = Glob(self.glob)
        except ValueError as error:
            raise ValueError(f"Files({self.folder!r}): {error}.") from None
        if self.marker is not None:
            yield (
                not self.marker or "/" in self.marker or self.marker in (".", ".."),
                f"cannot have the marker {self.marker!r}: use a name, such as '_SUCCESS'.",
            )
            yield (
                glob.takes_somewhere(self.marker),
                f"would read the marker {self.marker} as data: {self.glob} matches it. Write a narrower glob, such as "
                "'**/*.parquet'.",
            )

    @property
    def separator(self) -> str:
        """Return the separator of values in a CSV record."""
        return self.options.get("sep", self.options.get("delimiter", ","))

    @property
    def identity(self) -> str:
        """Return what identifies the rows: place, format, columns and reader options."""
        parts = [self.folder, self.glob, self.format, self.header, list(self.schema.items()), dict(self.options)]
        if self.partitions:
            parts.append(list(self.partitions.items()))
        return f"files {json.dumps(parts, sort_keys=True)}"

    @property
    def known_columns(self) -> Mapping[str, Sequence[str]]:
        """The columns of schema, partitions and `ignored_columns`."""
        return {"": (*self.schema, *self.partitions, *self.ignored_columns)}

    def done(self, home: Path) -> DoneFolder | None:
        """Return the done folder of a project, if there is one."""
        return DoneFolder(home / self.folder, home / self.done_folder) if self.done_folder else None

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return the folder, and the batch's files as the locations within it."""
        place = place_of(settings.home, self.folder)
        return [Dataset(*dataset_of(place), [str(place / file["name"]) for file in metadata["files"]])]

    def left_alone(self, settings: Settings) -> LeftAlone:
        """Return the names in the folder that are not read, by reason."""
        return self.listing(settings).report()

    def held_back(self, settings: Settings) -> str | None:
        """Return a sentence on files that may still be written, by their age or because a marker is missing."""
        min_age, listing = self.min_age(settings), self.listing(settings)
        where, young = listing.place, listing.young(min_age)
        unmarked = listing.unmarked(self.marker) if self.marker else []
        sentences = []
        if young:
            few = f"{len(young)} file(s) changed less than {min_age} s ago and may still be written, such as {young[0]}."
            sentences.append(f"In {where} {few}")
        if unmarked:
            few = f"{len(unmarked)} folder(s) with files have no {self.marker} yet, such as {unmarked[0]}"
            sentences.append(f"In {where} {few}: they are read once it is there.")
        return one_line(" ".join(sentences)) or None

    def min_age(self, settings: Settings) -> int:
        """Return the age in seconds from which on a file counts as complete."""
        usual = 0 if is_url(self.folder) else settings.min_file_age_seconds
        return usual if self.min_age_seconds is None else self.min_age_seconds

    def objects(self) -> ObjectPath | None:
        """Return the place in a store; None if the folder is on a disk."""
        place = place_of(Path(), self.folder)
        return place if isinstance(place, ObjectPath) else None

    def manifests_place(self) -> ObjectPath | None:
        """Return the place of the manifests, if there is one: it may be below the source's own."""
        place = self.objects()
        if place is None or self.manifests is None:
            return None
        elsewhere = place_of(Path(), self.manifests)
        return elsewhere if isinstance(elsewhere, ObjectPath) else place / self.manifests.removesuffix("/")

    def listing(self, settings: Settings) -> Listing:
        """Return what is in the folder, or first in the store: of the manifests, if there are any.

        Raises: SourceUnreadable, SourceUnavailable, SettingsInvalid.
        """
        if manifests := self.manifests_place():
            return first_objects(manifests, EVERYTHING)
        if place := self.objects():
            return first_objects(place, self.glob)
        return list_files(settings.home / self.folder, self.glob, follow_links=self.follow_links)

    @property
    def executor_packages(self) -> tuple[str, ...]:
        """The library by which our tasks read from a store, which executors elsewhere must have; Spark reads Parquet itself."""
        is_read_by_tasks = self.format != "parquet" or self.versions
        return libraries_of(self.folder) if is_read_by_tasks else ()

    @property
    def keeps_files(self) -> bool:
        """Each file is recorded permanently by its name and content."""
        return True

    @property
    def wants_acks(self) -> bool:
        """Whether there is a done folder."""
        return self.done_folder is not None

    def ack(self, attempt: "Attempt", settings: Settings) -> None:
        """Move the batch's files to the done folder, if there is one; files moved before are left alone."""
        done = self.done(settings.home)
        if done is None:
            return
        for file in attempt.source_metadata["files"]:
            done.move(attempt.txid, file)
