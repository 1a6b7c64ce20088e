-- The database of Tidegate as it is made: schemas, the ledger's tables, views, functions, aggregates and grants. The first migration
-- runs this file (migrations/versions/0001_ledger.py). For statements of SQLAlchemy, tables.py reads the tables from it: each
-- column is a line of its own, indented by four blanks.

CREATE SCHEMA IF NOT EXISTS tidegate; -- Alembic's table of versions may be in it already
CREATE SCHEMA state;
CREATE SCHEMA staging;

-- What has happened to a batch is recorded in rows and times.

CREATE TABLE tidegate.pipeline (
    pipeline text NOT NULL,
    source_kind text NOT NULL,
    fingerprint text NOT NULL,
    declaration jsonb NOT NULL,
    in_flight integer NOT NULL DEFAULT 16,
    commits_alone boolean NOT NULL DEFAULT false,
    registered_at timestamptz NOT NULL DEFAULT now(),
    paused_at timestamptz,
    paused_by text,
    paused_reason text,
    retired_at timestamptz,
    retired_by text,
    retired_reason text,
    CONSTRAINT pk_pipeline PRIMARY KEY (pipeline),
    CONSTRAINT ck_pipeline_paused CHECK (num_nulls(paused_at, paused_by, paused_reason) IN (0, 3)),
    CONSTRAINT ck_pipeline_retired CHECK (num_nulls(retired_at, retired_by, retired_reason) IN (0, 3)),
    CONSTRAINT ck_pipeline_source_kind CHECK (source_kind IN ('transactional', 'opaque', 'non-transactional'))
);
COMMENT ON TABLE tidegate.pipeline IS 'The registered pipelines.';
COMMENT ON COLUMN tidegate.pipeline.pipeline IS 'its name, as declared in jobs/pipelines';
COMMENT ON COLUMN tidegate.pipeline.fingerprint IS 'SHA-256 of the declaration; attempts and commits compare it';
COMMENT ON COLUMN tidegate.pipeline.declaration IS 'the declaration itself';
COMMENT ON COLUMN tidegate.pipeline.in_flight IS 'most batches begun and not committed';
COMMENT ON COLUMN tidegate.pipeline.commits_alone IS 'whether each batch is merged by itself';
COMMENT ON COLUMN tidegate.pipeline.registered_at IS 'when this declaration was registered';
COMMENT ON COLUMN tidegate.pipeline.paused_at IS 'since when no run and no batch begins';
COMMENT ON COLUMN tidegate.pipeline.retired_at IS 'since when no batch of it counts any more';

CREATE TABLE tidegate.state_table (
    state text NOT NULL,
    pipeline text NOT NULL,
    pruned_txid bigint NOT NULL DEFAULT 0,
    dropped_at timestamptz,
    table_oid oid,
    columns jsonb,
    shape jsonb,
    accepted_shape jsonb NOT NULL DEFAULT '{}',
    CONSTRAINT pk_state_table PRIMARY KEY (state),
    CONSTRAINT fk_state_table_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline)
);
COMMENT ON TABLE tidegate.state_table IS 'Which pipeline owns which state table: one writer each.';
COMMENT ON COLUMN tidegate.state_table.state IS 'name of the table in schema state';
COMMENT ON COLUMN tidegate.state_table.pipeline IS 'its only writer';
COMMENT ON COLUMN tidegate.state_table.pruned_txid IS 'of changes: those up to here were removed';
COMMENT ON COLUMN tidegate.state_table.dropped_at IS 'since when it is dropped, as its pipeline is retired';
COMMENT ON COLUMN tidegate.state_table.table_oid IS 'its number in Postgres; NULL: not noted, or it is a view';
COMMENT ON COLUMN tidegate.state_table.columns IS 'the numbers of its columns in Postgres, by their names, noted with that';
COMMENT ON COLUMN tidegate.state_table.shape IS 'its table_shape as declared; NULL: it is a view';
COMMENT ON COLUMN tidegate.state_table.accepted_shape IS 'what differs from that, and a person has accepted';

CREATE TABLE tidegate.state_range (
    state text NOT NULL,
    partition text NOT NULL,
    lower text,
    upper text,
    every text NOT NULL,
    CONSTRAINT pk_state_range PRIMARY KEY (state, partition),
    CONSTRAINT fk_state_range_state_table FOREIGN KEY (state) REFERENCES tidegate.state_table (state)
);
COMMENT ON TABLE tidegate.state_range IS 'Partitions of states that are divided by ranges, and of what states record.';
COMMENT ON COLUMN tidegate.state_range.partition IS 'name of the table in schema state that has its rows';
COMMENT ON COLUMN tidegate.state_range.lower IS 'its least value, of a time in UTC; NULL: it has none';
COMMENT ON COLUMN tidegate.state_range.upper IS 'the least value above it; NULL: there is none';
COMMENT ON COLUMN tidegate.state_range.every IS 'its length, as it was declared; of changes: how many txids';

CREATE TABLE tidegate.cursor (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    attempt integer,
    source_digest bytea,
    epoch text NOT NULL,
    history uuid NOT NULL DEFAULT gen_random_uuid(),
    CONSTRAINT pk_cursor PRIMARY KEY (pipeline),
    CONSTRAINT fk_cursor_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline),
    CONSTRAINT ck_cursor_txid CHECK (txid >= 0)
);
COMMENT ON TABLE tidegate.cursor IS 'One row per pipeline. Every commit holds its row lock; order and exactly-once are decided under it.';
COMMENT ON COLUMN tidegate.cursor.txid IS 'last committed txid';
COMMENT ON COLUMN tidegate.cursor.attempt IS 'its attempt; NULL before the first commit';
COMMENT ON COLUMN tidegate.cursor.source_digest IS 'SHA-256 of its source metadata';
COMMENT ON COLUMN tidegate.cursor.epoch IS 'which database incarnation: system identifier and timeline, number of the database';
COMMENT ON COLUMN tidegate.cursor.history IS 'which history of commits; a new one begins when a loss is accepted';

CREATE TABLE tidegate.plan (
    pipeline text NOT NULL,
    succeeded bigint NOT NULL DEFAULT 0,
    succeeded_at timestamptz,
    failed integer NOT NULL DEFAULT 0,
    failing_since timestamptz,
    failed_at timestamptz,
    failed_run text,
    error text,
    CONSTRAINT pk_plan PRIMARY KEY (pipeline),
    CONSTRAINT fk_plan_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline),
    CONSTRAINT ck_plan_failed CHECK (
        failed >= 0 AND num_nulls(failing_since, failed_at, failed_run, error) = CASE failed WHEN 0 THEN 4 ELSE 0 END
    )
);
COMMENT ON TABLE tidegate.plan IS 'How the plans of each pipeline end: one row per pipeline.';
COMMENT ON COLUMN tidegate.plan.succeeded IS 'plans that have found out what is new';
COMMENT ON COLUMN tidegate.plan.succeeded_at IS 'when the last of them ended';
COMMENT ON COLUMN tidegate.plan.failed IS 'plans that have failed since';
COMMENT ON COLUMN tidegate.plan.failing_since IS 'when the first of these failed';
COMMENT ON COLUMN tidegate.plan.failed_at IS 'when the last of these failed';
COMMENT ON COLUMN tidegate.plan.failed_run IS 'its run';
COMMENT ON COLUMN tidegate.plan.error IS 'why it failed: code and message';

CREATE TABLE tidegate.batch (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    source_metadata bytea NOT NULL,
    source_digest bytea NOT NULL,
    previous_digest bytea,
    opened_by text NOT NULL,
    opened_at timestamptz NOT NULL DEFAULT now(),
    attempt integer NOT NULL DEFAULT 0,
    halted_at timestamptz,
    halted_reason text,
    skip_owner text,
    skip_reason text,
    tries_after integer NOT NULL DEFAULT 0,
    awaits_ack boolean NOT NULL DEFAULT true,
    acked_at timestamptz,
    CONSTRAINT pk_batch PRIMARY KEY (pipeline, txid),
    CONSTRAINT fk_batch_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline),
    CONSTRAINT ck_batch_halted CHECK ((halted_at IS NULL) = (halted_reason IS NULL)),
    CONSTRAINT ck_batch_skip CHECK ((skip_owner IS NULL) = (skip_reason IS NULL)),
    CONSTRAINT ck_batch_txid CHECK (txid >= 1)
);
-- Every plan looks for commits of which the source has yet to learn, however many batches there are.
CREATE INDEX ix_batch_pipeline_txid ON tidegate.batch (pipeline, txid) WHERE awaits_ack;
COMMENT ON TABLE tidegate.batch IS 'One row per txid with its frozen source metadata.';
COMMENT ON COLUMN tidegate.batch.source_metadata IS 'what is needed to read exactly this batch; never edited';
COMMENT ON COLUMN tidegate.batch.source_digest IS 'its SHA-256';
COMMENT ON COLUMN tidegate.batch.previous_digest IS 'SHA-256 of the metadata that it continues; NULL for the first batch';
COMMENT ON COLUMN tidegate.batch.opened_by IS 'the run that planned it';
COMMENT ON COLUMN tidegate.batch.opened_at IS 'when its metadata was frozen';
COMMENT ON COLUMN tidegate.batch.attempt IS 'newest attempt: the fence';
COMMENT ON COLUMN tidegate.batch.halted_at IS 'since when no task retries it';
COMMENT ON COLUMN tidegate.batch.halted_reason IS 'why, in one line';
COMMENT ON COLUMN tidegate.batch.skip_owner IS 'who gave it up: its commit will be without rows';
COMMENT ON COLUMN tidegate.batch.tries_after IS 'failures up to this attempt no longer count';
COMMENT ON COLUMN tidegate.batch.awaits_ack IS 'its source has yet to learn that it counts';
COMMENT ON COLUMN tidegate.batch.acked_at IS 'when its source learned it; NULL: not yet, or not wanted';

CREATE TABLE tidegate.attempt (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    attempt integer NOT NULL,
    owner text NOT NULL,
    airflow_run_id text,
    airflow_task_id text,
    airflow_try integer,
    spark_application text,
    spark_tag text,
    fingerprint text NOT NULL,
    source_metadata bytea,
    source_digest bytea NOT NULL,
    previous_digest bytea,
    started_at timestamptz NOT NULL DEFAULT now(),
    seen_at timestamptz,
    session text,
    staged_at timestamptz,
    sealed_at timestamptz,
    failed_at timestamptz,
    error text,
    is_poison boolean,
    source_rows bigint,
    source_hash_sum bigint,
    quarantined_rows bigint,
    transformed_rows bigint,
    transformed_hash_sum bigint,
    staged_bytes bigint,
    dropped_at timestamptz,
    CONSTRAINT pk_attempt PRIMARY KEY (pipeline, txid, attempt),
    CONSTRAINT fk_attempt_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid),
    CONSTRAINT ck_attempt_error CHECK ((failed_at IS NULL) = (error IS NULL)),
    CONSTRAINT ck_attempt_is_poison CHECK ((failed_at IS NULL) = (is_poison IS NULL)),
    CONSTRAINT ck_attempt_one_end CHECK (sealed_at IS NULL OR failed_at IS NULL)
);
-- Every plan looks for staging to drop, however many attempts there are.
CREATE INDEX ix_attempt_pipeline_txid_attempt ON tidegate.attempt (pipeline, txid, attempt) WHERE dropped_at IS NULL;
COMMENT ON TABLE tidegate.attempt IS 'One row per try at a batch.';
COMMENT ON COLUMN tidegate.attempt.attempt IS 'numbered by the store, from 1';
COMMENT ON COLUMN tidegate.attempt.owner IS 'who runs it, for people';
COMMENT ON COLUMN tidegate.attempt.airflow_run_id IS 'NULL outside Airflow';
COMMENT ON COLUMN tidegate.attempt.airflow_try IS 'for people: it numbers nothing here';
COMMENT ON COLUMN tidegate.attempt.spark_tag IS 'tag of its operations, by which they are interrupted';
COMMENT ON COLUMN tidegate.attempt.fingerprint IS 'declaration that computes the partials';
COMMENT ON COLUMN tidegate.attempt.source_metadata IS 'what it reads, if it planned an opaque batch again; NULL: the first plan';
COMMENT ON COLUMN tidegate.attempt.source_digest IS 'SHA-256 of the metadata that it reads';
COMMENT ON COLUMN tidegate.attempt.previous_digest IS 'SHA-256 of the metadata that this continues; NULL for the first batch';
COMMENT ON COLUMN tidegate.attempt.started_at IS 'when it took the fence';
COMMENT ON COLUMN tidegate.attempt.seen_at IS 'when the process that runs it last said that it is alive';
COMMENT ON COLUMN tidegate.attempt.session IS 'application_name of the sessions of the process that runs it';
COMMENT ON COLUMN tidegate.attempt.staged_at IS 'when Spark had staged the last row';
COMMENT ON COLUMN tidegate.attempt.sealed_at IS 'when its staging was complete';
COMMENT ON COLUMN tidegate.attempt.failed_at IS 'when it gave up';
COMMENT ON COLUMN tidegate.attempt.error IS 'why it gave up: code and message';
COMMENT ON COLUMN tidegate.attempt.is_poison IS 'whether the content of the batch is at fault: only such failures count as tries';
COMMENT ON COLUMN tidegate.attempt.source_rows IS 'rows that the source emitted';
COMMENT ON COLUMN tidegate.attempt.source_hash_sum IS 'sum of their 64-bit hashes modulo 2^64; NULL if they are not tracked';
COMMENT ON COLUMN tidegate.attempt.quarantined_rows IS 'of these, set aside as bad';
COMMENT ON COLUMN tidegate.attempt.transformed_rows IS 'rows that the transform returned';
COMMENT ON COLUMN tidegate.attempt.transformed_hash_sum IS 'sum of their 64-bit hashes modulo 2^64; NULL if they are not tracked';
COMMENT ON COLUMN tidegate.attempt.staged_bytes IS 'bytes that were copied into staging';
COMMENT ON COLUMN tidegate.attempt.dropped_at IS 'when its staging was dropped';

CREATE TABLE tidegate.seal (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    attempt integer NOT NULL,
    state text NOT NULL,
    partition integer NOT NULL,
    task_attempt bigint NOT NULL,
    rows bigint NOT NULL,
    digest bigint NOT NULL,
    CONSTRAINT pk_seal PRIMARY KEY (pipeline, txid, attempt, state, partition),
    CONSTRAINT fk_seal_attempt FOREIGN KEY (pipeline, txid, attempt) REFERENCES tidegate.attempt (pipeline, txid, attempt),
    CONSTRAINT ck_seal_rows CHECK (rows > 0)
);
COMMENT ON TABLE tidegate.seal IS 'What a sealed attempt staged: one task attempt per partition. Partitions without rows have no row.';
COMMENT ON COLUMN tidegate.seal.partition IS 'Spark partition';
COMMENT ON COLUMN tidegate.seal.task_attempt IS 'the one Spark task attempt whose rows count';
COMMENT ON COLUMN tidegate.seal.rows IS 'rows it staged';
COMMENT ON COLUMN tidegate.seal.digest IS 'XOR of the rows'' 64-bit hashes, in any order';

CREATE TABLE tidegate.commit (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    attempt integer NOT NULL,
    source_digest bytea NOT NULL,
    owner text NOT NULL,
    key_count bigint NOT NULL,
    committed_at timestamptz NOT NULL DEFAULT now(),
    merged_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    quarantined_rows bigint NOT NULL DEFAULT 0,
    skipped_reason text,
    CONSTRAINT pk_commit PRIMARY KEY (pipeline, txid),
    CONSTRAINT fk_commit_attempt FOREIGN KEY (pipeline, txid, attempt) REFERENCES tidegate.attempt (pipeline, txid, attempt)
);
COMMENT ON TABLE tidegate.commit IS 'One row per committed txid, written in the commit''s own transaction.';
COMMENT ON COLUMN tidegate.commit.owner IS 'who committed it, for people';
COMMENT ON COLUMN tidegate.commit.key_count IS 'state rows it wrote, over all states';
COMMENT ON COLUMN tidegate.commit.committed_at IS 'when its transaction began';
COMMENT ON COLUMN tidegate.commit.merged_at IS 'when everything was merged, just before COMMIT';
COMMENT ON COLUMN tidegate.commit.quarantined_rows IS 'bad records set aside with it';
COMMENT ON COLUMN tidegate.commit.skipped_reason IS 'why the batch was skipped; NULL if it was not';

CREATE TABLE tidegate.source_file (
    pipeline text NOT NULL,
    name text COLLATE "C" NOT NULL,
    sha256 bytea NOT NULL,
    size bigint NOT NULL,
    mtime_ns bigint NOT NULL,
    inode text,
    txid bigint NOT NULL,
    CONSTRAINT pk_source_file PRIMARY KEY (pipeline, name, sha256),
    CONSTRAINT fk_source_file_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid)
);
-- A redo deletes the files of its batch.
CREATE INDEX ix_source_file_pipeline_txid ON tidegate.source_file (pipeline, txid);
-- A plan looks for files that were renamed by their times.
CREATE INDEX ix_source_file_pipeline_mtime_ns ON tidegate.source_file (pipeline, mtime_ns);
COMMENT ON TABLE tidegate.source_file IS 'One row per file that has counted, written in the commit of its batch.';
COMMENT ON COLUMN tidegate.source_file.name IS 'below the source''s folder';
COMMENT ON COLUMN tidegate.source_file.sha256 IS 'of its content: name and content are the file';
COMMENT ON COLUMN tidegate.source_file.size IS 'bytes';
COMMENT ON COLUMN tidegate.source_file.mtime_ns IS 'when it was last seen to be modified';
COMMENT ON COLUMN tidegate.source_file.inode IS 'its number and last change when it was last looked at; NULL: an object';
COMMENT ON COLUMN tidegate.source_file.txid IS 'the batch in which it counts, or was skipped';

CREATE TABLE tidegate.run_batch (
    pipeline text NOT NULL,
    run_id text NOT NULL,
    position integer NOT NULL,
    txid bigint NOT NULL,
    CONSTRAINT pk_run_batch PRIMARY KEY (pipeline, run_id, position),
    CONSTRAINT fk_run_batch_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid)
);
COMMENT ON TABLE tidegate.run_batch IS 'Which txids a run covers: a plan that is tried again finds its own answer.';
COMMENT ON COLUMN tidegate.run_batch.run_id IS 'the Airflow run, or the command line''s own name';
COMMENT ON COLUMN tidegate.run_batch.position IS 'from 0: Airflow''s map index';

CREATE TABLE tidegate.quarantine (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    number bigint NOT NULL,
    reason text NOT NULL,
    origin text,
    payload text NOT NULL,
    is_raw boolean NOT NULL,
    state text,
    quarantined_at timestamptz NOT NULL DEFAULT now(),
    replayed_txid bigint,
    mended_payload text,
    mended_at timestamptz,
    mended_by text,
    mended_reason text,
    CONSTRAINT pk_quarantine PRIMARY KEY (pipeline, txid, number),
    CONSTRAINT fk_quarantine_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid),
    CONSTRAINT ck_quarantine_mended CHECK (num_nulls(mended_payload, mended_at, mended_by, mended_reason) IN (0, 4))
);
-- A replay reads the records that have its txid, `tidegate quarantine list` those that wait.
CREATE INDEX ix_quarantine_pipeline_replayed_txid_txid_number ON tidegate.quarantine (pipeline, replayed_txid, txid, number);
COMMENT ON TABLE tidegate.quarantine IS 'Bad records: set aside in the commit of their batch, so that none is lost.';
COMMENT ON COLUMN tidegate.quarantine.txid IS 'the batch that set it aside';
COMMENT ON COLUMN tidegate.quarantine.number IS 'from 1 within the batch';
COMMENT ON COLUMN tidegate.quarantine.reason IS 'why it is bad';
COMMENT ON COLUMN tidegate.quarantine.origin IS 'where it stood: file, or topic, partition and offset';
COMMENT ON COLUMN tidegate.quarantine.payload IS 'the record: as it stood, or its columns as JSON';
COMMENT ON COLUMN tidegate.quarantine.is_raw IS 'whether payload is the record as it stood';
COMMENT ON COLUMN tidegate.quarantine.state IS 'the state whose final window it came too late for, as a partial; NULL: a bad record';
COMMENT ON COLUMN tidegate.quarantine.quarantined_at IS 'when its batch committed';
COMMENT ON COLUMN tidegate.quarantine.replayed_txid IS 'the later batch that takes it up again; NULL while it waits here';
COMMENT ON COLUMN tidegate.quarantine.mended_payload IS 'what replays read in the place of payload; NULL: it was not mended';
COMMENT ON COLUMN tidegate.quarantine.mended_at IS 'when';
COMMENT ON COLUMN tidegate.quarantine.mended_by IS 'the operator';
COMMENT ON COLUMN tidegate.quarantine.mended_reason IS 'why it was mended so';

CREATE TABLE tidegate.check_result (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    name text NOT NULL,
    found text,
    CONSTRAINT pk_check_result PRIMARY KEY (pipeline, txid, name),
    CONSTRAINT fk_check_result_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid)
);
COMMENT ON TABLE tidegate.check_result IS 'One row per check of a committed batch.';
COMMENT ON COLUMN tidegate.check_result.name IS 'of the check';
COMMENT ON COLUMN tidegate.check_result.found IS 'what it warned of; NULL: nothing';

CREATE TABLE tidegate.undeclared_column (
    pipeline text NOT NULL,
    input text NOT NULL,
    name text NOT NULL,
    txid bigint NOT NULL,
    CONSTRAINT pk_undeclared_column PRIMARY KEY (pipeline, input, name),
    CONSTRAINT fk_undeclared_column_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid)
);
COMMENT ON TABLE tidegate.undeclared_column IS 'One row per column that a source has and its declaration leaves out.';
COMMENT ON COLUMN tidegate.undeclared_column.input IS 'of the source; empty if it is a single one';
COMMENT ON COLUMN tidegate.undeclared_column.txid IS 'the first batch that has it';

CREATE TABLE tidegate.watermark (
    state text NOT NULL,
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    watermark timestamptz,
    previous_watermark timestamptz,
    removed_until timestamptz,
    CONSTRAINT pk_watermark PRIMARY KEY (state),
    CONSTRAINT fk_watermark_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline)
);
COMMENT ON TABLE tidegate.watermark IS 'How far event time has come in each state with windows.';
COMMENT ON COLUMN tidegate.watermark.state IS 'a state with windows';
COMMENT ON COLUMN tidegate.watermark.txid IS 'the last batch that counted in it';
COMMENT ON COLUMN tidegate.watermark.watermark IS 'the greatest event time that has counted, in UTC; NULL: there was none';
COMMENT ON COLUMN tidegate.watermark.previous_watermark IS 'the same before that batch, for a redo';
COMMENT ON COLUMN tidegate.watermark.removed_until IS 'windows that ended by then are no longer kept; NULL: all are';

CREATE TABLE tidegate.open_commit (
    pipeline text NOT NULL,
    CONSTRAINT pk_open_commit PRIMARY KEY (pipeline),
    CONSTRAINT fk_open_commit_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline)
);
COMMENT ON TABLE tidegate.open_commit IS 'Empty, but for the commits that run an author''s update: a transaction that leaves a row here is refused.';

CREATE TABLE tidegate.operator_action (
    number bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    pipeline text NOT NULL,
    txid bigint,
    action text NOT NULL,
    owner text NOT NULL,
    reason text NOT NULL,
    acted_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_operator_action PRIMARY KEY (number),
    CONSTRAINT fk_operator_action_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline),
    CONSTRAINT ck_operator_action_action CHECK (
        action IN ('pause', 'resume', 'retry', 'skip', 'redo', 'replay', 'accept', 'mend', 'prune', 'retire', 'reinstate')
    )
);
COMMENT ON TABLE tidegate.operator_action IS 'What people did by hand, and why.';
COMMENT ON COLUMN tidegate.operator_action.txid IS 'NULL: the whole pipeline';
COMMENT ON COLUMN tidegate.operator_action.acted_at IS 'when';

-- Phase of a batch. It is derived from the batch's rows, in order of precedence, and never stored.

CREATE VIEW tidegate.batches AS
SELECT b.pipeline, b.txid,
       CASE WHEN c.skipped_reason IS NOT NULL THEN 'skipped'
            WHEN c.txid IS NOT NULL THEN 'committed'
            WHEN b.halted_at IS NOT NULL THEN 'halted'
            WHEN a.attempt IS NULL THEN 'planned'
            WHEN a.sealed_at IS NOT NULL THEN 'processed'
            WHEN a.failed_at IS NOT NULL THEN 'failed'
            ELSE 'processing' END AS phase,
       coalesce(c.attempt, b.attempt) AS attempt,
       a.source_rows, c.key_count, b.opened_at, a.started_at, a.sealed_at, c.committed_at, a.owner,
       CASE WHEN c.txid IS NOT NULL THEN NULL
            WHEN EXISTS (SELECT FROM tidegate.pipeline p WHERE p.pipeline = b.pipeline AND p.retired_at IS NOT NULL)
            THEN 'nothing: its pipeline was retired'
            WHEN b.skip_reason IS NOT NULL THEN 'its turn to be skipped: ' || b.skip_reason
            WHEN b.halted_at IS NOT NULL THEN b.halted_reason
            WHEN a.failed_at IS NOT NULL THEN a.error
            WHEN a.attempt IS NULL AND b.txid - k.txid > (
                SELECT p.in_flight FROM tidegate.pipeline p WHERE p.pipeline = b.pipeline
            ) THEN 'txid ' || k.txid + 1 || ' to commit: the window is full'
            WHEN a.attempt IS NULL THEN 'a run that processes it'
            WHEN a.sealed_at IS NULL THEN 'attempt ' || a.attempt || ' by ' || a.owner
            WHEN b.txid > k.txid + 1 THEN 'txid ' || k.txid + 1 || ' to commit'
            ELSE 'its commit' END AS waits_for
FROM tidegate.batch b
JOIN tidegate.cursor k ON k.pipeline = b.pipeline
LEFT JOIN tidegate.commit c ON c.pipeline = b.pipeline AND c.txid = b.txid
LEFT JOIN tidegate.attempt a
       ON a.pipeline = b.pipeline AND a.txid = b.txid AND a.attempt = coalesce(c.attempt, b.attempt);

-- A state table has one writer (I15 in docs/protocol.md): each has a trigger, `single_writer`, that calls this function. A commit
-- names its pipeline for the length of its transaction; writers that do not are refused. The grants are the first line of defence.

CREATE FUNCTION tidegate.single_writer() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
DECLARE
    -- The name of a partition begins with that of its table, and a $.
    whole text := (SELECT relname FROM pg_class WHERE oid = coalesce(pg_partition_root(TG_RELID), TG_RELID));
    owner text := (SELECT pipeline FROM tidegate.state_table WHERE state = split_part(whole, '$', 1));
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
END $$;

-- What decides which values a merge leaves in a table of a state, by the names of its parts: types and collations of columns, formulas
-- of generated ones, unique keys, and whatever else changes rows: triggers, rules, tables that inherit from it or that it inherits
-- from, and no log. A commit compares it with what is declared, in which these last ones are not.

CREATE FUNCTION tidegate.table_shape(of_table oid) RETURNS jsonb LANGUAGE plpgsql STABLE
SET search_path = pg_catalog SET quote_all_identifiers = off AS $$
BEGIN
    RETURN (
        WITH parts (oid) AS (
            SELECT of_table UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = of_table
        ), unique_keys (columns, nulls) AS (
            SELECT (SELECT string_agg(quote_ident(attname), ', ' ORDER BY attname) FROM pg_attribute
                    WHERE attrelid = of_table AND attnum = ANY (indkey)),
                concat_ws(', ', 'unique', CASE WHEN indnullsnotdistinct THEN 'NULLs equal' END,
                    CASE WHEN NOT indimmediate THEN 'deferrable' END)
            FROM pg_index WHERE indrelid = of_table AND indisunique AND indisvalid AND indpred IS NULL AND indexprs IS NULL
        )
        SELECT coalesce(jsonb_object_agg(part, definition), '{}') FROM (
            SELECT 'column ' || quote_ident(attname), concat_ws(' ', format_type(atttypid, atttypmod),
                'COLLATE ' || pg_collation.oid::regcollation,
                'GENERATED AS ' || pg_get_expr(adbin, adrelid), CASE WHEN attidentity <> '' THEN 'AS IDENTITY' END)
            FROM pg_attribute
            LEFT JOIN pg_collation ON pg_collation.oid = attcollation AND pg_collation.oid <> '"default"'::regcollation
            LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum AND attgenerated <> ''
            WHERE attrelid = of_table AND attnum > 0 AND NOT attisdropped
            UNION ALL
            SELECT 'required ' || quote_ident(attname), 'NOT NULL without a default'
            FROM pg_attribute WHERE attrelid = of_table AND attnum > 0 AND NOT attisdropped AND attnotnull AND NOT atthasdef
                AND attidentity = ''
            UNION ALL
            SELECT format('key (%s)', columns), max(nulls) FROM unique_keys GROUP BY columns
            UNION ALL
            SELECT format('trigger %I of %s', tgname, tgrelid::regclass), pg_get_triggerdef(pg_trigger.oid) || ', ' || md5(prosrc)
            FROM parts JOIN pg_trigger ON tgrelid = parts.oid JOIN pg_proc ON pg_proc.oid = tgfoid
            WHERE NOT tgisinternal AND tgparentid = 0 AND tgenabled <> 'D'
                AND tgfoid <> 'tidegate.single_writer()'::regprocedure
            UNION ALL
            SELECT format('rule %I', rulename), pg_get_ruledef(pg_rewrite.oid)
            FROM pg_rewrite WHERE ev_class = of_table AND ev_enabled <> 'D'
            UNION ALL
            SELECT 'child ' || parts.oid::regclass, 'inherits'
            FROM parts JOIN pg_class USING (oid) WHERE parts.oid <> of_table AND NOT relispartition
            UNION ALL
            SELECT 'parent ' || inhparent::regclass, 'what is written to that is written here, past the guard'
            FROM pg_inherits WHERE inhrelid = of_table
            UNION ALL
            SELECT 'unlogged ' || parts.oid::regclass, 'a crash of the server empties it'
            FROM parts JOIN pg_class USING (oid) WHERE relpersistence <> 'p'
        ) AS found (part, definition)
    );
END $$;

-- What of a table is otherwise than expected: part, expected definition and found one. Columns and keys that are not expected are the
-- team's, and no difference, unless a merge would have to fill them.

CREATE FUNCTION tidegate.shape_differences(of_table oid, expected jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog AS $$
BEGIN
    RETURN (
        SELECT jsonb_agg(jsonb_build_array(key, e.value, f.value) ORDER BY key)
        FROM jsonb_each_text(expected) AS e FULL JOIN jsonb_each_text(tidegate.table_shape(of_table)) AS f USING (key)
        WHERE CASE
            WHEN e.value IS NULL THEN key !~ '^(column|key) '
            WHEN f.value IS NULL THEN key !~ '^required '
            ELSE e.value <> f.value END
    );
END $$;

REVOKE EXECUTE ON FUNCTION tidegate.table_shape(oid), tidegate.shape_differences(oid, jsonb) FROM PUBLIC;

-- A commit that runs an author's update has a row in open_commit until its end, so that Postgres refuses a COMMIT by the
-- update.

CREATE FUNCTION tidegate.unfinished() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    IF EXISTS (SELECT FROM tidegate.open_commit WHERE pipeline = NEW.pipeline) THEN
        RAISE EXCEPTION 'the commit of a batch of pipeline % has not ended', NEW.pipeline USING ERRCODE = 'invalid_transaction_termination',
            HINT = 'An update may not end the transaction.';
    END IF;
    RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER unfinished AFTER INSERT ON tidegate.open_commit DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION tidegate.unfinished();

-- Sum of bigints that stays a bigint: Postgres' own sum goes through numeric. Out of range is an error, as in a state's sum.

CREATE AGGREGATE tidegate.add_up(bigint) (
    SFUNC = pg_catalog.int8pl, STYPE = bigint, COMBINEFUNC = pg_catalog.int8pl, PARALLEL = SAFE
);

-- Last txid of a key. Without a COMBINEFUNC, so that Postgres gives whole groups to each of its processes.

CREATE AGGREGATE tidegate.latest(bigint) (SFUNC = pg_catalog.int8larger, STYPE = bigint, PARALLEL = SAFE);

REVOKE EXECUTE ON FUNCTION tidegate.add_up(bigint), tidegate.latest(bigint) FROM PUBLIC;

-- Merges of arrays: the functions (..._of_two) merge a key's array with another, the aggregates (..._of_all) all arrays of a key.
-- They keep the different values (union), all values (list), the smallest, the largest, or add counts up. More values than a key
-- may keep are an out-of-range error. The bounds of a histogram are declared, so all its arrays of counts have the same length.

CREATE FUNCTION tidegate.checked(anyarray, most integer) RETURNS anyarray
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
BEGIN
    IF cardinality($1) > most THEN
        RAISE numeric_value_out_of_range
            USING MESSAGE = format('a key would have %s values, and keeps at most %s', cardinality($1), most);
    END IF;
    RETURN $1;
END $$;

CREATE FUNCTION tidegate.union_of_two(anyarray, anyarray, most integer) RETURNS anyarray
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
BEGIN
    RETURN tidegate.checked(ARRAY(SELECT DISTINCT value FROM unnest($1 || $2) AS value ORDER BY value), most);
END $$;

CREATE FUNCTION tidegate.list_of_two(anyarray, anyarray, most integer) RETURNS anyarray
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
BEGIN
    RETURN tidegate.checked(ARRAY(SELECT value FROM unnest($1 || $2) AS value ORDER BY value), most);
END $$;

CREATE FUNCTION tidegate.smallest_of_two(anyarray, anyarray, most integer) RETURNS anyarray
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
BEGIN
    RETURN ARRAY(SELECT value FROM unnest($1 || $2) AS value ORDER BY value LIMIT most);
END $$;

CREATE FUNCTION tidegate.largest_of_two(anyarray, anyarray, most integer) RETURNS anyarray
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
BEGIN
    RETURN ARRAY(SELECT value FROM unnest($1 || $2) AS value ORDER BY value DESC LIMIT most);
END $$;

CREATE FUNCTION tidegate.counts_of_two(bigint[], bigint[]) RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
BEGIN
    RETURN ARRAY(SELECT coalesce(a, 0) + coalesce(b, 0) FROM unnest($1, $2) WITH ORDINALITY AS pairs (a, b, place) ORDER BY place);
END $$;

CREATE AGGREGATE tidegate.union_of_all(anyarray, integer) (
    SFUNC = tidegate.union_of_two, STYPE = anyarray, INITCOND = '{}', PARALLEL = SAFE
);
CREATE AGGREGATE tidegate.list_of_all(anyarray, integer) (
    SFUNC = tidegate.list_of_two, STYPE = anyarray, INITCOND = '{}', PARALLEL = SAFE
);
CREATE AGGREGATE tidegate.smallest_of_all(anyarray, integer) (
    SFUNC = tidegate.smallest_of_two, STYPE = anyarray, INITCOND = '{}', PARALLEL = SAFE
);
CREATE AGGREGATE tidegate.largest_of_all(anyarray, integer) (
    SFUNC = tidegate.largest_of_two, STYPE = anyarray, INITCOND = '{}', PARALLEL = SAFE
);
CREATE AGGREGATE tidegate.counts_of_all(bigint[]) (
    SFUNC = tidegate.counts_of_two, STYPE = bigint[], INITCOND = '{}', PARALLEL = SAFE
);

REVOKE EXECUTE ON FUNCTION tidegate.checked(anyarray, integer), tidegate.union_of_two(anyarray, anyarray, integer),
    tidegate.list_of_two(anyarray, anyarray, integer), tidegate.smallest_of_two(anyarray, anyarray, integer),
    tidegate.largest_of_two(anyarray, anyarray, integer), tidegate.counts_of_two(bigint[], bigint[]),
    tidegate.union_of_all(anyarray, integer), tidegate.list_of_all(anyarray, integer),
    tidegate.smallest_of_all(anyarray, integer), tidegate.largest_of_all(anyarray, integer),
    tidegate.counts_of_all(bigint[]) FROM PUBLIC;

CREATE FUNCTION tidegate.bits_of_two(bigint[], bigint[]) RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
BEGIN
    RETURN ARRAY(SELECT coalesce(a, 0) | coalesce(b, 0) FROM unnest($1, $2) WITH ORDINALITY AS pairs (a, b, place) ORDER BY place);
END $$;

CREATE AGGREGATE tidegate.bits_of_all(bigint[]) (
    SFUNC = tidegate.bits_of_two, STYPE = bigint[], INITCOND = '{}', PARALLEL = SAFE
);

-- The number of different values that is estimated from a sketch (jobs/sketches.py), an array of bits in 32 rows. A value sets
-- one bit, in row n with a probability of 2^-n, in the last two rows with the same. The estimate is the number of values of
-- which so many bits are expected to be set as are set, found by Newton's method.

CREATE FUNCTION tidegate.distinct_of(bits bigint[]) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
DECLARE
    columns double precision := 2 * cardinality(bits);
    found double precision := (SELECT sum(bit_count(word::bit(64))) FROM unnest(bits) AS word);
    estimate double precision;
    step double precision;
BEGIN
    IF coalesce(found, 0) * found < 3 * columns OR found IS NULL THEN
        RETURN coalesce(found, 0); -- so few are hardly ever in the same place
    END IF;
    found := least(found, 32 * columns - 1);
    estimate := greatest(found, columns * power(2, found / columns - 0.33));
    FOR iteration IN 1..50 LOOP
        -- exp of less than -700 is an error.
        SELECT (found - sum(columns - columns * kept)) / sum(chance * columns * kept) INTO step
        FROM (
            SELECT chance, exp(-least(estimate * chance, 700)) AS kept
            FROM (SELECT power(2::double precision, -least(number, 31)) / columns AS chance FROM generate_series(1, 32) AS number) AS p
        ) AS chances;
        estimate := greatest(estimate + step, found);
        EXIT WHEN abs(step) < 0.001 + estimate / 1000000;
    END LOOP;
    RETURN round(estimate);
END $$;

-- A quantile that is estimated from a sketch: counts of the values below the range, of negative sizes from the largest on, of
-- zero, of sizes, and of the values above the range. The numbers from each power of two to the next are divided into
-- `per_octave` sizes. The estimate has the same relative distance to both ends of its size.

CREATE FUNCTION tidegate.quantile_of(counts bigint[], probability numeric, per_octave integer, negatives integer, scale integer)
RETURNS numeric
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
DECLARE
    missing bigint := ceil(probability * (SELECT sum(n) FROM unnest(counts) AS n));
    place integer := 0;
    size integer;
    start bigint;
    low numeric;
    high numeric;
BEGIN
    WHILE missing > 0 LOOP
        place := place + 1;
        missing := missing - counts[place];
    END LOOP;
    IF place IN (0, 1, cardinality(counts)) THEN
        RETURN NULL;
    END IF;
    size := abs(place - negatives - 2) - 1;
    IF size < 0 THEN
        RETURN 0;
    END IF;
    start := 1::bigint << (size / per_octave);
    low := (start * (per_octave + size % per_octave) + per_octave - 1) / per_octave;
    high := (start * (per_octave + size % per_octave + 1) + per_octave - 1) / per_octave - 1;
    RETURN sign((place - negatives - 2)::numeric) * 2 * low * high / (low + high) / power(10::numeric, scale);
END $$;

REVOKE EXECUTE ON FUNCTION tidegate.bits_of_two(bigint[], bigint[]), tidegate.bits_of_all(bigint[]), tidegate.distinct_of(bigint[]),
    tidegate.quantile_of(bigint[], numeric, integer, integer, integer) FROM PUBLIC;

-- Which incarnation of the database answers: system identifier and timeline of the server, number of the database. A restore or
-- a promotion changes the timeline, a copy within the server the number. A hosted server may hide the first two; then the
-- number of the table tidegate.cursor stands for the server, and is another one after a dump was restored. It runs with the
-- owner's privileges, so that all roles get the same answer.

CREATE FUNCTION tidegate.epoch() RETURNS text LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
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

REVOKE EXECUTE ON FUNCTION tidegate.epoch() FROM PUBLIC;

-- A table with range partitions, of a state's rows or of what a state records, gets one for each range of which a commit brings the
-- first row. The role tidegate may create no table in schema state, so the commit has this function of the owner do it. What it makes is
-- noted in state_range, which shows when a partition is missing. Bounds are texts, those of times in UTC; without one, the range is open
-- there. A partition is read and written by its table, with the privileges and policies of that: it has none of its own.
-- pg_temp is named last in search_path: Postgres would otherwise look there first, for types whose checks then ran as the owner.

CREATE FUNCTION tidegate.add_range(state text, partition text, lower text, upper text, every text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    parent regclass := to_regclass(format('state.%I', state));
    owner text := (SELECT t.pipeline FROM tidegate.state_table t WHERE t.state = add_range.state);
    made text := format('state.%I', partition);
    reader text;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_partitioned_table WHERE partrelid = parent AND partstrat = 'r') THEN
        RAISE EXCEPTION 'state.% is not divided by ranges', state USING ERRCODE = 'undefined_table';
    END IF;
    IF owner IS NULL OR owner IS DISTINCT FROM nullif(current_setting('tidegate.writer', true), '')
        OR NOT starts_with(partition, state || '$') THEN
        RAISE EXCEPTION 'state.% gets its partitions by the commits of its pipeline only', state
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING INDEXES)', made, parent);
    FOR reader IN
        SELECT DISTINCT coalesce(quote_ident(rolname), 'PUBLIC')
        FROM pg_class JOIN aclexplode(relacl) ON grantee <> relowner LEFT JOIN pg_roles ON pg_roles.oid = grantee
        WHERE pg_class.oid = made::regclass
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s', made, reader);
    END LOOP;
    EXECUTE format('CREATE TRIGGER single_writer BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s '
                   'FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer()', made);
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER single_writer', made);
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)', parent, made,
                   coalesce(quote_literal(lower), 'MINVALUE'), coalesce(quote_literal(upper), 'MAXVALUE'));
    INSERT INTO tidegate.state_range VALUES (state, partition, lower, upper, every);
END $$;

REVOKE EXECUTE ON FUNCTION tidegate.add_range(text, text, text, text, text) FROM PUBLIC;

-- tidegate: plans, processes and commits. It may not edit frozen metadata, truncate, or delete, but for rows of open_commit and
-- for sessions that become one (state_tables.GRANT_DELETE).

GRANT USAGE ON SCHEMA tidegate, state TO tidegate;
GRANT USAGE, CREATE ON SCHEMA staging TO tidegate;
GRANT SELECT ON ALL TABLES IN SCHEMA tidegate TO tidegate;
GRANT INSERT ON tidegate.batch, tidegate.attempt, tidegate.seal, tidegate.commit, tidegate.run_batch, tidegate.source_file,
    tidegate.quarantine, tidegate.operator_action, tidegate.check_result, tidegate.watermark, tidegate.undeclared_column TO tidegate;
GRANT UPDATE (paused_at, paused_by, paused_reason, in_flight, commits_alone) ON tidegate.pipeline TO tidegate;
GRANT UPDATE (txid, attempt, source_digest) ON tidegate.cursor TO tidegate;
GRANT UPDATE (attempt, halted_at, halted_reason, skip_owner, skip_reason, tries_after, awaits_ack, acked_at)
    ON tidegate.batch TO tidegate;
GRANT UPDATE (seen_at, staged_at, sealed_at, failed_at, error, is_poison, source_rows, source_hash_sum, quarantined_rows,
    transformed_rows, transformed_hash_sum, staged_bytes, spark_application, spark_tag, dropped_at)
    ON tidegate.attempt TO tidegate;
GRANT UPDATE (mtime_ns, inode) ON tidegate.source_file TO tidegate;
GRANT UPDATE (succeeded, succeeded_at, failed, failing_since, failed_at, failed_run, error) ON tidegate.plan TO tidegate;
GRANT UPDATE (txid, watermark, previous_watermark, removed_until) ON tidegate.watermark TO tidegate;
GRANT UPDATE (txid) ON tidegate.undeclared_column TO tidegate;
GRANT INSERT, DELETE ON tidegate.open_commit TO tidegate;
GRANT UPDATE (replayed_txid, mended_payload, mended_at, mended_by, mended_reason) ON tidegate.quarantine TO tidegate;
GRANT EXECUTE ON FUNCTION tidegate.add_up(bigint), tidegate.latest(bigint) TO tidegate;
GRANT EXECUTE ON FUNCTION tidegate.checked(anyarray, integer), tidegate.union_of_two(anyarray, anyarray, integer),
    tidegate.list_of_two(anyarray, anyarray, integer), tidegate.smallest_of_two(anyarray, anyarray, integer),
    tidegate.largest_of_two(anyarray, anyarray, integer), tidegate.counts_of_two(bigint[], bigint[]),
    tidegate.union_of_all(anyarray, integer), tidegate.list_of_all(anyarray, integer),
    tidegate.smallest_of_all(anyarray, integer), tidegate.largest_of_all(anyarray, integer),
    tidegate.counts_of_all(bigint[]) TO tidegate;
GRANT EXECUTE ON FUNCTION tidegate.bits_of_two(bigint[], bigint[]), tidegate.bits_of_all(bigint[]), tidegate.distinct_of(bigint[]),
    tidegate.quantile_of(bigint[], numeric, integer, integer, integer) TO tidegate;
GRANT EXECUTE ON FUNCTION tidegate.epoch() TO tidegate, tidegate_reader;
GRANT EXECUTE ON FUNCTION tidegate.table_shape(oid), tidegate.shape_differences(oid, jsonb) TO tidegate;
GRANT EXECUTE ON FUNCTION tidegate.add_range(text, text, text, text, text) TO tidegate;
ALTER DEFAULT PRIVILEGES IN SCHEMA state GRANT SELECT, INSERT, UPDATE ON TABLES TO tidegate;

-- tidegate_stager: Spark's tasks. It fills the staging tables that it is given. It reads the quarantine, for replays; the
-- tables by which other pipelines follow states (state_tables.GRANT_SELECT_TO_STAGER): appended rows, changes, final windows; and the states that
-- transforms read (registration.grant_queried).

GRANT USAGE ON SCHEMA tidegate, staging, state TO tidegate_stager;
GRANT SELECT ON tidegate.quarantine TO tidegate_stager;

-- tidegate_reader: people, and the page in Airflow. It reads ledger and states.

GRANT USAGE ON SCHEMA tidegate, state TO tidegate_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA tidegate TO tidegate_reader;
GRANT EXECUTE ON FUNCTION tidegate.bits_of_all(bigint[]), tidegate.distinct_of(bigint[]), tidegate.counts_of_all(bigint[]),
    tidegate.quantile_of(bigint[], numeric, integer, integer, integer) TO tidegate_reader;
ALTER DEFAULT PRIVILEGES IN SCHEMA state GRANT SELECT ON TABLES TO tidegate_reader;
