"""Bars 1 and 2: the same events aggregated by few keys and by many, beside Structured Streaming."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks import events
from benchmarks.harness import Bar, Bench, Figure, compared, timed
from benchmarks.peer import Peer, create_target
from benchmarks.pipelines import PAGES, USERS
from benchmarks.project import Project, project
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import StateStore

STREAMING = "Structured Streaming"


def run(bench: Bench) -> Iterator[Figure]:
    """Time 20 million events in ten files, from trigger to last commit: 1,000 and 864,000 keys per batch."""
    files, rows, passes = bench.choose(10, 3), bench.choose(2_000_000, 100_000), bench.passes
    raw = bench.folder / "raw"
    events.write_events(raw, files, rows)
    size = f"{files} files of {rows:,} events"
    home = bench.folder / "project"
    with project(home, ["pages", "users"]) as made, Peer(made.settings, bench.folder) as peer:
        trial = _Trial(bench, made, peer, sorted(raw.iterdir()))
        # The JVMs go on compiling for several passes. With few keys a pass takes seconds, so more of them cost little.
        for pipeline, key, kind, engine_bar, airflow_bar, times in (
            (PAGES, "page", 'text COLLATE "C"', 1.5, 1.0, bench.choose(3, 1)),
            (USERS, "user_id", "bigint", 2.5, 2.5, bench.choose(2, 1)),
        ):
            with contextlib.closing(made.administrator()) as connection:
                create_target(connection, f"peer_{pipeline.name}", key, kind)
            trial.warm_up(pipeline, key, 2 * times)
            streaming, engine, airflow = trial.passes(pipeline, key, passes * times)
            what = f"{size} by {key}"
            yield compared("cardinality", f"{what}, tidegate run", engine, STREAMING, streaming, bar=Bar(at_least=engine_bar))
            yield compared(
                "cardinality", f"{what}, through Airflow", airflow, STREAMING, streaming, bar=Bar(at_least=airflow_bar)
            )


class _Trial:
    """Runs peer, engine and Airflow alternately over the same files."""

    def __init__(self, bench: Bench, made: Project, peer: Peer, files: list[Path]) -> None:
        self._bench = bench
        self._project = made
        self._peer = peer
        self._files = files
        self._arrivals = 0

    def warm_up(self, pipeline: Pipeline, key: str, times: int) -> None:
        """Run everything untimed, equally often in both JVMs, until their code is compiled and no table is empty."""
        for way in (self._streaming, self._engine, self._streaming, self._airflow) * times:
            way(pipeline, key, self._files)

    def passes(self, pipeline: Pipeline, key: str, passes: int) -> tuple[list[float], list[float], list[float]]:
        """Time each way equally often, alternately, and check the results."""
        streaming: list[float] = []
        engine: list[float] = []
        airflow: list[float] = []
        for number in range(passes):
            for name, way, times in (
                ("Structured Streaming", self._streaming, streaming),
                ("tidegate run", self._engine, engine),
                ("through Airflow", self._airflow, airflow),
            ):
                self._project.settle()
                times.append(way(pipeline, key, self._files))
                self._bench.tell(f"{pipeline.name}, pass {number + 1}, {name}: {times[-1]:.2f} s")
        self._check(pipeline, key)
        return streaming, engine, airflow

    def _offer(self, source: Path, files: list[Path]) -> None:
        self._arrivals += 1
        events.offer(files, source, f"{self._arrivals:04d}")

    def _streaming(self, pipeline: Pipeline, key: str, files: list[Path]) -> float:
        source = self._bench.folder / "peer" / pipeline.name
        self._offer(source, files)
        return self._peer.run(source, key, f"peer_{pipeline.name}")

    def _engine(self, pipeline: Pipeline, _key: str, files: list[Path]) -> float:
        self._offer(self._project.home / "data" / pipeline.name, files)
        return timed(lambda: run_pipeline(self._project.settings, pipeline, run_id=f"benchmark {self._arrivals}"))

    def _airflow(self, pipeline: Pipeline, _key: str, files: list[Path]) -> float:
        with StateStore.connect(self._project.settings) as store:
            last = store.committed(pipeline.name) + len(files)
        self._offer(self._project.home / "data" / pipeline.name, files)
        return self._project.dag_run(pipeline.name, {}, committed=last).to_commit

    def _check(self, pipeline: Pipeline, key: str) -> None:
        """Compare our states and the peer's with what DuckDB computes from the files."""
        (state,) = pipeline.states
        wanted = events.expected(self._project.home / "data" / pipeline.name, key)
        assert self._project.state(pipeline, state) == wanted, f"{pipeline.name} is wrong"
        with contextlib.closing(self._project.administrator()) as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM peer_{pipeline.name} ORDER BY 1")
            assert cursor.fetchall() == events.expected(self._bench.folder / "peer" / pipeline.name, key)
