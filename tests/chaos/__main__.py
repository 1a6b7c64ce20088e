"""`python -m tests.chaos MINUTES [--seed N]`: a pipeline on the embedded stack while its parts are killed, stopped and cut off.

It prints each fault as it happens, then a report. The exit code is 1 if a state differs from what DuckDB computes, an
invariant was violated, or, after an hour, a cell of the fault table was not reached.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import run
from tests.reaper import reaped


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    folder = Path(tempfile.mkdtemp(prefix="tidegate-chaos-"))
    with reaped(folder):
        (home := folder / "project").mkdir()
        report = run(home, arguments.minutes, arguments.seed)
    if report.violations:
        sys.stdout.write(f"\nThe logs are in {home}\n")
    else:
        shutil.rmtree(folder)
    sys.stdout.write(f"\n{report}\n")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
