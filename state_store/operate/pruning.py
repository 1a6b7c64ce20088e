"""What operators remove once no follower needs it: recorded changes, final windows, range partitions of appended rows."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import RangeRefused
from tidegate.state_store.commit import commit_facts
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateSpec
from tidegate.state_store.ledger import cursors, tables
from tidegate.state_store.ledger.batches import MAX_TXID
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.operate.action_record import write_action
from tidegate.state_store.states import range_partitions, state_tables

# A transaction removes no more rows one by one: commits wait for it.
ROWS_AT_ONCE = 50_000


class Pruned(NamedTuple):
    """What was removed of the changes of txids up to one: whole partitions, and so many other changes.

    `cut` is the txid up to which rows were removed one by one; `are_more` says whether there are more to remove.
    """

    up_to_txid: int
    changes: int = 0
    partitions: tuple[str, ...] = ()
    cut: int = 0
    are_more: bool = True


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


def pruned_txid(connection: Connection, state: StateSpec) -> int:
    """Return the txid up to which a state's changes, or some of its appended rows, were removed; 0 if none were."""
    s = tables.state_table.c
    return connection.scalar(sa.select(s.pruned_txid).where(s.state == _followed(state))) or 0


def has_changes(connection: Connection, state: StateSpec, up_to_txid: int) -> bool:
    """Return whether there are recorded changes of txids up to this one."""
    recorded = state_tables.changes_table_of(state)
    return connection.scalar(sa.select(sa.exists().where(recorded.c.txid <= up_to_txid))) or False


def _followed(state: StateSpec) -> str:
    assert state.stream is not None, "only what can be followed is pruned"
    return state.stream[0]


def prune(
    connection: Connection, spec: PipelineSpec, state: StateSpec, so_far: Pruned, action: tuple[str, str], witness: Witness
) -> Pruned:
    """Remove some of the recorded changes of txids up to one; return what was removed `so_far` and now.

    First the partitions that have no later txids, as a whole; then rows of the one that also has later ones. `action` is the
    operator and the reason.

    No follower needs them, as the caller has checked: followers only move forward, and later ones refuse to start.

    Raises: RangeRefused if the txid has not committed; PartitionsHeld while readers hold the partitions; what `_lock`
    raises.
    """
    up_to_txid = so_far.up_to_txid
    committed = _lock(connection, spec.name, witness)
    if up_to_txid > committed:
        raise RangeRefused(f"{spec.name} has committed up to txid {committed}: later changes are not removed.")
    changes = range_partitions.changes_of(state)
    attached = range_partitions.attached(connection, changes.table)
    end = up_to_txid + 1 if up_to_txid < committed else MAX_TXID  # without later txids, the last range has as good as ended
    ended = range_partitions.ended(connection, changes, str(end))[: range_partitions.MOST_AT_ONCE]
    if ended:
        _remove(connection, changes.table, ended, attached)
        done = so_far._replace(partitions=(*so_far.partitions, *(name for name in ended if name in attached)))
    else:
        done = _cut(connection, range_partitions.partition_of(state, up_to_txid), attached, so_far)
    _note(connection, state, up_to_txid)
    if so_far == Pruned(up_to_txid):
        owner, reason = action
        write_action(connection, spec.name, up_to_txid, "prune", owner, f"changes of {state.name}: {reason}")
    return done


def _lock(connection: Connection, pipeline: str, witness: Witness) -> int:
    """Lock the cursor of a pipeline in service, in a database where it could commit; return its txid."""
    facts = commit_facts.lock_and_read(connection, pipeline, witness)
    cursors.check_not_retired(pipeline, facts.retired)
    return facts.cursor.txid


def _remove(
    connection: Connection, table: str, names: Sequence[str], attached: Collection[str], *, detaches: bool = False
) -> list[str]:
    """Drop or detach partitions, and forget those that are gone; return the kept tables."""
    range_partitions.lock(connection, [table, *(name for name in names if name in attached)])
    kept = []
    for name in names:
        if name not in attached:
            range_partitions.forget(connection, table, name)
        elif detaches:
            kept.append(range_partitions.detach(connection, table, name))
        else:
            range_partitions.drop(connection, table, name)
    return kept


def _cut(connection: Connection, partition: str, attached: Collection[str], so_far: Pruned) -> Pruned:
    if partition not in attached:
        return so_far._replace(are_more=False)
    txids = (so_far.cut, so_far.up_to_txid)
    rows, last = range_partitions.remove_rows(connection, partition, txids, ROWS_AT_ONCE)
    return so_far._replace(changes=so_far.changes + rows, cut=last, are_more=rows == ROWS_AT_ONCE)


def prune_ranges(
    connection: Connection, spec: PipelineSpec, state: StateSpec, removal: Removal, action: tuple[str, str], witness: Witness
) -> PrunedRanges:
    """Remove range partitions that end by a value, the oldest first, up to one that a follower needs.

    At most `range_partitions.MOST_AT_ONCE`; the result says whether there are more.

    A later row of such a range has it made again. A pipeline that begins to follow the state from its beginning is refused
    from then on. Of a partition that was detached or dropped by hand, the note goes: it is no longer missed.

    Raises: UsageError if the value is none of the column's type; PartitionsHeld while readers hold the partitions; what `_lock`
    raises.
    """
    committed = _lock(connection, spec.name, witness)
    attached = range_partitions.attached(connection, state.name)
    ended = range_partitions.ended(connection, range_partitions.rows_of(state), removal.before)
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
    kept = _remove(connection, state.name, pruned.partitions, attached, detaches=removal.detaches)
    _note(connection, state, last_txid)
    owner, reason = action
    what = f"partitions of {state.name} before {removal.before}"
    write_action(connection, spec.name, last_txid or None, "prune", owner, f"{what}: {reason}")
    return pruned._replace(kept=kept)


def _note(connection: Connection, state: StateSpec, up_to_txid: int) -> None:
    """Note that what followers would read up to a txid is not complete any more."""
    s = tables.state_table.c
    connection.execute(
        sa.update(tables.state_table)
        .where(s.state == _followed(state), s.pruned_txid < up_to_txid)
        .values(pruned_txid=up_to_txid)
    )
