"""Faults of secrets and of what other accounts could put in the way: private files, proofs of servers, escaped texts."""

from tests.mutants.planted_fault import in_file

PROJECT_PY = in_file("state_store/base/project.py")
SETTINGS_PY = in_file("state_store/base/settings.py")
WITNESS = in_file("state_store/ledger/commit_witness.py")
READ = in_file("jobs/sources/kafka/read.py")
ERRORS = in_file("state_store/base/errors.py")
OUTPUT = in_file("tidegate/output.py")
SPANS = in_file("jobs/engine/spans.py")
PRIVATE_FILES = in_file("tidegate/stack/machine/private_files.py")


MUTANTS = (
    PROJECT_PY("code-in-a-linked-folder-is-not-looked-at", "security:another-account-that-can-write-into-project", "folder_of")(
        "if place.is_symlink() and place.[-is_dir-]{+is_file+}()]", "test_code_in_a_folder_that_is_linked_is_looked_at"
    ),
    OUTPUT("a-program-that-a-module-starts-writes-into-the-output", "error:SETTINGS_INVALID", "keep_standard_output")(
        "os.dup2([-2-]{+1+}, 1)", "test_whatever_a_module_writes_or_raises_the_others_are_found"
    ),
    ERRORS("an-error-without-a-text-takes-all-pipelines-along", "error:SETTINGS_INVALID", "class_and_text")(
        "except [-BaseException-]{+TypeError+} as failed:", "test_whatever_a_module_writes_or_raises_the_others_are_found"
    ),
    PROJECT_PY("a-module-that-others-may-write-is-run", "security:another-account-that-can-write-into-project", "folder_of")(
        'places = [folder[-, *folder.rglob("*")-]]', "test_code_of_other_accounts_is_not_run"
    ),
    SETTINGS_PY(
        "a-server-need-not-prove-that-it-knows-the-password",
        "security:another-account-that-takes-port-while-its",
        "Settings.conninfo",
    )(
        '[-"require_auth": self.pg_require_auth,\n-]',
        "test_the_connection_uses_the_names_that_libpq_knows",
        "test_an_impostor_of_postgres_does_not_get_the_password",
    ),
    PROJECT_PY("settings-that-all-may-write-are-taken", "security:another-account-that-leaves-tidegate-toml-or", "is_trusted")(
        "            return [-False-]{+True+}\n    return True",
        "test_a_settings_file_that_all_may_write_is_ignored_with_a_warning",
    ),
    PROJECT_PY("code-that-all-may-write-is-run", "security:another-account-that-can-write-into-project", "folder_of")(
        "and folder.[-is_dir-]{+is_file+}():", "test_code_of_other_accounts_is_not_run"
    ),
    PROJECT_PY("a-running-stack-trusts-what-it-has-found", "security:another-account-that-can-write-into-project", "is_named")(
        "bool(environ.get(HOME_VARIABLE))[- and not environ.get(FOUND_VARIABLE)-]",
        "test_code_of_other_accounts_is_not_run",
    ),
    PROJECT_PY("what-every-account-may-write-is-trusted", "security:another-account-that-can-write-into-project", "_distrust")(
        "if found.st_mode & stat.[-S_IWOTH-]{+S_ISUID+}:", "test_code_of_other_accounts_is_not_run"
    ),
    WITNESS("others-may-read-the-witness", "security:another-account-in-file-system", "_write")(
        "os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, [-0o600-]{+0o644+})",
        "test_marks_only_go_forward_and_are_private",
    ),
    WITNESS("others-may-enter-the-witness", "security:another-account-in-file-system", "_make_private")(
        "folder.mkdir(mode=[-0o700-]{+0o755+}, exist_ok=True)", "test_marks_only_go_forward_and_are_private"
    ),
    OUTPUT("a-terminal-obeys-what-data-say", "security:author-of-data", "visible")(
        "return [-UNSEEN.sub(escaped, text)-]{+text+}", "tests/unit/test_output.py"
    ),
    OUTPUT("log-lines-are-obeyed-by-a-terminal", "security:author-of-data", "VisibleFormatter.format")(
        'return [-visible(super().format(record), keep="\\n"-]{+super().format(record+})',
        "test_a_log_and_a_crash_show_every_character",
    ),
    READ(
        "spark-s-plan-shows-the-password-of-kafka", "security:another-account-of-same-machine-at-ports", "KafkaReader._log_in"
    )(
        "user, password = ([-_reference_to(file, name)-]{+configured[name]+} for name in",
        "test_the_password_is_in_no_plan_metadata_or_identity",
    ),
    READ(
        "spark-s-plan-shows-the-password-of-a-key", "security:another-account-of-same-machine-at-ports", "KafkaReader._log_in"
    )(
        "properties |= [-{name: _reference_to(file, name) for name in secret}-]{+secret+}",
        "test_the_password_of_a_key_is_read_where_brokers_are_asked",
    ),
    PRIVATE_FILES("the-stack-s-folders-are-open", "security:another-account-in-file-system", "private_folder")(
        "mode = [-0o711 if passable else 0o700-]{+0o755+}", "test_secrets_are_in_private_files_and_nowhere_else"
    ),
    PRIVATE_FILES("the-stack-s-files-are-open", "security:another-account-in-file-system", "private")(
        "os.O_NOFOLLOW, [-0o600-]{+0o644+})", "test_a_stacks_file_is_private_under_any_umask_and_is_no_link"
    ),
    SPANS("a-trace-has-what-an-error-quotes", "security:reader-of-metrics-endpoint", "Spans._record_attempt")(
        'times.error[-.partition(":")[0]-] if times.error', "test_spans_have_the_times_of_the_ledger_and_the_codes_of_errors"
    ),
)
