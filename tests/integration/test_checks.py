"""Checks of a batch and of the states as they would be: they block a commit or warn, before anything is visible."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conformance.conftest import Flow, Stream
from tests.integration.conftest import refused
from tests.store import Tracked
from tidegate.jobs import Check, Count, Pipeline, Rows, State
from tidegate.jobs.checks import Finds, between, like_before, no_nulls, unique
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import CheckFailed

Word = tuple[str | None, int]


class Words(Flow):
    """Batches of words and numbers, into a state of counts and one of rows."""

    def finish_words(self, txid: int, words: list[Word], **how: Any) -> None:
        attempt = self.start(txid, **how)
        counts = {word or "none": sum(other == word for other, _ in words) for word, _ in words}
        counted = self.stage(attempt, "counted", counts.items())
        log = self.stage(attempt, "log", [(place, *row) for place, row in enumerate(words)])
        self.seal(attempt, counted, log, tracked=Tracked(len(words)))


@pytest.fixture
def words(settings: Settings, register: Callable[..., None]) -> Iterator[Callable[..., Words]]:
    """A function that declares a pipeline with these checks and returns its flow, with ten planned batches at first."""
    opened: list[Words] = []

    def begin(**checks: Check) -> Words:
        states = {
            "counted": State(key={"word": "text"}, aggregates={"lines": Count()}),
            "log": Rows({"word": "text", "number": "bigint"}),
        }
        pipeline = Pipeline("words", Stream("transactional"), states, checks=checks)
        if not opened:
            register(pipeline)
        opened.append(Words(settings, pipeline.spec))
        if len(opened) == 1:
            opened[0].plan(*[1] * 10)
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def outcome(flow: Words, txid: int) -> dict[str, Any]:
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
def test_what_a_check_finds_blocks_the_batch_or_is_kept(
    words: Callable[..., Words], settings: Settings, finds: Finds, batch: list[Word], found: str
) -> None:
    flow = words(check=Check(finds))
    flow.finish_words(1, [("a", 1), ("a", 2)])
    flow.commit(1)
    flow.finish_words(2, batch)
    with refused(settings, CheckFailed) as failed:
        flow.commit(2)
    assert str(failed.value).startswith("words 2: ")
    assert found in str(failed.value)
    warned = words(check=Check(finds, otherwise="warn"))
    warned.commit(2)
    assert found in outcome(warned, 2)["check"]
    assert outcome(warned, 1) == {"check": None}


def repeated(batch: Any) -> Any:
    """Find rows of the batch whose word an earlier one of its rows has; NULL is a word like others."""
    log = batch.partials("log").c
    place = sa.func.row_number().over(partition_by=log.word, order_by=log.position)
    rows = sa.select(log.position, log.word, place.label("place")).subquery()
    return sa.select(rows).where(rows.c.place > 1).order_by(rows.c.position)


def test_what_a_check_finds_is_set_aside(words: Callable[..., Words], settings: Settings) -> None:
    few = Check(lambda batch: sa.select(batch.partials("counted")).where(sa.text("lines > 2")), "quarantine", of="counted")
    flow = words(once=Check(repeated, otherwise="quarantine", of="log"), few=few)
    flow.finish_words(1, [("a", 1), ("b", 2), ("a", 3), (None, 4), (None, 5), ("a", 6)])
    flow.commit(1)
    flow.finish_words(2, [("a", 7)])
    flow.commit(2)

    with flow.store.engine.connect() as connection:
        log = connection.execute(sa.text("SELECT txid, word, number FROM state.log ORDER BY txid, position")).all()
        counted = connection.execute(sa.text("SELECT word, lines FROM state.counted ORDER BY word")).all()
        columns = "number, state, reason, payload::json ->> 'number', payload::json ->> 'lines'"
        aside = connection.execute(sa.text(f"SELECT {columns} FROM tidegate.quarantine ORDER BY number")).all()
    assert log == [(1, "a", 1), (1, "b", 2), (1, None, 4), (2, "a", 7)]
    assert counted == [("a", 1), ("b", 1), ("none", 2)]
    assert aside == [
        (1, "counted", "the check 'few' found it", None, "3"),
        (2, "log", "the check 'once' found it", "3", None),
        (3, "log", "the check 'once' found it", "5", None),
        (4, "log", "the check 'once' found it", "6", None),
    ]
    assert outcome(flow, 2) == {"few": None, "once": None}
    assert outcome(flow, 1)["few"] == "1 set aside: (word=a, lines=3, txid=1)"
    assert outcome(flow, 1)["once"].startswith("3 set aside: (position=2, word=a, place=2), (position=4")
    assert flow.store.batch_history("words", 1).status.key_count == 5


def known(batch: Any) -> Any:
    brought, counted = batch.partials("counted"), batch.state("counted")
    return sa.select(brought).where(brought.c.word.in_(sa.select(counted.c.word)))


def test_a_replay_of_quarantine_is_not_compared_with_slices_of_the_source(
    words: Callable[..., Words], as_role: Callable[..., Any]
) -> None:
    flow = words(alike=Check(like_before(least=0.5)))
    flow.finish_words(1, [("a", number) for number in range(10)])
    flow.commit(1)
    # As if the second batch took up a record that the first one had set aside.
    as_role(
        "tidegate_owner",
        "INSERT INTO tidegate.quarantine (pipeline, txid, number, reason, payload, is_raw, replayed_txid) "
        "VALUES ('words', 1, 1, 'no int', 'x', true, 2)",
    )
    flow.finish_words(2, [("b", 1)])
    flow.commit(2)
    flow.finish_words(3, [("a", number) for number in range(5)])
    flow.commit(3)
    flow.finish_words(4, [("a", 1)])
    with pytest.raises(CheckFailed, match=r"\(source_rows=1, mean_before=7\.5\)"):
        flow.commit(4)
