"""Floats and ids that Spark and Postgres write differently are kept exactly, or refused with their column."""

import uuid
from dataclasses import replace
from decimal import Decimal

import pytest

from tests.jobs.conftest import Tables
from tests.sources.shop import Shop, shop, shops
from tidegate.jobs import Count, Max, PostgresTable, State, Sum
from tidegate.state_store.base.errors import MalformedRecord

__all__ = ["shop", "shops"]  # fixtures

ID = uuid.UUID("0a000000-0000-0000-0000-00000000000b")
WEIGHTS = State(aggregates={"total": Sum("v", "numeric(12,4)"), "most": Max("v", "numeric(12,4)"), "lines": Count("v")})


@pytest.mark.soak
@pytest.mark.promise("decision:0008")
def test_floats_are_kept_as_their_shortest_decimals(tables: Tables) -> None:
    of_floats = State(aggregates={**WEIGHTS.aggregates, "single": Sum("w", "numeric(12,4)"), "owner": Max("u", "uuid")})
    values = [*[0.1] * 10, 0.0001, -0.0, 1234.5, None, -0.3]
    owners = [str(ID), str(ID).upper(), *[None] * 13]
    schema = {"v": "double", "w": "float", "u": "string"}
    states = {"overall": of_floats, "per_owner": State({"u": "uuid"}, {"lines": Count()}, null_keys=True)}
    pipeline = tables.declare_over(schema, None, states=states)
    rows = [*zip(values, values, owners, strict=True)]
    tables.put_rows(schema, rows[:14], rows[14:])
    assert tables.run(pipeline) == [1, 2]
    (row,) = tables.rows(pipeline, "overall")
    total = Decimal("1235.2001")
    assert (row["total"], row["single"], row["most"], row["lines"]) == (total, total, Decimal("1234.5000"), 14)
    per_owner = [(row["u"] and str(row["u"]), row["lines"]) for row in tables.rows(pipeline, "per_owner")]
    assert per_owner == [(str(ID), 2), (None, 13)]


def test_a_double_of_a_table_may_be_declared_decimal(shop: Shop) -> None:
    shop.execute("CREATE TABLE things (id bigserial PRIMARY KEY, weight double precision, small real)")
    shop.execute("INSERT INTO things (weight, small) VALUES (1234567890.1234567, 0.1), (1e-7, 16777216), (-0.0, NULL)")
    schema = {"id": "int", "weight": "decimal(38,18)", "small": "decimal(10,1)"}
    source = PostgresTable(table="things", key="id", schema=schema, max_rows=60, wait_seconds=0)
    assert shop.rows(source, shop.planned(source)) == [
        (1, Decimal("1234567890.1234567"), Decimal("0.1")),
        (2, Decimal("1E-7"), Decimal(16777216)),
        (3, Decimal(0), None),
    ]
    for value in ("'NaN'", "'Infinity'", "0.3000000000000000004e-3", "1e300"):
        shop.execute("DELETE FROM things")
        shop.execute(f"INSERT INTO things (weight) VALUES ({value})")
        narrow = replace(source, schema={"id": "int", "weight": "decimal(20,3)"})
        with pytest.raises(MalformedRecord, match=r"Table things, row id=\d+: weight="):
            shop.rows(narrow, shop.planned(narrow))
