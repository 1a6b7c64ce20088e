"""Faults of event time: which rows are late, which windows are final or removed, and how sessions are joined (I22)."""

from functools import partial

from tests.mutants.planted_fault import Mutant

EVENT, SESSION = "state_store/commit/event_windows.py", "state_store/commit/session_windows.py"
TESTS = "tests/conformance/test_windows.py"
MODEL = f"{TESTS}::test_windows_after_each_batch_are_those_of_plain_python"
BOUNDS = f"{TESTS}::test_a_moment_at_a_bound_is_on_the_side_that_is_documented"
SESSIONS = f"{TESTS}::test_sessions_a_whole_gap_apart_are_two"
LATE_FOR_SESSIONS = f"{TESTS}::test_what_overlaps_a_final_session_is_late_also_when_that_is_removed"
SLIDING = f"{TESTS}::test_sliding_windows_have_each_event_as_often_as_they_overlap"
REDO = f"{TESTS}::test_a_redo_takes_back_windows_watermark_and_what_became_final"
of_windows = partial(Mutant, breaks="I22")

MUTANTS = (
    of_windows(
        "a-late-row-counts-too",
        file=EVENT,
        function="EventTime._set_aside",
        old="on_time = sa.select(w).where(w.c[WINDOW_END] > final_until)",
        new="on_time = sa.select(w).where(w.c[WINDOW_END] >= final_until)",
        noticed_by=(
            BOUNDS,
            MODEL,
        ),
    ),
    of_windows(
        "a-row-at-the-bound-is-neither-late-nor-on-time",
        file=EVENT,
        function="EventTime._set_aside",
        old="late = sa.select(w).where(w.c[WINDOW_END] <= final_until)",
        new="late = sa.select(w).where(w.c[WINDOW_END] < final_until)",
        noticed_by=(
            BOUNDS,
            MODEL,
        ),
    ),
    of_windows(
        "a-watermark-goes-back",
        file=EVENT,
        function="EventTime.take",
        old="self._watermark = max((time for time in (self._watermark, newest) if time is not None), default=None)",
        new="self._watermark = self._watermark if newest is None else newest",
        noticed_by=(
            BOUNDS,
            MODEL,
        ),
    ),
    of_windows(
        "a-watermark-of-the-same-txid-is-moved-again",
        file=EVENT,
        function="EventTime.take",
        old="if self._txid >= txid:",
        new="if self._txid > txid:",
        noticed_by=(f"{TESTS}::test_a_watermark_of_another_writer_stops_the_commit",),
    ),
    of_windows(
        "a-lost-watermark-begins-again",
        file=EVENT,
        function="EventTime.__init__",
        old="if row is None and connection.scalar(",
        new="if row is not None and row is None and connection.scalar(",
        noticed_by=(f"{TESTS}::test_a_watermark_of_another_writer_stops_the_commit",),
    ),
    of_windows(
        "windows-are-final-too-early",
        file=EVENT,
        function="EventTime._final_until",
        old="return watermark - self._window.final_after",
        new="return watermark",
        noticed_by=(
            BOUNDS,
            MODEL,
        ),
    ),
    of_windows(
        "windows-are-removed-by-the-batch-itself",
        file=EVENT,
        function="EventTime.finish",
        old="until = self._before - self._window.keep",
        new="until = self._watermark - self._window.keep",
        noticed_by=(
            BOUNDS,
            MODEL,
        ),
    ),
    of_windows(
        "the-watermark-before-a-batch-is-forgotten",
        file=EVENT,
        function="EventTime.finish",
        old='"previous_watermark": _as_moment(self._before)',
        new='"previous_watermark": _as_moment(self._watermark)',
        noticed_by=(REDO,),
    ),
    of_windows(
        "final-windows-are-recorded-again",
        file=EVENT,
        function="EventTime.finish",
        old="self._emit(self._final_until(self._before), until)",
        new="self._emit(None, until)",
        noticed_by=(
            BOUNDS,
            MODEL,
        ),
    ),
    of_windows(
        "a-window-at-the-bound-is-recorded-twice",
        file=EVENT,
        function="EventTime._emit",
        old="windows.where(ended > _at(after, self._window))",
        new="windows.where(ended >= _at(after, self._window))",
        noticed_by=(
            BOUNDS,
            MODEL,
        ),
    ),
    of_windows(
        "corrections-are-counted-one-moment-late",
        file=EVENT,
        function="EventTime._partials_of",
        old="w[WINDOW_END] <= passed",
        new="w[WINDOW_END] < passed",
        noticed_by=(
            BOUNDS,
            MODEL,
        ),
    ),
    of_windows(
        "a-piece-counts-in-one-window-too-many",
        file=EVENT,
        function="_in_each_window",
        old="first = start - _interval(window.size - window.every)",
        new="first = start - _interval(window.size)",
        noticed_by=(
            SLIDING,
            MODEL,
        ),
    ),
    of_windows(
        "a-redo-leaves-the-watermark",
        file=EVENT,
        function="take_back",
        old='"watermark": w.previous_watermark',
        new='"watermark": w.watermark',
        noticed_by=(REDO,),
    ),
    of_windows(
        "a-redo-forgets-the-event-time",
        file="state_store/commit/merge_into_states.py",
        function="restore",
        old="event_windows.take_back(connection, state, txid)",
        new="pass",
        noticed_by=(REDO,),
    ),
    of_windows(
        "sessions-a-whole-gap-apart-are-joined-to-the-one-before",
        file=SESSION,
        function="_touched",
        old="last.c[WINDOW_END] > start",
        new="last.c[WINDOW_END] >= start",
        noticed_by=(
            SESSIONS,
            MODEL,
        ),
    ),
    of_windows(
        "sessions-a-whole-gap-apart-are-joined-to-the-one-after",
        file=SESSION,
        function="_touched",
        old="kept.c[WINDOW_START] < end",
        new="kept.c[WINDOW_START] <= end",
        noticed_by=(
            SESSIONS,
            MODEL,
        ),
    ),
    of_windows(
        "pieces-a-whole-gap-apart-are-one-session",
        file=SESSION,
        function="_numbered",
        old="members.c[WINDOW_START] < until, 0",
        new="members.c[WINDOW_START] <= until, 0",
        noticed_by=(
            SESSIONS,
            MODEL,
        ),
    ),
    of_windows(
        "a-session-of-a-later-txid-is-taken-out",
        breaks="I14",
        file=SESSION,
        function="join",
        old="if done.newer or done.touched != done.removed or",
        new="if done.touched != done.removed or",
        noticed_by=(f"{TESTS}::test_a_session_of_another_writer_stops_the_commit",),
    ),
    of_windows(
        "a-session-that-was-not-taken-out-is-written-twice",
        breaks="I14",
        file=SESSION,
        function="join",
        old="or done.touched != done.removed or done.sessions != done.written:",
        new="or done.touched < done.removed:",
        noticed_by=(f"{TESTS}::test_a_session_of_another_writer_stops_the_commit",),
    ),
    of_windows(
        "a-late-piece-changes-a-final-session",
        file=SESSION,
        function="divide",
        old=".where(~joins_final, ~is_too_old)",
        new=".where(~is_too_old)",
        noticed_by=(LATE_FOR_SESSIONS,),
    ),
    of_windows(
        "a-piece-may-join-what-was-removed",
        file=SESSION,
        function="divide",
        old="is_too_old = sa.false() if removed_until is None else judged.c[WINDOW_START] < removed_until",
        new="is_too_old = sa.false()",
        noticed_by=(LATE_FOR_SESSIONS,),
    ),
    of_windows(
        "a-corrected-session-is-not-counted-as-such",
        file=SESSION,
        function="_united",
        old="sa.cast(before + sa.case((is_corrected, 1), else_=0), sa.BigInteger)",
        new="sa.cast(before, sa.BigInteger)",
        noticed_by=(
            SESSIONS,
            MODEL,
        ),
    ),
)
