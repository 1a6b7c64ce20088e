"""The ledger knows whose source has still to be told of a commit: for all others, a commit needs no task of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    # Without planning them anew nobody knows whether the sources of older batches want to be told: so they are told.
    op.add_column(
        "batch",
        sa.Column(
            "awaits_ack",
            sa.Boolean(),
            server_default="true",
            nullable=False,
            comment="its source was not told yet that it counts",
        ),
        schema="tidegate",
    )
    op.execute("GRANT UPDATE (awaits_ack) ON tidegate.batch TO tidegate")


def downgrade() -> None:
    op.drop_column("batch", "awaits_ack", schema="tidegate")
