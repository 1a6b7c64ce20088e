"""Hash partitions: the table of a state with many keys, split into smaller ones by a hash of the key.

A commit writes them through the table of the state's name, and Postgres divides the rows, so only the creation of the table
depends on them. All rows of a key are in one partition: of a state with windows every window, of a history every version.
Partitions are vacuumed and reindexed one by one. Their names have a $, which no declared name has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import OID

from state_store.declaration import PipelineSpec, StateSpec
from state_store.errors import SchemaOutOfDate

_CLASS = sa.table("pg_class", *map(sa.column, ("oid", "relkind", "relpartbound")), schema="pg_catalog")
_INHERITS = sa.table("pg_inherits", *map(sa.column, ("inhrelid", "inhparent", "inhdetachpending")), schema="pg_catalog")
# Gives a table that was made again what the one before has beyond its declaration: exactly its privileges, and the
# triggers that it lacks. Each partition has the table's privileges. Done where the migration runs, as databases differ.
# Row-level security is refused: without it, hidden rows would show; and a forced one may have hidden rows from the copy.
_MADE_LIKE_BEFORE = """DO $do$
DECLARE
    statement text;
BEGIN
    IF (SELECT relrowsecurity FROM pg_class WHERE oid = '{before}'::regclass)
        OR EXISTS (SELECT FROM pg_policy WHERE polrelid = '{before}'::regclass) THEN
        RAISE '{made} has row-level security, which the table that is made again would lack: drop it with its policies,
            migrate, then make both again';
    END IF;
    FOR statement IN
        WITH made (made) AS (
            SELECT '{made}'::regclass
            UNION ALL SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = '{made}'::regclass
        ), before AS (
            SELECT * FROM pg_class WHERE oid = '{before}'::regclass
        ), named (oid, name) AS (
            SELECT 0::oid, 'PUBLIC' UNION ALL SELECT oid, quote_ident(rolname) FROM pg_roles
        ), granted AS (
            SELECT 0 AS part, '' AS columns, a.* FROM before, aclexplode(relacl) WITH ORDINALITY AS a WHERE grantee <> relowner
            UNION ALL
            SELECT attnum, format('(%I)', attname), a.*
            FROM before JOIN pg_attribute ON attrelid = oid, aclexplode(attacl) WITH ORDINALITY AS a WHERE attnum > 0
        ), triggers AS (
            SELECT * FROM pg_trigger WHERE tgrelid = '{before}'::regclass AND NOT tgisinternal AND NOT EXISTS (
                SELECT FROM pg_trigger AS same WHERE same.tgrelid = '{made}'::regclass AND same.tgname = pg_trigger.tgname)
        )
        SELECT todo FROM (
            SELECT 1, 0, 0, format('REVOKE ALL ON %s FROM %s', made, name)
            FROM made JOIN pg_class ON oid = made, aclexplode(relacl) JOIN named ON named.oid = grantee
            WHERE grantee <> relowner
            UNION ALL
            SELECT 2, part, ordinality, format(
                'GRANT %s %s ON %s TO %s%s', privilege_type, columns, made, name,
                CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
            FROM granted JOIN named ON named.oid = grantee, made
            UNION ALL
            SELECT 3, 0, 0, replace(pg_get_triggerdef(oid), ' ON {quoted} ', ' ON {made} ') FROM triggers
            UNION ALL
            SELECT 4, 0, 0, format(
                'ALTER TABLE {made} %s TRIGGER %I',
                CASE tgenabled WHEN 'D' THEN 'DISABLE' WHEN 'A' THEN 'ENABLE ALWAYS' ELSE 'ENABLE REPLICA' END, tgname)
            FROM triggers WHERE tgenabled <> 'O'
        ) AS all_of_them (step, part, number, todo) ORDER BY step, part, number
    LOOP
        EXECUTE statement;
    END LOOP;
END
$do$"""


def partitioned_by(state: StateSpec) -> str:
    """Return the SQL of what the table is partitioned by."""
    quote = postgresql.dialect().identifier_preparer.quote  # type: ignore[no-untyped-call]
    return f"HASH ({', '.join(quote(key.name) for key in state.hashed_keys)})"


def made(schema: str | None, state: StateSpec, storage: dict[str, Any], after: Sequence[str]) -> Iterator[str]:
    """Yield the statements that create each partition of a table, followed by those of `after`, with its name in them."""
    options = ", ".join(f"{name} = {value}" for name, value in storage.items())
    for number, name in enumerate(_names(state)):
        table = f"{schema}.{name}"
        yield (
            f"CREATE TABLE {table} PARTITION OF {schema}.{state.table_name} "
            f"FOR VALUES WITH (MODULUS {state.hash_partitions}, REMAINDER {number}) WITH ({options})"
        )
        yield from (statement.format(table=table) for statement in after)


def check_complete(connection: Connection, schema: str, specs: Sequence[PipelineSpec]) -> None:
    """Refuse tables that lack a partition: a table created from one would lack the partition's rows.

    Raises: SchemaOutOfDate.
    """
    for state in (state for spec in specs for state in spec.readable):
        check_whole(connection, schema, state)


def check_whole(connection: Connection, schema: str, state: StateSpec) -> None:
    """Refuse a table that lacks a partition: for readers, its keys would have no rows.

    Raises: SchemaOutOfDate.
    """
    table = f"{schema}.{state.table_name}"
    moduli = _moduli(connection, table)
    if moduli is not None and (refusal := why_not_whole(table, moduli)):
        raise refusal


def why_not_whole(table: str, moduli: Sequence[int]) -> SchemaOutOfDate | None:
    """Return the error for a table with these moduli, one per partition; None if it has all partitions."""
    if set(moduli) == {len(moduli)}:
        return None
    divided = f"{len(moduli)} of {max(moduli)}" if moduli else "none"
    return SchemaOutOfDate(
        f"Table {table} is not divided as its migration made it: of its hash partitions, it has {divided}. What was "
        "detached is missing with all its keys: attach it again with its former modulus and remainder "
        f"(ALTER TABLE {table} ATTACH PARTITION ...; if its detaching was broken off, end that first: DETACH PARTITION ... "
        "FINALIZE), then run: tidegate migrate. Nothing was changed."
    )


def differing(connection: Connection, schema: str, specs: Sequence[PipelineSpec]) -> list[tuple[StateSpec, StateSpec]]:
    """Return the states whose tables have another number of partitions than is declared: as declared, and as found."""
    differing = []
    for state in (state for spec in specs for state in spec.readable):
        moduli = _moduli(connection, f"{schema}.{state.table_name}")
        if moduli is not None and len(moduli) != state.hash_partitions:
            differing.append((state, replace(state, hash_partitions=len(moduli))))
    return differing


def _moduli(connection: Connection, table: str) -> list[int] | None:
    """Return the modulus of each partition of a table: a single 1 if it is not divided, None if there is no such table.

    A partition that is being detached concurrently, or whose detaching was broken off, is gone for every query.
    """
    name = sa.cast(sa.func.to_regclass(table), OID)
    parent = connection.execute(sa.select(_CLASS.c.oid, _CLASS.c.relkind).where(_CLASS.c.oid == name)).one_or_none()
    if parent is None or parent.relkind != "p":
        return None if parent is None else [1]
    bound = sa.func.pg_get_expr(_CLASS.c.relpartbound, _CLASS.c.oid)
    modulus = sa.cast(sa.func.substring(bound, r"modulus (\d+)"), sa.Integer)
    parts = _CLASS.join(_INHERITS, _INHERITS.c.inhrelid == _CLASS.c.oid)
    there = _INHERITS.c.inhparent == parent.oid, sa.not_(_INHERITS.c.inhdetachpending)
    return list(connection.scalars(sa.select(modulus).select_from(parts).where(*there)))


def set_aside(table: Table, state: StateSpec) -> Iterator[str]:
    """Yield the statements that rename a table, its partitions and indexes, to make room for one with the same names."""
    for name in (table.name, *_names(state)):
        yield f"ALTER TABLE {table.schema}.{name} RENAME TO {name}$before"
    for name in sorted(str(part.name) for part in _indexed(table)):
        yield f"ALTER INDEX {table.schema}.{name} RENAME TO {name}$before"


def moved_back(table: Table) -> Iterator[str]:
    """Yield the statements that copy the table that was set aside, but for its declaration, and drop it."""
    before = sa.table(
        f"{table.name}$before", *(sa.column(c.name) for c in table.columns if c.computed is None), schema=table.schema
    )
    copy = sa.insert(table).from_select(before.c.keys(), sa.select(before))
    # The trigger, which refuses all writers but the pipeline's commits, would refuse this copy.
    yield f"ALTER TABLE {table.fullname} DISABLE TRIGGER single_writer"
    yield str(copy.compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]
    yield f"ALTER TABLE {table.fullname} ENABLE TRIGGER single_writer"
    quoted = f'{table.schema}."{table.name}$before"'
    like_before = _MADE_LIKE_BEFORE.format(made=table.fullname, before=f"{table.fullname}$before", quoted=quoted)
    yield " ".join(like_before.split())  # one line of the migration
    yield f"DROP TABLE {table.fullname}$before"


def _names(state: StateSpec) -> list[str]:
    """Return the names of a state's partitions; none without."""
    return [f"{state.table_name}${number}" for number in range(state.hash_partitions)] if state.hash_partitions > 1 else []


def _indexed(table: Table) -> Iterator[sa.PrimaryKeyConstraint | sa.UniqueConstraint | sa.Index]:
    for part in (*table.constraints, *table.indexes):
        if isinstance(part, sa.PrimaryKeyConstraint | sa.UniqueConstraint | sa.Index) and part.columns:
            yield part  # SQLAlchemy gives each table a primary key, without columns if there is none
