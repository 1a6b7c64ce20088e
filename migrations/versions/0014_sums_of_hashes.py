"""The acker adds hashes up, because an XOR misses rows that are lost and doubled in twos; the XORs of before stay as they are."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

NAMES = ("source_hash", "transformed_hash")
BEFORE = "XOR of their 64-bit hashes; NULL if they are not tracked"


def upgrade() -> None:
    for name in NAMES:
        # NULL for the attempts of older code, so that no replay is compared with an XOR; older code goes on with its own.
        op.add_column(
            "attempt",
            sa.Column(
                f"{name}_sum", sa.BigInteger(), comment="sum of their 64-bit hashes modulo 2^64; NULL if they are not tracked"
            ),
            schema="tidegate",
        )
        _comment(name, "XOR of their 64-bit hashes, of attempts by code from before revision 0014", BEFORE)
    op.execute("GRANT UPDATE (source_hash_sum, transformed_hash_sum) ON tidegate.attempt TO tidegate")


def downgrade() -> None:
    for name in NAMES:
        _comment(name, BEFORE, "XOR of their 64-bit hashes, of attempts by code from before revision 0014")
        op.drop_column("attempt", f"{name}_sum", schema="tidegate")


def _comment(name: str, wanted: str, found: str) -> None:
    op.alter_column("attempt", name, comment=wanted, existing_comment=found, schema="tidegate")
