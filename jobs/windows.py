"""Windows: a state has one row per key and window of event time, the time in a column of the rows.

    Tumbling   one after another: each row is in one window
    Sliding    longer than the distance between them: each row is in several
    Session    as long as rows come: rows of a key that are less than a gap apart are in one

docs/windows.md explains them, late rows, and when a window is final.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import get_args

from tidegate.jobs.aggregates import Part
from tidegate.state_store.declarations.window_spec import CORRECTIONS, LAST_EVENT, WINDOW_END, TimeType, WindowSpec

_DURATION = re.compile(r"(\d+) (microsecond|millisecond|second|minute|hour|day|week)s?")
_MICROSECOND = timedelta(microseconds=1)
# The most windows that a row may be in: it is merged once for each of them.
MOST_PER_ROW = 1000
# The longest duration: with a longer one, a window's end might be beyond what Postgres can represent.
LONGEST = timedelta(days=366_000)


@dataclass(frozen=True, kw_only=True)
class Window(ABC):
    """How a state divides time; `Tumbling` describes what all windows have in common."""

    column: str = field(kw_only=False)
    type: TimeType = "timestamptz"
    final_after: str | timedelta | None = None
    emit_final: bool = False
    keep: str | timedelta | None = None

    def __post_init__(self) -> None:
        """Check the declaration.

        Raises: ValueError, TypeError.
        """
        if self.type not in get_args(TimeType):
            raise ValueError(f"{self._name} has type={self.type!r}; use timestamptz or timestamp.")
        _ = self.spec

    @property
    @abstractmethod
    def spec(self) -> WindowSpec:
        """Return the store's view of these windows."""

    @property
    def _name(self) -> str:
        return f"{type(self).__name__}({self.column!r})"

    def _length(self, what: str, given: str | timedelta, *, least: int = 1) -> int:
        """Return a duration in microseconds; `what` is the name of its argument."""
        if isinstance(given, str):
            match = _DURATION.fullmatch(given)
            if match is None:
                raise ValueError(
                    f"{self._name}: {given!r} is no duration. Write {what} as a whole number and a unit, such as '15 minutes': "
                    "microseconds to weeks. Months and years have no fixed length."
                )
            length = int(match[1]) * (timedelta(**{f"{match[2]}s": 1}) // _MICROSECOND)
        elif isinstance(given, timedelta):
            length = given // _MICROSECOND
        else:
            raise TypeError(f"{self._name}: {what} is {given!r}; write it as text, such as '15 minutes', or as a timedelta.")
        if not least <= length <= LONGEST // _MICROSECOND:
            raise ValueError(
                f"{self._name}: {what} is {given}; use at least {least} microsecond, and at most {LONGEST.days} days."
            )
        return length

    def _final(self) -> tuple[int | None, bool, int | None]:
        """Return when windows are final, whether they are then recorded, and when they are removed."""
        if self.final_after is None:
            if self.emit_final:
                raise ValueError(f"{self._name}: emit_final needs final_after, which says when.")
            if self.keep is not None:
                raise ValueError(f"{self._name}: keep needs final_after. A late row would begin a removed window from zero.")
            return None, False, None
        final_after = self._length("final_after", self.final_after, least=0)
        if self.keep is None:
            return final_after, self.emit_final, None
        keep = self._length("keep", self.keep, least=0)
        if keep < final_after:
            raise ValueError(
                f"{self._name}: keep is {self.keep}, less than final_after, {self.final_after}. A late row would begin a "
                "removed window from zero."
            )
        return final_after, self.emit_final, keep


@dataclass(frozen=True)
class Tumbling(Window):
    """Windows of one size, one after another: ``Tumbling("at", "1 hour")``.

    `column` holds the event time: a timestamp with zone, or, with ``type="timestamp"``, one without. A window includes its
    start and not its end. Windows begin at multiples of the size since 1970-01-01 00:00 (UTC, where there is a zone), plus
    `offset`: weeks from Monday on are ``Tumbling("at", "1 week", offset="4 days")``. A day is 24 hours.

    `final_after` makes windows final: once the watermark, the greatest event time that has counted, is this much later than
    a window's end, the window never changes again. Rows that come for it later are set aside in quarantine, with the reason.
    Without it, a late row corrects its window, whenever it comes.

    With `emit_final`, each window is recorded in the table ``<state>_final`` once, in the commit that makes it final. Another
    pipeline can follow these: `tidegate.jobs.sources.changes.Changes`.

    `keep` bounds the table: once the watermark is this much later than a window's end, a commit removes the window. Only final
    windows are removed, so `keep` is at least `final_after`. It may be changed at any time; what is removed does not come back.

    Durations are texts, such as "90 seconds", "15 minutes", "1 hour", "2 days", "1 week", or `datetime.timedelta`.
    """

    size: str | timedelta
    offset: str | timedelta = timedelta(0)

    @property
    def spec(self) -> WindowSpec:
        """Return the store's view of these windows."""
        size = self._length("size", self.size)
        offset = self._length("offset", self.offset, least=0) % size
        return WindowSpec("tumbling", self.column, self.type, size, size, offset, *self._final())


@dataclass(frozen=True)
class Sliding(Window):
    """Windows of one size that overlap: ``Sliding("at", size="1 hour", every="15 minutes")``.

    A new window begins `every` so often, and `size` is a multiple of that; each row counts in ``size / every`` windows, at most
    1,000. The rest is as in `Tumbling`.
    """

    size: str | timedelta
    every: str | timedelta
    offset: str | timedelta = timedelta(0)

    @property
    def spec(self) -> WindowSpec:
        """Return the store's view of these windows."""
        size, every = self._length("size", self.size), self._length("every", self.every)
        if size % every:
            raise ValueError(f"{self._name}: the size, {self.size}, has to be a multiple of `every`, {self.every}.")
        if size // every > MOST_PER_ROW:
            raise ValueError(
                f"{self._name}: each row would be in {size // every} windows; {MOST_PER_ROW} are possible. Make `every` longer."
            )
        offset = self._length("offset", self.offset, least=0) % every
        return WindowSpec("sliding", self.column, self.type, size, every, offset, *self._final())


@dataclass(frozen=True)
class Session(Window):
    """Windows that last as long as rows come: ``Session("at", gap="30 minutes")``.

    Rows of one key that are less than the gap apart are in one session, across batches and in any order of arrival: a row that
    comes late may join two sessions, which then become one. A session begins with its first row and ends a gap after its last.

    `type`, `final_after`, `emit_final` and `keep` are those of `Tumbling`. A row that would join a final session is set aside,
    and so is one that is older than what is kept.
    """

    gap: str | timedelta

    @property
    def spec(self) -> WindowSpec:
        """Return the store's view of these windows."""
        gap = self._length("gap", self.gap)
        return WindowSpec("session", self.column, self.type, gap, gap, 0, *self._final())


def parts_of(window: WindowSpec) -> Sequence[Part]:
    """Return the columns that a state keeps for its windows, besides their start, which is part of its key."""
    return [
        Part(WINDOW_END, window.type, "max", "window_end", window.column),
        Part(LAST_EVENT, window.type, "max", "max", window.column),
        Part(CORRECTIONS, "bigint", "sum", "no_corrections"),
    ]
