"""Runs a command, and says how many core seconds it and all processes took that it started, servers in the background too.

    python -m tests.core_seconds pytest ...

A slow neighbour changes the minutes, and not these seconds. What still runs after the command is killed, and is an error.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from tests.reaper import die_with_make, die_with_parent

SET_CHILD_SUBREAPER = 36  # of prctl(2): orphaned descendants become children of this process, whose times it then learns
PATIENCE_SECONDS = 30


def main(command: Sequence[str]) -> int:
    die_with_make()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    started = time.monotonic()
    child = subprocess.Popen(command, preexec_fn=die_with_parent)  # noqa: PLW1509 - there is one thread
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: child.send_signal(number))
    ended, status = os.wait()
    while ended != child.pid:  # one that was left by its parent
        ended, status = os.wait()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=1)
    for process in left:
        sys.stderr.write(f"Left behind: {process}\n")
        process.kill()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stdout.write(f"{(time.monotonic() - started) / 60:.1f} minutes, {used.ru_utime + used.ru_stime:.0f} core seconds\n")
    return os.waitstatus_to_exitcode(status) or int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
