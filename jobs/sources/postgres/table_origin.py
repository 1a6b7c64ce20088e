"""Checks that a PostgresTable's server, tables, sequences and order of text keys are the same from plan to plan.

A position is the last key that was read. It means the same rows only while the table, the type of its key and the sequence
that fills it stay the same; so each batch's metadata records them:

    origin = {"server": id, "timeline": number, "tables": {oid: name}, "storage": digest, "sequences": {oid: storage},
              "types": [key's types], "keys": [[oid of the key's table, number of its column], ...], "views": {name: digest}}

A table's oid shows that it was dropped and created again; a column's number shows that another column took its name. A
table's storage changes whenever Postgres rewrites it: TRUNCATE does so, and so do VACUUM FULL and some forms of ALTER TABLE,
which keep the rows. A sequence's storage changes when it is restarted (TRUNCATE ... RESTART IDENTITY, ALTER SEQUENCE), but
setval writes in place: its value shows that. A server's timeline changes when a standby is promoted and when it is restored to
an earlier moment: rows that were read may be gone then, and their keys are drawn again for others.
"""

import re
from dataclasses import dataclass
from typing import Any

from psycopg2 import errors, sql

from tidegate.jobs.sources.postgres.table_query import TableQuery
from tidegate.jobs.sources.postgres.time_steps import step_seconds
from tidegate.state_store.base.errors import AccessRefused, SourceChanged, SourceUnreadable
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

# Our transaction has locked exactly the relations that the query reads: tables of views, partitions, both sides of a join.
_TABLES_READ = """
    SELECT c.oid::bigint, c.relkind, c.oid::regclass::text, EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid = c.oid)
    FROM pg_class AS c
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relnamespace <> 'pg_catalog'::regnamespace AND c.oid IN (
        SELECT ancestor.oid
        FROM pg_locks AS own, LATERAL (
            SELECT own.relation UNION SELECT relid FROM pg_partition_ancestors(own.relation)
        ) AS ancestor (oid)
        WHERE own.pid = pg_backend_pid() AND own.locktype = 'relation')
"""
# The tables read that are not partitions or children of others.
_ROOTS = """
    SELECT oid::text, oid::regclass::text FROM pg_class
    WHERE relkind IN ('r', 'p') AND oid = ANY(%(tables)s)
        AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = oid AND inhparent = ANY(%(tables)s))
    ORDER BY pg_class.oid
"""
# A managed server may hide its identifier; the tables' oids and storage are compared all the same.
_MAY_SEE_SERVER = "SELECT has_function_privilege(to_regprocedure('pg_control_system()'), 'EXECUTE')"
_SERVER = "SELECT system_identifier::text FROM pg_control_system()"
HIDDEN = "hidden"
_TIMELINE = "SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)"
_STORAGE = """
    SELECT md5(string_agg(relfilenode::text, ',' ORDER BY oid)) FROM pg_class WHERE relkind = 'r' AND oid = ANY(%s)
"""
_REAL_TABLES = "SELECT oid::bigint FROM pg_class WHERE relkind IN ('r', 'p') AND oid = ANY(%s)"
# The columns in which the key's values may be drawn: the key itself, in its table and its parents and children;
# for a view, the columns that it refers to; for an expression, any.
_CANDIDATES = """
    WITH RECURSIVE family (oid) AS (
        SELECT %(table)s::oid
        UNION
        SELECT CASE WHEN i.inhrelid = f.oid THEN i.inhparent ELSE i.inhrelid END
        FROM family AS f JOIN pg_inherits AS i ON f.oid IN (i.inhrelid, i.inhparent)
    ), referred (oid, number) AS (
        SELECT d.refobjid, d.refobjsubid
        FROM pg_rewrite AS r
        JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
        WHERE r.ev_class = ANY(%(tables)s)
    )
    SELECT a.attrelid AS relation, a.attnum AS number
    FROM pg_attribute AS a
    WHERE a.attrelid = ANY(%(tables)s) AND a.attnum > 0 AND NOT a.attisdropped AND CASE %(kind)s
        WHEN 'table' THEN a.attrelid IN (SELECT oid FROM family)
            AND a.attname = (SELECT attname FROM pg_attribute WHERE attrelid = %(table)s AND attnum = %(column)s)
        WHEN 'view' THEN (a.attrelid, a.attnum) IN (SELECT oid, number FROM referred)
        ELSE true END
"""
# Sequences of these columns. A sequence fills a column that is IDENTITY, or whose DEFAULT is nextval(...) and nothing more.
_SEQUENCES = """
    WITH candidate AS ({candidates}), used (sequence, fills, expression) AS (
        SELECT d.objid, d.deptype = 'i', NULL
        FROM candidate AS c
        JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass
            AND d.deptype IN ('a', 'i') AND d.refobjid = c.relation AND d.refobjsubid = c.number
        UNION ALL
        SELECT d.refobjid, true, pg_get_expr(a.adbin, a.adrelid)
        FROM candidate AS c
        JOIN pg_attrdef AS a ON a.adrelid = c.relation AND a.adnum = c.number
        JOIN pg_depend AS d ON d.classid = 'pg_attrdef'::regclass AND d.objid = a.oid AND d.refclassid = 'pg_class'::regclass
    )
    SELECT s.seqrelid::text, s.seqrelid::regclass::text, s.seqcache, s.seqincrement, s.seqcycle,
        has_sequence_privilege(s.seqrelid, 'SELECT'), quote_ident(current_user), bool_or(q.relpersistence = 'u'),
        bool_or(u.fills), max(u.expression), max(q.relfilenode::text)
    FROM used AS u JOIN pg_sequence AS s ON s.seqrelid = u.sequence JOIN pg_class AS q ON q.oid = s.seqrelid
    GROUP BY s.seqrelid, s.seqcache, s.seqincrement, s.seqcycle
    ORDER BY s.seqrelid
"""
# Another major version may write the same view otherwise. Texts and names must not depend on the role's search_path, which
# comes back with the savepoint.
_VIEWS = """
    SAVEPOINT views;
    SET LOCAL search_path = pg_catalog; SET LOCAL quote_all_identifiers = off;
    SELECT oid::regclass::text, concat(current_setting('server_version_num')::int / 10000, ' ', md5(pg_get_viewdef(oid)))
    FROM pg_class WHERE relkind = 'v' AND oid = ANY(%s)
"""
_TEXTS = ("text", "character varying", "character", "name")
# Another collation may have taken the name. The version is that of the library's rules now, which change with an operating
# system, not the one noted in the catalog.
_COLLATION = sql.SQL("""
    SELECT concat_ws(' ', pg_collation_for(tidegate_key), collation_of.oid, CASE
        WHEN collation_of.collprovider = 'd' THEN pg_database_collation_actual_version(pg_database.oid)
        ELSE pg_collation_actual_version(collation_of.oid) END)
    FROM (VALUES (1)) AS one (row) LEFT JOIN (SELECT {key} AS tidegate_key FROM {relation} LIMIT 0) AS no_rows ON true
    JOIN pg_collation AS collation_of ON collation_of.oid = pg_collation_for(tidegate_key)::regcollation
    JOIN pg_database ON datname = current_database()
""")
# Types that order the same values alike, so that a key may be widened.
_WHOLE = ("smallint", "integer", "bigint", "numeric")
_PLAIN_DEFAULT = re.compile(r"nextval\('[^()]*'::regclass\)(::[\w ]+)?")
START_AGAIN = (
    "If it is meant to be so, declare generation={generation} in the PostgresTable and raise the pipeline's version: it is "
    "then read from its beginning, and its states stay as they are. With keeps_position=True it is read on from where it "
    "stood, for rows that were put back under their old keys."
)


@dataclass(frozen=True)
class Sequence:
    """A sequence that may draw the key: its name, its storage, and the last number that it handed out."""

    oid: str
    name: str
    storage: str
    increment: int
    last: int
    fills: bool
    is_computed: bool


@dataclass(frozen=True)
class Origin:
    """Server, tables and key columns of a query's rows at one time. `table` is None for a key from a view or an expression.

    `step_seconds` is what the key's first column rounds a time to. Collations have their versions; None: no text. Views have
    digests of their texts.
    """

    server: str
    tables: dict[str, str]
    storage: str
    types: list[str]
    keys: list[list[int] | None]
    read: list[int]
    collations: list[str | None]
    views: dict[str, str]
    step_seconds: float

    @property
    def table(self) -> int | None:
        """The table of the key's first column."""
        return self.keys[0][0] if self.keys[0] else None

    def metadata(self, timeline: str, sequences: list[Sequence]) -> SourceMetadata:
        """Return the entry `origin` of a batch's metadata, with which later plans compare."""
        stored = {sequence.oid: sequence.storage for sequence in sequences}
        return {
            "server": self.server,
            "timeline": timeline,
            "tables": self.tables,
            "storage": self.storage,
            "sequences": stored,
            "types": self.types,
            "collations": self.collations,
            "views": self.views,
            "keys": self.keys,
        }


def read_origin(cursor: Any, query: TableQuery, complaint: type[SourceUnreadable] | type[SourceChanged]) -> Origin:
    """Look up server, tables and key columns of a query's rows, without reading rows.

    Raises: `complaint` for columns that do not fit; SourceUnreadable for relations that receive rows in any order.
    """
    columns = query.check_columns(cursor, complaint)
    tables = tables_read(cursor, query)
    key_columns = [columns[name] for name in query.key]
    cursor.execute(_REAL_TABLES, [[key.table for key in key_columns]])
    real_tables = {table for (table,) in cursor.fetchall()}
    keys = [[key.table, key.number] if key.table in real_tables else None for key in key_columns]
    cursor.execute(_ROOTS, {"tables": [keys[0][0]] if keys[0] else tables})
    roots = dict(cursor.fetchall())
    cursor.execute(_STORAGE, [tables])
    (storage,) = cursor.fetchone()
    cursor.execute(_VIEWS, [tables])
    views = dict(cursor.fetchall())
    cursor.execute("ROLLBACK TO SAVEPOINT views")
    types = [key.type for key in key_columns]
    step = step_seconds(cursor, query, key_columns[0], tables) if types[0] == "timestamp with time zone" else 0
    return Origin(_server(cursor), roots, storage, types, keys, tables, _collations(cursor, query, types), views, step)


def _collations(cursor: Any, query: TableQuery, types: list[str]) -> list[str | None]:
    """Return the collation of each key column, with the version of its rules."""
    found: list[str | None] = []
    for name, kind in zip(query.key, types, strict=True):
        if kind not in _TEXTS:
            found.append(None)
            continue
        cursor.execute(_COLLATION.format(key=sql.Identifier(name), relation=query.relation))
        found += cursor.fetchone()
    return found


def _server(cursor: Any) -> str:
    """Return the server's identifier, or HIDDEN if this role may not see it."""
    cursor.execute(_MAY_SEE_SERVER)
    if not cursor.fetchone()[0]:
        return HIDDEN
    cursor.execute(_SERVER)
    (server,) = cursor.fetchone()
    return str(server)


def read_timeline(cursor: Any) -> str:
    """Return the server's timeline, or HIDDEN if it does not show it."""
    cursor.execute("SAVEPOINT timeline")
    try:
        cursor.execute(_TIMELINE)
        (timeline,) = cursor.fetchone()
    except (errors.InsufficientPrivilege, errors.UndefinedFunction, errors.FeatureNotSupported):
        cursor.execute("ROLLBACK TO SAVEPOINT timeline")
        return HIDDEN
    cursor.execute("RELEASE SAVEPOINT timeline")
    return str(timeline)


def tables_read(cursor: Any, query: TableQuery) -> list[int]:
    """Return the relations that this transaction has read, and the parents through which they receive rows.

    Raises: SourceUnreadable for a relation whose open transactions are invisible, or that receives rows in any order.
    """
    cursor.execute(_TABLES_READ)
    tables = cursor.fetchall()
    for _, relkind, name, is_subscribed in tables:
        if relkind == "f":
            raise SourceUnreadable(
                f"{query.name} reads foreign table {name}, whose open transactions are elsewhere. Read it there."
            )
        if relkind == "m":
            raise SourceUnreadable(
                f"{query.name} reads materialized view {name}, whose refreshes bring rows in any order. Read the tables it is "
                "made of."
            )
        if is_subscribed:
            raise SourceUnreadable(
                f"{query.name} reads {name}, which a subscription fills in the order of its publisher's commits. Read it there."
            )
    return [table for table, *_ in tables]


def check_same_origin(query: TableQuery, before: SourceMetadata | None, now: Origin, generation: int) -> None:
    """Refuse other tables than those of earlier batches, whose positions mean nothing in them.

    Raises: SourceChanged.
    """
    if before is None:  # no range with rows was planned yet
        return
    advice = START_AGAIN.format(generation=generation + 1)
    if before["server"] != now.server:
        raise SourceChanged(
            f"{query.name} is on another server than the rows that were read before (its system identifier was "
            f"{before['server']}, now it is {now.server}). {advice}"
        )
    tables = {str(table) for table in now.read}
    for table, name in before["tables"].items():
        if table not in tables:
            raise SourceChanged(
                f"{query.name}: table {name} was dropped and created again, or another one has taken its place, since rows "
                f"were read from it (its oid was {table}). {advice}"
            )
    for view, shown in before.get("views", {}).items():
        found = now.views.get(view, "")
        if found != shown and (not found or found.split()[0] == shown.split()[0]):
            raise SourceChanged(
                f"{query.name}: view {view} was another one when rows were read. Rows that it shows only now may come before "
                f"the position, and would be passed over. {advice}"
            )
    _check_same_order(query, before, now, advice)
    for key, place, place_now in zip(query.key, before["keys"], now.keys, strict=True):
        if place != place_now:
            raise SourceChanged(
                f"{query.name}: what is called {key} is not the column any more from which keys were read: it was renamed, or "
                f"a view has taken the table's place. {advice}"
            )


def _check_same_order(query: TableQuery, before: SourceMetadata, now: Origin, advice: str) -> None:
    """Refuse key columns of other types or collations: what came before the position may come after it now."""
    for key, was, is_now in zip(query.key, before["types"], now.types, strict=True):
        if was != is_now and not (was in _WHOLE and is_now in _WHOLE):
            raise SourceChanged(
                f"{query.name}: key column {key} was {was} when rows were read, now it is {is_now}: they may be in another "
                f"order. {advice}"
            )
    for key, was_ordered, is_ordered in zip(query.key, before.get("collations", now.collations), now.collations, strict=True):
        if was_ordered != is_ordered:
            raise SourceChanged(
                f"{query.name}: key column {key} had collation {was_ordered} when rows were read, now it has {is_ordered}: "
                f"what came before the position in one order may come after it in the other, and would be passed over. {advice}"
            )


def check_timeline(query: TableQuery, previous: SourceMetadata, now: str, generation: int) -> None:
    """Refuse another timeline of the server than that of the previous batch; one that was, or is, hidden shows nothing.

    Raises: SourceChanged.
    """
    before = previous["origin"]["timeline"] if "origin" in previous else HIDDEN  # no range with rows was planned yet
    if HIDDEN not in (before, now) and before != now:
        raise SourceChanged(
            f"{query.name}: a standby was promoted in its server's place, or the server was restored to an earlier moment, "
            f"since rows were read (timeline {before}, now {now}). Rows that it has lost may have been read, and others that "
            "get their keys never are. If it has lost none, as where only synchronous standbys are promoted, declare "
            f'failover="go-on" in the PostgresTable. {START_AGAIN.format(generation=generation + 1)}'
        )


def read_sequences(cursor: Any, query: TableQuery, origin: Origin, *, is_promised: bool) -> list[Sequence]:
    """Return the sequences that may draw the key, after checking that they hand out numbers in order.

    A sequence that this role may not see is left out if the author promises that keys are drawn.

    Raises: SourceUnreadable; AccessRefused for a sequence whose value this role may not see.
    """
    kind = "table" if origin.table else "view" if query.table else "any"
    table, column = origin.keys[0] or (0, 0)
    place = {"tables": origin.read, "table": table, "column": column, "kind": kind}
    cursor.execute(_SEQUENCES.format(candidates=_CANDIDATES), place)
    sequences = []
    for oid, name, cache, increment, cycles, is_seen, role, is_unlogged, fills, expression, storage in cursor.fetchall():
        if disorder := _disorder(name, cache, is_unlogged, goes_back=increment < 0 or cycles):
            raise SourceUnreadable(f"{query.name}: sequence {name} {disorder}")
        if not is_seen and is_promised:
            continue
        if not is_seen:
            raise AccessRefused(
                f"{query.name}: role {role} cannot see where sequence {name} stands, so keys that it did not draw would go "
                f"unnoticed. Run: GRANT SELECT ON SEQUENCE {name} TO {role}"
            )
        cursor.execute(sql.SQL("SELECT last_value, is_called FROM {}").format(sql.SQL(name)))  # quoted by regclass
        last, is_called = cursor.fetchone()
        is_computed = expression is not None and not _PLAIN_DEFAULT.fullmatch(expression)
        handed_out = last if is_called else last - increment
        sequences.append(Sequence(oid, name, storage, increment, handed_out, fills and not is_computed, is_computed))
    return sequences


def _disorder(name: str, cache: int, is_unlogged: bool, *, goes_back: bool) -> str | None:
    """Return why a sequence hands out lower numbers after higher ones; None if it does not."""
    if cache > 1:
        return (
            f"has CACHE {cache}, so sessions keep low keys for later, and rows would be skipped. Run ALTER SEQUENCE {name} "
            "CACHE 1, then reconnect all writers."
        )
    if goes_back:
        return "counts down or starts over, so its keys do not increase."
    if is_unlogged:
        return (
            "is unlogged: after a crash of the server it begins again, and draws keys that were read already. Run ALTER "
            "TABLE ... SET LOGGED on its table."
        )
    return None


def drawn_by(query: TableQuery, origin: Origin, sequences: list[Sequence], *, is_promised: bool) -> Sequence | None:
    """Return the sequence that draws the key; None if there is only the author's promise.

    Raises: SourceUnreadable if there is no sequence, or more than one.
    """
    filling = [sequence for sequence in sequences if sequence.fills]
    key = query.key[0]
    is_number = origin.types[0] in _WHOLE
    if len(filling) == 1 and is_number:
        return filling[0]
    if is_promised:
        return None
    promise = (
        f'Read by a time and the key, as in key=("updated_at", "{key}"); or declare key_is_drawn=True, if each INSERT itself '
        "draws a higher key than all before, as a trigger with nextval does."
    )
    if not is_number:
        raise SourceUnreadable(
            f"{query.name}: key column {key} is {origin.types[0]}, whose order is not that in which rows are written: 'A10' "
            f"is below 'A9', and a uuid comes anywhere. {promise}"
        )
    if filling:
        names = " and ".join(sequence.name for sequence in filling)
        raise SourceUnreadable(
            f"{query.name}: its key {key} may be drawn from sequences {names}, whose numbers do not follow one another: rows "
            f"of the slower one would be passed by. Read each table by a pipeline of its own, or name the key's column in a "
            f"query without a view or an expression. {promise}"
        )
    how = f"; a DEFAULT computes it from {sequences[0].name}" if sequences and sequences[0].is_computed else ""
    raise SourceUnreadable(
        f"{query.name}: key column {key} is not filled by a sequence{how}. Lower keys may come after higher ones, and would "
        f"never be read. {promise}"
    )
