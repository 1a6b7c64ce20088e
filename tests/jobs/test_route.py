"""Routes: the choice is a pure function, checked by a table, and every route agrees with plain Python."""

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from tests import steps
from tests.jobs.conftest import Tables
from tests.sources.conftest import PER_NAME
from tests.store import Attempt
from tidegate.jobs import Count, Files, Max, Min, Pipeline, Rows, State, Sum
from tidegate.jobs.compute.shortcuts import SAFE, UNSHARED_BYTES, UNSPLIT_BYTES, Route, choose
from tidegate.jobs.compute.stage.stage_partials import FEW_ROWS
from tidegate.jobs.sources import InputFacts

PLAIN = Pipeline(name="inbox", source=Files("inbox", schema={"name": "string", "amount": "int"}), states={"per_name": PER_NAME})
TRANSFORMED = replace(PLAIN, transform=lambda rows: rows)
ONE_FILE = InputFacts(files=1, bytes=1000, rows=10, is_verified=True)
UNVERIFIED = replace(ONE_FILE, is_verified=False)
PER = frozenset({"per_name"})
USED = Route(hashed="used")
ONE_TASK = Route(one_task=True, is_brief=True, in_process=PER)
QUICKEST = replace(ONE_TASK, hashed="used", follows_partials=10)
FEW, MANY = {"per_name": FEW_ROWS}, {"per_name": FEW_ROWS + 1}

CHOICES: dict[str, tuple[Pipeline, InputFacts, dict[str, int], Route]] = {
    "nothing is known": (PLAIN, InputFacts(), {}, SAFE),
    "only earlier batches are known": (PLAIN, InputFacts(), FEW, replace(SAFE, in_process=PER)),
    "earlier batches had many": (PLAIN, InputFacts(), MANY, SAFE),
    "a small file": (PLAIN, ONE_FILE, {}, QUICKEST),
    "several small files": (PLAIN, replace(ONE_FILE, files=3), {}, QUICKEST),
    "a file with fewer rows than earlier ones": (PLAIN, ONE_FILE, MANY, QUICKEST),
    "a file of unknown rows": (PLAIN, replace(ONE_FILE, rows=None), {}, Route(one_task=True, is_brief=True, hashed="used")),
    "a large file": (PLAIN, replace(ONE_FILE, bytes=UNSHARED_BYTES), {}, replace(QUICKEST, is_brief=False)),
    "a larger file": (PLAIN, replace(ONE_FILE, bytes=UNSHARED_BYTES + 1), {}, USED),
    "several files that are not small": (PLAIN, replace(ONE_FILE, files=3, bytes=UNSPLIT_BYTES + 1), {}, USED),
    "many small files": (PLAIN, replace(ONE_FILE, files=66), {}, USED),
    "a transform": (TRANSFORMED, ONE_FILE, {}, replace(ONE_TASK, hashed="none")),
    "a transform of a larger file": (TRANSFORMED, replace(ONE_FILE, bytes=UNSPLIT_BYTES + 1), {}, Route(hashed="none")),
    "a transform without digests": (TRANSFORMED, UNVERIFIED, {}, ONE_TASK),
    "no files": (PLAIN, InputFacts(0, 0, 0, is_verified=True), {}, USED),
    "no digests": (PLAIN, UNVERIFIED, {}, ONE_TASK),
    "no tracking": (replace(PLAIN, tracking="off"), ONE_FILE, {}, ONE_TASK),
    "bad records set aside": (replace(PLAIN, on_poison="quarantine"), ONE_FILE, {}, replace(QUICKEST, follows_partials=None)),
}


@pytest.mark.promise("limit:FEW_ROWS")
def test_a_route_follows_from_the_known_facts() -> None:
    for name, (pipeline, facts, rows_before, expected) in CHOICES.items():
        assert choose(pipeline, Attempt("inbox", 1, 1, {"files": []}, rows_before=rows_before), facts) == expected, name


# Text is data and compares by bytes: no two of these become one key.
NASTY = [
    *("", " ", "a", "a ", "A", "\u0131", "I", "i", "\u0130", "é", "e\u0301", "\U0001f30a", "NULL", "null", "\\N", "\\."),
    *("a\nb", "a\r\nb", "tab\t", "'\";--", '"', '""', ",", "{}", "%s", "\x7f", "\ufeff", "x" * 2000, "\uffee", None),
]
NOISE = random.Random(1)
TIMES = (datetime.min, datetime(2013, 6, 1, 12, 30, 15, 123456), datetime.max)
KINDS: dict[str, tuple[str, str, list[Any]]] = {  # of each column: in the file, in the state, and its values
    "text": ("string", "text", [*NASTY, "".join(chr(NOISE.randrange(0x21, 0x7F)) for _ in range(2000))]),
    "instant": ("timestamp", "timestamptz", [*(time.replace(tzinfo=UTC) for time in TIMES), None]),
    "user": ("date", "date", [date(1, 1, 1), date(2012, 2, 29), date(9999, 12, 31), None]),
    "known": ("boolean", "boolean", [True, False, None]),
    "a.b": ("bigint", "bigint", [0, -1, 2**40, None]),
    "c`d": ("decimal(10,2)", "numeric(10,2)", [Decimal("-0.01"), Decimal("99999999.99"), None]),
}
COLUMNS = [*KINDS]
SCHEMA = {name: kind for name, (kind, *_) in KINDS.items()}
BOTH = {f"{of.__name__.lower()}_{number}": of(name, KINDS[name][1]) for number, name in enumerate(COLUMNS) for of in (Min, Max)}
NAMED = {"order": Count(), "select": Sum("a.b"), "not_null": Count("a.b")}
RICH: dict[str, Any] = {
    "per_text": State({"text": "text"}, {"lines": Count(), "total": Sum("c`d", "numeric(38,2)")}, null_keys=True),
    "table": State({"user": "date", "known": "boolean"}, {**NAMED, **BOTH}, null_keys=True),
    "overall": State(aggregates={"all": Sum("a.b")}),
    "log": Rows({"text": "text", "known": "boolean"}),
}
HOWS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "transformed": {"transform": lambda rows: rows.where("text IS NULL OR text <> 'dropped'")},
    "checked": {"check": {"kept": "coalesce(text, '') <> 'dropped'"}, "on_poison": "quarantine"},
}
# Each route, and each way to declare.
WAYS = [("chosen", "as it is"), ("safe", "transformed"), ("on executors", "checked"), ("shuffled", "transformed")]


def rows_of(dice: random.Random, text: list[Any]) -> list[dict[str, Any]]:
    return [{"text": each} | {name: dice.choice(KINDS[name][2]) for name in COLUMNS[1:]} for each in text]


def expected(rows: list[dict[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    def grouped(*key: str) -> Iterator[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
        for own in {tuple(row[name] for name in key) for row in rows}:
            yield own, [row for row in rows if tuple(row[name] for name in key) == own]

    def column(of: list[dict[str, Any]], name: str) -> list[Any]:
        """Return the known values in the order of Postgres: texts by their bytes."""
        known = [row[name] for row in of if row[name] is not None]
        return sorted(known, key=lambda value: value.encode() if isinstance(value, str) else value)

    found: dict[str, list[tuple[Any, ...]]] = {
        "per_text": [(*key, len(of), sum(column(of, "c`d"), Decimal(0))) for key, of in grouped("text")],
        "table": [
            (
                *(*key, len(of), sum(column(of, "a.b")), len(column(of, "a.b"))),
                *(each for name in COLUMNS for each in ((column(of, name) or [None])[end] for end in (0, -1))),
            )
            for key, of in grouped("user", "known")
        ],
        "overall": [(sum(column(rows, "a.b")),)],
        "log": [(row["text"], row["known"]) for row in rows],
    }
    return {name: sorted(of, key=repr) for name, of in found.items()}


@pytest.mark.promise("performance:up-to-10-000-partials-are-copied", "performance:small-files-are-grouped-by-one-task")
@pytest.mark.promise("performance:rows-are-appended-by-plain-insert-in")
def test_every_route_agrees_with_plain_python(tables: Tables) -> None:
    """Batch after batch by another route, as they are, transformed and checked: every type as key and as value, any name."""
    dice = random.Random(3)
    pipeline = tables.declare(Files("inbox", schema=SCHEMA, max_files=2), states=RICH)
    kept: list[dict[str, Any]] = []
    for number, (route, how) in enumerate(WAYS, start=1):
        first, second = rows_of(dice, KINDS["text"][2]), rows_of(dice, dice.choices(NASTY[:6], k=20))
        dropped = [] if how == "as it is" else rows_of(dice, ["dropped"] * 3)
        second = [] if number == 1 else second
        tables.put_rows(SCHEMA, first + dropped, second)
        kept += first + second
        each = replace(pipeline, **HOWS[how])
        tables.run(each, f"run {number}", routing=steps.ROUTINGS[route])
        found = {
            name: sorted((tuple(v for n, v in row.items() if n != "position") for row in tables.rows(each, name)), key=repr)
            for name in RICH
        }
        assert found == expected(kept), (route, how)
    assert len(steps.waiting(tables.settings)) == 3
