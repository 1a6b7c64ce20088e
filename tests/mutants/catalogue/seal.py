"""Faults of the seal: the fence, the recount of staging, its digest, and what is compared with earlier attempts."""

from tests.mutants.planted_fault import in_file

ATTEMPTS_PY = in_file("state_store/attempt/attempts.py")
STAGING = in_file("state_store/attempt/staging_tables.py")
SETTINGS = in_file("state_store/base/settings.py")


MUTANTS = (
    STAGING("an-event-trigger-changes-what-is-staged", "I15", "create")(
        'connection.execute(_GIVEN, {"tables": [[-table.name for table in made-]]})',
        "test_what_an_event_trigger_gives_to_new_staging_tables_is_refused",
    ),
    ATTEMPTS_PY("a-fence-that-is-not-compared", "I4", "_lock_owned")(
        "if batch.attempt [-!=-]{+<+} attempt.number:", "test_a_newer_attempt_fences_the_older_whenever_that_goes_on"
    ),
    ATTEMPTS_PY("an-attempt-of-another-history-counts", "I4", "_lock_owned")(
        "if [-batch.history != attempt.history-]{+attempt.history is None+}:",
        "test_an_attempt_from_before_an_accepted_loss_is_fenced",
    ),
    ATTEMPTS_PY("an-attempt-that-failed-is-sealed", "I5", "seal")(
        "if own.failed_at is not None{+ and own.is_poison+}:",
        "test_a_retry_keeps_what_was_sealed_and_begins_again_after_all_else",
    ),
    ATTEMPTS_PY("a-second-seal-is-written", "I8", "seal")(
        "if own.sealed_at is {+None and own.failed_at is +}not None:",
        "test_a_retry_keeps_what_was_sealed_and_begins_again_after_all_else",
    ),
    ATTEMPTS_PY("a-replay-is-not-compared", "I11", "seal")(
        "[-_check_replay(connection, attempt, tracked)-]{+pass+}", "test_a_transactional_replay_with_other_sums_is_refused"
    ),
    ATTEMPTS_PY("only-the-number-of-replayed-rows-is-compared", "I11", "_check_replay")(
        "if other and "
        "[-(other.source_rows, other.source_hash_sum) != (tracked.source_rows, tracked.source_hash_sum)-]"
        "{+other.source_rows != tracked.source_rows+}:",
        "test_a_transactional_replay_with_other_sums_is_refused",
    ),
    ATTEMPTS_PY("an-opaque-source-must-replay-too", "I12", "_check_replay")(
        '.where(p.pipeline == a.pipeline[-, p.source_kind == "transactional"-])', "test_sums_are_not_compared_without_a_promise"
    ),
    ATTEMPTS_PY("a-sealed-attempt-is-recorded-as-failed", "I5", "is_open")(
        "attempt.c.[-sealed_at.is_(None), attempt.c.-]failed_at.is_(None)",
        "test_a_newer_attempt_fences_the_older_whenever_that_goes_on",
    ),
    ATTEMPTS_PY("a-fenced-attempt-says-that-it-failed", "I5", "fail")(
        "[-_lock_owned(connection, attempt-]{+lock_batch(connection, attempt.pipeline, attempt.txid+})",
        "test_a_newer_attempt_fences_the_older_whenever_that_goes_on",
    ),
    ATTEMPTS_PY("tries-from-before-a-retry-count", "limit:Pipeline.tries", "count_poison_tries")(
        "a.attempt >{+=+} b.tries_after", "test_a_retry_revokes_a_decision_to_skip"
    ),
    ATTEMPTS_PY("failures-of-servers-count-as-tries", "limit:Pipeline.tries", "count_poison_tries")(
        "tables.batch), a.[-is_poison, a.-]attempt", "test_a_retry_revokes_a_decision_to_skip"
    ),
    STAGING("a-seal-that-is-not-recounted", "I7", "recount")(
        "if [-(rows_found, digest_found) != (rows_sealed, digest)-]{+rows_found is None+}:",
        "test_staging_that_differs_from_its_seal_never_counts",
    ),
    STAGING("a-seal-whose-rows-alone-are-counted", "I7", "recount")(
        "if (rows_found[-, digest_found) != (rows_sealed, digest)-]{+ or 0) != rows_sealed+}:",
        "test_staging_that_differs_from_its_seal_never_counts",
    ),
    STAGING("a-digest-over-too-few-columns", "I7", "digest_of")(
        'if column.name != "task_attempt"{+ and column.nullable+}', "test_staging_that_differs_from_its_seal_never_counts"
    ),
    STAGING("a-digest-that-does-not-know-the-order-of-values", "I7", "_hash")(
        'return f"'
        "[-hashint8extended(coalesce({function}({value}, {_ZERO}), -1::bigint), {before}-]"
        '{+({before} # coalesce({function}({value}, {_ZERO}), -1::bigint)+})"',
        "test_staging_that_differs_from_its_seal_never_counts",
    ),
    STAGING("a-digest-that-takes-null-for-nothing", "I7", "_hash")(
        'return f"'
        "[-hashint8extended(coalesce({function}({value}, {_ZERO}), -1::bigint-]"
        '{+coalesce({function}({value}, {before}+}), {before})"',
        "test_staging_that_differs_from_its_seal_never_counts",
    ),
    STAGING("staging-is-dropped-while-its-batch-is-young", "I18", "drop_old")(
        "[-c.committed_at < oldest, -]a.started_at < oldest",
        "test_staging_is_kept_until_its_batch_committed_and_the_retention_is_over",
    ),
    STAGING("staging-of-a-young-attempt-is-dropped", "I18", "drop_old")(
        "c.committed_at < oldest[-, a.started_at < oldest-]",
        "test_staging_is_kept_until_its_batch_committed_and_the_retention_is_over",
    ),
    STAGING("staging-is-dropped-before-its-batch-has-committed", "I18", "drop_old")(
        ".[-join(tables.commit, tables.same_batch(tables.attempt, tables.commit))\n        .where(c.committed_at < "
        "oldest, -]{+where(+}",
        "test_staging_is_kept_until_its_batch_committed_and_the_retention_is_over",
    ),
    SETTINGS("texts-are-staged-in-the-encoding-of-the-session", "I7", "Settings.conninfo")(
        '[-"client_encoding": CLIENT_ENCODING,\n-]', "test_texts_are_staged_as_utf8_whatever_the_session_has"
    ),
)
