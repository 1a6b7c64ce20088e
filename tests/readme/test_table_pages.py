"""The examples of docs/delta.md and docs/iceberg.md, run as they stand over tables of those formats, against DuckDB."""

from collections.abc import Callable

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.readme.pages import examples, raw, rows
from tests.sources.iceberg_catalog import catalog
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings

pytestmark = pytest.mark.soak


def append_to_delta(settings: Settings, rows: pa.Table) -> None:
    folder = str(settings.home / "data" / "flights")
    write_deltalake(folder, rows, mode="append", partition_by=["month"])
    DeltaTable(folder).optimize.compact()


def append_to_iceberg(_settings: Settings, rows: pa.Table) -> None:
    catalog().create_namespace_if_not_exists("travel")
    table = catalog().create_table_if_not_exists("travel.flights", rows.schema)
    if table.spec().is_unpartitioned():
        with table.update_spec() as spec:
            spec.add_identity("month")
    table.append(rows)


@pytest.mark.parametrize(("page", "append"), [("delta.md", append_to_delta), ("iceberg.md", append_to_iceberg)])
def test_flights_are_counted_as_they_come(
    settings: Settings, register: Callable[..., None], page: str, append: Callable[[Settings, pa.Table], None]
) -> None:
    """A month is a version or snapshot of a table that is partitioned by it."""
    flights = raw("flights")[["carrier", "distance", "month"]]
    pipeline = next(each for each in examples(page).values() if "flights" in str(each.source))
    register(pipeline)
    for months in ((1, 2, 3), (4,), (11, 12)):
        for month in months:
            append(settings, pa.Table.from_pandas(flights[flights.month == month], preserve_index=False))
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
