"""Windows over a time column, as the store sees them. All lengths are in microseconds.

An attempt at a batch stages pieces: one row per key and stretch of time that belongs to the same windows.

    tumbling   a piece is a window
    sliding    a piece is `every` long, and belongs to each of the windows that cover it
    session    a piece holds rows that are less than the gap apart, and joins the session that it overlaps

So every row of the batch is in exactly one piece, whatever the windows, and is counted once.
"""

from dataclasses import dataclass
from typing import Literal

WindowKind = Literal["tumbling", "sliding", "session"]
TimeType = Literal["timestamptz", "timestamp"]
# The columns of a state with windows: the first is part of its key, the others come before its aggregates.
WINDOW_START, WINDOW_END, LAST_EVENT, CORRECTIONS = "window_start", "window_end", "last_event", "corrections"


@dataclass(frozen=True)
class WindowSpec:
    """How a state divides time.

    Windows are `size` long and begin every `every` from `offset` after 1970 on; for a session both are the gap. A window is
    final, and never changes again, once its end is `final_after` before the watermark, the greatest time that has counted;
    None: never. With `emits`, each final window is recorded once. Windows that ended `keep` before the watermark are removed,
    which is never sooner than they are final; None: they stay.
    """

    kind: WindowKind
    column: str
    type: TimeType
    size: int
    every: int
    offset: int = 0
    final_after: int | None = None
    emits: bool = False
    keep: int | None = None

    @property
    def is_session(self) -> bool:
        """Return whether windows end with a pause, not after a fixed time."""
        return self.kind == "session"

    @property
    def per_piece(self) -> int:
        """Return to how many windows a staged piece belongs."""
        return self.size // self.every

    @property
    def commits_alone(self) -> bool:
        """Return whether each batch is merged by itself, as final windows and sessions depend on the batch before."""
        return self.is_session or self.final_after is not None
