"""Pipelines over Parquet files that tests write as Arrow tables, one batch each; all are called inbox and share sessions."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import steps
from tests.integration.conftest import owner
from tests.sources.conftest import Inbox, counted_here
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.compute.sessions import session as sessions
from tidegate.jobs.compute.shortcuts import Routing
from tidegate.jobs.sources.column_types import parse_type
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import TidegateError

__all__ = ["counted_here", "owner"]  # fixtures


class Tables(Inbox):
    def put_rows(self, schema: Mapping[str, str], *batches: Iterable[Any]) -> None:
        """Write a file per batch: rows are mappings, or values in the order of the schema, whose types are Spark's."""
        types = pa.schema({name: parse_type(kind).arrow for name, kind in schema.items()})
        for number, rows in enumerate(batches, start=len(list(self.folder.iterdir())) + 1):
            named = [row if isinstance(row, Mapping) else dict(zip(schema, row, strict=True)) for row in rows]
            pq.write_table(pa.Table.from_pylist(named, types), self.folder / f"{number:04d}.parquet")

    def declare_over(self, schema: Mapping[str, str], state: Any, transform: Any = None, **more: Any) -> Pipeline:
        return self.declare(Files("inbox", schema=schema), **{"states": {"per_name": state}, "transform": transform, **more})

    def run_mixed(self, pipeline: Pipeline, routings: Iterable[str]) -> None:
        """Process the available batches by these routes in turn; commit the first half one by one, the others together."""
        txids = self.plan(pipeline, "mixed")
        for txid, name in zip(txids, cycle(routings), strict=False):
            how = {"routing": steps.ROUTINGS[name], "commit_ready": txid == txids[-1]}
            steps.process(self.settings, pipeline, txid, owner="test", **how)
            if txid in txids[: len(txids) // 2]:
                steps.commit(self.settings, pipeline, txid, owner="test")

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
    """Let transforms of all modules, which do not change while tests run, and rebuilds share a session of Spark."""
    code_of, join = sessions.code_of, sessions._join
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sessions, "code_of", lambda names: code_of(name for name in names if not name.startswith("tests.")))
        patched.setattr(sessions, "_join", lambda at, of, *more: join(at, re.sub("^(inbox__v.|clean)/", "inbox/", of), *more))
        yield


@pytest.fixture
def tables(settings: Settings, register: Callable[..., None]) -> Tables:
    return Tables(settings, register)
