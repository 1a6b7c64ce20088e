"""`Iceberg` over tables that PyIceberg writes: each row once, whatever becomes of them. PyIceberg's reader is the oracle."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import ManifestContent, ManifestWriterV2
from pyiceberg.types import IntegerType, StringType

from tests.sources.in_process import SCHEMA, names, raises
from tests.sources.lake_tables import IcebergTable, catalog, path_of, rows_of
from tidegate.jobs.sources.iceberg import table as tables
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import MalformedRecord, RangeExpired, SourceChanged, SourceUnreadable


@pytest.fixture
def table(tmp_path: Path) -> IcebergTable:
    """A table without rows, of a project without servers."""
    return IcebergTable(Settings(home=tmp_path, min_file_age_seconds=0))


@pytest.mark.promise("decision:0043")
def test_rows_are_read_once_by_snapshots_and_of_a_partitioned_table(table: IcebergTable) -> None:
    table.partition()
    follower = table.follow(max_files=2)
    assert follower.run() == []
    table.append(("a", 1), ("b", 2), ("50% a=b/c ü", 3), (None, 4), ("a", 5))
    assert follower.run() == table.there()
    with table.iceberg.update_schema() as change:
        change.add_column("shop", StringType())
    table.iceberg.append(rows_of(("b", 6)).append_column("shop", pa.array(["here"])))
    table.append(("c", 7))
    assert follower.run() == table.there("name", "amount")
    assert table.follow(schema={**SCHEMA, "shop": "string"}).run() == table.there()
    assert {("a", 1, None), ("b", 6, "here")} <= set(table.there())


@pytest.mark.promise("decision:0043")
@pytest.mark.parametrize("merges", ["false", "true"])
def test_a_place_in_a_snapshot_is_a_number_of_files(table: IcebergTable, merges: str) -> None:
    table.partition()
    properties = {"commit.manifest-merge.enabled": merges, "commit.manifest.min-count-to-merge": "2"}
    table.iceberg.transaction().set_properties(properties).commit_transaction()
    for number in range(4):
        table.append((f"a{number}", number), (f"b{number}", number))
    assert len(names(table.plan(max_bytes=1))) == 1
    batches = [table.plan(max_files=1)]
    table.append(("c", 8), ("d", 9))
    while found := table.plan(batches[-1], max_files=1):
        batches.append(found)
    planned = [name for batch in batches for name in names(batch)]
    assert len(planned) == len(set(planned)) == len(batches) == 10
    assert [batch["taken"] for batch in batches] == [1, 2, 3, 4, 5, 6, 7, None, 1, None]


def test_a_snapshot_that_takes_rows_away_stops_planning(table: IcebergTable) -> None:
    table.append(("a", 1), ("b", 2))
    table.append(("c", 3))
    follower = table.follow()
    follower.run()
    table.iceberg.delete("amount = 1")
    table.append(("d", 4))
    raises(SourceChanged, follower.run, r"deletes or rewrites rows that may have counted: it removes, .* skip_overwrites")
    follower.source = replace(table.source, skip_overwrites=True)
    assert follower.run() == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]


def test_files_that_are_written_again_add_nothing(table: IcebergTable) -> None:
    """A batch without rows takes note of the compaction, so that its predecessors may expire."""
    table.append(("a", 1))
    table.append(("b", 2))
    follower = table.follow()
    follower.run()
    table.compact()
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
    raises(RangeExpired, follower.run, rf"has no snapshot {last} any more, .* The oldest that is left is {current}")
    follower.source = replace(table.source, generation=2)
    assert len(follower.run()) == 3 + 5
    for number in range(3):
        table.append(("e", number))
    between = table.snapshots[-2]
    table.expire(between)
    raises(RangeExpired, follower.run, rf"has no snapshot {between} any more, which came after snapshot {current}")


def test_a_table_that_was_rolled_back_stops_planning(table: IcebergTable) -> None:
    table.append(("a", 1))
    table.append(("b", 2))
    follower = table.follow()
    follower.run()
    table.iceberg.manage_snapshots().rollback_to_snapshot(table.snapshots[0]).commit()
    for _ in range(2):
        raises(SourceChanged, follower.run, r"does not come from snapshot .* any more.*starting_snapshot the first")
        table.append(("c", 3))
    follower.source = replace(table.source, generation=2, starting_snapshot=table.snapshots[-2])  # as the message says
    assert follower.run() == [("a", 1), ("b", 2), ("c", 3), ("c", 3)], "each row that was added counts once"


def test_another_table_of_the_name_stops_planning(table: IcebergTable) -> None:
    table.append(("a", 1))
    follower = table.follow()
    follower.run()
    catalog().drop_table(table.name)
    raises(SourceUnreadable, follower.run, r"Catalog lake has no table sales\.number_\d+ \(NoSuchTableError")
    table.create(**{"format-version": "1"})
    table.append(("b", 2))
    raises(SourceChanged, follower.run, r"it has the id .*, and was .* declare generation=2")
    follower.source = replace(table.source, generation=2)
    assert follower.run() == [("a", 1), ("b", 2)]
    raises(SourceChanged, lambda: table.plan(table.plan(generation=2)), r"Generation 2 of .* was read already")
    of_another_format = {"generation": 1, "files": []}
    assert names(table.plan(of_another_format)) == names(table.plan(generation=2))


def test_columns_that_were_renamed_or_added_again_are_refused(table: IcebergTable) -> None:
    """Files have what was true when they were written: their columns would be NULL."""
    table.append(("a", 1))
    previous = table.plan()
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
            table.plan(previous, schema=columns)


def test_a_column_of_the_partition_must_be_in_the_file(table: IcebergTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table.partition()
    table.append(("b", 2))
    (task,) = table.iceberg.scan().plan_files()
    path = path_of(task.file.file_path)
    pq.write_table(rows_of(("b", 2)).select(["amount"]), path)
    found, size = tables.IcebergTable._data_file, path.stat().st_size
    monkeypatch.setattr(tables.IcebergTable, "_data_file", lambda self, entry: replace(found(self, entry), size=size))
    with pytest.raises(MalformedRecord, match=r"column name of the schema is missing; it has amount\. Correct [^.]*with it\.$"):
        table.follow().run()


def test_deletes_of_single_rows_are_refused(table: IcebergTable) -> None:
    """In a manifest of deletes, as merge-on-read writes one; its files are not looked at."""
    table.append(("a", 1), ("b", 2))
    with patch.object(ManifestWriterV2, "content", lambda _: ManifestContent.DELETES):
        table.append(("a", 1))
    raises(SourceUnreadable, table.plan, r"has deletes of single rows in snapshot \d+, which are not read here")
    raises(SourceChanged, lambda: table.plan(starting_snapshot=table.snapshots[0]), "deletes or rewrites rows")


@pytest.mark.parametrize("place", ["elsewhere", "{root}/data/../../other"])
def test_a_data_file_outside_the_table_is_refused(table: IcebergTable, tmp_path: Path, place: str) -> None:
    """So those who write the table's metadata cannot choose any file to be read."""
    root = table.folder
    (root / "data").mkdir(parents=True)
    folder = tmp_path / place.format(root=root)
    folder.mkdir(exist_ok=True)
    pq.write_table(rows_of(("a", 1)), folder / "1.parquet")
    table.iceberg.add_files([f"file://{folder}/1.parquet"])
    raises(SourceUnreadable, table.plan, r"1\.parquet of .* lies outside the table's place")
