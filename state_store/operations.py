"""What people do by hand: pause, resume, retry, replay quarantined records. Each leaves its mark in ``operator_action``."""

from typing import Literal

import sqlalchemy as sa
from sqlalchemy import Connection

from state_store import batches, tables
from state_store.batches import QUARANTINED, encode_metadata, position_of
from state_store.commits import registered, write_action
from state_store.errors import PipelinePaused


def pause(connection: Connection, pipeline: str, owner: str, reason: str) -> bool:
    """Let no new run of the pipeline start; False if it was paused already."""
    return _set_paused(connection, pipeline, "pause", owner, reason)


def resume(connection: Connection, pipeline: str, owner: str, reason: str) -> bool:
    """Let runs of the pipeline start again; False if it was not paused."""
    return _set_paused(connection, pipeline, "resume", owner, reason)


def _set_paused(connection: Connection, pipeline: str, action: Literal["pause", "resume"], owner: str, reason: str) -> bool:
    p = tables.pipeline.c
    pausing = action == "pause"
    changed = connection.execute(
        sa.update(tables.pipeline)
        .where(p.pipeline == pipeline, p.paused_at.is_(None) if pausing else p.paused_at.is_not(None))
        .values(
            paused_at=sa.func.now() if pausing else None,
            paused_by=owner if pausing else None,
            paused_reason=reason if pausing else None,
        )
    ).rowcount
    if changed:
        write_action(connection, pipeline, None, action, owner, reason)
    else:
        registered(connection, pipeline)
    return bool(changed)


def check_not_paused(connection: Connection, pipeline: str) -> None:
    """Refuse to go on if the pipeline is paused.

    Raises: PipelinePaused, SchemaOutOfDate if it is not registered.
    """
    row = registered(connection, pipeline)
    if row.paused_at is not None:
        raise PipelinePaused(
            f"{pipeline} was paused by {row.paused_by} on {row.paused_at:%Y-%m-%d %H:%M} UTC: {row.paused_reason.rstrip('.')}. "
            f"Go on with: tidegate resume {pipeline}",
            pipeline=pipeline,
        )


def retry(connection: Connection, pipeline: str, txid: int | None, owner: str, reason: str) -> list[int]:
    """Let batches that were halted or given up be tried anew: this one, or all; return which."""
    forgiven = batches.forgive(connection, pipeline, txid)
    for each in forgiven:
        write_action(connection, pipeline, each, "retry", owner, reason)
    return forgiven


def replay_quarantined(
    connection: Connection, pipeline: str, owner: str, reason: str, txid: int | None
) -> tuple[int, int] | Literal[False] | None:
    """Open a batch that takes up waiting records; return its txid and their number.

    None if no record waits, False if another planner took the txid first; then the caller rolls back.
    """
    after = batches.last_opened(connection, pipeline)
    if after is None:
        return None
    q = tables.quarantine.c
    waiting = [q.pipeline == pipeline, q.replayed_txid.is_(None), *([] if txid is None else [q.txid == txid])]
    new_txid = after.txid + 1
    taken = connection.execute(sa.update(tables.quarantine).where(*waiting).values(replayed_txid=new_txid)).rowcount
    if not taken:
        return None
    metadata = {QUARANTINED: taken, "source": position_of(after.metadata)}
    if not batches.insert_batches(connection, pipeline, after, [encode_metadata(metadata)], owner):
        return False
    write_action(connection, pipeline, new_txid, "replay", owner, reason)
    return new_txid, taken
