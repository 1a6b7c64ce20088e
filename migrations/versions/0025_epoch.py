"""Epoch: which incarnation of the database answers, by what a server that is not ours lets its users see."""

from alembic import op

revision = "0025"
down_revision = "0024"

EPOCH = """
CREATE FUNCTION tidegate.epoch() RETURNS text LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE
    server text := 'ledger ' || 'tidegate.cursor'::regclass::oid;
    timeline text := '-';
    number oid := (SELECT oid FROM pg_database WHERE datname = current_database());
BEGIN
    -- What the owner may not call is an error only when its statement runs.
    IF has_function_privilege(to_regprocedure('pg_control_system()'), 'EXECUTE') THEN
        server := (SELECT system_identifier FROM pg_control_system());
    END IF;
    BEGIN
        timeline := left(pg_walfile_name(pg_current_wal_insert_lsn()), 8);
    EXCEPTION WHEN insufficient_privilege OR undefined_function OR feature_not_supported THEN
        NULL;
    END;
    RETURN server || '/' || timeline || '/' || number;
END $$;
"""
GRANTS = """
REVOKE EXECUTE ON FUNCTION tidegate.epoch() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tidegate.epoch() TO tidegate, tidegate_reader;
"""


def upgrade() -> None:
    op.execute(EPOCH)
    op.execute(GRANTS)


def downgrade() -> None:
    op.execute("DROP FUNCTION tidegate.epoch()")
