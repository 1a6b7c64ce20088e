"""The ledger says how the plans of each pipeline end: operators see those that fail."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"


def upgrade() -> None:
    """Assume that no plan fails; the next ones say so."""
    op.create_table(
        "plan",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column(
            "succeeded",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="plans that have found out what is new",
        ),
        sa.Column("succeeded_at", sa.TIMESTAMP(timezone=True), nullable=True, comment="when the last of them ended"),
        sa.Column("failed", sa.Integer(), server_default="0", nullable=False, comment="plans that have failed since"),
        sa.Column("failing_since", sa.TIMESTAMP(timezone=True), nullable=True, comment="when the first of these failed"),
        sa.Column("failed_at", sa.TIMESTAMP(timezone=True), nullable=True, comment="when the last of these failed"),
        sa.Column("failed_run", sa.Text(), nullable=True, comment="its run"),
        sa.Column("error", sa.Text(), nullable=True, comment="why it failed: code and message"),
        sa.CheckConstraint(
            "failed >= 0 AND num_nulls(failing_since, failed_at, failed_run, error) = CASE failed WHEN 0 THEN 4 ELSE 0 END",
            name=op.f("ck_plan_failed"),
        ),
        sa.ForeignKeyConstraint(["pipeline"], ["tidegate.pipeline.pipeline"], name=op.f("fk_plan_pipeline")),
        sa.PrimaryKeyConstraint("pipeline", name=op.f("pk_plan")),
        schema="tidegate",
        comment="How the plans of each pipeline end: one row per pipeline.",
    )
    op.execute("INSERT INTO tidegate.plan (pipeline) SELECT pipeline FROM tidegate.pipeline")
    op.execute("GRANT SELECT ON tidegate.plan TO tidegate, tidegate_reader")
    op.execute(
        "GRANT UPDATE (succeeded, succeeded_at, failed, failing_since, failed_at, failed_run, error) ON tidegate.plan TO tidegate"
    )


def downgrade() -> None:
    op.drop_table("plan", schema="tidegate")
