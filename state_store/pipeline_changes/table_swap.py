"""Tables take the place of those of states, with what the team had given to these: of a rebuild, or divided otherwise."""

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import OID, REGCLASS
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.schema import AddConstraint

from tidegate.state_store.base.errors import DeclarationChanged
from tidegate.state_store.connections import statement_text
from tidegate.state_store.connections.local_settings import set_local
from tidegate.state_store.connections.postgres_errors import dependents, message_of
from tidegate.state_store.connections.statement_text import in_state, quoted
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateSpec
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import range_partitions, state_tables, team_additions

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

# Takes a table that new tables' default privileges have opened from the roles that may not read the table that it will replace.
_HIDDEN = """DO $do$
DECLARE
    statement text;
BEGIN
    FOR statement IN
        SELECT format('REVOKE ALL ON %s FROM %s', made.oid::regclass, coalesce(quote_ident(rolname), 'PUBLIC'))
        FROM pg_class AS before, pg_class AS made, aclexplode(made.relacl) LEFT JOIN pg_roles ON pg_roles.oid = grantee
        WHERE before.oid = '{before}'::regclass AND made.oid = '{made}'::regclass
            AND privilege_type = 'SELECT' AND grantee <> made.relowner
            AND coalesce(rolname, '') NOT IN ('tidegate', 'tidegate_stager')
            AND (before.relrowsecurity OR NOT has_table_privilege(grantee, before.oid, 'SELECT'))
    LOOP
        EXECUTE statement;
    END LOOP;
END
$do$"""

# What else of the team's was accepted of a table, such as a trigger, the one in its place is given, too.
_NOTED = sa.text("""
UPDATE tidegate.state_table AS old SET pruned_txid = new.pruned_txid, accepted_shape = new.accepted_shape || (
    SELECT coalesce(jsonb_object_agg(key, value), '{}') FROM jsonb_each(old.accepted_shape)
    WHERE NOT starts_with(key, 'column '))
FROM tidegate.state_table AS new WHERE old.state = :old AND new.state = :new
""")


def hide(connection: Connection, spec: PipelineSpec, rebuild: PipelineSpec) -> None:
    """Take the new tables and views of a rebuild from readers who may not read all of what these will replace.

    The owner, commits, and Spark's tasks, which are given what they need, keep them.
    """
    for state, rebuilt in zip(spec.readable, rebuild.readable, strict=True):
        replaced, made = ([*state_tables.tables_of(each), state_tables.readable_of(each)] for each in (state, rebuilt))
        for old, new in zip(replaced, made, strict=True):
            if sa.inspect(connection).has_table(old.name, schema=old.schema):
                statement_text.ddl(connection, _HIDDEN.format(before=old.fullname, made=new.fullname))


def empty(connection: Connection, spec: PipelineSpec, before: PipelineSpec) -> None:
    """Empty the tables of the states that a pipeline still declares: a rebuild will take their place.

    Migrations then change empty tables, of which the ledger notes nothing, and which are not divided by a column that is to
    divide them no longer: Postgres would neither drop it nor take it out of the key. Readers wait from now on.

    Raises: DeclarationChanged if a table of the team's refers to one by a foreign key.
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
                _drop(connection, spec.name, f"TRUNCATE {statement_text.in_state(table.name)}", table.name)
            divides = range_partitions.dividing_column(connection, state.name) if state.appends else None
            if divides is not None and divides not in kept.required:
                make_again(connection, spec.name, state, divides)


def make_lost(connection: Connection, before: PipelineSpec) -> None:
    """Make those tables of a pipeline's registered states that are gone, empty: it may be rebuilt because they are."""
    state_tables.metadata_of((before,)).create_all(connection)


def partition_count(connection: Connection, spec: PipelineSpec) -> int:
    """Return how many partitions commits have made for the states of a pipeline."""
    r, s = tables.state_range.c, tables.state_table.c
    made = sa.select(sa.func.count()).select_from(tables.state_range).join(tables.state_table, r.state == s.state)
    return connection.scalar(made.where(s.pipeline == spec.name)) or 0


def take_place(connection: Connection, pipeline: str, state: StateSpec, rebuilt: StateSpec) -> None:
    """Put the tables of a rebuilt state, or of one that is divided otherwise, in the place of the state's, of the same columns.

    They get what the team has given to those: privileges, triggers, constraints, indexes, statistics, comments. Rows of those
    are gone.

    Raises: DeclarationChanged if a view or something else depends on a table that is replaced, or the new rows break one of
    these constraints.
    """
    for each in (state, rebuilt):
        if each.history:
            _drop(connection, pipeline, state_tables.drop_of_view(state_tables.STATE, each), each.name)
    for old, new in zip(state_tables.tables_of(state), state_tables.tables_of(rebuilt), strict=True):
        team_additions.check_replaceable(connection, pipeline, old, new)
        given = team_additions.statements(connection, new, old)
        _drop(connection, pipeline, f"DROP TABLE {statement_text.in_state(old.name)}", old.name)
        names = {"before": new.name, "state_before": rebuilt.name, "state": state.name}
        statement_text.ddl(connection, _RENAMED.format(schema=state_tables.STATE, **names))
        for statement in given:
            _give(connection, pipeline, statement, old)
        for statement in state_tables.after_create(state, old.name):
            if statement.startswith("GRANT"):  # what the former declaration may not have needed
                statement_text.ddl(connection, statement)


def _give(connection: Connection, pipeline: str, statement: str, table: sa.Table) -> None:
    """Give a table what the team had given to the one in whose place it is."""
    try:
        statement_text.ddl(connection, statement)
    except (DataError, IntegrityError, NotSupportedError, ProgrammingError) as error:
        raise DeclarationChanged(
            f"{pipeline}: no other table can take the place of {table.fullname}, to which your team has given what another "
            f"cannot have: {message_of(error.orig)} ({statement}). Drop that from {table.fullname}, then run: tidegate "
            "migrate. Nothing was changed."
        ) from error


def divide(connection: Connection, spec: PipelineSpec) -> None:
    """Make those tables of a registered pipeline again, with their rows, that are not divided as is declared.

    Raises: what `make_again` raises.
    """
    for state, divides in range_partitions.divided_otherwise(connection, [spec]):
        make_again(connection, spec.name, state, divides)


def make_again(connection: Connection, pipeline: str, state: StateSpec, divides: str | None = None) -> None:
    """Make a state's table again, divided as is declared, with its rows; `divides` is the column that divides it now.

    Commits and readers wait from now on.

    Raises: DeclarationChanged as `take_place`; BadKey for a row without a value in the column that is to divide the table.
    """
    s, r, table = tables.state_table.c, tables.state_range.c, state_tables.state_table_of(state)
    team_additions.check_replaceable(connection, pipeline, table, table)
    made = _empty_copy(connection, state, divides)
    new = state_tables.state_table_of(made)
    # The new table is the pipeline's from now on: its partitions are made as those of any other.
    noted = sa.select(sa.literal(new.name), s.pipeline, s.pruned_txid, s.accepted_shape).where(s.state == table.name)
    columns = ["state", "pipeline", "pruned_txid", "accepted_shape"]
    connection.execute(sa.insert(tables.state_table).from_select(columns, noted))
    connection.execute(sa.delete(tables.state_range).where(r.state == table.name))
    set_local(connection, {"tidegate.writer": pipeline})
    found = sa.inspect(connection).get_columns(table.name, schema=table.schema)
    names = [column["name"] for column in found if "computed" not in column]
    if state.ranges:
        values = sa.select(table.c[state.ranges.column])
        range_partitions.add_missing(connection, range_partitions.rows_of(made), values, most=None)
    before, after = (sa.table(each.name, *map(sa.column, names), schema=each.schema) for each in (table, new))
    connection.execute(sa.insert(after).from_select(names, sa.select(before)))
    # If the table is the one into which batches have committed, registration notes the new one in its place.
    is_known = s.table_oid == sa.cast(sa.cast(table.fullname, REGCLASS), OID)
    connection.execute(sa.update(tables.state_table).where(s.state == table.name, is_known).values(table_oid=None))
    take_place(connection, pipeline, state, made)
    move_notes(connection, pipeline, state, made)
    connection.execute(sa.delete(tables.state_table).where(s.state == new.name))


def divide_without_rows(connection: Connection, specs: Sequence[PipelineSpec]) -> None:
    """Put empty tables in the place of those that are not divided as is declared, for a comparison that is then taken back."""
    for state, divides in range_partitions.divided_otherwise(connection, specs):
        made = _empty_copy(connection, state, divides)
        for name, other in ((state.name, f"{state.name}$before"), (made.name, state.name)):
            statement_text.ddl(connection, f"ALTER TABLE {in_state(name)} RENAME TO {quoted(other)}")


def _empty_copy(connection: Connection, state: StateSpec, divides: str | None) -> StateSpec:
    """Lock a state's table, make an empty one of its columns, divided as is declared, and return the state of that."""
    made = replace(state, name=f"{state.name[:36]}__v0")  # no rebuild is of version 0
    table, new = state_tables.state_table_of(state), state_tables.state_table_of(made)
    statement_text.ddl(connection, f"LOCK TABLE {in_state(table.name)} IN ACCESS EXCLUSIVE MODE")
    by = f" PARTITION BY RANGE ({quoted(state.ranges.column)})" if state.ranges else ""
    like = f"(LIKE {in_state(table.name)} INCLUDING DEFAULTS INCLUDING GENERATED)"
    statement_text.ddl(connection, f"CREATE TABLE {in_state(new.name)} {like}{by}")
    if divides is not None:
        statement_text.ddl(connection, f"ALTER TABLE {in_state(new.name)} ALTER {quoted(divides)} DROP NOT NULL")
    connection.execute(AddConstraint(new.primary_key))
    return made


def move_notes(connection: Connection, pipeline: str, state: StateSpec, rebuilt: StateSpec) -> None:
    """Give a state's tables what the ledger notes of those in their place.

    That is: partitions, removed changes, accepted columns, and the watermark.

    The pipeline owns the state's tables already.
    """
    r, w = tables.state_range.c, tables.watermark.c
    for old, new in zip(state_tables.tables_of(state), state_tables.tables_of(rebuilt), strict=True):
        partition = sa.func.replace(r.partition, new.name, old.name)
        moved = sa.update(tables.state_range).where(r.state == new.name)
        connection.execute(moved.values(state=old.name, partition=partition))
        connection.execute(_NOTED, {"old": old.name, "new": new.name})
    moved = sa.update(tables.watermark).where(w.state == rebuilt.name)
    connection.execute(moved.values(state=state.name, pipeline=pipeline))


def _drop(connection: Connection, pipeline: str, statement: str, name: str) -> None:
    try:
        statement_text.ddl(connection, statement)
    except DBAPIError as error:
        if (detail := dependents(error.orig)) is None:
            raise
        raise DeclarationChanged(
            f"{pipeline}: no other table can take the place of {state_tables.STATE}.{name}: {detail}. Drop that first,"
            " then run: tidegate migrate; and make it again afterwards. Nothing was changed."
        ) from error
