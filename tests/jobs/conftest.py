"""Pipelines over Parquet files that tests write as Arrow tables, one batch each; all are called inbox and share sessions."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import steps
from tests.integration.conftest import Row, Tally
from tests.sources.conftest import Inbox
from tests.store import Redo, Tracked
from tidegate.jobs import Files, Pipeline, State
from tidegate.jobs.compute.sessions import session as spark_sessions
from tidegate.jobs.compute.shortcuts import Routing
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import TidegateError

# Spark's name of each Arrow type that tests use.
SPARK_TYPES = {
    "string": "string",
    "int32": "int",
    "int64": "bigint",
    "double": "double",
    "float": "float",
    "bool": "boolean",
    "binary": "binary",
    "date32[day]": "date",
    "timestamp[us, tz=UTC]": "timestamp",
    "timestamp[us]": "timestamp_ntz",
}


class Tables(Inbox):
    """An inbox that takes Arrow tables: each becomes one file, each file one batch."""

    def put(self, *tables: pa.Table) -> None:
        existing = len(list(self.folder.iterdir()))
        for number, table in enumerate(tables, start=existing + 1):
            content = io.BytesIO()
            pq.write_table(table, content)
            self.write(f"{number:04d}.parquet", content.getvalue())

    def aggregate(self, state: State, *tables: pa.Table, transform: Any = None) -> list[Mapping[str, Any]]:
        """Run the tables through a pipeline with this one state; return its rows."""
        pipeline = self.declare_over(tables[0].schema, state, transform)
        self.put(*tables)
        assert self.run(pipeline) == list(range(1, len(tables) + 1))
        return self.rows(pipeline)

    def declare_over(self, schema: pa.Schema, state: State, transform: Any = None, **more: Any) -> Pipeline:
        return self.declare(source_of(schema), **{"states": {"per_name": state}, "transform": transform, **more})

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


class Staged(Tally):
    """Moves batches with partials that the test makes through the real ledger, without Spark."""

    def batch(self, *, redo: bool = False, is_committed: bool = True, **partials: Iterable[Row]) -> int:
        """Plan, stage and commit a batch with these partials by state, or redo the last one; return its txid."""
        txid = self.store.committed(self.spec.name) if redo else self.plan(run_id=f"run {self._planned()}")[-1]
        attempt = self.start(txid, mode="redo" if redo else "resume")
        staged = [self.stage(attempt, state, rows) for state, rows in partials.items()]
        self.store.seal(attempt, staged, Tracked(0))
        if redo:
            settings = self.store.settings
            with StateStore.connect(settings, user=settings.pg_owner) as owner:
                owner.redo_batch(self.spec, txid, Redo("an operator", "it was wrong"))
        elif is_committed:
            self.commit(txid)
        return txid

    def _planned(self) -> int:
        last = self.store.last_opened(self.spec.name)
        return last.txid if last else 0


def source_of(schema: pa.Schema, **more: Any) -> Files:
    columns = {
        column.name: SPARK_TYPES.get(str(column.type)) or f"{column.type}".replace("decimal128", "decimal") for column in schema
    }
    return Files("inbox", schema=columns, **more)


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
