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
class FaultPlan:
    """Counts the points at which a process can die, and dies at the chosen one.

    A point is named by its statement, or as that before or after the COMMIT of the statements that have changed something.
    """

    at: int | None = None
    died_at: str | None = None
    passed: Counter[str] = field(default_factory=Counter)

    def reach(self, name: str) -> None:
        """Pass one more point, or die; after its death, a process reaches none."""
        kind = re.sub(r"\d+", "0", name)  # the names of staging tables have the txid in them
        self.passed[kind] += 1
        if self.died_at is None and self.dies(kind):
            self.died_at = name
        if self.died_at is not None:
            raise Crash(self.died_at)

    def dies(self, _kind: str) -> bool:
        """Return whether the process dies at the point that it has come to, which is of this kind."""
        return self.passed.total() == self.at

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Watch every statement, and the moments just before and just after every COMMIT."""
        changes: defaultdict[Any, list[str]] = defaultdict(list)  # of open transactions, by their connections
        here = threading.get_ident()  # a thread that shows by the clock that its process is alive dies with it

        def reach(name: str) -> None:
            if threading.get_ident() == here:
                self.reach(name)

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


@dataclass
class EachPoint(FaultPlan):
    """Lets one process after another die, each at another point, until one reaches the end.

    They die before and after the COMMIT of each kind of transaction that changes something; if ``SOAK`` is set, before each
    time that any statement is run, too.
    """

    points: list[str] = field(default_factory=list)  # at which they have died
    _tried: set[tuple[str, int]] = field(default_factory=set)

    def dies(self, kind: str) -> bool:
        """Return whether no process has died here."""
        point = (kind, self.passed[kind] if IN_FULL else 1)
        if point in self._tried or not (IN_FULL or re.match("(before|after) COMMIT of (?!nothing)", kind)):
            return False
        self._tried.add(point)
        return True

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let what runs within die, unless it passes no new point."""
        self.passed.clear()
        self.died_at = None
        try:
            with super().armed():
                yield
        except Crash as crash:
            self.points.append(str(crash))
            raise

    def deaths(self, run: Callable[[], object]) -> Iterator[Crash]:
        """Run again and again, until one run survives; yield each death."""
        while True:
            try:
                with self.armed():
                    run()
            except Crash as crash:
                yield crash
            else:
                return
