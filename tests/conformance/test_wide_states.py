"""States of very many columns, which a wide table has: staged, sealed, recounted and merged as narrow ones are."""

from collections.abc import Callable
from typing import Any

import pytest

from jobs import Max, Newest, Pipeline, Rows, State, Sum
from jobs.states import AnyState
from state_store import Settings
from tests.conformance.conftest import Flow, Stream

WIDE: dict[str, tuple[int, Callable[[list[str]], AnyState]]] = {
    "rows": (1_590, lambda names: Rows(dict.fromkeys(names, "bigint"))),
    "sums": (900, lambda names: State({"key": "bigint"}, {name: Sum(name) for name in names})),
    "opaque": (300, lambda names: State({"key": "bigint"}, {name: Max(name) for name in names}, kind="opaque")),
    "newest": (90, lambda names: Newest({"key": "bigint"}, dict.fromkeys(names[1:], "bigint"), {names[0]: "bigint"})),
}


@pytest.mark.parametrize("kind", WIDE)
def test_a_state_may_have_very_many_columns(settings: Settings, register: Callable[..., None], kind: str) -> None:
    """Batches count one by one and, where that is possible, together."""
    count, make = WIDE[kind]
    names = [f"c{number}" for number in range(count)]
    pipeline = Pipeline("wide", Stream("transactional"), {"wide": make(names)})
    register(pipeline)
    f = Flow(settings, pipeline.spec)
    for txid in f.plan(1, 1, 1) or []:
        values: list[Any] = [txid, *[0 if kind == "sums" else None] * (count - 2), 7]
        attempt = f.start(txid)
        f.seal(attempt, f.stage(attempt, "wide", [[1, *values]]))
    f.commit(1)
    while f.store.committed("wide") < 3:
        assert f.store.commit_ready(pipeline.spec, "test")
    expected: dict[str, Any] = {
        "rows": [(1, None, 7), (2, None, 7), (3, None, 7)],
        "sums": [(6, 0, 21)],
        "opaque": [(3, None, 7)],
        "newest": [(3, None, 7)],
    }
    assert [(row["c0"], row["c1"], row[names[-1]]) for row in f.rows("wide")] == expected[kind]
    f.close()
