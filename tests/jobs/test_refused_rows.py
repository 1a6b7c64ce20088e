"""What cannot be kept exactly refuses its batch, by column, key or type: nothing is rounded, cut or cast on the way."""

import random
from typing import Any

import pytest

from tests import steps
from tests.jobs.conftest import Tables, offenders
from tidegate.jobs import (
    ApproxDistinct,
    ApproxQuantiles,
    Avg,
    CollectList,
    CollectSet,
    Count,
    Histogram,
    History,
    Last,
    Max,
    Min,
    Ranges,
    Rows,
    Session,
    Sliding,
    State,
    Sum,
    Tumbling,
    Variance,
)
from tidegate.jobs.windows import Window

SCHEMA = {"name": "string"}
LINES = {"lines": Count()}
PAIR = State(key={"name": "text", "number": "integer", "other": "text"}, aggregates=LINES)
DIVIDED = Rows({"name": "text", "amount": "bigint"}, range_partitions=Ranges("amount", 100))


def noise(length: int) -> str:
    dice = random.Random(length)
    return "".join(chr(dice.randrange(0x30, 0x5B)) for _ in range(length))


def keep(aggregate: Any) -> State:
    return State(key={"name": "text"}, aggregates={"x": aggregate})


def within(window: Window) -> State:
    return State(aggregates=LINES, window=window)


def key(kind: str) -> State:
    return State(key={"v": kind}, aggregates=LINES)


YEARS = "Years are kept from 1 to 9999"
FAR = {  # what a transform makes, its type, and how it is shown
    "a date after 9999": ("date_from_unix_date(2932897)", "date", "10000-01-01"),
    "a date before 1": ("date_from_unix_date(-719163)", "date", "0000-12-31"),
    "a time after 9999": ("timestamp_micros(253402300800000000)", "timestamptz", "10000-01-01 00:00:00"),
    "a time before 1": ("timestamp_micros(-62135596800000001)", "timestamptz", "0000-12-31 23:59:59.999999"),
}
OTHER = "MalformedRecord: .*State state_.*: column v, declared {}, has the value"
ID = "0a000000-0000-0000-0000-00000000000b"
# The columns that a transform makes of one row, beside its name; the state that they are for; the refusal.
FEW: dict[str, tuple[list[str], Any, str]] = {
    "a key too long together": (
        [f"'{noise(1201)}' name", "7 number", f"'{noise(1201)}' other"],
        PAIR,
        rf"BadKey.*name='{noise(1201)[:20]}.*number=7.*takes 2406 bytes",
    ),
    "a sum": (["explode(array(9223372036854775807, 1)) v"], keep(Sum("v")), "Overflow"),
    "a numeric sum": ([f"explode(array({'9' * 38}BD, {'0' * 37}1BD)) v"], keep(Sum("v", "numeric(38,0)")), "Overflow"),
    "a cast": (["CAST(name AS INT) v"], keep(Sum("v")), "TransformFailed.*CAST_INVALID_INPUT"),
    "a set": (
        ["explode(array(1L, 2L, 3L)) v"],
        keep(CollectSet("v", "bigint", most=2)),
        "Overflow.*3 values of a key, and keeps",
    ),
    "a list": (["explode(array(1L, 1L, 1L)) v"], keep(CollectList("v", "bigint", most=2)), "Overflow.*3 values of a key, and"),
    "squares": (["1000000000000000000L v"], keep(Variance("v")), "Overflow.*(out of range|cannot be represented)"),
    "digits of a mean": (["0.25D v"], keep(Avg("v", scale=1)), "MalformedRecord.*column v, declared numeric"),
    "digits of a quantile": (
        ["0.25D v"],
        keep(ApproxQuantiles("v", 10, "numeric(10,1)")),
        "MalformedRecord.*column v, declared",
    ),
    "texts of a set": (
        ["'a' v"],
        keep(CollectSet("v", "bigint")),
        "DeclarationInvalid.*declared bigint, but .* returns string",
    ),
    "a far day of a set": (["date_add(date'2026-01-01', 4000000) v"], keep(CollectSet("v", "date")), f"Overflow.*{YEARS}"),
    "an integer row": (["1099511627776L v"], Rows({"v": "integer"}), "Overflow"),
    "an id of rows": (["'not a uuid' v"], Rows({"v": "uuid"}), "MalformedRecord"),
    "NUL in a row": (["concat('a', char(0)) v"], Rows({"v": "text"}), "BadKey"),
    "a row in no window": (
        ["CAST(NULL AS timestamp) v"],
        within(Tumbling("v", "1 day")),
        r"BadKey.*the event time is NULL in 1 group\(s\)",
    ),
    "a version without a time": (
        ["'x' label", "CAST(NULL AS timestamp) v"],
        History({"name": "text"}, {"label": "text"}, {"v": "timestamptz"}),
        "BadKey.*column v of order_by is NULL in 1 version",
    ),
    "a row in no range": (
        ["CAST(NULL AS bigint) amount"],
        DIVIDED,
        r"BadKey.*column amount, by .* divided, is NULL in 1 row\(s\)",
    ),
}
MORE: dict[str, tuple[list[str], Any, str]] = {
    **{
        f"{far} as key": ([f"{made} v"], key(kind), f"BadKey.*column v is {shown}.*{YEARS}")
        for far, (made, kind, shown) in FAR.items()
    },
    **{
        f"{far} as value": (
            [f"{made} v"],
            keep(Max("v", kind)),
            rf"Overflow.*column x of the key \(name='a'\) is {shown}.*{YEARS}",
        )
        for far, (made, kind, shown) in FAR.items()
        if far != "a date before 1"
    },
    "a sum below": (["explode(array(-9223372036854775807, -2)) v"], keep(Sum("v")), "Overflow"),
    "an integer sum": (["explode(array(2147483647L, 1L)) v"], keep(Sum("v", "integer")), "Overflow"),
    "an integer minimum": (["2147483648L v"], keep(Min("v", "integer")), "Overflow"),
    "an integer quantile": (
        ["2147483648L v"],
        keep(ApproxQuantiles("v", 10, "integer")),
        "Overflow.*(out of range|cannot be rep)",
    ),
    "digits before the point": (["explode(array(99.99, 0.01)) v"], keep(Sum("v", "numeric(4,2)")), "Overflow"),
    "NaN": (["double('nan') v"], keep(Avg("v")), "MalformedRecord.*has the value NaN"),
    "NaN estimated": (["double('nan') v"], keep(ApproxDistinct("v", "numeric(10,1)")), "MalformedRecord.*has the value NaN"),
    "a bound": (["0.001D v"], keep(Histogram("v", [0], "numeric(10,2)")), "MalformedRecord.*column v, declared numeric"),
    "NUL in a set": (["concat('a', char(0), 'b') v"], keep(CollectSet("v", "text")), "NUL character"),
    **{
        f"the float {value}": ([f"{value} v"], keep(Sum("v", "numeric(12,4)")), OTHER.format("numeric.12,4."))
        for value in ("0.30000000000000004D", "0.00001D", "1e8D", "double('nan')", "-double('inf')")
    },
    # Two ways to write one uuid would be two rows of one key.
    **{f"the id {value}": ([f"{value} v"], key("uuid"), OTHER.format("uuid")) for value in ("''", f"'{{{ID}}}'", f"'{ID}\\n'")},
    "the id without dashes": (["'0a00000000000000000000000000000b' v"], key("uuid"), OTHER.format("uuid")),
    # Declared otherwise than the transform returns it.
    "a scale": (["1.005BD v"], keep(Sum("v", "numeric(38,2)")), r"declared numeric\(38,2\), .* returns decimal\(4,3\)"),
    "a precision": (["CAST(1 AS DECIMAL(20,2)) v"], keep(Min("v", "numeric(10,2)")), r"returns decimal\(20,2\)"),
    "a product": (
        ["CAST(1 AS DECIMAL(38,18)) * CAST(1 AS DECIMAL(38,18)) v"],
        keep(Min("v", "numeric(38,18)")),
        r"returns decimal\(38,6\).*cast what it is computed of",
    ),
    "a double": (["1.5D v"], keep(Sum("v")), "declared bigint, but the transform returns double"),
    "a decimal": (["CAST(1 AS DECIMAL(10,0)) v"], keep(Sum("v")), r"returns decimal\(10,0\)"),
    "a text": (["'1' v"], keep(Sum("v")), "returns string"),
    "a number": (["1 v"], keep(Min("v", "text")), "declared text, but the transform returns int"),
    "bytes": (["X'00' v"], keep(Min("v", "uuid")), "declared uuid, but the transform returns binary"),
    "a time": (["timestamp'2013-01-01' v"], keep(Min("v", "date")), "returns timestamp"),
    "a zone": (["timestamp'2013-01-01' v"], keep(Min("v", "timestamp")), "returns timestamp"),
    "no zone": (["timestamp_ntz'2013-01-01' v"], keep(Min("v", "timestamptz")), "returns timestamp_ntz"),
    "an order": (["'a' v", "date'2026-01-01' day"], keep(Last("v", "text", {"day": "timestamptz"})), "declared timestamptz"),
    "a missing column": (["1 something"], keep(Sum("v")), "needs column v, but the transform returns name, something"),
    "a column that is only counted": (["1 something"], keep(Count("v")), "needs column v"),
    "capitals": (["1 V"], keep(Sum("v")), "needs column v"),
    "a column twice": (["1 v", "2 v"], keep(Sum("v")), "v"),
    "an unknown column": (["no_such_column v"], keep(Sum("v")), "no_such_column"),
    "a misspelt key": ([], State({"nam": "text"}, LINES), "needs column nam, but the transform returns name"),
    "an impure transform": (["rand() v"], keep(Sum("v")), "The transform uses rand"),
    # Windows.
    "days of a window": (["date'2026-03-29' v"], within(Tumbling("v", "1 day")), "declared timestamptz, .* returns date"),
    "a window without a zone": (
        ["timestamp'1970-01-01' v"],
        within(Tumbling("v", "1 day", type="timestamp")),
        "declared timestamp, .* returns timestamp",
    ),
    "a window's column": ([], within(Session("v", "1 day")), "needs column v"),
    "a window's end": (["timestamp'9999-12-31 01:00:00' v"], within(Tumbling("v", "1 day")), f"Overflow.*{YEARS}"),
    "a session's end": (["timestamp'9999-12-31 01:00:00' v"], within(Session("v", "1 day")), f"Overflow.*{YEARS}"),
    "a window's start": (
        ["timestamp'0001-01-01 01:00:00' v"],
        within(Sliding("v", "2 days", "1 day")),
        "BadKey.*Years are kept",
    ),
}


@pytest.mark.promise("limit:MAX_KEY_BYTES", "limit:MAX_KEYS_BYTES", "error:BAD_KEY", "error:OVERFLOW", "error:TRANSFORM_FAILED")
@pytest.mark.promise("error:DECLARATION_INVALID")
@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.soak)], ids=["few", "more"])
def test_what_cannot_be_kept_refuses_its_batch(tables: Tables, cases: dict[str, tuple[list[str], Any, str]]) -> None:
    tables.put_rows(SCHEMA, [("a",)])
    tables.plan(tables.declare_over(SCHEMA, State(aggregates=LINES)), "test")
    found = {}
    for number, (name, (columns, state, _)) in enumerate(cases.items()):
        made = columns if any(column.endswith(" name") for column in columns) else ["name", *columns]
        transform = lambda rows, made=made: rows.selectExpr(*made)  # noqa: E731
        pipeline = tables.declare_over(SCHEMA, None, transform, states={f"state_{number}": state})
        # In this process, a refusal would only lead to executors, which raise the error.
        found[name] = tables.outcome(pipeline, routing=steps.ROUTINGS["on executors"])
    assert offenders(found, {name: refusal for name, (*_, refusal) in cases.items()}) == {}
    assert steps.history(tables.settings, 1).seals == []
