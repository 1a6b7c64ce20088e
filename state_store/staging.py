"""The staging that commits read: the recount that checks a seal against what is really there (I7)."""

from functools import reduce
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.dialects.postgresql import psycopg2

from state_store import tables
from state_store.attempts import StagedPartition
from state_store.declaration import Staged
from state_store.errors import StagingLost

# Executors write it; the owner of the state tables reads it for a redo.
STAGER_GRANT = sa.DDL(  # type: ignore[no-untyped-call]
    "GRANT INSERT, SELECT ON %(fullname)s TO tidegate_stager; GRANT SELECT ON %(fullname)s TO tidegate_owner"
)
# Postgres' own hashes of these types take a quarter of the time of `hash_record_extended`, which takes any.
_HASHES: list[tuple[type[Any], str]] = [
    (sa.BigInteger, "hashint8extended"),
    (sa.Integer, "hashint4extended"),
    (sa.Numeric, "hash_numeric_extended"),
    (sa.Text, "hashtextextended"),
]


def digest_of(stage: Table) -> sa.ColumnElement[int]:
    """Return the digest of staged rows, in whatever order: the XOR of their 64-bit hashes, over all staged columns.

    The task attempt is left out: it is by what the rows are found.
    """
    staged = (column for column in stage.c if column.name != "task_attempt")
    return sa.func.coalesce(sa.func.bit_xor(reduce(_hash, staged, _constant(0))), _constant(0))


def digest_statement(staged: Staged, txid: int, attempt: int) -> str:
    """Return the SQL by which an executor finds number and digest of what its task, %(task_attempt)s, has staged."""
    stage = tables.staging_table_of(staged, txid, attempt)
    of_task = stage.c.task_attempt == sa.bindparam("task_attempt", type_=sa.BigInteger)
    statement = sa.select(sa.func.count(), digest_of(stage)).select_from(stage).where(of_task)
    return str(statement.compile(dialect=psycopg2.dialect()))  # type: ignore[no-untyped-call]


def _hash(before: sa.ColumnElement[int], column: sa.Column[Any]) -> sa.ColumnElement[int]:
    """Return the hash of a row up to this column. Each value's begins with that of those before it: none can change places."""
    if not column.nullable:
        return _hash_of_value(column, before)
    own = sa.func.coalesce(_hash_of_value(column, _constant(0)), _constant(-1))  # Postgres has no hash of NULL
    return sa.func.hashint8extended(own, before)


def _hash_of_value(column: sa.Column[Any], seed: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    function = next((name for kind, name in _HASHES if isinstance(column.type, kind)), None)
    if function:
        return getattr(sa.func, function)(column, seed)  # type: ignore[no-any-return]
    return sa.func.hash_record_extended(sa.func.row(column), seed)


def _constant(value: int) -> sa.ColumnElement[int]:
    return sa.literal_column(f"{value}::bigint", sa.BigInteger)


def recount(connection: Connection, pipeline: str, staged: Staged, txid: int, attempt: int) -> list[StagedPartition]:
    """Return what the seal names for a state, after checking that exactly these rows are in staging.

    Raises: StagingLost if the table is gone, a row is missing or one byte differs.
    """
    s = tables.seal.c
    sealed = [
        StagedPartition(staged.name, *row)
        for row in connection.execute(
            sa.select(s.partition, s.task_attempt, s.rows, s.digest).where(
                s.pipeline == pipeline, s.txid == txid, s.attempt == attempt, s.state == staged.name
            )
        )
    ]
    staging = tables.staging_table_of(staged, txid, attempt)
    if connection.scalar(sa.select(sa.func.to_regclass(f'{tables.STAGING}."{staging.name}"'))) is None:
        raise _lost(staged, txid, attempt, "its table is gone")
    found: dict[int, tuple[int, int]] = {}
    if sealed:
        found = {
            row.task_attempt: (row[1], row[2])
            for row in connection.execute(
                sa.select(staging.c.task_attempt, sa.func.count(), digest_of(staging))
                .where(staging.c.task_attempt.in_([p.task_attempt for p in sealed]))
                .group_by(staging.c.task_attempt)
            )
        }
    for p in sealed:
        if found.get(p.task_attempt) != (p.rows, p.digest):
            rows = found.get(p.task_attempt, (0, 0))[0]
            raise _lost(staged, txid, attempt, f"partition {p.partition} was sealed with {p.rows} rows, staging has {rows}")
    return sealed


def _lost(staged: Staged, txid: int, attempt: int, what: str) -> StagingLost:
    return StagingLost(
        f"The staging of state {staged.name}, batch {txid}, attempt {attempt} cannot be used: {what}. It is processed again.",
        txid=txid,
        attempt=attempt,
    )
