"""Mended records, through Spark: after the replay the state is that of a source that was right from the start."""

from typing import Any

from tests import steps
from tests.jobs.test_policies import NOT_NEGATIVE, by_line
from tests.sources.conftest import Inbox, inbox
from tidegate.jobs import Files, Pipeline, Rows
from tidegate.state_store import StateStore

__all__ = ["inbox"]  # a fixture


def declare(inbox: Inbox, schema: dict[str, str], **more: Any) -> Pipeline:
    source = Files("inbox", format="csv", schema=schema)
    return inbox.declare(source, **{"on_poison": "quarantine", "check": NOT_NEGATIVE, **more})


def replay(inbox: Inbox, pipeline: Pipeline) -> None:
    with StateStore.connect(inbox.settings) as store:
        opened = store.replay_quarantined(pipeline.spec, "test", "mended")
    assert opened is not None
    assert inbox.run(pipeline, f"replay {opened[0]}") == [opened[0]]


EXACTLY: dict[str, tuple[str, str]] = {  # a value of each type as a file has it, and as Spark shows it
    "timestamp": ("2024-01-05T10:00:00.123456Z", "2024-01-05 10:00:00.123456"),
    "timestamp_ntz": ("0001-01-01T00:00:00.000001", "0001-01-01 00:00:00.000001"),
    "date": ("0001-01-01", "0001-01-01"),
    "decimal(38,18)": ("12345678901234567890.123456789012345678", "12345678901234567890.123456789012345678"),
    "bigint": ("-9223372036854775808", "-9223372036854775808"),
    "smallint": ("-32768", "-32768"),
    "boolean": ("true", "true"),
    "double": ("5e-324", "4.9E-324"),
    "float": ("16777216.0", "1.6777216E7"),
    "double NaN": ("NaN", "NaN"),
    "float -Infinity": ("-Infinity", "-Infinity"),
    "binary": ("\u00e9", "\u00e9"),
    "string": ("1.10 \u00e9\u2028", "1.10 \u00e9\u2028"),
}


def test_a_record_that_waited_has_lost_nothing(inbox: Inbox) -> None:
    """Six digits of a second, all digits of a number, whether a column was mended or not: as in a clean run."""
    columns = {f"v{number}": kind.partition(" ")[0] for number, kind in enumerate(EXACTLY)}
    declared: dict[str, Any] = {"states": {"log": Rows({"amount": "integer", **dict.fromkeys(columns, "text")})}}

    def texts(renamed: str = "v0") -> Any:
        casts = [f"CAST({renamed if name == 'v0' else name} AS string) {name}" for name in columns]
        return lambda rows: rows.selectExpr("amount", *casts)

    values = ",".join(text for text, _ in EXACTLY.values())
    lines = [",".join(["shop", *columns, "amount"]), *(f"s,{values},{amount}" for amount in ("1", "-1", "-2", "-5", "3x"))]
    inbox.write("1.csv", "".join(f"{line}\n" for line in lines))
    inbox.run(declare(inbox, {"amount": "int", **columns, "shop": "string"}, transform=texts(), **declared))
    (_, two, _, raw) = by_line(inbox)
    steps.mend(inbox.settings, two, two["payload"].replace('"amount":-2', '"amount":2'))
    steps.mend(inbox.settings, raw, f"s,{values},3")
    how: dict[str, Any] = {"version": 2, "check": {"not far below": "amount >= -1"}}
    milder = declare(inbox, {"amount": "int", **columns}, transform=texts(), **declared, **how)
    replay(inbox, milder)
    shown = {f"v{number}": shown for number, (_, shown) in enumerate(EXACTLY.values())}
    found = [{name: value for name, value in row.items() if name != "position"} for row in inbox.rows(milder, "log")]
    assert sorted(found, key=lambda row: row["amount"]) == [{"amount": n, **shown} for n in (-1, 1, 2, 3)]
    renamed = {"amount": "int", "w0": columns["v0"], **{name: columns[name] for name in [*columns][1:]}}
    replay(inbox, declare(inbox, renamed, transform=texts("w0"), **declared, version=3, check={}))
    (left,) = steps.waiting(inbox.settings)
    assert left["reason"] == "it has no column w0, but v0, which the schema does not name"
