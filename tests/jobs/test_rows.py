"""Appended rows: each row of a batch once, with its txid and a position, beside other states of the same pipeline."""

from collections import Counter as Tally
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tests import steps
from tests.jobs.conftest import Staged, Tables
from tests.store import key_lookup, state_table_of
from tidegate import migrations
from tidegate.jobs import Count, Files, Pipeline, Rows, State
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import GuardMismatch

SCHEMA = {"name": "string", "amount": "bigint"}
ALL = Rows({"name": "text", "amount": "bigint"})
Record = tuple[str | None, int | None]
# What CSV or COPY might take for something else, and rows that are equal.
RECORDS: list[Record] = [("a", 1), ("a", 1), ('"x",\\.', None), ("", 0), ("NULL", -1), ("line\nbreak", 2**63 - 1), ("\\N", 5)]


def appended(store: StateStore) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    rows = list(store.state_rows(ALL.spec("log")))
    assert len({(row["txid"], row["position"]) for row in rows}) == len(rows)
    for row in rows:
        found.setdefault(row["txid"], []).append((row["name"], row["amount"]))
    return found


def declare(tables: Tables, states: Any, **changes: Any) -> Pipeline:
    return tables.declare(Files("inbox", schema=SCHEMA), states=states, **changes)


@pytest.mark.promise("performance:rows-are-appended-by-plain-insert-in")
def test_each_row_is_appended_once(tables: Tables, store: StateStore) -> None:
    pipeline = declare(tables, {"log": ALL, "per_name": State(key={"name": "text"}, aggregates={"lines": Count()})})
    batches: list[list[Record]] = [RECORDS, [], [("a", 1), ("b", None)], RECORDS]
    tables.put_rows(SCHEMA, *batches)
    tables.run_mixed(pipeline, steps.ROUTINGS)
    assert appended(store) == {1: RECORDS, 3: batches[2], 4: RECORDS}
    assert {row["name"]: row["lines"] for row in tables.rows(pipeline)} == Tally(name for rows in batches for name, _ in rows)


def test_rows_that_the_transform_makes_are_appended_by_several_tasks(tables: Tables, store: StateStore) -> None:
    transform = lambda rows: rows.where("amount > 0").selectExpr("explode(sequence(1L, amount)) AS amount", "name")  # noqa: E731
    pipeline = tables.declare(Files("inbox", schema=SCHEMA, max_files=2), states={"log": ALL}, transform=transform)
    tables.routing = steps.ROUTINGS["safe"]
    tables.put_rows(SCHEMA, [("a", 3), ("b", 0), ("c", 1)], [("many", 40_000)])
    tables.run(pipeline)
    found = Tally(name for name, _ in appended(store)[1])
    assert found == {"a": 3, "c": 1, "many": 40_000}


def test_a_row_of_another_writer_stops_the_commit(store: StateStore, settings: Settings, register: Callable[..., None]) -> None:
    """A row in the place of one that is to be appended is an alarm; nothing of the batch counts. Rows are found by place."""
    pipeline = Pipeline("inbox", Files("inbox", schema=SCHEMA), {"log": ALL})
    register(pipeline)
    flow = Staged(store, pipeline.spec)
    flow.batch(log=[(0, "a", 1), (1, "b", 2)])
    found = key_lookup.get(settings, ALL.spec("log"), [["1", "1"], ["2", "0"]])
    assert found == [{"txid": 1, "position": 1, "name": "b", "amount": 2}, None]

    txid = flow.batch(log=[(0, "c", 1)], is_committed=False)
    with StateStore.connect(settings, user=settings.pg_owner) as owner, owner.engine.begin() as connection:
        connection.execute(sa.select(sa.func.set_config("tidegate.writer", "inbox", True)))
        by_hand = {"txid": txid, "position": 0, "name": "another", "amount": 0}
        connection.execute(sa.insert(state_table_of(ALL.spec("log"))).values(by_hand))
    with pytest.raises(GuardMismatch, match=r"the 1 rows of log_2_1 cannot be appended to state\.log: one is there already"):
        flow.commit(txid)
    assert appended(store) == {1: [("a", 1), ("b", 2)], 2: [("another", 0)]}

    with StateStore.connect(settings, user="postgres") as owner, owner.engine.begin() as connection:
        connection.execute(sa.select(sa.func.set_config("tidegate.writer", "inbox", True)))
        connection.execute(sa.delete(state_table_of(ALL.spec("log"))).where(sa.column("txid") == txid))
        for statement in (
            "CREATE FUNCTION public.keep_out() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
            "CREATE TRIGGER keep_out BEFORE INSERT ON state.log FOR EACH ROW EXECUTE FUNCTION public.keep_out()",
        ):
            connection.execute(sa.text(statement))
    migrations.accept_table(settings, "log", "ann")
    with pytest.raises(GuardMismatch, match=r"the 1 rows of log_2_1 cannot be appended .* a trigger or a rule keeps 1 out"):
        flow.commit(txid)
    assert appended(store) == {1: [("a", 1), ("b", 2)]}
