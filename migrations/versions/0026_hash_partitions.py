"""The trigger of state tables knows that a hash partition belongs to the owner of the table that it is part of."""

from alembic import op

revision = "0026"
down_revision = "0025"

OF_TABLE = """
    owner text := (SELECT pipeline FROM tidegate.state_table WHERE state = TG_TABLE_NAME);
"""
OF_PARTITIONS = """
    declared oid := coalesce(pg_partition_root(TG_RELID), TG_RELID);  -- of a hash partition: the table that it is part of
    owner text := (SELECT pipeline FROM tidegate.state_table WHERE state = (SELECT relname FROM pg_class WHERE oid = declared));
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
    op.execute(SINGLE_WRITER.replace("@DECLARED@", OF_PARTITIONS.strip("\n")))


def downgrade() -> None:
    """Go back; refused while a state has hash partitions, whose writers older code would all refuse."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM pg_class WHERE relkind = 'p' AND relnamespace = 'state'::regnamespace) THEN "
        "RAISE 'states have hash partitions'; END IF; END $$"
    )
    op.execute(SINGLE_WRITER.replace("@DECLARED@", OF_TABLE.strip("\n")))
