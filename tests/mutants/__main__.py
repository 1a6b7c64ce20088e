"""Plants each fault of the catalogue alone, and runs the tests that may notice it.

Tests that need Postgres alone share one stack, so that a fault costs seconds. All others start what they need: Spark's tasks
run the code that their server was started with.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.checkout import REPOSITORY
from tests.mutants.catalogue import ROOMS
from tests.mutants.copied_checkout import CopiedCheckout
from tests.mutants.first_failure import FOLDER, REPORT
from tests.mutants.planted_fault import DoesNotApply, Mutant

# Tests of these folders need no more of a stack than its Postgres.
OF_POSTGRES = ("tests/unit/", "tests/integration/", "tests/conformance/")
SECONDS = 300  # for the tests of one fault; what takes longer hangs
KILLED, SURVIVED, HUNG, INVALID, NOT_RUN = "killed", "SURVIVED", "killed by timeout", "INVALID", "not run"


class Outcome(NamedTuple):
    """What became of a fault, after how many seconds; the test that noticed it, and what it says, or what was wrong."""

    what: str
    seconds: float = 0.0
    by: str = ""
    why: str = ""

    @property
    def is_good(self) -> bool:
        """Return whether a test of behaviour has noticed it."""
        return self.what in (KILLED, HUNG)


class Runner:
    """Runs tests in a copy of the checkout."""

    def __init__(self, copy: CopiedCheckout, stack: Path | None, seconds: int) -> None:
        self._copy = copy
        self._stack = stack
        self._seconds = seconds
        self._sound: dict[str, bool] = {}  # tests that have noticed a fault: whether they pass without one

    def outcome(self, mutant: Mutant) -> Outcome:
        """Plant a fault, run the tests that may notice it, and take it out again."""
        try:
            planted = mutant.planted_in(self._copy.folder)
        except DoesNotApply as why:
            return Outcome(INVALID, by=f"it does not apply: {why}")
        before = (self._copy.folder / mutant.file).read_text()
        self._copy.write(mutant.file, planted)
        try:
            found = self._run_in_turn(mutant.noticed_by)
        finally:
            self._copy.write(mutant.file, before)
        if found.what == KILLED and not self._passes(found.by):
            return Outcome(INVALID, found.seconds, f"without the fault, it fails too: {found.by}")
        return found

    def _run_in_turn(self, tests: Sequence[str]) -> Outcome:
        """Run single tests before whole files, which may have the same ones."""
        first, seconds = Outcome(SURVIVED), 0.0
        for some in ([test for test in tests if "::" in test], [test for test in tests if "::" not in test]):
            if some and first.what == SURVIVED:
                first = self._run(some)
                seconds += first.seconds
        return first._replace(seconds=seconds)

    def _passes(self, test: str) -> bool:
        if test not in self._sound:
            self._sound[test] = self._run([test]).what == SURVIVED
        return self._sound[test]

    def _run(self, tests: Sequence[str]) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            environment = {**os.environ, REPORT: str(report), FOLDER: str(self._copy.folder)}
            if self._stack is not None and all(test.startswith(OF_POSTGRES) for test in tests):
                environment["STACK_OF_TESTS"] = str(self._stack)
            arguments = ["-x", "-q", "--no-header", "-p", "tests.mutants.first_failure", "-p", "no:cacheprovider"]
            began = time.monotonic()
            code, output = self._pytest([*arguments, "--timeout", str(self._seconds), *tests], environment)
            seconds = time.monotonic() - began
            if report.exists():
                first = json.loads(report.read_text())
                return Outcome(KILLED, seconds, first["test"], first["why"])
            if code is None:
                return Outcome(HUNG, seconds, f"nothing failed within {self._seconds} s")
            return Outcome(SURVIVED, seconds) if code == 0 else Outcome(INVALID, seconds, f"pytest ended with {code}: {output}")

    def _pytest(self, arguments: Sequence[str], environment: dict[str, str]) -> tuple[int | None, str]:
        """Run pytest in the copy; return its code, None if it had to be ended, and the end of its output."""
        command = [str(self._copy.python), "-m", "pytest", *arguments]
        with subprocess.Popen(
            command,
            cwd=self._copy.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=self._seconds + 60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # pytest's reaper ends what it has started
                time.sleep(1)
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return None, ""
        return process.returncode, " / ".join(output.strip().splitlines()[-3:])[:500]


@contextmanager
def shared_stack(mutants: Sequence[Mutant]) -> Iterator[Path | None]:
    """Run a stack of this checkout's code for the faults whose tests need Postgres alone; none if there are none."""
    if not any(all(test.startswith(OF_POSTGRES) for test in mutant.noticed_by) for mutant in mutants):
        yield None
        return
    from tests import reaper  # noqa: PLC0415 - loads Tidegate, which --list does without
    from tests.conftest import running_stack  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="mutants-stack-") as home:
        Path(home).chmod(0o711)
        with reaper.reaped(Path(home)), running_stack(Path(home)) as settings:
            yield settings.home


def chosen(names: Sequence[str], room: str | None) -> list[Mutant]:
    """Return the faults of these names, or of a room, or all."""
    everything = [mutant for of_room in ROOMS.values() for mutant in of_room]
    if unknown := set(names) - {mutant.name for mutant in everything}:
        sys.exit(f"There is no mutant {min(unknown)}. See: python -m tests.mutants --list")
    of_room = everything if room is None else list(ROOMS[room])
    return [mutant for mutant in of_room if not names or mutant.name in names]


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the chosen faults; return 0 if a test of behaviour has noticed each."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--room", choices=ROOMS)
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES", help="begin none after so long")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for the tests of one fault")
    parser.add_argument("--list", action="store_true", help="only show which there are")
    asked = parser.parse_args()
    mutants = chosen(asked.names, asked.room)
    if asked.list:
        for mutant in mutants:
            say(f"{mutant.name:45} {mutant.breaks:12} {mutant.file}, {mutant.function}")
        return 0
    ends_at, outcomes = time.monotonic() + 60 * asked.budget, {}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)))
        folder.chmod(0o755)  # other accounts run what the tests start
        copy = CopiedCheckout(folder.resolve() / REPOSITORY.name)
        copy.check()
        runner = Runner(copy, held.enter_context(shared_stack(mutants)), asked.seconds)
        for mutant in mutants:
            outcome = runner.outcome(mutant) if time.monotonic() < ends_at else Outcome(NOT_RUN)
            outcomes[mutant.name] = outcome
            say(f"{mutant.name:45} {mutant.breaks:6} {outcome.what:10} {outcome.seconds:5.0f} s  {outcome.by}  {outcome.why}")
    wrong = [name for name, outcome in outcomes.items() if not outcome.is_good and outcome.what != NOT_RUN]
    left = sum(outcome.what == NOT_RUN for outcome in outcomes.values())
    say(f"{len(outcomes) - len(wrong) - left} of {len(outcomes)} noticed; not run: {left}; wrong: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
