"""Reads the log of a Delta table: which files versions add, which a snapshot has, which features of a table are refused.

The log is a folder `_delta_log`. It has a JSON file of actions for each version, which is written once, and now and then a
checkpoint: Parquet files with the state of the table at a version. Delta may delete both after a time, except for what the
newest snapshot needs. Its protocol defines the actions (PROTOCOL.md of delta-io/delta).

To save memory, a snapshot holds only the files that were added or removed since its checkpoint.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any
from urllib.parse import unquote

from tidegate.jobs.sources.files.content import open_file
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place, for_arrow, listed
from tidegate.state_store.base.errors import RangeExpired, SourceChanged, SourceUnreadable

FOLDER = "_delta_log"
# Features that make no difference to reading whole Parquet files. Only files that have deletion vectors are refused.
READ_FEATURES = frozenset({"deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "vacuumProtocolCheck"})
LAST_READER_VERSION = 3
ROWS_AT_ONCE = 10_000
# Actions on files, and what happened to all rows of one; None if the file says it row by row.
CHANGES = {"add": "insert", "remove": "delete", "cdc": None}
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_SECOND_CHECKPOINT = re.compile(r"\d{20}\.checkpoint\.[0-9a-f-]{36}\.(?:json|parquet)")
# The columns of a checkpoint that are read, about the table and about its files.
_TABLE_COLUMNS, _FILE_COLUMNS = ("protocol", "metaData"), ("add.path", "add.partitionValues", "add.size", "add.deletionVector")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file in the log: its name below the table's folder, size in bytes, and partition values as text.

    `change` is what happened to all of its rows; None if the file's own column `_change_type` says it row by row. The rows of
    one that `is_rewrite` were only written again. `deletions` identifies its deletion vector; None if it has none.
    """

    name: str
    size: int | None
    partition: Mapping[str, str | None]
    version: int
    change: str | None
    is_rewrite: bool = False
    deletions: str | None = None

    @property
    def key(self) -> tuple[str, str | None]:
        """Return what identifies the file in later actions."""
        return self.name, self.deletions


@dataclass(frozen=True)
class Table:
    """The table's id, columns and properties, as of a version."""

    id: str
    columns: tuple[str, ...]
    partitions: tuple[str, ...]
    records_changes: bool


@dataclass
class Commit:
    """What a version does; `digest` is its JSON file's, `table` is None if unchanged, `files` are in the order of that file."""

    version: int
    digest: str = ""
    operation: str = "an unknown operation"
    table: Table | None = None
    files: list[DataFile] = field(default_factory=list)

    def changed(self, *changes: str | None) -> list[DataFile]:
        """Return the files with changed rows, by what happened to these."""
        return [file for file in self.files if file.change in changes and not file.is_rewrite]


@dataclass
class Snapshot:
    """The table as of a version: its files are those of a checkpoint, except as changed in `since`."""

    version: int
    table: Table
    checkpoint: tuple[str, ...]  # the names of its files; empty if the log is read from the first version on
    # By `DataFile.key`: files that were added since the checkpoint; None for files that were removed since.
    since: dict[tuple[str, str | None], DataFile | None] = field(default_factory=dict)


class Log:
    """The log of the table in a folder, on a disk or in a store."""

    def __init__(self, folder: Place) -> None:
        self.table = folder
        self._folder = folder / FOLDER

    def following(self, version: int) -> Iterator[Commit]:
        """Yield the versions after this one, up to the newest; all for -1.

        Raises: SourceUnreadable, SourceUnavailable; RangeExpired if a version is missing.
        """
        while True:
            version += 1
            try:
                commit = self.commit(version)
            except FileNotFoundError:
                if (newest := _newest_version(self._names())) < version:
                    return
                commit = self._known_commit(version, newest)
            yield commit

    def _known_commit(self, version: int, newest: int) -> Commit:
        """Return a version up to `newest`: it was written, so it is there or was removed (RangeExpired)."""
        try:
            return self.commit(version)
        except FileNotFoundError:
            raise RangeExpired(
                f"{self._folder} has version {newest}, and no longer version {version}, which was to be read: the table "
                "removes its old log after a time (delta.logRetentionDuration). Put the JSON file back, or declare the "
                "next generation with a later starting_version, and raise the pipeline's version."
            ) from None

    def commit(self, version: int) -> Commit:
        """Return what a version does.

        Raises: FileNotFoundError if there is no such version; SourceUnreadable.
        """
        digest, commit = sha256(), Commit(version)
        for line in self._lines(version):
            digest.update(line)
            for name, details in self._parse(version, line).items():
                if name in CHANGES:
                    commit.files.append(self._data_file(details, version, CHANGES[name]))
                elif name == "commitInfo":
                    commit.operation = str(details.get("operation") or commit.operation)
                elif name == "protocol":
                    self._check_protocol(details)
                elif name == "metaData":
                    commit.table = self._table_of(details)
        commit.digest = digest.hexdigest()
        return commit

    def files(self, commit: Commit, *, changes: bool) -> list[DataFile]:
        """Return the files that a version adds, in the order of its JSON file; with `changes`, all with changed rows.

        Raises: SourceUnreadable if one that the version adds or removes has deleted rows, unless other files say what changed.
        """
        if changes and (by_row := commit.changed(None)):
            return by_row
        for file in commit.changed(*CHANGES.values()):
            self._check_whole(file)
        return commit.changed("insert", "delete") if changes else commit.changed("insert")

    def snapshot(self, version: int | None = None) -> Snapshot:
        """Return the table as of a version, by default the newest.

        Raises: SourceUnreadable if there is no such table; RangeExpired if the log does not go back to the version.
        """
        names = list(self._names())
        if any(map(_SECOND_CHECKPOINT.fullmatch, names)):
            raise self._unsupported("the feature v2Checkpoint")
        checkpoints = _complete_checkpoints(names)
        newest = max(_newest_version(names), *checkpoints, -1)
        if newest < 0:
            raise SourceUnreadable(
                f"{self.table} is no Delta table: {self._folder} has no version. Correct the pipeline's Delta(...)."
            )
        version = newest if version is None else version
        base = max((each for each in checkpoints if each <= version), default=None)
        table = None if base is None else self._table_in(checkpoints[base])
        since: dict[tuple[str, str | None], DataFile | None] = {}
        for each in range(0 if base is None else base + 1, version + 1):
            commit = self._known_commit(each, newest)
            table = commit.table or table
            since |= {file.key: file if file.change == "insert" else None for file in commit.files if file.change}
        if table is None:
            raise SourceUnreadable(f"{self._folder} does not say what the table is up to version {version}.")
        return Snapshot(version, table, () if base is None else checkpoints[base], since)

    def files_in(self, snapshot: Snapshot) -> Iterator[DataFile]:
        """Yield the files of a snapshot, in any order.

        Raises: SourceUnreadable.
        """
        for name in snapshot.checkpoint:
            for row in self._rows(name, _FILE_COLUMNS):
                if row["add"] is not None:
                    file = self._data_file(row["add"], snapshot.version, "insert")
                    if file.key not in snapshot.since:
                        yield self._check_whole(file)
        for each in snapshot.since.values():
            if each is not None:
                yield self._check_whole(replace(each, version=snapshot.version))

    def _names(self) -> Iterator[str]:
        """Yield the names in the log's folder."""
        if isinstance(self._folder, ObjectPath):
            for page in listed(self._folder):
                yield from (each.key[len(self._folder.key) + 1 :] for each in page)
            return
        try:
            yield from (path.name for path in self._folder.iterdir())
        except FileNotFoundError:
            raise SourceUnreadable(
                f"{self.table} is no Delta table: it has no folder {FOLDER}. Correct the pipeline's Delta(...)."
            ) from None
        except OSError as error:
            raise SourceUnreadable(f"{self._folder} cannot be listed: {error.strerror}. Make it readable.") from error

    def _lines(self, version: int) -> Iterator[bytes]:
        path = self._folder / f"{version:020}.json"
        try:
            with open_file(path) as content:
                yield from content
        except SourceChanged:  # raised for an object that is gone
            raise FileNotFoundError(str(path)) from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SourceUnreadable(f"{path} cannot be read: {error.strerror}. Make it readable.") from error

    def _parse(self, version: int, line: bytes) -> dict[str, Any]:
        try:
            action = json.loads(line) if line.strip() else {}
        except ValueError as error:
            raise SourceUnreadable(
                f"Version {version} of {self.table} cannot be read: its log has a line that is no JSON ({error})."
            ) from None
        if not isinstance(action, dict):
            raise SourceUnreadable(f"Version {version} of {self.table} cannot be read: its log has a line that is no action.")
        return action

    def _rows(self, name: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows of a checkpoint's file, with these columns."""
        import pyarrow as pa  # noqa: PLC0415 - declaring a pipeline must not load pyarrow
        import pyarrow.parquet as pq  # noqa: PLC0415

        path = self._folder / name
        try:
            with pq.ParquetFile(for_arrow(path)) as file:
                for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(columns)):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise SourceUnreadable(f"{path} is no checkpoint that can be read: {str(error).splitlines()[0]}.") from error

    def _table_in(self, checkpoint: tuple[str, ...]) -> Table | None:
        table = None
        for name in checkpoint:
            for row in self._rows(name, _TABLE_COLUMNS):
                if row.get("protocol") is not None:
                    self._check_protocol(row["protocol"])
                if row.get("metaData") is not None:
                    table = self._table_of(row["metaData"])
        return table

    def _data_file(self, action: Mapping[str, Any], version: int, change: str | None) -> DataFile:
        vector = action.get("deletionVector")
        deletions = vector and f"{vector['storageType']}{vector['pathOrInlineDv']}@{vector.get('offset')}"
        values = dict(action.get("partitionValues") or {})
        partition = {key: text or None for key, text in values.items()}  # Delta writes NULL as null or as an empty text
        is_rewrite = change is not None and not action.get("dataChange", True)
        return DataFile(self._name_of(action["path"]), action.get("size"), partition, version, change, is_rewrite, deletions)

    def _check_whole(self, file: DataFile) -> DataFile:
        """Refuse a file that has deleted rows."""
        if file.deletions is not None:
            raise SourceUnreadable(
                f"{self.table / file.name} has deleted rows in version {file.version} (a deletion vector), which is not read "
                "here. Let Delta write such files again: REORG TABLE ... APPLY (PURGE)."
            )
        return file

    def _name_of(self, path: str) -> str:
        try:
            name = unquote(path, errors="strict")  # otherwise two names would become one
        except UnicodeDecodeError:
            raise SourceUnreadable(f"{self.table} lists a file whose name is not UTF-8: {path}.") from None
        if "://" in path or name.startswith("/") or re.match(r"[a-z][a-z0-9]*:/", path) or ".." in name.split("/"):
            raise SourceUnreadable(
                f"{self.table} lists a file outside its folder: {path}. Such tables, as shallow clones are, are not read."
            )
        return name

    def _check_protocol(self, protocol: Mapping[str, Any]) -> None:
        version, features = protocol["minReaderVersion"], set(protocol.get("readerFeatures") or ())
        unknown = sorted(features - READ_FEATURES)
        if version > LAST_READER_VERSION or unknown:
            what = f"the feature {unknown[0]}" if unknown else f"version {version} of Delta's protocol"
            raise self._unsupported(what)

    def _unsupported(self, what: str) -> SourceUnreadable:
        return SourceUnreadable(f"{self.table} requires {what} of its readers, which Tidegate does not support.")

    def _table_of(self, metadata: Mapping[str, Any]) -> Table:
        configuration = dict(metadata.get("configuration") or {})
        if (mode := configuration.get("delta.columnMapping.mode", "none")) != "none":
            raise SourceUnreadable(
                f"{self.table} has other names for its columns in its files (column mapping by {mode}), which is not read."
            )
        columns = [field["name"] for field in json.loads(metadata["schemaString"])["fields"]]
        records_changes = configuration.get("delta.enableChangeDataFeed", "false").lower() == "true"
        return Table(metadata["id"], tuple(columns), tuple(metadata["partitionColumns"] or ()), records_changes)


def _newest_version(names: Iterable[str]) -> int:
    """Return the newest version that has a JSON file; -1 if there is none."""
    return max((int(match[1]) for name in names if (match := _COMMIT.fullmatch(name))), default=-1)


def _complete_checkpoints(names: list[str]) -> dict[int, tuple[str, ...]]:
    """Return the names of the files of each complete checkpoint, by version."""
    single: dict[int, tuple[str, ...]] = {}
    parts: dict[tuple[int, int], list[str]] = {}
    for name in names:
        if match := _CHECKPOINT.fullmatch(name):
            if match[3] is None:
                single[int(match[1])] = (name,)
            else:
                parts.setdefault((int(match[1]), int(match[3])), []).append(name)
    whole = {version: tuple(sorted(files)) for (version, count), files in parts.items() if len(files) == count}
    return whole | single
