"""Pipelines over Parquet files that tests write as Arrow tables, one batch each; all are called inbox and share sessions."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import steps
from tests.sources.conftest import Inbox
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.compute.sessions import session as spark_sessions
from tidegate.jobs.compute.shortcuts import Routing
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import TidegateError

# The Arrow type of each of Spark's types that tests use, beside decimals.
ARROW = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
Schema = Mapping[str, str]


def table_of(schema: Schema, rows: Iterable[Any]) -> pa.Table:
    """Return rows, each a mapping or its values in the order of the schema, whose types are Spark's, as a table."""
    values = [[row[name] for name in schema] if isinstance(row, Mapping) else row for row in rows]
    arrays = [pa.array([row[place] for row in values], arrow_type(kind)) for place, kind in enumerate(schema.values())]
    return pa.Table.from_arrays(arrays, names=[*schema])


def arrow_type(kind: str) -> pa.DataType:
    return pa.decimal128(*map(int, re.findall(r"\d+", kind))) if kind.startswith("decimal") else ARROW[kind]


class Tables(Inbox):
    """An inbox that takes Arrow tables: each becomes one file, each file one batch."""

    def put(self, *tables: pa.Table) -> None:
        existing = len(list(self.folder.iterdir()))
        for number, table in enumerate(tables, start=existing + 1):
            content = io.BytesIO()
            pq.write_table(table, content)
            self.write(f"{number:04d}.parquet", content.getvalue())

    def put_rows(self, schema: Schema, *batches: Iterable[Any]) -> None:
        self.put(*(table_of(schema, rows) for rows in batches))

    def declare_over(self, schema: Schema, state: Any, transform: Any = None, **more: Any) -> Pipeline:
        return self.declare(Files("inbox", schema=schema), **{"states": {"per_name": state}, "transform": transform, **more})

    def run_mixed(self, pipeline: Pipeline, routings: Iterable[str] = ("chosen",)) -> list[int]:
        """Process the available batches by these routes in turn; commit the first half one by one, the others together."""
        txids, names = self.plan(pipeline, "mixed"), [*routings]
        for number, txid in enumerate(txids):
            routing = steps.ROUTINGS[names[number % len(names)]]
            is_last = number == len(txids) - 1
            steps.process(self.settings, pipeline, txid, owner="test", routing=routing, commit_ready=is_last)
            if number < len(txids) // 2:
                steps.commit(self.settings, pipeline, txid, owner="test")
        with StateStore.connect(self.settings) as store:
            assert store.committed(pipeline.name) == txids[-1]
        return txids

    def outcome(self, pipeline: Pipeline, txid: int = 1, routing: Routing | None = None, **more: Any) -> str:
        """Process a planned batch, whatever was tried before; return what became of it, or its error's class and message."""
        try:
            done = steps.process(self.settings, pipeline, txid, owner="test", routing=routing or self.routing, **more)
        except TidegateError as error:
            assert "\n" not in str(error)
            return f"{type(error).__name__}: {error}"
        return done.outcome.value


def offenders(found: Mapping[str, str], expected: Mapping[str, str]) -> dict[str, str]:
    """Return what was found where it does not match what was expected, by name."""
    assert found.keys() == expected.keys()
    return {name: text for name, text in found.items() if not re.search(expected[name], text, re.DOTALL)}


@pytest.fixture(scope="session", autouse=True)
def one_session() -> Iterator[None]:
    """Let transforms of all modules share a session of Spark: modules of tests do not change while they run."""
    code_of = spark_sessions.code_of
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            spark_sessions, "code_of", lambda modules: code_of(name for name in modules if not name.startswith("tests."))
        )
        yield


@pytest.fixture
def tables(settings: Settings, register: Callable[..., None]) -> Tables:
    return Tables(settings, register)
