"""OpenLineage events name what a batch reads and which states it goes into, as OpenLineage's own client does, and the batch."""

import json
from dataclasses import replace
from pathlib import Path

import attr
import jsonschema
import pytest
from openlineage.client.naming import dataset as naming

from tests.batches import Batches
from tests.checkout import REPOSITORY
from tests.dags.conftest import CLICKS
from tests.store import encode_metadata
from tidegate.dags import lineage
from tidegate.jobs import Kafka, PostgresTable
from tidegate.state_store import Settings


def named(dataset: naming.DatasetNaming) -> tuple[str, str]:
    return dataset.get_namespace(), dataset.get_name()


def test_a_batch_has_its_files_its_states_and_a_facet(
    batches: Batches, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a.csv", "dt=2024-01-05/b c.csv"]
    files = [{"name": name, "size": 1, "mtime_ns": 1, "sha256": "ab"} for name in names]
    assert batches.store.open_batches(batches.spec, "a run", [], None, [encode_metadata({"files": files})])
    monkeypatch.setattr(Settings, "load", lambda *_: settings)
    monkeypatch.setattr(lineage, "find_pipeline", {"clicks": CLICKS}.__getitem__)
    found = lineage.lineage_of("clicks", 1)
    (read,), (written,) = found.inputs, found.outputs
    folder = settings.home / "clicks"
    assert (read.namespace, read.name) == named(naming.LocalFileSystem(str(folder)))
    assert read.inputFacets["subset"].inputCondition.locations == [str(folder / name) for name in names]
    server = naming.Postgres(settings.pg_host, str(settings.pg_port), settings.pg_database, "state", "per_page")
    assert (written.namespace, written.name) == named(server)
    assert [field.name for field in written.facets["schema"].fields] == ["page", "clicks", "txid"]
    facet = attr.asdict(found.run_facets["tidegate_batch"], filter=lambda _, value: value is not None)
    jsonschema.validate(facet, json.loads((REPOSITORY / "docs/schemas/TidegateBatchRunFacet.json").read_text()))
    assert (facet["txid"], facet["phase"]) == (1, "planned")


def test_topics_and_tables_are_named_by_their_servers() -> None:
    settings = Settings(home=Path("/srv/shop"), kafka_bootstrap="one:9092, two:9092", pg_host="db", pg_port=5433)
    (topic,) = Kafka("orders").datasets({}, settings)
    assert (topic.namespace, topic.name) == named(naming.Kafka("one", "9092", "orders"))
    assert Kafka("orders").datasets({}, replace(settings, kafka_bootstrap=None)) == []
    table = PostgresTable(table='Shop."Orders"', key="id", schema={"id": "bigint"}, connection="host=other dbname=shop user=me")
    (rows,) = table.datasets({}, settings)
    assert (rows.namespace, rows.name) == named(naming.Postgres("other", "5432", "shop", "shop", "Orders"))
