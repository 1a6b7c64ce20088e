"""Sketches: the merge of bits, and the functions that estimate what sketches stand for."""

from alembic import op

revision = "0023"
down_revision = "0022"

FUNCTIONS = """
CREATE FUNCTION tidegate.bits_of_two(bigint[], bigint[]) RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog AS $$
BEGIN
    RETURN ARRAY(SELECT coalesce(a, 0) | coalesce(b, 0) FROM unnest($1, $2) WITH ORDINALITY AS pairs (a, b, place) ORDER BY place);
END $$;

CREATE AGGREGATE tidegate.bits_of_all(bigint[]) (
    SFUNC = tidegate.bits_of_two, STYPE = bigint[], INITCOND = '{}', PARALLEL = SAFE
);

-- What sketches estimate (jobs/sketches.py). The bits have 32 rows: a value sets one, in row n with a probability of 2^-n, in the last
-- two rows with the same. So many values are likely that so many different bits are set by them: the root, by Newton's method.

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

-- The counts are those of values below the range, of negative sizes from the largest on, of zero, of sizes, and of values above the
-- range. From each power of two to the next are `per_octave` sizes. The estimate has the same relative distance to both ends of one.

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
"""
GRANTS = """
REVOKE EXECUTE ON FUNCTION tidegate.bits_of_two(bigint[], bigint[]), tidegate.bits_of_all(bigint[]), tidegate.distinct_of(bigint[]),
    tidegate.quantile_of(bigint[], numeric, integer, integer, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tidegate.bits_of_two(bigint[], bigint[]), tidegate.bits_of_all(bigint[]), tidegate.distinct_of(bigint[]),
    tidegate.quantile_of(bigint[], numeric, integer, integer, integer) TO tidegate;
GRANT EXECUTE ON FUNCTION tidegate.bits_of_all(bigint[]), tidegate.distinct_of(bigint[]), tidegate.counts_of_all(bigint[]),
    tidegate.quantile_of(bigint[], numeric, integer, integer, integer) TO tidegate_reader;
"""
MADE = """
REVOKE EXECUTE ON FUNCTION tidegate.counts_of_all(bigint[]) FROM tidegate_reader;
DROP AGGREGATE tidegate.bits_of_all(bigint[]);
DROP FUNCTION tidegate.bits_of_two(bigint[], bigint[]), tidegate.distinct_of(bigint[]),
    tidegate.quantile_of(bigint[], numeric, integer, integer, integer);
"""


def upgrade() -> None:
    op.execute(FUNCTIONS)
    op.execute(GRANTS)


def downgrade() -> None:
    """Go back; Postgres refuses it while a state has an estimate, which older code cannot merge."""
    op.execute(MADE)
