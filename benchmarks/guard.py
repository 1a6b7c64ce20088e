"""The cost of exactly-once at the store: ledger, seal, fence and txid guard, beside a bare COPY and an unguarded upsert.

Both ways get the same rows in Arrow batches, as Spark delivers them, write them as CSV over new connections, and run
alternately, one connection at a time. Ours checks the rows and sorts numeric keys (`tidegate.jobs.compute.stage.staging_sink`),
stages into a logged table, computes the digest of the staged rows twice, and checks again; theirs stages into a temporary
table, like a job that need not find its work again after a crash.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg2
import pyarrow as pa
import sqlalchemy as sa
from psycopg2 import sql

from benchmarks.harness import Bar, Bench, Figure, compared
from benchmarks.peer import as_csv, copy_and_upsert, create_target
from benchmarks.pipelines import KEEPING, PAGES, RECORDING, USERS
from benchmarks.project import Project, stack_without_airflow
from tidegate.jobs import Pipeline
from tidegate.jobs.compute.stage.staging_sink import SORTED_ROWS, PartialsReader
from tidegate.state_store import StateStore
from tidegate.state_store.attempt.attempts import Attempt, StagedPartition, Tracked
from tidegate.state_store.attempt.staging_tables import digest_statement
from tidegate.state_store.connections.copy_into_staging import copy_partition
from tidegate.state_store.ledger.batches import encode_metadata
from tidegate.state_store.states.state_tables import staging_table_of

BARE = "bare COPY + upsert"
OWNER = "benchmark"
TASK_ATTEMPT = 1
# The purpose of a statement, by a text that only it contains; all others are small statements of the ledger.
PARTS = {"COPY ": "copy", "bit_xor": "digest", "ON CONFLICT": "merge"}


def run(bench: Bench) -> Iterator[Figure]:
    """Time updates of a million existing keys, by bigint and by text."""
    keys, passes = bench.choose(1_000_000, 20_000), bench.choose(5, 2)
    with stack_without_airflow(bench.folder / "project") as made:
        made.register(PAGES, USERS)
        for pipeline, key, kind in ((USERS, "user_id", "bigint"), (PAGES, "page", 'text COLLATE "C"')):
            with contextlib.closing(made.administrator()) as connection:
                create_target(connection, f"bare_{pipeline.name}", key, kind)
            trial = _Trial(bench, made, pipeline, key, _shuffled(keys, key))
            trial.passes(passes)
            yield from trial.figures(f"{keys:,} {kind.split()[0]} keys")
        yield _recorded_changes(bench, made, keys, passes)


def _recorded_changes(bench: Bench, made: Project, keys: int, passes: int) -> Figure:
    """Time the merge of updates into an opaque state that records what each batch changes, beside one that does not."""
    made.register(KEEPING, RECORDING)
    rows = _shuffled(keys, "user_id")
    trials = [_Trial(bench, made, pipeline, "user_id", rows) for pipeline in (RECORDING, KEEPING)]
    merges: list[list[float]] = [[], []]
    for number in range(passes + 1):
        for trial, seconds in zip(trials, merges, strict=True):
            made.settle()
            clock = _Clock()
            trial._guarded(clock)
            if number:
                seconds.append(clock.parts["commit_batch: merge"])
    with contextlib.closing(made.administrator()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT count(*), sum(amount - coalesce(previous_amount, 0)) FROM state.per_recorded_user_changes")
        assert cursor.fetchone() == (keys * (passes + 1), (passes + 1) * keys * (keys - 1) // 2), "changes are wrong"
    what = f"{keys:,} bigint keys: merge that records changes"
    return compared("guard", what, merges[0], "one that does not", merges[1], bar=Bar(at_most=1.5), is_speed=False)


def _shuffled(keys: int, key: str) -> pa.Table:
    """Return a row for each key in random order, as Spark's hash partitions have them."""
    numbers = np.random.default_rng(1).permutation(keys)
    column = pa.array(numbers if key == "user_id" else [f"page-{number:09d}" for number in numbers])
    return pa.table({key: column, "events": np.ones(keys, dtype=np.int64), "amount": numbers})


@dataclass
class _Clock:
    """Seconds of one pass, by part."""

    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of a block to a part."""
        start = time.perf_counter()
        yield
        self.parts[name] += time.perf_counter() - start

    def cursor_factory(self, step: str) -> type[psycopg2.extensions.cursor]:
        """Return a cursor class that times what psycopg2 runs for a step."""
        clock = self

        class TimedCursor(psycopg2.extensions.cursor):
            """Times COPY and single statements."""

            def copy_expert(self, statement: Any, *arguments: Any) -> None:
                """Copy, timed."""
                with clock.part(f"{step}: copy"):
                    super().copy_expert(statement, *arguments)

            def execute(self, statement: Any, *arguments: Any) -> None:
                """Execute, timed."""
                with clock.part(f"{step}: {_part_of(str(statement))}"):
                    super().execute(statement, *arguments)

        return TimedCursor

    @contextlib.contextmanager
    def statements(self, step: str, engine: sa.Engine) -> Iterator[None]:
        """Time a step of the store, and its statements."""
        begun: list[float] = []

        def begin(*_: object) -> None:
            begun.append(time.perf_counter())

        def end(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            self.parts[f"{step}: {_part_of(statement)}"] += time.perf_counter() - begun.pop()

        sa.event.listen(engine, "before_cursor_execute", begin)
        sa.event.listen(engine, "after_cursor_execute", end)
        try:
            with self.part(step):
                yield
        finally:
            sa.event.remove(engine, "before_cursor_execute", begin)
            sa.event.remove(engine, "after_cursor_execute", end)


def _part_of(statement: str) -> str:
    return next((part for mark, part in PARTS.items() if mark in statement), "ledger")


class _Trial:
    """Runs both ways alternately over the same rows."""

    def __init__(self, bench: Bench, made: Project, pipeline: Pipeline, key: str, rows: pa.Table) -> None:
        self._bench = bench
        self._project = made
        self._pipeline = pipeline
        self._key = key
        self._rows = rows
        self._ours: list[_Clock] = []
        self._theirs: list[_Clock] = []

    def passes(self, passes: int) -> None:
        """Let both write every key, then time them, each first in every other pass; check the results."""
        for run in (self._guarded, self._bare):
            run(_Clock())
        for number in range(passes):
            ways = [(self._guarded, self._ours), (self._bare, self._theirs)]
            for way, clocks in ways if number % 2 else reversed(ways):
                self._project.settle()
                clock = _Clock()
                with clock.part("whole"):
                    way(clock)
                clocks.append(clock)
            ours, theirs = (clocks[-1].parts["whole"] for clocks in (self._ours, self._theirs))
            self._bench.tell(f"{self._pipeline.name}, pass {number + 1}: {ours:.2f} s, bare {theirs:.2f} s")
        self._check(passes + 1)

    def figures(self, what: str) -> Iterator[Figure]:
        """Compare the whole with the bare way, then show what each step adds."""
        ours, theirs = self._seconds(self._ours, "whole"), self._seconds(self._theirs, "whole")
        yield compared("guard", what, ours, BARE, theirs, bar=Bar(at_most=1.10), is_speed=False)
        for step, part, their_part in (
            ("connect", "connect", None),
            ("plan", "plan", None),
            ("start_attempt", "start_attempt", None),
            ("copy_partition", "copy_partition", None),
            ("copy_partition, COPY", "copy_partition: copy", "bare: copy"),
            ("copy_partition, digest", "copy_partition: digest", None),
            ("seal", "seal", None),
            ("commit_batch", "commit_batch", None),
            ("commit_batch, recount", "commit_batch: digest", None),
            ("commit_batch, merge", "commit_batch: merge", "bare: merge"),
            ("commit_batch, ledger", "commit_batch: ledger", None),
        ):
            spent = self._seconds(self._ours, part)
            if their_part:
                name, beside = f"the bare one's {their_part.removeprefix('bare: ')}", self._seconds(self._theirs, their_part)
            else:
                name, beside = f"all of {BARE}", theirs
            yield compared("guard", f"{what}: {step}", spent, name, beside, is_speed=False)

    def _seconds(self, clocks: list[_Clock], part: str) -> list[float]:
        return [clock.parts[part] for clock in clocks]

    def _guarded(self, clock: _Clock) -> None:
        """Run a batch's whole life with these rows."""
        spec = self._pipeline.spec
        with clock.part("connect"):
            store = StateStore.connect(self._project.settings)
        with store:
            with clock.statements("plan", store.engine):
                after = store.last_opened(spec.name)
                metadata = encode_metadata({"batch": after.txid + 1 if after else 1})
                (txid,) = store.open_batches(spec, f"{OWNER} {metadata!r}", [], after, [metadata]) or []
            with clock.statements("start_attempt", store.engine):
                attempt = store.start_attempt(spec, txid, OWNER)
                assert isinstance(attempt, Attempt)
            with clock.part("copy_partition"):
                staged = self._stage(attempt, clock)
            with clock.statements("seal", store.engine):
                store.seal(attempt, [staged], Tracked(source_rows=len(self._rows)))
            with clock.statements("commit_batch", store.engine):
                done = store.commit_batch(spec, txid, OWNER)
                assert done.key_count == len(self._rows)

    def _stage(self, attempt: Attempt, clock: _Clock) -> StagedPartition:
        settings, (state,) = self._project.settings, self._pipeline.spec.states
        conninfo = settings.conninfo(user=settings.pg_stager) | {"cursor_factory": clock.cursor_factory("copy_partition")}
        table = staging_table_of(state, attempt.txid, attempt.number).name
        columns = [*(column.name for column in state.columns), "task_attempt"]
        digest = digest_statement(state, attempt.txid, attempt.number)
        reader = PartialsReader(iter(self._rows.to_batches(max_chunksize=SORTED_ROWS)), state, TASK_ATTEMPT)
        rows, checksum = copy_partition(conninfo, table, columns, reader, TASK_ATTEMPT, digest)
        return StagedPartition(state.name, 0, TASK_ATTEMPT, rows, checksum)

    def _bare(self, clock: _Clock) -> None:
        """Copy and upsert the rows in one unguarded transaction."""
        conninfo = self._project.settings.conninfo(user="postgres") | {"cursor_factory": clock.cursor_factory("bare")}
        copy_and_upsert(conninfo, f"bare_{self._pipeline.name}", self._key, as_csv(self._rows))

    def _check(self, times: int) -> None:
        """Compare both tables with the rows, counted this many times."""
        keys, _, amounts = (self._rows.column(name).to_pylist() for name in self._rows.column_names)
        wanted = sorted((key, times, times * amount) for key, amount in zip(keys, amounts, strict=True))
        (state,) = self._pipeline.states
        assert self._project.state(self._pipeline, state) == wanted, f"{self._pipeline.name} is wrong"
        statement = sql.SQL("SELECT * FROM {} ORDER BY 1").format(sql.Identifier(f"bare_{self._pipeline.name}"))
        with contextlib.closing(self._project.administrator()) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            assert cursor.fetchall() == wanted, "the bare table is wrong"
