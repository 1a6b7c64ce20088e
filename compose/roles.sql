-- Creates roles and databases, once, when the cluster is new; the same as in tidegate/stack/components/postgres.py.
-- psql itself reads the passwords, so they are in no environment and no argument.

\set password `cat /run/secrets/postgres_tidegate_owner`
CREATE ROLE tidegate_owner LOGIN PASSWORD :'password'; -- migrates
\set password `cat /run/secrets/postgres_tidegate`
CREATE ROLE tidegate LOGIN PASSWORD :'password'; -- plans, processes, commits
\set password `cat /run/secrets/postgres_tidegate_stager`
CREATE ROLE tidegate_stager LOGIN PASSWORD :'password'; -- Spark's executors: stages rows
\set password `cat /run/secrets/postgres_tidegate_reader`
CREATE ROLE tidegate_reader LOGIN PASSWORD :'password'; -- people: reads
\set password `cat /run/secrets/postgres_airflow`
CREATE ROLE airflow LOGIN PASSWORD :'password'; -- Airflow's own metadata
\unset password
-- psql goes on when a file cannot be read; a role without a password could never log in.
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_authid WHERE rolcanlogin AND rolpassword IS NULL) THEN
        RAISE 'A file in /run/secrets cannot be read. Run compose/secrets.sh, then: docker compose down --volumes';
    END IF;
END $$;

CREATE DATABASE tidegate OWNER tidegate_owner;
CREATE DATABASE airflow OWNER airflow;

-- Only roles that need a database can connect to it; inside, the migrations grant what each role needs.
REVOKE ALL ON DATABASE tidegate, airflow, postgres, template1 FROM PUBLIC;
GRANT CONNECT ON DATABASE tidegate TO tidegate, tidegate_stager, tidegate_reader;
