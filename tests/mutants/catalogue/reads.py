"""Faults of what reads states: whole batches, one snapshot, as of the previous txid."""

from tests.mutants.planted_fault import MODULE, in_file

FACTS = in_file("state_store/read_ledger/pipeline_facts.py")
KEY_LOOKUP = in_file("state_store/states/key_lookup.py")
LOOKUP = in_file("state_store/read_states/executor_lookup.py")
TRANSFORM = in_file("state_store/read_states/transform_reads.py")
ROWS = in_file("state_store/read_states/state_rows.py")
DATABASE = in_file("state_store/connections/database.py")
NAMED_QUERY_ANSWERS = in_file("state_store/read_states/named_query_answers.py")
UTC_TIMES = in_file("state_store/connections/utc_times.py")


MUTANTS = (
    FACTS("the-ack-of-the-last-commit-is-not-shown-as-due", "I20", "_facts")(
        "b.txid <[-=-] c.txid, b.awaits_ack", "test_searches_and_measures_are_what_python_and_plain_sql_find"
    ),
    KEY_LOOKUP("a-key-with-more-digits-finds-another-row", "I17", "rows")(
        'key.type.name[-.partition("(")[0]-]', "test_a_key_is_found_whatever_it_contains"
    ),
    KEY_LOOKUP("a-key-of-null-finds-no-row", "I17", "statement")(
        'sql.SQL("{} [-IS-]{+=+} NULL")', "test_a_key_is_found_whatever_it_contains"
    ),
    LOOKUP("a-newer-row-is-read-as-that-of-the-batch-before", "I21", "Reading._check")(
        "txid > self.newest_txid{+ + 10**6+}:", "test_a_row_that_is_newer_than_the_batch_is_refused"
    ),
    TRANSFORM("an-attempt-reads-what-its-own-batch-has-written", "I21", "_before")(
        "sa.case(([-is_of_txid-]{+sa.not_(is_of_txid)+}, value), else_=row.c[name])", "test_a_redo_reads_what_was_there_before"
    ),
    LOOKUP("a-policy-hides-rows-from-a-transform", "I21", "(module)")(
        "[-SET LOCAL row_security = off; -]", "test_rows_that_a_policy_hides_are_not_taken_for_missing"
    ),
    LOOKUP("the-latest-is-another-one-in-each-task", "I17", "Reading._fetch")(
        "imported = [] if self.snapshot is None {+or self.snapshot +}else [",
        "test_the_latest_is_one_snapshot_for_an_attempt",
    ),
    ROWS("a-range-lacks-its-end", "I17", "_within")(
        "sa.tuple_(*columns) <[-=-] given)", "test_rows_are_read_by_key_and_in_ranges"
    ),
    ROWS("the-last-row-of-a-page-comes-again", "I17", "_parts_after")(
        "yield [sa.tuple_(*columns) >{+=+} sa.tuple_(*values)]", "test_rows_come_as_they_are"
    ),
    ROWS("a-page-has-no-rows-of-which-a-key-is-null", "I17", "_parts_after")(
        "[-yield [*same, columns[position].is_(None)]-]{+pass+}", "test_rows_without_a_key_have_their_place"
    ),
    DATABASE("a-reader-s-snapshot-is-not-one", "I17", "Database._snapshot")(
        'isolation_level="[-REPEATABLE READ-]{+READ COMMITTED+}"', "test_an_answer_is_of_one_moment"
    ),
    DATABASE("a-reader-takes-its-snapshot-before-it-holds-the-table", "I17", "Database._snapshot")(
        "[-hold(connection.connection.driver_connection, states, lock_timeout_seconds=lock_timeout_seconds-]"
        "{+connection.exec_driver_sql('SELECT 1'+})",
        "test_a_reader_that_waits_for_a_table_to_be_made_again_finds_its_rows",
    ),
    NAMED_QUERY_ANSWERS("a-query-reads-what-it-does-not-name", "security:user-who-asks-query", "_statement")(
        "part.fullname [-not in known-]{+in ()+}:", "test_an_answer_that_is_more_than_reading_is_refused"
    ),
    UTC_TIMES("times-are-in-the-zone-of-the-database", "I17", "prepare_times")(
        'get_parameter_status("TimeZone") != "[-UTC-]{+Asia/Tokyo+}":', "test_times_are_in_utc_whatever_zone_the_session_has"
    ),
    KEY_LOOKUP("a-partition-that-is-being-detached-is-not-missed", "I17", MODULE)(
        "AND [-NOT inhdetachpending-]{+true+}", "test_a_partition_whose_detaching_was_broken_off_is_missing"
    ),
)
