"""Merge what an attempt has sealed into the state tables, by the rules of each state's kind. Called under the cursor's lock.

    transactional      (value, txid)                       value joins what is there; a row's txid must be older (I14)
    opaque             (value, previous value, txid)       the same, and what was there is kept, so that the last txid can be
                                                           taken back for every key it touched (I13)
    non-transactional  (value)                             value joins what is there; nothing tells whether it did before

The theory lets states tell a replay by the txids in their rows (SEMANTICS (a), States). Here the cursor tells, so an equal
or a newer txid in a row is never a replay: somebody else wrote it, and the commit stops.
"""

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from state_store import staging, tables
from state_store.attempts import StagedPartition
from state_store.declaration import PREVIOUS_TXID, SNAPSHOT, PipelineSpec, QuarantineSpec, StateSpec, previous_name
from state_store.errors import GuardMismatch


def open_tables(connection: Connection, spec: PipelineSpec) -> None:
    """Name the writer for the length of the transaction: the state tables refuse everybody else."""
    connection.execute(sa.select(sa.func.set_config("tidegate.writer", spec.name, True)))


def merge_all(connection: Connection, spec: PipelineSpec, txid: int, attempt: int) -> tuple[int, int]:
    """Merge everything that the attempt has sealed; return the number of state rows written and of bad records set aside."""
    open_tables(connection, spec)
    keys = 0
    for state in spec.states:
        sealed = staging.recount(connection, state, txid, attempt)
        keys += _merge(connection, spec, state, txid, attempt, sealed)
    bad = _set_aside(connection, spec, txid, attempt) if spec.quarantines else 0
    return keys, bad


def _set_aside(connection: Connection, spec: PipelineSpec, txid: int, attempt: int) -> int:
    """Move the attempt's bad records into quarantine, all of them or nothing."""
    staged = QuarantineSpec(spec.name)
    sealed = staging.recount(connection, staged, txid, attempt)
    stage = tables.staging_table_of(staged, txid, attempt)
    names = [column.name for column in staged.columns]
    found = sa.select(
        sa.literal(spec.name),
        sa.literal(txid, sa.BigInteger),
        sa.func.row_number().over(order_by=(stage.c.origin, stage.c.payload)),
        *(stage.c[name] for name in names),
    ).where(stage.c.task_attempt.in_([p.task_attempt for p in sealed]))
    if not sealed:
        return 0
    written: int = connection.execute(
        insert(tables.quarantine).from_select(["pipeline", "txid", "number", *names], found)
    ).rowcount
    return written


def restore(connection: Connection, state: StateSpec, txid: int) -> None:
    """Take back what txid did to an opaque state: its rows get their previous values, new ones go.

    The whole table is read: an index on txid would end HOT updates for the sake of what rarely happens.
    """
    table = tables.state_table_of(state)
    connection.execute(sa.delete(table).where(table.c.txid == txid, table.c[PREVIOUS_TXID].is_(None)))
    before: dict[str, Any] = {value.name: table.c[previous_name(value.name)] for value in state.values}
    unknown = dict.fromkeys([*map(previous_name, before), PREVIOUS_TXID])  # what they were before that is not kept
    connection.execute(sa.update(table).where(table.c.txid == txid).values(before | {"txid": table.c[PREVIOUS_TXID]} | unknown))


def _merge(
    connection: Connection,
    spec: PipelineSpec,
    state: StateSpec,
    txid: int,
    attempt: int,
    sealed: Sequence[StagedPartition],
) -> int:
    """Upsert the sealed rows in key order; every one of them must land (CONTRACT I14).

    The txid guard is an alarm, not a filter: the cursor says that txid is new, so a row that the guard rejects was
    written by somebody else, and dropping it silently would lose an update.
    """
    expected = sum(p.rows for p in sealed)
    if not expected:
        return 0
    target, stage = tables.state_table_of(state), tables.staging_table_of(state, txid, attempt)
    names = [column.name for column in state.columns]
    keys = [key.name for key in state.keys]
    stamp = [sa.literal(txid, sa.BigInteger)] if state.has_txid else []
    rows = (
        sa.select(*(stage.c[name] for name in names), *stamp)
        .where(stage.c.task_attempt.in_([p.task_attempt for p in sealed]))
        .order_by(*(stage.c[key] for key in keys))  # index locality, and one lock order for everybody
    )
    upsert = insert(target).from_select([*names, *(["txid"] if stamp else [])], rows)
    new = upsert.excluded
    merged: dict[str, Callable[[str], sa.ColumnElement[Any]]] = {
        "sum": lambda name: target.c[name] + new[name],
        "min": lambda name: sa.func.least(target.c[name], new[name]),
        "max": lambda name: sa.func.greatest(target.c[name], new[name]),
    }
    changes: dict[str, Any] = {v.name: merged[v.merge](v.name) for v in state.values}
    if state.kind == "opaque":
        changes |= {previous_name(v.name): target.c[v.name] for v in state.values}
        changes[PREVIOUS_TXID] = target.c.txid
    if state.has_txid:
        changes["txid"] = new.txid
    upsert = upsert.on_conflict_do_update(
        index_elements=keys or [SNAPSHOT],
        set_=changes,
        where=target.c.txid < new.txid if state.has_txid else None,
    )
    written = connection.execute(upsert).rowcount
    if written != expected:
        raise GuardMismatch(
            f"{spec.name} {txid}:{attempt}: {expected - written} of {expected} rows of state.{state.name} carry a txid of at "
            f"least {txid} already: somebody else wrote them. Nothing was committed; "
            "restore the table, or find its other writer.",
            pipeline=spec.name,
            txid=txid,
            attempt=attempt,
        )
    return expected
