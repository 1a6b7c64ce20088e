"""Faults of what a project declares: names, settings, inputs, globs, changes of a declaration, what travels to executors."""

from tests.mutants.planted_fault import in_file

COLUMNS = in_file("state_store/declarations/column_spec.py")
SPEC = in_file("state_store/declarations/pipeline_spec.py")
WINDOWS = in_file("state_store/declarations/window_spec.py")
CHANGES = in_file("state_store/pipeline_changes/declaration_changes.py")
SETTINGS_PY = in_file("state_store/base/settings.py")
EXITS = in_file("state_store/base/process_exits.py")
TASKS = in_file("jobs/spark/task_connections.py")
LINEAGE = in_file("dags/lineage.py")
KAFKA_SOURCE = in_file("jobs/sources/kafka/source.py")
GLOBS = in_file("jobs/sources/files/file_globs.py")
LISTING = in_file("jobs/sources/files/listing.py")
PARTITIONS = in_file("jobs/sources/files/partition_columns.py")
MARKERS = in_file("jobs/sources/files/completeness_markers.py")
RECORDS = in_file("jobs/sources/files/formats/records/text_records.py")
INPUTS_SOURCE = in_file("jobs/sources/inputs/source.py")
INPUTS_PLAN = in_file("jobs/sources/inputs/plan.py")
REFERENCES = in_file("jobs/sources/inputs/reference.py")


MUTANTS = (
    COLUMNS("a-name-may-be-no-identifier", "security:author-of-data", "check_name")(
        "if not NAME.[-fullmatch-]{+search+}(name):", "test_a_declaration_that_cannot_work_is_refused_when_it_is_made"
    ),
    SPEC("the-window-belongs-to-what-is-registered", "I16", "PipelineSpec.declaration")(
        'if name not in _WITHOUT_MEANING{+ or name == "window"+}}', "test_the_same_declaration_has_the_same_fingerprint"
    ),
    WINDOWS("what-is-final-is-decided-for-several-batches-at-once", "I22", "WindowSpec.commits_alone")(
        "return self.is_session[- or self.final_after is not None-]",
        "test_batches_that_depend_on_the_one_before_are_merged_one_by_one",
    ),
    CHANGES("columns-that-are-gone-are-not-named", "decision:0051", "_compare")(
        "for one, other in ((new, gone), (gone, new[-))-]{+[:0]))+})", "test_columns_come_and_go_if_the_version_confirms_that"
    ),
    CHANGES("an-aggregate-is-added-to-rows-that-lack-it", "I1", "_of_aggregates")(
        "if name not in [-was-]{+now+}:", "test_every_other_change_is_refused_with_its_reason"
    ),
    SETTINGS_PY("the-environment-comes-last", "verb:settings", "Settings.sources")(
        "origins[f.name], raw = candidates[[-0-]{+-1+}]", "test_each_setting_comes_from_the_first_place_that_has_it"
    ),
    SETTINGS_PY("a-copied-project-writes-into-the-others-states", "I1", "_read_stack")(
        "and not _is_same(Path(folder), [-file.parent-]{+Path(folder)+}):",
        "test_a_copied_project_does_not_lead_to_the_stack_of_the_other",
    ),
    SETTINGS_PY("a-misspelt-setting-is-ignored", "error:SETTINGS_INVALID", "Settings.sources")(
        "sorted(set(places[0][1]) - known{+ - set(places[0][1])+})",
        "test_a_setting_that_does_not_exist_is_refused_with_those_that_do_and_none_is_a_password",
    ),
    SETTINGS_PY(
        "a-password-is-a-parameter-that-is-shown", "security:another-account-of-same-machine-at-ports", "Settings.conninfo"
    )(
        '"user": user or self.pg_user,{+ "password": os.environ.get("PGPASSWORD"),+}',
        "test_a_setting_that_does_not_exist_is_refused_with_those_that_do_and_none_is_a_password",
    ),
    EXITS("a-thread-ends-a-process-as-a-success", "fault:process-dies-at-any-statement:processing", "_leave")(
        "status = status[- or 1-]", "test_a_thread_of_an_authors_code_ends_no_process_as_a_success"
    ),
    TASKS("a-files-name-says-its-password", "decision:0035", "_fingerprint")(
        'return [-hashlib.scrypt(secret, salt=b"tidegate", n=2**14, r=8, p=1, dklen=10).hex()-]{+secret.decode()+}',
        "test_a_password_file_travels_under_a_name_that_says_nothing",
    ),
    TASKS("an-error-quotes-a-part-of-a-password", "decision:0035", "_parameters")(
        "        )[- from None-]\n", "test_parameters_that_cannot_be_used_are_refused"
    ),
    LINEAGE("a-batch-goes-into-no-state", "name:Pipeline", "lineage_of")(
        "for state in pipeline.spec.readable{+[:0]+}", "test_a_batch_has_its_files_its_states_and_a_facet"
    ),
    KAFKA_SOURCE("a-topic-is-named-by-its-last-broker", "name:Kafka", "Kafka.datasets")(
        'split(",")[[-0-]{+-1+}]', "test_topics_and_tables_are_named_by_their_servers"
    ),
    GLOBS("two-stars-stand-for-a-folder-at-least", "I1", "_with_optional")(
        'frozenset(positions)[- | {position[1:] for position in positions if position[0] == "**"}-]',
        "test_a_glob_matches_its_files",
    ),
    LISTING("a-file-counts-again-by-the-name-of-a-link", "I1", "_Walk.run")(
        "names.[-discard-]{+add+}(name)", "test_a_link_within_the_folder_is_read_unless_its_file_is"
    ),
    PARTITIONS("a-value-of-a-folder-is-taken-as-it-is-written", "I1", "_decoded")(
        'return [-unquote(text, errors="strict")-]{+text+}', "test_a_folder_name_gives_a_value_of_the_declared_type"
    ),
    PARTITIONS("of-two-values-of-folders-the-first-counts", "I1", "PartitionColumns.values_of")(
        "if len(texts) [-!= 1-]{+== 0+}:", "test_a_folder_name_without_such_a_value_is_refused"
    ),
    MARKERS("a-marker-is-for-its-own-folder-alone", "name:Files", "_with_parents")(
        'while "/" in folder{+ and not folder+}:', "test_a_folder_is_read_once_its_marker_is_there"
    ),
    RECORDS("the-end-of-a-longer-line-end-is-passed-over", "limit:MAX_RECORD_BYTES", "_Splitter._end_of_passed")(
        "if line_end is None else [-min(len(line_end) - 1, len(data))-]{+0+}",
        "test_records_that_are_too_long_are_told_however_blocks_fall",
    ),
    INPUTS_SOURCE("inputs-are-as-good-as-the-best-of-them", "I12", "Inputs.__post_init__")(
        "kind for kind in [-_WEAKEST_FIRST-]{+reversed(_WEAKEST_FIRST)+} if any(", "test_the_kind_is_that_of_the_weakest_input"
    ),
    INPUTS_PLAN("an-input-that-rests-begins-again", "I1", "_positions")(
        'return {[-**previous["idle"], -]**previous[INPUTS]}', "test_each_input_moves_on_by_itself"
    ),
    INPUTS_PLAN("a-slice-that-only-moves-is-lost", "I20", "InputsCoordinator._with_partners")(
        "return [-moves or -]None", "test_a_slice_that_only_moves_a_position_is_nobodys_partner"
    ),
    REFERENCES("rows-are-joined-with-nothing", "decision:0030", "check_count")(
        "if [-not files-]{+files < 0+}:", "test_nothing_is_planned_without_the_reference"
    ),
)
