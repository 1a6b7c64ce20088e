"""What differs between two declarations is named, and not both of them printed."""

from dataclasses import replace
from typing import Any

import pytest

from tests.store import declaration_changes
from tidegate.jobs import Files, Kafka, PostgresTable

SALES = Files("sales", glob="*.csv", format="csv", schema={"shop": "string", "cents": "int"})
ORDERS = PostgresTable(table="orders", key="id", schema={"id": "bigint"})
DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "a type": (
        SALES,
        replace(SALES, schema={"shop": "string", "cents": "bigint"}),
        'it no longer has column cents "int", it now has column cents "bigint"',
    ),
    "a column": (SALES, replace(SALES, schema={**SALES.schema, "day": "date"}), 'it now has column day "date"'),
    "an option": (SALES, replace(SALES, options={"sep": ";"}), 'it now has sep=";"'),
    "a folder": (SALES, replace(SALES, folder="more"), 'it no longer has "sales", it now has "more"'),
    "a topic": (Kafka("orders"), Kafka("clicks"), 'it no longer has "orders", it now has "clicks"'),
    "a table": (ORDERS, replace(ORDERS, table="sales"), "it no longer has"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_parts_that_differ_are_named(name: str) -> None:
    before, now, difference = DIFFERENCES[name]
    assert declaration_changes.source_difference(before.identity, now.identity).startswith(difference)


def test_another_kind_of_source_is_named() -> None:
    """Few of the parts are."""
    difference = declaration_changes.source_difference(SALES.identity, Kafka("orders").identity)
    assert difference.startswith("it no longer has ")
    assert difference.endswith(" more")
    assert declaration_changes.source_difference("an author's own", "another") == "it was an author's own"
