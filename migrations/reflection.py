"""A plugin of Alembic that reads all tables of a schema by one statement for each of their properties.

Alembic does so for the default schema, and asks for each table of any other by seven statements.
"""

from collections.abc import Collection
from typing import Any

from alembic.autogenerate.api import AutogenContext
from alembic.runtime.plugins import Plugin
from alembic.util import DispatchPriority, PriorityDispatchResult

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
    """Put the tables of these schemas that are compared into the inspector's cache."""
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


Plugin(NAME).add_autogenerate_comparator(_read_tables, "schema", priority=DispatchPriority.FIRST)
