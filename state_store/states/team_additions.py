"""What a team has given to a state's table by hand (indexes, constraints, storage), for the table that takes its place.

Privileges and triggers are given to the new table while both exist (`partitions.made_like_before`). An index has a name of its
own in the schema, so it can be made again only when the former table is gone: these statements are read before that.
"""

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy import Connection, Table

# Postgres writes a definition with the former table's name. NOT NULL and primary keys are declared. What belongs to a single
# partition is left: the new table may be divided otherwise; and a divided one has no storage parameters and is not clustered.
_STATEMENTS = """
    SELECT todo FROM (
        SELECT 1 AS step, conname::text AS name, format('ALTER TABLE {made} ADD CONSTRAINT %I %s', conname,
            pg_get_constraintdef(oid)) AS todo
        FROM pg_constraint
        WHERE conrelid = '{before}'::regclass AND contype IN ('c', 'u', 'x', 'f') AND conparentid = 0
            AND conname <> ALL ({ours})
        UNION ALL
        SELECT 2, relname, replace(regexp_replace(pg_get_indexdef(indexrelid), ' ON ONLY ', ' ON '),
            format(' ON %s ', indrelid::regclass), ' ON {made} ')
        FROM pg_index JOIN pg_class ON oid = indexrelid
        WHERE indrelid = '{before}'::regclass AND relname <> ALL ({ours})
            AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid AND contype IN ('p', 'u', 'x'))
        UNION ALL
        SELECT 3, stxname, regexp_replace(pg_get_statisticsobjdef(oid), ' FROM [^ ]+$', ' FROM {made}')
        FROM pg_statistic_ext WHERE stxrelid = '{before}'::regclass
        UNION ALL
        SELECT 4, attname, format('ALTER TABLE {made} ALTER %I SET STATISTICS %s', attname, attstattarget)
        FROM pg_attribute WHERE attrelid = '{before}'::regclass AND attnum > 0 AND NOT attisdropped AND attstattarget >= 0
        UNION ALL
        SELECT 5, attname, format('COMMENT ON COLUMN {made}.%I IS %L', attname, col_description(attrelid, attnum))
        FROM pg_attribute WHERE attrelid = '{before}'::regclass AND col_description(attrelid, attnum) IS NOT NULL
        UNION ALL
        SELECT 6, '', format('COMMENT ON TABLE {made} IS %L', described)
        FROM obj_description('{before}'::regclass, 'pg_class') AS described WHERE described IS NOT NULL
        UNION ALL
        SELECT 7, '', format('ALTER TABLE {made} REPLICA IDENTITY %s', CASE relreplident
            WHEN 'f' THEN 'FULL'
            WHEN 'n' THEN 'NOTHING'
            ELSE format('USING INDEX %I', (
                SELECT regexp_replace(relname, '[$]before$', '') FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
                WHERE indrelid = '{before}'::regclass AND indisreplident)) END)
        FROM pg_class WHERE oid = '{before}'::regclass AND relreplident <> 'd'
        UNION ALL
        SELECT 8, attname, format('ALTER TABLE {made} ALTER %I %s', attname, changed)
        FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid CROSS JOIN LATERAL (VALUES
            ('SET (' || array_to_string(attoptions, ', ') || ')'),
            (CASE WHEN attstorage <> typstorage THEN 'SET STORAGE ' || CASE attstorage
                WHEN 'p' THEN 'PLAIN' WHEN 'e' THEN 'EXTERNAL' WHEN 'm' THEN 'MAIN' ELSE 'EXTENDED' END END),
            (CASE attcompression WHEN 'p' THEN 'SET COMPRESSION pglz' WHEN 'l' THEN 'SET COMPRESSION lz4' END)
        ) AS of_it (changed)
        WHERE attrelid = '{before}'::regclass AND attnum > 0 AND NOT attisdropped AND changed IS NOT NULL
        UNION ALL
        SELECT 9, '', 'ALTER TABLE {made} ' || changed
        FROM pg_class LEFT JOIN pg_class AS toast ON toast.oid = pg_class.reltoastrelid CROSS JOIN LATERAL (VALUES
            ('SET (' || array_to_string(pg_class.reloptions, ', ') || ')'),
            ('SET (toast.' || array_to_string(toast.reloptions, ', toast.') || ')'),
            ((SELECT format('CLUSTER ON %I', regexp_replace(relname, '[$]before$', ''))
                FROM pg_index JOIN pg_class AS i ON i.oid = indexrelid
                WHERE indrelid = '{before}'::regclass AND indisclustered))) AS of_it (changed)
        WHERE pg_class.oid = '{before}'::regclass AND (SELECT relkind FROM pg_class WHERE oid = '{made}'::regclass) = 'r'
            AND changed IS NOT NULL
        UNION ALL
        SELECT 10, '', format('ALTER TABLE {made} SET TABLESPACE %I', spcname)
        FROM pg_class JOIN pg_tablespace ON pg_tablespace.oid = reltablespace WHERE pg_class.oid = '{before}'::regclass
        UNION ALL
        SELECT 11, lpad(inhseqno::text, 9), format('ALTER TABLE {made} INHERIT %s', inhparent::regclass)
        FROM pg_inherits WHERE inhrelid = '{before}'::regclass
    ) AS all_of_them ORDER BY step, name"""
_REPLACED = """DO $do$
DECLARE
    given text[] := ARRAY({statements});
    statement text;
BEGIN
    DROP TABLE {before};
    FOREACH statement IN ARRAY given
    LOOP
        EXECUTE statement;
    END LOOP;
EXCEPTION WHEN feature_not_supported OR data_exception OR integrity_constraint_violation
        OR syntax_error_or_access_rule_violation THEN
    RAISE '{made} cannot have any more what your team has given to it: % (%). Drop that from the table, then migrate',
        SQLERRM, statement;
END
$do$"""


def statements(connection: Connection, table: Table) -> list[str]:
    """Return the statements that give what a team has given to a table to the one that gets its name."""
    text = _statements(made=table.fullname, before=table.fullname, ours=_ours(table))
    return list(connection.scalars(sa.text(text)))


def replaced(table: Table, before: str) -> str:
    """Return the statement that drops the table of this name, and gives what a team had given to it to the new `table`."""
    ours = [name + end for name in _ours(table) for end in ("", "$before")]
    fullname = f"{table.schema}.{before}"
    return _REPLACED.format(
        made=table.fullname, before=fullname, statements=_statements(made=table.fullname, before=fullname, ours=ours)
    )


def _statements(*, made: str, before: str, ours: Iterable[str]) -> str:
    names = ", ".join(f"'{name}'" for name in sorted(ours))
    return _STATEMENTS.format(made=made, before=before, ours=f"ARRAY[{names}]::text[]")


def _ours(table: Table) -> set[str]:
    """Return the names of a table's declared constraints and indexes."""
    return {str(each.name) for each in table.constraints if each.name} | {str(index.name) for index in table.indexes}
