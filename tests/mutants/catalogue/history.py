"""Faults of the cursor and of what shows that commits are lost: lock, epoch, witness; and of lost answers and waits."""

from tests.mutants.planted_fault import MODULE, in_file

CURSORS = in_file("state_store/ledger/cursors.py")
WITNESS = in_file("state_store/ledger/commit_witness.py")
STORE = in_file("state_store/store.py")
DATABASE = in_file("state_store/connections/database.py")
COMMIT_FACTS = in_file("state_store/commit/commit_facts.py")
VERDICTS = in_file("state_store/commit/verdicts.py")
POSTGRES_ERRORS = in_file("state_store/connections/postgres_errors.py")
RECORDED_ACTIONS = in_file("state_store/operate/recorded_actions.py")
SCHEMA_REVISION = in_file("state_store/ledger/schema_revision.py")
LOCAL_SETTINGS = in_file("state_store/connections/local_settings.py")
WHY = in_file("tidegate/explain/why.py")


MUTANTS = (
    CURSORS("a-cursor-read-without-its-lock", "I3", "lock")(
        ".where(c.pipeline == pipeline)[-.with_for_update(nowait=not wait)-])",
        "test_the_sequence_ends_at_the_first_batch_that_is_not_ready",
    ),
    CURSORS("a-commit-waits-though-it-should-not", "I20", "lock")(
        ".with_for_update([-nowait=not wait-]))", "test_the_sequence_ends_at_the_first_batch_that_is_not_ready"
    ),
    CURSORS("a-locked-cursor-is-not-compared-with-its-history", "I9", "check_database")(
        "if [-not is_same_database(cursor, epoch := Epoch.of(facts.epoch), witness)-]"
        "{+(epoch := Epoch.of(facts.epoch)) is None+}:",
        "test_a_copy_within_the_server_is_noticed",
    ),
    CURSORS("code-from-before-the-ledger-commits", "I19", "check_database")(
        "[-schema_revision.check_known(facts.name, facts.ledger, facts.in_the_way)-]{+pass+}",
        "test_a_ledger_that_is_not_that_of_the_code_commits_nothing",
    ),
    SCHEMA_REVISION("a-trigger-keeps-rows-of-the-ledger-out", "I19", MODULE)(
        "tgtype & 3 = [-3-]{+4+} -- before each row", "test_nothing_goes_on_while_rows_of_the_ledger_are_not_found_or_kept"
    ),
    VERDICTS("ready-batches-of-a-retired-pipeline-commit", "I23", "ready")(
        "[-check_in_order(facts)-]{+pass+}", "test_no_step_of_a_retired_pipeline_goes_on"
    ),
    COMMIT_FACTS("a-retired-pipeline-plans-and-processes", "I23", "check_history")(
        "[-cursors.check_not_retired(pipeline, facts.retired)-]{+pass+}", "test_no_step_of_a_retired_pipeline_goes_on"
    ),
    CURSORS("an-epoch-that-is-not-compared", "I9", "is_same_database")(
        "return epoch [-== before-]{+is not None+} or", "test_a_copy_within_the_server_is_noticed"
    ),
    CURSORS("any-promotion-is-trusted", "I9", "is_same_database")(
        "[-(witness.trusts_promotions and epoch.was_promoted_from(before)-]{+epoch.was_promoted_from(before+})",
        "test_a_promoted_standby_is_noticed",
    ),
    CURSORS("an-older-copy-is-not-noticed", "I9", "describe_loss_since")(
        "if found is None[- and cursor.txid >= mark.txid-]:", "test_an_older_copy_in_the_place_of_the_database_is_noticed"
    ),
    CURSORS("other-commits-of-the-same-txid-are-not-noticed", "I9", "describe_loss_since")(
        "if (committed_at := _as_text(found.committed_at)) != mark.committed_at{+ and found.attempt != mark.attempt+}:",
        "test_an_older_copy_in_the_place_of_the_database_is_noticed",
    ),
    CURSORS("a-lost-redo-is-not-noticed", "I9", "describe_loss_since")(
        "if found.attempt [-<-]{+>+} mark.attempt:", "test_the_next_plan_repairs_the_witness"
    ),
    STORE("a-witness-not-written", "I9", "StateStore._commit_transaction")(
        "[-self.witness.advance(committed)-]{+pass+}", "test_an_older_copy_in_the_place_of_the_database_is_noticed"
    ),
    STORE("a-plan-repairs-no-witness", "I9", "StateStore.open_batches")(
        "[-self.witness.advance(committed)  # a process on another machine may have committed it-]{+pass+}",
        "test_the_next_plan_repairs_the_witness",
    ),
    WITNESS("a-mark-goes-back", "I9", "_is_later")(
        "return known is not None and known.place [->-]{+=+}= mark.place", "test_marks_only_go_forward_and_are_private"
    ),
    WITNESS("a-redo-makes-no-later-mark", "I9", "Mark.place")(
        "return self.txid, [-self.attempt-]{+0+}", "test_the_next_plan_repairs_the_witness"
    ),
    WITNESS("the-mark-of-something-else-is-taken", "I19", "_read")(
        "if not is_known[- or not is_ours-]:", "test_the_next_plan_repairs_the_witness"
    ),
    RECORDED_ACTIONS("an-accepted-loss-begins-no-history", "I9", "accept_epoch")(
        ".values(epoch=str(epoch)[-, history=sa.func.gen_random_uuid()-])",
        "test_an_older_copy_in_the_place_of_the_database_is_noticed",
    ),
    STORE("a-lost-answer-is-taken-for-a-failure", "I10", "StateStore.commit_batch")(
        "if isinstance(cause, DBAPIError)[- and not cause.connection_invalidated-]:",
        "test_the_outcome_of_a_commit_whose_answer_is_lost_is_waited_for",
    ),
    STORE("the-outcome-of-a-commit-is-looked-up-without-the-lock", "I10", "StateStore._resolve")(
        "[-commit_facts.lock_and_read(connection, pipeline, self.witness)-]{+pass+}",
        "test_the_outcome_of_a_commit_whose_answer_is_lost_is_waited_for",
    ),
    DATABASE("a-statement-after-the-lock-sees-what-was-before-it", "I3", "_engine_for")(
        'isolation_level="[-READ COMMITTED-]{+REPEATABLE READ+}",', "test_many_committers_of_many_txids_make_one_commit_each"
    ),
    DATABASE("a-commit-does-not-wait-for-the-disk", "I9", "_limits")(
        '[-sa.case((current == "remote_apply", current), else_="on")-]{+current+}',
        "test_a_commit_waits_for_the_disk_and_never_for_less_than_the_server_requires",
    ),
    DATABASE("a-stopped-process-keeps-its-transaction", "I20", "_limits")(
        '"idle_in_transaction_session_timeout": [-f"{idle_seconds}s-]{+"0+}"',
        "test_a_committer_that_is_paused_loses_its_transaction",
    ),
    DATABASE("what-can-be-done-later-waits-for-its-lock", "I20", "left_for_later")(
        "if [-not -]lock_holders.is_lock_timeout(error.orig):",
        "test_a_plan_leaves_for_the_next_one_what_a_lock_is_in_the_way_of",
    ),
    DATABASE("a-child-uses-its-parent-s-connections", "I8", "_forget_connections")(
        "[-engine.dispose(close=False)-]{+pass+}", "test_a_forked_process_opens_its_own_connections"
    ),
    POSTGRES_ERRORS("a-deadlock-is-a-permanent-error", "fault:deadlock-statement-timeout:commit", "translate")(
        'if state in _RETRYABLE_STATES{+.keys() - {"40P01"}+}:',
        "test_a_step_that_a_deadlock_ends_leaves_nothing_and_is_tried_again",
    ),
    LOCAL_SETTINGS("a-limit-on-transactions-ends-large-merges", "I20", "without_time_limit")(
        'sa.func.set_config(name, "[-0-]{+300ms+}", True)', "test_a_limit_on_whole_transactions_does_not_stop_a_commit"
    ),
    WITNESS("databases-share-a-mark", "I9", "Witness.file_of")(
        'f"{pipeline}.[-{history}.-]json"', "test_a_database_does_not_disturb_its_successor_or_another_with_the_same_folder"
    ),
    WHY("a-restored-database-commits-within-seconds", "verb:why", "_causes")(
        "yield _lost(wait, wait.loss)[-\n        return-]", "test_a_restored_database_is_the_root"
    ),
    SCHEMA_REVISION("states-of-another-project-are-taken", "decision:0045", "check_revision")(
        "[-_check_same_migration(connection, own, of_project)-]{+pass+}", "test_every_process_needs_the_projects_revision"
    ),
)
