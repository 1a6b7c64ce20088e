"""Spark's Python daemon, which ends once it has had no worker for a while; Spark starts another when a task needs one.

Spark starts a daemon per session, and ends a daemon's idle workers after a minute, but the daemon with its memory and its
threads in the server only when the server ends (SPARK-54055). Sessions of pipelines last long and are mostly idle.

Its workers report each error of Python. Spark announces an error before it encodes its text: of one with half a character (a
lone surrogate, as JSON may bring), nothing follows, and the task would hold its core for ever. Here such a text is escaped.

Spark runs this as a module, by its setting ``spark.python.daemon.module``, from a folder of its own: so a daemon loads nothing
of this project.
"""

import os
import signal
import traceback
from types import FrameType
from typing import IO

from pyspark import daemon, util, worker

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


_report = util.handle_worker_exception


def report_escaped(e: BaseException, outfile: IO[bytes], hide_traceback: bool | None = None) -> None:
    """Report a worker's error to Spark, as Spark does, with a text that can be encoded."""
    try:
        "".join(traceback.format_exception(e)).encode()
    except UnicodeEncodeError:
        e = _escaped(e)
    _report(e, outfile, hide_traceback)


def _escaped(error: BaseException) -> BaseException:
    """Return an error whose class is called the same, and whose text, with those of its causes, is escaped."""
    kind = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})
    escaped: BaseException = kind(str(error).encode(errors="backslashreplace").decode())
    escaped.__cause__, escaped.__context__ = (each and _escaped(each) for each in (error.__cause__, error.__context__))
    escaped.__suppress_context__ = error.__suppress_context__
    return escaped


def main() -> None:
    """Run Spark's daemon, and look in between whether it has workers."""
    for module in (util, worker):
        setattr(module, "handle_worker_exception", report_escaped)  # noqa: B010 - for the type checker the name is not worker's
    signal.signal(signal.SIGALRM, Idleness().look)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LOOKS)  # workers do not inherit a timer
    daemon.manager()


if __name__ == "__main__":
    main()
