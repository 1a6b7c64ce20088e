"""The memory of a stack with a hundred declared pipelines, ten of which run at once: bounded by what runs."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil

from benchmarks.harness import Bar, Bench, Figure
from benchmarks.orchestration import write_small
from benchmarks.pipelines import PIPELINES
from benchmarks.project import Project, project
from state_store.settings import STACK_FOLDER
from tidegate.stack.component import RunFolder

NAME = "many"
MAX_GIGABYTES = 12
IDLE_SECONDS = 240  # after a while, Spark's Python processes of idle pipelines end


def run(bench: Bench) -> Iterator[Figure]:
    """Declare pipelines, run a tenth of them at once through Airflow; sum up the stack's memory before, meanwhile, after."""
    declared, busy, txids = bench.choose(100, 4), bench.choose(10, 2), bench.choose(20, 2)
    names = [name for name in PIPELINES if name.startswith("many_")][:declared]
    with project(bench.folder / "project", names) as made:
        watch = _Watch(made)
        yield _figure(f"memory of {declared} declared pipelines, none of which has run", watch.now())
        started = time.perf_counter()
        with watch.peak(), ThreadPoolExecutor(busy) as pool:
            for name in names[:busy]:
                write_small(made.home / "data" / name, 0, txids)
            runs = [pool.submit(made.dag_run, name, {}, committed=txids) for name in names[:busy]]
            for each in runs:
                each.result()
        seconds = time.perf_counter() - started
        bench.tell(f"{busy} of {declared} pipelines, {txids} txids each: {seconds:.0f} s, {watch.most / 1e9:.2f} GB at most")
        yield _figure(
            f"memory while {busy} of {declared} declared pipelines commit {txids} txids each",
            watch.most,
            bar=Bar(at_most=MAX_GIGABYTES),
        )
        time.sleep(bench.choose(IDLE_SECONDS, 1))
        yield _figure(f"memory {bench.choose(IDLE_SECONDS, 1)} s after that", watch.now())


def _figure(what: str, size: int, bar: Bar | None = None) -> Figure:
    return Figure(NAME, what, size / 1e9, "GB", size / 1e9, bar=bar)


class _Watch:
    """Sums up the memory of all processes of a stack; what processes share counts once."""

    def __init__(self, made: Project) -> None:
        self._run = RunFolder(made.home / STACK_FOLDER)
        self.most = 0

    def now(self) -> int:
        """Return the bytes of all processes: each page divided by the number of processes that have it."""
        total = 0
        found = [identity.process() for name in self._run.names() if (identity := self._run.read(name))]
        for root in (process for process in found if process):
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        total += process.memory_full_info().pss
        return total

    @contextlib.contextmanager
    def peak(self) -> Iterator[None]:
        """Keep the largest sum of the block in `most`."""
        done = threading.Event()

        def look() -> None:
            while not done.wait(2):
                self.most = max(self.most, self.now())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
