"""Histories: each version with the time until which it was valid, whatever the order and split in which versions come."""

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from tests.jobs.conftest import Staged, Tables
from tests.store import state_table_of
from tidegate.jobs import Files, History, Pipeline
from tidegate.state_store import StateStore

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
    rows = tables.rows(pipeline, state)
    found = {(row["name"], row["at"], row["label"], row["n"], row["valid_to"]) for row in rows}
    assert len(found) == len(rows)
    return found


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
