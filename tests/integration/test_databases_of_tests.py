"""A test's database is used again if it equals the template, and else dropped."""

from contextlib import closing

import psycopg2
import pytest

from tests.databases import Pool
from tests.servers import Server

ROWS = """
    CREATE TABLE state.some (key text PRIMARY KEY);
    INSERT INTO state.some VALUES ('a');
    CREATE TABLE staging.some_1_1 (LIKE state.some);
    SET session_replication_role = replica;
    INSERT INTO tidegate.plan (pipeline) VALUES ('orders');
"""
CHANGES = {
    "a column": "ALTER TABLE tidegate.commit ADD remark text",
    "a column less": "ALTER TABLE tidegate.commit DROP skipped_reason CASCADE",
    "a trigger that is off": "ALTER TABLE tidegate.batch DISABLE TRIGGER ALL",
    "a comment": "COMMENT ON TABLE tidegate.commit IS 'ours'",
    "a grant": "GRANT SELECT ON tidegate.cursor TO PUBLIC",
    "a grant less": "REVOKE ALL ON tidegate.cursor FROM tidegate",
    "another function": "CREATE OR REPLACE FUNCTION tidegate.epoch() RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$",
    "a setting of a role": "ALTER ROLE tidegate IN DATABASE {} SET work_mem = '8MB'",
    "a setting of the database": "ALTER DATABASE {} SET work_mem = '8MB'",
    "statistics": "ANALYZE tidegate.alembic_version",
    "a table elsewhere": "CREATE TABLE public.orders (id int)",
    "an index": "CREATE INDEX ON tidegate.commit (committed_at)",
    "another revision": "UPDATE tidegate.alembic_version SET version_num = '0'",
}


@pytest.fixture
def pool(server: Server, template: str) -> Pool:
    return Pool(server, template)


def run(server: Server, name: str, statements: str) -> None:
    """Run statements as the administrator, and leave the session open."""
    connection = psycopg2.connect(**{**server.settings.conninfo(user="postgres"), "dbname": name})
    connection.autocommit = True
    connection.cursor().execute(statements)


def test_rows_and_states_go_and_the_database_stays(pool: Pool, server: Server) -> None:
    first = pool.take()
    run(server, first, ROWS)
    pool.give_back(first)
    assert pool.take() == first
    with closing(psycopg2.connect(**{**server.settings.conninfo(user="postgres"), "dbname": first})) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT count(*) FROM pg_tables WHERE schemaname IN ('state', 'staging')")
        assert cursor.fetchone() == (0,)
        cursor.execute("SELECT count(*) FROM tidegate.plan")
        assert cursor.fetchone() == (0,)
    server.drop_database(first)


@pytest.mark.soak
def test_a_database_that_differs_from_the_template_is_not_used_again(pool: Pool, server: Server) -> None:
    kept = []
    for change, statement in CHANGES.items():
        name = pool.take()
        run(server, name, statement.format(name))
        pool.give_back(name)
        if pool._free:
            kept.append(change)
            pool.drop_all()
    assert kept == []
