"""What pipeline `kinds` has in the states of each kind, and what DuckDB computes for each from the same files."""

import csv
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import psycopg2

CARRIERS, AIRPORTS = ("AA", "B6", "UA"), ("EWR", "JFK", "LGA", "BOS", "LAX")
ROWS_PER_FILE = 60
NAMES = ("carrier", "flight", "origin", "dest", "distance", "at")
OUTBOX_DDL = """
    CREATE SCHEMA mail;
    CREATE TABLE mail.outbox (carrier text NOT NULL, flights bigint NOT NULL, txid bigint NOT NULL);
    GRANT USAGE ON SCHEMA mail TO tidegate;
    GRANT INSERT ON mail.outbox TO tidegate;
"""


def depart(file: Path, number: int) -> None:
    """Write the departures of a file: rows of different times from file to file, some of which are earlier than before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([NAMES, *_departures(number)])


def _departures(number: int) -> Iterator[tuple[object, ...]]:
    for row in range(ROWS_PER_FILE):
        at = datetime(2013, 1, 30, tzinfo=UTC) + timedelta(minutes=(row * 89 + number * 1013) % 5000)
        origin, dest = AIRPORTS[(row + number) % 3], AIRPORTS[row % 5]
        yield CARRIERS[row % 3], row % 7, origin, dest, 100 + row * number, f"{at:%Y-%m-%dT%H:%M:%SZ}"


# By what is compared: what Postgres has, and what DuckDB computes from the files.
FOUND = {
    "appended rows": "SELECT carrier, flight, origin, at FROM state.departure",
    "newest rows": "SELECT carrier, flight, at, origin FROM state.newest_departure",
    "versions": "SELECT carrier, flight, at, origin, valid_to FROM state.departures",
    "windows": "SELECT origin, window_start, flights FROM state.by_hour",
    "aggregates": "SELECT carrier, flights, distance, goals FROM state.by_carrier",
    "what the update wrote": "SELECT carrier, sum(flights)::bigint FROM mail.outbox GROUP BY carrier",
    "changes": """SELECT carrier, sum(flights - coalesce(previous_flights, 0))::bigint
                  FROM state.by_carrier_changes GROUP BY carrier""",
    "notices and changes without a counterpart": """
        SELECT carrier, txid FROM mail.outbox FULL JOIN state.by_carrier_changes USING (carrier, txid)
        GROUP BY carrier, txid HAVING count(*) > 1 OR count(outbox.*) <> count(by_carrier_changes.*)""",
}
FLEW = """
    WITH flew AS (
        SELECT * FROM read_csv(?, header = true, types = {'carrier': 'VARCHAR', 'flight': 'INT', 'at': 'TIMESTAMPTZ'})
    ), version AS (SELECT carrier, flight, "at", max(origin) AS origin FROM flew GROUP BY ALL)
"""
WANTED = {
    "appended rows": 'SELECT carrier, flight, origin, "at" FROM flew',
    "newest rows": 'SELECT carrier, flight, max("at"), arg_max(origin, "at") FROM version GROUP BY ALL',
    "versions": """SELECT carrier, flight, "at", origin, lead("at") OVER (PARTITION BY carrier, flight ORDER BY "at")
                   FROM version""",
    "windows": 'SELECT origin, time_bucket(INTERVAL 1 HOUR, "at") AS hour, count(*) FROM flew GROUP BY ALL',
    "aggregates": """SELECT carrier, count(*), sum(distance)::BIGINT, list_sort(list(DISTINCT dest))
                     FROM flew GROUP BY ALL""",
    "what the update wrote": "SELECT carrier, count(*) FROM flew GROUP BY ALL",
    "changes": "SELECT carrier, count(*) FROM flew GROUP BY ALL",
    "notices and changes without a counterpart": "SELECT 1 WHERE false",
}


def found(connection: psycopg2.extensions.connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return what Postgres has, in some order that is the same for `wanted`."""
    results = {}
    with connection, connection.cursor() as cursor:
        cursor.execute("SET LOCAL TimeZone = 'UTC'")
        for what, query in FOUND.items():
            cursor.execute(query)
            results[what] = sorted(cursor.fetchall(), key=str)
    return results


def wanted(files: Path) -> dict[str, list[tuple[Any, ...]]]:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        computed = {what: connection.execute(FLEW + query, [str(files)]).fetchall() for what, query in WANTED.items()}
    return {what: sorted(rows, key=str) for what, rows in computed.items()}
