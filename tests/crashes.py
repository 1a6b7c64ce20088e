"""Processes that die at chosen points: just before and just after a COMMIT, or before any statement."""

import os
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.psycopg2 import PGDialect_psycopg2

# Otherwise processes die around COMMITs alone: what a death within a transaction leaves is what a ROLLBACK does.
IN_FULL = bool(os.environ.get("SOAK"))
COMMIT, ROLLBACK = PGDialect_psycopg2.do_commit, PGDialect_psycopg2.do_rollback
_READING = re.compile(r"SELECT (?!tidegate\.(?!epoch)\w+\()|SAVEPOINT|RELEASE|SET |SHOW ")


class Crash(BaseException):
    """The process dies here. It is not an Exception, so that no handler catches it."""


@contextmanager
def watched(
    before_statement: Callable[..., None], do_commit: Callable[..., None], do_rollback: Callable[..., None] = ROLLBACK
) -> Iterator[None]:
    """Let these functions see each statement of SQLAlchemy's engines, and send each COMMIT and ROLLBACK."""
    sa.event.listen(sa.Engine, "before_cursor_execute", before_statement)
    try:
        with patch.multiple(PGDialect_psycopg2, do_commit=do_commit, do_rollback=do_rollback):
            yield
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", before_statement)


@dataclass
class EachPoint:
    """Lets one process after another die, each at another point, until one reaches the end.

    They die before and after the COMMIT of each kind of transaction that changes something; if ``SOAK`` is set, before each
    time that any statement is run, too. A point is named by its statement, or as that before or after the COMMIT of the
    statements that have changed something.
    """

    points: list[str] = field(default_factory=list)  # at which they have died
    _died_at: str | None = None
    _passed: Counter[str] = field(default_factory=Counter)  # by the process that lives
    _tried: set[tuple[str, int]] = field(default_factory=set)

    def _reach(self, name: str) -> None:
        """Pass one more point, or die; after its death, a process reaches none."""
        kind = re.sub(r"\d+", "0", name)  # the names of staging tables have the txid in them
        self._passed[kind] += 1
        if self._died_at is None and self._is_new(kind):
            self._died_at = name
        if self._died_at is not None:
            raise Crash(self._died_at)

    def _is_new(self, kind: str) -> bool:
        """Return whether no process has died here."""
        point = (kind, self._passed[kind] if IN_FULL else 1)
        if point in self._tried or not (IN_FULL or re.match("(before|after) COMMIT of (?!nothing)", kind)):
            return False
        self._tried.add(point)
        return True

    @contextmanager
    def _armed(self) -> Iterator[None]:
        """Watch every statement, and the moments just before and just after every COMMIT."""
        changes: defaultdict[Any, list[str]] = defaultdict(list)  # of open transactions, by their connections
        here = threading.get_ident()  # a thread that shows by the clock that its process is alive dies with it

        def reach(name: str) -> None:
            if threading.get_ident() == here:
                self._reach(name)

        def changed_by(connection: Any) -> list[str]:
            return changes.pop(getattr(connection, "dbapi_connection", connection), [])

        def before_statement(_connection: object, cursor: Any, statement: str, *_: object) -> None:
            name = " ".join(statement.split())[:60]
            if not _READING.match(name):
                changes[cursor.connection].append(name)
            reach(name)

        def do_rollback(dialect: object, connection: Any) -> None:
            changed_by(connection)
            ROLLBACK(dialect, connection)

        def do_commit(dialect: object, connection: Any) -> None:
            of = f"COMMIT of {'; '.join(dict.fromkeys(changed_by(connection))) or 'nothing'}"
            reach(f"before {of}")
            COMMIT(dialect, connection)
            reach(f"after {of}")

        with watched(before_statement, do_commit, do_rollback):
            yield

    def deaths(self, run: Callable[[], object]) -> Iterator[Crash]:
        """Run again and again, until a run passes no new point and survives; yield each death."""
        while True:
            self._passed.clear()
            self._died_at = None
            try:
                with self._armed():
                    run()
            except Crash as crash:
                self.points.append(str(crash))
                yield crash
            else:
                return
