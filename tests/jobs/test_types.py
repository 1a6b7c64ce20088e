"""Floats and ids that Spark and Postgres write differently are kept exactly."""

from decimal import Decimal
from uuid import UUID

import pytest

from tests.jobs.conftest import Tables
from tidegate.jobs import Count, Max, State, Sum

ID = "0a000000-0000-0000-0000-00000000000b"


@pytest.mark.promise("decision:0008")
def test_floats_are_kept_as_their_shortest_decimals_and_ids_in_small_letters(tables: Tables) -> None:
    kept = {"total": Sum("v", "numeric(12,4)"), "single": Sum("w", "numeric(12,4)"), "most": Max("v", "numeric(12,4)")}
    states = {"overall": State(aggregates=kept), "per_owner": State({"u": "uuid"}, {"lines": Count()}, null_keys=True)}
    schema = {"v": "double", "w": "float", "u": "string"}
    pipeline = tables.declare_over(schema, None, states=states)
    values = [*[0.1] * 10, 0.0001, -0.0, 1234.5, None, -0.3]
    tables.put_rows(schema, zip(values, values, [ID, ID.upper(), *[None] * 13], strict=True))
    tables.run(pipeline)
    assert tables.rows(pipeline, "overall") == [dict.fromkeys(("total", "single"), Decimal("1235.2001")) | {"most": 1234.5}]
    assert tables.rows(pipeline, "per_owner") == [{"u": UUID(ID), "lines": 2}, {"u": None, "lines": 13}]
