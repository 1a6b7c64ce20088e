"""The verb query: queries that authors declare, asked at the command line."""

from collections.abc import Callable

import pytest

from tests.cli.conftest import CommandLine
from tests.integration.conftest import Tally
from tidegate.jobs.pipelines import word_count
from tidegate.state_store import StateStore


@pytest.fixture
def words(tidegate: CommandLine, register: Callable[..., None]) -> CommandLine:
    register(word_count.PIPELINE)
    with StateStore.connect(tidegate.settings) as store:
        tally = Tally(store, word_count.PIPELINE.spec)
        for txid in tally.plan(2):
            tally.process_states(txid, {"word_count": [("the", 2), (f"new {txid}", 1)]})
            tally.commit(txid)
    return tidegate


@pytest.mark.promise("verb:query", "json:query")
def test_a_query_is_answered_with_its_txid(words: CommandLine) -> None:
    assert words.json("query", "words_total", "the", "new 1", "unknown") == {
        "query": "words_total",
        "txids": {"word_count": 2},
        "columns": [{"name": "total", "type": "numeric"}],
        "rows": [{"total": "5"}],
    }
    assert words.json("query", "words_total")["rows"] == [{"total": "0"}]
    shown = words("query", "words_total", "the", "--", "-1", "--json")
    assert (shown.returncode, shown.stdout.split(), shown.stderr) == (0, ["total", "4"], "As of txid 2 of word_count.\n")


@pytest.mark.promise("json:query")
def test_queries_are_listed(words: CommandLine) -> None:
    (found,) = words.json("query")
    assert (found["name"], found["reads"], found["arguments"]) == (
        "words_total",
        ["word_count.word_count"],
        {"words": "text[]"},
    )
    assert "words_total WORDS..." in words("query").stdout
