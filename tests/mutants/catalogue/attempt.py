"""Faults of the beginning of an attempt: the fence that it takes, the input that it reads, and whether it begins at all."""

from tests.mutants.planted_fault import in_file

FILE = in_file("state_store/turns/begin_attempt.py")
TURNS = in_file("state_store/turns/batch_turns.py")
COMMIT_FACTS = in_file("state_store/commit/commit_facts.py")
STORE = in_file("state_store/store.py")
FURTHER = in_file("dags/further_batches.py")


MUTANTS = (
    FILE("a-pause-lets-batches-begin", "error:PIPELINE_PAUSED", "_reason_against")(
        "if batch_turns.is_held(batch.locked.attempt{+ - 1+},",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
        "test_a_paused_pipeline_plans_nothing_and_ends_only_what_has_begun",
    ),
    FILE("a-new-attempt-fences-those-at-other-batches", "I5", "_take_fence")(
        "[-a.txid == batch.txid, attempts-]{+attempts+}.is_open", "test_a_newer_attempt_fences_the_older_whenever_that_goes_on"
    ),
    FILE("a-new-attempt-lifts-no-halt", "I20", "_take_fence")(
        ".values(attempt=number[-, halted_at=None, halted_reason=None, skip_owner=None, skip_reason=None-])",
        "test_a_retry_keeps_what_was_sealed_and_begins_again_after_all_else",
    ),
    FILE("an-attempt-of-a-replanned-batch-keeps-the-former-link", "I12", "_planned_again")(
        "continues=[-new-]{+planned+}.continues",
        "test_a_sealed_batch_is_processed_again_as_soon_as_its_predecessor_is_planned_again",
    ),
    FILE("an-attempt-does-not-compare-the-declaration", "I16", "decide")(
        "[-verdicts.check_declaration(spec, facts.registered)-]{+pass+}",
        "test_after_a_deploy_neither_old_code_nor_old_partials_count",
    ),
    FILE("an-attempt-of-a-retired-pipeline-begins", "I23", "decide")(
        "[-check_not_retired(spec.name, facts.retired)-]{+pass+}", "test_no_step_of_a_retired_pipeline_goes_on"
    ),
    COMMIT_FACTS("an-attempt-begins-in-a-restored-database", "I9", "read")(
        "[-cursors.check_database(cursor, database, mark, witness)-]{+pass+}", "test_a_copy_within_the_server_is_noticed"
    ),
    FILE("a-committed-batch-is-processed-again", "I8", "start_attempt")(
        "elif [-facts.batches[txid].is_committed-]{+txid < 0+}:", "test_batches_add_up_in_txid_order"
    ),
    FILE("a-batch-keeps-an-input-that-continues-nothing", "I12", "_keeps_input")(
        "or batch[-.continues(previous)-]{+ is not None+}",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
    ),
    FILE("a-sealed-batch-outlives-a-new-plan-of-its-predecessor", "I12", "_reason_against")(
        "newest.is_sealed_by(spec.fingerprint)[- and batch.continues(previous)-]",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
        "test_a_sealed_batch_is_processed_again_as_soon_as_its_predecessor_is_planned_again",
    ),
    FILE("a-batch-sealed-by-another-declaration-is-kept", "I16", "_reason_against")(
        "newest.[-is_sealed_by(spec.fingerprint)-]{+sealed_at is not None+} and batch.continues(previous)",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
        "test_after_a_deploy_neither_old_code_nor_old_partials_count",
    ),
    FILE("a-decision-to-skip-outlives-a-new-input", "I12", "_reason_against")(
        "if batch.locked.skip_reason is not None[- and _keeps_input(spec, batch, previous)-]:",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
    ),
    FILE(
        "an-idle-task-fences-another-that-has-begun-its-batch",
        "performance:task-that-is-finished-goes-on-with",
        "_reason_against",
    )(
        'if mode == "first"{+ and newest.sealed_at is not None+}:',
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
        "test_an_idle_task_finds_the_batches_that_no_task_has_begun_in_order",
    ),
    in_file("state_store/attempt/heartbeats.py")(
        "a-killed-process-holds-its-batch-until-it-falls-silent", "limit:LONGEST_SILENCE_SECONDS", "is_alive"
    )(
        "not is_silent(silent_seconds)[- and has_session-]",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
        "test_a_process_that_is_gone_holds_no_other_up",
    ),
    FILE("a-task-fences-another-process-that-is-at-work", "limit:POLL_SECONDS", "_reason_against")(
        'if mode [-!-]{+=+}= "take over" and newest',
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
        "test_who_would_process_a_batch_waits_for_the_process_at_work",
    ),
    FILE("a-plan-from-before-its-predecessor-s-new-plan-is-taken", "I12", "_must_replan")(
        "return [-new.continues != (previous.digest if previous else None)-]{+False+}",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
    ),
    FILE("the-first-attempt-does-not-read-the-plan", "I6", "_must_replan")(
        "[-(is_planned_again and batch.newest is not None)-]{+is_planned_again+}",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
        "test_later_batches_follow_a_batch_that_is_planned_again",
    ),
    FILE("a-rebuild-plans-its-batches-again", "I24", "_must_replan")(
        'spec.source_kind != "transactional"[- and spec.rebuilds is None-]',
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
    ),
    TURNS("the-window-is-one-batch-shorter", "limit:WINDOW", "has_room")(
        "return txid - committed <[-=-] window",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
    ),
    TURNS("the-window-is-one-batch-longer", "I3", "has_room")(
        "return txid - committed <= window{+ + 1+}",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
    ),
    FILE("a-batch-that-reads-its-states-begins-too-early", "I21", "_has_room")(
        "[-1-]{+2+} if spec.awaits_previous",
        "test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason",
        "test_a_batch_waits_for_the_one_before_and_says_so",
    ),
    STORE("a-begun-batch-may-be-given-up-by-the-policy", "I1", "StateStore.give_up")(
        "if [-not attempts.is_poison(connection, batch) or -]attempts.poison_tries(connection, pipeline, txid) < tries:",
        "test_a_batch_that_is_being_sealed_is_not_given_up",
    ),
    STORE("a-batch-is-given-up-before-its-tries", "limit:Pipeline.tries", "StateStore.give_up")(
        "attempts.poison_tries(connection, pipeline, txid) < tries{+ - 1+}:", "test_a_batch_has_all_its_tries"
    ),
    FURTHER("a-task-helps-a-long-run-until-its-end", "I20", "process_further_batches")(
        "if time.monotonic() >= ends_at{+ + 10**9+}:", "test_an_idle_task_finds_the_batches_that_no_task_has_begun_in_order"
    ),
)
