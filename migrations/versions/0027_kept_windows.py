"""Windows that are no longer kept: up to which end they are removed. Some comments are written in plainer words."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"

# Of each column: its comment since this revision, and the one before.
COMMENTS = {
    ("batch", "halted_at"): ("since when no task retries it", "since when nobody retries it by itself"),
    ("batch", "tries_after"): ("failures up to this attempt no longer count", "failures up to this attempt are forgiven"),
    ("batch", "awaits_ack"): ("its source has yet to learn that it counts", "its source was not told yet that it counts"),
    ("batch", "acked_at"): (
        "when its source learned it; NULL: not yet, or not wanted",
        "when its source was told; NULL: not yet, or not wanted",
    ),
    ("attempt", "source_metadata"): (
        "what it reads, if it planned an opaque batch again; NULL: the first plan",
        "what it reads, if it cut an opaque batch anew; NULL: what was planned",
    ),
}


def upgrade() -> None:
    removed = sa.Column(
        "removed_until",
        sa.TIMESTAMP(timezone=True),
        nullable=True,
        comment="windows that ended by then are no longer kept; NULL: all are",
    )
    op.add_column("watermark", removed, schema="tidegate")
    op.execute("GRANT UPDATE (removed_until) ON tidegate.watermark TO tidegate")
    for (table, column), (comment, _) in COMMENTS.items():
        op.alter_column(table, column, comment=comment, schema="tidegate")


def downgrade() -> None:
    """Go back; refused once a window was removed, which older code would begin from zero if a late session joined it."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM tidegate.watermark WHERE removed_until IS NOT NULL) THEN "
        "RAISE 'windows were removed'; END IF; END $$"
    )
    for (table, column), (_, comment) in COMMENTS.items():
        op.alter_column(table, column, comment=comment, schema="tidegate")
    op.drop_column("watermark", "removed_until", schema="tidegate")
