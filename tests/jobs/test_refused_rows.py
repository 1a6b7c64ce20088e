"""What cannot be kept exactly refuses its batch, by column, key or type: nothing is rounded, cut or cast on the way."""

from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from tests import steps
from tests.jobs.conftest import Tables, offenders
from tidegate import jobs as j

SCHEMA = {"name": "string"}
ID = "0a000000-0000-0000-0000-00000000000b"
LINES = {"lines": j.Count()}
DAYS, GAPS = (j.State(aggregates=LINES, window=kind("v", "1 day")) for kind in (j.Tumbling, j.Session))


def keep(aggregate: Any) -> j.State:
    return j.State(key={"name": "text"}, aggregates={"x": aggregate})


def key(kind: str) -> j.State:
    return j.State(key={"v": kind}, aggregates=LINES)


# The columns that a transform makes of one row, beside its name; the state that they are for; the refusal.
REFUSED: dict[str, tuple[list[str], Any, str]] = {
    "a sum": (["explode(array(9223372036854775807, 1)) v"], keep(j.Sum("v")), "Overflow"),
    "a numeric sum": ([f"explode(array({'9' * 38}BD, {'0' * 37}1BD)) v"], keep(j.Sum("v", "numeric(38,0)")), "Overflow"),
    "a cast": (["CAST(name AS INT) v"], keep(j.Sum("v")), "TransformFailed.*CAST_INVALID_INPUT"),
    "a set": (["explode(array(1L, 2L, 3L)) v"], keep(j.CollectSet("v", "bigint", most=2)), "Overflow.*3 values of a key"),
    "a list": (["explode(array(1L, 1L, 1L)) v"], keep(j.CollectList("v", "bigint", most=2)), "Overflow.*3 values of a key"),
    "squares": (["1000000000000000000L v"], keep(j.Variance("v")), "Overflow.*(out of range|cannot be represented)"),
    "digits of a mean": (["0.25D v"], keep(j.Avg("v", scale=1)), "MalformedRecord.*column v, declared numeric"),
    "a quantile": (["0.25D v"], keep(j.ApproxQuantiles("v", 10, "numeric(10,1)")), "MalformedRecord.*column v, declared"),
    "texts of a set": (["'a' v"], keep(j.CollectSet("v", "bigint")), "DeclarationInvalid.*declared bigint, but .* string"),
    "a far day of a set": (["date_add(date'2026-01-01', 4000000) v"], keep(j.CollectSet("v", "date")), "Overflow.*Years are"),
    "an integer row": (["1099511627776L v"], j.Rows({"v": "integer"}), "Overflow"),
    "an integer minimum": (["2147483648L v"], keep(j.Min("v", "integer")), "Overflow"),
    "an id of rows": (["'not a uuid' v"], j.Rows({"v": "uuid"}), "MalformedRecord"),
    "an id in braces": ([f"'{{{ID}}}' v"], key("uuid"), "MalformedRecord.*column v, declared uuid"),
    "a float": (["0.30000000000000004D v"], keep(j.Sum("v", "numeric(12,4)")), "MalformedRecord.*column v, declared numeric"),
    "a scale": (["1.005BD v"], keep(j.Sum("v", "numeric(38,2)")), r"declared numeric\(38,2\), .* returns decimal\(4,3\)"),
    "a zone": (["timestamp'2013-01-01' v"], keep(j.Min("v", "timestamp")), "DeclarationInvalid.*returns timestamp"),
    "a missing column": (["1 w"], keep(j.Sum("v")), "needs column v, but the transform returns name, w"),
    "a row in no window": (["CAST(NULL AS timestamp) v"], DAYS, r"BadKey.*the event time is NULL in 1 group"),
    "a session's end": (["timestamp'9999-12-31 01:00:00' v"], GAPS, "Overflow.*Years are kept"),
}


@pytest.mark.promise("error:BAD_KEY", "error:OVERFLOW", "error:TRANSFORM_FAILED", "error:DECLARATION_INVALID")
def test_what_cannot_be_kept_refuses_its_batch(tables: Tables) -> None:
    tables.put_rows(SCHEMA, [("a",)])
    tables.plan(tables.declare_over(SCHEMA, j.State(aggregates=LINES)), "test")
    found = {}
    for number, (name, (columns, state, _)) in enumerate(REFUSED.items()):
        transform = lambda rows, columns=columns: rows.selectExpr("name", *columns)  # noqa: E731
        pipeline = tables.declare_over(SCHEMA, None, transform, states={f"state_{number}": state})
        # In this process, a refusal would only lead to executors, which raise the error.
        found[name] = tables.outcome(pipeline, routing=steps.ROUTINGS["on executors"])
    assert offenders(found, {name: refusal for name, (*_, refusal) in REFUSED.items()}) == {}
    assert steps.history(tables.settings, 1).seals == []


@pytest.mark.promise("decision:0008")
def test_floats_are_kept_as_their_shortest_decimals_and_ids_in_small_letters(tables: Tables) -> None:
    kept = {"total": j.Sum("v", "numeric(12,4)"), "single": j.Sum("w", "numeric(12,4)"), "most": j.Max("v", "numeric(12,4)")}
    states = {"overall": j.State(aggregates=kept), "per_owner": j.State({"u": "uuid"}, {"lines": j.Count()}, null_keys=True)}
    schema = {"v": "double", "w": "float", "u": "string"}
    pipeline = tables.declare_over(schema, None, states=states)
    values = [*[0.1] * 10, 0.0001, -0.0, 1234.5, None, -0.3]
    tables.put_rows(schema, zip(values, values, [ID, ID.upper(), *[None] * 13], strict=True))
    tables.run(pipeline)
    assert tables.rows(pipeline, "overall") == [dict.fromkeys(("total", "single"), Decimal("1235.2001")) | {"most": 1234.5}]
    assert tables.rows(pipeline, "per_owner") == [{"u": UUID(ID), "lines": 2}, {"u": None, "lines": 13}]
