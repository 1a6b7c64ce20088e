"""Batches: opened without gaps, assigned to runs; metadata are frozen before a read (I6 in docs/protocol.md).

Each batch records the digest of the metadata that it continues. The commit compares that with the cursor's: a batch commits
only if it continues exactly what has committed, whichever batches were planned again in the meantime (I12).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.base.errors import MetadataCorrupt, RangeRefused, UnknownBatch
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, SourceMetadata
from tidegate.state_store.ledger import tables

METADATA_VERSION = 1
# Only a batch that replays quarantined records has this key in its metadata; `source` beside it repeats the source's metadata
# of the batch before.
QUARANTINED = "_quarantined"
MAX_METADATA_BYTES = 64 * 1024 * 1024  # about 400,000 files; a bytea of this size still travels in one message
MAX_TXID = 2**63 - 2


def encode_metadata(metadata: SourceMetadata) -> bytes:
    """Return metadata as canonical JSON with a version: equal metadata gives equal bytes."""
    envelope = {"version": METADATA_VERSION, "metadata": metadata}
    return json.dumps(envelope, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode_metadata(pipeline: str, txid: int, content: bytes, digest: bytes) -> SourceMetadata:
    """Return saved metadata, checked by its digest.

    Raises: MetadataCorrupt if it is damaged or of an unknown version (I19).
    """
    damage = None
    if hashlib.sha256(content).digest() != bytes(digest):
        damage = "does not match its digest"
    else:
        try:
            envelope = json.loads(bytes(content))
            version, metadata = envelope.get("version"), envelope.get("metadata")
        except (ValueError, AttributeError):
            damage = "is not a JSON object"
        else:
            if version == METADATA_VERSION and isinstance(metadata, dict):
                return metadata
            damage = f"has version {version!r}, this code reads {METADATA_VERSION}"
    raise MetadataCorrupt(f"{pipeline} {txid}: the saved source metadata {damage}. Restore tidegate.batch from a backup.")


def check_limits(pipeline: str, last: int, metadata: Sequence[bytes]) -> None:
    """Refuse new batches after the last possible txid, or with too large metadata.

    Raises: RangeRefused.
    """
    if last + len(metadata) > MAX_TXID:
        raise RangeRefused(f"{pipeline} has used up its txids.")
    for content in metadata:
        if len(content) > MAX_METADATA_BYTES:
            raise RangeRefused(
                f"{pipeline}: the metadata of one batch takes {len(content)} bytes, the limit is {MAX_METADATA_BYTES}. "
                "Make the source's batches smaller."
            )


@dataclass(frozen=True)
class BatchInput:
    """The current metadata of a batch: of the committed attempt, else of the newest one, else as planned.

    Until the batch commits, each attempt of an opaque source may choose other rows (I12). `continues` is the digest of
    the metadata that this continues.
    """

    txid: int
    metadata: SourceMetadata
    digest: bytes
    continues: bytes | None


def position_of(metadata: SourceMetadata | None) -> SourceMetadata | None:
    """Return the source's metadata as of a batch: if it replays quarantined records, that of the batch before."""
    return metadata["source"] if metadata is not None and QUARANTINED in metadata else metadata


def last_opened(connection: Connection, pipeline: str) -> BatchInput | None:
    """Return the newest batch with its current metadata; None before the first.

    Raises: MetadataCorrupt.
    """
    row = connection.execute(_inputs(pipeline).order_by(tables.batch.c.txid.desc()).limit(1)).one_or_none()
    return checked_input(pipeline, InputRow(*row)) if row else None


def uncommitted_inputs(connection: Connection, pipeline: str, before_txid: int) -> list[BatchInput]:
    """Return the inputs of the batches between the cursor and a txid, in order.

    Raises: MetadataCorrupt.
    """
    b = tables.batch.c
    statement = _inputs(pipeline).where(b.txid > cursor_txid(pipeline), b.txid < before_txid).order_by(b.txid)
    return [checked_input(pipeline, InputRow(*row)) for row in connection.execute(statement)]


def existing_input(connection: Connection, pipeline: str, txid: int) -> BatchInput:
    """Return the input of a batch.

    Raises: UnknownBatch, MetadataCorrupt.
    """
    row = connection.execute(_inputs(pipeline).where(tables.batch.c.txid == txid)).one_or_none()
    if row is None:
        raise unknown_batch(pipeline, txid)
    return checked_input(pipeline, InputRow(*row))


def unknown_batch(pipeline: str, txid: int) -> UnknownBatch:
    """Return the error for a txid that was never opened."""
    return UnknownBatch(f"{pipeline} has no txid {txid}. See: tidegate inspect {pipeline}")


def with_current_attempt(batch: sa.FromClause, commit: sa.FromClause, attempt: sa.FromClause) -> sa.Join:
    """Return batches joined with their commit, if there is one, and the committed or else newest attempt."""
    is_current = attempt.c.attempt == sa.func.coalesce(commit.c.attempt, batch.c.attempt)
    committed = sa.outerjoin(batch, commit, tables.same_batch(batch, commit))
    return committed.outerjoin(attempt, sa.and_(tables.same_batch(batch, attempt), is_current))


def _inputs(pipeline: str) -> sa.Select[Any]:
    current = with_current_attempt(tables.batch, tables.commit, tables.attempt)
    return sa.select(*input_columns()).select_from(current).where(tables.batch.c.pipeline == pipeline)


def input_columns() -> list[sa.ColumnElement[Any]]:
    """Return the columns of `InputRow`, of a statement that reads ``batch`` with its current attempt."""
    b, a = tables.batch.c, tables.attempt.c
    return [
        b.txid,
        sa.func.coalesce(a.source_metadata, b.source_metadata).label("source_metadata"),
        # The digest of the metadata selected above; `checked_input` compares that metadata with the attempt's digest, too.
        sa.case((a.source_metadata.is_(None), b.source_digest), else_=a.source_digest).label("source_digest"),
        sa.func.coalesce(a.source_digest, b.source_digest).label("attempt_digest"),
        sa.case((a.attempt.is_(None), b.previous_digest), else_=a.previous_digest).label("previous_digest"),
    ]


class InputRow(NamedTuple):
    """The current metadata of a batch as the ledger has it, not yet compared with its digests."""

    txid: int
    source_metadata: bytes
    source_digest: bytes
    attempt_digest: bytes
    previous_digest: bytes | None


def checked_input(pipeline: str, row: InputRow) -> BatchInput:
    """Return the input of a batch.

    Raises: MetadataCorrupt.
    """
    metadata = decode_metadata(pipeline, row.txid, row.source_metadata, row.source_digest)
    if bytes(row.attempt_digest) != bytes(row.source_digest):
        decode_metadata(pipeline, row.txid, row.source_metadata, row.attempt_digest)
    continues = None if row.previous_digest is None else bytes(row.previous_digest)
    return BatchInput(row.txid, metadata, bytes(row.source_digest), continues)


def in_flight(connection: Connection, pipeline: str) -> tuple[int, int]:
    """Return how many uncommitted batches have begun, and how many have not."""
    b = tables.batch.c
    begun = sa.func.count().filter(b.attempt > 0)
    counts = sa.select(begun, sa.func.count() - begun).where(b.pipeline == pipeline, b.txid > cursor_txid(pipeline))
    begun_count, not_begun = connection.execute(counts).one()
    return begun_count, not_begun


def note_window(connection: Connection, spec: PipelineSpec) -> None:
    """Record the pipeline's window and `commits_alone`, for tasks that wait for their turn."""
    p = tables.pipeline.c
    noted = {p.in_flight.name: spec.window, p.commits_alone.name: spec.commits_alone}
    differs = sa.or_(*(p[name] != value for name, value in noted.items()))
    connection.execute(sa.update(tables.pipeline).where(p.pipeline == spec.name, differs).values(noted))


def keep_declaration(connection: Connection, pipeline: str) -> None:
    """Let no migration change a pipeline's declaration until the transaction ends, as the foreign key of new batches does."""
    p = tables.pipeline.c
    connection.execute(sa.select(p.pipeline).where(p.pipeline == pipeline).with_for_update(read=True, key_share=True))


def insert_batches(
    connection: Connection,
    pipeline: str,
    after: BatchInput | None,
    metadata: Sequence[bytes],
    opened_by: str,
    *,
    awaits_ack: bool = True,
) -> bool:
    """Insert the batches that follow `after` (None: the first ones).

    Returns False if another planner, by the primary key, inserted any first: then the caller rolls back.

    Raises: RangeRefused if there is no batch `after`: txids have no gaps.
    """
    b = tables.batch.c
    if after and not connection.scalar(sa.select(sa.exists().where(b.pipeline == pipeline, b.txid == after.txid))):
        raise RangeRefused(f"{pipeline} has no txid {after.txid} for others to follow: that would leave a gap.")
    digests = [after.digest if after else None, *(hashlib.sha256(content).digest() for content in metadata)]
    rows = [
        {
            "pipeline": pipeline,
            "txid": (after.txid if after else 0) + position,
            "source_metadata": content,
            "source_digest": digests[position],
            "previous_digest": digests[position - 1],
            "opened_by": opened_by,
            "awaits_ack": awaits_ack,
        }
        for position, content in enumerate(metadata, start=1)
    ]
    statement = insert(tables.batch).values(rows).on_conflict_do_nothing().returning(tables.batch.c.txid)
    return len(connection.execute(statement).all()) == len(rows)


def uncommitted(connection: Connection, pipeline: str, limit: int) -> list[int]:
    """Return opened txids after the cursor in order, at most `limit`."""
    return list(connection.scalars(open_txids(pipeline).limit(limit)))


def open_txids(pipeline: str) -> sa.Select[Any]:
    """Return the query for the opened txids after the cursor, in order."""
    b = tables.batch.c
    return sa.select(b.txid).where(b.pipeline == pipeline, b.txid > cursor_txid(pipeline)).order_by(b.txid)


def assign_to_run(connection: Connection, pipeline: str, run_id: str, txids: Sequence[int]) -> bool:
    """Record the txids that the run covers, and lift their halts; batches that were given up stay so.

    Returns False if another process has planned the same run: then the caller rolls back.
    """
    rows = [{"pipeline": pipeline, "run_id": run_id, "position": position, "txid": txid} for position, txid in enumerate(txids)]
    covered = insert(tables.run_batch).values(rows).on_conflict_do_nothing().returning(tables.run_batch.c.position)
    if len(connection.execute(covered).all()) != len(rows):
        return False
    b = tables.batch.c
    connection.execute(
        sa.update(tables.batch)
        .where(b.pipeline == pipeline, b.txid.in_(txids), b.halted_at.is_not(None))
        .values(halted_at=None, halted_reason=None)
    )
    return True


def run_txids(connection: Connection, pipeline: str, run_id: str) -> list[int]:
    """Return the txids that a run covers, in order; empty if it has not planned yet."""
    r = tables.run_batch.c
    statement = sa.select(r.txid).where(r.pipeline == pipeline, r.run_id == run_id).order_by(r.position)
    return list(connection.scalars(statement))


def txid_at(connection: Connection, pipeline: str, run_id: str, position: int) -> int | None:
    """Return the txid at a position of a run, its Airflow map index; None if there is none."""
    r = tables.run_batch.c
    return connection.scalar(sa.select(r.txid).where(r.pipeline == pipeline, r.run_id == run_id, r.position == position))


def lock_open(connection: Connection, pipeline: str, requested: sa.ColumnElement[bool]) -> list[int]:
    """Lock uncommitted batches in txid order, as commits do, and return their txids.

    The next statement sees what has committed while this one waited; this one itself may not.
    """
    txids = open_txids(pipeline).where(requested).with_for_update(key_share=True, of=tables.batch)
    return list(connection.scalars(txids))


def owe_ack(connection: Connection, pipeline: str, txid: int, *, awaits_ack: bool) -> None:
    """Clear the ack of a batch that is redone; with `awaits_ack`, the source has to be sent another."""
    b = tables.batch.c
    owed = sa.update(tables.batch).where(b.pipeline == pipeline, b.txid == txid)
    connection.execute(owed.values(awaits_ack=awaits_ack, acked_at=None))


def note_ack(connection: Connection, pipeline: str, txid: int, attempt: int) -> None:
    """Record that the source has learned of the batch's commit, so that no task is needed for it any more.

    Nothing is changed if that is no longer the commit by this attempt: a redo's own ack is still due.
    """
    b, c = tables.batch.c, tables.commit.c
    # A statement of its own, so that the next one sees the commit of a redo that this one waits for.
    connection.execute(sa.select(b.txid).where(b.pipeline == pipeline, b.txid == txid).with_for_update(key_share=True))
    counts = sa.exists().where(c.pipeline == b.pipeline, c.txid == b.txid, c.attempt == attempt)
    connection.execute(
        sa.update(tables.batch)
        .where(b.pipeline == pipeline, b.txid == txid, counts)
        .values(awaits_ack=False, acked_at=sa.func.now())
    )


def cursor_txid(pipeline: str) -> sa.ScalarSelect[int]:
    """Return the query for the txid that has committed last."""
    return sa.select(tables.cursor.c.txid).where(tables.cursor.c.pipeline == pipeline).scalar_subquery()
