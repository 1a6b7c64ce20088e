"""Histories: each version with the time until which it was valid, whatever the order and split in which versions come."""

import random
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from jobs import Files, History, Pipeline
from state_store import StateStore, lookup
from state_store.errors import BadKey
from state_store.history import changes as changes_of
from state_store.state_rows import StateReader
from state_store.state_tables import state_table_of
from tests import steps
from tests.jobs.conftest import Tables
from tests.jobs.test_aggregates import run_together

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = {"name": "string", "label": "string", "n": "bigint", "at": "timestamp", "gone": "boolean"}
KINDS = [pa.string(), pa.string(), pa.int64(), pa.timestamp("us", tz="UTC"), pa.bool_()]
PARTS: dict[str, Any] = {
    "key": {"name": "text"},
    "columns": {"label": "text", "n": "bigint"},
    "order_by": {"at": "timestamptz"},
}
STATES = {
    "versions": History(**PARTS, deleted="gone"),
    "joined": History(**PARTS, deleted="gone", collapse=True),
    "opaque": History(**PARTS, kind="opaque", changes=True),
}
Row = tuple[str, str | None, int | None, datetime, bool | None]


def at(second: int) -> datetime:
    """Return a moment."""
    return START + timedelta(seconds=second)


def as_table(rows: list[Row]) -> pa.Table:
    """Return rows as an Arrow table."""
    return pa.table(
        {name: pa.array([row[i] for row in rows], kind) for i, (name, kind) in enumerate(zip(SCHEMA, KINDS, strict=True))}
    )


def declare(tables: Tables, states: Any = None) -> Pipeline:
    """Declare a pipeline with histories, a file a batch."""
    return tables.declare(Files("inbox", schema=SCHEMA), states=states or STATES)


def rows_of(rng: random.Random, count: int) -> list[Row]:
    """Return versions of few keys at few moments, many equal to others, some deletions."""
    return [
        (
            rng.choice("abc"),
            rng.choice(["x", "y", "", None]),
            rng.choice([1, None]),
            at(rng.randint(0, 30)),
            rng.choice([True, False, False, None]),
        )
        for _ in range(count)
    ]


def expected(rows: list[Row], *, deletes: bool = True, collapses: bool = False) -> set[tuple[Any, ...]]:
    """Return name, moment, label, number and end of each version that is shown, in plain Python."""

    def place(row: Row) -> list[tuple[bool, Any]]:
        parts = ([row[4]] if deletes else []) + [row[1], row[2]]
        return [(part is not None, "" if part is None else part) for part in parts]

    found = set()
    for name in {row[0] for row in rows}:
        mine = [row for row in rows if row[0] == name]
        versions = [max((r for r in mine if r[3] == moment), key=place) for moment in sorted({r[3] for r in mine})]
        if collapses:
            same = groupby(versions, key=lambda r: (bool(r[4]), r[1], r[2]))
            versions = [next(iter(run)) for _, run in same]
        ends = [*(row[3] for row in versions[1:]), None]
        found |= {(r[0], r[3], r[1], r[2], end) for r, end in zip(versions, ends, strict=True) if not (deletes and r[4])}
    return found


def shown(tables: Tables, pipeline: Pipeline, state: str) -> set[tuple[Any, ...]]:
    """Return what readers see of a state, without txids."""
    rows = tables.rows(pipeline, state)
    found = {(row["name"], row["at"], row["label"], row["n"], row["valid_to"]) for row in rows}
    assert len(found) == len(rows)
    return found


def all_of(tables: Tables, state: str) -> list[dict[str, Any]]:
    """Return what readers see of a state."""
    with StateStore.connect(tables.settings) as store:
        return list(store.state_rows(STATES[state].spec(state)))


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_any_order_and_split_gives_the_same_history(tables: Tables, *, together: bool) -> None:
    """Random versions in random batches, one of them empty, against one pass in plain Python; txids are of the batches."""
    rng = random.Random(f"history {together}")
    rows = rows_of(rng, 120)
    cuts = sorted(rng.sample(range(1, len(rows)), 3))
    batches = [rows[start:end] for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    states = {name: state for name, state in STATES.items() if not (together and state.kind == "opaque")}
    pipeline = declare(tables, states)
    tables.put(*map(as_table, [*batches[:2], [], *batches[2:]]))
    if together:
        run_together(tables, pipeline)
    else:
        tables.run(pipeline)
    assert shown(tables, pipeline, "versions") == expected(rows)
    assert shown(tables, pipeline, "joined") == expected(rows, collapses=True)
    if not together:
        assert shown(tables, pipeline, "opaque") == expected(rows, deletes=False)
    versions = state_table_of(STATES["versions"].spec("versions"))
    with StateStore.connect(tables.settings) as store, store.engine.connect() as connection:
        txids = {(row.name, row.at): row.txid for row in connection.execute(sa.select(versions))}
    for row in all_of(tables, "versions"):
        assert row["txid"] == txids[row["name"], row["at"]]
        assert row["to_txid"] == (row["valid_to"] and txids[row["name"], row["valid_to"]])


def test_every_reader_sees_until_when_a_version_is_valid(tables: Tables) -> None:
    """A late version ends the one before it; a deletion is no version; one key, ranges, pages and moments agree."""
    pipeline = declare(tables)
    tables.put(as_table([("a", "new", 1, at(20), None), ("b", "only", 1, at(0), None)]))
    tables.put(
        as_table([("a", "old", 1, at(0), None), ("a", None, None, at(30), True)]),
        as_table([("a", "between", 1, at(10), False)]),
    )
    tables.run(pipeline)
    spec = STATES["versions"].spec("versions")
    first, middle, last = (
        {
            "name": "a",
            "at": at(start),
            "gone": gone,
            "label": label,
            "n": 1,
            "valid_to": at(start + 10),
            "to_txid": to,
            "txid": txid,
        }
        for start, gone, label, to, txid in ((0, None, "old", 3, 2), (10, False, "between", 1, 3), (20, None, "new", 2, 1))
    )
    only = {"name": "b", "at": at(0), "gone": None, "label": "only", "n": 1, "valid_to": None, "to_txid": None, "txid": 1}
    assert all_of(tables, "versions") == [first, middle, last, only]
    keys = [["a", str(at(10))], ["a", str(at(30))], ["b", str(at(0))]]
    assert lookup.get(tables.settings, spec, keys) == [middle, None, only]
    with StateReader.open(tables.settings, pipeline.name, "versions") as reader:
        assert reader.get_many(keys).rows == [middle, None, only]
        assert reader.range(["a"], ["a"], limit=10).rows == [first, middle, last]
        with reader.scan() as (txid, rows):
            assert (txid, list(rows)) == (3, [first, middle, last, only])
    moment = sa.text("SELECT label FROM state.versions WHERE at <= :t AND (valid_to > :t OR valid_to IS NULL) ORDER BY name")
    with StateStore.connect(tables.settings, user=tables.settings.pg_reader) as store, store.engine.connect() as connection:
        found = [connection.scalars(moment, {"t": at(second)}).all() for second in (-1, 5, 10, 29, 30)]
    assert found == [[], ["old", "only"], ["between", "only"], ["new", "only"], ["only"]]


def test_a_redo_takes_back_the_versions_of_its_batch(tables: Tables) -> None:
    """Replaced, new and equal versions: what was valid before is valid again, for as long as before; changes too."""
    pipeline = tables.declare(Files("inbox", schema=SCHEMA, kind="opaque"), states={"opaque": STATES["opaque"]})
    first: list[Row] = [("a", "x", 1, at(0), None), ("a", "y", 1, at(20), None), ("b", "x", 1, at(0), None)]
    tables.put(as_table(first))
    tables.run(pipeline, "first")
    tables.put(as_table([("a", "late", 1, at(10), None), ("a", "z", 1, at(20), None), ("c", "x", 1, at(5), None)]))
    tables.run(pipeline, "second")
    (tables.folder / "0002.parquet").unlink()
    third: list[Row] = [("b", "z", 1, at(9), None)]
    tables.put(as_table(third))
    steps.redo(tables.settings, pipeline, 2, owner="an operator", reason="it was wrong")
    tables.run(pipeline, "third")
    assert shown(tables, pipeline, "opaque") == expected(first + third, deletes=False)
    with StateStore.connect(tables.settings) as store, store.engine.connect() as connection:
        found = [
            (row["name"], row["at"], row["label"]) for row in changes_of(connection, STATES["opaque"].spec("opaque"), 0, None)
        ]
    assert sorted(found) == sorted((row[0], row[3], row[1]) for row in first + third)


@pytest.mark.parametrize("row", [("a", "x", 1, None, None), (None, "x", 1, at(0), None)])
def test_a_version_without_a_key_or_a_time_is_refused(tables: Tables, row: Any) -> None:
    """Its place in the history is unknown; nothing of its batch counts."""
    pipeline = declare(tables, {"versions": STATES["versions"]})
    tables.put(as_table([("b", "x", 1, at(0), None), row]))
    (txid,) = tables.plan(pipeline, "refused")
    with pytest.raises(BadKey, match="NULL"):
        steps.process(tables.settings, pipeline, txid, owner="test")
    assert tables.rows(pipeline, "versions") == []


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"key": {}}, "needs a key"),
        ({"order_by": {}}, "needs order_by"),
        ({"columns": {}}, "needs columns"),
        ({"order_by": {"name": "text"}}, "has name in its key and in order_by"),
        ({"columns": {"valid_to": "date"}}, "two columns named valid_to"),
        ({"columns": {"at": "timestamptz"}}, "two columns named at"),
        ({"changes": True}, "declare kind='opaque'"),
    ],
)
def test_a_history_that_cannot_be_kept_is_refused(parts: dict[str, Any], message: str) -> None:
    """When it is declared."""
    with pytest.raises(ValueError, match=message):
        History(**PARTS | parts).spec("versions")


def test_a_state_cannot_have_the_name_of_a_histories_table() -> None:
    """Both would be one table."""
    with pytest.raises(ValueError, match="two tables named plane_versions"):
        Pipeline("p", Files("inbox", schema=SCHEMA), {"plane": STATES["versions"], "plane_versions": STATES["versions"]})
