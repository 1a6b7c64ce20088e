"""The pieces of windows: a piece is the rows of a key in a stretch of time that belongs to the same windows.

Times are whole numbers of microseconds since 1970. Spark's sessions have the time zone UTC, so a timestamp without zone
becomes such a number, and a timestamp again, without a shift.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from tidegate.jobs.aggregates import Part
from tidegate.jobs.compute.partials import declared_columns
from tidegate.state_store.declarations.column_spec import ColumnType
from tidegate.state_store.declarations.window_spec import WINDOW_START, WindowSpec

# The column by which a session's rows are grouped; it is not kept, because a session begins with its first row.
PIECE = "_tidegate_piece"


def grouped_by(window: WindowSpec, time: Column) -> Column:
    """Return the column by which rows are grouped besides the state's own key; NULL if their time is NULL."""
    start = _start(window, time)
    return start.alias(PIECE) if window.is_session else _time(window, start).alias(WINDOW_START)


def session_start(time: Column) -> Column:
    """Return the start of a piece of a session."""
    return F.min(time).alias(WINDOW_START)


def partial(window: WindowSpec, part: Part, time: Column) -> Column:
    """Return a piece's part: the end of its window, or 0 as the number of corrections, which the commit may raise."""
    if part.function == "no_corrections":
        return F.max(F.lit(0))
    begins = _micros(time) if window.is_session else _start(window, time)
    return _time(window, F.max(begins + F.lit(window.size)))


def _start(window: WindowSpec, time: Column) -> Column:
    ticks = _micros(time)
    return ticks - F.pmod(ticks - F.lit(window.offset), F.lit(window.every).cast("bigint"))


def _micros(time: Column) -> Column:
    return F.unix_micros(time.cast("timestamp"))


def _time(window: WindowSpec, ticks: Column) -> Column:
    return F.timestamp_micros(ticks).cast(declared_columns.spark_type(ColumnType(window.type)))
