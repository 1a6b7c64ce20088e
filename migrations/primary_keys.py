"""A plugin of Alembic: primary keys of tables, which it neither compares nor writes."""

from typing import Any

from alembic.autogenerate.api import AutogenContext
from alembic.autogenerate.render import renderers
from alembic.operations import ops
from alembic.runtime.plugins import Plugin
from alembic.util import DispatchPriority, PriorityDispatchResult
from sqlalchemy import Table

NAME = "tidegate.primary_keys"


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
_PLUGIN.add_autogenerate_comparator(_compare_primary_keys, "table", priority=DispatchPriority.LAST)
