"""Plans batches of an Iceberg table: first the files that it has, then those of each snapshot; snapshots may have expired.

    metadata = {"table": uuid, "snapshot": "its id", "whole": whether all of its files are read, "taken": n or null,
                "generation": 1, "root": place of the data files, "data_files": [{...}, ...]}

`snapshot` is the last one that was looked at, and `taken` counts its files so far; it is null once there are no more. A batch
without files only moves the position past snapshots that add no rows, so that they may expire.

Snapshots name their parents. So each plan sees whether the branch still leads through the snapshot that was read last.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from tidegate.jobs.sources.data_files import DataFilesCoordinator
from tidegate.jobs.sources.files.stores.object_places import place_of
from tidegate.jobs.sources.iceberg.source import Iceberg
from tidegate.jobs.sources.iceberg.table import DataFile, IcebergTable
from tidegate.state_store.base.errors import RangeExpired, SourceChanged, SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    from pyiceberg.table.snapshots import Snapshot


@dataclass(frozen=True)
class Position:
    """What has been taken up to a place, as metadata keep it."""

    table: str
    snapshot: str
    whole: bool = False
    taken: int | None = None


class IcebergCoordinator(DataFilesCoordinator[DataFile, Position]):
    """Plans batches of data files: those that the table has first, then those that snapshots add."""

    OWN = "whole"

    def __init__(self, source: Iceberg, settings: Settings) -> None:
        self._source = source
        self._home = settings.home
        super().__init__(source, source.table)

    def _metadata(self, files: list[DataFile], position: Position) -> SourceMetadata:
        """Return the metadata of a batch of these files."""
        return {
            **vars(position),
            "generation": self._source.generation,
            "root": files[0].root if files else self._table.root,
            "data_files": [self._entry(file, position.snapshot) for file in files],
        }

    def _goes_with(self, file: DataFile, others: list[DataFile]) -> bool:
        """Return whether a file lies in the same place as those before it."""
        return file.root == others[0].root

    @cached_property
    def _table(self) -> IcebergTable:
        """The table as it was when the plan first asked for it."""
        table = IcebergTable(self._source.table)
        table.check(self._source.schema)
        return table

    def version(self, most_files: int) -> SourceMetadata:
        """Return what the branch main has now with its files, or the first of them.

        Raises: SourceUnreadable, SourceUnavailable; RangeExpired for a file that is gone.
        """
        history = self._table.history()
        snapshot = history[-1] if history else None
        files = list(islice(self._table.files(snapshot, 0, whole=True), most_files)) if snapshot else []
        if len(roots := {file.root for file in files} or {self._table.root}) > 1:
            raise SourceUnreadable(
                f"{self._source.table} has files below {' and '.join(sorted(roots))}: such a table cannot be a reference. "
                "Write it again."
            )
        name = str(snapshot.snapshot_id) if snapshot else None
        return {
            **{"table": self._table.uuid, "snapshot": name, "root": roots.pop()},
            "data_files": [self._entry(file, name) for file in files],
        }

    def _find_new(self, previous: SourceMetadata | None) -> Iterator[tuple[DataFile | None, Position]]:
        """Yield each new file with the position after it; no file for a snapshot that adds no rows."""
        table, history = self._table, self._table.history()
        if previous is None or self._begins_again(previous):
            following = self._begin(history)
            if self._source.starting_snapshot is None and history:
                yield from self._rest_of(history[-1], 0, whole=True)
        else:
            position = Position(**{name: previous[name] for name in Position.__dataclass_fields__})
            following = self._after(position, history)
            if position.taken is not None:
                yield from self._rest_of(self._snapshot_in_progress(position), position.taken, whole=position.whole)
        for snapshot in following:
            if self._is_to_be_read(snapshot):
                yield from self._rest_of(snapshot, 0, whole=False)
            else:
                yield None, Position(table.uuid, str(snapshot.snapshot_id))

    def _begin(self, history: "list[Snapshot]") -> "list[Snapshot]":
        """Return the snapshots whose additions are to be read at the beginning."""
        start = self._source.starting_snapshot
        if start is None:
            return []
        numbers = [snapshot.snapshot_id for snapshot in history]
        if start not in numbers:
            raise SourceUnreadable(
                f"{self._source.table} has no snapshot {start} on its branch main; the oldest that is left is "
                f"{numbers[0] if numbers else 'none'}."
            )
        return history[numbers.index(start) :]

    def _after(self, position: Position, history: "list[Snapshot]") -> "list[Snapshot]":
        """Return the snapshots that followed the one that was read last."""
        table, last = self._table, int(position.snapshot)
        if table.uuid != position.table:
            raise self._other_table(f"it has the id {table.uuid}, and was {position.table}")
        numbers = [snapshot.snapshot_id for snapshot in history]
        if last in numbers:
            return history[numbers.index(last) + 1 :]
        oldest = history[0].parent_snapshot_id if history else None
        if oldest == last:
            return history
        read = table.snapshot(last)
        is_cut_after = read is not None and oldest is not None and history[0].timestamp_ms > read.timestamp_ms
        if read is not None and not is_cut_after:
            raise SourceChanged(
                f"{self._source.table} is another table than the one that has been read: its branch main does not come from "
                f"snapshot {last} any more, as after a rollback. Nothing is planned. Put the branch back. Or go on with what "
                f"came since the rollback: declare generation={self._source.generation + 1}, and as starting_snapshot the "
                "first snapshot after it, and raise the pipeline's version. Without starting_snapshot, all rows of the table "
                "are read, and those that have counted and are still there count twice."
            )
        oldest_left = numbers[0] if numbers else "none"
        missing = f"{oldest} any more, which came after snapshot {last}" if is_cut_after else f"{last} any more"
        raise RangeExpired(
            f"{self._source.table} has no snapshot {missing}, which was read last, and what followed may be gone, too: "
            f"snapshots expire (history.expire.max-snapshot-age-ms). The oldest that is left is {oldest_left}. "
            "Declare the next generation, with a starting_snapshot or to read again all that the table has, and raise the "
            "pipeline's version."
        )

    def _snapshot_in_progress(self, position: Position) -> "Snapshot":
        """Return the snapshot that was read in part."""
        if (snapshot := self._table.snapshot(int(position.snapshot))) is None:
            raise RangeExpired(
                f"{self._source.table} has no snapshot {position.snapshot} any more, of which {position.taken} files were "
                "read and others were not: it was expired. Declare the next generation, and raise the pipeline's version."
            )
        return snapshot

    def _rest_of(self, snapshot: "Snapshot", taken: int, *, whole: bool) -> Iterator[tuple[DataFile, Position]]:
        """Yield the files that a snapshot has, or adds, after the first, each with its position."""
        uuid, name, total = self._table.uuid, str(snapshot.snapshot_id), self._table.count(snapshot, whole=whole)
        for number, file in enumerate(self._table.files(snapshot, taken, whole=whole), start=taken + 1):
            yield file, Position(uuid, name, whole, None if number == total else number)

    def _is_to_be_read(self, snapshot: "Snapshot") -> bool:
        """Return whether a snapshot adds rows that are to be read."""
        operation, adds, removes = self._table.effect(snapshot)
        if operation == "replace":
            return False
        if not removes:
            return adds > 0
        self._pass_change(
            f"Snapshot {snapshot.snapshot_id} of {self._source.table} ({operation})",
            f"it removes, or deletes rows of, {removes} file(s) and adds {adds}",
            "skip_overwrites",
        )
        return False

    def _entry(self, file: DataFile, snapshot: str | None) -> dict[str, Any]:
        """Return a data file's entry in the metadata of a batch, by which attempts recognize it."""
        identity = self._identity(
            *(file, place_of(self._home, file.root), "by the table's manifest"),
            f"snapshot {snapshot} or one before it has, is gone: it was removed after its snapshot expired. Put it back, or "
            "declare the next generation",
        )
        return {**identity, "partition": {}, "may_lack": [name for name in self._source.schema if name not in file.columns]}
