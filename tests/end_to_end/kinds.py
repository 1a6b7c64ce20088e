"""A pipeline with a state of each kind over the sample flights, and what DuckDB computes for each from the same files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import psycopg2
import sqlalchemy as sa
from tidegate.jobs.pipelines.flights import PIPELINE as FLIGHTS

from tidegate.jobs import Check, CollectSet, Count, History, Newest, Pipeline, Ranges, Rows, State, Sum, Tumbling, Update

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tidegate.state_store.commit.author_updates import UpdateBatch

OUTBOX = sa.table("outbox", sa.column("carrier"), sa.column("flights"), sa.column("txid"), schema="mail")
OUTBOX_DDL = """
    CREATE SCHEMA mail;
    CREATE TABLE mail.outbox (carrier text NOT NULL, flights bigint NOT NULL, txid bigint NOT NULL);
    GRANT USAGE ON SCHEMA mail TO tidegate;
    GRANT INSERT ON mail.outbox TO tidegate;
"""


def departed(flights: "DataFrame") -> "DataFrame":
    """Leave cancelled flights out, and add the time of the departure, as if the clocks of New York were UTC's."""
    at = "make_timestamp(year, month, day, 0, 0, 0) + make_dt_interval(0, dep_time DIV 100, dep_time % 100) AS at"
    return flights.where("dep_time IS NOT NULL").selectExpr("carrier", "flight", "origin", "dest", "distance", at)


def count_carriers(batch: "UpdateBatch") -> None:
    """Put how many flights of each carrier the batch has into the outbox."""
    rows = batch.rows.c
    counted = sa.select(rows.carrier, sa.func.count(), sa.literal(batch.txid)).group_by(rows.carrier)
    batch.execute(sa.insert(OUTBOX).from_select(["carrier", "flights", "txid"], counted))


FLIGHT = {"carrier": "text", "flight": "integer", "origin": "text", "at": "timestamptz"}
NUMBER = {"carrier": "text", "flight": "integer"}
KINDS = Pipeline(
    name="kinds",
    source=FLIGHTS.source,
    transform=departed,
    states={
        "departure": Rows(columns=FLIGHT, range_partitions=Ranges("at", "month")),
        "newest_departure": Newest(NUMBER, {"origin": "text"}, {"at": "timestamptz"}),
        "departures": History(NUMBER, {"origin": "text"}, {"at": "timestamptz"}),
        "by_hour": State(key={"origin": "text"}, window=Tumbling("at", "1 hour"), aggregates={"flights": Count()}),
        "by_carrier": State(
            key={"carrier": "text"},
            aggregates={"flights": Count(), "distance": Sum("distance"), "goals": CollectSet("dest", "text", most=200)},
            kind="opaque",
            changes=True,
        ),
        "notices": Update({"carrier": "text"}, count_carriers),
    },
    checks={"many": Check(lambda batch: sa.select(batch.state("by_carrier").c.carrier).limit(1), otherwise="warn")},
)
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
        SELECT carrier, flight, origin, dest, distance,
               make_timestamptz(year, month, day, 0, 0, 0, 'UTC') + to_minutes(dep_time // 100 * 60 + dep_time % 100) AS "at"
        FROM read_csv(?, header = true, nullstr = '', types = {'carrier': 'VARCHAR', 'dep_time': 'INT'})
        WHERE dep_time IS NOT NULL
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
    """Compute the same from the files."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        computed = {what: connection.execute(FLEW + query, [str(files)]).fetchall() for what, query in WANTED.items()}
    return {what: sorted(rows, key=str) for what, rows in computed.items()}
