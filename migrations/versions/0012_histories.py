"""Older copies and copies within a server are noticed: a history of commits per pipeline, the database in the epoch."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"

EPOCH = "which database incarnation: system identifier and timeline"
ACTIONS = "action IN ('pause', 'resume', 'retry', 'skip', 'redo', 'replay'{more})"


def _restrict_actions(more: str) -> None:
    op.drop_constraint(op.f("ck_operator_action_action"), "operator_action", schema="tidegate")
    op.create_check_constraint(
        op.f("ck_operator_action_action"), "operator_action", ACTIONS.format(more=more), schema="tidegate"
    )


def upgrade() -> None:
    history = sa.Column(
        "history",
        postgresql.UUID(),
        nullable=False,
        server_default=sa.func.gen_random_uuid(),
        comment="which history of commits; a new one begins when a loss is accepted",
    )
    op.add_column("cursor", history, schema="tidegate")
    # Whatever incarnation a cursor was made in, it was not a copy within this server as far as anybody knows.
    op.execute(
        "UPDATE tidegate.cursor SET epoch = epoch || '/' || (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    op.alter_column("cursor", "epoch", comment=f"{EPOCH}, number of the database", existing_comment=EPOCH, schema="tidegate")
    _restrict_actions(more=", 'accept'")


def downgrade() -> None:
    op.execute("DELETE FROM tidegate.operator_action WHERE action = 'accept'")
    _restrict_actions(more="")
    op.alter_column("cursor", "epoch", comment=EPOCH, existing_comment=f"{EPOCH}, number of the database", schema="tidegate")
    op.execute("UPDATE tidegate.cursor SET epoch = regexp_replace(epoch, '/[^/]*$', '')")
    op.drop_column("cursor", "history", schema="tidegate")
