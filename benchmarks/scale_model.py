"""What many pipelines need of each part of a stack: measured costs, times a workload. Writes the tables of docs/scale.md.

Costs come from benchmarks/results/latest.json: those that the benchmarks `scale` and `orchestration` measured last. They are
linear in what they count (txids, rows, keys), which the benchmark `growth` shows as far as it goes. Capacities are those of
ordinary machines, and are named in the table.
"""

import heapq
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import LATEST

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
SECONDS_PER_DAY = 24 * 3600
BEGIN, END = "<!-- {}: written by python -m benchmarks.scale_model -->\n", "<!-- end of {} -->\n"


@dataclass(frozen=True)
class Workload:
    """What is asked of the stack."""

    pipelines: int = 1_000
    txids_per_pipeline: int = 1_000_000
    commits_per_second: float = 10
    bytes_per_day: float = 100e12
    bytes_per_row: int = 100
    keys_per_batch: int = 10_000
    executors: int = 500
    cores_per_executor: int = 4
    cores_per_batch: int = 8  # those that one batch gets at a time
    staging_connections: int = 8

    @property
    def rows_per_second(self) -> float:
        """Rows that arrive."""
        return self.bytes_per_day / self.bytes_per_row / SECONDS_PER_DAY

    @property
    def rows_per_batch(self) -> float:
        """Rows of a batch."""
        return self.rows_per_second / self.commits_per_second


@dataclass(frozen=True)
class Need:
    """A part of the stack: what the workload needs of it, what one of it has, and what to do when that is not enough."""

    part: str
    needs: float
    has: float
    unit: str
    then: str

    @property
    def share(self) -> float:
        """The share of one that is needed: above 1, one is not enough."""
        return self.needs / self.has


class Costs:
    """Measured costs by their names in a file of figures."""

    def __init__(self, figures: Path = LATEST) -> None:
        rows = json.loads(figures.read_text())
        self._ours: Mapping[tuple[str, str], float] = {(row["benchmark"], row["what"]): row["ours"] for row in rows}

    def scale(self, what: str) -> float:
        """Return a figure of the benchmark `scale`."""
        return self._ours["scale", what]

    def airflow(self, process: str) -> float:
        """Return the core seconds per txid of a process of Airflow."""
        return self._ours["orchestration", f"a txid of one small file, core seconds of airflow-{process}"]

    @property
    def seconds_between_commits(self) -> float:
        """The time from a commit's end to the next one's start, in one pipeline."""
        return self._ours["orchestration", "from a commit's end to the next one's start"]


def needs(load: Workload, costs: Costs) -> list[Need]:
    """Return what each part has to give, the scarcest first."""
    rate, keys = load.commits_per_second, load.commits_per_second * load.keys_per_batch
    per_row = costs.scale("a row with a transform and two states, core microseconds of Spark") / 1e6
    per_key = costs.scale("a key of a batch, core microseconds of Postgres") / 1e6
    wal = rate * costs.scale("a txid of 100 rows, WAL") + keys * costs.scale("a key of a batch, WAL")
    merging = load.keys_per_batch * per_key
    processing = load.rows_per_batch * per_row / load.cores_per_batch + merging / load.staging_connections
    found = [
        Need(
            "the scheduler of Airflow",
            rate * costs.airflow("scheduler"),
            1,
            "cores (its loop has one)",
            "more schedulers; larger batches; `concurrency` as it is: finished tasks go on with further batches",
        ),
        Need("triggerers", rate * costs.airflow("triggerer"), 1, "cores (its loop has one)", "more triggerers"),
        Need(
            "the commits of one pipeline",
            rate / load.pipelines * (costs.seconds_between_commits + merging),
            1,
            "seconds per second under its cursor's lock",
            "larger batches: those that are ready together are merged together",
        ),
        Need(
            "Spark's driver",
            rate * costs.scale("a txid of 100 rows, core seconds of Spark"),
            8,
            "cores",
            "several Connect servers: `spark_remote` is a setting of each pipeline's tasks",
        ),
        Need(
            "executors",
            load.rows_per_second * per_row,
            load.executors * load.cores_per_executor,
            "cores",
            "more executors",
        ),
        Need(
            "connections that stage",
            rate * processing * load.staging_connections,
            200,
            "connections at a time",
            "fewer `staging_connections`; a connection limit of the stager's role, which tasks wait for",
        ),
        Need(
            "Postgres",
            rate * costs.scale("a txid of 100 rows, core seconds of Postgres") + keys * per_key,
            16,
            "cores",
            "fewer keys per second: larger batches repeat fewer; another server for other pipelines",
        ),
        Need("WAL", wal / 1e6, 200, "MB/s", "its own disk; another server for other pipelines"),
        Need(
            "the ledger, after all txids",
            load.pipelines * load.txids_per_pipeline * costs.scale("a committed txid in the ledger") / 1e12,
            16,
            "TB",
            "larger batches; another database for other pipelines",
        ),
    ]
    return sorted(found, key=lambda need: -need.share)


def windows(batches: int = 4_000, seed: int = 1) -> Iterator[tuple[int, float, float]]:
    """Simulate one pipeline of batches whose processing takes unequal times, and yield window, throughput and waste.

    A batch begins once it is within the window after the last commit and a slot is free; commits are in order and take no time.
    Processing times are lognormal: the median is 1 and one in a hundred takes ten times as long. Throughput is a share of what
    as many slots do without order. Waste is the mean number of finished batches that wait for an earlier one.
    """
    slots = 8
    drawn = random.Random(seed)
    times = [drawn.lognormvariate(0, 1) for _ in range(batches)]
    unordered = _end(times, slots, batches)[0]
    for window in (1, 2, 4, 8, 16, 32, 64):
        end, waited = _end(times, slots, window)
        yield window, unordered / end, waited / end


def _end(times: list[float], slots: int, window: int) -> tuple[float, float]:
    """Return when the last batch is committed, and the sum of the times that finished batches waited."""
    free, committed = [0.0] * slots, [0.0] * (len(times) + 1)
    waited = 0.0
    for number, seconds in enumerate(times, 1):
        begins = max(heapq.heappop(free), committed[max(0, number - window)])
        done = begins + seconds
        heapq.heappush(free, done)
        committed[number] = max(done, committed[number - 1])
        waited += committed[number] - done
    return committed[-1], waited


def tables(load: Workload, costs: Costs) -> dict[str, list[str]]:
    """Return the lines of the page's tables."""
    found = needs(load, costs)
    heads = "| part | needs | one has | share | when one is not enough |", "|---|---|---|---|---|"
    rows = [f"| {n.part} | {_short(n.needs)} | {_short(n.has)} {n.unit} | {_percent(n.share)} | {n.then} |" for n in found]
    order = ["| window | throughput | finished batches that wait |", "|---|---|---|"]
    order += [f"| {window} | {throughput:.0%} | {waste:.1f} |" for window, throughput, waste in windows()]
    return {"needs": [*heads, *rows], "windows": order}


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def filled(page: str, made: Mapping[str, list[str]]) -> str:
    """Return the page with its tables replaced."""
    for name, lines in made.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = before + begin + "".join(f"{line}\n" for line in lines) + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), tables(Workload(), Costs())))
