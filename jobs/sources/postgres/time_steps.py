"""The step to which the time is rounded by which a table is read, so that a row may lie before its transaction's start.

A plan waits for longer than the step. What would let it wait for longer than a day, or rounds in a way that is not known here,
is refused. Looked at are the column's type, its default or formula, the expression of a query or view, and triggers that
assign the column.
"""

import re
from typing import Any

from tidegate.jobs.sources.postgres.table_query import ResultColumn, TableQuery
from tidegate.state_store.base.errors import SourceUnreadable

LONGEST_STEP_SECONDS = 86_400
# The modifier of a domain's type is that of the domain, or of one that it is made of.
_TYPE_MODIFIER = """
    WITH RECURSIVE kind (oid, modifier) AS (
        SELECT atttypid, atttypmod FROM pg_attribute WHERE attrelid = %s AND attnum = %s
        UNION ALL
        SELECT typbasetype, typtypmod FROM kind JOIN pg_type USING (oid) WHERE typtype = 'd'
    )
    SELECT max(modifier) FROM kind
"""
# What gives a value to a column of this name in the tables that are read: default, formula, code of triggers.
_WRITTEN = """
    SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef
    JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
    WHERE attrelid = ANY(%(tables)s) AND attname = %(column)s
    UNION ALL
    SELECT (regexp_matches(prosrc, 'new[.]"?' || %(column)s || '"?[[:space:]]*:?=([^;]*)', 'gi'))[1]
    FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid WHERE tgrelid = ANY(%(tables)s) AND tgenabled <> 'D'
"""
# How an expression rounds or moves a time: as Postgres shows it, or as it is written in a function. A time without a zone, or a
# text, that becomes one with a zone means something else once its writers' zone changes.
_ROUNDED = re.compile(
    r"timestamp(?:tz)?\((?P<digits>\d)\)|date_trunc\((?:'(?P<unit>\w+)')?|date_bin\((?:(?:interval )?'(?P<stride>[^']*)')?"
    r"|(?P<day>::date\b|\bcurrent_date\b)|[-*] '[^']*'::interval|\)::timestamp with time zone"
    r"|AT TIME ZONE [^()]*\) AT TIME ZONE"
    r"|to_timestamp\([^']*(?:\b(?:floor|round|trunc|ceil|ceiling|div)\(|::bigint|::integer)|(?P<second>to_timestamp\()",
    re.IGNORECASE,
)
_STEPS = {"microsecond": 1e-6, "millisecond": 1e-3, "second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_CALL = re.compile(r'([\w$."]+)\(')
_MAKES_A_TIME = """
    SELECT called FROM unnest(%s::text[]) AS called JOIN pg_proc ON proname = regexp_replace(called, '^.*[.]|"', '', 'g')
    WHERE prorettype IN ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype) AND proname <> ALL (%s)
"""
_KNOWN = ["date_trunc", "date_bin", "timestamp", "timestamptz", "timezone", "to_timestamp", "max", "min"]


def step_seconds(cursor: Any, query: TableQuery, key: ResultColumn, tables: list[int]) -> float:
    """Return what the key's time is rounded to in the `tables` that are read; 0 if nothing is seen to round it.

    Raises: SourceUnreadable for a step of more than a day, or one that is not known.
    """
    cursor.execute(_TYPE_MODIFIER, [key.table, key.number])
    (modifier,) = cursor.fetchone()
    read = [text for node in query.plan_nodes(cursor, query.key[:1]) for text in node.get("Output", [])]
    cursor.execute(_WRITTEN, {"tables": tables, "column": query.key[0]})
    expressions = [*read, *(text for (text,) in cursor.fetchall())]
    steps = {found[0]: _step_of(cursor, found) for text in expressions for found in _ROUNDED.finditer(text)}
    cursor.execute(_MAKES_A_TIME, [[call for text in read for call in _CALL.findall(text)], _KNOWN])
    steps |= {f"{call}(": None for (call,) in cursor.fetchall()}
    for how, step in steps.items():
        if step is None or step > LONGEST_STEP_SECONDS:
            raise SourceUnreadable(
                f"{query.name}: its time {query.key[0]} is computed by {how}, which rounds it to more than a day, or in a way "
                "that is not known here: rows would be read much later, or passed by. Name the time itself in the key, and "
                "round it in the transform."
            )
    return max([0 if modifier is None or modifier < 0 else 10.0**-modifier, *(step for step in steps.values() if step)])


def _step_of(cursor: Any, found: re.Match[str]) -> float | None:
    if found["digits"]:
        return 10.0 ** -int(found["digits"])
    if found["stride"]:
        cursor.execute("SELECT extract(epoch FROM %s::interval)::float8", [found["stride"]])
        (seconds,) = cursor.fetchone()
        return float(seconds)
    unit = "day" if found["day"] else "second" if found["second"] else found["unit"] or ""
    return _STEPS.get(unit.lower().removesuffix("s"))
