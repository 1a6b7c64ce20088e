"""Revenue per shop, in the project of a team that also has packages called jobs and dags."""

from jobs.probes import note
from tidegate import Count, Files, Pipeline, State, Sum


def in_cents(parts):
    """Multiply, in Spark's Python workers."""
    note("executor")
    for part in parts:
        part["cents"] = part["euros"] * 100
        yield part[["shop", "cents"]]


def transform(orders):
    """Leave the rows to `in_cents`."""
    note("task")
    return orders.mapInPandas(in_cents, "shop string, cents long")


PIPELINE = Pipeline(
    name="orders",
    source=Files("orders", glob="*.csv", format="csv", schema={"shop": "string", "euros": "int"}),
    transform=transform,
    states={"revenue": State(key={"shop": "text"}, aggregates={"orders": Count(), "cents": Sum("cents")})},
)
