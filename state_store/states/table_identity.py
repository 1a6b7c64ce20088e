"""Whether the tables of states are still those of earlier commits (HOLE_DETECTED), with one writer (GUARD_MISMATCH).

A table that was dropped and made again, or put back by itself from an older dump, lacks rows of batches that have committed.
Its rows do not show that. But it has another number in Postgres than the one that the ledger has noted
(`state_table.table_oid`), and so has a column. A table keeps its number when it is renamed, moved, rewritten or vacuumed, and
in a copy of its whole database.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from tidegate.state_store.base.errors import GuardMismatch, HoleDetected
from tidegate.state_store.connections import statement_text
from tidegate.state_store.ledger import schema_revision
from tidegate.state_store.states import state_tables

_NOTE = sa.text("""
UPDATE tidegate.state_table SET table_oid = pg_class.oid, columns = (
    SELECT jsonb_object_agg(attname, attnum) FROM pg_attribute
    WHERE attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped)
FROM pg_class
WHERE pipeline = :pipeline AND relname = state AND relnamespace = 'state'::regnamespace AND relkind IN ('r', 'p')
    AND (table_oid IS NULL OR :again)
""")
# A trigger that fires always (A) does so in sessions, too, whose session_replication_role is replica.
_GUARDED = sa.text("""
SELECT format('ALTER TABLE state.%I ENABLE ALWAYS TRIGGER %I', relname, tgname)
FROM tidegate.state_table JOIN pg_class ON relname = state AND relnamespace = 'state'::regnamespace
JOIN pg_trigger ON tgrelid = pg_class.oid AND tgfoid = 'tidegate.single_writer()'::regprocedure AND tgenabled = 'O'
WHERE pipeline = :pipeline
""")
_STRANGE = """
SELECT s.pipeline, s.state, k.txid, is_missing, is_another, unguarded, differences
FROM tidegate.state_table AS s JOIN tidegate.cursor AS k USING (pipeline)
LEFT JOIN pg_class AS c ON c.relname = s.state AND c.relnamespace = 'state'::regnamespace
CROSS JOIN LATERAL (
    SELECT k.txid > 0 AND c.oid IS NULL AS is_missing, k.txid > 0 AND (s.table_oid <> c.oid OR EXISTS (
            SELECT FROM pg_attribute WHERE attrelid = c.oid AND attnum <> CAST(s.columns ->> attname AS int)
                AND s.shape ? ('column ' || quote_ident(attname))
        )) AS is_another,
        (SELECT oid::regclass::text FROM (
            SELECT c.oid UNION ALL SELECT inhrelid FROM pg_inherits JOIN pg_class ON oid = inhrelid AND relispartition
            WHERE inhparent = c.oid) AS part (oid)
        WHERE oid IS NOT NULL AND NOT EXISTS (
            SELECT FROM pg_trigger
            WHERE tgrelid = part.oid AND tgfoid = 'tidegate.single_writer()'::regprocedure AND tgenabled = 'A'
        ) ORDER BY oid LIMIT 1) AS unguarded,
        CASE WHEN c.oid IS NOT NULL THEN tidegate.shape_differences(c.oid, s.shape || s.accepted_shape) END AS differences
) AS found
WHERE s.pipeline = ANY (:pipelines) AND s.table_oid IS NOT NULL AND s.dropped_at IS NULL
    AND (is_missing OR is_another OR unguarded IS NOT NULL OR differences IS NOT NULL)
ORDER BY s.pipeline, s.state
"""
_STRANGE_TABLES = sa.text(_STRANGE).bindparams(sa.bindparam("pipelines", type_=ARRAY(sa.Text)))


class Difference(NamedTuple):
    """A part of a table, such as ``column amount``, with what is expected and what was found; None: nothing."""

    part: str
    expected: str | None
    found: str | None

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.part} ({self.expected}) is gone"
        return f"{self.part} is {self.found}, not {self.expected}" if self.expected else f"it has {self.part} ({self.found})"


class StrangeTable(NamedTuple):
    """A table of a state that is not as its pipeline's commits have left it, or what part others may write; what is so."""

    pipeline: str
    state: str
    txid: int
    is_missing: bool
    is_another: bool
    unguarded: str | None
    differences: Any


def note(connection: Connection, pipeline: str, *, again: bool = False) -> None:
    """Note which tables a pipeline's states are, of new ones or, once it is known that they are whole, `again` of all.

    Their guard fires in every session from now on. Only the tables' owner may.
    """
    connection.execute(_NOTE, {"pipeline": pipeline, "again": again})
    for statement in connection.scalars(_GUARDED, {"pipeline": pipeline}).all():
        statement_text.ddl(connection, statement)


def strange_table() -> sa.ScalarSelect[Any]:
    """Return the first `StrangeTable` of the pipelines in the parameter `pipelines`, as JSON in a column; NULL without one."""
    found = sa.text(_STRANGE).columns(*(sa.column(name) for name in StrangeTable._fields)).subquery("strange")
    return sa.select(sa.func.to_jsonb(sa.literal_column("strange"), type_=JSONB)).select_from(found).limit(1).scalar_subquery()


def check(strange: StrangeTable | None) -> None:
    """Refuse tables that are not those of the pipeline's committed batches, are not as declared, or that others may write.

    Raises: HoleDetected, GuardMismatch.
    """
    if strange is not None:
        kind = HoleDetected if strange.is_missing or strange.is_another else GuardMismatch
        raise kind(_describe(strange))


def _strange(connection: Connection, pipelines: Collection[str]) -> Iterator[StrangeTable]:
    return map(StrangeTable._make, connection.execute(_STRANGE_TABLES, {"pipelines": list(pipelines)}))


def replaced(connection: Connection, pipelines: Collection[str]) -> dict[str, list[str]]:
    """Return, by pipeline, those tables of these that are there, and are others than those that batches have committed into."""
    found: dict[str, list[str]] = {}
    if schema_revision.has_ledger(connection):
        for row in _strange(connection, pipelines):
            if row.is_another:
                found.setdefault(row.pipeline, []).append(f"{state_tables.STATE}.{row.state}")
    return found


def losses(connection: Connection, pipelines: Collection[str]) -> dict[str, str]:
    """Return a sentence for each of these pipelines of which a table, or a column with values, is gone; for migrations.

    A migration would make it again, empty, and nothing would say later that rows are missing.
    """
    if not schema_revision.has_ledger(connection):
        return {}
    lost: dict[str, str] = {}
    for row in _strange(connection, pipelines):
        if row.is_missing:
            lost.setdefault(row.pipeline, _describe(row))
        elif row.txid and (missing := _missing_columns(row)):
            lost.setdefault(
                row.pipeline,
                f"{row.pipeline}: {missing[0]} of table {state_tables.STATE}.{row.state} is gone, with the values of committed "
                "batches. Put it back with its values: rename it back, or restore a backup of the database.",
            )
    return lost


def lacks_columns(connection: Connection, pipelines: Collection[str]) -> bool:
    """Return whether tables of states lack a column that one of these pipelines is registered with, so that commits fail."""
    return schema_revision.has_ledger(connection) and any(map(_missing_columns, _strange(connection, pipelines)))


def _missing_columns(row: StrangeTable) -> list[str]:
    return [each.part for each in differences_in(row.differences) if each.found is None and each.part.startswith("column ")]


def differences_in(found: Any) -> Iterator[Difference]:
    """Yield what ``tidegate.shape_differences`` has found."""
    yield from (Difference(*each) for each in found or ())


def _describe(row: StrangeTable) -> str:
    name = f"{state_tables.STATE}.{row.state}"
    otherwise = "restore a backup of the database; or compute the batches again, as a higher version (docs/rebuilding.md)."
    if row.is_missing:
        return (
            f"{row.pipeline}: table {name} is gone, with the rows of the batches up to txid {row.txid}. Put it back: rename "
            f"it, or move it, to where it was. If it was dropped, {otherwise}"
        )
    if row.is_another:
        return (
            f"{row.pipeline}: table {name} is another one than that of the batches up to txid {row.txid}, or a column of it "
            "is: it was dropped and made again, put back by itself or renamed, so values may be missing. If all are there, "
            f"run: tidegate migrate --accept-epoch. If not, {otherwise}"
        )
    if row.unguarded:
        guard = f"{state_tables.SINGLE_WRITER}; {state_tables.ALWAYS}".format(table=row.unguarded)
        return (
            f"{row.pipeline}: the trigger single_writer of table {row.unguarded} is disabled or gone, or does not fire in "
            "every session, so other programs may have changed its rows, and may do so again. See that they are right; then, "
            f"as the table's owner: {guard}"
        )
    differences = [str(each) for each in differences_in(row.differences)]
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    return (
        f"{row.pipeline}: table {name} is not as it is declared: {differences[0]}{more}. It could change the values of a batch "
        "as they are written, so nothing is committed. Put the table back as it was; or let it count as it is, if the values "
        f"stay right: tidegate migrate --accept-table {row.state}"
    )
