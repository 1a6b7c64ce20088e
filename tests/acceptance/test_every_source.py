"""For every source: after deaths, the state equals a clean run's.

The oracle is computed from the source's rows. In one history, processes die around each COMMIT of every step, in turn;
`make soak` has a history for each statement as well.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests import steps
from tests.conftest import copied
from tests.crashes import Crash, EachPoint, FaultPlan
from tests.servers import Server
from tests.sources.feeds import FEEDS
from tidegate.jobs import Count, Pipeline, State, Sum
from tidegate.state_store import Settings, StateStore

# These go the ways of others: of opaque folders that are emptied, of several inputs, of lists in test_crashes.py.
ALIKE = ("Files", "Files with a done folder", "opaque Files", "Inputs", "FixedBatches")
EACH_SOURCE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in ALIKE else []) for name in FEEDS]
)
STEPS = (  # a history has a death in the transaction of each
    "INSERT INTO tidegate.batch",
    "INSERT INTO tidegate.attempt",
    "INSERT INTO tidegate.seal",
    "INSERT INTO state.per_name",
    "INSERT INTO tidegate.commit",  # which advances the cursor, too
)


def pipeline_over(feed: Any, **pipeline: Any) -> Pipeline:
    """Declare a pipeline that counts the feed's rows by name, with states of the source's kind."""
    kind = feed.source.kind
    state = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")}, kind=kind)
    return Pipeline(name="every", source=feed.source, states={"per_name": state}, retry_delay_seconds=0, **pipeline)


def oracle(rows: list[tuple]) -> dict[str, tuple[int, int]]:
    """Compute the state from the rows: name and amount are the last two values of each, or the first two for Kafka."""
    rows = [(row[0].decode(), int(row[1])) if isinstance(row[0], bytes) else row for row in rows]
    lines: Counter[str] = Counter()
    amounts: Counter[str] = Counter()
    for row in rows:
        lines[row[-2]] += 1
        amounts[row[-2]] += row[-1]
    return {name: (lines[name], amounts[name]) for name in lines}


def stored(settings: Settings, pipeline: Pipeline) -> dict[str, tuple[int, int]]:
    """Read the state from Postgres."""
    with StateStore.connect(settings) as store:
        return {row["name"]: (row["lines"], row["amount"]) for row in store.state_rows(pipeline.spec.states[0])}


def run_once(settings: Settings, pipeline: Pipeline, run_id: str) -> None:
    """Plan, process ahead, and commit all batches."""
    txids = steps.plan(settings, pipeline, run_id=run_id)
    for txid in txids:
        steps.process(settings, pipeline, txid, owner=run_id)
    for txid in txids:
        steps.commit(settings, pipeline, txid, owner=run_id)


def die_in_turn(settings: Settings, pipeline: Pipeline, feed: Any) -> None:
    """Let one process after another die, around each COMMIT; the same run goes on, or, after every second death, another."""
    deaths, rows = EachPoint(), feed.put(4)
    for crash in deaths.deaths(lambda: run_once(settings, pipeline, f"run {len(deaths.points) // 2}")):
        found, most = stored(settings, pipeline), oracle(rows)
        assert all(found[name] <= most[name] for name in found), crash
    assert stored(settings, pipeline) == oracle(rows), deaths.points
    for step in STEPS:
        assert any(step in point for point in deaths.points), f"no process died at {step}: {deaths.points}"


def die_everywhere(settings: Settings, server: Server, pipeline: Pipeline, feed: Any, *, stride: int = 1) -> None:
    """Let a run die before a statement or around a COMMIT, and the next ones repair it: from one database, for each."""
    rows = feed.put(2)
    run_once(settings, pipeline, "before")
    rows += feed.put(4)
    expected = oracle(rows)

    at, died = 1, 0
    while True:
        faults = FaultPlan(at)
        with copied(server, settings) as copy:
            try:
                with faults.armed():
                    run_once(copy, pipeline, "crashing")
            except Crash as crash:
                died += 1
                run_once(copy, pipeline, "crashing")  # Airflow tries the same run again ...
                run_once(copy, pipeline, "another")  # ... or a new run picks up the left-over batches
                assert stored(copy, pipeline) == expected, f"crashed at point {at}: {crash}"
            else:
                assert stored(copy, pipeline) == expected
                break
        at += stride
    assert died >= len(faults.points) // stride - 1 > 0


@pytest.mark.promise(
    "I1",
    "fault:process-dies-at-any-statement:processing",
    "fault:process-dies-at-any-statement:commit",
    "fault:process-dies-at-any-statement:after",
)
@EACH_SOURCE
def test_deaths_around_each_commit_leave_the_state_of_a_clean_run(
    settings: Settings, register: Callable[..., None], name: str
) -> None:
    """In turn, in one history: what is left over of each is taken up by the next."""
    feed = FEEDS[name](settings, 0)
    pipeline = pipeline_over(feed)
    register(pipeline)
    die_in_turn(settings, pipeline, feed)


# A folder that empties itself is not the same for the next crash.
@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in FEEDS if "done" not in name])
def test_a_crash_at_any_statement_leaves_the_state_of_a_clean_run(
    settings: Settings, server: Server, register: Callable[..., None], name: str
) -> None:
    """Runs die before statements and around COMMITs of plan, process and commit; the next run repairs it."""
    feed = FEEDS[name](settings, 0)
    pipeline = pipeline_over(feed)
    register(pipeline)
    die_everywhere(settings, server, pipeline, feed)
