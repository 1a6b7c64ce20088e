"""Every plan looks for staging that may be dropped: without an index it reads every attempt that there ever was."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

INDEX = "ix_attempt_pipeline_txid_attempt"


def upgrade() -> None:
    op.create_index(
        INDEX, "attempt", ["pipeline", "txid", "attempt"], schema="tidegate", postgresql_where=sa.text("dropped_at IS NULL")
    )


def downgrade() -> None:
    op.drop_index(INDEX, table_name="attempt", schema="tidegate")
