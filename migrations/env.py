"""Alembic's entry: which tables the migrations lead to, and on which connection they run.

`migrations.run` hands over a connection and the pipelines' specs; nothing is configured here.
"""

from alembic import context
from alembic.operations import ops
from sqlalchemy.schema import CreateSchema

from state_store import tables
from state_store.schema import VERSION_TABLE

# Postgres refuses a writer that is not the owner of the table, and people only read (CONTRACT I15).
SINGLE_WRITER = (
    "CREATE TRIGGER single_writer BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON state.{table} "
    "FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer()"
)


def _ours(name, type_, parent_names):  # noqa: ANN001, ANN202
    """Look only at our two schemas: staging tables come and go, and other schemas are other people's."""
    return type_ != "schema" or name in (tables.LEDGER, tables.STATE)


def _guard_new_states(_context, _revision, directives):  # noqa: ANN001, ANN202
    """Write the single-writer trigger into every migration that creates a state table; number the file."""
    script = directives[0]
    for operation in list(script.upgrade_ops.ops):
        if isinstance(operation, ops.CreateTableOp) and operation.schema == tables.STATE:
            script.upgrade_ops.ops.append(ops.ExecuteSQLOp(SINGLE_WRITER.format(table=operation.table_name)))


connection = context.config.attributes["connection"]
connection.execute(CreateSchema(tables.LEDGER, if_not_exists=True))
context.configure(
    connection=connection,
    target_metadata=[tables.ledger, tables.state_tables(context.config.attributes["specs"])],
    version_table=VERSION_TABLE,
    version_table_schema=tables.LEDGER,
    include_schemas=True,
    include_name=_ours,
    include_object=lambda _object, name, type_, _reflected, _compare_to: (type_, name) != ("table", VERSION_TABLE),
    process_revision_directives=_guard_new_states,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
