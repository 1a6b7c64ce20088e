"""Arrays of a key's values: functions and aggregates that make one array of two, or of all."""

from alembic import op

revision = "0018"
down_revision = "0017"

FUNCTIONS = """
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
"""
GRANTS = """
REVOKE EXECUTE ON FUNCTION tidegate.checked(anyarray, integer), tidegate.union_of_two(anyarray, anyarray, integer),
    tidegate.list_of_two(anyarray, anyarray, integer), tidegate.smallest_of_two(anyarray, anyarray, integer),
    tidegate.largest_of_two(anyarray, anyarray, integer), tidegate.counts_of_two(bigint[], bigint[]),
    tidegate.union_of_all(anyarray, integer), tidegate.list_of_all(anyarray, integer),
    tidegate.smallest_of_all(anyarray, integer), tidegate.largest_of_all(anyarray, integer),
    tidegate.counts_of_all(bigint[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tidegate.checked(anyarray, integer), tidegate.union_of_two(anyarray, anyarray, integer),
    tidegate.list_of_two(anyarray, anyarray, integer), tidegate.smallest_of_two(anyarray, anyarray, integer),
    tidegate.largest_of_two(anyarray, anyarray, integer), tidegate.counts_of_two(bigint[], bigint[]),
    tidegate.union_of_all(anyarray, integer), tidegate.list_of_all(anyarray, integer),
    tidegate.smallest_of_all(anyarray, integer), tidegate.largest_of_all(anyarray, integer),
    tidegate.counts_of_all(bigint[]) TO tidegate;
"""
MADE = """
DROP AGGREGATE tidegate.union_of_all(anyarray, integer), tidegate.list_of_all(anyarray, integer),
    tidegate.smallest_of_all(anyarray, integer), tidegate.largest_of_all(anyarray, integer),
    tidegate.counts_of_all(bigint[]);
DROP FUNCTION tidegate.counts_of_two(bigint[], bigint[]), tidegate.largest_of_two(anyarray, anyarray, integer),
    tidegate.smallest_of_two(anyarray, anyarray, integer), tidegate.list_of_two(anyarray, anyarray, integer),
    tidegate.union_of_two(anyarray, anyarray, integer), tidegate.checked(anyarray, integer);
"""


def upgrade() -> None:
    op.execute(FUNCTIONS)
    op.execute(GRANTS)


def downgrade() -> None:
    """Go back; refused while a state has such an array, because older code cannot merge it."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM information_schema.columns WHERE table_schema = 'state' AND data_type = 'ARRAY') "
        "THEN RAISE 'a state keeps arrays'; END IF; END $$"
    )
    op.execute(MADE)
