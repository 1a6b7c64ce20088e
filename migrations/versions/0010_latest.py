"""The last txid of a key, which no two processes of Postgres find together: so each of them has keys of its own."""

from alembic import op

revision = "0010"
down_revision = "0009"

# Without a COMBINEFUNC. With one, Postgres may cut a group in two, and then does not give whole groups to each process.
LATEST = """
CREATE AGGREGATE tidegate.latest(bigint) (SFUNC = pg_catalog.int8larger, STYPE = bigint, PARALLEL = SAFE)
"""
GRANTS = (
    "REVOKE EXECUTE ON FUNCTION tidegate.latest(bigint) FROM PUBLIC",
    "GRANT EXECUTE ON FUNCTION tidegate.latest(bigint) TO tidegate",
)


def upgrade() -> None:
    for statement in (LATEST, *GRANTS):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP AGGREGATE tidegate.latest(bigint)")
