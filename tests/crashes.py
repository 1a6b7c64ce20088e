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
_READING = re.compile(r"SELECT (?!tidegate\.(?!epoch)\w+\()|SAVEPOINT|RELEASE|SET |SHOW ")


class Crash(BaseException):
    """The process dies here. It is not an Exception, so that no handler catches it."""


@dataclass
class FaultPlan:
    """Counts the points at which a process can die, and dies at the chosen one.

    A point is named by its statement, or as that before or after the COMMIT of the statements that have changed something.
    """

    at: int | None = None
    points: list[str] = field(default_factory=list)

    def reach(self, name: str) -> None:
        """Pass one more point, or die; after its death, a process reaches none."""
        self.points.append(name)
        if self.at is not None and len(self.points) >= self.at:
            raise Crash(self.points[self.at - 1])

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Watch every statement, and the moments just before and just after every COMMIT."""
        changes: defaultdict[Any, list[str]] = defaultdict(list)  # of open transactions, by their connections
        here = threading.get_ident()  # a thread that shows by the clock that its process is alive dies with it

        def before_statement(_connection: object, cursor: Any, statement: str, *_: object) -> None:
            name = " ".join(statement.split())[:60]
            if not _READING.match(name):
                changes[cursor.connection].append(name)
            if threading.get_ident() == here:
                self.reach(name)

        def changed_by(connection: Any) -> list[str]:
            return changes.pop(getattr(connection, "dbapi_connection", connection), [])

        real_commit, real_rollback = PGDialect_psycopg2.do_commit, PGDialect_psycopg2.do_rollback

        def do_rollback(dialect: object, connection: Any) -> None:
            changed_by(connection)
            real_rollback(dialect, connection)

        def do_commit(dialect: object, connection: Any) -> None:
            if threading.get_ident() != here:
                real_commit(dialect, connection)
                return
            changed = dict.fromkeys(changed_by(connection))
            of = f"COMMIT of {'; '.join(changed) or 'nothing'}"
            self.reach(f"before {of}")
            real_commit(dialect, connection)
            self.reach(f"after {of}")

        sa.event.listen(sa.Engine, "before_cursor_execute", before_statement)
        try:
            with patch.multiple(PGDialect_psycopg2, do_commit=do_commit, do_rollback=do_rollback):
                yield
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", before_statement)


class _NextPlan(FaultPlan):
    """Dies at the first point where none of its predecessors has died."""

    def __init__(self, died_at: set[tuple[str, int]]) -> None:
        super().__init__()
        self._died_at = died_at
        self._passed: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        """Pass one more point, or die."""
        kind = re.sub(r"\d+", "0", name)  # the names of staging tables have the txid in them
        self._passed[kind] += 1
        is_commit = re.match("(before|after) COMMIT of (?!nothing)", name)
        if self.at is None and (IN_FULL or is_commit):
            point = (kind, self._passed[kind] if IN_FULL else 1)
            if point not in self._died_at:
                self._died_at.add(point)
                self.at = len(self.points) + 1
        super().reach(name)


class EachPoint:
    """Lets one process after another die, each at another point, until one reaches the end.

    They die before and after the COMMIT of each kind of transaction that changes something; if ``SOAK`` is set, before each
    time that any statement is run, too.
    """

    def __init__(self) -> None:
        self.points: list[str] = []
        self._died_at: set[tuple[str, int]] = set()

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let what runs within die, unless it passes no new point."""
        with _NextPlan(self._died_at).armed():
            try:
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
