"""Stage partials: one COPY per Spark task, and the recount that checks a seal against what is really there (CONTRACT I7)."""

from collections.abc import Iterable
from contextlib import closing
from typing import Any, Protocol

import psycopg2
import sqlalchemy as sa
from psycopg2 import sql
from sqlalchemy import Connection

from state_store import tables
from state_store.attempts import StagedPartition
from state_store.declaration import StateSpec
from state_store.errors import StagingLost

COPY_BLOCK_BYTES = 1 << 20
STAGER_GRANT = sa.DDL("GRANT INSERT, SELECT ON %(fullname)s TO tidegate_stager")


class CsvReader(Protocol):
    """What COPY reads from: CSV bytes in blocks, nothing unquoted but NULL is empty."""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes; nothing at the end."""


def copy_partition(
    conninfo: dict[str, Any], table: str, columns: Iterable[str], reader: CsvReader, task_attempt: int
) -> tuple[int, int]:
    """Copy one Spark task's rows into a staging table; return their number and digest. Runs on executors, in one transaction.

    If the process dies, or the answer is lost after the commit, nothing counts: the rows carry a task attempt that no seal
    will name. The password is not in `conninfo`: libpq finds it on the executor (PGPASSFILE).
    """
    target = sql.Identifier(tables.STAGING, table)
    copy = sql.SQL("COPY {} ({}) FROM STDIN WITH (FORMAT csv)").format(
        target, sql.SQL(", ").join(sql.Identifier(name) for name in columns)
    )
    digest = sql.SQL(
        "SELECT count(*), coalesce(bit_xor(hash_record_extended(s, 0)), 0) FROM {} AS s WHERE task_attempt = %s"
    ).format(target)
    with closing(psycopg2.connect(**conninfo)) as connection, connection, connection.cursor() as cursor:
        cursor.copy_expert(copy, reader, COPY_BLOCK_BYTES)
        cursor.execute(digest, [task_attempt])
        rows, checksum = cursor.fetchone()
    return rows, checksum


def recount(connection: Connection, state: StateSpec, txid: int, attempt: int) -> list[StagedPartition]:
    """Return what the seal names for a state, after checking that exactly these rows are in staging.

    Raises: StagingLost if the table is gone, a row is missing or one byte differs.
    """
    s = tables.seal.c
    sealed = [
        StagedPartition(state.name, *row)
        for row in connection.execute(
            sa.select(s.partition, s.task_attempt, s.rows, s.digest).where(
                s.state == state.name, s.txid == txid, s.attempt == attempt
            )
        )
    ]
    staging = tables.staging_table_of(state, txid, attempt)
    if connection.scalar(sa.select(sa.func.to_regclass(f'{tables.STAGING}."{staging.name}"'))) is None:
        raise _lost(state, txid, attempt, "its table is gone")
    found: dict[int, tuple[int, int]] = {}
    if sealed:
        digest = sa.func.bit_xor(sa.func.hash_record_extended(staging.table_valued(), 0))
        found = {
            row.task_attempt: (row[1], row[2])
            for row in connection.execute(
                sa.select(staging.c.task_attempt, sa.func.count(), digest)
                .where(staging.c.task_attempt.in_([p.task_attempt for p in sealed]))
                .group_by(staging.c.task_attempt)
            )
        }
    for p in sealed:
        if found.get(p.task_attempt) != (p.rows, p.digest):
            rows = found.get(p.task_attempt, (0, 0))[0]
            raise _lost(
                state, txid, attempt, f"partition {p.partition} was sealed with {p.rows} rows, staging has {rows}"
            )
    return sealed


def _lost(state: StateSpec, txid: int, attempt: int, what: str) -> StagingLost:
    return StagingLost(
        f"The staging of state {state.name}, batch {txid}, attempt {attempt} cannot be used: {what}. It is processed again.",
        txid=txid,
        attempt=attempt,
    )
