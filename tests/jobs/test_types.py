"""Each type on its whole path: source table, Spark, staging, merges, quarantine, replay, lookups, output."""

import json
import uuid
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from click.testing import CliRunner

from tests import steps
from tests.jobs.conftest import Tables, offenders
from tests.sources.conftest import Inbox, inbox
from tests.sources.shop import Shop, shop, shops
from tests.store import key_lookup
from tidegate.commands.show.inspect_verbs import get, inspect
from tidegate.jobs import Count, Files, Max, Min, Pipeline, PostgresTable, State, Sum
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import MalformedRecord, UsageError

__all__ = ["inbox", "shop", "shops"]  # fixtures

OWNERS = [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1), uuid.UUID("0a000000-0000-0000-0000-00000000000b"), None]
WALL = [
    datetime(1, 1, 1),
    datetime(9999, 12, 31, 23, 59, 59, 999999),
    datetime(2026, 3, 29, 2, 30, 0, 1),  # an hour that clocks of Berlin skip
    datetime(1969, 12, 31, 23, 59, 59, 999999),
    None,
]
CODE = [b"", b"\x00", b"\x00\xff\\x41\"'\n,", bytes(range(256)), b"\xff" * 2000, None]
WEIGHT = [0.1, 0.2, -0.0, 1e-9, 123456789012.123, -99999.5, None]
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
EXTREMES = {
    **{"owner_min": Min("owner", "uuid"), "owner_max": Max("owner", "uuid")},
    **{"wall_min": Min("wall", "timestamp"), "wall_max": Max("wall", "timestamp")},
    **{"code_min": Min("code", "bytea"), "code_max": Max("code", "bytea")},
    **{"weight": Sum("weight", "numeric(38,9)"), "small": Sum("small", "numeric(20,3)"), "things": Count()},
}
KEYS = {"owner": "uuid", "wall": "timestamp", "code": "bytea"}


def states(kind: Any) -> dict[str, State]:
    """States with a key, with keys of all types, and without a key; each has values of each type."""
    keys = {"by_code": {"code": "bytea"}, "by_all": KEYS, "overall": {}}
    return {name: State(key, EXTREMES, null_keys=bool(key), kind=kind) for name, key in keys.items()}


def fill(shop: Shop, rows: int) -> None:
    for n in range(rows):
        small = [1.5, 0.001, -16777.215, None][n % 4]
        doc = json.dumps({"n": n, "text": 'ü"\\', "list": [1, None]})
        values = [OWNERS[n % 4] and str(OWNERS[n % 4]), WALL[n % 5], CODE[n % 6], WEIGHT[n % 7], small, doc]
        shop.execute("INSERT INTO things (owner, wall, code, weight, small, doc) VALUES (%s, %s, %s, %s, %s, %s)", values)


def expected(shop: Shop, keys: list[str]) -> list[tuple]:
    """Return the expected rows of a state with these keys, by plain SQL over the table."""
    grouped = f"GROUP BY {', '.join(keys)} ORDER BY {', '.join(keys)}" if keys else ""
    extremes = ", ".join(f"(array_agg({c} ORDER BY {c}))[1], (array_agg({c} ORDER BY {c} DESC NULLS LAST))[1]" for c in KEYS)
    numbers = "coalesce(sum(weight::text::numeric(38,9)), 0), coalesce(sum(small::text::numeric(20,3)), 0), count(*)"
    found = shop.execute(f"SELECT {', '.join([*keys, extremes, numbers])} FROM things {grouped}")
    return [tuple(comparable(value) for value in row) for row in found]


def comparable(value: Any) -> Any:
    if isinstance(value, memoryview):
        return bytes(value)
    return str(value) if isinstance(value, uuid.UUID) else value


def rows_of(inbox: Inbox, pipeline: Pipeline, state: str) -> list[tuple]:
    """Return a state's rows without the previous values of opaque states."""
    found = inbox.rows(pipeline, state)
    return [tuple(comparable(v) for name, v in row.items() if not name.startswith("previous_")) for row in found]


@pytest.fixture
def things(shop: Shop) -> Shop:
    shop.execute("SET timezone = 'Europe/Berlin'")
    shop.execute(CREATE)
    return shop


@pytest.mark.soak
def test_every_value_arrives_in_every_place_and_is_looked_up(
    things: Shop, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As key and as value, merged one by one and together, set aside and replayed, by two routes; before a redo, too.

    A printed key can be looked up again.
    """
    fill(things, 60)
    strict: dict[str, Any] = {"on_poison": "quarantine", "states": states("opaque")}
    pipeline = inbox.declare(THINGS, check={"not every third": "id % 3 <> 0"}, **strict)
    assert inbox.run(pipeline, "first") == [1]
    pipeline = inbox.declare(THINGS, check={}, version=2, **strict)
    with StateStore.connect(inbox.settings) as store:
        assert store.replay_quarantined(pipeline.spec, "test", "fixed") == (2, 20)
    fill(things, 70)
    assert inbox.plan(pipeline, "second") == [2, 3, 4]
    for txid, routing in ((2, "chosen"), (3, "safe"), (4, "chosen")):
        steps.process(inbox.settings, pipeline, txid, owner="test", routing=steps.ROUTINGS[routing])
    with StateStore.connect(inbox.settings) as store:
        while store.committed("inbox") < 4:
            assert store.commit_ready(pipeline.spec, "test")

    for name, state in pipeline.states.items():
        assert rows_of(inbox, pipeline, name) == expected(things, list(state.key)), name
    last = inbox.rows(pipeline, "overall")[0]
    assert comparable(last["previous_owner_max"]) == str(OWNERS[1])
    assert (last["previous_wall_min"], bytes(last["previous_code_max"])) == (WALL[0], CODE[4])

    settings = inbox.settings
    by_code, by_all, _ = pipeline.spec.states
    codes = [("\\x",), ("\\x00",), (f"\\x{bytes(range(256)).hex()}",)]
    assert None not in key_lookup.get(settings, by_code, codes)
    assert key_lookup.get(settings, by_code, [("\\x0102",)]) == [None]
    of_all = [
        ("0A000000-0000-0000-0000-00000000000B", "2026-03-29 02:30:00.000001", f"\\x{CODE[2].hex()}"),
        (str(OWNERS[1]), "9999-12-31T23:59:59.999999", "\\x00"),
    ]
    assert None not in key_lookup.get(settings, by_all, of_all)
    with pytest.raises(UsageError, match="invalid input syntax for type uuid"):
        key_lookup.get(settings, by_all, [("0a", *of_all[0][1:])])

    monkeypatch.setattr("tidegate.commands.show.inspect_verbs.find_pipeline", lambda _name: pipeline)
    monkeypatch.setattr("tidegate.commands.show.inspect_verbs.Settings.load", lambda *_: settings)
    shown = CliRunner().invoke(inspect, ["inbox", "--state", "by_code", "--json"])
    assert shown.exit_code == 0, shown.output
    printed = json.loads(shown.stdout)
    assert [row["code"] for row in printed] == [
        None if code is None else f"\\x{code.hex()}" for code in [*sorted(code for code in CODE if code is not None), None]
    ]
    assert printed[0]["wall_max"] == "9999-12-31T23:59:59.999999"
    for more in ([], ["--json"]):
        got = CliRunner().invoke(get, ["inbox", "by_code", "\\x00", *more])
        assert got.exit_code == 0, got.output
        assert "\\x00" in got.output.replace("\\\\", "\\")
        assert "memory" not in got.output


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
