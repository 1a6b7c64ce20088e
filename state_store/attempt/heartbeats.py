"""Whether an attempt's process is alive, by its heartbeats: a hint that saves waiting, as the fence decides (I4)."""

from datetime import datetime

import sqlalchemy as sa

# An attempt sends heartbeats every few seconds. After a silence this long its process is taken for dead or suspended, and other
# processes stop waiting for it. If it is alive after all, the fence keeps it from committing.
LONGEST_SILENCE_SECONDS = 60


def is_silent(seconds: float | None) -> bool:
    """Return whether no heartbeat has come for long: the attempt's process is taken for dead or suspended.

    A clock that was set back makes the silence negative: then nothing is known of it, so the attempt is not silent.
    """
    return seconds is not None and seconds >= LONGEST_SILENCE_SECONDS


def is_alive(silent_seconds: float | None, *, has_session: bool) -> bool:
    """Return whether a process sends heartbeats, and has a session at this server, which ends with the process.

    Through a connection pooler, an idle process may have no session, and be taken for dead.
    """
    return not is_silent(silent_seconds) and has_session


def seconds_since(moment: sa.ColumnElement[datetime]) -> sa.ColumnElement[float]:
    """Return how long ago a moment was by the database's clock, which goes on during a transaction."""
    return sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp() - moment), sa.Float)
