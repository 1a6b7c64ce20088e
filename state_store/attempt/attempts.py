"""Seal and fail attempts; older and silent ones are fenced: they never commit.

The fence is ``batch.attempt``, the number of the newest attempt, raised under the batch's row lock (I4 in docs/protocol.md).
Airflow's try number, clocks and process ids play no part in it. A seal declares that an attempt's staging, the rows that it
computed, is complete.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.attempt import heartbeats
from tidegate.state_store.base.errors import AttemptFenced, SourceChanged
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger import tables, undeclared_columns
from tidegate.state_store.ledger.batches import unknown_batch

FENCED = AttemptFenced("").code
NO_TASK = -1  # the task attempt of rows that no Spark task wrote: those of Spark begin at 0


@dataclass(frozen=True)
class Attempt:
    """One try at a batch: its number, the metadata that it reads, and the open older attempts that it has fenced.

    `rows_before` is how many rows to expect for each state: the most that any of the last batches sealed. `history` is the
    pipeline's history of commits in which the attempt began; in another one, or without it, the attempt cannot seal.
    """

    pipeline: str
    txid: int
    number: int
    source_metadata: SourceMetadata
    fenced: tuple[int, ...] = ()
    rows_before: Mapping[str, int] = field(default_factory=dict)
    history: UUID | None = None

    def __str__(self) -> str:
        return f"{self.pipeline} {self.txid}:{self.number}"


@dataclass(frozen=True)
class AirflowTry:
    """Which Airflow task instance runs an attempt; recorded for people, nothing depends on it."""

    run_id: str
    task_id: str
    number: int

    def __str__(self) -> str:
        return f"Airflow {self.run_id}, {self.task_id}, try {self.number}"


@dataclass(frozen=True)
class Tracked:
    """An attempt's counts of rows, and sums of their 64-bit hashes, after the source and the transform; None if untracked."""

    source_rows: int
    source_hash_sum: int | None = None
    quarantined_rows: int = 0
    transformed_rows: int | None = None
    transformed_hash_sum: int | None = None
    staged_bytes: int | None = None
    staged_at: datetime | None = None


@dataclass(frozen=True)
class StagedPartition:
    """The rows that one Spark task, or NO_TASK, staged for a state: their number and digest."""

    state: str
    partition: int
    task_attempt: int
    rows: int
    digest: int


class LockedBatch(NamedTuple):
    """A batch's locked row: its newest attempt (the fence), whether it is halted or given up, and the pipeline's history."""

    pipeline: str
    txid: int
    source_digest: bytes
    attempt: int
    halted_at: datetime | None
    skip_owner: str | None
    skip_reason: str | None
    history: UUID

    def __str__(self) -> str:
        return f"{self.pipeline} {self.txid}:{self.attempt}"


class AttemptRow(NamedTuple):
    """An attempt's row; its age, and the times since its last heartbeat and its seal, are by the database's clock.

    Of one that has not ended, `session_columns` add whether its process has a session at this server, and is this process.
    """

    owner: str
    fingerprint: str
    sealed_at: datetime | None
    failed_at: datetime | None
    error: str | None
    is_poison: bool | None
    quarantined_rows: int | None
    age_seconds: float
    silent_seconds: float | None
    sealed_seconds: float | None
    has_session: bool = False
    is_own: bool = False

    def is_sealed_by(self, fingerprint: str) -> bool:
        """Return whether it is sealed, and has computed by this declaration (I16)."""
        return self.sealed_at is not None and self.fingerprint == fingerprint

    @property
    def is_silent(self) -> bool:
        """Whether no heartbeat has come for long."""
        return heartbeats.is_silent(self.silent_seconds)

    @property
    def is_at_work(self) -> bool:
        """Whether it has not ended, and its process is alive."""
        is_alive = heartbeats.is_alive(self.silent_seconds, has_session=self.has_session)
        return self.sealed_at is None and self.failed_at is None and is_alive

    @property
    def is_at_work_elsewhere(self) -> bool:
        """Whether it is at work in another process than this one."""
        return self.is_at_work and not self.is_own


_SESSIONS = sa.table("pg_stat_activity", sa.column("datname"), sa.column("application_name"))
OWN_SESSION = sa.func.current_setting("application_name")  # the name of this process' sessions
_HISTORY = (
    sa.select(tables.cursor.c.history)
    .where(tables.cursor.c.pipeline == tables.batch.c.pipeline)
    .correlate(tables.batch)
    .scalar_subquery()
)
LOCKED = [*(tables.batch.c[name] for name in LockedBatch._fields[:-1]), _HISTORY]


def lock_batch(connection: Connection, pipeline: str, txid: int) -> LockedBatch:
    """Lock and return the batch's row, so that taking a fence, sealing and committing exclude each other.

    Raises: UnknownBatch.
    """
    if (batch := lock_known(connection, pipeline, txid)) is None:
        raise unknown_batch(pipeline, txid)
    return batch


def lock_known(connection: Connection, pipeline: str, txid: int) -> LockedBatch | None:
    """Lock and return the batch's row, if there is one."""
    b = tables.batch.c
    row = connection.execute(
        sa.select(*LOCKED).where(b.pipeline == pipeline, b.txid == txid).with_for_update(key_share=True)
    ).one_or_none()
    return LockedBatch(*row) if row else None


def lock_sealed(connection: Connection, pipeline: str, after: int, most: int) -> list[LockedBatch]:
    """Lock and return the batches that directly follow a txid and whose newest attempts are sealed, at most so many.

    No other is locked: an attempt that is about to seal must not wait for the merge of earlier batches.
    """
    b, open_batch = tables.batch.c, tables.batch.alias("open")
    near = (b.pipeline == pipeline, b.txid > after, b.txid <= after + most)
    first_open = (
        sa.select(sa.func.min(open_batch.c.txid))
        .where(open_batch.c.pipeline == pipeline, open_batch.c.txid > after, open_batch.c.txid <= after + most)
        .where(~newest_is_sealed(open_batch))
        .scalar_subquery()
    )
    in_order = sa.or_(first_open.is_(None), b.txid < first_open)
    statement = sa.select(*LOCKED).where(*near, newest_is_sealed(tables.batch), in_order).order_by(b.txid)
    return [LockedBatch(*row) for row in connection.execute(statement.with_for_update(of=tables.batch, key_share=True))]


def attempt_columns() -> list[sa.ColumnElement[Any]]:
    """Return the columns of `AttemptRow`, of a statement that reads ``attempt``."""
    a = tables.attempt.c
    since = map(heartbeats.seconds_since, (a.started_at, a.seen_at, a.sealed_at))
    return [*(a[name] for name in AttemptRow._fields[:-5]), *since]


def session_columns() -> list[sa.ColumnElement[Any]]:
    """Return the last columns of `AttemptRow`; sessions are listed only for an attempt that has not ended."""
    a, session = tables.attempt.c, _SESSIONS.c
    own = session.datname == sa.func.current_database(), session.application_name == a.session
    is_unended = sa.and_(a.attempt.is_not(None), is_open(tables.attempt))
    has_session = sa.case((is_unended, sa.exists().where(*own)), else_=sa.false())
    return [has_session, sa.func.coalesce(a.session == OWN_SESSION, sa.false())]


def is_open(attempt: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return whether an attempt has not ended."""
    return sa.and_(attempt.c.sealed_at.is_(None), attempt.c.failed_at.is_(None))


def newest(connection: Connection, batch: LockedBatch) -> AttemptRow | None:
    """Return a batch's newest attempt, if any."""
    a = tables.attempt.c
    of_batch = (a.pipeline == batch.pipeline, a.txid == batch.txid, a.attempt == batch.attempt)
    row = connection.execute(sa.select(*attempt_columns()).where(*of_batch)).one_or_none()
    return AttemptRow(*row) if row else None


def keep_alive(connection: Connection, attempt: Attempt) -> bool:
    """Record that the attempt's process is alive, so that others wait for it; False if the attempt has ended or is fenced.

    Both are hints that save work: the seal checks the fence under the batch's lock.
    """
    seen = sa.update(tables.attempt).where(*_row_of(attempt), is_open(tables.attempt)).values(seen_at=sa.func.clock_timestamp())
    return bool(connection.execute(seen).rowcount)


def newest_ended_at(batch: sa.FromClause) -> sa.ScalarSelect[datetime]:
    """Return when the newest attempt at a batch of this table or alias was sealed or has failed; NULL before that."""
    newest = tables.attempt.alias("newest")
    ended_at = sa.select(sa.func.coalesce(newest.c.sealed_at, newest.c.failed_at))
    return ended_at.where(tables.same_attempt(newest, batch)).correlate(batch).scalar_subquery()


def newest_is_sealed(batch: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return whether the newest attempt at a batch of this table or alias was sealed."""
    newest = tables.attempt.alias("newest")
    return sa.exists().where(tables.same_attempt(newest, batch), newest.c.sealed_at.is_not(None)).correlate(batch)


def sealed_rows() -> sa.ScalarSelect[int]:
    """Return how many rows an attempt has sealed, bad records included, as a column of a statement that reads ``attempt``."""
    s, a = tables.seal, tables.attempt
    return sa.select(sa.func.coalesce(sa.func.sum(s.c.rows), 0)).where(tables.same_attempt(s, a)).correlate(a).scalar_subquery()


def write_spark(connection: Connection, attempt: Attempt, application: str, tag: str) -> None:
    """Record in which Spark application the attempt computes, and the tag of its operations."""
    connection.execute(sa.update(tables.attempt).where(*_row_of(attempt)).values(spark_application=application, spark_tag=tag))


def seal(
    connection: Connection,
    attempt: Attempt,
    partitions: Sequence[StagedPartition],
    tracked: Tracked,
    undeclared: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Record that the attempt's staging is complete: exactly these rows count. A second seal changes nothing.

    `undeclared` are the columns of each input that the source's declaration leaves out.

    Raises: AttemptFenced if a newer attempt owns the batch, or this one has failed; SourceChanged if a transactional source
    has emitted different rows from those of an earlier attempt.
    """
    own = newest(connection, _lock_owned(connection, attempt))
    assert own is not None, "the batch has its number"
    if own.failed_at is not None:
        raise AttemptFenced(f"{attempt} was recorded as failed: {own.error} Nothing of it counts.")
    if own.sealed_at is not None:
        return
    _check_replay(connection, attempt, tracked)
    key = {"pipeline": attempt.pipeline, "txid": attempt.txid, "attempt": attempt.number}
    if rows := [{**key, **asdict(partition)} for partition in partitions if partition.rows]:
        connection.execute(insert(tables.seal).values(rows))
    connection.execute(
        sa.update(tables.attempt).where(*_row_of(attempt)).values(sealed_at=sa.func.clock_timestamp(), **asdict(tracked))
    )
    undeclared_columns.note(connection, attempt.pipeline, attempt.txid, undeclared)


def fail(connection: Connection, attempt: Attempt, error: str, *, is_poison: bool = False) -> int:
    """Record why the attempt failed, unless it had already ended, so that its staging never counts; return `poison_tries`.

    Raises: AttemptFenced if a newer attempt owns the batch.
    """
    _lock_owned(connection, attempt)
    connection.execute(
        sa.update(tables.attempt)
        .where(*_row_of(attempt), is_open(tables.attempt))
        .values(failed_at=sa.func.clock_timestamp(), error=error, is_poison=is_poison)
    )
    return poison_tries(connection, attempt.pipeline, attempt.txid)


def _lock_owned(connection: Connection, attempt: Attempt) -> LockedBatch:
    """Lock the attempt's batch, and return its row if the attempt still owns it.

    In a history that begins after a loss of commits, another attempt may have the same number.
    """
    batch = lock_batch(connection, attempt.pipeline, attempt.txid)
    if batch.history != attempt.history:
        raise AttemptFenced(
            f"{attempt} is fenced: the pipeline has begun another history since it started, because the database has lost "
            "commits. Nothing of this attempt counts."
        )
    if batch.attempt != attempt.number:
        raise AttemptFenced(f"{attempt} is fenced: attempt {batch.attempt} owns the batch now. Nothing of this attempt counts.")
    return batch


def _check_replay(connection: Connection, attempt: Attempt, tracked: Tracked) -> None:
    """Refuse an attempt that got other rows from a transactional source than an earlier one did (I11).

    Counts and hash sums are compared, of attempts with the same declaration and metadata.
    """
    if tracked.source_hash_sum is None or attempt.number == 1:
        return
    a, p, earlier = tables.attempt.c, tables.pipeline.c, tables.attempt.alias("earlier")
    e = earlier.c
    other = connection.execute(
        sa.select(e.attempt, e.source_rows, e.source_hash_sum)
        .select_from(tables.attempt)
        .where(*_row_of(attempt), tables.same_batch(earlier, tables.attempt), e.attempt < a.attempt)
        .where(e.source_digest == a.source_digest, e.fingerprint == a.fingerprint, e.source_hash_sum.is_not(None))
        .where(p.pipeline == a.pipeline, p.source_kind == "transactional")
        .order_by(e.attempt)
        .limit(1)
    ).one_or_none()
    if other and (other.source_rows, other.source_hash_sum) != (tracked.source_rows, tracked.source_hash_sum):
        raise SourceChanged(
            f"{attempt}: the source emitted {tracked.source_rows} rows, sum of hashes {tracked.source_hash_sum}, "
            f"attempt {other.attempt} at the same batch {other.source_rows}, sum of hashes {other.source_hash_sum}. "
            "A transactional source replays the identical rows: put them back."
        )


def poison_tries(connection: Connection, pipeline: str, txid: int) -> int:
    """Return how many attempts failed because of the batch's content since an operator last chose to retry it."""
    b = tables.batch.c
    return connection.scalar(sa.select(count_poison_tries()).where(b.pipeline == pipeline, b.txid == txid)) or 0


def count_poison_tries() -> sa.ScalarSelect[int]:
    """Return `poison_tries`, as a column of a statement that reads ``batch``."""
    a, b = tables.attempt.c, tables.batch.c
    counted = tables.same_batch(tables.attempt, tables.batch), a.is_poison, a.attempt > b.tries_after
    return sa.select(sa.func.count()).select_from(tables.attempt).where(*counted).correlate(tables.batch).scalar_subquery()


def is_poison(connection: Connection, batch: LockedBatch) -> bool:
    """Return whether a locked batch's newest attempt failed because of the batch's content."""
    attempt = newest(connection, batch)
    return attempt is not None and bool(attempt.is_poison)


def _row_of(attempt: Attempt) -> tuple[sa.ColumnElement[bool], ...]:
    a = tables.attempt.c
    return a.pipeline == attempt.pipeline, a.txid == attempt.txid, a.attempt == attempt.number
