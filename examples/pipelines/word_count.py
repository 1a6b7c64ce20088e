"""How often each word occurs in a folder of plain-text files."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidegate import Count, Files, Pipeline, Query, State

if TYPE_CHECKING:
    import sqlalchemy as sa
    from pyspark.sql import DataFrame


def words(lines: "DataFrame") -> "DataFrame":
    """Split lines into lower-case words: runs of letters, apostrophes inside."""
    return lines.selectExpr(r"""explode(regexp_extract_all(lower(value), r"(\p{L}+(?:'\p{L}+)*)", 1)) AS word""")


def words_total(states: "Mapping[str, sa.Table]", words: list[str]) -> "sa.Select[Any]":
    """Add up how often some words occur."""
    import sqlalchemy as sa  # noqa: PLC0415 - declaring a query does without

    count = states["word_count.word_count"].c
    return sa.select(sa.func.coalesce(sa.func.sum(count.occurrences), 0).label("total")).where(count.word.in_(words))


PIPELINE = Pipeline(
    name="word_count",
    source=Files("data/word_count", glob="*.txt", format="text", max_files=1),
    transform=words,
    states={"word_count": State(key={"word": "text"}, aggregates={"occurrences": Count()})},
    description="How often each word occurs in a folder of plain-text files.",
)
QUERIES = [
    Query(
        "words_total",
        words_total,
        reads=["word_count.word_count"],
        arguments={"words": "text[]"},
        description="How often some words occur, all of them together.",
    )
]
