"""Bar 4: many small batches through Airflow, beside Airflow alone."""

import contextlib
import statistics
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from psycopg2 import sql

from benchmarks.harness import Bar, Bench, Figure, compared
from benchmarks.pipelines import SMALL
from benchmarks.project import Project, project

ROWS_PER_FILE = 100


def run(bench: Bench) -> Iterator[Figure]:
    """Time 200 txids of one small file each in one Dag run, beside as many groups of two empty tasks."""
    txids, passes = bench.choose(200, 10), bench.passes
    home = bench.folder / "project"
    ours: list[float] = []
    last_commits: list[float] = []
    floor: list[float] = []
    used: list[dict[str, float]] = []
    with project(home, ["small"]) as made:
        source = home / "data" / "small"
        committed = bench.choose(40, 2)
        write_small(source, 0, committed)
        made.dag_run("small", {}, committed=committed)
        made.dag_run("floor", {"max_batches": committed})
        for number in range(passes):
            floor.append(made.dag_run("floor", {"max_batches": txids}).to_end)
            bench.tell(f"pass {number + 1}: {txids} empty groups in {floor[-1]:.1f} s")
            write_small(source, committed, committed + txids)
            committed += txids
            cores = made.core_seconds()
            done = made.dag_run("small", {}, committed=committed)
            used.append({name: spent - cores[name] for name, spent in made.core_seconds().items()})
            ours.append(done.to_end)
            last_commits.append(done.to_commit)
            bench.tell(f"pass {number + 1}: {txids} txids in {ours[-1]:.1f} s, the last commit after {last_commits[-1]:.1f} s")
        waits = _waits(made, committed - txids + 1)
        assert made.state(SMALL, "per_small_page") == _expected(committed), "small is wrong"
    what = f"{txids} txids of one small file"
    yield compared("orchestration", what, ours, "empty groups", floor, bar=Bar(at_most=1.3), is_speed=False)
    yield compared("orchestration", f"{what}, to the last commit", last_commits, "empty groups", floor, is_speed=False)
    speed = [txids / seconds for seconds in ours]
    middle = statistics.median(speed)
    yield Figure("orchestration", f"{what}, per second", middle, "txids/s", middle, bar=Bar(at_least=2.5), runs=speed)
    wait = statistics.fmean(waits)
    yield Figure("orchestration", "from a commit's end to the next one's start", wait, "s", wait, bar=Bar(at_most=0.3))
    for component in used[0]:
        spent = statistics.median(run[component] for run in used) / txids
        yield Figure("orchestration", f"a txid of one small file, core seconds of {component}", spent, "s", spent)


def write_small(source: Path, first: int, last: int) -> None:
    """Write small files with these numbers."""
    source.mkdir(parents=True, exist_ok=True)
    for number in range(first, last):
        lines = "".join(f"page-{row % 20},{number}\n" for row in range(ROWS_PER_FILE))
        (source / f"{number:06d}.csv").write_text(f"page,amount\n{lines}")


def _expected(files: int) -> list[tuple[object, ...]]:
    per_page = ROWS_PER_FILE // 20
    rows = [(f"page-{page}", per_page * files, per_page * sum(range(files))) for page in range(20)]
    return sorted(rows)


def _waits(made: Project, first: int) -> list[float]:
    """Return the seconds between each commit's end and the next one's start, from the ledger."""
    statement = sql.SQL(
        "SELECT committed_at, merged_at FROM tidegate.commit WHERE pipeline = 'small' AND txid >= {} ORDER BY txid"
    ).format(sql.Literal(first))
    with contextlib.closing(made.administrator()) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        commits: list[tuple[datetime, datetime]] = cursor.fetchall()
    return [(after[0] - before[1]).total_seconds() for before, after in pairwise(commits)]
