"""A pipeline that reads its own state: after crashes at its statements, it equals a clean run, and plain Python.

In one history the process dies around each COMMIT, in turn; in `make soak` before each statement, too.
"""

from collections.abc import Callable
from typing import Any

from tests.acceptance.conftest import run_once
from tests.crashes import EachPoint
from tidegate.jobs import Count, FixedBatches, Pipeline, Rows, State, StateQuery, Sum, state_query
from tidegate.state_store import Settings, StateStore

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


def test_deaths_around_each_commit_leave_what_a_clean_run_does(settings: Settings, register: Callable[..., None]) -> None:
    """What is left over of each is taken up by the next; none reads its state at another txid than the last committed."""
    register(PIPELINE)
    deaths = EachPoint()
    for _ in deaths.deaths(lambda: run_once(settings, f"run {len(deaths.points) // 2}", PIPELINE)):
        pass
    assert stored(settings) == expected(), deaths.points
    assert any("INSERT INTO state.log" in point for point in deaths.points)
