"""Files: a folder of Parquet, CSV, JSON-lines or text files as a transactional source.

Files are ordered by name; a batch is the next few of them. Its metadata names each file with size, modification time and
SHA-256. The digest is the identity: it is checked before and after every read, so that a batch is sealed only if Spark
saw the planned bytes (CONTRACT I11).
"""

import codecs
import csv
import glob
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from state_store.declaration import SourceMetadata
from state_store.errors import MalformedRecord, SourceChanged, SourceUnreadable, TidegateError
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Format = Literal["parquet", "csv", "json", "text"]
# What writers call files that are not finished, and what they leave beside those that are.
UNFINISHED = re.compile(r"(^|/)[._]|\.(tmp|temp|part|partial|inprogress|crdownload|swp)$", re.IGNORECASE)
COMPRESSED = re.compile(r"\.(gz|bz2|zst|lz4|snappy|deflate|xz)$", re.IGNORECASE)
READ_BLOCK_BYTES = 1 << 20
SHOWN_RECORD_CHARACTERS = 200
CORRUPT = "_tidegate_corrupt_record"
MALFORMED_MARK = "TIDEGATE_MALFORMED_RECORD"
# Options that would make Spark drop, guess or repair rows instead of failing.
RESERVED_OPTIONS = ("mode", "columnnameofcorruptrecord", "inferschema", "header", "enforceschema", "pathglobfilter")


@dataclass(frozen=True)
class Files:
    """A folder of files of one format, each read exactly once, in the order of their names.

    `folder` starts at the project folder if it is relative. A batch is the next `max_files` files, or fewer when they
    would exceed `max_bytes`. New files must sort behind those that were planned before; one that does not is refused,
    because it would never be read. Names that start with ``.`` or ``_``, or end like unfinished files, are left alone, and
    so is a file that changed less than `min_age_seconds` ago or while it was looked at.

    `schema` maps columns to Spark types. Text has the one column ``value``. `options` go to Spark's reader, such as
    ``{"sep": ";", "nullValue": "NA", "dateFormat": "dd.MM.yyyy"}``. A record that does not fit the schema fails the batch
    with its file and line; it never becomes NULL.
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

    def __post_init__(self) -> None:
        if self.format not in ("parquet", "csv", "json", "text"):
            raise ValueError(f"Files({self.folder!r}) cannot read {self.format!r}: use parquet, csv, json or text.")
        if self.format == "text" and self.schema:
            raise ValueError(f"Files({self.folder!r}) of text has the one column value; leave schema out.")
        if self.format != "text" and not self.schema:
            raise ValueError(f"Files({self.folder!r}) needs a schema, such as {{'name': 'string', 'amount': 'int'}}.")
        if self.max_files < 1 or (self.max_bytes is not None and self.max_bytes < 1):
            raise ValueError(f"Files({self.folder!r}) needs max_files and max_bytes of at least 1.")
        if refused := [name for name in self.options if name.lower() in RESERVED_OPTIONS]:
            raise ValueError(
                f"Files({self.folder!r}) cannot take the option {refused[0]}: Tidegate sets it to keep its promise."
            )

    @property
    def kind(self) -> Literal["transactional"]:
        """Files replay: the same bytes, or SourceChanged."""
        return "transactional"

    @property
    def identity(self) -> str:
        """Return what decides which rows are read: place, format, columns and reader options."""
        parts = [self.folder, self.glob, self.format, self.header, dict(self.schema), dict(self.options)]
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

    def emitter(self, metadata: SourceMetadata, settings: Settings) -> "FilesEmitter":
        """Return what reads the files that the metadata names."""
        return FilesEmitter(self, settings.home / self.folder, metadata["files"])


class FilesCoordinator:
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
        if current_metadata is not None:
            return current_metadata
        planned, last = 0, ""
        if previous_metadata:
            planned = previous_metadata["files_before"] + len(previous_metadata["files"])
            last = previous_metadata["files"][-1]["name"]
            self._refuse_late_files(planned, last)

        files: list[dict[str, Any]] = []
        size = 0
        for name in self._names:
            if name <= last:
                continue
            if len(files) == self._source.max_files:
                break
            identity = _identify(self._folder, name, self._source.min_age_seconds)
            if identity is None:
                break  # a later file must not overtake one that is still being written
            size += identity["size"]
            if files and self._source.max_bytes is not None and size > self._source.max_bytes:
                break
            files.append(identity)
        return {"files": files, "files_before": planned} if files else None

    def _refuse_late_files(self, planned: int, last: str) -> None:
        """Refuse to go on when more files sort up to `last` than were ever planned: some would never be read."""
        early = [name for name in self._names if name <= last]
        if (late := len(early) - planned) > 0:
            newest = sorted(early, key=lambda name: (self._folder / name).stat().st_mtime_ns)[-late:]
            raise SourceChanged(
                f"{late} file(s) in {self._folder} sort before {last}, which is planned already, and would never be read; by "
                "their "
                f"times: {', '.join(newest[:3])}. Rename them so that they sort behind it."
            )


class FilesEmitter:
    """Reads the files of one batch, and checks that they are what was planned."""

    def __init__(self, source: Files, folder: Path, files: list[dict[str, Any]]) -> None:
        self._source = source
        self._folder = folder
        self._files = files

    def emit_batch(self, spark: "SparkSession") -> "DataFrame":
        """Return the rows of the files, after checking the files' digests and, for text formats, their encoding."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812 - declaring a pipeline must not load pyspark

        for file in self._files:
            self._check_content(file)
        reader = spark.read.format(self._source.format).options(**self._source.options)
        paths = [_literal_path(self._folder / file["name"]) for file in self._files]
        if self._source.format == "text":
            return reader.load(paths)
        columns = ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in self._source.schema.items())
        if self._source.format == "parquet":
            rows = reader.schema(columns).load(paths)
            self._check_parquet_schemas(rows)
            return rows

        if self._source.format == "csv":
            reader = reader.options(header=self._source.header, enforceSchema=True)
            if self._source.header:
                self._check_headers()
        reader = reader.options(mode="PERMISSIVE", columnNameOfCorruptRecord=CORRUPT)
        rows = reader.schema(f"{columns}, `{CORRUPT}` string").load(paths)
        record = F.substring(F.col(CORRUPT), 1, SHOWN_RECORD_CHARACTERS)
        finding = F.to_json(F.struct(F.col("_metadata.file_path").alias("file"), record.alias("record")))
        refusal = F.raise_error(F.concat(F.lit(f"{MALFORMED_MARK} "), finding)).cast("boolean")
        return rows.where(F.when(F.col(CORRUPT).isNull(), F.lit(True)).otherwise(refusal)).drop(CORRUPT)

    def verify_batch(self) -> None:
        """Check the digests again: a file that changed during the read is found before the seal."""
        for file in self._files:
            self._check_content(file, encoding=False)

    def explain(self, error: Exception) -> TidegateError | None:
        """Return which file and line a Spark error is about."""
        text = str(error)
        if (start := text.find(MALFORMED_MARK)) >= 0:
            finding, _ = json.JSONDecoder().raw_decode(text, text.index("{", start))
            path, record = self._path_of(finding["file"]), finding["record"]
            line = next((n for n, content in _lines(path) if content.startswith(record)), None)
            place = f"{path}, line {line}" if line else str(path)
            return MalformedRecord(
                f"{place}: the record does not fit the schema: {record!r}. Correct the schema, or replace the file before "
                "its batch is planned."
            )
        if "FAILED_READ_FILE" in text or "CANNOT_READ_FILE_FOOTER" in text:
            return SourceUnreadable(text.strip().splitlines()[0])
        return None

    def _path_of(self, uri: str) -> Path:
        named: list[Path] = [self._folder / file["name"] for file in self._files]
        return next((path for path in named if uri.endswith(path.as_uri().removeprefix("file://"))), named[0])

    def _check_content(self, file: dict[str, Any], *, encoding: bool = True) -> None:
        path = self._folder / file["name"]
        text = encoding and self._source.format != "parquet" and not COMPRESSED.search(file["name"])
        try:
            size = path.stat().st_size
            digest = _digest(path, text=text) if size == file["size"] else None
        except FileNotFoundError:
            raise SourceChanged(f"{path} is gone since its batch was planned. Put it back, unchanged.") from None
        except OSError as error:
            raise SourceUnreadable(f"{path} cannot be read: {error.strerror}.") from error
        if digest != file["sha256"]:
            raise SourceChanged(
                f"{path} changed since its batch was planned ({file['size']} bytes then, {size} now). "
                "Put the planned content back."
            )

    def _check_headers(self) -> None:
        expected = list(self._source.schema)
        separator = self._source.options.get("sep", self._source.options.get("delimiter", ","))
        for file in self._files:
            path = self._folder / file["name"]
            if COMPRESSED.search(file["name"]):
                continue
            with path.open(newline="", encoding="utf-8-sig") as content:
                header = next(csv.reader(content, delimiter=separator), None)
            if header != expected:
                raise MalformedRecord(
                    f"{path}, line 1: the header is {','.join(header or []) or 'missing'}, "
                    f"the schema says {','.join(expected)}."
                )

    def _check_parquet_schemas(self, rows: "DataFrame") -> None:
        """Compare each file's own schema with the declared one, because Spark reads a missing column as NULL."""
        import pyarrow as pa  # noqa: PLC0415 - declaring a pipeline must not load pyarrow
        import pyarrow.parquet as pq  # noqa: PLC0415
        from pyspark.errors import PySparkException  # noqa: PLC0415
        from pyspark.sql.pandas.types import from_arrow_type  # noqa: PLC0415

        expected = {column.name: column.dataType for column in rows.schema}
        for file in self._files:
            path = self._folder / file["name"]
            try:
                found = pq.read_schema(path)
            except (pa.ArrowInvalid, OSError) as error:
                raise SourceUnreadable(f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}") from error
            if set(found.names) != set(expected) or len(found.names) != len(expected):
                missing, added = sorted(set(expected) - set(found.names)), sorted(set(found.names) - set(expected))
                raise MalformedRecord(f"{path}: its columns are not those of the schema: missing {missing}, added {added}.")
            for column in found:
                try:
                    kind = from_arrow_type(column.type, prefer_timestamp_ntz=True)
                except PySparkException:
                    kind = None
                if kind != expected[column.name] or (pa.types.is_timestamp(column.type) and column.type.unit == "ns"):
                    raise MalformedRecord(
                        f"{path}: column {column.name} is {column.type}, "
                        f"the schema says {expected[column.name].simpleString()}."
                    )


def _identify(folder: Path, name: str, min_age_seconds: int) -> dict[str, Any] | None:
    """Return a file's identity, None while it is still being written."""
    path = folder / name
    try:
        before = path.stat()
        digest = _digest(path, text=False)
        after = path.stat()
    except OSError as error:
        raise SourceUnreadable(f"{path} cannot be read: {error.strerror}. Make it readable, or move it away.") from error
    changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
    if changed or time.time() - after.st_mtime < min_age_seconds:
        return None
    return {"name": name, "size": after.st_size, "mtime_ns": after.st_mtime_ns, "sha256": digest}


def _digest(path: Path, *, text: bool) -> str:
    """Return a file's SHA-256; with `text`, refuse bytes that are not UTF-8, which Spark would replace silently."""
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as content:
        lines = 1
        for block in iter(partial(content.read, READ_BLOCK_BYTES), b""):
            digest.update(block)
            if text:
                try:
                    decoder.decode(block)
                except UnicodeDecodeError as error:
                    line = lines + error.object[: error.start].count(b"\n")
                    raise MalformedRecord(
                        f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8."
                    ) from None
                lines += block.count(b"\n")
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if COMPRESSED.search(path.name):
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as content:
        yield from ((number, line.rstrip("\r\n")) for number, line in enumerate(content, start=1))


def _literal_path(path: Path) -> str:
    """Return a path that Spark takes as it is: it would expand *, ?, [] and {} in names."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", str(path))
