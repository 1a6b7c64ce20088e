"""What states record is divided by ranges of txids, and a partition has no privileges of its own."""

from pathlib import Path

from alembic import op

revision = "0033"
down_revision = "0032"

SCHEMA = Path(__file__).resolve().parents[2] / "state_store/schema.sql"
ADD_RANGE = "CREATE FUNCTION tidegate.add_range"
ADD_PARTITION = "tidegate.add_partition(text, bigint)"
COMMENTS = {
    "upper": "the least value above it; NULL: there is none",
    "every": "its length, as it was declared; of changes: how many txids",
}


def upgrade() -> None:
    op.execute(f"DROP FUNCTION {ADD_PARTITION}")
    body, end, _ = SCHEMA.read_text().partition(ADD_RANGE)[2].partition("END $$;")
    op.execute(f"CREATE OR REPLACE {ADD_RANGE.removeprefix('CREATE ')}{body}{end}")
    for column, comment in COMMENTS.items():
        op.alter_column("state_range", column, comment=comment, schema="tidegate")


def downgrade() -> None:
    older = {number: op.get_context().script.get_revision(number).module for number in ("0028", "0031")}
    for column, (comment, _) in older["0031"].COMMENTS.items():
        op.alter_column("state_range", column, comment=comment, schema="tidegate")
    op.execute(older["0028"].ADD_RANGE.replace(ADD_RANGE, "CREATE OR REPLACE FUNCTION tidegate.add_range"))
    op.execute(older["0031"].ADD_PARTITION)
    op.execute(f"REVOKE EXECUTE ON FUNCTION {ADD_PARTITION} FROM PUBLIC")
    op.execute(f"GRANT EXECUTE ON FUNCTION {ADD_PARTITION} TO tidegate")
