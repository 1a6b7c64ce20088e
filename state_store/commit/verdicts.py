"""What is decided about batches that are to commit: pure functions of the facts that the ledger has, without a clock.

Numbers such as I3 are rules of docs/protocol.md.
"""

from tidegate.state_store.attempt.attempts import AttemptRow, LockedBatch
from tidegate.state_store.base.errors import (
    AttemptNotSealed,
    CommitOutOfOrder,
    DeclarationChanged,
    HoleDetected,
    MetadataCorrupt,
    Unprocessed,
)
from tidegate.state_store.commit.commit_facts import BatchFacts, CommitFacts, Registered
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.ledger.batches import BatchInput, unknown_batch
from tidegate.state_store.ledger.cursors import Cursor, check_not_retired
from tidegate.state_store.states import table_identity

MAX_ROWS_TOGETHER = 10_000_000  # staged rows of several batches in one transaction; a batch alone may have more


def may_commit(facts: CommitFacts, spec: PipelineSpec, txid: int, attempt_timeout_seconds: int) -> BatchFacts:
    """Return the batch of a txid that comes next, if it may commit: merged, or without rows if it was given up.

    Raises: CommitOutOfOrder before its turn; AttemptNotSealed, Unprocessed if it must be processed first, or again;
    PipelineRetired, HoleDetected, GuardMismatch, UnknownBatch, MetadataCorrupt, DeclarationChanged.
    """
    check_in_order(facts)
    if txid != facts.cursor.txid + 1:  # I3
        raise CommitOutOfOrder(
            f"{spec.name} cannot commit txid {txid}: {facts.cursor.txid} is the last committed. "
            f"It is retried until {txid - 1} commits; see: tidegate inspect {spec.name}"
        )
    if (batch := facts.batches.get(txid)) is None:
        raise unknown_batch(spec.name, txid)
    is_given_up, batch_input = batch.locked.skip_reason is not None, batch.input  # as it was frozen (I6)
    if not is_given_up:
        check_sealed(spec, batch.locked, batch.newest, attempt_timeout_seconds)  # the newest attempt (I4)
    check_continues(spec, batch_input, facts.cursor)  # after its predecessor's input (I12); a skip consumes rows, too
    if not is_given_up:
        check_declaration(spec, facts.registered)  # I16
    return batch


def ready(facts: CommitFacts, spec: PipelineSpec) -> list[BatchFacts]:
    """Return those of the locked batches, from the cursor on, that may be merged together; the first that may not ends them.

    Raises: PipelineRetired, HoleDetected, GuardMismatch, MetadataCorrupt, DeclarationChanged.
    """
    check_in_order(facts)
    check_declaration(spec, facts.registered)
    together: list[BatchFacts] = []
    continued, rows = _digest(facts.cursor), 0
    for batch in facts.batches.values():
        batch_input = batch.input
        try:
            check_sealed(spec, batch.locked, batch.newest, attempt_timeout_seconds=0)
        except Unprocessed:
            return together
        rows += batch.sealed_rows
        if (
            batch.locked.skip_reason is not None
            or batch.locked.halted_at is not None
            or batch.locked.txid != facts.cursor.txid + 1 + len(together)  # I3: of equal digests, any continues any
            or batch_input.continues != continued
            or (together and rows > MAX_ROWS_TOGETHER)
        ):
            return together
        together.append(batch)
        continued = batch_input.digest
    return together


def check_in_order(facts: CommitFacts) -> None:
    """Refuse a retired pipeline, and a cursor that is not at the last txid in the table of commits.

    Raises: PipelineRetired, HoleDetected.
    """
    cursor = facts.cursor
    check_not_retired(cursor.pipeline, facts.retired)
    if facts.registered.last_commit != cursor.txid:
        raise HoleDetected(
            f"{cursor.pipeline}: the cursor is at txid {cursor.txid}, but the ledger committed {facts.registered.last_commit}. "
            "Nothing is skipped or repeated until a person has restored one of the two."
        )


def check_sealed(spec: PipelineSpec, batch: LockedBatch, attempt: AttemptRow | None, attempt_timeout_seconds: int) -> None:
    """Refuse a locked batch whose newest attempt is not sealed by this declaration of the pipeline.

    Raises: AttemptNotSealed while it is processed; Unprocessed if it has to be processed again.
    """
    name = str(batch)
    if attempt is None:
        raise Unprocessed(f"{spec.name} {batch.txid} has not been processed yet. It is processed now.")
    if attempt.failed_at is not None:
        raise Unprocessed(f"{name} failed: {attempt.error} It is processed again.")
    if attempt.sealed_at is None:
        if attempt.is_silent:
            raise Unprocessed(
                f"{name} has not been heard of for {attempt.silent_seconds:.0f} s: its process ({attempt.owner}) died or is "
                "suspended. It is processed again."
            )
        if attempt.age_seconds >= attempt_timeout_seconds:
            raise Unprocessed(f"{name} has not ended within {attempt_timeout_seconds} s. It is processed again.")
        raise AttemptNotSealed(
            f"{name} is still processing ({attempt.owner}, for {attempt.age_seconds:.0f} s). The commit is retried."
        )
    if attempt.fingerprint != spec.fingerprint:
        raise Unprocessed(f"{name} was computed by another declaration of the pipeline. It is processed again.")
    if attempt.quarantined_rows and not spec.quarantines:
        raise Unprocessed(f"{name} set bad records aside; the pipeline no longer does so. It is processed again.")


def check_declaration(spec: PipelineSpec, registered: Registered) -> None:
    """Refuse a declaration that is not the registered one (I16), other tables than the pipeline owns, or others of their names.

    Raises: DeclarationChanged; HoleDetected, GuardMismatch as `table_identity.check`.
    """
    if registered.fingerprint != spec.fingerprint:
        raise DeclarationChanged(f"{spec.name}: this code's declaration is not the registered one. Run: tidegate migrate")
    if set(registered.tables) != set(spec.tables):
        raise DeclarationChanged(f"{spec.name} does not own the states it declares. Run: tidegate migrate")
    table_identity.check(registered.strange)


def check_continues(spec: PipelineSpec, batch_input: BatchInput, cursor: Cursor) -> None:
    """Refuse a batch whose metadata does not continue the last commit's: rows would be lost or repeated (I12).

    Raises: Unprocessed if the source can plan it again, else MetadataCorrupt.
    """
    if batch_input.continues == _digest(cursor):
        return
    where = f"{spec.name} {batch_input.txid} continues another batch than the one that committed as {cursor.txid}."
    if spec.source_kind == "transactional":
        raise MetadataCorrupt(f"{where} Restore tidegate.batch from a backup.")
    raise Unprocessed(f"{where} It is planned and processed again.")


def _digest(cursor: Cursor) -> bytes | None:
    return None if cursor.source_digest is None else bytes(cursor.source_digest)
