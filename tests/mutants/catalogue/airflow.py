"""Faults of the sensor, the trigger and the dispatch: turns, halts, and which tasks get workers."""

from tests.mutants.planted_fault import in_file

TRIGGER = in_file("dags/batch_trigger.py")
DISPATCH = in_file("dags/dispatch.py")
TASKS = in_file("dags/batch_tasks.py")
TURNS = in_file("state_store/turns/batch_turns.py")
WAIT_TO_MERGE = in_file("state_store/turns/wait_to_merge.py")
PIPELINE = in_file("jobs/pipeline.py")
AIRFLOW_REPORT = in_file("tidegate/explain/airflow_report.py")
SUPERVISOR = in_file("tidegate/stack/supervisor.py")


MUTANTS = (
    TRIGGER("a-halted-batch-ends-no-wait", "I20", "_opened")(
        "if turn.opens or [-turn.halted or -](", "test_a_halted_batch_ends_all_later_waits_with_its_reason"
    ),
    TRIGGER("a-wait-for-the-window-does-not-end", "I20", "_opened")(
        '(place.awaited == "begin" and turn.[-begins-]{+done+})', "test_a_wait_for_the_window_ends_when_there_is_room_or_a_halt"
    ),
    TRIGGER("a-task-that-has-just-failed-ends-waits-at-once", "limit:POLL_SECONDS", "TurnPoller._failed_twice")(
        "failed, self._seen_failed = seen[- & self._seen_failed-], seen",
        "test_a_task_that_has_just_failed_may_still_report_to_the_ledger",
    ),
    TRIGGER("a-batch-that-was-given-up-ends-later-waits", "I20", "TurnPoller._failed_twice")(
        "([-batch.is_next-]{+not batch.is_committed+} or not batch.is_over)",
        "test_a_task_that_was_marked_by_hand_ends_no_wait_while_its_batch_may_still_commit",
    ),
    TRIGGER("a-commit-ends-before-a-cleared-task-has-lifted-its-halt", "I20", "TurnPoller._without_tried_again")(
        "if goes_on [-or not is_due-]{+and not is_due+}:", "test_a_commit_waits_while_its_process_task_goes_on_or_was_cleared"
    ),
    TRIGGER("waits-end-with-postgres", "fault:one-postgres-backend-or-server-dies:processing", "TurnPoller._poll")(
        "except ([-TidegateError, -]AirflowRuntimeError{+,+}) as", "test_waits_outlive_an_unreachable_postgres"
    ),
    TRIGGER("a-run-of-another-database-waits-for-ever", "I20", "TurnPoller._answers")(
        "over = {place: UNKNOWN for place in places if place not in {+places or place in +}waiting}",
        "test_a_run_that_another_database_does_not_know_ends_its_waits",
    ),
    TRIGGER("a-cleared-task-ends-without-a-worker", "name:batch_dag", "TurnTrigger.run")(
        "ti.try_number > [-1-]{+9+}:", "test_a_process_task_that_was_cleared_goes_to_a_worker_at_once"
    ),
    TASKS("a-wait-that-ended-in-vain-does-not-ask-the-ledger-again", "I20", "_still_halted")(
        "return [-store.committed(pipeline) < waits_for-]{+True+}",
        "test_a_wait_that_ended_in_vain_asks_the_ledger_again_before_it_fails",
    ),
    TASKS("a-misspelt-run-parameter-takes-everything", "name:batch_dag", "_check_parameters")(
        "if [-is_like_ours-]{+False+}:", "test_a_misspelt_run_parameter_is_refused_as_the_run_would_take_everything"
    ),
    TRIGGER("a-commit-that-goes-on-is-taken-for-one-that-is-tried-no-more", "I20", "failed_tasks")(
        "or (state in OVER[- and committing.get(map_index) in OVER-])",
        "test_a_batch_whose_tasks_were_marked_by_hand_ends_the_later_waits",
    ),
    TASKS("runs-that-are-active-at-once-form-a-chain", "limit:BATCHES_PER_RUN", "plan")(
        "if dag.max_active_runs [-== 1-]{+> 0+}:", "test_a_plan_that_leaves_batches_over_queues_the_next_run"
    ),
    TASKS("a-chain-of-runs-goes-on-past-a-batch-that-is-left-over", "I20", "_check_run_before")(
        "if txid [-> store.committed(pipeline)-]{+< 0+}",
        "test_a_chain_of_runs_ends_at_a_batch_that_is_left_over_and_with_the_source",
    ),
    TRIGGER("a-batch-that-nobody-processes-waits-for-ever", "limit:SECONDS_UNTIL_ABANDONED", "TurnPoller._abandoned")(
        "if now - since >= [-SECONDS_UNTIL_ABANDONED-]{+10**9+}",
        "test_a_batch_that_nobody_processes_any_more_gets_a_worker_by_its_commit_task",
    ),
    TURNS("a-turn-opens-one-txid-too-early", "I3", "TurnFacts.is_next")(
        "self.txid [-== self.committed + 1-]{+<= self.committed + 2+}",
        "test_turns_open_in_order_and_wait_only_for_batches_that_come",
    ),
    TURNS("a-halted-batch-halts-the-ones-before-it", "I20", "turn")(
        "and facts.halted_txid [-<= facts.txid-]{+> 0+}:",
        "test_turns_open_in_order_and_wait_only_for_batches_that_come",
        "test_a_halted_batch_ends_all_later_waits_with_its_reason",
    ),
    TURNS("tasks-that-wait-do-not-learn-of-a-retirement", "I23", "turn")(
        "if facts.retired_at is not None and [-not -]facts.is_committed:",
        "test_turns_open_in_order_and_wait_only_for_batches_that_come",
        "test_no_step_of_a_retired_pipeline_goes_on",
    ),
    WAIT_TO_MERGE("a-clock-that-was-set-back-keeps-a-batch-waiting", "I20", "has_waited_enough")(
        "not [-0 <= -]sealed_seconds < patience", "test_turns_open_in_order_and_wait_only_for_batches_that_come"
    ),
    TURNS("a-batch-waits-for-others-outside-the-window", "I20", "_may_commit")(
        "unended is not None[- and has_room(unended, facts.committed, facts.window)-]",
        "test_turns_open_in_order_and_wait_only_for_batches_that_come",
    ),
    TURNS("a-batch-waits-for-others-that-a-pause-holds", "I20", "_may_commit")(
        "is_coming[- and not is_held(facts.unended_attempt, facts.paused_at)-]",
        "test_turns_open_in_order_and_wait_only_for_batches_that_come",
    ),
    TURNS("a-batch-sealed-under-another-declaration-gets-no-worker", "I16", "TurnFacts.is_over")(
        "self.newest.[-is_sealed_by(self.fingerprint)-]{+sealed_at is not None+}",
        "test_turns_open_in_order_and_wait_only_for_batches_that_come",
    ),
    DISPATCH(
        "more-tasks-get-workers-than-the-run-may-have",
        "performance:so-do-process-tasks-except-first-ones",
        "Dispatcher._sent_to_workers",
    )(
        "max(left[0].concurrency[- - len(busy)-], 0)",
        "test_as_many_tasks_get_workers_as_the_run_may_have_and_the_others_end_without",
    ),
    DISPATCH("a-task-that-is-over-keeps-its-place", "I20", "Dispatcher._sent_to_workers")(
        'if state [-in WITH_WORKER-]{+!= "deferred"+}}', "test_a_task_whose_worker_is_gone_is_replaced_by_the_first_that_waits"
    ),
    DISPATCH("a-halt-ends-no-wait-for-a-worker", "I20", "Dispatcher.answers")(
        "batch is None[- or (turn.halted and not turn.begins)-]:",
        "test_a_wait_for_the_window_ends_when_there_is_room_or_a_halt",
    ),
    DISPATCH(
        "a-task-on-its-way-is-not-counted", "performance:so-do-process-tasks-except-first-ones", "Dispatcher._sent_to_workers"
    )(
        "if state in WITH_WORKER}[- | sent.keys()-]",
        "test_as_many_tasks_get_workers_as_the_run_may_have_and_the_others_end_without",
    ),
    PIPELINE("a-step-is-tried-once-more-than-its-pipeline-says", "limit:Pipeline.tries", "Retry.pause_after")(
        "if failures >[-=-] self.tries:", "test_a_task_is_tried_as_often_as_its_pipeline_says"
    ),
    TASKS("a-cleared-task-keeps-what-was-sealed", "name:batch_dag", "tries_since_clearing")(
        "return try_number - (max_tries - retries){+ - 1+}", "test_a_cleared_task_processes_its_batch_again"
    ),
    AIRFLOW_REPORT("a-paused-dag-is-said-to-go-on", "verb:why", "causes_of")(
        "if facts.paused_page is not None{+ and facts.run is None+}:", "test_each_obstacle_is_named_and_a_run_that_goes_on"
    ),
    SUPERVISOR("a-part-of-airflow-that-hangs-is-left", "verb:up", "Supervised.note_silence")(
        "[-self.process.kill()-]{+pass+}", "test_a_component_that_lives_without_a_heartbeat_is_started_again"
    ),
    SUPERVISOR("a-new-process-has-the-silence-of-its-predecessor", "verb:up", "Supervised.keep_alive")(
        "self._started[-, self._silent_since = now, None-]{+ = now+}",
        "test_a_component_that_lives_without_a_heartbeat_is_started_again",
    ),
)
