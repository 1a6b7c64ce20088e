"""The ledger, as schema.sql makes it. No other migration changes it, and nothing takes it back but dropping the database."""

from alembic import op

from tidegate.state_store.ledger import schema_revision, tables

revision = schema_revision.DIGEST
down_revision = None


def upgrade() -> None:
    # As the file is: in a text of SQLAlchemy, colons and percent signs would have a meaning.
    op.get_bind().exec_driver_sql(tables.SCHEMA, execution_options={"no_parameters": True})
