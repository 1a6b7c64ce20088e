"""Fixtures for file sources: a folder of files and a small pipeline over it."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import steps
from tests.integration.conftest import owner
from tests.sources.in_process import SCHEMA, Folder, counted_here, folder, raises
from tests.sources.shop import shop, shops
from tidegate.jobs import Count, Pipeline, State, Sum
from tidegate.jobs.compute.shortcuts import Routing, choose
from tidegate.jobs.sources import Source
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import TidegateError

__all__ = ["counted_here", "folder", "owner", "shop", "shops"]  # fixtures

PER_NAME = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})


class Inbox:
    """The folder `inbox`, others beside it, and a pipeline named `inbox` too, so that all tests share one Spark session."""

    routing: Routing = staticmethod(choose)
    write = Folder.write

    def __init__(self, settings: Settings, register: Callable[..., None]) -> None:
        self.settings = settings
        self.folder = self.path = settings.home / "inbox"
        self.folder.mkdir()
        self.register = register

    def put(self, folder: str, rows: Iterable[tuple], *, columns: Iterable[str] = SCHEMA, name: str | None = None) -> Path:
        """Write a CSV file into a folder beside the inbox; without a name, after the others there."""
        there = list((self.settings.home / folder).glob("*"))
        lines = (f"{','.join(map(str, row))}\n" for row in [tuple(columns), *rows])
        return self.write(f"../{folder}/{name or f'{len(there):03d}.csv'}", "".join(lines)).resolve()

    def declare(self, source: Source, **pipeline: Any) -> Pipeline:
        """Declare and register the pipeline; by default it has one state per name."""
        declared = Pipeline(**{"name": "inbox", "source": source, "states": {"per_name": PER_NAME}, **pipeline})
        self.register(declared)
        return declared

    def plan(self, pipeline: Pipeline, run_id: str) -> list[int]:
        return steps.plan(self.settings, pipeline, run_id=run_id)

    def run(self, pipeline: Pipeline, run_id: str = "run", **options: Any) -> list[int]:
        return steps.run(self.settings, pipeline, run_id, **{"routing": self.routing, **options})

    def counts(self, pipeline: Pipeline) -> dict[str, tuple[int, int]]:
        return steps.counts(self.settings, pipeline)

    def tuples(self, pipeline: Pipeline) -> list[tuple[str, int]]:
        return sorted(((row["name"], row["amount"]) for row in steps.rows(self.settings, pipeline)), key=repr)

    def rows(self, pipeline: Pipeline, state: str = "per_name") -> list[Mapping[str, Any]]:
        """Return the state's rows in key order, without their txids."""
        return [{name: row[name] for name in row if name != "txid"} for row in steps.rows(self.settings, pipeline, state)]

    def refused(self, pipeline: Pipeline, error: type[TidegateError], txid: int = 1, **options: Any) -> str:
        """Process a planned batch, check that it is refused without side effects, and return the error's line."""
        before = steps.rows(self.settings, pipeline)
        options = {"owner": "test", "routing": self.routing, **options}
        message = raises(error, lambda: steps.process(self.settings, pipeline, txid, **options))
        assert steps.rows(self.settings, pipeline) == before
        with StateStore.connect(self.settings) as store:
            assert store.committed("inbox") == txid - 1
            history = store.batch_history("inbox", txid)
        assert history.status.phase == "halted"
        assert message in (history.status.waits_for or "")
        assert history.attempts[-1]["error"] == f"{error('').code}: {message}"
        sealed = [attempt["attempt"] for attempt in history.attempts if attempt["sealed_at"]]
        assert [seal["attempt"] for seal in history.seals] == sealed
        assert history.attempts[-1]["attempt"] not in sealed
        return message


@pytest.fixture
def inbox(settings: Settings, register: Callable[..., None]) -> Inbox:
    return Inbox(settings, register)
