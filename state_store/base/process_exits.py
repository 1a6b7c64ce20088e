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
    """Let `os._exit`, called in this thread, raise SystemExit, as `sys.exit` does. A child that the code forks may end."""
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
    _end_process(status)
