"""Pipelines are retired: no batch of theirs counts any more, and no reader of the ledger lists them."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"

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
            {retired}
            WHEN b.skip_reason IS NOT NULL THEN 'its turn to be skipped: ' || b.skip_reason
            WHEN b.halted_at IS NOT NULL THEN b.halted_reason
            WHEN a.failed_at IS NOT NULL THEN a.error
            WHEN a.attempt IS NULL AND b.txid - k.txid > (
                SELECT p.in_flight FROM tidegate.pipeline p WHERE p.pipeline = b.pipeline
            ) THEN 'txid ' || k.txid + 1 || ' to commit: the window is full'
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
RETIRED = """
            WHEN EXISTS (SELECT FROM tidegate.pipeline p WHERE p.pipeline = b.pipeline AND p.retired_at IS NOT NULL)
            THEN 'nothing: its pipeline was retired'
"""
LAG = """
CREATE OR REPLACE VIEW tidegate.lag AS
SELECT k.pipeline, k.txid AS committed, coalesce(o.txid, 0) AS opened, coalesce(o.txid, 0) - k.txid AS pending,
       c.committed_at,
       (SELECT 'txid ' || n.txid || ': ' || n.waits_for FROM tidegate.batches n
         WHERE n.pipeline = k.pipeline AND n.txid = k.txid + 1) AS waits_for
FROM tidegate.cursor k
{listed}LEFT JOIN tidegate.commit c ON c.pipeline = k.pipeline AND c.txid = k.txid
LEFT JOIN LATERAL (SELECT max(txid) AS txid FROM tidegate.batch b WHERE b.pipeline = k.pipeline) o ON true
"""
LISTED = "JOIN tidegate.pipeline p ON p.pipeline = k.pipeline AND p.retired_at IS NULL\n"
ACTIONS = "'pause', 'resume', 'retry', 'skip', 'redo', 'replay', 'accept', 'mend', 'prune'"


def upgrade() -> None:
    for column in (
        sa.Column("retired_at", sa.TIMESTAMP(timezone=True), comment="since when no batch of it counts any more"),
        sa.Column("retired_by", sa.Text()),
        sa.Column("retired_reason", sa.Text()),
    ):
        op.add_column("pipeline", column, schema="tidegate")
    together = "num_nulls(retired_at, retired_by, retired_reason) IN (0, 3)"
    op.create_check_constraint(op.f("ck_pipeline_retired"), "pipeline", together, schema="tidegate")
    dropped = "since when it is dropped, as its pipeline is retired"
    op.add_column("state_table", sa.Column("dropped_at", sa.TIMESTAMP(timezone=True), comment=dropped), schema="tidegate")
    _allow(f"{ACTIONS}, 'retire', 'reinstate'")
    op.execute(BATCHES.format(retired=RETIRED))
    op.execute(LAG.format(listed=LISTED))


def downgrade() -> None:
    """Go back; refused once a pipeline was retired: older code would let its batches count, or the ledger lacks the action."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM tidegate.operator_action WHERE action IN ('retire', 'reinstate')) "
        "THEN RAISE 'pipelines were retired'; END IF; END $$"
    )
    op.execute(LAG.format(listed=""))
    op.execute(BATCHES.format(retired=""))
    _allow(ACTIONS)
    op.drop_column("state_table", "dropped_at", schema="tidegate")
    op.drop_constraint(op.f("ck_pipeline_retired"), "pipeline", schema="tidegate")
    for column in ("retired_reason", "retired_by", "retired_at"):
        op.drop_column("pipeline", column, schema="tidegate")


def _allow(actions: str) -> None:
    op.drop_constraint(op.f("ck_operator_action_action"), "operator_action", schema="tidegate")
    condition = f"action IN ({actions})"
    op.create_check_constraint(op.f("ck_operator_action_action"), "operator_action", condition, schema="tidegate")
