"""Partition values from the names of folders, and the names that are refused."""

from datetime import UTC, date, datetime
from typing import Any

import pytest

from tidegate.jobs import Files
from tidegate.jobs.sources.files.partition_columns import NOTHING, PartitionColumns


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "10%3A30%2F2%25", "10:30/2%"),
        ("string", "100%", "100%"),
        ("string", NOTHING, None),
        ("int", "07", 7),
        ("boolean", "true", True),
        ("date", "2024-01-05", date(2024, 1, 5)),
        ("timestamp", "2024-01-05 10%3A00%3A00.5", datetime(2024, 1, 5, 10, 0, 0, 500_000, UTC)),
    ],
)
def test_a_folder_name_gives_a_value_of_the_declared_type(kind: str, text: str, value: Any) -> None:
    """As Hive and Spark write it: percent signs for characters that a name cannot have, and a special name for NULL."""
    values = PartitionColumns({"p": kind}).values_of(f"region=eu/p={text}/x.json")
    assert [found.to_pylist() for found in values.values()] == [[value]]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x.json", "none of its folders is called dt=..."),
        ("dt=2024-01-05/dt=2024-01-05/x.json", "more than one of its folders is called dt=..."),
        ("dt=/x.json", "has no value"),
        ("dt=2024-02-30/x.json", "'2024-02-30' is no date"),
        ("dt=%FF/x.json", "is not UTF-8 once its percent signs are decoded"),
        ("dt=null/x.json", "'null' is no date"),
    ],
)
def test_a_folder_name_without_such_a_value_is_refused(name: str, why: str) -> None:
    """A value that is missing, repeated or malformed is never NULL."""
    with pytest.raises(ValueError, match=why.replace(".", r"\.")):
        PartitionColumns({"dt": "date"}).values_of(name)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"partitions": {"name": "int"}}, "has the column name in schema and in partitions"),
        ({"partitions": {"p": "array<int>"}}, "which no folder's name can be"),
        ({"partitions": {"p": "day"}}, "'day' is not a type"),
    ],
)
def test_impossible_partitions_are_refused_when_declared(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Files(**{"folder": "inbox", "format": "json", "schema": {"name": "string"}, **arguments})
