"""The step to which the time is rounded by which a table is read: by its type, or by the expression that computes it."""

import re
from typing import Any

from psycopg2 import sql

from tidegate.jobs.sources.postgres.table_query import ResultColumn, TableQuery

# The modifier of a domain's type is that of the domain, or of one that it is made of.
_TYPE_MODIFIER = """
    WITH RECURSIVE kind (oid, modifier) AS (
        SELECT atttypid, atttypmod FROM pg_attribute WHERE attrelid = %s AND attnum = %s
        UNION ALL
        SELECT typbasetype, typtypmod FROM kind JOIN pg_type USING (oid) WHERE typtype = 'd'
    )
    SELECT max(modifier) FROM kind
"""
# How an expression of a query, or of its views, rounds a time, as Postgres shows it in a plan.
_ROUNDED = re.compile(r"timestamp\((\d)\) with time zone|date_trunc\('(\w+)'")
_STEPS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800, "month": 2_678_400, "quarter": 7_948_800}


def step_seconds(cursor: Any, query: TableQuery, key: ResultColumn) -> float:
    """Return what a key's type, or the expression that computes it, rounds a time to; 0 if that is not known."""
    cursor.execute(_TYPE_MODIFIER, [key.table, key.number])
    (modifier,) = cursor.fetchone()
    cursor.execute(
        sql.SQL("EXPLAIN (VERBOSE, COSTS OFF) SELECT {} FROM {}").format(sql.Identifier(query.key[0]), query.relation)
    )
    outputs = " ".join(line for (line,) in cursor.fetchall() if line.strip().startswith("Output: "))
    rounded = [10.0 ** -int(digits) if digits else _STEPS.get(unit, 0) for digits, unit in _ROUNDED.findall(outputs)]
    return max([0 if modifier is None or modifier < 0 else 10.0**-modifier, *rounded])
