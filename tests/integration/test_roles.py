"""The database itself limits each role to its work, by grants and by the single-writer trigger."""

import io
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product

import psycopg2
import pytest
from psycopg2 import errors

from tests.integration.conftest import ROW, Tally
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
        name: reads | APPENDS.get(name, set()) | ({"INSERT", "UPDATE"} if name.startswith("state.") else set())
        for name, reads in READS.items()
    },
    "tidegate_reader": READS,
    "tidegate_stager": {
        **{f"staging.{state}_1_1": {"SELECT", "INSERT"} for state in STATES},
        "tidegate.quarantine": {"SELECT"},  # executors read the records that a batch takes up again
    },
    "airflow": {},
}
COLUMN_UPDATES = {
    "tidegate.pipeline": {"paused_at", "paused_by", "paused_reason", "in_flight", "commits_alone"},
    "tidegate.batch": {
        *("attempt", "halted_at", "halted_reason", "skip_owner", "skip_reason", "tries_after", "awaits_ack", "acked_at")
    },
    "tidegate.attempt": {
        *("seen_at", "sealed_at", "failed_at", "error", "is_poison", "dropped_at", "staged_at"),
        *("spark_application", "spark_tag", "source_hash_sum", "transformed_hash_sum"),
        *("source_rows", "quarantined_rows", "transformed_rows", "staged_bytes"),
    },
    "tidegate.plan": {"succeeded", "succeeded_at", "failed", "failing_since", "failed_at", "failed_run", "error"},
    "tidegate.source_file": {"mtime_ns", "inode"},  # of a file that was touched
    "tidegate.cursor": {"txid", "attempt", "source_digest"},
    "tidegate.watermark": {"txid", "watermark", "previous_watermark", "removed_until"},
    "tidegate.undeclared_column": {"txid"},  # an earlier batch, processed later, may have the column too
    # The original, `payload`, is never changed.
    "tidegate.quarantine": {"replayed_txid", "mended_payload", "mended_at", "mended_by", "mended_reason"},
}
USED_SCHEMAS = {
    "tidegate": {"tidegate", "state", "staging", "public"},
    "tidegate_stager": {"tidegate", "state", "staging", "public"},
    "tidegate_reader": {"tidegate", "state", "public"},
    "airflow": {"public"},
}
# What grants do not say.
FORBIDDEN = [
    ("tidegate", "ALTER TABLE state.per_shop DISABLE TRIGGER single_writer"),
    ("tidegate", "DROP FUNCTION tidegate.single_writer CASCADE"),
    ("tidegate", "CREATE SCHEMA mine"),
    ("tidegate", "SET session_replication_role = replica"),
    ("tidegate", "SET ROLE tidegate_owner"),
    ("tidegate_stager", "INSERT INTO state.per_shop VALUES ('z', 1, 1, 1, 1, 1)"),
    ("tidegate_stager", "ALTER TABLE staging.per_shop_1_1 ADD COLUMN more int"),
    ("tidegate_reader", "UPDATE state.per_shop SET sold = 9"),
    ("tidegate_reader", "SELECT FROM tidegate.cursor FOR UPDATE"),
]
# What is granted to a role, or to all, on what the role does not own.
GRANTED = """
SELECT name, array_agg(privilege_type) FROM (
    SELECT 'schema ' || nspname AS name, nspname::text AS place, nspowner AS owner, nspacl AS acl FROM pg_namespace
    UNION ALL SELECT oid::regclass::text, relnamespace::regnamespace::text, relowner, relacl FROM pg_class
    UNION ALL SELECT c.oid::regclass || ' ' || attname, relnamespace::regnamespace::text, relowner, attacl
    FROM pg_attribute JOIN pg_class c ON c.oid = attrelid
) AS ours, aclexplode(acl) AS granted
WHERE place IN ('tidegate', 'state', 'staging', 'public') AND grantee IN (0, %(role)s::regrole) AND grantee <> owner
GROUP BY name
"""


def test_a_role_has_the_privileges_of_its_work_and_no_other(tally: Tally, settings: Settings) -> None:
    """A grant that is added anywhere has to be added here too, with a reason."""
    busy = tally.having(1, 1, 1)
    for role, used in USED_SCHEMAS.items():
        expected = TABLE_PRIVILEGES[role] | {f"schema {schema}": {"USAGE"} for schema in used}
        if role == "tidegate":
            expected["schema staging"] = {"USAGE", "CREATE"}
            expected |= {f"{table} {column}": {"UPDATE"} for table, columns in COLUMN_UPDATES.items() for column in columns}
        assert {name: set(granted) for name, granted in busy.sql(GRANTED, {"role": role})} == expected

    powers = "rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls"
    assert busy.sql(f"SELECT rolname FROM pg_roles WHERE {powers}") == [("postgres",)]
    memberships = "SELECT roleid::regrole FROM pg_auth_members WHERE member::regrole::text ~ '^(tidegate|airflow)'"
    assert busy.sql(memberships) == [("pg_read_all_stats",)] * 2  # tests.servers.show_transactions

    for role, statement in FORBIDDEN:
        for tried in (statement, f"SET tidegate.writer = tally; {statement}"):
            with pytest.raises(errors.InsufficientPrivilege):
                busy.sql(tried, role=role)

    reading = replace(settings, pg_user="tidegate_reader")
    with StateStore.connect(reading) as reader:
        assert Tally(reader).state() == [("a", 1, 1, 1, 1, 1)]
        assert reader.batch_history("tally", 1).status.phase == "committed"
        assert [lag.pending for lag in reader.lag()] == [0]
        assert reader.turn("tally", 1).opens
    found = {"shop": "a", "sold": 1, "cents": 1, "least": 1, "most": 1, "txid": 1}
    assert key_lookup.get(reading, busy.spec.states[0], [("a",)]) == [found]


WRITES = [
    "INSERT INTO state.per_shop VALUES ('z', 1, 1, 1, 1, 1)",
    "INSERT INTO state.per_shop VALUES ('a', 1, 1, 1, 1, 1) ON CONFLICT (shop) DO UPDATE SET sold = 9",
    "UPDATE state.per_shop SET sold = 9",
    "UPDATE state.per_shop SET sold = 9 WHERE false",
    "MERGE INTO state.per_shop s USING (VALUES ('a')) v (k) ON s.shop = v.k WHEN MATCHED THEN UPDATE SET sold = 9",
]
DELETES = ["DELETE FROM state.per_shop", "TRUNCATE state.per_shop"]


@pytest.mark.promise("I15", "fault:another-program-writes-state-table:processing")
def test_only_the_commit_writes_a_state_table(tally: Tally, settings: Settings) -> None:
    busy = tally.having(1, 1, 1)
    says = r"state\.per_shop is written by the commits of pipeline tally only\nHINT: .*: SET tidegate\.writer = 'tally'"
    prefixes = ("", "SET tidegate.writer = ''; ", "SET tidegate.writer = another_pipeline; ")
    for role, statements in {"tidegate": WRITES, "tidegate_owner": [*WRITES, *DELETES], "postgres": DELETES}.items():
        tried = map("".join, product(prefixes, statements))
        busy.refuses(errors.InsufficientPrivilege, says, *(partial(busy.sql, statement, role=role) for statement in tried))
    refused = pytest.raises(errors.InsufficientPrivilege, match=says)
    with closing(psycopg2.connect(**settings.conninfo())) as connection, connection.cursor() as cursor, refused:
        cursor.copy_expert("COPY state.per_shop FROM STDIN", io.StringIO("z\t1\t1\t1\t1\t1\n"))

    busy.plan(run_id="next")
    busy.complete(2, ROW)
    with busy.store.engine.begin() as connection, pytest.raises(Exception, match="is written by the commits of pipeline tally"):
        connection.exec_driver_sql("UPDATE state.per_shop SET sold = 9")

    busy.sql("SET tidegate.writer = 'tally'; UPDATE state.per_shop SET sold = 7")
    assert busy.state() == [("a", 7, 2, 1, 1, 2)]
    with pytest.raises(errors.InsufficientPrivilege):
        busy.sql("UPDATE state.per_shop SET sold = 8")
    busy.sql("DELETE FROM tidegate.state_table WHERE state = 'per_shop'")
    for prefix in ("", "SET tidegate.writer = tally; "):
        with pytest.raises(errors.InsufficientPrivilege):
            busy.sql(f"{prefix}UPDATE state.per_shop SET sold = 9", role="tidegate")
