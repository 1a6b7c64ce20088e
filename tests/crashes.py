"""Processes that die at chosen points: before a statement, and just before and just after a COMMIT."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.psycopg2 import PGDialect_psycopg2


class Crash(BaseException):
    """The process dies here. It is not an Exception, so that no handler catches it."""


@dataclass
class FaultPlan:
    """Counts the points at which a process can die, and dies at the chosen one."""

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

        def before_statement(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            self.reach(" ".join(statement.split())[:60])

        real_commit = PGDialect_psycopg2.do_commit

        def do_commit(dialect: object, connection: object) -> None:
            self.reach("before COMMIT")
            real_commit(dialect, connection)
            self.reach("after COMMIT")

        sa.event.listen(sa.Engine, "before_cursor_execute", before_statement)
        try:
            with patch.object(PGDialect_psycopg2, "do_commit", do_commit):
                yield
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", before_statement)


# Otherwise, not before statements that change nothing, and before the others only the first time that a process runs them:
# to die before the first of the next ones, or before the COMMIT, leaves the same in the database.
IN_FULL = bool(os.environ.get("SOAK"))
_READING = re.compile(r"SELECT (?!tidegate\.)|SAVEPOINT|RELEASE|SET |SHOW ")


class _NextPlan(FaultPlan):
    """Dies at the first point where none of its predecessors has died."""

    def __init__(self, died_at: set[tuple[str, int]]) -> None:
        super().__init__()
        self._died_at = died_at
        self._passed: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        """Pass one more point, or die."""
        statement = re.sub(r"\d+", "0", name)  # the names of staging tables have the txid in them
        self._passed[statement] += 1
        if self.at is None and (IN_FULL or not _READING.match(name)):
            point = (statement, self._passed[statement] if IN_FULL or "COMMIT" in name else 1)
            if point not in self._died_at:
                self._died_at.add(point)
                self.at = len(self.points) + 1
        super().reach(name)


class EachPoint:
    """Lets one process after another die, each at another point, until one reaches the end.

    They die around each COMMIT and before each different statement that changes something; if ``SOAK`` is set, before each
    time that any statement is run.
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
