"""Faults of planning: frozen metadata, txids without gaps, decisions about batches, files that have counted, acks."""

from tests.mutants.planted_fault import in_file

BATCHES = in_file("state_store/ledger/batches.py")
STOPPED = in_file("state_store/ledger/stopped_batches.py")
STORE = in_file("state_store/store.py")
FILES = in_file("state_store/ledger/counted_files.py")
COMMIT_RECORD = in_file("state_store/commit/commit_record.py")
PLAN_OUTCOMES = in_file("state_store/ledger/plan_outcomes.py")
TABLES = in_file("state_store/ledger/tables.py")


MUTANTS = (
    BATCHES("metadata-is-not-compared-with-its-digest", "I6", "decode_metadata")(
        "if [-hashlib.sha256(content).digest() != bytes(digest)-]{+not digest+}:",
        "test_altered_metadata_halts_every_step_of_its_batch",
    ),
    BATCHES("metadata-of-an-unknown-version-is-guessed-at", "I19", "decode_metadata")(
        "if [-version == METADATA_VERSION and -]isinstance(metadata, dict):",
        "test_altered_metadata_halts_every_step_of_its_batch",
    ),
    BATCHES("the-attempt-s-own-digest-is-not-compared", "I6", "checked_input")(
        "if [-bytes(row.attempt_digest) != bytes(row.source_digest)-]{+not row.attempt_digest+}:",
        "test_altered_metadata_halts_every_step_of_its_batch",
    ),
    BATCHES("a-txid-may-leave-a-gap", "I3", "insert_batches")(
        "if after and {+after.txid < 0 and +}not connection.scalar(", "test_a_plan_continues_what_was_opened_and_is_made_once"
    ),
    BATCHES("batches-planned-together-continue-the-first", "I12", "insert_batches")(
        '"previous_digest": digests[[-position - 1-]{+0+}]', "test_batches_add_up_in_txid_order"
    ),
    BATCHES("of-two-planners-both-have-planned", "I6", "insert_batches")(
        "return len(connection.execute(statement).all()) [-=-]{+<+}= len(rows)",
        "test_a_plan_continues_what_was_opened_and_is_made_once",
    ),
    BATCHES("a-run-is-planned-twice", "I8", "assign_to_run")(
        "if len(connection.execute(covered).all()) [-!=-]{+>+} len(rows):", "test_a_plan_that_runs_twice_at_once_is_one_plan"
    ),
    STORE("a-repeated-plan-plans-anew", "I8", "StateStore.open_batches")(
        "if planned := [-batches.run_txids(connection, spec.name, run_id)-]{+[]+}:",
        "test_a_plan_continues_what_was_opened_and_is_made_once",
    ),
    STORE("half-a-plan-is-kept", "I6", "StateStore.open_batches")(
        "after, new)\n            ):\n[-                connection.rollback()\n-]",
        "test_a_plan_continues_what_was_opened_and_is_made_once",
    ),
    STORE("batches-of-another-declaration-are-planned", "I16", "StateStore.open_batches")(
        "[-verdicts.check_declaration(spec, registered)-]{+pass+}",
        "test_a_declaration_that_is_not_registered_fails_where_there_is_something_new",
    ),
    STORE("a-plan-does-not-wait-for-a-migration", "I16", "StateStore.open_batches")(
        "[-batches.keep_declaration(connection, spec.name)-]{+pass+}",
        "test_a_plan_of_the_former_declaration_opens_nothing_during_a_migration",
    ),
    STORE("records-are-replayed-in-a-restored-database", "I9", "StateStore.replay_quarantined")(
        "[-commit_facts.check_history(connection, spec.name, self.witness)-]{+pass+}",
        "test_a_copy_within_the_server_is_noticed",
    ),
    STORE("a-paused-pipeline-opens-batches", "verb:pause", "StateStore.open_batches")(
        "[-recorded_actions.check_not_paused(connection, spec.name)-]{+pass+}",
        "test_a_paused_pipeline_plans_nothing_and_ends_only_what_has_begun",
    ),
    BATCHES("txids-overflow", "I3", "check_limits")(
        "if last [-+ len(metadata) -]> MAX_TXID:", "test_a_plan_continues_what_was_opened_and_is_made_once"
    ),
    BATCHES("metadata-may-be-one-byte-too-long", "limit:MAX_METADATA_BYTES", "check_limits")(
        "if len(content) > {+2 * +}MAX_METADATA_BYTES:", "test_a_plan_continues_what_was_opened_and_is_made_once"
    ),
    STOPPED("a-committed-batch-is-halted", "I8", "halt")(
        "b.[-txid > batches.cursor_txid(pipeline), b.-]skip_reason.is_(None), ~is_retired",
        "test_a_batch_that_commits_or_is_given_up_meanwhile_is_not_halted",
    ),
    STOPPED("a-batch-that-was-given-up-is-halted", "I20", "halt")(
        "[-b.skip_reason.is_(None), -]~is_retired", "test_a_batch_that_commits_or_is_given_up_meanwhile_is_not_halted"
    ),
    STOPPED("a-batch-is-halted-without-its-lock", "I8", "halt")(
        "[-batches.lock_open(connection, pipeline, b.txid == txid)-]{+pass+}",
        "test_a_batch_that_commits_or_is_given_up_meanwhile_is_not_halted",
    ),
    STOPPED("a-committed-batch-is-reopened", "I8", "reopen")(
        "b.txid.in_(locked), [-b.txid > batches.cursor_txid(pipeline), -]requested)",
        "test_a_batch_that_is_being_skipped_cannot_be_tried_again",
    ),
    STOPPED("a-retry-forgets-no-failure", "limit:Pipeline.tries", "reopen")(
        '"tries_after": b.[-attempt-]{+tries_after+}}', "test_a_retry_revokes_a_decision_to_skip"
    ),
    STOPPED("a-committed-batch-is-given-up", "I8", "give_up")(
        "b.[-txid > batches.cursor_txid(pipeline), b.-]skip_reason.is_(None))",
        "test_only_a_new_sealed_attempt_at_the_last_committed_txid_is_redone",
    ),
    BATCHES("the-metadata-of-a-replay-is-taken-for-a-position", "I12", "position_of")(
        'return metadata[-["source"] if metadata is not None and QUARANTINED in metadata else metadata-]',
        "test_a_replay_is_a_separate_batch_and_counts_once",
        "test_bad_records_are_set_aside_and_replayed",
    ),
    BATCHES("a-late-ack-counts-for-a-redo", "I13", "note_ack")(
        "b.txid == txid[-, counts-])", "test_a_late_ack_of_the_commit_before_a_redo_is_not_that_of_the_redo"
    ),
    COMMIT_RECORD("the-last-commit-owes-no-ack", "I8", "awaiting_acks")(
        "b.txid <[-=-] c.txid",
        "test_a_source_hears_of_commits_and_failures",
        "test_a_late_ack_of_the_commit_before_a_redo_is_not_that_of_the_redo",
    ),
    FILES("a-file-counts-twice", "I12", "write")(
        "if connection.execute(statement).rowcount [-!=-]{+>+} len(files)", "test_a_file_that_two_batches_list_counts_once"
    ),
    FILES("a-redo-keeps-the-files-of-the-commit-before", "I13", "take_back")(
        "f.pipeline == pipeline, f.txid [-==-]{+>+} txid", "test_a_redo_reads_the_files_of_its_batch_again"
    ),
    PLAN_OUTCOMES(
        "an-older-failure-hides-a-newer-success", "fault:plan-fails-its-source-is-away-or:processing", "note_failure"
    )("p.succeeded [-=-]{+>+}= began.succeeded", "test_an_older_plan_that_fails_does_not_hide_a_newer_success"),
    TABLES(
        "an-error-that-postgres-cannot-store-is-lost",
        "fault:plan-fails-its-source-is-away-or:processing",
        "_Message.process_bind_param",
    )(
        "return None if value is None else [-storable(value)-]{+value+}",
        "test_the_first_of_a_row_of_failures_dates_it_and_the_newest_says_why",
    ),
    STORE("a-plan-that-has-not-asked-its-source-has-succeeded", "I20", "StateStore.open_batches")(
        "if metadata [-is not None-]{+or txids+}:", "test_a_plan_that_has_not_asked_the_source_proves_nothing"
    ),
)
