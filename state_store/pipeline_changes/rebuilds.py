"""Rebuilds: the committed batches of a pipeline computed again, for states that the code now declares otherwise.

A changed state means something else than its rows do, so these cannot be kept. A rebuild is a pipeline of its own, whose name
and states end with the declaration's version, as in `flights__v3`. Its batches are those that the pipeline has committed, with
the same txids and the same frozen metadata, and what operators skipped or replayed there is skipped or replayed here. Once both
have committed the same txid, `tidegate migrate` puts the rebuilt states in the place of the others, in one transaction under
the locks of both cursors (I24 in docs/protocol.md). Until then, readers have the states as they were.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import DeclarationChanged, TidegateError
from tidegate.state_store.commit import commit_record
from tidegate.state_store.commit.quarantined_records import MENDED, count_by_input, records_by_input, waits
from tidegate.state_store.declarations.pipeline_spec import (
    PipelineSpec,
    RebuildName,
    SourceMetadata,
    rebuilt_by,
    rebuilt_name,
    taken_over,
)
from tidegate.state_store.ledger import batches, cursors, followers, schema_revision, tables
from tidegate.state_store.ledger.batches import QUARANTINED, BatchInput, position_of
from tidegate.state_store.operate.action_record import write_action
from tidegate.state_store.pipeline_changes import registration, table_swap
from tidegate.state_store.read_ledger import registered_pipelines
from tidegate.state_store.states import range_partitions, state_tables

# Two records that are kept by their columns are the same if the columns that both have read the same, also as another type,
# and one of them has no other columns. A text of JSON with an escape by number, such as of NUL, is more than the functions of
# Postgres take: it is compared as a whole.
_SAME = sa.text("""
WITH record AS (
    SELECT *, CASE WHEN NOT is_raw AND strpos(payload, '\\u') = 0 THEN
        array(SELECT name FROM json_object_keys(CAST(payload AS json)) AS name ORDER BY name) END AS columns
    FROM tidegate.quarantine WHERE pipeline IN (:ours, :theirs) AND state IS NULL
), kept (by) AS (SELECT DISTINCT columns FROM record), part AS (
    SELECT *, CASE WHEN by IS NULL THEN ARRAY[payload] ELSE array(
        SELECT CASE json_typeof(value) WHEN 'number' THEN CAST(trim_scale(CAST(value #>> '{}' AS numeric)) AS text)
            ELSE value #>> '{}' END
        FROM json_each(CAST(payload AS json)) WHERE key = ANY (by) ORDER BY key
    ) END AS reads
    FROM record JOIN kept ON by IS NULL OR by <@ columns
), numbered AS (
    SELECT *, row_number() OVER (PARTITION BY pipeline, txid, origin, is_raw, by, reads ORDER BY number) AS nth FROM part
)
SELECT DISTINCT ON (ours.txid, ours.number) ours.txid, ours.number, ours.origin,
    theirs.mended_payload, theirs.mended_at, theirs.mended_by, theirs.mended_reason
FROM numbered AS ours JOIN numbered AS theirs USING (txid, is_raw, reads, nth)
WHERE ours.pipeline = :ours AND theirs.pipeline = :theirs AND ours.by IS NOT DISTINCT FROM theirs.by
    AND (ours.by IS NULL OR ours.by IN (ours.columns, theirs.columns))
    AND ours.origin IS NOT DISTINCT FROM theirs.origin AND ours.replayed_txid IS NULL
    AND theirs.replayed_txid IS NOT DISTINCT FROM CAST(:taken_by AS bigint)
    AND num_nulls(CAST(:taken_by AS bigint), theirs.mended_at) < 2
ORDER BY ours.txid, ours.number, cardinality(ours.by) DESC NULLS FIRST
""")


class Progress(NamedTuple):
    """The last txids that a pipeline and its rebuild have committed, and the rebuild's name."""

    rebuild: str
    committed: int
    rebuilt: int


def rebuild_of(spec: PipelineSpec) -> PipelineSpec:
    """Return the pipeline that computes a pipeline's committed batches again.

    Raises: ValueError if a name is too long to be followed by the version.
    """
    states = tuple(replace(state, name=rebuilt_name(state.name, spec.version)) for state in spec.states)
    return replace(spec, name=rebuilt_name(spec.name, spec.version), states=states, rebuilds=spec.name)


def begin(connection: Connection, spec: PipelineSpec, *, is_confirmed: bool = True) -> Progress:
    """Register the rebuild of a pipeline, with empty tables of its own, as their owner. Safe to repeat.

    Unless it `is_confirmed`, nothing is done, and this returns how far it is. Migrations of states may be missing, which
    `StateStore.connect` refuses: where they come with the changed code, they wait for the rebuild.

    Raises: DeclarationChanged if nothing has committed, or this pipeline cannot be rebuilt; SchemaOutOfDate; MetadataCorrupt.
    """
    schema_revision.check_ledger(connection)
    schema_revision.check_not_newer(connection)
    schema_revision.lock_revision(connection)
    cursors.check_in_service(connection, spec.name)
    committed = cursors.committed(connection, spec.name)
    before = registered_pipelines.spec_of_pipeline(connection, spec.name)
    if why := _why_not(connection, before, spec, committed):
        raise DeclarationChanged(f"{spec.name} cannot be rebuilt: {why}")
    registration.check_source_change(connection, before.source_identity, before.source_kind, spec)
    registration.check_new_states(connection, before, spec)
    rebuild = rebuild_of(spec)
    _check_same(connection, spec, rebuild)
    if is_confirmed:
        state_tables.metadata_of((rebuild,)).create_all(connection)
        registration.register(connection, rebuild)
        table_swap.hide(connection, spec, rebuild)
    c = tables.cursor.c
    rebuilt = connection.scalar(sa.select(c.txid).where(c.pipeline == rebuild.name)) or 0
    return Progress(rebuild.name, committed, rebuilt)


def _check_same(connection: Connection, spec: PipelineSpec, rebuild: PipelineSpec) -> None:
    """Refuse a declaration that has changed since its rebuild was begun, whose tables are of the former one."""
    p = tables.pipeline.c
    known = connection.execute(sa.select(p.fingerprint, p.declaration).where(p.pipeline == rebuild.name)).one_or_none()
    if known is None:
        return
    if not rebuilt_by(known.declaration):
        raise DeclarationChanged(
            f"{spec.name} cannot be rebuilt for version {spec.version}: there is a pipeline {rebuild.name}. Raise the version."
        )
    cursors.check_in_service(connection, rebuild.name)
    if known.fingerprint != rebuild.fingerprint:
        raise DeclarationChanged(
            f"{rebuild.name} was begun for another declaration of {spec.name}. Raise its version above {spec.version}, and "
            f'retire the former rebuild: tidegate retire {rebuild.name} --drop-states --reason "..." --yes'
        )


def _why_not(connection: Connection, before: PipelineSpec, spec: PipelineSpec, committed: int) -> str | None:
    if not committed:
        return "no batch of it has committed. Run: tidegate migrate"
    if spec.version <= before.version:
        return f"first raise its version above {before.version}, for which its committed batches are then computed again."
    if why := _why_never(connection, before, spec):
        return f"{why} Give the changed pipeline and its states new names."
    return None


def _why_never(connection: Connection, before: PipelineSpec, spec: PipelineSpec) -> str | None:
    try:
        rebuild = rebuild_of(spec)
    except ValueError as too_long:
        return f"{too_long} A rebuild adds the version to each name."
    if _kind_of_source(spec) != _kind_of_source(before):
        return "it has another kind of source, which cannot read the batches that have committed."
    for state in (*before.states, *spec.states):
        if state.updates:
            return f"{state.name} is an update of your own, whose tables Tidegate does not know."
        if (was := before.state(state.name)) is not None and (was.history is None) != (state.history is None):
            return f"state {state.name} was a history, or becomes one, which is read by a view."
    for each in (before, rebuild):
        if (count := table_swap.partition_count(connection, each)) > range_partitions.MOST_AT_ONCE:
            return f"its states have {count} partitions; a migration puts at most {range_partitions.MOST_AT_ONCE} into place."
    if any(query.pipeline == spec.name for query in spec.queries):
        return "its transform reads its own states, by their names."
    for other in followers.others(connection, spec.name):
        if read := other.read_pipelines & {spec.name, rebuild.name}:
            its = "its states" if spec.name in read else f"the states of {rebuild.name}"
            learn = "would not learn that they are others now: retire it first, if it can be spared."
            return f"{other.name} follows or reads {its}, and {learn}"
    return None


def _kind_of_source(spec: PipelineSpec) -> str:
    """Return which class of source a pipeline has: the first word of its identity."""
    return spec.source_identity.partition(" ")[0]


# The batches of a rebuild


def next_batches(connection: Connection, spec: PipelineSpec, after: int, most: int) -> list[SourceMetadata]:
    """Return the metadata of the committed batches that follow a txid of a rebuild, at most so many.

    A batch of replayed records comes alone, and not before the batches from whose quarantine it takes them have committed.

    Raises: MetadataCorrupt; SchemaOutOfDate if one of the two is not registered.
    """
    assert spec.rebuilds is not None, "only a rebuild has another pipeline's batches"
    found: list[SourceMetadata] = []
    last = min(after + most, cursors.committed(connection, spec.rebuilds))
    for txid in range(after + 1, last + 1):
        metadata = batches.existing_input(connection, spec.rebuilds, txid).metadata
        if QUARANTINED in metadata:
            if found or cursors.committed(connection, spec.name) != txid - 1:
                break
            records = count_by_input(connection, sa.select(_same_records(spec, txid).c.origin))
            by_input = {"records": records} if "records" in metadata else {}
            return [{**metadata, QUARANTINED: sum(records.values()), **by_input}]
        found.append(metadata)
    return found


def follow_decisions(connection: Connection, spec: PipelineSpec, after: BatchInput | None, metadata: Sequence[bytes]) -> bool:
    """Let batches of a rebuild that are being opened do what was decided about them: skip them, or replay records.

    Of any other pipeline, nothing was decided.

    Returns False if the last batch was redone since it was planned, or the records to replay are others: then the caller plans
    again. The pipeline's cursor is locked, so a redo comes before, or is refused.
    """
    if spec.rebuilds is None:
        return True
    c = tables.cursor.c
    connection.execute(sa.select(c.txid).where(c.pipeline == spec.rebuilds).with_for_update(read=True))
    first = (after.txid if after else 0) + 1
    last = first + len(metadata) - 1
    now = batches.existing_input(connection, spec.rebuilds, last).metadata
    if QUARANTINED not in now and batches.encode_metadata(now) != metadata[-1]:
        return False
    skipped = _skip(connection, spec, first, last)
    planned = batches.existing_input(connection, spec.name, first).metadata
    return first in skipped or QUARANTINED not in planned or _replay(connection, spec, first, planned)


def _replay(connection: Connection, spec: PipelineSpec, txid: int, planned: SourceMetadata) -> bool:
    """Let a new batch of a rebuild take up its records; return False, to be rolled back, if they are others than planned."""
    taken = connection.execute(_mended_as(spec, _same_records(spec, txid), replayed_txid=txid))
    if taken.rowcount != planned[QUARANTINED]:
        return False
    if not taken.rowcount:
        q = tables.quarantine.c
        of = sa.select(q.txid).where(q.pipeline == spec.rebuilds, q.replayed_txid == txid)
        are_left = connection.scalar(sa.select(sa.exists().where(q.pipeline == spec.name, waits(), q.txid.in_(of))))
        now = "read otherwise now; see what waits in quarantine" if are_left else "count in their own batches now"
        _give_up(connection, spec, txid, "tidegate rebuild", f"the records that it replayed {now}")
    return "records" not in planned or bool(planned["records"] == records_by_input(connection, spec.name, txid))


def _skip(connection: Connection, spec: PipelineSpec, first: int, last: int) -> set[int]:
    """Give up those new batches of a rebuild that were skipped in its pipeline; return their txids."""
    assert spec.rebuilds is not None
    skipped = commit_record.skipped(spec.rebuilds).where(tables.commit.c.txid.between(first, last))
    found = connection.execute(skipped).all()
    for txid, owner, reason in found:
        _give_up(connection, spec, txid, owner, reason)
    return {txid for txid, _, _ in found}


def _give_up(connection: Connection, spec: PipelineSpec, txid: int, owner: str, reason: str) -> None:
    """Give up a batch, with one more attempt that has failed: a commit without rows names one, too."""
    b = tables.batch.c
    given_up = (
        sa.update(tables.batch)
        .where(b.pipeline == spec.name, b.txid == txid)
        .values(attempt=b.attempt + 1, skip_owner=owner, skip_reason=reason, halted_at=None, halted_reason=None)
        .returning(b.attempt, b.source_digest, b.previous_digest)
    )
    number, digest, previous = connection.execute(given_up).one()
    now, error = sa.func.now(), f"It is not tried: {reason}"
    ended = {"started_at": now, "failed_at": now, "dropped_at": now, "error": error, "is_poison": False}
    attempt = {"pipeline": spec.name, "txid": txid, "attempt": number, "owner": owner, "fingerprint": spec.fingerprint}
    digests = {"source_digest": digest, "previous_digest": previous}
    connection.execute(sa.insert(tables.attempt).values(**attempt, **digests, **ended))


def _same_records(spec: PipelineSpec, replayed_txid: int | None) -> sa.Subquery:
    """Return the rebuild's waiting records that are those which a batch of the pipeline has replayed, with their corrections.

    Without a txid, they are those that wait there with a correction. Records are the same if they are of one txid and place
    (which begins with the input's name) and read the same; of several that do, the first is the first.
    """
    names = {"ours": spec.name, "theirs": spec.rebuilds, "taken_by": replayed_txid}
    q = tables.quarantine.c
    columns = (q[name].label(name) for name in ("txid", "number", "origin", *MENDED))
    return _SAME.bindparams(**names).columns(*(sa.column(each.name, each.type) for each in columns)).subquery("same")


def _mended_as(rebuild: PipelineSpec, same: sa.Subquery, **values: int | None) -> sa.Update:
    """Return the statement that gives records of a rebuild the corrections of the `same` ones, and these values."""
    q = tables.quarantine.c
    these = q.pipeline == rebuild.name, q.txid == same.c.txid, q.number == same.c.number
    return sa.update(tables.quarantine).where(*these).values(**values, **{name: same.c[name] for name in MENDED})


# The end of a rebuild


class Found(NamedTuple):
    """Why pipelines cannot be migrated before they have been rebuilt; and those whose rebuild is ready to take their place."""

    pending: dict[str, str]
    ready: list[PipelineSpec]


def find(connection: Connection, specs: Sequence[PipelineSpec]) -> Found:
    """Return which of these pipelines have to be rebuilt, because of their states or as it was begun, and which have been.

    The cursors of a ready one and of its rebuild are locked, so it stays ready until the transaction ends.

    Raises: MetadataCorrupt.
    """
    found = Found({}, [])
    rebuilding = begun(connection, specs)
    for spec in specs if schema_revision.has_ledger(connection) else ():
        try:
            if spec.name not in rebuilding:
                registration.check_states(connection, [spec])
            elif why := _why_not_ready(connection, spec):
                found.pending[spec.name] = why
            else:
                found.ready.append(spec)
        except TidegateError as error:
            found.pending[spec.name] = str(error)
    return found


def begun(connection: Connection, specs: Sequence[PipelineSpec]) -> set[str]:
    """Return the names of those of these pipelines of whose version a rebuild is registered, and in service."""
    if not schema_revision.has_ledger(connection):
        return set()
    known = set(schema_revision.rebuilds_in_service(connection).values())
    return {spec.name for spec in specs if RebuildName(spec.name, spec.version) in known}


def _why_not_ready(connection: Connection, spec: PipelineSpec) -> str | None:
    """Return why a pipeline's rebuild cannot take its place yet, and what to do; None if it can. Lock both cursors."""
    c, rebuild = tables.cursor.c, rebuild_of(spec)
    _check_same(connection, spec, rebuild)
    locked = sa.select(c.pipeline, c.txid).where(c.pipeline.in_((spec.name, rebuild.name))).order_by(c.pipeline)
    txids = {row.pipeline: row.txid for row in connection.execute(locked.with_for_update())}
    if txids[spec.name] != txids[rebuild.name]:
        return (
            f"{spec.name} is being rebuilt: {rebuild.name} has committed {txids[rebuild.name]} of its {txids[spec.name]} "
            f"batches. Let it go on: tidegate rebuild {spec.name} --yes"
        )
    before = registered_pipelines.spec_of_pipeline(connection, spec.name)
    registration.check_source_change(connection, before.source_identity, before.source_kind, spec)
    registration.check_new_states(connection, before, spec)
    if spec.version <= before.version:
        return f"{spec.name} is registered with version {before.version}, and its rebuild is of {spec.version}: retire that."
    if why := _why_never(connection, before, spec):  # such as a pipeline that has begun to follow it
        retire = f'tidegate retire {rebuild.name} --reason "..." --yes'
        return f"{spec.name} cannot take over its rebuild: {why} Or retire the rebuild: {retire}"
    last = txids[spec.name]
    ends = [position_of(batches.existing_input(connection, name, last).metadata) for name in (spec.name, rebuild.name)]
    if ends[0] != ends[1]:
        return (
            f"{spec.name} cannot take over its rebuild: {rebuild.name} has read the source up to another place in txid {last}, "
            "as the source has changed, and planned batches again. Give the changed pipeline and its states new names."
        )
    return None


def take_place(connection: Connection, spec: PipelineSpec) -> None:
    """Put what a rebuild has made in the place of what its pipeline had: states, declaration, quarantine; retire the rebuild.

    The caller has found it not to be pending in this transaction, and the tables of the states are empty and as declared.

    Raises: DeclarationChanged if something of the team's depends on a table that is replaced.
    """
    rebuild = rebuild_of(spec)
    both = list(zip(spec.readable, rebuild.readable, strict=True))
    for state, rebuilt in both:
        table_swap.take_place(connection, spec.name, state, rebuilt)
    registration.own(connection, spec)
    for state, rebuilt in both:
        table_swap.move_notes(connection, spec.name, state, rebuilt)
    registration.replace_declaration(connection, spec)  # divides tables by these notes
    _move_outcomes(connection, spec, rebuild)
    s, p = tables.state_table.c, tables.pipeline.c
    by, why = taken_over(spec.name)
    connection.execute(
        sa.update(tables.pipeline)
        .where(p.pipeline == rebuild.name)
        .values(retired_at=sa.func.now(), retired_by=by, retired_reason=why)
    )
    connection.execute(sa.update(tables.state_table).where(s.pipeline == rebuild.name).values(dropped_at=sa.func.now()))
    last = cursors.committed(connection, spec.name)
    write_action(connection, rebuild.name, last, "retire", by, why)


def _move_open_replays(connection: Connection, spec: PipelineSpec, rebuild: PipelineSpec) -> None:
    """Let opened batches that replay records have these of the rebuild; give up one that would have others, which wait then."""
    for batch in batches.uncommitted_inputs(connection, spec.name, batches.MAX_TXID):
        if QUARANTINED not in batch.metadata:
            continue
        same = _same_records(rebuild, batch.txid)
        records = count_by_input(connection, sa.select(same.c.origin))
        is_whole = sum(records.values()) == batch.metadata[QUARANTINED] and batch.metadata.get("records", records) == records
        connection.execute(_mended_as(rebuild, same, replayed_txid=batch.txid if is_whole else None))
        if not is_whole:
            why = f"{rebuild.name} has other records in quarantine; those that are left wait again"
            _give_up(connection, spec, batch.txid, "tidegate migrate", why)


def _move_outcomes(connection: Connection, spec: PipelineSpec, rebuild: PipelineSpec) -> None:
    """Give a pipeline the quarantine of its rebuild, and what that has found of each batch: rows, checks, whether skipped.

    What the rebuild has not set aside counts now, and is not to be replayed.
    """
    q, k, c = tables.quarantine.c, tables.commit.c, tables.check_result.c
    connection.execute(sa.select(q.number).where(q.pipeline == spec.name).with_for_update())  # mends and replays wait
    _move_open_replays(connection, spec, rebuild)
    connection.execute(_mended_as(rebuild, _same_records(rebuild, None)))
    connection.execute(sa.delete(tables.quarantine).where(q.pipeline == spec.name))
    moved = sa.update(tables.quarantine).where(q.pipeline == rebuild.name)
    connection.execute(moved.values(pipeline=spec.name))
    names = {new.name: old.name for old, new in zip(spec.states, rebuild.states, strict=True)}
    for new, old in names.items():
        of_state = sa.update(tables.quarantine).where(q.pipeline == spec.name, q.state == new)
        connection.execute(of_state.values(state=old, origin=f"state {old}"))
    connection.execute(sa.delete(tables.check_result).where(c.pipeline == spec.name))
    connection.execute(sa.update(tables.check_result).where(c.pipeline == rebuild.name).values(pipeline=spec.name))
    theirs = tables.commit.alias("theirs")
    connection.execute(
        sa.update(tables.commit)
        .where(k.pipeline == spec.name, theirs.c.pipeline == rebuild.name, theirs.c.txid == k.txid)
        .values({name: theirs.c[name] for name in ("key_count", "quarantined_rows", "skipped_reason")})
    )
