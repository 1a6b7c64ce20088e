"""What a team has given to a state's table by hand (privileges, triggers, indexes), for the table that takes its place.

An index has a name of its own in the schema, so it can be made again only when the former table is gone: the statements are
read while both are there.
"""

import sqlalchemy as sa
from sqlalchemy import Connection, Table

from tidegate.state_store.base.errors import DeclarationChanged

# Row-level security is in the way: without it, hidden rows would show; and a forced one may have hidden rows from a copy.
_IN_THE_WAY = sa.text("""
    SELECT what, remedy FROM (
        SELECT 'has row-level security', 'Drop it with its policies, migrate, and make both'
        FROM pg_class WHERE oid = CAST(:table AS regclass)
            AND (relrowsecurity OR EXISTS (SELECT FROM pg_policy WHERE polrelid = pg_class.oid))
        UNION ALL
        SELECT format('is in publication %I: its subscribers would be emptied', pubname),
            CASE WHEN puballtables OR pnnspid IS NOT NULL THEN 'Drop that publication, migrate, and make it'
                ELSE 'Take it out, migrate, and add it' END
        FROM pg_publication LEFT JOIN pg_publication_rel ON prpubid = pg_publication.oid
        LEFT JOIN pg_publication_namespace ON pnpubid = pg_publication.oid AND pnnspid = CAST(:schema AS regnamespace)
        WHERE puballtables OR pnnspid IS NOT NULL OR prrelid = CAST(:table AS regclass)
            OR prrelid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = CAST(:table AS regclass))
        UNION ALL
        SELECT 'has a rule', 'Drop it, migrate, and make it' FROM pg_rewrite WHERE ev_class = CAST(:table AS regclass)
        UNION ALL
        SELECT 'is a partition of another table', 'Detach it, migrate, and attach it'
        FROM pg_class WHERE oid = CAST(:table AS regclass) AND relispartition
        UNION ALL
        SELECT format('has column %I, which is not declared', attname),
            'Keep its values elsewhere, drop it, migrate, and add it'
        FROM pg_attribute WHERE attrelid = CAST(:table AS regclass) AND attnum > 0 AND NOT attisdropped
            AND attname <> ALL (SELECT attname FROM pg_attribute WHERE attrelid = CAST(:made AS regclass))
    ) AS found (what, remedy) LIMIT 1
""")
# Exactly the former table's privileges, and the triggers that the new one lacks. Postgres writes a definition with the former
# table's name. NOT NULL and primary keys are declared. What belongs to a single partition is left: the new table may be divided
# otherwise; and a divided one has no storage parameters and is not clustered.
_STATEMENTS = """
    WITH triggers AS (
        SELECT * FROM pg_trigger WHERE tgrelid = '{before}'::regclass AND NOT tgisinternal
            AND tgname <> ALL (SELECT tgname FROM pg_trigger WHERE tgrelid = '{new}'::regclass)
    ), granted AS (
        SELECT 0 AS part, '' AS columns, relacl AS acl FROM pg_class WHERE oid = '{before}'::regclass
        UNION ALL
        SELECT attnum, format('(%I)', attname), attacl FROM pg_attribute WHERE attrelid = '{before}'::regclass AND attnum > 0
    )
    SELECT todo FROM (
        SELECT 1 AS step, '' AS name, format('REVOKE ALL ON {made} FROM %s',
            CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END) AS todo
        FROM pg_class, aclexplode(relacl) WHERE oid = '{new}'::regclass AND grantee <> relowner
        UNION ALL
        SELECT 2, lpad(part::text, 5, '0') || lpad(ordinality::text, 5, '0'), format('GRANT %s %s ON {made} TO %s%s',
            privilege_type, columns, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END,
            CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
        FROM granted, aclexplode(acl) WITH ORDINALITY
        WHERE grantee <> (SELECT relowner FROM pg_class WHERE oid = '{before}'::regclass)
        UNION ALL
        SELECT 3, tgname, replace(pg_get_triggerdef(oid), format(' ON %s ', tgrelid::regclass), ' ON {made} ') FROM triggers
        UNION ALL
        SELECT 4, tgname, format('ALTER TABLE {made} %s TRIGGER %I', CASE tgenabled
            WHEN 'D' THEN 'DISABLE' WHEN 'A' THEN 'ENABLE ALWAYS' ELSE 'ENABLE REPLICA' END, tgname)
        FROM triggers WHERE tgenabled <> 'O'
        UNION ALL
        SELECT 5, conname, format('ALTER TABLE {made} ADD CONSTRAINT %I %s', conname,
            pg_get_constraintdef(oid))
        FROM pg_constraint
        WHERE conrelid = '{before}'::regclass AND contype IN ('c', 'u', 'x', 'f') AND conparentid = 0
            AND conname <> ALL ({ours})
        UNION ALL
        SELECT 6, relname, replace(regexp_replace(pg_get_indexdef(indexrelid), ' ON ONLY ', ' ON '),
            format(' ON %s ', indrelid::regclass), ' ON {made} ')
        FROM pg_index JOIN pg_class ON oid = indexrelid
        WHERE indrelid = '{before}'::regclass AND relname <> ALL ({ours})
            AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid AND contype IN ('p', 'u', 'x'))
        UNION ALL
        SELECT 7, stxname, regexp_replace(pg_get_statisticsobjdef(oid), ' FROM [^ ]+$', ' FROM {made}')
        FROM pg_statistic_ext WHERE stxrelid = '{before}'::regclass
        UNION ALL
        SELECT 8, attname, format('ALTER TABLE {made} ALTER %I SET STATISTICS %s', attname, attstattarget)
        FROM pg_attribute WHERE attrelid = '{before}'::regclass AND attnum > 0 AND NOT attisdropped AND attstattarget >= 0
        UNION ALL
        SELECT 9, attname, format('COMMENT ON COLUMN {made}.%I IS %L', attname, col_description(attrelid, attnum))
        FROM pg_attribute WHERE attrelid = '{before}'::regclass AND col_description(attrelid, attnum) IS NOT NULL
        UNION ALL
        SELECT 10, '', format('COMMENT ON TABLE {made} IS %L', described)
        FROM obj_description('{before}'::regclass, 'pg_class') AS described WHERE described IS NOT NULL
        UNION ALL
        SELECT 11, '', format('ALTER TABLE {made} REPLICA IDENTITY %s', CASE relreplident
            WHEN 'f' THEN 'FULL'
            WHEN 'n' THEN 'NOTHING'
            ELSE format('USING INDEX %I', (
                SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
                WHERE indrelid = '{before}'::regclass AND indisreplident)) END)
        FROM pg_class WHERE oid = '{before}'::regclass AND relreplident <> 'd'
        UNION ALL
        SELECT 12, attname, format('ALTER TABLE {made} ALTER %I %s', attname, changed)
        FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid CROSS JOIN LATERAL (VALUES
            ('SET (' || array_to_string(attoptions, ', ') || ')'),
            (CASE WHEN attstorage <> typstorage THEN 'SET STORAGE ' || CASE attstorage
                WHEN 'p' THEN 'PLAIN' WHEN 'e' THEN 'EXTERNAL' WHEN 'm' THEN 'MAIN' ELSE 'EXTENDED' END END),
            (CASE attcompression WHEN 'p' THEN 'SET COMPRESSION pglz' WHEN 'l' THEN 'SET COMPRESSION lz4' END)
        ) AS of_it (changed)
        WHERE attrelid = '{before}'::regclass AND attnum > 0 AND NOT attisdropped AND changed IS NOT NULL
        UNION ALL
        SELECT 13, '', 'ALTER TABLE {made} ' || changed
        FROM pg_class LEFT JOIN pg_class AS toast ON toast.oid = pg_class.reltoastrelid CROSS JOIN LATERAL (VALUES
            ('SET (' || array_to_string(pg_class.reloptions, ', ') || ')'),
            ('SET (toast.' || array_to_string(toast.reloptions, ', toast.') || ')'),
            ((SELECT format('CLUSTER ON %I', relname)
                FROM pg_index JOIN pg_class AS i ON i.oid = indexrelid
                WHERE indrelid = '{before}'::regclass AND indisclustered))) AS of_it (changed)
        WHERE pg_class.oid = '{before}'::regclass AND (SELECT relkind FROM pg_class WHERE oid = '{new}'::regclass) = 'r'
            AND changed IS NOT NULL
        UNION ALL
        SELECT 14, '', format('ALTER TABLE {made} SET TABLESPACE %I', spcname)
        FROM pg_class JOIN pg_tablespace ON pg_tablespace.oid = reltablespace WHERE pg_class.oid = '{before}'::regclass
        UNION ALL
        SELECT 15, lpad(inhseqno::text, 9), format('ALTER TABLE {made} INHERIT %s', inhparent::regclass)
        FROM pg_inherits WHERE inhrelid = '{before}'::regclass
    ) AS all_of_them ORDER BY step, name"""


def check_replaceable(connection: Connection, pipeline: str, table: Table, made: Table) -> None:
    """Refuse to put a table that was `made` in the place of one with what that would lack.

    Raises: DeclarationChanged.
    """
    for what, remedy in connection.execute(
        _IN_THE_WAY, {"table": table.fullname, "made": made.fullname, "schema": table.schema}
    ):
        raise DeclarationChanged(
            f"{pipeline}: no other table can take the place of {table.fullname}, which {what}. {remedy} again. Nothing was "
            "changed."
        )


def statements(connection: Connection, new: Table, former: Table) -> list[str]:
    """Return the statements that give what a team has given to a table to the new one, once that has its name."""
    ours = {str(each.name) for each in former.constraints if each.name} | {str(index.name) for index in former.indexes}
    listed = ", ".join(f"'{name}'" for name in sorted(ours))
    names = {"made": former.fullname, "new": new.fullname, "before": former.fullname, "ours": f"ARRAY[{listed}]::text[]"}
    return list(connection.scalars(sa.text(_STATEMENTS.format(**names))))
