"""Partitions of what states record: a commit goes on in another table when the last one has become large."""

from alembic import op

revision = "0031"
down_revision = "0030"

BY_ROOT = """
    declared oid := coalesce(pg_partition_root(TG_RELID), TG_RELID);  -- of a hash partition: the table that it is part of
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
@OWNER@
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
ADD_PARTITION = """
CREATE FUNCTION tidegate.add_partition(recorded text, first_txid bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    parent regclass := format('state.%I', recorded);
    owner text := (SELECT pipeline FROM tidegate.state_table WHERE state = recorded);
    partition text := format('%s$%s', recorded, first_txid);
    made text := format('state.%I', partition);
    todo text;
BEGIN
    IF owner IS NULL OR owner IS DISTINCT FROM nullif(current_setting('tidegate.writer', true), '') THEN
        RAISE EXCEPTION 'state.% gets its partitions by the commits of its pipeline only', recorded
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    BEGIN
        EXECUTE format('LOCK TABLE ONLY %s IN SHARE UPDATE EXCLUSIVE MODE NOWAIT', parent);
    EXCEPTION WHEN lock_not_available THEN
        RETURN false;
    END;
    EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING ALL, CHECK (txid >= %s))', made, parent, first_txid);
    FOR todo IN
        SELECT statement FROM (
            SELECT 1, format('REVOKE ALL ON %s FROM %s', made, coalesce(quote_ident(rolname), 'PUBLIC'))
            FROM pg_class JOIN aclexplode(relacl) ON grantee <> relowner LEFT JOIN pg_roles ON pg_roles.oid = grantee
            WHERE pg_class.oid = made::regclass
            UNION
            SELECT 2, format('GRANT INSERT ON %s TO tidegate', made)
            UNION
            SELECT 3, replace(pg_get_triggerdef(oid), format(' ON %s ', parent), format(' ON %s ', made))
            FROM pg_trigger WHERE tgrelid = parent AND NOT tgisinternal
            UNION
            SELECT 4, format('ALTER TABLE %s %s TRIGGER %I', made,
                             CASE tgenabled WHEN 'D' THEN 'DISABLE' WHEN 'A' THEN 'ENABLE ALWAYS' ELSE 'ENABLE REPLICA' END, tgname)
            FROM pg_trigger WHERE tgrelid = parent AND NOT tgisinternal AND tgenabled <> 'O'
        ) AS all_of_them (step, statement) ORDER BY step
    LOOP
        EXECUTE todo;
    END LOOP;
    EXECUTE format('ALTER TABLE %s INHERIT %s', made, parent);
    INSERT INTO tidegate.state_range VALUES (recorded, partition, first_txid, NULL, 'size');
    RETURN true;
END $$
"""
SIGNATURE = "tidegate.add_partition(text, bigint)"
# Of each comment of state_range: the one since this revision, and the one before.
COMMENTS = {
    "upper": (
        "the least value above it; NULL: there is none, or it is the lower one of the next",
        "the least value above it; NULL: there is none",
    ),
    "every": ("its length, as it was declared; size: of changes, which have none", "its length, as it was declared"),
}
TABLE_COMMENT = (
    "Partitions of states that are divided by ranges, and of what states record.",
    "Partitions of states that are divided by ranges.",
)


def upgrade() -> None:
    op.execute(SINGLE_WRITER.replace("@OWNER@", BY_NAME.strip("\n")))
    op.execute(ADD_PARTITION)
    op.execute(f"REVOKE EXECUTE ON FUNCTION {SIGNATURE} FROM PUBLIC")
    op.execute(f"GRANT EXECUTE ON FUNCTION {SIGNATURE} TO tidegate")
    for column, (comment, _) in COMMENTS.items():
        op.alter_column("state_range", column, comment=comment, schema="tidegate")
    op.create_table_comment("state_range", TABLE_COMMENT[0], schema="tidegate")


def downgrade() -> None:
    """Go back. Partitions stay, and are read as before; older code writes into the tables from which they inherit."""
    op.create_table_comment("state_range", TABLE_COMMENT[1], schema="tidegate")
    for column, (_, comment) in COMMENTS.items():
        op.alter_column("state_range", column, comment=comment, schema="tidegate")
    op.execute(f"DROP FUNCTION {SIGNATURE}")
    op.execute(SINGLE_WRITER.replace("@OWNER@", BY_ROOT.strip("\n")))
