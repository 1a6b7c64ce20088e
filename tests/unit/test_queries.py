"""State queries and queries are checked when they are declared, and found by name."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.store import spec_of
from tidegate.jobs import Count, Files, Newest, Pipeline, Query, Rows, State, StateQuery, Tumbling

SOURCE = Files("planes", format="csv", schema={"tail": "string", "seats": "int"})
STATES = {
    "by_tail": State({"tail": "text"}, {"reports": Count()}),
    "plane": Newest({"tail": "text"}, {}, {"seats": "integer"}, kind="non-transactional"),
    "report": Rows({"tail": "text"}),
}
KEPT = State({"tail": "text"}, {"reports": Count()}, window=Tumbling("at", "1 hour", final_after="1 hour", keep="1 day"))


def declare(*queries: StateQuery, **changes: Any) -> Pipeline:
    declared = {"source": SOURCE, "states": STATES, "transform": lambda rows: rows, "guarantee": "at_least_once", **changes}
    return Pipeline("planes", queries=queries, **declared)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StateQuery("by_tail"), "'by_tail' has to name pipeline and state, as in flights.daily"),
        (lambda: declare(StateQuery("planes.gone")), "and has no such state. It has by_tail, plane, report."),
        (lambda: declare(StateQuery("planes.report")), "only a State or a Newest has rows by key"),
        (lambda: declare(StateQuery("planes.plane")), "does not know which txid wrote a row"),
        (
            lambda: declare(StateQuery("planes.by_tail"), states={"by_tail": KEPT}),
            "a redo would miss those that its batch has removed. Leave keep out.",
        ),
        (lambda: declare(StateQuery("ships.by_name")), 'the txids of another pipeline are others. Say as_of="latest".'),
        (lambda: declare(StateQuery("planes.by_tail"), transform=None), "has queries, and no transform"),
        (lambda: declare(StateQuery("planes.by_tail"), window=4), "a window of 4, and its batches read what the one before"),
        (
            lambda: declare(
                StateQuery("ships.by_name", as_of="latest"), states={"t": STATES["by_tail"]}, guarantee="exactly_once"
            ),
            "another attempt at a batch may read other values",
        ),
    ],
)
def test_a_state_query_that_cannot_be_kept_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_what_is_read_is_part_of_the_declaration() -> None:
    plain, repeatable = declare(), declare(StateQuery("planes.by_tail"), window=1)
    latest = declare(StateQuery("planes.by_tail", as_of="latest"), StateQuery("planes.plane", as_of="latest"))
    assert plain.spec.declaration["queries"] == ()
    assert len({each.spec.fingerprint for each in (plain, repeatable, latest)}) == 3
    assert [each.spec.window for each in (plain, repeatable, latest)] == [16, 1, 16]
    assert [each.spec.awaits_previous for each in (plain, repeatable, latest)] == [False, True, False]
    assert declare(StateQuery("planes.by_tail")).spec.window == 1
    for each in (plain, repeatable, latest):
        assert spec_of(each.spec.declaration).fingerprint == each.spec.fingerprint
    accepted = StateQuery("planes.by_tail", as_of="latest", allow_not_repeatable=True)
    assert declare(accepted, guarantee="exactly_once", states={"by_tail": STATES["by_tail"]}).spec.queries == (accepted.read,)


def answer(states: Any, words: list[str]) -> Any:
    """Answer nothing."""
    return states, words


def query(**changes: Any) -> Query:
    return Query(
        **{"name": "total", "answer": answer, "reads": ["planes.by_tail"], "arguments": {"words": "text[]"}, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Total"}, "cannot be the name of a query"),
        ({"reads": []}, 'has to list the states that it reads: reads=["pipeline.state"]'),
        ({"arguments": {"words": "word"}}, "'word' is not a column type"),
        ({"arguments": {"words": "text[]", "most": "integer"}}, "only the last argument can be an array"),
        ({"arguments": {}}, "calls its answer as answer(states), which does not fit: missing a required argument: 'words'"),
        ({"most_rows": 0}, "needs most_rows and timeout_seconds of at least 1"),
    ],
)
def test_a_query_that_could_not_be_asked_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        query(**changes)
