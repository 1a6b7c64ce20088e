"""The pipelines of the benchmarks, found by an entry point, like those of another package (`benchmarks.project`)."""

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tidegate.jobs import Count, Files, Newest, Pipeline, Rows, State, Sum

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EVENT = {"user_id": "bigint", "page": "string", "amount": "bigint"}
VERSION = {**EVENT, "at": "bigint"}
PER_KEY = {"events": Count(), "amount": Sum("amount")}


def ordinary(events: "DataFrame") -> "DataFrame":
    """Transform events as usual pipelines do: leave some out, compute a column."""
    return events.where("amount >= 10").selectExpr("page", "user_id % 10000 AS bucket", "amount")


def words(lines: "DataFrame") -> "DataFrame":
    """Split lines into lower-case words, as the example does."""
    return lines.selectExpr(r"""explode(regexp_extract_all(lower(value), r"(\p{L}+(?:'\p{L}+)*)", 1)) AS word""")


def _files(name: str, schema: dict[str, str] = EVENT, files: int = 1) -> Files:
    return Files(f"data/{name}", glob="*.parquet", format="parquet", schema=schema, max_files=files, min_age_seconds=0)


PAGES = Pipeline(
    name="pages",
    source=_files("pages"),
    states={"per_page": State(key={"page": "text"}, aggregates=PER_KEY)},
)
USERS = Pipeline(
    name="users",
    source=_files("users"),
    states={"per_user": State(key={"user_id": "bigint"}, aggregates=PER_KEY)},
)
# An opaque state with and without changes, which are made of the values before.
KEEPING, RECORDING = (
    Pipeline(
        name=f"{name}_users",
        source=_files(f"{name}_users"),
        states={
            f"per_{name}_user": State(key={"user_id": "bigint"}, aggregates=PER_KEY, kind="opaque", changes=name == "recorded")
        },
    )
    for name in ("kept", "recorded")
)
SMALL = Pipeline(
    name="small",
    source=Files(
        "data/small", glob="*.csv", format="csv", schema={"page": "string", "amount": "bigint"}, max_files=1, min_age_seconds=0
    ),
    states={"per_small_page": State(key={"page": "text"}, aggregates=PER_KEY)},
)
APPENDED = Pipeline(
    name="appended",
    source=_files("appended"),
    states={"event": Rows(columns={"user_id": "bigint", "page": "text", "amount": "bigint"})},
)
NEWEST = Pipeline(
    name="newest",
    source=_files("newest", VERSION),
    states={"newest_event": Newest({"user_id": "bigint"}, {"page": "text", "amount": "bigint"}, {"at": "bigint"})},
)
ORDINARY = Pipeline(
    name="ordinary",
    source=_files("ordinary", files=4),
    transform=ordinary,
    states={
        "by_page": State(key={"page": "text"}, aggregates=PER_KEY),
        "by_bucket": State(key={"bucket": "bigint"}, aggregates=PER_KEY),
    },
)
WORDS = Pipeline(
    name="words",
    source=Files("data/words", glob="*.txt", format="text", max_files=1, min_age_seconds=0),
    transform=words,
    states={"per_word": State(key={"word": "text"}, aggregates={"events": Count()})},
)
# As many declared pipelines as a large team has.
MANY = [
    replace(
        SMALL,
        name=name,
        source=replace(SMALL.source, folder=f"data/{name}"),
        states={f"per_page_of_{name}": SMALL.states["per_small_page"]},
    )
    for name in (f"many_{number:03d}" for number in range(100))
]
PIPELINES = {pipeline.name: pipeline for pipeline in (PAGES, USERS, SMALL, *MANY)}
PUBLISHED = SimpleNamespace(**PIPELINES)  # entry points name attributes
