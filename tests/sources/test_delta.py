"""`Delta` over tables that delta-rs writes: each row once, whatever becomes of them; delta-rs' own reader is the oracle."""

import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.sources.feeds import SCHEMA
from tests.sources.in_process import Table
from tidegate.jobs import Delta
from tidegate.jobs.sources.delta import plan
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import RangeExpired, SourceChanged, SourceUnreadable

FEED = {"delta.enableChangeDataFeed": "true"}


class DeltaLakeTable(Table):
    """A table in the project folder, with names and amounts."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Delta("sales", schema=SCHEMA))
        self.folder = settings.home / "sales"
        self.log = self.folder / "_delta_log"

    @property
    def delta(self) -> DeltaTable:
        return DeltaTable(str(self.folder))

    def append(self, *rows: tuple[str, int], mode: Any = "append", more: dict[str, Any] | None = None, **options: Any) -> None:
        names, amounts = zip(*rows, strict=True)
        columns = {"name": names, "amount": pa.array(amounts, pa.int32()), **(more or {})}
        write_deltalake(str(self.folder), pa.table(columns), mode=mode, **options)

    def there(self, *columns: str) -> list[tuple]:
        found = self.delta.to_pyarrow_table(columns=list(columns) or None).to_pylist()
        return sorted((tuple(row.values()) for row in found), key=repr)


@pytest.fixture
def table(tmp_path: Path) -> DeltaLakeTable:
    """A table that is not there yet."""
    return DeltaLakeTable(Settings(home=tmp_path, min_file_age_seconds=0))


@pytest.mark.promise("decision:0042")
def test_rows_are_read_once_by_versions_partitions_and_added_columns(table: DeltaLakeTable) -> None:
    """With odd partition values, files that OPTIMIZE wrote again, and a batch without files."""

    def append(day: str | None, *rows: tuple[str, int], **columns: Any) -> None:
        more = {"day": pa.array([day] * len(rows), pa.string()), **columns}
        table.append(*rows, more=more, partition_by=["day"], schema_mode="merge" if columns else None)

    follower = table.follow(partitions={"day": "string"}, max_files=2)
    append("2026-01-01", ("a", 1), ("b", 2))
    append("50% a=b/c ü", ("c", 3))
    append(None, ("d", 4))
    assert follower.run() == table.there()
    append("2026-01-01", ("e", 5))
    table.delta.optimize.compact()
    table.delta.create_checkpoint()
    append("2026-01-02", ("f", 6))
    table.delta.optimize.z_order(["name"])
    assert follower.run() == table.there()
    assert len(follower.rows) == 6

    append("2026-01-03", ("g", 7), shop=pa.array(["here"]))
    assert follower.run() == table.there("name", "amount", "day")
    for amount in ("int", "bigint"):
        follower = table.follow(schema={"name": "string", "amount": amount, "shop": "string"}, partitions={"day": "string"})
        follower.run()
        assert sorted((row["name"], row["shop"]) for row in follower.rows) == [
            (n, "here" if n == "g" else None) for n in "abcdefg"
        ]


@pytest.mark.promise("limit:NAMES_AT_ONCE", "decision:0042")
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_snapshot_is_read_on_while_the_table_goes_on(
    table: DeltaLakeTable, monkeypatch: pytest.MonkeyPatch, has_checkpoint: bool
) -> None:
    monkeypatch.setattr(plan, "NAMES_AT_ONCE", 2)
    for number in range(7):
        table.append((f"row {number}", number))
    if has_checkpoint:
        table.delta.create_checkpoint()
    source = replace(table.source, max_files=1)
    previous, names = None, []
    for number in range(12):
        found = table.plan(source, previous)
        if found is None:
            break
        names += [file["name"] for file in found["data_files"]]
        previous = found
        if number == 2:
            table.append(("late", 100))
            table.delta.optimize.compact()
            table.append(("later", 200))
    assert len(names) == len(set(names)) == 9
    assert names[:7] == sorted(names[:7])
    assert table.follow(max_files=1).run() == table.there()


def test_a_version_is_cut_into_batches_and_read_on(table: DeltaLakeTable) -> None:
    table.append(("first", 0))
    source = replace(table.source, max_files=3)
    follower = table.follow(max_files=3)
    assert follower.run() == [("first", 0)]
    _write_version(table, 1, [json.dumps({"add": _added(table, f"part-{number}.parquet", number)}) for number in range(7)])
    previous, sizes = None, []
    while found := table.plan(replace(source, starting_version=1), previous):
        previous = found
        sizes.append(len(found["data_files"]))
    assert sizes == [3, 3, 1]
    assert len(follower.run()) == 8
    assert follower.run() == table.there()


def _added(table: DeltaLakeTable, name: str, amount: int) -> dict[str, Any]:
    path = table.folder / name
    pq.write_table(pa.table({"name": [name], "amount": pa.array([amount], pa.int32())}), path)
    size = path.stat().st_size
    return {"path": name, "partitionValues": {}, "size": size, "modificationTime": 0, "dataChange": True}


def _write_version(table: DeltaLakeTable, version: int, actions: list[str]) -> None:
    (table.log / f"{version:020}.json").write_text("\n".join(actions) + "\n")


def test_what_is_deleted_or_brought_back_stops_planning_and_may_be_left_out(table: DeltaLakeTable) -> None:
    table.append(("a", 1))
    follower = table.follow()
    assert follower.run() == [("a", 1)]
    table.append(("b", 2))
    table.delta.delete("name = 'a'")
    with pytest.raises(SourceChanged, match=r"Version 2 of .*sales \(DELETE\) deletes or rewrites rows"):
        follower.run()
    follower.source = replace(table.source, skip_change_commits=True)
    assert follower.run() == [("a", 1), ("b", 2)]
    table.delta.restore(1)
    assert follower.run() == [("a", 1), ("b", 2)], "RESTORE added a file, whose rows had counted"


def test_changes_make_a_copy_of_the_table(table: DeltaLakeTable) -> None:
    """Appended, updated, deleted, merged, overwritten and compacted: the newest rows per key are the table's."""
    table.append(("a", 1), ("b", 2), ("c", 3), configuration=FEED)
    follower = table.follow(changes=True, max_files=1)

    def copied() -> list[tuple]:
        follower.run()
        gone = ("delete", "update_preimage")
        newest: dict[str, Any] = {}
        for row in sorted(follower.rows, key=lambda row: (row["_commit_version"], row["_change_type"] not in gone)):
            newest[row["name"]] = row
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
    read, (file,) = follower.batches, table.plan(table.source)["data_files"]
    rest = {"path": file["name"], "partitionValues": {}, "size": file["size"], "dataChange": True}
    actions = [{"remove": rest}, {"add": {**rest, "deletionVector": VECTOR}}]
    _write_version(table, table.delta.version() + 1, [json.dumps(action) for action in actions])
    with pytest.raises(SourceUnreadable, match="has deleted rows in version"):
        copied()
    assert follower.batches == read


def test_a_table_in_the_place_of_another_is_not_read(table: DeltaLakeTable) -> None:
    table.append(("a", 1))
    copy = table.folder.with_name("copy")
    shutil.copytree(table.folder, copy)
    table.append(("b", 2))
    found = table.plan(table.source)
    assert table.plan(table.source, found) is None
    for rows, why in ((1, "its log ends before version 1"), (3, "version 1 of its log is not the one")):
        shutil.rmtree(table.folder)
        for number in range(rows):
            table.append((f"other {number}", number))
        with pytest.raises(SourceChanged, match=f"is another table than the one that has been read: {why}"):
            table.plan(table.source, found)
    table.delta.create_checkpoint()
    for version in range(2):  # as the table itself removes them, with what would show that version 1 is another
        (table.log / f"{version:020}.json").unlink()
    with pytest.raises(SourceChanged, match=r"it has the id .*, and was "):
        table.plan(table.source, found)
    shutil.rmtree(table.folder)
    shutil.copytree(copy, table.folder)
    table.append(("c", 3))
    with pytest.raises(SourceChanged, match="version 1 of its log is not the one"):
        table.plan(table.source, found)


def test_versions_and_files_that_were_removed_are_not_passed_over(table: DeltaLakeTable) -> None:
    table.append(("a", 1))
    found = table.plan(table.source)
    for number in range(3):
        table.append((f"row {number}", number))
    table.delta.create_checkpoint()
    (table.log / f"{1:020}.json").unlink()
    with pytest.raises(RangeExpired, match="has version 3, and no longer version 1"):
        table.plan(table.source, found)
    table.delta.optimize.compact()
    table.delta.vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert len(table.plan(table.source)["data_files"]) == 1, "the newest snapshot has one file"
    with pytest.raises(RangeExpired, match=r"which version 2 has, is gone: .* VACUUM removed it"):
        table.plan(replace(table.source, starting_version=2))


VECTOR = {"storageType": "i", "pathOrInlineDv": "wi5b", "sizeInBytes": 4, "cardinality": 1}
REFUSED = {
    "column mapping": (
        {"metaData": {"configuration": {"delta.columnMapping.mode": "name"}}},
        "has other names for its columns",
    ),
    "an unknown feature": (
        {"protocol": {"minReaderVersion": 3, "readerFeatures": ["variantType"]}},
        "requires the feature variantType of its readers",
    ),
    "a later protocol": ({"protocol": {"minReaderVersion": 4}}, "requires version 4 of Delta's protocol"),
    "deleted rows": ({"add": {"deletionVector": VECTOR}}, "has deleted rows in version 0"),
    "a clone": ({"add": {"path": "s3://other/part.parquet"}}, "lists a file outside its folder: s3://other/part.parquet"),
    "a way out": ({"add": {"path": "../part.parquet"}}, r"lists a file outside its folder: \.\./part"),
    "a name that is no text": ({"add": {"path": "%FF.parquet"}}, "lists a file whose name is not UTF-8: %FF"),
    "another size": ({"add": {"size": 1}}, "bytes, and 1 in the log of version 0"),
    "a partition": ({"metaData": {"partitionColumns": ["name"]}}, "is partitioned by name: declare it in partitions"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_table_that_would_be_misread_is_refused(table: DeltaLakeTable, what: str) -> None:
    changed, message = REFUSED[what]
    table.append(("a", 1))
    path = table.log / f"{0:020}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    found = table.plan(table.source)
    altered = [{name: {**action, **changed.get(name, {})} for name, action in each.items()} for each in actions]
    later = [each for each in altered if "add" not in each] if "add" not in changed else altered
    _write_version(table, 1, [json.dumps(each) for each in later])
    with pytest.raises(SourceUnreadable, match=message.replace("version 0", "version 1")):
        table.plan(table.source, found)
    (table.log / f"{1:020}.json").unlink()
    path.write_text("\n".join(map(json.dumps, altered)))
    with pytest.raises(SourceUnreadable, match=message):
        table.plan(table.source)


@pytest.mark.parametrize(("line", "message"), [("[]", "a line that is no action"), ('{"add"', "a line that is no JSON")])
def test_a_line_of_the_log_that_is_no_action_is_refused(table: DeltaLakeTable, line: str, message: str) -> None:
    table.append(("a", 1))
    with (table.log / f"{0:020}.json").open("a") as log:
        log.write(f"\n{line}")
    with pytest.raises(SourceUnreadable, match=message):
        table.plan(table.source)


def test_a_declaration_that_changes_is_compared_with_the_table_again(table: DeltaLakeTable) -> None:
    """A misspelt column would be NULL, and the rest of a version be read in another way than its beginning."""
    table.append(("a", 1), configuration=FEED)
    found = table.plan(table.source)
    table.append(("b", 2), mode="overwrite")
    with pytest.raises(SourceUnreadable, match=r"Version 1 of .* has no column misspelt"):
        table.plan(replace(table.source, schema={**SCHEMA, "misspelt": "int"}), found)
    in_part = table.plan(replace(table.source, changes=True, max_files=1), found)
    with pytest.raises(SourceChanged, match=r"has been read in part, with changes=True\. Declare it so until the rest"):
        table.plan(table.source, in_part)


def test_an_instant_of_a_partition_needs_its_zone(table: DeltaLakeTable) -> None:
    at = pa.array([datetime(2026, 1, 2, 3)], pa.timestamp("us", "UTC"))
    write_deltalake(str(table.folder), pa.table({"name": ["a"], "at": at}), mode="append", partition_by=["at"])
    source = Delta("sales", schema={"name": "string"}, partitions={"at": "timestamp"})
    with pytest.raises(SourceUnreadable, match=r"at=2026-01-02 03:00:00.*, which has no time zone: .* as timestamp_ntz, or"):
        table.plan(source)
    version = table.log / f"{0:020}.json"
    version.write_text(version.read_text().replace("2026-01-02 03:00:00.000000", "2026-01-02T03:00:00.000000Z"))
    assert len(table.plan(source)["data_files"]) == 1
