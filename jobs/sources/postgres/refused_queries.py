"""Refuses queries whose rows depend on others, on chance or the clock, or come from functions whose tables are not seen.

A plan waits for transactions that write to the tables read, and finds these by the locks of its own transaction. Postgres
locks the tables within a function only when it runs, unless it can write the function's query into that of the caller. So the
query's plan is searched for functions that return rows. Immutable ones read no tables: this is what their owner has declared.
A function that returns a single value is not looked for: many queries call such, and few of these read tables. Those of
Postgres itself whose values are others at the next look, such as `random()` and `now()`, are refused wherever they stand.
So are texts that Postgres takes for the clock, such as 'now' and 'today', where they stand for a time.
"""

import re
from dataclasses import replace
from typing import Any

import psycopg2

from tidegate.jobs.sources.postgres.table_origin import Origin
from tidegate.jobs.sources.postgres.table_query import TableQuery
from tidegate.state_store.base.errors import SourceUnreadable

_TABLES = "SELECT EXISTS (SELECT FROM pg_class WHERE relkind IN ('r', 'p') AND oid = ANY(%s))"
# Functions of these schemas, NULL if it is not written, and names that return rows and may read tables.
_READING = """
    SELECT DISTINCT p.oid::regprocedure::text
    FROM unnest(%s::text[], %s::text[]) AS called (schema, name)
    JOIN pg_proc AS p ON p.proname = called.name
    JOIN pg_namespace AS n ON n.oid = p.pronamespace
    WHERE CASE WHEN called.schema IS NULL THEN pg_function_is_visible(p.oid) ELSE n.nspname = called.schema END
        AND p.proretset AND p.provolatile <> 'i' AND n.nspname <> 'pg_catalog'
    ORDER BY 1
"""
# Which of these functions of Postgres itself give another value each time; those of the clock do so in each transaction.
_VARYING = """
    SELECT DISTINCT proname || '()' FROM pg_proc
    WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY(%s)
        AND (provolatile = 'v' OR proname IN ('now', 'statement_timestamp', 'transaction_timestamp'))
"""
_CLOCK = re.compile(r"\b(?:CURRENT_(?:DATE|TIME|TIMESTAMP)|LOCALTIME|LOCALTIMESTAMP)\b")
_NAME = r'("(?:[^"]|"")+"|[^\W\d][\w$]*)'
_CALL = re.compile(rf"(?:{_NAME}\.)?{_NAME}\(")
_QUOTED = re.compile(r'"(?:[^"]|"")+"')
_TEXT = re.compile(r"E'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'", re.DOTALL)
# Literals, after what only looks like one: comments and names in quotes.
_LITERAL = re.compile(
    rf"--[^\n]*|/\*.*?\*/|{_QUOTED.pattern}|({_TEXT.pattern}|(\$(?:[^\W\d]\w*)?\$).*?\2)", re.DOTALL | re.IGNORECASE
)
_CLOCK_WORD = re.compile(r"\b(?:now|today|tomorrow|yesterday)\b", re.IGNORECASE)
_CLOCK_TEXT = re.compile(rf"('[^']*{_CLOCK_WORD.pattern}[^']*')::cstring\)::(?:date|time|ts)", re.IGNORECASE)
_ADVICE = "Write the function's query into that of the PostgresTable"


def check_query(cursor: Any, query: TableQuery, origin: Origin) -> None:
    """Refuse a query or view that reads no table, or whose rows depend on others, on chance or the clock, or on unseen tables.

    Raises: SourceUnreadable.
    """
    if query.table and origin.table is not None:
        return
    cursor.execute(_TABLES, [origin.read])
    if not cursor.fetchone()[0]:
        raise SourceUnreadable(
            f"{query.name} reads no table that Tidegate can see, so it cannot wait for transactions that still write rows. "
            f"{_ADVICE}, if a function reads one."
        )
    nodes = query.plan_nodes(cursor, query.columns)
    if across := _across_rows(nodes[0]):
        raise SourceUnreadable(
            f"{query.name} has {across}: what it returns below a position changes as rows come, and is not read again. Read "
            "the rows themselves; the pipeline's states aggregate them, and max_rows bounds a batch."
        )
    if varying := _varying(cursor, nodes) or _clock_literal(cursor, query):
        raise SourceUnreadable(
            f"{query.name} has {varying}: it gives other rows, or other values, each time it is read, so rows are passed over "
            "and a batch that is tried again is another one. Choose rows by their own columns."
        )
    # What returns rows: after FROM, or in the list after SELECT.
    returning = [node["Function Call"] for node in nodes if node["Node Type"] == "Function Scan"]
    returning += [text for node in nodes if node["Node Type"] == "ProjectSet" for text in node["Output"]]
    calls = {call for expression in returning for call in _CALL.findall(_TEXT.sub("''", expression))}
    if not calls:
        return
    schemas, names = zip(*((_unquoted(schema) or None, _unquoted(name)) for schema, name in calls), strict=True)
    cursor.execute(_READING, [list(schemas), list(names)])
    if reading := [name for (name,) in cursor.fetchall()]:
        raise SourceUnreadable(
            f"{query.name} calls {' and '.join(reading)}, and Tidegate does not see which tables are read there, so it cannot "
            f"wait for transactions that still write rows. {_ADVICE}; or declare the function IMMUTABLE, if it reads none."
        )


def _varying(cursor: Any, nodes: list[dict[str, Any]]) -> str | None:
    """Return what makes a plan give other rows each time: a sample, a function of chance, or the clock."""
    if any(node["Node Type"] == "Sample Scan" for node in nodes):
        return "a TABLESAMPLE"
    written = [each for node in nodes for value in node.values() for each in (value if isinstance(value, list) else [value])]
    texts = [each for each in written if isinstance(each, str)]
    code = " ".join(_QUOTED.sub('""', _TEXT.sub("''", each)) for each in texts)
    varying = set(_CLOCK.findall(code))
    varying |= {f"{text} as a time" for each in texts for text in _CLOCK_TEXT.findall(each)}
    if called := [name for schema, name in _CALL.findall(code) if schema in ("", "pg_catalog")]:
        cursor.execute(_VARYING, [called])
        varying |= {name for (name,) in cursor.fetchall()}
    return min(varying, default=None)


def _clock_literal(cursor: Any, query: TableQuery) -> str | None:
    """Return a literal of the author's query that is the clock: a time with another word in its place is refused by Postgres.

    The plan does not show it: Postgres has made a time of it.
    """
    for literal in _LITERAL.finditer(query.select):
        if literal[1] is None or not _CLOCK_WORD.search(literal[1]):
            continue
        before, after = query.select[: literal.start()], query.select[literal.end() :]
        other = replace(query, select=f"{before}{_CLOCK_WORD.sub('tidegate', literal[1])}{after}")
        cursor.execute("SAVEPOINT other")
        try:
            other.plan_nodes(cursor, query.columns)
        except psycopg2.errors.InvalidDatetimeFormat:
            return f"{literal[1]} as a time"
        except (psycopg2.DataError, psycopg2.ProgrammingError):
            pass  # such as the label of an enum
        finally:
            cursor.execute("ROLLBACK TO SAVEPOINT other")
    return None


def _across_rows(node: dict[str, Any]) -> str | None:
    """Return what makes a plan's rows depend on other rows. Beyond a join, or in a subquery after SELECT, it is a look-up."""
    if node["Node Type"] == "Limit":
        return "a LIMIT, OFFSET or FETCH"
    if node["Node Type"] == "WindowAgg" or (
        node["Node Type"] == "Aggregate" and set(node["Output"]) - set(node.get("Group Key", []))
    ):
        return "aggregates or window functions"
    is_join = "Join" in node["Node Type"] or node["Node Type"] == "Nested Loop"
    below = [] if is_join else node.get("Plans", [])
    rows = [child for child in below if "Plan" not in child["Parent Relationship"] or "CTE" in child["Subplan Name"]]
    return next(filter(None, map(_across_rows, rows)), None)


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name
