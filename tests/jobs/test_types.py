"""Each type on its whole path: source table, Spark, staging, merges, quarantine, replay, lookups, output."""

import uuid
from dataclasses import replace
from decimal import Decimal

import pytest

from tests.jobs.conftest import Tables, offenders
from tests.sources.conftest import inbox
from tests.sources.shop import Shop, shop, shops
from tidegate.jobs import Count, Files, Max, PostgresTable, State, Sum
from tidegate.state_store.base.errors import MalformedRecord

__all__ = ["inbox", "shop", "shops"]  # fixtures

OWNERS = [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1), uuid.UUID("0a000000-0000-0000-0000-00000000000b"), None]
CREATE = (
    "CREATE TABLE things (id bigserial PRIMARY KEY, owner uuid, wall timestamp, code bytea, weight double precision,"
    " small real, doc jsonb)"
)
THINGS = PostgresTable(
    table="things",
    key="id",
    schema={
        "id": "bigint",
        "owner": "string",
        "wall": "timestamp_ntz",
        "code": "binary",
        "weight": "double",
        "small": "decimal(10,3)",
        "doc": "string",
    },
    max_rows=60,
    wait_seconds=0,
)


@pytest.fixture
def things(shop: Shop) -> Shop:
    shop.execute("SET timezone = 'Europe/Berlin'")
    shop.execute(CREATE)
    return shop


WEIGHTS = State(aggregates={"total": Sum("v", "numeric(12,4)"), "most": Max("v", "numeric(12,4)"), "lines": Count("v")})


@pytest.mark.soak
@pytest.mark.promise("decision:0008")
def test_floats_are_kept_as_their_shortest_decimals(tables: Tables) -> None:
    of_floats = State(aggregates={**WEIGHTS.aggregates, "single": Sum("w", "numeric(12,4)"), "owner": Max("u", "uuid")})
    values = [*[0.1] * 10, 0.0001, -0.0, 1234.5, None, -0.3]
    owners = [str(OWNERS[2]), str(OWNERS[2]).upper(), *[None] * 13]
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
    assert per_owner == [(str(OWNERS[2]), 2), (None, 13)]


NO_DECIMALS = ["0.30000000000000004D", "0.00001D", "1e8D", "double('nan')", "-double('inf')"]
NO_UUIDS = ["''", f"'{{{OWNERS[2]}}}'", "'0a00000000000000000000000000000b'", f"'{OWNERS[0]}\\n'"]


@pytest.mark.soak
def test_a_value_of_another_type_is_refused_with_its_column(tables: Tables) -> None:
    """Nothing is rounded, NaN does not become NULL, and two ways to write one uuid would be two rows of one key."""
    tables.put_rows({"name": "string"}, [("a",)])
    of: dict[str, State] = dict.fromkeys(NO_DECIMALS, WEIGHTS) | dict.fromkeys(
        NO_UUIDS, State({"v": "uuid"}, {"lines": Count()})
    )
    source = Files("inbox", schema={"name": "string"})
    tables.plan(tables.declare(source, states={"lines": State(aggregates={"lines": Count()})}), "run")
    found = {}
    for number, (value, state) in enumerate(of.items()):
        transform = lambda rows, value=value: rows.selectExpr(f"{value} v")  # noqa: E731
        found[value] = tables.outcome(tables.declare(source, states={f"state_{number}": state}, transform=transform))
    refused = "MalformedRecord: .*State state_.*: column v, declared (numeric.12,4.|uuid), has the value"
    assert offenders(found, dict.fromkeys(of, refused)) == {}


def test_a_double_of_the_table_may_be_declared_decimal(things: Shop) -> None:
    things.execute("INSERT INTO things (weight, small) VALUES (1234567890.1234567, 0.1), (1e-7, 16777216), (-0.0, NULL)")
    source = replace(THINGS, schema={"id": "int", "weight": "decimal(38,18)", "small": "decimal(10,1)"})
    assert things.rows(source, things.planned(source)) == [
        (1, Decimal("1234567890.1234567"), Decimal("0.1")),
        (2, Decimal("1E-7"), Decimal(16777216)),
        (3, Decimal(0), None),
    ]
    for value in ("'NaN'", "'Infinity'", "0.3000000000000000004e-3", "1e300"):
        things.execute("DELETE FROM things")
        things.execute(f"INSERT INTO things (weight) VALUES ({value})")
        narrow = replace(source, schema={"id": "int", "weight": "decimal(20,3)"})
        with pytest.raises(MalformedRecord, match=r"Table things, row id=\d+: weight="):
            things.rows(narrow, things.planned(narrow))
