"""The staging that commits read: the recount that checks a seal against what is really there (CONTRACT I7)."""

import sqlalchemy as sa
from sqlalchemy import Connection

from state_store import tables
from state_store.attempts import StagedPartition
from state_store.declaration import Staged
from state_store.errors import StagingLost

# Executors write it; the owner of the state tables reads it for a redo.
STAGER_GRANT = sa.DDL(  # type: ignore[no-untyped-call]
    "GRANT INSERT, SELECT ON %(fullname)s TO tidegate_stager; GRANT SELECT ON %(fullname)s TO tidegate_owner"
)


def recount(connection: Connection, staged: Staged, txid: int, attempt: int) -> list[StagedPartition]:
    """Return what the seal names for a state, after checking that exactly these rows are in staging.

    Raises: StagingLost if the table is gone, a row is missing or one byte differs.
    """
    s = tables.seal.c
    sealed = [
        StagedPartition(staged.name, *row)
        for row in connection.execute(
            sa.select(s.partition, s.task_attempt, s.rows, s.digest).where(
                s.state == staged.name, s.txid == txid, s.attempt == attempt
            )
        )
    ]
    staging = tables.staging_table_of(staged, txid, attempt)
    if connection.scalar(sa.select(sa.func.to_regclass(f'{tables.STAGING}."{staging.name}"'))) is None:
        raise _lost(staged, txid, attempt, "its table is gone")
    found: dict[int, tuple[int, int]] = {}
    if sealed:
        digest = sa.func.bit_xor(sa.func.hash_record_extended(staging.table_valued(), 0))
        found = {
            row.task_attempt: (row[1], row[2])
            for row in connection.execute(
                sa.select(staging.c.task_attempt, sa.func.count(), digest)
                .where(staging.c.task_attempt.in_([p.task_attempt for p in sealed]))
                .group_by(staging.c.task_attempt)
            )
        }
    for p in sealed:
        if found.get(p.task_attempt) != (p.rows, p.digest):
            rows = found.get(p.task_attempt, (0, 0))[0]
            raise _lost(staged, txid, attempt, f"partition {p.partition} was sealed with {p.rows} rows, staging has {rows}")
    return sealed


def _lost(staged: Staged, txid: int, attempt: int, what: str) -> StagingLost:
    return StagingLost(
        f"The staging of state {staged.name}, batch {txid}, attempt {attempt} cannot be used: {what}. It is processed again.",
        txid=txid,
        attempt=attempt,
    )
