"""The window bounds what is in flight, from a batch's beginning to its commit: the ledger tells it to everybody who waits."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

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
            WHEN b.skip_reason IS NOT NULL THEN 'its turn to be skipped: ' || b.skip_reason
            WHEN b.halted_at IS NOT NULL THEN b.halted_reason
            WHEN a.failed_at IS NOT NULL THEN a.error
            {window}
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
WINDOW = """
            WHEN a.attempt IS NULL AND b.txid - k.txid > (
                SELECT p.in_flight FROM tidegate.pipeline p WHERE p.pipeline = b.pipeline
            ) THEN 'txid ' || k.txid + 1 || ' to commit: the window is full'
"""


def upgrade() -> None:
    in_flight = sa.Column(
        "in_flight", sa.Integer(), nullable=False, server_default="16", comment="most batches begun and not committed"
    )
    op.add_column("pipeline", in_flight, schema="tidegate")
    op.execute("GRANT UPDATE (in_flight) ON tidegate.pipeline TO tidegate")
    op.execute(BATCHES.format(window=WINDOW))


def downgrade() -> None:
    op.execute(BATCHES.format(window=""))
    op.drop_column("pipeline", "in_flight", schema="tidegate")
