"""A pipeline's cursor: its last commit, and whether this database is the one of that commit (HOLE_DETECTED).

Each commit locks the cursor, so order and exactly-once are decided under its lock. An epoch names the incarnation of the
database that answers; the witness is a file outside Postgres that marks each pipeline's last commit. Both show whether commits
are lost, in a database that was restored, promoted or copied (I9 in docs/protocol.md).
"""

from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import HoleDetected, PipelineRetired, SchemaOutOfDate, StoreUnavailable
from tidegate.state_store.ledger import schema_revision, tables
from tidegate.state_store.ledger.commit_witness import Mark, Witness

_ledger = getattr(sa.func, tables.LEDGER)


class Cursor(NamedTuple):
    """A pipeline's row in ``cursor``: its last commit, and the database's incarnation (`epoch`) that it was made in.

    A new `history` begins when an operator accepts that commits are lost.
    """

    pipeline: str
    txid: int
    attempt: int | None
    source_digest: bytes | None
    epoch: str
    history: UUID


CURSOR = [tables.cursor.c[name] for name in Cursor._fields]


class Retired(NamedTuple):
    """That a pipeline was retired: when, by which operator and why; all None if it was not."""

    at: datetime | None
    by: str | None
    reason: str | None


RETIRED = [tables.pipeline.c[f"retired_{name}"] for name in Retired._fields]


class MarkedCommit(NamedTuple):
    """What the table ``commit`` has of the commit that a mark of the witness names."""

    attempt: int
    committed_at: datetime


class DatabaseFacts(NamedTuple):
    """What the database that answers says of itself, and of a pipeline's commits in it.

    `name` is its name, `ledger` which schema.sql has made its ledger, `in_the_way` what keeps rows of that from being written,
    `epoch` its incarnation (None on a standby). `marked` are the attempt and the time of the commit that the witness's mark
    names; None if there is no such commit, or no mark.
    """

    name: str
    is_standby: bool
    ledger: str | None
    in_the_way: str | None
    epoch: str | None
    marked_attempt: int | None
    marked_at: datetime | None

    @property
    def marked(self) -> MarkedCommit | None:
        """The ledger's commit of the mark's txid, if any."""
        if self.marked_attempt is None or self.marked_at is None:
            return None
        return MarkedCommit(self.marked_attempt, self.marked_at)


def database_facts() -> list[sa.ColumnElement[Any]]:
    """Return the columns of `DatabaseFacts`, for a statement from ``pipeline`` with `parameters`."""
    is_standby = sa.func.pg_is_in_recovery()
    marked = tables.commit.alias("marked").c
    of_mark = (
        marked.pipeline == sa.bindparam("pipeline", type_=sa.Text),
        marked.txid == sa.bindparam("marked", type_=sa.BigInteger),
    )
    return [
        sa.func.current_database(),
        is_standby,
        *schema_revision.of_ledger(),
        sa.select(sa.case((sa.not_(is_standby), _ledger.epoch()))).scalar_subquery(),  # asked once, for however many rows
        sa.select(marked.attempt).where(*of_mark).scalar_subquery(),
        sa.select(marked.committed_at).where(*of_mark).scalar_subquery(),
    ]


def parameters(pipeline: str, mark: Mark | None) -> dict[str, Any]:
    """Return the parameters of a statement with `database_facts`."""
    return {"pipeline": pipeline, "marked": mark.txid if mark else None}


def lock(connection: Connection, pipeline: str, *, wait: bool = True) -> Cursor:
    """Lock and return the pipeline's cursor; what its database is has yet to be checked (`check_database`).

    Without `wait`, a cursor that another transaction has locked is an error at once.

    Raises: SchemaOutOfDate if the pipeline is not registered.
    """
    c = tables.cursor.c
    row = connection.execute(sa.select(*CURSOR).where(c.pipeline == pipeline).with_for_update(nowait=not wait)).one_or_none()
    if row is None:
        raise unregistered(connection, pipeline)
    return Cursor(*row)


def check_database(cursor: Cursor, facts: DatabaseFacts, mark: Mark | None, witness: Witness) -> None:
    """Refuse a database in which no commit may be made; whether the pipeline is in service is the caller's to check.

    Raises: SchemaOutOfDate if the ledger is of other code than this process has; StoreUnavailable on a standby; HoleDetected
    in a restored, promoted or copied database, or in one that is older than its witness.
    """
    if facts.is_standby or facts.epoch is None:
        raise StoreUnavailable(f"{cursor.pipeline}: PGHOST is a standby. Commits need the primary.")
    schema_revision.check_known(facts.name, facts.ledger, facts.in_the_way)
    lost = describe_loss_since(cursor, mark, facts.marked, witness) if mark else None
    if lost is not None:
        raise HoleDetected(
            f"{cursor.pipeline}: this database is older than it was, or has gone on elsewhere from an older copy: {lost}. Put "
            "back a newer backup. Or give that up: put back what its source has moved away since, such as the files in a done "
            "folder, then run: tidegate migrate --accept-epoch"
        )
    if not is_same_database(cursor, epoch := Epoch.of(facts.epoch), witness):
        raise HoleDetected(
            f"{cursor.pipeline}: this database was restored, promoted or copied (epoch {epoch}, the cursor was made in "
            f"{cursor.epoch}): commits after txid {cursor.txid} may be lost. Check what depends on them, then run: "
            "tidegate migrate --accept-epoch"
        )


def describe_loss(connection: Connection, cursor: Cursor, witness: Witness) -> str | None:
    """Return as text which commits the witness knows and the database lacks, if any.

    Raises: HoleDetected if the mark is damaged.
    """
    k = tables.commit.c
    if (mark := witness.mark_of(cursor.pipeline, str(cursor.history))) is None:
        return None
    statement = sa.select(k.attempt, k.committed_at).where(k.pipeline == cursor.pipeline, k.txid == mark.txid)
    found = connection.execute(statement).one_or_none()
    return describe_loss_since(cursor, mark, MarkedCommit(*found) if found else None, witness)


def describe_loss_since(cursor: Cursor, mark: Mark, found: MarkedCommit | None, witness: Witness) -> str | None:
    """Return as text which commits a mark shows to be lost, if any; `found` is the ledger's commit of the mark's txid."""
    file = witness.file_of(mark.pipeline, mark.history)
    if found is None and cursor.txid >= mark.txid:
        return None  # the ledger's cursor and commits contradict each other: `check_no_hole` reports that
    if found is None:
        return (
            f"it stands at txid {cursor.txid}, but {file} says that txid {mark.txid} committed at {mark.committed_at}, so "
            f"{_span(cursor.txid + 1, mark.txid)} lost"
        )
    if (committed_at := _as_text(found.committed_at)) != mark.committed_at:
        return (
            f"its txid {mark.txid} committed at {committed_at}, but {file} says that txid {mark.txid} "
            f"committed at {mark.committed_at}, so that commit, and those after it, are lost"
        )
    if found.attempt < mark.attempt:
        return (
            f"its txid {mark.txid} is that of attempt {found.attempt}, but {file} says that a redo has put attempt "
            f"{mark.attempt} in its place, so the redo is lost"
        )
    return None


def _span(first: int, last: int) -> str:
    return f"txid {first} is" if first == last else f"txids {first} to {last} are"


def _as_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat()


def mark(connection: Connection, pipeline: str) -> Mark | None:
    """Return the witness's mark for a pipeline's last commit, also of this transaction; None without one."""
    c, k = tables.cursor.c, tables.commit.c
    row = connection.execute(
        sa.select(c.history, c.epoch, c.txid, c.attempt, k.committed_at)
        .join(tables.commit, tables.same_batch(tables.commit, tables.cursor))
        .where(c.pipeline == pipeline)
    ).one_or_none()
    return Mark(pipeline, str(row.history), row.epoch, row.txid, row.attempt, _as_text(row.committed_at)) if row else None


class Epoch(NamedTuple):
    """The incarnation of the database that answers: server, timeline, and number of the database in the server.

    A restore or a promotion changes the system identifier or the timeline; a copy within its server changes the number.
    """

    server: str
    timeline: str
    number: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def of(cls, text: str) -> "Epoch":
        """Return the epoch that a cursor keeps as text; other text gives one that equals no real epoch."""
        parts = text.split("/")
        return cls(*parts) if len(parts) == len(cls._fields) else cls(text, "", "")

    def was_promoted_from(self, before: "Epoch") -> bool:
        """Return whether this epoch differs by a later timeline alone, as after the promotion of a standby."""
        return self._replace(timeline="") == before._replace(timeline="") and self.timeline > before.timeline


def current_epoch(connection: Connection) -> Epoch:
    """Return the epoch of the database that answers."""
    return Epoch.of(connection.execute(sa.select(_ledger.epoch())).scalar_one())


def is_same_database(cursor: Cursor, epoch: Epoch, witness: Witness) -> bool:
    """Return whether the database is the one in which the cursor was made, so that no commit can be missing.

    A promoted standby counts as such if the setting `pg_failover` says that it has all commits.
    """
    before = Epoch.of(cursor.epoch)
    return epoch == before or (witness.trusts_promotions and epoch.was_promoted_from(before))


def committed(connection: Connection, pipeline: str) -> int:
    """Return the last committed txid, read without a lock: it may grow, but never shrinks.

    Raises: SchemaOutOfDate if the pipeline is not registered.
    """
    txid: int | None = connection.scalar(sa.select(tables.cursor.c.txid).where(tables.cursor.c.pipeline == pipeline))
    if txid is None:
        raise unregistered(connection, pipeline)
    return txid


def check_in_service(connection: Connection, pipeline: str) -> None:
    """Refuse a pipeline that is not registered, or was retired.

    Raises: SchemaOutOfDate, PipelineRetired.
    """
    row = connection.execute(sa.select(*RETIRED).where(tables.pipeline.c.pipeline == pipeline)).one_or_none()
    if row is None:
        raise unregistered(connection, pipeline)
    check_not_retired(pipeline, Retired(*row))


def check_not_retired(pipeline: str, retired: Retired) -> None:
    """Refuse a pipeline that was retired.

    Raises: PipelineRetired.
    """
    if retired.at is not None:
        raise PipelineRetired(
            f"{pipeline} was retired by {retired.by} on {retired.at:%Y-%m-%d %H:%M} UTC: {(retired.reason or '').rstrip('.')}. "
            f"No batch of it counts any more. Whether it can go on, and how: tidegate why {pipeline}"
        )


def unregistered(connection: Connection, pipeline: str) -> SchemaOutOfDate:
    """Return the error for a pipeline whose row is not found.

    Raises: SchemaOutOfDate if something in the ledger is in the way of the row, such as a policy.
    """
    schema_revision.check_ledger(connection)
    return SchemaOutOfDate(f"Pipeline {pipeline} is not registered in this database. Run: tidegate migrate")
