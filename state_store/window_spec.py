"""Windows over a time column, as the store sees them. All lengths are in microseconds.

An attempt stages pieces: one row per key and stretch of time that belongs to the same windows.

    tumbling   a piece is a window
    sliding    a piece is `every` long, and counts in each of the windows that cover it
    session    a piece holds rows that are less than the gap apart, and joins the session that it touches

So every row is in exactly one partial, whatever the window, and the acker follows it like any other.
"""

from dataclasses import dataclass
from typing import Literal

WindowKind = Literal["tumbling", "sliding", "session"]
TimeType = Literal["timestamptz", "timestamp"]
# The columns of a state with windows: the first is part of its key, the others come before its aggregates.
WINDOW_START, WINDOW_END, LAST_EVENT, CORRECTIONS = "window_start", "window_end", "last_event", "corrections"
WINDOW_COLUMNS = (WINDOW_START, WINDOW_END, LAST_EVENT, CORRECTIONS)


@dataclass(frozen=True)
class WindowSpec:
    """How a state divides time.

    Windows are `size` long and begin every `every` from `offset` after 1970 on; for a session both are the gap. A window is
    final once its end is `final_after` before the watermark; None: never. With `emits`, each is then recorded once.
    """

    kind: WindowKind
    column: str
    type: TimeType
    size: int
    every: int
    offset: int = 0
    final_after: int | None = None
    emits: bool = False

    @property
    def is_session(self) -> bool:
        """Return whether windows end with a pause, not after a fixed time."""
        return self.kind == "session"

    @property
    def per_piece(self) -> int:
        """Return in how many windows a staged piece counts."""
        return self.size // self.every

    @property
    def commits_alone(self) -> bool:
        """Return whether each batch is merged by itself: what is final, and how sessions join, depends on the one before."""
        return self.is_session or self.final_after is not None
