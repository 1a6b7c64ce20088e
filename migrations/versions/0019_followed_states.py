"""States that other pipelines follow, whose tables Spark's tasks may read; and commits that an update cannot end."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

UNFINISHED = """
CREATE FUNCTION tidegate.unfinished() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    IF EXISTS (SELECT FROM tidegate.open_commit WHERE pipeline = NEW.pipeline) THEN
        RAISE EXCEPTION 'the commit of a batch of pipeline % has not ended', NEW.pipeline USING ERRCODE = 'invalid_transaction_termination',
            HINT = 'An update may not end the transaction.';
    END IF;
    RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER unfinished AFTER INSERT ON tidegate.open_commit DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION tidegate.unfinished();
"""


def upgrade() -> None:
    op.execute("GRANT USAGE ON SCHEMA state TO tidegate_stager")
    op.create_table(
        "open_commit",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["pipeline"], ["tidegate.pipeline.pipeline"], name=op.f("fk_open_commit_pipeline")),
        sa.PrimaryKeyConstraint("pipeline", name=op.f("pk_open_commit")),
        schema="tidegate",
        comment="Empty, but for the commits that run an author's update: a transaction that leaves a row here is refused.",
    )
    op.execute(UNFINISHED)
    op.execute("GRANT SELECT, INSERT, DELETE ON tidegate.open_commit TO tidegate")
    op.execute("GRANT SELECT ON tidegate.open_commit TO tidegate_reader")


def downgrade() -> None:
    op.drop_table("open_commit", schema="tidegate")
    op.execute("DROP FUNCTION tidegate.unfinished()")
    op.execute("REVOKE USAGE ON SCHEMA state FROM tidegate_stager")
