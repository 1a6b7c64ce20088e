"""Pipelines of the page's tests. `ORPHAN` is registered, but no code declares it."""

from jobs import Count, Files, Pipeline, State, Sum

CLICKS = Pipeline(
    name="clicks",
    source=Files("clicks", glob="*.csv", format="csv", schema={"page": "string", "cents": "string"}),
    states={
        "per_page": State(
            key={"page": "text", "day": "date"},
            aggregates={"clicks": Count(), "spent": Sum("cents", type="numeric(20,4)")},
        ),
        "total": State(aggregates={"all_clicks": Count()}),
    },
    description="Clicks <b>per page</b> & day",
    on_poison="quarantine",
)
BROKEN = Pipeline(
    name="broken",
    source=Files("broken", glob="*.csv", format="csv", schema={"page": "string"}),
    states={"per_broken": State(key={"page": "text"}, aggregates={"clicks": Count()})},
)
ORPHAN = Pipeline(
    name="orphan",
    source=Files("orphan", glob="*.csv", format="csv", schema={"page": "string"}),
    states={
        "per_orphan": State(
            key={"page": "text", "shop": "integer"}, aggregates={"clicks": Count()}, kind="opaque", null_keys=True
        )
    },
)
REGISTERED = (CLICKS, BROKEN, ORPHAN)
