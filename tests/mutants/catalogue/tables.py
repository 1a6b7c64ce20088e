"""Faults of tables and topics as sources: what would read rows twice, never, or as other rows."""

from tests.mutants.planted_fault import MODULE, in_file

DELTA, DELTA_LOG = in_file("jobs/sources/delta/plan.py"), in_file("jobs/sources/delta/log.py")
ICEBERG, ICEBERG_TABLE = in_file("jobs/sources/iceberg/plan.py"), in_file("jobs/sources/iceberg/table.py")
KAFKA, TOPIC = in_file("jobs/sources/kafka/plan.py"), in_file("jobs/sources/kafka/topic.py")
KAFKA_SOURCE = in_file("jobs/sources/kafka/source.py")
POSTGRES, READ = in_file("jobs/sources/postgres/plan.py"), in_file("jobs/sources/postgres/read.py")
SOURCE, QUERY = in_file("jobs/sources/postgres/source.py"), in_file("jobs/sources/postgres/table_query.py")
CONNECTION = in_file("jobs/sources/postgres/source_connection.py")
ORIGIN, REFUSED_QUERIES = in_file("jobs/sources/postgres/table_origin.py"), in_file("jobs/sources/postgres/refused_queries.py")
SEEN, LATE = in_file("jobs/sources/postgres/seen_by_plans.py"), in_file("jobs/sources/postgres/late_rows.py")
SETTLED = in_file("jobs/sources/postgres/settled_rows.py")
ERRORS = in_file("state_store/connections/postgres_errors.py")
LOCAL_SETTINGS = in_file("state_store/connections/local_settings.py")


MUTANTS = (
    DELTA("rows-that-a-delta-version-rewrites-count-again", "I11", "DeltaCoordinator._is_to_be_read")(
        "not ([-removes or -](adds and", "test_what_is_deleted_or_brought_back_stops_planning_and_may_be_left_out"
    ),
    DELTA("rows-that-restore-brings-back-count-again", "I11", "DeltaCoordinator._is_to_be_read")(
        "(removes[- or (adds and commit.operation == RESTORE)-])",
        "test_what_is_deleted_or_brought_back_stops_planning_and_may_be_left_out",
    ),
    DELTA("a-column-that-a-new-declaration-misspells-is-null", "I16", "DeltaCoordinator._check_declared")(
        'if previous["declared"] [-== self._declared-]{+is not None+}:',
        "test_a_declaration_that_changes_is_compared_with_the_table_again",
    ),
    DELTA("an-instant-of-delta-without-a-zone-is-read", "I11", "DeltaCoordinator._entry")(
        '[-not -]text.endswith("Z")', "test_an_instant_of_a_partition_needs_its_zone"
    ),
    DELTA_LOG("a-vector-deletes-all-rows-of-its-file", "I11", "Log.files")(
        'commit.changed([-*CHANGES.values()-]{+"delete" if changes else "insert"+}):', "test_changes_make_a_copy_of_the_table"
    ),
    DELTA_LOG("a-delta-version-that-is-gone-is-passed-over", "error:RANGE_EXPIRED", "Log.following")(
        "commit = [-self._known_commit(version, newest)-]{+Commit(version)+}",
        "test_versions_and_files_that_were_removed_are_not_passed_over",
    ),
    DELTA_LOG("a-delta-file-leads-out-of-its-table", "security:author-of-data", "Log._name_of")(
        '[- or ".." in name.split("/")-]', "test_a_table_that_would_be_misread_is_refused"
    ),
    DELTA_LOG("a-line-of-a-delta-log-that-is-no-action-is-passed-over", "I11", "Log._parse")(
        "if not isinstance(action, [-dict-]{+dict | list+}):", "test_a_table_that_would_be_misread_is_refused"
    ),
    DELTA_LOG("two-names-of-delta-that-are-no-text-become-one", "I11", "Log._name_of")(
        '[-, errors="strict"-]', "test_a_table_that_would_be_misread_is_refused"
    ),
    DELTA_LOG("rows-that-a-vector-deletes-are-read", "I11", "Log._check_whole")(
        "if file.deletions is not [-None-]{+file.deletions+}:", "test_a_table_that_would_be_misread_is_refused"
    ),
    ICEBERG("rows-that-iceberg-rewrites-count-again", "I11", "IcebergCoordinator._is_to_be_read")(
        "if [-not removes-]{+adds+}:", "test_a_snapshot_that_takes_rows_away_stops_planning"
    ),
    ICEBERG("a-compaction-of-iceberg-counts-again", "I11", "IcebergCoordinator._is_to_be_read")(
        '"replace":\n            return [-False-]{+True+}', "test_files_that_are_written_again_add_nothing"
    ),
    ICEBERG("a-rollback-of-iceberg-is-taken-for-an-expiry", "I11", "IcebergCoordinator._after")(
        "is_cut_after = [-read is not None and oldest is not None and history[0].timestamp_ms > read.timestamp_ms-]{+True+}",
        "test_a_table_that_was_rolled_back_stops_planning",
    ),
    ICEBERG("a-column-that-a-partition-has-is-null", "I11", "IcebergCoordinator._entry")(
        "for name in self._source.schema[- if name not in file.columns-]]", "test_a_column_of_the_partition_must_be_in_the_file"
    ),
    ICEBERG_TABLE("a-renamed-column-of-iceberg-is-null", "I11", "IcebergTable._check_names")(
        "[- or any(len(names[number]) > 1 for number in numbers[name])-]",
        "test_columns_that_were_renamed_or_added_again_are_refused",
    ),
    ICEBERG_TABLE("rows-that-iceberg-deletes-by-position-are-read", "I11", "IcebergTable.files")(
        "self._count(each, *[-THERE-]{+DELETED+}) for", "test_deletes_of_single_rows_are_refused"
    ),
    ICEBERG_TABLE("an-iceberg-file-leads-out-of-its-table", "security:author-of-data", "IcebergTable._data_file")(
        '"[-..-]{+...+}"} & set', "test_a_data_file_outside_the_table_is_refused"
    ),
    KAFKA("a-new-partition-begins-at-its-end", "I11", "TopicOffsets.next_slice")(
        'position = [-(previous or UNREAD)["end"]-]{+previous["end"] if previous else self._bounds(partition)[1]+}',
        "test_a_start_at_the_end_keeps_its_place_and_a_new_partition_begins_at_its_first_record",
    ),
    KAFKA("records-that-are-given-up-are-not-noted", "I12", "_first_offset")(
        'planned[-.get("lost", [planned["start"]])[0]-]{+["start"]+}',
        "test_an_opaque_source_may_go_on_without_expired_records_and_says_so",
    ),
    KAFKA("a-redo-takes-expired-records-away", "I13", "KafkaCoordinator._check_redo")(
        "self._history.committed() <{+=+} txid", "test_an_opaque_source_may_go_on_without_expired_records_and_says_so"
    ),
    KAFKA("planned-records-of-the-old-topic-are-left-behind", "I12", "KafkaCoordinator._rest_of_earlier")(
        "if [-not before <= generation < self._source.generation-]{+generation+} or",
        "test_the_next_generation_leaves_no_planned_record_of_the_old_topic_behind",
    ),
    TOPIC("a-wrong-password-is-taken-for-brokers-that-are-away", "error:SOURCE_UNREADABLE", MODULE)(
        "REFUSALS = (\n[-    *refusals_of_kafka_client(),\n-]",
        "test_a_wrong_password_is_distinguished_from_brokers_that_are_away",
    ),
    TOPIC("an-ack-moves-positions-back", "name:Kafka", "Topic._try_commit")(
        "if committed.offset [-<-]{+!=+} ends[committed.partition]",
        "test_ack_shows_positions_to_lag_tools_and_never_moves_them_back",
    ),
    KAFKA_SOURCE("a-compacted-topic-is-replayed", "I11", "Kafka.check_not_compacted")(
        'if self.kind == "[-transactional-]{+none+}"', "test_a_compacted_topic_is_an_opaque_source_only"
    ),
    KAFKA_SOURCE("a-transactional-topic-goes-on-without-records", "I11", "Kafka.__post_init__")(
        'and self.kind != "[-opaque-]{+transactional+}"', "tests/unit/test_declaration.py"
    ),
    CONNECTION("a-connection-has-a-password-in-code-and-logs", "name:PostgresTable", "conninfo_of")(
        "for name in _SECRETS if name in [-parameters-]{+()+}]", "tests/unit/test_declaration.py"
    ),
    CONNECTION("a-source-that-is-away-is-taken-for-unreadable", "error:SOURCE_UNAVAILABLE", "_meaning")(
        "if isinstance(family, [-StoreUnavailable-]{+LockHeld+}) and not", "test_a_server_that_is_away_is_tried_again"
    ),
    SEEN("rows-of-a-partition-that-was-attached-are-passed-over", "I11", "check_attached")(
        "if rows{+ > 1000+}:", "test_what_could_hide_rows_is_refused"
    ),
    SEEN("a-savepoint-is-taken-for-ended", "I12", MODULE)(
        "= '[-in progress-]{+aborted+}'", "test_what_is_open_during_a_plan_is_not_passed_by"
    ),
    SEEN("transactions-that-are-not-listed-are-taken-for-ended", "I12", "snapshot_of")(
        "high = [-running[OPEN]-]{+int(high)+}", "test_a_transaction_that_metadata_cannot_list_counts_as_open"
    ),
    SEEN("times-are-compared-with-an-early-snapshot", "I12", "snapshot_of")(
        "if not may_be_early{+ and OPEN < 0+}:", "test_rows_are_planned_by_time_once_all_open_transactions_can_be_listed"
    ),
    SEEN("a-transaction-number-means-another-one", "I12", MODULE)(
        "mod(newest - x, [-4294967296-]{+8589934592+})", "test_transaction_numbers_are_compared_across_their_wraparound"
    ),
    POSTGRES("late-rows-are-looked-for-before-the-range-is-chosen", "I11", "PostgresCoordinator.initialize_transaction")(
        "[-following = self._next_range(connection, after, survey, previous_metadata)\n            -]if before is not None:\n"
        "                self._check_late(connection, survey, before)\n"
        "{+            following = self._next_range(connection, after, survey, previous_metadata)\n+}",
        "test_what_could_hide_rows_while_a_plan_works_is_refused",
    ),
    POSTGRES("a-partition-that-comes-meanwhile-is-taken-for-late", "I20", "PostgresCoordinator._ends")(
        "if partitions_of(cursor, table) == partitions{+ or ends+}:",
        "test_a_partition_with_new_rows_may_be_attached_while_a_plan_works",
    ),
    POSTGRES("a-batch-without-rows-loses-its-position", "I12", "PostgresCoordinator.initialize_transaction")(
        "if following is None and [-current_metadata is not None-]{+following+}:",
        "test_an_opaque_batch_reads_what_is_still_there",
    ),
    ORIGIN("a-wider-key-is-taken-for-another-one", "I20", "_check_same_order")(
        "if was != is_now[- and not (was in _WHOLE and is_now in _WHOLE)-]:", "test_what_hides_no_row_is_read_on"
    ),
    ORIGIN("what-a-subscription-fills-is-read", "I11", "tables_read")(
        "if is_subscribed{+ is None+}:", "test_tables_whose_rows_come_in_another_order_are_refused"
    ),
    ORIGIN("keys-that-sessions-keep-for-later-are-passed-over", "I11", "_disorder")(
        "if cache > [-1-]{+1000+}:", "test_tables_that_would_lose_rows_are_refused"
    ),
    ORIGIN("a-promoted-standby-is-read-on", "I11", "check_timeline")(
        "before != now{+ + before+}:", "test_a_key_or_a_server_of_another_order_is_refused"
    ),
    ORIGIN("writers-through-a-partition-s-parent-are-passed-by", "I12", MODULE)(
        "SELECT own.relation[- UNION SELECT relid FROM pg_partition_ancestors(own.relation)-]",
        "test_a_partition_is_held_back_by_writers_through_its_parent",
    ),
    REFUSED_QUERIES("a-query-of-chance-is-read", "I12", "check_query")(
        "if varying := [-_varying(cursor, nodes) or -]_clock", "test_tables_that_would_lose_rows_are_refused"
    ),
    REFUSED_QUERIES("the-clock-is-taken-for-a-value-of-a-row", "I12", "_varying")(
        "varying = set([-_CLOCK.findall(code)-]{+()+})", "test_tables_that_would_lose_rows_are_refused"
    ),
    REFUSED_QUERIES("a-text-is-never-the-clock", "I12", "_clock_literal")(
        '[-return f"{literal[1]} as a time"-]{+pass+}', "test_tables_that_would_lose_rows_are_refused"
    ),
    REFUSED_QUERIES("a-text-in-a-plan-is-never-the-clock", "I12", "_varying")(
        "in _CLOCK_TEXT.findall([-each-]{+code+})", "test_tables_that_would_lose_rows_are_refused"
    ),
    REFUSED_QUERIES("tables-within-a-function-are-not-seen", "I12", "check_query")(
        "in cursor.fetchall(){+ if not name+}]:", "test_tables_that_would_lose_rows_are_refused"
    ),
    LATE("a-server-that-was-restored-is-read-on", "I11", "check_in_time")(
        "if newest < [-before-]{+0+}:", "test_a_key_or_a_server_of_another_order_is_refused"
    ),
    SETTLED("hidden-transactions-are-passed-by", "I12", "settled_by_clock")(
        "if hidden{+ > 1000+}:", "test_hidden_transactions_are_refused"
    ),
    SETTLED("a-prepared-transaction-is-passed-by", "I12", "settled_by_clock")(
        "if pid is [-None-]{+cursor+}}", "test_a_prepared_transaction_is_waited_for"
    ),
    READ("executors-read-our-own-server-instead", "name:PostgresTable", "PostgresReader.__init__")(
        "if source.connection is {+None or source.connection is not +}None:", "test_another_server_is_read_by_a_password_file"
    ),
    READ("a-decimal-of-too-many-digits-is-read", "I11", "_Parser.parse")(
        "[-table.validate(full=True)-]{+pass+}", "test_a_value_that_does_not_fit_fails_with_column_and_key"
    ),
    READ("rows-after-a-block-are-cut-apart", "I11", "_Spool.write")(
        "self._size = [-0-]{+len(row)+}", "test_long_texts_and_many_rows_pass_through_blocks"
    ),
    QUERY("names-in-quotes-are-folded", "name:PostgresTable", "table_of")(
        """.replace('""', '"'){+.lower()+} if""", "test_names_are_those_of_sql"
    ),
    QUERY("a-position-loses-digits", "I11", "TableQuery.position")(
        '"{}::[-text-]{+float8::text+}"', "test_keys_of_all_types_cut_ranges"
    ),
    SOURCE("another-database-is-the-same-source", "I16", "PostgresTable.identity")(
        '"port"[-, "dbname"-])', "test_the_identity_says_which_rows_and_where"
    ),
    ERRORS("a-server-without-proof-is-asked-again", "security:another-account-that-takes-port-while-its", MODULE)(
        '_TLS = ("[-certificate-]{+no certificate+}",', "test_a_server_that_is_not_verified_is_refused_for_good"
    ),
    LOCAL_SETTINGS("a-setting-is-left-behind-in-a-pooled-session", "I15", "local")(
        "set_config(name, value, [-True-]{+False+})", "test_batches_commit_through_a_transaction_pooler"
    ),
)
