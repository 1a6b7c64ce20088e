"""Sessions in a commit: the pieces of a batch, and the kept sessions that they overlap, become the sessions that they make up.

A piece is what a batch has for a key in a time without a gap. A session covers the time from its first event to a gap after its
last one, and never overlaps another of its key. What overlaps belongs together: two events are then less than a gap apart. So a
piece joins the kept sessions that it overlaps, and may make one of two. Those are deleted, united with the pieces by the merges
of the state's values, and written back.

The result is the same in any order and split of the rows, because it only depends on which events there are.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.base.errors import GuardMismatch
from tidegate.state_store.commit import merge_expressions
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateSpec
from tidegate.state_store.declarations.window_spec import CORRECTIONS, WINDOW_END, WINDOW_START
from tidegate.state_store.states import state_tables
from tidegate.state_store.states.state_tables import StagedBatch

Column = sa.ColumnElement[Any]
# Whether a row of a union is a kept session; whether a session begins with it, the number of that per key, and its end; the
# start of the piece that overlaps a session. No declared column begins with _, so none of a state's has such a name.
_IS_KEPT, _BEGINS, _NUMBER, _ENDS, _PIECE = "_is_kept", "_begins", "_number", "_ends", "_piece"


def divide(
    state: StateSpec, pieces: sa.Select[Any], final_until: Column, removed_until: Column | None
) -> tuple[sa.Select[Any], sa.Select[Any]]:
    """Return the pieces that come too late, and the others.

    A piece is too late if it overlaps a final session, which would change, if its session would be final at once, or if it
    begins before `removed_until`: a session that it overlaps may be gone.
    """
    judged = pieces.cte("judged")
    touched = _touched(state, judged, "judged_touched")
    final, is_open = touched.c[WINDOW_END] <= final_until, touched.c[WINDOW_END] > final_until
    joins_final = sa.exists().where(_is_of(state, touched, judged), final).correlate(judged)
    is_too_old = sa.false() if removed_until is None else judged.c[WINDOW_START] < removed_until
    rest = sa.select(judged).where(~joins_final, ~is_too_old).cte("judged_rest")
    joined = sa.exists().where(_is_of(state, touched, rest)).correlate(touched)
    kept = sa.select(*_of_key(state, touched), touched.c[WINDOW_START], touched.c[WINDOW_END], sa.true().label(_IS_KEPT))
    own = sa.select(*_of_key(state, rest), rest.c[WINDOW_START], rest.c[WINDOW_END], sa.false().label(_IS_KEPT))
    members = sa.union_all(own, kept.where(is_open, joined).distinct()).cte("judged_members")
    numbered = _numbered(state, members)
    end = sa.func.max(numbered.c[WINDOW_END]).over(partition_by=[*_of_key(state, numbered), numbered.c[_NUMBER]])
    ends = sa.select(*_of_key(state, numbered), numbered.c[WINDOW_START], numbered.c[_IS_KEPT], end.label(_ENDS)).subquery()
    counts = sa.select(ends).where(~ends.c[_IS_KEPT], ends.c[_ENDS] > final_until).cte("judged_on_time")
    is_on_time = (
        sa.exists()
        .where(_same_key(state, counts.c, judged.c), counts.c[WINDOW_START] == judged.c[WINDOW_START])
        .correlate(judged)
    )
    return sa.select(judged).where(~is_on_time), sa.select(judged).where(is_on_time)


def join(
    connection: Connection, spec: PipelineSpec, state: StateSpec, txid: int, batch: StagedBatch, passed: Column | None
) -> int:
    """Merge a batch's pieces into the state's sessions; return how many sessions were written.

    A session is corrected if it, or a kept one that it contains, ended by `passed`, the watermark before the batch.

    Raises: GuardMismatch.
    """
    target = state_tables.state_table_of(state)
    names = [*(column.name for column in state.columns), "txid"]
    pieces = batch.partials.cte("pieces")
    touched = _touched(state, pieces, "_touched")
    is_touched = sa.and_(_same_key(state, touched.c, target.c), touched.c[WINDOW_START] == target.c[WINDOW_START])
    taken_out = sa.delete(target).where(sa.exists().where(is_touched).correlate(target))
    removed = taken_out.returning(*(target.c[name] for name in names)).cte("removed")
    members = sa.union_all(
        sa.select(*(pieces.c[name] for name in names), sa.false().label(_IS_KEPT)),
        sa.select(*(removed.c[name] for name in names), sa.true().label(_IS_KEPT)),
    ).cte("members")
    # Nothing is written before all members are sorted, so before all kept sessions are removed.
    sessions = _united(state, _numbered(state, members), passed).cte("sessions")
    added = insert(target).from_select(names, sa.select(*(sessions.c[name] for name in names)))
    written = added.returning(target.c.txid).cte("written")

    def count(of: sa.CTE, *conditions: Column) -> sa.ScalarSelect[int]:
        return sa.select(sa.func.count()).select_from(of).where(*conditions).scalar_subquery()

    distinct = sa.select(*_of_key(state, touched), touched.c[WINDOW_START]).distinct().cte("found")
    rows = sa.select(
        count(distinct).label("touched"),
        count(removed).label("removed"),
        count(removed, removed.c.txid >= txid).label("newer"),
        count(sessions).label("sessions"),
        count(written).label("written"),
    )
    done = connection.execute(rows).one()
    if done.newer or done.touched != done.removed or done.sessions != done.written:
        raise GuardMismatch(
            f"{spec.name} {txid}: of {done.touched} sessions in state.{state.name} {done.removed} were taken out, of which "
            f"{done.newer} carry a txid of at least {txid} already, and {done.written} of {done.sessions} were written: there "
            "is another writer, a trigger or a rule. Nothing was committed; restore the table, or find its other writer."
        )
    return int(done.written)


def _touched(state: StateSpec, pieces: sa.CTE, name: str) -> sa.CTE:
    """Return each pair of a piece and a kept session that overlap: the key, both starts, and the session's end."""
    # Sessions of a key do not overlap, so of those that begin before a piece only the last can reach into it. The key's index
    # finds that one, and those that begin within.
    kept, earlier = state_tables.state_table_of(state).alias("kept"), state_tables.state_table_of(state).alias("earlier")
    start, end = pieces.c[WINDOW_START], pieces.c[WINDOW_END]
    last = (
        sa.select(earlier.c[WINDOW_START], earlier.c[WINDOW_END])
        .where(_same_key(state, earlier.c, pieces.c), earlier.c[WINDOW_START] < start)
        .order_by(earlier.c[WINDOW_START].desc())
        .limit(1)
        .correlate(pieces)
        .lateral("last")
    )
    own = [*_of_key(state, pieces), start.label(_PIECE)]
    before = (
        sa.select(*own, last.c[WINDOW_START], last.c[WINDOW_END])
        .select_from(pieces.join(last, sa.true()))
        .where(last.c[WINDOW_END] > start)
    )
    within = sa.select(*own, kept.c[WINDOW_START], kept.c[WINDOW_END]).select_from(
        pieces.join(
            kept, sa.and_(_same_key(state, kept.c, pieces.c), kept.c[WINDOW_START] >= start, kept.c[WINDOW_START] < end)
        )
    )
    return sa.union_all(before, within).cte(name)


def _numbered(state: StateSpec, members: sa.CTE) -> sa.Subquery:
    """Return pieces and sessions, numbered by the session that they make up: it begins where none before reaches."""
    # Of two with the same start, the same one has to be first in both sorts.
    order = (members.c[WINDOW_START], members.c[_IS_KEPT])
    until = sa.func.max(members.c[WINDOW_END]).over(partition_by=_of_key(state, members), order_by=order, rows=(None, -1))
    begins = sa.case((members.c[WINDOW_START] < until, 0), else_=1)
    marked = sa.select(members, begins.label(_BEGINS)).subquery("marked")
    order = (marked.c[WINDOW_START], marked.c[_IS_KEPT])
    number = sa.func.sum(marked.c[_BEGINS]).over(partition_by=_of_key(state, marked), order_by=order, rows=(None, 0))
    return sa.select(marked, number.label(_NUMBER)).subquery("numbered")


def _united(state: StateSpec, members: sa.Subquery, passed: Column | None) -> sa.Select[Any]:
    m = members.c
    own = _of_key(state, members)
    is_corrected: Column = sa.false()
    if passed is not None:
        had_ended = sa.func.bool_or(sa.and_(m[_IS_KEPT], m[WINDOW_END] <= passed))
        is_corrected = sa.or_(had_ended, sa.func.max(m[WINDOW_END]) <= passed)
    before = sa.func.sum(sa.case((m[_IS_KEPT], m[CORRECTIONS]), else_=0))
    values = {value.name: merge_expressions.combined(value, m, of_one_batch=True) for value in state.values}
    values[CORRECTIONS] = sa.cast(before + sa.case((is_corrected, 1), else_=0), sa.BigInteger)
    return sa.select(
        *own,
        sa.func.min(m[WINDOW_START]).label(WINDOW_START),
        *(value.label(name) for name, value in values.items()),
        sa.func.max(m.txid).label("txid"),
    ).group_by(*own, m[_NUMBER])


def _of_key(state: StateSpec, rows: Any) -> list[Column]:
    return [rows.c[key.name] for key in state.keys[:-1]]


def _is_of(state: StateSpec, touched: sa.CTE, pieces: sa.CTE) -> Column:
    return sa.and_(_same_key(state, touched.c, pieces.c), touched.c[_PIECE] == pieces.c[WINDOW_START])


def _same_key(state: StateSpec, one: Any, other: Any) -> Column:
    def same(name: str, *, nullable: bool) -> Column:
        equal: Column = one[name] == other[name]
        return sa.or_(equal, sa.and_(one[name].is_(None), other[name].is_(None))) if nullable else equal

    return sa.and_(sa.true(), *(same(key.name, nullable=key.nullable) for key in state.keys[:-1]))
