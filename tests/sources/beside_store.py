"""For modules whose stack runs beside a store of their own, in a fixture `beside_store`: fixtures to import by name, checks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from tests import steps
from tests.conftest import Server, migrated_database
from tests.sources.feeds import SCHEMA
from tidegate.jobs import Delta, Files, Pipeline, Rows, State, Sum
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.jobs.sources.files.completeness_markers import Markers
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import RangeExpired, SourceChanged, SourceUnavailable, SourceUnreadable

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

    find = Markers._find
    looks: list[str] = []

    def written_meanwhile(markers: Markers, marked: str) -> Any:
        """The job runs again after the plan has listed the folder, and before it looks for the marker."""
        if marked == "dt=2026-01-01" and marked not in looks:
            folder.delete("in/dt=2026-01-01/lost.csv")
            put(1, "rewritten.csv", 1)
            folder.put("in/dt=2026-01-01/_SUCCESS", "")
        looks.append(marked)
        return find(markers, marked)

    with patch.object(Markers, "_find", written_meanwhile):
        run_pipeline(settings, pipeline, run_id="one")
    with StateStore.connect(settings) as store:
        assert [row["amount"] for row in store.state_rows(pipeline.spec.states[0])] == [11]
    assert source.held_back(settings) is None

    def begins_again(markers: Markers, marked: str) -> Any:
        """The job takes its marker away and begins again after the plan has looked for it."""
        found = find(markers, marked)
        if marked == "dt=2026-01-03" and marked not in looks:
            folder.delete("in/dt=2026-01-03/_SUCCESS")
        looks.append(marked)
        return found

    put(3, "half.csv", 1000)
    folder.put("in/dt=2026-01-03/_SUCCESS", "")
    with (
        patch.object(Markers, "_find", begins_again),
        pytest.raises(SourceUnavailable, match=r"dt=2026-01-03 lost its _SUCCESS, or got another one, while its files were"),
    ):
        source.coordinator(settings).initialize_transaction(2, None, None)


def check_delta(settings: Settings, register: Callable[..., None], folder: Any) -> None:
    """Check that a Delta table in a store is followed, and what is said of one that is not there; `folder` puts and deletes."""
    local = settings.home / "table"
    source = Delta(f"{folder.url}/table", schema={"name": "string"}, partitions={"day": "string"}, max_files=2)
    pipeline = Pipeline("followed", source, {"followed_rows": Rows({"name": "text", "day": "text"})}, retry_delay_seconds=0)
    register(pipeline)

    def append(*names: str) -> None:
        rows = pa.table({"name": names, "day": [f"50% {name} =/ü" for name in names]})
        write_deltalake(str(local), rows, mode="append", partition_by=["day"])
        upload()

    def upload() -> None:
        for path in sorted(local.rglob("*"), key=lambda path: "_delta_log" in path.parts):
            if path.is_file() and path not in uploaded:
                folder.put(f"table/{path.relative_to(local)}", path.read_bytes())
                uploaded.add(path)

    def stored() -> list[str]:
        with StateStore.connect(settings) as store:
            return sorted(row["name"] for row in store.state_rows(pipeline.spec.states[0]) if row["name"] in row["day"])

    uploaded: set[Path] = set()
    folder.put("table/_delta_log/_staged", "")
    with pytest.raises(SourceUnreadable, match=r"is no Delta table: .* has no version"):
        source.coordinator(settings).initialize_transaction(1, None, None)
    append("a", "b", "c")
    run_pipeline(settings, pipeline, run_id="first")
    append("d")
    DeltaTable(str(local)).optimize.compact()
    DeltaTable(str(local)).create_checkpoint()
    append("e")
    run_pipeline(settings, pipeline, run_id="second")
    assert stored() == ["a", "b", "c", "d", "e"]

    append("f")
    steps.plan(settings, pipeline, run_id="third")
    (name,) = [path.relative_to(local) for path in uploaded if "%20f%20" in path.parent.name]
    folder.put(f"table/{name}", b"other content")
    with pytest.raises(SourceChanged, match="was overwritten since its batch was planned"):
        run_pipeline(settings, pipeline, run_id="third")
    folder.put(f"table/{name}", (local / name).read_bytes())
    append("g")
    (name,) = [path.relative_to(local) for path in uploaded if "%20g%20" in path.parent.name]
    folder.delete(f"table/{name}")
    with pytest.raises(RangeExpired, match="which version 4 has, is gone"):
        run_pipeline(settings, pipeline, run_id="fourth")
    folder.put(f"table/{name}", (local / name).read_bytes())
    run_pipeline(settings, pipeline, run_id="fifth")
    assert stored() == ["a", "b", "c", "d", "e", "f", "g"]
