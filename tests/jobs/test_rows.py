"""Appended rows: each row of a batch once, with its txid and a position, beside other states of the same pipeline."""

from collections import Counter as Tally
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from tests import steps
from tests.jobs.conftest import Tables
from tidegate.jobs import Count, Files, Newest, Pipeline, Ranges, Rows, State
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import BadKey, GuardMismatch, MalformedRecord, Overflow
from tidegate.state_store.states import key_lookup
from tidegate.state_store.states.state_tables import state_table_of

SCHEMA = {"name": "string", "amount": "bigint"}
ALL = Rows({"name": "text", "amount": "bigint"})
STATES = {
    "per_name": State(key={"name": "text"}, aggregates={"lines": Count()}, kind="opaque"),
    "newest": Newest({"name": "text"}, {}, order_by={"amount": "bigint"}, kind="opaque"),
    "log": ALL,
}
Record = tuple[str | None, int | None]
# What CSV or COPY might take for something else, and rows that are equal.
RECORDS: list[Record] = [("a", 1), ("a", 1), ('"x",\\.', None), ("", 0), ("NULL", -1), ("line\nbreak", 2**63 - 1), ("\\N", 5)]


def as_table(records: list[Record]) -> pa.Table:
    """Return records as an Arrow table."""
    names, amounts = ([record[place] for record in records] for place in (0, 1))
    return pa.table({"name": pa.array(names, pa.string()), "amount": pa.array(amounts, pa.int64())})


def appended(tables_: Tables, state: str = "log") -> dict[int, list[Record]]:
    """Return the rows of each txid, in the order of their positions, which have to be different."""
    spec = ALL.spec(state)
    found: dict[int, list[Record]] = {}
    with StateStore.connect(tables_.settings) as store:
        rows = list(store.state_rows(spec))
    assert len({(row["txid"], row["position"]) for row in rows}) == len(rows)
    for row in rows:
        found.setdefault(row["txid"], []).append((row["name"], row["amount"]))
    return found


def declare(tables_: Tables, states: Any, **changes: Any) -> Pipeline:
    """Declare a pipeline with these states, a file a batch."""
    return tables_.declare(Files("inbox", schema=SCHEMA), states=states, **changes)


@pytest.mark.promise("performance:rows-are-appended-by-plain-insert-in")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.parametrize("routing", list(steps.ROUTINGS))
def test_each_row_is_appended_once(tables: Tables, routing: str, *, together: bool) -> None:
    """By every route, with an empty batch, equal rows and NULLs, merged one by one or in one transaction."""
    tables.routing = steps.ROUTINGS[routing]
    pipeline = declare(tables, {"log": ALL, "per_name": State(key={"name": "text"}, aggregates={"lines": Count()})})
    batches = [RECORDS, [], [("a", 1), ("b", None)]]
    tables.put(*map(as_table, batches))
    txids = tables.plan(pipeline, "run")
    for txid in txids:
        commits_all = together and txid == txids[-1]
        steps.process(tables.settings, pipeline, txid, owner="test", routing=tables.routing, commit_ready=commits_all)
        if not together:
            steps.commit(tables.settings, pipeline, txid, owner="test")
    with StateStore.connect(tables.settings) as store:
        assert store.committed("inbox") == 3
    assert appended(tables) == {1: RECORDS, 3: batches[2]}
    assert {row["name"]: row["lines"] for row in tables.rows(pipeline)} == Tally(name for rows in batches for name, _ in rows)


def test_rows_that_the_transform_makes_are_appended(tables: Tables) -> None:
    """A transform may drop and multiply rows; all that it returns arrive."""
    transform = lambda rows: rows.where("amount > 0").selectExpr("explode(sequence(1L, amount)) AS amount", "name")  # noqa: E731
    pipeline = declare(tables, {"log": ALL}, transform=transform)
    tables.put(as_table([("a", 3), ("b", 0), ("c", 1)]))
    tables.run(pipeline)
    assert sorted(appended(tables)[1]) == [("a", 1), ("a", 2), ("a", 3), ("c", 1)]


def test_many_rows_are_appended_by_several_tasks(tables: Tables) -> None:
    """More rows than fit into one Arrow batch, in several files of one batch: positions stay different."""
    records: list[Record] = [(f"n{number % 7}", number) for number in range(50_000)]
    pipeline = tables.declare(Files("inbox", schema=SCHEMA, max_files=4), states={"log": ALL})
    tables.routing = steps.ROUTINGS["safe"]
    tables.put(*(as_table(records[start::4]) for start in range(4)))
    assert tables.run(pipeline) == [1]
    assert sorted(appended(tables)[1], key=lambda record: record[1] or 0) == records


DIVIDED = Rows({"name": "text", "amount": "bigint"}, range_partitions=Ranges("amount", 100))


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_rows_are_divided_by_the_ranges_of_a_column(tables: Tables, *, together: bool) -> None:
    """Each row once, whatever range it is in; batches that are merged together bring ranges that others have brought, too."""
    pipeline = declare(tables, {"log": DIVIDED})
    batches: list[list[Record]] = [[("a", 1), ("b", 250), (None, -1)], [], [("a", 1), ("c", 299), ("d", 300)]]
    tables.put(*map(as_table, batches))
    for txid in (txids := tables.plan(pipeline, "run")):
        commits_all = together and txid == txids[-1]
        steps.process(tables.settings, pipeline, txid, owner="test", commit_ready=commits_all)
        if not together:
            steps.commit(tables.settings, pipeline, txid, owner="test")
    assert appended(tables) == {1: batches[0], 3: batches[2]}
    with StateStore.connect(tables.settings) as store, store.engine.connect() as connection:
        found = connection.execute(sa.text("SELECT tableoid::regclass::text, count(*) FROM state.log GROUP BY 1"))
        assert dict(map(tuple, found)) == {
            'state."log$-100"': 1,
            'state."log$0"': 2,
            'state."log$200"': 2,
            'state."log$300"': 1,
        }


@pytest.mark.parametrize("on_poison", ["block", "quarantine"])
def test_a_row_that_is_in_no_range_is_bad(tables: Tables, on_poison: str) -> None:
    """NULL refuses the batch, or is set aside alone."""
    pipeline = declare(tables, {"log": DIVIDED}, on_poison=on_poison)
    tables.put(as_table([("a", 1), ("b", None)]))
    (txid,) = tables.plan(pipeline, "run")
    if on_poison == "block":
        with pytest.raises(BadKey, match=r"State log: column amount, by which its rows are divided, is NULL in 1 row\(s\)"):
            steps.process(tables.settings, pipeline, txid, owner="test")
        return
    steps.process(tables.settings, pipeline, txid, owner="test")
    steps.commit(tables.settings, pipeline, txid, owner="test")
    assert appended(tables) == {1: [("a", 1)]}
    with StateStore.connect(tables.settings) as store:
        assert [row["reason"] for row in store.quarantined("inbox")] == ["column amount is NULL"]


def test_a_redo_replaces_the_rows_of_its_batch_alone(tables: Tables) -> None:
    """Rows of earlier batches stay, also where they are equal; no row of the first attempt is left."""
    source = Files("inbox", schema=SCHEMA, kind="opaque")
    pipeline = tables.declare(source, states=STATES)
    tables.put(as_table([("a", 1), ("b", 2)]))
    tables.run(pipeline, "first")
    tables.put(as_table([("a", 1), ("c", 9)]))
    tables.run(pipeline, "second")
    assert appended(tables) == {1: [("a", 1), ("b", 2)], 2: [("a", 1), ("c", 9)]}
    (tables.folder / "0002.parquet").unlink()
    tables.put(as_table([("d", 4)]))
    steps.redo(tables.settings, pipeline, 2, owner="an operator", reason="it was wrong")
    after = appended(tables)
    assert after[1] == [("a", 1), ("b", 2)]
    assert [row["name"] for row in tables.rows(pipeline)] == sorted(
        {name for rows in after.values() for name, _ in rows if name}
    )
    assert {row["name"]: row["amount"] for row in tables.rows(pipeline, "newest")} == dict(sorted(after[1] + after.get(2, [])))


def test_a_row_of_another_writer_stops_the_commit(tables: Tables) -> None:
    """A row in the place of one that is to be appended is an alarm; nothing of the batch counts."""
    pipeline = declare(tables, {"log": ALL})
    tables.put(as_table([("a", 1)]))
    (txid,) = tables.plan(pipeline, "run")
    steps.process(tables.settings, pipeline, txid, owner="test")
    log = put_by_hand(tables)
    with pytest.raises(GuardMismatch, match=r"the 1 rows of log_1_1 cannot be appended to state\.log: one is there already"):
        steps.commit(tables.settings, pipeline, txid, owner="test")
    assert appended(tables) == {1: [log]}


def put_by_hand(tables_: Tables) -> Record:
    """Write a row by hand where the first row of batch 1 will be."""
    table = state_table_of(ALL.spec("log"))
    with StateStore.connect(tables_.settings, user=tables_.settings.pg_owner) as store, store.engine.begin() as connection:
        connection.execute(sa.select(sa.func.set_config("tidegate.writer", "inbox", True)))
        connection.execute(sa.insert(table).values(txid=1, position=0, name="another", amount=0))
    return ("another", 0)


def test_a_row_is_found_by_txid_and_position(tables: Tables) -> None:
    """Both are the key of the table."""
    pipeline = declare(tables, {"log": ALL})
    tables.put(as_table([("a", 1), ("b", 2)]))
    tables.run(pipeline)
    found = key_lookup.get(tables.settings, ALL.spec("log"), [["1", "1"], ["2", "0"]])
    assert found == [{"txid": 1, "position": 1, "name": "b", "amount": 2}, None]


@pytest.mark.parametrize(
    ("columns", "values", "error"),
    [
        ({"amount": "integer"}, [("a", 2**40)], Overflow),
        ({"name": "uuid"}, [("not a uuid", 1)], MalformedRecord),
        ({"name": "text"}, [("a\0b", 1)], BadKey),
    ],
)
def test_a_value_that_does_not_fit_refuses_the_batch(
    tables: Tables, columns: dict[str, str], values: list[Record], error: type[Exception]
) -> None:
    """Nothing is cut, rounded or left out."""
    pipeline = declare(tables, {"log": Rows(columns)})
    tables.put(as_table(values))
    (txid,) = tables.plan(pipeline, "run")
    with pytest.raises(error):
        steps.process(tables.settings, pipeline, txid, owner="test")
    with StateStore.connect(tables.settings) as store:
        assert list(store.state_rows(Rows(columns).spec("log"))) == []
