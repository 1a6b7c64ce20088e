"""flights and word_count."""

import sqlalchemy as sa
from alembic import op

# Of states only: code that was started before this migration keeps working after it.
revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "daily",
        sa.Column("carrier", sa.Text(collation="C"), nullable=False),
        sa.Column("date", sa.Date(), nullable=False),
        sa.Column("flights", sa.BigInteger(), nullable=False),
        sa.Column("cancelled", sa.BigInteger(), nullable=False),
        sa.Column("delay_sum", sa.BigInteger(), nullable=False),
        sa.Column("delay_min", sa.Integer(), nullable=True),
        sa.Column("delay_max", sa.Integer(), nullable=True),
        sa.Column("distance", sa.BigInteger(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("carrier", "date", name="pk_daily"),
        schema="state",
        postgresql_with={"fillfactor": 75, "autovacuum_vacuum_scale_factor": 0.02, "autovacuum_vacuum_cost_limit": 2000},
    )
    op.create_table(
        "word_count",
        sa.Column("word", sa.Text(collation="C"), nullable=False),
        sa.Column("occurrences", sa.BigInteger(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("word", name="pk_word_count"),
        schema="state",
        postgresql_with={"fillfactor": 75, "autovacuum_vacuum_scale_factor": 0.02, "autovacuum_vacuum_cost_limit": 2000},
    )
    op.execute(
        "CREATE TRIGGER single_writer BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON state.daily FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer()"
    )
    op.execute(
        "CREATE TRIGGER single_writer BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON state.word_count FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer()"
    )
