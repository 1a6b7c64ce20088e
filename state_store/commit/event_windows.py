"""Windows of event time in a commit: late rows, which pieces are merged, which windows are final, the watermark.

A piece is what a batch has for a key in a stretch of time that belongs to the same windows. The watermark of a state is the
greatest event time in its committed batches. It is read and moved under the cursor's lock, in txid order: no clock decides
what is late, so a replay decides the same. A batch is judged by the watermark of the batches before it; within a batch, nothing
is late.

    a window that ends after the watermark        is open
    at or before it                               has passed: `corrections` counts the batches that change it all the same
    `final_after` or more before it               is final: what comes for it is set aside in quarantine, and is not merged
    `keep` or more before it                      is removed

A commit removes windows by the watermark of the batches before it, too: a redo of its batch would remove the same ones, so none
has to be put back.
"""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import INTERVAL, insert

from tidegate.state_store.base.errors import GuardMismatch
from tidegate.state_store.commit import merge_expressions, session_windows
from tidegate.state_store.commit.quarantined_records import in_json, set_aside
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateSpec
from tidegate.state_store.declarations.window_spec import CORRECTIONS, LAST_EVENT, WINDOW_END, WINDOW_START, WindowSpec
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import range_partitions, state_tables
from tidegate.state_store.states.state_tables import StagedBatch

_MICROSECONDS = 1_000_000  # in a second
# A commit removes this many windows at least, if there are so many to remove; or twice as many as its batch has partials.
REMOVED_AT_ONCE = 100_000


@dataclass(frozen=True)
class EventTimeProgress:
    """How far event time has come in a state after a txid: the watermark, and up to which end windows are final.

    Times are texts in UTC, or as they stand where they have no zone. `late` counts the partials that were set aside. Windows
    that ended until `removed_until` are no longer kept; None: all are.
    """

    state: str
    txid: int
    watermark: str | None
    final_until: str | None
    late: int
    removed_until: str | None

    def __str__(self) -> str:
        known = f"After txid {self.txid}, the watermark of {self.state} is {self.watermark or 'not set: no event has counted'}."
        if self.final_until is None:
            return known
        known += f" Windows that ended until {self.final_until} are final; {self.late} partials came too late for theirs."
        return known if self.removed_until is None else f"{known} Those that ended until {self.removed_until} are removed."


class EventTime:
    """The event time of a state with windows during one commit."""

    def __init__(self, connection: Connection, spec: PipelineSpec, state: StateSpec) -> None:
        """Read the state's watermark.

        Raises: GuardMismatch if the state has rows, but the ledger has lost its watermark: final windows would change again.
        """
        assert state.window is not None, "only windows have an event time"
        self._connection, self._spec, self._state, self._window = connection, spec, state, state.window
        noted = _noted(connection, state)
        if noted is None and connection.scalar(sa.select(sa.exists().select_from(state_tables.state_table_of(state)))):
            raise GuardMismatch(
                f"{spec.name}: state.{state.name} has rows, but the ledger has no watermark of it. Nothing was committed; "
                "restore tidegate.watermark."
            )
        # Of the watermark: the txid, and microseconds since 1970, None before the first event.
        self._txid: int = noted.txid if noted else 0
        self._watermark: int | None = noted.watermark if noted else None
        self._before = self._watermark  # that before the batch taken last
        # Up to which end windows are no longer kept. It never goes back, also if `keep` is made longer.
        self._removed_until: int | None = noted.removed_until if noted else None
        self._partials = 0  # of the batch taken last

    @property
    def joins_pieces(self) -> bool:
        """Return whether a batch's pieces are merged by `join`, because they make up sessions."""
        return self._window.is_session

    def take(self, txid: int, pieces: StagedBatch) -> StagedBatch:
        """Return a batch's partials for windows that are not final, set aside the rest, and move the watermark.

        For sessions, the partials are the pieces: which sessions they join is found by `join`.

        Raises: GuardMismatch if the watermark is that of a later batch.
        """
        if self._txid >= txid:
            raise GuardMismatch(
                f"{self._spec.name} {txid}: the watermark of state {self._state.name} is that of txid {self._txid} already: "
                "another writer moved it. Nothing was committed; restore tidegate.watermark."
            )
        self._before, self._txid, self._partials = self._watermark, txid, pieces.rows
        if not pieces.rows:
            return pieces
        partials = self._partials_of(pieces)
        if (final_until := _final_until(self._window, self._before)) is not None:
            partials = self._set_aside(partials, _at(final_until, self._window))
        counted = partials.subquery()
        statement = sa.select(sa.func.count(), _microseconds(sa.func.max(counted.c[LAST_EVENT]))).select_from(counted)
        rows, newest = self._connection.execute(statement).one()
        self._watermark = max((time for time in (self._watermark, newest) if time is not None), default=None)
        return pieces._replace(rows=rows, partials=partials)

    def join(self, pieces: StagedBatch) -> int:
        """Merge the pieces of the batch taken last into sessions; return how many sessions were written.

        Raises: GuardMismatch.
        """
        return session_windows.join(self._connection, self._spec, self._state, self._txid, pieces, self._passed)

    def finish(self) -> None:
        """Record the watermark and the windows that the batch taken last has made final; remove those that are not kept.

        Raises: SchemaOutOfDate.
        """
        if self._window.keep is not None and self._before is not None:
            until = self._before - self._window.keep
            self._remove(until if self._removed_until is None else max(until, self._removed_until))
        values = {
            "txid": self._txid,
            "watermark": _as_moment(self._watermark),
            "previous_watermark": _as_moment(self._before),
            "removed_until": _as_moment(self._removed_until),
        }
        row = insert(tables.watermark).values(state=self._state.name, pipeline=self._spec.name, **values)
        self._connection.execute(row.on_conflict_do_update(index_elements=["state"], set_=values))
        until = _final_until(self._window, self._watermark)
        if self._window.emits and until is not None:
            self._emit(_final_until(self._window, self._before), until)

    @property
    def _passed(self) -> sa.ColumnElement[Any] | None:
        return None if self._before is None else _at(self._before, self._window)

    @property
    def _removed(self) -> sa.ColumnElement[Any] | None:
        return None if self._removed_until is None else _at(self._removed_until, self._window)

    def _partials_of(self, pieces: StagedBatch) -> sa.Select[Any]:
        """Return the partials of each window that the pieces belong to; the pieces of sessions as they are."""
        if self._window.is_session:
            return pieces.partials
        partials = pieces.partials if self._window.per_piece == 1 else _in_each_window(self._state, pieces)
        w = partials.subquery("windows").c
        is_correction = sa.false() if (passed := self._passed) is None else w[WINDOW_END] <= passed
        corrections = sa.cast(sa.case((is_correction, 1), else_=0), sa.BigInteger).label(CORRECTIONS)
        return sa.select(*(corrections if column.name == CORRECTIONS else column for column in w))

    def _set_aside(self, partials: sa.Select[Any], final_until: sa.ColumnElement[Any]) -> sa.Select[Any]:
        if self._window.is_session:
            late, on_time = session_windows.divide(self._state, partials, final_until, self._removed)
        else:
            w = partials.subquery("judged")
            late = sa.select(w).where(w.c[WINDOW_END] <= final_until)
            on_time = sa.select(w).where(w.c[WINDOW_END] > final_until)
        rows = set_aside(
            self._connection,
            self._spec,
            self._state,
            self._txid,
            late,
            lambda record: self._reason(record[WINDOW_END], in_json(final_until)),
        )
        return on_time if rows else partials

    def _reason(self, end: sa.ColumnElement[Any], final_until: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
        if not self._window.is_session:
            known = ("late: its window ended at ", end, " and is final: all that ended until ", final_until, " are")
            return sa.func.concat(*known)
        reason = ["late: it belongs to a session that is final: all that ended until ", final_until, " are"]
        if self._removed is not None:
            reason += ["; or to one that is no longer kept: none that ended until ", in_json(self._removed), " is"]
        return sa.func.concat(*reason)

    def _emit(self, after: int | None, until: int) -> None:
        """Record the windows that become final by this commit, with their last values."""
        target = state_tables.state_table_of(self._state)
        range_partitions.begin_txid(self._connection, self._state, self._txid)
        names = [column.name for column in self._state.columns]
        ended = target.c[WINDOW_END]
        windows = sa.select(sa.literal(self._txid, sa.BigInteger), *(target.c[name] for name in names)).where(
            ended <= _at(until, self._window)
        )
        if after is not None:
            windows = windows.where(ended > _at(after, self._window))
        final = state_tables.changes_table_of(self._state)
        self._connection.execute(insert(final).from_select(["txid", *names], windows))

    def _remove(self, until: int) -> None:
        """Remove the windows that ended until then, the oldest first.

        Where there are many, because `keep` is new or shorter, this leaves some to the commits that follow, of which a redo of
        this batch removes the first. Which ones are left depends on the windows alone, not on the run.
        """
        self._removed_until = until
        target = state_tables.state_table_of(self._state)
        ended, bound = target.c[WINDOW_END], _at(until, self._window)
        most = max(REMOVED_AT_ONCE, 2 * self._partials)
        oldest = sa.select(ended).where(ended <= bound).order_by(ended).offset(most - 1).limit(1)
        self._connection.execute(sa.delete(target).where(ended <= sa.func.coalesce(oldest.scalar_subquery(), bound)))


def progress(connection: Connection, state: StateSpec) -> EventTimeProgress | None:
    """Return how far event time has come in a state with windows; None before its first batch."""
    window, q = state.window, tables.quarantine.c
    assert window is not None, "only windows have an event time"
    if (noted := _noted(connection, state)) is None:
        return None
    late = sa.select(sa.func.count()).where(q.pipeline == noted.pipeline, q.state == state.name)
    known = (noted.watermark, _final_until(window, noted.watermark), noted.removed_until)
    shown = sa.select(*(sa.null() if moment is None else in_json(_at(moment, window)) for moment in known))
    watermark, final_until, removed_until = connection.execute(shown).one()
    return EventTimeProgress(state.name, noted.txid, watermark, final_until, connection.scalar(late) or 0, removed_until)


def _noted(connection: Connection, state: StateSpec) -> sa.Row[Any] | None:
    """Return a state's watermark, and up to which end windows are removed, in microseconds; None before its first batch."""
    w = tables.watermark.c
    moments = (_microseconds(moment).label(moment.name) for moment in (w.watermark, w.removed_until))
    return connection.execute(sa.select(w.pipeline, w.txid, *moments).where(w.state == state.name)).one_or_none()


def _final_until(window: WindowSpec, watermark: int | None) -> int | None:
    """Return up to which end windows are final, at a watermark; None: none is."""
    return None if watermark is None or window.final_after is None else watermark - window.final_after


def take_back(connection: Connection, state: StateSpec, txid: int) -> None:
    """Put the watermark back to where it was before a txid; if that batch did not move it, it stays."""
    w = tables.watermark.c
    before = {"watermark": w.previous_watermark, "previous_watermark": None, "txid": w.txid - 1}
    connection.execute(sa.update(tables.watermark).where(w.state == state.name, w.txid == txid).values(before))


def _in_each_window(state: StateSpec, pieces: StagedBatch) -> sa.Select[Any]:
    window = state.window
    assert window is not None, "only windows have pieces"
    p = pieces.partials.subquery("pieces")
    start = p.c[WINDOW_START]
    first = start - _interval(window.size - window.every)
    series = sa.func.generate_series(first, start, _interval(window.every))
    starts = series.table_valued(sa.column(WINDOW_START, start.type), name="starts").render_derived()
    # SQLAlchemy takes the sum for a time without a zone, and Postgres would convert it.
    end = sa.type_coerce(starts.c[WINDOW_START] + _interval(window.size), start.type)
    of_windows: dict[str, sa.ColumnElement[Any]] = {WINDOW_START: starts.c[WINDOW_START], WINDOW_END: end}
    columns = [of_windows.get(column.name, column).label(column.name) for column in p.c]
    # A function in a FROM may refer to what stands before it.
    shares = sa.select(*columns).select_from(p.join(starts, sa.true())).subquery("shares").c
    keys = [shares[key.name] for key in state.keys]
    values = [merge_expressions.combined(value, shares, of_one_batch=True).label(value.name) for value in state.values]
    stamp = [sa.func.max(shares.txid).label("txid")] if state.has_txid else []
    return sa.select(*keys, *values, *stamp).group_by(*keys)


def _at(microseconds: int, window: WindowSpec) -> sa.ColumnElement[Any]:
    """Return a moment, in microseconds since 1970, in the type of the windows' times."""
    return _since_1970(microseconds, sa.TIMESTAMP(timezone=window.type == "timestamptz"))


def _as_moment(microseconds: int | None) -> sa.ColumnElement[Any]:
    return sa.null() if microseconds is None else _since_1970(microseconds, sa.TIMESTAMP(timezone=True))


def _since_1970(microseconds: int, kind: Any) -> sa.ColumnElement[Any]:
    return sa.cast(sa.cast(sa.literal("epoch"), kind) + _interval(microseconds), kind)


def _interval(microseconds: int) -> sa.ColumnElement[Any]:
    """Return an interval without days, which would have other lengths where clocks are put forward or back."""
    return sa.cast(sa.literal(f"{microseconds} microseconds", sa.Text), INTERVAL)


def _microseconds(moment: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return sa.cast(sa.extract("epoch", moment) * _MICROSECONDS, sa.BigInteger)
