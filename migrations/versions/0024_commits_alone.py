"""The ledger says which pipelines commit one batch at a time: their batches wait for no others to be merged with."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    """Assume what older code did; each pipeline's next plan records it."""
    alone = sa.Column(
        "commits_alone",
        sa.Boolean(),
        nullable=False,
        server_default=sa.false(),
        comment="whether each batch is merged by itself",
    )
    op.add_column("pipeline", alone, schema="tidegate")
    op.execute(
        "UPDATE tidegate.pipeline SET commits_alone = true "
        """WHERE declaration @> '{"states": [{"kind": "opaque"}]}'"""
    )
    op.execute("GRANT UPDATE (commits_alone) ON tidegate.pipeline TO tidegate")
    _describe("the declaration itself")  # which readers of the ledger decode


def downgrade() -> None:
    _describe("the declaration itself, for people")
    op.drop_column("pipeline", "commits_alone", schema="tidegate")


def _describe(comment: str) -> None:
    op.alter_column("pipeline", "declaration", comment=comment, schema="tidegate")
