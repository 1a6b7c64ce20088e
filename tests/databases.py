"""Databases for tests: like the migrated template, and used again by the next test if a test has changed nothing but rows.

Emptying one takes a fraction of the time of making one. What a test may have changed besides rows (a column, a grant,
a comment, a disabled trigger, a setting of a role) leaves a newer row in the catalog, or one less: that database is dropped.
"""

from contextlib import closing

import psycopg2

from tests.servers import Server

# Objects that were copied from the template have its numbers, so that equal catalogs have equal rows.
FIRST_OF_USERS = 16384
# Tables of the catalog, by the column that tells which of their rows are of users' objects.
CATALOG = {
    "oid": "constraint event_trigger extension namespace policy proc publication rewrite statistic_ext trigger type",
    "adrelid": "attrdef",
    "attrelid": "attribute",
    "objoid": "description",
    "indexrelid": "index",
    "seqrelid": "sequence",
    "starelid": "statistic",
}
NEWEST_ROWS = [
    f"SELECT concat_ws(' ', '{name}', count(*), max(xmin::text::bigint)) FROM pg_{name} WHERE {key} >= {FIRST_OF_USERS}"
    for key, names in CATALOG.items()
    for name in names.split()
]
# TRUNCATE writes a row of pg_class again, so what is in it is compared.
FINGERPRINT = f"""
SELECT string_agg(found, ' ' ORDER BY found COLLATE "C") FROM (
    {" UNION ALL ".join(NEWEST_ROWS)}
    UNION ALL SELECT concat_ws(' ', relname, relnamespace, relowner, relkind, relpersistence, relacl, reloptions,
        relispartition, relrowsecurity, relreplident, relhastriggers, relhasrules) FROM pg_class WHERE oid >= {FIRST_OF_USERS}
    UNION ALL SELECT concat_ws(' ', datdba, datconnlimit, datallowconn, datacl, setrole, setconfig)
        FROM pg_database d LEFT JOIN pg_db_role_setting s ON s.setdatabase = d.oid WHERE datname = current_database()
    UNION ALL SELECT version_num FROM tidegate.alembic_version
    UNION ALL SELECT concat_ws(' ', defaclrole, defaclnamespace, defaclobjtype, defaclacl) FROM pg_default_acl
) AS catalog (found)
"""
EMPTY = """
DO $$
DECLARE
    found text;
    is_large boolean;
BEGIN
    PERFORM pg_terminate_backend(pid, 10000) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend';
    SET LOCAL session_replication_role = replica;
    SELECT string_agg(oid::regclass::text, ', ') INTO found FROM pg_class
        WHERE relnamespace IN ('state'::regnamespace, 'staging'::regnamespace) AND relkind IN ('r', 'p') AND NOT relispartition;
    IF found IS NOT NULL THEN
        EXECUTE 'DROP TABLE ' || found || ' CASCADE';
    END IF;
    FOR found, is_large IN SELECT oid::regclass::text, pg_relation_size(oid) > 1000000 FROM pg_class
        WHERE relnamespace = 'tidegate'::regnamespace AND relkind = 'r' AND relname <> 'alembic_version'
        AND pg_relation_size(oid) > 0
    LOOP
        EXECUTE CASE WHEN is_large THEN 'TRUNCATE ' || found || ' CASCADE' ELSE 'DELETE FROM ' || found END;
    END LOOP;
END $$
"""


class Pool:
    """The databases of one process on one server, copied from a template."""

    def __init__(self, server: Server, template: str) -> None:
        self._server = server
        self._template = template
        self._fingerprint: str | None = None
        self._free: list[str] = []

    def take(self) -> str:
        if self._free:
            return self._free.pop()
        name = self._server.create_database(self._template)
        if self._fingerprint is None:  # of a copy: nobody connects to the template, which nobody could copy meanwhile
            self._fingerprint = self._emptied(name)
        return name

    def give_back(self, name: str) -> None:
        """Empty a database for the next test; drop it if it does not equal the template then."""
        try:
            is_as_before = self._emptied(name) == self._fingerprint
        except psycopg2.Error:  # a test may have shut itself out
            is_as_before = False
        if is_as_before:
            self._free.append(name)
        else:
            self._server.drop_database(name)

    def drop_all(self) -> None:
        while self._free:
            self._server.drop_database(self._free.pop())

    def _emptied(self, name: str) -> str:
        """Remove all rows, states and staging from a database; return a fingerprint of all else."""
        with closing(psycopg2.connect(**{**self._server.settings.conninfo(user="postgres"), "dbname": name})) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(EMPTY)
                cursor.execute(FINGERPRINT)
                return str(cursor.fetchone()[0])
