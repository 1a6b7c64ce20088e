"""How far event time has come in states with windows, and what came too late for a window that is final."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"

LATE = "the state whose final window it came too late for, as a partial; NULL: a bad record"


def upgrade() -> None:
    op.create_table(
        "watermark",
        sa.Column("state", sa.Text(), nullable=False, comment="a state with windows"),
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), nullable=False, comment="the last batch that counted in it"),
        sa.Column(
            "watermark",
            sa.TIMESTAMP(timezone=True),
            nullable=True,
            comment="the greatest event time that has counted, in UTC; NULL: there was none",
        ),
        sa.Column(
            "previous_watermark",
            sa.TIMESTAMP(timezone=True),
            nullable=True,
            comment="the same before that batch, for a redo",
        ),
        sa.ForeignKeyConstraint(["pipeline"], ["tidegate.pipeline.pipeline"], name=op.f("fk_watermark_pipeline")),
        sa.PrimaryKeyConstraint("state", name=op.f("pk_watermark")),
        schema="tidegate",
        comment="How far event time has come in each state with windows.",
    )
    op.execute("GRANT SELECT, INSERT ON tidegate.watermark TO tidegate")
    op.execute("GRANT UPDATE (txid, watermark, previous_watermark) ON tidegate.watermark TO tidegate")
    op.execute("GRANT SELECT ON tidegate.watermark TO tidegate_reader")
    op.add_column("quarantine", sa.Column("state", sa.Text(), nullable=True, comment=LATE), schema="tidegate")


def downgrade() -> None:
    """Go back; refused while a state has windows, whose watermark older code would neither read nor move."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM tidegate.watermark) THEN RAISE 'states with windows have counted'; END IF; END $$"
    )
    op.drop_column("quarantine", "state", schema="tidegate")
    op.drop_table("watermark", schema="tidegate")
