"""For every source: after crashes, failed attempts, changed replays and racing planners, the state equals a clean run's.

The oracle is computed from the source's rows. The process dies at some of its points, at all of them if ``SOAK`` is set, as
`make soak` does.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest
from pyspark.sql import DataFrame

from tests import steps
from tests.conftest import Server, copied
from tests.crashes import Crash, FaultPlan
from tests.sources.feeds import FEEDS, TableFeed
from tidegate.jobs import Count, Pipeline, State, Sum
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import RowsLost, SourceChanged
from tidegate.state_store.seal.attempts import Attempt

STRIDE = 1 if os.environ.get("SOAK") else 50
# A folder that empties itself is not the same for the next crash.
NAMES = [name for name in FEEDS if "done" not in name]


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


def run_once(settings: Settings, pipeline: Pipeline, run_id: str) -> list[int]:
    """Plan, process and commit all batches, one step after another."""
    txids = steps.plan(settings, pipeline, run_id=run_id)
    for txid in txids:
        steps.process(settings, pipeline, txid, owner=run_id)
        steps.commit(settings, pipeline, txid, owner=run_id)
    return txids


def die_everywhere(settings: Settings, server: Server, pipeline: Pipeline, feed: Any, *, first_point: int) -> None:
    """Let runs die before statements and around COMMITs, from this point on; each time the next runs repair it."""
    rows = feed.put(2)
    run_once(settings, pipeline, "before")
    rows += feed.put(4)
    expected = oracle(rows)

    at, died = first_point, 0
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
        at += STRIDE
    assert died >= len(faults.points) // STRIDE - 1 > 0


def race(settings: Settings, pipeline: Pipeline) -> None:
    """Let two runs plan, process and commit at the same moment."""
    together = threading.Barrier(2)
    failures: list[BaseException] = []

    def run(run_id: str) -> None:
        together.wait()
        try:
            run_pipeline(settings, pipeline, run_id=run_id)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(run_id,)) for run_id in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.fixture(autouse=True)
def _readable_statistics(server: Server) -> Iterator[None]:
    """Let the stager see when open transactions began, which reading by time needs."""
    with server.shows_transactions_to("tidegate_stager"):
        yield


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
def test_a_crash_anywhere_leaves_the_state_of_a_clean_run(
    settings: Settings, server: Server, register: Callable[..., None], name: str
) -> None:
    """Runs die before statements and around COMMITs of plan, process and commit; the next run repairs it."""
    feed = FEEDS[name](settings, 0)
    pipeline = pipeline_over(feed)
    register(pipeline)
    die_everywhere(settings, server, pipeline, feed, first_point=1 + NAMES.index(name) % STRIDE)


class Flaky:
    """Fails in one phase, then works: once, but in the commit twice, in the joint commit and in the batch's own."""

    def __init__(self, phase: str) -> None:
        self.phase: str | None = phase
        self._times = 2 if phase == "commit" else 1

    def fail(self, phase: str) -> None:
        """Fail if this is the place."""
        if self.phase == phase:
            self._times -= 1
            self.phase = phase if self._times else None
            raise RowsLost(f"a failure in {phase}")


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Flaky]:
    """A temporary fault in one step of the real engine."""
    fault = Flaky(request.param)
    for phase, place, method in (
        ("plan", StateStore, "open_batches"),
        ("seal", StateStore, "seal"),
        ("commit", StateStore, "commit_ready"),
        ("commit", StateStore, "commit_batch"),
    ):
        real = getattr(place, method)

        def failing(*arguments: Any, _phase: str = phase, _real: Any = real, **options: Any) -> Any:
            of = arguments[1]  # the spec, or the attempt
            if (of.pipeline if isinstance(of, Attempt) else of.name) == "every":  # a feed may be a pipeline, too
                fault.fail(_phase)
            return _real(*arguments, **options)

        monkeypatch.setattr(place, method, failing)
    return fault


@pytest.mark.sampled(14)
@pytest.mark.parametrize("flaky", ["plan", "transform", "seal", "commit"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_a_failed_attempt_in_any_phase_changes_nothing(
    settings: Settings, register: Callable[..., None], name: str, flaky: Flaky
) -> None:
    """The batch is tried again, from the saved metadata or with a new cut, and every row counts once."""
    feed = FEEDS[name](settings, 0)

    def transform(rows: Any) -> Any:
        flaky.fail("transform")
        return reduce(DataFrame.unionByName, rows.values()) if isinstance(rows, dict) else rows

    pipeline = pipeline_over(feed, transform=transform, window=2)
    register(pipeline)
    rows = feed.put(4)
    if flaky.phase == "plan":
        with pytest.raises(RowsLost):
            run_pipeline(settings, pipeline, run_id="first")
    run_pipeline(settings, pipeline, run_id="first")
    rows += feed.put(2)
    run_pipeline(settings, pipeline, run_id="second")
    assert flaky.phase is None, "the fault did not happen"
    assert stored(settings, pipeline) == oracle(rows)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_planners_at_the_same_moment_plan_each_row_once(settings: Settings, register: Callable[..., None], name: str) -> None:
    """Two runs read the same source; a batch that both process counts once."""
    feed = FEEDS[name](settings, 0)
    pipeline = pipeline_over(feed)
    register(pipeline)
    rows = feed.put(6)
    race(settings, pipeline)
    assert stored(settings, pipeline) == oracle(rows)


def test_a_row_that_was_updated_before_the_replay_is_found_by_the_acker(
    settings: Settings, register: Callable[..., None]
) -> None:
    """The range has the same number of rows; only their hashes differ (I11)."""
    feed = TableFeed(settings, by_time=False)
    pipeline = pipeline_over(feed)
    register(pipeline)
    feed.put(2)
    steps.plan(settings, pipeline, run_id="run")
    steps.process(settings, pipeline, 1, owner="first")
    feed.change()
    with pytest.raises(SourceChanged, match="replays the identical rows"):
        steps.process(settings, pipeline, 1, owner="second", mode="restage")
