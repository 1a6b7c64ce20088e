"""The examples of docs/delta.md, run as they stand over tables that delta-rs writes, against DuckDB and delta-rs."""

from collections.abc import Callable

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.readme.pages import examples, raw, rows
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings

pytestmark = pytest.mark.soak


def test_flights_are_counted_as_their_versions_come(settings: Settings, register: Callable[..., None]) -> None:
    """A month is a version; then the table is compacted, and the last months come."""
    flights = raw("flights")[["carrier", "distance", "month"]]
    folder = settings.home / "data" / "flights"
    pipeline = examples("delta.md")["miles"]
    register(pipeline)
    for months in ((1, 2, 3), (4,), (11, 12)):
        for month in months:
            part = pa.Table.from_pandas(flights[flights.month == month], preserve_index=False)
            write_deltalake(str(folder), part, mode="append", partition_by=["month"])
        DeltaTable(str(folder)).optimize.compact()
        run_pipeline(settings, pipeline, run_id=f"until {months[-1]}")
        there = flights[flights.month.isin([month for month in (1, 2, 3, 4, 11, 12) if month <= months[-1]])]
        expected = duckdb.sql("SELECT carrier, month, count(*), sum(distance)::bigint FROM there GROUP BY ALL ORDER BY ALL")
        assert rows(settings, pipeline, None, "carrier", "month", "flights", "miles") == expected.fetchall()
        assert len(there) > 0


def test_the_copy_of_a_table_has_its_rows(settings: Settings, register: Callable[..., None]) -> None:
    """After planes were added, changed, sold and counted again from the beginning."""
    planes = raw("planes")[["tailnum", "model", "seats"]]
    folder = str(settings.home / "data" / "planes")
    pipeline = examples("delta.md")["fleet"]
    register(pipeline)

    def check() -> None:
        run_pipeline(settings, pipeline, run_id=f"version {DeltaTable(folder).version()}")
        there = DeltaTable(folder).to_pyarrow_table().to_pylist()
        copied = rows(settings, pipeline, None, "tailnum", "model", "seats", where=lambda row: not row["gone"])
        assert copied == sorted(tuple(row.values()) for row in there)

    feed = {"delta.enableChangeDataFeed": "true"}
    write_deltalake(folder, pa.Table.from_pandas(planes[:2000], preserve_index=False), configuration=feed)
    check()
    write_deltalake(folder, pa.Table.from_pandas(planes[2000:], preserve_index=False), mode="append")
    DeltaTable(folder).update({"seats": "seats + 1"}, predicate="model = '737-824'")
    DeltaTable(folder).delete("seats < 10")
    check()
    write_deltalake(folder, pa.Table.from_pandas(planes[1000:], preserve_index=False), mode="overwrite")
    check()
