"""Staged in an order that suits the merge, without exceeding the sort's memory; what Postgres cannot keep is refused."""

import random
from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from tests.jobs.conftest import offenders
from tests.store import StateSpec
from tidegate import jobs as j
from tidegate.jobs.compute.stage import staging_sink, unstorable_values
from tidegate.state_store.base.errors import TidegateError

TIMES = [datetime(2024, 2, 29, tzinfo=UTC), datetime(1969, 12, 31, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC)]


def _state(key: str) -> StateSpec:
    return j.State(key={"key": key}, aggregates={"events": j.Count()}, null_keys=True).spec("per_key")


def _batches(keys: list[object], kind: pa.DataType, rows_each: int) -> Iterator[pa.RecordBatch]:
    rows = pa.table({"key": pa.array(keys, kind), "events": range(len(keys))})
    return iter(rows.to_batches(max_chunksize=rows_each))


KEYS: list[tuple[str, pa.DataType, list[Any]]] = [
    ("bigint", pa.int64(), [5, -(2**63), 2**63 - 1, 0, -1, None]),
    ("integer", pa.int32(), [5, -(2**31), 2**31 - 1, 0, -1]),
    ("date", pa.date32(), [date(2024, 2, 29), date(1969, 12, 31), date(2024, 1, 1)]),
    ("timestamptz", pa.timestamp("us", tz="UTC"), TIMES),
    ("timestamp", pa.timestamp("us"), [time.replace(tzinfo=None) for time in TIMES]),
]


@pytest.mark.promise("performance:partials-are-staged-in-key-order-32")
def test_rows_are_staged_in_key_order_each_with_its_values() -> None:
    """NULL comes last, as Postgres sorts it. Texts are not sorted: that would take longer than it saves."""
    for declared, kind, keys in KEYS:
        ordered = pa.Table.from_batches(staging_sink.in_key_order(_batches(keys, kind, 2), _state(declared)))
        in_order = sorted(keys, key=lambda key: (key is None, key))
        assert ordered["key"].to_pylist() == [keys[event] for event in ordered["events"].to_pylist()] == in_order
    texts = list(_batches(["b", "c", "a"], pa.string(), 2))
    assert list(staging_sink.in_key_order(iter(texts), _state("text"))) == texts


@pytest.mark.promise("limit:SORTED_BYTES", "performance:partials-are-staged-in-key-order-32")
def test_no_more_than_the_limit_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_sink, "SORTED_BYTES", 2 * 16)
    keys, state = [4, 3, 2, 1, 0], _state("bigint")
    ordered = staging_sink.in_key_order(_batches(keys, pa.int64(), 1), state)
    assert [piece["key"].to_pylist() for piece in ordered] == [[3, 4], [1, 2], [0]]
    next(staging_sink.in_key_order(rest := _batches(keys, pa.int64(), 1), state))
    assert [batch["key"].to_pylist() for batch in rest] == [[2], [1], [0]]


LINES, NOISE = {"lines": j.Count()}, "".join(random.Random(1201).choices([chr(code) for code in range(0x30, 0x5B)], k=1201))
PAIR = j.State(key={"name": "text", "number": "integer", "other": "text"}, aggregates=LINES).spec("pairs")
LATEST = j.State(key={"name": "text"}, aggregates={"x": j.Max("v", "timestamptz")}).spec("latest")
VERSIONS = j.History({"name": "text"}, {"label": "text"}, {"v": "timestamptz"}).spec("versions")
DIVIDED = j.Rows({"name": "text", "amount": "bigint"}, range_partitions=j.Ranges("amount", 100)).spec("divided")
TIME = pa.timestamp("us", "UTC")


def last_of(key: str) -> StateSpec:
    return j.State(key={"key": key}, aggregates={"last": j.Max("last", "text")}).spec("per_key")


TEXT = last_of("text")
# A state, the columns of a row of it that cannot be kept, and the refusal.
REFUSED: dict[str, tuple[StateSpec, list[pa.Array], str]] = {
    "NULL": (TEXT, [pa.nulls(1, pa.string()), pa.array([""])], "BadKey: .*column key is NULL.*null_keys=True"),
    "a long key": (TEXT, [["x" * 2001], [""]], r"BadKey: .*column key of the key \(key='x+\.\.\.\) takes 2001 bytes"),
    "long in bytes": (TEXT, [["é" * 1001], [""]], "BadKey: .*column key of .* takes 2002 bytes"),
    "bytes": (last_of("bytea"), [[b"\0" * 2001], [""]], "BadKey: .*column key of .* takes 2001 bytes"),
    "NUL": (TEXT, [["nul\0inside"], [""]], r"BadKey: .*column key of the key \(key='nul\\x00inside'\) holds a NUL"),
    "NUL in a value": (TEXT, [["a"], ["x\0y"]], r"BadKey: .*column last of the key \(key='a'\) holds a NUL"),
    "NUL in a row": (j.Rows({"v": "text"}).spec("log"), [[0], ["x\0y"]], "BadKey: .*column v .* holds a NUL"),
    "a long value": (TEXT, [["a"], ["x" * 3001]], r"Overflow: .*of the key \(key='a'\) takes 3001 bytes, the limit is 3000"),
    "a date after 9999": (last_of("date"), [pa.array([2932897], pa.date32()), [""]], "BadKey: .*column key is 10000-01-01"),
    "a date before 1": (last_of("date"), [pa.array([-719163], pa.date32()), [""]], "BadKey: .*column key is 0000-12-31"),
    "keys too long": (PAIR, [[NOISE], pa.array([7], pa.int32()), [NOISE], [1]], "BadKey: .*number=7.*takes 2406 bytes"),
    "an early time as value": (
        *(LATEST, [["a"], pa.array([-62135596800000001], TIME)]),
        r"Overflow: .*column x of the key .name='a'. is 0000-12-31 23:59:59.999999.*Years are kept from 1 to 9999",
    ),
    "no version": (VERSIONS, [["a"], pa.nulls(1, TIME), ["x"]], "BadKey: .*column v of order_by is NULL in 1 version"),
    "no range": (DIVIDED, [[0], ["a"], pa.nulls(1)], r"BadKey: .*column amount, by .* divided, is NULL in 1 row"),
}


@pytest.mark.promise("limit:MAX_KEY_BYTES", "limit:MAX_KEYS_BYTES", "limit:MAX_VALUE_BYTES", "error:BAD_KEY")
def test_a_key_or_value_that_postgres_cannot_keep_is_refused_by_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before COPY: nothing is cut or left out. What is as long as it may be is passed on."""
    monkeypatch.setattr(unstorable_values, "MAX_VALUE_BYTES", 3_000)
    found = {}
    for name, (state, columns, _) in {**REFUSED, "longest": (TEXT, [["x" * 2000], ["y" * 3000]], "")}.items():
        row = pa.RecordBatch.from_pydict(dict(zip((column.name for column in state.columns), columns, strict=True)))
        try:
            staging_sink.PartialsReader(iter([row]), state, 1).read()
        except TidegateError as refusal:
            found[name] = f"{type(refusal).__name__}: {refusal}"
    assert offenders(found, {name: message for name, (*_, message) in REFUSED.items()}) == {}
