"""The ledger: pipelines, batches, attempts, seals, cursors and commits, and who may do what to them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None


# A batch's phase is derived from its rows, in the order in which they overrule each other.
BATCHES = """
CREATE VIEW tidegate.batches AS
SELECT b.pipeline, b.txid,
       CASE WHEN c.txid IS NOT NULL THEN 'committed'
            WHEN b.halted_at IS NOT NULL THEN 'halted'
            WHEN a.attempt IS NULL THEN 'planned'
            WHEN a.sealed_at IS NOT NULL THEN 'processed'
            WHEN a.failed_at IS NOT NULL THEN 'failed'
            ELSE 'processing' END AS phase,
       coalesce(c.attempt, b.attempt) AS attempt,
       a.source_rows, c.key_count, b.opened_at, a.started_at, a.sealed_at, c.committed_at, a.owner,
       CASE WHEN c.txid IS NOT NULL THEN NULL
            WHEN b.halted_at IS NOT NULL THEN b.halted_reason
            WHEN a.failed_at IS NOT NULL THEN a.error
            WHEN a.attempt IS NULL THEN 'a run that processes it'
            WHEN a.sealed_at IS NULL THEN 'attempt ' || a.attempt || ' by ' || a.owner
            WHEN b.txid > k.txid + 1 THEN 'txid ' || k.txid + 1 || ' to commit'
            ELSE 'its commit' END AS waits_for
FROM tidegate.batch b
JOIN tidegate.cursor k ON k.pipeline = b.pipeline
LEFT JOIN tidegate.commit c ON c.pipeline = b.pipeline AND c.txid = b.txid
LEFT JOIN tidegate.attempt a
       ON a.pipeline = b.pipeline AND a.txid = b.txid AND a.attempt = coalesce(c.attempt, b.attempt)
"""
LAG = """
CREATE VIEW tidegate.lag AS
SELECT k.pipeline, k.txid AS committed, coalesce(o.txid, 0) AS opened, coalesce(o.txid, 0) - k.txid AS pending,
       c.committed_at,
       (SELECT 'txid ' || n.txid || ': ' || n.waits_for FROM tidegate.batches n
         WHERE n.pipeline = k.pipeline AND n.txid = k.txid + 1) AS waits_for
FROM tidegate.cursor k
LEFT JOIN tidegate.commit c ON c.pipeline = k.pipeline AND c.txid = k.txid
LEFT JOIN LATERAL (SELECT max(txid) AS txid FROM tidegate.batch b WHERE b.pipeline = k.pipeline) o ON true
"""
# A state table has one writer. The commit names itself for the length of its transaction; anybody else is refused, with
# the grants as the outer wall.
SINGLE_WRITER = """
CREATE FUNCTION tidegate.single_writer() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
DECLARE
    owner text := (SELECT pipeline FROM tidegate.state_table WHERE state = TG_TABLE_NAME);
BEGIN
    IF owner IS NULL THEN
        RAISE EXCEPTION 'state.% belongs to no registered pipeline', TG_TABLE_NAME
            USING ERRCODE = 'insufficient_privilege', HINT = 'Run: tidegate migrate';
    END IF;
    IF owner IS DISTINCT FROM nullif(current_setting('tidegate.writer', true), '') THEN
        RAISE EXCEPTION 'state.% is written by the commits of pipeline % only', TG_TABLE_NAME, owner
            USING ERRCODE = 'insufficient_privilege',
                  HINT = 'To change it by hand all the same: SET tidegate.writer = ' || quote_literal(owner);
    END IF;
    RETURN NULL;
END $$
"""
# The worker may not edit frozen metadata, delete, or truncate; the stager reaches only the tables it is given.
GRANTS = (
    "GRANT USAGE ON SCHEMA tidegate TO tidegate, tidegate_reader",
    "GRANT USAGE ON SCHEMA state TO tidegate, tidegate_reader",
    "GRANT USAGE, CREATE ON SCHEMA staging TO tidegate",
    "GRANT USAGE ON SCHEMA staging TO tidegate_stager",
    "GRANT SELECT ON ALL TABLES IN SCHEMA tidegate TO tidegate, tidegate_reader",
    "GRANT INSERT ON tidegate.batch, tidegate.attempt, tidegate.seal, tidegate.commit, tidegate.run_batch TO tidegate",
    "GRANT UPDATE (attempt, halted_at, halted_reason) ON tidegate.batch TO tidegate",
    "GRANT UPDATE (sealed_at, failed_at, error, source_rows, dropped_at) ON tidegate.attempt TO tidegate",
    "GRANT UPDATE (txid, attempt, source_digest) ON tidegate.cursor TO tidegate",
    "ALTER DEFAULT PRIVILEGES IN SCHEMA state GRANT SELECT, INSERT, UPDATE ON TABLES TO tidegate",
    "ALTER DEFAULT PRIVILEGES IN SCHEMA state GRANT SELECT ON TABLES TO tidegate_reader",
)


def upgrade() -> None:
    op.execute("CREATE SCHEMA state")
    op.execute("CREATE SCHEMA staging")
    op.create_table(
        "pipeline",
        sa.Column("pipeline", sa.Text(), nullable=False, comment="its name, as declared in jobs/pipelines"),
        sa.Column("source_kind", sa.Text(), nullable=False),
        sa.Column(
            "fingerprint",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of the declaration; attempts and commits compare it",
        ),
        sa.Column(
            "declaration",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="the declaration itself, for people",
        ),
        sa.Column(
            "registered_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="when this declaration was registered",
        ),
        sa.CheckConstraint("source_kind IN ('transactional')", name=op.f("ck_pipeline_source_kind")),
        sa.PrimaryKeyConstraint("pipeline", name=op.f("pk_pipeline")),
        schema="tidegate",
        comment="The registered pipelines.",
    )
    op.create_table(
        "batch",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column(
            "source_metadata",
            postgresql.BYTEA(),
            nullable=False,
            comment="what is needed to read exactly this batch; never edited",
        ),
        sa.Column("source_digest", postgresql.BYTEA(), nullable=False, comment="its SHA-256"),
        sa.Column("opened_by", sa.Text(), nullable=False, comment="the run that planned it"),
        sa.Column(
            "opened_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="when its metadata was frozen",
        ),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False, comment="newest attempt: the fence"),
        sa.Column("halted_at", sa.TIMESTAMP(timezone=True), nullable=True, comment="since when nobody retries it by itself"),
        sa.Column("halted_reason", sa.Text(), nullable=True, comment="why, in one line"),
        sa.CheckConstraint("(halted_at IS NULL) = (halted_reason IS NULL)", name=op.f("ck_batch_halted")),
        sa.CheckConstraint("txid >= 1", name=op.f("ck_batch_txid")),
        sa.ForeignKeyConstraint(["pipeline"], ["tidegate.pipeline.pipeline"], name=op.f("fk_batch_pipeline")),
        sa.PrimaryKeyConstraint("pipeline", "txid", name=op.f("pk_batch")),
        schema="tidegate",
        comment="One row per txid with its frozen source metadata.",
    )
    op.create_table(
        "cursor",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), nullable=False, comment="last committed txid"),
        sa.Column("attempt", sa.Integer(), nullable=True, comment="its attempt; NULL before the first commit"),
        sa.Column("source_digest", postgresql.BYTEA(), nullable=True, comment="SHA-256 of its source metadata"),
        sa.Column("epoch", sa.Text(), nullable=False, comment="which database incarnation: system identifier and timeline"),
        sa.CheckConstraint("txid >= 0", name=op.f("ck_cursor_txid")),
        sa.ForeignKeyConstraint(["pipeline"], ["tidegate.pipeline.pipeline"], name=op.f("fk_cursor_pipeline")),
        sa.PrimaryKeyConstraint("pipeline", name=op.f("pk_cursor")),
        schema="tidegate",
        comment="One row per pipeline. Every commit holds its row lock; order and exactly-once are decided under it.",
    )
    op.create_table(
        "state_table",
        sa.Column("state", sa.Text(), nullable=False, comment="name of the table in schema state"),
        sa.Column("pipeline", sa.Text(), nullable=False, comment="its only writer"),
        sa.ForeignKeyConstraint(["pipeline"], ["tidegate.pipeline.pipeline"], name=op.f("fk_state_table_pipeline")),
        sa.PrimaryKeyConstraint("state", name=op.f("pk_state_table")),
        schema="tidegate",
        comment="Which pipeline owns which state table: one writer each.",
    )
    op.create_table(
        "attempt",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False, comment="numbered by the store, from 1"),
        sa.Column("owner", sa.Text(), nullable=False, comment="who runs it, for people"),
        sa.Column("fingerprint", sa.Text(), nullable=False, comment="declaration that computes the partials"),
        sa.Column(
            "started_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="when it took the fence",
        ),
        sa.Column("sealed_at", sa.TIMESTAMP(timezone=True), nullable=True, comment="when its staging was complete"),
        sa.Column("failed_at", sa.TIMESTAMP(timezone=True), nullable=True, comment="when it gave up"),
        sa.Column("error", sa.Text(), nullable=True, comment="why it gave up: code and message"),
        sa.Column("source_rows", sa.BigInteger(), nullable=True, comment="rows that the source emitted"),
        sa.Column("dropped_at", sa.TIMESTAMP(timezone=True), nullable=True, comment="when its staging was dropped"),
        sa.CheckConstraint("(failed_at IS NULL) = (error IS NULL)", name=op.f("ck_attempt_error")),
        sa.CheckConstraint("sealed_at IS NULL OR failed_at IS NULL", name=op.f("ck_attempt_one_end")),
        sa.ForeignKeyConstraint(
            ["pipeline", "txid"], ["tidegate.batch.pipeline", "tidegate.batch.txid"], name=op.f("fk_attempt_batch")
        ),
        sa.PrimaryKeyConstraint("pipeline", "txid", "attempt", name=op.f("pk_attempt")),
        schema="tidegate",
        comment="One row per try at a batch.",
    )
    op.create_table(
        "run_batch",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False, comment="the Airflow run, or the command line's own name"),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False, comment="from 0: Airflow's map index"),
        sa.Column("txid", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["pipeline", "txid"], ["tidegate.batch.pipeline", "tidegate.batch.txid"], name=op.f("fk_run_batch_batch")
        ),
        sa.PrimaryKeyConstraint("pipeline", "run_id", "position", name=op.f("pk_run_batch")),
        schema="tidegate",
        comment="Which txids a run covers: a plan that is tried again finds its own answer.",
    )
    op.create_table(
        "commit",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("source_digest", postgresql.BYTEA(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False, comment="who committed it, for people"),
        sa.Column("key_count", sa.BigInteger(), nullable=False, comment="state rows it wrote, over all states"),
        sa.Column(
            "committed_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="when its transaction began",
        ),
        sa.ForeignKeyConstraint(
            ["pipeline", "txid", "attempt"],
            ["tidegate.attempt.pipeline", "tidegate.attempt.txid", "tidegate.attempt.attempt"],
            name=op.f("fk_commit_attempt"),
        ),
        sa.PrimaryKeyConstraint("pipeline", "txid", name=op.f("pk_commit")),
        schema="tidegate",
        comment="One row per committed txid, written in the commit's own transaction.",
    )
    op.create_table(
        "seal",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("partition", sa.Integer(), autoincrement=False, nullable=False, comment="Spark partition"),
        sa.Column("task_attempt", sa.BigInteger(), nullable=False, comment="the one Spark task attempt whose rows count"),
        sa.Column("rows", sa.BigInteger(), nullable=False, comment="rows it staged"),
        sa.Column("digest", sa.BigInteger(), nullable=False, comment="XOR of the rows' 64-bit hashes, in any order"),
        sa.CheckConstraint("rows > 0", name=op.f("ck_seal_rows")),
        sa.ForeignKeyConstraint(
            ["pipeline", "txid", "attempt"],
            ["tidegate.attempt.pipeline", "tidegate.attempt.txid", "tidegate.attempt.attempt"],
            name=op.f("fk_seal_attempt"),
        ),
        sa.PrimaryKeyConstraint("pipeline", "txid", "attempt", "state", "partition", name=op.f("pk_seal")),
        schema="tidegate",
        comment="What a sealed attempt staged: one task attempt per partition. Partitions without rows have no row.",
    )
    for statement in (BATCHES, LAG, SINGLE_WRITER, *GRANTS):
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP SCHEMA staging CASCADE")  # attempts' tables: their ledger goes with them
    op.execute("DROP SCHEMA state")  # refuses while a state table is left
    op.execute("DROP VIEW tidegate.lag, tidegate.batches")
    op.execute("DROP FUNCTION tidegate.single_writer")
    op.drop_table("seal", schema="tidegate")
    op.drop_table("commit", schema="tidegate")
    op.drop_table("run_batch", schema="tidegate")
    op.drop_table("attempt", schema="tidegate")
    op.drop_table("state_table", schema="tidegate")
    op.drop_table("cursor", schema="tidegate")
    op.drop_table("batch", schema="tidegate")
    op.drop_table("pipeline", schema="tidegate")
