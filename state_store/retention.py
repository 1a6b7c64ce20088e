"""What operators remove once no follower needs it: recorded changes, final windows, range partitions of appended rows."""

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from state_store import cursors, merges, partitions, range_partitions, state_tables, tables
from state_store.database import DDL_LOCK_TIMEOUT_SECONDS, set_local
from state_store.declaration import PipelineSpec, StateSpec, followed_as, parts_of
from state_store.errors import RangeRefused
from state_store.operations import write_action
from state_store.witness import Witness


class Pruned(NamedTuple):
    """What was removed: the changes of txids (numbers of batches) up to this one, and how many rows."""

    up_to_txid: int
    changes: int


class Removal(NamedTuple):
    """Which range partitions are to be removed: those that end by `before`, without rows of txids after `up_to_txid`.

    With `detaches`, they stay as tables of their own. Unless it `is_confirmed`, nothing is removed.
    """

    before: str
    up_to_txid: int
    detaches: bool
    is_confirmed: bool


class PrunedRanges(NamedTuple):
    """Which partitions were removed, the oldest first, and the first one that a follower still needs.

    `kept` are the tables that detached ones have become; `are_more` says whether there are more to remove.
    """

    partitions: list[str]
    needed: str | None
    kept: list[str]
    are_more: bool = False


class Follower(NamedTuple):
    """A pipeline that reads a state's changes by one of its inputs ("" if it has one source), and its last committed txid."""

    pipeline: str
    input: str
    committed: int


def followers(connection: Connection, pipeline: str, state: str) -> list[Follower]:
    """Return the inputs of pipelines that follow a state; those of retired ones do not count."""
    p, k = tables.pipeline.c, tables.cursor.c
    identity = p.declaration["source_identity"].astext
    registered = connection.execute(
        sa.select(p.pipeline, k.txid, identity)
        .join(tables.cursor, k.pipeline == p.pipeline)
        .where(p.retired_at.is_(None))
        .order_by(p.pipeline)
    )
    followed = followed_as(pipeline, state)
    return [
        Follower(name, part, txid) for name, txid, of in registered for part, what in parts_of(of).items() if what == followed
    ]


def pruned_txid(connection: Connection, state: StateSpec) -> int:
    """Return the txid up to which a state's changes, or some of its appended rows, were removed; 0 if none were."""
    s = tables.state_table.c
    return connection.scalar(sa.select(s.pruned_txid).where(s.state == _followed(state))) or 0


def _followed(state: StateSpec) -> str:
    """Return the table by which others follow a state."""
    assert state.stream is not None, "only what can be followed is pruned"
    return state.stream[0]


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
    _note(connection, state, up_to_txid)
    owner, reason = action
    write_action(connection, spec.name, up_to_txid, "prune", owner, f"changes of {state.name}: {reason}")
    return Pruned(up_to_txid, removed)


def prune_ranges(
    connection: Connection, spec: PipelineSpec, state: StateSpec, removal: Removal, action: tuple[str, str], witness: Witness
) -> PrunedRanges:
    """Remove range partitions that end at or before a value, the oldest first, up to one that a follower needs.

    It removes at most `range_partitions.MOST_AT_ONCE`, and says whether there are more.

    Readers wait meanwhile, and it waits for them, for some seconds. A row of such a range that comes later has it made again. A
    pipeline that begins to follow the state from its beginning afterwards is refused, as for changes. Of a partition that was
    detached or dropped by hand, only the note is removed: what it had is no longer missed.

    Raises: UsageError if the value is none of the column's type; what `cursors.lock_cursor` raises.
    """
    committed = cursors.lock_cursor(connection, spec.name, witness).txid
    set_local(connection, {"lock_timeout": f"{DDL_LOCK_TIMEOUT_SECONDS}s"})
    attached = partitions.attached(connection, state_tables.STATE, state)
    ended = range_partitions.ended(connection, state, removal.before)
    pruned = PrunedRanges([], None, [], are_more=len(ended) > range_partitions.MOST_AT_ONCE)
    last_txid = 0
    for partition in ended[: range_partitions.MOST_AT_ONCE]:
        newest = range_partitions.newest_txid(connection, partition) if partition in attached else committed
        if partition in attached and newest > removal.up_to_txid:
            pruned = pruned._replace(needed=partition, are_more=False)
            break
        last_txid = max(last_txid, newest)
        pruned.partitions.append(partition)
    if not pruned.partitions or not removal.is_confirmed:
        return pruned
    for partition in pruned.partitions:
        if partition not in attached:
            range_partitions.forget(connection, state, partition)
        elif removal.detaches:
            pruned.kept.append(range_partitions.detach(connection, state, partition))
        else:
            range_partitions.drop(connection, state, partition)
    _note(connection, state, last_txid)
    owner, reason = action
    what = f"partitions of {state.name} before {removal.before}"
    write_action(connection, spec.name, last_txid or None, "prune", owner, f"{what}: {reason}")
    return pruned


def _note(connection: Connection, state: StateSpec, up_to_txid: int) -> None:
    """Note that what followers would read up to a txid is not complete any more."""
    s = tables.state_table.c
    connection.execute(
        sa.update(tables.state_table)
        .where(s.state == _followed(state), s.pruned_txid < up_to_txid)
        .values(pruned_txid=up_to_txid)
    )
