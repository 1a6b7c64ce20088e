"""The life of staging tables: created with an attempt, granted, filled by COPY, verified by the commit, dropped when old.

An attempt has one table per state, and one for bad records if they are set aside. Each row carries the Spark
task attempt that wrote it: if a task ran twice, the attempt's seal, its list of complete partitions, names the rows that count.
"""

import logging
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from functools import reduce
from typing import Any

import sqlalchemy as sa
from psycopg2.errors import UndefinedTable
from sqlalchemy import Connection, Table
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.schema import CreateTable

from tidegate.state_store.attempt.attempts import NO_TASK, Attempt, StagedPartition
from tidegate.state_store.base.errors import GuardMismatch, Unprocessed
from tidegate.state_store.connections.copy_into_staging import CsvReader, copy_rows
from tidegate.state_store.connections.database import left_for_later
from tidegate.state_store.connections.statement_text import DIALECT, ddl, quoted
from tidegate.state_store.connections.table_locks import STAGING
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, QuarantineSpec, Staged
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import state_tables

logger = logging.getLogger(__name__)

# Executors write the tables; the owner of the state tables reads them for a redo.
STAGER_GRANT = "GRANT INSERT, SELECT ON {tables} TO tidegate_stager; GRANT SELECT ON {tables} TO tidegate_owner"
# What a new table has only if an event trigger gives it: it would change rows before their digest is taken.
_GIVEN = sa.text("""
    SELECT relname, coalesce('trigger ' || tgname, 'rule ' || rulename) AS given
    FROM pg_class LEFT JOIN pg_trigger ON tgrelid = pg_class.oid LEFT JOIN pg_rewrite ON ev_class = pg_class.oid
    WHERE relnamespace = CAST(:schema AS regnamespace) AND relname = ANY (:tables) AND coalesce(tgname, rulename) IS NOT NULL
    LIMIT 1
""").bindparams(sa.bindparam("tables", type_=ARRAY(sa.Text)), schema=STAGING)
# The staging, with this ending of its name, of states that no pipeline declares any more.
_UNDECLARED = sa.text("""
    SELECT relname FROM pg_class, substring(relname FROM '^(.*)_[0-9]+_[0-9]+$') AS staged
    WHERE relnamespace = CAST(:schema AS regnamespace) AND relkind = 'r' AND relname = staged || :ending
        AND NOT EXISTS (
            SELECT FROM tidegate.pipeline
            WHERE staged = '_q_' || pipeline OR declaration -> 'states' @> jsonb_build_array(jsonb_build_object('name', staged))
        )
""").bindparams(schema=STAGING)
# Postgres' own hashes of these types take a quarter of the time of `hash_record_extended`, which takes any.
_HASHES: list[tuple[type[Any], str]] = [
    (sa.BigInteger, "hashint8extended"),
    (sa.Integer, "hashint4extended"),
    (sa.Numeric, "hash_numeric_extended"),
    (sa.Text, "hashtextextended"),
]
_ZERO = "0::bigint"


def create(connection: Connection, spec: PipelineSpec, txid: int, attempt: int) -> None:
    """Create an attempt's staging tables, which Spark's executors may fill, and drop any of the same names.

    The caller has checked that the pipeline owns its states, and taken the attempt's number.

    Raises: GuardMismatch for tables to which an event trigger gives triggers or rules.
    """
    made = [state_tables.staging_table_of(staged, txid, attempt) for staged in spec.staged]
    names = ", ".join(map(_quoted, made))
    # One that exists was left by a pipeline that gave the state away before its first commit: its attempts commit no more.
    ddl(connection, f"DROP TABLE IF EXISTS {names}")
    for table in made:
        connection.execute(CreateTable(table))
    ddl(connection, STAGER_GRANT.format(tables=names))
    for table_name, given in connection.execute(_GIVEN, {"tables": [table.name for table in made]}):
        raise GuardMismatch(
            f"{spec.name}: new table {STAGING}.{table_name} has {given}, by an event trigger of this database. It could change "
            "values before they are merged, so nothing is. Let the event trigger leave schema staging out."
        )


def fill(connection: Connection, attempt: Attempt, staged: Staged, content: CsvReader) -> StagedPartition:
    """Copy rows into an attempt's staging from this process; return their partition for the seal.

    For few rows, which need no Spark task. Call it once per attempt and state: if the answer is lost, the attempt is not
    sealed, and the next one has its own table.

    Raises: StoreUnavailable, also for an error that `content` raises while it is read.
    """
    of_attempt = staged, attempt.txid, attempt.number
    table = state_tables.staging_table_of(*of_attempt)
    columns = [column.name for column in table.columns]
    with closing(connection.connection.cursor()) as cursor:
        copied = copy_rows(cursor, table.name, columns, content, NO_TASK, digest_statement(*of_attempt))
    return StagedPartition(staged.name, 0, NO_TASK, *copied)


def digest_of(stage: Table) -> sa.ColumnElement[int]:
    """Return the digest of staged rows, in any order: the XOR of 64-bit hashes of all columns but the task attempt."""
    # As text: the hashes are nested, one per column, and SQLAlchemy would need several of Python's thousand frames for each.
    staged = (column for column in stage.c if column.name != "task_attempt")
    return sa.literal_column(f"coalesce(bit_xor({reduce(_hash, staged, _ZERO)}), {_ZERO})", sa.BigInteger)


def digest_statement(staged: Staged, txid: int, attempt: int) -> str:
    """Return the SQL for number and digest of the rows that %(task_attempt)s has staged."""
    stage = state_tables.staging_table_of(staged, txid, attempt)
    of_task = stage.c.task_attempt == sa.bindparam("task_attempt", type_=sa.BigInteger)
    statement = sa.select(sa.func.count(), digest_of(stage)).select_from(stage).where(of_task)
    return str(statement.compile(dialect=DIALECT))


def _hash(before: str, column: sa.Column[Any]) -> str:
    """Return the hash of a row up to this column, seeded with the one before, so the order of values matters."""
    name = quoted(column.name)
    known = next((function for kind, function in _HASHES if isinstance(column.type, kind)), None)
    function, value = (known, name) if known else ("hash_record_extended", f"row({name})")
    if not column.nullable:
        return f"{function}({value}, {before})"
    return f"hashint8extended(coalesce({function}({value}, {_ZERO}), -1::bigint), {before})"  # Postgres has no hash of NULL


def recount(
    connection: Connection, pipeline: str, staged: Staged, attempts: Sequence[tuple[int, int]]
) -> list[list[StagedPartition]]:
    """Return the sealed partitions of a state, for each of these attempts (txid and number), by a single statement.

    It checks that staging holds exactly their rows (I7 in docs/protocol.md). Task attempts that no seal names, because Spark
    repeated the task, are only logged.

    Raises: Unprocessed if a table is gone, a row is missing or one byte differs.
    """
    counts = [_counts(pipeline, staged, place, *attempt) for place, attempt in enumerate(attempts)]
    try:
        rows = connection.execute(sa.union_all(*counts) if len(counts) > 1 else counts[0]).all()
    except ProgrammingError as error:
        if not isinstance(error.orig, UndefinedTable):
            raise
        raise _lost(staged, *_first_without_table(staged, attempts, str(error.orig)), "its table is gone") from error
    sealed: list[list[StagedPartition]] = [[] for _ in attempts]
    for place, partition, task_attempt, rows_sealed, digest, found_task_attempt, rows_found, digest_found in rows:
        txid, number = attempts[place]
        if partition is not None:
            if (rows_found, digest_found) != (rows_sealed, digest):
                what = f"partition {partition} was sealed with {rows_sealed} rows, staging has {rows_found or 0}"
                raise _lost(staged, txid, number, what)
            sealed[place].append(StagedPartition(staged.name, partition, task_attempt, rows_sealed, digest))
        elif found_task_attempt != NO_TASK:
            logger.warning(
                "%s %d:%d: Spark's task attempt %d staged %d rows of %s too; no seal names it, so they do not count",
                *(pipeline, txid, number, found_task_attempt, rows_found, staged.name),
            )
    return sealed


def _counts(pipeline: str, staged: Staged, place: int, txid: int, attempt: int) -> sa.Select[Any]:
    s, stage = tables.seal.c, state_tables.staging_table_of(staged, txid, attempt)
    of_attempt = s.pipeline == pipeline, s.txid == txid, s.attempt == attempt, s.state == staged.name
    sealed = sa.select(s.partition, s.task_attempt, s.rows, s.digest).where(*of_attempt).subquery("sealed")
    counted = sa.select(stage.c.task_attempt, sa.func.count().label("rows"), digest_of(stage).label("digest"))
    found = counted.group_by(stage.c.task_attempt).subquery("found")
    same = sealed.c.task_attempt == found.c.task_attempt
    return sa.select(sa.literal(place), *sealed.c, *found.c).select_from(sa.outerjoin(sealed, found, same, full=True))


def _first_without_table(staged: Staged, attempts: Sequence[tuple[int, int]], refusal: str) -> tuple[int, int]:
    """Return the attempt whose staging table Postgres did not find; the first if its refusal names none of them."""
    named = (each for each in attempts if f'"{STAGING}.{state_tables.staging_table_of(staged, *each).name}"' in refusal)
    return next(named, attempts[0])


def _quoted(staging: Table) -> str:
    return f'{STAGING}."{staging.name}"'


def _lost(staged: Staged, txid: int, attempt: int, what: str) -> Unprocessed:
    return Unprocessed(
        f"The staging of state {staged.name}, batch {txid}, attempt {attempt} cannot be used: {what}. It is processed again."
    )


def drop_old(connection: Connection, spec: PipelineSpec, retention_hours: int, limit: int) -> int:
    """Drop the staging of attempts that started, and whose batch committed, before the retention (I18).

    Takes at most `limit` attempts, and leaves out locked ones; returns their number.
    """
    a, c = tables.attempt.c, tables.commit.c
    oldest = sa.func.now() - timedelta(hours=retention_hours)
    old = (
        sa.select(a.txid, a.attempt)
        .join(tables.commit, tables.same_batch(tables.attempt, tables.commit))
        .where(c.committed_at < oldest, a.started_at < oldest)  # the attempt of a redo starts after the batch has committed
    )
    return _drop_some(connection, spec, old, limit)


def drop_all(connection: Connection, spec: PipelineSpec, limit: int) -> int:
    """Drop the staging of at most `limit` attempts, whatever their batches are; return their number."""
    return _drop_some(connection, spec, sa.select(tables.attempt.c.txid, tables.attempt.c.attempt), limit)


def _drop_some(connection: Connection, spec: PipelineSpec, attempts: sa.Select[Any], limit: int) -> int:
    a = tables.attempt.c
    kept = attempts.where(a.pipeline == spec.name, a.dropped_at.is_(None)).order_by(a.txid, a.attempt).limit(limit)
    found = connection.execute(kept.with_for_update(of=tables.attempt, skip_locked=True)).all()
    return sum(_drop(connection, spec, txid, number) for txid, number in found)


def _drop(connection: Connection, spec: PipelineSpec, txid: int, number: int) -> bool:
    """Drop an attempt's staging; return False, without a change, if a late reader or writer holds a table."""
    a = tables.attempt.c
    # The bad records too: an earlier declaration may have set some aside.
    everything: tuple[Staged, ...] = (*spec.states, QuarantineSpec(spec.name))
    with left_for_later(connection, f"dropping the staging of {spec.name} {txid}:{number}"):
        names = [state_tables.staging_table_of(staged, txid, number).name for staged in everything]
        names += connection.scalars(_UNDECLARED, {"ending": f"_{txid}_{number}"})
        ddl(connection, f"DROP TABLE IF EXISTS {', '.join(f'{STAGING}.{quoted(name)}' for name in names)}")
        connection.execute(
            sa.update(tables.attempt)
            .where(a.pipeline == spec.name, a.txid == txid, a.attempt == number)
            .values(dropped_at=sa.func.now())
        )
        return True
    return False
