"""Windows in plain Python: what a state has to hold after some batches, event by event."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.store import WindowSpec

# An event: its key, its time in microseconds since 1970, its amount.
Event = tuple[Any, int, int | None]
MINUTE = 60 * 1_000_000
HOUR = 60 * MINUTE
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def microseconds(time: datetime) -> int:
    return (time.replace(tzinfo=time.tzinfo or UTC) - EPOCH) // timedelta(microseconds=1)


def of_row(row: Any) -> tuple[Any, ...]:
    """Return a state's row, or one that came too late, as `Kept.row` and `Model.rows` have it."""
    times = [row[name] for name in ("window_start", "window_end", "last_event")]
    times = [microseconds(datetime.fromisoformat(time) if isinstance(time, str) else time) for time in times]
    return (row.get("key"), *times, row["events"], row["amount"], *([row["corrections"]] if "corrections" in row else []))


def by_txid(changes: Iterable[Any]) -> dict[int, list[tuple[Any, ...]]]:
    """Return recorded windows as `Model.recorded` has them."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for row in changes:
        found.setdefault(row["txid"], []).append(of_row(row)[:6])
    return {txid: sorted(rows, key=repr) for txid, rows in found.items()}


def events_of(seed: int, count: int, *, origin: int = 0) -> list[Event]:
    """Return events that mostly go forward in time, at whole minutes, so that many are equal and at bounds."""
    rng, back = random.Random(seed), [0, 0, 1, 5, 20, 60, 90, 200, 400]
    times = [origin + (number * 9 - rng.choice(back)) * MINUTE + rng.choice([0, 0, -1, 1]) for number in range(count)]
    return [(rng.choice(["a", "a", "b", "b", None]), time, rng.choice([None, 0, 1, -5, 2**40])) for time in times]


@dataclass
class Kept:
    """A window, or a part of a session, with its events."""

    key: Any
    start: int
    end: int
    events: list[Event]
    corrections: int = 0

    @property
    def row(self) -> tuple[Any, ...]:
        """The window as a state's row has it: last event, count, sum."""
        amounts = [amount or 0 for _, _, amount in self.events]
        return (self.key, self.start, self.end, max(time for _, time, _ in self.events), len(amounts), sum(amounts))


def piece_of(window: WindowSpec, time: int) -> int:
    """Return the start of the stretch of time to which an event belongs."""
    return time - (time - window.offset) % window.every


def sessions_of(window: WindowSpec, events: Iterable[Event]) -> list[Kept]:
    """Return the sessions of all events in one pass: a new one where the next event is not less than the gap later."""
    found: list[Kept] = []
    for key, time, amount in sorted(events, key=lambda event: (repr(event[0]), event[1])):
        if not (found and found[-1].key == key and time < found[-1].end):
            found.append(Kept(key, time, time, []))
        found[-1].events.append((key, time, amount))
        found[-1].end = time + window.size
    return found


def _is_past(end: int, until: int | None) -> bool:
    return until is not None and end <= until


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
        """Count a batch, which is judged by the watermark after the one before."""
        watermark, until = self.watermark, self._final_until()
        pieces, final = self._pieces(events), [kept for kept in self.kept if _is_past(kept.end, until)]
        late = [piece for piece in pieces if self._is_of_removed(piece) or any(self._touch(piece, kept) for kept in final)]
        new = [piece for piece in pieces if piece not in late]
        old = [kept for kept in self.kept if kept not in final and any(self._touch(kept, piece) for piece in new)]
        self.kept = [kept for kept in self.kept if kept not in old]
        for parts in self._united([*old, *new]):
            end = max(part.end for part in parts)
            if _is_past(end, until):
                late += parts
                continue
            is_corrected = any(_is_past(ended, watermark) for ended in (end, *(part.end for part in parts if part in old)))
            counted, so_far = [event for part in parts for event in part.events], sum(part.corrections for part in parts)
            self.kept.append(Kept(parts[0].key, parts[0].start, end, counted, so_far + is_corrected))
            times = [time for _, time, _ in counted]
            self.watermark = max(times if self.watermark is None else [*times, self.watermark])
        self.late.append(_rows(late))
        now = self._final_until()
        self.final.append(_rows(k for k in self.kept if _is_past(k.end, now) and not _is_past(k.end, until)))
        if self.window.keep is not None and watermark is not None:
            self.removed_until = watermark - self.window.keep
            self.kept = [kept for kept in self.kept if not _is_past(kept.end, self.removed_until)]

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(((*kept.row, kept.corrections) for kept in self.kept), key=repr)

    def recorded(self) -> dict[int, list[tuple[Any, ...]]]:
        return {txid: rows for txid, rows in enumerate(self.final, start=1) if rows}

    def _final_until(self) -> int | None:
        final_after = self.window.final_after
        return None if self.watermark is None or final_after is None else self.watermark - final_after

    def _pieces(self, events: list[Event]) -> list[Kept]:
        """Return what a batch brings to each window, or session: the latter's pieces end a gap after their last event."""
        window, found = self.window, dict[tuple[Any, int], list[Event]]()
        for event in events:
            for start in range(piece_of(window, event[1]), event[1] - window.size, -window.every):
                found.setdefault((event[0], start), []).append(event)
        pieces = [Kept(key, start, start + window.size, own) for (key, start), own in found.items()]
        for piece in pieces if window.is_session else []:
            times = [time for _, time, _ in piece.events]
            piece.start, piece.end = min(times), max(times) + window.size
        return pieces

    def _touch(self, one: Kept, other: Kept) -> bool:
        if self.window.is_session:
            return one.key == other.key and one.start < other.end and other.start < one.end
        return (one.key, one.start) == (other.key, other.start)

    def _is_of_removed(self, piece: Kept) -> bool:
        """Return whether a piece may belong to a session that is no longer kept."""
        return self.window.is_session and self.removed_until is not None and piece.start < self.removed_until

    def _united(self, parts: list[Kept]) -> list[list[Kept]]:
        """Return the parts of each window, the first one first."""
        found: list[list[Kept]] = []
        for part in sorted(parts, key=lambda part: (repr(part.key), part.start)):
            if found and any(self._touch(part, other) for other in found[-1]):
                found[-1].append(part)
            else:
                found.append([part])
        return found


def _rows(windows: Iterable[Kept]) -> list[tuple[Any, ...]]:
    return sorted((kept.row for kept in windows), key=repr)
