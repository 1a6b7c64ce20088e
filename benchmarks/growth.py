"""Costs that must not grow: a batch's time with the size of ledger or state, and memory with the size of the batch.

Each size has a database of its own on the same server. Batches go to all sizes in turn, each after a vacuum and a checkpoint.
All sizes are vacuumed before the first batch of a turn: otherwise the smallest table would be in the processor's cache, where
no larger one fits. Ledgers and states are filled in bulk with the rows that as many commits would have left a week ago. A size
keeps its session, as a run does for its batches. A session is warm once it has touched most of the shared memory that holds its
state: a process of Postgres takes a page fault for each 64 kB of it. The time of a batch in a new session is reported as well.

Memory is sampled continuously in the two places that a batch passes through: the Spark server with its Python workers (PSS,
which counts memory that forked workers share only once), and the process of `tidegate run` (RSS). A JVM returns no memory, and
takes more the longer it runs, up to -Xmx, each server another amount. So two fresh servers process equally many batches, and
equally many rows in all: one in equal batches, the other with nearly all rows in its last batch. The difference of their
medians is due to the size of that batch. All batches have the same keys: the effect of more keys is another question.
"""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import duckdb
import psutil
import sqlalchemy as sa

from benchmarks.harness import Bar, Bench, Figure, compared, timed
from benchmarks.pipelines import USERS
from benchmarks.project import Project, publish, repeated, share_of_memory, stack_without_airflow
from tests import steps
from tests.conftest import COMMAND
from tests.servers import Server
from tidegate import migrations
from tidegate import stack as embedded
from tidegate.state_store import StateStore

REPOSITORY = Path(__file__).resolve().parents[1]
OWNER = "benchmark"
FLAT = Bar(at_most=1.2)
AT_ONCE = Bar(at_most=0.3)
ROWS_PER_BATCH = 10_000
WARM_UP_BATCHES = 12  # of 10,000 random keys; 50 million rows and their index lie in 95,000 times 64 kB
BATCHES_AT_ONCE = 100  # in the one plan that has more to do
LEDGER_ROWS = 20  # what `tidegate inspect` shows
MEMORY_KEYS = 50_000
SMALL_BATCH_ROWS = 1_000
SECONDS_BETWEEN_SAMPLES = 0.05
MIB = 1024**2

# A batch of one file, as `Files` plans it: its name, the number of files before it, the last of these.
METADATA = (
    '{"metadata":{"files":[{"mtime_ns":1,"name":"%1$s","sha256":"","size":1}],"files_before":%2$s,"last":"%3$s","taken":[]},'
    '"version":1}'
)
FILL_BATCHES = """
INSERT INTO tidegate.batch (pipeline, txid, source_metadata, source_digest, previous_digest, opened_by, opened_at, attempt)
SELECT :pipeline, txid, content, sha256(content), lag(sha256(content)) OVER (ORDER BY txid),
       'run ' || txid, now() - interval '7 days', 1
FROM (
    SELECT txid, convert_to(format(
        :metadata, to_char(txid, 'FM000000000') || '.parquet', txid - 1,
        CASE WHEN txid > 1 THEN to_char(txid - 1, 'FM000000000') || '.parquet' END
    ), 'UTF8') AS content
    FROM generate_series(1, CAST(:last AS bigint)) AS txid
) AS batches
"""
FILL_ATTEMPTS = """
INSERT INTO tidegate.attempt (pipeline, txid, attempt, owner, fingerprint, source_digest, previous_digest,
                              started_at, staged_at, sealed_at, source_rows, source_hash_sum, staged_bytes, dropped_at)
SELECT b.pipeline, txid, 1, opened_by, fingerprint, source_digest, previous_digest,
       opened_at, opened_at, opened_at, 1, txid, 1, opened_at
FROM tidegate.batch AS b JOIN tidegate.pipeline USING (pipeline)
"""
FILL_SEALS = """
INSERT INTO tidegate.seal (pipeline, txid, attempt, state, partition, task_attempt, rows, digest)
SELECT pipeline, txid, 1, state, 0, txid, 1, txid FROM tidegate.batch JOIN tidegate.state_table USING (pipeline)
"""
FILL_COMMITS = """
INSERT INTO tidegate.commit (pipeline, txid, attempt, source_digest, owner, key_count, committed_at, merged_at)
SELECT pipeline, txid, 1, source_digest, opened_by, 1, opened_at, opened_at FROM tidegate.batch
"""
FILL_RUNS = """
INSERT INTO tidegate.run_batch (pipeline, run_id, position, txid) SELECT pipeline, opened_by, 0, txid FROM tidegate.batch
"""
FILL_CURSOR = """
UPDATE tidegate.cursor SET txid = b.txid, attempt = 1, source_digest = b.source_digest
FROM tidegate.batch AS b WHERE cursor.pipeline = b.pipeline AND b.txid = :last
"""
OPEN_STATE = "SELECT set_config('tidegate.writer', :pipeline, true)"
FILL_STATE = """
INSERT INTO state.per_user (user_id, events, amount, txid)
SELECT user_id, 1, 0, 1 FROM generate_series(0, CAST(:keys AS bigint) - 1) AS user_id
"""


def run(bench: Bench) -> Iterator[Figure]:
    """Grow the ledger, the state and the batch, one after another."""
    with stack_without_airflow(bench.folder / "project") as made:
        yield from _growing_ledger(bench, made)
        yield from _growing_state(bench, made)
    yield from _growing_batch(bench)


@dataclass
class Place(Project):
    """A database and a project folder of one size, with the times of its batches."""

    size: int
    spent: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def create(cls, made: Project, size: int) -> "Place":
        """Create an empty place on a stack's server, for the users' pipeline."""
        settings = replace(made.settings, pg_database=Server(made.settings).create_database())
        migrations.upgrade(settings, [])
        home = made.home / settings.pg_database
        (home / "data" / USERS.name).mkdir(parents=True)
        place = cls(home, replace(settings, home=home), size)
        place.register(USERS)
        return place

    @property
    def source(self) -> Path:
        """Return the folder of the users' files."""
        return self.home / "data" / USERS.name

    def fill_ledger(self, txids: int) -> None:
        """Fill the ledger with committed batches whose staging was dropped and whose files are no longer in the folder."""
        batches = sa.text(FILL_BATCHES).bindparams(pipeline=USERS.name, last=txids, metadata=METADATA)
        others = map(sa.text, (FILL_ATTEMPTS, FILL_SEALS, FILL_COMMITS, FILL_RUNS))
        self.as_owner(batches, *others, sa.text(FILL_CURSOR).bindparams(last=txids))

    def fill_state(self, keys: int) -> None:
        """Fill the state with the keys from 0, one event each, by txid 1."""
        self.as_owner(sa.text(OPEN_STATE).bindparams(pipeline=USERS.name), sa.text(FILL_STATE).bindparams(keys=keys))

    def committed(self) -> int:
        """Return the last committed txid."""
        with StateStore.connect(self.settings) as store:
            return store.committed(USERS.name)

    def arrive(self, keys: int, rows: int = ROWS_PER_BATCH, batches: int = 1) -> None:
        """Write the files of the next batches into the folder, then vacuum and write a checkpoint."""
        for txid in range(self.committed() + 1, self.committed() + 1 + batches):
            step = keys // rows
            write_users(self.source / file_name(txid), f"i * {step} + hash(i + {txid}) % {step}", rows)
        self.settle()

    def batch(self) -> None:
        """Run the steps of a batch, each timed."""
        txid = self.committed() + 1
        parts: dict[str, Callable[[], object]] = {
            "plan": lambda: steps.plan(self.settings, USERS, run_id=f"{OWNER} {txid}"),
            "process": lambda: steps.process(self.settings, USERS, txid, owner=OWNER),
            "commit": lambda: steps.commit(self.settings, USERS, txid, owner=OWNER),
        }
        self.spent.append({name: timed(step) for name, step in parts.items()})
        assert self.committed() == txid

    def runs(self, *parts: str) -> list[float]:
        """Return the seconds of each timed batch, in these steps or in all."""
        return [sum(spent[step] for step in parts or spent) for spent in self.spent]

    def check(self, events: int) -> None:
        """Compare the number of events in the state."""
        with contextlib.closing(self.administrator()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT sum(events)::bigint FROM state.per_user")
            found = cursor.fetchone()
            assert found == (events,), f"size {self.size}: {found} events instead of {events}"


def _growing_ledger(bench: Bench, made: Project) -> Iterator[Figure]:
    """Time batches of the same few keys after 10 to 100,000 txids; then commands and plans on the largest ledger."""
    sizes = [10, 1_000] if bench.is_smoke else [10, 100, 1_000, 10_000, 100_000]
    places = [Place.create(made, size) for size in sizes]
    for place in places:
        with bench.timed(f"a ledger of {place.size:,} txids", []):
            place.fill_ledger(place.size)
    batches = _in_turn(bench, places, lambda _place: ROWS_PER_BATCH)
    for place in places:
        place.check(ROWS_PER_BATCH * batches)
    yield from _flatness(bench, "ledger", "txids in the ledger", places)
    yield from _asked(bench, made, places[-1])
    yield from _planned_from_a_full_folder(bench, places[-1])


def _growing_state(bench: Bench, made: Project) -> Iterator[Figure]:
    """Time batches of 10,000 random keys in states of 1 to 50 million keys."""
    sizes = [10_000, 100_000] if bench.is_smoke else [1_000_000, 10_000_000, 50_000_000]
    places = [Place.create(made, size) for size in sizes]
    for place in places:
        place.fill_ledger(1)
        with bench.timed(f"a state of {place.size:,} keys", []):
            place.fill_state(place.size)
    batches = _in_turn(bench, places, lambda place: place.size)
    for place in places:
        place.check(place.size + ROWS_PER_BATCH * batches)
    yield from _flatness(bench, "state", "keys in the state", places)
    small, large = places[0], places[-1]
    batches += _in_turn(bench, (small, large), lambda place: place.size, keeps_sessions=False)
    for place in (small, large):
        place.check(place.size + ROWS_PER_BATCH * batches)
    for parts in ((), ("commit",)):
        what = f"{large.size:,} keys in the state, {' '.join(parts) or 'whole batch'} in a new session"
        yield compared("growth", what, large.runs(*parts), f"{small.size:,}", small.runs(*parts), is_speed=False)


def _in_turn(bench: Bench, places: Sequence[Place], keys: Callable[[Place], int], *, keeps_sessions: bool = True) -> int:
    """Run batches in all places alternately, keep the times after the warm-up, and return the number of batches per place."""
    warm_up, passes = bench.choose(WARM_UP_BATCHES if keeps_sessions else 1, 1), bench.choose(9, 3)
    with contextlib.ExitStack() as held:
        for place in places if keeps_sessions else ():
            held.enter_context(StateStore.connect(place.settings))
        for number in range(1, warm_up + passes + 1):
            for place in places:
                place.arrive(keys(place))
            for place in places:
                place.batch()
                bench.tell(f"size {place.size:,}, pass {number} behind {warm_up} to warm up: {place.runs()[-1]:.2f} s")
    for place in places:
        place.spent = place.spent[-passes:]
    return warm_up + passes


def _flatness(bench: Bench, name: str, what: str, places: Sequence[Place]) -> Iterator[Figure]:
    """Compare a batch at the largest size with one at the smallest, and plot all sizes."""
    small, large = places[0], places[-1]
    with bench.plot(f"growth_{name}", f"One batch of {ROWS_PER_BATCH:,} rows") as axes:
        for parts in ((), ("plan",), ("process",), ("commit",)):
            label = " ".join(parts) or "whole batch"
            medians = [median(place.runs(*parts)) for place in places]
            axes.plot([place.size for place in places], medians, marker="o", label=label)
            title = f"{large.size:,} {what}, {label}"
            beside = f"{small.size:,}"
            bar = None if parts else FLAT
            yield compared("growth", title, large.runs(*parts), beside, small.runs(*parts), bar=bar, is_speed=False)
        axes.set(xscale="log", xlabel=what, ylabel="seconds", ylim=(0, None))
        axes.legend()


def _asked(bench: Bench, made: Project, place: Place) -> Iterator[Figure]:
    """Time the queries of `status`, `inspect` and a plan, and the whole commands."""
    times, newest = bench.choose(9, 3), place.committed()
    plans = iter(range(times))

    def status() -> None:
        with StateStore.connect(place.settings) as store:
            store.lag()

    def inspect() -> None:
        with StateStore.connect(place.settings) as store:
            assert len(store.batch_statuses(USERS.name, limit=LEDGER_ROWS)) == min(LEDGER_ROWS, newest)

    def inspect_batch() -> None:
        with StateStore.connect(place.settings) as store:
            store.batch_history(USERS.name, place.size // 2)

    def plan() -> None:
        assert steps.plan(place.settings, USERS, run_id=f"nothing new {next(plans)}") == []

    environ = command_environ(made) | {"PGDATABASE": place.settings.pg_database}
    asked: dict[str, Callable[[], object]] = {
        "status": status,
        "inspect": inspect,
        "inspect --txid": inspect_batch,
        "a plan without anything new": plan,
        "the command tidegate status": lambda: run_command(environ, "status"),
        "the command tidegate inspect": lambda: run_command(environ, "inspect", USERS.name),
        "the command tidegate --help, which asks nothing": lambda: run_command(environ, "--help"),
    }
    for what, ask in asked.items():
        runs = [timed(ask) for _ in range(times)]
        bar = None if "--help" in what else AT_ONCE
        yield Figure("growth", f"{place.size:,} txids, {what}", median(runs), "s", median(runs), bar=bar, runs=tuple(runs))


def _planned_from_a_full_folder(bench: Bench, place: Place) -> Iterator[Figure]:
    """Time plans of one and of many new batches while the folder still holds the files of all earlier ones."""
    last, times, planned = place.committed(), bench.choose(3, 1), 0
    for txid in range(1, last + 1):
        (place.source / file_name(txid)).touch()
    for txid in range(last + 1, last + 1 + times * (1 + BATCHES_AT_ONCE)):
        write_users(place.source / file_name(txid), "i", 1)
    for batches in (1, BATCHES_AT_ONCE):
        runs = []
        for _ in range(times):
            planned += batches  # those that were planned before are still to do
            plan = partial(steps.plan, place.settings, USERS, run_id=f"a folder, {planned}", max_batches=planned)
            runs.append(timed(plan))
        what = f"{place.size:,} txids and their files in the folder, a plan of {batches}"
        yield Figure("growth", what, median(runs), "s", median(runs), runs=tuple(runs))


def _growing_batch(bench: Bench) -> Iterator[Figure]:
    """Compare peak memory of equal batches with that of small batches followed by a large one."""
    rows, times = bench.choose(1_000_000, 50_000), bench.choose(20, 4)
    equal, large = [], []
    for number in range(bench.choose(3, 1)):
        equal.append(_peaks(bench, f"equal_{number}", [rows] * times))
        large.append(_peaks(bench, f"large_{number}", [SMALL_BATCH_ROWS] * (times - 1) + [rows * times]))
    for what, bar in (("client", FLAT), ("Spark server", FLAT), ("JVM", None), ("Python workers", None)):
        title = f"batch of {rows * times:,} rows, peak memory of {what}"
        ours, theirs = ([peaks[what] for peaks in servers] for servers in (large, equal))
        yield compared("growth", title, ours, f"{rows:,}", theirs, unit="MiB", bar=bar, is_speed=False)


def _peaks(bench: Bench, name: str, batches: Sequence[int]) -> dict[str, float]:
    """Return the peak memory in MiB of batches of these sizes, one after another, on a new server."""
    with stack_without_airflow(bench.folder / f"batches_{name}") as made:
        made.register(USERS)
        environ = command_environ(made)
        source = made.home / "data" / USERS.name
        source.mkdir(parents=True)
        (spark,) = (component for component in embedded.status(made.settings) if component.name == "spark")
        assert spark.pid
        peaks: dict[str, float] = {}
        for number, rows in enumerate(batches, 1):
            write_users(source / file_name(number), f"(i * 7919) % {MEMORY_KEYS}", rows)
            client = subprocess.Popen(
                [COMMAND, "run", USERS.name], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            with _sampled(spark.pid, client.pid, peaks):
                _, said = client.communicate()
            assert client.returncode == 0, said
            bench.tell(f"batch {number} of {rows:,} rows: {', '.join(f'{k} {v:,.0f} MiB' for k, v in peaks.items())}")
        events = sum(row[1] for row in made.state(USERS, "per_user"))
        assert events == sum(batches), f"{events} events instead of {sum(batches)}"
        return peaks


@contextlib.contextmanager
def _sampled(server: int, client: int, peaks: dict[str, float]) -> Iterator[None]:
    """Sample the memory of Spark's server and of a client in a thread, and raise the peaks, until the block ends."""

    def sample() -> None:
        jvm = psutil.Process(server)
        found = {"JVM": share_of_memory(jvm) / MIB}
        found["Python workers"] = sum(map(share_of_memory, jvm.children(recursive=True))) / MIB
        found["Spark server"] = found["JVM"] + found["Python workers"]
        with contextlib.suppress(psutil.Error):
            found["client"] = psutil.Process(client).memory_info().rss / MIB
        for name, value in found.items():
            peaks[name] = max(peaks.get(name, 0), value)

    with repeated(sample, SECONDS_BETWEEN_SAMPLES):
        yield


def file_name(txid: int) -> str:
    """Return the name of the only file of a batch."""
    return f"{txid:09d}.parquet"


def write_users(file: Path, user_id: str, rows: int) -> None:
    """Write events of amount 0, with the users that an expression of `i` gives."""
    statement = f"SELECT ({user_id})::BIGINT AS user_id, 'page' AS page, 0::BIGINT AS amount FROM range({rows}) AS events(i)"
    with duckdb.connect() as connection:
        connection.sql(statement).write_parquet(str(file))


def command_environ(made: Project) -> dict[str, str]:
    """Return the environment in which the real commands find the stack and the users' pipeline."""
    authors = made.home / "authors"
    publish(authors, [USERS.name])
    return {**os.environ, "TIDEGATE_HOME": str(made.home), "PYTHONPATH": f"{authors}:{REPOSITORY}"}


def run_command(environ: dict[str, str], *arguments: str) -> None:
    """Run the command line; if it fails, fail with its output."""
    done = subprocess.run([COMMAND, *arguments], env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
