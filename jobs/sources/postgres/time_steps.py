"""The step to which the time is rounded by which a table is read, so that a row may lie before its transaction's start.

A plan waits for longer than the step. What would let it wait for longer than a day, or rounds in a way that is not known here,
is refused. Looked at are the column's type, its default or formula, the expression of a query or view, triggers that assign
the column, and the functions that these call.
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
# The default or formula of a column of this name in the tables that are read, or of its domain.
_DEFAULTS = """
    SELECT coalesce(pg_get_expr(adbin, adrelid), typdefault) FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
    LEFT JOIN pg_attrdef ON attrelid = adrelid AND attnum = adnum
    WHERE attrelid = ANY(%s) AND attname = %s
"""
_TRIGGERS = "SELECT prosrc FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid WHERE tgrelid = ANY(%s) AND tgenabled <> 'D'"
# Statements of a function that give a name its value: by := or =, with a declaration, or by INTO, but not INSERT INTO.
_ASSIGNED = (
    r"(?<![\w.])(?:{name})(?:\s+(?:constant\s+)?(?:timestamp|date|text|bigint|int)[\w\s()]*?)?\s*(?::?=|\bdefault\b)[^;]*"
    r"|[^;]*(?<!insert\s)\binto\s+(?:strict\s+)?(?:[\w.\"]+\s*,\s*)*(?:{name})(?![\w.])[^;]*"
)
_VARIABLE = re.compile(r"(?<![\w.])[a-z_]\w*(?![\w.(])")
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
    SELECT called, pronamespace = 'pg_catalog'::regnamespace, coalesce(pg_get_function_sqlbody(pg_proc.oid), prosrc)
    FROM unnest(%s::text[]) AS called JOIN pg_proc ON proname = regexp_replace(called, '^.*[.]|"', '', 'g')
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
    written = _written(cursor, query.key[0], tables)
    steps = {found[0]: _step_of(cursor, found) for text in [*read, *written] for found in _ROUNDED.finditer(text)}
    steps |= {f"{call}(": None for call, _, _ in _that_make_a_time(cursor, read)}
    for how, step in steps.items():
        if step is None or step > LONGEST_STEP_SECONDS:
            raise SourceUnreadable(
                f"{query.name}: its time {query.key[0]} is computed by {how}, which rounds it to more than a day, or in a way "
                "that is not known here: rows would be read much later, or passed by. Name the time itself in the key, and "
                "round it in the transform."
            )
    return max([0 if modifier is None or modifier < 0 else 10.0**-modifier, *(step for step in steps.values() if step)])


def _written(cursor: Any, column: str, tables: list[int]) -> list[str]:
    """Return what gives a value to a column of this name, with the text of the functions that are called there."""
    cursor.execute(_DEFAULTS, [tables, column])
    texts = [text for (text,) in cursor.fetchall() if text]
    cursor.execute(_TRIGGERS, [tables])
    for (source,) in cursor.fetchall():
        texts += _assigned(source, rf'new\."?{re.escape(column)}"?')
    called: set[str] = set()
    while made := [each for each in _that_make_a_time(cursor, texts) if not each[1] and each[0] not in called]:
        called.update(call for call, _, _ in made)
        texts += [body for _, _, body in made]
    return texts


def _assigned(source: str, pattern: str) -> list[str]:
    """Return the statements of a function's source that give a value to what the pattern names, also through variables."""
    texts, patterns = [], [pattern]
    for name in patterns:  # which grow on the way
        found = [match[0] for match in re.finditer(_ASSIGNED.format(name=name), source, re.IGNORECASE)]
        texts += found
        patterns += sorted({word for text in found for word in _VARIABLE.findall(text.lower())} - set(patterns))
    return texts


def _that_make_a_time(cursor: Any, texts: list[str]) -> list[tuple[str, bool, str]]:
    """Return the functions called in texts that return a time: their name there, whether they are Postgres' own, their text."""
    cursor.execute(_MAKES_A_TIME, [sorted({call for text in texts for call in _CALL.findall(text)}), _KNOWN])
    made: list[tuple[str, bool, str]] = cursor.fetchall()
    return made


def _step_of(cursor: Any, found: re.Match[str]) -> float | None:
    if found["digits"]:
        return 10.0 ** -int(found["digits"])
    if found["stride"]:
        cursor.execute("SELECT extract(epoch FROM %s::interval)::float8", [found["stride"]])
        (seconds,) = cursor.fetchone()
        return float(seconds)
    unit = "day" if found["day"] else "second" if found["second"] else found["unit"] or ""
    return _STEPS.get(unit.lower().removesuffix("s"))
