"""Pipelines that quarantine bad records or skip their batches, with states that can be redone."""

from tidegate.jobs import Count, Files, Pipeline, Ranges, Rows, State, Sum

SALES = {"orders": Count(), "cents": Sum("cents")}
REVENUE = State({"shop": "text"}, SALES, kind="opaque", changes=True, null_keys=True, unanchored=True)
ORDERS = Pipeline(
    name="orders",
    source=Files("data/orders", glob="*.csv", format="csv", schema={"shop": "string", "cents": "int"}, max_files=1),
    states={"revenue": REVENUE, "sale": Rows({"shop": "text", "cents": "integer"}, range_partitions=Ranges("cents", 1000))},
    check={"paid": "cents > 0"},
    on_poison="quarantine",
    message_timeout_seconds=600,
)
PER_PAGE = State({"page": "text"}, {"visits": Count(), "seconds": Sum("seconds")}, kind="non-transactional")
VISITS = Pipeline(
    name="visits",
    source=Files("data/visits", glob="*.csv", format="csv", schema={"page": "string", "seconds": "int"}, max_files=1),
    states={"per_page": PER_PAGE},
    guarantee="at_least_once",
    on_poison="skip",
    tries=1,
    retry_delay_seconds=0,
    tracking="off",
)
