"""The example of docs/iceberg.md, run as it stands over a table that PyIceberg writes, against DuckDB."""

from collections.abc import Callable

import duckdb
import pyarrow as pa
import pytest

from tests.readme.pages import examples, raw, rows
from tests.sources.iceberg_catalog import catalog
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings


@pytest.mark.soak
def test_flights_are_counted_as_their_snapshots_come(settings: Settings, register: Callable[..., None]) -> None:
    """A month is a snapshot, of a table that is partitioned by it."""
    flights = raw("flights")[["carrier", "month", "distance"]]
    catalog().create_namespace_if_not_exists("travel")
    parts = {month: pa.Table.from_pandas(flights[flights.month == month], preserve_index=False) for month in (1, 2, 3)}
    table = catalog().create_table("travel.flights", parts[1].schema)
    with table.update_spec() as spec:
        spec.add_identity("month")
    (pipeline,) = examples("iceberg.md").values()
    register(pipeline)
    for month, part in parts.items():
        table.append(part)
        run_pipeline(settings, pipeline, run_id=f"until {month}")
        there = flights[flights.month <= month]
        expected = duckdb.sql("SELECT carrier, month, count(*), sum(distance)::bigint FROM there GROUP BY ALL ORDER BY ALL")
        assert rows(settings, pipeline, None, "carrier", "month", "flights", "miles") == expected.fetchall()
        assert len(there) > 0
