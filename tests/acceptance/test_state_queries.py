"""A pipeline that reads its own state: after crashes at its statements, it equals a clean run, and plain Python.

The process dies at some of its points, at all of them if ``SOAK`` is set, as `make soak` does.
"""

import os
from collections.abc import Callable
from typing import Any

from tests.acceptance.conftest import run_once
from tests.conftest import Server, copied
from tests.crashes import Crash, FaultPlan
from tidegate.jobs import Count, FixedBatches, Pipeline, Rows, State, StateQuery, Sum, state_query
from tidegate.state_store import Settings, StateStore

STRIDE = 1 if os.environ.get("SOAK") else 60
BATCHES = [[("a", 1), ("b", 2)], [("a", 3), ("a", 4), ("c", 5)], [("b", 6), ("c", 7)]]


def gains(rows: Any) -> Any:
    """Compare each amount with the sum of all before its batch: a value that is read twice, or too late, changes all later."""
    found = state_query(rows, "gains.per_name", on=["name"], columns={"amount": "before"})
    return found.selectExpr("name", "amount + 2 * coalesce(before, 0) AS amount", "before")


PIPELINE = Pipeline(
    "gains",
    FixedBatches(BATCHES, {"name": "string", "amount": "bigint"}),
    {
        "per_name": State({"name": "text"}, {"lines": Count(), "amount": Sum("amount")}, kind="opaque"),
        "log": Rows({"name": "text", "amount": "bigint", "before": "bigint"}),
    },
    transform=gains,
    queries=[StateQuery("gains.per_name")],
)


def expected() -> tuple[dict[str, int], list[tuple[Any, ...]]]:
    """Compute both states in plain Python."""
    amounts: dict[str, int] = {}
    log: list[tuple[Any, ...]] = []
    for txid, batch in enumerate(BATCHES, start=1):
        before = dict(amounts)
        for name, amount in batch:
            gained = amount + 2 * before.get(name, 0)
            log.append((txid, name, gained, before.get(name)))
            amounts[name] = amounts.get(name, 0) + gained
    return amounts, sorted(log)


def stored(settings: Settings) -> tuple[dict[str, int], list[tuple[Any, ...]]]:
    """Read both states from Postgres."""
    per_name, log = PIPELINE.spec.states
    with StateStore.connect(settings) as store:
        amounts = {row["name"]: row["amount"] for row in store.state_rows(per_name)}
        rows = [tuple(row[name] for name in ("txid", "name", "amount", "before")) for row in store.state_rows(log)]
    return amounts, sorted(rows)


def test_a_crash_anywhere_leaves_what_a_clean_run_does(
    settings: Settings, server: Server, register: Callable[..., None]
) -> None:
    """Each run dies at another point of plan, process and commit; the next ones repair it."""
    register(PIPELINE)
    at, died = 45 % STRIDE or 1, 0
    while True:
        faults = FaultPlan(at)
        with copied(server, settings) as copy:
            try:
                with faults.armed():
                    run_once(copy, "crashing", PIPELINE)
            except Crash as crash:
                died += 1
                run_once(copy, "crashing", PIPELINE)  # Airflow tries the same run again ...
                run_once(copy, "another", PIPELINE)  # ... or a new run picks up the left-over batches
                assert stored(copy) == expected(), f"crashed at point {at}: {crash}"
            else:
                assert stored(copy) == expected()
                break
        at += STRIDE
    assert died >= len(faults.points) // STRIDE - 1 > 0
    assert any("has_table_privilege" in point for point in faults.points)
