"""Faults of the ledger's SQL: triggers, functions, aggregates, views and grants."""

from tests.mutants.planted_fault import in_file

FILE = in_file("state_store/ledger/schema.sql")
ERRORS_PY = in_file("state_store/connections/postgres_errors.py")
PREREQUISITES = in_file("migrations/prerequisites.py")


MUTANTS = (
    FILE("a-column-of-another-type-is-written", "I15", "CREATE FUNCTION tidegate.shape_differences")(
        "ELSE [-e.value <> f.value-]{+false+} END", "test_nothing_goes_on_with_a_table_that_is_not_as_declared"
    ),
    FILE("a-foreign-trigger-changes-what-is-written", "I15", "CREATE FUNCTION tidegate.table_shape")(
        "WHERE NOT tgisinternal AND tgparentid = 0 AND tgenabled [-<> 'D-]{+= 'A+}'",
        "test_nothing_goes_on_with_a_table_that_is_not_as_declared",
    ),
    FILE("a-table-without-a-log-is-written", "I15", "CREATE FUNCTION tidegate.table_shape")(
        "FROM parts JOIN pg_class USING (oid) WHERE relpersistence [-<> 'p-]{+= 't+}'",
        "test_nothing_goes_on_with_a_table_that_is_not_as_declared",
    ),
    FILE("a-policy-hides-rows-from-commits", "I15", "CREATE FUNCTION tidegate.table_shape")(
        "AND relrowsecurity{+ AND relforcerowsecurity+} AND", "test_nothing_goes_on_with_a_table_that_is_not_as_declared"
    ),
    FILE("a-parent-past-the-guard-is-not-seen", "I15", "CREATE FUNCTION tidegate.table_shape")(
        "FROM pg_inherits WHERE inhrelid = of_table{+ AND inhparent = of_table+}",
        "test_nothing_goes_on_with_a_table_that_is_not_as_declared",
    ),
    FILE("another-function-under-an-accepted-trigger-is-taken", "I15", "CREATE FUNCTION tidegate.table_shape")(
        "pg_get_triggerdef(pg_trigger.oid)[- || ', ' || md5(prosrc)-]", "test_a_shape_that_a_person_accepts_counts_from_then_on"
    ),
    FILE("any-role-with-the-right-writes-a-state", "I15", "CREATE FUNCTION tidegate.single_writer")(
        "IF [-owner IS DISTINCT FROM nullif(current_setting('tidegate.writer', true), '')-]"
        "{+nullif(current_setting('tidegate.writer', true), '') <> owner+} THEN",
        "test_only_the_commit_writes_a_state_table",
    ),
    FILE("a-state-that-no-pipeline-owns-is-written", "I15", "CREATE FUNCTION tidegate.single_writer")(
        "IF owner [-IS NULL-]{+= ''+} THEN", "test_only_the_commit_writes_a_state_table"
    ),
    FILE(
        "a-commit-in-the-middle-of-an-update-is-not-refused",
        "fault:update-ends-transaction:commit",
        "CREATE FUNCTION tidegate.unfinished",
    )("WHERE pipeline [-=-]{+<>+} NEW.pipeline)", "test_an_update_that_fails_or_ends_the_transaction_leaves_nothing"),
    FILE("a-key-of-several-batches-gets-its-first-txid", "I14", "CREATE AGGREGATE tidegate.latest")(
        "pg_catalog.[-int8larger-]{+int8smaller+}",
        "test_several_batches_are_added_up_as_they_are_read",
        "test_batches_together_leave_what_they_leave_one_by_one",
    ),
    FILE("values-are-kept-twice", "I16", "CREATE FUNCTION tidegate.union_of_two")(
        "SELECT [-DISTINCT -]value", "test_updates_of_one_batch_accumulate_in_every_aggregate"
    ),
    FILE("counts-of-the-first-batch-are-lost", "I16", "CREATE FUNCTION tidegate.counts_of_two")(
        "coalesce([-a, 0) + coalesce(b, 0-]{+b, a+})", "test_updates_of_one_batch_accumulate_in_every_aggregate"
    ),
    FILE("a-key-may-not-keep-as-many-values-as-it-may", "limit:MOST_ELEMENTS", "CREATE FUNCTION tidegate.checked")(
        "IF cardinality($1) >{+=+} most THEN", "test_a_key_that_gets_too_many_values_in_the_course_of_batches_stops_the_commit"
    ),
    FILE("bits-of-a-sketch-are-counted-out", "name:ApproxDistinct", "CREATE FUNCTION tidegate.bits_of_two")(
        "coalesce(a, 0) [-|-]{+#+} coalesce(b, 0)", "tests/jobs/test_sketches.py"
    ),
    FILE("an-estimated-quantile-is-one-value-lower", "name:ApproxQuantiles", "CREATE FUNCTION tidegate.quantile_of")(
        "missing bigint := [-ceil-]{+floor+}(", "tests/jobs/test_sketches.py"
    ),
    FILE("a-copy-of-the-database-has-the-same-epoch", "I9", "CREATE FUNCTION tidegate.epoch")(
        "|| '/' || [-number-]{+1+};", "test_a_copy_within_the_server_is_noticed"
    ),
    FILE("a-promoted-standby-has-the-same-epoch", "I9", "CREATE FUNCTION tidegate.epoch")(
        "timeline := left(pg_walfile_name(pg_current_wal_insert_lsn()), [-8-]{+0+});", "test_a_promoted_standby_is_noticed"
    ),
    FILE("any-writer-gets-partitions-made", "I15", "CREATE FUNCTION tidegate.add_range")(
        "IF owner IS NULL OR [-owner IS DISTINCT FROM nullif(current_setting('tidegate.writer', true), '')\n        OR -]NOT",
        "test_a_partition_has_one_writer_and_no_readers_of_its_own",
    ),
    FILE("the-owner-s-function-takes-types-of-its-caller", "security:author-of-data", "CREATE FUNCTION tidegate.add_range")(
        "SET search_path = pg_catalog[-, pg_temp-] SET timezone", "test_a_function_of_the_owner_takes_no_types_of_its_caller"
    ),
    FILE(
        "a-partition-keeps-readers-of-its-own",
        "security:user-of-airflow-on-operator-page",
        "CREATE FUNCTION tidegate.add_range",
    )(
        "EXECUTE format('REVOKE [-ALL-]{+INSERT+} ON %s FROM %s', made, reader);",
        "test_a_partition_has_one_writer_and_no_readers_of_its_own",
    ),
    FILE("a-partition-has-no-trigger-of-its-own", "I15", "CREATE FUNCTION tidegate.add_range")(
        "CREATE TRIGGER single_writer BEFORE [-INSERT OR UPDATE OR DELETE OR -]TRUNCATE ON %s ",
        "test_a_partition_has_one_writer_and_no_readers_of_its_own",
    ),
    FILE("a-partition-is-not-noted", "I9", "CREATE FUNCTION tidegate.add_range")(
        "[-INSERT INTO tidegate.state_range VALUES (state, partition, lower, upper, every)-]{+PERFORM 1+};",
        "test_a_detached_partition_is_missed",
    ),
    FILE("the-role-of-commits-may-edit-frozen-metadata", "I6", "GRANT UPDATE (attempt, halted_at, halted_reason, skip_owner")(
        "GRANT UPDATE ({+source_metadata, source_digest, +}attempt,", "test_a_role_has_the_privileges_of_its_work_and_no_other"
    ),
    FILE("the-role-of-commits-may-rewrite-history", "I9", "GRANT UPDATE (txid, attempt, source_digest) ON tidegate.cursor")(
        "(txid, attempt, source_digest{+, epoch, history+})", "test_a_role_has_the_privileges_of_its_work_and_no_other"
    ),
    FILE(
        "the-reader-may-write",
        "security:user-of-airflow-on-operator-page",
        "GRANT SELECT ON ALL TABLES IN SCHEMA tidegate TO tidegate_reader",
    )("GRANT SELECT{+, UPDATE+} ON", "test_a_role_has_the_privileges_of_its_work_and_no_other"),
    FILE("a-window-is-full-one-batch-early", "limit:WINDOW", "CREATE VIEW tidegate.batches")(
        "b.txid - k.txid >{+=+} (", "test_each_batch_waits_for_what_the_view_says"
    ),
    FILE("a-halted-batch-is-shown-as-failed", "I19", "CREATE VIEW tidegate.batches")(
        "[-            WHEN b.halted_at IS NOT NULL THEN 'halted'\n-]",
        "test_a_halted_batch_says_the_way_out_of_its_error",
        "test_searches_and_measures_are_what_python_and_plain_sql_find",
    ),
    ERRORS_PY("a-constraint-is-named-without-its-value", "I15", "_of_a_constraint")(
        '_detail(error, "[-message_detail-]{+message_hint+}")[:', "test_a_constraint_of_a_team_is_named_with_table_and_value"
    ),
    PREREQUISITES("a-database-that-keeps-few-characters-is-taken", "error:PERMANENT_ERROR", "check")(
        'scalar_one()) != "[-UTF8-]{+SQL_ASCII+}":', "test_a_database_that_cannot_be_used_says_why"
    ),
)
