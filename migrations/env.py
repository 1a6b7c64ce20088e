"""Alembic's environment: the migrations' target tables, their connection, and the text that `migrate --new` writes.

The package's functions pass a connection and the pipelines' specs; nothing is configured here.
"""

import warnings

from alembic import context
from alembic.operations import ops
from sqlalchemy import inspect
from sqlalchemy.schema import CreateSchema

from tidegate.migrations import primary_keys
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import state_tables, table_shape


def _ours(name, type_, _parents):  # noqa: ANN001, ANN202
    """Compare declared states: other tables belong to others, and the ledger is made by schema.sql alone."""
    if type_ == "schema":
        return name == state_tables.STATE
    return type_ != "table" or name in after


def _managed(table, _name, type_, reflected, compare_to):  # noqa: ANN001, ANN202
    """Ignore columns, indexes and constraints that only the database has and no declaration had: they are the team's."""
    if type_ == "column" and reflected and compare_to is None:
        return (table.table.name, table.name) in registered
    if type_ not in ("index", "unique_constraint", "foreign_key_constraint") or not reflected or compare_to is not None:
        return True
    # A key that may be NULL is declared as unique, until it may not.
    return type_ == "unique_constraint" and table.name == f"uq_{table.table.name}_key"


def _is_other_type(_context, column, _declared, _found_type, _declared_type):  # noqa: ANN001, ANN202
    """Let a type stay that a person has accepted; None: Alembic compares."""
    return False if registered.get((column.table.name, column.name)) else None


def _complete_states(_context, _revision, directives):  # noqa: ANN001, ANN202
    """Add the triggers and further grants of new tables; drop the view of a history before a change that it would prevent."""
    operations = directives[0].upgrade_ops.ops
    for operation in list(operations):
        if isinstance(operation, ops.CreateTableOp):
            operations += map(ops.ExecuteSQLOp, after[operation.table_name])
        elif operation.table_name in views and not all(isinstance(each, ops.AddColumnOp) for each in operation.ops):
            operations.insert(0, ops.ExecuteSQLOp(views[operation.table_name]))  # registration makes it again


connection = context.config.attributes["connection"]
specs = context.config.attributes["specs"]
after = {
    table: state_tables.after_create(state, table)
    for spec in specs
    for state in spec.readable
    for table in (state.table_name, state.records)
    if table
}
registered = table_shape.registered_columns(connection)
views = {s.table_name: state_tables.drop_of_view(state_tables.STATE, s) for spec in specs for s in spec.readable if s.history}
if not inspect(connection).has_schema(tables.LEDGER):  # Alembic's table of versions comes before the first migration
    connection.execute(CreateSchema(tables.LEDGER))
context.configure(
    connection=connection,
    target_metadata=state_tables.metadata_of(specs),
    version_table=context.config.attributes["version_table"],
    version_table_schema=tables.LEDGER,
    include_schemas=True,
    include_name=_ours,
    include_object=_managed,
    compare_type=_is_other_type,
    process_revision_directives=_complete_states,
    # No comment is declared, so they are the team's.
    autogenerate_plugins=["alembic.autogenerate.*", "~alembic.autogenerate.comments", primary_keys.NAME],
    transactional_ddl=True,
)
with context.begin_transaction(), warnings.catch_warnings():
    # SQLAlchemy does not know its own option of a check that a team has added NOT VALID.
    warnings.filterwarnings("ignore", "Can't validate argument 'dialect_options'")
    context.run_migrations()
