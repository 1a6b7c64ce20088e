"""Range partitions of appended rows: the commit that brings the first row of a range has its partition made, and noted."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"

ADD_RANGE = """
CREATE FUNCTION tidegate.add_range(state text, partition text, lower text, upper text, every text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    parent regclass := to_regclass(format('state.%I', state));
    owner text := (SELECT t.pipeline FROM tidegate.state_table t WHERE t.state = add_range.state);
BEGIN
    IF NOT EXISTS (SELECT FROM pg_partitioned_table WHERE partrelid = parent AND partstrat = 'r') THEN
        RAISE EXCEPTION 'state.% is not divided by ranges', state USING ERRCODE = 'undefined_table';
    END IF;
    IF owner IS NULL OR owner IS DISTINCT FROM nullif(current_setting('tidegate.writer', true), '')
        OR NOT starts_with(partition, state || '$') THEN
        RAISE EXCEPTION 'state.% gets its partitions by the commits of its pipeline only', state
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    EXECUTE format('CREATE TABLE state.%I (LIKE %s INCLUDING ALL EXCLUDING INDEXES)', partition, parent);
    EXECUTE format('CREATE TRIGGER single_writer BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON state.%I '
                   'FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer()', partition);
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION state.%I FOR VALUES FROM (%s) TO (%s)', parent, partition,
                   coalesce(quote_literal(lower), 'MINVALUE'), coalesce(quote_literal(upper), 'MAXVALUE'));
    INSERT INTO tidegate.state_range VALUES (state, partition, lower, upper, every);
END $$
"""
SIGNATURE = "tidegate.add_range(text, text, text, text, text)"


def upgrade() -> None:
    op.create_table(
        "state_range",
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("partition", sa.Text(), nullable=False, comment="name of the table in schema state that has its rows"),
        sa.Column("lower", sa.Text(), nullable=True, comment="its least value, of a time in UTC; NULL: it has none"),
        sa.Column("upper", sa.Text(), nullable=True, comment="the least value above it; NULL: there is none"),
        sa.Column("every", sa.Text(), nullable=False, comment="its length, as it was declared"),
        sa.ForeignKeyConstraint(["state"], ["tidegate.state_table.state"], name=op.f("fk_state_range_state_table")),
        sa.PrimaryKeyConstraint("state", "partition", name=op.f("pk_state_range")),
        schema="tidegate",
        comment="Partitions of states that are divided by ranges.",
    )
    op.execute(ADD_RANGE)
    op.execute(f"REVOKE EXECUTE ON FUNCTION {SIGNATURE} FROM PUBLIC")
    op.execute(f"GRANT EXECUTE ON FUNCTION {SIGNATURE} TO tidegate")
    op.execute("GRANT SELECT ON tidegate.state_range TO tidegate, tidegate_reader")
    # Without pg_temp at the end, Postgres looks there first: for types of a caller, whose checks then ran as the owner.
    op.execute("ALTER FUNCTION tidegate.epoch() SET search_path = pg_catalog, pg_temp")


def downgrade() -> None:
    """Go back; refused while a state has range partitions, of which older code would add none."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM pg_partitioned_table JOIN pg_class ON oid = partrelid "
        "WHERE partstrat = 'r' AND relnamespace = 'state'::regnamespace) THEN RAISE 'states have range partitions'; END IF; END $$"
    )
    op.execute(f"DROP FUNCTION {SIGNATURE}")
    op.drop_table("state_range", schema="tidegate")
    op.execute("ALTER FUNCTION tidegate.epoch() SET search_path = pg_catalog")
