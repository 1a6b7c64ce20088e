"""`Delta` and `Iceberg` over tables that delta-rs and PyIceberg write, whose readers are the oracles: each row once."""

import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from pyiceberg.manifest import ManifestContent, ManifestWriterV2
from pyiceberg.types import IntegerType, StringType

from tests.sources.in_process import SCHEMA, batches, names, raises
from tests.sources.lake_tables import DeltaLakeTable, IcebergTable, catalog, parquet_of, path_of, rows_of
from tidegate.jobs.sources.delta import plan
from tidegate.jobs.sources.iceberg import table as tables
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import MalformedRecord, RangeExpired, SourceChanged, SourceUnreadable


@pytest.fixture
def table(tmp_path: Path) -> IcebergTable:
    return IcebergTable(Settings(home=tmp_path, min_file_age_seconds=0))


@pytest.mark.promise("decision:0043")
def test_rows_are_read_once_by_snapshots_and_of_a_partitioned_table(table: IcebergTable) -> None:
    table.partition()
    follower = table.follow(max_files=2)
    assert follower.run() == []
    table.append(("a", 1), ("b", 2), ("50% a=b/c ü", 3), (None, 4), ("a", 5))
    assert follower.run() == table.there()
    table.iceberg.update_schema().add_column("shop", StringType()).commit()
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
    first = table.plan(max_files=1)
    table.append(("c", 8), ("d", 9))
    found = [first, *batches(table.settings, replace(table.source, max_files=1), first)]
    planned = [name for batch in found for name in names(batch)]
    assert len(planned) == len(set(planned)) == len(found) == 10
    assert [batch["taken"] for batch in found] == [1, 2, 3, 4, 5, 6, 7, None, 1, None]


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
    assert names(table.plan({"generation": 1, "files": []})) == names(table.plan(generation=2)), "a place of another format"


def test_columns_that_were_renamed_or_added_again_are_refused(table: IcebergTable) -> None:
    """Files have what was true when they were written: their columns would be NULL."""
    table.append(("a", 1))
    previous = table.plan()
    table.iceberg.update_schema().rename_column("name", "title").delete_column("amount").commit()
    table.iceberg.update_schema().add_column("amount", IntegerType()).commit()
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
    path.write_bytes(parquet_of(rows_of(("b", 2)).select(["amount"])))
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
    (table.folder / "data").mkdir(parents=True)
    folder = tmp_path / place.format(root=table.folder)
    folder.mkdir(exist_ok=True)
    (folder / "1.parquet").write_bytes(parquet_of(rows_of(("a", 1))))
    table.iceberg.add_files([f"file://{folder}/1.parquet"])
    raises(SourceUnreadable, table.plan, r"1\.parquet of .* lies outside the table's place")


@pytest.fixture
def sales(tmp_path: Path) -> DeltaLakeTable:
    return DeltaLakeTable(Settings(home=tmp_path, min_file_age_seconds=0))


@pytest.mark.promise("decision:0042")
def test_rows_are_read_once_by_versions_partitions_and_added_columns(sales: DeltaLakeTable) -> None:
    def append(rows: dict[str, str | None], **columns: Any) -> None:
        numbered = [(name, number) for number, name in enumerate(rows)]
        more = {"day": pa.array(rows.values(), pa.string()), **columns}
        sales.append(*numbered, more=more, partition_by=["day"], schema_mode="merge" if columns else None)

    follower = sales.follow(partitions={"day": "string"}, max_files=2)
    append({"a": "2026-01-01", "b": "2026-01-01"})
    assert follower.run() == sales.there()
    append({"c": "50% a=b/c ü", "d": None, "e": "1", "f": "2", "g": "3"})
    assert follower.run() == sales.there()
    append({"h": "2026-01-01"})
    sales.delta.optimize.compact()
    sales.delta.create_checkpoint()
    append({"i": "2026-01-02"})
    sales.delta.optimize.z_order(["name"])
    assert follower.run() == sales.there()
    append({"j": "2026-01-03"}, shop=pa.array(["here"]))
    assert follower.run() == sales.there("name", "amount", "day")
    for amount in ("int", "bigint"):
        follower = sales.follow(schema={"name": "string", "amount": amount, "shop": "string"}, partitions={"day": "string"})
        assert [row[0] for row in follower.run()] == list("abcdefghij")
        assert [row["name"] for row in follower.rows if row["shop"] == "here"] == ["j"]


@pytest.mark.promise("limit:NAMES_AT_ONCE", "decision:0042")
@pytest.mark.parametrize("has_checkpoint", [False, True])
@patch.object(plan, "NAMES_AT_ONCE", 2)
def test_a_snapshot_is_read_on_while_the_table_goes_on(sales: DeltaLakeTable, has_checkpoint: bool) -> None:
    for number in range(7):
        sales.append((f"row {number}", number))
    if has_checkpoint:
        sales.delta.create_checkpoint()
    follower = sales.follow(max_files=1)
    assert len(follower.run(most=3)) == 3
    sales.append(("late", 100))
    sales.delta.optimize.compact()
    sales.append(("later", 200))
    assert follower.run() == sales.there()


def test_what_is_deleted_or_brought_back_stops_planning_and_may_be_left_out(sales: DeltaLakeTable) -> None:
    sales.append(("a", 1))
    follower = sales.follow()
    assert follower.run() == [("a", 1)]
    sales.append(("b", 2))
    sales.delta.delete("name = 'a'")
    raises(SourceChanged, follower.run, r"Version 2 of .*sales \(DELETE\) deletes or rewrites rows")
    follower.source = replace(sales.source, skip_change_commits=True)
    assert follower.run() == [("a", 1), ("b", 2)]
    sales.delta.restore(1)
    assert follower.run() == [("a", 1), ("b", 2)], "RESTORE added a file, whose rows had counted"


VECTOR = {"storageType": "i", "pathOrInlineDv": "wi5b", "sizeInBytes": 4, "cardinality": 1}


def test_changes_make_a_copy_of_the_table(sales: DeltaLakeTable) -> None:
    sales.append(("a", 1), ("b", 2), ("c", 3), configuration={"delta.enableChangeDataFeed": "true"})
    follower = sales.follow(changes=True, max_files=1)

    def copied() -> list[tuple]:
        follower.run()
        gone = ("delete", "update_preimage")
        in_order = sorted(follower.rows, key=lambda row: (row["_commit_version"], row["_change_type"] not in gone))
        newest = {row["name"]: row for row in in_order}
        return sorted((name, row["amount"]) for name, row in newest.items() if row["_change_type"] not in gone)

    assert copied() == sales.there()
    sales.delta.update({"amount": "amount + 10"}, predicate="name = 'a'")
    sales.append(("d", 4))
    sales.delta.delete("name = 'b'")
    sales.delta.optimize.compact()
    assert copied() == sales.there()
    changed = pa.table({"name": ["b", "c"], "amount": pa.array([7, 8], pa.int32())})
    merge = sales.delta.merge(changed, "s.name = t.name", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()
    assert copied() == sales.there()
    sales.append(("a", 5), ("e", 6), mode="overwrite")
    assert copied() == sales.there() == [("a", 5), ("e", 6)]
    # A deletion vector without a change file: to read the removed file alone would delete all of its rows.
    (file,) = sales.plan()["data_files"]
    rest = {"path": file["name"], "partitionValues": {}, "size": file["size"], "dataChange": True}
    sales.write_log(sales.delta.version() + 1, {"remove": rest}, {"add": {**rest, "deletionVector": VECTOR}})
    raises(SourceUnreadable, copied, "has deleted rows in version")


def test_a_table_in_the_place_of_another_is_not_read(sales: DeltaLakeTable) -> None:
    sales.append(("a", 1))
    copy = shutil.copytree(sales.folder, sales.folder.with_name("copy"))
    sales.append(("b", 2))
    found = sales.plan()
    assert sales.plan(found) is None
    for rows, why in ((1, "its log ends before version 1"), (3, "version 1 of its log is not the one")):
        shutil.rmtree(sales.folder)
        for number in range(rows):
            sales.append((f"other {number}", number))
        raises(SourceChanged, lambda: sales.plan(found), f"is another table than the one that has been read: {why}")
    sales.delta.create_checkpoint()
    for version in range(2):  # as the table itself removes them, with what would show that version 1 is another
        sales.log(version).unlink()
    raises(SourceChanged, lambda: sales.plan(found), r"it has the id .*, and was ")
    shutil.rmtree(sales.folder)
    shutil.copytree(copy, sales.folder)
    sales.append(("c", 3))
    raises(SourceChanged, lambda: sales.plan(found), "version 1 of its log is not the one")


def test_versions_and_files_that_were_removed_are_not_passed_over(sales: DeltaLakeTable) -> None:
    sales.append(("a", 1))
    found = sales.plan()
    for number in range(3):
        sales.append((f"row {number}", number))
    sales.delta.create_checkpoint()
    sales.log(1).unlink()
    raises(RangeExpired, lambda: sales.plan(found), "has version 3, and no longer version 1")
    sales.delta.optimize.compact()
    sales.delta.vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert len(sales.plan()["data_files"]) == 1, "the newest snapshot has one file"
    raises(RangeExpired, lambda: sales.plan(starting_version=2), r"which version 2 has, is gone: .* VACUUM removed it")


OUTSIDE = "lists a file outside its folder"
# What a log has instead of what was written there, or beside it.
REFUSED: list[tuple[Any, str]] = [
    ({"metaData": {"configuration": {"delta.columnMapping.mode": "name"}}}, "has other names for its columns"),
    ({"metaData": {"partitionColumns": ["name"]}}, "is partitioned by name: declare it in partitions"),
    ({"protocol": {"minReaderVersion": 3, "readerFeatures": ["variantType"]}}, "requires the feature variantType of its"),
    ({"protocol": {"minReaderVersion": 4}}, "requires version 4 of Delta's protocol"),
    ({"add": {"deletionVector": VECTOR}}, "has deleted rows in version 0"),
    ({"add": {"path": "s3://other/part.parquet"}}, f"{OUTSIDE}: s3://other/part.parquet"),
    ({"add": {"path": "../part.parquet"}}, rf"{OUTSIDE}: \.\./part"),
    ({"add": {"path": "%FF.parquet"}}, "lists a file whose name is not UTF-8: %FF"),
    ({"add": {"size": 1}}, "bytes, and 1 in the log of version 0"),
    ("[]", "a line that is no action"),
    ('{"add"', "a line that is no JSON"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_a_table_that_would_be_misread_is_refused(sales: DeltaLakeTable, changed: Any, message: str) -> None:
    sales.append(("a", 1))
    found = sales.plan()
    actions = [json.loads(line) for line in sales.log(0).read_text().splitlines()]
    if isinstance(changed, str):
        altered = later = [*actions, changed]
    else:
        altered = [{name: {**action, **changed.get(name, {})} for name, action in each.items()} for each in actions]
        later = [each for each in altered if "add" not in each] if "add" not in changed else altered
    sales.write_log(1, *later)
    raises(SourceUnreadable, lambda: sales.plan(found), message.replace("version 0", "version 1"))
    sales.log(1).unlink()
    sales.write_log(0, *altered)
    raises(SourceUnreadable, sales.plan, message)


def test_a_declaration_that_changes_is_compared_with_the_table_again(sales: DeltaLakeTable) -> None:
    """A misspelt column would be NULL, and the rest of a version be read in another way than its beginning."""
    sales.append(("a", 1), configuration={"delta.enableChangeDataFeed": "true"})
    found = sales.plan()
    sales.append(("b", 2), mode="overwrite")
    with pytest.raises(SourceUnreadable, match=r"Version 1 of .* has no column misspelt"):
        sales.plan(found, schema={**SCHEMA, "misspelt": "int"})
    part = sales.plan(found, changes=True, max_files=1)
    raises(SourceChanged, lambda: sales.plan(part), r"has been read in part, with changes=True\. Declare it so until the rest")


def test_an_instant_of_a_partition_needs_its_zone(sales: DeltaLakeTable) -> None:
    at = pa.array([datetime(2026, 1, 2, 3)], pa.timestamp("us", "UTC"))
    sales.append(("a", 1), more={"at": at}, partition_by=["at"])
    source: Any = {"schema": {"name": "string"}, "partitions": {"at": "timestamp"}}
    with pytest.raises(SourceUnreadable, match=r"at=2026-01-02 03:00:00.*, which has no time zone: .* as timestamp_ntz, or"):
        sales.plan(**source)
    sales.log(0).write_text(sales.log(0).read_text().replace("2026-01-02 03:00:00.000000", "2026-01-02T03:00:00.000000Z"))
    assert len(sales.plan(**source)["data_files"]) == 1
