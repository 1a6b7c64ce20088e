"""The pipelines of the benchmarks, found by an entry point, like those of another package (`benchmarks.project`)."""

from jobs import Count, Files, Pipeline, State, Sum

EVENT = {"user_id": "bigint", "page": "string", "amount": "bigint"}
PER_KEY = {"events": Count(), "amount": Sum("amount")}

PAGES = Pipeline(
    name="pages",
    source=Files("data/pages", glob="*.parquet", format="parquet", schema=EVENT, max_files=1, min_age_seconds=0),
    states={"per_page": State(key={"page": "text"}, aggregates=PER_KEY)},
)
USERS = Pipeline(
    name="users",
    source=Files("data/users", glob="*.parquet", format="parquet", schema=EVENT, max_files=1, min_age_seconds=0),
    states={"per_user": State(key={"user_id": "bigint"}, aggregates=PER_KEY)},
)
SMALL = Pipeline(
    name="small",
    source=Files(
        "data/small", glob="*.csv", format="csv", schema={"page": "string", "amount": "bigint"}, max_files=1, min_age_seconds=0
    ),
    states={"per_small_page": State(key={"page": "text"}, aggregates=PER_KEY)},
)
PIPELINES = {pipeline.name: pipeline for pipeline in (PAGES, USERS, SMALL)}
