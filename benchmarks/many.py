"""The memory of a stack with a hundred declared pipelines, ten of which run at once: bounded by what runs."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness import Bar, Bench, Figure
from benchmarks.orchestration import write_small
from benchmarks.pipelines import MANY
from benchmarks.project import project, repeated

NAME = "many"
MAX_GIGABYTES = 12
SECONDS_BETWEEN_SAMPLES = 2
IDLE_SECONDS = 240  # after a while, Spark's Python processes of idle pipelines end


def run(bench: Bench) -> Iterator[Figure]:
    """Declare pipelines, run a tenth of them at once through Airflow; sum up the stack's memory before, meanwhile, after."""
    declared, busy, txids = bench.choose(100, 4), bench.choose(10, 2), bench.choose(20, 2)
    names = [pipeline.name for pipeline in MANY][:declared]
    with project(bench.folder / "project", names) as made:
        yield _figure(f"memory of {declared} declared pipelines, none of which has run", made.memory())
        samples: list[int] = []
        started = time.perf_counter()
        with repeated(lambda: samples.append(made.memory()), SECONDS_BETWEEN_SAMPLES), ThreadPoolExecutor(busy) as pool:
            for name in names[:busy]:
                write_small(made.home / "data" / name, 0, txids)
            runs = [pool.submit(made.dag_run, name, {}, committed=txids) for name in names[:busy]]
            for each in runs:
                each.result()
        seconds = time.perf_counter() - started
        bench.tell(f"{busy} of {declared} pipelines, {txids} txids each: {seconds:.0f} s, {max(samples) / 1e9:.2f} GB at most")
        yield _figure(
            f"memory while {busy} of {declared} declared pipelines commit {txids} txids each",
            max(samples),
            bar=Bar(at_most=MAX_GIGABYTES),
        )
        time.sleep(bench.choose(IDLE_SECONDS, 1))
        yield _figure(f"memory {bench.choose(IDLE_SECONDS, 1)} s after that", made.memory())


def _figure(what: str, size: int, bar: Bar | None = None) -> Figure:
    return Figure(NAME, what, size / 1e9, "GB", size / 1e9, bar=bar)
