"""The database itself limits each role to its work, by grants and by the single-writer trigger."""

import io
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest
from psycopg2 import errors

from tests.integration.conftest import Execute, Tally, contents
from tests.store import key_lookup
from tidegate.state_store import Settings, StateStore

LEDGER = {
    *("pipeline", "state_table", "cursor", "batch", "attempt", "seal", "commit", "run_batch", "alembic_version"),
    *("source_file", "quarantine", "operator_action", "open_commit", "check_result", "watermark", "state_range", "plan"),
    "undeclared_column",
}
VIEWS = {"batches"}
STATES = {"per_shop", "per_day"}
READS = {f"tidegate.{name}": {"SELECT"} for name in LEDGER | VIEWS} | {f"state.{name}": {"SELECT"} for name in STATES}
NOT_ITS_OWN = {"pipeline", "state_table", "state_range", "cursor", "plan", "alembic_version"}
APPENDS = {f"tidegate.{name}": {"INSERT"} for name in (LEDGER - NOT_ITS_OWN)}
APPENDS["tidegate.open_commit"] = {"INSERT", "DELETE"}  # its row lives as long as the commit
# The privileges of each role on whole tables, besides the owner's on its own.
TABLE_PRIVILEGES = {
    "tidegate": {
        name: READS.get(name, set()) | APPENDS.get(name, set()) | ({"INSERT", "UPDATE"} if name.startswith("state.") else set())
        for name in READS
    },
    "tidegate_reader": READS,
    "tidegate_stager": {
        "staging.per_shop_1_1": {"SELECT", "INSERT"},
        "staging.per_day_1_1": {"SELECT", "INSERT"},
        "tidegate.quarantine": {"SELECT"},  # executors read the records that a batch takes up again
    },
    "airflow": {},
}
COLUMN_UPDATES = {
    "tidegate.pipeline": {"paused_at", "paused_by", "paused_reason", "in_flight", "commits_alone"},
    "tidegate.batch": {
        "attempt",
        "halted_at",
        "halted_reason",
        "skip_owner",
        "skip_reason",
        "tries_after",
        "awaits_ack",
        "acked_at",
    },
    "tidegate.attempt": {
        *("seen_at", "sealed_at", "failed_at", "error", "is_poison", "dropped_at", "staged_at"),
        *("spark_application", "spark_tag"),
        *("source_rows", "quarantined_rows", "transformed_rows", "staged_bytes"),
        *("source_hash_sum", "transformed_hash_sum"),
    },
    "tidegate.plan": {"succeeded", "succeeded_at", "failed", "failing_since", "failed_at", "failed_run", "error"},
    "tidegate.source_file": {"mtime_ns", "inode"},  # of a file that was touched
    "tidegate.cursor": {"txid", "attempt", "source_digest"},
    "tidegate.watermark": {"txid", "watermark", "previous_watermark", "removed_until"},
    "tidegate.undeclared_column": {"txid"},  # an earlier batch, processed later, may have the column too
    # The original, `payload`, is never changed.
    "tidegate.quarantine": {"replayed_txid", "mended_payload", "mended_at", "mended_by", "mended_reason"},
}
SCHEMA_PRIVILEGES = {
    "tidegate": {"tidegate": {"USAGE"}, "state": {"USAGE"}, "staging": {"USAGE", "CREATE"}, "public": {"USAGE"}},
    "tidegate_reader": {"tidegate": {"USAGE"}, "state": {"USAGE"}, "public": {"USAGE"}},
    "tidegate_stager": {"tidegate": {"USAGE"}, "state": {"USAGE"}, "staging": {"USAGE"}, "public": {"USAGE"}},
    "airflow": {"public": {"USAGE"}},
}
ROLES = ["tidegate", "tidegate_stager", "tidegate_reader", "airflow"]


@pytest.fixture
def busy(tally: Tally) -> Tally:
    tally.plan()
    tally.process(1, [("a", 1, 1, 1, 1)], [("2013-01-01", 1)])
    tally.commit(1)
    return tally


def by_name(rows: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return what rows have beside each name."""
    found: dict[str, set[str]] = {}
    for name, granted in rows:
        found.setdefault(name, set()).add(granted)
    return found


def test_a_role_has_the_privileges_of_its_work_and_no_other(busy: Tally, as_role: Execute, settings: Settings) -> None:
    """A grant that is added anywhere has to be added here too, with a reason."""
    for role in ROLES:
        tables = as_role(
            "postgres",
            """
            SELECT n.nspname || '.' || c.relname, p.privilege
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER'] ||
                CASE WHEN current_setting('server_version_num')::int >= 170000 THEN ARRAY['MAINTAIN'] ELSE '{}' END
            ) AS p (privilege)
            WHERE n.nspname IN ('tidegate', 'state', 'staging', 'public') AND c.relkind IN ('r', 'v', 'm', 'p', 'S', 'f')
              AND pg_get_userbyid(c.relowner) <> %(role)s AND has_table_privilege(%(role)s, c.oid, p.privilege)
            """,
            {"role": role},
        )
        assert by_name(tables) == TABLE_PRIVILEGES[role]

        schemas = as_role(
            "postgres",
            """
            SELECT n.nspname, p.privilege FROM pg_namespace n CROSS JOIN unnest(ARRAY['USAGE', 'CREATE']) AS p (privilege)
            WHERE n.nspname IN ('tidegate', 'state', 'staging', 'public') AND has_schema_privilege(%s, n.oid, p.privilege)
            """,
            [role],
        )
        assert by_name(schemas) == SCHEMA_PRIVILEGES[role]

        columns = as_role(
            "postgres",
            """
            SELECT n.nspname || '.' || c.relname, a.attname
            FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname IN ('tidegate', 'state', 'staging') AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
              AND pg_get_userbyid(c.relowner) <> %(role)s AND has_column_privilege(%(role)s, c.oid, a.attnum, 'UPDATE')
              AND NOT has_table_privilege(%(role)s, c.oid, 'UPDATE')
            """,
            {"role": role},
        )
        assert by_name(columns) == (COLUMN_UPDATES if role == "tidegate" else {})

    powers = as_role(
        "postgres",
        "SELECT rolname FROM pg_roles WHERE (rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls) "
        "AND rolname !~ '^pg_'",
    )
    assert powers == [("postgres",)]
    memberships = "SELECT roleid::regrole FROM pg_auth_members WHERE member::regrole::text ~ '^(tidegate|airflow)'"
    assert as_role("postgres", memberships) == [("pg_read_all_stats",)] * 2  # tests.servers.show_transactions

    before = contents(settings)
    for role, statement in ((r, s) for r in ROLES for s in FORBIDDEN[r]):
        for attempt in (statement, f"SET tidegate.writer = tally; {statement}"):
            try:
                as_role(role, attempt)
            except errors.InsufficientPrivilege:
                continue
            pytest.fail(f"{role} may: {attempt}")
    assert contents(settings) == before

    reading = replace(settings, pg_user="tidegate_reader")
    per_shop = busy.spec.states[0]
    with StateStore.connect(reading) as reader:
        assert Tally(reader).state() == [("a", 1, 1, 1, 1, 1)]
        assert reader.batch_history("tally", 1).status.phase == "committed"
        assert [lag.pending for lag in reader.lag()] == [0]
        assert reader.turn("tally", 1).opens
    assert key_lookup.get(reading, per_shop, [("a",)]) == [
        {"shop": "a", "sold": 1, "cents": 1, "least": 1, "most": 1, "txid": 1}
    ]


# What the catalog's privileges on tables, columns and schemas do not say.
FORBIDDEN = {
    "tidegate": [
        "ALTER TABLE state.per_shop DISABLE TRIGGER single_writer",
        "DROP TRIGGER single_writer ON state.per_shop",
        "DROP FUNCTION tidegate.single_writer CASCADE",
        "CREATE OR REPLACE FUNCTION tidegate.single_writer() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE INDEX ON state.per_shop (txid)",
        "CREATE SCHEMA mine",
        "CREATE ROLE mine",
        "SET session_replication_role = replica",
        "SET ROLE tidegate_owner",
    ],
    "tidegate_stager": [
        "INSERT INTO state.per_shop VALUES ('z', 1, 1, 1, 1, 1)",
        "DROP TABLE staging.per_shop_1_1",
        "ALTER TABLE staging.per_shop_1_1 ADD COLUMN more int",
    ],
    "tidegate_reader": ["UPDATE state.per_shop SET sold = 9", "SELECT FROM tidegate.cursor FOR UPDATE"],
    "airflow": ["SELECT FROM state.per_shop"],
}


WRITES = [
    "INSERT INTO state.per_shop VALUES ('z', 1, 1, 1, 1, 1)",
    "INSERT INTO state.per_shop VALUES ('a', 1, 1, 1, 1, 1) ON CONFLICT (shop) DO UPDATE SET sold = 9",
    "UPDATE state.per_shop SET sold = 9",
    "UPDATE state.per_shop SET sold = 9 WHERE false",
    "MERGE INTO state.per_shop s USING (VALUES ('a')) v (k) ON s.shop = v.k WHEN MATCHED THEN UPDATE SET sold = 9",
]
DELETES = ["DELETE FROM state.per_shop", "TRUNCATE state.per_shop"]


@pytest.mark.promise("I15", "fault:another-program-writes-state-table:processing")
def test_only_the_commit_writes_a_state_table(busy: Tally, settings: Settings, as_role: Execute) -> None:
    """A role with grants still gets an error that names the owning pipeline and the way to insist."""
    before = contents(settings)
    by_role = {"tidegate": WRITES, "tidegate_owner": [*WRITES, *DELETES], "postgres": DELETES}
    prefixes = ("", "SET tidegate.writer = ''; ", "SET tidegate.writer = another_pipeline; ")
    for role, prefix, statement in ((r, p, s) for r, statements in by_role.items() for s in statements for p in prefixes):
        with pytest.raises(errors.InsufficientPrivilege) as refused:
            as_role(role, prefix + statement)
        assert refused.value.diag.message_primary == "state.per_shop is written by the commits of pipeline tally only"
        assert refused.value.diag.message_hint == "To change it by hand all the same: SET tidegate.writer = 'tally'"
    assert contents(settings) == before
    with (
        closing(psycopg2.connect(**settings.conninfo())) as connection,
        connection.cursor() as cursor,
        pytest.raises(errors.InsufficientPrivilege, match="by the commits of pipeline tally"),
    ):
        cursor.copy_expert("COPY state.per_shop FROM STDIN", io.StringIO("z\t1\t1\t1\t1\t1\n"))

    busy.plan(run_id="next")
    busy.process(2, [("a", 1, 1, 1, 1)])
    busy.commit(2)
    with (
        busy.store.engine.begin() as connection,
        pytest.raises(Exception, match="is written by the commits of pipeline tally only"),
    ):
        connection.exec_driver_sql("UPDATE state.per_shop SET sold = 9")

    as_role("tidegate_owner", "SET tidegate.writer = 'tally'; UPDATE state.per_shop SET sold = 7")
    assert busy.state() == [("a", 7, 2, 1, 1, 2)]
    with pytest.raises(errors.InsufficientPrivilege):
        as_role("tidegate_owner", "UPDATE state.per_shop SET sold = 8")

    as_role("tidegate_owner", "DELETE FROM tidegate.state_table WHERE state = 'per_shop'")
    for prefix in ("", "SET tidegate.writer = tally; "):
        with pytest.raises(errors.InsufficientPrivilege):
            as_role("tidegate", prefix + "UPDATE state.per_shop SET sold = 9")
