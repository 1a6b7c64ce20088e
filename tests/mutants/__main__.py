"""Plants each fault of the catalogue alone, and runs the tests that may notice it.

Tests that need Postgres alone share one stack, so that a fault costs seconds. All others start what they need: Spark's tasks
run the code that their server was started with. At the end, the tests that have noticed a fault run once without any.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tests.checkout import REPOSITORY
from tests.mutants.catalogue import PROTOCOL, ROOMS
from tests.mutants.copied_checkout import CopiedCheckout
from tests.mutants.planted_fault import DoesNotApply, Mutant

# Tests of these folders and files need no more of a stack than its Postgres.
OF_POSTGRES = ("tests/unit/", "tests/integration/", "tests/conformance/", "tests/sources/test_postgres_")
SECONDS = 300  # for the tests of one fault; what takes longer hangs
KILLED, SURVIVED, HUNG, INVALID, NOT_RUN = "killed", "SURVIVED", "killed by timeout", "INVALID", "not run"


class Run(NamedTuple):
    """A run of pytest: its exit code (None: it had to be ended), why tests failed, how long it took, the end of its output."""

    code: int | None
    failures: dict[str, str]
    seconds: float
    output: str


class Outcome(NamedTuple):
    """What became of a fault, after how many seconds; the test that noticed it and what it said, or what was wrong."""

    what: str
    seconds: float = 0.0
    by: str = ""
    why: str = ""


class Runner:
    """Runs tests in a copy of the checkout."""

    def __init__(self, copy: CopiedCheckout, stack: Path | None, seconds: int) -> None:
        self._copy, self._stack, self._seconds = copy, stack, seconds

    def outcome(self, mutant: Mutant) -> Outcome:
        """Plant a fault, run the tests that may notice it, and take it out again."""
        try:
            planted = mutant.planted_in(self._copy.folder)
        except DoesNotApply as why:
            return Outcome(INVALID, why=f"it does not apply: {why}")
        before = (self._copy.folder / mutant.file).read_text()
        self._copy.write(mutant.file, planted)
        try:
            run = self.run(["-x"], mutant.tests, self._seconds)
        finally:
            self._copy.write(mutant.file, before)
        for test, why in run.failures.items():
            return Outcome(KILLED, run.seconds, test, why)
        if run.code is None:
            return Outcome(HUNG, run.seconds, why=f"nothing had failed within {self._seconds} s")
        if run.code != 0:
            return Outcome(INVALID, run.seconds, why=f"pytest ended with {run.code}: {run.output}")
        return Outcome(SURVIVED, run.seconds)

    def failing(self, tests: Collection[str]) -> dict[str, str]:
        """Return those of these tests that fail without any fault, and why."""
        found: dict[str, str] = {}
        for _, of_folder in groupby(sorted(tests), key=lambda test: test.split("/")[1]):
            some = list(of_folder)
            run = self.run([], some, 600 + 60 * len(some))
            found |= run.failures
            if run.code not in (0, 1):
                found |= dict.fromkeys(some, f"pytest ended with {run.code}: {run.output}")
        return found

    def run(self, arguments: Sequence[str], tests: Sequence[str], seconds: int) -> Run:
        """Run pytest in the copy, for so many seconds at most."""
        command = [str(self._copy.python), "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
        command += ["--timeout", str(self._seconds), *arguments, *tests]
        environment = {**os.environ, "COLUMNS": "400"}  # so that lines of the summary are whole
        if self._stack is not None and all(test.startswith(OF_POSTGRES) for test in tests):
            environment["STACK_OF_TESTS"] = str(self._stack)
        piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
        began = time.monotonic()
        with subprocess.Popen(command, cwd=self._copy.folder, env=environment, start_new_session=True, **piped) as pytest:
            try:
                output, _ = pytest.communicate(timeout=seconds + 60)
                code = pytest.returncode
            except subprocess.TimeoutExpired:
                os.killpg(pytest.pid, signal.SIGKILL)  # the reaper of its tests ends what they have started
                output, code = pytest.communicate()[0], None
        failed = r"^(?:FAILED|ERROR) (tests/[^\s\[]+(?:\[.*?\](?= - |$))?)(?: - (.*))?$"
        failures = dict(re.findall(failed, output, re.MULTILINE))
        return Run(code, failures, time.monotonic() - began, " / ".join(output.strip().splitlines()[-3:])[:500])


def needs_more_than_postgres(mutant: Mutant) -> bool:
    """Return whether a test of a fault starts a stack of its own."""
    return not all(test.startswith(OF_POSTGRES) for test in mutant.tests)


@contextmanager
def shared_stack(mutants: Sequence[Mutant]) -> Iterator[Path | None]:
    """Run a stack of this checkout's code for the faults whose tests need Postgres alone; none if there are none."""
    if all(map(needs_more_than_postgres, mutants)):
        yield None
        return
    from tests import reaper, servers  # noqa: PLC0415 - they load Tidegate, which --list does without

    with tempfile.TemporaryDirectory(prefix="mutants-stack-", ignore_cleanup_errors=True) as home:
        Path(home).chmod(0o711)
        with reaper.reaped(Path(home)), servers.running_stack(Path(home)) as settings:
            yield settings.home


def chosen(names: Sequence[str], rooms: Sequence[str]) -> list[Mutant]:
    """Return the faults of these names, or of these rooms, or all."""
    everything = [mutant for of_room in ROOMS.values() for mutant in of_room]
    if unknown := set(names) - {mutant.name for mutant in everything}:
        sys.exit(f"There is no mutant {min(unknown)}. See: python -m tests.mutants --list")
    if names:
        return [mutant for mutant in everything if mutant.name in names]
    wanted = [room for name in rooms or ROOMS for room in (PROTOCOL if name == "protocol" else (name,))]
    return [mutant for room in wanted for mutant in ROOMS[room]]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--room", action="append", default=[], choices=("protocol", *ROOMS), help="may be repeated")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES", help="begin none after so long")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for the tests of one fault")
    parser.add_argument("--list", action="store_true", help="only show which there are")
    asked = parser.parse_args()
    mutants = chosen(asked.names, asked.room)
    if asked.list:
        for mutant in mutants:
            say(f"{mutant.name:60} {mutant.breaks:12} {mutant.file}, {mutant.function}")
        return 0
    ends_at, outcomes = time.monotonic() + 60 * asked.budget, {}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)))
        folder.chmod(0o755)  # other accounts run what the tests start
        copy = CopiedCheckout(folder.resolve() / REPOSITORY.name)
        copy.check()
        runner = Runner(copy, held.enter_context(shared_stack(mutants)), asked.seconds)
        for mutant in sorted(mutants, key=needs_more_than_postgres):  # cheap ones first
            outcome = runner.outcome(mutant) if time.monotonic() < ends_at else Outcome(NOT_RUN)
            outcomes[mutant.name] = outcome
            say(f"{mutant.name:60} {mutant.breaks:6} {outcome.what:10} {outcome.seconds:4.0f} s  {outcome.by}  {outcome.why}")
        unsound = runner.failing({outcome.by for outcome in outcomes.values() if outcome.what == KILLED})
    return conclude(outcomes, unsound)


def conclude(outcomes: dict[str, Outcome], unsound: dict[str, str]) -> int:
    """Say what is wrong; return the exit code."""
    wrong = {name: outcome.what for name, outcome in outcomes.items() if outcome.what in (SURVIVED, INVALID)}
    for test, why in unsound.items():
        wrong |= {name: f"without it, {test} fails too: {why}" for name, outcome in outcomes.items() if outcome.by == test}
    left = sum(outcome.what == NOT_RUN for outcome in outcomes.values())
    say(f"{len(outcomes) - len(wrong) - left} of {len(outcomes)} faults were noticed, {left} not planted for lack of time.")
    for name, what in wrong.items():
        say(f"{name}: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
