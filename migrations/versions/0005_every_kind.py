"""Every kind of source and state: batches that are cut anew, the acker's sums, quarantine, and what operators did."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"

WHEN = sa.TIMESTAMP(timezone=True)


def new_columns() -> dict[str, tuple[sa.Column, ...]]:
    return {
        "pipeline": (
            sa.Column("paused_at", WHEN, comment="since when no new run starts"),
            sa.Column("paused_by", sa.Text()),
            sa.Column("paused_reason", sa.Text()),
        ),
        "batch": (
            sa.Column(
                "previous_digest",
                postgresql.BYTEA(),
                comment="SHA-256 of the metadata that it continues; NULL for the first batch",
            ),
            sa.Column("skip_owner", sa.Text(), comment="who gave it up: its commit will be without rows"),
            sa.Column("skip_reason", sa.Text()),
            sa.Column(
                "tries_after",
                sa.Integer(),
                server_default="0",
                nullable=False,
                comment="failures up to this attempt are forgiven",
            ),
        ),
        "attempt": (
            sa.Column("airflow_run_id", sa.Text(), comment="NULL outside Airflow"),
            sa.Column("airflow_task_id", sa.Text()),
            sa.Column("airflow_try", sa.Integer(), comment="for people: it numbers nothing here"),
            sa.Column("spark_application", sa.Text()),
            sa.Column("spark_tag", sa.Text(), comment="tag of its operations, by which they are interrupted"),
            sa.Column(
                "source_metadata",
                postgresql.BYTEA(),
                comment="what it reads, if it cut an opaque batch anew; NULL: what was planned",
            ),
            sa.Column("source_digest", postgresql.BYTEA(), comment="SHA-256 of the metadata that it reads"),
            sa.Column(
                "previous_digest",
                postgresql.BYTEA(),
                comment="SHA-256 of the metadata that this continues; NULL for the first batch",
            ),
            sa.Column("staged_at", WHEN, comment="when Spark had staged the last row"),
            sa.Column(
                "is_poison", sa.Boolean(), comment="whether the failure is the batch's own, not that of a server that was away"
            ),
            sa.Column("source_hash", sa.BigInteger(), comment="XOR of their 64-bit hashes; NULL if they are not tracked"),
            sa.Column("quarantined_rows", sa.BigInteger(), comment="of these, set aside as bad"),
            sa.Column("transformed_rows", sa.BigInteger(), comment="rows that the transform returned"),
            sa.Column("transformed_hash", sa.BigInteger(), comment="XOR of their 64-bit hashes; NULL if they are not tracked"),
            sa.Column("staged_bytes", sa.BigInteger(), comment="bytes that were copied into staging"),
        ),
        "commit": (
            sa.Column(
                "merged_at",
                WHEN,
                server_default=sa.text("clock_timestamp()"),
                nullable=False,
                comment="when everything was merged, just before COMMIT",
            ),
            sa.Column(
                "quarantined_rows", sa.BigInteger(), server_default="0", nullable=False, comment="bad records set aside with it"
            ),
        ),
    }


CHECKS = {
    "pipeline": {"paused": "num_nulls(paused_at, paused_by, paused_reason) IN (0, 3)"},
    "batch": {"skip": "(skip_owner IS NULL) = (skip_reason IS NULL)"},
    "attempt": {"is_poison": "(failed_at IS NULL) = (is_poison IS NULL)"},
}
# Every batch that is there continues the one before it.
CHAIN = (
    "UPDATE tidegate.batch b SET previous_digest = p.source_digest FROM tidegate.batch p "
    "WHERE p.pipeline = b.pipeline AND p.txid = b.txid - 1",
    "UPDATE tidegate.attempt a SET source_digest = b.source_digest, previous_digest = b.previous_digest, "
    "is_poison = CASE WHEN a.failed_at IS NOT NULL THEN false END "
    "FROM tidegate.batch b WHERE b.pipeline = a.pipeline AND b.txid = a.txid",
)
KINDS = "source_kind IN ({})"
# A batch that was given up waits for its turn to be skipped.
BATCHES = """
CREATE OR REPLACE VIEW tidegate.batches AS
SELECT b.pipeline, b.txid,
       CASE WHEN c.skipped_reason IS NOT NULL THEN 'skipped'
            WHEN c.txid IS NOT NULL THEN 'committed'
            WHEN b.halted_at IS NOT NULL THEN 'halted'
            WHEN a.attempt IS NULL THEN 'planned'
            WHEN a.sealed_at IS NOT NULL THEN 'processed'
            WHEN a.failed_at IS NOT NULL THEN 'failed'
            ELSE 'processing' END AS phase,
       coalesce(c.attempt, b.attempt) AS attempt,
       a.source_rows, c.key_count, b.opened_at, a.started_at, a.sealed_at, c.committed_at, a.owner,
       CASE WHEN c.txid IS NOT NULL THEN NULL
            {skip}
            WHEN b.halted_at IS NOT NULL THEN b.halted_reason
            WHEN a.failed_at IS NOT NULL THEN a.error
            WHEN a.attempt IS NULL THEN 'a run that processes it'
            WHEN a.sealed_at IS NULL THEN 'attempt ' || a.attempt || ' by ' || a.owner
            WHEN b.txid > k.txid + 1 THEN 'txid ' || k.txid + 1 || ' to commit'
            ELSE 'its commit' END AS waits_for
FROM tidegate.batch b
JOIN tidegate.cursor k ON k.pipeline = b.pipeline
LEFT JOIN tidegate.commit c ON c.pipeline = b.pipeline AND c.txid = b.txid
LEFT JOIN tidegate.attempt a
       ON a.pipeline = b.pipeline AND a.txid = b.txid AND a.attempt = coalesce(c.attempt, b.attempt)
"""
SKIP = "WHEN b.skip_reason IS NOT NULL THEN 'its turn to be skipped: ' || b.skip_reason"
# Frozen metadata stays out of the worker's reach: a new cut is a new attempt's, beside the planned one.
GRANTS = (
    "GRANT UPDATE (skip_owner, skip_reason, tries_after) ON tidegate.batch TO tidegate",
    "GRANT UPDATE (staged_at, is_poison, source_hash, quarantined_rows, transformed_rows, transformed_hash, staged_bytes, "
    "spark_application, spark_tag) ON tidegate.attempt TO tidegate",
    "GRANT UPDATE (paused_at, paused_by, paused_reason) ON tidegate.pipeline TO tidegate",
    "GRANT SELECT, INSERT, UPDATE (replayed_txid) ON tidegate.quarantine TO tidegate",
    "GRANT SELECT, INSERT ON tidegate.operator_action TO tidegate",
    "GRANT SELECT ON tidegate.quarantine, tidegate.operator_action TO tidegate_reader",
    "GRANT USAGE ON SCHEMA tidegate TO tidegate_stager",
    "GRANT SELECT ON tidegate.quarantine TO tidegate_stager",
)


def upgrade() -> None:
    for table, columns in new_columns().items():
        for column in columns:
            op.add_column(table, column, schema="tidegate")
    op.execute("UPDATE tidegate.commit SET merged_at = committed_at")
    for statement in CHAIN:
        op.execute(statement)
    op.alter_column("attempt", "source_digest", nullable=False, schema="tidegate")
    for table, checks in CHECKS.items():
        for name, condition in checks.items():
            op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, condition, schema="tidegate")
    op.drop_constraint(op.f("ck_pipeline_source_kind"), "pipeline", schema="tidegate")
    kinds = KINDS.format("'transactional', 'opaque', 'non-transactional'")
    op.create_check_constraint(op.f("ck_pipeline_source_kind"), "pipeline", kinds, schema="tidegate")
    op.create_table(
        "quarantine",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False, comment="the batch that set it aside"),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False, comment="from 1 within the batch"),
        sa.Column("reason", sa.Text(), nullable=False, comment="why it is bad"),
        sa.Column("origin", sa.Text(), comment="where it stood: file, or topic, partition and offset"),
        sa.Column("payload", sa.Text(), nullable=False, comment="the record: as it stood, or its columns as JSON"),
        sa.Column("is_raw", sa.Boolean(), nullable=False, comment="whether payload is the record as it stood"),
        sa.Column("quarantined_at", WHEN, server_default=sa.text("now()"), nullable=False, comment="when its batch committed"),
        sa.Column("replayed_txid", sa.BigInteger(), comment="the later batch that takes it up again; NULL while it waits here"),
        sa.ForeignKeyConstraint(
            ["pipeline", "txid"], ["tidegate.batch.pipeline", "tidegate.batch.txid"], name=op.f("fk_quarantine_batch")
        ),
        sa.PrimaryKeyConstraint("pipeline", "txid", "number", name=op.f("pk_quarantine")),
        schema="tidegate",
        comment="Bad records: set aside in the commit of their batch, so that none is lost.",
    )
    op.create_index(
        op.f("ix_quarantine_pipeline_replayed_txid_txid_number"),
        "quarantine",
        ["pipeline", "replayed_txid", "txid", "number"],
        schema="tidegate",
    )
    op.create_table(
        "operator_action",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), comment="NULL: the whole pipeline"),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("acted_at", WHEN, server_default=sa.text("now()"), nullable=False, comment="when"),
        sa.CheckConstraint(
            "action IN ('pause', 'resume', 'retry', 'skip', 'redo', 'replay')", name=op.f("ck_operator_action_action")
        ),
        sa.ForeignKeyConstraint(["pipeline"], ["tidegate.pipeline.pipeline"], name=op.f("fk_operator_action_pipeline")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_operator_action")),
        schema="tidegate",
        comment="What people did by hand, and why.",
    )
    for statement in (BATCHES.format(skip=SKIP), *GRANTS):
        op.execute(statement)


def downgrade() -> None:
    """Go back; refused while a pipeline is of a kind that the older code does not know, or records are in quarantine."""
    kinds = KINDS.format("'transactional'")
    op.drop_constraint(op.f("ck_pipeline_source_kind"), "pipeline", schema="tidegate")
    op.create_check_constraint(op.f("ck_pipeline_source_kind"), "pipeline", kinds, schema="tidegate")
    op.execute("DO $$ BEGIN IF EXISTS (SELECT FROM tidegate.quarantine) THEN RAISE 'records are in quarantine'; END IF; END $$")
    op.execute(BATCHES.format(skip=""))
    op.drop_table("operator_action", schema="tidegate")
    op.drop_table("quarantine", schema="tidegate")
    op.execute("REVOKE USAGE ON SCHEMA tidegate FROM tidegate_stager")
    for table, checks in CHECKS.items():
        for name in checks:
            op.drop_constraint(op.f(f"ck_{table}_{name}"), table, schema="tidegate")
    for table, columns in new_columns().items():
        for column in columns:
            op.drop_column(table, column.name, schema="tidegate")
