"""How the plans of each pipeline end: how many have succeeded, and those that have failed since, with the newest error.

A plan succeeds in the transaction that opens its batches, also if it finds nothing new. One that fails is recorded afterwards,
by a transaction of its own, unless another plan has succeeded since it began: that one knows better. Their order is that of
`succeeded` in the pipeline's row, not of clocks.
"""

from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from state_store import tables

# The COMMIT of a transaction that only notes how a plan has ended waits neither for the disk nor for a standby: if the server
# loses that in a crash, the next plan notes it.
_NO_WAIT = sa.func.set_config("synchronous_commit", "off", True)


class Beginning(NamedTuple):
    """Where a plan begins: after the last committed txid, a batch's number, and after so many plans that have succeeded."""

    committed: int
    succeeded: int


def succeeded(connection: Connection, pipeline: str) -> int:
    """Return how many plans of a pipeline have succeeded."""
    p = tables.plan.c
    return connection.scalar(sa.select(p.succeeded).where(p.pipeline == pipeline)) or 0


def note_success(connection: Connection, pipeline: str, *, only_that: bool) -> None:
    """Record that a plan succeeds with this transaction, which may do `only_that`; what failed before is over."""
    p = tables.plan.c
    values = {"succeeded": p.succeeded + 1, "succeeded_at": sa.func.now(), "failed": 0}
    over = dict.fromkeys(("failing_since", "failed_at", "failed_run", "error"))
    success = sa.update(tables.plan).where(p.pipeline == pipeline).values(**values, **over)
    connection.execute(success.returning(_NO_WAIT) if only_that else success)


def note_failure(connection: Connection, pipeline: str, began: Beginning, run_id: str, error: str) -> bool:
    """Record that a plan has failed, in a transaction of its own.

    Returns False, having changed nothing, if another has succeeded since it began.
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
