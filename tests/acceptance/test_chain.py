"""Two pipelines in a chain, both dying at random points: the second sees each change of the first once, in txid order.

One history of crashes is played; many if ``SOAK`` is set, as `make soak` does.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.conftest import run_once
from tests.crashes import Crash, FaultPlan
from tidegate.jobs import Changes, Count, FixedBatches, Pipeline, Rows, State, Sum
from tidegate.state_store import Settings, StateStore

HISTORIES = 40 if os.environ.get("SOAK") else 1
BATCHES = [
    [("a", 1), ("b", 2)],
    [],
    [("c", 4), ("a", -4), ("b", 0)],
    [("a", 6), ("b", 7), ("c", 8), ("d", 9)],
]
# More points than one batch passes, so that some runs die late or not at all.
MOST_POINTS = 250

FIRST = Pipeline(
    "first",
    FixedBatches(BATCHES, {"name": "string", "amount": "bigint"}),
    {"per_name": State({"name": "text"}, {"amount": Sum("amount")}, kind="opaque", changes=True)},
)
SECOND = Pipeline(
    "second",
    Changes("first.per_name", max_txids=2),
    {
        "seen": Rows({"txid_seen": "bigint", "name": "text", "amount": "bigint", "before": "bigint"}),
        "gained": State({"name": "text"}, {"changes": Count(), "amount": Sum("more")}),
    },
    transform=lambda rows: rows.selectExpr(
        "txid AS txid_seen",
        "name",
        "amount",
        "previous_amount AS before",
        "amount - coalesce(previous_amount, 0) AS more",
    ),
)


def expected() -> tuple[list[tuple[Any, ...]], dict[str, tuple[int, int]]]:
    """Compute in plain Python what the second pipeline sees, and what it makes of it."""
    amounts: dict[str, int] = {}
    seen: list[tuple[Any, ...]] = []
    changes: dict[str, int] = {}
    for txid, batch in enumerate(BATCHES, start=1):
        for name, amount in sorted(batch):
            before = amounts.get(name)
            amounts[name] = (before or 0) + amount
            changes[name] = changes.get(name, 0) + 1
            seen.append((txid, name, amounts[name], before))
    return seen, {name: (changes[name], amounts[name]) for name in amounts}


def stored(settings: Settings) -> tuple[list[tuple[Any, ...]], dict[str, tuple[int, int]]]:
    """Read the second pipeline's states: what it saw in the order of its own txids."""
    seen, gained = SECOND.spec.states
    with StateStore.connect(settings) as store:
        rows = sorted(store.state_rows(seen), key=lambda row: (row["txid"], row["txid_seen"], row["name"]))
        per_name = {row["name"]: (row["changes"], row["amount"]) for row in store.state_rows(gained)}
    return [(row["txid_seen"], row["name"], row["amount"], row["before"]) for row in rows], per_name


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_both_pipelines_die_at_any_point(settings: Settings, register: Callable[..., None], seed: int) -> None:
    """In turns, as they come: runs of either die, or not; then each is run once more."""
    register(FIRST, SECOND)
    history, died = random.Random(seed), 0
    for number in range(8):
        pipeline = history.choice([FIRST, SECOND])
        try:
            with FaultPlan(history.randrange(1, MOST_POINTS)).armed():
                run_once(settings, f"run {number}", pipeline)
        except Crash:
            died += 1
    for pipeline in (FIRST, SECOND):
        run_once(settings, "the last", pipeline)
    assert stored(settings) == expected()
    assert died > 0
