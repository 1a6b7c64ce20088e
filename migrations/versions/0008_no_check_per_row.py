"""State tables lose CHECK (txid >= 1), evaluated twice per written row: their one writer's txids are checked in the ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

FOUND = """
SELECT format('ALTER TABLE %s DROP CONSTRAINT %I', conrelid::regclass, conname)
FROM pg_constraint
WHERE connamespace = 'state'::regnamespace AND contype = 'c' AND pg_get_constraintdef(oid) = 'CHECK ((txid >= 1))'
ORDER BY conrelid::regclass::text
"""
MISSING = """
SELECT format('ALTER TABLE %s ADD CONSTRAINT %I CHECK (txid >= 1)', attrelid::regclass, 'ck_' || relname || '_txid')
FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = 'state'::regnamespace AND relkind = 'r' AND attname = 'txid'
ORDER BY attrelid::regclass::text
"""


def upgrade() -> None:
    _execute_each(FOUND)


def downgrade() -> None:
    _execute_each(MISSING)


def _execute_each(query: str) -> None:
    """Run the statements that a query returns."""
    for statement in list(op.get_bind().scalars(sa.text(query))):
        op.execute(statement)
