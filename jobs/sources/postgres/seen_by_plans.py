"""Records what a plan has seen: transactions that had ended, and the table's partitions. The next plan checks the rest.

A snapshot of Postgres lists open transactions, but not their subtransactions (savepoints, and blocks with EXCEPTION in
PL/pgSQL), whose numbers are in the rows that they write. So these are looked up, and added to its list.

The snapshot is taken once the plan has waited for writers, before the first range is chosen. No row of a settled range is
written by a transaction that was still open then, as `tidegate.jobs.sources.postgres.settled_rows` shows; so such a row is
late. What ends between the snapshot and the look at its subtransactions counts as seen, because the checks for late rows come
after both.

A partition may be attached at any time, and with rows that are in the range that is planned just then. So each range's metadata
lists those partitions that the plan saw and the snapshot does not show: `[[oid, number of the transaction that attached it],
...]`. Without the latter, one that was detached, filled and attached again would be taken for the old one.
"""

import logging
from typing import Any

from psycopg2 import sql

from tidegate.jobs.sources.postgres.table_query import TableQuery
from tidegate.state_store.base.errors import SourceChanged
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

logger = logging.getLogger(__name__)

# The number of transactions whose state is looked up, in about a second. Subtransactions of older ones are taken for ended.
TRANSACTIONS = 1_000_000
# The most open transactions that metadata list. What began after them counts as open, or the plan waits.
OPEN = 5_000
# A row has 32 bits of its transaction's number; after this many more transactions they may mean another transaction.
_COMPARABLE = 2**31
_ENDS = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint, pg_snapshot_xmax(%s::pg_snapshot)::text::bigint"
_SNAPSHOT = """
    WITH seen AS MATERIALIZED (SELECT pg_current_snapshot() AS snapshot), bounds AS (
        SELECT snapshot, pg_snapshot_xmin(snapshot)::text::bigint AS low, pg_snapshot_xmax(snapshot)::text::bigint AS high
        FROM seen
    )
    SELECT low, high, ARRAY(
        SELECT pg_snapshot_xip(snapshot)::text::bigint
        UNION
        SELECT x FROM generate_series(greatest(low, high - %s), high - 1) AS x
        WHERE pg_xact_status(x::text::xid8) = 'in progress'
        ORDER BY 1
    ) FROM bounds
"""
# Adds the epoch to a row's transaction number; 1 and 2 are the numbers of rows that are permanently frozen.
_WITH_EPOCH = sql.SQL("CASE WHEN x < 3 THEN x ELSE newest - mod(newest - x, 4294967296) END")
_VISIBLE = "x < 3 OR pg_visible_in_snapshot(({with_epoch})::text::xid8, {snapshot}::pg_snapshot)"
_PARTITIONS = """
    WITH RECURSIVE child AS (
        SELECT 1 AS depth, inhrelid, inhparent, xmin::text::bigint AS x
        FROM pg_inherits WHERE inhparent = {table} AND NOT inhdetachpending
        UNION
        SELECT depth + 1, i.inhrelid, i.inhparent, i.xmin::text::bigint
        FROM child JOIN pg_inherits AS i ON i.inhparent = child.inhrelid AND NOT i.inhdetachpending
    )
    SELECT inhrelid::bigint, inhparent::bigint, {with_epoch}
    FROM (SELECT *, pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS newest FROM child) AS child
    ORDER BY depth, 1, 2
"""
_NAME = "SELECT %(oid)s::regclass::text, has_table_privilege(%(oid)s::oid, 'SELECT')"
# A partition or child, its parent, and the number of the transaction that attached it; parents come before their children.
PartitionTables = list[tuple[int, int, int]]


def snapshot_of(cursor: Any, query: TableQuery, *, may_be_early: bool) -> str | None:
    """Return the snapshot of now, as Postgres writes it, with open subtransactions in its list.

    If more are open than metadata list, return the snapshot of before the first that is not listed, or None.
    """
    cursor.execute(_SNAPSHOT, [TRANSACTIONS])
    low, high, running = cursor.fetchone()
    if len(running) > OPEN:
        if not may_be_early:
            logger.warning(
                "%s: nothing new is planned now, %s transactions and savepoints of this server are open; rows are planned "
                "while there are at most %s",
                query.name,
                len(running),
                OPEN,
            )
            return None
        high = running[OPEN]
    return f"{low}:{high}:{','.join(map(str, running[:OPEN]))}"


def ends_of(cursor: Any, snapshot: str) -> tuple[int, int]:
    """Return the number of the newest transaction now, and in a snapshot."""
    cursor.execute(_ENDS, [snapshot])
    newest, before = cursor.fetchone()
    return newest, before


def is_comparable(cursor: Any, snapshot: str) -> bool:
    """Return whether the numbers of transactions in rows can be compared with a snapshot."""
    newest, before = ends_of(cursor, snapshot)
    return newest - before < _COMPARABLE


def visible(snapshot: str) -> sql.Composable:
    """Return the condition that a row, whose xmin is `x`, was written before a snapshot; `newest` is the server's newest."""
    return sql.SQL(_VISIBLE).format(with_epoch=_WITH_EPOCH, snapshot=sql.Literal(snapshot))


def partitions_of(cursor: Any, table: int | None) -> PartitionTables:
    """Return a table's partitions, or children, and those of these."""
    if table is None:
        return []
    cursor.execute(sql.SQL(_PARTITIONS).format(with_epoch=_WITH_EPOCH, table=sql.Literal(table)))
    partitions: PartitionTables = cursor.fetchall()
    return partitions


def attached(partitions: PartitionTables, snapshot: str) -> list[list[int]]:
    """Return the entry `attached` of a range's metadata.

    It has those of the partitions, with which the range was planned, that the snapshot may not show.
    """
    oldest = int(snapshot.partition(":")[0])
    return [[oid, x] for oid, _, x in partitions if x >= oldest]


def check_attached(cursor: Any, query: TableQuery, table: int, previous: SourceMetadata, advice: str) -> None:
    """Refuse rows of partitions that were attached since the previous range was planned, up to the position.

    Raises: SourceChanged.
    """
    if "snapshot" not in previous or not previous["to"] or not is_comparable(cursor, previous["snapshot"]):
        return
    low = int(previous["snapshot"].partition(":")[0])
    cut_with = {tuple(pair) for pair in previous["attached"]}
    partitions, known = partitions_of(cursor, table), {table}
    for oid, parent, x in partitions:
        if parent in known and (x < low or (oid, x) in cut_with):
            known.add(oid)
    for oid in sorted({oid for oid, _, _ in partitions} - known):
        cursor.execute(_NAME, {"oid": oid})
        name, is_readable = cursor.fetchone()
        # For a partition that is readable only through its parent all rows are searched, which takes longer.
        relation = sql.SQL(name) if is_readable else query.relation  # quoted by regclass
        cursor.execute(
            sql.SQL("SELECT count(*), concat_ws(', ', {lowest}) FROM {relation} WHERE {up_to} AND tableoid = {oid}").format(
                lowest=sql.SQL(", ").join(sql.SQL("min({}::text)").format(sql.Identifier(column)) for column in query.key),
                relation=relation,
                up_to=query.up_to(previous["to"]),
                oid=sql.Literal(oid),
            )
        )
        rows, key = cursor.fetchone()
        if rows:
            raise SourceChanged(
                f"{query.name}: partition {name} was attached since rows up to {', '.join(previous['to'])} were planned, and "
                f"has {rows} row(s) up to there, such as {key}, which would never be read. Give them new keys. {advice}"
            )
