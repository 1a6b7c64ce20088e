"""Declarations are checked at once, with clear messages, and the fingerprint changes with their meaning."""

from dataclasses import fields, replace
from typing import Any

import pytest

from tidegate.jobs import Count, Delta, Files, Iceberg, Max, Min, Pipeline, PostgresTable, Ranges, Rows, State, Sum

SOURCE = Files("inbox", format="csv", schema={"name": "string", "amount": "int", "price": "decimal(10,2)"})
STATE = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})


def declare(**changes: Any) -> Pipeline:
    return Pipeline(**{"name": "inbox", "source": SOURCE, "states": {"per_name": STATE}, **changes})


def declare_state(**changes: Any) -> Pipeline:
    return declare(states={"per_name": replace(STATE, **changes)})


def rows(ranges: Ranges | None) -> Rows:
    return Rows({"at": "date", "n": "bigint"}, range_partitions=ranges)


ALIKE = {"id": "int", "Id": "int"}
SOURCES_OF_ALIKE = {
    **{form: lambda form=form: Files("f", format=form, schema=ALIKE) for form in ("csv", "json", "parquet")},
    "folder": lambda: Files("f", format="json", schema={"id": "int"}, partitions={"day": "int", "Day": "int"}),
    "field": lambda: Files("f", format="json", schema={"v": "array<struct<id: int, Id: int>>"}),
    "Delta": lambda: Delta("t", schema=ALIKE),
    "Iceberg": lambda: Iceberg("a.b.c", schema=ALIKE),
    "PostgresTable": lambda: PostgresTable(table="t", key="id", schema=ALIKE),
}


@pytest.mark.parametrize("declare", SOURCES_OF_ALIKE.values(), ids=SOURCES_OF_ALIKE.keys())
def test_columns_that_are_one_to_spark_are_refused_with_both_names(declare: Any) -> None:
    with pytest.raises(ValueError, match=r"(id and Id|day and Day) differ by case at most, and are one name to Spark"):
        declare()


BAD_NAMES = ["Flights", "semi;colon", "zürich", "a" * 41]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_no_plain_identifier_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a pipeline"):
        declare(name=name)
    with pytest.raises(ValueError, match="cannot be the name of a state"):
        declare(states={name: STATE})
    for changes in ({"key": {name: "text"}}, {"aggregates": {name: Count()}}):
        with pytest.raises(ValueError, match="cannot be the name of a column of state per_name"):
            declare_state(**changes)


KEPT = ["txid", "ctid", "lateral"]


@pytest.mark.parametrize("name", KEPT)
def test_a_column_that_tidegate_or_postgres_keeps_for_itself_is_refused(name: str) -> None:
    """Such a table could not be created, or would mean something else."""
    with pytest.raises(ValueError, match=f"cannot have a column named {name}"):
        declare_state(key={name: "text"})
    with pytest.raises(ValueError, match=f"cannot have a column named {name}"):
        declare_state(aggregates={name: Count()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": {}}, "Pipeline inbox declares no state"),
        ({"states": {"per_name": State(key={"name": "text"}, aggregates={})}}, "per_name needs at least one aggregate"),
        ({"states": {"log": rows(Ranges("price", "day"))}}, "log cannot be divided by price: it has no such column"),
        (
            {"states": {"log": rows(Ranges("n", "day"))}},
            "by ranges of day of column n, a bigint: its type has to be date or timestamptz",
        ),
        ({"window": 0}, "window of 0; it must be at least 1"),
        ({"concurrency": 0}, "concurrency of 0; it must be at least 1"),
        ({"version": 0}, "version"),
    ],
)
def test_a_pipeline_that_could_not_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declare(**changes)


@pytest.mark.parametrize("kind", ["float", "char(3)", "TEXT", "numeric(39,2)", "numeric(5,6)"])
def test_a_type_that_cannot_keep_the_promise_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"is not a column type\. Choose one of: text, boolean"):
        declare_state(key={"name": kind})
    for aggregate in (Min, Max):
        with pytest.raises(ValueError, match="is not a column type"):
            declare_state(aggregates={"x": aggregate("amount", kind)})


@pytest.mark.promise("decision:0008")
@pytest.mark.parametrize("kind", ["text", "boolean", "timestamp"])
def test_a_sum_that_is_no_number_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be kept as {kind}"):
        Sum("name", kind)


@pytest.mark.parametrize(
    "make", [lambda: Count("amount", "text"), lambda: Min("amount", merge="sum")], ids=["count as text", "min merged by sum"]
)
def test_an_inconsistent_aggregate_cannot_be_declared(make: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        declare_state(aggregates={"x": make()})


def test_the_same_declaration_has_the_same_fingerprint() -> None:
    again = Pipeline(name="inbox", source=replace(SOURCE), states={"per_name": replace(STATE)})
    assert declare().spec == again.spec
    undivided, divided = (declare(states={"log": rows(ranges)}).spec for ranges in (None, Ranges("n", 10)))
    assert undivided.fingerprint == divided.fingerprint
    assert (
        declare(description="for people", window=9, concurrency=2, transform=lambda rows: rows).spec.fingerprint
        == again.spec.fingerprint
    )


@pytest.mark.promise("I16")
@pytest.mark.parametrize(
    "changed",
    [
        declare(name="other"),
        declare(version=2),
        declare(source=replace(SOURCE, folder="elsewhere")),
        declare(states={"other": STATE}),
        declare_state(null_keys=True),
        declare_state(key={"name": "date"}),
        declare_state(aggregates={"lines": Count(), "amount": Sum("amount", "integer")}),
        declare_state(aggregates={"lines": Count(), "amount": Max("amount")}),
        declare_state(aggregates={"lines": Count(), "amount": Sum("price")}),
        declare_state(aggregates={"lines": Count("amount"), "amount": Sum("amount")}),
    ],
    ids=[
        "name",
        "version",
        "source",
        "state's name",
        "NULL keys",
        "key's type",
        "value's type",
        "other merge",
        "sum of another column",
        "count of a column",
    ],
)
def test_every_change_of_a_values_meaning_changes_the_fingerprint(changed: Pipeline) -> None:
    """Partials of another declaration must never meet the state (I16)."""
    assert changed.spec.fingerprint != declare().spec.fingerprint


@pytest.mark.promise("decision:0053")
def test_a_state_by_key_is_one_table() -> None:
    assert [field.name for field in fields(State) if "partition" in field.name] == []
    assert [field.name for field in fields(Rows) if "partition" in field.name] == ["range_partitions"]
