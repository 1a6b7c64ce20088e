"""Faults of the verbs, of the stack on this machine, and of the team server."""

from tests.mutants.planted_fault import MODULE, in_file

AIRFLOW_REPORT = in_file("tidegate/explain/airflow_report.py")
COMPLETION = in_file("tidegate/completion.py")
SOURCE_REPORT = in_file("tidegate/explain/source_report.py")
REMEDIES = in_file("tidegate/explain/remedies.py")
GUARD_PAGE = in_file("docs/errors/GUARD_MISMATCH.md")
LISTING = in_file("jobs/sources/files/listing.py")
PLUGIN = in_file("tidegate/page/plugin.py")
OUTPUT = in_file("tidegate/output.py")
CLEANUP = in_file("tidegate/stack/components/airflow_cleanup.py")
PROCESS = in_file("tidegate/stack/components/server_process.py")
POSTGRES = in_file("tidegate/stack/components/postgres.py")
KAFKA = in_file("tidegate/stack/components/kafka.py")
COMPOSE_FILE = in_file("docker-compose.yml")
SECRETS_SCRIPT = in_file("compose/secrets.sh")
ENTRY = in_file("compose/entrypoint.sh")
ROLES = in_file("compose/roles.sql")
POD = in_file("deploy/worker-pod.yaml")
RUN_VERBS = in_file("tidegate/commands/act/run_verbs.py")

ACCOUNT = "security:another-account-in-file-system"

MUTANTS = (
    RUN_VERBS("a-backfill-does-not-ask-again-what-others-have-committed", "verb:backfill", "through_airflow")(
        "_others(outcome, parameters, [-store.committed(pipeline)-]{+committed+})",
        "test_a_backfill_whose_batches_another_run_commits_is_done",
    ),
    RUN_VERBS("a-run-without-a-plan-counts-as-a-success", "verb:trigger", "_check_planned")(
        'if [-all(task["task_id"] != airflow.PLAN or-]{+any(task["task_id"] == airflow.PLAN and+} task',
        "test_a_run_that_a_person_another_team_or_a_retirement_ends_is_no_success",
    ),
    AIRFLOW_REPORT("a-scheduler-that-is-heard-is-said-to-be-silent", "verb:why", "causes_of")(
        "is None or silent [->-]{+<+} BUSY_SECONDS:", "test_each_obstacle_is_named_and_a_run_that_goes_on"
    ),
    AIRFLOW_REPORT("airflow-is-not-asked-about-a-commit-whose-turn-has-come", "verb:why", MODULE)(
        '"UNREAD"[-, "WAITS_FOR_COMMIT"-])', "test_airflow_is_asked_also_if_something_else_needs_attention"
    ),
    COMPLETION("states-are-completed-for-one-verb-alone", "verb:inspect", "states")(
        "if s.stream or [-not -]needs_changes]", "test_words_are_completed"
    ),
    SOURCE_REPORT("a-source-that-hangs-hides-the-others", "verb:status", "of_all")(
        "asked.ended.get(timeout=[-SILENCE_SECONDS-]{+ANSWER_SECONDS+})",
        "test_a_source_that_hangs_hides_no_other_in_the_status",
    ),
    LISTING("names-that-are-left-alone-are-not-counted", "verb:inspect", "_Walk._list")(
        "[-self._found.left_alone[self.glob.why_not(places, entry.name)].append(name)-]{+pass+}",
        "test_names_that_a_source_leaves_alone_are_counted_and_listed",
    ),
    REMEDIES("a-batch-of-a-source-that-changed-may-not-be-given-up", "error:SOURCE_CHANGED", MODULE)(
        '"OVERFLOW", [-"SOURCE_CHANGED", -]"TRANSFORM_FAILED")', "test_a_source_that_has_changed_is_put_back_or_counts_as_it_is"
    ),
    REMEDIES("the-way-out-of-a-halted-rebuild-is-refused", "verb:rebuild", "run_of")(
        'command("rebuild", rebuild.pipeline[-, "--yes"-])',
        "test_content_that_fails_is_corrected_or_given_up_also_in_a_rebuild",
    ),
    GUARD_PAGE("the-page-lets-another-pipeline-put-the-rows-back", "error:GUARD_MISMATCH", MODULE)(
        "SET tidegate.writer = '[-flights-]{+daily+}'", "test_a_ledger_that_was_restored_and_a_state_that_was_written_by_hand"
    ),
    PLUGIN("airflow-does-not-serve-the-page", "security:user-of-airflow-on-operator-page", "TidegatePlugin.fastapi_apps")(
        '"url_prefix": PREFIX{+ + "s"+}', "test_mended_and_retried_it_commits_before_the_operators_eyes"
    ),
    OUTPUT("an-authors-mistake-is-shown-among-our-calls", "verb:explain", "_keep_authors_calls")(
        "calls[:] = [-calls[first : last + 1] if only_ours else calls[first:]-]{+calls+}",
        "test_an_error_in_a_module_of_pipelines_is_shown_where_its_author_made_it",
    ),
    CLEANUP("new-logs-are-removed", "verb:up", "remove_logs")(
        "file.stat().st_mtime [-<-]{+>+} before:", "test_old_logs_are_removed_with_the_folders_that_they_leave_empty"
    ),
    PROCESS("a-process-of-another-boot-is-ended", "verb:down", "Identity.is_of")(
        "return [-self == Identity.of(pid)-]{+self.pid == pid+}",
        "test_a_process_of_another_boot_or_of_a_copied_stack_is_another_process",
    ),
    PROCESS("a-copied-stack-ends-the-processes-of-the-other", "verb:down", "RunFolder.read")(
        'record.pop("folder", None) [-== place-]{+!= ""+}:',
        "test_a_process_of_another_boot_or_of_a_copied_stack_is_another_process",
    ),
    POSTGRES("passwords-to-a-ledger-are-made-again", "verb:up", "EmbeddedPostgres.initialize")(
        "            if [-self._exists()-]{+not self.port+}:\n                raise",
        "test_a_ledger_is_never_overwritten_replaced_or_shared",
    ),
    POSTGRES("a-ledger-that-is-gone-is-made-again", "verb:up", "EmbeddedPostgres._check_cluster")(
        "            if [-known-]{+not self.port+}:\n", "test_a_ledger_is_never_overwritten_replaced_or_shared"
    ),
    POSTGRES("another-cluster-is-taken-for-the-ledger", "verb:up", "EmbeddedPostgres._check_cluster")(
        "(found := Cluster.at(self.data)) [-!= known-]{+is None+}:", "test_a_ledger_is_never_overwritten_replaced_or_shared"
    ),
    KAFKA("a-misspelt-topic-is-made", "name:Kafka", MODULE)(
        '"auto.create.topics.enable": "[-false-]{+true+}"', "test_a_topic_is_not_created_by_accident"
    ),
    COMPOSE_FILE("executors-of-the-team-server-own-the-tables", "I15", MODULE)(
        "[spark_token, postgres_tidegate_stager, {+postgres_tidegate_owner, +}kafka_tidegate_password]",
        "test_role_passwords_go_only_to_the_services_that_use_them",
    ),
    COMPOSE_FILE("the-witness-is-restored-along-with-the-database", "I9", MODULE)(
        '"witness:/var/lib/tidegate/[-witness-]{+data+}"', "test_committing_services_keep_the_witness_outside_the_database"
    ),
    COMPOSE_FILE("a-password-stands-in-an-environment", ACCOUNT, MODULE)(
        "POSTGRES_PASSWORD_FILE: [-/run/secrets/postgres_postgres-]{+secret+}", "test_no_value_is_a_secret"
    ),
    SECRETS_SCRIPT("others-may-read-the-team-servers-secrets", ACCOUNT, MODULE)(
        'chmod [-700-]{+755+} "$folder"', "test_secrets_are_declared_used_random_closed_and_kept"
    ),
    ENTRY("a-service-leaves-its-passwords-open", ACCOUNT, MODULE)(
        "umask [-077-]{+022+}", "test_a_service_starts_with_its_own_secrets_only"
    ),
    ROLES("every-role-gets-into-the-administrators-database", "I15", "REVOKE ALL ON DATABASE")(
        "tidegate, airflow, [-postgres, -]template1", "test_each_role_gets_into_its_own_database_only"
    ),
    POD("a-task-may-change-its-image", ACCOUNT, MODULE)(
        "readOnlyRootFilesystem: [-true-]{+false+}", "test_the_pod_is_closed_and_holds_no_secret"
    ),
)
