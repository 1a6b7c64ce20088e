"""The upsert: partials, sealed rows of an attempt, go into state tables by each state's kind, under the cursor's lock.

I13 and I14 are rules of docs/protocol.md.

    transactional      (value, txid)                       the value is merged in; the row's txid must be older (I14)
    opaque             (value, previous value, txid)       the same, and the previous value is kept, so that the last txid can
                                                           be undone for every key it touched (I13)
    non-transactional  (value)                             the value is merged in; nothing shows whether it was merged before

Appended rows carry their txid, so that it can be undone; no row of the txid may be there already.

In theory, states recognise a repeated batch by the txids in their rows. Here the cursor does, so an equal or newer txid in a
row is never that of a repeated batch: another writer put it there, and the commit stops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa
from psycopg2.errors import UniqueViolation
from sqlalchemy import Connection, Table
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.exc import DBAPIError, IntegrityError

from tidegate.state_store.attempt import staging_tables
from tidegate.state_store.attempt.attempts import LockedBatch, StagedPartition
from tidegate.state_store.base.errors import GuardMismatch, Overflow
from tidegate.state_store.commit import author_checks, author_updates, event_windows, merge_expressions, quarantined_records
from tidegate.state_store.commit.author_updates import UpdateBatch
from tidegate.state_store.commit.combine_batches import MEMORY_MIB, combined, keeps_whole_rows
from tidegate.state_store.commit.event_windows import EventTime
from tidegate.state_store.connections.local_settings import set_local
from tidegate.state_store.connections.postgres_errors import is_too_large_row
from tidegate.state_store.declarations.column_spec import POSITION, PREVIOUS_TXID, SNAPSHOT, previous_name
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, QuarantineSpec, Staged, StateSpec
from tidegate.state_store.states import partitions, range_partitions, state_tables
from tidegate.state_store.states.state_tables import StagedBatch

# Above this number of columns, a row that is kept as a whole is compared once, and not column by column.
MANY_COLUMNS = 30


class Merged(NamedTuple):
    """How many state rows a batch has written, and how many bad records it has set aside."""

    keys: int
    quarantined_rows: int


TextRow = Mapping[str, str | None]


def merge_all(connection: Connection, spec: PipelineSpec, batches: Sequence[LockedBatch]) -> list[Merged]:
    """Merge what the newest attempts at consecutive batches have sealed; return what each batch has written.

    A key that several batches touch is written once. The states come out as if the batches were merged one by one, but for
    opaque ones, which would need the values between the batches.

    Every sealed row that is not set aside must be written (I14): if the condition on the txid rejects one, another writer
    changed it.

    Raises: GuardMismatch, Unprocessed, CheckFailed, DeclarationInvalid; for several batches also IntegrityError if one of them
    might fail by itself, as a row has another writer or a sum comes near the limit of its type. Then merge them one by one.
    """
    set_aside = _move_bad_records(connection, spec, batches) if spec.quarantines else [0] * len(batches)
    checked = {batch.txid: author_checks.checked_batch(connection, spec, batch) for batch in batches if spec.checks}
    keys = [0] * len(batches)
    partials: list[dict[str, sa.Select[Any]]] = [{} for _ in batches]
    _update(connection, spec, batches, before=True)
    for state in spec.readable:
        for place, (staged, written) in enumerate(_merge_state(connection, spec, state, batches, checked)):
            keys[place] += written
            partials[place][state.name] = staged.partials
    _update(connection, spec, batches, before=False)
    for batch, of_states in zip(batches, partials, strict=True):
        if batch.txid in checked:
            author_checks.evaluate(connection, replace(checked[batch.txid], staged=of_states))
    return [Merged(*counts) for counts in zip(keys, set_aside, strict=True)]


def _move_bad_records(connection: Connection, spec: PipelineSpec, batches: Sequence[LockedBatch]) -> list[int]:
    """Move the bad records that the newest attempts have sealed into quarantine, all or none; return their number by batch."""
    staged = QuarantineSpec(spec.name)
    recounted = _recount(connection, spec, staged, batches)
    moved = []
    for batch, sealed in zip(batches, recounted, strict=True):
        stage = state_tables.staging_table_of(staged, batch.txid, batch.attempt)
        moved.append(quarantined_records.move_sealed(connection, staged, batch.txid, stage, [p.task_attempt for p in sealed]))
    return moved


def _merge_state(
    connection: Connection,
    spec: PipelineSpec,
    state: StateSpec,
    batches: Sequence[LockedBatch],
    checked: Mapping[int, author_checks.CheckedBatch],
) -> list[tuple[StagedBatch, int]]:
    """Merge batches into one state; return for each the partials that are not set aside, and the number of rows written."""
    event_time = EventTime(connection, spec, state) if state.window else None
    staged = []
    for batch, sealed in zip(batches, _staged(connection, spec, state, batches), strict=True):
        own = sealed
        if batch.txid in checked:
            own = author_checks.without_wrong(connection, checked[batch.txid], state, own)
        staged.append(event_time.take(batch.txid, own) if event_time else own)
    written = [own.rows for own in staged]
    if any(written) and event_time and event_time.joins_pieces:
        written = [event_time.join(staged[0])]  # sessions are merged one batch at a time
    elif any(written):
        _merge(connection, spec, state, batches, [own for own in staged if own.rows])
    if event_time:
        event_time.finish()
    return list(zip(staged, written, strict=True))


def _merge(
    connection: Connection, spec: PipelineSpec, state: StateSpec, batches: Sequence[LockedBatch], staged: Sequence[StagedBatch]
) -> None:
    if state.appends:
        _append(connection, spec, state, staged)
        return
    txid = batches[0].txid
    if len(batches) > 1:
        with combined(connection, state, staged, txid) as together:
            written = _write(connection, state, together.sums, first_txid=txid)
        if written != together.keys:
            raise GuardMismatch(
                f"{spec.name} {txid} to {batches[-1].txid}: {together.keys - written} of {together.keys} rows were not "
                f"written into state.{state.name}: a trigger or a rule keeps them out. Nothing was committed."
            )
        return
    expected = staged[0].rows
    if state.changes:  # such a state is merged alone
        range_partitions.begin_txid(connection, state, txid)
    written = _write(connection, state, staged[0].partials)
    if written != expected:
        raise GuardMismatch(
            f"{batches[0]}: {expected - written} of {expected} rows of state.{state.name} carry a txid of "
            f"at least {txid} already: another writer changed them. Nothing was committed; "
            "restore the table, or find its other writer."
        )


def _update(connection: Connection, spec: PipelineSpec, batches: Sequence[LockedBatch], *, before: bool) -> None:
    """Run the author's updates, with the code that is for `before` the merge of the states or for after it."""
    own = [state for state in spec.states if state.updates and (state.before or not before)]
    if not own:
        return
    partials = [[each.partials for each in _staged(connection, spec, state, batches)] for state in own]
    with author_updates.unfinished(connection, spec.name) as around:
        for batch, of_batch in zip(batches, zip(*partials, strict=True), strict=True):
            for state, rows in zip(own, of_batch, strict=True):
                given = UpdateBatch(spec.name, batch.txid, rows.subquery("batch"), connection)
                author_updates.run(connection, given, state, around, before=before)


def _append(connection: Connection, spec: PipelineSpec, state: StateSpec, staged: Sequence[StagedBatch]) -> None:
    """Add the rows of batches, in the order of txid and position, which fills the index from one end."""
    set_local(connection, {"work_mem": f"{MEMORY_MIB}MB"})  # for the sort
    if state.ranges:  # of all batches at once, as the limit is one of the transaction
        column = state.ranges.column
        values = (batch.partials.with_only_columns(batch.partials.selected_columns[column]) for batch in staged)
        every = sa.select(sa.union_all(*values).subquery("every"))
        range_partitions.add_missing(connection, range_partitions.rows_of(state), every)
    for batch in staged:
        rows = batch.partials.order_by(batch.partials.selected_columns[POSITION])
        added = insert(state_tables.state_table_of(state)).from_select(
            [*(column.name for column in rows.selected_columns)], rows
        )
        try:
            missing = batch.rows - connection.execute(added).rowcount
        except IntegrityError as error:
            if not isinstance(error.orig, UniqueViolation) or not _is_key(error.orig.diag.constraint_name or ""):
                raise
            raise _not_appended(spec, state, batch, f"one is there already: {error.orig.diag.message_detail}") from error
        if missing:
            raise _not_appended(spec, state, batch, f"a trigger or a rule keeps {missing} out.")


def _is_key(constraint: str) -> bool:
    """Return whether a constraint is the key that Tidegate has made, of a table or of one of its partitions."""
    return constraint.startswith("pk_") or constraint.endswith("pkey")


def _not_appended(spec: PipelineSpec, state: StateSpec, batch: StagedBatch, why: str) -> GuardMismatch:
    return GuardMismatch(
        f"{spec.name}: the {batch.rows} rows of {batch.stage.name} cannot be appended to state.{state.name}: {why} There is "
        "another writer. Nothing was committed; restore the table, or find its other writer."
    )


def _recorded(state: StateSpec, upsert: Insert) -> sa.Select[int]:
    """Return an upsert that also records the rows that it writes in the table of changes, as a query for their number.

    A version that is older than the kept one only stamps its row: of rows that are kept whole, those with a difference are
    recorded.
    """
    target = state_tables.state_table_of(state)
    assert state.stream is not None
    names = [column.name for column in state.stream[1]]
    written = upsert.returning(*(target.c[name] for name in names)).cte("written")
    changed = sa.select(*(written.c[name] for name in names))
    if keeps_whole_rows(state):
        differs = (written.c[value.name].is_distinct_from(written.c[previous_name(value.name)]) for value in state.values)
        changed = changed.where(sa.or_(written.c[PREVIOUS_TXID].is_(None), *differs))
    recorded = insert(state_tables.changes_table_of(state)).from_select(names, changed).cte("recorded")
    return sa.select(sa.func.count()).select_from(written).add_cte(recorded)


def restore(connection: Connection, state: StateSpec, txid: int) -> None:
    """Undo what a txid did to an opaque state: rows get their previous values; new and appended rows are deleted.

    This reads the whole table, as an index on txid would make every update slower.

    Raises: SchemaOutOfDate if a partition is missing: what the txid did there would stay.
    """
    table = state_tables.state_table_of(state)
    connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1))  # locks the table, so none is detached any more
    partitions.check_whole(connection, table.name)
    if state.appends:
        connection.execute(sa.delete(table).where(table.c.txid == txid))
        return
    if state.records:
        records = state_tables.changes_table_of(state)
        connection.execute(sa.delete(records).where(records.c.txid == txid))
        partitions.check_whole(connection, records.name)
    if state.window:
        event_windows.take_back(connection, state, txid)
    connection.execute(sa.delete(table).where(table.c.txid == txid, table.c[PREVIOUS_TXID].is_(None)))
    before: dict[str, Any] = {value.name: table.c[previous_name(value.name)] for value in state.values}
    unknown = dict.fromkeys([*map(previous_name, before), PREVIOUS_TXID])  # values from before these are not kept
    connection.execute(sa.update(table).where(table.c.txid == txid).values(before | {"txid": table.c[PREVIOUS_TXID]} | unknown))


def try_merge(connection: Connection, state: StateSpec, kept: TextRow | None, partial: TextRow) -> TextRow:
    """Return the values after a merge of a partial into a row, or into none; all are Postgres' text. For tests of aggregates.

    Raises: the errors of a merge, such as Overflow.
    """
    columns = state_tables.state_table_of(state).c

    def row(values: TextRow, name: str) -> sa.Subquery:
        given = (sa.cast(sa.literal(values[v.name], sa.Text), columns[v.name].type).label(v.name) for v in state.values)
        return sa.select(*given).subquery(name)

    before, new = row(kept or partial, "kept"), row(partial, "partial")
    merged = {v.name: merge_expressions.merged(v, before.c, new.c) if kept else new.c[v.name] for v in state.values}
    texts = (sa.cast(sa.cast(value, columns[name].type), sa.Text).label(name) for name, value in merged.items())
    joined = sa.select(*texts).select_from(before.join(new, sa.true()))
    return dict(connection.execute(joined).mappings().one())


def _staged(connection: Connection, spec: PipelineSpec, state: StateSpec, batches: Sequence[LockedBatch]) -> list[StagedBatch]:
    """Recount and return the sealed rows of each batch: the state's columns and, if its rows carry it, the txid."""
    recounted = _recount(connection, spec, state, batches)
    return [_rows_of(state, batch, sealed) for batch, sealed in zip(batches, recounted, strict=True)]


def _recount(
    connection: Connection, spec: PipelineSpec, staged: Staged, batches: Sequence[LockedBatch]
) -> list[list[StagedPartition]]:
    return staging_tables.recount(connection, spec.name, staged, [(batch.txid, batch.attempt) for batch in batches])


def _rows_of(state: StateSpec, batch: LockedBatch, sealed: Sequence[StagedPartition]) -> StagedBatch:
    stage = state_tables.staging_table_of(state, batch.txid, batch.attempt)
    # Without the explicit cast it is an int4, which Postgres converts for each row in a separate step.
    stamp = [sa.cast(batch.txid, sa.BigInteger).label("txid")] if state.has_txid else []
    columns = [*(stage.c[column.name] for column in state.columns), *stamp]
    partials = sa.select(*columns).where(stage.c.task_attempt.in_([p.task_attempt for p in sealed]))
    return StagedBatch(stage, sum(partition.rows for partition in sealed), partials)


def _write(connection: Connection, state: StateSpec, rows: sa.Select[Any], *, first_txid: int | None = None) -> int:
    """Merge the partials of one batch, or of several from `first_txid` on; return how many rows were written.

    These are recorded if the state records its changes.
    """
    is_wide = state.has_txid and keeps_whole_rows(state) and len(state.values) > MANY_COLUMNS
    upserts = _upserts_of_whole_rows(state, rows, first_txid) if is_wide else [_upsert(state, rows, first_txid)]
    try:
        if state.changes:
            return sum(connection.scalar(_recorded(state, upsert)) or 0 for upsert in upserts)
        return sum(connection.execute(upsert).rowcount for upsert in upserts)
    except DBAPIError as error:
        if not is_too_large_row(error.orig):
            raise
        raise Overflow(
            f"A row of state {state.name} does not fit into a page of Postgres: {error.orig}".rstrip()
            + ". It has too many values, of which an opaque state keeps those before the last txid, too. Divide them among "
            "several states."
        ) from error


def _upsert(state: StateSpec, rows: sa.Select[Any], first_txid: int | None) -> Insert:
    """Return the upsert of the partials of one batch, or of several from `first_txid` on, in key order.

    For one batch, a kept row with a txid that has not committed is not changed, which the row count shows. For several, it
    makes the statement fail, and so does a sum beyond half of the limit of its type.
    """
    target, upsert = _insert(state, rows)
    new = upsert.excluded
    changes: dict[str, Any] = {v.name: merge_expressions.merged(v, target.c, new) for v in state.values}
    if first_txid is not None:
        by_name = {v.name: (v, changes[v.name], target.c[v.name]) for v in state.values}
        changes = {name: merge_expressions.near_the_limit(*merged, state.derived) for name, merged in by_name.items()}
    changes |= _previous(state, target)
    guard = None
    if state.has_txid and first_txid is None:
        changes["txid"], guard = new.txid, target.c.txid < new.txid
    elif state.has_txid:
        changes["txid"] = sa.case((target.c.txid < first_txid, new.txid))  # else NULL, which the column rejects
    return upsert.on_conflict_do_update(index_elements=_unique(state), set_=changes, where=guard)


def _upserts_of_whole_rows(state: StateSpec, rows: sa.Select[Any], first_txid: int | None) -> list[Insert]:
    """Return two upserts that together do what `_upsert` does, for a state that keeps one whole row per key, of many columns.

    `_upsert` would compare all columns again for each column. Here, the first upsert writes partials that are new or win over
    the kept row; the second only stamps the rows that the first has left. Neither changes a row whose txid has not committed.
    """
    target, upsert = _insert(state, rows)
    new, stamp = upsert.excluded, {"txid": upsert.excluded.txid, **_previous(state, target)}
    is_older = target.c.txid < (new.txid if first_txid is None else first_txid)
    is_ahead = merge_expressions.is_ahead(state.values[0], target.c, new)
    taken: dict[str, Any] = {v.name: new[v.name] for v in state.values}
    return [
        upsert.on_conflict_do_update(index_elements=_unique(state), set_=stamp | taken, where=sa.and_(is_older, is_ahead)),
        upsert.on_conflict_do_update(index_elements=_unique(state), set_=stamp, where=is_older),
    ]


def _insert(state: StateSpec, rows: sa.Select[Any]) -> tuple[Table, Insert]:
    """Return a state's table, and the insertion of rows in key order, for index locality and one order of locks."""
    target = state_tables.state_table_of(state)
    rows = rows.order_by(*(rows.selected_columns[key.name] for key in state.keys))
    return target, insert(target).from_select([*(column.name for column in rows.selected_columns)], rows)


def _unique(state: StateSpec) -> list[str]:
    return [key.name for key in state.keys] or [SNAPSHOT]


def _previous(state: StateSpec, target: Table) -> dict[str, Any]:
    if not state.keeps_previous:
        return {}
    return {previous_name(v.name): target.c[v.name] for v in state.values} | {PREVIOUS_TXID: target.c.txid}
