"""Checks of a batch and of the states as they would be: they block a commit or warn, before anything is visible."""

from typing import Any

import pytest
import sqlalchemy as sa

from tests.batches import Stream
from tests.integration.conftest import Tally, TallyOf
from tests.store import Tracked, errors
from tidegate.jobs import Check, Count, Pipeline, Rows, State
from tidegate.jobs.checks import Finds, between, like_before, no_nulls, unique

Word = tuple[str | None, int]


def declare(**checks: Check) -> Pipeline:
    states = {"counted": State({"word": "text"}, {"lines": Count()}), "log": Rows({"word": "text", "number": "bigint"})}
    return Pipeline("words", Stream("transactional"), states, checks=checks)


def process(flow: Tally, txid: int, words: list[Word]) -> None:
    counts = {word or "none": sum(other == word for other, _ in words) for word, _ in words}
    log = [(place, *row) for place, row in enumerate(words)]
    attempt = flow.start(txid)
    staged = [flow.stage(attempt, "counted", counts.items()), flow.stage(attempt, "log", log)]
    flow.store.seal(attempt, staged, Tracked(len(words)))


def complete(flow: Tally, txid: int, words: list[Word]) -> None:
    process(flow, txid, words)
    flow.commit(txid)


def outcome(flow: Tally, txid: int) -> dict[str, Any]:
    return {check["name"]: check["found"] for check in flow.store.batch_history("words", txid).checks}


FINDINGS: dict[str, tuple[Finds, list[Word], str]] = {
    "a NULL": (no_nulls("log", "word", "number"), [("b", 1), (None, 2)], "(position=1, word=None, number=2"),
    "too much in the state": (between("counted", "lines", most=3), [("a", 1), ("a", 1)], "(word=a, lines=4, txid=2)"),
    "too little in the batch": (between("log", "number", least=0), [("b", -1)], "number=-1"),
    "a repeated value": (unique("log", "word", "number"), [("a", 1), ("c", 1)], "(word=a, number=1)"),
    "a value twice in the batch": (unique("log", "number"), [("c", 7), ("d", 7)], "(number=7)"),
    "many rows": (like_before(0.5, 1.5), [("b", 1)] * 4, "(source_rows=4, mean_before=2.0)"),
    "no rows": (like_before(0.5, 1.5), [], "(source_rows=0, mean_before=2.0)"),
}


@pytest.mark.promise("fault:check-finds-something-update-fails:commit", "error:CHECK_FAILED")
@pytest.mark.parametrize(("finds", "batch", "found"), FINDINGS.values(), ids=FINDINGS.keys())
def test_what_a_check_finds_blocks_the_batch_or_is_kept(tally_of: TallyOf, finds: Finds, batch: list[Word], found: str) -> None:
    flow = tally_of(declare(check=Check(finds)))
    flow.plan(2)
    complete(flow, 1, [("a", 1), ("a", 2)])
    process(flow, 2, batch)
    assert found in flow.refuses(errors.CheckFailed, "^words 2: ", lambda: flow.commit(2))
    flow.spec = declare(check=Check(finds, otherwise="warn")).spec
    flow.commit(2)
    assert found in outcome(flow, 2)["check"]
    assert outcome(flow, 1) == {"check": None}


def repeated(batch: Any) -> Any:
    """Find rows of the batch whose word an earlier one of its rows has; NULL is a word like others."""
    log = batch.partials("log").c
    place = sa.func.row_number().over(partition_by=log.word, order_by=log.position)
    rows = sa.select(log.position, log.word, place.label("place")).subquery()
    return sa.select(rows).where(rows.c.place > 1).order_by(rows.c.position)


def test_what_a_check_finds_is_set_aside(tally_of: TallyOf) -> None:
    few = Check(lambda batch: sa.select(batch.partials("counted")).where(sa.text("lines > 2")), "quarantine", of="counted")
    flow = tally_of(declare(once=Check(repeated, otherwise="quarantine", of="log"), few=few))
    flow.plan(2)
    complete(flow, 1, [("a", 1), ("b", 2), ("a", 3), (None, 4), (None, 5), ("a", 6)])
    complete(flow, 2, [("a", 7)])
    log = flow.sql("SELECT txid, word, number FROM state.log ORDER BY txid, position")
    assert log == [(1, "a", 1), (1, "b", 2), (1, None, 4), (2, "a", 7)]
    assert flow.sql("SELECT word, lines FROM state.counted ORDER BY word") == [("a", 1), ("b", 1), ("none", 2)]
    columns = "number, state, reason, payload::json ->> 'number', payload::json ->> 'lines'"
    assert flow.sql(f"SELECT {columns} FROM tidegate.quarantine ORDER BY number") == [
        (1, "counted", "the check 'few' found it", None, "3"),
        *((place, "log", "the check 'once' found it", number, None) for place, number in ((2, "3"), (3, "5"), (4, "6"))),
    ]
    assert outcome(flow, 2) == {"few": None, "once": None}
    assert outcome(flow, 1)["few"] == "1 set aside: (word=a, lines=3, txid=1)"
    assert outcome(flow, 1)["once"].startswith("3 set aside: (position=2, word=a, place=2), (position=4")
    assert flow.store.batch_history("words", 1).status.key_count == 5


def test_a_replay_of_quarantine_is_not_compared_with_slices_of_the_source(tally_of: TallyOf) -> None:
    flow = tally_of(declare(alike=Check(like_before(least=0.5))))
    flow.plan(4)
    complete(flow, 1, [("a", number) for number in range(10)])
    # As if the second batch took up a record that the first one had set aside.
    flow.sql("INSERT INTO tidegate.quarantine VALUES ('words', 1, 1, 'no int', NULL, 'x', true)")
    flow.sql("UPDATE tidegate.quarantine SET replayed_txid = 2")
    complete(flow, 2, [("b", 1)])
    complete(flow, 3, [("a", number) for number in range(5)])
    process(flow, 4, [("a", 1)])
    with pytest.raises(errors.CheckFailed, match=r"\(source_rows=1, mean_before=7\.5\)"):
        flow.commit(4)
