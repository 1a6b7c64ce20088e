"""Faults of an attempt with Spark: partials of rows, records set aside, what a transform may be and may read."""

from tests.mutants.planted_fault import MODULE, in_file

AGGREGATES = in_file("jobs/aggregates.py")
STATES = in_file("jobs/states.py")
WINDOW_PIECES = in_file("jobs/compute/partials/window_pieces.py")
DECLARED_COLUMNS = in_file("jobs/compute/partials/declared_columns.py")
BAD_RECORDS = in_file("jobs/compute/stage/bad_records.py")
WAITING = in_file("jobs/compute/stage/waiting_records.py")
IMPURE_SQL = in_file("jobs/impure_sql.py")
PIPELINE, PURITY = in_file("jobs/pipeline.py"), in_file("jobs/compute/transform/transform_purity.py")
ANSWERS = in_file("jobs/compute/transform/state_query_answers.py")
TASK_ERRORS = in_file("jobs/spark/task_errors.py")
HISTORY_VIEW = in_file("state_store/states/history_state_view.py")
PIPELINE_SPEC = in_file("state_store/declarations/pipeline_spec.py")


MUTANTS = (
    AGGREGATES("a-combiner-of-another-version-means-the-same", "I16", "Part.value_column")(
        'computed = f"{author!r}[- version {author.version}-]"', "test_another_meaning_of_a_combiner_is_another_declaration"
    ),
    STATES("of-two-rows-of-a-version-the-first-counts", "I16", "History.parts")(
        '.items()}, "[-last-]{+first+}"', "test_any_split_and_order_of_the_rows_gives_the_value_of_one_pass"
    ),
    HISTORY_VIEW("a-version-ends-at-that-of-another-key", "I1", "_Neighbours.nearest")(
        "first.where(*way[-, *compared-])", "test_null_in_a_key_is_a_key_as_any_other"
    ),
    TASK_ERRORS("a-value-chooses-the-class-of-its-error", "error:SPARK_FAILED", MODULE)(
        'MARK = f"TIDEGATE_ERROR[-_{secrets.token_hex(8)}-]"', "test_only_errors_about_values_are_content"
    ),
    WINDOW_PIECES("windows-begin-without-their-offset", "I22", "_start")(
        "F.pmod(ticks[- - F.lit(window.offset)-],", "test_windows_are_those_of_plain_python"
    ),
    DECLARED_COLUMNS("an-id-in-capitals-is-another-key", "I16", "column_of")(
        "declared, column, [-F.lower(column)-]{+column+}, F.lower(",
        "test_floats_are_kept_as_their_shortest_decimals_and_ids_in_small_letters",
    ),
    BAD_RECORDS("a-record-that-waits-loses-digits-of-a-second", "decision:0012", MODULE)(
        '"timestampFormat": "yyyy-MM-dd\'T\'HH:mm:ss.SSS[-SSS-]XXX"', "test_a_record_that_waited_has_lost_nothing"
    ),
    WAITING("a-column-that-was-renamed-becomes-null", "decision:0012", "_rows_kept_by_columns")(
        "(F.size(more) > [-0-]{+1000+})", "test_a_record_that_waited_has_lost_nothing"
    ),
    IMPURE_SQL("sql-may-draw-random-numbers", "I11", "_impure_calls")(
        "(name in FUNCTIONS and ([-brackets or -]name in", "test_a_declaration_that_cannot_work_is_refused_when_it_is_made"
    ),
    PIPELINE("a-check-of-each-record-may-read-the-clock", "I11", "Pipeline._check_conditions")(
        "in [-impure_in_sql(condition)-]{+impure_in_sql('')+} if",
        "test_a_declaration_that_cannot_work_is_refused_when_it_is_made",
    ),
    PURITY("a-text-may-stand-for-the-clock", "I11", "_clock_in_call")(
        "for text in [-_clock_texts(arguments)-]{+()+}:", "test_a_transform_whose_result_varies_is_refused"
    ),
    ANSWERS("what-the-state-has-is-taken-for-new", "I21", "StateAnswers.look_up")(
        'is_there if how == "inner" else [-~-]is_there', "test_what_has_counted_is_left_out"
    ),
    ANSWERS("the-last-day-of-all-is-no-key", "I21", "_can_be_stored")(
        "pc.less[-_equal-](ticks, last)", "test_keys_and_values_of_every_type_come_back_as_they_are"
    ),
    PIPELINE_SPEC("updates-see-the-states-of-later-batches", "I3", "StateSpec.why_alone")(
        "if self.updates{+ and not self+}:", "test_an_update_runs_once_per_txid_before_or_after_the_states"
    ),
)
