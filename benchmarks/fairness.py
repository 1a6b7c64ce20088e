"""One pipeline's backlog beside single files of another: how much longer those take, and how fast the backlog goes."""

import contextlib
import time
from collections.abc import Iterator

from benchmarks.harness import Bar, Bench, Figure, compared
from benchmarks.orchestration import write_small
from benchmarks.project import Project, project
from tidegate.airflow_client import AirflowClient
from tidegate.state_store import StateStore
from tidegate.state_store.base.project import STACK_FOLDER

NAME = "fairness"
BACKLOG, OTHER = "small", "many_000"
FALSE_DEATH = "SchedulerJob instances as failed"


def run(bench: Bench) -> Iterator[Figure]:
    """Trigger a Dag with one new file, alone, then while another pipeline works off thousands of files."""
    files, times = bench.choose(10_000, 20), bench.choose(5, 2)
    with project(bench.folder / "project", [BACKLOG, OTHER]) as made:
        _, *alone = [_one_file(made, number) for number in range(times + 1)]
        bench.tell(f"one file alone: {', '.join(f'{seconds:.1f}' for seconds in alone)} s")
        write_small(made.home / "data" / BACKLOG, 0, files)
        started = time.perf_counter()
        with contextlib.closing(AirflowClient(made.settings)) as airflow:
            airflow.trigger(BACKLOG, {})
        beside: list[float] = []
        with contextlib.closing(StateStore.connect(made.settings)) as store:
            for number in range(times):
                _wait_for(store, files * (number + 1) // (times + 2))
                beside.append(_one_file(made, times + 1 + number))
                done, passed = store.committed(BACKLOG), time.perf_counter() - started
                bench.tell(f"one file beside the backlog: {beside[-1]:.1f} s; {done} txids in {passed:.0f} s")
            _wait_for(store, files)
        seconds = time.perf_counter() - started
        log = (made.home / STACK_FOLDER / "logs" / "airflow-scheduler.log").read_text(errors="replace")
    yield compared(NAME, "one file beside a backlog", beside, "alone", alone, bar=Bar(at_most=2.0), is_speed=False)
    yield Figure(
        NAME, f"a backlog of {files} files, per second", files / seconds, "txids/s", files / seconds, bar=Bar(at_least=3)
    )
    deaths = log.count(FALSE_DEATH)
    yield Figure(NAME, "schedulers taken for dead", deaths, "", deaths, bar=Bar(at_most=0))


def _one_file(made: Project, number: int) -> float:
    write_small(made.home / "data" / OTHER, number, number + 1)
    return made.dag_run(OTHER, {}, committed=number + 1).to_end


def _wait_for(store: StateStore, txid: int) -> None:
    while store.committed(BACKLOG) < txid:
        time.sleep(0.2)
