-- The database of Tidegate as it is made: schemas, the ledger's tables, views, functions, aggregates and grants. The first migration
-- runs this file (migrations/versions/0001_ledger.py). For statements of SQLAlchemy, tables.py reads the tables from it: each
-- column is a line of its own, indented by four blanks.

CREATE SCHEMA IF NOT EXISTS tidegate; -- Alembic's table of versions may be in it already
CREATE SCHEMA state;
CREATE SCHEMA staging;

-- What has happened to a batch is recorded in rows and times.

-- The registered pipelines.
CREATE TABLE tidegate.pipeline (
    pipeline text NOT NULL, -- its name, as declared in jobs/pipelines
    source_kind text NOT NULL,
    fingerprint text NOT NULL, -- SHA-256 of the declaration; attempts and commits compare it
    declaration jsonb NOT NULL, -- the declaration itself
    in_flight integer NOT NULL DEFAULT 16, -- most batches begun and not committed
    commits_alone boolean NOT NULL DEFAULT false, -- whether each batch is merged by itself
    registered_at timestamptz NOT NULL DEFAULT now(), -- when this declaration was registered
    paused_at timestamptz, -- since when no run and no batch begins
    paused_by text,
    paused_reason text,
    retired_at timestamptz, -- since when no batch of it counts any more
    retired_by text,
    retired_reason text,
    CONSTRAINT pk_pipeline PRIMARY KEY (pipeline),
    CONSTRAINT ck_pipeline_paused CHECK (num_nulls(paused_at, paused_by, paused_reason) IN (0, 3)),
    CONSTRAINT ck_pipeline_retired CHECK (num_nulls(retired_at, retired_by, retired_reason) IN (0, 3)),
    CONSTRAINT ck_pipeline_source_kind CHECK (source_kind IN ('transactional', 'opaque', 'non-transactional'))
);

-- Which pipeline owns which state table: one writer each.
CREATE TABLE tidegate.state_table (
    state text NOT NULL, -- name of the table in schema state
    pipeline text NOT NULL, -- its only writer
    pruned_txid bigint NOT NULL DEFAULT 0, -- of changes: those up to here were removed
    dropped_at timestamptz, -- since when it is dropped, as its pipeline is retired
    table_oid oid, -- its number in Postgres; NULL: not noted, or it is a view
    columns jsonb, -- the numbers of its columns in Postgres, by their names, noted with that
    shape jsonb, -- its table_shape as declared; NULL: it is a view
    accepted_shape jsonb NOT NULL DEFAULT '{}', -- what differs from that, and a person has accepted
    CONSTRAINT pk_state_table PRIMARY KEY (state),
    CONSTRAINT fk_state_table_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline)
);

-- Partitions of states that are divided by ranges, and of what states record.
CREATE TABLE tidegate.state_range (
    state text NOT NULL,
    partition text NOT NULL, -- name of the table in schema state that has its rows
    lower text, -- its least value, of a time in UTC; NULL: it has none
    upper text, -- the least value above it; NULL: there is none
    every text NOT NULL, -- its length, as it was declared; of changes: how many txids
    CONSTRAINT pk_state_range PRIMARY KEY (state, partition),
    CONSTRAINT fk_state_range_state_table FOREIGN KEY (state) REFERENCES tidegate.state_table (state)
);

-- One row per pipeline. Every commit holds its row lock; order and exactly-once are decided under it.
CREATE TABLE tidegate.cursor (
    pipeline text NOT NULL,
    txid bigint NOT NULL, -- last committed txid
    attempt integer, -- its attempt; NULL before the first commit
    source_digest bytea, -- SHA-256 of its source metadata
    epoch text NOT NULL, -- which database incarnation: system identifier and timeline, number of the database
    history uuid NOT NULL DEFAULT gen_random_uuid(), -- which history of commits; a new one begins when a loss is accepted
    CONSTRAINT pk_cursor PRIMARY KEY (pipeline),
    CONSTRAINT fk_cursor_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline),
    CONSTRAINT ck_cursor_txid CHECK (txid >= 0)
);

-- How the plans of each pipeline end: one row per pipeline.
CREATE TABLE tidegate.plan (
    pipeline text NOT NULL,
    succeeded bigint NOT NULL DEFAULT 0, -- plans that have found out what is new
    succeeded_at timestamptz, -- when the last of them ended
    failed integer NOT NULL DEFAULT 0, -- plans that have failed since
    failing_since timestamptz, -- when the first of these failed
    failed_at timestamptz, -- when the last of these failed
    failed_run text, -- its run
    error text, -- why it failed: code and message
    CONSTRAINT pk_plan PRIMARY KEY (pipeline),
    CONSTRAINT fk_plan_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline),
    CONSTRAINT ck_plan_failed CHECK (
        failed >= 0 AND num_nulls(failing_since, failed_at, failed_run, error) = CASE failed WHEN 0 THEN 4 ELSE 0 END
    )
);

-- One row per txid with its frozen source metadata.
CREATE TABLE tidegate.batch (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    source_metadata bytea NOT NULL, -- what is needed to read exactly this batch; never edited
    source_digest bytea NOT NULL, -- its SHA-256
    previous_digest bytea, -- SHA-256 of the metadata that it continues; NULL for the first batch
    opened_by text NOT NULL, -- the run that planned it
    opened_at timestamptz NOT NULL DEFAULT now(), -- when its metadata was frozen
    attempt integer NOT NULL DEFAULT 0, -- newest attempt: the fence
    halted_at timestamptz, -- since when no task retries it
    halted_reason text, -- why, in one line
    skip_owner text, -- who gave it up: its commit will be without rows
    skip_reason text,
    tries_after integer NOT NULL DEFAULT 0, -- failures up to this attempt no longer count
    awaits_ack boolean NOT NULL DEFAULT true, -- its source has yet to learn that it counts
    acked_at timestamptz, -- when its source learned it; NULL: not yet, or not wanted
    CONSTRAINT pk_batch PRIMARY KEY (pipeline, txid),
    CONSTRAINT fk_batch_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline),
    CONSTRAINT ck_batch_halted CHECK ((halted_at IS NULL) = (halted_reason IS NULL)),
    CONSTRAINT ck_batch_skip CHECK ((skip_owner IS NULL) = (skip_reason IS NULL)),
    CONSTRAINT ck_batch_txid CHECK (txid >= 1)
);
-- Every plan looks for commits of which the source has yet to learn, however many batches there are.
CREATE INDEX ix_batch_pipeline_txid ON tidegate.batch (pipeline, txid) WHERE awaits_ack;

-- One row per try at a batch.
CREATE TABLE tidegate.attempt (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    attempt integer NOT NULL, -- numbered by the store, from 1
    owner text NOT NULL, -- who runs it, for people
    airflow_run_id text, -- NULL outside Airflow
    airflow_task_id text,
    airflow_try integer, -- for people: it numbers nothing here
    spark_application text,
    spark_tag text, -- tag of its operations, by which they are interrupted
    fingerprint text NOT NULL, -- declaration that computes the partials
    source_metadata bytea, -- what it reads, if it planned an opaque batch again; NULL: the first plan
    source_digest bytea NOT NULL, -- SHA-256 of the metadata that it reads
    previous_digest bytea, -- SHA-256 of the metadata that this continues; NULL for the first batch
    started_at timestamptz NOT NULL DEFAULT now(), -- when it took the fence
    seen_at timestamptz, -- when the process that runs it last said that it is alive
    session text, -- application_name of the sessions of the process that runs it
    staged_at timestamptz, -- when Spark had staged the last row
    sealed_at timestamptz, -- when its staging was complete
    failed_at timestamptz, -- when it gave up
    error text, -- why it gave up: code and message
    is_poison boolean, -- whether the content of the batch is at fault: only such failures count as tries
    source_rows bigint, -- rows that the source emitted
    source_hash_sum bigint, -- sum of their 64-bit hashes modulo 2^64; NULL if they are not tracked
    quarantined_rows bigint, -- of these, set aside as bad
    transformed_rows bigint, -- rows that the transform returned
    transformed_hash_sum bigint, -- sum of their 64-bit hashes modulo 2^64; NULL if they are not tracked
    staged_bytes bigint, -- bytes that were copied into staging
    dropped_at timestamptz, -- when its staging was dropped
    CONSTRAINT pk_attempt PRIMARY KEY (pipeline, txid, attempt),
    CONSTRAINT fk_attempt_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid),
    CONSTRAINT ck_attempt_error CHECK ((failed_at IS NULL) = (error IS NULL)),
    CONSTRAINT ck_attempt_is_poison CHECK ((failed_at IS NULL) = (is_poison IS NULL)),
    CONSTRAINT ck_attempt_one_end CHECK (sealed_at IS NULL OR failed_at IS NULL)
);
-- Every plan looks for staging to drop, however many attempts there are.
CREATE INDEX ix_attempt_pipeline_txid_attempt ON tidegate.attempt (pipeline, txid, attempt) WHERE dropped_at IS NULL;

-- What a sealed attempt staged: one task attempt per partition. Partitions without rows have no row.
CREATE TABLE tidegate.seal (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    attempt integer NOT NULL,
    state text NOT NULL,
    partition integer NOT NULL, -- Spark partition
    task_attempt bigint NOT NULL, -- the one Spark task attempt whose rows count
    rows bigint NOT NULL, -- rows it staged
    digest bigint NOT NULL, -- XOR of the rows' 64-bit hashes, in any order
    CONSTRAINT pk_seal PRIMARY KEY (pipeline, txid, attempt, state, partition),
    CONSTRAINT fk_seal_attempt FOREIGN KEY (pipeline, txid, attempt) REFERENCES tidegate.attempt (pipeline, txid, attempt),
    CONSTRAINT ck_seal_rows CHECK (rows > 0)
);

-- One row per committed txid, written in the commit's own transaction.
CREATE TABLE tidegate.commit (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    attempt integer NOT NULL,
    source_digest bytea NOT NULL,
    owner text NOT NULL, -- who committed it, for people
    key_count bigint NOT NULL, -- state rows it wrote, over all states
    committed_at timestamptz NOT NULL DEFAULT now(), -- when its transaction began
    merged_at timestamptz NOT NULL DEFAULT clock_timestamp(), -- when everything was merged, just before COMMIT
    quarantined_rows bigint NOT NULL DEFAULT 0, -- bad records set aside with it
    skipped_reason text, -- why the batch was skipped; NULL if it was not
    CONSTRAINT pk_commit PRIMARY KEY (pipeline, txid),
    CONSTRAINT fk_commit_attempt FOREIGN KEY (pipeline, txid, attempt) REFERENCES tidegate.attempt (pipeline, txid, attempt)
);

-- One row per file that has counted, written in the commit of its batch.
CREATE TABLE tidegate.source_file (
    pipeline text NOT NULL,
    name text COLLATE "C" NOT NULL, -- below the source's folder
    sha256 bytea NOT NULL, -- of its content: name and content are the file
    size bigint NOT NULL, -- bytes
    mtime_ns bigint NOT NULL, -- when it was last seen to be modified
    inode text, -- its number and last change when it was last looked at; NULL: an object
    txid bigint NOT NULL, -- the batch in which it counts, or was skipped
    CONSTRAINT pk_source_file PRIMARY KEY (pipeline, name, sha256),
    CONSTRAINT fk_source_file_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid)
);
-- A redo deletes the files of its batch.
CREATE INDEX ix_source_file_pipeline_txid ON tidegate.source_file (pipeline, txid);
-- A plan looks for files that were renamed by their times.
CREATE INDEX ix_source_file_pipeline_mtime_ns ON tidegate.source_file (pipeline, mtime_ns);

-- Which txids a run covers: a plan that is tried again finds its own answer.
CREATE TABLE tidegate.run_batch (
    pipeline text NOT NULL,
    run_id text NOT NULL, -- the Airflow run, or the command line's own name
    position integer NOT NULL, -- from 0: Airflow's map index
    txid bigint NOT NULL,
    CONSTRAINT pk_run_batch PRIMARY KEY (pipeline, run_id, position),
    CONSTRAINT fk_run_batch_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid)
);

-- Bad records: set aside in the commit of their batch, so that none is lost.
CREATE TABLE tidegate.quarantine (
    pipeline text NOT NULL,
    txid bigint NOT NULL, -- the batch that set it aside
    number bigint NOT NULL, -- from 1 within the batch
    reason text NOT NULL, -- why it is bad
    origin text, -- where it stood: file, or topic, partition and offset
    payload text NOT NULL, -- the record: as it stood, or its columns as JSON
    is_raw boolean NOT NULL, -- whether payload is the record as it stood
    state text, -- the state whose final window it came too late for, as a partial; NULL: a bad record
    quarantined_at timestamptz NOT NULL DEFAULT now(), -- when its batch committed
    replayed_txid bigint, -- the later batch that takes it up again; NULL while it waits here
    mended_payload text, -- what replays read in the place of payload; NULL: it was not mended
    mended_at timestamptz, -- when
    mended_by text, -- the operator
    mended_reason text, -- why it was mended so
    CONSTRAINT pk_quarantine PRIMARY KEY (pipeline, txid, number),
    CONSTRAINT fk_quarantine_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid),
    CONSTRAINT ck_quarantine_mended CHECK (num_nulls(mended_payload, mended_at, mended_by, mended_reason) IN (0, 4))
);
-- A replay reads the records that have its txid, `tidegate quarantine list` those that wait.
CREATE INDEX ix_quarantine_pipeline_replayed_txid_txid_number ON tidegate.quarantine (pipeline, replayed_txid, txid, number);

-- One row per check of a committed batch.
CREATE TABLE tidegate.check_result (
    pipeline text NOT NULL,
    txid bigint NOT NULL,
    name text NOT NULL, -- of the check
    found text, -- what it warned of; NULL: nothing
    CONSTRAINT pk_check_result PRIMARY KEY (pipeline, txid, name),
    CONSTRAINT fk_check_result_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid)
);

-- One row per column that a source has and its declaration leaves out.
CREATE TABLE tidegate.undeclared_column (
    pipeline text NOT NULL,
    input text NOT NULL, -- of the source; empty if it is a single one
    name text NOT NULL,
    txid bigint NOT NULL, -- the first batch that has it
    CONSTRAINT pk_undeclared_column PRIMARY KEY (pipeline, input, name),
    CONSTRAINT fk_undeclared_column_batch FOREIGN KEY (pipeline, txid) REFERENCES tidegate.batch (pipeline, txid)
);

-- How far event time has come in each state with windows.
CREATE TABLE tidegate.watermark (
    state text NOT NULL, -- a state with windows
    pipeline text NOT NULL,
    txid bigint NOT NULL, -- the last batch that counted in it
    watermark timestamptz, -- the greatest event time that has counted, in UTC; NULL: there was none
    previous_watermark timestamptz, -- the same before that batch, for a redo
    removed_until timestamptz, -- windows that ended by then are no longer kept; NULL: all are
    CONSTRAINT pk_watermark PRIMARY KEY (state),
    CONSTRAINT fk_watermark_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline)
);

-- Empty, but for the commits that run an author's update: a transaction that leaves a row here is refused.
CREATE TABLE tidegate.open_commit (
    pipeline text NOT NULL,
    CONSTRAINT pk_open_commit PRIMARY KEY (pipeline),
    CONSTRAINT fk_open_commit_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline)
);

-- What people did by hand, and why.
CREATE TABLE tidegate.operator_action (
    number bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    pipeline text NOT NULL,
    txid bigint, -- NULL: the whole pipeline
    action text NOT NULL,
    owner text NOT NULL,
    reason text NOT NULL,
    acted_at timestamptz NOT NULL DEFAULT now(), -- when
    CONSTRAINT pk_operator_action PRIMARY KEY (number),
    CONSTRAINT fk_operator_action_pipeline FOREIGN KEY (pipeline) REFERENCES tidegate.pipeline (pipeline),
    CONSTRAINT ck_operator_action_action CHECK (
        action IN ('pause', 'resume', 'retry', 'skip', 'redo', 'replay', 'accept', 'mend', 'prune', 'retire', 'reinstate')
    )
);

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
-- of generated ones, unique keys, and whatever else changes or hides rows: triggers, rules, policies, tables that inherit from it or
-- that it inherits from, and no log. A commit compares it with what is declared, in which these last ones are not.

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
            UNION ALL
            SELECT 'row-level security for ' || quote_ident(rolname), 'hides rows: ' || coalesce(policies, 'no policy shows any')
            FROM pg_class CROSS JOIN aclexplode(relacl) JOIN pg_roles ON pg_roles.oid = grantee CROSS JOIN LATERAL (
                SELECT string_agg(concat_ws(' ', quote_ident(polname), qual), '; ' ORDER BY polname) AS policies,
                    count(*) FILTER (WHERE polpermissive AND polcmd = '*' AND qual = 'true') > 0
                        AND count(*) FILTER (WHERE NOT polpermissive AND qual <> 'true') = 0 AS show_all
                FROM pg_policy CROSS JOIN pg_get_expr(polqual, polrelid) AS qual
                WHERE polrelid = of_table
                    AND EXISTS (SELECT FROM unnest(polroles) AS r WHERE r = 0 OR pg_has_role(grantee, r, 'USAGE'))
            ) AS of_writer
            WHERE pg_class.oid = of_table AND relrowsecurity AND privilege_type = 'INSERT' AND grantee <> relowner
                AND NOT (rolsuper OR rolbypassrls OR show_all)
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

-- tidegate: plans, processes and commits. It may not edit frozen metadata, truncate, or delete, but for rows of open_commit and
-- for sessions that become one (state_tables.GRANT_DELETE).

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA tidegate FROM PUBLIC;
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
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tidegate TO tidegate;
ALTER DEFAULT PRIVILEGES IN SCHEMA state GRANT SELECT, INSERT, UPDATE ON TABLES TO tidegate;

-- tidegate_stager: Spark's tasks. It fills the staging tables that it is given. It reads the quarantine, for replays; the
-- tables by which other pipelines follow states (state_tables.GRANT_SELECT_TO_STAGER): appended rows, changes, final windows; and the states that
-- transforms read (registration.grant_queried).

GRANT USAGE ON SCHEMA tidegate, staging, state TO tidegate_stager;
GRANT SELECT ON tidegate.quarantine TO tidegate_stager;
GRANT EXECUTE ON FUNCTION tidegate.distinct_of(bigint[]), tidegate.quantile_of(bigint[], numeric, integer, integer, integer)
    TO tidegate_stager; -- a transform that reads estimates as of the previous txid has tasks derive them

-- tidegate_reader: people, and the page in Airflow. It reads ledger and states.

GRANT USAGE ON SCHEMA tidegate, state TO tidegate_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA tidegate TO tidegate_reader;
GRANT EXECUTE ON FUNCTION tidegate.epoch(), tidegate.bits_of_all(bigint[]), tidegate.distinct_of(bigint[]),
    tidegate.counts_of_all(bigint[]), tidegate.quantile_of(bigint[], numeric, integer, integer, integer) TO tidegate_reader;
ALTER DEFAULT PRIVILEGES IN SCHEMA state GRANT SELECT ON TABLES TO tidegate_reader;
