-- The ledger's views, functions, aggregates and grants, besides the tables of tables.py. This is the current schema, for people
-- to read; all migrations together create it, as a test proves (tests/integration/test_schema.py).

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

-- Progress of each pipeline that is not retired.

CREATE VIEW tidegate.lag AS
SELECT k.pipeline, k.txid AS committed, coalesce(o.txid, 0) AS opened, coalesce(o.txid, 0) - k.txid AS pending,
       c.committed_at,
       (SELECT 'txid ' || n.txid || ': ' || n.waits_for FROM tidegate.batches n
         WHERE n.pipeline = k.pipeline AND n.txid = k.txid + 1) AS waits_for
FROM tidegate.cursor k
JOIN tidegate.pipeline p ON p.pipeline = k.pipeline AND p.retired_at IS NULL
LEFT JOIN tidegate.commit c ON c.pipeline = k.pipeline AND c.txid = k.txid
LEFT JOIN LATERAL (SELECT max(txid) AS txid FROM tidegate.batch b WHERE b.pipeline = k.pipeline) o ON true;

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

-- The table of a state with range partitions gets one for each range of which a commit brings the first row. The role tidegate may
-- create no table in schema state, so the commit has this function of the owner do it. What it makes is noted in state_range, which
-- shows when a partition is missing. Bounds are texts, those of times in UTC; without one, the range is open there.
-- pg_temp is named last in search_path: Postgres would otherwise look there first, for types whose checks then ran as the owner.

CREATE FUNCTION tidegate.add_range(state text, partition text, lower text, upper text, every text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    parent regclass := to_regclass(format('state.%I', state));
    owner text := (SELECT t.pipeline FROM tidegate.state_table t WHERE t.state = add_range.state);
BEGIN
    IF NOT EXISTS (SELECT FROM pg_partitioned_table WHERE partrelid = parent AND partstrat = 'r') THEN
        RAISE EXCEPTION 'state.% is not divided by ranges', state USING ERRCODE = 'undefined_table';
    END IF;
    IF owner IS NULL OR owner IS DISTINCT FROM nullif(current_setting('tidegate.writer', true), '')
        OR NOT starts_with(partition, state || '$') THEN
        RAISE EXCEPTION 'state.% gets its partitions by the commits of its pipeline only', state
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    EXECUTE format('CREATE TABLE state.%I (LIKE %s INCLUDING ALL EXCLUDING INDEXES)', partition, parent);
    EXECUTE format('CREATE TRIGGER single_writer BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON state.%I '
                   'FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer()', partition);
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION state.%I FOR VALUES FROM (%s) TO (%s)', parent, partition,
                   coalesce(quote_literal(lower), 'MINVALUE'), coalesce(quote_literal(upper), 'MAXVALUE'));
    INSERT INTO tidegate.state_range VALUES (state, partition, lower, upper, every);
END $$;

REVOKE EXECUTE ON FUNCTION tidegate.add_range(text, text, text, text, text) FROM PUBLIC;

-- What a state records goes on in another table when the last one has become large (state_store/size_partitions.py): the commit has
-- this function of the owner make it. It is read by the table from which it inherits, so the only privilege on it is that of
-- commits, to insert. It has the triggers of that table. False, without a wait, if a VACUUM or DDL holds that table: then one of the
-- next commits makes the partition.

CREATE FUNCTION tidegate.add_partition(recorded text, first_txid bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    parent regclass := format('state.%I', recorded);
    owner text := (SELECT pipeline FROM tidegate.state_table WHERE state = recorded);
    partition text := format('%s$%s', recorded, first_txid);
    made text := format('state.%I', partition);
    todo text;
BEGIN
    IF owner IS NULL OR owner IS DISTINCT FROM nullif(current_setting('tidegate.writer', true), '') THEN
        RAISE EXCEPTION 'state.% gets its partitions by the commits of its pipeline only', recorded
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    BEGIN
        EXECUTE format('LOCK TABLE ONLY %s IN SHARE UPDATE EXCLUSIVE MODE NOWAIT', parent);
    EXCEPTION WHEN lock_not_available THEN
        RETURN false;
    END;
    EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING ALL, CHECK (txid >= %s))', made, parent, first_txid);
    FOR todo IN
        SELECT statement FROM (
            SELECT 1, format('REVOKE ALL ON %s FROM %s', made, coalesce(quote_ident(rolname), 'PUBLIC'))
            FROM pg_class JOIN aclexplode(relacl) ON grantee <> relowner LEFT JOIN pg_roles ON pg_roles.oid = grantee
            WHERE pg_class.oid = made::regclass
            UNION
            SELECT 2, format('GRANT INSERT ON %s TO tidegate', made)
            UNION
            SELECT 3, replace(pg_get_triggerdef(oid), format(' ON %s ', parent), format(' ON %s ', made))
            FROM pg_trigger WHERE tgrelid = parent AND NOT tgisinternal
            UNION
            SELECT 4, format('ALTER TABLE %s %s TRIGGER %I', made,
                             CASE tgenabled WHEN 'D' THEN 'DISABLE' WHEN 'A' THEN 'ENABLE ALWAYS' ELSE 'ENABLE REPLICA' END, tgname)
            FROM pg_trigger WHERE tgrelid = parent AND NOT tgisinternal AND tgenabled <> 'O'
        ) AS all_of_them (step, statement) ORDER BY step
    LOOP
        EXECUTE todo;
    END LOOP;
    EXECUTE format('ALTER TABLE %s INHERIT %s', made, parent);
    INSERT INTO tidegate.state_range VALUES (recorded, partition, first_txid, NULL, 'size');
    RETURN true;
END $$;

REVOKE EXECUTE ON FUNCTION tidegate.add_partition(text, bigint) FROM PUBLIC;

-- tidegate: plans, processes and commits. It may not edit frozen metadata, truncate, or delete, but for rows of open_commit and
-- for sessions that become one (state_tables.GRANT_DELETE).

GRANT USAGE ON SCHEMA tidegate, state TO tidegate;
GRANT USAGE, CREATE ON SCHEMA staging TO tidegate;
GRANT SELECT ON ALL TABLES IN SCHEMA tidegate TO tidegate;
GRANT INSERT ON tidegate.batch, tidegate.attempt, tidegate.seal, tidegate.commit, tidegate.run_batch, tidegate.source_file,
    tidegate.quarantine, tidegate.operator_action, tidegate.check_result, tidegate.watermark TO tidegate;
GRANT UPDATE (paused_at, paused_by, paused_reason, in_flight, commits_alone) ON tidegate.pipeline TO tidegate;
GRANT UPDATE (txid, attempt, source_digest) ON tidegate.cursor TO tidegate;
GRANT UPDATE (attempt, halted_at, halted_reason, skip_owner, skip_reason, tries_after, awaits_ack, acked_at)
    ON tidegate.batch TO tidegate;
GRANT UPDATE (seen_at, staged_at, sealed_at, failed_at, error, is_poison, source_rows, source_hash, source_hash_sum,
    quarantined_rows, transformed_rows, transformed_hash, transformed_hash_sum, staged_bytes, spark_application, spark_tag,
    dropped_at) ON tidegate.attempt TO tidegate;
GRANT UPDATE (mtime_ns) ON tidegate.source_file TO tidegate;
GRANT UPDATE (succeeded, succeeded_at, failed, failing_since, failed_at, failed_run, error) ON tidegate.plan TO tidegate;
GRANT UPDATE (txid, watermark, previous_watermark, removed_until) ON tidegate.watermark TO tidegate;
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
GRANT EXECUTE ON FUNCTION tidegate.add_range(text, text, text, text, text) TO tidegate;
GRANT EXECUTE ON FUNCTION tidegate.add_partition(text, bigint) TO tidegate;
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
