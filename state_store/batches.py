"""Open batches: the next txids, each with source metadata that is frozen before anything is read (CONTRACT I6)."""

import hashlib
import json
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from state_store import tables
from state_store.declaration import SourceMetadata
from state_store.errors import MetadataCorrupt, UnknownBatch

METADATA_VERSION = 1
MAX_METADATA_BYTES = 64 * 1024 * 1024  # about 400,000 files; a bytea of this size still travels in one message
MAX_TXID = 2**63 - 2


def encode_metadata(metadata: SourceMetadata) -> bytes:
    """Return the one byte string that stands for this metadata: canonical JSON in a versioned envelope."""
    envelope = {"version": METADATA_VERSION, "metadata": metadata}
    return json.dumps(envelope, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode_metadata(pipeline: str, txid: int, content: bytes, digest: bytes) -> SourceMetadata:
    """Return saved metadata after checking it against its digest; a damaged or unknown record is never guessed at (I19)."""
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
    raise MetadataCorrupt(
        f"{pipeline} {txid}: the saved source metadata {damage}. Restore tidegate.batch from a backup.",
        pipeline=pipeline,
        txid=txid,
    )


def last_opened(connection: Connection, pipeline: str) -> tuple[int, SourceMetadata | None]:
    """Return the newest txid and its metadata; 0 and None before the first batch."""
    b = tables.batch.c
    row = connection.execute(
        sa.select(b.txid, b.source_metadata, b.source_digest).where(b.pipeline == pipeline).order_by(b.txid.desc()).limit(1)
    ).one_or_none()
    return (row.txid, decode_metadata(pipeline, *row)) if row else (0, None)


def load_metadata(connection: Connection, pipeline: str, txid: int) -> SourceMetadata:
    """Return the frozen metadata of a batch.

    Raises: UnknownBatch, MetadataCorrupt.
    """
    b = tables.batch.c
    row = connection.execute(
        sa.select(b.source_metadata, b.source_digest).where(b.pipeline == pipeline, b.txid == txid)
    ).one_or_none()
    if row is None:
        raise UnknownBatch(f"{pipeline} has no txid {txid}. See: tidegate inspect {pipeline}", pipeline=pipeline, txid=txid)
    return decode_metadata(pipeline, txid, *row)


def insert_batches(connection: Connection, pipeline: str, after: int, metadata: Sequence[bytes], opened_by: str) -> bool:
    """Insert the batches that follow txid `after`; False if another planner was first with any of them.

    The primary key is the referee between planners: no check before the insert could be. The caller rolls back on False.
    """
    rows = [
        {
            "pipeline": pipeline,
            "txid": after + position,
            "source_metadata": content,
            "source_digest": hashlib.sha256(content).digest(),
            "opened_by": opened_by,
        }
        for position, content in enumerate(metadata, start=1)
    ]
    statement = insert(tables.batch).values(rows).on_conflict_do_nothing().returning(tables.batch.c.txid)
    return len(connection.execute(statement).all()) == len(rows)


def uncommitted(connection: Connection, pipeline: str, limit: int) -> list[int]:
    """Return opened txids behind the cursor in order, at most `limit`."""
    b, c = tables.batch.c, tables.cursor.c
    committed = sa.select(c.txid).where(c.pipeline == pipeline).scalar_subquery()
    statement = sa.select(b.txid).where(b.pipeline == pipeline, b.txid > committed).order_by(b.txid).limit(limit)
    return list(connection.scalars(statement))


def assign_to_run(connection: Connection, pipeline: str, run_id: str, txids: Sequence[int]) -> bool:
    """Write down which txids the run covers, and lift their halts: the run is about to try them again.

    False if the same run was planned by somebody else at the same moment; the caller rolls back.
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


def halt(connection: Connection, pipeline: str, txid: int, reason: str) -> None:
    """Say that nobody will retry this batch by itself, unless it has committed meanwhile."""
    b, c = tables.batch.c, tables.cursor.c
    committed = sa.select(c.txid).where(c.pipeline == pipeline).scalar_subquery()
    connection.execute(
        sa.update(tables.batch)
        .where(b.pipeline == pipeline, b.txid == txid, b.txid > committed)
        .values(halted_at=sa.func.now(), halted_reason=reason)
    )
