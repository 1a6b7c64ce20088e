"""A state larger than memory: batches of 100,000 random keys into 5 and into 200 million.

Each size has a database of its own, and batches go to both in turn, each after a vacuum and a checkpoint, so that every page
that a merge touches goes to the log as a whole: what a server does that has just written a checkpoint. First single batches,
step by step; then runs of several, whose batches are processed in parallel and merged together where they are ready together.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

from benchmarks.growth import Place
from benchmarks.harness import Bar, Bench, Figure, compared, timed
from benchmarks.pipelines import USERS
from benchmarks.project import stack_without_airflow
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import StateStore

BATCHES_PER_RUN = 8
WARM_UP_BATCHES = 4  # until a session has touched most of the shared memory


def run(bench: Bench) -> Iterator[Figure]:
    """Time batches and runs at both sizes; the larger needs 21 GB of disk, and the log 8 GB."""
    sizes, rows = bench.choose((5_000_000, 200_000_000), (20_000, 100_000)), bench.choose(100_000, 1_000)
    with stack_without_airflow(bench.folder / "project") as made, contextlib.ExitStack() as held:
        places = [Place.create(made, size) for size in sizes]
        for place in places:
            place.fill_ledger(1)
            with bench.timed(f"a state of {place.size:,} keys", []):
                place.fill_state(place.size)
            held.enter_context(StateStore.connect(place.settings))
        passes, warm_up = bench.choose(5, 1), bench.choose(WARM_UP_BATCHES, 0)
        for number in range(warm_up + passes):
            for place in places:
                place.arrive(place.size, rows)
                place.batch()
                bench.tell(f"{place.size:,} keys, batch {number + 1}: {place.runs()[-1]:.2f} s")
        runs: list[list[float]] = [[], []]
        for number in range(passes):
            for place, seconds in zip(places, runs, strict=True):
                place.arrive(place.size, rows, BATCHES_PER_RUN)
                # The filled ledger has a run 1.
                seconds.append(timed(partial(run_pipeline, place.settings, USERS, run_id=f"several, {number}")))
                bench.tell(f"{place.size:,} keys, run {number + 1}: {seconds[-1]:.2f} s")
        for place in places:
            place.check(place.size + rows * (warm_up + passes + passes * BATCHES_PER_RUN))
            place.spent = place.spent[warm_up:]
    small, large = places
    for parts in ((), ("process",), ("commit",)):
        what = f"{large.size:,} keys in the state, {' '.join(parts) or 'a single batch'} of {rows:,} keys"
        bar = None if parts else Bar(at_most=1.3)
        yield compared("large_state", what, large.runs(*parts), f"{small.size:,}", small.runs(*parts), bar=bar, is_speed=False)
    what = f"{large.size:,} keys in the state, a run of {BATCHES_PER_RUN} batches of {rows:,} keys"
    yield compared("large_state", what, runs[1], f"{small.size:,}", runs[0], bar=Bar(at_most=1.3), is_speed=False)
