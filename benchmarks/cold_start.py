"""Times the start of the stack, by the real command, in a project that was started before."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness import Bar, Bench, Figure
from tests.conftest import COMMAND

COMMAND_SECONDS = 400


def run(bench: Bench) -> Iterator[Figure]:
    """Time `tidegate up`, with Airflow, in an initialised project; beside it the first start, and `tidegate down`."""
    passes = bench.passes
    first: list[float] = []
    ups: list[float] = []
    downs: list[float] = []
    home = bench.folder / "project"
    home.mkdir()
    try:
        with bench.timed("the first up", first):
            _tidegate(home, "up")
        for _ in range(passes):
            with bench.timed("down", downs):
                _tidegate(home, "down")
            with bench.timed("up", ups):
                _tidegate(home, "up")
    finally:
        _tidegate(home, "down", "--delete-data", "--yes")
    yield _seconds("tidegate up, initialised project", ups, Bar(at_most=25))
    yield _seconds("tidegate up, the first", first)
    yield _seconds("tidegate down", downs)


def _tidegate(home: Path, *arguments: str) -> None:
    """Run the command in a project folder; if it fails, fail with its output."""
    environ = {**os.environ, "TIDEGATE_HOME": str(home)}
    done = subprocess.run(
        [COMMAND, *arguments], env=environ, cwd=home, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr


def _seconds(what: str, runs: list[float], bar: Bar | None = None) -> Figure:
    return Figure("cold_start", what, median(runs), "s", median(runs), bar=bar, runs=tuple(runs))
