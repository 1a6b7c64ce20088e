"""Faults of the merge: guards, what is read of staging, how values are combined, the author's code in the commit."""

from tests.mutants.planted_fault import MODULE, in_file

MERGE = in_file("state_store/commit/merge_into_states.py")
EXPRESSIONS = in_file("state_store/commit/merge_expressions.py")
COMBINE = in_file("state_store/commit/combine_batches.py")
QUARANTINE = in_file("state_store/commit/quarantined_records.py")
AUTHOR_UPDATES = in_file("state_store/commit/author_updates.py")
AUTHOR_CHECKS = in_file("state_store/commit/author_checks.py")


MUTANTS = (
    MERGE("an-upsert-without-its-guard", "I14", "_upsert")(
        'changes["txid"], guard = new.txid, [-target.c.txid < new.txid-]{+None+}',
        "test_a_state_or_a_cursor_that_disagrees_with_the_commits_halts",
    ),
    MERGE("a-row-of-the-same-txid-is-written-again", "I14", "_upsert")(
        "guard = new.txid, target.c.txid <{+=+} new.txid", "test_a_state_or_a_cursor_that_disagrees_with_the_commits_halts"
    ),
    MERGE("batches-together-write-over-a-row-that-is-ahead", "I14", "_upsert")(
        "sa.case((target.c.txid < first_txid, new.txid){+, else_=new.txid+})", "test_a_foreign_row_or_trigger_stops_all_batches"
    ),
    MERGE("whole-rows-are-written-over-one-of-the-same-txid", "I14", "_upserts_of_whole_rows")(
        "is_older = target.c.txid <{+=+} (", "test_a_row_of_another_writer_stops_the_commit_of_whole_rows"
    ),
    MERGE("rows-that-were-not-written-are-not-counted", "I14", "_merge")(
        "if written [-!=-]{+>+} expected:", "test_a_state_or_a_cursor_that_disagrees_with_the_commits_halts"
    ),
    MERGE("keys-of-batches-together-are-not-counted", "I14", "_merge")(
        "if written [-!=-]{+>+} together.keys:", "test_a_foreign_row_or_trigger_stops_all_batches"
    ),
    MERGE("appended-rows-are-not-counted", "I14", "_append")("if missing{+ < 0+}:", "tests/conformance/test_states.py"),
    MERGE("an-opaque-row-forgets-what-it-was", "I13", "_previous")(
        "[-previous_name(v.name): target.c[v.name] for v in state.values} | {-]PREVIOUS_TXID: target.c.txid}",
        "test_a_redo_has_the_effect_of_the_new_attempt_alone",
    ),
    MERGE("a-redo-deletes-keys-that-were-there-before", "I13", "restore")(
        "sa.delete(table).where(table.c.txid == txid[-, table.c[PREVIOUS_TXID].is_(None)-])",
        "test_a_redo_has_the_effect_of_the_new_attempt_alone",
    ),
    MERGE("a-redo-leaves-values-of-the-txid", "I13", "restore")(
        '.values([-before | -]{"txid": table.c[PREVIOUS_TXID]} | unknown)',
        "test_a_redo_has_the_effect_of_the_new_attempt_alone",
    ),
    MERGE("a-redo-leaves-appended-rows", "I13", "restore")(
        "[-connection.execute(sa.delete(table).where(table.c.txid == txid))-]{+pass+}",
        "test_a_redo_has_the_effect_of_the_new_attempt_alone",
    ),
    MERGE("a-redo-does-not-miss-a-partition", "I13", "restore")(
        "[-partitions.check_whole(connection, table.name)-]{+pass+}", "test_a_detached_partition_is_missed"
    ),
    MERGE("a-version-that-loses-is-recorded-as-a-change", "I1", "_recorded")(
        "if [-keeps_whole_rows(state)-]{+not state+}:", "test_every_kind_of_state_is_divided_as_it_is_in_one_table"
    ),
    MERGE("a-redo-leaves-recorded-changes", "I13", "restore")(
        "[-connection.execute(sa.delete(records).where(records.c.txid == txid))-]{+pass+}",
        "test_a_redo_writes_its_changes_in_the_place_of_those_before",
    ),
    MERGE("rows-that-no-seal-names-are-merged", "I7", "_rows_of")(
        "sa.select(*columns)[-.where(stage.c.task_attempt.in_([p.task_attempt for p in sealed]))-]",
        "test_rows_that_no_seal_names_do_not_count",
    ),
    QUARANTINE("bad-records-that-no-seal-names-are-kept", "I7", "move_sealed")(
        ")[-.where(stage.c.task_attempt.in_(tasks))-]",
        "test_bad_records_are_set_aside_by_the_commit_of_their_batch_and_replaced_by_a_redo",
    ),
    MERGE("a-merge-in-two-transactions", "I2", "merge_all")(
        '    {+connection.exec_driver_sql("COMMIT")\n    +}_update(connection, spec, batches, before=False)\n',
        "test_what_a_check_finds_blocks_the_batch_or_is_kept",
    ),
    AUTHOR_CHECKS("a-check-that-finds-something-does-not-block", "I2", "evaluate")(
        'if found and check.otherwise == "[-block-]{+never+}":', "test_what_a_check_finds_blocks_the_batch_or_is_kept"
    ),
    AUTHOR_CHECKS("what-a-check-sets-aside-counts-too", "I14", "without_wrong")(
        "staged = staged._replace(rows=staged.rows[- - rows, partials=others-]{+, partials=staged.partials+})",
        "test_what_a_check_finds_is_set_aside",
    ),
    AUTHOR_CHECKS("checks-compare-a-batch-with-replays", "error:CHECK_FAILED", "CheckedBatch.before")(
        "earlier[- & sa.not_(is_replay(self.pipeline, k.txid))-]",
        "test_a_replay_of_quarantine_is_not_compared_with_slices_of_the_source",
    ),
    QUARANTINE("partials-that-were-set-aside-are-replayed", "I22", "take_up")(
        "sa.update(tables.quarantine).where(*of_txid, [-waits-]{+_is_here+}())",
        "test_what_came_too_late_is_neither_replayed_nor_mended",
    ),
    QUARANTINE("a-batch-whose-records-were-replayed-is-redone", "I13", "clear")(
        "if record.replayed_txid is not None{+ and record.replayed_txid < txid+}:",
        "test_bad_records_are_set_aside_by_the_commit_of_their_batch_and_replaced_by_a_redo",
    ),
    EXPRESSIONS("a-sum-of-batches-may-overflow-on-its-way", "I16", "combined")(
        "return sa."
        "[-case((sizes <= half_of(value, column.type, derived), sa.cast(_sum(column), column.type))-]"
        "{+cast(_sum(column), column.type+})",
        "test_batches_that_overflow_are_not_merged_together",
    ),
    EXPRESSIONS("a-merged-sum-may-come-near-its-limit", "I16", "near_the_limit")(
        'if value.merge == "{+no +}sum" else changed', "test_batches_that_overflow_are_not_merged_together"
    ),
    EXPRESSIONS("null-wins-among-the-rows-of-batches", "I16", "in_order")(
        "[c.desc()[-.nulls_last()-] if", "test_batches_together_leave_what_they_leave_one_by_one"
    ),
    EXPRESSIONS("null-wins-over-the-kept-row", "I16", "_place")(
        "else (lambda c: c.[-is_not-]{+is_+}(None))", "test_updates_of_one_batch_accumulate_in_every_aggregate"
    ),
    EXPRESSIONS("of-two-equal-in-the-first-column-the-later-batch-wins", "I16", "_comparisons")(
        "return new >{+=+} mine, new < mine, sa.func.record_gt(theirs, ours)",
        "test_updates_of_one_batch_accumulate_in_every_aggregate",
    ),
    EXPRESSIONS("bits-are-lost-to-a-null", "I16", "merged")(
        "result = [-sa.func.coalesce(ours.bool_op(_BITS[merge])(theirs), ours, -]{+ours.bool_op(_BITS[merge])(+}theirs)",
        "test_updates_of_one_batch_accumulate_in_every_aggregate",
    ),
    EXPRESSIONS("an-author-s-combiner-gets-nulls", "name:Combiner", "_own")(
        "sa.case(([-theirs.is_(None), ours), (-]ours.is_(None), theirs), else_=both)",
        "test_a_pipeline_with_combiners_gives_the_value_of_one_pass",
    ),
    COMBINE("a-key-that-is-null-is-in-no-part", "I1", "_is_between")(
        "(column < _constant(column, bound))[-.is_(sa.true())-]", "test_every_key_is_in_one_part"
    ),
    COMBINE("the-ends-of-parts-overlap", "I1", "_is_between")(
        "sa.and_([-sa.not_(below[0]), -]below[1])", "test_every_key_is_in_one_part"
    ),
    AUTHOR_UPDATES("an-update-goes-on-as-another-writer", "fault:update-ends-transaction:commit", MODULE)(
        "[-current_setting('tidegate.writer', true),-]", "test_an_update_that_fails_or_ends_the_transaction_leaves_nothing"
    ),
    AUTHOR_UPDATES("an-update-may-end-the-transaction", "fault:update-ends-transaction:commit", "run")(
        "if [-not is_as_it_was-]{+False+}:", "test_an_update_that_fails_or_ends_the_transaction_leaves_nothing"
    ),
    MERGE("what-comes-before-an-update-does-not-run", "name:Update", "merge_all")(
        "    [-_update(connection, spec, batches, before=True)\n    -]for state in spec.readable:",
        "test_what_comes_before_sees_the_states_without_the_batch",
    ),
)
