"""How often each word occurs in a folder of plain-text files."""

from typing import TYPE_CHECKING

from tidegate import Count, Files, Pipeline, State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def words(lines: "DataFrame") -> "DataFrame":
    """Split lines into lower-case words: runs of letters, apostrophes inside."""
    return lines.selectExpr(r"""explode(regexp_extract_all(lower(value), r"(\p{L}+(?:'\p{L}+)*)", 1)) AS word""")


PIPELINE = Pipeline(
    name="word_count",
    source=Files("data/word_count", glob="*.txt", format="text", max_files=1),
    transform=words,
    states={"word_count": State(key={"word": "text"}, aggregates={"occurrences": Count()})},
    description="How often each word occurs in a folder of plain-text files.",
)
