"""Faults of event time: which rows are late, which windows are final or removed, and how sessions are joined (I22)."""

from tests.mutants.planted_fault import in_file

EVENT = in_file("state_store/commit/event_windows.py")
SESSION = in_file("state_store/commit/session_windows.py")
MERGE = in_file("state_store/commit/merge_into_states.py")


MUTANTS = (
    EVENT("a-late-row-counts-too", "I22", "EventTime._set_aside")(
        "on_time = sa.select(w).where(w.c[WINDOW_END] >{+=+} final_until)",
        "test_a_moment_at_a_bound_is_on_the_side_that_is_documented",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    EVENT("a-row-at-the-bound-is-neither-late-nor-on-time", "I22", "EventTime._set_aside")(
        "late = sa.select(w).where(w.c[WINDOW_END] <[-=-] final_until)",
        "test_a_moment_at_a_bound_is_on_the_side_that_is_documented",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    EVENT("a-watermark-goes-back", "I22", "EventTime.take")(
        "self._watermark = "
        "[-max((time for time in (self._watermark, newest) if time is not None), default=None)-]"
        "{+self._watermark if newest is None else newest+}",
        "test_a_moment_at_a_bound_is_on_the_side_that_is_documented",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    EVENT("a-watermark-of-the-same-txid-is-moved-again", "I22", "EventTime.take")(
        "if self._txid >[-=-] txid:", "test_a_watermark_of_another_writer_stops_the_commit"
    ),
    EVENT("a-lost-watermark-begins-again", "I22", "EventTime.__init__")(
        "if noted is {+not None and noted is +}None and connection.scalar(",
        "test_a_watermark_of_another_writer_stops_the_commit",
    ),
    EVENT("windows-are-final-too-early", "I22", "_final_until")(
        "else watermark[- - window.final_after-]",
        "test_a_moment_at_a_bound_is_on_the_side_that_is_documented",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    EVENT("windows-are-removed-by-the-batch-itself", "I22", "EventTime.finish")(
        "until = self.[-_before-]{+_watermark+} - self._window.keep",
        "test_a_moment_at_a_bound_is_on_the_side_that_is_documented",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    EVENT("the-watermark-before-a-batch-is-forgotten", "I22", "EventTime.finish")(
        '"previous_watermark": _as_moment(self.[-_before-]{+_watermark+})',
        "test_a_redo_takes_back_windows_watermark_and_what_became_final",
    ),
    EVENT("final-windows-are-recorded-again", "I22", "EventTime.finish")(
        "self._emit([-_final_until(self._window, self._before)-]{+None+}, until)",
        "test_a_moment_at_a_bound_is_on_the_side_that_is_documented",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    EVENT("a-window-at-the-bound-is-recorded-twice", "I22", "EventTime._emit")(
        "windows.where(ended >{+=+} _at(after, self._window))",
        "test_a_moment_at_a_bound_is_on_the_side_that_is_documented",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    EVENT("corrections-are-counted-one-moment-late", "I22", "EventTime._partials_of")(
        "w[WINDOW_END] <[-=-] passed",
        "test_a_moment_at_a_bound_is_on_the_side_that_is_documented",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    EVENT("a-piece-counts-in-one-window-too-many", "I22", "_in_each_window")(
        "first = start - _interval(window.size[- - window.every-])", "test_windows_after_each_batch_are_those_of_plain_python"
    ),
    EVENT("a-redo-leaves-the-watermark", "I22", "take_back")(
        '"watermark": w.[-previous_watermark-]{+watermark+}', "test_a_redo_takes_back_windows_watermark_and_what_became_final"
    ),
    MERGE("a-redo-forgets-the-event-time", "I22", "restore")(
        "[-event_windows.take_back(connection, state, txid)-]{+pass+}",
        "test_a_redo_takes_back_windows_watermark_and_what_became_final",
    ),
    SESSION("sessions-a-whole-gap-apart-are-joined-to-the-one-before", "I22", "_touched")(
        "last.c[WINDOW_END] >{+=+} start", "test_sessions_a_whole_gap_apart_are_two"
    ),
    SESSION("sessions-a-whole-gap-apart-are-joined-to-the-one-after", "I22", "_touched")(
        "kept.c[WINDOW_START] <{+=+} end", "test_sessions_a_whole_gap_apart_are_two"
    ),
    SESSION("pieces-a-whole-gap-apart-are-one-session", "I22", "_numbered")(
        "members.c[WINDOW_START] <{+=+} until, 0", "test_sessions_a_whole_gap_apart_are_two"
    ),
    SESSION("a-session-of-a-later-txid-is-taken-out", "I14", "join")(
        "if done.[-newer or done.-]touched != done.removed or", "test_a_session_of_another_writer_stops_the_commit"
    ),
    SESSION("a-session-that-was-not-taken-out-is-written-twice", "I14", "join")(
        "or done.touched [-!= done.removed or done.sessions != done.written-]{+< done.removed+}:",
        "test_a_session_of_another_writer_stops_the_commit",
    ),
    SESSION("a-late-piece-changes-a-final-session", "I22", "divide")(
        ".where(~[-joins_final, ~-]is_too_old)", "test_what_overlaps_a_final_session_is_late_also_when_that_is_removed"
    ),
    SESSION("a-piece-may-join-what-was-removed", "I22", "divide")(
        "is_too_old = sa.false()[- if removed_until is None else judged.c[WINDOW_START] < removed_until-]",
        "test_what_overlaps_a_final_session_is_late_also_when_that_is_removed",
    ),
    SESSION("a-corrected-session-is-not-counted-as-such", "I22", "_united")(
        "sa.cast(before[- + sa.case((is_corrected, 1), else_=0)-], sa.BigInteger)",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    SESSION("a-session-of-a-key-that-is-null-is-another-one", "I22", "_same_key")(
        "return [-sa.or_(equal, sa.and_(one[name].is_(None), other[name].is_(None))) if nullable else -]equal",
        "test_windows_after_each_batch_are_those_of_plain_python",
    ),
    SESSION("a-sum-near-its-limit-is-refused-for-its-pieces", "I22", "_united")(
        "m[-, of_one_batch=True-])", "test_sums_near_the_limit_of_their_type_count"
    ),
)
