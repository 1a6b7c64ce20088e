"""Operators' actions: pause, resume, retry, skip, redo, replay, accept a loss; what each does, and when it is refused.

Each is recorded in ``operator_action``, with owner and reason, in the same transaction.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.attempt import attempts
from tidegate.state_store.attempt.attempts import LockedBatch
from tidegate.state_store.base.errors import PipelinePaused, RangeRefused, Unprocessed
from tidegate.state_store.commit import commit_facts, commit_record, merge_into_states, quarantined_records, verdicts
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.commit.merge_into_states import Merged
from tidegate.state_store.connections.local_settings import set_local
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, SourceMetadata, parts_of, references_of
from tidegate.state_store.ledger import batches, counted_files, cursors, plan_outcomes, schema_revision, stopped_batches, tables
from tidegate.state_store.ledger.batches import QUARANTINED, encode_metadata, position_of
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.operate.action_record import write_action
from tidegate.state_store.operate.redo_refusals import check_not_followed, check_not_read, check_not_rebuilt, check_redoable
from tidegate.state_store.states import state_tables, table_identity, table_shape


def pause(connection: Connection, pipeline: str, owner: str, reason: str) -> bool:
    """Let no run and no batch of the pipeline begin; return False if it was paused already."""
    return _set_paused(connection, pipeline, "pause", owner, reason)


def resume(connection: Connection, pipeline: str, owner: str, reason: str) -> bool:
    """Let runs and batches of the pipeline begin again; return False if it was not paused."""
    return _set_paused(connection, pipeline, "resume", owner, reason)


def _set_paused(connection: Connection, pipeline: str, action: Literal["pause", "resume"], owner: str, reason: str) -> bool:
    cursors.check_in_service(connection, pipeline)
    p = tables.pipeline.c
    paused = {"paused_at": sa.func.now(), "paused_by": owner, "paused_reason": reason}
    change = sa.update(tables.pipeline).where(p.pipeline == pipeline)
    if action == "pause":
        change = change.where(p.paused_at.is_(None)).values(paused)
    else:
        change = change.where(p.paused_at.is_not(None)).values(dict.fromkeys(paused))
    changed = connection.execute(change).rowcount
    if changed:
        write_action(connection, pipeline, None, action, owner, reason)
    return bool(changed)


def check_not_paused(connection: Connection, pipeline: str) -> None:
    """Refuse a pipeline that is paused.

    Raises: PipelinePaused; SchemaOutOfDate if it is not registered; PipelineRetired.
    """
    p = tables.pipeline.c
    paused = sa.select(p.paused_at, p.paused_by, p.paused_reason, *cursors.RETIRED).where(p.pipeline == pipeline)
    if (row := connection.execute(paused).one_or_none()) is None:
        raise cursors.unregistered(connection, pipeline)
    cursors.check_not_retired(pipeline, cursors.Retired(*row[3:]))
    if row.paused_at is not None:
        raise PipelinePaused(
            f"{pipeline} was paused by {row.paused_by} on {row.paused_at:%Y-%m-%d %H:%M} UTC: "
            f"{(row.paused_reason or '').rstrip('.')}. "
            f"Go on with: tidegate resume {pipeline}"
        )


def retry(connection: Connection, pipeline: str, txid: int | None, owner: str, reason: str) -> list[int]:
    """Let a batch be tried again, or without a txid all that were halted or given up; return the txids.

    Committed batches are left out, and those of a rebuild that its pipeline has skipped (I24). Repeating the call changes
    nothing but the record.

    Raises: SchemaOutOfDate if the pipeline is not registered, PipelineRetired; RangeRefused if its pipeline has skipped it.
    """
    cursors.check_in_service(connection, pipeline)
    rebuild = schema_revision.rebuilds_in_service(connection).get(pipeline)
    skipped = connection.scalars(commit_record.skipped(rebuild.pipeline)).all() if rebuild else ()
    if rebuild and txid in skipped:
        raise RangeRefused(
            f"{pipeline} {txid} is skipped as {rebuild.pipeline} has skipped it: a rebuild has the same batches."
        )
    reopened = stopped_batches.reopen(connection, pipeline, txid, skipped)
    for each in reopened:
        write_action(connection, pipeline, each, "retry", owner, reason)
    return reopened


@dataclass(frozen=True)
class Redo:
    """A request for a redo: by which operator, and why.

    `awaits_ack` is whether the source has to learn of the redo, as of a commit. `without` names pipelines that follow a state,
    may have counted what is taken back, and are not run any more.
    """

    owner: str
    reason: str
    awaits_ack: bool = True
    without: Collection[str] = ()


def redo(connection: Connection, witness: Witness, spec: PipelineSpec, txid: int, request: Redo) -> Commit:
    """Replace the effect of the last committed txid by what its newest attempt has sealed (I13).

    Keys that the new attempt lacks go back to their previous values, or disappear. Only the tables' owner may do so.

    Raises: RangeRefused if it is not the last committed txid, a state is not opaque, is followed or was read, or a later batch
    has taken up its bad records; Unprocessed without a newer attempt than the committed one; what a commit raises.
    """
    facts = commit_facts.lock_and_read(connection, spec.name, witness, txid)
    # So that a policy that hides rows even from the owner is an error: what the txid did to these rows would stay.
    set_local(connection, {"row_security": "off"})
    verdicts.check_in_order(facts)
    check_redoable(spec, txid, facts.cursor.txid)
    check_not_followed(connection, spec, txid, request.without)
    check_not_rebuilt(connection, spec, txid)
    batch = attempts.lock_batch(connection, spec.name, txid)
    check_not_read(connection, spec, txid)
    if batch.attempt == facts.cursor.attempt:
        raise Unprocessed(f"{spec.name} {txid} has no newer attempt than the committed one.")
    verdicts.check_sealed(spec, batch, attempts.newest(connection, batch), attempt_timeout_seconds=0)
    verdicts.check_declaration(spec, facts.registered)
    mended = _take_back(connection, spec, txid)
    (merged,) = merge_into_states.merge_all(connection, spec, [batch])
    quarantined_records.mend_again(connection, spec.name, txid, mended)
    _replace_commit(connection, batch, request.owner, merged)
    counted_files.write(connection, spec, [batches.existing_input(connection, spec.name, txid)])
    batches.owe_ack(connection, spec.name, txid, awaits_ack=request.awaits_ack)
    without = f" (without {', '.join(sorted(request.without))})" if request.without else ""
    write_action(connection, spec.name, txid, "redo", request.owner, f"{request.reason}{without}")
    done = commit_record.find(connection, spec.name, txid)
    assert done is not None
    return replace(done, already_committed=False)


def _take_back(connection: Connection, spec: PipelineSpec, txid: int) -> list[sa.Row[Any]]:
    """Undo what the commit of a txid has done; return what was mended of what it had set aside."""
    for state in spec.states:
        merge_into_states.restore(connection, state, txid)
    mended = quarantined_records.clear(connection, spec.name, txid)
    c = tables.check_result.c
    connection.execute(sa.delete(tables.check_result).where(c.pipeline == spec.name, c.txid == txid))
    counted_files.take_back(connection, spec.name, txid)
    return mended


def _replace_commit(connection: Connection, batch: LockedBatch, owner: str, merged: Merged) -> None:
    """Make the newest attempt the committed one, whose input later batches have to continue."""
    k, a, c = tables.commit.c, tables.attempt.c, tables.cursor.c
    of_attempt = (a.pipeline == batch.pipeline, a.txid == batch.txid, a.attempt == batch.attempt)
    counts = {"attempt": batch.attempt, "source_digest": sa.select(a.source_digest).where(*of_attempt).scalar_subquery()}
    wrote = {"key_count": merged.keys, "quarantined_rows": merged.quarantined_rows, "skipped_reason": None}
    of_batch = (k.pipeline == batch.pipeline, k.txid == batch.txid)
    connection.execute(sa.update(tables.commit).where(*of_batch).values(**counts, **wrote, owner=owner))
    connection.execute(sa.update(tables.cursor).where(c.pipeline == batch.pipeline).values(counts))


def skip(connection: Connection, witness: Witness, spec: PipelineSpec, txid: int, owner: str, reason: str) -> Commit | None:
    """Give up a failed batch: a commit without rows takes its place.

    Returns that commit, also if the batch was skipped or has committed before; or None if it follows when the batch's turn
    comes.

    Raises: RangeRefused if the batch has not failed; Unprocessed if its source has to plan it again, so that it is not known
    yet what would be skipped; SourceChanged, MetadataCorrupt, UnknownBatch; what a commit raises.
    """
    facts = commit_facts.lock_and_read(connection, spec.name, witness, txid)
    if txid <= facts.cursor.txid:
        return commit_record.already_committed(connection, spec.name, txid, facts.cursor.txid)
    verdicts.check_in_order(facts)
    if (batch := facts.batches.get(txid)) is None:
        raise batches.unknown_batch(spec.name, txid)
    locked, attempt = batch.locked, batch.newest
    if attempt is None or (attempt.failed_at is None and locked.halted_at is None and locked.skip_reason is None):
        raise RangeRefused(
            f"{spec.name} {txid} has not failed, so it is not skipped. See: tidegate inspect {spec.name} --txid {txid}"
        )
    is_new = stopped_batches.give_up(connection, spec.name, txid, owner, reason)
    is_its_turn = txid == facts.cursor.txid + 1
    if is_new or is_its_turn:  # a repeated action changes nothing
        write_action(connection, spec.name, txid, "skip", owner, reason)
    if not is_its_turn:
        return None
    verdicts.check_continues(spec, batch.input, facts.cursor)
    return commit_record.skip(connection, spec, batch, owner, reason)


def replay_quarantined(
    connection: Connection, spec: PipelineSpec, owner: str, reason: str, txid: int | None, beside: SourceMetadata
) -> tuple[int, int] | Literal[False] | None:
    """Open a batch of the records that wait in quarantine; return its txid and their number, or None if there are none.

    `beside` is frozen with them: what they are joined with. Of several inputs, the number of each one's records is, too.

    Returns False if another planner took the txid first: then the caller rolls back.

    Raises: MetadataCorrupt; RangeRefused if a record's input is not declared, the version of a reference is not given, or the
    pipeline is a rebuild.
    """
    pipeline = spec.name
    if spec.rebuilds is not None:
        raise RangeRefused(
            f"{pipeline} has the batches of {spec.rebuilds} and no others, so it replays what that has replayed. When it has "
            f'taken its place, run: tidegate quarantine replay {spec.rebuilds} --reason "..."'
        )
    after = batches.last_opened(connection, pipeline)
    if after is None:
        return None
    new_txid = after.txid + 1
    taken = quarantined_records.take_up(connection, pipeline, txid, new_txid)
    if not taken:
        return None
    metadata = {QUARANTINED: taken, "source": position_of(after.metadata), **beside}
    declared = parts_of(spec.source_identity)
    if "" not in declared:
        records = quarantined_records.records_by_input(connection, pipeline, new_txid)
        metadata = {"references": {}, **metadata, "records": records}
        _check_replayable(spec, declared, metadata)
    if not batches.insert_batches(connection, pipeline, after, [encode_metadata(metadata)], owner, awaits_ack=False):
        return False
    write_action(connection, pipeline, new_txid, "replay", owner, reason)
    return new_txid, taken


def _check_replayable(spec: PipelineSpec, declared: Collection[str], metadata: SourceMetadata) -> None:
    """Refuse to take up records whose input, or the version of what they are joined with, is missing."""
    if gone := sorted(metadata["records"].keys() - set(declared)):
        raise RangeRefused(
            f"{spec.name}: records of input {gone[0]} wait in quarantine, and the pipeline does not declare it any more. "
            "Declare it again, or take up the records of other txids: --txid."
        )
    if missing := [name for name in references_of(spec.source_identity) if name not in metadata["references"]]:
        raise RangeRefused(
            f"{spec.name}: a replay is joined with reference {missing[0]}, whose version has to be read for it. Type the "
            f'command: tidegate quarantine replay {spec.name} --reason "..."'
        )


def accept_table(connection: Connection, state: str, owner: str) -> str:
    """Let a state's table count as it is, though it is declared otherwise; return what is accepted, which the ledger records.

    Raises: as `table_shape.accept`.
    """
    pipeline, differences = table_shape.accept(connection, state)
    outcome = f"table {state_tables.STATE}.{state} is taken as it is: {'; '.join(map(str, differences))}"
    write_action(connection, pipeline, None, "accept", owner, outcome)
    return outcome


def accept_epoch(connection: Connection, witness: Witness, owner: str) -> dict[str, str]:
    """Let pipelines go on that are halted in a restored, promoted, copied or older database, or with another table of a state.

    Retired ones are left out.

    Returns what each gives up, which the ledger records too. Each begins a new history of commits, of which the witness (files
    outside Postgres that mark commits) has no mark yet.
    """
    epoch = cursors.current_epoch(connection)
    c, p = tables.cursor.c, tables.pipeline.c
    accepted = {}
    in_service = sa.select(*cursors.CURSOR).join(tables.pipeline, p.pipeline == c.pipeline).where(tables.IN_SERVICE)
    locked = connection.execute(in_service.order_by(c.pipeline).with_for_update(of=tables.cursor)).all()
    for cursor in map(cursors.Cursor._make, locked):
        lost = cursors.describe_loss(connection, cursor, witness)
        others = table_identity.replaced(connection, [cursor.pipeline]).get(cursor.pipeline)
        if lost is None and not others and cursor.epoch == str(epoch):
            continue
        outcome = f"goes on after txid {cursor.txid}; given up: {lost or 'nothing that the witness here knows of'}"
        if others and cursor.epoch == str(epoch):  # in another database, all of them are others
            outcome += f"; taken as they are: {', '.join(others)}"
        table_identity.note(connection, cursor.pipeline, again=True)
        connection.execute(
            sa.update(tables.cursor)
            .where(c.pipeline == cursor.pipeline)
            .values(epoch=str(epoch), history=sa.func.gen_random_uuid())
        )
        plan_outcomes.forget_failures(connection, cursor.pipeline)
        write_action(connection, cursor.pipeline, cursor.txid, "accept", owner, outcome)
        accepted[cursor.pipeline] = outcome
    return accepted
