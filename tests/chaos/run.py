"""A run of chaos: work and faults at once, invariants checked meanwhile, and the states compared at the end."""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import psycopg2

from tests.chaos.faults import CELLS, Tally, strike
from tests.chaos.stack_under_test import AWAY, StackUnderTest
from tests.chaos.wire import PHASES
from tests.statements import execute

MINUTES_FOR_ALL_CELLS = 60.0  # in less time, chance may leave a cell out
SECONDS_BETWEEN_STRIKES = (0.5, 4.0)
SECONDS_BETWEEN_CHECKS = 1.0
SECONDS_TO_RECOVER = 900.0
LEDGER = """
    SELECT c.pipeline, c.txid, count(k.txid), coalesce(max(k.txid), 0), coalesce(sum(a.source_rows), 0)::bigint
    FROM tidegate.cursor c LEFT JOIN tidegate.commit k USING (pipeline)
    LEFT JOIN tidegate.attempt a ON (a.pipeline, a.txid, a.attempt) = (k.pipeline, k.txid, k.attempt)
    GROUP BY c.pipeline, c.txid
"""
# By state, whose name begins with its pipeline's: what counts the rows of the source in it.
COUNTED = {"many_sums": "sum(lines)", "several_words": "sum(lines)", "several_rows": "count(*)", "opaque_sums": "sum(lines)"}
# By state: its columns, and what DuckDB computes from the files.
STATES = {
    "many_sums": ("k, lines, total, least, most", "SELECT k, count(*), sum(v), min(v), max(v) FROM {files} GROUP BY k"),
    "several_words": ("k, lines, longest", "SELECT k, count(*), max(word) FROM {files} GROUP BY k"),
    "several_rows": ("k, v, word", "FROM {files}"),
    "several_newest": ("k, v, word", "SELECT DISTINCT ON (k) * FROM {files} ORDER BY k, v DESC, word DESC"),
    "opaque_sums": ("k, lines, total, longest", "SELECT k, count(*), sum(v), max(word) FROM {files} GROUP BY k"),
}


@dataclass
class Report:
    minutes: float
    seed: int
    tally: Tally = field(default_factory=Tally)
    cursors: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)  # of invariants, while faults happened, and of the states at the end

    @property
    def exit_code(self) -> int:
        """Return 1 if something is wrong, or a cell was not reached in the time that is enough for all."""
        return int(bool(self.violations or (self.minutes >= MINUTES_FOR_ALL_CELLS and self.tally.missing)))

    def violated(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)

    def __str__(self) -> str:
        cells = self.tally.cells
        rows = {row: [str(cells[row, phase]) if phase in of else "" for phase in PHASES] for row, of in CELLS.items()}
        table = [f"{name:48}" + "".join(f"{cell:>12}" for cell in row) for name, row in {"": PHASES, **rows}.items()]
        return "\n".join([
            f"Faults by cell (seed {self.seed})",
            *table,
            f"Not reached: {', '.join(self.tally.missing) or 'none'}",
            f"Batches committed in {self.minutes:.1f} minutes of faults: {self.cursors}",
            *(f"violated: {violation}" for violation in self.violations),
            f"states equal: {'no' if self.violations else 'yes'}",
        ])  # fmt: skip


def look(stack: StackUnderTest, report: Report) -> None:
    """Look at ledger and states in one snapshot, and note what is wrong: whole batches, in order, and never fewer."""
    with closing(psycopg2.connect(**stack.administrator)) as connection, connection.cursor() as cursor:
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        cursor.execute(LEDGER)
        for pipeline, txid, commits, last, rows in cursor.fetchall():
            if not report.cursors.get(pipeline, 0) <= txid == commits == last:
                report.violated(f"{pipeline} went from {report.cursors} to {txid}, with {commits} commits up to {last}")
            report.cursors[pipeline] = txid
            for state in (state for state in COUNTED if state.startswith(pipeline)):
                cursor.execute(f"SELECT coalesce({COUNTED[state]}, 0)::bigint, coalesce(max(txid), 0) FROM state.{state}")
                if (counted := cursor.fetchone()) != (rows, txid):
                    report.violated(f"{state} has {counted}, but {pipeline} has counted {rows} rows up to txid {txid}")


def compare(stack: StackUnderTest, report: Report) -> None:
    for state, (columns, query) in STATES.items():
        found = Counter(execute(stack.administrator, f"SELECT {columns} FROM state.{state}"))
        files = f"read_csv('{stack.home}/data/{state.partition('_')[0]}/*.csv', header = true)"
        wanted = Counter(duckdb.sql(query.format(files=files)).fetchall())
        if found != wanted:
            report.violated(f"{state} has {list((found - wanted).items())[:3]}, not {list((wanted - found).items())[:3]}")


def run(home: Path, minutes: float, seed: int) -> Report:
    """Run a stack in an empty folder under faults for some minutes, then let it finish in peace, and compare."""
    chance, report = random.Random(seed), Report(minutes, seed)
    tally = report.tally

    def keep_looking(until: threading.Event) -> None:
        while not until.wait(SECONDS_BETWEEN_CHECKS):
            with suppress(*AWAY):
                look(stack, report)

    with StackUnderTest.running(home) as stack:
        with background(keep_looking):
            with background(lambda until: stack.feed(until, with_new_files=True)):
                while not any(report.cursors.values()) and tally.seconds < SECONDS_TO_RECOVER:
                    time.sleep(SECONDS_BETWEEN_CHECKS)  # until the first batch has committed
                tally.began = time.monotonic()
                while tally.seconds < 60 * minutes:
                    if done := strike(stack, chance, tally):
                        _say(f"{tally.seconds / 60:5.1f} {done}; {sum(report.cursors.values())} batches")
                    if not stack.component("supervisor"):
                        stack.up()
                    time.sleep(chance.uniform(*SECONDS_BETWEEN_STRIKES))
            _say(f"{tally.seconds / 60:5.1f} no more faults; {stack.failed_triggers} triggers had to be repeated")
            stack.wake()
            stack.up()
            with background(lambda until: stack.feed(until, with_new_files=False)):
                stack.await_all_counted(SECONDS_TO_RECOVER)
        _say(f"{tally.seconds / 60:5.1f} all has counted, or the time is over: {stack.uncounted()} files are left")
        look(stack, report)
        compare(stack, report)
    return report


@contextmanager
def background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run something in a thread until the block ends; an error of it is an error of the block."""
    until = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(work, until)
        try:
            yield
        finally:
            until.set()
        running.result()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
