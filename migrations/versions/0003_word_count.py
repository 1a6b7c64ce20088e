"""The state of pipeline word_count: word_count."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "word_count",
        sa.Column("word", sa.Text(collation="C"), nullable=False),
        sa.Column("occurrences", sa.BigInteger(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.CheckConstraint("txid >= 1", name=op.f("ck_word_count_txid")),
        sa.PrimaryKeyConstraint("word", name="pk_word_count"),
        schema="state",
        postgresql_with={
            "fillfactor": 75,
            "autovacuum_vacuum_scale_factor": 0.02,
            "autovacuum_vacuum_cost_limit": 2000,
        },
    )
    op.execute(
        "CREATE TRIGGER single_writer BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON state.word_count "
        "FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer()"
    )


def downgrade() -> None:
    op.drop_table("word_count", schema="state")
