"""Old changes of a state can be removed; the ledger knows up to which txid."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"

ACTIONS = "action IN ('pause', 'resume', 'retry', 'skip', 'redo', 'replay', 'accept', 'mend'{more})"


def upgrade() -> None:
    pruned = sa.Column(
        "pruned_txid", sa.BigInteger(), server_default="0", nullable=False, comment="of changes: those up to here were removed"
    )
    op.add_column("state_table", pruned, schema="tidegate")
    _allow(", 'prune'")


def downgrade() -> None:
    """Go back; refused once changes were removed, because older code would follow the rest as if it were all."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM tidegate.state_table WHERE pruned_txid > 0) "
        "THEN RAISE 'changes of a state were removed'; END IF; END $$"
    )
    op.execute("DELETE FROM tidegate.operator_action WHERE action = 'prune'")
    _allow("")
    op.drop_column("state_table", "pruned_txid", schema="tidegate")


def _allow(more: str) -> None:
    op.drop_constraint(op.f("ck_operator_action_action"), "operator_action", schema="tidegate")
    op.create_check_constraint(
        op.f("ck_operator_action_action"), "operator_action", ACTIONS.format(more=more), schema="tidegate"
    )
