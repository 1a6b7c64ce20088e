"""Plans batches of a Delta table: first the files of a snapshot, in the order of their names, then those of each version.

    metadata = {"table": id, "version": v, "commit": digest of v's JSON file or null, "snapshot": whether v's snapshot is read,
                "after": name or null, "taken": n or null, "generation": 1, "changes": false, "declared": digest,
                "data_files": [{...}, ...]}

`version` is the last one that was looked at. A batch without files only moves the position past versions that add no rows, so
that their part of the log may be removed. In a snapshot, `after` is the last name taken; in a version, `taken` counts its files
so far. Both are null once there are no more. So a position needs no list of files, and the rest of a snapshot can be read from
another checkpoint than its beginning.

`declared` is the digest of the source's identity: if it is another, the declaration is compared with the table again.

The digest of the version shows on each plan that the log is still that of the table which was read, and not that of a table
which was made again in its place, or of a copy that was restored.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from tidegate.jobs.sources.column_types import in_another_case
from tidegate.jobs.sources.data_files import DataFilesCoordinator
from tidegate.jobs.sources.delta.log import Commit, DataFile, Log, Snapshot, Table
from tidegate.jobs.sources.delta.source import CHANGE_TYPE, COMMIT_VERSION, Delta
from tidegate.jobs.sources.files.stores.object_places import place_of
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

NAMES_AT_ONCE = 10_000  # of a snapshot, that a plan has in memory
RESTORE = "RESTORE"


@dataclass(frozen=True)
class Position:
    """What has been taken up to a place, as metadata keep it."""

    table: str
    version: int
    commit: str | None
    snapshot: bool = False
    after: str | None = None
    taken: int | None = None


class DeltaCoordinator(DataFilesCoordinator[DataFile, Position]):
    """Plans batches of data files: those of a snapshot first, then those that versions add."""

    OWN = "version"

    def __init__(self, source: Delta, settings: Settings) -> None:
        self._source = source
        self._folder = place_of(settings.home, source.table)
        self._log = Log(self._folder)
        super().__init__(source, self._folder)
        self._declared = sha256(source.identity.encode()).hexdigest()
        self._newest: Snapshot | None = None  # the newest when the declaration was last compared with it

    def _metadata(self, files: list[DataFile], position: Position) -> SourceMetadata:
        """Return the metadata of a batch of these files."""
        declared = {"generation": self._source.generation, "changes": self._source.changes, "declared": self._declared}
        return {**vars(position), **declared, "data_files": list(map(self._entry, files))}

    def version(self, most_files: int) -> SourceMetadata:
        """Return the newest snapshot with its files, or the first of them by their names.

        Raises: SourceUnreadable, SourceUnavailable; RangeExpired for a file that is gone.
        """
        newest = self._check_newest()
        files = heapq.nsmallest(most_files, self._log.files_in(newest), key=lambda file: file.name)
        return {"table": newest.table.id, "version": newest.version, "data_files": list(map(self._entry, files))}

    def _find_new(self, previous: SourceMetadata | None) -> Iterator[tuple[DataFile | None, Position]]:
        """Yield each new file with the position after it; no file for a version that adds no rows."""
        unfinished: Commit | None = None
        if previous is None or self._begins_again(previous):
            position = self._begin()
        else:
            position = Position(**{name: previous[name] for name in Position.__dataclass_fields__})
            unfinished = self._version_of(position)
            self._check_declared(previous)
        if position.snapshot:
            yield from self._rest_of_snapshot(position)
        elif position.taken is not None:
            unfinished = unfinished or next(self._log.following(position.version - 1))
            yield from self._files_of(unfinished, position.table, position.taken)
        for commit in self._log.following(position.version):
            if self._is_to_be_read(commit, position.table):
                yield from self._files_of(commit, position.table, 0)
            else:
                yield None, Position(position.table, commit.version, commit.digest)

    def _begin(self) -> Position:
        """Return the position before the first batch, after checking that the table can be read as it is declared."""
        start, newest = self._source.starting_version, self._check_newest()
        if start is None:
            commit = self._commit(newest.version)
            return Position(newest.table.id, newest.version, commit.digest if commit else None, snapshot=True)
        if start > newest.version:
            raise SourceUnreadable(f"{self._folder} has no version {start}: its newest is {newest.version}.")
        return Position(newest.table.id, start - 1, None)

    def _check_declared(self, previous: SourceMetadata) -> None:
        """Check a declaration that is another than that of the previous batch."""
        if previous["declared"] == self._declared:
            return
        if previous["taken"] is not None and previous["changes"] != self._source.changes:
            raise SourceChanged(
                f"Version {previous['version']} of {self._folder} has been read in part, with changes={previous['changes']}. "
                "Declare it so until the rest of the version is planned; or raise generation, to begin again."
            )
        self._check_newest()

    def _check_newest(self) -> Snapshot:
        """Return the newest snapshot, after checking that the declaration fits it."""
        self._newest = self._log.snapshot()
        self._check(self._newest.table, self._newest.version)
        return self._newest

    def _version_of(self, position: Position) -> Commit | None:
        """Return the position's version; None if it was removed from the log."""
        commit = self._commit(position.version)
        if commit is None and position.commit is not None and next(self._log.following(position.version), None) is None:
            raise self._other_table(f"its log ends before version {position.version}, which has been read")
        if commit is None and (now := self._log.snapshot().table.id) != position.table:
            raise self._other_table(f"it has the id {now}, and was {position.table}")
        if commit is not None and position.commit not in (None, commit.digest):
            raise self._other_table(f"version {position.version} of its log is not the one that has been read")
        return commit

    def _commit(self, version: int) -> Commit | None:
        try:
            return self._log.commit(version)
        except FileNotFoundError:
            return None

    def _rest_of_snapshot(self, position: Position) -> Iterator[tuple[DataFile, Position]]:
        """Yield the files of a snapshot after a name, in the order of their names."""
        snapshot = self._newest
        if snapshot is None or snapshot.version != position.version:
            snapshot = self._log.snapshot(position.version)
        after = position.after
        while page := self._page(snapshot, after):
            is_last = len(page) <= NAMES_AT_ONCE
            page = page[:NAMES_AT_ONCE]
            for file in page:
                after = file.name
                is_end = is_last and file is page[-1]
                yield file, replace(position, snapshot=not is_end, after=None if is_end else after)
            if is_last:
                return

    def _page(self, snapshot: Snapshot, after: str | None) -> list[DataFile]:
        """Return the next files of a snapshot, and one more if there is one."""
        rest = (file for file in self._log.files_in(snapshot) if after is None or file.name > after)
        return heapq.nsmallest(NAMES_AT_ONCE + 1, rest, key=lambda file: file.name)

    def _is_to_be_read(self, commit: Commit, table: str) -> bool:
        """Return whether a version adds rows that are to be read."""
        if commit.table is not None:
            if commit.table.id != table:
                raise self._other_table(f"from version {commit.version} on it has the id {commit.table.id}, and was {table}")
            if self._newest is None or self._newest.version < commit.version:
                self._check_newest()  # and not this version, whose files may lack a column that was added later
        adds, removes = commit.changed("insert"), commit.changed("delete")
        if self._source.changes or not (removes or (adds and commit.operation == RESTORE)):
            return bool(adds or removes or commit.changed(None))
        self._pass_change(
            f"Version {commit.version} of {self._folder} ({commit.operation})",
            f"{len(removes)} file(s) are removed and {len(adds)} added",
            "skip_change_commits",
            "; or, in a new version of the pipeline, changes=True to read the changes themselves",
        )
        return False

    def _files_of(self, commit: Commit, table: str, taken: int) -> Iterator[tuple[DataFile, Position]]:
        """Yield the files of a version, except for the first ones."""
        files = self._log.files(commit, changes=self._source.changes)
        for number, file in enumerate(files, start=1):
            if number > taken:
                yield file, Position(table, commit.version, commit.digest, taken=None if number == len(files) else number)

    def _check(self, table: Table, version: int) -> None:
        """Check that the declaration fits the table as of a version."""
        place = f"Version {version} of {self._folder}"
        source = self._source
        if lacking := [name for name in (*source.schema, *source.partitions) if name not in table.columns]:
            case = in_another_case(lacking, table.columns)
            raise SourceUnreadable(f"{place} has no column {lacking[0]}{case}; it has {', '.join(table.columns)}.")
        if wrong := [name for name in source.schema if name in table.partitions]:
            raise SourceUnreadable(f"{place} is partitioned by {wrong[0]}: declare it in partitions, and not in the schema.")
        if wrong := [name for name in source.partitions if name not in table.partitions]:
            raise SourceUnreadable(
                f"{place} is not partitioned by {wrong[0]}: declare it in the schema, and not in partitions."
            )
        if source.changes and not table.records_changes:
            raise SourceUnreadable(
                f"{place} does not record changes: set its property delta.enableChangeDataFeed to true, or leave changes out."
            )

    def _entry(self, file: DataFile) -> dict[str, Any]:
        """Return a data file's entry in the metadata of a batch, by which attempts recognize it."""
        identity = self._identity(
            *(file, self._folder, f"in the log of version {file.version}"),
            f"version {file.version} has, is gone: the table no longer needs it, and VACUUM removed it "
            "(delta.deletedFileRetentionDuration). Put it back, or declare the next generation with a later starting_version",
        )
        if lacking := [name for name in self._source.partitions if name not in file.partition]:
            raise SourceUnreadable(
                f"The log of version {file.version} does not say of which partition {self._folder / file.name} is: it has no "
                f"value of {lacking[0]}. Leave the column out, or let a table's writer record it."
            )
        partition = {name: file.partition[name] for name in self._source.partitions}
        for name in self._source.instants:
            if (text := partition[name]) and not text.endswith("Z"):
                raise SourceUnreadable(
                    f"{self._folder / file.name} is of the partition {name}={text}, which has no time zone: it depends on who "
                    f"wrote it. Declare {name} as timestamp_ntz, or as string."
                )
        of_change = {CHANGE_TYPE: file.change} if file.change else {}
        beside = {**partition, **({**of_change, COMMIT_VERSION: str(file.version)} if self._source.changes else {})}
        return {**identity, "partition": beside}
