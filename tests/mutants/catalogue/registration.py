"""Faults of registration, retirement and rebuilds: names once, one owner, the same declaration, rebuilt as committed."""

from tests.mutants.planted_fault import MODULE, in_file

REGISTRATION = in_file("state_store/pipeline_changes/registration.py")
RETIREMENT_PY = in_file("state_store/pipeline_changes/retirement.py")
REBUILDS_PY = in_file("state_store/pipeline_changes/rebuilds.py")
CHANGES_PY = in_file("state_store/pipeline_changes/declaration_changes.py")
TABLE_IDENTITY = in_file("state_store/states/table_identity.py")
TEAM_ADDITIONS = in_file("state_store/states/team_additions.py")
ACTIONS = in_file("state_store/operate/recorded_actions.py")
ROLE_SETTINGS = in_file("state_store/connections/role_settings.py")
PRIMARY_KEYS = in_file("migrations/primary_keys.py")
PIPELINE = in_file("state_store/declarations/pipeline_spec.py")


MUTANTS = (
    ROLE_SETTINGS("another-role-passes-the-guard-unnamed", "I15", MODULE)(
        "WHERE role = ANY(:roles)[- OR name = 'tidegate.writer'-]",
        "test_a_setting_under_which_steps_never_end_is_named_with_its_role",
    ),
    ROLE_SETTINGS("settings-of-the-server-are-not-looked-at", "I20", MODULE)(
        "SELECT owner.role, name, [-reset_val || coalesce(unit, '')-]{+'0'+}",
        "test_a_setting_of_the_servers_configuration_is_named",
    ),
    ROLE_SETTINGS("what-pgoptions-asks-for-is-not-looked-at", "I20", MODULE)(
        "FROM pg_settings WHERE source = '[-client-]{+role+}'",
        "test_a_setting_under_which_steps_never_end_is_named_with_its_role",
    ),
    REGISTRATION("a-retired-name-is-given-again", "I23", "register")(
        "[-cursors.check_not_retired(spec.name, Retired(known.retired_at, known.retired_by, known.retired_reason))-]{+pass+}",
        "test_no_step_of_a_retired_pipeline_goes_on",
    ),
    REGISTRATION("a-pipeline-counts-on-top-of-rows-of-others", "I23", "register")(
        "[-_check_empty(connection, spec.name, spec.readable)-]{+pass+}",
        "test_rows_that_no_batch_of_the_pipeline_has_brought_stop_its_registration",
    ),
    REGISTRATION("a-state-has-two-writers", "I15", "_check_owned")(
        "if owner [-!= spec.name-]{+== ''+}:", "test_a_state_has_one_writer"
    ),
    REGISTRATION("an-update-has-two-pipelines", "I15", "_owners")(
        "for found in ([-of_states, of_tables-]{+of_tables,+}) for", "test_a_state_has_one_writer"
    ),
    REGISTRATION("another-source-needs-no-version", "I16", "_check_change")(
        'spec.version <[-=-] known.declaration["version"]', "test_a_declaration_is_fixed_from_the_first_commit_on"
    ),
    REGISTRATION("a-broken-chain-becomes-transactional", "I12", "_check_planned")(
        "if later.continues [-!= earlier.digest-]{+is None+}:",
        "test_no_source_gets_transactional_while_a_batch_waits_for_a_new_plan",
    ),
    REGISTRATION("a-batch-that-continues-no-commit-becomes-transactional", "I12", "_check_planned")(
        "if planned and planned[0].txid > {+10**9 + +}1:",
        "test_no_source_gets_transactional_while_a_batch_waits_for_a_new_plan",
    ),
    CHANGES_PY("states-may-change-once-batches-have-committed", "I16", "check")(
        "if refusals{+ and not committed+}:", "test_a_declaration_is_fixed_from_the_first_commit_on"
    ),
    CHANGES_PY("a-column-comes-without-a-version", "I16", "check")(
        'if changes and spec.version <[-=-] known["version"]:',
        "test_no_migration_leaves_a_registered_pipeline_without_its_column",
    ),
    CHANGES_PY("a-narrower-number-is-taken-for-a-wider-one", "I16", "_widened")(
        "old[0] [-<-]{+!=+} new[0]", "test_a_numeric_value_may_get_more_digits_before_the_point"
    ),
    CHANGES_PY("a-number-of-another-scale-is-taken-for-a-wider-one", "I16", "_widened")(
        "and old[1] [-=-]{+<+}= new[1]", "test_a_numeric_value_may_get_more_digits_before_the_point"
    ),
    TEAM_ADDITIONS("a-rebuilt-table-loses-its-storage-parameters", "I24", MODULE)(
        "FROM pg_class WHERE oid = '{new}'::regclass) = '[-r-]{+t+}'",
        "test_what_the_team_has_given_to_a_table_is_given_to_the_rebuilt_one",
    ),
    RETIREMENT_PY("a-followed-pipeline-is-retired", "I23", "retire")(
        "[-_check_not_read(pipeline, others)-]{+pass+}", "test_a_followed_pipeline_is_not_retired"
    ),
    RETIREMENT_PY("a-pipeline-at-work-is-retired", "I23", "retire")(
        "[-_check_not_in_work(connection, pipeline, committed)-]{+pass+}", "test_a_process_that_began_before_is_fenced"
    ),
    RETIREMENT_PY("a-pipeline-is-retired-without-its-cursor-s-lock", "I23", "_lock")(
        ".where(c.pipeline == pipeline)[-.with_for_update()-])", "test_a_commit_and_a_retirement_wait_for_each_other"
    ),
    RETIREMENT_PY("attempts-outlive-their-pipeline", "I23", "_write")(
        ".where(a.pipeline == pipeline, {+~+}attempts.is_open(tables.attempt))", "test_a_process_that_began_before_is_fenced"
    ),
    RETIREMENT_PY("a-pipeline-without-its-states-is-reinstated", "I23", "reinstate")(
        "if names := list(dropped){+[100:]+}:",
        "test_states_are_dropped_with_all_their_parts",
        "test_what_needs_the_tables_of_a_state_keeps_them",
    ),
    TABLE_IDENTITY("others-may-write-beside-commits", "I15", "(module)")(
        "AND tgenabled [-= 'A'-]{+IN ('A', 'D')+}", "test_nothing_goes_on_with_a_table_that_is_not_as_declared"
    ),
    TABLE_IDENTITY("a-table-without-its-trigger-is-written", "I15", "(module)")(
        "WHERE [-oid IS NOT NULL-]"
        "{+EXISTS (SELECT FROM pg_trigger WHERE tgrelid = part.oid AND tgname = 'single_writer')+} AND NOT EXISTS (",
        "test_nothing_goes_on_with_a_table_that_is_not_as_declared",
    ),
    TABLE_IDENTITY("others-may-write-a-partition", "I15", "(module)")(
        "JOIN pg_class ON oid = inhrelid AND {+NOT +}relispartition",
        "test_a_partition_has_one_writer_and_no_readers_of_its_own",
    ),
    TABLE_IDENTITY("a-table-that-was-put-back-is-taken", "I9", "(module)")(
        "AND (is_missing OR[- is_another OR-]", "test_nothing_goes_on_without_its_table_or_with_another"
    ),
    TABLE_IDENTITY("a-column-that-was-made-again-is-taken", "I9", "(module)")(
        "attnum <[->-] CAST(s.columns ->> attname AS int)", "test_another_column_of_the_name_is_not_added_to"
    ),
    TABLE_IDENTITY("a-migration-accepts-a-table-that-was-put-back", "I9", "(module)")(
        "AND (table_oid IS NULL OR :again{+ OR true+})", "test_nothing_goes_on_without_its_table_or_with_another"
    ),
    REBUILDS_PY("a-rebuild-takes-its-place-before-it-has-all-batches", "I24", "_why_not_ready")(
        "if txids[spec.name] [-!=-]{+<+} txids[rebuild.name]:", "test_a_rebuild_that_lacks_a_commit_is_not_ready"
    ),
    REBUILDS_PY("a-rebuild-goes-on-for-another-declaration", "I24", "_check_same")(
        "if known.fingerprint [-!= rebuild.fingerprint-]{+is None+}:",
        "test_what_would_count_twice_or_see_other_states_is_not_rebuilt",
    ),
    REBUILDS_PY("a-rebuild-runs-an-authors-update-again", "I24", "_why_never")(
        "if state.updates{+ and not state+}:", "test_what_would_count_twice_or_see_other_states_is_not_rebuilt"
    ),
    REBUILDS_PY("a-reader-gets-other-states-unnoticed", "I24", "_why_never")(
        "if read := other.read_pipelines & {[-spec.name, -]rebuild.name}:",
        "test_what_would_count_twice_or_see_other_states_is_not_rebuilt",
    ),
    TEAM_ADDITIONS("a-column-of-the-teams-is-dropped", "I24", MODULE)(
        "attname <> ALL (SELECT attname FROM pg_attribute WHERE attrelid = CAST(:[-made-]{+table+} AS regclass))",
        "test_columns_of_a_team_are_neither_lost_nor_taken_for_declared_ones",
    ),
    REGISTRATION("a-column-that-comes-has-values-of-the-teams", "I1", "_check_columns")(
        "found.intersection([-change.added-]{+()+})", "test_columns_of_a_team_are_neither_lost_nor_taken_for_declared_ones"
    ),
    REBUILDS_PY("a-rebuilt-state-is-open-to-every-reader", "I24", "begin")(
        "[-table_swap.hide(connection, spec, rebuild)-]{+pass+}", "test_who_may_not_read_a_state_may_not_read_what_is_rebuilt"
    ),
    REBUILDS_PY("a-rebuild-processes-what-was-skipped", "I24", "follow_decisions")(
        "skipped[- = _skip(connection, spec, first, last-]{+: set[int] = set(+})",
        "test_a_batch_that_was_skipped_is_skipped_and_one_that_is_open_is_processed_again",
    ),
    ACTIONS("a-retry-lets-a-rebuild-process-what-was-skipped", "I24", "retry")(
        "stopped_batches.reopen(connection, pipeline, txid[-, skipped-])",
        "test_a_retry_leaves_to_a_rebuild_what_its_pipeline_has_skipped",
    ),
    REBUILDS_PY("a-rebuild-has-what-was-before-a-redo", "I24", "follow_decisions")(
        "if [-QUARANTINED not in now and batches.encode_metadata(now) != metadata[-1]-]{+not now+}:",
        "test_what_is_redone_during_a_rebuild_is_planned_again_or_refused",
    ),
    PIPELINE("a-state-that-cannot-be-redone-is-taken-for-exactly-once", "I13", "exactly_once")(
        '"opaque": ("opaque",[-)-]{+ "transactional")+}',
        "test_only_pairs_that_give_exactly_once_are_accepted_unless_at_least_once_is_declared",
    ),
    PRIMARY_KEYS("a-table-keeps-its-former-key", "I14", "_compare_primary_keys")(
        "if [-set(before.columns.keys()) != set(after.columns.keys())-]{+after is before+}:",
        "test_a_key_that_is_declared_otherwise_becomes_the_tables_key",
    ),
)
