"""Routes: the choice is a pure function, checked by a table, and every route agrees with plain Python."""

from dataclasses import replace
from typing import Any

import pytest

from tests import steps
from tests.sources.conftest import Inbox, inbox
from tidegate.jobs import Count, Files, FixedBatches, Pipeline, State, Sum
from tidegate.jobs.compute.shortcut_report import paths
from tidegate.jobs.compute.shortcuts import SAFE, UNSHARED_BYTES, UNSPLIT_BYTES, Route, choose
from tidegate.jobs.compute.stage.stage_partials import FEW_ROWS
from tidegate.jobs.sources import InputFacts
from tidegate.state_store.ledger.batches import QUARANTINED
from tidegate.state_store.seal.attempts import Attempt

__all__ = ["inbox"]  # a fixture

PER_NAME = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})
PLAIN = Pipeline(name="inbox", source=Files("inbox", schema={"name": "string", "amount": "int"}), states={"per_name": PER_NAME})
TRANSFORMED = replace(PLAIN, transform=lambda rows: rows)
ONE_FILE = InputFacts(files=1, bytes=1000, rows=10, is_verified=True)
PER = frozenset({"per_name"})
QUICKEST = Route(one_task=True, is_brief=True, hashed="used", follows_partials=10, in_process=PER)
FEW = {"per_name": FEW_ROWS}
MANY = {"per_name": FEW_ROWS + 1}

CHOICES: dict[str, tuple[Pipeline, InputFacts, dict[str, int], Route]] = {
    "nothing is known": (PLAIN, InputFacts(), {}, SAFE),
    "only earlier batches are known": (PLAIN, InputFacts(), FEW, replace(SAFE, in_process=PER)),
    "earlier batches had many": (PLAIN, InputFacts(), MANY, SAFE),
    "a small file": (PLAIN, ONE_FILE, {}, QUICKEST),
    "several small files": (PLAIN, replace(ONE_FILE, files=3), {}, QUICKEST),
    "a file with fewer rows than earlier ones": (PLAIN, ONE_FILE, MANY, QUICKEST),
    "a file of unknown rows": (
        PLAIN,
        replace(ONE_FILE, rows=None),
        {},
        Route(one_task=True, is_brief=True, hashed="used"),
    ),
    "a large file": (PLAIN, replace(ONE_FILE, bytes=UNSHARED_BYTES), {}, replace(QUICKEST, is_brief=False)),
    "a larger file": (PLAIN, replace(ONE_FILE, bytes=UNSHARED_BYTES + 1), {}, Route(hashed="used")),
    "several files that are not small": (
        PLAIN,
        replace(ONE_FILE, files=3, bytes=UNSPLIT_BYTES + 1),
        {},
        Route(hashed="used"),
    ),
    "many small files": (PLAIN, replace(ONE_FILE, files=66), {}, Route(hashed="used")),
    "a transform": (TRANSFORMED, ONE_FILE, {}, Route(one_task=True, is_brief=True, hashed="none", in_process=PER)),
    "a transform of a file that is not small": (
        TRANSFORMED,
        replace(ONE_FILE, bytes=UNSPLIT_BYTES + 1),
        {},
        Route(hashed="none"),
    ),
    "a transform without digests": (
        TRANSFORMED,
        replace(ONE_FILE, is_verified=False),
        {},
        Route(one_task=True, is_brief=True, in_process=PER),
    ),
    "no files": (PLAIN, InputFacts(0, 0, 0, is_verified=True), {}, Route(hashed="used")),
    "no digests": (
        PLAIN,
        replace(ONE_FILE, is_verified=False),
        {},
        Route(one_task=True, is_brief=True, in_process=PER),
    ),
    "no tracking": (
        replace(PLAIN, tracking="off"),
        ONE_FILE,
        {},
        Route(one_task=True, is_brief=True, in_process=PER),
    ),
    "bad records set aside": (
        replace(PLAIN, on_poison="quarantine"),
        ONE_FILE,
        {},
        replace(QUICKEST, follows_partials=None),
    ),
}


@pytest.mark.parametrize(
    ("pipeline", "ways"),
    [
        (
            PLAIN,
            [("one", 1, "used", "partials", 1)] + [("one", 1, "used", "partials", 0)] * 2 + [("many", 1, "used", "rows", 0)],
        ),
        (TRANSFORMED, [("one", 1, "none", "rows", 1), ("one", 1, "none", "rows", 0)] + [("many", 1, "none", "rows", 0)] * 2),
        (
            replace(TRANSFORMED, states={"per_name": PER_NAME, "again": PER_NAME}, on_poison="quarantine", tracking="off"),
            [("one", 3, "none", "nothing", 2), ("one", 3, "none", "nothing", 0)] + [("many", 3, "none", "nothing", 0)] * 2,
        ),
        (replace(PLAIN, source=FixedBatches([], {"name": "string", "amount": "int"})), [("many", 1, "all", "rows", 0)]),
    ],
    ids=["files", "a transform", "two states, bad records, no tracking", "a source that knows nothing in advance"],
)
def test_the_ways_of_batches_are_shown(pipeline: Pipeline, ways: list[Any]) -> None:
    """They are those that the route takes for batches of typical sizes."""
    found = [(path.tasks, path.reads, path.hashed, path.follows, len(path.in_process)) for path in paths(pipeline)]
    assert found == ways


@pytest.mark.promise("limit:FEW_ROWS")
@pytest.mark.parametrize(("pipeline", "facts", "rows_before", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_a_route_follows_from_the_known_facts(
    pipeline: Pipeline, facts: InputFacts, rows_before: dict[str, int], expected: Route
) -> None:
    """Nothing else decides: no setting is read, no file is touched."""
    assert choose(pipeline, Attempt("inbox", 1, 1, {"files": []}, rows_before=rows_before), facts) == expected


def test_records_from_quarantine_are_followed_one_by_one() -> None:
    """Their batch has no files whose digests could vouch for the rows."""
    attempt = Attempt("inbox", 2, 1, {QUARANTINED: 3, "source": None})
    assert choose(PLAIN, attempt, ONE_FILE).follows_partials is None


@pytest.mark.promise("performance:up-to-10-000-partials-are-copied", "performance:small-files-are-grouped-by-one-task")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("route", steps.ROUTINGS)
@pytest.mark.parametrize("how", ["as it is", "transformed", "checked", "several states"])
def test_every_route_agrees_with_plain_python(inbox: Inbox, route: str, how: str) -> None:
    """For files with one row and with many, batches of one file and of several, and an empty file."""
    inbox.routing = steps.ROUTINGS[route]
    files = [[("a", 1)], [], [(f"n{number % 7}", number) for number in range(100)], [("a", 5), ("b", -5)]]
    for number, rows in enumerate(files):
        inbox.write(f"{number}.csv", "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows))
    source = Files("inbox", format="csv", schema={"name": "string", "amount": "int"}, max_files=2)
    more: dict[str, Any] = {
        "transformed": {"transform": lambda rows: rows.where("amount <> 0")},
        "checked": {"check": {"a name": "name <> ''"}},
        "several states": {"states": {"per_name": PER_NAME, "overall": State(aggregates={"amount": Sum("amount")})}},
    }.get(how, {})
    pipeline = inbox.declare(source, **more)

    assert inbox.run(pipeline) == [1, 2]

    expected: dict[str, list[int]] = {}
    for name, amount in (row for rows in files for row in rows):
        if how != "transformed" or amount:
            counted = expected.setdefault(name, [0, 0])
            counted[0] += 1
            counted[1] += amount
    assert {row["name"]: [row["lines"], row["amount"]] for row in inbox.rows(pipeline)} == expected
    if how == "several states":
        assert inbox.rows(pipeline, "overall") == [{"amount": sum(amount for rows in files for _, amount in rows)}]
