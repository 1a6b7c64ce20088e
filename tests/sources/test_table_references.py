"""Batches joined with a table of Delta Lake, Iceberg or Postgres: with the rows that it had when they were planned."""

import shutil
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import psycopg2
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.sources.conftest import Inbox
from tests.sources.iceberg_catalog import catalog
from tidegate.jobs import Delta, Files, Iceberg, Inputs, Pipeline, PostgresTable, Reference, Rows
from tidegate.jobs.sources.inputs import reference
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable

SCHEMA = {"name": "string", "price": "int"}
ARROW = pa.schema([("name", pa.string()), ("price", pa.int32())])


class DeltaPrices:
    def __init__(self, settings: Settings) -> None:
        self.folder = settings.home / "prices"
        self.source = Delta("prices", schema=SCHEMA)
        self.write()

    def write(self, **prices: int) -> None:
        write_deltalake(str(self.folder), pa.table([[*prices], [*prices.values()]], schema=ARROW), mode="overwrite")

    def forget(self) -> None:
        table = DeltaTable(str(self.folder))
        table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


class IcebergPrices:
    def __init__(self, _settings: Settings) -> None:
        name = f"prices.number_{uuid.uuid4().hex}"
        catalog().create_namespace_if_not_exists("prices")
        self._table = catalog().create_table(name, ARROW)
        self.source = Iceberg(f"lake.{name}", schema=SCHEMA)

    def write(self, **prices: int) -> None:
        self._table.overwrite(pa.table([[*prices], [*prices.values()]], schema=ARROW))

    def forget(self) -> None:
        kept = {task.file.file_path for task in self._table.scan().plan_files()}
        for path in Path(urlsplit(self._table.location()).path).rglob("*.parquet"):
            if f"file://{path}" not in kept:
                path.unlink()


class PostgresPrices:
    """Prices in a table of Postgres, which batches read as copies."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._run("CREATE TABLE prices (name text PRIMARY KEY, price int)")
        self._run("GRANT SELECT ON prices TO tidegate_stager")
        self.copies = settings.home / "kept"
        self.source = PostgresTable(table="prices", key="name", schema=SCHEMA)

    def write(self, **prices: int) -> None:
        self._run("TRUNCATE prices")
        for name, price in prices.items():
            self._run("INSERT INTO prices VALUES (%s, %s)", name, price)

    def forget(self) -> None:
        shutil.rmtree(self.copies)

    def _run(self, statement: str, *values: Any) -> None:
        with psycopg2.connect(**self._settings.conninfo(user="tidegate_owner")) as connection, connection.cursor() as cursor:
            cursor.execute(statement, values or None)


@pytest.fixture(params=[DeltaPrices, IcebergPrices, PostgresPrices], ids=["Delta", "Iceberg", "Postgres"])
def prices(request: pytest.FixtureRequest, settings: Settings) -> Any:
    return request.param(settings)


@pytest.fixture
def pipeline(inbox: Inbox, prices: Any) -> Pipeline:
    kept = {"keep_folder": "kept"} if isinstance(prices, PostgresPrices) else {}
    return inbox.declare(
        Inputs({"sold": Files("inbox", format="text"), "prices": Reference(prices.source, **kept)}),
        transform=lambda inputs: inputs["sold"].withColumnRenamed("value", "name").join(inputs["prices"], "name", "left"),
        states={"sold": Rows({"name": "text", "price": "integer"})},
        retry_delay_seconds=0,
    )


def sell(inbox: Inbox, number: int, *names: str) -> None:
    inbox.write(f"{number}.txt", "".join(f"{name}\n" for name in names))


def sold(inbox: Inbox, pipeline: Pipeline) -> list[tuple]:
    return sorted(((row["name"], row["price"]) for row in inbox.rows(pipeline, "sold")), key=repr)


@pytest.mark.promise("decision:0030", "fault:reference-is-replaced-before-batch-has-committed:processing")
@pytest.mark.sampled(2)
def test_each_batch_has_the_version_of_its_plan(inbox: Inbox, pipeline: Pipeline, prices: Any) -> None:
    sell(inbox, 1, "a")
    inbox.run(pipeline, "empty")
    prices.write(a=1, b=2)
    sell(inbox, 2, "a", "b")
    inbox.plan(pipeline, "first")
    prices.write(a=10, c=30)
    inbox.run(pipeline, "first")
    assert sold(inbox, pipeline) == [("a", 1), ("a", None), ("b", 2)]

    sell(inbox, 3, "a", "b", "c")
    inbox.run(pipeline, "second")
    assert sold(inbox, pipeline) == [("a", 1), ("a", 10), ("a", None), ("b", 2), ("b", None), ("c", 30)]

    sell(inbox, 4, "c")
    inbox.plan(pipeline, "third")
    prices.write(c=300)
    prices.forget()
    with pytest.raises(SourceChanged, match=r"is gone since its batch was planned.* It is a reference of this batch: put back"):
        inbox.run(pipeline, "third")
    assert len(sold(inbox, pipeline)) == 6


@pytest.mark.promise("limit:MOST_FILES")
@pytest.mark.parametrize("prices", [DeltaPrices, IcebergPrices], ids=["Delta", "Iceberg"], indirect=True)
def test_a_table_of_too_many_files_is_refused(inbox: Inbox, pipeline: Pipeline, prices: Any) -> None:
    """Each batch would list them."""
    prices.write(a=1)
    sell(inbox, 1, "a")
    with (
        patch.object(reference, "MOST_FILES", 0),
        pytest.raises(SourceUnreadable, match=r"The reference has 1 files or more in .*: the most is 0"),
    ):
        inbox.run(pipeline, "refused")
