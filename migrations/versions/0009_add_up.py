"""Adding up the bigints of several batches without going through numeric, as Postgres' own sum does: in half of the memory."""

from alembic import op

revision = "0009"
down_revision = "0008"

# Out of range it fails, as the sum of a state does. It may do so on the way to a result that is within: merged one by one,
# such batches go through.
ADD_UP = """
CREATE AGGREGATE tidegate.add_up(bigint) (
    SFUNC = pg_catalog.int8pl, STYPE = bigint, COMBINEFUNC = pg_catalog.int8pl, PARALLEL = SAFE
)
"""
GRANTS = (
    "REVOKE EXECUTE ON FUNCTION tidegate.add_up(bigint) FROM PUBLIC",
    "GRANT EXECUTE ON FUNCTION tidegate.add_up(bigint) TO tidegate",
)


def upgrade() -> None:
    for statement in (ADD_UP, *GRANTS):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP AGGREGATE tidegate.add_up(bigint)")
