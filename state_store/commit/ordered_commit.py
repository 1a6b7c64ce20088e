"""The ordered commit of one or more batches in one transaction: lock the cursor, check, merge, advance.

No function here opens or ends a transaction: their callers in `StateStore` do. If the process dies at any statement, Postgres
rolls all of them back; if it dies after COMMIT was sent, the cursor's row shows the outcome. Numbers such as I10 are rules of
docs/protocol.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.base.errors import GuardMismatch, HoleDetected
from tidegate.state_store.commit import commit_facts, merge_into_states, quarantined_records, verdicts
from tidegate.state_store.commit.commit_facts import BatchFacts
from tidegate.state_store.commit.merge_into_states import NOTHING, Merged
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.ledger import counted_files, cursors, tables
from tidegate.state_store.ledger.batches import QUARANTINED
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.seal import attempts

# The most batches that one transaction merges: enough for most of the gain in speed, few enough to repeat if it fails.
MAX_BATCHES_TOGETHER = 100


@dataclass(frozen=True)
class Commit:
    """A committed txid: its attempt, the number of state rows written, whether it had committed before the call.

    A batch that was given up is skipped: its commit has no rows, but a reason.
    """

    pipeline: str
    txid: int
    attempt: int
    key_count: int
    committed_at: datetime
    skipped_reason: str | None
    already_committed: bool

    def __str__(self) -> str:
        outcome = "committed" if self.skipped_reason is None else "skipped"
        outcome = f"already {outcome}" if self.already_committed else outcome
        return f"{self.pipeline} {self.txid}:{self.attempt} {outcome}, {self.key_count} key{'' if self.key_count == 1 else 's'}"


def find(connection: Connection, pipeline: str, txid: int) -> Commit | None:
    """Return the commit of a txid, if it has committed."""
    c = tables.commit.c
    row = connection.execute(
        sa.select(c.pipeline, c.txid, c.attempt, c.key_count, c.committed_at, c.skipped_reason).where(
            c.pipeline == pipeline, c.txid == txid
        )
    ).one_or_none()
    return Commit(*row, already_committed=True) if row else None


def commit_batch(
    connection: Connection, spec: PipelineSpec, txid: int, owner: str, attempt_timeout_seconds: int, witness: Witness
) -> Commit:
    """Commit a batch under the cursor's lock, or skip it if it was given up. A batch commits once: then its commit is returned.

    Runs in the caller's transaction, which must roll back after any error: then nothing of the batch is visible. The numbers
    are those of the rules in docs/protocol.md.

    Raises: CommitOutOfOrder before its turn; AttemptNotSealed, Unprocessed if it must be processed first, or again;
    SourceChanged, MetadataCorrupt, UnknownBatch by its metadata; DeclarationChanged, DeclarationInvalid by its code;
    CheckFailed by an author's check; GuardMismatch if a row was not merged; what `lock_cursor` raises; the driver's errors.
    """
    facts = commit_facts.lock_and_read(connection, spec.name, txid, witness)
    if txid <= facts.cursor.txid:
        return already_committed(connection, spec.name, txid, facts.cursor.txid)  # I8
    batch = verdicts.may_commit(facts, spec, txid, attempt_timeout_seconds)
    if batch.locked.skip_reason is not None:
        assert batch.locked.skip_owner is not None, "the table holds both or none"
        return commit_skip(connection, spec, batch, batch.locked.skip_owner, batch.locked.skip_reason)
    return _merge(connection, spec, [batch], owner)[0]


def commit_skip(connection: Connection, spec: PipelineSpec, batch: BatchFacts, owner: str, reason: str) -> Commit:
    """Commit the next batch without rows, as it was given up."""
    counted_files.write(connection, spec, [batch.input])
    if QUARANTINED in batch.input.metadata:
        quarantined_records.put_back(connection, spec.name, batch.locked.txid)
    return _record(connection, [(batch, NOTHING)], owner, skipped_reason=reason)[0]


def commit_ready(
    connection: Connection, spec: PipelineSpec, owner: str, witness: Witness, *, max_batches: int, wait: bool
) -> list[Commit]:
    """Commit the ready batches that directly follow the cursor, in order, as if each were committed alone.

    A sealed batch is ready if it passes the checks of `commit_batch` and is neither halted nor given up; the first that is not
    ends the sequence. A batch of more than MAX_ROWS_TOGETHER rows, or of a pipeline that `commits_alone`, is merged by itself.

    Raises: as `commit_batch`; committing one by one then shows which batch is at fault.
    """
    cursor = cursors.lock(connection, spec.name, wait=wait)
    locked = attempts.lock_sealed(connection, spec.name, cursor.txid, 1 if spec.commits_alone else max_batches)
    facts = commit_facts.read(connection, spec.name, cursor.history, witness, [batch.txid for batch in locked])
    together = verdicts.ready(facts, spec)
    return _merge(connection, spec, together, owner) if together else []


def _merge(connection: Connection, spec: PipelineSpec, together: Sequence[BatchFacts], owner: str) -> list[Commit]:
    """Merge batches that may commit, and record their commits."""
    counted_files.write(connection, spec, [batch.input for batch in together])  # refuses a file that has counted
    # All rows that were sealed (I7), and each of them (I14).
    merged = merge_into_states.merge_all(connection, spec, [batch.locked for batch in together])
    return _record(connection, list(zip(together, merged, strict=True)), owner)


def _record(
    connection: Connection,
    committed: Sequence[tuple[BatchFacts, Merged]],
    owner: str,
    *,
    skipped_reason: str | None = None,
) -> list[Commit]:
    """Record the commits of consecutive batches, and advance the locked cursor to the last of them.

    Raises: GuardMismatch if the cursor is not at the txid before.
    """
    first, last = committed[0][0].locked, committed[-1][0]
    rows = [
        {
            "pipeline": batch.locked.pipeline,
            "txid": batch.locked.txid,
            "attempt": batch.locked.attempt,
            "source_digest": batch.input.digest,
            "owner": owner,
            "key_count": merged.keys,
            "quarantined_rows": merged.quarantined_rows,
            "skipped_reason": skipped_reason,
        }
        for batch, merged in committed
    ]
    c = tables.cursor.c
    recorded = insert(tables.commit).values(rows).returning(tables.commit.c.committed_at).cte("recorded")
    position = {"txid": last.locked.txid, "attempt": last.locked.attempt, "source_digest": last.input.digest}
    is_there = c.pipeline == first.pipeline, c.txid == first.txid - 1
    advanced = sa.update(tables.cursor).where(*is_there).values(position).returning(c.txid).cte("advanced")
    both = sa.outerjoin(recorded, advanced, sa.true())
    # One time for all: that at which the transaction began.
    committed_at, moved = connection.execute(sa.select(recorded.c.committed_at, advanced.c.txid).select_from(both)).all()[0]
    if moved is None:
        raise GuardMismatch(
            f"{first.pipeline}: the cursor left txid {first.txid - 1} while it was locked.",
            pipeline=first.pipeline,
            txid=first.txid,
        )
    return [
        Commit(
            first.pipeline,
            batch.locked.txid,
            batch.locked.attempt,
            merged.keys,
            committed_at,
            skipped_reason,
            already_committed=False,
        )
        for batch, merged in committed
    ]


def already_committed(connection: Connection, pipeline: str, txid: int, cursor_txid: int) -> Commit:
    """Return the commit of a txid that the cursor has passed.

    Raises: HoleDetected if there is none.
    """
    done = find(connection, pipeline, txid)
    if done is None:
        raise HoleDetected(
            f"{pipeline}: the cursor is at txid {cursor_txid}, but txid {txid} has no commit record. Restore tidegate.commit.",
            pipeline=pipeline,
            txid=txid,
        )
    return done
