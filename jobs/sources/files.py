"""Files: a folder of Parquet, CSV, JSON-lines or text files, as a transactional or an opaque source.

Files are ordered by name; a batch is the next few of them. Its metadata names each file with size, modification time and
SHA-256. The digest is the identity: it is checked before and after every read, so that a batch is sealed only if Spark
saw the planned bytes (CONTRACT I11).

Which files have been taken already? As a rule that is one name: everything up to the last one. Where files may come late,
or are moved away when they are done with, the metadata lists those that were taken and are still in the folder.
"""

import glob
import json
import os
import re
import shutil
import stat
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jobs.sources import Coordinator, Source
from jobs.sources.file_content import digest_of
from jobs.sources.file_reader import DECIMAL, FileReader
from state_store.declaration import SourceMetadata
from state_store.errors import SourceChanged, SourceUnreadable
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from state_store.attempts import Attempt

Format = Literal["parquet", "csv", "json", "text"]
# What writers call files that are not finished, and what they leave beside those that are.
UNFINISHED = re.compile(r"(^|/)[._]|\.(tmp|temp|part|partial|inprogress|crdownload|swp)$", re.IGNORECASE)
# Compressed in ways that cannot be checked before Spark reads them.
UNCHECKED = re.compile(r"\.(zst|lz4|snappy|deflate|xz)$", re.IGNORECASE)
# What tells a taken file from a new one of the same name.
REMEMBERED = ("name", "size", "mtime_ns")
# Options that would make Spark drop, guess or repair rows instead of failing.
RESERVED_OPTIONS = (
    *("mode", "columnnameofcorruptrecord", "inferschema", "header", "enforceschema"),
    *("pathglobfilter", "modifiedbefore", "modifiedafter", "recursivefilelookup", "path"),
    *("ignorecorruptfiles", "ignoremissingfiles"),
)


@dataclass(frozen=True)
class Files(Source):
    """A folder of files of one format, each read exactly once, in the order of their names.

    `folder` starts at the project folder if it is relative. A batch is the next `max_files` files, or fewer when they
    would exceed `max_bytes`. New files must sort behind those that were planned before; one that does not is refused,
    because it would never be read. Names that start with ``.`` or ``_``, or end like unfinished files, are left alone, and
    so is a file that changed less than `min_age_seconds` ago or while it was looked at.

    `schema` maps columns to Spark types. Text has the one column ``value``. `options` go to Spark's reader, such as
    ``{"sep": ";", "nullValue": "NA", "dateFormat": "dd.MM.yyyy"}``. A record that does not fit the schema fails the batch
    with its file and line: it never becomes NULL, and a decimal is never rounded. In JSON, a key that a record lacks is NULL,
    and one that the schema does not name is left out. Text may be compressed by gzip or bzip2.

    `kind="opaque"` is for folders whose files may come late or be missing for a while: a late file is taken by the next
    batch, whatever its name, and a planned file that is gone or changed when it is read is left to a later batch. The
    states must be opaque too.

    `done_folder` is where the files of a batch go when it has committed, into a folder named by its txid. Without it, an
    opaque source's metadata grows with the folder. Only one pipeline can read a folder that empties itself.
    """

    folder: str
    glob: str = "*"
    format: Format = "parquet"
    schema: Mapping[str, str] = field(default_factory=dict)
    max_files: int = 1
    max_bytes: int | None = None
    header: bool = True
    options: Mapping[str, str] = field(default_factory=dict)
    min_age_seconds: int = 0
    kind: Literal["transactional", "opaque"] = "transactional"
    done_folder: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("transactional", "opaque"):
            raise ValueError(f"Files({self.folder!r}) cannot be {self.kind!r}: files replay, so use transactional or opaque.")
        if self.done_folder is not None and Path(self.done_folder).is_relative_to(self.folder):
            raise ValueError(
                f"Files({self.folder!r}) cannot move files to {self.done_folder!r} inside it: they would be read again."
            )
        if self.format not in ("parquet", "csv", "json", "text"):
            raise ValueError(f"Files({self.folder!r}) cannot read {self.format!r}: use parquet, csv, json or text.")
        if self.format == "text" and self.schema:
            raise ValueError(f"Files({self.folder!r}) of text has the one column value; leave schema out.")
        if self.format != "text" and not self.schema:
            raise ValueError(f"Files({self.folder!r}) needs a schema, such as {{'name': 'string', 'amount': 'int'}}.")
        if self.max_files < 1 or (self.max_bytes is not None and self.max_bytes < 1):
            raise ValueError(f"Files({self.folder!r}) needs max_files and max_bytes of at least 1.")
        if len(self.separator) != 1:
            raise ValueError(f"Files({self.folder!r}) cannot be separated by {self.separator!r}: use one character.")
        if self.format == "json" and any(name.lower() == "multiline" for name in self.options):
            raise ValueError(f"Files({self.folder!r}) reads JSON lines: one record a line, so multiLine makes no sense.")
        nested = [name for name, kind in self.schema.items() if DECIMAL.search(kind) and not DECIMAL.match(kind)]
        if nested and self.format == "json":
            raise ValueError(
                f"Files({self.folder!r}) cannot check decimals inside {nested[0]}: read them as string, and cast in the "
                "transform."
            )
        if refused := [name for name in self.options if name.lower() in RESERVED_OPTIONS]:
            raise ValueError(
                f"Files({self.folder!r}) cannot take the option {refused[0]}: Tidegate sets it to keep its promise."
            )

    @property
    def separator(self) -> str:
        """Return what stands between the values of a CSV record."""
        return self.options.get("sep", self.options.get("delimiter", ","))

    @property
    def identity(self) -> str:
        """Return what decides which rows are read: place, format, columns and reader options."""
        parts = [self.folder, self.glob, self.format, self.header, list(self.schema.items()), dict(self.options)]
        return f"files {json.dumps(parts, sort_keys=True)}"

    def coordinator(self, settings: Settings) -> "FilesCoordinator":
        """List the folder once and return what cuts it into batches.

        Raises: SourceUnreadable if the folder does not exist or cannot be listed.
        """
        folder = settings.home / self.folder
        if not folder.is_dir():
            raise SourceUnreadable(f"The source folder {folder} does not exist. Create it, or mend the pipeline's Files(...).")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise SourceUnreadable(f"The source folder {folder} cannot be listed: permission denied.")
        names = glob.glob(self.glob, root_dir=folder, recursive=True)  # noqa: PTH207 - pathlib's is five times slower
        return FilesCoordinator(self, folder, sorted(name for name in names if not UNFINISHED.search(name)))

    def emitter(self, spark: "SparkSession", settings: Settings) -> FileReader:
        """Return what reads the files that the metadata names."""
        return FileReader(
            spark,
            settings.home / self.folder,
            done_folder=settings.home / self.done_folder if self.done_folder else None,
            is_opaque=self.kind == "opaque",
            format=self.format,
            schema=self.schema,
            header=self.header,
            separator=self.separator,
            options=self.options,
        )

    @property
    def wants_acks(self) -> bool:
        """Only if there is a done folder."""
        return self.done_folder is not None

    def ack(self, attempt: "Attempt", settings: Settings) -> None:
        """Move the batch's files to the done folder, if there is one; those that were moved before are left alone."""
        if self.done_folder is None:
            return
        done = settings.home / self.done_folder / str(attempt.txid)
        for file in attempt.source_metadata["files"]:
            path = settings.home / self.folder / file["name"]
            if _is_still(path, file):
                (done / file["name"]).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, done / file["name"])


class FilesCoordinator(Coordinator):
    """Cuts one listing of the folder into batches."""

    def __init__(self, source: Files, folder: Path, names: list[str]) -> None:
        self._source = source
        self._folder = folder
        self._names = names

    def initialize_transaction(
        self,
        txid: int,  # noqa: ARG002 - files are numbered by their order alone
        previous_metadata: SourceMetadata | None,
        current_metadata: SourceMetadata | None,
    ) -> SourceMetadata | None:
        """Return the next files behind those of the previous batch, with their digests; None if there are none.

        Raises: SourceUnreadable for a file that cannot be read, SourceChanged for one that sorts before planned ones.
        """
        source = self._source
        if current_metadata is not None and source.kind == "transactional":
            return current_metadata
        planned, last, taken = 0, "", []
        if previous_metadata:
            before: list[dict[str, Any]] = previous_metadata["files"]
            planned = previous_metadata["files_before"] + len(before)
            last = max([previous_metadata.get("last", ""), *(file["name"] for file in before)])
            taken = [*previous_metadata.get("taken", ()), *before]
        if self._remembers:
            taken = [file for file in taken if _is_still(self._folder / file["name"], file)]
        else:
            taken = []
            self._refuse_late_files(planned, last)

        names = {file["name"] for file in taken}
        files: list[dict[str, Any]] = []
        size = 0
        for name in self._names if self._remembers else self._names[bisect_right(self._names, last) :]:
            if name in names:
                continue
            if name <= last and source.kind == "transactional":
                raise self._late(1, last, [name])
            if len(files) == source.max_files:
                break
            identity = _identify(self._folder, name, source.min_age_seconds)
            if identity is None:
                if source.kind == "opaque":
                    continue
                break  # a later file must not overtake one that is still being written
            size += identity["size"]
            if files and source.max_bytes is not None and size > source.max_bytes:
                break
            files.append(identity)
        if not files and current_metadata is None:
            return None
        remembered = [{name: file[name] for name in REMEMBERED} for file in taken]
        return {"files": files, "files_before": planned, "last": last, "taken": remembered}

    @property
    def _remembers(self) -> bool:
        """Tell whether the names of taken files are kept: where files come late or disappear, one last name says too little."""
        return self._source.kind == "opaque" or self._source.done_folder is not None

    def _refuse_late_files(self, planned: int, last: str) -> None:
        """Refuse to go on when more files sort up to `last` than were ever planned: some would never be read."""
        early = bisect_right(self._names, last)
        if (late := early - planned) > 0:
            newest = sorted(self._names[:early], key=lambda name: (self._folder / name).stat().st_mtime_ns)[-late:]
            raise self._late(late, last, newest)

    def _late(self, late: int, last: str, newest: list[str]) -> SourceChanged:
        return SourceChanged(
            f"{late} file(s) in {self._folder} sort before {last}, which is planned already, and would never be read; "
            f'by their times: {", ".join(newest[:3])}. Rename them so that they sort behind it, or declare kind="opaque".'
        )


def _is_still(path: Path, file: dict[str, Any]) -> bool:
    """Tell whether a file is there and is the one that was taken, not a new one of the same name."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_mtime_ns) == (file["size"], file["mtime_ns"])


def _identify(folder: Path, name: str, min_age_seconds: int) -> dict[str, Any] | None:
    """Return a file's identity, None while it is still being written."""
    path = folder / name
    if ":" in name or re.search("[\udc80-\udcff]", name):  # the latter is how Python shows bytes that are not UTF-8
        raise SourceUnreadable(f"{ascii(str(path))[1:-1]}: Spark cannot open a name with a colon, or not in UTF-8. Rename it.")
    if UNCHECKED.search(name):
        raise SourceUnreadable(f"{path} is compressed in a way that cannot be checked. Use gzip or bzip2.")
    try:
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            raise SourceUnreadable(f"{path} is no file. Move it away, or let the glob leave it out.")  # a pipe would block
        digest = digest_of(path)
        after = path.stat()
    except OSError as error:
        raise SourceUnreadable(f"{path} cannot be read: {error.strerror}. Make it readable, or move it away.") from error
    changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
    if changed or time.time() - after.st_mtime < min_age_seconds:
        return None
    return {"name": name, "size": after.st_size, "mtime_ns": after.st_mtime_ns, "sha256": digest}
