"""A state of each kind over departures of flights."""

from typing import TYPE_CHECKING

import sqlalchemy as sa

from tidegate.jobs import Check, CollectSet, Count, Files, History, Newest, Pipeline, Ranges, Rows, State, Sum, Tumbling, Update

if TYPE_CHECKING:
    from tests.store import UpdateBatch

OUTBOX = sa.table("outbox", sa.column("carrier"), sa.column("flights"), sa.column("txid"), schema="mail")
FLIGHT = {"carrier": "text", "flight": "integer", "origin": "text", "at": "timestamptz"}
NUMBER = {"carrier": "text", "flight": "integer"}


def count_carriers(batch: "UpdateBatch") -> None:
    """Put how many flights of each carrier the batch has into the outbox."""
    rows = batch.rows.c
    counted = sa.select(rows.carrier, sa.func.count(), sa.literal(batch.txid)).group_by(rows.carrier)
    batch.execute(sa.insert(OUTBOX).from_select(["carrier", "flights", "txid"], counted))


PIPELINE = Pipeline(
    name="kinds",
    source=Files(
        "data/departures",
        glob="*.csv",
        format="csv",
        schema={
            "carrier": "string",
            "flight": "int",
            "origin": "string",
            "dest": "string",
            "distance": "int",
            "at": "timestamp",
        },
    ),
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
    retry_delay_seconds=1,
    checks={"many": Check(lambda batch: sa.select(batch.state("by_carrier").c.carrier).limit(1), otherwise="warn")},
)
