"""Move a batch's bad records into quarantine when it commits, and number them there."""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.attempt.attempts import LockedBatch, StagedPartition
from tidegate.state_store.declarations.pipeline_spec import QuarantineSpec
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import state_tables


def move_into_quarantine(
    connection: Connection, staged: QuarantineSpec, batch: LockedBatch, sealed: Sequence[StagedPartition]
) -> int:
    """Move the sealed bad records of a batch's newest attempt, all of them, and return their number."""
    if not sealed:
        return 0
    stage = state_tables.staging_table_of(staged, batch.txid, batch.attempt)
    names = [column.name for column in staged.columns]
    records = sa.select(
        sa.literal(batch.pipeline),
        sa.literal(batch.txid, sa.BigInteger),
        sa.func.row_number().over(order_by=(stage.c.origin, stage.c.payload)),
        *(stage.c[name] for name in names),
    ).where(stage.c.task_attempt.in_([p.task_attempt for p in sealed]))
    moved: int = connection.execute(
        insert(tables.quarantine).from_select(["pipeline", "txid", "number", *names], records)
    ).rowcount
    return moved
