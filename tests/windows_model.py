"""Windows in plain Python: what a state has to hold after some batches, event by event."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.store import WindowSpec

# An event: its key, its time in microseconds since 1970, its amount.
Event = tuple[Any, int, int | None]


@dataclass
class Kept:
    """A window with its events."""

    key: Any
    start: int
    end: int
    events: list[Event]
    corrections: int = 0

    @property
    def row(self) -> tuple[Any, ...]:
        """Return the window as a state's row has it: count, sum, last event."""
        amounts = [amount or 0 for _, _, amount in self.events]
        return (self.key, self.start, self.end, max(time for _, time, _ in self.events), len(amounts), sum(amounts))


def piece_of(window: WindowSpec, time: int) -> int:
    """Return the start of the stretch of time to which an event belongs."""
    return time - (time - window.offset) % window.every


def windows_of(window: WindowSpec, time: int) -> list[tuple[int, int]]:
    """Return start and end of each tumbling or sliding window that an event is in, found by looking at all near it."""
    near = range(-window.per_piece - 1, 2)
    starts = [piece_of(window, time) + number * window.every for number in near]
    return [(start, start + window.size) for start in starts if start <= time < start + window.size]


def sessions_of(window: WindowSpec, events: Iterable[Event]) -> list[Kept]:
    """Return the sessions of all events in one pass: a new one where the next event is not less than the gap later."""
    found: list[Kept] = []
    for event in sorted(events, key=lambda event: (repr(event[0]), event[1])):
        last = found[-1] if found else None
        if last and last.key == event[0] and event[1] < last.end:
            last.events.append(event)
            last.end = event[1] + window.size
        else:
            found.append(Kept(event[0], event[1], event[1] + window.size, [event]))
    return found


@dataclass
class Model:
    """The windows of a state after each batch; what was late, and what became final, by batch."""

    window: WindowSpec
    kept: list[Kept] = field(default_factory=list)
    late: list[list[tuple[Any, ...]]] = field(default_factory=list)
    final: list[list[tuple[Any, ...]]] = field(default_factory=list)
    watermark: int | None = None
    removed_until: int | None = None

    def add(self, events: list[Event]) -> None:
        """Count a batch."""
        before, watermark = self._final_until(), self.watermark
        counted = self._add_sessions(events) if self.window.is_session else self._add_windows(events)
        self.watermark = max(
            [time for _, time, _ in counted] + ([] if self.watermark is None else [self.watermark]), default=None
        )
        until = self._final_until()
        self.final.append(
            sorted(
                (
                    kept.row
                    for kept in self.kept
                    if until is not None and (before is None or before < kept.end) and kept.end <= until
                ),
                key=repr,
            )
        )
        if self.window.keep is not None and watermark is not None:
            until = watermark - self.window.keep
            self.removed_until = until if self.removed_until is None else max(until, self.removed_until)
            self.kept = [kept for kept in self.kept if kept.end > self.removed_until]

    def rows(self) -> list[tuple[Any, ...]]:
        """Return all rows with their corrections."""
        return sorted(((*kept.row, kept.corrections) for kept in self.kept), key=repr)

    def recorded(self) -> dict[int, list[tuple[Any, ...]]]:
        """Return the windows that became final, by txid."""
        return {txid: rows for txid, rows in enumerate(self.final, start=1) if rows}

    def _final_until(self) -> int | None:
        if self.watermark is None or self.window.final_after is None:
            return None
        return self.watermark - self.window.final_after

    def _is_final(self, end: int) -> bool:
        until = self._final_until()
        return until is not None and end <= until

    def _has_ended(self, end: int) -> bool:
        return self.watermark is not None and end <= self.watermark

    def _add_windows(self, events: list[Event]) -> list[Event]:
        brought: dict[tuple[Any, int, int], list[Event]] = {}
        for event in events:
            for start, end in windows_of(self.window, event[1]):
                brought.setdefault((event[0], start, end), []).append(event)
        late, counted = [], []
        for (key, start, end), found in brought.items():
            if self._is_final(end):
                late.append(Kept(key, start, end, found).row)
                continue
            counted += found
            kept = next((kept for kept in self.kept if (kept.key, kept.start) == (key, start)), None)
            if kept is None:
                kept = Kept(key, start, end, [])
                self.kept.append(kept)
            kept.events += found
            kept.corrections += self._has_ended(end)
        self.late.append(sorted(late, key=repr))
        return counted

    def _add_sessions(self, events: list[Event]) -> list[Event]:
        by_piece: dict[tuple[Any, int], list[Event]] = {}
        for event in events:
            by_piece.setdefault((event[0], piece_of(self.window, event[1])), []).append(event)
        pieces = [
            Kept(key, min(t for _, t, _ in found), max(t for _, t, _ in found) + self.window.size, found)
            for (key, _), found in by_piece.items()
        ]

        def touch(one: Kept, other: Kept) -> bool:
            return one.key == other.key and one.start < other.end and other.start < one.end

        final = [kept for kept in self.kept if self._is_final(kept.end)]
        still_open = [kept for kept in self.kept if kept not in final]
        late = [
            piece
            for piece in pieces
            if any(touch(piece, kept) for kept in final)
            or (self.removed_until is not None and piece.start < self.removed_until)
        ]
        rest = [piece for piece in pieces if piece not in late]
        counted: list[Event] = []
        result = [*final, *(kept for kept in still_open if not any(touch(kept, piece) for piece in rest))]
        united = sessions_of(
            self.window, [e for kept in [*rest, *(k for k in still_open if k not in result)] for e in kept.events]
        )
        for session in united:
            parts = [kept for kept in still_open if kept not in result and kept.events[0] in session.events]
            if self._is_final(session.end):
                late += [piece for piece in rest if piece.events[0] in session.events]
                continue
            session.corrections = sum(kept.corrections for kept in parts)
            session.corrections += any(self._has_ended(kept.end) for kept in parts) or self._has_ended(session.end)
            counted += session.events
            result.append(session)
        self.kept = result
        self.late.append(sorted((piece.row for piece in late), key=repr))
        return counted
