"""Faults of secrets and of what other accounts could put in the way: private files, proofs of servers, escaped texts."""

from tests.mutants.planted_fault import Mutant

PROJECT_PY, SETTINGS_PY = "state_store/base/project.py", "state_store/base/settings.py"
WITNESS = "state_store/ledger/commit_witness.py"
SETTINGS, PROJECT = "tests/unit/test_settings.py", "tests/unit/test_project.py"
PRIVATE_MARKS = "tests/integration/test_restores.py::test_marks_only_go_forward_and_are_private"

MUTANTS = (
    Mutant(
        "a-module-that-others-may-write-is-run",
        "security:another-account-that-can-write-into-project",
        "state_store/base/project.py",
        "folder_of",
        'for place in [folder, *folder.rglob("*")]:',
        "for place in [folder]:",
        ("tests/unit/test_project.py::test_code_that_others_may_have_written_is_not_run",),
    ),
    Mutant(
        "a-server-need-not-prove-that-it-knows-the-password",
        "security:another-account-that-takes-port-while-its",
        SETTINGS_PY,
        "Settings.conninfo",
        '"require_auth": self.pg_require_auth,\n',
        "",
        (
            f"{SETTINGS}::test_the_connection_uses_the_names_that_libpq_knows",
            "tests/stack/test_neighbours.py::test_an_impostor_of_postgres_does_not_get_the_password",
        ),
    ),
    Mutant(
        "settings-that-all-may-write-are-taken",
        "security:another-account-that-leaves-tidegate-toml-or",
        PROJECT_PY,
        "is_trusted",
        "            return False\n    return True",
        "            return True\n    return True",
        (f"{SETTINGS}::test_a_settings_file_that_all_may_write_is_ignored_with_a_warning",),
    ),
    Mutant(
        "code-that-all-may-write-is-run",
        "security:another-account-that-can-write-into-project",
        PROJECT_PY,
        "folder_of",
        "and folder.is_dir():",
        "and folder.is_file():",
        (f"{PROJECT}::test_code_that_others_may_have_written_is_not_run",),
    ),
    Mutant(
        "what-every-account-may-write-is-trusted",
        "security:another-account-that-can-write-into-project",
        PROJECT_PY,
        "_distrust",
        "if found.st_mode & stat.S_IWOTH:",
        "if found.st_mode & stat.S_ISUID:",
        (f"{PROJECT}::test_code_that_others_may_have_written_is_not_run",),
    ),
    Mutant(
        "others-may-read-the-witness",
        "security:another-account-in-file-system",
        WITNESS,
        "_write",
        "os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)",
        "os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)",
        (PRIVATE_MARKS,),
    ),
    Mutant(
        "others-may-enter-the-witness",
        "security:another-account-in-file-system",
        WITNESS,
        "_make_private",
        "folder.mkdir(mode=0o700, exist_ok=True)",
        "folder.mkdir(mode=0o755, exist_ok=True)",
        (PRIVATE_MARKS,),
    ),
    Mutant(
        "a-terminal-obeys-what-data-say",
        "security:author-of-data",
        "tidegate/output.py",
        "visible",
        "return UNSEEN.sub(escaped, text)",
        "return text",
        ("tests/unit/test_output.py",),
    ),
    Mutant(
        "log-lines-are-obeyed-by-a-terminal",
        "security:author-of-data",
        "tidegate/output.py",
        "VisibleFormatter.format",
        'return visible(super().format(record), keep="\\n")',
        "return super().format(record)",
        ("tests/unit/test_output.py::test_a_log_and_a_crash_show_every_character",),
    ),
    Mutant(
        "spark-s-plan-shows-the-password-of-kafka",
        "security:another-account-of-same-machine-at-ports",
        "jobs/sources/kafka/read.py",
        "KafkaReader._log_in",
        "properties |= {name: _reference_to(file, name) for name in secret}",
        "properties |= secret",
        ("tests/sources/test_kafka.py::test_the_password_is_in_no_plan_metadata_or_identity",),
    ),
    Mutant(
        "the-stack-s-folders-are-open",
        "security:another-account-in-file-system",
        "tidegate/stack/machine/private_files.py",
        "private_folder",
        "mode = 0o711 if passable else 0o700",
        "mode = 0o755",
        ("tests/end_to_end/test_one_airflow.py::test_secrets_are_in_private_files_and_nowhere_else",),
    ),
    Mutant(
        "the-stack-s-files-are-open",
        "security:another-account-in-file-system",
        "tidegate/stack/machine/private_files.py",
        "private",
        "os.O_NOFOLLOW, 0o600)",
        "os.O_NOFOLLOW, 0o644)",
        ("tests/end_to_end/test_one_airflow.py::test_secrets_are_in_private_files_and_nowhere_else",),
    ),
)
