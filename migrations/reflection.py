"""A plugin of Alembic: what it reads of tables, and their primary keys, which it neither compares nor writes."""

from collections.abc import Collection
from typing import Any

from alembic.autogenerate.api import AutogenContext
from alembic.autogenerate.render import renderers
from alembic.operations import ops
from alembic.runtime.plugins import Plugin
from alembic.util import DispatchPriority, PriorityDispatchResult
from sqlalchemy import Table

NAME = "tidegate.reflection"
# What Alembic compares of a table, by the names of SQLAlchemy's inspector, and of Alembic's entries in the inspector's cache.
_PROPERTIES = (
    "columns",
    "pk_constraint",
    "foreign_keys",
    "indexes",
    "unique_constraints",
    "table_comment",
    "check_constraints",
    "table_options",
)


def _read_tables(context: AutogenContext, _operations: Any, schemas: Collection[str | None]) -> PriorityDispatchResult:
    """Put the tables of these schemas that are compared into the inspector's cache, by one statement for each property.

    Alembic does so for the default schema, and asks for each table of any other by seven statements.
    """
    inspector = context.inspector
    tables = {
        schema: [
            table
            for table in inspector.get_table_names(schema=schema)
            if context.run_name_filters(table, "table", {"schema_name": schema})
        ]
        for schema in schemas
    }
    for name in _PROPERTIES:
        read = getattr(inspector, f"get_multi_{name}")
        inspector.info_cache[f"alembic_{name}"] = {
            table: found
            for schema, names in tables.items()
            if names
            for table, found in read(schema=schema, filter_names=names).items()
        }
    return PriorityDispatchResult.CONTINUE


def _compare_primary_keys(
    _context: AutogenContext, changes: ops.ModifyTableOps, _schema: Any, _name: Any, found: Table | None, declared: Table | None
) -> PriorityDispatchResult:
    """Drop another primary key than the declared one before columns change, and add this one afterwards.

    A key that may be NULL is unique instead.
    """
    if found is not None and declared is not None:
        before, after = (table.primary_key for table in (found, declared))
        if set(before.columns.keys()) != set(after.columns.keys()):
            changes.ops[:0] = [ops.DropConstraintOp.from_constraint(before)] if before.columns else []
            changes.ops += [ops.CreatePrimaryKeyOp.from_constraint(after)] if after.columns else []
    return PriorityDispatchResult.CONTINUE


@renderers.dispatch_for(ops.CreatePrimaryKeyOp, replace=True)
def _write_primary_key(_context: AutogenContext, key: ops.CreatePrimaryKeyOp) -> str:
    return f"op.create_primary_key({key.constraint_name!r}, {key.table_name!r}, {list(key.columns)!r}, schema={key.schema!r})"


_PLUGIN = Plugin(NAME)
_PLUGIN.add_autogenerate_comparator(_read_tables, "schema", priority=DispatchPriority.FIRST)
_PLUGIN.add_autogenerate_comparator(_compare_primary_keys, "table", priority=DispatchPriority.LAST)
