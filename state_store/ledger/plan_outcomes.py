"""How the plans of each pipeline end: how many have succeeded, how many have failed since, and the newest error.

A plan succeeds in the transaction that opens its batches, also if it finds nothing new. A failure is recorded afterwards, in a
transaction of its own; but not if another plan has succeeded since the failed one began, as the error is then out of date. The
count `succeeded` in the pipeline's row says which came first; no clock does.
"""

from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.ledger import tables

# For a transaction that only records how a plan has ended: its COMMIT waits neither for the disk nor for a standby. If a crash
# of the server loses it, the end of the next plan is recorded in its place.
_NO_WAIT = sa.func.set_config("synchronous_commit", "off", True)
_NO_FAILURE = {"failed": 0, **dict.fromkeys(("failing_since", "failed_at", "failed_run", "error"))}


class Beginning(NamedTuple):
    """Where things stood when a plan began: the last committed txid, and how many plans had succeeded."""

    committed: int
    succeeded: int


def succeeded(connection: Connection, pipeline: str) -> int:
    """Return how many plans of a pipeline have succeeded."""
    p = tables.plan.c
    return connection.scalar(sa.select(p.succeeded).where(p.pipeline == pipeline)) or 0


def note_success(connection: Connection, pipeline: str, *, only_that: bool) -> None:
    """Record that a plan succeeds with this transaction, and clear earlier failures.

    With `only_that`, the transaction does nothing else, so its COMMIT need not be durable.
    """
    p = tables.plan.c
    values = {"succeeded": p.succeeded + 1, "succeeded_at": sa.func.now()}
    success = sa.update(tables.plan).where(p.pipeline == pipeline).values(**values, **_NO_FAILURE)
    connection.execute(success.returning(_NO_WAIT) if only_that else success)


def forget_failures(connection: Connection, pipeline: str) -> None:
    """Clear failures of plans before a person's decision that may end what they met: the next plan meets what is left."""
    connection.execute(sa.update(tables.plan).where(tables.plan.c.pipeline == pipeline).values(**_NO_FAILURE))


def note_failure(connection: Connection, pipeline: str, began: Beginning, run_id: str, error: str) -> bool:
    """Record that a plan has failed, in a transaction that does nothing else.

    Returns False, without a change, if another plan has succeeded since.
    """
    p = tables.plan.c
    values = {
        "failed": p.failed + 1,
        "failing_since": sa.func.coalesce(p.failing_since, sa.func.now()),
        "failed_at": sa.func.now(),
        "failed_run": run_id,
        "error": error,
    }
    failed = sa.update(tables.plan).where(p.pipeline == pipeline, p.succeeded == began.succeeded).values(values)
    return connection.execute(failed.returning(_NO_WAIT)).one_or_none() is not None
