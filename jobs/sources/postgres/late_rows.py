"""Finds late rows, which would never be read because batches were planned beyond their keys.

Plans wait for open transactions (`tidegate.jobs.sources.postgres.settled_rows`), which rules late rows out, if keys and times
are drawn as the author promises. This module checks the promise. No check costs more than to read one batch's keys again,
except for a single check after a sequence was altered or a partition attached (`tidegate.jobs.sources.postgres.seen_by_plans`);
rows that were read may be deleted or changed meanwhile. The position is the last key that was planned.

*Numeric keys*: a range's metadata, and that of later ranges, lists the keys that were missing when it was planned, as far as
GAPS go back: `[[low, high], ...]`, low is null for everything below the first key. A row in a gap came too late.

*Any drawn key*: the newest range may not have more rows than when it was planned, nor the same number with other keys.

*A sequence that was altered, a partition that was attached*: no row up to the position may have come from it since.

*Times that change*: a row moves out of its range when it is written again. If one of the newest rows up to the position was
not visible in the plan's snapshot, it was written since, and kept a time or received one that had been planned by then.
"""

from decimal import Decimal
from math import ceil
from typing import Any

from psycopg2 import sql

from tidegate.jobs.sources.postgres.seen_by_plans import ends_of, is_comparable, visible
from tidegate.jobs.sources.postgres.table_origin import Origin, Sequence
from tidegate.jobs.sources.postgres.table_query import Position, TableQuery, rows_now
from tidegate.state_store.base.errors import MalformedRecord, SourceChanged
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

# The most gaps in metadata: each costs a lookup in the key's index at every plan, and some bytes in each batch's metadata.
GAPS = 200
WHOLE = ("smallint", "integer", "bigint")


def gaps_of(query: TableQuery, types: list[str], after: Position | None) -> sql.Composable:
    """Return SQL for the newest gaps between the keys of relation tidegate_batch, as JSON; NULL if keys have no gaps."""
    if len(types) != 1 or types[0] not in (*WHOLE, "numeric"):
        return sql.SQL("NULL")
    number, down, up = ("numeric", "floor", "ceil") if types[0] == "numeric" else ("bigint", "", "")
    # CASE, because the ends of bigint have no number before or after them.
    return sql.SQL(
        "(SELECT json_agg(json_build_array(low, high) ORDER BY high) FROM ("
        " SELECT {down}(previous) + 1 AS low, {up}(key) - 1 AS high FROM ("
        "  SELECT {key}::{number} AS key, lag({key}::{number}, 1, {after}::{number}) OVER (ORDER BY {key}) AS previous"
        "  FROM tidegate_batch"
        " ) AS pairs WHERE CASE WHEN previous IS NULL THEN key > -9223372036854775808"
        "  WHEN previous < key THEN previous < key - 1 ELSE false END"
        " ORDER BY key DESC LIMIT {limit}"
        ") AS gaps)"
    ).format(
        key=query.keys,
        number=sql.SQL(number),
        down=sql.SQL(down),
        up=sql.SQL(up),
        after=sql.Literal(after[0] if after else None),
        limit=sql.Literal(GAPS),
    )


def check_in_time(cursor: Any, query: TableQuery, previous: SourceMetadata) -> None:
    """Refuse a server with fewer transactions than at the last plan: it was restored from a backup.

    Raises: SourceChanged.
    """
    if "snapshot" not in previous:
        return
    newest, before = ends_of(cursor, previous["snapshot"])
    if newest < before:
        raise SourceChanged(
            f"{query.name}: the server is at transaction {newest}, but was at {before} when rows were planned: it was restored "
            "from a backup, or a standby took over that had not received everything. Rows that are written now get keys that "
            "were read before. Put back what is missing, or raise generation of the PostgresTable and the pipeline's version."
        )


def check_gaps(cursor: Any, query: TableQuery, previous: SourceMetadata) -> None:
    """Refuse rows with keys that were missing when their range was planned.

    Raises: SourceChanged.
    """
    if not (gaps := previous.get("gaps")):
        return
    key = query.keys
    conditions = [
        sql.SQL("{key} <= {high}").format(key=key, high=sql.Literal(high))
        if low is None
        else sql.SQL("{key} BETWEEN {low} AND {high}").format(key=key, low=sql.Literal(low), high=sql.Literal(high))
        for low, high in gaps
    ]
    cursor.execute(
        sql.SQL("SELECT count(*), min({key})::text FROM {relation} WHERE {conditions}").format(
            key=key, relation=query.relation, conditions=sql.SQL(" OR ").join(conditions)
        )
    )
    rows, lowest = cursor.fetchone()
    if rows:
        raise SourceChanged(
            f"{query.name} has {rows} row(s) with keys that were missing when their range was read, such as key {lowest}, "
            f"up to {previous['to'][0]}: they came too late, and would never be read. Give them new keys, and let the INSERT "
            "draw them."
        )


def check_newest_range(cursor: Any, query: TableQuery, previous: SourceMetadata) -> None:
    """Refuse a range that has more rows than planned, or the same number with other keys.

    Raises: SourceChanged.
    """
    if now := rows_now(cursor, query, previous, may_shrink=True):
        raise SourceChanged(
            f"{query.name} has {now}: rows with lower keys came later, and would never be read. Give them new keys, and let "
            "the INSERT draw them."
        )


def check_keys(cursor: Any, query: TableQuery, types: list[str]) -> None:
    """Refuse keys that no range would ever contain, and keys after which a range would contain nothing.

    Raises: MalformedRecord.
    """
    first = sql.Identifier(query.key[0])
    conditions = [(f"{name} IS NULL", sql.SQL("{} IS NULL").format(sql.Identifier(name))) for name in query.key]
    if types[0] == "timestamp with time zone":
        endless = sql.SQL("{} IN ('infinity', '-infinity')").format(first)
        conditions.append((f"{query.key[0]} is infinite", endless))
    if types[0] == "numeric":
        endless = sql.SQL("{} IN ('NaN', 'Infinity', '-Infinity')").format(first)
        conditions.append((f"{query.key[0]} is NaN or infinite", endless))
    for defect, condition in conditions:
        cursor.execute(sql.SQL("SELECT EXISTS (SELECT FROM {} WHERE {})").format(query.relation, condition))
        if cursor.fetchone()[0]:
            cursor.execute(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(query.relation, condition))
            raise MalformedRecord(
                f"{query.name} has {cursor.fetchone()[0]} row(s) in which {defect}; they would never be read. Give them a key, "
                "and declare the column NOT NULL."
            )


def check_drawn(
    cursor: Any, query: TableQuery, types: list[str], sequence: Sequence, after: Position | None, highest: Position | None
) -> None:
    """Refuse new keys that this sequence has not handed out: above its value, or between its steps.

    Raises: SourceChanged.
    """
    if highest is None:
        return
    if Decimal(highest[0]) > sequence.last:
        raise SourceChanged(
            f"{query.name} has key {highest[0]}, but sequence {sequence.name} is at {sequence.last}: keys were chosen by hand, "
            "and rows with the next ones would never be read. Run SELECT "
            f"setval('{sequence.name}', {_whole(highest[0])})."
        )
    if sequence.increment == 1 and types[0] in WHOLE:  # a numeric may have digits after the point
        return
    between = sql.SQL("mod({key}::numeric - {last}, {increment}) <> 0").format(
        key=query.keys, last=sql.Literal(sequence.last), increment=sql.Literal(sequence.increment)
    )
    cursor.execute(
        sql.SQL("SELECT min({})::text FROM {} WHERE {} AND {}").format(
            query.keys, query.relation, query.between(after, highest), between
        )
    )
    if (key := cursor.fetchone()[0]) is not None:
        raise SourceChanged(
            f"{query.name} has key {key}, which sequence {sequence.name} (at {sequence.last}, INCREMENT {sequence.increment}) "
            "does not hand out: the writers draw one number for many keys, and low ones may come later. Let the INSERT draw "
            f'each key, or read by a time, as in key=("updated_at", "{query.key[0]}").'
        )


def check_sequence(query: TableQuery, sequence: Sequence, previous: SourceMetadata, advice: str) -> None:
    """Refuse a sequence that is below the position: it was set back.

    Raises: SourceChanged.
    """
    position = _whole(previous["to"][0]) if previous["to"] else sequence.last
    if sequence.last < position:
        raise SourceChanged(
            f"{query.name}: sequence {sequence.name} is at {sequence.last}, but rows up to {position} were read: it was set "
            f"back, as TRUNCATE ... RESTART IDENTITY does, and what it draws now would never be read. Run SELECT "
            f"setval('{sequence.name}', {position}) and give the rows of meanwhile new keys. {advice}"
        )


def check_altered(
    cursor: Any, query: TableQuery, origin: Origin, sequence: Sequence, previous: SourceMetadata, advice: str
) -> None:
    """Refuse a sequence that was altered, unless no row up to the position was written since: then no key was drawn twice.

    Raises: SourceChanged.
    """
    before = previous.get("origin")
    if before is None or before["sequences"].get(sequence.oid) == sequence.storage or not previous["to"]:
        return
    position = _whole(previous["to"][0])
    if origin.table is None or not query.table or not is_comparable(cursor, previous["snapshot"]):
        raise SourceChanged(
            f"{query.name}: sequence {sequence.name} was restarted or replaced since rows up to {position} were read, and "
            f"which keys were drawn twice cannot be found out here. {advice}"
        )
    cursor.execute(
        sql.SQL("SELECT count(*), min(key)::text FROM ({rows}) AS r WHERE NOT ({visible})").format(
            rows=_rows_up_to(query, previous["to"], query.keys), visible=visible(previous["snapshot"])
        )
    )
    rows, key = cursor.fetchone()
    if rows:
        raise SourceChanged(
            f"{query.name}: sequence {sequence.name} was restarted or replaced since rows up to {position} were read, and "
            f"{rows} row(s) with such keys were written since, such as {key}: they would never be read. {advice}"
        )


def check_times(cursor: Any, query: TableQuery, origin: Origin, previous: SourceMetadata, rows: int) -> None:
    """Refuse rows, among the newest, that were written since the last plan with times that had been planned.

    Only a table shows which transaction has written a row, until the whole table is rewritten.

    Raises: SourceChanged.
    """
    before = previous.get("origin")
    if before is None or before["storage"] != origin.storage or origin.table is None or not query.table or not previous["to"]:
        return
    if not is_comparable(cursor, previous["snapshot"]):
        return
    cursor.execute(
        sql.SQL(
            "SELECT count(*) FILTER (WHERE NOT ({visible})), min(key) FILTER (WHERE NOT ({visible})) FROM ({rows}) AS r"
        ).format(visible=visible(previous["snapshot"]), rows=_newest(query, previous["to"], rows))
    )
    late, key = cursor.fetchone()
    if late:
        column = query.key[0]
        raise SourceChanged(
            f"{query.name} has {late} row(s) that were written after rows up to {', '.join(previous['to'])} had been planned, "
            f"and have no later {column}, such as {key}: by a write that leaves {column} alone, with a time that is rounded by "
            "more than margin_seconds, under a clock that was put back, or loaded with old times. They would never be read as "
            f"they are now. Have a trigger set {column} to now() at each write, and touch these rows."
        )


def _whole(key: str) -> int:
    """Return a key as a number that a sequence can stand at: the next whole one, for a numeric with digits after the point."""
    return ceil(Decimal(key))


def _rows_up_to(query: TableQuery, position: Position, key: sql.Composable) -> sql.Composable:
    return sql.SQL(
        "SELECT xmin::text::bigint AS x, {key} AS key, pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS newest"
        " FROM {relation} WHERE {up_to}"
    ).format(key=key, relation=query.relation, up_to=query.up_to(position))


def _newest(query: TableQuery, position: Position, rows: int) -> sql.Composable:
    return sql.SQL("{rows_up_to} ORDER BY {descending} LIMIT {rows}").format(
        rows_up_to=_rows_up_to(query, position, sql.SQL("concat_ws(', ', {})").format(query.position)),
        descending=sql.SQL(", ").join(sql.SQL("{} DESC").format(sql.Identifier(name)) for name in query.key),
        rows=sql.Literal(rows),
    )
