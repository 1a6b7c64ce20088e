"""Faults of the commit: its checks under the cursor's lock, and what it records."""

from tests.mutants.planted_fault import in_file

FILE = in_file("state_store/commit/ordered_commit.py")
VERDICTS = in_file("state_store/commit/verdicts.py")
RECORD = in_file("state_store/commit/commit_record.py")
ACTIONS = in_file("state_store/operate/recorded_actions.py")
ANSWER_DEADLINES = in_file("state_store/connections/answer_deadlines.py")
HEARTBEATS = in_file("state_store/attempt/heartbeats.py")


MUTANTS = (
    ANSWER_DEADLINES("a-read-waits-for-a-lock-without-end", "I20", "DeadlineCursor.execute")(
        "if is_first and connection.lock_seconds [-is not None-]{+== 0+}", "test_what_meets_a_lock_names_the_session"
    ),
    ANSWER_DEADLINES("a-commit-waits-for-a-stopped-server-for-ever", "I10", "DeadlineConnection.commit")(
        "[-_Wait(self).for_answer(super().commit-]{+super().commit(+})",
        "test_a_commit_whose_process_is_stopped_is_given_up_and_looked_up",
    ),
    VERDICTS("a-txid-commits-before-its-predecessor", "I3", "may_commit")(
        "if txid [-!= facts.cursor.txid + 1:  # I3-]{+< facts.cursor.txid + 1:+}", "test_batches_add_up_in_txid_order"
    ),
    FILE("the-last-txid-is-not-known-to-have-committed", "I8", "commit_batch")(
        "if txid <[-=-] facts.cursor.txid:", "test_batches_add_up_in_txid_order"
    ),
    VERDICTS("a-commit-does-not-ask-for-the-seal", "I4", "may_commit")(
        "[-check_sealed(spec, batch.locked, batch.newest, attempt_timeout_seconds)  # the newest attempt (I4)-]{+pass+}",
        "test_only_a_sealed_attempt_commits",
    ),
    VERDICTS("a-commit-need-not-continue-the-one-before", "I12", "may_commit")(
        "[-check_continues(spec, batch_input, facts.cursor)-]{+pass+}  # after",
        "test_later_batches_follow_a_batch_that_is_planned_again",
    ),
    VERDICTS("a-commit-does-not-compare-the-declaration", "I16", "may_commit")(
        "[-check_declaration(spec, facts.registered)  # I16-]{+pass+}",
        "test_after_a_deploy_neither_old_code_nor_old_partials_count",
    ),
    FILE("files-that-count-are-not-recorded", "I12", "_merge")(
        "[-counted_files.write(connection, spec, [batch.input for batch in together])  # refuses a file that has "
        "counted-]{+pass+}",
        "test_a_file_with_a_new_time_is_read_again_once",
    ),
    VERDICTS("a-retired-pipeline-commits", "I23", "check_in_order")(
        "[-check_not_retired(cursor.pipeline, facts.retired)-]{+pass+}", "test_no_step_of_a_retired_pipeline_goes_on"
    ),
    VERDICTS("a-commit-looks-for-no-hole", "I9", "may_commit")(
        "[-check_in_order(facts-]{+check_not_retired(spec.name, facts.retired+})",
        "test_a_state_or_a_cursor_that_disagrees_with_the_commits_halts",
    ),
    VERDICTS("a-cursor-ahead-of-its-commits-is-no-hole", "I9", "check_in_order")(
        "if facts.registered.last_commit [-!=-]{+>+} cursor.txid:",
        "test_a_state_or_a_cursor_that_disagrees_with_the_commits_halts",
    ),
    ACTIONS("a-skip-need-not-continue-the-one-before", "I12", "skip")(
        "[-verdicts.check_continues(spec, batch.input, facts.cursor)-]{+pass+}",
        "test_a_skip_leaves_no_record_between_it_and_the_previous_batch",
    ),
    RECORD("files-of-a-skipped-batch-are-not-recorded", "I12", "skip")(
        "[-counted_files.write(connection, spec, [batch.input], are_skipped=True)-]{+pass+}",
        "test_a_file_that_was_skipped_and_then_completed_is_read",
    ),
    VERDICTS("ready-batches-of-another-declaration-commit", "I16", "ready")(
        "[-check_declaration(spec, facts.registered)-]{+pass+}", "test_after_a_deploy_neither_old_code_nor_old_partials_count"
    ),
    VERDICTS("ready-batches-commit-beyond-a-hole", "I9", "ready")(
        "[-check_in_order(facts-]{+check_not_retired(spec.name, facts.retired+})",
        "test_a_state_or_a_cursor_that_disagrees_with_the_commits_halts",
    ),
    VERDICTS("a-ready-batch-need-not-continue-the-one-before", "I12", "ready")(
        "or [-batch_input.continues != continued-]{+False+}", "test_later_batches_follow_a_batch_that_is_planned_again"
    ),
    VERDICTS("a-ready-batch-need-not-be-the-next", "I3", "ready")(
        "or [-batch.locked.txid != facts.cursor.txid + 1 + len(together)-]{+False+}  # I3",
        "test_batches_are_merged_together_up_to_the_first_that_is_not_ready",
    ),
    VERDICTS("a-halted-batch-commits-with-others", "I19", "ready")(
        "or [-batch.locked.halted_at is not None-]{+False+}", "test_the_sequence_ends_at_the_first_batch_that_is_not_ready"
    ),
    VERDICTS("a-given-up-batch-commits-with-others", "I1", "ready")(
        "batch.locked.[-skip_reason is not None\n            or batch.locked.-]halted_at",
        "test_the_sequence_ends_at_the_first_batch_that_is_not_ready",
    ),
    VERDICTS("a-ready-batch-need-not-be-sealed-by-this-declaration", "I16", "ready")(
        "[-check_sealed(spec, batch.locked, batch.newest, attempt_timeout_seconds=0)-]{+pass+}",
        "test_after_a_deploy_neither_old_code_nor_old_partials_count",
    ),
    RECORD("the-cursor-keeps-the-former-digest", "I12", "write")(
        '[-, "source_digest": last.input.digest-]}', "test_batches_add_up_in_txid_order"
    ),
    RECORD("a-skipped-replay-keeps-its-records", "I1", "skip")(
        "if QUARANTINED {+not +}in batch.input.metadata:", "test_a_replay_that_is_skipped_gives_its_records_back"
    ),
    VERDICTS("a-failed-attempt-is-waited-for", "I20", "check_sealed")(
        "if [-attempt.failed_at is not None-]{+False+}:", "test_only_a_sealed_attempt_commits"
    ),
    VERDICTS("partials-of-another-declaration-are-merged", "I16", "check_sealed")(
        "if [-attempt.fingerprint != spec.fingerprint-]{+False+}:",
        "test_after_a_deploy_neither_old_code_nor_old_partials_count",
    ),
    VERDICTS("bad-records-vanish-with-their-policy", "I1", "check_sealed")(
        "if [-attempt.quarantined_rows and not spec.quarantines-]{+False+}:",
        "test_bad_records_do_not_vanish_with_the_policy_that_set_them_aside",
    ),
    HEARTBEATS("a-silent-attempt-is-waited-for", "I20", "is_silent")(
        "seconds >= {+60 * +}LONGEST_SILENCE_SECONDS", "test_only_a_sealed_attempt_commits"
    ),
    VERDICTS("an-attempt-never-takes-too-long", "I20", "check_sealed")(
        "if attempt.age_seconds >= attempt_timeout_seconds{+ + 10**9+}:", "test_only_a_sealed_attempt_commits"
    ),
    VERDICTS("a-declaration-only-has-to-be-registered", "I16", "check_declaration")(
        "if registered.fingerprint [-!= spec.fingerprint-]{+is None+}:",
        "test_after_a_deploy_neither_old_code_nor_old_partials_count",
    ),
    VERDICTS("a-state-that-was-given-away-is-written", "I15", "check_declaration")(
        "if [-set(registered.tables) != set(spec.tables)-]{+not registered.tables and spec.tables+}:",
        "test_a_ledger_that_is_not_that_of_the_code_commits_nothing",
    ),
    VERDICTS("a-table-that-is-another-one-is-not-noticed", "I9", "check_declaration")(
        "[-table_identity.check(registered.strange)-]{+pass+}", "test_nothing_goes_on_without_its_table_or_with_another"
    ),
    VERDICTS("a-broken-chain-of-a-transactional-source-is-planned-again", "I19", "check_continues")(
        'if [-spec.source_kind == "transactional"-]{+False+}:', "test_a_transactional_chain_that_is_broken_is_corrupt"
    ),
    ANSWER_DEADLINES("a-read-in-blocks-waits-for-a-stopped-server-for-ever", "I20", "DeadlineCursor.fetchmany")(
        "[-_Wait(self.connection).for_answer(super().fetchmany, *args)-]{+super().fetchmany(*args)+}",
        "test_no_read_or_migration_waits_for_a_process_that_is_stopped",
    ),
)
