"""Floats and ids that Spark and Postgres write differently are kept exactly, or refused with their column."""

import uuid
from decimal import Decimal

import pytest

from tests.jobs.conftest import Tables
from tests.sources.shop import shop, shops
from tidegate.jobs import Count, Max, State, Sum

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
