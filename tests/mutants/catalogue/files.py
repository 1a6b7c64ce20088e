"""Faults of files, objects, inputs and followed states: rows that are passed, read twice or taken from elsewhere."""

from tests.mutants.planted_fault import MODULE, in_file

ATTEMPT = in_file("jobs/compute/batch_attempt.py")
BUCKETS = in_file("jobs/sources/files/stores/buckets.py")
CHANGES = in_file("jobs/sources/changes.py")
COLUMN_CHANGES = in_file("state_store/pipeline_changes/declaration_changes.py")
FILES = in_file("jobs/sources/files/plan.py")
FILE_IDENTITY = in_file("jobs/sources/files/identity.py")
INPUTS_PLAN = in_file("jobs/sources/inputs/plan.py")
INPUTS_READ = in_file("jobs/sources/inputs/read.py")
MANIFESTS = in_file("jobs/sources/files/stores/manifest_plan.py")
MARKERS = in_file("jobs/sources/files/completeness_markers.py")
PARQUET = in_file("jobs/sources/files/formats/parquet.py")
PARQUET_TASKS = in_file("jobs/sources/files/formats/parquet_files/parquet_tasks.py")
READ = in_file("jobs/sources/files/read.py")
REGISTRATION = in_file("state_store/pipeline_changes/registration.py")
ROW_TRACKING = in_file("jobs/compute/stage/row_tracking.py")
TEXT_OPTIONS = in_file("jobs/sources/files/formats/text_files/text_options.py")
TEXT_SCAN = in_file("jobs/sources/files/formats/text_files/text_scan.py")
TEXT_TASKS = in_file("jobs/sources/files/formats/text_files/text_tasks.py")
TIME_PATTERNS = in_file("jobs/sources/files/formats/text_files/time_patterns.py")
DELTA_LOG = in_file("jobs/sources/delta/log.py")
ICEBERG_TABLE = in_file("jobs/sources/iceberg/table.py")


MUTANTS = (
    FILES("a-name-that-comes-again-is-passed-over", "I12", "FilesCoordinator._is_new")(
        "return [-True-]{+False+}  # the file that counted was moved away", "test_a_name_comes_again_with_new_content"
    ),
    FILES("a-file-is-passed-over-for-an-inode-number-that-is-free-again", "I12", "FolderCoordinator._has_inode")(
        "[-self._done.is_off(status.st_dev)-]{+False+}",
        "test_a_file_that_left_its_file_system_takes_no_other_with_its_inode_number",
    ),
    FILES("planned-files-of-another-folder-are-passed-over", "I12", "FilesCoordinator._kept_files")(
        "is_moved = [-current.get(PLACE, self._place_name) != self._place_name-]{+False+}",
        "test_planned_files_of_another_folder_are_not_passed_over",
    ),
    PARQUET("a-column-that-a-file-lacks-becomes-null", "name:Files", "ParquetReader._read_footers")(
        'if self._source.missing == "[-refuse-]{+never+}"',
        "test_a_column_that_a_parquet_file_lacks_is_refused_or_declared_null",
    ),
    PARQUET_TASKS("a-parquet-value-that-does-not-fit-counts-as-null", "name:Files", "RowsReader._converted")(
        "return flagged_batch(columns, [-bad-]{+{}+}, origins", "test_a_parquet_row_with_a_value_that_does_not_fit_is_set_aside"
    ),
    TEXT_TASKS("a-replayed-record-loses-its-folder", "name:Files", "PayloadsReader.__call__")(
        '.rpartition(", line ")[[-0-]{+2+}]', "test_names_of_folders_are_columns_also_of_a_record_that_is_replayed"
    ),
    TEXT_SCAN("a-column-of-a-folder-is-read-from-the-file", "name:Files", "_columns")(
        "if twice := [-[name for name in file.values if name in names]-]{+[]+}:",
        "test_a_column_that_is_in_files_and_folders_is_never_guessed",
    ),
    TEXT_OPTIONS("a-date-without-a-year-is-made-up", "name:Files", "_wrong_with")(
        'if [-"y" not in always or -]not (', "test_an_option_by_which_values_are_dropped_made_up_or_cut_off_is_refused"
    ),
    READ("a-pattern-in-a-name-reads-other-files", "I11", "literal_path")(
        r'return [-re.sub(r"([\[\]{}*?\\])", r"\\\1", for_spark(path))-]{+for_spark(path)+}',
        "test_spark_opens_parquet_files_of_any_name_and_no_others",
    ),
    TIME_PATTERNS("a-text-is-read-up-to-its-separator", "name:Files", "TimePattern.fits")(
        "return [-~F.contains(text, F.lit(_NO_TEXT)) & -]F.coalesce(",
        "test_a_text_is_read_to_its_end_by_a_pattern_as_one_moment",
    ),
    TIME_PATTERNS("an-hour-that-comes-twice-is-guessed", "name:Files", "TimePattern.needs_moments")(
        'return [-self.family == "timestamp"-]{+False+} and', "test_a_text_is_read_to_its_end_by_a_pattern_as_one_moment"
    ),
    TEXT_SCAN("an-older-csv-file-halts-although-null-is-declared", "name:Files", "_check_missing")(
        "is_refused = {+True or +}not parser.may_lack", "test_csv_files_that_are_older_than_a_column_have_null"
    ),
    TEXT_SCAN("a-new-key-within-a-file-is-not-seen", "I11", "_Keys.__init__")(
        "self._share = [-LOOKED_AT_FIRST-]{+0+}", "test_a_key_of_one_record_in_the_middle_is_seen"
    ),
    ATTEMPT("new-columns-are-not-noted", "I11", "stage_batch")(
        "sums[-, emitter.undeclared()-])", "test_spark_reads_and_the_ledger_tells"
    ),
    MANIFESTS("an-url-in-a-manifest-is-no-name", "name:Files", "ManifestsCoordinator._name_in")(
        "name = [-url_for_spark(line)-]{+line+}.removeprefix", "test_objects_are_read_as_manifests_name_them"
    ),
    MANIFESTS("a-manifest-is-read-in-part", "I12", "ManifestsCoordinator._read_manifest")(
        "with [-replace(path, etag=info.etag)-]{+path+}.open()",
        "test_a_manifest_that_is_written_again_while_it_is_read_is_not_read_in_part",
    ),
    BUCKETS("an-object-that-stands-for-a-folder-stops-planning", "I20", "Bucket.pages")(
        "for each in objects[- if each.size-])]", "test_an_empty_object_that_stands_for_a_folder_is_no_disorder"
    ),
    BUCKETS("a-store-that-refuses-is-taken-for-one-that-is-away", "error:SOURCE_UNREADABLE", "Bucket._explained")(
        'raise ([-_refused if status and status[1] in ("401", "403") else -]_failed)',
        "test_a_store_that_refuses_is_no_store_that_is_away",
    ),
    FILE_IDENTITY("an-object-is-read-as-it-was-before-its-marker", "I11", "with_identity")(
        "and not source.versions[- and not source.marker-]:",
        "test_a_folder_that_is_written_again_while_it_is_planned_is_read_as_its_marker_found_it",
    ),
    MARKERS("a-folder-that-is-written-again-is-planned", "I11", "Markers.check_unchanged")(
        "if marked is not None and [-self._find(marked) != self._marked[marked]-]{+not marked+}:",
        "test_a_folder_that_is_written_again_while_it_is_planned_is_read_as_its_marker_found_it",
    ),
    DELTA_LOG("the-log-of-a-table-in-a-store-is-listed-by-whole-keys", "name:Delta", "Log._names")(
        "(each.key[[-len(self._folder.key) + 1-]{+0+} :]", "test_a_delta_table_is_followed"
    ),
    ICEBERG_TABLE("a-table-in-a-store-lies-on-the-disk", "name:Iceberg", MODULE)(
        '"s3://": "[-s3a://-]{+/+}"', "test_an_iceberg_table_is_followed"
    ),
    INPUTS_READ("inputs-of-other-types-are-merged", "I11", "merged")(
        "sorted(expected.[-items() ^ types.items()-]{+keys() ^ types.keys()+})", "test_inputs_of_different_types_are_not_merged"
    ),
    ROW_TRACKING("equal-rows-of-two-inputs-are-alike", "I11", "row_id")(
        "[F.lit(input_name)] if {+False and +}input_name", "test_equal_rows_of_two_inputs_have_different_hashes"
    ),
    ATTEMPT("a-side-of-a-join-is-not-read", "decision:0011", MODULE)(
        "UNKNOWN_TASKS = [-100_000-]{+1+}", "test_a_side_of_a_join_is_read_although_the_other_is_empty"
    ),
    REGISTRATION("an-input-of-another-name-is-read-again", "I12", "_check_inputs")(
        "if renamed := [-[gone for gone in sorted(was.keys() - now.keys()) if was[gone] == now[name]]-]{+[]+}:",
        "test_a_change_that_would_read_an_input_again_is_refused",
    ),
    REGISTRATION("a-follower-is-registered-during-a-redo", "I13", "_await_redo")(
        "[-connection.execute(followed.with_for_update(read=True))-]{+assert followed is not None+}",
        "test_a_redo_and_a_follower_that_registers_wait_for_each_other",
    ),
    COLUMN_CHANGES("a-column-goes-while-a-follower-needs-it", "I11", "check_followers")(
        "if {+False and +}first is not None:", "test_a_column_of_what_is_followed_comes_and_does_not_go_while_a_batch_needs_it"
    ),
    INPUTS_PLAN("states-that-are-followed-together-part", "I12", "InputsCoordinator._end_together")(
        "if [-end > until-]{+not end+} and name in slices", "test_what_one_pipeline_wrote_together_is_joined"
    ),
    CHANGES("rows-that-a-followed-state-has-lost-are-not-missed", "I11", "ChangesEmitter.verify_batch")(
        'if rows [-!=-]{+>+} metadata["rows"]:', "test_what_is_lost_of_what_is_followed_is_noticed"
    ),
    CHANGES("a-followed-commit-that-was-made-again-is-read-on", "I9", "_check_history")(
        '[-_commit(connection, source, to) != metadata["commit"]-]{+not to+}:',
        "test_what_is_lost_of_what_is_followed_is_noticed",
    ),
)
