"""Databases for tests: like the migrated template, and used again by the next test if a test has changed nothing but rows.

Emptying one takes a fraction of the time of making one. What a test may have changed besides rows (a column, a grant,
a comment, a disabled trigger, a setting of a role) leaves a newer row in the catalog, or one less: that database is dropped.
"""

from contextlib import closing

import psycopg2

from tests.servers import Server

# Objects that were copied from the template have its numbers, so that equal catalogs have equal rows.
FIRST_OF_USERS = 16384
# Rows of the catalog, and the column that tells which are of users' objects.
CATALOG = {
    "pg_attrdef": "adrelid",
    "pg_attribute": "attrelid",
    "pg_constraint": "oid",
    "pg_description": "objoid",
    "pg_event_trigger": "oid",
    "pg_extension": "oid",
    "pg_index": "indexrelid",
    "pg_namespace": "oid",
    "pg_policy": "oid",
    "pg_proc": "oid",
    "pg_publication": "oid",
    "pg_rewrite": "oid",
    "pg_sequence": "seqrelid",
    "pg_statistic": "starelid",
    "pg_statistic_ext": "oid",
    "pg_trigger": "oid",
    "pg_type": "oid",
}
FINGERPRINT = "SELECT string_agg(found, ' ' ORDER BY found COLLATE \"C\") FROM ({}) AS catalog (found)".format(
    " UNION ALL ".join(
        [
            *(
                f"SELECT concat_ws(' ', '{name}', count(*), max(xmin::text::bigint)) FROM {name}"
                f" WHERE {key} >= {FIRST_OF_USERS}"
                for name, key in CATALOG.items()
            ),
            # TRUNCATE writes a row of these again
            "SELECT concat_ws(' ', relname, relnamespace, relowner, relkind, relpersistence, relacl, reloptions,"
            " relispartition, relrowsecurity, relreplident, relhastriggers, relhasrules)"
            f" FROM pg_class WHERE oid >= {FIRST_OF_USERS}",
            "SELECT concat_ws(' ', datdba, datconnlimit, datallowconn, datacl) FROM pg_database"
            " WHERE datname = current_database()",
            "SELECT concat_ws(' ', setrole, setconfig) FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase"
            " WHERE datname = current_database()",
            "SELECT version_num FROM tidegate.alembic_version",
            "SELECT concat_ws(' ', defaclrole, defaclnamespace, defaclobjtype, defaclacl) FROM pg_default_acl",
        ]
    )
)
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
        """Return the name of a database that equals the template."""
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
        """Drop what is free, where the server outlives the run."""
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
