"""Alembic's environment: the migrations' target tables and their connection.

The package's functions pass a connection and the pipelines' specs; nothing is configured here.
"""

from alembic import context
from alembic.operations import ops
from sqlalchemy.schema import CreateSchema

from state_store import tables
from state_store.schema import VERSION_TABLE


def _ours(name, type_, _parent_names):  # noqa: ANN001, ANN202
    """Compare only our two schemas: staging tables come and go, and other schemas belong to others."""
    return type_ != "schema" or name in (tables.LEDGER, tables.STATE)


def _managed(table, name, type_, reflected, compare_to):  # noqa: ANN001, ANN202
    """Ignore Alembic's own table, and state tables whose pipeline is no longer declared: they hold data."""
    if type_ != "table":
        return True
    return name != VERSION_TABLE and not (reflected and compare_to is None and table.schema == tables.STATE)


def _guard_new_states(_context, _revision, directives):  # noqa: ANN001, ANN202
    """Write the single-writer trigger, and the grant of what others follow, into every migration that creates a state table."""
    script = directives[0]
    for operation in list(script.upgrade_ops.ops):
        if isinstance(operation, ops.CreateTableOp) and operation.schema == tables.STATE:
            table = f"{tables.STATE}.{operation.table_name}"
            after = [tables.SINGLE_WRITER, *([tables.FOLLOWED] if operation.table_name in followed else [])]
            script.upgrade_ops.ops += [ops.ExecuteSQLOp(statement.format(table=table)) for statement in after]


connection = context.config.attributes["connection"]
specs = context.config.attributes["specs"]
followed = {state.stream[0] for spec in specs for state in spec.states if state.stream}
connection.execute(CreateSchema(tables.LEDGER, if_not_exists=True))
context.configure(
    connection=connection,
    target_metadata=[tables.ledger, tables.state_tables(specs)],
    version_table=VERSION_TABLE,
    version_table_schema=tables.LEDGER,
    include_schemas=True,
    include_name=_ours,
    include_object=_managed,
    process_revision_directives=_guard_new_states,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
