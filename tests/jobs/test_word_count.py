"""The word count of the tutorials, written in two ways with the same result."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tidegate.jobs import Count, FixedBatches, Pipeline, State, Sum
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import DeclarationInvalid

LINES = [
    "the cow jumped over the moon",
    "the man went to the store and bought some candy",
    "four score and seven years ago",
    "how many apples can you eat",
    "the cow jumped over the moon",
]
BATCHES = [[(line,) for line in LINES[:3]], [(line,) for line in LINES[3:]]]
SPLIT = "explode(split(line, ' ')) AS word"


def counted_by_the_state(rows: Any) -> Any:
    """Only split; the state counts: each word is a row that goes into it (persistentAggregate)."""
    return rows.selectExpr(SPLIT)


def counted_by_the_transform(rows: Any) -> Any:
    """Count each batch's words first, and let the state add the counts up (aggregate, then partitionPersist)."""
    return rows.selectExpr(SPLIT).groupBy("word").count()


@pytest.mark.parametrize(
    ("transform", "occurrences"),
    [(counted_by_the_state, Count()), (counted_by_the_transform, Sum("count"))],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("kind", ["transactional", "opaque"])
def test_every_spelling_counts_the_same(
    settings: Settings, register: Callable[..., None], transform: Any, occurrences: Any, kind: Any
) -> None:
    """Over two batches, with words in both."""
    state = State(key={"word": "text"}, aggregates={"occurrences": occurrences}, kind=kind)
    pipeline = Pipeline(
        name="inbox", source=FixedBatches(BATCHES, {"line": "string"}), transform=transform, states={"words": state}
    )
    register(pipeline)
    run_pipeline(settings, pipeline, run_id="run")

    with StateStore.connect(settings) as store:
        found = {row["word"]: row["occurrences"] for row in store.state_rows(pipeline.spec.states[0])}
    assert found == Counter(word for line in LINES for word in line.split())
    assert found["the"] == 6


def test_a_transform_that_goes_through_a_view_is_refused(settings: Settings, register: Callable[..., None]) -> None:
    """Batches share a session: a view would show one batch the rows of another."""

    def through_a_view(rows: Any) -> Any:
        rows.createOrReplaceTempView("lines")
        return rows.sparkSession.sql(f"SELECT {SPLIT} FROM lines")

    states = {"words": State(key={"word": "text"}, aggregates={"occurrences": Count()})}
    source = FixedBatches(BATCHES, {"line": "string"})
    pipeline = Pipeline(name="inbox", source=source, transform=through_a_view, states=states)
    register(pipeline)
    with pytest.raises(DeclarationInvalid, match=r"must not go through views or spark\.sql"):
        run_pipeline(settings, pipeline, run_id="run")
