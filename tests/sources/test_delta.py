"""`Delta` over tables that delta-rs writes: each row once, whatever becomes of them; delta-rs' own reader is the oracle."""

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from tests.sources.in_process import SCHEMA, raises
from tests.sources.lake_tables import DeltaLakeTable
from tidegate.jobs.sources.delta import plan
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import RangeExpired, SourceChanged, SourceUnreadable


@pytest.fixture
def table(tmp_path: Path) -> DeltaLakeTable:
    """A table that is not there yet."""
    return DeltaLakeTable(Settings(home=tmp_path, min_file_age_seconds=0))


@pytest.mark.promise("decision:0042")
def test_rows_are_read_once_by_versions_partitions_and_added_columns(table: DeltaLakeTable) -> None:

    def append(rows: dict[str, str | None], **columns: Any) -> None:
        numbered = [(name, number) for number, name in enumerate(rows)]
        more = {"day": pa.array(rows.values(), pa.string()), **columns}
        table.append(*numbered, more=more, partition_by=["day"], schema_mode="merge" if columns else None)

    follower = table.follow(partitions={"day": "string"}, max_files=2)
    append({"a": "2026-01-01", "b": "2026-01-01"})
    assert follower.run() == table.there()
    append({"c": "50% a=b/c ü", "d": None, "e": "1", "f": "2", "g": "3"})
    assert follower.run() == table.there()
    append({"h": "2026-01-01"})
    table.delta.optimize.compact()
    table.delta.create_checkpoint()
    append({"i": "2026-01-02"})
    table.delta.optimize.z_order(["name"])
    assert follower.run() == table.there()
    append({"j": "2026-01-03"}, shop=pa.array(["here"]))
    assert follower.run() == table.there("name", "amount", "day")
    for amount in ("int", "bigint"):
        follower = table.follow(schema={"name": "string", "amount": amount, "shop": "string"}, partitions={"day": "string"})
        assert [row[0] for row in follower.run()] == list("abcdefghij")
        assert [row["name"] for row in follower.rows if row["shop"] == "here"] == ["j"]


@pytest.mark.promise("limit:NAMES_AT_ONCE", "decision:0042")
@pytest.mark.parametrize("has_checkpoint", [False, True])
@patch.object(plan, "NAMES_AT_ONCE", 2)
def test_a_snapshot_is_read_on_while_the_table_goes_on(table: DeltaLakeTable, has_checkpoint: bool) -> None:
    for number in range(7):
        table.append((f"row {number}", number))
    if has_checkpoint:
        table.delta.create_checkpoint()
    follower = table.follow(max_files=1)
    assert len(follower.run(most=3)) == 3
    table.append(("late", 100))
    table.delta.optimize.compact()
    table.append(("later", 200))
    assert follower.run() == table.there()


def test_what_is_deleted_or_brought_back_stops_planning_and_may_be_left_out(table: DeltaLakeTable) -> None:
    table.append(("a", 1))
    follower = table.follow()
    assert follower.run() == [("a", 1)]
    table.append(("b", 2))
    table.delta.delete("name = 'a'")
    raises(SourceChanged, follower.run, r"Version 2 of .*sales \(DELETE\) deletes or rewrites rows")
    skipping = table.follow(skip_change_commits=True)
    skipping.rows, skipping.previous = follower.rows, follower.previous
    assert skipping.run() == [("a", 1), ("b", 2)]
    table.delta.restore(1)
    assert skipping.run() == [("a", 1), ("b", 2)], "RESTORE added a file, whose rows had counted"


VECTOR = {"storageType": "i", "pathOrInlineDv": "wi5b", "sizeInBytes": 4, "cardinality": 1}


def test_changes_make_a_copy_of_the_table(table: DeltaLakeTable) -> None:
    table.append(("a", 1), ("b", 2), ("c", 3), configuration={"delta.enableChangeDataFeed": "true"})
    follower = table.follow(changes=True, max_files=1)

    def copied() -> list[tuple]:
        follower.run()
        gone = ("delete", "update_preimage")
        in_order = sorted(follower.rows, key=lambda row: (row["_commit_version"], row["_change_type"] not in gone))
        newest = {row["name"]: row for row in in_order}
        return sorted((name, row["amount"]) for name, row in newest.items() if row["_change_type"] not in gone)

    assert copied() == table.there()
    table.delta.update({"amount": "amount + 10"}, predicate="name = 'a'")
    table.append(("d", 4))
    table.delta.delete("name = 'b'")
    table.delta.optimize.compact()
    assert copied() == table.there()
    changed = pa.table({"name": ["b", "c"], "amount": pa.array([7, 8], pa.int32())})
    merge = table.delta.merge(changed, "s.name = t.name", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()
    assert copied() == table.there()
    table.append(("a", 5), ("e", 6), mode="overwrite")
    assert copied() == table.there() == [("a", 5), ("e", 6)]
    # A deletion vector without a change file: to read the removed file alone would delete all of its rows.
    (file,) = table.plan()["data_files"]
    rest = {"path": file["name"], "partitionValues": {}, "size": file["size"], "dataChange": True}
    table.write_log(table.delta.version() + 1, {"remove": rest}, {"add": {**rest, "deletionVector": VECTOR}})
    raises(SourceUnreadable, copied, "has deleted rows in version")


def test_a_table_in_the_place_of_another_is_not_read(table: DeltaLakeTable) -> None:
    table.append(("a", 1))
    copy = shutil.copytree(table.folder, table.folder.with_name("copy"))
    table.append(("b", 2))
    found = table.plan()
    assert table.plan(found) is None
    for rows, why in ((1, "its log ends before version 1"), (3, "version 1 of its log is not the one")):
        shutil.rmtree(table.folder)
        for number in range(rows):
            table.append((f"other {number}", number))
        raises(SourceChanged, lambda: table.plan(found), f"is another table than the one that has been read: {why}")
    table.delta.create_checkpoint()
    for version in range(2):  # as the table itself removes them, with what would show that version 1 is another
        table.log(version).unlink()
    raises(SourceChanged, lambda: table.plan(found), r"it has the id .*, and was ")
    shutil.rmtree(table.folder)
    shutil.copytree(copy, table.folder)
    table.append(("c", 3))
    raises(SourceChanged, lambda: table.plan(found), "version 1 of its log is not the one")


def test_versions_and_files_that_were_removed_are_not_passed_over(table: DeltaLakeTable) -> None:
    table.append(("a", 1))
    found = table.plan()
    for number in range(3):
        table.append((f"row {number}", number))
    table.delta.create_checkpoint()
    table.log(1).unlink()
    raises(RangeExpired, lambda: table.plan(found), "has version 3, and no longer version 1")
    table.delta.optimize.compact()
    table.delta.vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert len(table.plan()["data_files"]) == 1, "the newest snapshot has one file"
    raises(RangeExpired, lambda: table.plan(starting_version=2), r"which version 2 has, is gone: .* VACUUM removed it")


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
def test_a_table_that_would_be_misread_is_refused(table: DeltaLakeTable, changed: Any, message: str) -> None:
    table.append(("a", 1))
    found = table.plan()
    actions = [json.loads(line) for line in table.log(0).read_text().splitlines()]
    if isinstance(changed, str):
        altered = later = [*actions, changed]
    else:
        altered = [{name: {**action, **changed.get(name, {})} for name, action in each.items()} for each in actions]
        later = [each for each in altered if "add" not in each] if "add" not in changed else altered
    table.write_log(1, *later)
    raises(SourceUnreadable, lambda: table.plan(found), message.replace("version 0", "version 1"))
    table.log(1).unlink()
    table.write_log(0, *altered)
    raises(SourceUnreadable, table.plan, message)


def test_a_declaration_that_changes_is_compared_with_the_table_again(table: DeltaLakeTable) -> None:
    """A misspelt column would be NULL, and the rest of a version be read in another way than its beginning."""
    table.append(("a", 1), configuration={"delta.enableChangeDataFeed": "true"})
    found = table.plan()
    table.append(("b", 2), mode="overwrite")
    with pytest.raises(SourceUnreadable, match=r"Version 1 of .* has no column misspelt"):
        table.plan(found, schema={**SCHEMA, "misspelt": "int"})
    in_part = table.plan(found, changes=True, max_files=1)
    with pytest.raises(SourceChanged, match=r"has been read in part, with changes=True\. Declare it so until the rest"):
        table.plan(in_part)


def test_an_instant_of_a_partition_needs_its_zone(table: DeltaLakeTable) -> None:
    at = pa.array([datetime(2026, 1, 2, 3)], pa.timestamp("us", "UTC"))
    table.append(("a", 1), more={"at": at}, partition_by=["at"])
    source: Any = {"schema": {"name": "string"}, "partitions": {"at": "timestamp"}}
    with pytest.raises(SourceUnreadable, match=r"at=2026-01-02 03:00:00.*, which has no time zone: .* as timestamp_ntz, or"):
        table.plan(**source)
    table.log(0).write_text(table.log(0).read_text().replace("2026-01-02 03:00:00.000000", "2026-01-02T03:00:00.000000Z"))
    assert len(table.plan(**source)["data_files"]) == 1
