"""For every source: after deaths, the state equals a clean run's.

The oracle is computed from the source's rows. In one history, processes die around each COMMIT of every step, in turn;
in `make soak` before each statement, too.
"""

from collections.abc import Callable

import pytest

from tests import steps
from tests.crashes import EachPoint
from tests.sources.feeds import FEEDS
from tests.sources.in_process import summed
from tidegate.jobs import Count, Pipeline, State, Sum
from tidegate.state_store import Settings

# The others go the ways of these, and die at full size: without acks, without choosing again, of lists in test_crashes.py.
USUAL = ("opaque Files with a done folder", "opaque Inputs", "Changes", "PostgresTable by key")
STEPS = (  # a history has a death in the transaction of each
    "INSERT INTO tidegate.batch",
    "INSERT INTO tidegate.attempt",
    "INSERT INTO tidegate.seal",
    "INSERT INTO state.per_name",
    "INSERT INTO tidegate.commit",  # which advances the cursor, too
)


def run_once(settings: Settings, pipeline: Pipeline, run_id: str) -> None:
    """Plan, process ahead, and commit all batches."""
    txids = steps.plan(settings, pipeline, run_id=run_id)
    for txid in txids:
        steps.process(settings, pipeline, txid, owner=run_id)
    for txid in txids:
        steps.commit(settings, pipeline, txid, owner=run_id)


@pytest.mark.promise("I1", "fault:process-dies-at-any-statement:processing")
@pytest.mark.promise("fault:process-dies-at-any-statement:commit", "fault:process-dies-at-any-statement:after")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.soak) for name in FEEDS])
def test_deaths_around_commits_leave_a_clean_runs_state(settings: Settings, register: Callable[..., None], name: str) -> None:
    """In turn, in one history: the same run goes on or, after every second death, another takes up what is left over."""
    feed = FEEDS[name](settings, 0)
    state = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")}, kind=feed.source.kind)
    pipeline = Pipeline("every", feed.source, {"per_name": state}, retry_delay_seconds=0)
    register(pipeline)
    deaths, expected = EachPoint(), summed(feed.put(4))
    for crash in deaths.deaths(lambda: run_once(settings, pipeline, f"run {len(deaths.points) // 2}")):
        assert all(found <= expected[each] for each, found in steps.counts(settings, pipeline).items()), crash
    assert steps.counts(settings, pipeline) == expected, deaths.points
    for step in STEPS:
        assert any(step in point for point in deaths.points), f"no process died at {step}: {deaths.points}"
