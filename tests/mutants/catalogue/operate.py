"""Faults of what operators do: redo, skip, replay, mend, prune."""

from tests.mutants.planted_fault import MODULE, in_file

ACTIONS = in_file("state_store/operate/recorded_actions.py")
REFUSALS = in_file("state_store/operate/redo_refusals.py")
PRUNING = in_file("state_store/operate/pruning.py")
MENDED = in_file("state_store/operate/mended_records.py")
ACKS = in_file("jobs/engine/acks.py")
REBUILDS = in_file("state_store/pipeline_changes/rebuilds.py")
RANGES_PY = in_file("state_store/states/range_partitions.py")
TABLE_SWAP = in_file("state_store/pipeline_changes/table_swap.py")


MUTANTS = (
    REBUILDS("a-record-of-another-input-has-its-mend", "I24", MODULE)(
        "AND ours.origin IS NOT DISTINCT FROM [-theirs.origin-]{+ours.origin+}",
        "test_what_was_decided_about_a_record_is_kept_to_its_place",
    ),
    REBUILDS("a-mended-record-of-fewer-columns-is-another", "I24", MODULE)(
        "FROM record JOIN kept ON by IS NULL OR by [-<@-]{+=+} columns",
        "test_what_was_mended_is_the_same_record_with_other_columns",
    ),
    REBUILDS("a-mended-record-of-more-columns-is-another", "I24", MODULE)(
        "ours.by IN ([-ours.columns, -]theirs.columns)", "test_what_was_mended_is_the_same_record_with_other_columns"
    ),
    ACTIONS("a-redo-without-a-new-attempt", "I13", "redo")(
        "if batch.attempt [-== facts.cursor.attempt-]{+< (facts.cursor.attempt or 0)+}:",
        "test_only_a_new_sealed_attempt_at_the_last_committed_txid_is_redone",
    ),
    ACTIONS("a-redo-of-an-attempt-that-is-not-sealed", "I4", "redo")(
        "[-verdicts.check_sealed(spec, batch, attempts.newest(connection, batch), attempt_timeout_seconds=0)-]{+pass+}",
        "test_only_a_new_sealed_attempt_at_the_last_committed_txid_is_redone",
    ),
    ACTIONS("a-redo-that-a-policy-hides-rows-from", "I13", "redo")(
        '[-set_local(connection, {"row_security": "off"})-]{+pass+}', "test_a_redo_leaves_nothing_that_a_policy_hides"
    ),
    ACTIONS("a-redo-of-what-others-have-counted", "I13", "redo")(
        "[-check_not_followed(connection, spec, txid, request.without)-]{+pass+}",
        "test_a_redo_is_refused_if_a_pipeline_follows_meanwhile",
    ),
    ACTIONS("a-redo-of-what-is-being-rebuilt", "I24", "redo")(
        "[-check_not_rebuilt(connection, spec, txid)-]{+pass+}",
        "test_what_is_redone_during_a_rebuild_is_planned_again_or_refused",
    ),
    ACTIONS("a-redo-owes-no-ack", "I13", "redo")(
        "[-batches.owe_ack(connection, spec.name, txid, awaits_ack=request.awaits_ack)-]{+pass+}",
        "test_a_redo_that_dies_before_its_ack_owes_it",
    ),
    ACTIONS("a-redo-is-not-in-the-record-of-actions", "verb:redo", "redo")(
        '[-write_action(connection, spec.name, txid, "redo", request.owner, f"{request.reason}{without}")-]{+pass+}',
        "test_only_a_new_sealed_attempt_at_the_last_committed_txid_is_redone",
    ),
    REFUSALS("a-redo-of-an-earlier-txid", "I13", "check_redoable")(
        "if txid [-!=-]{+>+} committed_txid:", "test_only_a_new_sealed_attempt_at_the_last_committed_txid_is_redone"
    ),
    REFUSALS("a-redo-of-a-state-that-does-not-know-what-it-was", "I13", "check_redoable")(
        'if state.kind [-!= "opaque-]{+== "non-transactional+}"]', "test_a_state_without_previous_values_is_not_redone"
    ),
    ACTIONS("a-redo-keeps-the-former-bad-records", "I13", "_take_back")(
        "[-quarantined_records.clear(connection, spec.name, txid)-]{+[]+}",
        "test_bad_records_are_set_aside_by_the_commit_of_their_batch_and_replaced_by_a_redo",
    ),
    ACTIONS("a-redo-loses-what-was-mended", "I13", "redo")(
        "[-quarantined_records.mend_again(connection, spec.name, txid, mended)-]{+pass+}",
        "test_bad_records_are_set_aside_by_the_commit_of_their_batch_and_replaced_by_a_redo",
    ),
    ACTIONS("later-batches-continue-what-was-redone", "I13", "_replace_commit")(
        "[-connection.execute(sa.update(tables.cursor).where(c.pipeline == batch.pipeline).values(counts))-]{+pass+}",
        "test_only_a_new_sealed_attempt_at_the_last_committed_txid_is_redone",
    ),
    REFUSALS("a-redo-of-what-the-next-batch-has-read", "I21", "check_not_read")(
        "b.txid == txid + [-1-]{+2+})", "test_a_redo_reads_what_was_there_before"
    ),
    ACTIONS("a-batch-that-has-not-failed-is-skipped", "verb:skip", "skip")(
        "if attempt is None[- or (attempt.failed_at is None and locked.halted_at is None and locked.skip_reason is None)-]:",
        "test_a_batch_that_could_still_commit_is_not_skipped",
    ),
    ACTIONS("a-batch-is-skipped-before-its-turn", "I3", "skip")(
        "is_its_turn = txid [-=-]{+>+}= facts.cursor.txid + 1", "test_a_batch_that_is_given_up_waits_for_its_turn"
    ),
    MENDED("a-record-that-was-taken-up-is-mended", "verb:quarantine", "mend")(
        "if record.replayed_txid [-is not None-]{+== txid+}:", "test_a_second_mend_says_that_it_replaces_the_first"
    ),
    MENDED("a-second-mend-says-nothing", "verb:quarantine", "mend")(
        "if record.mended_at is [-not None and not-]{+None and+} mended.again:",
        "test_a_second_mend_says_that_it_replaces_the_first",
    ),
    MENDED("two-operators-mend-at-once", "verb:quarantine", "mend")(
        "sa.select(*columns).where(*this)[-.with_for_update()-]", "test_of_two_operators_who_mend_at_once_one_is_refused"
    ),
    PRUNING("what-has-not-committed-is-pruned", "I18", "prune")(
        "if up_to_txid > committed{+ + 1000+}:", "test_partitions_are_removed_as_a_whole_and_the_rest_in_pieces"
    ),
    PRUNING("what-was-removed-is-not-noted", "I18", "prune")(
        "[-_note(connection, state, up_to_txid)-]{+pass+}",
        "test_partitions_are_removed_as_a_whole_and_the_rest_in_pieces",
        "test_a_follower_stops_before_it_plans_a_range_that_lacks_changes",
    ),
    PRUNING("a-partition-that-a-follower-needs-is-removed", "I18", "prune_ranges")(
        "if partition in attached and newest > [-removal.up_to_txid-]{+committed+}:",
        "test_pruning_waits_for_followers_and_stops_later_ones",
    ),
    PRUNING("changes-of-the-txid-after-are-removed", "I18", "prune")(
        "end = up_to_txid + [-1-]{+1000+} if up_to_txid < committed else MAX_TXID",
        "test_partitions_are_removed_as_a_whole_and_the_rest_in_pieces",
    ),
    ACKS("an-ack-that-fails-keeps-all-others-waiting", "name:Pipeline", "(module)")(
        "MOST_FAILED_ACKS = [-10-]{+1+}", "test_a_source_hears_of_commits_and_failures"
    ),
    PRUNING("a-partition-that-is-to-stay-is-dropped", "verb:prune", "_remove")(
        "elif [-detaches-]{+False+}:", "test_a_detached_partition_stays_as_a_table"
    ),
    RANGES_PY("a-negative-number-is-in-the-next-range", "decision:0044", "_needed")(
        "(number + 1) // length[- - 1-]", "test_each_row_is_in_the_partition_of_its_time_or_number"
    ),
    RANGES_PY("ranges-of-two-lengths-in-one-table", "decision:0044", "add_missing")(
        "[-_check_every(connection, divided)-]{+pass+}", "test_a_table_is_divided_otherwise_with_all_its_rows"
    ),
    TABLE_SWAP("a-table-stays-divided-for-migrations", "decision:0044", "empty")(
        "if divides is not None{+ and not divides+} and", "test_a_rebuilt_state_is_that_of_a_pipeline_always_declared_so"
    ),
    TABLE_SWAP("what-was-accepted-of-a-column-outlives-its-table", "I15", MODULE)(
        "starts_with(key, 'column [-'-]{+-'+})", "test_columns_of_a_team_are_neither_lost_nor_taken_for_declared_ones"
    ),
    TABLE_SWAP("a-table-that-is-divided-loses-its-rows", "decision:0044", "make_again")(
        "[-connection.execute(sa.insert(after).from_select(names, sa.select(before)))-]{+pass+}",
        "test_a_table_is_divided_otherwise_with_all_its_rows",
    ),
    MENDED("a-mended-record-lacks-a-column", "verb:quarantine", "check_columns")(
        "isinstance(found, dict)[- and found.keys() == columns.keys()-] else", "test_a_parsed_record_takes_json_of_its_columns"
    ),
)
