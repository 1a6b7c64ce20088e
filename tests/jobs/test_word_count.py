"""The word count of the tutorials, written in two ways with the same result."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tidegate.jobs import Count, FixedBatches, Pipeline, State, Sum
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import DeclarationInvalid

LINES = ["the cow jumped over the moon", "the man went to the store and bought some candy", "four score and seven years ago"]
BATCHES = [[(line,) for line in LINES[:2]], [(line,) for line in LINES[2:] + LINES[:1]]]
SPLIT = "explode(split(line, ' ')) AS word"


def words(transform: Any, occurrences: Any) -> Pipeline:
    """Declare a pipeline that keeps the occurrences of each word."""
    state = State(key={"word": "text"}, aggregates={"occurrences": occurrences})
    return Pipeline("inbox", FixedBatches(BATCHES, {"line": "string"}), {"words": state}, transform=transform)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("transform", "occurrences"),
    [
        # Only split; the state counts: each word is a row that goes into it (persistentAggregate).
        (lambda rows: rows.selectExpr(SPLIT), Count()),
        # Count each batch's words first, and let the state add the counts up (aggregate, then partitionPersist).
        (lambda rows: rows.selectExpr(SPLIT).groupBy("word").count(), Sum("count")),
    ],
    ids=["by the state", "by the transform"],
)
def test_every_spelling_counts_the_same(
    settings: Settings, register: Callable[..., None], transform: Any, occurrences: Any
) -> None:
    """Over two batches, with words in both."""
    pipeline = words(transform, occurrences)
    register(pipeline)
    run_pipeline(settings, pipeline, run_id="run")
    with StateStore.connect(settings) as store:
        found = {row["word"]: row["occurrences"] for row in store.state_rows(pipeline.spec.states[0])}
    assert found == Counter(word for line in [*LINES, LINES[0]] for word in line.split())


def test_a_transform_that_goes_through_a_view_is_refused(settings: Settings, register: Callable[..., None]) -> None:
    """Batches share a session: a view would show one batch the rows of another."""

    def through_a_view(rows: Any) -> Any:
        rows.createOrReplaceTempView("lines")
        return rows.sparkSession.sql(f"SELECT {SPLIT} FROM lines")

    pipeline = words(through_a_view, Count())
    register(pipeline)
    with pytest.raises(DeclarationInvalid, match=r"must not go through views or spark\.sql"):
        run_pipeline(settings, pipeline, run_id="run")
