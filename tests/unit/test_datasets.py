"""Sources name what a batch reads as OpenLineage's own client does."""

from dataclasses import replace
from pathlib import Path

import pytest
from openlineage.client.naming import dataset as naming

from tidegate.jobs import Files, Kafka, PostgresTable
from tidegate.state_store import Settings

SETTINGS = Settings(home=Path("/srv/shop"), kafka_bootstrap="one:9092, two:9092", pg_host="db", pg_port=5433)
COLUMNS = {"id": "bigint"}


def named(dataset: naming.DatasetNaming) -> tuple[str, str]:
    return dataset.get_namespace(), dataset.get_name()


def test_files_are_locations_in_their_folder() -> None:
    names = ["a.csv", "dt=2024-01-05/b c.csv", 'quote".csv', "line\nend.csv", "../x%2f.csv"]
    metadata = {"files": [{"name": name} for name in names]}
    (found,) = Files("data/orders", format="csv", schema=COLUMNS).datasets(metadata, SETTINGS)
    assert (found.namespace, found.name) == named(naming.LocalFileSystem("/srv/shop/data/orders"))
    assert list(found.locations) == [f"/srv/shop/data/orders/{name}" for name in names]


def test_a_topic_is_named_by_its_first_broker() -> None:
    (found,) = Kafka("orders").datasets({}, SETTINGS)
    (own,) = Kafka("orders", bootstrap="three:9093").datasets({}, SETTINGS)
    assert (found.namespace, found.name) == named(naming.Kafka("one", "9092", "orders"))
    assert (own.namespace, own.name) == named(naming.Kafka("three", "9093", "orders"))
    assert Kafka("orders").datasets({}, replace(SETTINGS, kafka_bootstrap=None)) == []


@pytest.mark.parametrize(
    ("table", "connection", "expected"),
    [
        ("orders", None, naming.Postgres("db", "5433", "tidegate", "public", "orders")),
        ('Shop."Orders"', "host=other dbname=shop user=me", naming.Postgres("other", "5432", "shop", "shop", "Orders")),
    ],
)
def test_a_table_is_named_by_its_server(table: str, connection: object, expected: naming.Postgres) -> None:
    (found,) = PostgresTable(table=table, key="id", schema=COLUMNS, connection=connection).datasets({}, SETTINGS)
    assert (found.namespace, found.name) == named(expected)
