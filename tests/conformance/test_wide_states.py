"""States of very many columns, which a wide table has: staged, sealed, recounted and merged as narrow ones are."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conformance.conftest import Flow, Stream
from tests.store import merge_expressions, merge_into_states
from tidegate.jobs import Newest, Pipeline
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import GuardMismatch

VERSION: dict[str, Any] = {"columns": {"label": "text", "number": "bigint"}, "order_by": {"at": "bigint"}, "deleted": "gone"}
Batches = list[list[list[Any]]]


def committed(f: Flow, batches: Batches, *, together: bool) -> list[Any]:
    """Commit batches of versions; return what is then in the states, and the changes."""
    for txid, rows in zip(f.plan(*[1] * len(batches)) or [], batches, strict=True):
        attempt = f.start(txid)
        f.seal(attempt, *(f.stage(attempt, state.name, rows) for state in f.spec.states))
        if not together:
            f.commit(txid)
    while f.store.committed(f.spec.name) < len(batches):
        assert len(f.store.commit_ready(f.spec, "test", max_batches=3)) == 3
    changes = [list(f.store.changes(state)) for state in f.spec.states if state.changes]
    return [*(sorted(f.rows(state.name), key=repr) for state in f.spec.states), changes]


@pytest.mark.promise("performance:first-column-of-order-is-compared-before")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_newest_rows_are_the_same_whether_each_column_is_compared_or_all_at_once(
    settings: Settings, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch, *, together: bool
) -> None:
    draw = random.Random(1)
    batches: Batches = []
    for _ in range(6):
        keys = draw.sample(["a", "b", "c", "d", "e", None], 4)
        choices: list[list[Any]] = [[None, 1, 2], [None, True, False], [None, "", "x"], [None, 0, 7]]
        batches.append([[key, *(draw.choice(choice) for choice in choices)] for key in keys])
    found = []
    for name, many, record in (("narrow", 30, 1_000), ("wide", 0, 1_000), ("wider", 0, 3)):
        monkeypatch.setattr(merge_into_states, "MANY_COLUMNS", many)
        monkeypatch.setattr(merge_expressions, "MOST_IN_RECORD", record)
        states = {f"{name}_newest": Newest({"key": "text"}, **VERSION, null_keys=True)}
        if not together:
            states[f"{name}_opaque"] = Newest({"key": "text"}, **VERSION, null_keys=True, kind="opaque", changes=True)
        pipeline = Pipeline(name, Stream("transactional"), states)
        register(pipeline)
        f = Flow(settings, pipeline.spec)
        found.append(committed(f, batches, together=together))
        f.close()
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == 6


def test_a_row_of_another_writer_stops_the_commit_of_whole_rows(
    settings: Settings, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_into_states, "MANY_COLUMNS", 0)
    pipeline = Pipeline("wide", Stream("transactional"), {"wide": Newest({"key": "text"}, **VERSION)})
    register(pipeline)
    f = Flow(settings, pipeline.spec)
    f.plan(1, 1)
    for txid in (1, 2):
        attempt = f.start(txid)
        f.seal(attempt, f.stage(attempt, "wide", [[key, at, False, "x", txid] for key, at in (("older", 0), ("newer", txid))]))
        if txid == 1:
            f.commit(1)
    for key in ("older", "newer"):
        for txid in (2, 1):
            with f.owner.engine.begin() as connection:
                connection.execute(sa.select(sa.func.set_config("tidegate.writer", f.spec.name, True)))
                connection.execute(sa.text("UPDATE state.wide SET txid = :txid WHERE key = :key"), {"txid": txid, "key": key})
            if txid == 2:
                with pytest.raises(GuardMismatch, match=r"1 of 2 rows of state.wide carry a txid of at least 2 already"):
                    f.commit(2)
    f.commit(2)
    f.close()
