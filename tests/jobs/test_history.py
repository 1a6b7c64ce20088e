"""Histories: each version with the time until which it was valid, whatever the order and split in which versions come."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import pytest
import sqlalchemy as sa

from tests.jobs.conftest import Staged, Tables
from tests.store import Mend, StateReader, key_lookup, rows_after, state_table_of
from tests.store import changes as changes_of
from tidegate.jobs import Changes, Count, Files, History, Pipeline, State
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import UsageError

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = {"name": "string", "label": "string", "n": "bigint", "at": "timestamp", "gone": "boolean"}
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
Row = tuple[Any, str | None, int | None, datetime, bool | None]


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


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


def newest(rows: list[Row], *, deletes: bool = True) -> list[Row]:
    """Return of each key and moment the version that counts, as Spark stages it."""

    def place(row: Row) -> list[tuple[bool, Any]]:
        parts = ([row[4]] if deletes else []) + [row[1], row[2]]
        return [(part is not None, "" if part is None else part) for part in parts]

    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row[0], row[3]), []).append(row)
    return [max(group, key=place) for group in groups.values()]


def expected(rows: list[Row], *, deletes: bool = True, collapses: bool = False) -> set[tuple[Any, ...]]:
    """Return name, moment, label, number and end of each version that is shown, in plain Python."""
    found, counted = set(), newest(rows, deletes=deletes)
    for name in {row[0] for row in rows}:
        versions = sorted((row for row in counted if row[0] == name), key=lambda row: row[3])
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


Flow = Callable[..., Staged]


@pytest.fixture
def flow(store: StateStore, register: Callable[..., None]) -> Flow:
    """A function that registers a pipeline with one history; its batches are staged without Spark."""

    def begin(state: History) -> Staged:
        pipeline = Pipeline("inbox", Files("inbox", schema=SCHEMA), {"versions": state})
        register(pipeline)
        return Staged(store, pipeline.spec)

    return begin


def staged(rows: list[Row], *, deletes: bool = True) -> list[tuple[Any, ...]]:
    """Return versions in the order of a history's columns: key, time, deletion, label, number."""
    return [(name, moment, *([gone] if deletes else []), label, n) for name, label, n, moment, gone in rows]


def seen(flow: Staged) -> set[tuple[Any, ...]]:
    """Return what readers see of the history, without txids."""
    return {
        (row["name"], row["at"], row["label"], row["n"], row["valid_to"]) for row in flow.store.state_rows(flow.spec.states[0])
    }


def test_any_order_and_split_gives_the_same_history(tables: Tables) -> None:
    rng = random.Random("history")
    rows = rows_of(rng, 120)
    cuts = sorted(rng.sample(range(1, len(rows)), 2))
    batches = [rows[start:end] for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    pipeline = tables.declare_over(SCHEMA, None, states={name: STATES[name] for name in ("versions", "joined")})
    tables.put_rows(SCHEMA, *batches[:2], [], *batches[2:])
    tables.run_mixed(pipeline, ["safe", "chosen"])
    assert shown(tables, pipeline, "versions") == expected(rows)
    assert shown(tables, pipeline, "joined") == expected(rows, collapses=True)
    versions = state_table_of(STATES["versions"].spec("versions"))
    with StateStore.connect(tables.settings) as store, store.engine.connect() as connection:
        txids = {(row.name, row.at): row.txid for row in connection.execute(sa.select(versions))}
    for row in tables.all_rows(pipeline, "versions"):
        assert row["txid"] == txids[row["name"], row["at"]]
        assert row["to_txid"] == (row["valid_to"] and txids[row["name"], row["valid_to"]])


def test_every_reader_sees_until_when_a_version_is_valid(flow: Flow) -> None:
    """Of a key that is NULL, too."""
    inbox = flow(replace(STATES["versions"], null_keys=True))
    inbox.batch(versions=staged([("a", "new", 1, at(20), None), (None, "only", 1, at(0), None)]))
    inbox.batch(versions=staged([("a", "old", 1, at(0), None), ("a", None, None, at(30), True)]))
    inbox.batch(versions=staged([("a", "between", 1, at(10), False)]))
    spec, settings = inbox.spec.states[0], inbox.store.settings

    def version(name: str | None, start: int, label: str, txid: int, to_txid: int | None, **more: Any) -> dict[str, Any]:
        usual = {"gone": None, "n": 1, "valid_to": at(start + 10) if to_txid else None, "to_txid": to_txid}
        return {"name": name, "at": at(start), "label": label, "txid": txid, **usual, **more}

    first, middle = version("a", 0, "old", 2, 3), version("a", 10, "between", 3, 1, gone=False)
    last, only = version("a", 20, "new", 1, 2), version(None, 0, "only", 1, None)
    assert list(inbox.store.state_rows(spec)) == [first, middle, last, only]
    keys: list[list[str | None]] = [["a", str(at(10))], ["a", str(at(30))], [None, str(at(0))], [None, str(at(1))]]
    assert key_lookup.get(settings, spec, keys) == [middle, None, only, None]
    with StateReader.open(settings, "inbox", "versions") as reader:
        assert reader.get_many(keys).rows == [middle, None, only, None]
        assert reader.range(["a"], ["a"], limit=10).rows == reader.range(["a"], limit=10).rows == [first, middle, last]
        with pytest.raises(UsageError, match="no range from or to NULL"):
            reader.range([None], limit=10)
        with reader.scan() as (txid, rows):
            assert (txid, list(rows)) == (3, [first, middle, last, only])
    moment = sa.text("SELECT label FROM state.versions WHERE at <= :t AND (valid_to > :t OR valid_to IS NULL) ORDER BY name")
    with StateStore.connect(settings, user=settings.pg_reader) as store, store.engine.connect() as connection:
        found = [connection.scalars(moment, {"t": at(second)}).all() for second in (-1, 5, 10, 29, 30)]
    assert found == [[], ["old", "only"], ["between", "only"], ["new", "only"], ["only"]]

    inbox.batch(versions=staged([(None, "later", 1, at(second), None) for second in (10, 20)]))
    with StateStore.connect(settings) as store, store.engine.connect() as connection:
        everything = [(row["name"], row["label"]) for row in store.state_rows(spec)]
        paged: list[Any] = []
        after: list[str | None] | None = None
        more = True
        while more:
            page, more = rows_after(connection, spec, after, 2)
            paged += [(row[0], row[3]) for row in page]
            after = [page[-1][0], str(page[-1][1])]
        assert paged == everything
        assert everything[3:] == [(None, "only"), (None, "later"), (None, "later")]


@pytest.mark.soak
def test_a_redo_takes_back_the_versions_of_its_batch(flow: Flow, register: Callable[..., None]) -> None:
    """Replaced, new and equal versions: what was valid before is valid again, for as long as before; changes too.

    Who follows the changes gets NULL as any other key.
    """
    inbox = flow(replace(STATES["opaque"], null_keys=True))
    first: list[Row] = [(None, "x", 1, at(0), None), (None, "y", 1, at(20), None), ("a", "x", 1, at(0), None)]
    inbox.batch(versions=staged(first, deletes=False))
    wrong: list[Row] = [(None, "late", 1, at(10), None), (None, "z", 1, at(20), None), ("c", "x", 1, at(5), None)]
    inbox.batch(versions=staged(wrong, deletes=False))
    right: list[Row] = [(None, "w", 1, at(9), None)]
    inbox.batch(redo=True, versions=staged(right, deletes=False))
    last: list[Row] = [("a", "z", 1, at(9), None)]
    inbox.batch(versions=staged(last, deletes=False))
    assert seen(inbox) == expected(first + right + last, deletes=False)
    with inbox.store.engine.connect() as connection:
        found = [(row["name"], row["at"], row["label"]) for row in changes_of(connection, inbox.spec.states[0], 0, None)]
    assert sorted(found, key=repr) == sorted(((row[0], row[3], row[1]) for row in first + right + last), key=repr)
    counts = State(key={"name": "text"}, aggregates={"versions": Count()}, null_keys=True)
    follower = Pipeline("follower", Changes("inbox.versions"), {"per_name": counts})
    register(follower)
    run_pipeline(inbox.store.settings, follower, run_id="follow")
    rows = inbox.store.state_rows(follower.spec.states[0])
    assert {row["name"]: row["versions"] for row in rows} == {None: 3, "a": 2}


# NULL as a key

KEYS = ("site", "floor", "room", "shelf")  # more than are looked up by the index where they may be NULL
PLACES = History(dict.fromkeys(KEYS, "text"), {"label": "text"}, {"at": "timestamptz"}, deleted="gone", null_keys=True)


def test_null_in_a_key_is_a_key_as_any_other(store: StateStore, register: Callable[..., None]) -> None:
    rng = random.Random("nulls")
    batches: list[list[Row]] = [
        [
            (tuple(rng.choices(["a", "b", None], k=len(KEYS))), label, None, at(rng.randint(0, 9)), gone)
            for _, label, _, _, gone in rows_of(rng, 400)
        ]
        for _ in range(3)
    ]
    columns = {**dict.fromkeys(KEYS, "string"), "label": "string", "at": "timestamp", "gone": "boolean"}
    states = {"places": PLACES, "joined": replace(PLACES, collapse=True)}
    pipeline = Pipeline("inbox", Files("inbox", schema=columns), states)
    register(pipeline)
    inbox = Staged(store, pipeline.spec)
    for number, rows in enumerate(batches):
        partials = [(*key, moment, gone, label) for key, label, _, moment, gone in newest(rows)]
        inbox.batch(**dict.fromkeys(states, partials), is_committed=number == 0)
    assert store.commit_ready(pipeline.spec, "together")
    for state in pipeline.spec.states:
        found = [
            (tuple(row[key] for key in KEYS), row["at"], row["label"], None, row["valid_to"]) for row in store.state_rows(state)
        ]
        assert len(set(found)) == len(found)
        assert set(found) == expected([row for rows in batches for row in rows], collapses=state.name == "joined")
        assert any(key == (None,) * len(KEYS) for key, *_ in found)


def test_versions_of_one_null_key_are_looked_up_by_the_index(flow: Flow) -> None:
    """Each version reads its neighbours alone: with many versions of NULL, a scan of the group for each would be quadratic."""
    inbox = flow(replace(STATES["joined"], null_keys=True))
    inbox.batch(versions=staged([(None, f"v{second}", 1, at(second), None) for second in range(3000)]))
    query = "EXPLAIN (ANALYZE, FORMAT JSON) SELECT count(valid_to) FROM state.versions"
    with inbox.store.engine.connect() as connection:
        connection.execute(sa.text("SET enable_seqscan = off"))
        (plan,) = connection.scalars(sa.text(query)).one()
        assert connection.scalar(sa.text("SELECT count(valid_to) FROM state.versions")) == 2999

    def read(node: dict[str, Any]) -> float:
        removed = sum(node.get(f"Rows Removed by {what}", 0) for what in ("Filter", "Index Recheck"))
        own = (node["Actual Rows"] + removed) * node["Actual Loops"] if "Relation Name" in node else 0
        return float(own + sum(read(child) for child in node.get("Plans", ())))

    assert read(plan["Plan"]) <= 3000 * 4


@pytest.mark.soak
def test_a_version_without_a_key_or_a_time_is_refused_or_set_aside(tables: Tables) -> None:
    rows: list[Any] = [(None, "x", 1, at(0), None), (None, "y", 1, None, None)]
    tables.put_rows(SCHEMA, rows[:1], rows)
    state = replace(STATES["versions"], null_keys=True)
    tables.plan(tables.declare_over(SCHEMA, None, states={"versions": state}), "run")
    strict = tables.declare_over(SCHEMA, None, states={"strict": STATES["versions"]})
    assert re.search("BadKey.*key column name is NULL .* declare null_keys=True", tables.outcome(strict, 1))
    pipeline = tables.declare_over(SCHEMA, None, states={"versions": state}, version=2)
    assert re.search("BadKey.*column at of order_by is NULL in 1 version", tables.outcome(pipeline, 2))
    pipeline = replace(pipeline, on_poison="quarantine")
    tables.run(pipeline, "set aside")
    assert shown(tables, pipeline, "versions") == expected(rows[:1])
    with StateStore.connect(tables.settings) as store:
        (record,) = store.quarantined("inbox")
        assert record["reason"] == "key column at is NULL"
        mended = json.dumps({**json.loads(record["payload"]), "at": "2026-01-01T00:00:07Z"})
        store.mend_quarantined("inbox", record["txid"], record["number"], Mend(mended, "test", "the clock was off"))
        assert store.replay_quarantined(pipeline.spec, "test", "mended") == (3, 1)
    assert tables.run(pipeline, "replay") == [3]
    assert shown(tables, pipeline, "versions") == expected([rows[0], (None, "y", 1, at(7), None)])
