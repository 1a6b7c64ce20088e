"""The facts that a commit rests on, read by one statement after its locks are held; `verdicts` decides from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY

from tidegate.state_store.ledger import batches, cursors, tables
from tidegate.state_store.ledger.batches import BatchInput, InputRow
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.ledger.cursors import Cursor, DatabaseFacts
from tidegate.state_store.seal import attempts
from tidegate.state_store.seal.attempts import AttemptRow, LockedBatch
from tidegate.state_store.states import table_identity
from tidegate.state_store.states.table_identity import StrangeTable


class Registered(NamedTuple):
    """As what a pipeline is registered: its declaration's fingerprint, its states, the first table that is not as they are."""

    fingerprint: str | None
    tables: Sequence[str]
    strange: StrangeTable | None


@dataclass(frozen=True)
class BatchFacts:
    """What the ledger has of a locked batch: its newest attempt, if any, how many rows that has sealed, and its input."""

    locked: LockedBatch
    row: InputRow
    newest: AttemptRow | None
    sealed_rows: int

    @cached_property
    def input(self) -> BatchInput:
        """The current metadata.

        Raises: MetadataCorrupt.
        """
        return batches.checked_input(self.locked.pipeline, self.row)


@dataclass(frozen=True)
class CommitFacts:
    """What a commit rests on: the locked cursor, its database, the pipeline, its last commit, the locked batches by txid."""

    cursor: Cursor
    database: DatabaseFacts
    registered: Registered
    last_commit: int
    batches: Mapping[int, BatchFacts]


def _registered() -> list[sa.ColumnElement[Any]]:
    p, s, pipeline = tables.pipeline.c, tables.state_table.c, sa.bindparam("pipeline", type_=sa.Text)
    return [
        sa.select(p.fingerprint).where(p.pipeline == pipeline).scalar_subquery(),
        sa.func.array(sa.select(s.state).where(s.pipeline == pipeline).scalar_subquery(), type_=ARRAY(sa.Text)),
        table_identity.strange_table(),
    ]


def _facts() -> sa.Select[Any]:
    p, b, k = tables.pipeline.c, tables.batch.c, tables.commit.alias("any_commit").c
    pipeline = sa.bindparam("pipeline", type_=sa.Text)
    last_commit = sa.select(sa.func.coalesce(sa.func.max(k.txid), 0)).where(k.pipeline == pipeline).scalar_subquery()
    current = batches.with_current_attempt(tables.batch, tables.commit, tables.attempt)
    requested = sa.and_(b.pipeline == p.pipeline, b.txid == sa.any_(sa.bindparam("txids", type_=ARRAY(sa.BigInteger))))
    of_batch = [*batches.input_columns(), *attempts.attempt_columns(), attempts.sealed_rows()]
    return (
        sa.select(*cursors.database_facts(), *_registered(), last_commit, *of_batch)
        .select_from(sa.outerjoin(tables.pipeline, current, requested))
        .where(p.pipeline == pipeline)
    )


_REGISTERED, _FACTS = sa.select(*_registered()), _facts()


def read_registered(connection: Connection, pipeline: str) -> Registered:
    """Return as what a pipeline is registered; without a fingerprint if it is not."""
    return _as_registered(connection.execute(_REGISTERED, {"pipeline": pipeline, "pipelines": [pipeline]}).one())


def lock_and_read(connection: Connection, pipeline: str, txid: int, witness: Witness) -> CommitFacts:
    """Lock a pipeline's cursor, and the batch of a txid that has not committed; return what its commit rests on.

    Whether the pipeline is in service is the caller's to check. An unknown batch is not among the facts.

    Raises: what `cursors.lock_cursor` raises, but for PipelineRetired.
    """
    cursor = cursors.lock(connection, pipeline)
    locked = attempts.lock_known(connection, pipeline, txid) if txid > cursor.txid else None
    return read(connection, cursor, witness, [locked] if locked else [])


def read(connection: Connection, cursor: Cursor, witness: Witness, locked: Sequence[LockedBatch]) -> CommitFacts:
    """Return what a commit of these batches rests on; cursor and batches are locked, so nothing of it changes until it ends.

    Raises: as `lock_and_read`: the database has to be the one in which the cursor was made, and no older copy (I9).
    """
    mark = witness.mark_of(cursor.pipeline, str(cursor.history))
    known = {"pipelines": [cursor.pipeline], "txids": [batch.txid for batch in locked]}
    rows = connection.execute(_FACTS, cursors.parameters(cursor.pipeline, mark) | known).all()
    of_database, registered, (last_commit, *_) = _split(rows[0], len(DatabaseFacts._fields), len(Registered._fields))
    database = DatabaseFacts(*of_database)
    cursors.check_database(cursor, database, mark, witness)
    of_batches = {row[0]: row for row in (row[_BEFORE:] for row in rows) if row[0] is not None}
    return CommitFacts(
        cursor,
        database,
        _as_registered(registered),
        last_commit,
        {batch.txid: _of_batch(batch, of_batches[batch.txid]) for batch in locked},
    )


_BEFORE = len(DatabaseFacts._fields) + len(Registered._fields) + 1  # columns of a row before those of a batch


def _of_batch(batch: LockedBatch, row: Sequence[Any]) -> BatchFacts:
    of_input, of_attempt, (rows,) = _split(row, len(InputRow._fields), len(AttemptRow._fields))
    newest = AttemptRow(*of_attempt)
    return BatchFacts(batch, InputRow(*of_input), None if newest.owner is None else newest, int(rows))


def _as_registered(row: Sequence[Any]) -> Registered:
    fingerprint, owned, strange = row
    return Registered(fingerprint, owned, StrangeTable(**strange) if strange is not None else None)


def _split(row: Sequence[Any], first: int, second: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    return row[:first], row[first : first + second], row[first + second :]
