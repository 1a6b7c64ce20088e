"""The ordered commit of one or more batches in one transaction: lock the cursor, check, merge, advance.

No function here opens or ends a transaction: their callers in `StateStore` do. If the process dies at any statement, Postgres
rolls all of them back; if it dies after COMMIT was sent, the cursor's row shows the outcome. Numbers such as I10 are rules of
docs/protocol.md.
"""

from collections.abc import Sequence

from sqlalchemy import Connection

from tidegate.state_store.attempt import attempts
from tidegate.state_store.commit import commit_facts, commit_record, merge_into_states, verdicts
from tidegate.state_store.commit.commit_facts import BatchFacts
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.ledger import counted_files, cursors
from tidegate.state_store.ledger.commit_witness import Witness

# The most batches that one transaction merges: enough for most of the gain in speed, few enough to repeat if it fails.
MAX_BATCHES_TOGETHER = 100


def commit_batch(
    connection: Connection, spec: PipelineSpec, txid: int, owner: str, attempt_timeout_seconds: int, witness: Witness
) -> Commit:
    """Commit a batch under the cursor's lock, or skip it if it was given up. A batch commits once: then its commit is returned.

    Runs in the caller's transaction, which must roll back after any error: then nothing of the batch is visible. The numbers
    are those of the rules in docs/protocol.md.

    Raises: CommitOutOfOrder before its turn; AttemptNotSealed, Unprocessed if it must be processed first, or again;
    SourceChanged, MetadataCorrupt, UnknownBatch by its metadata; DeclarationChanged, DeclarationInvalid by its code;
    CheckFailed by an author's check; GuardMismatch if a row was not merged; what `commit_facts.read` raises; the
    driver's errors.
    """
    facts = commit_facts.lock_and_read(connection, spec.name, witness, txid)
    if txid <= facts.cursor.txid:
        return commit_record.already_committed(connection, spec.name, txid, facts.cursor.txid)  # I8
    batch = verdicts.may_commit(facts, spec, txid, attempt_timeout_seconds)
    if batch.locked.skip_reason is not None:
        assert batch.locked.skip_owner is not None, "the table holds both or none"
        return commit_record.skip(connection, spec, batch, batch.locked.skip_owner, batch.locked.skip_reason)
    return _merge(connection, spec, [batch], owner)[0]


def commit_ready(
    connection: Connection,
    witness: Witness,
    spec: PipelineSpec,
    owner: str,
    *,
    max_batches: int = MAX_BATCHES_TOGETHER,
    wait: bool = True,
) -> list[Commit]:
    """Commit the ready batches that directly follow the cursor, in order, as if each were committed alone.

    A sealed batch is ready if it passes the checks of `commit_batch` and is neither halted nor given up; the first that is not
    ends the sequence. A batch of more than MAX_ROWS_TOGETHER rows, or of a pipeline that `commits_alone`, is merged by itself.

    The states between them are never visible. Without `wait`, it is an error if another process is committing: that process
    will look for further batches. If the connection breaks, the next commit finds out the outcome.

    Raises: as `commit_batch`. Then nothing was committed; committing one by one shows which batch is at fault.
    """
    cursor = cursors.lock(connection, spec.name, wait=wait)
    locked = attempts.lock_sealed(connection, spec.name, cursor.txid, 1 if spec.commits_alone else max_batches)
    facts = commit_facts.read(connection, spec.name, cursor.history, witness, [batch.txid for batch in locked])
    together = verdicts.ready(facts, spec)
    return _merge(connection, spec, together, owner) if together else []


def _merge(connection: Connection, spec: PipelineSpec, together: Sequence[BatchFacts], owner: str) -> list[Commit]:
    counted_files.write(connection, spec, [batch.input for batch in together])  # refuses a file that has counted
    # All rows that were sealed (I7), and each of them (I14).
    merged = merge_into_states.merge_all(connection, spec, [batch.locked for batch in together])
    return commit_record.write(connection, list(zip(together, merged, strict=True)), owner)
