"""What the ledger and the witness say about why pipelines wait, read in one snapshot by a constant number of statements.

Every statement serves any number of pipelines, and looks at no more than their first uncommitted batch, one requested batch,
and the newest attempts at both; counts stop at a limit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql

from tidegate.state_store.attempt import attempts, heartbeats
from tidegate.state_store.base.errors import HoleDetected, TidegateError
from tidegate.state_store.ledger import schema_revision, tables
from tidegate.state_store.ledger.commit_witness import Mark, Witness
from tidegate.state_store.ledger.cursors import Cursor, MarkedCommit, current_epoch, describe_loss_since, is_same_database
from tidegate.state_store.read_ledger import pipeline_facts
from tidegate.state_store.read_ledger.batch_phases import Phase
from tidegate.state_store.read_ledger.ledger_reader import LedgerReader
from tidegate.state_store.read_ledger.pipeline_facts import ERROR_CHARACTERS
from tidegate.state_store.turns.batch_turns import has_room, turns

ATTEMPTS_LOOKED_AT = 20  # the newest ones of a batch


class Try(NamedTuple):
    """What an attempt's row says that may explain a wait; the error is cut to ERROR_CHARACTERS."""

    attempt: int
    owner: str
    airflow_run_id: str | None
    airflow_task_id: str | None
    airflow_try: int | None
    fingerprint: str
    started_at: datetime
    seen_at: datetime
    sealed_at: datetime | None
    failed_at: datetime | None
    silent_seconds: float | None
    error: str | None

    @property
    def is_silent(self) -> bool:
        """Whether no heartbeat has come for long."""
        return heartbeats.is_silent(self.silent_seconds)


class WaitingBatch(NamedTuple):
    """A batch, its commit if there is one, and how often its content made it fail since an operator last chose to retry it."""

    pipeline: str
    txid: int
    opened_at: datetime
    attempt: int
    halted_at: datetime | None
    halted_reason: str | None
    skip_owner: str | None
    skip_reason: str | None
    tries_after: int  # the newest attempt when an operator last chose to retry the batch
    committed_at: datetime | None
    skipped_reason: str | None
    awaits_ack: bool
    poison_tries: int
    phase: Phase
    tries: Sequence[Try]  # newest first, at most ATTEMPTS_LOOKED_AT


class RegisteredPipeline(NamedTuple):
    """A pipeline's row, its last commit and opened txid, and what else may need attention.

    `queries` are the states that its transform reads, as registered. `quarantined` are records, `acks_due` commits that the
    source has yet to learn of. `silences` are the seconds since the last heartbeat of the open
    attempts at uncommitted txids. `failed_plans` counts plans that failed since one succeeded at `planned_at`: the newest in
    `failed_run`, with `short_plan_error`, its first ERROR_CHARACTERS. `new_columns` are those of `ledger.undeclared_columns`.
    """

    pipeline: str
    fingerprint: str
    in_flight: int
    paused_at: datetime | None
    paused_by: str | None
    paused_reason: str | None
    retired_at: datetime | None
    retired_by: str | None
    retired_reason: str | None
    has_dropped: bool  # a state
    opened: int
    last_commit: int
    committed_at: datetime | None
    quarantined: int
    acks_due: int
    silences: Mapping[str, float | None] | None
    planned_at: datetime | None
    failed_plans: int
    plans_failing_since: datetime | None
    failed_run: str | None
    short_plan_error: str | None
    queries: Sequence[Mapping[str, str]]
    new_columns: Sequence[Mapping[str, Any]]

    @property
    def in_work(self) -> int | None:
        """The first uncommitted txid with an attempt that still sends heartbeats."""
        silences = (self.silences or {}).items()
        return min((int(txid) for txid, seconds in silences if not heartbeats.is_silent(seconds)), default=None)


@dataclass(frozen=True)
class Wait:
    """Everything that the ledger and the witness say about what one pipeline waits for.

    `first` is the first uncommitted batch, `requested` the requested one; None if there is none. `may_commit` is whether the
    first batch may commit now: a sealed one waits a little for others to be merged with it. `holder` is the process of
    Postgres that holds the cursor's lock, as each commit does; looked up if the first batch may commit. `damaged` is what is
    wrong with the witness's mark; `lost` says which commits this database lacks; `is_restored` whether it was restored,
    promoted or copied since the cursor was made. `refusal` is the error if the database's revision keeps every step from
    beginning.
    """

    row: RegisteredPipeline
    cursor: Cursor
    first: WaitingBatch | None
    requested: WaitingBatch | None
    may_commit: bool
    holder: int | None
    damaged: str | None
    lost: str | None
    is_restored: bool
    is_standby: bool
    refusal: TidegateError | None

    def has_room(self, txid: int) -> bool:
        """Return whether a txid is in the pipeline's window."""
        return has_room(txid, self.cursor.txid, self.row.in_flight)

    @property
    def may_go_on_without(self) -> bool:
        """Return whether a person may accept what is lost: no damaged mark, and no ledger that contradicts itself."""
        return self.damaged is None and (self.lost is not None or self.is_restored)

    @property
    def loss(self) -> str | None:
        """A sentence saying that this database lacks commits, or may, or contradicts itself; None if all is well."""
        name, committed, last_commit = self.row.pipeline, self.cursor.txid, self.row.last_commit
        if self.damaged is not None:
            return f"{self.damaged.rstrip('.')}."
        if self.lost is not None:
            return f"This database lacks commits of {name}: {self.lost.rstrip('.')}."
        if self.is_restored:
            return f"This database was restored, promoted or copied: commits of {name} after txid {committed} may be lost."
        if last_commit != committed:
            return f"The cursor of {name} is at txid {committed}, but the ledger committed {last_commit}."
        return None


Marks = Mapping[str, Mark | HoleDetected]  # the witness's, by pipeline; the error of one that is damaged


def marks(connection: Connection, pipelines: Sequence[str], witness: Witness) -> Marks:
    """Return the witness's marks of these pipelines, as far as they are registered and have one."""
    c = tables.cursor.c
    found: dict[str, Mark | HoleDetected] = {}
    for pipeline, history in connection.execute(sa.select(c.pipeline, c.history).where(c.pipeline.in_(list(pipelines)))):
        try:
            if mark := witness.mark_of(pipeline, str(history)):
                found[pipeline] = mark
        except HoleDetected as error:
            found[pipeline] = error
    return found


def read(connection: Connection, requested: Mapping[str, int | None], marks: Marks, witness: Witness) -> dict[str, Wait]:
    """Return what each registered pipeline, and its requested txid, waits for.

    The transaction has to show one snapshot, taken after the marks were read: else they could name a commit that it lacks.
    """
    rows = connection.execute(_PIPELINES, {"pipelines": list(requested)}).all()
    split = len(RegisteredPipeline._fields)
    pipelines = {row[0]: (RegisteredPipeline(*row[:split]), Cursor(*row[split:])) for row in rows}
    firsts = {name: cursor.txid + 1 for name, (_, cursor) in pipelines.items()}
    others = {(name, txid) for name, txid in requested.items() if name in pipelines and txid is not None}
    batches = _batches(connection, sorted({*firsts.items(), *others}))
    may_commit = turns(connection, sorted(firsts.items()))
    known = {name: mark for name, mark in marks.items() if isinstance(mark, Mark)}
    marked = _marked(connection, known.values())
    is_standby = bool(connection.scalar(sa.select(sa.func.pg_is_in_recovery())))
    epoch = None if is_standby else current_epoch(connection)
    refusal = schema_revision.refusal(connection)
    ready = [name for name, txid in firsts.items() if may_commit[name, txid].opens and (name, txid) in batches]
    holders = {row.pipeline: row.pid for row in connection.execute(_HOLDERS, {"pipelines": ready})} if ready else {}
    return {
        name: Wait(
            row=row,
            cursor=cursor,
            first=batches.get((name, firsts[name])),
            requested=batches.get((name, requested[name] or 0)),
            may_commit=may_commit[name, firsts[name]].opens,
            holder=holders.get(name),
            damaged=str(mark) if isinstance(mark := marks.get(name), HoleDetected) else None,
            lost=describe_loss_since(cursor, known[name], marked.get(name), witness) if name in known else None,
            is_restored=epoch is not None and not is_same_database(cursor, epoch, witness),
            is_standby=is_standby,
            refusal=refusal,
        )
        for name, (row, cursor) in pipelines.items()
    }


@dataclass(frozen=True)
class Moment:
    """A snapshot of ledger and states that also shows what pipelines wait for."""

    connection: Connection
    _marks: Marks
    _witness: Witness

    def waits(self, requested: Mapping[str, int | None]) -> dict[str, Wait]:
        """Return what each of these pipelines, and its requested txid if any, waits for."""
        return read(self.connection, requested, self._marks, self._witness)


@contextmanager
def moment(reader: LedgerReader, doing: str, pipelines: Sequence[str]) -> Iterator[Moment]:
    """Yield a snapshot that also shows what these pipelines wait for.

    Raises: the errors of `LedgerReader.snapshot`.
    """
    with reader.snapshot(doing) as connection:
        read_before = marks(connection, pipelines, reader.witness)  # before the snapshot that is compared with them
    with reader.snapshot(doing) as connection:
        yield Moment(connection, read_before, reader.witness)


_PIPELINES = pipeline_facts.of([*RegisteredPipeline._fields, *(f"cursor_{name}" for name in Cursor._fields)])
# Who has locked a row is in it, and keeps a lock on its own transaction.
_HOLDERS = sa.text("""
SELECT c.pipeline, l.pid FROM tidegate.cursor c JOIN pg_locks l ON l.transactionid = c.xmax AND l.granted
WHERE c.pipeline = ANY(:pipelines)
""").bindparams(sa.bindparam("pipelines", type_=postgresql.ARRAY(sa.Text)))


def _batches(connection: Connection, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], WaitingBatch]:
    if not wanted:
        return {}
    b, k, v = tables.batch.c, tables.commit.c, tables.batches_view.c
    of_batch = [*(b[name] for name in WaitingBatch._fields[:9]), k.committed_at, k.skipped_reason, b.awaits_ack]
    rows = connection.execute(
        sa.select(*of_batch, attempts.count_poison_tries(), v.phase)
        .select_from(sa.outerjoin(tables.batch, tables.commit, tables.same_batch(tables.commit, tables.batch)))
        .join(tables.batches_view, tables.same_batch(tables.batches_view, tables.batch))
        .where(sa.tuple_(b.pipeline, b.txid).in_(list(wanted)))
    )
    tries = _tries(connection, wanted)
    return {row[:2]: WaitingBatch._make([*row, tries.get(row[:2], ())]) for row in map(tuple, rows)}


def _tries(connection: Connection, batches: Sequence[tuple[str, int]]) -> dict[tuple[str, int], list[Try]]:
    b, a = tables.batch.c, tables.attempt.c
    newest = (
        sa.select(*(a[name] for name in Try._fields[:-2]), heartbeats.seconds_since(a.seen_at).label("silent_seconds"))
        .add_columns(sa.func.left(a.error, ERROR_CHARACTERS).label("error"))
        .where(tables.same_batch(tables.attempt, tables.batch))
        .order_by(a.attempt.desc())
        .limit(ATTEMPTS_LOOKED_AT)
        .correlate(tables.batch)
        .lateral("newest")
    )
    statement = (
        sa.select(b.pipeline, b.txid, *newest.c)
        .join(newest, sa.true())
        .where(sa.tuple_(b.pipeline, b.txid).in_(list(batches)))
        .order_by(newest.c.attempt.desc())
    )
    tries: dict[tuple[str, int], list[Try]] = {}
    for pipeline, txid, *values in connection.execute(statement):
        tries.setdefault((pipeline, txid), []).append(Try(*values))
    return tries


def _marked(connection: Connection, marks: Iterable[Mark]) -> dict[str, MarkedCommit]:
    k = tables.commit.c
    named = [(mark.pipeline, mark.txid) for mark in marks]
    if not named:
        return {}
    statement = sa.select(k.pipeline, k.attempt, k.committed_at).where(sa.tuple_(k.pipeline, k.txid).in_(named))
    return {row[0]: MarkedCommit(*row[1:]) for row in connection.execute(statement)}
