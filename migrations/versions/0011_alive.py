"""An attempt says that it is alive, so that its successor need not wait an hour; and only failures by content count as tries."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

CONTENT = ("MALFORMED_RECORD", "BAD_KEY", "OVERFLOW")


def upgrade() -> None:
    # NULL for the attempts of older code: those are dead when they are overdue, as before.
    seen_at = sa.Column(
        "seen_at", sa.DateTime(timezone=True), comment="when the process that runs it last said that it is alive"
    )
    op.add_column("attempt", seen_at, schema="tidegate")
    op.execute("GRANT UPDATE (seen_at) ON tidegate.attempt TO tidegate")
    # What older code took for the fault of a batch, though a server or its source was away, is no try of the batch.
    attempt = sa.table("attempt", sa.column("error"), sa.column("is_poison"), schema="tidegate")
    code = sa.func.split_part(attempt.c.error, ":", 1)
    op.execute(sa.update(attempt).where(attempt.c.is_poison, code.not_in(CONTENT)).values(is_poison=False))
    op.alter_column(
        "attempt",
        "is_poison",
        comment="whether the content of the batch is at fault: only such failures count as tries",
        existing_comment="whether the failure is the batch's own, not that of a server that was away",
        schema="tidegate",
    )


def downgrade() -> None:
    op.alter_column(
        "attempt",
        "is_poison",
        comment="whether the failure is the batch's own, not that of a server that was away",
        existing_comment="whether the content of the batch is at fault: only such failures count as tries",
        schema="tidegate",
    )
    op.drop_column("attempt", "seen_at", schema="tidegate")
