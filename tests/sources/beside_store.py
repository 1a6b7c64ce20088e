"""For modules whose stack runs beside a store of their own, in a fixture `beside_store`: fixtures to import by name, checks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import SparkSession

from jobs import Files, Pipeline, State, Sum
from jobs.compute.session import spark_session
from jobs.engine.local_run import run_pipeline
from jobs.sources.files.markers import Markers
from state_store import Settings, StateStore
from tests import steps
from tests.conftest import Server, migrated_database
from tests.sources.feeds import SCHEMA

__all__ = ["server", "spark", "template"]


@pytest.fixture(scope="module")
def server(beside_store: tuple[Settings, Any]) -> Server:
    """The Postgres server of that stack."""
    return Server(beside_store[0])


@pytest.fixture(scope="module")
def template(server: Server) -> Iterator[str]:
    """A migrated database on that server."""
    with migrated_database(server) as name:
        yield name


@pytest.fixture
def spark(settings: Settings) -> Iterator[SparkSession]:
    """The session that all tests of the module share."""
    with spark_session(settings, "conformance") as session:
        yield session


def check_markers(settings: Settings, register: Callable[..., None], folder: Any) -> None:
    """Check that folders of a store are read once they are marked, with what they then have; `folder` puts and deletes."""

    def put(day: int, name: str, amount: int) -> None:
        folder.put(f"in/dt=2026-01-0{day}/{name}", f"name,amount\na,{amount}\n")

    source = Files(f"{folder.url}/in", "**/*.csv", format="csv", schema=SCHEMA, max_files=9, marker="_SUCCESS")
    pipeline = Pipeline("marked", source, {"per_name": State(key={"name": "text"}, aggregates={"amount": Sum("amount")})})
    register(pipeline)
    put(1, "lost.csv", 1000)  # of a job that failed
    put(1, "rewritten.csv", 100)
    put(2, "first.csv", 10)
    assert steps.plan(settings, pipeline, run_id="early") == []
    assert "2 folder(s) with files have no _SUCCESS yet, such as dt=2026-01-01: they are read" in (
        source.held_back(settings) or ""
    )
    grows = replace(source, names_grow=True)
    folder.put("in/dt=2026-01-02/_SUCCESS", "")
    assert grows.coordinator(settings).initialize_transaction(1, None, None) is None, "a later folder passed an earlier one"

    exists = Markers._exists

    def written_meanwhile(markers: Markers, name: str) -> bool:
        """The job runs again after the plan has listed the folder, and before it looks for the marker."""
        if name.startswith("dt=2026-01-01"):
            folder.delete("in/dt=2026-01-01/lost.csv")
            put(1, "rewritten.csv", 1)
            folder.put("in/dt=2026-01-01/_SUCCESS", "")
        return exists(markers, name)

    with patch.object(Markers, "_exists", written_meanwhile):
        run_pipeline(settings, pipeline, run_id="one")
    with StateStore.connect(settings) as store:
        assert [row["amount"] for row in store.state_rows(pipeline.spec.states[0])] == [11]
    assert source.held_back(settings) is None
