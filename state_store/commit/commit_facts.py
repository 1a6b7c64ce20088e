"""The facts on which a commit or the start of an attempt rests, read by one statement after its locks are held.

`verdicts` and `begin_attempt` decide from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY

from tidegate.state_store.attempt import attempts
from tidegate.state_store.attempt.attempts import AttemptRow, LockedBatch
from tidegate.state_store.ledger import batches, cursors, tables
from tidegate.state_store.ledger.batches import BatchInput, InputRow
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.ledger.cursors import Cursor, DatabaseFacts, Retired
from tidegate.state_store.states import table_identity
from tidegate.state_store.states.table_identity import StrangeTable


class Registered(NamedTuple):
    """A registered pipeline: its declaration's fingerprint, its window, since when it is paused, the last txid with a commit.

    `tables` are those of its states, `strange` is the first of them that is not as it was.
    """

    fingerprint: str
    window: int
    paused_at: datetime | None
    last_commit: int
    tables: Sequence[str]
    strange: StrangeTable | None


@dataclass(frozen=True)
class BatchFacts:
    """What the ledger has of a batch: its row, its input, whether it has committed, and its committed or else newest attempt.

    `newest` is None before the first attempt; `sealed_rows` are how many rows it has sealed.
    """

    locked: LockedBatch
    row: InputRow
    newest: AttemptRow | None
    is_committed: bool
    sealed_rows: int

    @cached_property
    def input(self) -> BatchInput:
        """The current metadata.

        Raises: MetadataCorrupt.
        """
        return batches.checked_input(self.locked.pipeline, self.row)

    def continues(self, previous: BatchInput | None) -> bool:
        """Return whether it continues the input that the batch before has now; the first continues none (I12)."""
        return self.input.continues == (previous.digest if previous else None)


@dataclass(frozen=True)
class CommitFacts:
    """What a commit or the start of an attempt rests on; batches by txid, in order."""

    cursor: Cursor
    retired: Retired
    registered: Registered
    batches: Mapping[int, BatchFacts]


def _registered() -> list[sa.ColumnElement[Any]]:
    p, s, k = tables.pipeline.c, tables.state_table.c, tables.commit.alias("any_commit").c
    last_commit = sa.select(sa.func.coalesce(sa.func.max(k.txid), 0)).where(k.pipeline == p.pipeline)
    states = sa.select(s.state).where(s.pipeline == p.pipeline).correlate(tables.pipeline)
    return [
        *(p.fingerprint, p.in_flight, p.paused_at, last_commit.scalar_subquery()),
        sa.func.array(states.scalar_subquery(), type_=ARRAY(sa.Text)),
        table_identity.strange_table(),
    ]


def _facts() -> sa.Select[Any]:
    p, b, c = tables.pipeline.c, tables.batch.c, tables.cursor.c
    current = batches.with_current_attempt(tables.batch, tables.commit, tables.attempt)
    requested = sa.and_(b.pipeline == p.pipeline, b.txid == sa.any_(sa.bindparam("txids", type_=ARRAY(sa.BigInteger))))
    of_attempt = [*attempts.attempt_columns(), *attempts.session_columns()]
    of_batch = [
        *attempts.LOCKED,
        *batches.input_columns(),
        *of_attempt,
        tables.commit.c.txid.is_not(None),
        attempts.sealed_rows(),
    ]
    return (
        sa.select(*cursors.CURSOR, *cursors.database_facts(), *cursors.RETIRED, *_registered(), *of_batch)
        .select_from(sa.join(tables.pipeline, tables.cursor, c.pipeline == p.pipeline))
        .outerjoin(current, requested)
        .where(_REQUESTED)
    )


_REQUESTED = tables.pipeline.c.pipeline == sa.bindparam("pipeline", type_=sa.Text)
_FACTS = _facts()


def lock_and_read(connection: Connection, pipeline: str, witness: Witness, txid: int | None = None) -> CommitFacts:
    """Lock a pipeline's cursor, and the batch of a txid that has not committed; return what its commit rests on.

    Whether the pipeline is in service is the caller's to check. An unknown batch is not among the facts.

    Raises: what `read` raises.
    """
    cursor = cursors.lock(connection, pipeline)
    locked = attempts.lock_known(connection, pipeline, txid) if txid is not None and txid > cursor.txid else None
    return read(connection, pipeline, cursor.history, witness, [locked.txid] if locked else [])


def check_history(connection: Connection, pipeline: str, witness: Witness) -> Registered:
    """Refuse a database where no commit of a pipeline would be accepted, or a retired one; return how it is registered.

    Raises: what `read` raises; PipelineRetired.
    """
    c = tables.cursor.c
    if (history := connection.scalar(sa.select(c.history).where(c.pipeline == pipeline))) is None:
        raise cursors.unregistered(connection, pipeline)
    facts = read(connection, pipeline, history, witness, [])
    cursors.check_not_retired(pipeline, facts.retired)
    return facts.registered


def read(connection: Connection, pipeline: str, history: UUID, witness: Witness, txids: Sequence[int]) -> CommitFacts:
    """Return what a commit, or the start of an attempt, rests on; the batches of these txids that there are.

    What is locked stays so until the transaction ends: with the cursor all but the batches, of which each has its own lock.

    Raises: SchemaOutOfDate if the pipeline is not registered; what `cursors.check_database` raises: the database has to be the
    one in which the cursor was made, and no older copy (I9).
    """
    mark = witness.mark_of(pipeline, str(history))
    known = {"pipelines": [pipeline], "txids": list(txids)}
    rows = [_cut(row, _OF_PIPELINE) for row in connection.execute(_FACTS, cursors.parameters(pipeline, mark) | known)]
    if not rows:
        raise cursors.unregistered(connection, pipeline)
    cursor, database, retired, registered, _ = rows[0]
    cursors.check_database(cursor, database, mark, witness)
    found = [_of_batch(of_batch) for *_, of_batch in rows if of_batch[0] is not None]
    by_txid = {batch.locked.txid: batch for batch in sorted(found, key=lambda batch: batch.locked.txid)}
    if registered.strange is not None:
        registered = registered._replace(strange=StrangeTable(**registered.strange))
    return CommitFacts(cursor, retired, registered, by_txid)


_OF_PIPELINE = Cursor, DatabaseFacts, Retired, Registered  # a row's columns before those of a batch


def _cut(row: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    """Cut a row into named tuples, by the number of their fields, and the columns that are left."""
    parts = []
    for kind in kinds:
        size = len(kind._fields)
        parts.append(kind(*row[:size]))
        row = row[size:]
    return [*parts, row]


def _of_batch(row: Sequence[Any]) -> BatchFacts:
    locked, of_input, newest, (is_committed, rows) = _cut(row, (LockedBatch, InputRow, AttemptRow))
    return BatchFacts(locked, of_input, None if newest.owner is None else newest, is_committed, int(rows))
