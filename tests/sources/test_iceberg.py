"""`Iceberg` over tables that PyIceberg writes: each row once, whatever becomes of them. PyIceberg's reader is the oracle."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.types import IntegerType, StringType

from tests.sources.feeds import SCHEMA
from tests.sources.iceberg_catalog import catalog
from tests.sources.in_process import Table
from tidegate.jobs import Iceberg
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import MalformedRecord, RangeExpired, SourceChanged, SourceUnreadable

TYPES = pa.schema([("name", pa.string()), ("amount", pa.int32())])
_tables = count(1)


class IcebergTable(Table):
    """A table with names and amounts in the catalog of tests."""

    def __init__(self, settings: Settings, partitioned_by: str | None = None, **properties: str) -> None:
        self.name = f"sales.number_{next(_tables)}"
        super().__init__(settings, Iceberg(f"lake.{self.name}", schema=SCHEMA))
        catalog().create_namespace_if_not_exists("sales")
        self.create(partitioned_by, **properties)

    def create(self, partitioned_by: str | None = None, **properties: str) -> None:
        table = catalog().create_table(self.name, schema=TYPES, properties=properties)
        if partitioned_by:
            with table.update_spec() as spec:
                spec.add_identity(partitioned_by)

    @property
    def iceberg(self) -> Any:
        return catalog().load_table(self.name)

    @property
    def snapshots(self) -> list[int]:
        return [entry.snapshot_id for entry in self.iceberg.history()]

    def append(self, *rows: tuple[str, int]) -> None:
        """Add rows, in one snapshot and one file, or a file per partition."""
        self.iceberg.append(rows_of(*rows))

    def there(self, *columns: str) -> list[tuple]:
        found = self.iceberg.scan(selected_fields=columns or ("*",)).to_arrow().to_pylist()
        return sorted((tuple(row.values()) for row in found), key=repr)

    def expire(self, *snapshots: int) -> None:
        """Let snapshots expire as Iceberg's own library does: their children still name them; files that only they need go."""
        before = {file for number in snapshots for file in self._files(number)}
        path = Path(urlsplit(self.iceberg.metadata_location).path)
        metadata = json.loads(path.read_text())
        for name in ("snapshots", "snapshot-log"):
            metadata[name] = [entry for entry in metadata[name] if entry["snapshot-id"] not in snapshots]
        path.write_text(json.dumps(metadata))
        left = {file for snapshot in self.iceberg.snapshots() for file in self._files(snapshot.snapshot_id)}
        for file in before - left:
            Path(urlsplit(file).path).unlink()

    def _files(self, number: int) -> set[str]:
        table = self.iceberg
        snapshot = table.snapshot_by_id(number)
        found = {snapshot.manifest_list}
        for manifest in snapshot.manifests(table.io):
            found.add(manifest.manifest_path)
            found |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
        return found


def rows_of(*rows: tuple[str, int]) -> pa.Table:
    names, amounts = zip(*rows, strict=True)
    return pa.table({"name": names, "amount": amounts}, schema=TYPES)


@pytest.fixture
def project(tmp_path: Path) -> Settings:
    """A project without servers."""
    return Settings(home=tmp_path, min_file_age_seconds=0)


@pytest.fixture
def table(project: Settings) -> IcebergTable:
    """A table without rows."""
    return IcebergTable(project)


def names(metadata: Mapping[str, Any]) -> list[str]:
    return [file["name"] for file in metadata["data_files"]]


@pytest.mark.promise("decision:0043")
def test_rows_are_read_once_by_snapshots_and_of_a_partitioned_table(project: Settings) -> None:
    table = IcebergTable(project, partitioned_by="name")
    follower = table.follow(max_files=2)
    assert follower.run() == []
    table.append(("a", 1), ("b", 2), ("50% a=b/c ü", 3), (None, 4), ("a", 5))
    assert follower.run() == table.there()
    assert len(table.there()) == 5
    with table.iceberg.update_schema() as change:
        change.add_column("shop", StringType())
    table.iceberg.append(rows_of(("b", 6)).append_column("shop", pa.array(["here"])))
    table.append(("c", 7))
    assert follower.run() == table.there("name", "amount")
    assert table.follow(schema={**SCHEMA, "shop": "string"}).run() == table.there()
    assert ("a", 1, None) in table.there()


@pytest.mark.promise("decision:0043")
@pytest.mark.parametrize(
    "properties", [{}, {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}]
)
def test_a_place_in_a_snapshot_is_a_number_of_files(project: Settings, properties: dict[str, str]) -> None:
    table = IcebergTable(project, partitioned_by="name")
    table.iceberg.transaction().set_properties(properties).commit_transaction()
    for number in range(4):
        table.append((f"a{number}", number), (f"b{number}", number))
    one = replace(table.source, max_files=1)
    assert len(names(table.plan(replace(table.source, max_bytes=1)))) == 1
    first = table.plan(one)
    table.append(("c", 8), ("d", 9))
    rest = table.plans(one, first)
    planned = [name for batch in (first, *rest) for name in names(batch)]
    assert len(planned) == len(set(planned)) == 10
    assert all(len(names(batch)) == 1 for batch in (first, *rest))
    assert [batch["taken"] for batch in (first, *rest)] == [1, 2, 3, 4, 5, 6, 7, None, 1, None]


def test_a_snapshot_that_takes_rows_away_stops_planning(table: IcebergTable) -> None:
    table.append(("a", 1), ("b", 2))
    table.append(("c", 3))
    follower = table.follow()
    follower.run()
    table.iceberg.delete("amount = 1")
    table.append(("d", 4))
    with pytest.raises(SourceChanged, match=r"deletes or rewrites rows that may have counted: it removes, .* skip_overwrites"):
        follower.run()
    follower.source = replace(table.source, skip_overwrites=True)
    assert follower.run() == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]


def compact(table: IcebergTable) -> None:
    """Write all files again as one, as rewrite_data_files does: by a snapshot that replaces files and changes no row."""
    from pyiceberg.io.pyarrow import _dataframe_to_data_files  # noqa: PLC0415 - after the environment is set
    from pyiceberg.table.snapshots import Operation  # noqa: PLC0415
    from pyiceberg.table.update.snapshot import _OverwriteFiles  # noqa: PLC0415

    class Compaction(_OverwriteFiles):
        def _summary(self, *arguments: Any) -> Any:
            return super()._summary(*arguments).model_copy(update={"operation": Operation.REPLACE})

    iceberg = table.iceberg
    with iceberg.transaction() as transaction:
        update = Compaction(Operation.OVERWRITE, transaction, iceberg.io)
        for task in iceberg.scan().plan_files():
            update.delete_data_file(task.file)
        for file in _dataframe_to_data_files(iceberg.metadata, iceberg.scan().to_arrow(), iceberg.io):
            update.append_data_file(file)
        update.commit()


def test_files_that_are_written_again_add_nothing(table: IcebergTable) -> None:
    """A batch without rows takes note of the compaction, so that its predecessors may expire."""
    table.append(("a", 1))
    table.append(("b", 2))
    follower = table.follow()
    follower.run()
    compact(table)
    assert len(list(table.iceberg.scan().plan_files())) == 1
    assert follower.run() == table.there() == [("a", 1), ("b", 2)]
    table.expire(*table.snapshots[:-1])
    table.append(("c", 3))
    assert follower.run() == table.there()


def test_a_position_whose_snapshot_expired_is_known_by_its_child(table: IcebergTable) -> None:
    for number in range(2):
        table.append(("a", number))
    follower = table.follow()
    follower.run()
    table.append(("b", 2))
    table.expire(*table.snapshots[:2])
    assert follower.run() == table.there()

    table.append(("c", 3))
    table.append(("d", 4))
    last, lost, current = table.snapshots
    table.expire(last, lost)
    with pytest.raises(RangeExpired, match=rf"has no snapshot {last} any more, .* The oldest that is left is {current}"):
        follower.run()
    follower.source = replace(table.source, generation=2)
    assert len(follower.run()) == 3 + 5

    for number in range(3):
        table.append(("e", number))
    between = table.snapshots[-2]
    table.expire(between)
    with pytest.raises(RangeExpired, match=rf"has no snapshot {between} any more, which came after snapshot {current}"):
        follower.run()


def test_a_table_that_was_rolled_back_stops_planning(table: IcebergTable) -> None:
    table.append(("a", 1))
    table.append(("b", 2))
    follower = table.follow()
    follower.run()
    table.iceberg.manage_snapshots().rollback_to_snapshot(table.snapshots[0]).commit()
    for _ in range(2):
        with pytest.raises(SourceChanged, match=r"does not come from snapshot .* any more.*starting_snapshot the first"):
            follower.run()
        table.append(("c", 3))
    follower.source = replace(table.source, generation=2, starting_snapshot=table.snapshots[-2])  # as the message says
    assert follower.run() == [("a", 1), ("b", 2), ("c", 3), ("c", 3)], "each row that was added counts once"


def test_another_table_of_the_name_stops_planning(table: IcebergTable) -> None:
    table.append(("a", 1))
    follower = table.follow()
    follower.run()
    catalog().drop_table(table.name)
    with pytest.raises(SourceUnreadable, match=r"Catalog lake has no table sales\.number_\d+ \(NoSuchTableError"):
        follower.run()
    table.create(**{"format-version": "1"})
    table.append(("b", 2))
    with pytest.raises(SourceChanged, match=r"it has the id .*, and was .* declare generation=2"):
        follower.run()
    second = replace(table.source, generation=2)
    follower.source = second
    assert follower.run() == [("a", 1), ("b", 2)]
    with pytest.raises(SourceChanged, match=r"Generation 2 of .* was read already"):
        table.plan(table.source, table.plan(second))
    of_another_format = {"generation": 1, "files": []}
    assert names(table.plan(table.source, of_another_format)) == names(table.plan(second))


def test_columns_that_were_renamed_or_added_again_are_refused(table: IcebergTable) -> None:
    """Files have what was true when they were written: their columns would be NULL."""
    table.append(("a", 1))
    previous = table.plan(table.source)
    with table.iceberg.update_schema() as schema:
        schema.rename_column("name", "title")
        schema.delete_column("amount")
    with table.iceberg.update_schema() as schema:
        schema.add_column("amount", IntegerType())
    for columns, problem in (
        (SCHEMA, "has no column name; it has title, amount"),
        ({"title": "string"}, "several names for it: it was renamed, or dropped and added again"),
        ({"amount": "int"}, "several columns under the name amount"),
    ):
        with pytest.raises(SourceUnreadable, match=problem):
            table.plan(replace(table.source, schema=columns), previous)


def test_a_column_of_the_partition_must_be_in_the_file(project: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidegate.jobs.sources.iceberg import table as tables  # noqa: PLC0415 - after the environment is set

    table = IcebergTable(project, partitioned_by="name")
    table.append(("b", 2))
    (task,) = table.iceberg.scan().plan_files()
    path = Path(urlsplit(task.file.file_path).path)
    pq.write_table(rows_of(("b", 2)).select(["amount"]), path)
    found = tables.IcebergTable._data_file
    size = path.stat().st_size
    monkeypatch.setattr(tables.IcebergTable, "_data_file", lambda self, entry: replace(found(self, entry), size=size))
    with pytest.raises(MalformedRecord, match=r"column name of the schema is missing; it has amount\. Correct [^.]*with it\.$"):
        table.follow().run()


def test_deletes_of_single_rows_are_refused(table: IcebergTable) -> None:
    table.append(("a", 1), ("b", 2))
    first = table.snapshots[0]
    delete_by_position(table)
    with pytest.raises(SourceUnreadable, match=r"has deletes of single rows in snapshot \d+, which are not read here"):
        table.plan(table.source)
    with pytest.raises(SourceChanged, match="deletes or rewrites rows"):
        table.plans(replace(table.source, starting_snapshot=first))


def delete_by_position(table: IcebergTable) -> None:
    """Delete the first row of the first file as merge-on-read does, by a file of positions."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2  # noqa: PLC0415
    from pyiceberg.table.snapshots import Operation  # noqa: PLC0415
    from pyiceberg.table.update.snapshot import _FastAppendFiles  # noqa: PLC0415
    from pyiceberg.typedef import Record  # noqa: PLC0415

    iceberg = table.iceberg
    (task,) = iceberg.scan().plan_files()
    path = Path(urlsplit(task.file.file_path).path).with_name("deletes.parquet")
    pq.write_table(pa.table({"file_path": [task.file.file_path], "pos": pa.array([0], pa.int64())}), path)
    deleted = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=f"file://{path}",
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=path.stat().st_size,
    )
    deleted.spec_id = 0
    with patch.object(ManifestWriterV2, "content", lambda _: ManifestContent.DELETES), iceberg.transaction() as transaction:
        update = _FastAppendFiles(Operation.DELETE, transaction, iceberg.io)
        update.append_data_file(deleted)
        update.commit()


@pytest.mark.parametrize("place", ["elsewhere", "{root}/data/../../other"])
def test_a_data_file_outside_the_table_is_refused(table: IcebergTable, tmp_path: Path, place: str) -> None:
    """So those who write the table's metadata cannot choose any file to be read."""
    root = Path(urlsplit(table.iceberg.location()).path)
    (root / "data").mkdir(parents=True)
    folder = tmp_path / place.format(root=root)
    folder.mkdir(exist_ok=True)
    pq.write_table(rows_of(("a", 1)), folder / "1.parquet")
    table.iceberg.add_files([f"file://{folder}/1.parquet"])
    with pytest.raises(SourceUnreadable, match=r"1\.parquet of .* lies outside the table's place"):
        table.plan(table.source)
