"""Keeps code of authors from ending the process that calls it, by `sys.exit` or `os._exit`."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_end_process = os._exit
_calling = threading.local()


@contextmanager
def as_errors() -> Iterator[None]:
    """Let `os._exit`, called in this thread, raise SystemExit, as `sys.exit` does. A child that the code forks may end.

    In a thread that the code starts it ends this process, but says so, and never as a success: SystemExit would end that thread
    alone, and the code would go on without its work.
    """
    os._exit = _leave  # for good: threads that call authors' code at the same time share it
    before = getattr(_calling, "pid", None)
    _calling.pid = os.getpid()
    try:
        yield
    finally:
        _calling.pid = before


def _leave(status: int) -> NoReturn:
    if getattr(_calling, "pid", None) == os.getpid():
        raise SystemExit(status)
    if threading.current_thread() is not threading.main_thread():  # in a child, the thread that has forked it is the main one
        os.write(2, f"A thread of an author's code has ended this process by os._exit({status}).\n".encode())
        status = status or 1
    _end_process(status)
