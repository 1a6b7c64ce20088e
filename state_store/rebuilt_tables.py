"""The tables of a rebuild take the place of a pipeline's: they get their names, privileges, triggers and the team's indexes."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError

from state_store import history_views, partitions, state_tables, tables
from state_store.database import set_local
from state_store.declaration import PipelineSpec, StateSpec
from state_store.driver_errors import dependents
from state_store.errors import DeclarationChanged

# Gives a table, its partitions, and their indexes and constraints the names of another table, wherever they contain its own.
# A constraint that a partition inherits has its parent's name.
_RENAMED = """DO $do$
DECLARE
    statement text;
BEGIN
    FOR statement IN
        WITH renamed (oid) AS (
            SELECT '{schema}.{before}'::regclass::oid
            UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = '{schema}.{before}'::regclass
        )
        SELECT todo FROM (
            SELECT 1, format('ALTER TABLE %s RENAME CONSTRAINT %I TO %I', conrelid::regclass, conname,
                             replace(conname, '{state_before}', '{state}'))
            FROM pg_constraint JOIN renamed ON conrelid = renamed.oid
            WHERE coninhcount = 0 AND strpos(conname, '{state_before}') > 0
            UNION ALL
            SELECT 2, format('ALTER INDEX {schema}.%I RENAME TO %I', relname, replace(relname, '{state_before}', '{state}'))
            FROM pg_index JOIN renamed ON indrelid = renamed.oid JOIN pg_class ON pg_class.oid = indexrelid
            WHERE strpos(relname, '{state_before}') > 0
                AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid AND coninhcount = 0)
            UNION ALL
            SELECT 3, format('ALTER TABLE {schema}.%I RENAME TO %I', relname, replace(relname, '{state_before}', '{state}'))
            FROM pg_class JOIN renamed USING (oid)
        ) AS all_of_them (step, todo) ORDER BY step
    LOOP
        EXECUTE statement;
    END LOOP;
END
$do$"""


def empty(connection: Connection, spec: PipelineSpec, before: PipelineSpec) -> None:
    """Empty the tables of the states that a pipeline still declares: a rebuild will take their place.

    Migrations then change empty tables, of which the ledger notes nothing. Readers wait from now on.
    """
    make_lost(connection, before)
    set_local(connection, {"tidegate.writer": spec.name})
    r, w = tables.state_range.c, tables.watermark.c
    connection.execute(sa.delete(tables.state_range).where(r.state.in_(before.tables)))
    connection.execute(sa.delete(tables.watermark).where(w.state.in_([state.name for state in before.states])))
    for state in before.readable:
        kept = spec.state(state.name)
        if kept is not None and kept.is_table:
            for table in state_tables.tables_of(state):
                connection.execute(sa.DDL(f"TRUNCATE {_quoted(table.name)}"))  # type: ignore[no-untyped-call]
                for part in _size_partitions_of(connection, table):
                    _drop(connection, spec.name, f"DROP TABLE {_quoted(part)}", part)


def make_lost(connection: Connection, before: PipelineSpec) -> None:
    """Make those tables of a pipeline's registered states that are gone, empty: it may be rebuilt because they are."""
    state_tables.metadata_of((before,)).create_all(connection)


def partition_count(connection: Connection, spec: PipelineSpec) -> int:
    """Return how many partitions commits have made for the states of a pipeline."""
    r, s = tables.state_range.c, tables.state_table.c
    made = sa.select(sa.func.count()).select_from(tables.state_range).join(tables.state_table, r.state == s.state)
    return connection.scalar(made.where(s.pipeline == spec.name)) or 0


def take_place(connection: Connection, pipeline: str, state: StateSpec, rebuilt: StateSpec) -> None:
    """Put the tables of a rebuilt state in the place of the state's, which are empty and have the same columns.

    They get what the team has given to those: privileges, triggers and indexes.

    Raises: DeclarationChanged if a view or something else depends on a table that is replaced.
    """
    for each in (state, rebuilt):
        if each.history:
            _drop(connection, pipeline, history_views.drop_of(state_tables.STATE, each), each.name)
    for old, new in zip(state_tables.tables_of(state), state_tables.tables_of(rebuilt), strict=True):
        like_before = partitions.made_like_before(new, old.name)
        connection.execute(sa.DDL(like_before.replace("%", "%%")))  # type: ignore[no-untyped-call]
        for statement in state_tables.after_create(rebuilt, new.name):
            if statement.startswith("GRANT"):  # what the former declaration may not have needed
                connection.execute(sa.DDL(statement))  # type: ignore[no-untyped-call]
        _check_not_published(connection, pipeline, old)
        indexes = _indexes_of_the_team(connection, old)
        _drop(connection, pipeline, f"DROP TABLE {_quoted(old.name)}", old.name)
        names = {"before": new.name, "state_before": rebuilt.name, "state": state.name}
        renamed = _RENAMED.format(schema=state_tables.STATE, **names)
        connection.execute(sa.DDL(renamed.replace("%", "%%")))  # type: ignore[no-untyped-call]
        for index in indexes:
            connection.execute(sa.DDL(index.replace("%", "%%")))  # type: ignore[no-untyped-call]


def move_notes(connection: Connection, pipeline: str, state: StateSpec, rebuilt: StateSpec) -> None:
    """Give a state's tables what the ledger notes of the rebuilt ones: partitions, removed changes, and the watermark.

    The pipeline owns the state's tables already.
    """
    r, s, w = tables.state_range.c, tables.state_table.c, tables.watermark.c
    for old, new in zip(state_tables.tables_of(state), state_tables.tables_of(rebuilt), strict=True):
        partition = sa.func.replace(r.partition, new.name, old.name)
        moved = sa.update(tables.state_range).where(r.state == new.name)
        connection.execute(moved.values(state=old.name, partition=partition))
        pruned = connection.scalar(sa.select(s.pruned_txid).where(s.state == new.name))
        connection.execute(sa.update(tables.state_table).where(s.state == old.name).values(pruned_txid=pruned))
    moved = sa.update(tables.watermark).where(w.state == rebuilt.name)
    connection.execute(moved.values(state=state.name, pipeline=pipeline))


def _size_partitions_of(connection: Connection, table: sa.Table) -> list[str]:
    """Return the tables that commits have made for what a state records; one of the team's that inherits is in the way."""
    found = sa.text(
        "SELECT relname FROM pg_inherits JOIN pg_class AS child ON child.oid = inhrelid WHERE NOT relispartition"
        " AND inhparent = CAST(:table AS regclass) AND relnamespace = CAST(:schema AS regnamespace)"
        " AND starts_with(relname, :prefix) ORDER BY relname"
    )
    given = {"table": table.fullname, "schema": table.schema, "prefix": f"{table.name}$"}
    return list(connection.scalars(found, given))


def _indexes_of_the_team(connection: Connection, table: sa.Table) -> list[str]:
    """Return the statements that create the indexes of a table beyond its declaration; they name the table, not its number."""
    ours = [str(index.name) for index in table.indexes]
    found: Any = sa.text(
        "SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"
        " WHERE indrelid = CAST(:table AS regclass) AND relname <> ALL (:ours)"
        " AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid) ORDER BY relname"
    )
    definitions = connection.scalars(found, {"table": table.fullname, "ours": ours})
    return [definition.replace(" ON ONLY ", " ON ", 1) for definition in definitions]  # as of a divided table


def _check_not_published(connection: Connection, pipeline: str, table: sa.Table) -> None:
    """Refuse to replace a table that a publication names: subscribers would be emptied, and get nothing from then on.

    Raises: DeclarationChanged.
    """
    named = sa.text(
        "SELECT pubname FROM pg_publication_rel JOIN pg_publication ON pg_publication.oid = prpubid"
        " WHERE prrelid = CAST(:table AS regclass) ORDER BY pubname"
    )
    if names := list(connection.scalars(named, {"table": table.fullname})):
        raise DeclarationChanged(
            f"{pipeline}: the rebuilt state cannot take the place of {table.fullname}, which is in publication {names[0]}: its "
            "subscribers would be emptied. Take it out, migrate, and add it again. Nothing was changed.",
            pipeline=pipeline,
        )


def _drop(connection: Connection, pipeline: str, statement: str, name: str) -> None:
    try:
        connection.execute(sa.DDL(statement))  # type: ignore[no-untyped-call]
    except DBAPIError as error:
        if (detail := dependents(error.orig)) is None:
            raise
        raise DeclarationChanged(
            f"{pipeline}: the rebuilt state cannot take the place of {state_tables.STATE}.{name}: {detail}. Drop "
            "that first, then run: tidegate migrate; and make it again afterwards. Nothing was changed.",
            pipeline=pipeline,
        ) from error


def _quoted(table: str) -> str:
    quote = postgresql.dialect().identifier_preparer.quote  # type: ignore[no-untyped-call]
    return f"{state_tables.STATE}.{quote(table)}"
