"""The ledger notes which tables the states are: one that is put back by itself, or made again, lacks rows that have counted."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import OID

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    """Take the tables that are there for the right ones."""
    op.add_column(
        "state_table",
        sa.Column("table_oid", OID(), nullable=True, comment="its number in Postgres; NULL: not noted, or it is a view"),
        schema="tidegate",
    )
    op.execute(
        "UPDATE tidegate.state_table SET table_oid = pg_class.oid FROM pg_class"
        " WHERE relname = state AND relnamespace = 'state'::regnamespace AND relkind IN ('r', 'p')"
    )


def downgrade() -> None:
    op.drop_column("state_table", "table_oid", schema="tidegate")
