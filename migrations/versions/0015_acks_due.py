"""Every plan looks for acks that are due: without an index it reads every batch that there ever was."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

INDEX = "ix_batch_pipeline_txid"


def upgrade() -> None:
    op.create_index(INDEX, "batch", ["pipeline", "txid"], schema="tidegate", postgresql_where=sa.text("awaits_ack"))


def downgrade() -> None:
    op.drop_index(INDEX, table_name="batch", schema="tidegate")
