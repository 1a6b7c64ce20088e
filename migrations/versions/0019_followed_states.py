"""States that other pipelines follow: Spark's tasks, as the role tidegate_stager, reach the tables that they are given."""

from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.execute("GRANT USAGE ON SCHEMA state TO tidegate_stager")


def downgrade() -> None:
    op.execute("REVOKE USAGE ON SCHEMA state FROM tidegate_stager")
