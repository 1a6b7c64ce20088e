"""Places in stores: which can be declared, and what Spark and the ledger see of them."""

from pathlib import Path

import pytest

from tidegate.jobs import Files
from tidegate.jobs.sources.files.stores import buckets, object_places
from tidegate.jobs.sources.files.stores.object_places import ObjectPath
from tidegate.state_store import Settings

COLUMNS = {"name": "string"}


def test_a_place_is_named_as_each_reader_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*buckets.ENDPOINTS, *buckets.REGIONS):
        monkeypatch.delenv(name, raising=False)
    source = Files("s3://lake/in/", schema=COLUMNS)
    (found,) = source.datasets({"files": [{"name": "dt=1/a b.parquet"}]}, Settings())
    place = object_places.place_of(Path("/home"), "s3://lake/in/")

    assert (found.namespace, found.name, list(found.locations)) == ("s3://lake", "in", ["s3://lake/in/dt=1/a b.parquet"])
    assert isinstance(place, ObjectPath)
    assert object_places.for_spark(place / "a.parquet") == "s3a://lake/in/a.parquet"
    assert object_places.for_spark(Path("/home/in")) == "file:/home/in"
    assert object_places.hadoop_options(place) == {}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert object_places.hadoop_options(place)["fs.s3a.endpoint"] == "http://minio:9000"
    assert object_places.place_of(Path("/home"), "in") == Path("/home/in")
