"""The retention of recorded changes and final windows: old ones are removed by hand, once no follower needs them."""

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from state_store import cursors, merges, state_tables, tables
from state_store.declaration import PipelineSpec, StateSpec, followed_as, parts_of
from state_store.errors import RangeRefused
from state_store.operations import write_action
from state_store.witness import Witness


class Pruned(NamedTuple):
    """What was removed: the changes of txids (numbers of batches) up to this one, and how many rows."""

    up_to_txid: int
    changes: int


class Follower(NamedTuple):
    """A pipeline that reads a state's changes by one of its inputs ("" if it has one source), and its last committed txid."""

    pipeline: str
    input: str
    committed: int


def followers(connection: Connection, pipeline: str, state: str) -> list[Follower]:
    """Return the inputs of registered pipelines that follow a state."""
    p, k = tables.pipeline.c, tables.cursor.c
    identity = p.declaration["source_identity"].astext
    registered = connection.execute(
        sa.select(p.pipeline, k.txid, identity).join(tables.cursor, k.pipeline == p.pipeline).order_by(p.pipeline)
    )
    followed = followed_as(pipeline, state)
    return [
        Follower(name, part, txid) for name, txid, of in registered for part, what in parts_of(of).items() if what == followed
    ]


def pruned_txid(connection: Connection, state: StateSpec) -> int:
    """Return the txid up to which a state's changes were removed; 0 if none were."""
    s = tables.state_table.c
    return connection.scalar(sa.select(s.pruned_txid).where(s.state == state.records)) or 0


def prune(
    connection: Connection, spec: PipelineSpec, state: StateSpec, up_to_txid: int, action: tuple[str, str], witness: Witness
) -> Pruned:
    """Remove the recorded changes of txids up to this one; `action` is the operator and the reason.

    The caller has made sure that no follower needs them. That stays true, as followers only move forward; the source of a
    pipeline that begins to follow later refuses to start.

    Raises: RangeRefused if the txid has not committed; what `cursors.lock_cursor` raises.
    """
    committed = cursors.lock_cursor(connection, spec.name, witness).txid
    if up_to_txid > committed:
        raise RangeRefused(f"{spec.name} has committed up to txid {committed}: later changes are not removed.")
    table: Any = state_tables.changes_table_of(state)
    merges.open_tables(connection, spec)
    removed = connection.execute(sa.delete(table).where(table.c.txid <= up_to_txid)).rowcount
    s = tables.state_table.c
    connection.execute(
        sa.update(tables.state_table).where(s.state == state.records, s.pruned_txid < up_to_txid).values(pruned_txid=up_to_txid)
    )
    owner, reason = action
    write_action(connection, spec.name, up_to_txid, "prune", owner, f"changes of {state.name}: {reason}")
    return Pruned(up_to_txid, removed)
