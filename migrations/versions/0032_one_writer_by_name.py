"""The writer of a partition is found by its name: a table of a state may also inherit from a table of the team's."""

from alembic import op

revision = "0032"
down_revision = "0031"

BY_PARENT = """
    -- of a partition: the table that it is part of
    declared oid := coalesce(pg_partition_root(TG_RELID), (SELECT inhparent FROM pg_inherits WHERE inhrelid = TG_RELID), TG_RELID);
    owner text := (SELECT pipeline FROM tidegate.state_table WHERE state = (SELECT relname FROM pg_class WHERE oid = declared));
"""
BY_NAME = """
    -- The name of a partition begins with that of its table, and a $.
    whole text := (SELECT relname FROM pg_class WHERE oid = coalesce(pg_partition_root(TG_RELID), TG_RELID));
    owner text := (SELECT pipeline FROM tidegate.state_table WHERE state = split_part(whole, '$', 1));
"""
SINGLE_WRITER = """
CREATE OR REPLACE FUNCTION tidegate.single_writer() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
DECLARE
@DECLARED@
BEGIN
    IF owner IS NULL THEN
        RAISE EXCEPTION 'state.% belongs to no registered pipeline', TG_TABLE_NAME
            USING ERRCODE = 'insufficient_privilege', HINT = 'Run: tidegate migrate';
    END IF;
    IF owner IS DISTINCT FROM nullif(current_setting('tidegate.writer', true), '') THEN
        RAISE EXCEPTION 'state.% is written by the commits of pipeline % only', TG_TABLE_NAME, owner
            USING ERRCODE = 'insufficient_privilege',
                  HINT = 'To change it by hand all the same: SET tidegate.writer = ' || quote_literal(owner);
    END IF;
    RETURN NULL;
END $$
"""


def upgrade() -> None:
    op.execute(SINGLE_WRITER.replace("@DECLARED@", BY_NAME.strip("\n")))


def downgrade() -> None:
    op.execute(SINGLE_WRITER.replace("@DECLARED@", BY_PARENT.strip("\n")))
