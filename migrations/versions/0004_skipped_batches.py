"""A batch that can never be processed may be skipped: a commit without rows, with the reason, in its place."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

BATCHES = """
CREATE OR REPLACE VIEW tidegate.batches AS
SELECT b.pipeline, b.txid,
       CASE {skipped}
            WHEN c.txid IS NOT NULL THEN 'committed'
            WHEN b.halted_at IS NOT NULL THEN 'halted'
            WHEN a.attempt IS NULL THEN 'planned'
            WHEN a.sealed_at IS NOT NULL THEN 'processed'
            WHEN a.failed_at IS NOT NULL THEN 'failed'
            ELSE 'processing' END AS phase,
       coalesce(c.attempt, b.attempt) AS attempt,
       a.source_rows, c.key_count, b.opened_at, a.started_at, a.sealed_at, c.committed_at, a.owner,
       CASE WHEN c.txid IS NOT NULL THEN NULL
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


def upgrade() -> None:
    reason = sa.Column("skipped_reason", sa.Text(), nullable=True, comment="why the batch was skipped; NULL if it was not")
    op.add_column("commit", reason, schema="tidegate")
    op.execute(BATCHES.format(skipped="WHEN c.skipped_reason IS NOT NULL THEN 'skipped'"))


def downgrade() -> None:
    op.execute(BATCHES.format(skipped=""))
    op.drop_column("commit", "skipped_reason", schema="tidegate")
