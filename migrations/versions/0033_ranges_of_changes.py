"""What states record is divided by ranges of txids, and a partition has no privileges of its own."""

from alembic import op

revision = "0033"
down_revision = "0032"

ADD_PARTITION = "tidegate.add_partition(text, bigint)"
COMMENTS = {
    "upper": "the least value above it; NULL: there is none",
    "every": "its length, as it was declared; of changes: how many txids",
}
# What changes in tidegate.add_range.
OWNER = "    owner text := (SELECT t.pipeline FROM tidegate.state_table t WHERE t.state = add_range.state);\n"
MADE = "    EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING INDEXES)', made, parent);\n"
REVOKED = """    FOR reader IN
        SELECT DISTINCT coalesce(quote_ident(rolname), 'PUBLIC')
        FROM pg_class JOIN aclexplode(relacl) ON grantee <> relowner LEFT JOIN pg_roles ON pg_roles.oid = grantee
        WHERE pg_class.oid = made::regclass
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s', made, reader);
    END LOOP;
"""
CHANGES = {
    "CREATE FUNCTION": "CREATE OR REPLACE FUNCTION",
    OWNER: f"{OWNER}    made text := format('state.%I', partition);\n    reader text;\n",
    MADE.replace("TABLE %s", "TABLE state.%I").replace("made,", "partition,"): MADE + REVOKED,
    "TRUNCATE ON state.%I '": "TRUNCATE ON %s '",
    "single_writer()', partition);": "single_writer()', made);",
    "ATTACH PARTITION state.%I FOR VALUES FROM (%s) TO (%s)', parent, partition,": "ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)', parent, made,",
}


def upgrade() -> None:
    op.execute(f"DROP FUNCTION {ADD_PARTITION}")
    body = older("0028").ADD_RANGE
    for before, after in CHANGES.items():
        body = body.replace(before, after)
    op.execute(body)
    for column, comment in COMMENTS.items():
        op.alter_column("state_range", column, comment=comment, schema="tidegate")


def downgrade() -> None:
    for column, (comment, _) in older("0031").COMMENTS.items():
        op.alter_column("state_range", column, comment=comment, schema="tidegate")
    op.execute(older("0028").ADD_RANGE.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
    op.execute(older("0031").ADD_PARTITION)
    op.execute(f"REVOKE EXECUTE ON FUNCTION {ADD_PARTITION} FROM PUBLIC")
    op.execute(f"GRANT EXECUTE ON FUNCTION {ADD_PARTITION} TO tidegate")


def older(number):  # noqa: ANN001, ANN201
    return op.get_context().script.get_revision(number).module
