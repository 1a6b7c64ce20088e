"""When a committed txid cannot be redone: what has read its effect may have counted it."""

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import RangeRefused, UsageError
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.ledger import schema_revision, tables
from tidegate.state_store.ledger.batches import QUARANTINED, BatchInput
from tidegate.state_store.ledger.followers import followers


def check_redoable(spec: PipelineSpec, txid: int, committed_txid: int) -> None:
    """Refuse to redo any but the last committed txid, or states that keep no previous values.

    Raises: RangeRefused.
    """
    if txid != committed_txid:
        raise RangeRefused(f"{spec.name}: {committed_txid} is the last committed txid, and only that one can be redone.")
    if fixed := [state.name for state in spec.states if state.kind != "opaque"]:
        raise RangeRefused(
            f"{spec.name} {txid} cannot be redone: state {fixed[0]} is not opaque, so it does not know what it was before."
        )


def check_not_followed(connection: Connection, spec: PipelineSpec, txid: int, without: Collection[str] = ()) -> None:
    """Refuse to redo a txid if a pipeline that follows a state, and is not in `without`, may have counted its changes.

    Those in `without` are refused if they are run again after they have counted them (`tidegate.jobs.sources.changes`). Without
    the lock of the cursor, this is a hint.

    Raises: RangeRefused; UsageError if one of `without` follows no state.
    """
    found = [
        (each.pipeline, state.name)
        for state in spec.states
        if state.stream
        for each in followers(connection, spec.name, state.name)
    ]
    if unknown := sorted(set(without) - {name for name, _ in found}):
        raise UsageError(f"Pipeline {unknown[0]} follows no state of {spec.name}.")
    for name, state in ((name, state) for name, state in sorted(found) if name not in without):
        raise RangeRefused(
            f"{spec.name} {txid} cannot be redone: pipeline {name} follows its state {state}, and may have "
            "counted what would be taken back. Correct it by a later batch; or, if that pipeline is not run any more, add "
            f"--without {name}."
        )


def check_not_rebuilt(connection: Connection, spec: PipelineSpec, txid: int) -> None:
    """Refuse to redo a batch that a rebuild has, under the cursor's lock, for which the rebuild waits when it opens the batch.

    Raises: RangeRefused.
    """
    b = tables.batch.c
    names = [name for name, rebuild in schema_revision.rebuilds_in_service(connection).items() if rebuild.pipeline == spec.name]
    rebuild = connection.scalar(sa.select(b.pipeline).where(b.pipeline.in_(names), b.txid == txid).limit(1))
    if rebuild is not None:
        raise RangeRefused(
            f"{spec.name} {txid} cannot be redone: {rebuild} computes it again, and may have read what would be taken back. "
            "First let it take its pipeline's place (tidegate migrate), or retire it "
            f'(tidegate retire {rebuild} --reason "..." --yes).'
        )


def check_not_read(connection: Connection, spec: PipelineSpec, txid: int) -> None:
    """Refuse to redo a locked batch if the next one may have read the states as this one left them.

    Such a batch locks the one before it when it begins, so none begins during a redo.

    Raises: RangeRefused.
    """
    b, a = tables.batch.c, tables.attempt.c
    following = sa.and_(b.pipeline == spec.name, b.txid == txid + 1)
    has_begun = sa.exists().where(following, tables.same_attempt(tables.attempt, tables.batch), a.failed_at.is_(None))
    if spec.awaits_previous and connection.scalar(sa.select(has_begun)):
        raise RangeRefused(
            f"{spec.name} {txid} cannot be redone: txid {txid + 1} has begun, and reads states that would be taken back. "
            "Correct it by a later batch."
        )


def check_has_records(connection: Connection, pipeline: str, batch: BatchInput) -> None:
    """Refuse to redo a replay whose records wait again, as it was skipped, or count in other batches since a rebuild.

    Raises: RangeRefused.
    """
    q = tables.quarantine.c
    taken = sa.select(sa.func.count()).where(q.pipeline == pipeline, q.replayed_txid == batch.txid)
    planned = batch.metadata.get(QUARANTINED, 0)
    if planned and (left := connection.scalar(taken)) != planned:
        raise RangeRefused(
            f"{pipeline} {batch.txid} cannot be redone: of the {planned} records that it took out of quarantine it still has "
            f"{left}, as it was skipped, or {pipeline} was rebuilt. Let another batch take up those that wait: tidegate "
            f'quarantine replay {pipeline} --reason "..."'
        )
