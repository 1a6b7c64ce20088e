"""A run of chaos: work and faults at once, invariants checked meanwhile, and the states compared at the end."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg2

from tests.chaos import pipelines
from tests.chaos.faults import Tally, strike
from tests.chaos.report import Report
from tests.chaos.stack_under_test import StackUnderTest

SECONDS_BETWEEN_STRIKES = (0.5, 4.0)
SECONDS_BETWEEN_CHECKS = 1.0
SECONDS_TO_RECOVER = 900.0
LEDGER = """
    SELECT c.pipeline, c.txid, count(k.txid), coalesce(max(k.txid), 0), coalesce(sum(a.source_rows), 0)::bigint
    FROM tidegate.cursor c LEFT JOIN tidegate.commit k USING (pipeline)
    LEFT JOIN tidegate.attempt a ON (a.pipeline, a.txid, a.attempt) = (k.pipeline, k.txid, k.attempt)
    GROUP BY c.pipeline, c.txid
"""


class Watch:
    """Looks at ledger and states, in one snapshot each time: whole batches, in order, and never fewer."""

    def __init__(self, stack: StackUnderTest) -> None:
        self.violations: list[str] = []
        self.cursors: dict[str, int] = {}
        self._stack = stack

    def look(self) -> None:
        """Note what is wrong in a snapshot.

        Raises: psycopg2.OperationalError while Postgres is away.
        """
        with closing(self._stack.connect()) as connection:
            connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
            with connection.cursor() as cursor:
                cursor.execute(LEDGER)
                for pipeline, txid, commits, last, rows in cursor.fetchall():
                    if txid < self.cursors.get(pipeline, 0):
                        self._violated(f"the cursor of {pipeline} went back from {self.cursors[pipeline]} to {txid}")
                    if not txid == commits == last:
                        self._violated(f"the cursor of {pipeline} is at {txid}, with {commits} commits up to {last}")
                    self.cursors[pipeline] = txid
                    for state, count in pipelines.COUNTED[pipeline].items():
                        cursor.execute(f"SELECT coalesce({count}, 0)::bigint, coalesce(max(txid), 0) FROM state.{state}")
                        if (counted := cursor.fetchone()) != (rows, txid):
                            self._violated(f"{state} has {counted}, but {pipeline} has counted {rows} rows up to txid {txid}")

    def keep_looking(self, until: threading.Event) -> None:
        while not until.wait(SECONDS_BETWEEN_CHECKS):
            with suppress(psycopg2.OperationalError, psycopg2.InterfaceError):
                self.look()

    def _violated(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)


def run(home: Path, minutes: float, seed: int) -> Report:
    """Run a stack in an empty folder under faults for some minutes, then let it finish in peace, and compare."""
    chance, tally = random.Random(seed), Tally()
    with StackUnderTest.running(home) as stack:
        watch = Watch(stack)
        with _background(watch.keep_looking):
            with _background(lambda until: stack.feed(until, with_new_files=True)):
                while not any(watch.cursors.values()) and tally.seconds < SECONDS_TO_RECOVER:
                    time.sleep(SECONDS_BETWEEN_CHECKS)  # until the first batch has committed
                tally.began = time.monotonic()
                while tally.seconds < 60 * minutes:
                    if done := strike(stack, chance, tally):
                        _say(f"{tally.seconds / 60:5.1f} {done}; {sum(watch.cursors.values())} batches")
                    if not stack.is_supervised():
                        stack.up()
                    time.sleep(chance.uniform(*SECONDS_BETWEEN_STRIKES))
            _say(f"{tally.seconds / 60:5.1f} no more faults; {stack.failed_triggers} triggers had to be repeated")
            stack.wake()
            stack.up()
            with _background(lambda until: stack.feed(until, with_new_files=False)):
                stack.await_all_counted(SECONDS_TO_RECOVER)
        _say(f"{tally.seconds / 60:5.1f} all has counted, or the time is over: {stack.uncounted()} files are left")
        watch.look()
        wanted = pipelines.wanted(home)
        with closing(stack.connect()) as connection:
            compared = {state: pipelines.difference(rows, wanted[state]) for state, rows in pipelines.found(connection).items()}
    return Report(minutes, seed, tally, watch.cursors, watch.violations, {s: how for s, how in compared.items() if how})


@contextmanager
def _background(work: Callable[[threading.Event], None]) -> Iterator[None]:
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
