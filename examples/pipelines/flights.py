"""Flights from New York in 2013, one CSV file per day: delays per carrier and day."""

from typing import TYPE_CHECKING

from tidegate import Count, Files, Max, Min, Pipeline, State, Sum

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_day(flights: "DataFrame") -> "DataFrame":
    """Add the flight's date, and a column that is NULL unless the flight was cancelled."""
    return flights.selectExpr(
        "*", "make_date(year, month, day) AS date", "CASE WHEN dep_time IS NULL THEN 1 END AS was_cancelled"
    )


PIPELINE = Pipeline(
    name="flights",
    source=Files(
        "data/flights",
        glob="*.csv",
        format="csv",
        schema={
            "year": "int",
            "month": "int",
            "day": "int",
            "dep_time": "int",
            "dep_delay": "int",
            "carrier": "string",
            "flight": "int",
            "origin": "string",
            "dest": "string",
            "distance": "int",
        },
        max_files=15,
        min_age_seconds=0,  # files get their names once they are complete (`tidegate.sample_data`)
    ),
    transform=with_day,
    states={
        "daily": State(
            key={"carrier": "text", "date": "date"},
            aggregates={
                "flights": Count(),
                "cancelled": Count("was_cancelled"),
                "delay_sum": Sum("dep_delay"),
                "delay_min": Min("dep_delay", "integer"),
                "delay_max": Max("dep_delay", "integer"),
                "distance": Sum("distance"),
            },
        )
    },
    description="Delays per carrier and day of the flights that left New York in 2013.",
)
