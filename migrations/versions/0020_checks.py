"""What the checks of a committed batch have found."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.create_table(
        "check_result",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False, comment="of the check"),
        sa.Column("found", sa.Text(), nullable=True, comment="what it warned of; NULL: nothing"),
        sa.ForeignKeyConstraint(
            ["pipeline", "txid"], ["tidegate.batch.pipeline", "tidegate.batch.txid"], name=op.f("fk_check_result_batch")
        ),
        sa.PrimaryKeyConstraint("pipeline", "txid", "name", name=op.f("pk_check_result")),
        schema="tidegate",
        comment="One row per check of a committed batch.",
    )
    op.execute("GRANT SELECT, INSERT ON tidegate.check_result TO tidegate")
    op.execute("GRANT SELECT ON tidegate.check_result TO tidegate_reader")


def downgrade() -> None:
    op.drop_table("check_result", schema="tidegate")
