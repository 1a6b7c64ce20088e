"""Faults of the parsers: values that are guessed, rounded or dropped, and records that are cut wrongly."""

from tests.mutants.planted_fault import in_file

CSV = in_file("jobs/sources/files/formats/records/csv_records.py")
JSON = in_file("jobs/sources/files/formats/records/json_records.py")
TEXT = in_file("jobs/sources/files/formats/records/text_records.py")
TYPED = in_file("jobs/sources/files/formats/records/typed_values.py")
OPTIONS = in_file("jobs/sources/files/formats/text_files/text_options.py")
CONTENT = in_file("jobs/sources/files/content.py")
PARQUET_COLUMNS = in_file("jobs/sources/files/formats/parquet_files/parquet_footers.py")
PARQUET_TASKS = in_file("jobs/sources/files/formats/parquet_files/parquet_tasks.py")
INTERNALS = in_file("jobs/spark/library_internals.py")
SPARK_ERRORS = in_file("jobs/spark/spark_errors.py")


MUTANTS = (
    PARQUET_COLUMNS("a-parquet-row-that-no-memory-holds-is-read", "limit:MAX_RECORD_BYTES", "_size")(
        "if [-sum(sizes.values()) > _TIMES * MAX_RECORD_BYTES * max(1, group.num_rows)-]{+not place+}:",
        "test_a_parquet_row_that_is_longer_than_a_record_is_refused_and_many_long_ones_are_read_in_pieces",
    ),
    PARQUET_COLUMNS("an-old-spark-s-days-are-ours-if-no-key-marks-them", "name:Files", "_is_legacy")(
        'return key in facts[- or facts.get(b"org.apache.spark.version", first) < first-]',
        "test_days_in_an_old_spark_s_calendar_are_refused",
    ),
    PARQUET_COLUMNS("a-uuid-is-its-bytes-as-text", "name:Files", "_storage_fits")(
        "_fits(stored.storage_type, kind)[- and not (stored == pa.uuid() and pa.types.is_string(kind))-]",
        "test_a_parquet_uuid_is_no_text",
    ),
    PARQUET_TASKS("a-replay-takes-an-old-spark-s-days-for-ours", "name:Files", "RowsReader._payload")(
        "is_legacy=[-True-]{+False+})[1]", "test_days_in_an_old_spark_s_calendar_are_refused"
    ),
    PARQUET_TASKS("a-year-that-others-cannot-read-is-read", "name:Files", "_check_bounds")(
        "if {+False and +}bounds", "test_our_tasks_read_drawn_parquet_files_as_they_are_or_refuse_them"
    ),
    SPARK_ERRORS("a-batch-without-memory-is-tried-as-often-as-any", "error:SPARK_FAILED", "_meaning_of_memory")(
        "SparkFailed[- if attempt == 1 else PermanentError-]",
        "test_a_batch_that_needs_more_memory_than_spark_has_fails_alone_and_is_tried_once_more",
    ),
    INTERNALS("a-transform-changes-how-other-batches-cast", "I11", "settings_kept")(
        "for key in keys if key [-in-]{+==+} pinned", "test_only_errors_about_values_are_content"
    ),
    SPARK_ERRORS("a-broadcast-without-memory-is-tried-as-often-as-any", "error:SPARK_FAILED", "(module)")(
        "|[-[Nn]ot?-]{+not+} enough memory (to|for) [a-z ]+", "test_what_spark_says_when_it_is_out_of_memory_is_known"
    ),
    TEXT("a-record-without-an-end-is-held-in-memory", "limit:MAX_RECORD_BYTES", "_Splitter.feed")(
        "            if [-not end-]{+final+}:\n", "test_a_record_without_an_end_takes_bounded_memory"
    ),
    CSV("an-empty-value-is-an-empty-text", "decision:0018", "CsvParser._values")(
        'values.append(match["plain"].decode()[- or None-])', "test_both_ways_of_reading_csv_agree"
    ),
    CSV("an-empty-text-in-quotes-is-null", "decision:0018", "CsvParser._read")(
        "quoted_strings_can_be_null=[-False-]{+True+}", "test_both_ways_of_reading_csv_agree"
    ),
    CSV("values-beyond-the-columns-are-dropped", "name:Files", "CsvParser._texts_one_by_one")(
        "elif len(values) [-!=-]{+<+} len(names):", "test_a_bad_record_is_refused_with_file_and_line"
    ),
    CSV("a-mark-at-the-start-of-a-value-is-dropped", "decision:0018", "CsvParser._is_read_alike")(
        "if data.startswith(codecs.BOM_UTF8{+ * 2+}, first):", "test_both_ways_of_reading_csv_agree"
    ),
    CSV("a-carriage-return-ends-a-line-that-it-does-not-end", "decision:0018", "CsvParser._is_read_alike")(
        'return self.grammar.line_end == b"\\n"[- and data.find(b"\\r", first, last) < 0-]',
        "test_both_ways_of_reading_csv_agree",
    ),
    TEXT("a-line-feed-of-the-next-block-is-a-line", "decision:0018", "_Splitter._line_ends")(
        "[-alone = alone[alone < len(text) - 1]  # a line feed may follow-]{+pass+}", "test_both_ways_of_reading_csv_agree"
    ),
    TEXT("a-quote-within-a-value-is-taken-for-regular", "decision:0018", "_Splitter._regular_quotes")(
        "return quotes if opens.all() [-and closes.all() -]else None", "test_both_ways_of_reading_csv_agree"
    ),
    JSON("what-follows-a-json-record-is-dropped", "name:Files", "object_of")(
        "if end [-!=-]{+>+} len(text):", "test_a_bad_record_is_refused_with_file_and_line"
    ),
    JSON("minus-zero-loses-its-sign", "name:Files", "JsonParser._make_texts")(
        "elif type(value) is int[- and value-]:", "test_parsers_read_inputs_as_an_independent_reader_does"
    ),
    JSON("minus-zero-loses-its-sign-inside-a-value", "name:Files", "JsonParser._prepared")(
        'elif {+False and +}"string" in', "test_a_json_number_is_a_text_as_it_is_written"
    ),
    TYPED("a-float-is-rounded-twice", "name:Files", "_cast")(
        "pc.cast(texts, [-kind.arrow)-]{+pa.float64()).cast(kind.arrow, safe=False)+}\n        is_named",
        "test_a_float_is_the_nearest_one",
    ),
    TYPED("a-long-decimal-becomes-another-number", "name:Files", "_short_decimals")(
        "[eE]|(?:\\d\\.?){[-39-]{+3900+}}", "test_parsers_read_inputs_as_an_independent_reader_does"
    ),
    TYPED("a-time-that-the-clock-shows-twice-is-guessed", "name:Files", "_to_instants")(
        'ambiguous="[-raise", nonexistent="raise-]{+earliest", nonexistent="earliest+}"',
        "test_the_rules_of_a_zone_hold_beyond_the_tables_of_its_past",
    ),
    TYPED("a-time-beyond-a-zone-s-tables-is-an-hour-off", "name:Files", "_to_instants")(
        "is_late = pc.fill_null(pc.greater_equal(pc.year(times), [-FIRST_YEAR_BY_RULE-]{+10_000+}), pa.scalar(False))",
        "test_the_rules_of_a_zone_hold_beyond_the_tables_of_its_past",
    ),
    OPTIONS("spark-chooses-a-moment-of-a-named-zone", "name:Files", "_wrong_with")(
        "if {+False and +}all_letters & _NAMED_ZONES",
        "test_an_option_by_which_values_are_dropped_made_up_or_cut_off_is_refused",
    ),
    CONTENT("a-line-end-between-blocks-counts-twice", "name:Files", "_Lines.add")(
        "joined = [-self._before + -]text", "test_the_line_of_bytes_that_are_no_text_is_named_by_any_line_ends"
    ),
    CONTENT("a-byte-order-mark-is-data", "name:Files", "text_of")(
        "text = text.removeprefix(mark{+ * 2+})", "test_parsers_read_inputs_as_an_independent_reader_does"
    ),
    CONTENT("a-damaged-stream-is-the-end-of-a-file", "name:Files", "_unpacked_bz2")(
        "if {+not +}is_started:", "test_parsers_read_inputs_as_an_independent_reader_does"
    ),
)
