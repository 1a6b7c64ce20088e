"""Retire a pipeline, and reinstate it: decided under the lock of its cursor, as its commits are (I23 in docs/protocol.md).

A retired pipeline keeps its ledger, its name and the names of its states, so nothing ever counts again under them. Readers keep
its states, unless they are dropped.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.attempt import attempts, heartbeats, staging_tables
from tidegate.state_store.base.errors import AttemptNotSealed, RangeRefused, UnknownPipeline, UsageError
from tidegate.state_store.connections import statement_text
from tidegate.state_store.connections.database import DDL_LOCK_TIMEOUT_SECONDS
from tidegate.state_store.connections.local_settings import set_local
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, rebuilt_by, spec_of
from tidegate.state_store.ledger import cursors, followers, schema_revision, tables
from tidegate.state_store.ledger.cursors import Retired
from tidegate.state_store.operate.action_record import write_action
from tidegate.state_store.pipeline_changes import registration
from tidegate.state_store.read_ledger import pipeline_facts, registered_pipelines
from tidegate.state_store.states import range_partitions

ENDED = f"{attempts.FENCED}: the pipeline was retired."
# The existing views, partitions and tables of a pipeline's states, in an order in which they can be dropped. A table of other
# name or schema that inherits from one is not the pipeline's: it is in the way.
_RELATIONS = sa.text("""
WITH whole AS (
    SELECT pg_class.* FROM pg_class JOIN tidegate.state_table ON state = relname
    WHERE pipeline = :pipeline AND relnamespace = 'state'::regnamespace AND relkind IN ('r', 'p', 'v')
)
SELECT relname, kind FROM (
    SELECT CASE relkind WHEN 'v' THEN 1 ELSE 3 END, relname, CASE relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END FROM whole
    UNION ALL
    SELECT 2, part.relname, 'TABLE'
    FROM whole JOIN pg_inherits ON inhparent = whole.oid JOIN pg_class AS part ON part.oid = inhrelid
    WHERE part.relnamespace = whole.relnamespace AND starts_with(part.relname, whole.relname || '$')
) AS found (step, relname, kind) ORDER BY step, relname
""")


@dataclass(frozen=True)
class Request:
    """A request to retire a pipeline: by which operator, why, and whether its states' tables are dropped.

    Unless it `is_confirmed`, nothing is done.
    """

    owner: str
    reason: str
    drops_states: bool = False
    is_confirmed: bool = True


class Retirement(NamedTuple):
    """What was done, or would be, and what it leaves.

    `retired` says since when, by whom and why; it was so before if it is `already`. `uncommitted` batches will never count,
    `quarantined` records stay where they are, and the source has not had its ack for `acks_due` batches. `states` are the
    tables and views that stay, `dropped` those that this transaction has dropped, or would drop, without their partitions;
    `are_more` says whether there are more to drop. `mentioned_by` are pipelines whose source names a state's table itself.
    """

    retired: Retired
    already: bool
    committed: int
    uncommitted: int
    quarantined: int
    acks_due: int
    states: list[str]
    dropped: list[str]
    are_more: bool
    mentioned_by: list[str]


class RetiredPipeline(NamedTuple):
    """A retired pipeline, its last committed txid, and since when, by whom and why it is retired."""

    pipeline: str
    committed: int
    retired_at: datetime
    retired_by: str
    retired_reason: str


def retire(connection: Connection, pipeline: str, request: Request) -> Retirement:
    """Retire a pipeline, unless it is retired already; then drop its states, if requested, as many as fit a transaction.

    Only the tables' owner may. Its attempts are fenced: those that have not ended are recorded as failed, and no process goes
    on with a step. From now on, pipelines that begin to follow it or to read its states are refused.

    Raises: UnknownPipeline if it is not registered; AttemptNotSealed while an attempt at one of its batches is alive;
    UsageError if another pipeline reads its states; PermanentError if something depends on a table that is to be dropped.
    """
    schema_revision.lock_revision(connection)  # a migration registers pipelines that may read the states
    committed, retired = _lock(connection, pipeline)
    others = followers.others(connection, pipeline)
    _check_not_read(pipeline, others)
    if retired.at is None:
        _check_not_in_work(connection, pipeline, committed)
    already = retired.at is not None
    if request.is_confirmed and not already:
        _write(connection, pipeline, request)
        retired = registered_pipelines.retired(connection, pipeline)
    names = _state_tables(connection, pipeline)
    relations = [(name, kind) for name, kind in connection.execute(_RELATIONS, {"pipeline": pipeline})]
    dropped = relations if request.drops_states else []
    if request.drops_states and request.is_confirmed:
        dropped = relations[: range_partitions.MOST_AT_ONCE]
        _drop(connection, pipeline, request, dropped)
    facts = connection.execute(pipeline_facts.of(["pending", "quarantined", "acks_due"]), {"pipelines": [pipeline]}).one()
    return Retirement(
        retired=retired,
        already=already,
        committed=committed,
        uncommitted=facts.pending,
        quarantined=facts.quarantined,
        acks_due=facts.acks_due,
        states=[name for name, _ in relations if name in names and not request.drops_states],
        dropped=[name for name, _ in dropped if name in names],
        are_more=request.drops_states and len(dropped) < len(relations),
        mentioned_by=[other.name for other in others if _mentions(other.source_identity, names)],
    )


def reinstate(connection: Connection, pipeline: str, owner: str, reason: str) -> bool:
    """Let a retired pipeline go on where it stood; return False if it was not retired.

    Raises: UnknownPipeline if it is not registered; RangeRefused if its states were dropped; PipelineRetired if a pipeline
    whose states it reads is retired.
    """
    schema_revision.lock_revision(connection)
    _, retired = _lock(connection, pipeline)
    if retired.at is None:
        return False
    p, s = tables.pipeline.c, tables.state_table.c
    dropped = connection.scalars(sa.select(s.state).where(s.pipeline == pipeline, s.dropped_at.is_not(None)).order_by(s.state))
    if names := list(dropped):
        raise RangeRefused(
            f"{pipeline} cannot be reinstated: its states were dropped ({', '.join(names)}). To count its source again, "
            "declare a pipeline and states of other names."
        )
    spec = registered_pipelines.spec_of_pipeline(connection, pipeline)
    if rebuild := rebuilt_by(spec.declaration):
        raise RangeRefused(
            f"{pipeline} cannot be reinstated: what it has read may have been redone in {rebuild.pipeline} since. Begin "
            f"another rebuild: raise the version above {rebuild.version}, and run: tidegate rebuild {rebuild.pipeline} --yes"
        )
    registration.check_sources(connection, spec)
    values = dict.fromkeys(column.name for column in cursors.RETIRED)
    connection.execute(sa.update(tables.pipeline).where(p.pipeline == pipeline).values(values))
    write_action(connection, pipeline, None, "reinstate", owner, reason)
    return True


def retired_pipelines(connection: Connection) -> list[RetiredPipeline]:
    """Return the retired pipelines, in the order of their names."""
    p, c = tables.pipeline.c, tables.cursor.c
    known = sa.join(tables.pipeline, tables.cursor, c.pipeline == p.pipeline)
    statement = sa.select(p.pipeline, c.txid, *cursors.RETIRED).select_from(known).where(~tables.IN_SERVICE)
    return [RetiredPipeline(*row) for row in connection.execute(statement.order_by(p.pipeline))]


def drop_staging(connection: Connection, pipeline: str, limit: int) -> int:
    """Drop the staging of at most `limit` attempts of a retired pipeline; return their number.

    Only the role of commits may, as the staging tables' owner. Tables in use are left out.
    """
    p = tables.pipeline.c
    declaration = connection.scalar(
        sa.select(p.declaration).where(p.pipeline == pipeline, ~tables.IN_SERVICE).with_for_update(key_share=True)
    )
    return staging_tables.drop_all(connection, spec_of(declaration), limit) if declaration else 0


def _lock(connection: Connection, pipeline: str) -> tuple[int, Retired]:
    """Lock the cursor, also in a restored database; return its txid, and whether the pipeline is retired."""
    c = tables.cursor.c
    txid = connection.scalar(sa.select(c.txid).where(c.pipeline == pipeline).with_for_update())
    if txid is None:
        raise UnknownPipeline(f"Pipeline {pipeline} is not registered in this database.")
    schema_revision.check_ledger(connection)
    return txid, registered_pipelines.retired(connection, pipeline)


def _check_not_read(pipeline: str, others: Sequence[PipelineSpec]) -> None:
    if readers := [other.name for other in others if pipeline in other.read_pipelines]:
        read = "follows or reads" if len(readers) == 1 else "follow or read"
        raise UsageError(
            f"{pipeline} cannot be retired: {' and '.join(readers)} {read} its states. First retire {readers[0]}, or declare "
            "it without these and run: tidegate migrate"
        )


def _check_not_in_work(connection: Connection, pipeline: str, committed: int) -> None:
    """Refuse while an attempt is alive, and lock the batches, so that none begins meanwhile."""
    b, a = tables.batch.c, tables.attempt.c
    open_batches = sa.select(b.txid).where(b.pipeline == pipeline, b.txid >= committed).order_by(b.txid)
    connection.execute(open_batches.with_for_update(key_share=True))
    open_attempts = connection.execute(
        sa.select(a.txid, a.attempt, a.owner, heartbeats.seconds_since(a.seen_at).label("silent_seconds"))
        .where(a.pipeline == pipeline, a.txid >= committed, attempts.is_open(tables.attempt))
        .order_by(a.txid)
    ).all()
    if alive := next((one for one in open_attempts if not heartbeats.is_silent(one.silent_seconds)), None):
        raise AttemptNotSealed(
            f"{pipeline} is at work: attempt {alive.attempt} at txid {alive.txid}, by {alive.owner}. Let no other run begin "
            f"(tidegate pause {pipeline} --reason ...), and retire it when this one has ended; or end its process, which "
            f"counts as gone after {heartbeats.LONGEST_SILENCE_SECONDS} s."
        )


def _write(connection: Connection, pipeline: str, request: Request) -> None:
    p, a = tables.pipeline.c, tables.attempt.c
    values = zip(cursors.RETIRED, (sa.func.now(), request.owner, request.reason), strict=True)
    connection.execute(
        sa.update(tables.pipeline).where(p.pipeline == pipeline).values({column.name: value for column, value in values})
    )
    connection.execute(
        sa.update(tables.attempt)
        .where(a.pipeline == pipeline, attempts.is_open(tables.attempt))
        .values(failed_at=sa.func.now(), error=ENDED, is_poison=False)
    )
    write_action(connection, pipeline, None, "retire", request.owner, request.reason)


def _state_tables(connection: Connection, pipeline: str) -> set[str]:
    s = tables.state_table.c
    return set(connection.scalars(sa.select(s.state).where(s.pipeline == pipeline)))


def _drop(connection: Connection, pipeline: str, request: Request, relations: Sequence[tuple[str, str]]) -> None:
    """Drop relations of a pipeline's states; once one is gone, the pipeline cannot be reinstated."""
    s, r = tables.state_table.c, tables.state_range.c
    set_local(connection, {"lock_timeout": f"{DDL_LOCK_TIMEOUT_SECONDS}s"})
    of_pipeline = s.pipeline == pipeline
    is_new = connection.execute(
        sa.update(tables.state_table).where(of_pipeline, s.dropped_at.is_(None)).values(dropped_at=sa.func.now())
    ).rowcount
    if is_new:
        write_action(connection, pipeline, None, "retire", request.owner, f"its states are dropped: {request.reason}")
    connection.execute(sa.delete(tables.state_range).where(r.state.in_(sa.select(s.state).where(of_pipeline))))
    divided = {name.partition("$")[0] for name, _ in relations if "$" in name}
    for whole in sorted(divided):  # readers lock it before its partitions
        statement_text.ddl(connection, f"LOCK TABLE ONLY {statement_text.in_state(whole)} IN ACCESS EXCLUSIVE MODE")
    for name, kind in relations:
        statement_text.ddl(connection, f"DROP {kind} {statement_text.in_state(name)}")


def _mentions(identity: str, names: set[str]) -> bool:
    """Return whether a source's identity names one of these tables, as that of a `PostgresTable` may."""
    return any(re.search(rf"\bstate[\\\"]*\.[\\\"]*{re.escape(name)}\b", identity) for name in names)
