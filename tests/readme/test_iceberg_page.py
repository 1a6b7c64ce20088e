"""The example of docs/iceberg.md, run as it stands over a table that PyIceberg writes, against DuckDB."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from tests.readme.test_delta_page import raw
from tests.sources.iceberg_catalog import catalog
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "iceberg.md"


def declared() -> Pipeline:
    """Return the pipeline that the page declares."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    pipeline: Pipeline = names["PIPELINE"]
    return pipeline


def test_flights_are_counted_as_their_snapshots_come(settings: Settings, register: Callable[..., None]) -> None:
    """A month is a snapshot, of a table that is partitioned by it."""
    flights = raw("flights")[["carrier", "month", "distance"]]
    catalog().create_namespace_if_not_exists("travel")
    parts = {month: pa.Table.from_pandas(flights[flights.month == month], preserve_index=False) for month in (1, 2, 3)}
    table = catalog().create_table("travel.flights", parts[1].schema)
    with table.update_spec() as spec:
        spec.add_identity("month")
    pipeline = declared()
    register(pipeline)
    for month, part in parts.items():
        table.append(part)
        run_pipeline(settings, pipeline, run_id=f"until {month}")
        there = flights[flights.month <= month]
        expected = duckdb.sql("SELECT carrier, month, count(*), sum(distance)::bigint FROM there GROUP BY ALL ORDER BY ALL")
        with StateStore.connect(settings) as store:
            rows = store.state_rows(pipeline.spec.states[0])
            found = sorted((row["carrier"], row["month"], row["flights"], row["miles"]) for row in rows)
        assert found == expected.fetchall()
        assert len(there) > 0
