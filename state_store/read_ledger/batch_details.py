"""What the page in Airflow shows of batches beside their status: attempts, errors, merges, and the tasks that ran them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.ledger import tables
from tidegate.state_store.read_ledger.batch_status import BatchStatus

# The recorded task of an attempt, if that is at another batch than the task's own.
_OF_TXID = re.compile(r"(?P<task>\S+) of txid (?P<txid>\d+)")


class Task(NamedTuple):
    """The task instance of Airflow in which an attempt ran; `position` is its map index, `number` its try."""

    attempt: int
    run_id: str
    task_id: str
    position: int
    number: int


def rows(connection: Connection, statuses: Sequence[BatchStatus]) -> list[dict[str, Any]]:
    """Return batches as columns by name: those of their status, `attempts` (the number of tries) and `merged_at`."""
    if not statuses:
        return []
    b, k = tables.batch.c, tables.commit.c
    statement = (
        sa.select(b.txid, b.attempt, k.merged_at)
        .outerjoin(tables.commit, tables.same_batch(tables.commit, tables.batch))
        .where(b.pipeline == statuses[0].pipeline, b.txid.in_([status.txid for status in statuses]))
    )
    more = {row.txid: {"attempts": row.attempt, "merged_at": row.merged_at} for row in connection.execute(statement)}
    return [{**asdict(status), **more[status.txid], "error": status.error or None} for status in statuses]


def tasks(connection: Connection, pipeline: str, txid: int, attempts: Iterable[Mapping[str, Any]]) -> list[Task]:
    """Return the tasks of those attempts at a batch that ran in Airflow."""
    found = []
    for attempt in attempts:
        if attempt["airflow_run_id"] is None or attempt["airflow_task_id"] is None:
            continue
        other = _OF_TXID.fullmatch(attempt["airflow_task_id"])
        task_id, own_txid = (other["task"], int(other["txid"])) if other else (attempt["airflow_task_id"], txid)
        position = _position(connection, pipeline, attempt["airflow_run_id"], own_txid)
        if position is not None:
            found.append(Task(attempt["attempt"], attempt["airflow_run_id"], task_id, position, attempt["airflow_try"] or 1))
    return found


def _position(connection: Connection, pipeline: str, run_id: str, txid: int) -> int | None:
    r = tables.run_batch.c
    return connection.scalar(sa.select(r.position).where(r.pipeline == pipeline, r.run_id == run_id, r.txid == txid).limit(1))
