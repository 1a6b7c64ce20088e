"""Faults of registration, retirement and rebuilds: names once, one owner, the same declaration, rebuilt as committed."""

from tests.mutants.planted_fault import Mutant

REGISTRATION = "state_store/pipeline_changes/registration.py"
RETIREMENT_PY = "state_store/pipeline_changes/retirement.py"
REBUILDS_PY = "state_store/pipeline_changes/rebuilds.py"
CHANGES_PY = "state_store/pipeline_changes/declaration_changes.py"
TABLE_IDENTITY = "state_store/states/table_identity.py"
RETIREMENT = "tests/integration/test_retirement.py"
SCHEMA = "tests/integration/test_schema.py"
IDENTITY = "tests/integration/test_table_identity.py"
REBUILDS = "tests/jobs/test_rebuilds.py"

MUTANTS = (
    Mutant(
        "a-retired-name-is-given-again",
        "I23",
        REGISTRATION,
        "register",
        "cursors.check_not_retired(spec.name, Retired(known.retired_at, known.retired_by, known.retired_reason))",
        "pass",
        (f"{RETIREMENT}::test_its_name_and_those_of_its_states_stay_taken",),
    ),
    Mutant(
        "a-pipeline-counts-on-top-of-rows-of-others",
        "I23",
        REGISTRATION,
        "register",
        "_check_empty(connection, spec.name, spec.readable)",
        "pass",
        (f"{RETIREMENT}::test_rows_that_no_batch_of_the_pipeline_has_brought_stop_its_registration",),
    ),
    Mutant(
        "a-state-has-two-writers",
        "I15",
        REGISTRATION,
        "_check_owned",
        "if owner != spec.name:",
        "if owner == '':",
        (f"{SCHEMA}::test_a_state_has_one_writer",),
    ),
    Mutant(
        "an-update-has-two-pipelines",
        "I15",
        REGISTRATION,
        "_owners",
        "for found in (of_states, of_tables) for",
        "for found in (of_tables,) for",
        (f"{SCHEMA}::test_an_update_has_one_pipeline",),
    ),
    Mutant(
        "another-source-needs-no-version",
        "I16",
        REGISTRATION,
        "_check_change",
        'spec.version <= known.declaration["version"]',
        'spec.version < known.declaration["version"]',
        (f"{SCHEMA}::test_the_source_may_change_if_the_version_is_raised",),
    ),
    Mutant(
        "a-broken-chain-becomes-transactional",
        "I12",
        REGISTRATION,
        "_check_planned",
        "if later.continues != earlier.digest:",
        "if later.continues is None:",
        (
            "tests/conformance/test_matrix.py::test_a_source_does_not_become_transactional_while_a_batch_has_to_be_planned_again",
        ),
    ),
    Mutant(
        "states-may-change-once-batches-have-committed",
        "I16",
        CHANGES_PY,
        "check",
        "if refusals:",
        "if refusals and not committed:",
        (f"{SCHEMA}::test_a_declaration_is_fixed_from_the_first_commit_on",),
    ),
    Mutant(
        "a-column-comes-without-a-version",
        "I16",
        CHANGES_PY,
        "check",
        'if changes and spec.version <= known["version"]:',
        'if changes and spec.version < known["version"]:',
        ("tests/conformance/test_columns.py",),
    ),
    Mutant(
        "a-followed-pipeline-is-retired",
        "I23",
        RETIREMENT_PY,
        "retire",
        "_check_not_read(pipeline, others)",
        "pass",
        (f"{RETIREMENT}::test_a_followed_pipeline_is_not_retired",),
    ),
    Mutant(
        "a-pipeline-at-work-is-retired",
        "I23",
        RETIREMENT_PY,
        "retire",
        "_check_not_in_work(connection, pipeline, committed)",
        "pass",
        (f"{RETIREMENT}::test_a_pipeline_at_work_is_not_retired",),
    ),
    Mutant(
        "a-pipeline-is-retired-without-its-cursor-s-lock",
        "I23",
        RETIREMENT_PY,
        "_lock",
        ".where(c.pipeline == pipeline).with_for_update())",
        ".where(c.pipeline == pipeline))",
        (f"{RETIREMENT}::test_a_commit_and_a_retirement_wait_for_each_other",),
    ),
    Mutant(
        "attempts-outlive-their-pipeline",
        "I23",
        RETIREMENT_PY,
        "_write",
        ".where(a.pipeline == pipeline, a.sealed_at.is_(None), a.failed_at.is_(None))",
        ".where(a.pipeline == pipeline, a.sealed_at.is_not(None), a.failed_at.is_not(None))",
        (f"{RETIREMENT}::test_a_process_that_began_before_is_fenced",),
    ),
    Mutant(
        "a-pipeline-without-its-states-is-reinstated",
        "I23",
        RETIREMENT_PY,
        "reinstate",
        "if names := list(dropped):",
        "if names := list(dropped)[100:]:",
        (
            f"{RETIREMENT}::test_states_are_dropped_with_all_their_parts",
            f"{RETIREMENT}::test_states_of_a_retired_pipeline_can_be_dropped_later",
        ),
    ),
    Mutant(
        "others-may-write-beside-commits",
        "I15",
        TABLE_IDENTITY,
        "(module)",
        "AND tgenabled = 'A'",
        "AND tgenabled IN ('A', 'D')",
        (f"{IDENTITY}::test_no_batch_commits_while_other_writers_are_not_refused",),
    ),
    Mutant(
        "a-table-without-its-trigger-is-written",
        "I15",
        TABLE_IDENTITY,
        "(module)",
        "c.oid IS NOT NULL AND NOT EXISTS (",
        "EXISTS (SELECT FROM pg_trigger WHERE tgrelid = c.oid AND tgname = 'single_writer') AND NOT EXISTS (",
        (f"{IDENTITY}::test_no_batch_commits_while_other_writers_are_not_refused",),
    ),
    Mutant(
        "a-table-that-was-put-back-is-taken",
        "I9",
        TABLE_IDENTITY,
        "(module)",
        "AND (is_missing OR is_another OR",
        "AND (is_missing OR",
        (f"{IDENTITY}::test_nothing_goes_on_with_a_table_that_was_put_back",),
    ),
    Mutant(
        "a-migration-accepts-a-table-that-was-put-back",
        "I9",
        TABLE_IDENTITY,
        "(module)",
        "AND (table_oid IS NULL OR :again)",
        "AND (table_oid IS NULL OR :again OR true)",
        (f"{IDENTITY}::test_a_migration_does_not_accept_a_table_that_was_put_back",),
    ),
    Mutant(
        "a-rebuild-takes-its-place-before-it-has-all-batches",
        "I24",
        REBUILDS_PY,
        "_why_not_ready",
        "if txids[spec.name] != txids[rebuild.name]:",
        "if txids[spec.name] < txids[rebuild.name]:",
        (
            "tests/integration/test_decisions.py"
            "::test_a_rebuild_that_has_all_batches_and_lacks_a_commit_does_not_take_its_pipelines_place",
        ),
    ),
    Mutant(
        "a-rebuild-processes-what-was-skipped",
        "I24",
        REBUILDS_PY,
        "follow_decisions",
        "skipped = _skip(connection, spec, first, last)",
        "skipped: set[int] = set()",
        (f"{REBUILDS}::test_a_batch_that_was_skipped_is_skipped_and_one_that_is_open_is_processed_again",),
    ),
    Mutant(
        "a-rebuild-has-what-was-before-a-redo",
        "I24",
        REBUILDS_PY,
        "follow_decisions",
        "if QUARANTINED not in now and batches.encode_metadata(now) != metadata[-1]:",
        "if not now:",
        (f"{REBUILDS}::test_a_batch_that_is_redone_between_its_plan_and_its_opening_is_planned_again",),
    ),
)
