"""Faults of the sources' positions: which rows a batch reads, and what is compared before they count."""

from tests.mutants.planted_fault import MODULE, in_file

FILES = in_file("jobs/sources/files/plan.py")
MANIFESTS = in_file("jobs/sources/files/stores/manifest_plan.py")
DONE = in_file("jobs/sources/files/done_folder.py")
READ = in_file("jobs/sources/files/read.py")
LISTING = in_file("jobs/sources/files/listing.py")
FILE_IDENTITY = in_file("jobs/sources/files/identity.py")
KAFKA = in_file("jobs/sources/kafka/plan.py")
KAFKA_LAST = in_file("jobs/sources/kafka/last_records.py")
REFUSED_QUERIES = in_file("jobs/sources/postgres/refused_queries.py")
KAFKA_READ = in_file("jobs/sources/kafka/read.py")
POSTGRES = in_file("jobs/sources/postgres/plan.py")
QUERY = in_file("jobs/sources/postgres/table_query.py")
SETTLED = in_file("jobs/sources/postgres/settled_rows.py")
LATE = in_file("jobs/sources/postgres/late_rows.py")
DELTA = in_file("jobs/sources/delta/plan.py")
ICEBERG = in_file("jobs/sources/iceberg/plan.py")
CONTENT = in_file("jobs/sources/files/content.py")
PARTITIONED = in_file("jobs/sources/partitioned.py")
TABLE_ORIGIN = in_file("jobs/sources/postgres/table_origin.py")
TIME_STEPS = in_file("jobs/sources/postgres/time_steps.py")
JSON_RECORDS = in_file("jobs/sources/files/formats/records/json_records.py")
TEXT_SCAN = in_file("jobs/sources/files/formats/text_files/text_scan.py")
COUNTED_FILES = in_file("state_store/ledger/counted_files.py")
CHANGES = in_file("jobs/sources/changes.py")
SOURCE_CONNECTION = in_file("jobs/sources/postgres/source_connection.py")


MUTANTS = (
    READ("an-undeclared-column-is-not-told", "I11", "FileReader._note_columns")(
        "self._undeclared.update([-new-]{+[]+})", "test_a_new_column_is_told_with_its_first_txid_until_it_is_ignored"
    ),
    READ("an-undeclared-column-does-not-block", "I11", "FileReader._note_columns")(
        'self._source.on_new_column == "[-block-]{+never+}"', "test_a_batch_with_a_new_column_is_halted_if_the_source_says_so"
    ),
    CONTENT("a-file-of-the-same-size-and-time-is-the-same", "I11", "stamp_of")(
        '[-f"{status.st_ino}.{status.st_ctime_ns}{links}-]{+"same+}"', "test_a_file_of_the_same_size_and_time_is_read_and_named"
    ),
    FILES("a-renamed-file-counts-again", "I1", "FolderCoordinator._other_name")(
        "if {+not +}earlier else", "test_a_file_does_not_count_again_by_another_name"
    ),
    FILES("a-renamed-file-is-read-at-each-plan", "I20", "FolderCoordinator._other_name")(
        "[-self._touch(same, stamp)-]{+pass+}", "test_a_file_does_not_count_again_by_another_name"
    ),
    MANIFESTS("a-manifest-that-was-read-whole-is-passed-when-it-is-written-again", "I12", "ManifestsCoordinator._unread")(
        "if last is not None{+ and last.read < last.of+}:", "test_an_object_that_manifests_name_again_is_read_once"
    ),
    FILES("a-hard-link-counts-again", "I1", "FolderCoordinator._other_name")(
        "st_nlink > [-1-]{+9+}", "test_a_file_does_not_count_again_by_another_name"
    ),
    FILES("a-hard-link-with-a-time-of-whole-seconds-counts-again", "I1", "FolderCoordinator._other_name")(
        "for file in others if {+time_ns % 10**9 and +}self._has_inode",
        "test_a_link_to_a_file_with_a_time_of_whole_seconds_counts_once",
    ),
    FILES("a-copy-with-a-time-of-whole-seconds-is-passed-over", "I12", "FolderCoordinator._other_name")(
        "*(renamed if [-time_ns % 10**9-]{+True+} else ())", "test_a_link_to_a_file_with_a_time_of_whole_seconds_counts_once"
    ),
    FILES("a-copy-of-a-file-that-was-moved-away-is-passed-over", "I12", "FolderCoordinator._other_name")(
        "not in self._page[- and not self._was_moved_away(file)-]]", "test_a_copy_of_a_file_that_was_moved_away_counts"
    ),
    COUNTED_FILES("what-was-skipped-is-taken-for-what-counted", "I1", "last_counted")(
        "if [-not file.is_skipped-]{+file+}", "test_a_file_that_was_skipped_and_then_completed_is_read"
    ),
    KAFKA("records-in-the-place-of-lost-ones-are-passed-over", "I11", "TopicOffsets._find_cuts")(
        "if [-not -]is_same and self._is_left", "test_records_in_the_place_of_lost_ones_are_not_passed_over"
    ),
    KAFKA_LAST("a-record-in-the-place-of-another-is-taken", "I11", "losses")(
        "[-answer != last.get(LAST_RECORD, answer)-]{+last.get(LAST_RECORD) is None+}",
        "test_records_in_the_place_of_lost_ones_are_not_passed_over",
    ),
    KAFKA_LAST("a-log-that-was-cut-is-taken-for-whole", "I11", "losses")(
        'cuts[str(number)] = [-str(answer).rstrip(".")-]{+None+}', "test_records_in_the_place_of_lost_ones_are_not_passed_over"
    ),
    KAFKA_READ("a-planned-batch-reads-what-took-its-offsets", "I11", "KafkaReader._check_not_cut")(
        "(shorter[- or losses(topic, planned)-])", "test_records_in_the_place_of_lost_ones_are_not_passed_over"
    ),
    KAFKA("a-batch-that-is-chosen-again-keeps-no-leader-epoch", "I11", "KafkaCoordinator._starts")(
        "if LEADER_EPOCH {+not +}in last:", "test_records_in_the_place_of_lost_ones_are_not_passed_over"
    ),
    KAFKA("a-start-at-the-end-keeps-no-leader-epoch", "I11", "KafkaCoordinator._starts")(
        "[-**self._offsets.epoch_of(name)-]", "test_records_in_the_place_of_lost_ones_are_not_passed_over"
    ),
    KAFKA_LAST("an-older-copy-of-a-broker-is-waited-for", "I11", "losses")(
        "now is not None and now < [-epoch-]{+0+}", "test_records_in_the_place_of_lost_ones_are_not_passed_over"
    ),
    REFUSED_QUERIES("a-query-that-cuts-off-its-rows-is-read", "I11", "_across_rows")(
        '== "[-Limit-]{+Unlimited+}"', "test_tables_that_would_lose_rows_are_refused"
    ),
    REFUSED_QUERIES("a-group-is-read-before-it-is-whole", "I11", "_across_rows")(
        'node["Node Type"] == "[-Aggregate-]{+Group+}" and', "test_tables_that_would_lose_rows_are_refused"
    ),
    TABLE_ORIGIN("texts-in-another-order-are-passed-over", "I11", "_check_same_order")(
        "if [-was_ordered != is_ordered-]{+is_ordered is None+}:", "test_what_could_hide_rows_is_refused"
    ),
    TABLE_ORIGIN("another-collation-of-the-name-is-taken", "I11", MODULE)(
        "pg_collation_for(tidegate_key), [-collation_of.oid, -]CASE", "test_what_could_hide_rows_is_refused"
    ),
    TABLE_ORIGIN("what-a-view-shows-only-now-is-passed-over", "I12", "check_same_origin")(
        "if found != shown and (not found [-or-]{+and+}", "test_what_could_hide_rows_is_refused"
    ),
    TIME_STEPS("a-domain-rounds-a-time-unseen", "I12", MODULE)(
        "USING (oid) WHERE typtype = '[-d'-]{+b' AND typbasetype > 0+}",
        "test_a_rounded_time_before_its_transactions_start_is_read",
    ),
    TIME_STEPS("a-query-rounds-a-time-unseen", "I12", "step_seconds")(
        "else 10.0**-modifier[-, *(step for step in steps.values() if step)-]])",
        "test_a_rounded_time_before_its_transactions_start_is_read",
    ),
    TIME_STEPS("a-trigger-or-default-rounds-a-time-unseen", "I12", "step_seconds")(
        "for text in [-[*read, *written]-]{+read+} for", "test_a_rounded_time_before_its_transactions_start_is_read"
    ),
    TIME_STEPS("a-function-of-a-default-rounds-a-time-unseen", "I12", "_written")(
        "for _, _, body in made{+[:0]+}]", "test_a_rounded_time_before_its_transactions_start_is_read"
    ),
    TIME_STEPS("a-triggers-variable-rounds-a-time-unseen", "I12", "_assigned")(
        "for text in found{+[:0]+} for word", "test_a_rounded_time_before_its_transactions_start_is_read"
    ),
    TIME_STEPS("an-unknown-rounding-of-a-time-is-passed", "I12", "step_seconds")(
        "if step is [-None or-]{+not None and+} step >", "test_tables_that_would_lose_rows_are_refused"
    ),
    JSON_RECORDS("a-key-in-another-case-becomes-null", "I11", "JsonParser.parse")(
        "bad = [-self._in_another_case(records) | bad-]{+dict(bad)+}", "test_a_column_in_another_case_is_named_and_never_null"
    ),
    TEXT_SCAN("a-header-in-another-case-becomes-null", "I11", "_check_missing")(
        "not parser.may_lack or[- case or-]", "test_a_column_in_another_case_is_named_and_never_null"
    ),
    QUERY("a-real-is-read-by-its-printed-digits", "I11", "_printed")(
        'if kind.alias == "[-double-]":', "test_a_wider_type_has_each_value"
    ),
    SETTLED("a-rounded-time-is-before-the-bound", "I12", MODULE)(
        "SELECT [-(least(min(xact_start), %s::timestamptz)-]"
        "{+least(min(xact_start), %s::timestamptz+} - %s * interval '1 second')::text,",
        "test_a_rounded_time_before_its_transactions_start_is_read",
    ),
    READ("a-changed-file-of-the-same-size-is-read", "I11", "FileReader._check_planned")(
        'if [-digest != entry["sha256-]{+size != entry["size+}"]:',
        "test_a_planned_file_that_changed_is_refused_until_it_is_back",
    ),
    READ("a-file-that-changed-while-it-was-read-is-sealed", "I11", "FileReader.verify_batch")(
        "if [-self._check_planned(file) != file.inode-]{+file.inode is None+}:",
        "test_a_file_that_is_another_one_only_while_it_is_read_is_found_before_the_seal",
    ),
    READ("a-file-that-was-another-one-for-a-moment-is-sealed", "I11", "FileReader._check_planned")(
        "return status.st_dev, [-status.st_ino, status.st_ctime_ns-]{+0, 0+}",
        "test_a_file_that_is_another_one_only_while_it_is_read_is_found_before_the_seal",
    ),
    FILES("a-batch-has-one-file-too-many", "name:Files", "FilesCoordinator._filled")(
        "len(batch) <{+=+} source.max_files", "test_batches_are_cut_by_files_and_bytes"
    ),
    FILES("a-file-that-changed-after-it-counted-is-passed-over", "I12", "FolderCoordinator._find_same")(
        "[-next((file for file in candidates if file.sha256 == digest), None)-]{+candidates[0]+}",
        "test_a_file_that_changed_after_it_counted_is_named",
    ),
    DONE("a-file-that-took-the-name-of-one-that-is-copied-away-is-removed", "I1", "_copy")(
        "if stamp_of(source.stat()) != stamp_of([-before-]{+source.stat()+}):",
        "test_a_move_to_another_file_system_is_whole_or_not_at_all",
    ),
    DONE("a-file-that-took-the-name-of-one-that-was-copied-away-is-removed", "I12", "DoneFolder.move")(
        "if [-not _is_same(aside, aside.stat(), file)-]{+not aside.stat()+}:",
        "test_a_move_to_another_file_system_is_whole_or_not_at_all",
    ),
    DONE("a-link-is-moved-to-where-it-leads-nowhere", "I12", "DoneFolder.move")(
        "if [-not source.is_symlink() and -]_is_renamed(", "test_a_redo_reads_the_files_of_its_batch_again"
    ),
    FILES("a-done-folder-ahead-of-the-ledger-is-not-noticed", "I9", "FolderCoordinator._check_done_folder")(
        "if txid > committed {++ 1000 +}and self._done.has_files(txid)]", "test_a_done_folder_ahead_of_the_ledger_is_refused"
    ),
    FILE_IDENTITY("a-file-that-is-still-written-is-taken", "I11", "file_identity")(
        "if stamp_of(before) != stamp_of(after)[- or is_young(after.st_mtime_ns, min_age_seconds)-]:",
        "test_a_young_file_is_named_and_delays_no_other",
    ),
    LISTING("a-file-from-a-clock-that-is-ahead-is-taken", "I11", "is_young")(
        "-[-max(AHEAD_SECONDS, min_age_seconds)-]{+min_age_seconds+} <", "test_a_young_file_is_named_and_delays_no_other"
    ),
    CONTENT("a-link-leads-out-of-the-source", "security:author-of-data", "_check_opened")(
        "if within is not None and not {+path.is_symlink() and not +}is_below(",
        "test_a_link_that_leads_out_of_the_folder_is_refused",
    ),
    READ("an-object-of-the-same-size-is-read", "I11", "FileReader._check_object")(
        'if [-(info.size, identity) != (entry["size"], entry["sha256"])-]{+info.size != entry["size"]+}:',
        "test_an_object_that_is_not_as_planned_is_never_read",
    ),
    FILES("a-later-name-is-taken-before-one-that-is-held-back", "I12", "ObjectsCoordinator._may_come")(
        "return [-bool(self._page[name].size) or -]name in self._young",
        "test_an_object_that_is_gone_for_a_moment_holds_up_later_names_that_grow",
    ),
    FILES("an-object-that-was-overwritten-is-passed-over", "I12", "FilesCoordinator._is_new")(
        "if not last.is_committed{+ or last.inode is None+}:", "test_an_object_that_is_not_as_planned_is_never_read"
    ),
    KAFKA("another-topic-of-the-name-is-read-on", "I11", "KafkaCoordinator._check_same_topic")(
        "if not [-self._topic.is_topic_of(saved)-]{+saved+}:",
        "test_a_topic_that_was_created_again_is_never_taken_for_the_old_one",
    ),
    KAFKA("brokers-that-have-lost-records-are-read-on", "I12", "TopicOffsets.next_slice")(
        "if end < [-position-]{+0+}:", "test_a_position_after_the_end_is_refused"
    ),
    KAFKA("a-start-time-takes-the-record-before-it", "name:Kafka", "TopicOffsets.starts")(
        "moment = max([--((EPOCH - start) // timedelta(milliseconds=1)-]{+(start - EPOCH) // timedelta(milliseconds=1+}), 0)",
        "test_a_time_is_the_first_record_at_or_after_it",
    ),
    KAFKA("a-partition-gets-no-share", "I20", "fair_shares")(
        "max([-1-]{+0+}, lags[name] * room // total)", "test_shares_are_fair"
    ),
    KAFKA_READ("records-that-were-not-delivered-are-not-missed", "I11", "KafkaReader.verify_batch")(
        "if count < [-end - start-]{+0+} and not self._source.gaps:", "test_offsets_without_records_are_refused_unless_declared"
    ),
    KAFKA_READ("records-of-an-aborted-transaction-count", "name:Kafka", "KafkaReader._options")(
        '"kafka.isolation.level": "[-read_committed-]{+read_uncommitted+}"',
        "test_only_committed_records_of_transactions_are_read",
    ),
    SETTLED("rows-that-are-still-written-are-passed-by", "I12", "(module)")(
        '_WRITERS_LOCKS = [[-"RowExclusiveLock", -]', "test_a_lower_key_in_flight_holds_back_higher_ones"
    ),
    POSTGRES("writers-of-the-second-table-of-a-query-are-not-waited-for", "I12", "PostgresCoordinator._survey_table")(
        "settled = settled_by_sequence(connection, query, origin.read{+[:1]+}, highest, source.wait_seconds)",
        "test_writers_of_tables_in_a_query_are_waited_for",
    ),
    SETTLED("a-plan-waits-for-those-who-write-later", "I20", "_writers_end")(
        "for name, pid in still_open.items()[- if name in waiting-]}", "test_a_plan_waits_only_for_the_writers_it_found"
    ),
    SETTLED("rows-are-read-before-the-margin-of-the-clock", "I12", MODULE)(
        "%s::timestamptz) - {+0 * +}%s * interval", "test_rows_stay_behind_the_clock_by_the_margin"
    ),
    POSTGRES("rows-that-share-a-key-are-cut-apart", "I12", "PostgresCoordinator._statement")(
        "FETCH FIRST {rows} ROWS [-WITH TIES-]{+ONLY+}", "test_rows_that_share_a_key_stay_together"
    ),
    QUERY("the-last-row-of-a-range-is-read-again", "I11", "TableQuery.beyond")(
        'return self._compared(">{+=+}", position)', "test_a_table_keeps_its_promises"
    ),
    QUERY("a-view-that-shows-fewer-rows-is-sealed", "I11", "rows_now")(
        '[- or (rows < metadata["rows"] and not may_shrink)-]:', "test_a_batch_that_cannot_be_replayed_is_refused"
    ),
    LATE("a-row-below-numeric-keys-is-never-read", "I12", "gaps_of")(
        'types[0] not in (*WHOLE, [-"numeric"-])', "test_a_row_that_fills_an_old_gap_is_noticed"
    ),
    LATE("a-row-that-fills-an-old-gap-is-never-read", "I12", "check_gaps")(
        "    if rows{+ > 1000+}:\n", "test_a_row_that_fills_an_old_gap_is_noticed"
    ),
    QUERY("a-row-in-the-place-of-a-deleted-one-is-never-read", "I12", "rows_now")(
        'if rows == metadata["rows"] and [-metadata.get("keys", digest) !=-]{+not+} digest:',
        "test_gaps_are_remembered_up_to_a_limit",
    ),
    POSTGRES("a-txid-of-changes-is-taken-for-a-key", "I12", "PostgresCoordinator._position")(
        "if {+False and +}not is_range(previous)",
        "test_what_another_kind_of_source_has_planned_is_neither_read_nor_gone_on_from",
    ),
    DELTA("a-file-of-a-delta-snapshot-is-read-twice", "I11", "DeltaCoordinator._page")(
        "after is None or file.name >{+=+} after)", "test_a_snapshot_is_read_on_while_the_table_goes_on"
    ),
    DELTA("a-file-of-a-delta-version-is-read-twice", "I11", "DeltaCoordinator._files_of")(
        "if number >{+=+} taken:", "test_rows_are_read_once_by_versions_partitions_and_added_columns"
    ),
    DELTA("a-delta-table-made-again-is-read-on", "I11", "DeltaCoordinator._version_of")(
        'position.commit [-not in (None, commit.digest)-]{+== ""+}', "test_a_table_in_the_place_of_another_is_not_read"
    ),
    DELTA("a-delta-table-whose-old-log-is-gone-is-any-table", "I11", "DeltaCoordinator._version_of")(
        "if commit is {+not +}None and (now", "test_a_table_in_the_place_of_another_is_not_read"
    ),
    ICEBERG(
        "a-snapshot-that-expired-between-others-is-taken-for-a-rollback", "error:RANGE_EXPIRED", "IcebergCoordinator._after"
    )("read is not None and[- not is_cut_after-]{+ read+}", "test_a_position_whose_snapshot_expired_is_known_by_its_child"),
    ICEBERG("a-snapshot-of-iceberg-is-read-twice", "I11", "IcebergCoordinator._after")(
        "return history[numbers.index(last) [-+ 1 -]:]", "test_rows_are_read_once_by_snapshots_and_of_a_partitioned_table"
    ),
    ICEBERG("the-place-in-an-iceberg-snapshot-is-one-file-back", "I12", "IcebergCoordinator._rest_of")(
        "whole=whole), start=taken[- + 1-])", "test_a_place_in_a_snapshot_is_a_number_of_files"
    ),
    ICEBERG("another-iceberg-table-of-the-name-is-read-on", "I11", "IcebergCoordinator._after")(
        "if [-table.uuid != position.table-]{+not table.uuid+}:", "test_another_table_of_the_name_stops_planning"
    ),
    PARTITIONED("a-partition-that-vanished-is-left-out", "I11", "PartitionedCoordinator._report_missing")(
        'if self._kind == "{+non-+}transactional":', "test_a_partition_that_is_away_stops_a_transactional_source_only"
    ),
    CHANGES("a-policy-hides-changes-from-a-follower", "I1", "_connected")(
        'cursor.execute("SET LOCAL row_security = [-off-]{+on+}")',
        "test_a_follower_stops_before_it_plans_a_range_that_lacks_changes",
    ),
    CHANGES("a-follower-goes-on-over-a-rebuild", "I1", MODULE)(
        "SELECT max([-retired_at-]{+paused_at+})", "test_a_follower_does_not_go_on_over_states_that_were_rebuilt"
    ),
    SOURCE_CONNECTION("a-limit-of-the-source-s-server-ends-a-read", "I20", MODULE)(
        "SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN {+('none') AND name IN +}",
        "test_a_source_is_read_without_the_limits_of_its_server",
    ),
)
