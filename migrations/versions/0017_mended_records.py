"""A quarantined record can be mended: the ledger keeps the original, and beside it what a replay reads in its place."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

COLUMNS = ("mended_payload", "mended_at", "mended_by", "mended_reason")
ACTIONS = "action IN ('pause', 'resume', 'retry', 'skip', 'redo', 'replay', 'accept'{more})"


def upgrade() -> None:
    mended = sa.Column(
        "mended_payload", sa.Text(), comment="what replays read in the place of payload; NULL: it was not mended"
    )
    op.add_column("quarantine", mended, schema="tidegate")
    when = sa.Column("mended_at", sa.TIMESTAMP(timezone=True), comment="when")
    op.add_column("quarantine", when, schema="tidegate")
    op.add_column("quarantine", sa.Column("mended_by", sa.Text(), comment="the operator"), schema="tidegate")
    op.add_column("quarantine", sa.Column("mended_reason", sa.Text(), comment="why it was mended so"), schema="tidegate")
    op.create_check_constraint(
        op.f("ck_quarantine_mended"), "quarantine", f"num_nulls({', '.join(COLUMNS)}) IN (0, 4)", schema="tidegate"
    )
    op.execute(f"GRANT UPDATE ({', '.join(COLUMNS)}) ON tidegate.quarantine TO tidegate")
    _allow(", 'mend'")


def downgrade() -> None:
    """Go back; refused while a record is mended, because older code would replay the original."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM tidegate.quarantine WHERE mended_at IS NOT NULL) "
        "THEN RAISE 'records in quarantine are mended'; END IF; END $$"
    )
    op.execute("DELETE FROM tidegate.operator_action WHERE action = 'mend'")
    _allow("")
    for column in COLUMNS:
        op.drop_column("quarantine", column, schema="tidegate")


def _allow(more: str) -> None:
    op.drop_constraint(op.f("ck_operator_action_action"), "operator_action", schema="tidegate")
    op.create_check_constraint(
        op.f("ck_operator_action_action"), "operator_action", ACTIONS.format(more=more), schema="tidegate"
    )
