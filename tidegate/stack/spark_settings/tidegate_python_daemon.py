"""Spark's Python daemon, which ends once it has had no worker for a while; Spark starts another when a task needs one.

Spark starts a daemon per session, and ends a daemon's idle workers after a minute, but the daemon with its memory and its
threads in the server only when the server ends (SPARK-54055). Sessions of pipelines last long and are mostly idle.

Spark runs this as a module, by its setting ``spark.python.daemon.module``, from a folder of its own: so a daemon loads nothing
of this project.
"""

import os
import signal
from types import FrameType

from pyspark import daemon

SECONDS_BETWEEN_LOOKS = 5
# Looks in a row without a worker: two minutes. Spark forgets idle workers after 70 seconds at most, even those that died: it
# would tell this daemon to kill one that it remembers, and fail.
IDLE_LOOKS = 24


class Idleness:
    """Counts the looks in a row that found no worker."""

    def __init__(self) -> None:
        self._looks = 0

    def look(self, _signal: int, _frame: FrameType | None) -> None:
        """Count this look, or begin again; ask the daemon to end itself after enough of them."""
        if _has_workers():
            self._looks = 0
            return
        self._looks += 1
        if self._looks >= IDLE_LOOKS:
            os.kill(os.getpid(), signal.SIGTERM)  # as Spark does


def _has_workers() -> bool:
    """Return whether any forked worker lives; the daemon ignores the ends of its children, so none is left to wait for."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def main() -> None:
    """Run Spark's daemon, and look in between whether it has workers."""
    signal.signal(signal.SIGALRM, Idleness().look)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LOOKS)  # workers do not inherit a timer
    daemon.manager()


if __name__ == "__main__":
    main()
