"""The ledger knows each file that has counted, by name and content: nothing that happens to a file makes it count twice."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

# What has committed so far, as its metadata tells. Metadata that is damaged is left out: its pipeline halts at it anyway. A file
# that older code has counted twice has one row.
COUNTED = """
INSERT INTO tidegate.source_file (pipeline, name, sha256, size, mtime_ns, txid)
SELECT pipeline, file.name, decode(file.sha256, 'hex'), file.size,
       greatest(least(file.mtime_ns, 9223372036854775807), -9223372036854775807)::bigint, txid
FROM (
    SELECT c.pipeline, c.txid, convert_from(coalesce(a.source_metadata, b.source_metadata), 'UTF8')::jsonb AS envelope
    FROM tidegate.commit c
    JOIN tidegate.pipeline p ON p.pipeline = c.pipeline AND p.declaration ->> 'source_identity' LIKE 'files %'
    JOIN tidegate.batch b ON b.pipeline = c.pipeline AND b.txid = c.txid
    JOIN tidegate.attempt a ON a.pipeline = c.pipeline AND a.txid = c.txid AND a.attempt = c.attempt
    WHERE sha256(coalesce(a.source_metadata, b.source_metadata)) = c.source_digest
) AS committed
CROSS JOIN LATERAL jsonb_to_recordset(envelope -> 'metadata' -> 'files')
    AS file (name text, sha256 text, size bigint, mtime_ns numeric)
WHERE jsonb_typeof(envelope -> 'metadata' -> 'files') = 'array'
ORDER BY txid
ON CONFLICT DO NOTHING
"""


def upgrade() -> None:
    op.create_table(
        "source_file",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False, comment="below the source's folder"),
        sa.Column("sha256", sa.LargeBinary(), nullable=False, comment="of its content: name and content are the file"),
        sa.Column("size", sa.BigInteger(), nullable=False, comment="bytes"),
        sa.Column("mtime_ns", sa.BigInteger(), nullable=False, comment="when it was last seen to be modified"),
        sa.Column("txid", sa.BigInteger(), nullable=False, comment="the batch in which it counts, or was skipped"),
        sa.ForeignKeyConstraint(
            ["pipeline", "txid"], ["tidegate.batch.pipeline", "tidegate.batch.txid"], name=op.f("fk_source_file_batch")
        ),
        sa.PrimaryKeyConstraint("pipeline", "name", "sha256", name=op.f("pk_source_file")),
        schema="tidegate",
        comment="One row per file that has counted, written in the commit of its batch.",
    )
    # A redo takes back the files of its batch.
    op.create_index(op.f("ix_source_file_pipeline_txid"), "source_file", ["pipeline", "txid"], schema="tidegate")
    op.add_column(
        "batch",
        sa.Column("acked_at", sa.TIMESTAMP(timezone=True), comment="when its source was told; NULL: not yet, or not wanted"),
        schema="tidegate",
    )
    op.execute("GRANT SELECT, INSERT, UPDATE (mtime_ns) ON tidegate.source_file TO tidegate")
    op.execute("GRANT SELECT ON tidegate.source_file TO tidegate_reader")
    op.execute("GRANT UPDATE (acked_at) ON tidegate.batch TO tidegate")
    op.execute(COUNTED)


def downgrade() -> None:
    op.drop_column("batch", "acked_at", schema="tidegate")
    op.drop_table("source_file", schema="tidegate")
